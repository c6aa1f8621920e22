//! Command-line client `shepherdctl` of the fleet API.
//!
//! [`command`] is the grammar, there is one file per group of verbs, and [`run`] connects them. A command calls the API
//! by a [`fleet_client`]. Its services run in a server of the context ([`contexts`]), or in this process over a
//! connection to the database, which works while no shepherd does; [`backend`] decides which. A command decodes the
//! responses ([`api_decode`], [`api_streams`]), and pure functions turn them into text. Every change takes the same
//! path: it is decided under the machine's lock, with a line of history and of the audit that contain the operator and
//! the reason. Only [`declare_restored`] and `tokens bootstrap` write to the database without the API.

pub mod api_decode;
pub mod api_streams;
pub mod approvals;
pub mod artefacts;
pub mod backend;
pub mod budgets;
pub mod bulk_orders;
pub mod cluster;
mod cluster_credentials;
mod cluster_kubeconfig;
mod cluster_kubernetes;
mod cluster_plan;
mod cluster_rotate_key;
mod cluster_snapshots;
mod cluster_upgrade;
pub mod command;
pub mod completions;
pub mod contexts;
pub mod debug_bundle;
pub mod declare_restored;
pub mod describe;
pub mod dry_run;
pub mod error;
pub mod examples;
pub mod fleet_client;
pub mod get;
pub mod hardware_report;
pub mod idempotency_key;
pub mod issues;
pub mod logs;
pub mod loops;
pub mod machine_filter;
pub mod machine_orders;
pub mod mask;
pub mod order_retry;
pub mod output;
mod pem;
pub mod plan;
pub mod policy;
pub mod power;
pub mod priority;
pub mod retire;
pub mod role_file;
pub mod run;
pub mod timeline;
pub mod tokens;
pub mod top;
pub mod update;
pub mod watch;
pub mod why;
pub mod yaml;
