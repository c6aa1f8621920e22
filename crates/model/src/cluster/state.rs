//! Cluster state: spec, members from the database, nodes from the curators.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use uuid::Uuid;

use crate::cluster::authority_rotation::ObservedAuthority;
use crate::cluster::authority_theft::{AuthorityStep, AuthorityTheft};
use crate::cluster::declaration::{DesiredDeclaration, Digest, ServiceView};
use crate::cluster::kubernetes;
use crate::cluster::node_address::{AssignedAddress, NodeAddresses};
use crate::cluster::restore_programs::EtcdPrograms;
use crate::cluster::secret_keys::{SecretKeys, SecretsReport};
use crate::cluster::spec::{ClusterPart, ClusterSpec};
use crate::cluster::upgrade::ClusterUpgrade;
use crate::ids::MachineId;
use crate::phase::Phase;
use crate::process::UnknownName;
use crate::time::Timestamp;

/// Role of control plane nodes: a member of etcd and a curator.
pub const CONSENSUS_MEMBER_ROLE: &str = "consensus-member";

/// An order about a machine's membership of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MembershipOrder {
    /// Found the cluster as its first node.
    Found,
    /// Join the cluster as another node.
    Join,
    /// Leave the cluster and stop being a node.
    Leave,
}

impl MembershipOrder {
    /// All kinds of membership orders.
    pub const ALL: [Self; 3] = [Self::Found, Self::Join, Self::Leave];

    /// The name used in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Found => "found",
            Self::Join => "join",
            Self::Leave => "leave",
        }
    }
}

impl fmt::Display for MembershipOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for MembershipOrder {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|one| one.as_str() == name).ok_or_else(|| UnknownName {
            what: "order about a cluster",
            name: name.to_owned(),
            known: "found, join, leave",
        })
    }
}

/// The last membership order of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastOrder {
    /// What the machine has to do.
    pub order: MembershipOrder,
    /// Number of the order; each order of a machine has a larger one.
    pub generation: i64,
    /// When the order was sent.
    pub sent_at: Timestamp,
}

/// State of a machine as a node, from its agent's last report.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct MemberReport {
    /// Generation of the newest order that the machine has taken.
    pub generation: i64,
    /// Public key of its node; `None` while it is not a node.
    pub key: Option<[u8; 32]>,
    /// Certificate of the authority of the cluster whose node it is (DER).
    pub ca_certificate: Option<Vec<u8>>,
    /// Address at which other nodes reach it.
    pub address: Option<String>,
    /// Error that keeps it from executing its order.
    pub error: Option<String>,
    /// The highest epoch of its cluster that it has learned of.
    pub epoch: u64,
    /// Certificate of the authority that replaces the present one after a theft (DER).
    pub next_authority: Option<Vec<u8>>,
    /// The last step of that replacement that it has taken.
    pub next_authority_step: Option<AuthorityStep>,
    /// The versions of etcd and etcdutl on it.
    pub programs: EtcdPrograms,
    /// How it encrypts Kubernetes Secrets; `None` if its role server is of a release that does not.
    pub secrets: Option<SecretsReport>,
}

/// A machine that belongs to the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterMember {
    /// Identifier of the machine.
    pub machine: MachineId,
    /// The provider's name for the machine, for people.
    pub name: String,
    /// Its part in the cluster.
    pub part: ClusterPart,
    /// When it was chosen.
    pub chosen_at: Timestamp,
    /// The key that a person approved, if one did.
    pub approved_key: Option<[u8; 32]>,
    /// Why it has to leave; `None` if it stays.
    pub leave_reason: Option<String>,
    /// Its last order, if it got one.
    pub last_order: Option<LastOrder>,
    /// Its last report, if it sent one.
    pub report: Option<MemberReport>,
    /// Phase of the machine.
    pub phase: Phase,
    /// Whether an operator retires it.
    pub retiring: bool,
    /// Whether the order by which it leaves keeps the authority of the cluster.
    pub keep_authority: bool,
    /// Its address in the provider's list, if other nodes reach it there.
    pub listed_address: Option<IpAddr>,
}

impl ClusterMember {
    /// The key of its node, from its report.
    #[must_use]
    pub fn key(&self) -> Option<[u8; 32]> {
        self.report.as_ref()?.key
    }

    /// Whether this was its last order and it has taken it.
    #[must_use]
    pub fn has_acknowledged(&self, what: MembershipOrder) -> bool {
        self.last_order.is_some_and(|order| {
            order.order == what
                && self.report.as_ref().is_some_and(|report| report.generation == order.generation)
        })
    }

    /// Whether it reports that nothing of its node is left.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.has_acknowledged(MembershipOrder::Leave) && self.key().is_none()
    }

    /// Whether the control loops have given the machine up: it needs a person, is quarantined or is retired.
    #[must_use]
    pub const fn is_given_up(&self) -> bool {
        matches!(self.phase, Phase::NeedsHuman | Phase::Quarantined | Phase::Retired)
    }
}

/// State of a node, as the curator reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeState {
    /// It registered and waits for approval.
    New,
    /// It is approved and has to take its certificate.
    Standby,
    /// It is part of the cluster.
    Up,
    /// It was removed from the cluster for ever.
    Decommissioned,
}

impl NodeState {
    /// All states of a node.
    pub const ALL: [Self; 4] = [Self::New, Self::Standby, Self::Up, Self::Decommissioned];

    /// The name used in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Standby => "standby",
            Self::Up => "up",
            Self::Decommissioned => "decommissioned",
        }
    }
}

/// Health of a node, as the leading curator reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeHealth {
    /// The leading curator has not listened for long enough to tell.
    Unknown,
    /// It has not reported to the curator for this long.
    Silent(Duration),
    /// It reports to the curator.
    Healthy,
}

impl NodeHealth {
    /// The name used in the database, which does not store the duration.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Silent(_) => "silent",
            Self::Healthy => "healthy",
        }
    }
}

/// A node of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterNode {
    /// ID of the node, from the curators.
    pub id: String,
    /// Public key of the node.
    pub key: [u8; 32],
    /// The machine that the node claims to run on.
    pub machine: Option<MachineId>,
    /// State of the node in its life cycle.
    pub state: NodeState,
    /// Names of the roles that it has.
    pub roles: BTreeSet<String>,
    /// Health by the leading curator.
    pub health: NodeHealth,
    /// Services of operators' roles, from its last report.
    pub services: Vec<ServiceView>,
    /// Kubernetes on it, from its last report.
    pub kubernetes: Option<kubernetes::NodeKubernetes>,
    /// Its addresses, as its curators have them.
    pub addresses: NodeAddresses,
}

impl ClusterNode {
    /// Whether it has the role of a control plane node.
    #[must_use]
    pub fn is_etcd_member(&self) -> bool {
        self.roles.contains(CONSENSUS_MEMBER_ROLE)
    }
}

/// A member of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdMember {
    /// ID of its node; `None` while the member has not started.
    pub node: Option<String>,
    /// Whether it has no vote yet.
    pub learner: bool,
    /// Whether the leader reaches it.
    pub reachable: bool,
}

/// The size of its database file from which etcd accepts no writes, unless it reports another one. It is etcd's own limit,
/// because it is started without another one.
pub const MAX_ETCD_BYTES: u64 = 2 << 30;

/// A cluster as its leading curator reports it.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ObservedCluster {
    /// All nodes that the curator has a record of.
    pub nodes: Vec<ClusterNode>,
    /// All members of etcd.
    pub etcd_members: Vec<EtcdMember>,
    /// Size of the database file of the leader's own member of etcd; `None` if curators of an earlier release lead.
    pub etcd_bytes: Option<u64>,
    /// Size of that file from which etcd accepts no writes; `None` if the curators do not report it.
    pub etcd_quota_bytes: Option<u64>,
    /// Whether a member of etcd has the alarm `NOSPACE`. Curators of an earlier release report none.
    pub is_etcd_full: bool,
    /// Digests of declared roles, by role.
    pub declared_digests: BTreeMap<String, Digest>,
    /// What the curators have of Kubernetes.
    pub kubernetes: kubernetes::ObservedKubernetes,
    /// The authority of the cluster.
    pub authority: ObservedAuthority,
}

impl ObservedCluster {
    /// The node with this key, if there is one.
    #[must_use]
    pub fn node_by_key(&self, key: &[u8; 32]) -> Option<&ClusterNode> {
        self.nodes.iter().find(|node| node.key == *key)
    }

    /// The number of voting members of etcd, and how many of them are reached.
    #[must_use]
    pub fn vote_counts(&self) -> (usize, usize) {
        let voters = self.etcd_members.iter().filter(|member| !member.learner);
        (voters.clone().count(), voters.filter(|member| member.reachable).count())
    }
}

/// Result of a query of the curators.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(
    clippy::large_enum_variant,
    reason = "there is one in a pass over a cluster, and most have the largest"
)]
pub enum CuratorAnswer {
    /// There is no curator to query yet.
    NotQueried,
    /// No curator answered; the text is the reason.
    Unreachable(String),
    /// The answer of the leading curator.
    Observed(ObservedCluster),
}

/// Identity of a cluster since it was founded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterIdentity {
    /// Certificate of its authority (DER).
    pub ca_certificate: Vec<u8>,
    /// `host:port` of its curators.
    pub curators: Vec<String>,
    /// When the cluster was founded.
    pub founded_at: Timestamp,
}

/// A pending restore of the cluster from a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingRestore {
    /// When the restore was requested. Members that were chosen before belong to the old control plane.
    pub requested_at: Timestamp,
    /// The machine that has to restore it, if the operator named one.
    pub target_machine: Option<MachineId>,
    /// SHA-256 of the snapshot; `None` if it is no longer stored.
    pub digest: Option<Digest>,
    /// The image of etcd to restore with it; `None` if the objects of Kubernetes are not restored.
    pub image: Option<StoredImage>,
}

/// The image of etcd that a cluster is restored with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredImage {
    /// SHA-256 of the image; `None` if it is no longer stored.
    pub digest: Option<Digest>,
    /// Version of the etcd that sent it.
    pub etcd_version: String,
}

/// An order that the members of the control plane get new certificates for etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRenewal {
    /// When it was requested. A certificate that was sent before does not count.
    pub requested_at: Timestamp,
    /// Name of the operator who requested it.
    pub requested_by: String,
}

/// Everything known of a cluster at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// UUID of the cluster.
    pub id: Uuid,
    /// Desired state, as the operator set it.
    pub spec: ClusterSpec,
    /// Whether it is being deleted.
    pub deleting: bool,
    /// Its identity; `None` until it is founded.
    pub identity: Option<ClusterIdentity>,
    /// How often it was restored, including a pending restore.
    pub epoch: u64,
    /// When it was last restored.
    pub restored_at: Option<Timestamp>,
    /// The pending restore, if there is one.
    pub restoring: Option<PendingRestore>,
    /// The order for new certificates of etcd's members that is carried out.
    pub peer_renewal: Option<PeerRenewal>,
    /// The order to replace its authority after a theft that is carried out.
    pub authority_theft: Option<AuthorityTheft>,
    /// Roles that operators declared to it.
    pub declared_roles: Vec<DesiredDeclaration>,
    /// Desired state of its Kubernetes.
    pub kubernetes: Option<kubernetes::DesiredKubernetes>,
    /// The upgrade that is under way.
    pub upgrade: Option<ClusterUpgrade>,
    /// The keys of its Kubernetes Secrets; `None` for a cluster of a release before them.
    pub secret_keys: Option<SecretKeys>,
    /// When the oldest snapshot of it was taken; `None` if none is stored.
    pub oldest_snapshot: Option<Timestamp>,
    /// Its machines, in the order in which they were chosen.
    pub members: Vec<ClusterMember>,
    /// Keys of nodes that left it, as far back as its snapshots go: a restore may bring these nodes back.
    pub departed_keys: BTreeSet<Digest>,
    /// Result of the last query of its curators.
    pub observed: CuratorAnswer,
    /// Since when its etcd has been full, by the last answer of its curators.
    pub etcd_full_since: Option<Timestamp>,
}

impl Cluster {
    /// A newly requested cluster without members.
    #[must_use]
    pub fn new(id: Uuid, spec: ClusterSpec) -> Self {
        Self {
            id,
            spec,
            deleting: false,
            identity: None,
            epoch: 0,
            restored_at: None,
            restoring: None,
            peer_renewal: None,
            authority_theft: None,
            declared_roles: Vec::new(),
            kubernetes: None,
            upgrade: None,
            secret_keys: None,
            oldest_snapshot: None,
            members: Vec::new(),
            departed_keys: BTreeSet::new(),
            observed: CuratorAnswer::NotQueried,
            etcd_full_since: None,
        }
    }

    /// Whether a member of its etcd has the alarm `NOSPACE`. While no curator answers, their last answer counts: none can
    /// be elected before the alarm has ended. A cluster that is restored gets another etcd.
    #[must_use]
    pub const fn is_etcd_full(&self) -> bool {
        match &self.observed {
            CuratorAnswer::Observed(seen) => seen.is_etcd_full,
            CuratorAnswer::Unreachable(_) => self.etcd_full_since.is_some(),
            CuratorAnswer::NotQueried => false,
        }
    }

    /// The address that an order names for a machine: the one in its provider's list, unless its node is up without it and
    /// without an assigned address. Nodes may not reach each other at the address in the list, and the curators would refuse
    /// the report of a node that takes it.
    #[must_use]
    pub fn ordered_address(&self, machine: MachineId) -> Option<IpAddr> {
        let member = self.members.iter().find(|member| member.machine == machine)?;
        let listed = member.listed_address?;
        let node = match &self.observed {
            CuratorAnswer::Observed(seen) => {
                let key = member.report.as_ref().and_then(|report| report.key);
                key.and_then(|key| seen.node_by_key(&key))
            }
            CuratorAnswer::NotQueried | CuratorAnswer::Unreachable(_) => None,
        };
        let keeps_own = node.is_some_and(|node| {
            node.state == NodeState::Up
                && !matches!(node.addresses.assigned, AssignedAddress::Address(_))
                && node.addresses.recorded.is_none_or(|recorded| recorded != listed)
        });
        (!keeps_own).then_some(listed)
    }

    /// How many machines of a part are missing; machines that leave do not count as present.
    #[must_use]
    pub fn missing_members(&self, part: ClusterPart) -> u32 {
        let staying =
            self.members.iter().filter(|member| member.part == part && member.leave_reason.is_none());
        let staying = u32::try_from(staying.count()).unwrap_or(u32::MAX);
        if self.deleting { 0 } else { self.spec.desired_count(part).saturating_sub(staying) }
    }
}

/// A machine that may be chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CandidateMachine {
    /// Identifier of the machine.
    pub machine: MachineId,
    /// The provider's name for it, for people.
    pub name: String,
    /// Location of the machine; `None` if unknown.
    pub location: Option<String>,
    /// The versions of etcd and etcdutl on it.
    pub programs: EtcdPrograms,
}
