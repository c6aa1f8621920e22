//! Clusters: spec, state, plan, restore, upgrade and credentials.
//!
//! An operator requests a cluster of so many machines ([`spec`][]). A cluster loop reads its [`state`][]: what the BMDB
//! knows of its members, and what its curators report of its nodes. [`plan`][] compares the two and returns the next
//! steps. The loop executes them and observes the cluster again, until no step is left.
//!
//! # What is requested and what is there
//!
//! * [`spec`][]: what an operator requests, with the [`crate::selector`] of the machines that may be chosen.
//!   [`label_rights`][]: who may change a label by which machines are chosen. [`node_labels`][]: labels that a node
//!   gets when it joins. [`node_address`][]: its address in the provider's list, and the one that curators have of it.
//! * [`declaration`][]: roles that operators declare to a cluster. [`kubernetes`][]: desired and observed Kubernetes.
//!   [`upgrade`][]: an upgrade that is under way.
//! * [`state`][]: spec, members and nodes of a cluster at one time. [`view`][]: what people see of it.
//!
//! # What follows
//!
//! * [`plan`][]: the next steps, and what each machine waits for. [`forecast`][]: all steps to come, before any of them
//!   is taken.
//! * [`disruption`][]: a cluster's objection to disrupting one of its machines.
//! * [`restore`][]: whether a cluster may be restored from a snapshot, or its members of etcd may get certificates by
//!   order. [`snapshot`][]: when a cluster's records are copied elsewhere, and which of these copies are kept.
//!   [`image`][]: when the whole etcd of a cluster is copied with them. [`restore_programs`][]: whether a machine can
//!   restore that.
//! * [`certificate_request`][]: the life of a request for a person's certificate, with its two kinds [`credential`][]
//!   and [`kubernetes_user`][]. [`owner_key`][]: the shepherd's own key and its rotation.
//! * [`authority_rotation`][]: an order to replace the cluster's authority, and how far that is. [`authority_theft`][]: the
//!   same after a theft of its key.
//! * [`secret_keys`][]: the keys that Kubernetes Secrets are encrypted with, and their rotation.
//! * [`etcd_space`][]: the way back of an etcd that accepts no writes because it is full.
//! * `quorum`: majority and tolerated failures.
//!
//! # Invariants
//!
//! * Types of state decide nothing, and lie below the planner: [`plan`][] imports [`state`][], never the reverse.
//! * No step relies on another step of the same pass. A pass may end after any step.
//! * A voting member of etcd is removed only while the other members keep a majority.

pub mod authority_rotation;
pub mod authority_theft;
pub mod certificate_request;
pub mod credential;
pub mod declaration;
pub mod disruption;
pub mod etcd_space;
pub mod forecast;
pub mod image;
pub mod kubernetes;
pub mod kubernetes_user;
pub mod label_rights;
pub mod node_address;
pub mod node_labels;
pub mod owner_key;
pub mod plan;
mod quorum;
pub mod restore;
pub mod restore_programs;
pub mod secret_keys;
pub mod snapshot;
pub mod spec;
pub mod state;
pub mod upgrade;
pub mod view;
