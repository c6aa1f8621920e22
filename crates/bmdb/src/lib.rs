//! The bare metal database (BMDB): the only layer that speaks SQL; facts, schedule, sessions, claims, intents, orders,
//! audit.
//!
//! # How it works
//!
//! * A **session** ([`session`], [`session_renewer`]) is a lease that its process renews. Every action is taken under a
//!   session.
//! * A **claim** ([`claim`]) puts due machines' lanes under sessions, each with a fence that grows; [`work`] ends them
//!   (`complete`). The [`reaper`] frees what a lost session held.
//! * A **fact** changes ([`fact_change`]) only in a transaction that holds the machine's due rows and recomputes its
//!   [`schedule`] before it commits. The [`sweeper`] proves that no transaction forgot.
//! * A **heartbeat** is stored in groups (`group_commit`) as long as it changes nothing but a time, and otherwise
//!   handled singly (`heartbeat`).
//! * An **intent** ([`intent`]) records an outward action before it is taken.
//! * An **order** of an operator ([`action`], [`audit`]) is carried out once and recorded in the same transaction; a
//!   [`credential`] identifies the actor.
//! * A **cluster** of machines is specified and read in [`cluster`]; its state is written under its lease
//!   (`cluster_transitions`). Declared roles are in [`cluster_declaration`], snapshots in [`cluster_snapshot`], and
//!   restoring from one in [`cluster_restore`]. The inputs of its forecast are in [`cluster_forecast`].
//! * A **roll-out** of a release is ordered and read in [`roll_out`]; its state is written under a lease
//!   (`roll_out_transitions`).
//! * An [`artefact`] is a file that machines fetch from any shepherd, stored in pieces.
//! * All metrics are in one registry ([`metric_registry`], [`metrics`]); the fleet is counted once a minute
//!   ([`fleet_sample`]).
//! * Old rows are deleted by [`retention`], which lists every table with its bound; [`vacuum_stats`] reads what the
//!   database itself leaves behind.
//!
//! # Rules that hold everywhere
//!
//! * Locks are taken in one order: session, due rows by (machine, lane), facts, work, history. Batches are sorted.
//! * Time is the database's: `clock_timestamp()` where waiting for a lock must count, `now()` where one moment for a
//!   whole transaction is meant.
//! * No transaction stays open over anything but statements, and none is ever dropped half-way
//!   ([`connection::Bmdb::transact`]).
//! * Statements are in `sql/`, one per file, and are checked at compile time.

pub mod action;
pub mod approval;
pub mod artefact;
pub mod audit;
pub mod budget;
pub mod bulk_orders;
pub mod claim;
pub mod cluster;
mod cluster_candidates;
pub mod cluster_credential;
pub mod cluster_declaration;
pub mod cluster_forecast;
pub mod cluster_key;
pub mod cluster_kubernetes;
pub mod cluster_kubernetes_user;
pub mod cluster_restore;
pub mod cluster_snapshot;
#[cfg(feature = "sealing")]
pub mod cluster_transitions;
pub mod cluster_upgrade;
#[cfg(feature = "sealing")]
pub mod cluster_upgrade_transitions;
mod complete;
pub mod connection;
pub mod connection_url;
pub mod credential;
pub mod declare_restored;
pub mod error;
pub mod fact_change;
pub mod facts;
pub mod fleet;
pub mod fleet_sample;
pub mod fleet_view;
#[cfg(feature = "sealing")]
pub mod group_commit;
#[cfg(feature = "sealing")]
pub mod heartbeat;
pub mod host_key;
pub mod inspect;
pub mod intent;
pub mod issue_inputs;
pub mod listing;
pub mod live_counts;
pub mod log_request;
pub mod loop_pause;
pub mod machine_lookup;
pub mod machine_order;
pub mod metric_registry;
pub mod metrics;
pub mod named_lease;
mod phase_exits;
pub mod policy;
mod pool_metrics;
pub mod postgres_programs;
pub mod power_order;
pub mod private_postgres;
mod private_postgres_directory;
pub mod provision;
pub mod queues;
pub mod read_pool;
pub mod reaper;
mod renewal_thread;
pub mod retention;
pub mod retirement;
pub mod roll_out;
#[cfg(feature = "sealing")]
pub mod roll_out_transitions;
pub mod schedule;
pub mod schema;
#[cfg(feature = "sealing")]
pub mod sealed_snapshot;
#[cfg(feature = "sealing")]
pub mod secret;
pub mod session;
pub mod session_renewer;
pub mod silent_machines;
pub mod statistics;
pub mod sweeper;
pub mod tags;
mod transaction;
mod unknown_fence;
pub mod vacuum_stats;
pub mod wakeup;
pub mod work;
