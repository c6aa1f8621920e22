//! Cluster membership on etcd: nodes, roles, certificates, tickets and Kubernetes keys.
//!
//! A curator is a server that runs on every consensus member of a cluster, beside its etcd member. One curator leads
//! and is the only one that writes records; the others name the leader to callers. Nodes and owners call it with
//! certificates of the cluster. The contract is `proto/shepherd/curator/v1`. What callers share with the curator
//! (records of nodes, the authority, TLS) is in the crate `curator-client`, and all access to etcd in the crate `etcd`.
//!
//! # How it works
//!
//! A cluster begins with [`bootstrap`][]: the first node writes the first records into its own etcd. Or it begins with
//! [`restore`][], from a snapshot and under a new epoch. Then curators elect a leader and serve ([`service`][]).
//!
//! Decisions are functions of records and time, without I/O. Tables test them, and a simulated cluster runs them as the
//! real one does:
//!
//! * Nodes. A machine registers with a ticket ([`tickets`][]). The node is approved, becomes part of the cluster, and
//!   leaves it one day ([`node_lifecycle`][]). Its labels are changed by [`node_labels`][], its health follows from
//!   heartbeats ([`node_health`][]), its address from its connections ([`node_address`][]), and `node_filter` selects
//!   nodes for a list.
//! * Roles. An order adds roles to a node or removes them ([`role_orders`][]). Built-in roles have conditions: a
//!   consensus member is also a member of etcd ([`membership`][]), and a Kubernetes node needs keys and an address
//!   range ([`kubernetes`][]). Operators declare roles of their own; `role_declaration` stores them.
//! * Certificates. [`entitlement`][] has what each kind may contain, which every certificate is compared with.
//! * A stolen authority. [`authority_installation`][] replaces it by an order that no curator carries out.
//! * Trust. [`permissions`][] defines which kind of peer may make which call. `credential` has the records of issued
//!   certificates and of revocations, `key_limits` bounds what a key without a certificate gets. `peer_revocation`
//!   decides which certificates of etcd's members are rejected, `statement_plan` what the cluster's authority states
//!   for all nodes, and [`statement_record`][] stores it. `clock_comparison` decides whether the leader's clock is
//!   wrong, and `record_retention` which records end by it.
//!
//! # Invariants
//!
//! * Only the leader writes records. A write succeeds only while it still leads and the records that the decision was
//!   made from are unchanged. Bootstrapping and restoring write without that condition, before any curator runs, and so
//!   does a node that renews its certificate from its own etcd, or records the certificate of its etcd member: it writes
//!   a record under a key that nobody else writes. After a theft, a node writes the records of another authority, as long
//!   as they are what it has read.
//! * etcd's membership changes first, and roles follow. If a node lost its role first, it would stop a member that
//!   still votes. So every decision about roles names the membership change to make *before* the record is written, and
//!   [`membership::plan_sync`] completes what was left half-done. Nothing ever reverts it.
//! * No order removes a voting member of etcd unless the members that remain are a quorum.
//! * No certificate is recorded or sent that contains anything else than its kind may have.
//! * Every call may be repeated. A node that lost the response to a step repeats the call and gets it again.
//! * A rejection is a value with a message and a gRPC code, never only an event in a log.
//! * The clocks of nodes are never used, but to find that the leader's own is wrong, or that it is right. The curator's own time is a
//!   parameter of every decision.
//!
//! # Notes for the next implementor
//!
//! * A new call needs a row in [`permissions`][]; a test compares that table with the contract. Its handler is in a
//!   file of [`service`][], and what it decides in a file without I/O.
//! * A new kind of record needs a prefix in `etcd::key_space`. [`restore`][] says what becomes of it in a restored
//!   cluster. If watches or authorization need it, the leader's cache watches its prefix.
//! * During an update a curator of an older release may lead. It deletes a node without the records that it does not
//!   know, so the leader repairs such leftovers in the background, as it does with allocations of Kubernetes.
//! * `tests/all/cluster_model` runs the decisions with everything else simulated, and `tests` of this crate runs
//!   curators against a real etcd.

pub mod authority_installation;
mod authority_rotation;
pub mod bootstrap;
mod clock_comparison;
mod credential;
pub mod entitlement;
mod key_limits;
pub mod kubernetes;
pub mod membership;
pub mod node_address;
mod node_filter;
pub mod node_health;
pub mod node_labels;
pub mod node_lifecycle;
mod peer_revocation;
pub mod permissions;
mod record_retention;
pub mod restore;
mod role_declaration;
pub mod role_orders;
pub mod service;
mod statement_plan;
pub mod statement_record;
pub mod tickets;
