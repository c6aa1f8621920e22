//! Simulator: a fleet of machines behind real protocols.
//!
//! A shepherd's work can only be observed on a fleet, and fleets are scarce. The simulator is a fleet in one process.
//! Each machine has power, boots, answers SSH, accepts a role server and sends heartbeats, and each can be broken. The
//! control loops cannot distinguish it from hardware, because they reach it only through the interfaces of hardware: a
//! provider's HTTP API (`api`), SSH (`ssh`) and the agent's own gRPC (`agent`).
//!
//! # How it works
//!
//! * [`machine`][] is a pure state machine: event and time in, new state and effects out. The effects are the changes
//!   of its [`observable`][] state. Its random values come from a [`seed`][], so the same events have the same effects.
//!   Keys of agents and addresses of nodes are really random, and stored.
//! * [`faults`][] defines the faults, and when they occur by chance. [`fault_command`][] injects one.
//! * `fleet` owns all machines, steps them, and carries out the effects: it opens and closes SSH servers (`ssh`, each
//!   on a `port` of its own), and starts and stops agents (`agent`). `severable_stream` cuts the connections of a
//!   machine that goes down.
//! * `node` lets a machine be a node of a cluster, with a real etcd, if the simulator has the role server's program.
//! * [`state`][] stores the fleet in a file. The simulator outlives any shepherd, and a restarted simulator is the same
//!   fleet.
//! * `journal` records the start and the end of every call, for a checker that shares no code with the control loops.
//! * `hardware` and `host_key` derive from the seed what a machine reports and shows. [`service`][] is the simulator as
//!   a process.
//!
//! # Invariants
//!
//! * A change is on disk before it is answered. A shepherd that repeats an order finds what the first one did.
//! * What is observable follows from the state alone. No event can forget to open or close something.
//! * The rules of enrolment, TLS and heartbeats are those of the real role server; they are never written twice.
//! * Nothing of a machine runs on the host, except what nodes of clusters run. An SSH command is recognised by its
//!   words or answered with "not found".
//! * Only loopback addresses are listened on.
//!
//! # Notes for the next implementor
//!
//! * A new fault is a variant in [`faults`][], a transition in [`machine`][] with a row in the table of its tests, and
//!   an entry in [`fault_command`][].
//! * A random value is drawn by a name of its own ([`seed::Seed`][]): purpose, machine, turn. A new value under a new
//!   name changes no other, so the runs of a seed stay the same.
//! * A new field of the state file needs a default, so that a kept fleet can still be read.
//! * The journal is a contract with the checker (`tests/all/checker.rs`): its fields are listed in `journal.rs`.

mod agent;
mod api;
pub mod fault_command;
pub mod faults;
mod fleet;
mod hardware;
mod host_key;
mod journal;
pub mod machine;
mod node;
pub mod observable;
mod port;
pub mod seed;
pub mod service;
mod severable_stream;
mod ssh;
pub mod state;
