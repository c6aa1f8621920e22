//! `shepherdctl`: the operators' command line, through the fleet's API or straight to the BMDB.
//!
//! [`command`] is the grammar, one file a verb group does what it says, and
//! [`run`] joins them. [`source`] decides who is asked: a context's API
//! ([`contexts`], [`remote`]), or the database itself, which answers while no
//! shepherd does. Either way the same types are filled ([`remote_read`]) and
//! turned into text by the same pure functions, written at once. What changes
//! something goes the way that every change goes: decided under the machine's
//! lock, with a line of history and of the audit that name who asked and why.

pub mod again;
pub mod approvals;
pub mod artefacts;
pub mod budgets;
pub mod bundle;
pub mod cluster;
mod cluster_credentials;
mod cluster_keys;
mod cluster_kubeconfig;
mod cluster_kubernetes;
mod cluster_plan;
mod cluster_upgrade;
pub mod command;
pub mod contexts;
pub mod declaration;
pub mod describe;
pub mod dry_run;
pub mod error;
pub mod examples;
pub mod filter;
pub mod get;
pub mod hardware;
pub mod issues;
pub mod logs;
pub mod loops;
pub mod machine;
pub mod many;
pub mod mask;
pub mod operate;
pub mod order_key;
pub mod output;
mod pem;
pub mod plan;
pub mod policy;
pub mod power;
pub mod priority;
pub mod remote;
pub mod remote_outlook;
pub mod remote_read;
pub mod restored;
pub mod retire;
pub mod run;
pub mod shell;
mod snapshots;
pub mod source;
pub mod timeline;
pub mod tokens;
pub mod top;
pub mod update;
pub mod watch;
pub mod why;
pub mod yaml;
