//! Shepherd: a control loop that takes over bare-metal servers and keeps them in use without an operator.
//!
//! # Modules
//!
//! * [`model`][]: plain types and pure decisions. No I/O, no clock of its own.
//! * [`bmdb`][]: the only crate that uses SQL. Sessions, leases, the schedule, facts about machines and their history.
//! * [`manager`][]: the control loops. They claim due machines, act on them and record what they learnt.
//! * [`providers`][]: sources of machines, with power control and reboots.
//! * [`takeover`][]: installs the role server on a machine over SSH.
//! * [`server`][]: the services of the API, and what listens: the agent callback, the API and metrics.
//! * [`roleserver`][]: the program on the machine.
//! * [`supervisor`][]: a tree of tasks that are restarted when they end, and the values by which they observe each
//!   other.
//! * [`curator`][]: the control plane of a cluster: which nodes belong to it and which roles each of them has.
//! * [`curator_client`][]: what a program needs to talk to a curator: identities, certificates, the channel to the
//!   leader.
//! * [`reconciler`][]: keeps the built-in objects of Kubernetes as the newest release needs them.
//! * [`etcd`][]: the client of a cluster's etcd, and the layout of its keys.
//! * [`service`][]: all of it as one process: flags, configuration, start and stop.
//! * [`simulator`][]: simulated machines behind real protocols.
//! * [`transport`][]: TLS, and the gate of every listener.
//! * `hardening`: what a program does for its own process first. It has the usual limits of what we start.
//! * [`cli`][]: `shepherdctl`.
//! * [`backoff`][]: growing delays between retries, which every module may use.
//! * `trusted_file`: who may read or change a file that a program believes, which every module may use.
//! * [`proto`][]: generated contracts, which every module may use.
//!
//! `manager`, `providers` and `service` are modules of this package. The others are crates, below `crates/`, most of
//! which are exported again here.
//!
//! # Which module may import which
//!
//! `service → {server, manager}`, `cli → server`, `manager → {providers, takeover, curator_client}`, and
//! `{server, manager} → bmdb → model`. `providers` and `takeover` need only `model`. On the node
//! `roleserver → {curator, reconciler, supervisor}`, `curator → curator_client → etcd` and `reconciler → etcd`; all of
//! them use `model`, except for `etcd` and `supervisor`. `simulator → {roleserver, curator_client, supervisor, model}`.
//! What an arrow leads to may be imported over further arrows too. The manager calls the curators of clusters as their
//! nodes do. A test reads every import of the root package's modules and fails on one that violates its list. A crate
//! imports what its `Cargo.toml` names; the same test has the list of what that may be.
//!
//! # How data flows
//!
//! Facts about a machine are rows. A transaction that changes a fact also writes when each lane of that machine is next
//! due and why ([`model::schedule::next_due`], a pure function). A control loop claims what is due, acts outside any
//! transaction, and finishes with new facts. Nothing else decides: a notification only makes a loop look sooner.

#[cfg(feature = "shepherd")]
pub mod manager;
#[cfg(feature = "shepherd")]
pub mod providers;
#[cfg(feature = "shepherd")]
pub mod service;

/// Growing delays between retries.
#[cfg(feature = "shepherd")]
pub use backoff;
/// The bare metal database: the only layer that speaks SQL.
#[cfg(feature = "shepherd")]
pub use bmdb;
/// The commands of `shepherdctl`.
#[cfg(feature = "shepherdctl")]
pub use cli;
/// The control plane of a cluster: which nodes belong to it and which roles each of them has.
#[cfg(feature = "roleserver")]
pub use curator;
/// What a program needs to talk to the curators of a cluster.
#[cfg(feature = "roleserver")]
pub use curator_client;
/// The client of a cluster's etcd, and the layout of its keys.
#[cfg(feature = "roleserver")]
pub use etcd;
/// Plain types and pure decisions about machines.
pub use model;
/// Rust types and services generated from the gRPC contracts in `proto`.
pub use proto;
/// Keeps the built-in objects of Kubernetes as the newest release needs them.
#[cfg(feature = "reconciler")]
pub use reconciler;
/// The program on the machine.
#[cfg(feature = "roleserver")]
pub use roleserver;
/// The services of the API, and what listens.
#[cfg(feature = "shepherd")]
pub use server;
/// Simulated machines behind real protocols.
#[cfg(feature = "shepherd")]
pub use simulator;
/// A tree of tasks that are restarted when they end.
#[cfg(feature = "roleserver")]
pub use supervisor;
/// Installs and enrols the role server on a machine over SSH.
#[cfg(feature = "shepherd")]
pub use takeover;
/// TLS, and the gate of every listener.
#[cfg(feature = "shepherd")]
pub use transport;
