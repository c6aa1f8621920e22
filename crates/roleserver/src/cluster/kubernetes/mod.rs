//! Kubernetes on a node: control plane and worker components, their bundles, keys and draining.
//!
//! What runs follows from four inputs that arrive in any order and change at any time: the roles of the node, whether
//! etcd runs on it, the setup that the curator assigns, and what is already on the disk. Every change repeats the
//! decision, and no input waits for another one: a role server that starts continues with the components that it finds,
//! from the files on its disk, with or without a curator.
//!
//! Components are children of the role server, run by the same service manager as operators' services
//! ([`services`](crate::cluster::services)): adopted by the next role server, started after their dependencies, stopped
//! before them, restarted with a backoff, health-checked, and removed with all their files when their role ends. Only
//! the derivation of the desired components is specific to Kubernetes.
//!
//! # How the files fit
//!
//! * [`assembly`][]: starts all the parts below, and connects them by watch cells.
//! * [`curator_watch`][]: watches the setup from the curator. [`setup`][]: validates and stores it.
//! * [`startup`][]: decides which roles run (pure).
//! * [`bundle_store`][]: bundles of programs, as [`model::kubernetes::bundle_manifest`] describes them.
//! * `bundle_proof`: raises the lowest accepted version of bundles.
//!   [`bundle_install`][]: installs the desired one.
//! * [`component_certificates`][]: issues keys and certificates. [`key_material`][]: their layout on the disk, and
//!   which are due.
//! * [`secrets_config`][]: how API servers encrypt Secrets. [`secrets_rewrite`][]: every Secret is written again.
//! * [`reconciler_runner`][]: the reconciler of built-in objects, and controller readiness. [`cluster_config`][]: the
//!   configuration that the reconciler applies.
//! * [`node_object`][]: a worker's Node object, and draining. [`load_balancer`][]: connections to API servers.
//!   [`pod_cgroups`][]: control groups of pods. [`cgroup_driver`][]: what makes them. [`stored_driver`][]: what this
//!   worker has for that. [`host_cleanup`][]: removes what a worker leaves on its host.
//! * [`components`][]: what each component is started with, and listen ports (pure).
//! * [`desired`][]: all desired components (pure). [`component_revisions`][]: what running components were started
//!   with.
//! * [`component_status`][]: the status that the node reports (pure).
//!
//! # A role server without it
//!
//! The code that uses the Kubernetes API links many packages (`kube`, `k8s-openapi` and what they need), so it is a
//! feature, `reconciler`. The demo's role server is built without it. A node with a Kubernetes role then reports what
//! it waits for (`refusal.rs`) and starts nothing. Every role server can clean up what a worker left.
//!
//! # On the disk
//!
//! | below `cluster/` | content |
//! | --- | --- |
//! | `kubernetes.json` | the last setup from a curator |
//! | `kubernetes-runs.json` | numbers of combinations of a bundle and a generation of keys |
//! | `kubernetes-leaving.json` | when the current drain began |
//! | `kubernetes-cgroup-driver.json` | what makes the control groups of pods |
//! | `kubernetes/controller/`, `kubernetes/worker/` | keys, certificates and authorities of a role |
//! | `kubernetes/bundles/` | bundles |
//! | `kubernetes/add-ons/` | manifests of add-ons |
//! | `kubernetes/ROLE_COMPONENT/` | the directory of a component |
//!
//! # Invariants
//!
//! * A controller without etcd waits, and does not fail. A worker needs no etcd.
//! * Pods outlive containerd, the kubelet and the role server. They are evicted to other nodes before a worker ends or
//!   its bundle changes. When the role ends, nothing of them is left on the host. A mounted file system is never
//!   removed with a directory.
//! * Components that rely on the built-in objects start only once the controller is ready. Once started they keep
//!   running.
//! * The reported status is what components were started with, as it was recorded when they started.
//! * A new bundle restarts every component, and a new generation of keys every component that reads keys (not
//!   containerd). They restart in order: components stop before their dependencies. A renewed certificate restarts only
//!   components that do not reload it.
//!
//! # Notes for the next implementor
//!
//! * An input that is unknown has a value of its own, which stops nothing: `None` in [`startup`][], a sentence instead
//!   of a command line in [`desired`][]. A default that means "nothing to run" would stop running components whenever a
//!   role server starts.
//! * What a worker changes on its host outside its own directory belongs into the table of [`host_cleanup`][], with a
//!   step that can be repeated.
//! * A module that needs the API of Kubernetes is compiled only with the feature. Cleaning up must not need it.

use std::sync::Arc;

use curator_client::clock::Clock;
use supervisor::context::Runnable;

use crate::child::lifecycle::ChildContext;
use crate::cluster::files::ClusterFiles;
use crate::cluster::kubernetes::components::ComponentPorts;
use crate::cluster::node_facts::NodeFacts;
use crate::server_pool::ServerPool;
use crate::signing_store::SigningStore;

#[cfg(feature = "reconciler")]
pub mod assembly;
#[cfg(feature = "reconciler")]
pub mod bundle_install;
#[cfg(feature = "reconciler")]
pub mod bundle_proof;
pub mod bundle_store;
pub mod cgroup_driver;
#[cfg(feature = "reconciler")]
pub mod cluster_config;
#[cfg(feature = "reconciler")]
pub mod component_certificates;
#[cfg(feature = "reconciler")]
pub mod component_revisions;
#[cfg(feature = "reconciler")]
pub mod component_status;
pub mod components;
#[cfg(feature = "reconciler")]
pub mod curator_watch;
#[cfg(feature = "reconciler")]
pub mod desired;
pub mod host_cleanup;
pub mod key_material;
#[cfg(feature = "reconciler")]
pub mod load_balancer;
#[cfg(feature = "reconciler")]
pub mod node_object;
pub mod pod_cgroups;
#[cfg(feature = "reconciler")]
pub mod reconciler_runner;
#[cfg(any(test, not(feature = "reconciler")))]
mod refusal;
pub mod secrets_config;
#[cfg(feature = "reconciler")]
pub mod secrets_rewrite;
pub mod setup;
#[cfg(feature = "reconciler")]
pub mod startup;
pub mod stored_driver;

/// What the Kubernetes parts need from the node.
#[derive(Clone, Debug)]
pub struct KubernetesContext {
    /// Cluster files of this node.
    pub files: ClusterFiles,
    /// Where children of the role server are recorded and started.
    pub children: Arc<ChildContext>,
    /// Clock for validities and timestamps.
    pub clock: Clock,
    /// UUID of the running boot.
    pub boot_id: String,
    /// Source of bundles and add-ons.
    pub server_pool: ServerPool,
    /// Keys that bundles must be signed with.
    pub signing: SigningStore,
    /// Listen ports of the components.
    pub ports: ComponentPorts,
}

/// Makes the runnable of all parts, or of the refusal in a role server without the feature.
#[must_use]
pub fn run_kubernetes(host: KubernetesContext, facts: NodeFacts) -> Runnable {
    #[cfg(feature = "reconciler")]
    return assembly::assembly(host, facts);
    #[cfg(not(feature = "reconciler"))]
    {
        let _ = host;
        return refusal::refusal(&facts);
    }
}
