//! Reconciles etcd's members with node records, one change at a time, never below quorum.
//!
//! Two sources define who runs etcd: etcd itself, and the role in each node's record. They are written one after the
//! other, so a leader that dies in between leaves them different. Its successor compares them at every tick and makes
//! *one* change; the next tick sees the result. etcd is authoritative:
//!
//! 1. A member is removed if it belongs to no node, if its node has no record, is not up, or has another member.
//! 2. A node that is a member and has no role, or the role of an earlier membership, gets the role. So does a node
//!    whose member has not started while other members came or went, because etcd starts only with the current list of
//!    members.
//! 3. A node that has the role and is no member loses the role, and with it the role of Kubernetes controller.
//!
//! No order overrides the quorum rule: a member that votes is removed only if enough of the voters that remain are
//! started and reachable to be their quorum. etcd has a similar check, but counts members that *were* started, and so
//! would let two dead members outvote the last living one.
//!
//! A member list that lacks the leader which reads it is stale or belongs to another cluster. It is not acted on.
//!
//! A member joins without a vote, as a learner, and etcd accepts one learner at a time. It gets its vote once it is
//! started and reachable, if its node is still up, and if a quorum of the voters, itself included, is then reachable.
//! The curator whose etcd leads gives it the vote, whichever curator leads.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use curator_client::node::{ConsensusMember, Node, NodeRoles, NodeState};
use curator_client::node_id::NodeId;

/// The port on which etcd members reach each other.
const PEER_PORT: u16 = 7834;

/// The peer URL of a member at this address.
#[must_use]
pub fn peer_url(address: IpAddr) -> String {
    format!("https://{}", std::net::SocketAddr::new(address, PEER_PORT))
}

/// A member of etcd, as a running member lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdMember {
    /// etcd's number for this membership.
    pub id: u64,
    /// The name it started with: its node's id. Empty before it ever started.
    pub name: String,
    /// Peer URLs of the member, at which other members reach it.
    pub peer_urls: Vec<String>,
    /// Whether it has no vote yet.
    pub learner: bool,
    /// Whether the member that listed it exchanges messages with it; true for itself.
    pub reachable: bool,
}

impl EtcdMember {
    /// Whether it ever started.
    #[must_use]
    pub const fn has_started(&self) -> bool {
        !self.name.is_empty()
    }

    const fn is_active(&self) -> bool {
        self.has_started() && self.reachable
    }
}

/// Nodes by their ids, all read at one revision.
pub type Nodes = BTreeMap<NodeId, Node>;

/// Members by the nodes they belong to, and members that belong to no node.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct MemberOwners<'a> {
    /// One member of each node.
    pub by_node: BTreeMap<NodeId, &'a EtcdMember>,
    /// Members that cannot be matched to a node, or whose node has another member.
    pub stray: Vec<&'a EtcdMember>,
}

/// Matches members to nodes.
///
/// A member that has started has its node's id as its name. Before that, its number may be in a node's record, or its
/// address may be that of a node. If two nodes report the same address (a reinstalled machine and its former node), the
/// member is a stray, because a wrong guess would give a vote to the wrong node.
#[must_use]
pub fn match_members_to_nodes<'a>(members: &'a [EtcdMember], nodes: &Nodes) -> MemberOwners<'a> {
    let mut found: BTreeMap<NodeId, Vec<&EtcdMember>> = BTreeMap::new();
    let mut owners = MemberOwners::default();
    for member in members {
        match find_owner(member, nodes) {
            Some(node) => found.entry(node).or_default().push(member),
            None => owners.stray.push(member),
        }
    }
    for (node, mut of_node) in found {
        let recorded =
            nodes.get(&node).and_then(|node| node.roles.consensus_member.as_ref()).map(|role| role.member_id);
        of_node.sort_by_key(|member| {
            (Some(member.id) != recorded, !member.is_active(), member.learner, member.id)
        });
        let mut of_node = of_node.into_iter();
        owners.by_node.extend(of_node.next().map(|first| (node, first)));
        owners.stray.extend(of_node);
    }
    owners.stray.sort_by_key(|member| member.id);
    owners
}

fn find_owner(member: &EtcdMember, nodes: &Nodes) -> Option<NodeId> {
    if member.has_started() {
        return member.name.parse().ok();
    }
    let recorded =
        |node: &&Node| node.roles.consensus_member.as_ref().is_some_and(|role| role.member_id == member.id);
    if let Some(node) = nodes.values().find(recorded) {
        return Some(node.id);
    }
    let mut there = nodes.values().filter(|node| {
        node.state == NodeState::Up
            && node.status.as_ref().is_some_and(|status| member.peer_urls.contains(&peer_url(status.address)))
    });
    match (there.next(), there.next()) {
        (Some(node), None) => Some(node.id),
        _ => None,
    }
}

/// The role in the record of `node` once it is this member.
#[must_use]
pub fn consensus_role_for(node: &NodeId, member: &EtcdMember, owners: &MemberOwners<'_>) -> ConsensusMember {
    let others = owners.by_node.iter().filter(|(other, _)| *other != node);
    let peers = others.filter_map(|(other, member)| Some((*other, member.peer_urls.first()?.clone())));
    ConsensusMember { member_id: member.id, peers: peers.collect() }
}

/// Why a member must not be removed, or its etcd not be restarted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuorumError {
    /// Too few started and reachable voters would remain.
    #[error(
        "member {member:x} of etcd was not removed: of the {remaining} voting members that would be left, {alive} are \
         started and within reach, and {quorum} must be. Bring a member back, or add one, first"
    )]
    TooFewRemaining {
        /// etcd's number of the member.
        member: u64,
        /// How many voting members would remain.
        remaining: usize,
        /// How many of these are started and reachable.
        alive: usize,
        /// How many would have to be.
        quorum: usize,
    },
    /// It is the last voting member, and a cluster needs one.
    #[error(
        "member {member:x} of etcd was not removed: it is the last one that votes. Add another one first"
    )]
    LastVoter {
        /// etcd's number of the member.
        member: u64,
    },
    /// etcd does not list the member.
    #[error("member {member:x} of etcd was not removed: there is no such member. List them again")]
    NoSuchMember {
        /// The number that was to be removed.
        member: u64,
    },
    /// Too few of the other voting members are started and reachable for a restart.
    #[error(
        "of the {others} other voting members of etcd, {alive} are started and within reach, and {required} must be. Bring \
         a member back, or remove the one that is gone for good"
    )]
    TooFewOthers {
        /// How many voting members there are besides this one.
        others: usize,
        /// How many of these are started and reachable.
        alive: usize,
        /// How many have to be.
        required: usize,
    },
    /// etcd does not list the member that is to restart.
    #[error("etcd lists no member {member:x}, which runs here. List the members, and add this one again")]
    NotListed {
        /// The number that the running member has.
        member: u64,
    },
}

/// Checks that the member with this number may be removed.
///
/// A member without a vote may always be removed: no quorum depends on it.
pub fn check_removal(members: &[EtcdMember], member: u64) -> Result<(), QuorumError> {
    let target = members.iter().find(|one| one.id == member).ok_or(QuorumError::NoSuchMember { member })?;
    if target.learner {
        return Ok(());
    }
    let left = || members.iter().filter(|one| !one.learner && one.id != member);
    let (left, alive) = (left().count(), left().filter(|one| one.is_active()).count());
    let quorum = left / 2 + 1;
    match left {
        0 => Err(QuorumError::LastVoter { member }),
        _ if alive < quorum => Err(QuorumError::TooFewRemaining { member, remaining: left, alive, quorum }),
        _ => Ok(()),
    }
}

/// Checks that the etcd of the member `own` may be restarted now. `members` is its own list.
///
/// The others must be a quorum without it. A cluster of two has none without either, so it pauses for the restart, and
/// the other member must be there when it ends. A member that votes alone may always be restarted: it needs nobody to
/// come back, and nothing else ends the connections to it. A learner has no vote, and no quorum depends on it.
pub fn check_restart(members: &[EtcdMember], own: u64) -> Result<(), QuorumError> {
    let target = members.iter().find(|one| one.id == own).ok_or(QuorumError::NotListed { member: own })?;
    if target.learner {
        return Ok(());
    }
    let voters = || members.iter().filter(|one| !one.learner && one.id != own);
    let (others, alive) = (voters().count(), voters().filter(|one| one.is_active()).count());
    let all = others + 1;
    let required = (all / 2 + 1).min(others);
    if alive < required { Err(QuorumError::TooFewOthers { others, alive, required }) } else { Ok(()) }
}

/// No consensus member with an accepted curator would remain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the credentials of {0} were not revoked: no other consensus member votes, is started, within reach and not revoked \
     itself, so no curator could lead the cluster. Add a consensus member, or bring one back, first"
)]
pub struct LastCurator(pub NodeId);

/// Checks that all certificates of a node may be revoked. `revoked` are the nodes for which this was done before.
///
/// Nodes do not follow the curator of a revoked node, and it does not lead. So at least one other consensus member must
/// be able to.
pub fn check_revocation(
    node: NodeId,
    members: &[EtcdMember],
    nodes: &Nodes,
    revoked: &BTreeSet<NodeId>,
) -> Result<(), LastCurator> {
    if can_be_spared(node, members, nodes, revoked) { Ok(()) } else { Err(LastCurator(node)) }
}

/// No consensus member with an accepted curator would remain in etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0} stays a consensus member: the credentials of every other one that votes, is started and within reach are \
     revoked, so no curator could lead the cluster. Add a consensus member first"
)]
pub struct LastMember(pub NodeId);

/// Checks that the membership of a node may end. `revoked` are the nodes with revoked certificates.
///
/// [`check_removal`] counts votes, and a revoked member has one. But its curator does not lead, and nobody could take
/// the revocation back or add a member.
pub fn check_member_removal(
    node: NodeId,
    members: &[EtcdMember],
    nodes: &Nodes,
    revoked: &BTreeSet<NodeId>,
) -> Result<(), LastMember> {
    if can_be_spared(node, members, nodes, revoked) { Ok(()) } else { Err(LastMember(node)) }
}

/// Whether another curator can lead without that of this node, or this node leads nothing anyway.
fn can_be_spared(node: NodeId, members: &[EtcdMember], nodes: &Nodes, revoked: &BTreeSet<NodeId>) -> bool {
    let owners = match_members_to_nodes(members, nodes);
    if !owners.by_node.contains_key(&node) || revoked.contains(&node) {
        return true;
    }
    let can_lead = |other: &NodeId, member: &EtcdMember| {
        *other != node
            && !member.learner
            && member.is_active()
            && is_up(nodes, other)
            && !revoked.contains(other)
    };
    owners.by_node.iter().any(|(other, member)| can_lead(other, member))
}

/// A change that makes members and records agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SyncAction {
    /// Remove a member of etcd.
    RemoveMember {
        /// etcd's number of the member.
        member: u64,
        /// The node it belongs to, if it names one.
        node: Option<NodeId>,
    },
    /// Write the role into a node's record.
    SetRole {
        /// The node whose record is written.
        node: NodeId,
        /// The new consensus role of the node.
        role: ConsensusMember,
    },
    /// Remove the roles of consensus member and Kubernetes controller from a node's record.
    RemoveRoles {
        /// The node whose record is written.
        node: NodeId,
    },
}

impl SyncAction {
    /// The record to write for this action, from the nodes it was planned with; `None` if the action changes no record.
    #[must_use]
    pub fn updated_record(&self, nodes: &Nodes) -> Option<Node> {
        let (node, consensus_member) = match self {
            Self::RemoveMember { .. } => return None,
            Self::SetRole { node, role } => (node, Some(role.clone())),
            Self::RemoveRoles { node } => (node, None),
        };
        let known = nodes.get(node)?;
        let kubernetes_controller = known.roles.kubernetes_controller && consensus_member.is_some();
        let roles = NodeRoles { consensus_member, kubernetes_controller, ..known.roles.clone() };
        Some(Node { roles, ..known.clone() })
    }
}

/// The result of planning one tick.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct SyncPlan {
    /// The one change, if a change is needed and allowed.
    pub action: Option<SyncAction>,
    /// Removals that are needed but not allowed yet.
    pub blocked: Vec<QuorumError>,
}

/// Why members and records are not compared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SyncError {
    /// etcd's list lacks the leader.
    #[error(
        "etcd and the records of nodes were not compared: {0}, which leads, is not among the members of etcd"
    )]
    LeaderNotMember(NodeId),
    /// The records lack the leader.
    #[error("etcd and the records of nodes were not compared: {0}, which leads, has no record that is up")]
    LeaderHasNoRecord(NodeId),
}

/// Plans the next change. The leader on node `leader` must have read the members first and the nodes after them.
///
/// The membership of a node in `revoked` ends, as that of a node that is not up does. A list of revoked peers would not
/// do: etcd compares only those that connect to it, and members connect to each other in both directions. So a revoked
/// member would go on to receive every entry. The leader itself stays: a revoked one steps down, and the next one removes it.
///
/// With the nodes read first, a node that is added in between would have a record without a member, and rule 3 would
/// remove the role that is just being added. Either order requires that nothing else in this leader writes in between.
pub fn plan_sync(
    leader: NodeId,
    members: &[EtcdMember],
    nodes: &Nodes,
    revoked: &BTreeSet<NodeId>,
) -> Result<SyncPlan, SyncError> {
    let owners = match_members_to_nodes(members, nodes);
    if !owners.by_node.contains_key(&leader) {
        return Err(SyncError::LeaderNotMember(leader));
    }
    if !is_up(nodes, &leader) {
        return Err(SyncError::LeaderHasNoRecord(leader));
    }

    let mut withheld = Vec::new();
    let is_revoked = |node: &NodeId| *node != leader && revoked.contains(node);
    let unwanted = owners.by_node.iter().filter(|(node, _)| !is_up(nodes, node) || is_revoked(node));
    let unwanted = unwanted.map(|(node, member)| (Some(*node), *member));
    let stray = owners.stray.iter().map(|member| (member.name.parse().ok(), *member));
    for (node, member) in unwanted.chain(stray) {
        match check_removal(members, member.id) {
            Ok(()) => {
                let change = SyncAction::RemoveMember { member: member.id, node };
                return Ok(SyncPlan { action: Some(change), blocked: withheld });
            }
            Err(refusal) => withheld.push(refusal),
        }
    }

    let recorded = |node: &NodeId| nodes.get(node).and_then(|node| node.roles.consensus_member.as_ref());
    let lacks = owners.by_node.iter().filter(|(node, _)| is_up(nodes, node)).find(|(node, member)| {
        recorded(node).is_none_or(|role| {
            role.member_id != member.id
                || !member.has_started() && *role != consensus_role_for(node, member, &owners)
        })
    });
    if let Some((node, member)) = lacks {
        let change = SyncAction::SetRole { node: *node, role: consensus_role_for(node, member, &owners) };
        return Ok(SyncPlan { action: Some(change), blocked: withheld });
    }

    let listed: BTreeSet<&NodeId> = owners.by_node.keys().collect();
    let left_over = nodes.keys().find(|node| recorded(node).is_some() && !listed.contains(node));
    let change = left_over.map(|node| SyncAction::RemoveRoles { node: *node });
    Ok(SyncPlan { action: change, blocked: withheld })
}

fn is_up(nodes: &Nodes, node: &NodeId) -> bool {
    nodes.get(node).is_some_and(|node| node.state == NodeState::Up)
}

/// The number of the learner to promote now, if any. Every consensus member calls this, but it returns a learner only
/// on the one whose member leads etcd (`local` is `etcd_leader`).
///
/// etcd itself rejects a learner that has not caught up; it is tried again at the next tick. With the new vote counted,
/// the started and reachable voters must still be a quorum.
#[must_use]
pub fn learner_to_promote(
    local: u64,
    etcd_leader: u64,
    members: &[EtcdMember],
    nodes: &Nodes,
) -> Option<u64> {
    if local != etcd_leader {
        return None;
    }
    let owners = match_members_to_nodes(members, nodes);
    let learner = owners
        .by_node
        .iter()
        .find(|(node, member)| member.learner && member.is_active() && is_up(nodes, node))
        .map(|(_, member)| member.id)?;
    let voters = || members.iter().filter(|member| !member.learner || member.id == learner);
    let alive = voters().filter(|member| member.is_active()).count();
    (alive > voters().count() / 2).then_some(learner)
}

#[cfg(test)]
pub(crate) mod tests;
