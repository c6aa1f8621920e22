//! Cluster membership on etcd: nodes, roles, certificates, tickets and Kubernetes keys.
//!
//! A curator runs on every consensus member, beside its etcd member. One curator leads and is the only one that writes.
//! The API that it serves is defined in `proto/shepherd/curator/v1`.
//!
//! # How the files fit
//!
//! Decisions are functions of the records and the time. So tables test them, and a simulated cluster runs them as the
//! real one does:
//!
//! * [`node_lifecycle`][]: how a node is registered, approved, decommissioned and deleted. [`node_labels`][]: changes
//!   of its labels.
//! * [`node_role`](model::node_role): the names of roles. [`role_orders`][]: plans an order that adds or removes
//!   roles.
//! * [`membership`][]: reconciles etcd's members with node records, one change at a time.
//! * [`node_health`][]: node health from heartbeats. [`node_filter`][]: filters for listing nodes.
//! * [`tickets`][]: which machines may register as nodes.
//! * [`permissions`][]: which kind of peer may make which call.
//! * [`role_declaration`](model::role_declaration): operators' own roles; how they are stored is in
//!   [`role_declaration`][]. [`template`](model::template): what differs between the nodes that have one.
//! * [`kubernetes`][]: the Kubernetes settings of the cluster, and the keys of its components.
//! * [`credential`][]: the records of certificates.
//!
//! What callers share with the curator is in [`curator_client`][]: the records of nodes and of the
//! cluster, its authority, and TLS. All access to etcd, and the layout of its keys, is in [`etcd`][].
//! [`service`][] puts all of it together, for a cluster that [`bootstrap`][] has created or [`restore`][] has restored.
//!
//! # Membership before roles
//!
//! etcd's membership changes first and roles follow. If a node lost its role first, it would stop a member that still
//! votes, and with it, perhaps, the cluster. So every decision about roles names the membership change to make *before*
//! the record is written. [`membership::plan_sync`] completes what was left half-done; nothing ever reverts it.
//!
//! A rejection is a value with a message and a gRPC code, never only an event in a log.

pub mod bootstrap;
pub mod credential;
pub mod kubernetes;
pub mod membership;
pub mod node_filter;
pub mod node_health;
pub mod node_labels;
pub mod node_lifecycle;
pub mod permissions;
pub mod restore;
pub mod role_declaration;
pub mod role_orders;
pub mod service;
pub mod tickets;
