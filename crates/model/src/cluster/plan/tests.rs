//! Fixtures for tests of cluster plans, and plans of whole clusters.

use std::collections::BTreeSet;

use uuid::Uuid;

use super::*;
use crate::cluster::declaration::DesiredDeclaration;
use crate::cluster::node_address::NodeAddresses;
use crate::cluster::restore_programs::EtcdPrograms;
use crate::cluster::spec::tests::spec;
use crate::cluster::state::{
    CONSENSUS_MEMBER_ROLE, ClusterIdentity, ClusterNode, EtcdMember, LastOrder, MemberReport, NodeHealth,
    NodeState,
};
use crate::phase::Phase;

pub(super) fn at(seconds: i64) -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
}

pub(super) fn machine(number: u8) -> MachineId {
    MachineId(Uuid::from_u128(u128::from(number)))
}

pub(super) fn key(number: u8) -> [u8; 32] {
    [number; 32]
}

pub(super) fn member(number: u8, part: ClusterPart) -> ClusterMember {
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
        keep_authority: false,
        listed_address: None,
    }
}

pub(super) fn order(what: MembershipOrder, seconds_ago: i64) -> LastOrder {
    LastOrder { order: what, generation: 3, sent_at: at(1000 - seconds_ago) }
}

/// A member that joined and reported its key.
pub(super) fn joined(number: u8, part: ClusterPart) -> ClusterMember {
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

pub(super) fn node(number: u8, roles: &[&str]) -> ClusterNode {
    ClusterNode {
        id: format!("node-{number}"),
        key: key(number),
        machine: Some(machine(number)),
        state: NodeState::Up,
        roles: roles.iter().map(|role| (*role).to_owned()).collect(),
        health: NodeHealth::Healthy,
        services: Vec::new(),
        kubernetes: None,
        addresses: NodeAddresses::default(),
    }
}

pub(super) fn etcd(number: u8) -> EtcdMember {
    EtcdMember { node: Some(format!("node-{number}")), learner: false, reachable: true }
}

/// A cluster of `control_plane` members and one worker, all of them healthy.
pub(super) fn healthy_cluster(control_plane: u8) -> Cluster {
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
        peer_renewal: None,
        authority_theft: None,
        declared_roles: Vec::new(),
        kubernetes: None,
        upgrade: None,
        secret_keys: None,
        oldest_snapshot: None,
        members,
        departed_keys: BTreeSet::new(),
        observed: CuratorAnswer::Observed(seen),
        etcd_full_since: None,
    }
}

pub(super) fn observed(cluster: &mut Cluster) -> &mut ObservedCluster {
    match &mut cluster.observed {
        CuratorAnswer::Observed(seen) => seen,
        _ => panic!("not seen"),
    }
}

/// The programs of a machine that can restore an image of etcd 3.6, or cannot.
pub(super) fn programs(restores: bool) -> EtcdPrograms {
    let version = || Some("3.6.1".to_owned());
    EtcdPrograms { etcd: version(), etcdutl: version().filter(|_| restores) }
}

/// The plan as text: its steps, then its waits.
pub(super) fn plan_text(cluster: &Cluster, candidates: &[u8]) -> String {
    let candidate = |number: &u8| CandidateMachine {
        machine: machine(*number),
        name: format!("m{number}"),
        location: None,
        // From 40 on, a machine can restore an image of etcd 3.6.
        programs: programs(*number >= 40),
    };
    let candidates: Vec<CandidateMachine> = candidates.iter().map(candidate).collect();
    let plan = plan_cluster(cluster, &candidates, &MachineLocations::new(), at(1000));
    let number = |machine: &MachineId| machine.0.as_u128();
    let steps = plan.steps.iter().map(|step| match step {
        ClusterPlanStep::AddMember { machine, part } => format!("choose {} {part}", number(machine)),
        ClusterPlanStep::SendOrder { machine, order: what } => format!("ask {} {what}", number(machine)),
        ClusterPlanStep::RecordFounding { machine } => format!("founded {}", number(machine)),
        ClusterPlanStep::ApproveNode { machine, address, .. } => {
            let place = address.map(|address| format!(" at {address}")).unwrap_or_default();
            format!("approve {}{place}", number(machine))
        }
        ClusterPlanStep::AssignAddress { machine, address, is_moved, .. } => {
            let way = if *is_moved { " by an order" } else { "" };
            format!("assign {} {address}{way}", number(machine))
        }
        ClusterPlanStep::ChangeRoles { node, add: give, remove: take, keep_authority } => {
            let keeping = if *keep_authority { " keeping the authority" } else { "" };
            format!("{node} +{} -{}{keeping}", give.join("+"), take.join("-"))
        }
        ClusterPlanStep::DecommissionNode { node } => format!("decommission {node}"),
        ClusterPlanStep::DeleteNode { node } => format!("delete {node}"),
        ClusterPlanStep::MarkLeaving { machine, reason: why, .. } => {
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
    let waits = "waits: role web is withdrawn, and 1 of its nodes still have it";
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
fn plan_waits_for_unreachable_curators() {
    let mut cluster = healthy_cluster(3);
    cluster.members[0].phase = Phase::NeedsHuman;
    cluster.members[1].retiring = true;
    cluster.observed = CuratorAnswer::Unreachable("no route".to_owned());
    assert_eq!(plan_text(&cluster, &[]), "waits: none of its curators answers: no route");
}

#[test]
fn silent_curators_are_explained_by_what_their_machines_report() {
    let mut cluster = healthy_cluster(5);
    cluster.observed = CuratorAnswer::Unreachable("no route".to_owned());
    let silent = "waits: none of its curators answers: no route";
    let report = |cluster: &mut Cluster, index: usize, error: &str| {
        cluster.members[index].report.as_mut().unwrap().error = Some(error.to_owned());
    };
    // What a worker reports explains nothing.
    report(&mut cluster, 5, "it has no disk");
    assert_eq!(plan_text(&cluster, &[]), silent);
    report(&mut cluster, 1, "etcd is full");
    let name = |index: usize, cluster: &Cluster| cluster.members[index].name.clone();
    let one = format!("{silent}; {} reports: etcd is full", name(1, &cluster));
    assert_eq!(plan_text(&cluster, &[]), one);
    for index in [0, 2, 3] {
        report(&mut cluster, index, "etcd is missing");
    }
    let text = plan_text(&cluster, &[]);
    let first = format!("{silent}; {} reports: etcd is missing; ", name(0, &cluster));
    assert!(text.starts_with(&first) && text.matches(" reports: ").count() == 3, "{text}");
}

#[test]
fn nothing_changes_while_etcd_is_full() {
    /// A change of the cluster, its first step while etcd has room, and whether the worker waits while it is full.
    type Case = (&'static str, fn(&mut Cluster), &'static str, bool);
    let full =
        "waits: its etcd is full (alarm NOSPACE) and accepts no writes until its members have made room";
    let leaves = "it cannot leave yet: the etcd of its cluster is full (alarm NOSPACE)";
    let silent = "waits: none of its curators answers: off";
    let cases: [Case; 6] = [
        ("nothing is due", |_| {}, "", false),
        ("it grows", |cluster| cluster.spec.workers = 2, "choose 20 worker", false),
        ("it shrinks", |cluster| cluster.spec.workers = 0, "leaving 9", false),
        ("a machine retires", |cluster| cluster.members[3].retiring = true, "leaving 9", true),
        (
            "a machine leaves",
            |cluster| {
                cluster.spec.workers = 0;
                cluster.members[3].leave_reason = Some("it is surplus".to_owned());
            },
            "decommission node-9",
            true,
        ),
        (
            "a role is declared",
            |cluster| {
                let web = DesiredDeclaration { role: "web".to_owned(), digest: [7; 32], withdrawn: false };
                cluster.declared_roles = vec![web];
            },
            "declare web",
            false,
        ),
    ];
    for (what, change, steps, waits) in cases {
        let mut cluster = healthy_cluster(3);
        change(&mut cluster);
        let planned = plan_text(&cluster, &[20]);
        assert!(planned.starts_with(steps), "{what}: {planned}");
        observed(&mut cluster).is_etcd_full = true;
        let planned = plan_text(&cluster, &[20]);
        assert!(planned.starts_with(full) && !planned.contains(" 20 "), "{what}: {planned}");
        assert_eq!(planned.contains(&format!("; 9 waits: {leaves}")), waits, "{what}: {planned}");
        // The last answer counts until the next one.
        cluster.etcd_full_since = Some(at(900));
        cluster.observed = CuratorAnswer::Unreachable("off".to_owned());
        let planned = plan_text(&cluster, &[20]);
        assert!(planned.starts_with(&format!("{full}; {silent}")), "{what}: {planned}");
        cluster.observed = healthy_cluster(3).observed;
        let planned = plan_text(&cluster, &[20]);
        assert!(planned.starts_with(steps) && !planned.contains("NOSPACE"), "{what}: {planned}");
    }
}
