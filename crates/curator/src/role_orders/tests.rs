//! Tests of orders about roles.

use curator_client::testing::{at, key, member as member_node, node_id, up};

use super::*;
use crate::membership::tests::{dead, learner, nodes, unstarted, voter};

const C: &str = "consensus-member";
const K: &str = "kubernetes-controller";
const W: &str = "kubernetes-worker";

fn roles(names: &[&str]) -> BTreeSet<NodeRole> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

fn order(give: &[&str], take: &[&str]) -> RoleOrder {
    RoleOrder { add: roles(give), remove: roles(take) }
}

fn declared() -> BTreeSet<DeclaredRole> {
    BTreeSet::from(["web".parse().unwrap()])
}

/// A node that has these roles.
fn with(number: u8, names: &[&str]) -> Node {
    let mut node = if names.contains(&C) { member_node(number) } else { up(number) };
    node.roles.kubernetes_controller = names.contains(&K);
    node.roles.kubernetes_worker = names.contains(&W);
    node.roles.declared = if names.contains(&"web") { declared() } else { BTreeSet::new() };
    node
}

/// What etcd lists after the step.
fn after(step: Option<&MemberChange>, number: u8, mut members: Vec<EtcdMember>) -> Vec<EtcdMember> {
    match step {
        None => {}
        Some(MemberChange::AddLearner { peer_url }) => {
            members.push(EtcdMember { peer_urls: vec![peer_url.clone()], ..unstarted(number) });
        }
        Some(MemberChange::RemoveMember { member }) => members.retain(|one| one.id != *member),
    }
    members
}

#[test]
fn order_is_evaluated_by_the_resulting_roles() {
    let add = Some(MemberChange::AddLearner { peer_url: "https://10.0.0.3:7834".to_owned() });
    let remove = Some(MemberChange::RemoveMember { member: 3 });
    for (has, give, take, step, gets) in [
        (vec![], vec![W], vec![], None, vec![W]),
        (vec![], vec!["web", W], vec![], None, vec![W, "web"]),
        (vec![W], vec![], vec![W], None, vec![]),
        (vec![], vec![C], vec![], add.clone(), vec![C]),
        (vec![], vec![C, K], vec![], add.clone(), vec![C, K]),
        (vec![], vec![K, C, W], vec![], add, vec![C, K, W]),
        (vec![C], vec![K], vec![], None, vec![C, K]),
        (vec![C, K], vec![], vec![K], None, vec![C]),
        (vec![C, K], vec![], vec![C, K], remove.clone(), vec![]),
        (vec![C, K, W], vec!["web"], vec![C, K], remove.clone(), vec![W, "web"]),
        (vec![C], vec![], vec![C], remove, vec![]),
        // An order for roles that the node already has as ordered is no error, and needs no step.
        (vec![C], vec![C], vec![], None, vec![C]),
        (vec![], vec![], vec![C, K, W, "web"], None, vec![]),
        (vec![W], vec![], vec![], None, vec![W]),
    ] {
        let node = with(3, &has);
        let known = nodes([member_node(1), member_node(2), node.clone()]);
        let mut members = vec![voter(1), voter(2)];
        members.extend(has.contains(&C).then(|| voter(3)));
        let text = format!("{has:?} give {give:?} take {take:?}");
        let plan = plan_role_change(&node, &order(&give, &take), &members, &known, &declared()).expect(&text);
        assert_eq!(plan.member_change, step, "{text}");
        let members = after(plan.member_change.as_ref(), 3, members);
        let written = plan.updated_record(&node, &members, &known).unwrap();
        assert_eq!(written.roles.names(), roles(&gets), "{text}");
        assert!(written.encode().is_ok());
    }
}

#[test]
fn impossible_order_is_rejected_with_a_reason() {
    let three = || vec![voter(1), voter(2), voter(3)];
    for (node, give, take, members, text, code) in [
        (with(3, &[]), vec![W], vec![W], three(), "both added and removed", Code::InvalidArgument),
        (with(3, &[]), vec!["other"], vec![], three(), "not declared", Code::NotFound),
        (with(3, &[]), vec![K], vec![], vec![voter(1)], "the one needs", Code::FailedPrecondition),
        (with(3, &[C, K]), vec![], vec![C], three(), "the one needs", Code::FailedPrecondition),
        (with(3, &[C]), vec![K], vec![C], three(), "the one needs", Code::FailedPrecondition),
        (with(3, &[C]), vec![], vec![C], vec![voter(3)], "the last one", Code::FailedPrecondition),
        (
            with(3, &[C]),
            vec![],
            vec![C],
            vec![voter(1), dead(2), voter(3)],
            "would be left",
            Code::FailedPrecondition,
        ),
        (with(3, &[]), vec![C], vec![], vec![voter(1), learner(2)], "still learning", Code::Unavailable),
        (
            with(3, &[]),
            vec![C],
            vec![],
            vec![voter(1), EtcdMember { name: "stranger".to_owned(), ..voter(9) }],
            "member 9 of etcd belongs to no known node",
            Code::Unavailable,
        ),
        (
            Node { status: None, ..with(3, &[]) },
            vec![C],
            vec![],
            vec![voter(1)],
            "not reported its address",
            Code::FailedPrecondition,
        ),
    ] {
        let known = nodes([member_node(1), member_node(2), node.clone()]);
        let refusal =
            plan_role_change(&node, &order(&give, &take), &members, &known, &declared()).unwrap_err();
        assert!(refusal.to_string().contains(text), "{text}: {refusal}");
        assert_eq!(refusal.code(), code, "{refusal}");
    }
}

#[test]
fn roles_are_added_only_to_nodes_that_are_up_and_removed_from_any() {
    for state in [NodeState::New, NodeState::Standby, NodeState::Decommissioned] {
        let node = Node::new(key(3), state, at(0));
        let known = nodes([member_node(1), node.clone()]);
        for role in [C, W, "web"] {
            let refusal = plan_role_change(&node, &order(&[role], &[]), &[voter(1)], &known, &declared());
            assert_eq!(refusal, Err(RoleOrderError::NotUp { node: node.id, state }), "{role}");
        }
        assert!(plan_role_change(&node, &order(&[], &[W]), &[voter(1)], &known, &declared()).is_ok());
    }
}

#[test]
fn half_done_order_is_completed_by_repeating_it() {
    // The member was added, and the leader died before it wrote the record.
    let known = nodes([member_node(1), up(3)]);
    let members = [voter(1), unstarted(3)];
    let plan = plan_role_change(&up(3), &order(&[C], &[]), &members, &known, &declared()).unwrap();
    assert_eq!(plan.member_change, None);
    let role = plan.updated_record(&up(3), &members, &known).unwrap().roles.consensus_member.unwrap();
    assert_eq!(role.member_id, 3);
    assert_eq!(role.peers.into_keys().collect::<Vec<_>>(), [node_id(1)]);

    // The member was removed, and the record still has the role.
    let known = nodes([member_node(1), with(3, &[C, K])]);
    let plan =
        plan_role_change(&with(3, &[C, K]), &order(&[], &[C, K]), &[voter(1)], &known, &declared()).unwrap();
    assert_eq!(plan.member_change, None);
    assert!(plan.updated_record(&with(3, &[C, K]), &[voter(1)], &known).unwrap().roles.is_empty());
}

#[test]
fn role_is_not_written_before_etcd_changed_its_members() {
    let known = nodes([member_node(1), member_node(2), with(3, &[])]);
    let members = [voter(1), voter(2)];
    let plan = plan_role_change(&up(3), &order(&[C], &[]), &members, &known, &declared()).unwrap();
    assert_eq!(
        plan.updated_record(&up(3), &members, &known),
        Err(RoleOrderError::MembersNotChanged { node: node_id(3) })
    );

    let known = nodes([member_node(1), member_node(2), with(3, &[C])]);
    let members = [voter(1), voter(2), voter(3)];
    let plan = plan_role_change(&with(3, &[C]), &order(&[], &[C]), &members, &known, &declared()).unwrap();
    let refusal = plan.updated_record(&with(3, &[C]), &members, &known).unwrap_err();
    assert_eq!(
        (refusal.code(), refusal),
        (Code::Unavailable, RoleOrderError::MembersNotChanged { node: node_id(3) })
    );
}

#[test]
fn record_follows_only_once_membership_is_changed() {
    let node = with(3, &[C]);
    let known = nodes([member_node(1), member_node(2), node.clone()]);
    let members = [voter(1), voter(2), voter(3)];
    let plan = plan_role_change(&node, &order(&[], &[C]), &members, &known, &declared()).unwrap();
    let step = MemberChange::RemoveMember { member: 3 };
    assert_eq!(plan.next_step(false, &node, &members, &known), Ok(NextStep::ChangeMembers(step)));
    let Ok(NextStep::WriteRecord(written)) = plan.next_step(true, &node, &members[..2], &known) else {
        panic!("no record, though etcd has done its part")
    };
    assert!(written.roles.is_empty());
    // An order without a membership change is written at once.
    let plan = plan_role_change(&node, &order(&[W], &[]), &members, &known, &declared()).unwrap();
    assert!(matches!(plan.next_step(false, &node, &members, &known), Ok(NextStep::WriteRecord(_))));
}

#[test]
fn order_may_remove_a_dead_member() {
    let known = nodes([member_node(1), member_node(2), with(3, &[C])]);
    let members = [voter(1), voter(2), dead(3)];
    let plan = plan_role_change(&with(3, &[C]), &order(&[], &[C]), &members, &known, &declared()).unwrap();
    assert_eq!(plan.member_change, Some(MemberChange::RemoveMember { member: 3 }));
}

#[test]
fn order_about_other_roles_keeps_membership() {
    // etcd lost the member; the next sync removes the role, not an order that adds another role.
    let node = with(3, &[C, K]);
    let known = nodes([member_node(1), node.clone()]);
    let plan = plan_role_change(&node, &order(&[W], &[]), &[voter(1)], &known, &declared()).unwrap();
    assert_eq!(plan.member_change, None);
    assert_eq!(plan.updated_record(&node, &[voter(1)], &known).unwrap().roles.names(), roles(&[C, K, W]));
}
