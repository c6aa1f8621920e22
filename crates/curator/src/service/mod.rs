//! The curator as a server: election, listeners, authorization, gRPC services.
//!
//! The files here do I/O and decide nothing. A handler reads records, calls the decision for them, and writes what the
//! decision returned.
//!
//! # How it works
//!
//! * [`curator_server`][] takes part in the election and serves in its role. While no leader is known, connections are
//!   closed at once. A follower only names the leader. The leader serves everything.
//! * A connection is accepted by `listener`, through the gate of the curator. Each of its calls passes `auth_router`,
//!   which identifies the peer by its certificate, checks the permission, and routes the call to its service.
//!   `cluster_members` decides which connections the gate keeps, and [`gate_monitor`][] has its numbers.
//! * There is a file per gRPC service: `leader_service` is served by every curator, `registration`, `nodes`,
//!   `declarations`, `kubernetes`, `management`, `tickets`, `credentials` and `snapshots` by the leader alone.
//! * `leader_context` is what a curator has while it leads. [`store`][] reads and writes records under the guard of the
//!   election. `record_cache` watches etcd once for all watches of clients (except those that follow the leader), and
//!   [`node_watch_cache`][] keeps the nodes in it by the order of their changes.
//! * `statements` signs the statement of the cluster's authority, and every curator serves the newest one.
//!   [`statement_monitor`][] has the reason why the leader signs none. `curator_certificates` passes on to it which
//!   certificates there are.
//! * In the background the leader makes etcd's members and the records agree (`etcd_members`), moves key rotations on
//!   and repairs allocations (`kubernetes_controller`), and deletes expired records. A learner is promoted by the
//!   curator whose etcd leads etcd, whether that curator leads or not.
//! * `node_addresses` compares what nodes claim with the sources of their connections.
//! * [`error`][] has the errors of all calls, with their gRPC codes, and [`curator_error`][] the reasons why a curator stops.
//!
//! # Invariants
//!
//! * When a curator changes its role, all its connections end. A call that came before is never served in the new role.
//! * A peer is authorized before anything of its request is read, and again for each call. A stream ends when the
//!   certificate of its caller is no longer accepted.
//! * A revocation returns once this curator rejects what was revoked. A curator ends when its own node is revoked.
//! * A decision whose records changed meanwhile is made again from the start, alone ([`store`][]).
//! * Changes of etcd's members, and of what depends on them, are made one at a time, under the membership lock.
//!
//! # Notes for the next implementor
//!
//! * The cache is a moment behind etcd. Serve watches from it, and read from the store before you reject or write.
//! * A handler that changes members, roles or Kubernetes records takes the membership lock first, and reads the members
//!   of etcd before the nodes.
//! * A handler that watches passes its stream to `LeaderContext::guard_stream`.

mod auth_router;
mod authority_rotation;
mod clock_check;
mod cluster_members;
mod credentials;
mod curator_certificates;
pub mod curator_error;
pub mod curator_server;
mod declarations;
pub mod error;
pub mod etcd_members;
pub mod gate_monitor;
mod kubernetes;
mod kubernetes_controller;
mod leader_context;
mod leader_service;
mod listener;
mod management;
mod node_addresses;
pub mod node_watch_cache;
mod nodes;
mod record_cache;
mod registration;
mod snapshots;
pub mod statement_monitor;
mod statements;
pub mod store;
mod tickets;
