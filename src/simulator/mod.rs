//! Machines that are not there, behind real protocols.
//!
//! # Purpose
//!
//! A shepherd's work can only be seen on a fleet, and fleets are scarce. The
//! simulator is a fleet in one process: each machine has power, boots, answers
//! SSH, takes a role server and heartbeats; and each can be broken. Nothing in
//! the control loops can tell it from hardware, because it is reached only
//! through what hardware is reached through: a provider's HTTP API
//! ([`api`][]), SSH ([`ssh`][]) and the agent's own gRPC ([`agent`][]).
//!
//! # How it works
//!
//! * [`machine`][] is a pure state machine: event and time in, new state and
//!   effects out, which are what changed of its [`face`][]. All chance comes from
//!   a [`seed`][], so a run can be repeated.
//! * [`faults`][] says which faults there are and when they strike unasked.
//! * [`fleet`][] owns all machines, steps them, and carries out the effects:
//!   opening and closing SSH servers, starting and stopping agents.
//! * [`node`][] lets a machine be a node of a cluster, with a real etcd, where the simulator is given the role
//!   server's program.
//! * [`state`][] keeps the fleet in a file. The simulator outlives any shepherd,
//!   and a restarted simulator is the same fleet.
//! * [`journal`][] writes every call down, start and end, for a checker to read
//!   that shares no code with the control loops.
//!
//! # Non-goals
//!
//! It runs nothing on the host it stands on but what nodes of clusters run: an SSH
//! command is recognised or answered with "not found". It listens on loopback addresses only.

pub mod agent;
pub mod api;
mod cuttable;
pub mod face;
pub mod fault_command;
pub mod faults;
pub mod fleet;
pub mod hardware;
pub mod host_key;
pub mod journal;
pub mod machine;
pub mod node;
mod port;
pub mod seed;
pub mod service;
pub mod ssh;
pub mod state;
