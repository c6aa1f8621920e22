//! The cluster-specific input of reconciliation: runtime handlers, storage driver, add-ons.

use std::collections::{BTreeMap, BTreeSet};

/// The configuration of a cluster's objects. A watch channel provides it, and a new one after each change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterConfig {
    /// The runtime handlers of the nodes, by their names in containerd. A runtime class is created for each.
    pub runtime_handlers: BTreeSet<String>,
    /// The driver that provisions volumes; `None` if there is none.
    pub storage_driver: Option<StorageDriver>,
    /// The add-ons that are installed in the cluster.
    pub add_ons: Vec<AddOn>,
}

/// A CSI driver that every node has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageDriver {
    /// Its CSI driver name, which is also the name of the provisioner.
    pub name: String,
    /// The name of its storage class.
    pub class: String,
    /// The parameters of its storage class.
    pub parameters: BTreeMap<String, String>,
    /// Whether volumes can grow.
    pub can_expand: bool,
    /// Whether a volume has to be attached to a node before it is mounted there.
    pub needs_attach: bool,
}

/// An add-on, described by Kubernetes manifests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddOn {
    /// Its name, which must be a valid label value.
    pub name: String,
    /// YAML, or JSON, of one document or several.
    pub manifest: Vec<u8>,
}
