//! The curator as a server: election, listeners, authorization, gRPC services.
//!
//! * [`curator_server`][]: stands for election, and serves in its role.
//! * [`listener`][]: TLS connections, and cutting them. [`auth_router`][]: authorizes and routes calls.
//! * [`leader_service`][]: the one service of every curator.
//! * [`leader_context`][]: what a curator has while it leads. [`store`][]: records, written only while it leads.
//!   [`record_cache`][] and [`node_watch_cache`][]: caches that serve all watches. [`etcd_members`][]: the members of
//!   etcd. [`kubernetes_controller`][]: what the leader does about Kubernetes by itself. [`error`][]: errors and their
//!   codes.
//! * [`registration`][], [`nodes`][], [`declarations`][], [`kubernetes`][], [`management`][], [`tickets`][],
//!   [`credentials`][], [`snapshots`][]: the gRPC services, one file each. They decide nothing: each reads records,
//!   calls the decision for them, and writes.

pub mod auth_router;
pub mod credentials;
pub mod curator_server;
pub mod declarations;
pub mod error;
pub mod etcd_members;
pub mod kubernetes;
pub mod kubernetes_controller;
pub mod leader_context;
pub mod leader_service;
pub mod listener;
pub mod management;
pub mod node_watch_cache;
pub mod nodes;
pub mod record_cache;
pub mod registration;
pub mod snapshots;
pub mod store;
pub mod tickets;
