//! The course of clusters, from one beginning after another, as people are told it.

use std::time::Duration;

use uuid::Uuid;

use super::*;
use crate::model::cluster::declared::Declared;
use crate::model::cluster::kubernetes::{Kubernetes, Wanted as WantedKubernetes};
use crate::model::cluster::spec::tests::spec;
use crate::model::cluster::spec::{Approval, Change};
use crate::model::cluster::state::Restoring;
use crate::model::cluster::upgrade::{Bundle, Release, Upgrade};

fn now() -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000, 0).unwrap()
}

fn machine(number: u8) -> MachineId {
    MachineId(Uuid::from_u128(u128::from(number)))
}

/// A cluster that was just asked for, and machines 1 to `free`.
fn asked_for(control_plane: u32, workers: u32, free: u8) -> Beginning {
    let candidate =
        |number: u8| Candidate { machine: machine(number), name: format!("m{number}"), location: None };
    Beginning {
        cluster: Cluster::asked_for(Uuid::from_u128(77), spec(control_plane, workers)),
        last: Seen::default(),
        candidates: (1..=free).map(candidate).collect(),
        places: Places::new(),
    }
}

/// What became of it, a line a step, and how it ended.
fn lines(foreseen: &Foreseen) -> Vec<String> {
    let subject = |step: &Foretold| step.name.clone().map(|name| format!("{name} ")).unwrap_or_default();
    let mut lines: Vec<String> =
        foreseen.steps.iter().map(|step| format!("{}{}", subject(step), step.what)).collect();
    lines.push(format!("{}: {}", foreseen.end.as_str(), foreseen.waits.join("; ")));
    lines.extend(foreseen.machines.iter().map(|(machine, waits)| format!("{machine} waits: {waits}")));
    lines
}

/// Where it is once all of that is done.
fn afterwards(beginning: Beginning) -> Beginning {
    let mut course = Course { beginning, now: now(), told: Vec::new() };
    for _ in 0..MOST {
        let Beginning { cluster, candidates, places, .. } = &course.beginning;
        let planned = plan(cluster, candidates, places, course.now);
        let idle = planned.steps.is_empty();
        planned.steps.into_iter().for_each(|step| course.take(step));
        if idle && !course.pass() {
            return course.beginning;
        }
        course.now = after(course.now, Duration::from_secs(1));
    }
    panic!("it never comes to rest");
}

/// A settled cluster of so many, and what is free beside it.
fn settled(control_plane: u32, workers: u32, free: u8) -> Beginning {
    let beginning = afterwards(asked_for(control_plane, workers, free));
    assert_eq!(lines(&foresee(beginning.clone(), now())), ["settled: "]);
    beginning
}

#[test]
fn cluster_is_made_member_by_member() {
    let foreseen = foresee(asked_for(3, 1, 4), now());
    assert_eq!(
        lines(&foreseen),
        [
            "m1 is chosen as control-plane",
            "m2 is chosen as control-plane",
            "m3 is chosen as control-plane",
            "m4 is chosen as worker",
            "m1 is asked to found",
            "m1 has founded it",
            "m2 is asked to join",
            "m3 is asked to join",
            "m4 is asked to join",
            "m2 is let in by its key",
            "m3 is let in by its key",
            "m4 is let in by its key",
            "m2 is given consensus-member",
            "m3 is given consensus-member",
            "settled: ",
        ]
    );
    assert_eq!(foreseen.at, now());
}

#[test]
fn what_lacks_and_whom_a_person_has_to_let_in_is_said_at_the_end() {
    let mut beginning = asked_for(1, 2, 2);
    beginning.cluster.spec.approval = Approval::Manual;
    let told = lines(&foresee(beginning, now()));
    let end = told.iter().position(|line| line.starts_with("waiting")).unwrap();
    assert_eq!(told[end], "waiting: 1 more of the worker is wanted, and no machine is free");
    assert!(told[end + 1].starts_with("m2 waits: a person has to approve its key"), "{told:?}");
}

#[test]
fn changes_are_foreseen_before_they_are_ordered() {
    let beginning = settled(3, 2, 7);
    let with = |change: Change| {
        let mut beginning = beginning.clone();
        beginning.cluster.spec = beginning.cluster.spec.with(&change).unwrap();
        lines(&foresee(beginning, now()))
    };
    let told = with(Change { control_plane: Some(5), ..Change::default() });
    assert_eq!(told.iter().filter(|line| line.contains("is chosen as control-plane")).count(), 2);
    let votes: Vec<_> = told.iter().filter(|line| line.contains("is given consensus-member")).collect();
    assert_eq!(votes.len(), 2, "one after the other: {told:?}");

    let told = with(Change { workers: Some(1), ..Change::default() });
    let why = "the cluster is to have 1 of the worker";
    let gone = told[0].split(' ').next().unwrap();
    assert_eq!(
        told,
        [
            format!("{gone} is to leave: {why}"),
            format!("{gone} is decommissioned"),
            format!("{gone} is deleted"),
            format!("{gone} is asked to leave"),
            format!("{gone} is out of it: {why}, and it has left"),
            "settled: ".to_owned(),
        ]
    );

    let told = with(Change { give: BTreeSet::from(["web".to_owned()]), ..Change::default() });
    assert_eq!(told.iter().filter(|line| line.contains("is given web")).count(), 2, "{told:?}");

    let mut beginning = beginning;
    beginning.cluster.deleting = true;
    let ended = lines(&foresee(beginning, now()));
    assert_eq!(ended.iter().filter(|line| line.contains("is asked to leave")).count(), 5);
    assert_eq!(ended[ended.len() - 2..], ["nothing of it is left", "gone: "]);
}

#[test]
fn member_that_goes_has_a_successor_first_and_one_that_is_lost_has_not() {
    let at = |told: &[String], what: &str| {
        told.iter().position(|line| line.contains(what)).unwrap_or_else(|| panic!("no {what}: {told:?}"))
    };
    let mut retired = settled(3, 0, 4);
    retired.cluster.members[0].retiring = true;
    let told = lines(&foresee(retired, now()));
    assert!(at(&told, "m4 is given consensus-member") < at(&told, "gives up consensus-member"), "{told:?}");
    assert_eq!(told.last().unwrap(), "settled: ");

    let mut lost = settled(3, 0, 4);
    lost.cluster.members[0].phase = Phase::NeedsHuman;
    let key = lost.cluster.members[0].key().unwrap();
    let View::Seen(seen) = &mut lost.cluster.view else { panic!("not seen") };
    let node = seen.nodes.iter_mut().find(|node| node.key == key).unwrap();
    node.health = Health::Silent(Duration::from_mins(10));
    let id = node.id.clone();
    seen.etcd
        .iter_mut()
        .filter(|member| member.node.as_ref() == Some(&id))
        .for_each(|member| member.reachable = false);
    let told = lines(&foresee(lost, now()));
    assert!(at(&told, "gives up consensus-member") < at(&told, "m4 is given consensus-member"), "{told:?}");
    assert_eq!(told.last().unwrap(), "settled: ");
}

#[test]
fn curators_that_do_not_answer_are_waited_for_and_machines_that_are_silent_do_nothing() {
    let mut away = settled(1, 0, 1);
    away.cluster.view = View::Away("connection refused".to_owned());
    assert_eq!(lines(&foresee(away, now())), ["waiting: none of its curators answers: connection refused"]);

    let mut silent = asked_for(1, 0, 1);
    silent.cluster.members = afterwards(asked_for(1, 0, 1)).cluster.members;
    silent.candidates.clear();
    let member = &mut silent.cluster.members[0];
    (member.phase, member.report) = (Phase::Silent, None);
    assert_eq!(
        lines(&foresee(silent, now())),
        ["waiting: ", "m1 waits: it was asked to found the cluster, and has not taken the order"]
    );
}

#[test]
fn restored_cluster_is_founded_anew_and_grows_to_its_size() {
    let mut beginning = settled(3, 1, 5);
    let View::Seen(seen) = std::mem::replace(&mut beginning.cluster.view, View::Nobody) else { panic!() };
    beginning.last = seen;
    beginning.cluster.epoch = 1;
    beginning.cluster.restoring = Some(Restoring { since: now(), onto: None, digest: None });
    // Two are lost for good; the third and the worker are heard.
    for member in beginning.cluster.members.iter_mut().take(2) {
        member.phase = Phase::NeedsHuman;
    }
    let told = lines(&foresee(beginning, after(now(), Duration::from_secs(1))));
    let restored = "its cluster is restored from a snapshot";
    let given_up = "its machine is NeedsHuman, and is told to leave if it is heard again";
    assert_eq!(
        told,
        [
            format!("m1 is to leave: {restored}"),
            format!("m2 is to leave: {restored}"),
            format!("m3 is to leave: {restored}"),
            "m5 is chosen as control-plane".to_owned(),
            "m1 is asked to leave".to_owned(),
            "m2 is asked to leave".to_owned(),
            "m3 is asked to leave".to_owned(),
            "m5 is asked to found".to_owned(),
            "m5 has founded it".to_owned(),
            "m1 is decommissioned".to_owned(),
            "m2 is decommissioned".to_owned(),
            "m3 is decommissioned".to_owned(),
            // The worker goes on with its key, once it is told where its cluster is.
            "m4 is asked to join".to_owned(),
            "m1 is deleted".to_owned(),
            "m2 is deleted".to_owned(),
            "m3 is deleted".to_owned(),
            format!("m1 is out of it: {restored}; {given_up}"),
            format!("m2 is out of it: {restored}; {given_up}"),
            format!("m3 is out of it: {restored}, and it has left"),
            "m3 is chosen as control-plane".to_owned(),
            "m3 is asked to join".to_owned(),
            "m3 is let in by its key".to_owned(),
            "m3 is given consensus-member".to_owned(),
            "waiting: 1 more of the control-plane is wanted, and no machine is free".to_owned(),
        ]
    );
}

#[test]
fn roles_and_kubernetes_come_in_their_order_and_go_in_the_other() {
    let mut beginning = settled(1, 1, 2);
    let kubernetes =
        Kubernetes { bundle: "ab".repeat(32), version: "1.20.2".to_owned(), ..Kubernetes::default() };
    beginning.cluster.kubernetes = Some(WantedKubernetes { kubernetes, removing: false, rotate: Vec::new() });
    beginning.cluster.declared = vec![Declared { role: "web".to_owned(), digest: [1; 32], withdrawn: false }];
    let View::Seen(seen) = &mut beginning.cluster.view else { panic!("not seen") };
    seen.kubernetes = Known::Nothing;
    assert_eq!(
        lines(&foresee(beginning.clone(), now())),
        [
            "role web is declared",
            "its curators are told what Kubernetes is to be",
            "m1 is given kubernetes-controller",
            "m2 is given kubernetes-worker",
            "settled: ",
        ]
    );
    let mut going = afterwards(beginning);
    going.cluster.kubernetes.as_mut().unwrap().removing = true;
    going.cluster.declared[0].withdrawn = true;
    let told = lines(&foresee(going, now()));
    assert_eq!(
        told,
        [
            "role web is declared no more",
            "m2 gives up kubernetes-worker",
            "the declaration of role web is forgotten",
            "m1 gives up kubernetes-controller",
            "its curators forget Kubernetes",
            "Kubernetes is forgotten",
            "settled: ",
        ]
    );
}

#[test]
fn upgrade_goes_through_role_servers_controllers_and_workers_and_back_the_other_way() {
    let mut beginning = settled(3, 2, 5);
    let bundle =
        |digits: &str, version: &str| Bundle { digest: digits.repeat(32), version: version.to_owned() };
    let (from, to) = (bundle("ab", "1.20.2"), bundle("cd", "1.21.0"));
    let kubernetes =
        Kubernetes { bundle: from.digest.clone(), version: from.version.clone(), ..Kubernetes::default() };
    beginning.cluster.kubernetes = Some(WantedKubernetes { kubernetes, removing: false, rotate: Vec::new() });
    let View::Seen(seen) = &mut beginning.cluster.view else { panic!("not seen") };
    seen.kubernetes = Known::Nothing;
    let mut runs = afterwards(beginning);
    let release = Release { roll_out: "r1".to_owned(), paused: None, ended: None };
    let upgrade = Upgrade {
        id: "u1".to_owned(),
        bundles: Some((from, to)),
        back: false,
        parallelism: 1,
        deadline: Duration::from_mins(15),
        paused: None,
        release: Some(release),
        elsewhere: None,
        asked: BTreeMap::new(),
    };
    runs.cluster.upgrade = Some(upgrade.clone());
    let forth = lines(&foresee(runs.clone(), now()));
    let order = |told: &[String]| -> Vec<String> {
        let asked = told.iter().filter(|line| line.contains("is asked to run the bundle"));
        asked.map(|line| line.split(' ').next().unwrap().to_owned()).collect()
    };
    assert_eq!(forth[0], "its role servers are through");
    assert_eq!(order(&forth), ["m1", "m2", "m3", "m4", "m5"], "{forth:?}");
    assert_eq!(forth.last().unwrap(), "settled: ", "{forth:?}");
    assert!(forth.contains(&"its upgrade is done".to_owned()), "{forth:?}");

    runs.cluster.upgrade = Some(upgrade.clone());
    let mut there = afterwards(runs);
    assert_eq!(there.cluster.kubernetes.as_ref().unwrap().kubernetes.version, "1.21.0");
    let back = Upgrade { back: true, parallelism: 2, release: None, ..upgrade };
    there.cluster.upgrade = Some(back.clone());
    let told = lines(&foresee(there.clone(), now()));
    assert_eq!(order(&told), ["m4", "m5", "m1", "m2", "m3"], "{told:?}");

    there.cluster.upgrade = Some(Upgrade { paused: Some("kim said so".to_owned()), ..back });
    let told = lines(&foresee(there, now()));
    assert_eq!(told, ["waiting: its upgrade stands still: kim said so"]);
}
