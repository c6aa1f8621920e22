//! What a cluster wants to have in its Kubernetes, besides what every cluster has.

use std::collections::{BTreeMap, BTreeSet};

/// What depends on the cluster. Whoever knows it hands it over, and hands over the next when it changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// The runtime handlers that nodes have, as their containerd calls them: a class is made for each.
    pub runtime_handlers: BTreeSet<String>,
    /// Who makes volumes; `None` where nobody does.
    pub storage_driver: Option<StorageDriver>,
    /// What else is to run in it.
    pub add_ons: Vec<AddOn>,
}

/// A CSI driver that every node has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageDriver {
    /// Its name as CSI has it, which is that of the provisioner, too.
    pub name: String,
    /// The name of its storage class.
    pub class: String,
    /// What it is to be told of each volume.
    pub parameters: BTreeMap<String, String>,
    /// Whether volumes can grow.
    pub can_expand: bool,
    /// Whether a volume has to be attached to a node before it is mounted there.
    pub attaches: bool,
}

/// What is to run in a cluster, as its maker describes it to Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddOn {
    /// Its name: that of a label's value.
    pub name: String,
    /// YAML, or JSON, of one document or several.
    pub manifest: Vec<u8>,
}
