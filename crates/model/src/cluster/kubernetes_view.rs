//! The observed state of Kubernetes as it is stored.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::cluster::kubernetes::{CuratorKubernetes, KubernetesKeyRotation, KubernetesSpec, is_in_sync};

/// Kubernetes by the last answer of a cluster's curators.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct KubernetesStatusView {
    /// Whether the curators have the desired spec.
    #[serde(rename = "told")]
    pub in_sync: bool,
    /// Bundles assigned to single nodes, by node id.
    #[serde(rename = "assigned")]
    pub assigned_bundles: BTreeMap<String, String>,
    /// Rotations of keys that are under way.
    pub rotations: Vec<KubernetesKeyRotation>,
    /// `host:port` of API servers.
    pub api_servers: Vec<String>,
}

impl KubernetesStatusView {
    /// The part of the curators' answer that is stored.
    #[must_use]
    pub fn new(wanted: &KubernetesSpec, has: &CuratorKubernetes) -> Self {
        Self {
            in_sync: is_in_sync(wanted, has),
            assigned_bundles: has.assigned_bundles.clone(),
            rotations: has.rotations.clone(),
            api_servers: has.api_servers.clone(),
        }
    }
}
