//! Kubernetes on a node.
//!
//! What runs follows from four things that come in any order and change at any time: which roles the node has, whether etcd
//! runs in it, what a curator says that it is to run, and what of that is here already. A change makes all of it be decided
//! anew, and none is awaited by another: a role server that starts goes on with the components that it finds, by what is on
//! its disk, whether or not there is a curator.
//!
//! Components are programs beside the role server, kept by the same machinery as operators' services
//! ([`services`](crate::roleserver::cluster::services)): adopted by the next role server, started after those that they
//! need, stopped before them, started again with ever longer pauses, looked at, and cleared away with all that they had
//! when their role goes. What is particular to them is how what is to run is found.
//!
//! # How the files fit
//!
//! * [`assembly`][]: the parts below, started together.
//! * [`follow`][]: what a curator says. [`setup`][]: that, checked, and on the disk.
//! * [`startup`][]: which roles are carried out (pure).
//! * [`bundles`][]: where programs come from, as [`crate::model::kubernetes::bundle`] describes them; [`held`][]: having the
//!   one that is to run.
//! * [`certificates`][]: keys and certificates; [`material`][]: how they stand on the disk, and which are due (pure).
//! * [`controller`][]: the reconciler of built-in objects, and the gate; [`wishing`][]: what the cluster wishes of those.
//! * [`own_node`][]: a worker's own object in Kubernetes, and pods that go elsewhere first; [`balancer`][]: its way to API
//!   servers. [`groups`][]: control groups of pods. [`leftovers`][]: what a worker does to its host, undone.
//! * [`components`][]: with what each is started (pure); [`ports`][]: where it listens.
//! * [`wanted`][]: all that is to run (pure). [`runs`][]: by what that which runs was started.
//! * [`told`][]: what is said of it (pure).
//!
//! # A role server without it
//!
//! What acts on Kubernetes' objects brings 41 of the 234 packages that a role server is built of, so it is a feature,
//! `reconciler`. The demo's role server is built without it. A node with a role of Kubernetes then reports what it waits for
//! (`refusal.rs`) and starts nothing. Every role server can undo the leftovers of a worker.
//!
//! # On the disk
//!
//! | below `cluster/` | what |
//! | --- | --- |
//! | `kubernetes.json` | what a curator said last |
//! | `kubernetes-runs.json` | numbers of combinations of a bundle and a generation of keys |
//! | `kubernetes-leaving.json` | when pods began to go elsewhere |
//! | `kubernetes/controller/`, `kubernetes/worker/` | keys, certificates and authorities of a role |
//! | `kubernetes/bundles/` | bundles |
//! | `kubernetes/add-ons/` | manifests of add-ons |
//! | `kubernetes/ROLE_COMPONENT/` | the directory of a component |
//!
//! # What holds
//!
//! * A controller without etcd waits, and does not fail. A worker needs none.
//! * Pods outlive containerd, the kubelet and the role server, and go to other nodes before a worker ends or has another
//!   bundle. When the role goes nothing of them is left here, and what is mounted is never removed with a directory.
//! * What relies on the built-in objects begins behind the gate, and what has begun goes on.
//! * What a node says that it runs is what its components were started with, as that was written down when they were.
//! * Another bundle, or another generation of keys, starts every component again, in order: those that need others stop
//!   first. A certificate that is renewed starts only those again that do not look at it themselves.

use std::sync::Arc;

use crate::curator::clock::Clock;
use crate::roleserver::child::keep::Places;
use crate::roleserver::cluster::facts::Facts;
use crate::roleserver::cluster::files::Files;
use crate::roleserver::cluster::kubernetes::ports::Ports;
use crate::roleserver::shepherds::Shepherds;
use crate::supervisor::context::Runnable;

#[cfg(feature = "reconciler")]
pub mod assembly;
#[cfg(feature = "reconciler")]
pub mod balancer;
pub mod bundles;
#[cfg(feature = "reconciler")]
pub mod certificates;
pub mod components;
#[cfg(feature = "reconciler")]
pub mod controller;
#[cfg(feature = "reconciler")]
pub mod follow;
pub mod groups;
#[cfg(feature = "reconciler")]
pub mod held;
pub mod leftovers;
pub mod material;
#[cfg(feature = "reconciler")]
pub mod own_node;
pub mod ports;
#[cfg(any(test, not(feature = "reconciler")))]
mod refusal;
#[cfg(feature = "reconciler")]
pub mod runs;
pub mod setup;
#[cfg(feature = "reconciler")]
pub mod startup;
#[cfg(feature = "reconciler")]
pub mod told;
#[cfg(feature = "reconciler")]
pub mod wanted;
#[cfg(feature = "reconciler")]
pub mod wishing;

/// With what it is run.
#[derive(Clone, Debug)]
pub struct Host {
    /// What is kept.
    pub files: Files,
    /// Where programs are kept.
    pub places: Arc<Places>,
    /// The time.
    pub clock: Clock,
    /// UUID of the running boot.
    pub boot_id: String,
    /// Where bundles and add-ons come from.
    pub shepherds: Shepherds,
    /// Where components listen.
    pub ports: Ports,
}

/// The runnable: all of it, or in a role server without Kubernetes the refusal.
#[must_use]
pub fn kubernetes(host: Host, facts: Facts) -> Runnable {
    #[cfg(feature = "reconciler")]
    return assembly::assembly(host, facts);
    #[cfg(not(feature = "reconciler"))]
    {
        let _ = host;
        return refusal::refusal(&facts);
    }
}
