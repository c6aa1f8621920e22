//! Kubernetes objects: the interface of the reconciler, and the pass over all objects.
//!
//! A pass lists the objects that have our label, compares them with the desired ones, and sends a request for each that
//! differs. There are three sources of desired objects: the release itself, the add-ons of the cluster, and the records
//! of nodes.
//!
//! # How it works
//!
//! * Desired state. [`built_in`][] has the objects of the release. [`cluster_config`][] is the configuration of the
//!   cluster. `add_on_manifest` parses the manifests of its add-ons, and `add_ons` resolves them to the kinds that the
//!   server serves.
//! * Decisions, without I/O. [`diff`][] compares an object with the desired one. [`object_plan`][] plans the changes of
//!   one kind, and [`node_objects`][] those of Node objects. `kind_plan` plans which kinds a pass processes.
//!   [`api_error`][] classifies errors. `watch_cache` decides which changes by others need a pass. [`problem`][] has
//!   the problems that need a person. [`object_kind`][] has kinds, keys and labels.
//! * I/O. [`api_client`][] sends requests, [`node_api`][] those about nodes and their pods. [`discovery`][] finds the
//!   kinds that a server serves. `object_write` writes one object. `object_watches` watches the kinds between passes.
//!   `node_reconcile` is the part of a pass for Node objects. [`reconcile`][] combines all of it and implements
//!   [`ObjectReconciler`]. [`secret_rewrite`][] is no part of a pass: it writes every Secret again as it is.
//!
//! # What the library `kube` does
//!
//! `kube` builds requests, sends them over TLS, and decodes responses, events, errors and API versions. Objects stay
//! JSON ([`object_kind`][] says why). These parts of it were considered and left out; the modules give the reasons:
//!
//! | part of `kube` 5.0 | instead |
//! | --- | --- |
//! | `runtime::watcher` and its backoff | `object_watches`, with the delays that all retries here have |
//! | `runtime::reflector` | `watch_cache` |
//! | `Discovery::run` and `run_aggregated` | [`discovery`][], one API version at a time |
//! | apply, for objects of the release | `object_write` creates and replaces them |
//!
//! `kube` has nothing to compare an object with the desired one ([`diff`][]), to find why a write was rejected
//! ([`api_error`][]), or to replace a client after its certificate was renewed ([`api_client`][]).
//!
//! # Invariants
//!
//! * An object without our label is never changed, unless it is ours anyway: we wrote it before, it is an object
//!   of the release and equals what we would write, or it is the Node object of one of our nodes. A Secret that is written
//!   again has not changed.
//! * An add-on of which a part cannot be read loses nothing: what it created stays until it can be read.
//! * An object is deleted in the evaluated state only. Objects of add-ons are never deleted to be replaced, because
//!   they may hold data.
//! * A problem that only a person can solve never makes a pass fail.
//!
//! # Notes for the next implementor
//!
//! * A desired object sets every field that must be kept, also to the server's default: what is not set is not
//!   compared.
//! * A new kind of built-in object goes into `built_in_kinds`, in the order of creation. It stays there after its last
//!   object was removed, so that clusters lose these objects.
//! * `tests/all/objects` runs a pass against a server that behaves as an API server does, and against a real one.

use std::fmt;

mod add_on_manifest;
mod add_ons;
pub mod api_client;
pub mod api_error;
pub mod built_in;
pub mod cluster_config;
pub mod diff;
pub mod discovery;
mod kind_plan;
pub mod node_api;
pub mod node_objects;
mod node_reconcile;
pub mod object_kind;
pub mod object_plan;
mod object_watches;
mod object_write;
pub mod problem;
pub mod reconcile;
pub mod secret_rewrite;
mod watch_cache;

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
