//! What is planned, case by case, and that any cluster gets where it is to be.

use uuid::Uuid;

use super::*;
use crate::model::cluster::declared::Declared;
use crate::model::cluster::spec::tests::spec;
use crate::model::cluster::state::{Asked, EtcdMember, Founded, Report};

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
}

fn machine(number: u8) -> MachineId {
    MachineId(Uuid::from_u128(u128::from(number)))
}

fn key(number: u8) -> [u8; 32] {
    [number; 32]
}

fn member(number: u8, part: Part) -> Member {
    Member {
        machine: machine(number),
        name: format!("m{number}"),
        part,
        chosen_at: at(i64::from(number)),
        approved: None,
        leaving: None,
        asked: None,
        report: None,
        phase: Phase::Ready,
        retiring: false,
    }
}

fn order(what: Wanted, seconds_ago: i64) -> Asked {
    Asked { what, generation: 3, at: at(1000 - seconds_ago) }
}

/// A member that joined and reported its key.
fn joined(number: u8, part: Part) -> Member {
    Member {
        asked: Some(order(Wanted::Join, 300)),
        report: Some(Report {
            generation: 3,
            key: Some(key(number)),
            ca_certificate: Some(vec![1]),
            ..Report::default()
        }),
        ..member(number, part)
    }
}

fn node(number: u8, roles: &[&str]) -> Node {
    Node {
        id: format!("node-{number}"),
        key: key(number),
        machine: Some(machine(number)),
        state: NodeState::Up,
        roles: roles.iter().map(|role| (*role).to_owned()).collect(),
        health: Health::Healthy,
        services: Vec::new(),
        kubernetes: None,
    }
}

fn etcd(number: u8) -> EtcdMember {
    EtcdMember { node: Some(format!("node-{number}")), learner: false, reachable: true }
}

/// A cluster of `control_plane` members and one worker, all of which are well.
fn well(control_plane: u8) -> Cluster {
    let members: Vec<Member> = (1..=control_plane)
        .map(|number| joined(number, Part::ControlPlane))
        .chain([joined(9, Part::Worker)])
        .collect();
    let seen = Seen {
        nodes: (1..=control_plane)
            .map(|number| node(number, &[CONSENSUS_MEMBER]))
            .chain([node(9, &[])])
            .collect(),
        etcd: (1..=control_plane).map(etcd).collect(),
        ..Seen::default()
    };
    Cluster {
        id: Uuid::from_u128(77),
        spec: spec(u32::from(control_plane), 1),
        deleting: false,
        founded: Some(Founded { ca_certificate: vec![1], curators: vec!["10.0.0.1:7835".into()], at: at(0) }),
        epoch: 0,
        restored_at: None,
        restoring: None,
        declared: Vec::new(),
        kubernetes: None,
        upgrade: None,
        members,
        left: BTreeSet::new(),
        view: View::Seen(seen),
    }
}

fn seen(cluster: &mut Cluster) -> &mut Seen {
    match &mut cluster.view {
        View::Seen(seen) => seen,
        _ => panic!("not seen"),
    }
}

/// What is planned, a line a step, and what is waited for.
fn told(cluster: &Cluster, candidates: &[u8]) -> String {
    let candidate =
        |number: &u8| Candidate { machine: machine(*number), name: format!("m{number}"), location: None };
    let candidates: Vec<Candidate> = candidates.iter().map(candidate).collect();
    let plan = plan(cluster, &candidates, &Places::new(), at(1000));
    let number = |machine: &MachineId| machine.0.as_u128();
    let steps = plan.steps.iter().map(|step| match step {
        Step::Choose { machine, part } => format!("choose {} {part}", number(machine)),
        Step::Ask { machine, what } => format!("ask {} {what}", number(machine)),
        Step::Founded { machine } => format!("founded {}", number(machine)),
        Step::Approve { machine, .. } => format!("approve {}", number(machine)),
        Step::Roles { node, give, take } => format!("{node} +{} -{}", give.join("+"), take.join("-")),
        Step::Decommission { node } => format!("decommission {node}"),
        Step::Delete { node } => format!("delete {node}"),
        Step::Leaving { machine, why } => format!("leaving {}: {why}", number(machine)),
        Step::Forget { machine, .. } => format!("forget {}", number(machine)),
        Step::Declare { role } => format!("declare {role}"),
        Step::Undeclare { role } => format!("undeclare {role}"),
        Step::ForgetDeclaration { role } => format!("forget role {role}"),
        Step::Remove => "remove".to_owned(),
        other => other.to_string(),
    });
    let waits = plan.waits.iter().map(|wait| format!("waits: {wait}"));
    let machines = plan.machines.iter().map(|(machine, wait)| format!("{} waits: {wait}", number(machine)));
    steps.chain(waits).chain(machines).collect::<Vec<_>>().join("; ")
}

#[test]
fn cluster_that_is_well_is_left_alone() {
    assert_eq!(told(&well(3), &[20]), "");
    assert_eq!(told(&well(1), &[]), "");
}

#[test]
fn role_is_declared_before_it_is_given_and_withdrawn_once_it_is_taken() {
    let declared = |withdrawn| Declared { role: "web".to_owned(), digest: [7; 32], withdrawn };
    let mut cluster = well(1);
    cluster.declared = vec![declared(false)];
    cluster.spec.roles.insert("web".to_owned());
    assert_eq!(told(&cluster, &[]), "declare web; node-9 +web -");
    seen(&mut cluster).declared.insert("web".to_owned(), [7; 32]);
    seen(&mut cluster).nodes[1].roles.insert("web".to_owned());
    assert_eq!(told(&cluster, &[]), "");
    cluster.declared = vec![declared(true)];
    cluster.spec.roles.clear();
    let waits = "waits: role web is withdrawn, and 1 of its nodes have it still";
    assert_eq!(told(&cluster, &[]), format!("node-9 + -web; {waits}"));
    seen(&mut cluster).nodes[1].roles.clear();
    assert_eq!(told(&cluster, &[]), "undeclare web");
    seen(&mut cluster).declared.clear();
    assert_eq!(told(&cluster, &[]), "forget role web");
    // Where nobody answers, nothing is known of what the curators have.
    cluster.view = View::Away("off".to_owned());
    assert_eq!(told(&cluster, &[]), "waits: none of its curators answers: off");
}

#[test]
fn founding_is_asked_of_one_machine_and_the_others_wait() {
    let mut cluster = Cluster { founded: None, view: View::Nobody, members: Vec::new(), ..well(3) };
    assert_eq!(
        told(&cluster, &[1, 2, 3, 4, 5]),
        "choose 1 control-plane; choose 2 control-plane; choose 3 control-plane; choose 4 worker"
    );
    assert_eq!(
        told(&cluster, &[1, 2]),
        "choose 1 control-plane; choose 2 control-plane; \
         waits: 1 more of the control-plane is wanted, and no machine is free; \
         waits: 1 more of the worker is wanted, and no machine is free"
    );
    cluster.members =
        vec![member(1, Part::ControlPlane), member(2, Part::ControlPlane), member(9, Part::Worker)];
    cluster.spec = spec(1, 1);
    cluster.members.remove(1);
    let second = "9 waits: m1 founds the cluster first";
    assert_eq!(told(&cluster, &[]), format!("ask 1 found; {second}"));
    cluster.members[0].asked = Some(order(Wanted::Found, 5));
    assert_eq!(
        told(&cluster, &[]),
        format!("1 waits: it was asked to found the cluster, and has not taken the order; {second}")
    );
    cluster.members[0].report = Some(Report { generation: 3, key: Some(key(1)), ..Report::default() });
    assert_eq!(told(&cluster, &[]), format!("1 waits: it is founding the cluster; {second}"));
    let report = cluster.members[0].report.as_mut().unwrap();
    report.error = Some("no etcd".to_owned());
    assert_eq!(told(&cluster, &[]), format!("1 waits: it cannot found the cluster: no etcd; {second}"));
    let report = cluster.members[0].report.as_mut().unwrap();
    (report.error, report.ca_certificate, report.address) =
        (None, Some(vec![1]), Some("10.0.0.1".to_owned()));
    assert_eq!(told(&cluster, &[]), format!("founded 1; {second}"));
}

#[test]
fn founder_that_is_lost_leaves_before_another_one_founds() {
    let founder = Member {
        asked: Some(order(Wanted::Found, 5)),
        phase: Phase::NeedsHuman,
        ..member(1, Part::ControlPlane)
    };
    let mut cluster =
        Cluster { founded: None, view: View::Nobody, spec: spec(1, 0), members: vec![founder], ..well(3) };
    assert!(told(&cluster, &[2]).starts_with("leaving 1: its machine is lost"), "{}", told(&cluster, &[2]));
    cluster.members[0].leaving = Some("its machine is lost".to_owned());
    assert_eq!(told(&cluster, &[2]), "choose 2 control-plane; ask 1 leave");
    cluster.members.push(member(2, Part::ControlPlane));
    assert_eq!(
        told(&cluster, &[]),
        "ask 1 leave; 2 waits: m1, which was to found the cluster, has to leave first"
    );
    cluster.members[0].asked = Some(order(Wanted::Leave, 5));
    assert_eq!(told(&cluster, &[]), "forget 1; ask 2 found");
}

#[test]
fn machine_becomes_a_node_step_by_step() {
    let report = |generation, number: Option<u8>, error: Option<&str>| {
        Some(Report {
            generation,
            key: number.map(key),
            error: error.map(str::to_owned),
            ..Report::default()
        })
    };
    let new = |state| Some(Node { state, ..node(9, &[]) });
    for (name, what, ago, said, record, expected) in [
        ("asked nothing", None, 0, None, None, "ask 9 join"),
        (
            "just asked",
            Some(Wanted::Join),
            5,
            None,
            None,
            "9 waits: it was asked to join, and has not taken the order",
        ),
        (
            "an older order",
            Some(Wanted::Join),
            5,
            report(2, None, None),
            None,
            "9 waits: it was asked to join, and has not",
        ),
        ("its ticket is over", Some(Wanted::Join), 3700, None, None, "ask 9 join"),
        (
            "it begins",
            Some(Wanted::Join),
            5,
            report(3, None, None),
            None,
            "9 waits: it was asked to join, and registers",
        ),
        (
            "it registers",
            Some(Wanted::Join),
            5,
            report(3, Some(9), None),
            None,
            "9 waits: it was asked to join, and registers",
        ),
        (
            "refused",
            Some(Wanted::Join),
            5,
            report(3, Some(9), Some("no")),
            None,
            "9 waits: it cannot join: no",
        ),
        ("refused for long", Some(Wanted::Join), 200, report(3, Some(9), Some("no")), None, "ask 9 join"),
        ("registered", Some(Wanted::Join), 5, report(3, Some(9), None), new(NodeState::New), "approve 9"),
        (
            "another key registered",
            Some(Wanted::Join),
            5,
            report(3, Some(8), None),
            new(NodeState::New),
            "9 waits: it was asked to join, and registers",
        ),
        (
            "let in",
            Some(Wanted::Join),
            5,
            report(3, Some(9), None),
            new(NodeState::Standby),
            "9 waits: it was let in",
        ),
        ("up", Some(Wanted::Join), 5, report(3, Some(9), None), new(NodeState::Up), ""),
        ("was founder and lost its disk", Some(Wanted::Found), 5, report(0, None, None), None, "ask 9 join"),
        (
            "is leaving",
            Some(Wanted::Leave),
            5,
            report(2, Some(9), None),
            None,
            "9 waits: it has to leave before it comes anew",
        ),
        ("has left", Some(Wanted::Leave), 5, report(3, None, None), None, "ask 9 join"),
        (
            "gone for ever",
            Some(Wanted::Join),
            5,
            report(3, Some(9), None),
            new(NodeState::Decommissioned),
            "ask 9 leave",
        ),
    ] {
        let mut cluster = well(3);
        let worker = cluster.members.last_mut().unwrap();
        worker.asked = what.map(|what| order(what, ago));
        worker.report = said;
        let nodes = &mut seen(&mut cluster).nodes;
        nodes.pop();
        nodes.extend(record);
        let told = told(&cluster, &[]);
        assert!(told.starts_with(expected) && told.is_empty() == expected.is_empty(), "{name}: {told}");
    }
}

#[test]
fn nobody_is_let_in_by_us_where_a_person_is_to() {
    let mut cluster = well(3);
    cluster.spec.approval = Approval::Manual;
    seen(&mut cluster).nodes.last_mut().unwrap().state = NodeState::New;
    assert_eq!(
        told(&cluster, &[]),
        "9 waits: a person has to approve its key; run: shepherdctl cluster approve ams m9"
    );
    cluster.members[3].approved = Some(key(8));
    assert!(told(&cluster, &[]).starts_with("9 waits: a person"), "another key than it has was approved");
    cluster.members[3].approved = Some(key(9));
    assert_eq!(told(&cluster, &[]), "approve 9");
}

#[test]
fn members_of_etcd_come_one_at_a_time() {
    let mut cluster = well(3);
    for number in [1, 2] {
        seen(&mut cluster).nodes[number].roles.clear();
    }
    seen(&mut cluster).etcd.truncate(1);
    assert_eq!(
        told(&cluster, &[]),
        "node-2 +consensus-member -; 3 waits: members of etcd come and go one at a time"
    );
    seen(&mut cluster).nodes[1] = node(2, &[CONSENSUS_MEMBER]);
    seen(&mut cluster).etcd.push(EtcdMember { node: None, learner: true, reachable: false });
    assert_eq!(
        told(&cluster, &[]),
        "2 waits: its member of etcd has not started; 3 waits: another member of etcd is still learning"
    );
    seen(&mut cluster).etcd[1] = EtcdMember { learner: true, ..etcd(2) };
    assert_eq!(
        told(&cluster, &[]),
        "2 waits: its member of etcd learns; 3 waits: another member of etcd is still learning"
    );
    seen(&mut cluster).etcd[1] = EtcdMember { reachable: false, ..etcd(2) };
    assert_eq!(
        told(&cluster, &[]),
        "2 waits: its member of etcd is not reached; \
         3 waits: 1 of 2 members of etcd are reached, and one more would leave no majority"
    );
}

#[test]
fn workers_have_the_roles_that_are_asked_for() {
    let mut cluster = well(3);
    cluster.spec.roles = BTreeSet::from(["web".to_owned(), "dns".to_owned()]);
    seen(&mut cluster).nodes[3] = node(9, &["old", "web"]);
    assert_eq!(told(&cluster, &[]), "node-9 +dns -old");
    seen(&mut cluster).nodes[3].health = Health::Silent(Duration::from_secs(70));
    assert_eq!(told(&cluster, &[]), "9 waits: its curator has not heard it for 70 s; its machine reports");
}

#[test]
fn lost_member_gives_up_its_vote_first_and_is_then_replaced() {
    let mut cluster = well(3);
    cluster.members[2].phase = Phase::NeedsHuman;
    seen(&mut cluster).nodes[2].health = Health::Silent(Duration::from_mins(15));
    seen(&mut cluster).etcd[2].reachable = false;
    let first = told(&cluster, &[]);
    assert!(first.starts_with("leaving 3: its machine is lost"), "{first}");
    cluster.members[2].leaving = Some("its machine is lost".to_owned());
    assert_eq!(told(&cluster, &[4]), "choose 4 control-plane; node-3 + -consensus-member");
    seen(&mut cluster).nodes[2].roles.clear();
    seen(&mut cluster).etcd.pop();
    assert_eq!(told(&cluster, &[4]), "choose 4 control-plane; decommission node-3");
    seen(&mut cluster).nodes[2].state = NodeState::Decommissioned;
    assert_eq!(told(&cluster, &[4]), "choose 4 control-plane; delete node-3");
    seen(&mut cluster).nodes.remove(2);
    assert_eq!(told(&cluster, &[4]), "choose 4 control-plane; ask 3 leave");
    cluster.members[2].asked = Some(order(Wanted::Leave, 5));
    assert_eq!(told(&cluster, &[4]), "choose 4 control-plane; forget 3");
}

#[test]
fn node_that_its_curator_hears_is_not_replaced_for_what_we_do_not_hear() {
    for phase in [Phase::Silent, Phase::Recovering, Phase::NeedsHuman, Phase::Quarantined] {
        let mut cluster = well(3);
        cluster.members[2].phase = phase;
        assert_eq!(told(&cluster, &[4]), "", "{phase}");
    }
}

#[test]
fn member_that_is_well_keeps_its_vote_until_another_has_taken_its_place() {
    let mut cluster = well(3);
    cluster.members[0].retiring = true;
    assert_eq!(told(&cluster, &[]), "leaving 1: it is being retired");
    cluster.members[0].leaving = Some("it is being retired".to_owned());
    let wait = "it leaves, because it is being retired; another member has to take its place first";
    assert_eq!(told(&cluster, &[4]), format!("choose 4 control-plane; 1 waits: {wait}"));
    cluster.members.push(joined(4, Part::ControlPlane));
    seen(&mut cluster).nodes.push(node(4, &[]));
    assert_eq!(told(&cluster, &[]), format!("node-4 +consensus-member -; 1 waits: {wait}"));
    seen(&mut cluster).nodes[4] = node(4, &[CONSENSUS_MEMBER]);
    seen(&mut cluster).etcd.push(etcd(4));
    assert_eq!(told(&cluster, &[]), "node-1 + -consensus-member");
}

#[test]
fn vote_that_is_needed_is_not_given_up() {
    let mut cluster = well(3);
    cluster.members[2].leaving = Some("its machine is lost".to_owned());
    seen(&mut cluster).nodes[2].health = Health::Silent(Duration::from_mins(15));
    for number in [1, 2] {
        seen(&mut cluster).etcd[number].reachable = false;
    }
    let told = told(&cluster, &[]);
    assert!(told.contains("its vote is needed: 1 of the 2 other members are reached"), "{told}");
    assert!(!told.contains("-consensus-member"), "{told}");
}

#[test]
fn only_member_is_never_taken() {
    let mut cluster = well(1);
    cluster.members[0].leaving = Some("it is being retired".to_owned());
    let told = told(&cluster, &[]);
    assert!(told.contains("its vote is needed: 0 of the 0"), "{told}");
}

#[test]
fn machine_that_lost_its_disk_comes_anew_and_its_old_node_goes() {
    let mut cluster = well(3);
    cluster.members[1].report = Some(Report::default());
    // What was asked last is handed out again, but its ticket is used up.
    cluster.members[1].asked = Some(order(Wanted::Join, 3700));
    seen(&mut cluster).nodes[1].health = Health::Silent(Duration::from_mins(1));
    seen(&mut cluster).etcd[1].reachable = false;
    assert_eq!(told(&cluster, &[]), "ask 2 join; node-2 + -consensus-member");
    cluster.members[1].report = joined(12, Part::ControlPlane).report;
    cluster.members[1].asked = Some(order(Wanted::Join, 5));
    seen(&mut cluster).nodes[1].roles.clear();
    seen(&mut cluster).etcd.remove(1);
    seen(&mut cluster).nodes.push(Node { machine: Some(machine(2)), ..node(12, &[]) });
    assert_eq!(told(&cluster, &[]), "decommission node-2; node-12 +consensus-member -");
}

#[test]
fn node_that_is_heard_is_no_old_node_whatever_its_machine_said() {
    let mut cluster = well(3);
    cluster.members[1].report = Some(Report { generation: 3, key: Some(key(12)), ..Report::default() });
    let told = told(&cluster, &[]);
    assert!(!told.contains("node-2"), "{told}");
}

#[test]
fn node_that_somebody_else_let_in_is_left_alone() {
    let mut cluster = well(3);
    let silent = Health::Silent(Duration::from_mins(15));
    seen(&mut cluster).nodes.push(Node { health: silent, machine: None, ..node(50, &["web"]) });
    seen(&mut cluster).nodes.push(Node { health: silent, ..node(51, &["web"]) });
    assert_eq!(told(&cluster, &[]), "");
}

#[test]
fn what_is_too_many_goes_and_the_control_plane_one_by_one() {
    let mut cluster = well(5);
    cluster.spec = spec(3, 0);
    assert_eq!(
        told(&cluster, &[]),
        "leaving 5: the cluster is to have 3 of the control-plane; \
         leaving 9: the cluster is to have 0 of the worker"
    );
    cluster.members[4].leaving = Some("too many".to_owned());
    cluster.members[5].leaving = Some("too many".to_owned());
    assert_eq!(told(&cluster, &[]), "decommission node-9; node-5 + -consensus-member");
}

#[test]
fn cluster_ends_when_its_machines_have_left() {
    let mut cluster = Cluster { deleting: true, view: View::Nobody, ..well(1) };
    assert_eq!(told(&cluster, &[]), "ask 1 leave; ask 9 leave");
    cluster.members[0].asked = Some(order(Wanted::Leave, 5));
    cluster.members[0].report = Some(Report { generation: 3, ..Report::default() });
    cluster.members[1].asked = Some(order(Wanted::Leave, 5));
    cluster.members[1].report = Some(Report { generation: 2, ..Report::default() });
    assert_eq!(told(&cluster, &[]), "forget 1; 9 waits: it was asked to leave, and has not said that it has");
    cluster.members[1].phase = Phase::NeedsHuman;
    assert_eq!(told(&cluster, &[]), "forget 1; forget 9");
    cluster.members = vec![member(9, Part::Worker)];
    assert_eq!(told(&cluster, &[]), "forget 9", "it was never asked anything");
    cluster.members.clear();
    assert_eq!(told(&cluster, &[]), "remove");
}

/// A cluster of three that is being brought back since 50 seconds, onto a control plane of one; of the old one a member is
/// heard.
fn restoring(onto: Option<u8>) -> Cluster {
    let since = at(950);
    let restoring = Restoring { since, onto: onto.map(machine), digest: Some([5; 32]) };
    let mut cluster = Cluster { restoring: Some(restoring), view: View::Nobody, spec: spec(1, 1), ..well(3) };
    cluster.members[1].phase = Phase::NeedsHuman;
    cluster.members[2].phase = Phase::Silent;
    cluster
}

fn old_ones_leave(cluster: &mut Cluster) {
    for member in &mut cluster.members[..3] {
        member.leaving = Some("its cluster is restored from a snapshot".to_owned());
        member.asked = Some(order(Wanted::Leave, 5));
        member.report = Some(Report { generation: 2, key: Some([1; 32]), ..Report::default() });
    }
}

#[test]
fn cluster_is_brought_back_by_a_new_machine_once_those_of_the_old_that_are_heard_have_left() {
    let mut cluster = restoring(None);
    let why = "its cluster is restored from a snapshot";
    let fence = "waits: 1 of its old control plane are heard and have to leave first";
    assert_eq!(
        told(&cluster, &[20]),
        format!("leaving 1: {why}; leaving 2: {why}; leaving 3: {why}; {fence}")
    );
    for member in &mut cluster.members[..3] {
        member.leaving = Some(why.to_owned());
    }
    assert_eq!(
        told(&cluster, &[20]),
        format!("choose 20 control-plane; ask 1 leave; ask 2 leave; ask 3 leave; {fence}")
    );
    old_ones_leave(&mut cluster);
    cluster.members.push(Member { chosen_at: at(960), ..member(20, Part::ControlPlane) });
    let asked = "it was asked to leave, and has not said that it has";
    assert_eq!(told(&cluster, &[]), format!("{fence}; 1 waits: {asked}; 2 waits: {asked}; 3 waits: {asked}"));
    cluster.members[0].report = Some(Report { generation: 3, ..Report::default() });
    let waits = format!(
        "1 waits: it has left; its node is deleted once the cluster is back; 2 waits: {asked}; 3 waits: {asked}; \
         9 waits: m20 restores the cluster first"
    );
    assert_eq!(told(&cluster, &[]), format!("ask 20 found; {waits}"));
    cluster.members[3].leaving = Some("it is being retired".to_owned());
    assert!(told(&cluster, &[]).ends_with("9 waits: it leaves once the cluster is back"));
    cluster.members[3].leaving = None;
    // One that is heard and does not leave is not waited for without an end: its epoch is over in any case.
    cluster.members[0].report = Some(Report { generation: 2, key: Some([1; 32]), ..Report::default() });
    cluster.restoring.as_mut().unwrap().since = at(1000 - 121);
    assert!(told(&cluster, &[]).starts_with("ask 20 found; "), "{}", told(&cluster, &[]));
    cluster.members[4].asked = Some(order(Wanted::Found, 5));
    cluster.members[4].report = Some(Report {
        generation: 3,
        key: Some(key(20)),
        ca_certificate: Some(vec![1]),
        address: Some("10.0.0.20".to_owned()),
        ..Report::default()
    });
    assert!(told(&cluster, &[]).starts_with("founded 20; "), "{}", told(&cluster, &[]));
    cluster.members[4].phase = Phase::NeedsHuman;
    let lost = told(&cluster, &[]);
    assert!(lost.starts_with("leaving 20: it was lost while the cluster was restored"), "{lost}");
}

#[test]
fn cluster_is_brought_back_onto_the_machine_that_was_said_or_one_that_has_left_where_none_is_free() {
    let mut cluster = restoring(Some(21));
    old_ones_leave(&mut cluster);
    cluster.members[0].report = Some(Report { generation: 3, ..Report::default() });
    let first = told(&cluster, &[20, 21]);
    assert!(first.starts_with("choose 21 control-plane; "), "{first}");
    let nobody = told(&cluster, &[20]);
    assert!(!nobody.contains("choose") && !nobody.contains("forget"), "{nobody}");
    assert!(nobody.contains("waits: the machine that it is to be restored onto is not free yet"), "{nobody}");
    // Of the old ones, the one that was said.
    cluster.restoring.as_mut().unwrap().onto = Some(machine(1));
    assert!(told(&cluster, &[20]).starts_with("forget 1; "), "{}", told(&cluster, &[20]));
    cluster.restoring.as_mut().unwrap().onto = None;
    assert!(told(&cluster, &[]).starts_with("forget 1; "), "{}", told(&cluster, &[]));
    assert!(told(&cluster, &[20]).starts_with("choose 20 control-plane; "), "{}", told(&cluster, &[20]));
}

#[test]
fn whoever_lived_on_is_told_where_the_restored_cluster_is_once() {
    let mut cluster = Cluster { epoch: 2, restored_at: Some(at(900)), ..well(1) };
    assert_eq!(told(&cluster, &[]), "ask 1 join; ask 9 join");
    cluster.members[0].report.as_mut().unwrap().epoch = 2;
    assert_eq!(told(&cluster, &[]), "ask 9 join", "it has heard of it");
    cluster.members[1].asked = Some(order(Wanted::Join, 50));
    assert_eq!(told(&cluster, &[]), "", "it was told");
}

#[test]
fn whoever_registered_while_the_cluster_was_restored_is_asked_anew() {
    let mut cluster = Cluster { epoch: 2, restored_at: Some(at(900)), ..well(1) };
    for number in [0, 1] {
        cluster.members[number].report.as_mut().unwrap().epoch = 2;
    }
    let waiting = Report { generation: 3, key: Some(key(20)), ..Report::default() };
    cluster.members.push(Member {
        asked: Some(order(Wanted::Join, 50)),
        report: Some(waiting),
        ..member(20, Part::Worker)
    });
    cluster.spec.workers = 2;
    let last = cluster.members.len() - 1;
    let registers = "20 waits: it was asked to join, and registers";
    assert_eq!(told(&cluster, &[]), registers, "it was asked since then, and is told where the cluster is");
    cluster.members[last].asked = Some(Asked { at: at(899), ..order(Wanted::Join, 50) });
    assert_eq!(told(&cluster, &[]), "ask 20 join", "the snapshot has no node of it");
    seen(&mut cluster).nodes.push(Node { state: NodeState::Standby, ..node(20, &[]) });
    assert_eq!(told(&cluster, &[]), "ask 20 join", "the snapshot has it as let in");
}

#[test]
fn whoever_is_to_leave_a_restored_cluster_is_told_nothing_else() {
    let mut cluster = Cluster { epoch: 2, restored_at: Some(at(900)), ..well(1) };
    cluster.members[0].report.as_mut().unwrap().epoch = 2;
    // Its node came after the snapshot.
    seen(&mut cluster).nodes.retain(|node| node.key != key(9));
    assert_eq!(told(&cluster, &[]), "ask 9 leave");
    cluster.members[1].asked = Some(order(Wanted::Leave, 50));
    let waits = "9 waits: its node was deleted, and it has to leave before it comes anew";
    assert_eq!(told(&cluster, &[]), waits);
}

#[test]
fn nodes_that_had_left_and_that_a_snapshot_brought_back_go_again() {
    let mut cluster = well(1);
    seen(&mut cluster).nodes.push(Node { machine: Some(machine(30)), ..node(30, &[]) });
    assert_eq!(told(&cluster, &[]), "", "what somebody else let in is theirs");
    cluster.left = BTreeSet::from([key(30), key(9)]);
    assert_eq!(
        told(&cluster, &[]),
        "decommission node-30",
        "and that of a machine that is here by now stays"
    );
    seen(&mut cluster).nodes[2].machine = None;
    assert_eq!(told(&cluster, &[]), "decommission node-30", "it is known by its key");
    seen(&mut cluster).nodes[2].state = NodeState::Decommissioned;
    assert_eq!(told(&cluster, &[]), "delete node-30");
}

#[test]
fn machine_that_is_free_is_taken_to_restore_the_cluster_before_any_worker() {
    let mut cluster = restoring(None);
    cluster.spec.workers = 3;
    let first = told(&cluster, &[20]);
    assert!(!first.contains("worker"), "{first}");
    old_ones_leave(&mut cluster);
    let next = told(&cluster, &[20]);
    assert!(next.starts_with("choose 20 control-plane; ") && !next.contains("worker"), "{next}");
}

#[test]
fn curators_that_say_nothing_are_waited_for_and_nothing_is_done() {
    let mut cluster = well(3);
    cluster.members[0].phase = Phase::NeedsHuman;
    cluster.members[1].retiring = true;
    cluster.view = View::Away("no route".to_owned());
    assert_eq!(told(&cluster, &[]), "waits: none of its curators answers: no route");
}

#[test]
fn kubernetes_is_put_then_run_by_controllers_then_by_workers_and_goes_the_other_way() {
    use crate::model::cluster::kubernetes::{
        CONTROLLER, Has, Known, WORKER, Wanted as WantedKubernetes, tests,
    };
    let wanted = |removing| {
        let kubernetes = tests::kubernetes();
        Some(WantedKubernetes { kubernetes, removing, rotate: Vec::new() })
    };
    let mut cluster = well(3);
    cluster.kubernetes = wanted(false);
    seen(&mut cluster).kubernetes = Known::Nothing;
    assert_eq!(told(&cluster, &[]), "its curators are told what Kubernetes is to be");
    let settings = crate::model::cluster::kubernetes::told(tests::kubernetes().settings());
    seen(&mut cluster).kubernetes = Known::Has(Has { settings, ..Has::default() });
    // A member that is not reached is not asked yet; without a controller there are no workers.
    seen(&mut cluster).etcd[1].reachable = false;
    let first = told(&cluster, &[]);
    assert!(
        first.starts_with("node-1 +kubernetes-controller -; node-3 +kubernetes-controller -; 2 waits:"),
        "{first}"
    );
    seen(&mut cluster).etcd[1].reachable = true;
    for node in 0..3 {
        seen(&mut cluster).nodes[node].roles.insert(CONTROLLER.to_owned());
    }
    assert_eq!(told(&cluster, &[]), "node-9 +kubernetes-worker -");
    seen(&mut cluster).nodes[3].roles.insert(WORKER.to_owned());
    assert_eq!(told(&cluster, &[]), "");
    // What curators do not say takes nothing from anybody.
    let has = std::mem::replace(&mut seen(&mut cluster).kubernetes, Known::Away("busy".to_owned()));
    assert!(!told(&cluster, &[]).contains("kubernetes-worker"), "{}", told(&cluster, &[]));
    seen(&mut cluster).kubernetes = has;
    // A controller that leaves gives that up before its vote.
    cluster.members[2].leaving = Some("it is old".to_owned());
    cluster.members.push(joined(4, Part::ControlPlane));
    seen(&mut cluster).nodes.push(node(4, &[CONSENSUS_MEMBER, CONTROLLER]));
    seen(&mut cluster).etcd.push(etcd(4));
    assert_eq!(told(&cluster, &[]), "node-3 + -kubernetes-controller");
    seen(&mut cluster).nodes[2].roles.remove(CONTROLLER);
    assert_eq!(told(&cluster, &[]), "node-3 + -consensus-member");
    // It goes: pods first.
    let mut cluster = well(1);
    cluster.kubernetes = wanted(true);
    seen(&mut cluster).kubernetes = Known::Has(Has::default());
    seen(&mut cluster).nodes[0].roles.insert(CONTROLLER.to_owned());
    seen(&mut cluster).nodes[1].roles.insert(WORKER.to_owned());
    let both = told(&cluster, &[]);
    assert!(both.starts_with("node-9 + -kubernetes-worker; waits:"), "{both}");
    seen(&mut cluster).nodes[1].roles.clear();
    assert!(told(&cluster, &[]).starts_with("node-1 + -kubernetes-controller"), "{}", told(&cluster, &[]));
    seen(&mut cluster).nodes[0].roles.remove(CONTROLLER);
    assert_eq!(told(&cluster, &[]), "its curators forget Kubernetes");
    seen(&mut cluster).kubernetes = Known::Nothing;
    assert_eq!(told(&cluster, &[]), "Kubernetes is forgotten");
}
