//! Kubernetes objects: the reconciler's interface and its parts.
//!
//! # How the files fit
//!
//! * Desired state: [`built_in`][] of the release, [`cluster_config`][] of the cluster. [`add_on_manifest`][] and
//!   [`add_ons`][] parse and resolve the manifests of its add-ons.
//! * Decisions: [`diff`][] compares an object with the desired one, [`object_plan`][] plans the changes of a kind,
//!   [`node_objects`][] those of nodes. [`api_error`][] classifies errors, [`watch_cache`][] decides which changes by
//!   others need a pass, [`problem`][] has the problems that need a person.
//! * I/O: [`api_client`][] sends the requests, [`node_api`][] those about nodes, [`discovery`][] finds the kinds,
//!   `object_watches` watches them between passes, `node_reconcile` is the node part of a pass. [`reconcile`][]
//!   combines all of it and is an [`ObjectReconciler`].

use std::fmt;

pub mod add_on_manifest;
pub mod add_ons;
pub mod api_client;
pub mod api_error;
pub mod built_in;
pub mod cluster_config;
pub mod diff;
pub mod discovery;
pub mod node_api;
pub mod node_objects;
mod node_reconcile;
pub mod object_kind;
pub mod object_plan;
mod object_watches;
pub mod problem;
pub mod reconcile;
pub mod watch_cache;

/// The objects of one release in one Kubernetes.
///
/// The desired state is the same each time. Two programs that reconcile at once, because one of them does not know yet
/// that it is no longer the leader, may make each other fail; the next pass repairs that.
pub trait ObjectReconciler: Send + Sync {
    /// Compares all objects with what this release requires, and changes those that differ.
    ///
    /// May be dropped at any await, and must send nothing from then on: the program may no longer be the leader.
    fn reconcile(&self) -> impl Future<Output = Result<ReconcileSummary, ReconcileError>> + Send;

    /// Waits until another client has changed objects since the last pass began.
    ///
    /// Cancel-safe: if a call is dropped, the next call returns the change.
    fn wait_for_change(&self) -> impl Future<Output = ()> + Send;
}

/// The number of objects that a pass has changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReconcileSummary {
    /// Objects that did not exist.
    pub created: usize,
    /// Objects that differed and were written.
    pub updated: usize,
    /// Objects that differed in immutable fields, and were deleted and created again.
    pub replaced: usize,
    /// Objects that no release needs any more.
    pub deleted: usize,
}

impl ReconcileSummary {
    /// Whether the pass changed nothing.
    #[must_use]
    pub fn is_unchanged(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for ReconcileSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { created, updated, replaced, deleted } = self;
        write!(f, "{created} created, {updated} updated, {replaced} replaced, {deleted} deleted")
    }
}

/// Why a pass failed. What it did until then stays done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the built-in objects of Kubernetes are not all as this release wants them: {0}")]
pub struct ReconcileError(pub String);
