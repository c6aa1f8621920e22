//! Clusters: specification, machines, Kubernetes, upgrades, keys, certificates, snapshots, restore.
//!
//! A cluster is a number of machines with curators, which have the cluster's own state in etcd. The BMDB has what
//! operators want of it, which machines it has, and what the curators last reported.
//!
//! # How it works
//!
//! * Operators' orders write the **desired state**: [`spec_orders`] the specification, [`declaration`] the roles,
//!   [`kubernetes`], [`upgrade`], [`restore`], and requests for a snapshot ([`snapshot`]), a certificate
//!   ([`credential`]), another key ([`owner_key`]), certificates for etcd ([`peer_renewal`]) or another authority
//!   ([`authority_rotation`], and after a theft `authority_theft`).
//! * One shepherd at a time has the cluster's **lease** ([`crate::engine::named_lease`]). It reads the [`record`], has
//!   the next steps planned ([`model::cluster::plan`]), executes them, and writes what it did and saw: in
//!   `transitions`, or in the file of the order that is completed.
//! * [`reading`] reads the records, and [`forecast`] plans all steps to come without taking one. `candidates` are the
//!   machines that can be chosen. `selectors` are those of all clusters, for orders about labels.
//! * [`secret_keys`] are those of Kubernetes Secrets, with orders to replace them.
//! * `image` is the whole etcd of a cluster, which belongs to a snapshot. It is stored in parts, outside the lease's
//!   transaction.
//! * `statement` is what the cluster's authority states of its curators, as a shepherd verified it last.
//! * [`lock`] finds and locks the cluster that an order names, and `cluster_order` also reads it. `certificate_request` has
//!   the rules of both kinds of certificates.
//!
//! # Invariants
//!
//! * An order only changes the desired state: its transaction chooses no machine, contacts no curator and ends nothing.
//! * Every write of the lease's holder checks the lease in its own transaction, so that a holder that was away for too
//!   long changes nothing any more. A change of a machine is written under that machine's lock and recorded in its
//!   history. Only a statement needs no lease: it is written if it is higher.
//! * A machine is in one cluster at most. It stays in it until it has left.
//! * No private key of a person is ever stored here. The shepherd's own keys and the snapshots are sealed.
//!
//! # Notes for the next implementor
//!
//! * What belongs to a cluster is deleted with it (`transitions`, `purge_cluster`). Add a new table there, and to
//!   [`crate::fleet::retention`].
//! * A column of observations that another release wrote and this one cannot read is not an error: the next pass writes
//!   it again.
//! * Code that writes under the lease needs the feature `sealing`, which only the service has.

pub mod authority_rotation;
#[cfg(feature = "sealing")]
pub mod authority_theft;
mod candidates;
mod certificate_request;
mod cluster_order;
pub mod credential;
pub mod declaration;
pub mod forecast;
#[cfg(feature = "sealing")]
pub mod image;
pub mod kubernetes;
pub mod lock;
pub mod owner_key;
pub mod peer_renewal;
pub mod reading;
pub mod record;
pub mod restore;
#[cfg(feature = "sealing")]
pub mod sealed_image;
#[cfg(feature = "sealing")]
pub mod sealed_snapshot;
pub mod secret_keys;
pub(crate) mod selectors;
pub mod snapshot;
pub mod spec_orders;
#[cfg(feature = "sealing")]
pub mod statement;
#[cfg(feature = "sealing")]
pub mod transitions;
pub mod upgrade;
