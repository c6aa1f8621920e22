//! Simulator: a fleet of machines behind real protocols.
//!
//! # Purpose
//!
//! A shepherd's work can only be seen on a fleet, and fleets are scarce. The simulator is a fleet in one process: each
//! machine has power, boots, answers SSH, accepts a role server and sends heartbeats, and each can be broken. The
//! control loops cannot distinguish it from hardware, because they reach it only through the interfaces of hardware: a
//! provider's HTTP API ([`api`][]), SSH ([`ssh`][]) and the agent's own gRPC ([`agent`][]).
//!
//! # How it works
//!
//! * [`machine`][] is a pure state machine: event and time in, new state and effects out. The effects are the changes
//!   of its [`observable`][] state. All random values come from a [`seed`][], so a run can be repeated.
//! * [`faults`][] defines the faults, and when they occur by chance.
//! * [`fleet`][] owns all machines, steps them, and carries out the effects: it opens and closes SSH servers, and
//!   starts and stops agents.
//! * [`node`][] lets a machine be a node of a cluster, with a real etcd, if the simulator has the role server's
//!   program.
//! * [`state`][] stores the fleet in a file. The simulator outlives any shepherd, and a restarted simulator is the same
//!   fleet.
//! * [`journal`][] records the start and the end of every call, for a checker that shares no code with the control
//!   loops.
//!
//! # Non-goals
//!
//! It runs nothing on its host except what nodes of clusters run: an SSH command is recognised or answered with "not
//! found". It listens on loopback addresses only.

pub mod agent;
pub mod api;
pub mod fault_command;
pub mod faults;
pub mod fleet;
pub mod hardware;
pub mod host_key;
pub mod journal;
pub mod machine;
pub mod node;
pub mod observable;
mod port;
pub mod seed;
pub mod service;
mod severable_stream;
pub mod ssh;
pub mod state;
