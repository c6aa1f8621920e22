//! Model: plain types and pure decisions about machines.
//!
//! It defines what a machine is, which facts exist about it, and what follows from them. Nothing here does I/O or reads
//! a clock: time is a parameter, and leases and deadlines are measured by the database's clock. Every decision has the
//! shape `fn(facts, policy, now) -> plan`, so that a test can table-drive it, a person can print it, and a loop can
//! execute it.

pub mod access;
pub mod arguments;
pub mod artefact;
pub mod backoff;
pub mod brake;
pub mod budget;
pub mod circuit_breaker;
pub mod cluster;
pub mod disruption;
pub mod drift;
pub mod facts;
pub mod fleet_sample;
pub mod host_key;
pub mod humanize;
pub mod ids;
pub mod issues;
pub mod kubernetes;
pub mod label;
pub mod log_request;
pub mod machine_view;
pub mod needs_human;
pub mod node_role;
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
pub mod recovery;
pub mod release_report;
pub mod remote_step;
pub mod retirement;
pub mod role_declaration;
pub mod roll_out;
pub mod roll_out_view;
pub mod sanitize;
pub mod schedule;
pub mod shell_words;
pub mod template;
pub mod text_layout;
pub mod time;
pub mod traces;
pub mod two_person_rule;
pub mod unknown_fence;
pub mod usage_error;
pub mod waits;
pub mod why;
