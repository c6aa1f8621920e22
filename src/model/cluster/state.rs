//! What is known of a cluster at one time: what was asked for, its machines as the database has them, and its nodes as
//! its curators say.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use uuid::Uuid;

use crate::model::cluster::declared::{Declared, Digest, ServiceView};
use crate::model::cluster::kubernetes;
use crate::model::cluster::spec::{Part, Spec};
use crate::model::cluster::upgrade::Upgrade;
use crate::model::ids::MachineId;
use crate::model::phase::Phase;
use crate::model::process::UnknownName;
use crate::model::time::Timestamp;

/// The role of the control plane.
pub const CONSENSUS_MEMBER: &str = "consensus-member";

/// What a machine was asked last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// To be the first node.
    Found,
    /// To be one more.
    Join,
    /// To be none any more.
    Leave,
}

impl Wanted {
    /// All of them.
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

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Wanted {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|one| one.as_str() == name).ok_or_else(|| UnknownName {
            what: "order about a cluster",
            name: name.to_owned(),
            known: "found, join, leave",
        })
    }
}

/// An order that was given to a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// What.
    pub what: Wanted,
    /// Which of its orders; they grow.
    pub generation: i64,
    /// When.
    pub at: Timestamp,
}

/// Where a machine stands, as its agent said last.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Report {
    /// The newest order that it has.
    pub generation: i64,
    /// Its key as a node.
    pub key: Option<[u8; 32]>,
    /// The certificate of the authority of the cluster that it is a node of, DER.
    pub ca_certificate: Option<Vec<u8>>,
    /// Where other nodes reach it.
    pub address: Option<String>,
    /// What stands in its way.
    pub error: Option<String>,
    /// The highest epoch of its cluster that it has heard of.
    pub epoch: u64,
}

/// A machine of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Which.
    pub machine: MachineId,
    /// Its provider's name for it, for people.
    pub name: String,
    /// What it is for.
    pub part: Part,
    /// When it was chosen.
    pub chosen_at: Timestamp,
    /// The key that a person let in, if one did.
    pub approved: Option<[u8; 32]>,
    /// Why it is to leave, if it is.
    pub leaving: Option<String>,
    /// What it was asked last.
    pub asked: Option<Asked>,
    /// What it said last.
    pub report: Option<Report>,
    /// Where it is in its life as a machine.
    pub phase: Phase,
    /// Whether somebody retires it.
    pub retiring: bool,
}

impl Member {
    /// Its key as a node, as it reported it.
    #[must_use]
    pub fn key(&self) -> Option<[u8; 32]> {
        self.report.as_ref()?.key
    }

    /// Whether it was asked this, and has taken it.
    #[must_use]
    pub fn has_taken(&self, what: Wanted) -> bool {
        self.asked.is_some_and(|asked| {
            asked.what == what
                && self.report.as_ref().is_some_and(|report| report.generation == asked.generation)
        })
    }

    /// Whether nothing of a node is left on it, as it says.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.has_taken(Wanted::Leave) && self.key().is_none()
    }

    /// Whether whoever helps machines has given this one up.
    #[must_use]
    pub const fn is_given_up(&self) -> bool {
        matches!(self.phase, Phase::NeedsHuman | Phase::Quarantined | Phase::Retired)
    }
}

/// Where a node is in its life, as the curator says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeState {
    /// It registered and waits for approval.
    New,
    /// It is approved and has to take its certificate.
    Standby,
    /// It is part of the cluster.
    Up,
    /// It is so no more.
    Decommissioned,
}

impl NodeState {
    /// All of them.
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

/// How a node does, as the curator that leads says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Nobody listened for long enough.
    Unknown,
    /// It was not heard for this long.
    Silent(Duration),
    /// It is heard.
    Healthy,
}

impl Health {
    /// The name used in the database, which does not keep for how long.
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
pub struct Node {
    /// Its id.
    pub id: String,
    /// Its key.
    pub key: [u8; 32],
    /// The machine that it said to be.
    pub machine: Option<MachineId>,
    /// Where it is in its life.
    pub state: NodeState,
    /// Its roles.
    pub roles: BTreeSet<String>,
    /// How it does.
    pub health: Health,
    /// What it runs of operators' roles, as it said last.
    pub services: Vec<ServiceView>,
    /// What it runs of Kubernetes, as it said last.
    pub kubernetes: Option<kubernetes::OnNode>,
}

impl Node {
    /// Whether it runs a control plane.
    #[must_use]
    pub fn is_member(&self) -> bool {
        self.roles.contains(CONSENSUS_MEMBER)
    }
}

/// A member of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdMember {
    /// Its node; none when it has not started yet.
    pub node: Option<String>,
    /// Whether it has no vote yet.
    pub learner: bool,
    /// Whether the leader reaches it.
    pub reachable: bool,
}

/// What the curator that leads said.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Seen {
    /// Every node.
    pub nodes: Vec<Node>,
    /// Every member of etcd.
    pub etcd: Vec<EtcdMember>,
    /// Roles that are declared, by what they are known.
    pub declared: BTreeMap<String, Digest>,
    /// What they have of Kubernetes.
    pub kubernetes: kubernetes::Known,
}

impl Seen {
    /// The node that has this key.
    #[must_use]
    pub fn node_of(&self, key: &[u8; 32]) -> Option<&Node> {
        self.nodes.iter().find(|node| node.key == *key)
    }

    /// How many members of etcd there are, and how many of them vote and are reached.
    #[must_use]
    pub fn votes(&self) -> (usize, usize) {
        let voters = self.etcd.iter().filter(|member| !member.learner);
        (voters.clone().count(), voters.filter(|member| member.reachable).count())
    }
}

/// What is known of a cluster's nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(
    clippy::large_enum_variant,
    reason = "there is one in a pass over a cluster, and most have the largest"
)]
pub enum View {
    /// There is nobody to ask yet.
    Nobody,
    /// Nobody answered, and why.
    Away(String),
    /// As the leader said.
    Seen(Seen),
}

/// By what the cluster is known since it was founded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Founded {
    /// The certificate of its authority, DER.
    pub ca_certificate: Vec<u8>,
    /// `host:port` of curators.
    pub curators: Vec<String>,
    /// When.
    pub at: Timestamp,
}

/// That the cluster is to be brought back from a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restoring {
    /// Since when. Whoever was of the control plane before is of the old one.
    pub since: Timestamp,
    /// The machine that is to restore it, if a person said one.
    pub onto: Option<MachineId>,
    /// SHA-256 of the snapshot; none when that is not kept any more.
    pub digest: Option<Digest>,
}

/// A cluster at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Its id.
    pub id: Uuid,
    /// What it is to be.
    pub spec: Spec,
    /// Whether it is to end.
    pub deleting: bool,
    /// By what it is known, once it is founded.
    pub founded: Option<Founded>,
    /// How often it was restored, or is to have been.
    pub epoch: u64,
    /// When it was restored last.
    pub restored_at: Option<Timestamp>,
    /// Whether it is to be brought back.
    pub restoring: Option<Restoring>,
    /// Roles that operators declared to it.
    pub declared: Vec<Declared>,
    /// What is wanted of Kubernetes.
    pub kubernetes: Option<kubernetes::Wanted>,
    /// The upgrade that is under way.
    pub upgrade: Option<Upgrade>,
    /// Its machines, in the order in which they were chosen.
    pub members: Vec<Member>,
    /// Keys of nodes that left it, as far back as its snapshots go: one that is restored brings them back.
    pub left: BTreeSet<Digest>,
    /// Its nodes.
    pub view: View,
}

impl Cluster {
    /// One that was just asked for, and has nothing yet.
    #[must_use]
    pub fn asked_for(id: Uuid, spec: Spec) -> Self {
        Self {
            id,
            spec,
            deleting: false,
            founded: None,
            epoch: 0,
            restored_at: None,
            restoring: None,
            declared: Vec::new(),
            kubernetes: None,
            upgrade: None,
            members: Vec::new(),
            left: BTreeSet::new(),
            view: View::Nobody,
        }
    }

    /// How many machines it lacks of a part; those that leave do not count.
    #[must_use]
    pub fn lacks(&self, part: Part) -> u32 {
        let staying = self.members.iter().filter(|member| member.part == part && member.leaving.is_none());
        let staying = u32::try_from(staying.count()).unwrap_or(u32::MAX);
        if self.deleting { 0 } else { self.spec.wanted(part).saturating_sub(staying) }
    }
}

/// A machine that may be chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Which.
    pub machine: MachineId,
    /// Its provider's name for it, for people.
    pub name: String,
    /// Where it stands, if that is known.
    pub location: Option<String>,
}
