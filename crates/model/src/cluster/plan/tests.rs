//! Cluster plans, case by case.

use uuid::Uuid;

use super::*;
use crate::cluster::declaration_sync::DesiredDeclaration;
use crate::cluster::spec::tests::spec;
use crate::cluster::state::{ClusterIdentity, EtcdMember, LastOrder, MemberReport};

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
}

fn machine(number: u8) -> MachineId {
    MachineId(Uuid::from_u128(u128::from(number)))
}

fn key(number: u8) -> [u8; 32] {
    [number; 32]
}

fn member(number: u8, part: ClusterPart) -> ClusterMember {
    ClusterMember {
        machine: machine(number),
        name: format!("m{number}"),
        part,
        chosen_at: at(i64::from(number)),
        approved_key: None,
        leave_reason: None,
        last_order: None,
        report: None,
        phase: Phase::Ready,
        retiring: false,
    }
}

fn order(what: MembershipOrder, seconds_ago: i64) -> LastOrder {
    LastOrder { order: what, generation: 3, sent_at: at(1000 - seconds_ago) }
}

/// A member that joined and reported its key.
fn joined(number: u8, part: ClusterPart) -> ClusterMember {
    ClusterMember {
        last_order: Some(order(MembershipOrder::Join, 300)),
        report: Some(MemberReport {
            generation: 3,
            key: Some(key(number)),
            ca_certificate: Some(vec![1]),
            ..MemberReport::default()
        }),
        ..member(number, part)
    }
}

fn node(number: u8, roles: &[&str]) -> ClusterNode {
    ClusterNode {
        id: format!("node-{number}"),
        key: key(number),
        machine: Some(machine(number)),
        state: NodeState::Up,
        roles: roles.iter().map(|role| (*role).to_owned()).collect(),
        health: NodeHealth::Healthy,
        services: Vec::new(),
        kubernetes: None,
    }
}

fn etcd(number: u8) -> EtcdMember {
    EtcdMember { node: Some(format!("node-{number}")), learner: false, reachable: true }
}

/// A cluster of `control_plane` members and one worker, all of them healthy.
fn healthy_cluster(control_plane: u8) -> Cluster {
    let members: Vec<ClusterMember> = (1..=control_plane)
        .map(|number| joined(number, ClusterPart::ControlPlane))
        .chain([joined(9, ClusterPart::Worker)])
        .collect();
    let seen = ObservedCluster {
        nodes: (1..=control_plane)
            .map(|number| node(number, &[CONSENSUS_MEMBER_ROLE]))
            .chain([node(9, &[])])
            .collect(),
        etcd_members: (1..=control_plane).map(etcd).collect(),
        ..ObservedCluster::default()
    };
    Cluster {
        id: Uuid::from_u128(77),
        spec: spec(u32::from(control_plane), 1),
        deleting: false,
        identity: Some(ClusterIdentity {
            ca_certificate: vec![1],
            curators: vec!["10.0.0.1:7835".into()],
            founded_at: at(0),
        }),
        epoch: 0,
        restored_at: None,
        restoring: None,
        declared_roles: Vec::new(),
        kubernetes: None,
        upgrade: None,
        members,
        departed_keys: BTreeSet::new(),
        observed: CuratorAnswer::Observed(seen),
    }
}

fn observed(cluster: &mut Cluster) -> &mut ObservedCluster {
    match &mut cluster.observed {
        CuratorAnswer::Observed(seen) => seen,
        _ => panic!("not seen"),
    }
}

/// The plan as text: its steps, then its waits.
fn plan_text(cluster: &Cluster, candidates: &[u8]) -> String {
    let candidate = |number: &u8| CandidateMachine {
        machine: machine(*number),
        name: format!("m{number}"),
        location: None,
    };
    let candidates: Vec<CandidateMachine> = candidates.iter().map(candidate).collect();
    let plan = plan_cluster(cluster, &candidates, &MachineLocations::new(), at(1000));
    let number = |machine: &MachineId| machine.0.as_u128();
    let steps = plan.steps.iter().map(|step| match step {
        ClusterPlanStep::AddMember { machine, part } => format!("choose {} {part}", number(machine)),
        ClusterPlanStep::SendOrder { machine, order: what } => format!("ask {} {what}", number(machine)),
        ClusterPlanStep::RecordFounding { machine } => format!("founded {}", number(machine)),
        ClusterPlanStep::ApproveNode { machine, .. } => format!("approve {}", number(machine)),
        ClusterPlanStep::ChangeRoles { node, add: give, remove: take } => {
            format!("{node} +{} -{}", give.join("+"), take.join("-"))
        }
        ClusterPlanStep::DecommissionNode { node } => format!("decommission {node}"),
        ClusterPlanStep::DeleteNode { node } => format!("delete {node}"),
        ClusterPlanStep::MarkLeaving { machine, reason: why } => {
            format!("leaving {}: {why}", number(machine))
        }
        ClusterPlanStep::RemoveMember { machine, .. } => format!("forget {}", number(machine)),
        ClusterPlanStep::DeclareRole { role } => format!("declare {role}"),
        ClusterPlanStep::UndeclareRole { role } => format!("undeclare {role}"),
        ClusterPlanStep::DeleteDeclaration { role } => format!("forget role {role}"),
        ClusterPlanStep::DeleteCluster => "remove".to_owned(),
        other => other.to_string(),
    });
    let waits = plan.wait_reasons.iter().map(|wait| format!("waits: {wait}"));
    let machines =
        plan.machine_waits.iter().map(|(machine, wait)| format!("{} waits: {wait}", number(machine)));
    steps.chain(waits).chain(machines).collect::<Vec<_>>().join("; ")
}

#[test]
fn healthy_cluster_needs_no_steps() {
    assert_eq!(plan_text(&healthy_cluster(3), &[20]), "");
    assert_eq!(plan_text(&healthy_cluster(1), &[]), "");
}

#[test]
fn role_is_declared_before_use_and_undeclared_after_removal() {
    let declared = |withdrawn| DesiredDeclaration { role: "web".to_owned(), digest: [7; 32], withdrawn };
    let mut cluster = healthy_cluster(1);
    cluster.declared_roles = vec![declared(false)];
    cluster.spec.roles.insert("web".to_owned());
    assert_eq!(plan_text(&cluster, &[]), "declare web; node-9 +web -");
    observed(&mut cluster).declared_digests.insert("web".to_owned(), [7; 32]);
    observed(&mut cluster).nodes[1].roles.insert("web".to_owned());
    assert_eq!(plan_text(&cluster, &[]), "");
    cluster.declared_roles = vec![declared(true)];
    cluster.spec.roles.clear();
    let waits = "waits: role web is withdrawn, and 1 of its nodes have it still";
    assert_eq!(plan_text(&cluster, &[]), format!("node-9 + -web; {waits}"));
    observed(&mut cluster).nodes[1].roles.clear();
    assert_eq!(plan_text(&cluster, &[]), "undeclare web");
    observed(&mut cluster).declared_digests.clear();
    assert_eq!(plan_text(&cluster, &[]), "forget role web");
    // While no curator answers, what the curators have is unknown.
    cluster.observed = CuratorAnswer::Unreachable("off".to_owned());
    assert_eq!(plan_text(&cluster, &[]), "waits: none of its curators answers: off");
}

#[test]
fn one_machine_founds_and_the_others_wait() {
    let mut cluster = Cluster {
        identity: None,
        observed: CuratorAnswer::NotQueried,
        members: Vec::new(),
        ..healthy_cluster(3)
    };
    assert_eq!(
        plan_text(&cluster, &[1, 2, 3, 4, 5]),
        "choose 1 control-plane; choose 2 control-plane; choose 3 control-plane; choose 4 worker"
    );
    assert_eq!(
        plan_text(&cluster, &[1, 2]),
        "choose 1 control-plane; choose 2 control-plane; \
         waits: 1 more of the control-plane is wanted, and no machine is free; \
         waits: 1 more of the worker is wanted, and no machine is free"
    );
    cluster.members = vec![
        member(1, ClusterPart::ControlPlane),
        member(2, ClusterPart::ControlPlane),
        member(9, ClusterPart::Worker),
    ];
    cluster.spec = spec(1, 1);
    cluster.members.remove(1);
    let second = "9 waits: m1 founds the cluster first";
    assert_eq!(plan_text(&cluster, &[]), format!("ask 1 found; {second}"));
    cluster.members[0].last_order = Some(order(MembershipOrder::Found, 5));
    assert_eq!(
        plan_text(&cluster, &[]),
        format!("1 waits: it was ordered to found the cluster, and has not accepted the order; {second}")
    );
    cluster.members[0].report =
        Some(MemberReport { generation: 3, key: Some(key(1)), ..MemberReport::default() });
    assert_eq!(plan_text(&cluster, &[]), format!("1 waits: it is founding the cluster; {second}"));
    let report = cluster.members[0].report.as_mut().unwrap();
    report.error = Some("no etcd".to_owned());
    assert_eq!(plan_text(&cluster, &[]), format!("1 waits: it cannot found the cluster: no etcd; {second}"));
    let report = cluster.members[0].report.as_mut().unwrap();
    (report.error, report.ca_certificate, report.address) =
        (None, Some(vec![1]), Some("10.0.0.1".to_owned()));
    assert_eq!(plan_text(&cluster, &[]), format!("founded 1; {second}"));
}

#[test]
fn founder_that_is_lost_leaves_before_another_one_founds() {
    let founder = ClusterMember {
        last_order: Some(order(MembershipOrder::Found, 5)),
        phase: Phase::NeedsHuman,
        ..member(1, ClusterPart::ControlPlane)
    };
    let mut cluster = Cluster {
        identity: None,
        observed: CuratorAnswer::NotQueried,
        spec: spec(1, 0),
        members: vec![founder],
        ..healthy_cluster(3)
    };
    assert!(
        plan_text(&cluster, &[2]).starts_with("leaving 1: its machine is lost"),
        "{}",
        plan_text(&cluster, &[2])
    );
    cluster.members[0].leave_reason = Some("its machine is lost".to_owned());
    assert_eq!(plan_text(&cluster, &[2]), "choose 2 control-plane; ask 1 leave");
    cluster.members.push(member(2, ClusterPart::ControlPlane));
    assert_eq!(
        plan_text(&cluster, &[]),
        "ask 1 leave; 2 waits: m1, which was to found the cluster, has to leave first"
    );
    cluster.members[0].last_order = Some(order(MembershipOrder::Leave, 5));
    assert_eq!(plan_text(&cluster, &[]), "forget 1; ask 2 found");
}

#[test]
fn machine_becomes_a_node_step_by_step() {
    let report = |generation, number: Option<u8>, error: Option<&str>| {
        Some(MemberReport {
            generation,
            key: number.map(key),
            error: error.map(str::to_owned),
            ..MemberReport::default()
        })
    };
    let (join, leave) = (Some(MembershipOrder::Join), Some(MembershipOrder::Leave));
    let new = |state| Some(ClusterNode { state, ..node(9, &[]) });
    for (name, what, ago, member_report, record, expected) in [
        ("no order yet", None, 0, None, None, "ask 9 join"),
        (
            "just ordered",
            join,
            5,
            None,
            None,
            "9 waits: it was ordered to join, and has not accepted the order",
        ),
        (
            "an older order",
            join,
            5,
            report(2, None, None),
            None,
            "9 waits: it was ordered to join, and has not",
        ),
        ("its ticket is over", join, 3700, None, None, "ask 9 join"),
        ("it begins", join, 5, report(3, None, None), None, "9 waits: it was ordered to join, and registers"),
        (
            "it registers",
            join,
            5,
            report(3, Some(9), None),
            None,
            "9 waits: it was ordered to join, and registers",
        ),
        ("refused", join, 5, report(3, Some(9), Some("no")), None, "9 waits: it cannot join: no"),
        ("refused for long", join, 200, report(3, Some(9), Some("no")), None, "ask 9 join"),
        ("registered", join, 5, report(3, Some(9), None), new(NodeState::New), "approve 9"),
        (
            "another key registered",
            join,
            5,
            report(3, Some(8), None),
            new(NodeState::New),
            "9 waits: it was ordered to join, and registers",
        ),
        ("let in", join, 5, report(3, Some(9), None), new(NodeState::Standby), "9 waits: it was let in"),
        ("up", join, 5, report(3, Some(9), None), new(NodeState::Up), ""),
        (
            "was founder and lost its disk",
            Some(MembershipOrder::Found),
            5,
            report(0, None, None),
            None,
            "ask 9 join",
        ),
        (
            "is leaving",
            leave,
            5,
            report(2, Some(9), None),
            None,
            "9 waits: it has to leave before it can join again",
        ),
        ("has left", leave, 5, report(3, None, None), None, "ask 9 join"),
        ("gone for ever", join, 5, report(3, Some(9), None), new(NodeState::Decommissioned), "ask 9 leave"),
    ] {
        let mut cluster = healthy_cluster(3);
        let worker = cluster.members.last_mut().unwrap();
        worker.last_order = what.map(|what| order(what, ago));
        worker.report = member_report;
        let nodes = &mut observed(&mut cluster).nodes;
        nodes.pop();
        nodes.extend(record);
        let text = plan_text(&cluster, &[]);
        assert!(text.starts_with(expected) && text.is_empty() == expected.is_empty(), "{name}: {text}");
    }
}

#[test]
fn manual_approval_is_never_automatic() {
    let mut cluster = healthy_cluster(3);
    cluster.spec.approval = JoinApproval::Manual;
    observed(&mut cluster).nodes.last_mut().unwrap().state = NodeState::New;
    assert_eq!(
        plan_text(&cluster, &[]),
        "9 waits: a person has to approve its key; run: shepherdctl cluster approve ams m9"
    );
    cluster.members[3].approved_key = Some(key(8));
    assert!(
        plan_text(&cluster, &[]).starts_with("9 waits: a person"),
        "another key than it has was approved"
    );
    cluster.members[3].approved_key = Some(key(9));
    assert_eq!(plan_text(&cluster, &[]), "approve 9");
}

#[test]
fn members_of_etcd_come_one_at_a_time() {
    let mut cluster = healthy_cluster(3);
    for number in [1, 2] {
        observed(&mut cluster).nodes[number].roles.clear();
    }
    observed(&mut cluster).etcd_members.truncate(1);
    assert_eq!(
        plan_text(&cluster, &[]),
        "node-2 +consensus-member -; 3 waits: members of etcd come and go one at a time"
    );
    observed(&mut cluster).nodes[1] = node(2, &[CONSENSUS_MEMBER_ROLE]);
    observed(&mut cluster).etcd_members.push(EtcdMember { node: None, learner: true, reachable: false });
    assert_eq!(
        plan_text(&cluster, &[]),
        "2 waits: its member of etcd has not started; 3 waits: another member of etcd is still learning"
    );
    observed(&mut cluster).etcd_members[1] = EtcdMember { learner: true, ..etcd(2) };
    assert_eq!(
        plan_text(&cluster, &[]),
        "2 waits: its member of etcd learns; 3 waits: another member of etcd is still learning"
    );
    observed(&mut cluster).etcd_members[1] = EtcdMember { reachable: false, ..etcd(2) };
    assert_eq!(
        plan_text(&cluster, &[]),
        "2 waits: its member of etcd is not reached; \
         3 waits: 1 of 2 members of etcd are reached, and one more would leave no majority"
    );
}

#[test]
fn workers_get_the_requested_roles() {
    let mut cluster = healthy_cluster(3);
    cluster.spec.roles = BTreeSet::from(["web".to_owned(), "dns".to_owned()]);
    observed(&mut cluster).nodes[3] = node(9, &["old", "web"]);
    assert_eq!(plan_text(&cluster, &[]), "node-9 +dns -old");
    observed(&mut cluster).nodes[3].health = NodeHealth::Silent(Duration::from_secs(70));
    assert_eq!(
        plan_text(&cluster, &[]),
        "9 waits: its curator has had no report from it for 70 s; its machine reports"
    );
}

#[test]
fn lost_member_loses_its_vote_first_and_is_then_replaced() {
    let mut cluster = healthy_cluster(3);
    cluster.members[2].phase = Phase::NeedsHuman;
    observed(&mut cluster).nodes[2].health = NodeHealth::Silent(Duration::from_mins(15));
    observed(&mut cluster).etcd_members[2].reachable = false;
    let first = plan_text(&cluster, &[]);
    assert!(first.starts_with("leaving 3: its machine is lost"), "{first}");
    cluster.members[2].leave_reason = Some("its machine is lost".to_owned());
    assert_eq!(plan_text(&cluster, &[4]), "choose 4 control-plane; node-3 + -consensus-member");
    observed(&mut cluster).nodes[2].roles.clear();
    observed(&mut cluster).etcd_members.pop();
    assert_eq!(plan_text(&cluster, &[4]), "choose 4 control-plane; decommission node-3");
    observed(&mut cluster).nodes[2].state = NodeState::Decommissioned;
    assert_eq!(plan_text(&cluster, &[4]), "choose 4 control-plane; delete node-3");
    observed(&mut cluster).nodes.remove(2);
    assert_eq!(plan_text(&cluster, &[4]), "choose 4 control-plane; ask 3 leave");
    cluster.members[2].last_order = Some(order(MembershipOrder::Leave, 5));
    assert_eq!(plan_text(&cluster, &[4]), "choose 4 control-plane; forget 3");
}

#[test]
fn node_healthy_to_its_curator_is_not_replaced() {
    for phase in [Phase::Silent, Phase::Recovering, Phase::NeedsHuman, Phase::Quarantined] {
        let mut cluster = healthy_cluster(3);
        cluster.members[2].phase = phase;
        assert_eq!(plan_text(&cluster, &[4]), "", "{phase}");
    }
}

#[test]
fn healthy_leaving_member_votes_until_it_is_replaced() {
    let mut cluster = healthy_cluster(3);
    cluster.members[0].retiring = true;
    assert_eq!(plan_text(&cluster, &[]), "leaving 1: it is being retired");
    cluster.members[0].leave_reason = Some("it is being retired".to_owned());
    let wait = "it leaves, because it is being retired; another member has to take its place first";
    assert_eq!(plan_text(&cluster, &[4]), format!("choose 4 control-plane; 1 waits: {wait}"));
    cluster.members.push(joined(4, ClusterPart::ControlPlane));
    observed(&mut cluster).nodes.push(node(4, &[]));
    assert_eq!(plan_text(&cluster, &[]), format!("node-4 +consensus-member -; 1 waits: {wait}"));
    observed(&mut cluster).nodes[4] = node(4, &[CONSENSUS_MEMBER_ROLE]);
    observed(&mut cluster).etcd_members.push(etcd(4));
    assert_eq!(plan_text(&cluster, &[]), "node-1 + -consensus-member");
}

#[test]
fn needed_vote_is_not_removed() {
    let mut cluster = healthy_cluster(3);
    cluster.members[2].leave_reason = Some("its machine is lost".to_owned());
    observed(&mut cluster).nodes[2].health = NodeHealth::Silent(Duration::from_mins(15));
    for number in [1, 2] {
        observed(&mut cluster).etcd_members[number].reachable = false;
    }
    let text = plan_text(&cluster, &[]);
    assert!(text.contains("its vote is needed: 1 of the 2 other members are reached"), "{text}");
    assert!(!text.contains("-consensus-member"), "{text}");
}

#[test]
fn last_member_is_never_removed() {
    let mut cluster = healthy_cluster(1);
    cluster.members[0].leave_reason = Some("it is being retired".to_owned());
    let text = plan_text(&cluster, &[]);
    assert!(text.contains("its vote is needed: 0 of the 0"), "{text}");
}

#[test]
fn machine_with_a_new_disk_rejoins_and_its_old_node_is_deleted() {
    let mut cluster = healthy_cluster(3);
    cluster.members[1].report = Some(MemberReport::default());
    // The last order is dispatched again, but its ticket is used up.
    cluster.members[1].last_order = Some(order(MembershipOrder::Join, 3700));
    observed(&mut cluster).nodes[1].health = NodeHealth::Silent(Duration::from_mins(1));
    observed(&mut cluster).etcd_members[1].reachable = false;
    assert_eq!(plan_text(&cluster, &[]), "ask 2 join; node-2 + -consensus-member");
    cluster.members[1].report = joined(12, ClusterPart::ControlPlane).report;
    cluster.members[1].last_order = Some(order(MembershipOrder::Join, 5));
    observed(&mut cluster).nodes[1].roles.clear();
    observed(&mut cluster).etcd_members.remove(1);
    observed(&mut cluster).nodes.push(ClusterNode { machine: Some(machine(2)), ..node(12, &[]) });
    assert_eq!(plan_text(&cluster, &[]), "decommission node-2; node-12 +consensus-member -");
}

#[test]
fn healthy_node_is_never_deleted_as_stale() {
    let mut cluster = healthy_cluster(3);
    cluster.members[1].report =
        Some(MemberReport { generation: 3, key: Some(key(12)), ..MemberReport::default() });
    let text = plan_text(&cluster, &[]);
    assert!(!text.contains("node-2"), "{text}");
}

#[test]
fn nodes_approved_by_others_are_not_touched() {
    let mut cluster = healthy_cluster(3);
    let silent = NodeHealth::Silent(Duration::from_mins(15));
    observed(&mut cluster).nodes.push(ClusterNode { health: silent, machine: None, ..node(50, &["web"]) });
    observed(&mut cluster).nodes.push(ClusterNode { health: silent, ..node(51, &["web"]) });
    assert_eq!(plan_text(&cluster, &[]), "");
}

#[test]
fn scale_down_removes_the_control_plane_one_by_one() {
    let mut cluster = healthy_cluster(5);
    cluster.spec = spec(3, 0);
    assert_eq!(
        plan_text(&cluster, &[]),
        "leaving 5: the cluster is to have 3 of the control-plane; \
         leaving 9: the cluster is to have 0 of the worker"
    );
    cluster.members[4].leave_reason = Some("too many".to_owned());
    cluster.members[5].leave_reason = Some("too many".to_owned());
    assert_eq!(plan_text(&cluster, &[]), "decommission node-9; node-5 + -consensus-member");
}

#[test]
fn cluster_is_deleted_when_its_machines_have_left() {
    let mut cluster = Cluster { deleting: true, observed: CuratorAnswer::NotQueried, ..healthy_cluster(1) };
    assert_eq!(plan_text(&cluster, &[]), "ask 1 leave; ask 9 leave");
    cluster.members[0].last_order = Some(order(MembershipOrder::Leave, 5));
    cluster.members[0].report = Some(MemberReport { generation: 3, ..MemberReport::default() });
    cluster.members[1].last_order = Some(order(MembershipOrder::Leave, 5));
    cluster.members[1].report = Some(MemberReport { generation: 2, ..MemberReport::default() });
    assert_eq!(
        plan_text(&cluster, &[]),
        "forget 1; 9 waits: it was ordered to leave, and has not reported that it has left"
    );
    cluster.members[1].phase = Phase::NeedsHuman;
    assert_eq!(plan_text(&cluster, &[]), "forget 1; forget 9");
    cluster.members = vec![member(9, ClusterPart::Worker)];
    assert_eq!(plan_text(&cluster, &[]), "forget 9", "it never received an order");
    cluster.members.clear();
    assert_eq!(plan_text(&cluster, &[]), "remove");
}

/// A cluster of three that is being restored since 50 seconds, onto a control plane of one. One member of the old
/// control plane is reachable.
fn restoring(onto: Option<u8>) -> Cluster {
    let since = at(950);
    let restoring =
        PendingRestore { requested_at: since, target_machine: onto.map(machine), digest: Some([5; 32]) };
    let mut cluster = Cluster {
        restoring: Some(restoring),
        observed: CuratorAnswer::NotQueried,
        spec: spec(1, 1),
        ..healthy_cluster(3)
    };
    cluster.members[1].phase = Phase::NeedsHuman;
    cluster.members[2].phase = Phase::Silent;
    cluster
}

fn mark_old_members_left(cluster: &mut Cluster) {
    for member in &mut cluster.members[..3] {
        member.leave_reason = Some("its cluster is restored from a snapshot".to_owned());
        member.last_order = Some(order(MembershipOrder::Leave, 5));
        member.report = Some(MemberReport { generation: 2, key: Some([1; 32]), ..MemberReport::default() });
    }
}

#[test]
fn restore_waits_for_reachable_old_members_to_leave() {
    let mut cluster = restoring(None);
    let why = "its cluster is restored from a snapshot";
    let fence = "waits: 1 machines of its old control plane still report and have to leave first";
    assert_eq!(
        plan_text(&cluster, &[20]),
        format!("leaving 1: {why}; leaving 2: {why}; leaving 3: {why}; {fence}")
    );
    for member in &mut cluster.members[..3] {
        member.leave_reason = Some(why.to_owned());
    }
    assert_eq!(
        plan_text(&cluster, &[20]),
        format!("choose 20 control-plane; ask 1 leave; ask 2 leave; ask 3 leave; {fence}")
    );
    mark_old_members_left(&mut cluster);
    cluster.members.push(ClusterMember { chosen_at: at(960), ..member(20, ClusterPart::ControlPlane) });
    let query = "it was ordered to leave, and has not reported that it has left";
    assert_eq!(
        plan_text(&cluster, &[]),
        format!("{fence}; 1 waits: {query}; 2 waits: {query}; 3 waits: {query}")
    );
    cluster.members[0].report = Some(MemberReport { generation: 3, ..MemberReport::default() });
    let waits = format!(
        "1 waits: it has left; its node is deleted once the cluster is back; 2 waits: {query}; 3 waits: {query}; \
         9 waits: m20 restores the cluster first"
    );
    assert_eq!(plan_text(&cluster, &[]), format!("ask 20 found; {waits}"));
    cluster.members[3].leave_reason = Some("it is being retired".to_owned());
    assert!(plan_text(&cluster, &[]).ends_with("9 waits: it leaves once the cluster is back"));
    cluster.members[3].leave_reason = None;
    // The wait for a reachable member that does not leave is limited: its epoch is over in any case.
    cluster.members[0].report =
        Some(MemberReport { generation: 2, key: Some([1; 32]), ..MemberReport::default() });
    cluster.restoring.as_mut().unwrap().requested_at = at(1000 - 121);
    assert!(plan_text(&cluster, &[]).starts_with("ask 20 found; "), "{}", plan_text(&cluster, &[]));
    cluster.members[4].last_order = Some(order(MembershipOrder::Found, 5));
    cluster.members[4].report = Some(MemberReport {
        generation: 3,
        key: Some(key(20)),
        ca_certificate: Some(vec![1]),
        address: Some("10.0.0.20".to_owned()),
        ..MemberReport::default()
    });
    assert!(plan_text(&cluster, &[]).starts_with("founded 20; "), "{}", plan_text(&cluster, &[]));
    cluster.members[4].phase = Phase::NeedsHuman;
    let lost = plan_text(&cluster, &[]);
    assert!(lost.starts_with("leaving 20: it was lost while the cluster was restored"), "{lost}");
}

#[test]
fn restore_uses_the_target_machine_or_one_that_has_left() {
    let mut cluster = restoring(Some(21));
    mark_old_members_left(&mut cluster);
    cluster.members[0].report = Some(MemberReport { generation: 3, ..MemberReport::default() });
    let first = plan_text(&cluster, &[20, 21]);
    assert!(first.starts_with("choose 21 control-plane; "), "{first}");
    let nobody = plan_text(&cluster, &[20]);
    assert!(!nobody.contains("choose") && !nobody.contains("forget"), "{nobody}");
    assert!(nobody.contains("waits: the machine that it is to be restored onto is not free yet"), "{nobody}");
    // Of the old members, the one that the operator named.
    cluster.restoring.as_mut().unwrap().target_machine = Some(machine(1));
    assert!(plan_text(&cluster, &[20]).starts_with("forget 1; "), "{}", plan_text(&cluster, &[20]));
    cluster.restoring.as_mut().unwrap().target_machine = None;
    assert!(plan_text(&cluster, &[]).starts_with("forget 1; "), "{}", plan_text(&cluster, &[]));
    assert!(
        plan_text(&cluster, &[20]).starts_with("choose 20 control-plane; "),
        "{}",
        plan_text(&cluster, &[20])
    );
}

#[test]
fn surviving_member_rejoins_the_restored_cluster_once() {
    let mut cluster = Cluster { epoch: 2, restored_at: Some(at(900)), ..healthy_cluster(1) };
    assert_eq!(plan_text(&cluster, &[]), "ask 1 join; ask 9 join");
    cluster.members[0].report.as_mut().unwrap().epoch = 2;
    assert_eq!(plan_text(&cluster, &[]), "ask 9 join", "it reports the new epoch");
    cluster.members[1].last_order = Some(order(MembershipOrder::Join, 50));
    assert_eq!(plan_text(&cluster, &[]), "", "it was ordered to join");
}

#[test]
fn member_registering_during_restore_is_ordered_again() {
    let mut cluster = Cluster { epoch: 2, restored_at: Some(at(900)), ..healthy_cluster(1) };
    for number in [0, 1] {
        cluster.members[number].report.as_mut().unwrap().epoch = 2;
    }
    let waiting = MemberReport { generation: 3, key: Some(key(20)), ..MemberReport::default() };
    cluster.members.push(ClusterMember {
        last_order: Some(order(MembershipOrder::Join, 50)),
        report: Some(waiting),
        ..member(20, ClusterPart::Worker)
    });
    cluster.spec.workers = 2;
    let last = cluster.members.len() - 1;
    let registers = "20 waits: it was ordered to join, and registers";
    assert_eq!(
        plan_text(&cluster, &[]),
        registers,
        "it was ordered to join since then, and gets the new addresses"
    );
    cluster.members[last].last_order =
        Some(LastOrder { sent_at: at(899), ..order(MembershipOrder::Join, 50) });
    assert_eq!(plan_text(&cluster, &[]), "ask 20 join", "the snapshot has no node of it");
    observed(&mut cluster).nodes.push(ClusterNode { state: NodeState::Standby, ..node(20, &[]) });
    assert_eq!(plan_text(&cluster, &[]), "ask 20 join", "the snapshot has it as let in");
}

#[test]
fn leaving_member_of_a_restored_cluster_gets_no_other_order() {
    let mut cluster = Cluster { epoch: 2, restored_at: Some(at(900)), ..healthy_cluster(1) };
    cluster.members[0].report.as_mut().unwrap().epoch = 2;
    // Its node joined after the snapshot.
    observed(&mut cluster).nodes.retain(|node| node.key != key(9));
    assert_eq!(plan_text(&cluster, &[]), "ask 9 leave");
    cluster.members[1].last_order = Some(order(MembershipOrder::Leave, 50));
    let waits = "9 waits: its node was deleted, and it has to leave before it can join again";
    assert_eq!(plan_text(&cluster, &[]), waits);
}

#[test]
fn departed_nodes_revived_by_a_snapshot_are_deleted() {
    let mut cluster = healthy_cluster(1);
    observed(&mut cluster).nodes.push(ClusterNode { machine: Some(machine(30)), ..node(30, &[]) });
    assert_eq!(plan_text(&cluster, &[]), "", "what somebody else let in is theirs");
    cluster.departed_keys = BTreeSet::from([key(30), key(9)]);
    assert_eq!(
        plan_text(&cluster, &[]),
        "decommission node-30",
        "and that of a machine that is here by now stays"
    );
    observed(&mut cluster).nodes[2].machine = None;
    assert_eq!(plan_text(&cluster, &[]), "decommission node-30", "it is known by its key");
    observed(&mut cluster).nodes[2].state = NodeState::Decommissioned;
    assert_eq!(plan_text(&cluster, &[]), "delete node-30");
}

#[test]
fn free_machine_restores_before_it_becomes_a_worker() {
    let mut cluster = restoring(None);
    cluster.spec.workers = 3;
    let first = plan_text(&cluster, &[20]);
    assert!(!first.contains("worker"), "{first}");
    mark_old_members_left(&mut cluster);
    let next = plan_text(&cluster, &[20]);
    assert!(next.starts_with("choose 20 control-plane; ") && !next.contains("worker"), "{next}");
}

#[test]
fn plan_waits_for_unreachable_curators() {
    let mut cluster = healthy_cluster(3);
    cluster.members[0].phase = Phase::NeedsHuman;
    cluster.members[1].retiring = true;
    cluster.observed = CuratorAnswer::Unreachable("no route".to_owned());
    assert_eq!(plan_text(&cluster, &[]), "waits: none of its curators answers: no route");
}

#[test]
fn kubernetes_starts_on_controllers_first_and_stops_on_workers_first() {
    use crate::cluster::kubernetes::{
        CONTROLLER_ROLE, CuratorKubernetes, DesiredKubernetes as WantedKubernetes, ObservedKubernetes,
        WORKER_ROLE, tests,
    };
    let wanted = |removing| {
        let kubernetes = tests::kubernetes();
        Some(WantedKubernetes { spec: kubernetes, removing, pending_rotations: Vec::new() })
    };
    let mut cluster = healthy_cluster(3);
    cluster.kubernetes = wanted(false);
    observed(&mut cluster).kubernetes = ObservedKubernetes::Absent;
    assert_eq!(plan_text(&cluster, &[]), "its curators receive the Kubernetes spec");
    let settings = crate::cluster::kubernetes::spec_from_settings(tests::kubernetes().to_settings());
    observed(&mut cluster).kubernetes =
        ObservedKubernetes::Present(CuratorKubernetes { spec: settings, ..CuratorKubernetes::default() });
    // A member that is not reachable gets no role yet. Without a controller there are no workers.
    observed(&mut cluster).etcd_members[1].reachable = false;
    let first = plan_text(&cluster, &[]);
    assert!(
        first.starts_with("node-1 +kubernetes-controller -; node-3 +kubernetes-controller -; 2 waits:"),
        "{first}"
    );
    observed(&mut cluster).etcd_members[1].reachable = true;
    for node in 0..3 {
        observed(&mut cluster).nodes[node].roles.insert(CONTROLLER_ROLE.to_owned());
    }
    assert_eq!(plan_text(&cluster, &[]), "node-9 +kubernetes-worker -");
    observed(&mut cluster).nodes[3].roles.insert(WORKER_ROLE.to_owned());
    assert_eq!(plan_text(&cluster, &[]), "");
    // No role is taken while the curators do not answer for Kubernetes.
    let has = std::mem::replace(
        &mut observed(&mut cluster).kubernetes,
        ObservedKubernetes::Unavailable("busy".to_owned()),
    );
    assert!(!plan_text(&cluster, &[]).contains("kubernetes-worker"), "{}", plan_text(&cluster, &[]));
    observed(&mut cluster).kubernetes = has;
    // A controller that leaves gives up that role before its vote.
    cluster.members[2].leave_reason = Some("it is old".to_owned());
    cluster.members.push(joined(4, ClusterPart::ControlPlane));
    observed(&mut cluster).nodes.push(node(4, &[CONSENSUS_MEMBER_ROLE, CONTROLLER_ROLE]));
    observed(&mut cluster).etcd_members.push(etcd(4));
    assert_eq!(plan_text(&cluster, &[]), "node-3 + -kubernetes-controller");
    observed(&mut cluster).nodes[2].roles.remove(CONTROLLER_ROLE);
    assert_eq!(plan_text(&cluster, &[]), "node-3 + -consensus-member");
    // Kubernetes is removed: pods first.
    let mut cluster = healthy_cluster(1);
    cluster.kubernetes = wanted(true);
    observed(&mut cluster).kubernetes = ObservedKubernetes::Present(CuratorKubernetes::default());
    observed(&mut cluster).nodes[0].roles.insert(CONTROLLER_ROLE.to_owned());
    observed(&mut cluster).nodes[1].roles.insert(WORKER_ROLE.to_owned());
    let both = plan_text(&cluster, &[]);
    assert!(both.starts_with("node-9 + -kubernetes-worker; waits:"), "{both}");
    observed(&mut cluster).nodes[1].roles.clear();
    assert!(
        plan_text(&cluster, &[]).starts_with("node-1 + -kubernetes-controller"),
        "{}",
        plan_text(&cluster, &[])
    );
    observed(&mut cluster).nodes[0].roles.remove(CONTROLLER_ROLE);
    assert_eq!(plan_text(&cluster, &[]), "its curators forget Kubernetes");
    observed(&mut cluster).kubernetes = ObservedKubernetes::Absent;
    assert_eq!(plan_text(&cluster, &[]), "Kubernetes is forgotten");
}
