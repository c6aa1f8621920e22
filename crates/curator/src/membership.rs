//! Reconciles etcd's members with node records, one change at a time, never below quorum.
//!
//! Two sources define who runs etcd: etcd itself, and the role in each node's record. They are written one after the
//! other, so a leader that dies in between leaves them different. Its successor compares them at every tick and makes
//! *one* change; the next tick sees the result. etcd is authoritative:
//!
//! 1. A member whose node has no record, or is not up, is removed.
//! 2. A node that is a member and has no role, or the role of an earlier membership, gets the role. So does a node
//!    whose member has not started while other members came or went, because etcd starts only with the current list of
//!    members.
//! 3. A node that has the role and is no member loses the role, and with it the role of Kubernetes controller.
//!
//! No order overrides the quorum rule: a member is removed only if the members that remain, started and
//! reachable, are a quorum of themselves. etcd has a similar check, but counts members that *were* started, and so
//! would let two dead members outvote the last living one.
//!
//! A member list that lacks the leader which reads it is stale or belongs to another cluster. It is not acted on.
//!
//! A member joins without a vote, as a learner, and etcd accepts one learner at a time. It gets its vote once it has
//! started and if its node is still up.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use curator_client::node::{ConsensusMember, Node, NodeRoles, NodeState};
use curator_client::node_id::NodeId;

/// The port on which etcd members reach each other.
pub const PEER_PORT: u16 = 7834;

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

/// Why a member must not be removed.
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
/// With the nodes read first, a node that is added in between would have a record without a member, and rule 3 would
/// remove the role that is just being added. Either order requires that nothing else in this leader writes in between.
pub fn plan_sync(leader: NodeId, members: &[EtcdMember], nodes: &Nodes) -> Result<SyncPlan, SyncError> {
    let owners = match_members_to_nodes(members, nodes);
    if !owners.by_node.contains_key(&leader) {
        return Err(SyncError::LeaderNotMember(leader));
    }
    if !is_up(nodes, &leader) {
        return Err(SyncError::LeaderHasNoRecord(leader));
    }

    let mut withheld = Vec::new();
    let unwanted = owners.by_node.iter().filter(|(node, _)| !is_up(nodes, node));
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
pub(crate) mod tests {
    use curator_client::testing::{at, key, member as member_node, node_id, up};

    use super::*;

    /// The voting member of the node with this number.
    pub(crate) fn voter(number: u8) -> EtcdMember {
        let address = up(number).status.unwrap().address;
        EtcdMember {
            id: number.into(),
            name: node_id(number).to_string(),
            peer_urls: vec![peer_url(address)],
            learner: false,
            reachable: true,
        }
    }

    pub(crate) fn learner(number: u8) -> EtcdMember {
        EtcdMember { learner: true, ..voter(number) }
    }

    pub(crate) fn unstarted(number: u8) -> EtcdMember {
        EtcdMember { name: String::new(), reachable: false, ..learner(number) }
    }

    pub(crate) fn dead(number: u8) -> EtcdMember {
        EtcdMember { reachable: false, ..voter(number) }
    }

    pub(crate) fn nodes(list: impl IntoIterator<Item = Node>) -> Nodes {
        list.into_iter().map(|node| (node.id, node)).collect()
    }

    fn planned_action(members: &[EtcdMember], nodes: &Nodes) -> Option<SyncAction> {
        plan_sync(node_id(1), members, nodes).unwrap().action
    }

    #[test]
    fn sync_does_nothing_when_both_agree() {
        let agreed = nodes([member_node(1), member_node(2), up(3)]);
        assert_eq!(plan_sync(node_id(1), &[voter(1), voter(2)], &agreed).unwrap(), SyncPlan::default());
    }

    #[test]
    fn member_list_without_the_leader_is_ignored() {
        let known = nodes([member_node(1), member_node(2)]);
        let gone = voter(9);
        assert_eq!(
            plan_sync(node_id(1), &[voter(2), gone.clone()], &known),
            Err(SyncError::LeaderNotMember(node_id(1)))
        );
        let without = nodes([member_node(2)]);
        assert_eq!(
            plan_sync(node_id(1), &[voter(1), gone], &without),
            Err(SyncError::LeaderHasNoRecord(node_id(1)))
        );
        let mut down = up(1);
        down.state = NodeState::Decommissioned;
        let error = plan_sync(node_id(1), &[voter(1)], &nodes([down])).unwrap_err();
        assert_eq!(error, SyncError::LeaderHasNoRecord(node_id(1)));
    }

    #[test]
    fn differences_are_resolved_one_at_a_time_in_rule_order() {
        // The leader lacks its role, a member belongs to no node, and a controller is no member.
        let mut lost = member_node(3);
        lost.roles.kubernetes_controller = true;
        let mut known = nodes([up(1), member_node(2), lost]);
        let mut members = vec![voter(1), voter(2), voter(9)];

        let first = planned_action(&members, &known).unwrap();
        assert_eq!(first, SyncAction::RemoveMember { member: 9, node: Some(node_id(9)) });
        members.retain(|member| member.id != 9);

        let peers = BTreeMap::from([(node_id(2), "https://10.0.0.2:7834".to_owned())]);
        let role = ConsensusMember { member_id: 1, peers };
        assert_eq!(
            planned_action(&members, &known).unwrap(),
            SyncAction::SetRole { node: node_id(1), role: role.clone() }
        );
        known.get_mut(&node_id(1)).unwrap().roles.consensus_member = Some(role);

        assert_eq!(planned_action(&members, &known).unwrap(), SyncAction::RemoveRoles { node: node_id(3) });
        known.insert(node_id(3), up(3));
        assert_eq!(planned_action(&members, &known), None);
    }

    #[test]
    fn unstarted_member_gets_the_current_peers() {
        let known = nodes([member_node(1), member_node(2), member_node(3)]);
        let peers = |of: &[EtcdMember]| match planned_action(of, &known) {
            Some(SyncAction::SetRole { node, role }) if node == node_id(3) => {
                role.peers.into_keys().collect()
            }
            _ => Vec::new(),
        };
        assert_eq!(peers(&[voter(1), voter(2), unstarted(3)]), [node_id(1), node_id(2)]);
        assert_eq!(
            peers(&[voter(1), unstarted(3)]),
            [node_id(1)],
            "before anything else that is to be settled"
        );
        // A started member knows its peers from etcd itself.
        assert_eq!(planned_action(&[voter(1), voter(2), learner(3)], &known), None);
    }

    #[test]
    fn members_of_nodes_that_are_not_up_are_removed() {
        for state in [NodeState::New, NodeState::Standby, NodeState::Decommissioned] {
            let known = nodes([member_node(1), Node::new(key(2), state, at(0))]);
            let expected = SyncAction::RemoveMember { member: 2, node: Some(node_id(2)) };
            assert_eq!(planned_action(&[voter(1), learner(2)], &known), Some(expected), "{state:?}");
        }
    }

    #[test]
    fn stray_member_stays_while_removal_would_lose_quorum() {
        let known = nodes([member_node(1), member_node(2), up(3)]);
        let members = [voter(1), dead(2), voter(9)];
        let tick = plan_sync(node_id(1), &members, &known).unwrap();
        assert_eq!(tick.action, None);
        let refusal = QuorumError::TooFewRemaining { member: 9, remaining: 2, alive: 1, quorum: 2 };
        assert_eq!(tick.blocked, [refusal]);
        // An allowed change is made even if others are blocked.
        let known = nodes([member_node(1), member_node(2), member_node(3)]);
        let tick = plan_sync(node_id(1), &members, &known).unwrap();
        assert_eq!(tick.action, Some(SyncAction::RemoveRoles { node: node_id(3) }));
        assert_eq!(tick.blocked.len(), 1);
    }

    #[test]
    fn half_added_member_is_matched_by_its_node_address() {
        let known = nodes([member_node(1), up(2)]);
        let members = [voter(1), unstarted(2)];
        assert!(
            matches!(planned_action(&members, &known), Some(SyncAction::SetRole { node, .. }) if node == node_id(2))
        );
        // Two nodes with one address: the member matches neither, so it is removed.
        let mut before = up(3);
        before.status = up(2).status;
        let known = nodes([member_node(1), up(2), before]);
        assert_eq!(
            planned_action(&members, &known),
            Some(SyncAction::RemoveMember { member: 2, node: None })
        );
        // A record that has the member's number decides.
        let mut recorded = known.clone();
        recorded.insert(node_id(2), member_node(2));
        // The member has not started, so its role is written again with the current peers.
        let Some(SyncAction::SetRole { node, role }) = planned_action(&members, &recorded) else {
            panic!("a member that has not started keeps members of old");
        };
        assert_eq!((node, role.peers.keys().collect::<Vec<_>>()), (node_id(2), vec![&node_id(1)]));
        if let Some(node) = recorded.get_mut(&node) {
            node.roles.consensus_member = Some(role);
        }
        assert_eq!(planned_action(&members, &recorded), None);
    }

    #[test]
    fn role_of_an_earlier_membership_is_replaced() {
        let mut again = learner(2);
        again.id = 77;
        let known = nodes([member_node(1), member_node(2)]);
        let Some(SyncAction::SetRole { node, role }) = planned_action(&[voter(1), again.clone()], &known)
        else {
            panic!("the role keeps the number of a membership that is over");
        };
        assert_eq!((node, role.member_id), (node_id(2), 77));
        // While the role still names the earlier membership, the other member is the stray.
        let expected = SyncAction::RemoveMember { member: 77, node: Some(node_id(2)) };
        assert_eq!(planned_action(&[voter(1), voter(2), again], &known), Some(expected));
    }

    #[test]
    fn removal_leaves_a_quorum_of_living_members() {
        for (members, target, may) in [
            (vec![voter(1)], 1, false),
            (vec![voter(1), learner(2)], 1, false),
            (vec![voter(1), learner(2)], 2, true),
            (vec![voter(1), unstarted(2)], 2, true),
            (vec![voter(1), voter(2)], 2, true),
            (vec![voter(1), dead(2)], 2, true),
            (vec![voter(1), dead(2)], 1, false),
            (vec![voter(1), voter(2), voter(3)], 3, true),
            (vec![voter(1), voter(2), dead(3)], 3, true),
            (vec![voter(1), voter(2), dead(3)], 2, false),
            (vec![voter(1), dead(2), dead(3)], 3, false),
            (vec![voter(1), voter(2), voter(3), dead(4), dead(5)], 5, true),
            (vec![voter(1), voter(2), voter(3), dead(4), dead(5)], 3, false),
            (vec![voter(1)], 9, false),
        ] {
            assert_eq!(check_removal(&members, target).is_ok(), may, "{target} of {members:?}");
        }
        assert_eq!(check_removal(&[voter(1)], 1), Err(QuorumError::LastVoter { member: 1 }));
        assert_eq!(check_removal(&[voter(1)], 9), Err(QuorumError::NoSuchMember { member: 9 }));
    }

    #[test]
    fn learner_is_promoted_once_reachable_and_its_node_is_up() {
        let known = nodes([member_node(1), member_node(2), member_node(3), member_node(4)]);
        for (members, expected) in [
            (vec![voter(1), learner(2)], Some(2)),
            (vec![voter(1), unstarted(2)], None),
            (vec![voter(1), EtcdMember { reachable: false, ..learner(2) }], None),
            (vec![voter(1), voter(2)], None),
            (vec![voter(1), learner(9)], None),
            (vec![voter(1), voter(2), dead(3), learner(4)], Some(4)),
        ] {
            assert_eq!(learner_to_promote(1, 1, &members, &known), expected, "{members:?}");
        }
        assert_eq!(
            learner_to_promote(1, 2, &[voter(1), voter(2), learner(3)], &known),
            None,
            "another one leads etcd"
        );
        let mut gone = up(2);
        gone.state = NodeState::Decommissioned;
        let known = nodes([member_node(1), gone]);
        assert_eq!(learner_to_promote(1, 1, &[voter(1), learner(2)], &known), None);
    }

    #[test]
    fn new_vote_never_costs_the_quorum() {
        let known = nodes((1..=4).map(member_node));
        let members = [voter(1), dead(2), dead(3), learner(4)];
        assert_eq!(learner_to_promote(1, 1, &members, &known), None);
    }

    #[test]
    fn address_of_either_family_makes_a_peer_url() {
        assert_eq!(peer_url("10.0.0.1".parse().unwrap()), "https://10.0.0.1:7834");
        assert_eq!(peer_url("2001:db8::1".parse().unwrap()), "https://[2001:db8::1]:7834");
    }

    proptest::proptest! {
        /// From any disagreement, ticks alone lead to agreement, and no tick removes a quorum.
        #[test]
        fn repeated_syncs_resolve_every_disagreement(
            kinds in proptest::collection::vec((0..5_u8, 0..4_u8), 5),
        ) {
            // Every node but the leader's: a member of some kind or none, and a record of some kind or none.
            let mut members = vec![voter(1)];
            let mut known = nodes([member_node(1)]);
            for (index, (kind, record)) in (2_u8..).zip(kinds) {
                members.extend(match kind {
                    1 => Some(voter(index)),
                    2 => Some(learner(index)),
                    3 => Some(unstarted(index)),
                    4 => Some(dead(index)),
                    _ => None,
                });
                let record = match record {
                    1 => Some(up(index)),
                    2 => Some(member_node(index)),
                    3 => Some(Node::new(key(index), NodeState::Decommissioned, at(0))),
                    _ => None,
                };
                known.extend(record.map(|node| (node.id, node)));
            }
            let mut ticks = 0;
            while let Some(change) = plan_sync(node_id(1), &members, &known).unwrap().action {
                ticks += 1;
                proptest::prop_assert!(ticks <= 20, "it goes round in circles: {:?}", change);
                match change {
                    SyncAction::RemoveMember { member, .. } => {
                        let removed = members.iter().position(|one| one.id == member).unwrap();
                        let removed = members.remove(removed);
                        let voters = || members.iter().filter(|one| !one.learner);
                        let alive = voters().filter(|one| one.is_active()).count();
                        proptest::prop_assert!(removed.learner || 2 * alive > voters().count());
                    }
                    SyncAction::SetRole { node, role } => {
                        known.get_mut(&node).unwrap().roles.consensus_member = Some(role);
                    }
                    SyncAction::RemoveRoles { node } => {
                        let roles = &mut known.get_mut(&node).unwrap().roles;
                        (roles.consensus_member, roles.kubernetes_controller) = (None, false);
                    }
                }
            }
            // Only blocked removals are still different.
            let withheld = plan_sync(node_id(1), &members, &known).unwrap().blocked.len();
            let has_role = |member: &EtcdMember| {
                let role = |node: &Node| node.roles.consensus_member.as_ref().map(|role| role.member_id);
                known.values().any(|node| role(node) == Some(member.id))
            };
            proptest::prop_assert_eq!(members.iter().filter(|member| !has_role(member)).count(), withheld);
            let roles = known.values().filter(|node| node.roles.consensus_member.is_some()).count();
            proptest::prop_assert_eq!(roles + withheld, members.len());
        }
    }
}
