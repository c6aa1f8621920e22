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
//! * [`node_id`][]: the identity of a node. [`node`][]: its record, and how etcd stores it.
//! * [`node_lifecycle`][]: how a node is registered, approved, decommissioned and deleted. [`node_labels`][]: changes
//!   of its labels.
//! * [`node_role`](crate::model::node_role): the names of roles. [`role_orders`][]: plans an order that adds or removes
//!   roles.
//! * [`membership`][]: reconciles etcd's members with node records, one change at a time.
//! * [`node_health`][]: node health from heartbeats. [`node_filter`][]: filters for listing nodes.
//! * [`tickets`][]: which machines may register as nodes. [`ticket_id`][]: by which id a ticket is named.
//! * [`permissions`][]: which kind of peer may make which call. [`peer_identity`][]: which peer makes it. [`pki`][]:
//!   what the authority signs.
//! * [`role_declaration`](crate::model::role_declaration): operators' own roles; how they are stored is in
//!   [`role_declaration`][]. [`template`](crate::model::template): what differs between the nodes that have one.
//! * [`kubernetes`][]: the Kubernetes settings of the cluster, and the keys of its components.
//! * [`identity`][]: a key pair that identifies its holder.
//! * [`cluster`][] and [`credential`][]: the singleton records, and those of certificates. [`cluster_snapshot`][]: all
//!   records at one revision.
//!
//! All access to etcd, and the layout of its keys, is in [`etcd`](crate::etcd). [`service`][] puts both together, over
//! [`tls`][] and with its [`clock`][], for a cluster that [`bootstrap`][] has created or [`restore`][] has restored.
//! Callers go through [`leader_channel`][], which opens [`curator_channel`][]s.
//!
//! # Membership before roles
//!
//! etcd's membership changes first and roles follow. If a node lost its role first, it would stop a member that still
//! votes, and with it, perhaps, the cluster. So every decision about roles names the membership change to make *before*
//! the record is written. [`membership::plan_sync`] completes what was left half-done; nothing ever reverts it.
//!
//! A rejection is a value with a message and a gRPC code, never only an event in a log.

pub mod bootstrap;
pub mod clock;
pub mod cluster;
pub mod cluster_snapshot;
pub mod credential;
pub mod curator_channel;
pub mod identity;
pub mod kubernetes;
pub mod leader_channel;
pub mod membership;
pub mod node;
pub mod node_filter;
pub mod node_health;
pub mod node_id;
pub mod node_labels;
pub mod node_lifecycle;
pub mod peer_identity;
pub mod permissions;
pub mod pki;
pub mod restore;
pub mod role_declaration;
pub mod role_orders;
pub mod service;
pub mod ticket_id;
pub mod tickets;
pub mod tls;
