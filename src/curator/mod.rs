//! What the nodes of a cluster agree on: who belongs to it, and what each is to do.
//!
//! A curator runs on every consensus member, beside its member of etcd; one of them leads and is the only one
//! that writes. What it serves stands in `proto/shepherd/curator/v1`.
//!
//! # How the files fit
//!
//! Decisions, all of them functions of what is known and of the time, so that a table tests them and a
//! simulated cluster runs them as the real one does:
//!
//! * [`node_id`][]: who a node is. [`node`][]: what is kept of it, and how that stands in etcd.
//! * [`life_cycle`][]: how a node comes, and how it goes. [`labels`][]: what people say of it.
//! * [`role`](crate::model::role): the names of roles. [`roles`][]: what becomes of an order to give or take roles.
//! * [`membership`][]: how the members of etcd and the records of nodes come to agree, one change at a time.
//! * [`health`][]: what silence means. [`filter`][]: which nodes a list shows.
//! * [`tickets`][]: which machines may ask to become nodes.
//! * [`permissions`][]: who may make which call. [`peer`][]: how it is known who makes it. [`pki`][]: what
//!   the authority signs.
//! * [`declaration`](crate::model::declaration): operators' own roles; here is how they are [stored](declaration). [`template`](crate::model::template): what differs between the nodes that have one.
//! * [`kubernetes`][]: what Kubernetes of the cluster is to be, and by which keys its parts know each other.
//! * [`identity`][]: a key that is all that its holder is known by.
//! * [`cluster`][] and [`credential`][]: records of what there is one of, and of certificates. [`snapshot`][]: all
//!   records at one moment.
//!
//! All that is said to etcd, and where in it everything stands: [`etcd`](crate::etcd). And what is made of both:
//! [`service`][], over [`tls`][] and by its [`clock`][], for a cluster that [`bootstrap`][] has founded, or
//! [`restore`][] has brought back. Whoever calls goes through [`leader_channel`][], which [`dial`][]s.
//!
//! # What would break otherwise
//!
//! etcd's membership leads and roles follow: a node whose role were taken first would stop a member that
//! still votes, and with it, perhaps, the cluster. So every decision about roles names the change of
//! membership to be made *before* the record is written, and [`membership::sync`] completes what was left
//! half-done; nothing ever takes it back.
//!
//! A refusal is a value with a sentence and the code that gRPC answers it with, never an event in a log.

pub mod bootstrap;
pub mod clock;
pub mod cluster;
pub mod credential;
pub mod declaration;
pub mod dial;
pub mod filter;
pub mod health;
pub mod identity;
pub mod kubernetes;
pub mod labels;
pub mod leader_channel;
pub mod life_cycle;
pub mod membership;
pub mod node;
pub mod node_id;
pub mod peer;
pub mod permissions;
pub mod pki;
pub mod restore;
pub mod roles;
pub mod service;
pub mod snapshot;
pub mod tickets;
pub mod tls;
