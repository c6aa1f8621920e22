//! Tests of the node lifecycle.

use curator_client::testing::{at, key, member, node_id, up};

use super::*;
use crate::membership::tests::{dead, nodes, voter};

#[test]
fn status_report_is_accepted_while_up_and_only_when_changed() {
    let before = curator_client::testing::up(3);
    let status = before.status.clone().unwrap();
    let later = NodeStatus { reported_at: at(60), ..status.clone() };
    assert_eq!(
        apply_status_report(Some(&before), before.id, &later),
        Ok(NodeUpdate::Unchanged(before.clone()))
    );
    let moved = NodeStatus { address: "10.0.0.9".parse().unwrap(), ..later };
    let changed = apply_status_report(Some(&before), before.id, &moved).unwrap();
    assert_eq!(changed, NodeUpdate::Changed(Node { status: Some(moved.clone()), ..before.clone() }));
    assert_eq!(apply_status_report(None, before.id, &moved), Err(LifecycleError::Unknown(before.id)));
    for state in [NodeState::New, NodeState::Standby, NodeState::Decommissioned] {
        let refusal = apply_status_report(Some(&node(state)), before.id, &moved);
        assert_eq!(refusal, Err(LifecycleError::NotUp { node: before.id, state }));
    }
}

const STATES: [NodeState; 4] = [NodeState::New, NodeState::Standby, NodeState::Up, NodeState::Decommissioned];

fn node(state: NodeState) -> Node {
    Node::new(key(3), state, at(0))
}

fn machine(number: u8) -> MachineId {
    MachineId(uuid::Uuid::from_bytes([number; 16]))
}

fn registration() -> NodeRegistration {
    NodeRegistration {
        key: key(3),
        machine: Some(machine(1)),
        labels: Labels::from([("row".to_owned(), "7".to_owned())]),
        ticket: "0011223344556677".parse().unwrap(),
    }
}

/// A key with the same first half as the node's.
fn colliding_key() -> PublicKey {
    let mut twin = key(3);
    twin.0[20] ^= 1;
    twin
}

#[test]
fn assigned_address_stays_until_another_one_replaces_it() {
    let mut node = Node::new(key(3), NodeState::Up, at(1));
    for (address, assigned, changed) in [
        (None, None, false),
        (Some("10.0.0.7"), Some("10.0.0.7"), true),
        (Some("10.0.0.7"), Some("10.0.0.7"), false),
        (None, Some("10.0.0.7"), false),
        (Some("10.0.0.8"), Some("10.0.0.8"), true),
    ] {
        let parse = |text: &str| text.parse::<IpAddr>().unwrap();
        let update = assign_address(NodeUpdate::Unchanged(node), address.map(parse));
        assert_eq!(matches!(update, NodeUpdate::Changed(_)), changed, "{address:?}");
        node = update.node().clone();
        assert_eq!(node.assigned_address, assigned.map(parse), "{address:?}");
    }
    let approved = NodeUpdate::Changed(node.clone());
    assert_eq!(assign_address(approved.clone(), None), approved, "its approval is still to be written");
}

#[test]
fn every_lifecycle_step_is_idempotent() {
    let now = at(1);
    let NodeUpdate::Changed(new) = register_node(None, &registration(), now).unwrap() else {
        panic!("nothing to write")
    };
    assert_eq!((new.id, new.state, new.registered_at), (node_id(3), NodeState::New, now));
    assert_eq!((new.machine, new.labels.len(), new.ticket.is_some()), (Some(machine(1)), 1, true));
    assert!(new.roles.is_empty());
    let again = register_node(Some(&new), &registration(), at(9)).unwrap();
    assert_eq!(again, NodeUpdate::Unchanged(new.clone()));
    assert_eq!(commit_node(Some(&new), &key(3), false, now).unwrap(), None);

    let NodeUpdate::Changed(standby) = approve_node(Some(&new), &key(3), at(2)).unwrap() else {
        panic!("not approved")
    };
    assert_eq!((standby.state, standby.state_since), (NodeState::Standby, at(2)));
    assert_eq!(approve_node(Some(&standby), &key(3), at(9)).unwrap(), NodeUpdate::Unchanged(standby.clone()));
    assert_eq!(register_node(Some(&standby), &registration(), at(9)).unwrap().node(), &standby);

    let Some(NodeUpdate::Changed(up)) = commit_node(Some(&standby), &key(3), false, at(3)).unwrap() else {
        panic!("not taken in")
    };
    assert_eq!((up.state, up.state_since), (NodeState::Up, at(3)));
    let lost_answer = commit_node(Some(&up), &key(3), false, at(9)).unwrap();
    assert_eq!(lost_answer, Some(NodeUpdate::Unchanged(up.clone())));
    assert_eq!(register_node(Some(&up), &registration(), at(9)).unwrap().node(), &up);
    assert_eq!(approve_node(Some(&up), &key(3), at(9)).unwrap(), NodeUpdate::Unchanged(up.clone()));
    assert_eq!(check_join(Some(&up), &key(3), false).unwrap(), &up);

    let NodeUpdate::Changed(gone) = decommission_node(Some(&up), up.id, at(4)).unwrap() else {
        panic!("still there")
    };
    assert_eq!((gone.state, gone.state_since), (NodeState::Decommissioned, at(4)));
    assert_eq!(decommission_node(Some(&gone), gone.id, at(9)).unwrap(), NodeUpdate::Unchanged(gone.clone()));
    assert_eq!(
        plan_node_deletion(Some(&gone), gone.id, DeleteBypass::default(), &[], &nodes([gone.clone()])),
        Ok(None)
    );
}

#[test]
fn decommissioned_node_is_rejected_everywhere() {
    let gone = node(NodeState::Decommissioned);
    let refusal = LifecycleError::Decommissioned(gone.id);
    assert_eq!(register_node(Some(&gone), &registration(), at(1)), Err(refusal.clone()));
    assert_eq!(approve_node(Some(&gone), &key(3), at(1)), Err(refusal.clone()));
    assert_eq!(commit_node(Some(&gone), &key(3), false, at(1)), Err(refusal.clone()));
    assert_eq!(check_join(Some(&gone), &key(3), false), Err(refusal.clone()));
    assert_eq!(check_credentials(Some(&gone), gone.id, &key(3)), Err(refusal.clone()));
    assert_eq!(refusal.code(), Code::FailedPrecondition);
}

#[test]
fn credentials_are_valid_for_a_node_that_is_up_and_its_own_key() {
    for state in STATES {
        let known = node(state);
        assert_eq!(
            check_credentials(Some(&known), known.id, &key(3)).is_ok(),
            state == NodeState::Up,
            "{state:?}"
        );
        assert_eq!(check_join(Some(&known), &key(3), false).is_ok(), state == NodeState::Up, "{state:?}");
        let other = LifecycleError::IdCollision(known.id);
        assert_eq!(check_credentials(Some(&known), known.id, &colliding_key()), Err(other));
    }
    let unknown = LifecycleError::Unknown(node_id(3));
    assert_eq!(
        check_credentials(None, node_id(3), &key(3)),
        Err(unknown.clone()),
        "a deleted node is unknown"
    );
    assert_eq!(unknown.code(), Code::NotFound);
}

#[test]
fn revoked_node_is_given_no_certificate() {
    let refusal = LifecycleError::Revoked(node_id(3));
    for state in [NodeState::Standby, NodeState::Up] {
        assert_eq!(commit_node(Some(&node(state)), &key(3), true, at(1)), Err(refusal.clone()));
    }
    assert_eq!(check_join(Some(&node(NodeState::Up)), &key(3), true), Err(refusal));
}

#[test]
fn only_a_consensus_member_gets_a_curators_certificate() {
    let (its, id) = (key(3), node_id(3));
    let mut controller = member(3);
    controller.roles.kubernetes_controller = true;
    let mut worker = up(3);
    worker.roles.kubernetes_worker = true;
    let unapproved = NodeState::New;
    for (what, known, key, revoked, expected) in [
        ("a member", Some(member(3)), its, false, Ok(id)),
        ("a member with another role", Some(controller), its, false, Ok(id)),
        ("a revoked member", Some(member(3)), its, true, Err(LifecycleError::Revoked(id))),
        ("a node without roles", Some(up(3)), its, false, Err(LifecycleError::NotConsensusMember(id))),
        ("a worker", Some(worker), its, false, Err(LifecycleError::NotConsensusMember(id))),
        ("a revoked node", Some(up(3)), its, true, Err(LifecycleError::Revoked(id))),
        (
            "a node that nobody approved",
            Some(node(unapproved)),
            its,
            false,
            Err(LifecycleError::NotUp { node: id, state: unapproved }),
        ),
        (
            "a former node",
            Some(node(NodeState::Decommissioned)),
            its,
            false,
            Err(LifecycleError::Decommissioned(id)),
        ),
        ("a deleted node", None, its, false, Err(LifecycleError::Unknown(id))),
        ("another key", Some(member(3)), colliding_key(), false, Err(LifecycleError::IdCollision(id))),
    ] {
        let checked = check_curator(known.as_ref(), &key, revoked).map(|node| node.id);
        assert_eq!(checked, expected, "{what}");
    }
}

#[test]
fn key_with_a_colliding_id_is_rejected() {
    let known = node(NodeState::Up);
    let refusal = LifecycleError::IdCollision(known.id);
    let registration = NodeRegistration { key: colliding_key(), ..registration() };
    assert_eq!(register_node(Some(&known), &registration, at(1)), Err(refusal.clone()));
    assert_eq!(approve_node(Some(&known), &colliding_key(), at(1)), Err(refusal.clone()));
    assert_eq!(commit_node(Some(&known), &colliding_key(), false, at(1)), Err(refusal.clone()));
    assert_eq!(check_join(Some(&known), &colliding_key(), false), Err(refusal.clone()));
    assert_eq!(refusal.code(), Code::AlreadyExists);
}

#[test]
fn unregistered_node_is_not_found() {
    let refusal = LifecycleError::Unknown(node_id(3));
    assert_eq!(approve_node(None, &key(3), at(1)), Err(refusal.clone()));
    assert_eq!(commit_node(None, &key(3), false, at(1)), Err(refusal.clone()));
    assert_eq!(check_join(None, &key(3), false), Err(refusal.clone()));
    assert_eq!(decommission_node(None, node_id(3), at(1)), Err(refusal.clone()));
    assert_eq!(
        plan_node_deletion(None, node_id(3), DeleteBypass::default(), &[], &Nodes::new()),
        Err(refusal)
    );
}

#[test]
fn machine_of_a_node_is_set_once() {
    let silent = NodeRegistration { machine: None, ..registration() };
    let other = NodeRegistration { machine: Some(machine(2)), ..registration() };
    let reported = register_node(None, &registration(), at(1)).unwrap().node().clone();
    assert_eq!(
        register_node(Some(&reported), &silent, at(2)).unwrap(),
        NodeUpdate::Unchanged(reported.clone())
    );
    let refusal = register_node(Some(&reported), &other, at(2)).unwrap_err();
    let expected =
        LifecycleError::OtherMachine { node: reported.id, recorded: machine(1), offered: machine(2) };
    assert_eq!(refusal, expected);
    let unsaid = register_node(None, &silent, at(1)).unwrap().node().clone();
    let later = register_node(Some(&unsaid), &other, at(2)).unwrap();
    assert!(matches!(&later, NodeUpdate::Changed(node) if node.machine == Some(machine(2))));
    let approved = Node { machine: None, ..node(NodeState::Standby) };
    assert_eq!(register_node(Some(&approved), &other, at(2)).unwrap(), NodeUpdate::Unchanged(approved));
}

#[test]
fn registration_with_invalid_labels_is_rejected() {
    let labels = Labels::from([("-row".to_owned(), "7".to_owned())]);
    let refusal = register_node(None, &NodeRegistration { labels, ..registration() }, at(1)).unwrap_err();
    assert_eq!(refusal.code(), Code::InvalidArgument);
    assert!(refusal.to_string().contains("-row"), "{refusal}");
}

#[test]
fn node_with_roles_is_not_decommissioned() {
    let refusal = decommission_node(Some(&member(3)), node_id(3), at(1)).unwrap_err();
    assert_eq!(refusal, LifecycleError::HasRoles { node: node_id(3), roles: "consensus-member".to_owned() });
    for state in [NodeState::New, NodeState::Standby] {
        let refusal = decommission_node(Some(&node(state)), node_id(3), at(1)).unwrap_err();
        assert_eq!(refusal, LifecycleError::NeverUp { node: node_id(3), state });
    }
}

#[test]
fn deletion_needs_a_bypass_for_each_safeguard() {
    let both = DeleteBypass { has_roles: true, not_decommissioned: true };
    let roles = DeleteBypass { not_decommissioned: false, ..both };
    let not_decommissioned = DeleteBypass { has_roles: false, ..both };
    let mut worker = up(3);
    worker.roles.kubernetes_worker = true;
    let refuses = |known: &Node, bypass, text: &str| {
        let refusal = plan_node_deletion(Some(known), known.id, bypass, &[voter(1)], &nodes([known.clone()]))
            .unwrap_err();
        assert!(refusal.to_string().contains(text), "{refusal}");
        assert_eq!(refusal.code(), Code::FailedPrecondition);
    };
    let allows = |known: &Node, bypass| {
        assert_eq!(
            plan_node_deletion(Some(known), known.id, bypass, &[voter(1)], &nodes([known.clone()])),
            Ok(None)
        );
    };
    refuses(&up(3), DeleteBypass::default(), "bypass_not_decommissioned");
    refuses(&up(3), roles, "bypass_not_decommissioned");
    allows(&up(3), not_decommissioned);
    refuses(&worker, not_decommissioned, "kubernetes-worker");
    refuses(&worker, not_decommissioned, "bypass_has_roles");
    refuses(&worker, roles, "bypass_not_decommissioned");
    allows(&worker, both);
    for state in [NodeState::New, NodeState::Standby, NodeState::Decommissioned] {
        allows(&node(state), DeleteBypass::default());
    }
}

#[test]
fn deleting_a_member_removes_it_from_etcd_first_and_keeps_quorum() {
    let both = DeleteBypass { has_roles: true, not_decommissioned: true };
    let known = nodes([member(1), member(2), member(3)]);
    let step =
        plan_node_deletion(known.get(&node_id(3)), node_id(3), both, &[voter(1), voter(2), dead(3)], &known);
    assert_eq!(step, Ok(Some(MemberChange::RemoveMember { member: 3 })));
    let refusal =
        plan_node_deletion(known.get(&node_id(2)), node_id(2), both, &[voter(1), voter(2), dead(3)], &known);
    assert!(matches!(refusal, Err(LifecycleError::Quorum { .. })), "{refusal:?}");
    // An etcd member whose record lacks the role.
    let known = nodes([member(1), up(3)]);
    let step = plan_node_deletion(known.get(&node_id(3)), node_id(3), both, &[voter(1), voter(3)], &known);
    assert_eq!(step, Ok(Some(MemberChange::RemoveMember { member: 3 })));
}
