//! How the members of etcd and the records of nodes come to agree.
//!
//! Two things say who runs etcd: etcd itself, and the role in each node's record. They are written one after
//! the other, so a leader that dies in between leaves them different. Its successor compares them at every
//! tick and makes *one* change; the next tick sees what came of it. etcd is the truth:
//!
//! 1. a member whose node has no record, or is not up, is removed;
//! 2. a node that is a member and has no role, or one of an earlier membership, is given the role; so is one whose
//!    member has not started while others came or went, for etcd starts only where it is told the members there are;
//! 3. a node that has the role and is no member loses it, and with it the role of Kubernetes controller.
//!
//! What must never be is done by nobody, whoever asks: a member is removed only while those that are left,
//! started and within reach, are a quorum of themselves. etcd asks the same, but of members that *were*
//! started, and so would let two dead members outvote the last living one.
//!
//! A list that lacks the leader which reads it is stale or is of another cluster; it is not acted on.
//!
//! A member joins without a vote, as a learner, and etcd takes one at a time. It is given its vote once it
//! has started and its node is still wanted.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::curator::node::{ConsensusMember, Node, Roles, State};
use crate::curator::node_id::NodeId;

/// Port on which members of etcd reach each other.
pub const PEER_PORT: u16 = 7834;

/// The peer URL of a member at this address.
#[must_use]
pub fn peer_url(address: IpAddr) -> String {
    format!("https://{}", std::net::SocketAddr::new(address, PEER_PORT))
}

/// A member of etcd, as a living one lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// etcd's number for this membership.
    pub id: u64,
    /// The name it started with: its node's id. Empty before it ever started.
    pub name: String,
    /// Where other members reach it.
    pub peer_urls: Vec<String>,
    /// Whether it has no vote yet.
    pub learner: bool,
    /// Whether it answered the leader lately.
    pub reachable: bool,
}

impl Member {
    /// Whether it ever started.
    #[must_use]
    pub const fn started(&self) -> bool {
        !self.name.is_empty()
    }

    const fn active(&self) -> bool {
        self.started() && self.reachable
    }
}

/// Nodes by their ids, as they were read at once.
pub type Nodes = BTreeMap<NodeId, Node>;

/// The members by the nodes they belong to, and those that belong to none.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Owners<'a> {
    /// One member of each node.
    pub of_node: BTreeMap<NodeId, &'a Member>,
    /// Members that cannot be told, or whose node has another one.
    pub stray: Vec<&'a Member>,
}

/// Finds out whose each member is.
///
/// A member that has started has its node's name. Before, it has a number that may be in a record, or else
/// the address of a node; where two nodes say the same address (a machine that was installed anew, and what
/// it was before) it is nobody's, because to guess would give a vote to the wrong one.
#[must_use]
pub fn owners<'a>(members: &'a [Member], nodes: &Nodes) -> Owners<'a> {
    let mut found: BTreeMap<NodeId, Vec<&Member>> = BTreeMap::new();
    let mut owners = Owners::default();
    for member in members {
        match owner(member, nodes) {
            Some(node) => found.entry(node).or_default().push(member),
            None => owners.stray.push(member),
        }
    }
    for (node, mut of_node) in found {
        let recorded =
            nodes.get(&node).and_then(|node| node.roles.consensus_member.as_ref()).map(|role| role.member);
        of_node
            .sort_by_key(|member| (Some(member.id) != recorded, !member.active(), member.learner, member.id));
        let mut of_node = of_node.into_iter();
        owners.of_node.extend(of_node.next().map(|first| (node, first)));
        owners.stray.extend(of_node);
    }
    owners.stray.sort_by_key(|member| member.id);
    owners
}

fn owner(member: &Member, nodes: &Nodes) -> Option<NodeId> {
    if member.started() {
        return member.name.parse().ok();
    }
    let recorded =
        |node: &&Node| node.roles.consensus_member.as_ref().is_some_and(|role| role.member == member.id);
    if let Some(node) = nodes.values().find(recorded) {
        return Some(node.id);
    }
    let mut there = nodes.values().filter(|node| {
        node.state == State::Up
            && node.status.as_ref().is_some_and(|status| member.peer_urls.contains(&peer_url(status.address)))
    });
    match (there.next(), there.next()) {
        (Some(node), None) => Some(node.id),
        _ => None,
    }
}

/// What the role of `node` says once it is this member.
#[must_use]
pub fn role_of(node: &NodeId, member: &Member, owners: &Owners<'_>) -> ConsensusMember {
    let others = owners.of_node.iter().filter(|(other, _)| *other != node);
    let peers = others.filter_map(|(other, member)| Some((*other, member.peer_urls.first()?.clone())));
    ConsensusMember { member: member.id, peers: peers.collect() }
}

/// Why a member may not be removed, or not be given a vote.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuorumRefusal {
    /// Too few would be left alive.
    #[error(
        "member {member:x} of etcd was not removed: of the {left} voting members that would be left, {alive} are \
         started and within reach, and {quorum} must be. Bring a member back, or add one, first"
    )]
    TooFewLeft {
        /// Which.
        member: u64,
        /// How many would be left.
        left: usize,
        /// How many of those are started and within reach.
        alive: usize,
        /// How many would have to be.
        quorum: usize,
    },
    /// No cluster is without members.
    #[error(
        "member {member:x} of etcd was not removed: it is the last one that votes. Add another one first"
    )]
    Last {
        /// Which.
        member: u64,
    },
    /// etcd does not list it.
    #[error("member {member:x} of etcd was not removed: there is no such member. List them again")]
    NoSuchMember {
        /// Which.
        member: u64,
    },
}

/// Whether a member may be removed, by its number.
///
/// One that has no vote may always be: nothing depends on it.
pub fn may_remove(members: &[Member], member: u64) -> Result<(), QuorumRefusal> {
    let target = members.iter().find(|one| one.id == member).ok_or(QuorumRefusal::NoSuchMember { member })?;
    if target.learner {
        return Ok(());
    }
    let left = || members.iter().filter(|one| !one.learner && one.id != member);
    let (left, alive) = (left().count(), left().filter(|one| one.active()).count());
    let quorum = left / 2 + 1;
    match left {
        0 => Err(QuorumRefusal::Last { member }),
        _ if alive < quorum => Err(QuorumRefusal::TooFewLeft { member, left, alive, quorum }),
        _ => Ok(()),
    }
}

/// A change that makes members and records agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Remove a member of etcd.
    RemoveMember {
        /// Its number.
        member: u64,
        /// Its node, if that can be told.
        node: Option<NodeId>,
    },
    /// Write the role into a node's record.
    GiveRole {
        /// Whose.
        node: NodeId,
        /// What to write.
        role: ConsensusMember,
    },
    /// Take the roles of consensus member and Kubernetes controller out of a node's record.
    TakeRoles {
        /// Whose.
        node: NodeId,
    },
}

impl Change {
    /// The record to write for it, by the nodes it was decided by; none where a record is not what changes.
    #[must_use]
    pub fn record(&self, nodes: &Nodes) -> Option<Node> {
        let (node, consensus_member) = match self {
            Self::RemoveMember { .. } => return None,
            Self::GiveRole { node, role } => (node, Some(role.clone())),
            Self::TakeRoles { node } => (node, None),
        };
        let known = nodes.get(node)?;
        let kubernetes_controller = known.roles.kubernetes_controller && consensus_member.is_some();
        let roles = Roles { consensus_member, kubernetes_controller, ..known.roles.clone() };
        Some(Node { roles, ..known.clone() })
    }
}

/// What one tick is to do.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Tick {
    /// The one change, if any is needed and may be made.
    pub change: Option<Change>,
    /// Changes that are needed and may not be made yet.
    pub withheld: Vec<QuorumRefusal>,
}

/// Why what was read is not acted on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Abort {
    /// etcd's list lacks the leader.
    #[error(
        "etcd and the records of nodes were not compared: {0}, which leads, is not among the members of etcd"
    )]
    LeaderIsNoMember(NodeId),
    /// The records lack the leader.
    #[error("etcd and the records of nodes were not compared: {0}, which leads, has no record that is up")]
    LeaderHasNoRecord(NodeId),
}

/// Decides what to change next, as the leader on node `leader` that read the members first and the nodes
/// after them.
///
/// Members first: a node that is added in between has a record without a member, and rule 3 would take the
/// role that somebody is just giving. Both orders need that nobody else of this leader writes in between.
pub fn sync(leader: NodeId, members: &[Member], nodes: &Nodes) -> Result<Tick, Abort> {
    let owners = owners(members, nodes);
    if !owners.of_node.contains_key(&leader) {
        return Err(Abort::LeaderIsNoMember(leader));
    }
    if !is_up(nodes, &leader) {
        return Err(Abort::LeaderHasNoRecord(leader));
    }

    let mut withheld = Vec::new();
    let unwanted = owners.of_node.iter().filter(|(node, _)| !is_up(nodes, node));
    let unwanted = unwanted.map(|(node, member)| (Some(*node), *member));
    let stray = owners.stray.iter().map(|member| (member.name.parse().ok(), *member));
    for (node, member) in unwanted.chain(stray) {
        match may_remove(members, member.id) {
            Ok(()) => {
                let change = Change::RemoveMember { member: member.id, node };
                return Ok(Tick { change: Some(change), withheld });
            }
            Err(refusal) => withheld.push(refusal),
        }
    }

    let recorded = |node: &NodeId| nodes.get(node).and_then(|node| node.roles.consensus_member.as_ref());
    let lacks = owners.of_node.iter().filter(|(node, _)| is_up(nodes, node)).find(|(node, member)| {
        recorded(node).is_none_or(|role| {
            role.member != member.id || !member.started() && *role != role_of(node, member, &owners)
        })
    });
    if let Some((node, member)) = lacks {
        let change = Change::GiveRole { node: *node, role: role_of(node, member, &owners) };
        return Ok(Tick { change: Some(change), withheld });
    }

    let listed: BTreeSet<&NodeId> = owners.of_node.keys().collect();
    let left_over = nodes.keys().find(|node| recorded(node).is_some() && !listed.contains(node));
    let change = left_over.map(|node| Change::TakeRoles { node: *node });
    Ok(Tick { change, withheld })
}

fn is_up(nodes: &Nodes, node: &NodeId) -> bool {
    nodes.get(node).is_some_and(|node| node.state == State::Up)
}

/// The learner to be given a vote now, if any: asked on every member, and answered on the one that leads etcd
/// alone.
///
/// etcd itself refuses a learner that has not caught up; that is asked again at the next tick. With the new
/// vote, those that are started and within reach must still be a quorum.
#[must_use]
pub fn promotion(local: u64, etcd_leader: u64, members: &[Member], nodes: &Nodes) -> Option<u64> {
    if local != etcd_leader {
        return None;
    }
    let owners = owners(members, nodes);
    let learner = owners
        .of_node
        .iter()
        .find(|(node, member)| member.learner && member.active() && is_up(nodes, node))
        .map(|(_, member)| member.id)?;
    let voters = || members.iter().filter(|member| !member.learner || member.id == learner);
    let alive = voters().filter(|member| member.active()).count();
    (alive > voters().count() / 2).then_some(learner)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::curator::node::tests::{at, member as member_node, up};
    use crate::curator::node_id::tests::{key, node_id};

    /// The member of the node of that number, with its vote.
    pub(crate) fn voter(number: u8) -> Member {
        let address = up(number).status.unwrap().address;
        Member {
            id: number.into(),
            name: node_id(number).to_string(),
            peer_urls: vec![peer_url(address)],
            learner: false,
            reachable: true,
        }
    }

    pub(crate) fn learner(number: u8) -> Member {
        Member { learner: true, ..voter(number) }
    }

    pub(crate) fn unstarted(number: u8) -> Member {
        Member { name: String::new(), reachable: false, ..learner(number) }
    }

    pub(crate) fn dead(number: u8) -> Member {
        Member { reachable: false, ..voter(number) }
    }

    pub(crate) fn nodes(list: impl IntoIterator<Item = Node>) -> Nodes {
        list.into_iter().map(|node| (node.id, node)).collect()
    }

    fn change(members: &[Member], nodes: &Nodes) -> Option<Change> {
        sync(node_id(1), members, nodes).unwrap().change
    }

    #[test]
    fn nothing_is_done_where_both_agree() {
        let agreed = nodes([member_node(1), member_node(2), up(3)]);
        assert_eq!(sync(node_id(1), &[voter(1), voter(2)], &agreed).unwrap(), Tick::default());
    }

    #[test]
    fn list_without_the_leader_is_not_acted_on() {
        let known = nodes([member_node(1), member_node(2)]);
        let gone = voter(9);
        assert_eq!(
            sync(node_id(1), &[voter(2), gone.clone()], &known),
            Err(Abort::LeaderIsNoMember(node_id(1)))
        );
        let without = nodes([member_node(2)]);
        assert_eq!(sync(node_id(1), &[voter(1), gone], &without), Err(Abort::LeaderHasNoRecord(node_id(1))));
        let mut down = up(1);
        down.state = State::Decommissioned;
        let error = sync(node_id(1), &[voter(1)], &nodes([down])).unwrap_err();
        assert_eq!(error, Abort::LeaderHasNoRecord(node_id(1)));
    }

    #[test]
    fn differences_are_settled_one_at_a_time_in_the_order_of_the_rules() {
        // The leader lacks its role, a member is a stranger's, and a controller is no member.
        let mut lost = member_node(3);
        lost.roles.kubernetes_controller = true;
        let mut known = nodes([up(1), member_node(2), lost]);
        let mut members = vec![voter(1), voter(2), voter(9)];

        let first = change(&members, &known).unwrap();
        assert_eq!(first, Change::RemoveMember { member: 9, node: Some(node_id(9)) });
        members.retain(|member| member.id != 9);

        let peers = BTreeMap::from([(node_id(2), "https://10.0.0.2:7834".to_owned())]);
        let role = ConsensusMember { member: 1, peers };
        assert_eq!(
            change(&members, &known).unwrap(),
            Change::GiveRole { node: node_id(1), role: role.clone() }
        );
        known.get_mut(&node_id(1)).unwrap().roles.consensus_member = Some(role);

        assert_eq!(change(&members, &known).unwrap(), Change::TakeRoles { node: node_id(3) });
        known.insert(node_id(3), up(3));
        assert_eq!(change(&members, &known), None);
    }

    #[test]
    fn member_that_has_not_started_is_told_the_others_as_they_are_now() {
        let known = nodes([member_node(1), member_node(2), member_node(3)]);
        let peers = |of: &[Member]| match change(of, &known) {
            Some(Change::GiveRole { node, role }) if node == node_id(3) => role.peers.into_keys().collect(),
            _ => Vec::new(),
        };
        assert_eq!(peers(&[voter(1), voter(2), unstarted(3)]), [node_id(1), node_id(2)]);
        assert_eq!(
            peers(&[voter(1), unstarted(3)]),
            [node_id(1)],
            "before anything else that is to be settled"
        );
        // It knows them from etcd itself by then.
        assert_eq!(change(&[voter(1), voter(2), learner(3)], &known), None);
    }

    #[test]
    fn members_of_nodes_that_are_not_up_are_removed() {
        for state in [State::New, State::Standby, State::Decommissioned] {
            let known = nodes([member_node(1), Node::new(key(2), state, at(0))]);
            let expected = Change::RemoveMember { member: 2, node: Some(node_id(2)) };
            assert_eq!(change(&[voter(1), learner(2)], &known), Some(expected), "{state:?}");
        }
    }

    #[test]
    fn stray_member_stays_while_the_rest_would_have_no_quorum() {
        let known = nodes([member_node(1), member_node(2), up(3)]);
        let members = [voter(1), dead(2), voter(9)];
        let tick = sync(node_id(1), &members, &known).unwrap();
        assert_eq!(tick.change, None);
        let refusal = QuorumRefusal::TooFewLeft { member: 9, left: 2, alive: 1, quorum: 2 };
        assert_eq!(tick.withheld, [refusal]);
        // What may be done is done all the same.
        let known = nodes([member_node(1), member_node(2), member_node(3)]);
        let tick = sync(node_id(1), &members, &known).unwrap();
        assert_eq!(tick.change, Some(Change::TakeRoles { node: node_id(3) }));
        assert_eq!(tick.withheld.len(), 1);
    }

    #[test]
    fn half_added_member_is_known_by_the_address_of_its_node() {
        let known = nodes([member_node(1), up(2)]);
        let members = [voter(1), unstarted(2)];
        assert!(
            matches!(change(&members, &known), Some(Change::GiveRole { node, .. }) if node == node_id(2))
        );
        // Two nodes of one address: nobody can tell, so it goes.
        let mut before = up(3);
        before.status = up(2).status;
        let known = nodes([member_node(1), up(2), before]);
        assert_eq!(change(&members, &known), Some(Change::RemoveMember { member: 2, node: None }));
        // A record that names its number tells.
        let mut recorded = known.clone();
        recorded.insert(node_id(2), member_node(2));
        // It has not started, so that it is told again with whom it is to.
        let Some(Change::GiveRole { node, role }) = change(&members, &recorded) else {
            panic!("a member that has not started keeps members of old");
        };
        assert_eq!((node, role.peers.keys().collect::<Vec<_>>()), (node_id(2), vec![&node_id(1)]));
        if let Some(node) = recorded.get_mut(&node) {
            node.roles.consensus_member = Some(role);
        }
        assert_eq!(change(&members, &recorded), None);
    }

    #[test]
    fn role_of_an_earlier_membership_is_replaced() {
        let mut again = learner(2);
        again.id = 77;
        let known = nodes([member_node(1), member_node(2)]);
        let Some(Change::GiveRole { node, role }) = change(&[voter(1), again.clone()], &known) else {
            panic!("the role keeps the number of a membership that is over");
        };
        assert_eq!((node, role.member), (node_id(2), 77));
        // While the earlier membership still counts, the other one is the stray.
        let expected = Change::RemoveMember { member: 77, node: Some(node_id(2)) };
        assert_eq!(change(&[voter(1), voter(2), again], &known), Some(expected));
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
            assert_eq!(may_remove(&members, target).is_ok(), may, "{target} of {members:?}");
        }
        assert_eq!(may_remove(&[voter(1)], 1), Err(QuorumRefusal::Last { member: 1 }));
        assert_eq!(may_remove(&[voter(1)], 9), Err(QuorumRefusal::NoSuchMember { member: 9 }));
    }

    #[test]
    fn learner_is_given_a_vote_once_it_lives_and_is_wanted() {
        let known = nodes([member_node(1), member_node(2), member_node(3), member_node(4)]);
        for (members, expected) in [
            (vec![voter(1), learner(2)], Some(2)),
            (vec![voter(1), unstarted(2)], None),
            (vec![voter(1), Member { reachable: false, ..learner(2) }], None),
            (vec![voter(1), voter(2)], None),
            (vec![voter(1), learner(9)], None),
            (vec![voter(1), voter(2), dead(3), learner(4)], Some(4)),
        ] {
            assert_eq!(promotion(1, 1, &members, &known), expected, "{members:?}");
        }
        assert_eq!(
            promotion(1, 2, &[voter(1), voter(2), learner(3)], &known),
            None,
            "another one leads etcd"
        );
        let mut gone = up(2);
        gone.state = State::Decommissioned;
        let known = nodes([member_node(1), gone]);
        assert_eq!(promotion(1, 1, &[voter(1), learner(2)], &known), None);
    }

    #[test]
    fn new_vote_never_costs_the_quorum() {
        let known = nodes((1..=4).map(member_node));
        let members = [voter(1), dead(2), dead(3), learner(4)];
        assert_eq!(promotion(1, 1, &members, &known), None);
    }

    #[test]
    fn address_of_either_family_makes_a_peer_url() {
        assert_eq!(peer_url("10.0.0.1".parse().unwrap()), "https://10.0.0.1:7834");
        assert_eq!(peer_url("2001:db8::1".parse().unwrap()), "https://[2001:db8::1]:7834");
    }

    proptest::proptest! {
        /// From any disagreement, ticks alone lead to agreement, and no tick removes a quorum.
        #[test]
        fn ticks_settle_every_disagreement(
            kinds in proptest::collection::vec((0..5_u8, 0..4_u8), 5),
        ) {
            // Every number but the leader's: a member of some kind or none, a record of some kind or none.
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
                    3 => Some(Node::new(key(index), State::Decommissioned, at(0))),
                    _ => None,
                };
                known.extend(record.map(|node| (node.id, node)));
            }
            let mut ticks = 0;
            while let Some(change) = sync(node_id(1), &members, &known).unwrap().change {
                ticks += 1;
                proptest::prop_assert!(ticks <= 20, "it goes round in circles: {:?}", change);
                match change {
                    Change::RemoveMember { member, .. } => {
                        let removed = members.iter().position(|one| one.id == member).unwrap();
                        let removed = members.remove(removed);
                        let voters = || members.iter().filter(|one| !one.learner);
                        let alive = voters().filter(|one| one.active()).count();
                        proptest::prop_assert!(removed.learner || 2 * alive > voters().count());
                    }
                    Change::GiveRole { node, role } => {
                        known.get_mut(&node).unwrap().roles.consensus_member = Some(role);
                    }
                    Change::TakeRoles { node } => {
                        let roles = &mut known.get_mut(&node).unwrap().roles;
                        (roles.consensus_member, roles.kubernetes_controller) = (None, false);
                    }
                }
            }
            // What is still different is withheld, and nothing else is.
            let withheld = sync(node_id(1), &members, &known).unwrap().withheld.len();
            let has_role = |member: &Member| {
                let role = |node: &Node| node.roles.consensus_member.as_ref().map(|role| role.member);
                known.values().any(|node| role(node) == Some(member.id))
            };
            proptest::prop_assert_eq!(members.iter().filter(|member| !has_role(member)).count(), withheld);
            let roles = known.values().filter(|node| node.roles.consensus_member.is_some()).count();
            proptest::prop_assert_eq!(roles + withheld, members.len());
        }
    }
}
