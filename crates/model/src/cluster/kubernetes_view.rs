//! Kubernetes and upgrades of a cluster as shown by the API and by `shepherdctl` alike.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::cluster::kubernetes::{
    CuratorKubernetes, KubernetesKeyRotation, KubernetesSpec, VolumeDriver, is_in_sync,
};
use crate::time::Timestamp;

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

/// Kubernetes of a cluster: desired spec and observed status.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KubernetesView {
    /// SHA-256 of the cluster's bundle, 64 hexadecimal digits.
    pub bundle: String,
    /// Version of Kubernetes in the bundle.
    pub version: String,
    /// IPv4 range of service addresses (CIDR).
    pub service_range: String,
    /// IPv4 range that is divided among nodes for their pods (CIDR).
    pub pod_range: String,
    /// Prefix length of one node's part of `pod_range`.
    pub node_prefix: u32,
    /// DNS domain of service names.
    pub domain: String,
    /// Digests of files with Kubernetes objects, by add-on name.
    pub add_ons: BTreeMap<String, String>,
    /// Driver that provisions volumes; `None` for no storage.
    pub storage: Option<VolumeDriver>,
    /// When an operator requested Kubernetes.
    pub requested_at: Timestamp,
    /// Operator who requested it.
    pub requested_by: String,
    /// Operator who requested its removal; `None` if it stays.
    pub removal_requested_by: Option<String>,
    /// Rotations that an operator requested and no curator has accepted yet.
    pub pending_rotations: Vec<String>,
    /// Status by the last answer of the curators.
    pub status: KubernetesStatusView,
}

/// An upgrade of a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UpgradeView {
    /// ID of the upgrade, 8 hexadecimal digits.
    pub id: String,
    /// The bundle before the upgrade; `None` if only role servers are upgraded.
    pub from: Option<BundleView>,
    /// The bundle after the upgrade; `None` if only role servers are upgraded.
    pub to: Option<BundleView>,
    /// Release of the role server that is installed first; `None` if only Kubernetes is upgraded.
    pub release: Option<String>,
    /// The roll-out of that release.
    pub roll_out: Option<String>,
    /// Whether that roll-out is over, even if machines failed in it.
    pub release_done: bool,
    /// Whether the upgrade is being rolled back.
    pub rolling_back: bool,
    /// How many workers are upgraded at a time.
    pub parallelism: u32,
    /// How long a node may take, in seconds.
    pub deadline_seconds: u32,
    /// When the upgrade was ordered.
    pub created_at: Timestamp,
    /// Operator who ordered it.
    pub created_by: String,
    /// The operator's reason for it.
    pub reason: String,
    /// Why it is paused; `None` while it proceeds.
    pub pause_reason: Option<String>,
    /// When it ended; `None` while it is under way.
    pub ended_at: Option<Timestamp>,
    /// How it ended: `finished`, `rolled back` or `aborted`.
    pub outcome: Option<String>,
    /// Nodes that were sent a bundle in the present direction.
    pub requested_count: u32,
    /// How many of these nodes have finished.
    pub completed_count: u32,
}

/// A bundle of Kubernetes and its version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BundleView {
    /// SHA-256 of the bundle, 64 hexadecimal digits.
    pub sha256: String,
    /// Version of Kubernetes in it.
    pub version: String,
}

impl UpgradeView {
    /// Summary in a line without a full stop.
    #[must_use]
    pub fn summary(&self) -> String {
        let versions = match (&self.from, &self.to) {
            (Some(from), Some(to)) if self.rolling_back => {
                format!("back from Kubernetes {} to {}", to.version, from.version)
            }
            (Some(from), Some(to)) => format!("from Kubernetes {} to {}", from.version, to.version),
            _ => "of its role servers alone".to_owned(),
        };
        let release = match &self.release {
            Some(release) if self.rolling_back => format!(" (role servers stay at {release})"),
            Some(release) if self.release_done => format!(", role servers are at {release}"),
            Some(release) => format!(", role servers to {release} first"),
            None => String::new(),
        };
        format!("{versions}{release}")
    }
}
