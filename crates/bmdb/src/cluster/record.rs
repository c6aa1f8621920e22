//! Cluster record: everything that is stored about a cluster and its machines.

use std::collections::BTreeSet;

use serde_json::Value;
use uuid::Uuid;

use crate::cluster::kubernetes::KubernetesRecord;
use crate::cluster::upgrade::UpgradeRecord;
use crate::connection::error::BmdbError;
use model::cluster::authority_rotation::{AuthorityProgress, AuthorityRotationOrder};
use model::cluster::authority_theft::AuthorityTheft;
use model::cluster::declaration::{DeclarationView, DesiredDeclaration, ServiceView};
use model::cluster::kubernetes::NodeKubernetes;
use model::cluster::plan::MachineLocations;
use model::cluster::secret_keys::SecretKeys;
use model::cluster::snapshot::ClusterSnapshots;
use model::cluster::spec::ClusterSpec;
use model::cluster::state::{
    Cluster, ClusterIdentity, ClusterMember, CuratorAnswer, PeerRenewal, PendingRestore,
};
use model::selector::traits::Hardware;
use model::time::Timestamp;

/// A cluster with everything that is stored about it.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterRecord {
    /// Id of the cluster's row.
    pub id: Uuid,
    /// The specification that operators ordered.
    pub spec: ClusterSpec,
    /// Version of the desired state; grows with every change.
    pub version: i64,
    /// When an operator created it.
    pub created_at: Timestamp,
    /// Name of the operator who created it.
    pub created_by: String,
    /// When its deletion was ordered, and by which operator.
    pub deleting: Option<(Timestamp, String)>,
    /// Its identity; `None` until it is founded.
    pub founded: Option<ClusterIdentity>,
    /// When a shepherd last examined it.
    pub polled_at: Option<Timestamp>,
    /// When its curators last answered.
    pub observed_at: Option<Timestamp>,
    /// Since when its curators have not answered any query; `None` while they answer.
    pub unreachable_since: Option<Timestamp>,
    /// What the cluster as a whole waits for.
    pub wait_reasons: Vec<String>,
    /// Whether it matched its specification when a shepherd last examined it.
    pub converged: bool,
    /// Voting members of etcd, and how many of them were reached.
    pub voters: Option<(i64, i64)>,
    /// Since when a member of etcd has had the alarm `NOSPACE`, by the last answer of its curators.
    pub etcd_full_since: Option<Timestamp>,
    /// State of its snapshots and of their schedule.
    pub snapshots: ClusterSnapshots,
    /// How often it was restored from a snapshot, counting a restore that is under way.
    pub epoch: u64,
    /// When it was last restored; `None` if never.
    pub restored_at: Option<Timestamp>,
    /// The restore that is ordered or under way.
    pub restoring: Option<PendingRestore>,
    /// The order for new certificates of etcd's members that is carried out.
    pub peer_renewal: Option<PeerRenewal>,
    /// The order to replace its authority that is carried out.
    pub authority_rotation: Option<AuthorityRotationOrder>,
    /// How far that order is, if it was given after a theft.
    pub authority_theft: Option<AuthorityTheft>,
    /// How far a replacement of its authority is, as its curators last reported; `None` without one.
    pub authority_progress: Option<AuthorityProgress>,
    /// The snapshot of the restore under way; `None` without one.
    pub restoring_from: Option<Uuid>,
    /// Operator who ordered the restore under way; `None` without one.
    pub restoring_by: Option<String>,
    /// Since when the shepherd's key for it is in force; `None` until it is founded.
    pub key_since: Option<Timestamp>,
    /// Operator who ordered that this key be replaced.
    pub key_rotation_requested_by: Option<String>,
    /// Since when its curators reject every key that the shepherd has.
    pub keys_rejected_since: Option<Timestamp>,
    /// The keys of its Kubernetes Secrets; `None` for a cluster of a release before them.
    pub secret_keys: Option<SecretKeys>,
    /// When the oldest snapshot of it was taken; `None` if none is stored.
    pub oldest_snapshot: Option<Timestamp>,
}

/// A machine of a cluster with everything that is stored about it there.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterMachineRecord {
    /// The membership as decisions need it.
    pub member: ClusterMember,
    /// Name of the machine's provider; `None` if it is in no list any more.
    pub provider: Option<String>,
    /// The machine's location as its provider reports it; `None` if unknown.
    pub location: Option<String>,
    /// Its hardware, as far as it was reported.
    pub hardware: Hardware,
    /// What it waits for.
    pub wait_reason: Option<String>,
    /// Its node, as the curators reported it at `observed_at`.
    pub node: Option<NodeRecord>,
    /// When its curator last answered.
    pub observed_at: Option<Timestamp>,
    /// Services of operators' roles on its node, as last reported.
    pub services: Vec<ServiceView>,
    /// Kubernetes on its node, as last reported.
    pub kubernetes: Option<NodeKubernetes>,
}

/// A node as it was last observed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRecord {
    /// The node's id in its cluster.
    pub id: String,
    /// `new`, `standby`, `up` or `decommissioned`.
    pub state: String,
    /// Names of the node's roles.
    pub roles: Vec<String>,
    /// `healthy`, `silent` or `unknown`.
    pub health: String,
}

/// A cluster and its machines.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterDetails {
    /// The cluster without its machines.
    pub cluster: ClusterRecord,
    /// Its machines, in the order in which they were chosen.
    pub machines: Vec<ClusterMachineRecord>,
    /// Roles that operators declared to it, in order of their names.
    pub declarations: Vec<DeclarationView>,
    /// Keys of nodes that left it, as far back as its snapshots go.
    pub departed_keys: BTreeSet<[u8; 32]>,
    /// Its desired Kubernetes; `None` without one.
    pub kubernetes: Option<KubernetesRecord>,
    /// The upgrade under way, or else the newest one.
    pub upgrade: Option<UpgradeRecord>,
}

impl ClusterDetails {
    /// The state that decisions need, with the curators' answer.
    #[must_use]
    pub fn planning_state(&self, view: CuratorAnswer) -> Cluster {
        let cluster = &self.cluster;
        Cluster {
            id: cluster.id,
            spec: cluster.spec.clone(),
            deleting: cluster.deleting.is_some(),
            identity: cluster.founded.clone(),
            epoch: cluster.epoch,
            restored_at: cluster.restored_at,
            restoring: cluster.restoring.clone(),
            peer_renewal: cluster.peer_renewal.clone(),
            authority_theft: cluster.authority_theft.clone(),
            declared_roles: self.declarations.iter().filter_map(parse_declared).collect(),
            kubernetes: self.kubernetes.as_ref().map(|line| line.desired.clone()),
            upgrade: (self.upgrade.as_ref())
                .filter(|line| line.ended.is_none())
                .map(|line| line.upgrade.clone()),
            members: self.machines.iter().map(|line| line.member.clone()).collect(),
            secret_keys: cluster.secret_keys.clone(),
            oldest_snapshot: cluster.oldest_snapshot,
            departed_keys: self.departed_keys.clone(),
            observed: view,
            etcd_full_since: cluster.etcd_full_since,
        }
    }

    /// The same without the addresses in the lists of these providers, at which nodes do not reach each other.
    #[must_use]
    pub fn without_listed_addresses(mut self, providers: &BTreeSet<String>) -> Self {
        for line in &mut self.machines {
            if line.provider.as_ref().is_some_and(|provider| providers.contains(provider)) {
                line.member.listed_address = None;
            }
        }
        self
    }

    /// Location of each of its machines.
    #[must_use]
    pub fn machine_locations(&self) -> MachineLocations {
        self.machines.iter().map(|line| (line.member.machine, line.location.clone())).collect()
    }
}

/// The desired state of a declared role.
fn parse_declared(kept: &DeclarationView) -> Option<DesiredDeclaration> {
    // The database holds 32 bytes.
    let digest = hex::decode(&kept.digest).ok()?.try_into().ok()?;
    Some(DesiredDeclaration { role: kept.role.clone(), digest, withdrawn: kept.withdrawn })
}

/// The columns of a cluster's specification.
pub(super) struct SpecColumns {
    pub(super) name: String,
    pub(super) control_plane: i64,
    pub(super) workers: i64,
    pub(super) selector: String,
    pub(super) roles: Value,
    pub(super) approval: String,
}

impl SpecColumns {
    pub(super) fn into_spec(self) -> Result<ClusterSpec, BmdbError> {
        let count =
            |what, count: i64| u32::try_from(count).map_err(|error| corrupt_error(what, &self.name, error));
        Ok(ClusterSpec {
            control_plane: count("control plane", self.control_plane)?,
            workers: count("number of workers", self.workers)?,
            selector: self.selector.parse().map_err(|error| corrupt_error("selector", &self.name, error))?,
            roles: json_strings(&self.roles).into_iter().collect(),
            approval: self.approval.parse().map_err(|error| corrupt_error("approval", &self.name, error))?,
            name: self.name,
        })
    }
}

fn corrupt_error(what: &str, name: &str, error: impl std::fmt::Display) -> BmdbError {
    BmdbError::Corrupt(format!("the {what} of cluster {name:?}: {error}"))
}

pub(crate) fn json_strings(value: &Value) -> Vec<String> {
    let items = value.as_array().into_iter().flatten();
    items.filter_map(|item| item.as_str().map(str::to_owned)).collect()
}
