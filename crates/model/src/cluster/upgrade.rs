//! Cluster upgrade: its record, and the progress of its nodes and role servers.
//!
//! Between two passes only this is stored: which nodes were requested, when, and which of them have finished. The next
//! steps follow from that record and the observed cluster ([`plan::upgrade`][crate::cluster::plan::upgrade]).

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::time::Timestamp;

/// Most workers that may be upgraded at a time.
pub const MAX_PARALLELISM: u32 = 50;
/// Permitted deadlines of a node, in seconds.
pub const NODE_DEADLINE_RANGE_SECONDS: std::ops::RangeInclusive<u32> = 5..=7_200;
/// Default deadline of a node in seconds: to fetch a bundle, to drain and to start.
pub const DEFAULT_NODE_DEADLINE_SECONDS: u32 = 900;

/// A bundle before or after an upgrade.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundleRef {
    /// SHA-256 of the bundle, 64 hexadecimal digits.
    pub digest: String,
    /// Version of Kubernetes in it.
    pub version: String,
}

/// An upgrade that is under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterUpgrade {
    /// ID of the upgrade, 8 hexadecimal digits.
    pub id: String,
    /// The bundles before and after; `None` if only role servers are upgraded.
    pub bundles: Option<(BundleRef, BundleRef)>,
    /// Whether the upgrade is being rolled back.
    pub rolling_back: bool,
    /// How many workers are upgraded at a time.
    pub parallelism: usize,
    /// How long a node may take.
    pub node_deadline: Duration,
    /// Why it is paused; `None` while it proceeds.
    pub pause_reason: Option<String>,
    /// Roll-out of the role servers' release; `None` if there is none, or if it is over.
    pub release: Option<ReleaseProgress>,
    /// Another roll-out that has sent an order to a machine of this cluster, if there is one.
    pub conflicting_roll_out: Option<String>,
    /// Nodes that were requested in the present direction, by ID.
    pub requested_nodes: BTreeMap<String, NodeUpgrade>,
}

/// Progress of the roll-out of the role servers' release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReleaseProgress {
    /// ID of the roll-out.
    pub roll_out: String,
    /// Why it is paused; `None` while it proceeds.
    pub pause_reason: Option<String>,
    /// How it ended, and how many machines failed in it; `None` until it has ended.
    pub outcome: Option<(String, u32)>,
}

/// Record of a node that has to run the bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeUpgrade {
    /// When the node was requested.
    #[serde(rename = "at")]
    pub requested_at: Timestamp,
    /// Whether it has finished.
    #[serde(rename = "through")]
    pub is_done: bool,
}

/// A change of an upgrade's record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UpgradeEvent {
    /// A node has finished.
    NodeDone {
        /// ID of the node.
        node: String,
    },
    /// The upgrade pauses until a person decides.
    Pause {
        /// Reason for the pause, a sentence.
        reason: String,
    },
    /// The roll-out of role servers is over.
    ReleaseDone,
    /// The upgrade has finished.
    Finish,
}
