//! Kubernetes of a cluster and its upgrades as people see them: the same from the database and through the API.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::cluster::kubernetes::{Has, Kubernetes, Rotation, Storage, is_told};
use crate::model::time::Timestamp;

/// What the curators of a cluster said of its Kubernetes last.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Known {
    /// Whether they have what is wanted.
    pub told: bool,
    /// Bundles of nodes that were given one of their own, by node id.
    pub assigned: BTreeMap<String, String>,
    /// What is being replaced.
    pub rotations: Vec<Rotation>,
    /// `host:port` of API servers.
    pub api_servers: Vec<String>,
}

impl Known {
    /// What is kept of what they said.
    #[must_use]
    pub fn of(wanted: &Kubernetes, has: &Has) -> Self {
        Self {
            told: is_told(wanted, has),
            assigned: has.assigned.clone(),
            rotations: has.rotations.clone(),
            api_servers: has.api_servers.clone(),
        }
    }
}

/// Kubernetes of a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KubernetesView {
    /// SHA-256 of its bundle, 64 hexadecimal digits.
    pub bundle: String,
    /// Version of Kubernetes in that.
    pub version: String,
    /// From which services get their addresses.
    pub service_range: String,
    /// From which nodes get theirs for pods.
    pub pod_range: String,
    /// How long the prefix of one node's range is.
    pub node_prefix: u32,
    /// In which services have names.
    pub domain: String,
    /// Digests of files with objects, by names.
    pub add_ons: BTreeMap<String, String>,
    /// Who makes volumes.
    pub storage: Option<Storage>,
    /// When it was asked for.
    pub asked_at: Timestamp,
    /// By whom.
    pub asked_by: String,
    /// Who said that it is to go.
    pub removing_by: Option<String>,
    /// What is to be replaced, as long as no curator was told.
    pub rotate: Vec<String>,
    /// What the curators said last.
    pub known: Known,
}

/// An upgrade of a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UpgradeView {
    /// Its id.
    pub id: String,
    /// SHA-256 of the bundle before, and the version in it.
    pub from: Option<BundleView>,
    /// Of the bundle after.
    pub to: Option<BundleView>,
    /// Name of the release that role servers become first.
    pub release: Option<String>,
    /// The roll-out of that.
    pub roll_out: Option<String>,
    /// Whether they are through.
    pub released: bool,
    /// Whether it goes back.
    pub back: bool,
    /// How many workers at a time.
    pub parallelism: u32,
    /// How long a node may take, in seconds.
    pub deadline_seconds: u32,
    /// When it was ordered.
    pub created_at: Timestamp,
    /// By whom.
    pub created_by: String,
    /// Why.
    pub reason: String,
    /// Why it stands still.
    pub paused: Option<String>,
    /// When it ended.
    pub ended_at: Option<Timestamp>,
    /// How: `finished`, `rolled back` or `aborted`.
    pub ended: Option<String>,
    /// Nodes that were asked on the way that it goes now.
    pub asked: u32,
    /// How many of them are through.
    pub through: u32,
}

/// A bundle.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BundleView {
    /// SHA-256, 64 hexadecimal digits.
    pub sha256: String,
    /// Version of Kubernetes in it.
    pub version: String,
}

impl UpgradeView {
    /// What it is, in a line without an end.
    #[must_use]
    pub fn line(&self) -> String {
        let versions = match (&self.from, &self.to) {
            (Some(from), Some(to)) if self.back => {
                format!("back from Kubernetes {} to {}", to.version, from.version)
            }
            (Some(from), Some(to)) => format!("from Kubernetes {} to {}", from.version, to.version),
            _ => "of its role servers alone".to_owned(),
        };
        let release = match &self.release {
            Some(release) if self.back => format!(" (role servers stay at {release})"),
            Some(release) if self.released => format!(", role servers are at {release}"),
            Some(release) => format!(", role servers to {release} first"),
            None => String::new(),
        };
        format!("{versions}{release}")
    }
}
