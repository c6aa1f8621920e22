//! A cluster as commands print it for people, with times in place of the timestamps of the API.

use std::collections::BTreeMap;

use model::cluster::authority_rotation::AuthorityWait;
use model::cluster::declaration::{DeclarationView, ServiceView};
use model::cluster::kubernetes::{ComponentStatus, ObjectConflict, VolumeDriver};
use model::time::Timestamp;

/// A cluster, as the tables and the page of `cluster describe` print it.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterView {
    /// Name of the cluster.
    pub name: String,
    /// UUID of the cluster.
    pub id: String,
    /// Stage: `waiting for machines`, `founding`, `changing`, `converged`, `restoring` or `deleting`.
    pub stage: String,
    /// Desired number of etcd members.
    pub control_plane: u32,
    /// Desired number of other nodes.
    pub workers: u32,
    /// Which machines may be chosen, as text.
    pub selector: String,
    /// Roles of every worker.
    pub roles: Vec<String>,
    /// Approval of keys: `automatic` or `manual`.
    pub approval: String,
    /// When the cluster was requested.
    pub created_at: Timestamp,
    /// Operator who requested the cluster.
    pub created_by: String,
    /// Operator who requested its deletion; `None` if it stays.
    pub deletion_requested_by: Option<String>,
    /// `host:port` of its curators.
    pub curators: Vec<String>,
    /// When its curators last answered.
    pub observed_at: Option<Timestamp>,
    /// Number of voting members of etcd, by the last answer of the curators.
    pub voters: Option<u32>,
    /// How many of them were reached.
    pub voters_reached: Option<u32>,
    /// When its last snapshot was taken.
    pub snapshot_at: Option<Timestamp>,
    /// How often it was restored, including a pending restore.
    pub epoch: u64,
    /// When it was last restored.
    pub restored_at: Option<Timestamp>,
    /// The snapshot from which it is being restored.
    pub restoring_from: Option<String>,
    /// Operator who requested the pending restore.
    pub restore_requested_by: Option<String>,
    /// When the shepherd's current owner key became the current one.
    pub key_since: Option<Timestamp>,
    /// Operator who ordered a rotation of that key, if one is pending.
    pub key_rotation_requested_by: Option<String>,
    /// When its curators began to refuse every owner key of the shepherd.
    pub keys_rejected_since: Option<Timestamp>,
    /// What the cluster as a whole waits for.
    pub wait_reasons: Vec<String>,
    /// Its machines, in the order in which they were chosen.
    pub machines: Vec<ClusterMachineView>,
    /// Declared roles, ordered by name.
    pub declarations: Vec<DeclarationView>,
    /// Its Kubernetes: desired spec and observed status.
    pub kubernetes: Option<KubernetesView>,
    /// The upgrade that is under way, or else the newest one.
    pub upgrade: Option<UpgradeView>,
    /// The replacement of its authority that is ordered or under way.
    pub authority_rotation: Option<AuthorityRotationView>,
    /// The encryption of its Kubernetes Secrets; `None` for a cluster of a release before it.
    pub secrets_encryption: Option<SecretsEncryptionView>,
}

/// The encryption of a cluster's Kubernetes Secrets.
#[derive(Clone, Debug, PartialEq)]
pub struct SecretsEncryptionView {
    /// Stage: `new`, `prepared`, `reading`, `writing`, `rewriting` or `settled`.
    pub stage: String,
    /// When the stage began.
    pub since: Timestamp,
    /// Name of the key that writes; `None` while Secrets are stored in plain text.
    pub key: Option<String>,
    /// Operator who ordered another key, if that is pending or under way.
    pub rotation_ordered_by: Option<String>,
}

/// A replacement of a cluster's authority.
#[derive(Clone, Debug, PartialEq)]
pub struct AuthorityRotationView {
    /// `planned` or `compromised`; `None` if no operator ordered it.
    pub kind: Option<String>,
    /// When an operator ordered it.
    pub ordered_at: Option<Timestamp>,
    /// Operator who ordered it.
    pub ordered_by: Option<String>,
    /// Stage by the last answer of the curators: `trusted`, `signing` or `dropping`; `None` until it has begun.
    pub stage: Option<String>,
    /// When the stage began.
    pub since: Option<Timestamp>,
    /// Nodes that the stage waits for.
    pub waits_for: Vec<AuthorityWait>,
}

/// A machine of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterMachineView {
    /// UUID of the machine.
    pub machine: String,
    /// The provider's name for it.
    pub name: String,
    /// Part in the cluster: `control-plane` or `worker`.
    pub part: String,
    /// Location of the machine; `None` if unknown.
    pub location: Option<String>,
    /// Phase of the machine.
    pub phase: String,
    /// ID of its node; `None` while it is not a node.
    pub node: Option<String>,
    /// State of the node by its curator: `new`, `standby`, `up` or `decommissioned`.
    pub state: Option<String>,
    /// Health of the node by its curator: `healthy`, `silent` or `unknown`.
    pub health: Option<String>,
    /// Roles of its node.
    pub roles: Vec<String>,
    /// Why it leaves; `None` if it stays.
    pub leave_reason: Option<String>,
    /// What it waits for; `None` if it waits for nothing.
    pub wait_reason: Option<String>,
    /// Services of operators' roles on it.
    pub services: Vec<ServiceView>,
    /// Kubernetes on it, from its node's last report.
    pub kubernetes: Option<NodeKubernetesView>,
}

impl ClusterView {
    /// How many of its machines are healthy nodes.
    #[must_use]
    pub fn healthy_nodes(&self) -> usize {
        self.machines.iter().filter(|machine| machine.health.as_deref() == Some("healthy")).count()
    }
}

/// Kubernetes of a cluster: desired spec and observed status.
#[derive(Clone, Debug, PartialEq)]
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
    pub status: KubernetesStatus,
}

/// Kubernetes of a cluster by the last answer of its curators.
#[derive(Clone, Debug, PartialEq)]
pub struct KubernetesStatus {
    /// Whether the curators have the desired spec.
    pub in_sync: bool,
    /// Bundles assigned to single nodes, by node id.
    pub assigned_bundles: BTreeMap<String, String>,
    /// Rotations of keys that are under way.
    pub rotations: Vec<KeyRotationView>,
    /// `host:port` of API servers.
    pub api_servers: Vec<String>,
}

/// A rotation of keys that is under way.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyRotationView {
    /// The keys, as `cluster kubernetes rotate` names them.
    pub keys: String,
    /// Stage of the rotation: `trusted` or `signing`.
    pub stage: String,
    /// When the stage began, if that is known.
    pub since: Option<Timestamp>,
    /// Nodes that do not act on this stage yet.
    pub waits_for: Vec<String>,
    /// When everything that the old key signed has expired; `None`: the stage does not wait for that.
    pub until: Option<Timestamp>,
    /// Nodes that block the rotation now: no further node is notified meanwhile.
    pub blocked_by: Vec<String>,
    /// When a node was last notified of this stage; `None` if none was yet.
    pub notified_at: Option<Timestamp>,
}

/// Kubernetes of one node, from the node's last report.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeKubernetesView {
    /// SHA-256 of the node's bundle; empty while nothing runs.
    pub bundle: String,
    /// Version of Kubernetes in the bundle.
    pub version: String,
    /// Its components, ordered by name.
    pub components: Vec<ComponentStatus>,
    /// What the node as a whole waits for; empty if it waits for nothing.
    pub wait_reason: String,
    /// Whether this node maintains the built-in objects.
    pub is_reconciler: bool,
    /// Objects that it could not create because objects of others are in the way.
    pub conflicts: Vec<ObjectConflict>,
}

/// An upgrade of a cluster.
#[derive(Clone, Debug, PartialEq)]
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
#[derive(Clone, Debug, PartialEq, Eq)]
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
