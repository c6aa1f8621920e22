//! Plain types and pure decisions: what a machine is, what is known of it, and
//! what follows from that.
//!
//! Nothing here does I/O or asks a clock: time is a parameter, and the one that
//! leases and deadlines are measured with is the database's. Every decision has
//! the shape `fn(facts, policy, now) -> plan`, so that a test can table-drive
//! it, a person can print it, and a loop can execute it.

pub mod access;
pub mod arguments;
pub mod artefact;
pub mod backoff;
pub mod brake;
pub mod breaker;
pub mod budget;
pub mod cluster;
pub mod declaration;
pub mod disturb;
pub mod drift;
pub mod facts;
pub mod fleet_sample;
pub mod host_key;
pub mod ids;
pub mod issues;
pub mod kubernetes;
pub mod label;
pub mod layout;
pub mod log_request;
pub mod machine_view;
pub mod needs_human;
pub mod newer_fence;
pub mod order_limits;
pub mod pause;
pub mod phase;
pub mod plan;
pub mod policy;
pub mod policy_flags;
pub mod power_order;
pub mod priority;
pub mod process;
pub mod provider_status;
pub mod readable;
pub mod recovery;
pub mod release;
pub mod remote_step;
pub mod retirement;
pub mod role;
pub mod roll_out;
pub mod roll_out_view;
pub mod schedule;
pub mod second_person;
pub mod shell_words;
pub mod telling;
pub mod template;
pub mod time;
pub mod traces;
pub mod usage;
pub mod waits;
pub mod why;
