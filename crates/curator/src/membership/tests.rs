//! Tests of the membership: matching, one row per rule, and a property of any disagreement.

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

/// Plans for the leader on node 1, where nobody is revoked.
fn plan(members: &[EtcdMember], nodes: &Nodes) -> Result<SyncPlan, SyncError> {
    plan_sync(node_id(1), members, nodes, &BTreeSet::new())
}

fn planned_action(members: &[EtcdMember], nodes: &Nodes) -> Option<SyncAction> {
    plan(members, nodes).unwrap().action
}

#[test]
fn sync_does_nothing_when_both_agree() {
    let agreed = nodes([member_node(1), member_node(2), up(3)]);
    assert_eq!(plan(&[voter(1), voter(2)], &agreed).unwrap(), SyncPlan::default());
}

#[test]
fn member_list_without_the_leader_is_ignored() {
    let known = nodes([member_node(1), member_node(2)]);
    let gone = voter(9);
    assert_eq!(plan(&[voter(2), gone.clone()], &known), Err(SyncError::LeaderNotMember(node_id(1))));
    let without = nodes([member_node(2)]);
    assert_eq!(plan(&[voter(1), gone], &without), Err(SyncError::LeaderHasNoRecord(node_id(1))));
    let mut down = up(1);
    down.state = NodeState::Decommissioned;
    let error = plan(&[voter(1)], &nodes([down])).unwrap_err();
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
        Some(SyncAction::SetRole { node, role }) if node == node_id(3) => role.peers.into_keys().collect(),
        _ => Vec::new(),
    };
    assert_eq!(peers(&[voter(1), voter(2), unstarted(3)]), [node_id(1), node_id(2)]);
    assert_eq!(peers(&[voter(1), unstarted(3)]), [node_id(1)], "before anything else that is to be settled");
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
    let tick = plan(&members, &known).unwrap();
    assert_eq!(tick.action, None);
    let refusal = QuorumError::TooFewRemaining { member: 9, remaining: 2, alive: 1, quorum: 2 };
    assert_eq!(tick.blocked, [refusal]);
    // An allowed change is made even if others are blocked.
    let known = nodes([member_node(1), member_node(2), member_node(3)]);
    let tick = plan(&members, &known).unwrap();
    assert_eq!(tick.action, Some(SyncAction::RemoveRoles { node: node_id(3) }));
    assert_eq!(tick.blocked.len(), 1);
}

#[test]
fn revoked_member_is_removed_once_that_keeps_the_quorum() {
    let known = nodes([member_node(1), member_node(2), member_node(3)]);
    let remove = |node: u8| Some(SyncAction::RemoveMember { member: node.into(), node: Some(node_id(node)) });
    for (what, members, revoked, action, blocked) in [
        ("nobody", vec![voter(1), voter(2), voter(3)], &[][..], None, 0),
        ("all are there", vec![voter(1), voter(2), voter(3)], &[2][..], remove(2), 0),
        ("of two", vec![voter(1), voter(2)], &[2][..], remove(2), 0),
        ("it votes not yet", vec![voter(1), dead(2), learner(3)], &[3][..], remove(3), 0),
        ("the other one is away", vec![voter(1), voter(2), dead(3)], &[2][..], None, 1),
        ("it is away itself", vec![voter(1), dead(2), voter(3)], &[2][..], remove(2), 0),
        ("one after the other", vec![voter(1), voter(2), voter(3)], &[2, 3][..], remove(2), 0),
        ("the leader steps down by itself", vec![voter(1), voter(2), voter(3)], &[1][..], None, 0),
    ] {
        let known = if members.len() == 2 { nodes([member_node(1), member_node(2)]) } else { known.clone() };
        let revoked: BTreeSet<NodeId> = revoked.iter().map(|&number| node_id(number)).collect();
        let plan = plan_sync(node_id(1), &members, &known, &revoked).unwrap();
        assert_eq!((plan.action, plan.blocked.len()), (action, blocked), "{what}");
    }
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
    assert_eq!(planned_action(&members, &known), Some(SyncAction::RemoveMember { member: 2, node: None }));
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
    let Some(SyncAction::SetRole { node, role }) = planned_action(&[voter(1), again.clone()], &known) else {
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
fn restart_leaves_a_quorum_of_living_members() {
    for (members, own, may) in [
        (vec![voter(1)], 1, true),
        (vec![voter(1), unstarted(2)], 1, true),
        (vec![voter(1), learner(2)], 1, true),
        (vec![voter(1), learner(2)], 2, true),
        (vec![voter(1), voter(2)], 1, true),
        (vec![voter(1), dead(2)], 1, false),
        (vec![voter(1), voter(2), voter(3)], 3, true),
        (vec![voter(1), dead(2), voter(3)], 3, false),
        (vec![voter(1), dead(2), voter(3), learner(4)], 3, false),
        (vec![voter(1), voter(2), voter(3), unstarted(4)], 3, true),
        (vec![voter(1), voter(2), voter(3), voter(4)], 1, true),
        (vec![voter(1), dead(2), voter(3), voter(4)], 1, false),
        (vec![voter(1), dead(2), voter(3), voter(4), voter(5)], 1, true),
        (vec![voter(1), dead(2), dead(3), voter(4), voter(5)], 1, false),
        (vec![voter(1)], 9, false),
    ] {
        assert_eq!(check_restart(&members, own).is_ok(), may, "{own} of {members:?}");
    }
    let refused = check_restart(&[voter(1), dead(2), voter(3)], 1);
    assert_eq!(refused, Err(QuorumError::TooFewOthers { others: 2, alive: 1, required: 2 }));
    assert_eq!(check_restart(&[voter(1)], 9), Err(QuorumError::NotListed { member: 9 }));
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
        while let Some(change) = plan(&members, &known).unwrap().action {
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
        let withheld = plan(&members, &known).unwrap().blocked.len();
        let has_role = |member: &EtcdMember| {
            let role = |node: &Node| node.roles.consensus_member.as_ref().map(|role| role.member_id);
            known.values().any(|node| role(node) == Some(member.id))
        };
        proptest::prop_assert_eq!(members.iter().filter(|member| !has_role(member)).count(), withheld);
        let roles = known.values().filter(|node| node.roles.consensus_member.is_some()).count();
        proptest::prop_assert_eq!(roles + withheld, members.len());
    }
}

#[test]
fn last_curator_that_could_lead_is_neither_revoked_nor_removed() {
    let known = nodes([member_node(1), member_node(2), member_node(3), up(4)]);
    let mut gone = known.clone();
    gone.remove(&node_id(2));
    for (what, node, members, nodes, revoked, expected) in [
        ("one of three", 1, vec![voter(1), voter(2), voter(3)], &known, vec![], true),
        ("the second of three", 1, vec![voter(1), voter(2), voter(3)], &known, vec![2], true),
        ("the last of three", 1, vec![voter(1), voter(2), voter(3)], &known, vec![2, 3], false),
        ("revoked before", 1, vec![voter(1)], &known, vec![1], true),
        ("the only one", 1, vec![voter(1)], &known, vec![], false),
        ("the other one is out of reach", 1, vec![voter(1), dead(2)], &known, vec![], false),
        ("the other one has no vote", 1, vec![voter(1), learner(2)], &known, vec![], false),
        ("the other one has not started", 1, vec![voter(1), unstarted(2)], &known, vec![], false),
        ("the other one has no record", 1, vec![voter(1), voter(2)], &gone, vec![], false),
        ("a node that is no member", 4, vec![voter(1)], &known, vec![], true),
    ] {
        let revoked = revoked.into_iter().map(node_id).collect();
        let outcome = check_revocation(node_id(node), &members, nodes, &revoked);
        assert_eq!(outcome, if expected { Ok(()) } else { Err(LastCurator(node_id(node))) }, "{what}");
        let removed = check_member_removal(node_id(node), &members, nodes, &revoked);
        assert_eq!(removed, if expected { Ok(()) } else { Err(LastMember(node_id(node))) }, "{what}");
    }
    for text in [LastCurator(node_id(1)).to_string(), LastMember(node_id(1)).to_string()] {
        assert!(text.contains(&node_id(1).to_string()) && text.contains("Add a consensus member"), "{text}");
    }
}
