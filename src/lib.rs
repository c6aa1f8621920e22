//! Shepherd takes bare-metal servers from any source and keeps them useful
//! without a person watching.
//!
//! # Rooms
//!
//! * [`model`][]: plain types and pure decisions. No I/O, no clock of its own.
//! * [`bmdb`][]: the only room that speaks SQL. Sessions, leases, the schedule,
//!   facts about machines and their history.
//! * [`manager`][]: the control loops, which source due machines, act on them and
//!   write down what they learnt.
//! * [`providers`][]: sources of machines and of power over them.
//! * [`takeover`][]: getting the role server onto a machine over SSH.
//! * [`server`][]: what listens: the agent callback and metrics.
//! * [`roleserver`][]: the program on the machine.
//! * [`supervisor`][]: a tree of tasks that are started again when they end, and
//!   the values by which they know of each other.
//! * [`curator`][]: what the nodes of a cluster agree on: who belongs to it and what each is to do.
//! * [`reconciler`][]: the built-in objects of Kubernetes, as the newest release wants them.
//! * [`etcd`][]: all that is said to the etcd of a cluster, and where in it everything stands.
//! * [`service`][]: all of it as one process: flags, configuration, start and stop.
//! * [`simulator`][]: machines that are not there, behind real protocols.
//! * [`cli`][]: `shepherdctl`.
//! * [`proto`][]: generated contracts, open to every room.
//!
//! # Who may know whom
//!
//! `bin → {service, cli} → {server, manager} → {providers, takeover} → bmdb → model`, and on
//! the node `bin → roleserver → {curator, reconciler} → {etcd, supervisor} → model`; `simulator → {roleserver, model}`. The
//! manager knows of the curator's room as well: it calls the curators of clusters as their nodes do. A
//! test reads every `use crate::` line and fails on an import against this.
//!
//! # How data flows
//!
//! Facts about a machine are rows. Whatever changes a fact also writes, in the
//! same transaction, when each lane of that machine is next due and why
//! ([`model::schedule::next_due`], a pure function). A control loop claims what
//! is due, acts outside any transaction, and finishes with new facts. Nothing
//! else decides: a notification only makes a loop look sooner.

#[cfg(feature = "bmdb")]
pub mod bmdb;
#[cfg(feature = "shepherdctl")]
pub mod cli;
#[cfg(feature = "roleserver")]
pub mod curator;
#[cfg(feature = "roleserver")]
pub mod etcd;
#[cfg(feature = "shepherd")]
pub mod manager;
pub mod model;
pub mod proto;
#[cfg(feature = "shepherd")]
pub mod providers;
#[cfg(feature = "reconciler")]
pub mod reconciler;
#[cfg(feature = "roleserver")]
pub mod roleserver;
#[cfg(feature = "shepherd")]
pub mod server;
#[cfg(feature = "shepherd")]
pub mod service;
#[cfg(feature = "shepherd")]
pub mod simulator;
#[cfg(feature = "roleserver")]
pub mod supervisor;
#[cfg(feature = "shepherd")]
pub mod takeover;
