//! Forecasts of clusters from different beginnings, as text.

use std::time::Duration;

use uuid::Uuid;

use super::*;
use crate::cluster::declaration::DesiredDeclaration;
use crate::cluster::kubernetes::{DesiredKubernetes as WantedKubernetes, KubernetesSpec};
use crate::cluster::restore_programs::EtcdPrograms;
use crate::cluster::spec::tests::spec;
use crate::cluster::spec::{ClusterSpecChange, JoinApproval};
use crate::cluster::state::PendingRestore;
use crate::cluster::upgrade::{BundleRef, ClusterUpgrade, ReleaseProgress};
use crate::phase::Phase;

fn now() -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000, 0).unwrap()
}

fn machine(number: u8) -> MachineId {
    MachineId(Uuid::from_u128(u128::from(number)))
}

/// A newly requested cluster, and the free machines 1 to `free`.
fn requested_cluster(control_plane: u32, workers: u32, free: u8) -> ForecastInput {
    let candidate = |number: u8| CandidateMachine {
        machine: machine(number),
        name: format!("m{number}"),
        location: None,
        programs: EtcdPrograms::default(),
    };
    ForecastInput {
        cluster: Cluster::new(Uuid::from_u128(77), spec(control_plane, workers)),
        last_observed: ObservedCluster::default(),
        candidates: (1..=free).map(candidate).collect(),
        locations: MachineLocations::new(),
    }
}

/// The forecast as text: one line per step, then its end.
fn step_lines(forecast: &Forecast) -> Vec<String> {
    let subject = |step: &ForecastStep| step.name.clone().map(|name| format!("{name} ")).unwrap_or_default();
    let mut lines: Vec<String> =
        forecast.steps.iter().map(|step| format!("{}{}", subject(step), step.action)).collect();
    lines.push(format!("{}: {}", forecast.end.as_str(), forecast.wait_reasons.join("; ")));
    lines.extend(forecast.machine_waits.iter().map(|(machine, waits)| format!("{machine} waits: {waits}")));
    lines
}

/// The state of the cluster after all steps.
fn run_to_end(beginning: ForecastInput) -> ForecastInput {
    let mut course = ForecastRun { input: beginning, now: now(), steps: Vec::new() };
    for _ in 0..MAX_STEPS {
        let ForecastInput { cluster, candidates, locations: places, .. } = &course.input;
        let planned = plan_cluster(cluster, candidates, places, course.now);
        let idle = planned.steps.is_empty();
        planned.steps.into_iter().for_each(|step| course.apply_step(step));
        if idle && !course.advance() {
            return course.input;
        }
        course.now = after(course.now, Duration::from_secs(1));
    }
    panic!("it never comes to rest");
}

/// A converged cluster of this size, and the free machines beside it.
fn converged_cluster(control_plane: u32, workers: u32, free: u8) -> ForecastInput {
    let beginning = run_to_end(requested_cluster(control_plane, workers, free));
    assert_eq!(step_lines(&forecast_cluster(beginning.clone(), now())), ["converged: "]);
    beginning
}

#[test]
fn cluster_is_created_member_by_member() {
    let forecast = forecast_cluster(requested_cluster(3, 1, 4), now());
    assert_eq!(
        step_lines(&forecast),
        [
            "m1 is chosen as control-plane",
            "m2 is chosen as control-plane",
            "m3 is chosen as control-plane",
            "m4 is chosen as worker",
            "m1 is ordered to found",
            "m1 has founded it",
            "m2 is ordered to join",
            "m3 is ordered to join",
            "m4 is ordered to join",
            "m2 is admitted with its key",
            "m3 is admitted with its key",
            "m4 is admitted with its key",
            "m2 is given consensus-member",
            "m3 is given consensus-member",
            "converged: ",
        ]
    );
    assert_eq!(forecast.at, now());
}

#[test]
fn missing_machines_and_pending_approvals_are_reported_at_the_end() {
    let mut beginning = requested_cluster(1, 2, 2);
    beginning.cluster.spec.approval = JoinApproval::Manual;
    let messages = step_lines(&forecast_cluster(beginning, now()));
    let end = messages.iter().position(|line| line.starts_with("waiting")).unwrap();
    assert_eq!(messages[end], "waiting: 1 more worker is wanted, and no machine is free");
    assert!(messages[end + 1].starts_with("m2 waits: a person has to approve its key"), "{messages:?}");
}

#[test]
fn changes_are_forecast_before_they_are_ordered() {
    let beginning = converged_cluster(3, 2, 7);
    let with = |change: ClusterSpecChange| {
        let mut beginning = beginning.clone();
        beginning.cluster.spec = beginning.cluster.spec.apply_change(&change).unwrap();
        step_lines(&forecast_cluster(beginning, now()))
    };
    let messages = with(ClusterSpecChange { control_plane: Some(5), ..ClusterSpecChange::default() });
    assert_eq!(messages.iter().filter(|line| line.contains("is chosen as control-plane")).count(), 2);
    let votes: Vec<_> = messages.iter().filter(|line| line.contains("is given consensus-member")).collect();
    assert_eq!(votes.len(), 2, "one after the other: {messages:?}");

    let messages = with(ClusterSpecChange { workers: Some(1), ..ClusterSpecChange::default() });
    let why = "the cluster should have 1 worker";
    let gone = messages[0].split(' ').next().unwrap();
    assert_eq!(
        messages,
        [
            format!("{gone} is to leave: {why}"),
            format!("{gone} is decommissioned"),
            format!("{gone} is deleted"),
            format!("{gone} is ordered to leave"),
            format!("{gone} is removed from the cluster: {why}, and it has left"),
            "converged: ".to_owned(),
        ]
    );

    let messages = with(ClusterSpecChange {
        add_roles: BTreeSet::from(["web".to_owned()]),
        ..ClusterSpecChange::default()
    });
    assert_eq!(messages.iter().filter(|line| line.contains("is given web")).count(), 2, "{messages:?}");

    let mut beginning = beginning;
    beginning.cluster.deleting = true;
    let ended = step_lines(&forecast_cluster(beginning, now()));
    assert_eq!(ended.iter().filter(|line| line.contains("is ordered to leave")).count(), 5);
    assert_eq!(ended[ended.len() - 2..], ["nothing of it is left", "deleted: "]);
}

#[test]
fn leaving_member_is_replaced_first_and_a_lost_one_is_not() {
    let at = |messages: &[String], what: &str| {
        messages
            .iter()
            .position(|line| line.contains(what))
            .unwrap_or_else(|| panic!("no {what}: {messages:?}"))
    };
    let mut retired = converged_cluster(3, 0, 4);
    retired.cluster.members[0].retiring = true;
    let messages = step_lines(&forecast_cluster(retired, now()));
    assert!(
        at(&messages, "m4 is given consensus-member") < at(&messages, "gives up consensus-member"),
        "{messages:?}"
    );
    assert_eq!(messages.last().unwrap(), "converged: ");

    let mut lost = converged_cluster(3, 0, 4);
    lost.cluster.members[0].phase = Phase::NeedsHuman;
    let key = lost.cluster.members[0].key().unwrap();
    let CuratorAnswer::Observed(seen) = &mut lost.cluster.observed else { panic!("not seen") };
    let node = seen.nodes.iter_mut().find(|node| node.key == key).unwrap();
    node.health = NodeHealth::Silent(Duration::from_mins(10));
    let id = node.id.clone();
    seen.etcd_members
        .iter_mut()
        .filter(|member| member.node.as_ref() == Some(&id))
        .for_each(|member| member.reachable = false);
    let messages = step_lines(&forecast_cluster(lost, now()));
    assert!(
        at(&messages, "gives up consensus-member") < at(&messages, "m4 is given consensus-member"),
        "{messages:?}"
    );
    assert_eq!(messages.last().unwrap(), "converged: ");
}

#[test]
fn forecast_waits_for_unreachable_curators_and_silent_machines() {
    let mut away = converged_cluster(1, 0, 1);
    away.cluster.observed = CuratorAnswer::Unreachable("connection refused".to_owned());
    assert_eq!(
        step_lines(&forecast_cluster(away, now())),
        ["waiting: none of its curators answers: connection refused"]
    );

    let mut silent = requested_cluster(1, 0, 1);
    silent.cluster.members = run_to_end(requested_cluster(1, 0, 1)).cluster.members;
    silent.candidates.clear();
    let member = &mut silent.cluster.members[0];
    (member.phase, member.report) = (Phase::Silent, None);
    assert_eq!(
        step_lines(&forecast_cluster(silent, now())),
        ["waiting: ", "m1 waits: it was ordered to found the cluster, and has not accepted the order"]
    );
}

#[test]
fn restored_cluster_is_founded_again_and_grows_to_its_size() {
    let mut beginning = converged_cluster(3, 1, 5);
    let CuratorAnswer::Observed(seen) =
        std::mem::replace(&mut beginning.cluster.observed, CuratorAnswer::NotQueried)
    else {
        panic!()
    };
    beginning.last_observed = seen;
    beginning.cluster.epoch = 1;
    beginning.cluster.restoring =
        Some(PendingRestore { requested_at: now(), target_machine: None, digest: None, image: None });
    // Two are lost for good; the third and the worker report.
    for member in beginning.cluster.members.iter_mut().take(2) {
        member.phase = Phase::NeedsHuman;
    }
    let messages = step_lines(&forecast_cluster(beginning, after(now(), Duration::from_secs(1))));
    let restored = "its cluster is restored from a snapshot";
    let given_up = "its machine is NeedsHuman, and is ordered to leave if it reports again";
    assert_eq!(
        messages,
        [
            format!("m1 is to leave: {restored}"),
            format!("m2 is to leave: {restored}"),
            format!("m3 is to leave: {restored}"),
            "m5 is chosen as control-plane".to_owned(),
            "m1 is ordered to leave".to_owned(),
            "m2 is ordered to leave".to_owned(),
            "m3 is ordered to leave".to_owned(),
            "m5 is ordered to found".to_owned(),
            "m5 has founded it".to_owned(),
            "m1 is decommissioned".to_owned(),
            "m2 is decommissioned".to_owned(),
            "m3 is decommissioned".to_owned(),
            // The worker keeps its key once it gets the new addresses of its cluster.
            "m4 is ordered to join".to_owned(),
            "m1 is deleted".to_owned(),
            "m2 is deleted".to_owned(),
            "m3 is deleted".to_owned(),
            format!("m1 is removed from the cluster: {restored}; {given_up}"),
            format!("m2 is removed from the cluster: {restored}; {given_up}"),
            format!("m3 is removed from the cluster: {restored}, and it has left"),
            "m3 is chosen as control-plane".to_owned(),
            "m3 is ordered to join".to_owned(),
            "m3 is admitted with its key".to_owned(),
            "m3 is given consensus-member".to_owned(),
            "waiting: 1 more member of the control plane is wanted, and no machine is free".to_owned(),
        ]
    );
}

#[test]
fn roles_and_kubernetes_are_added_in_order_and_removed_in_reverse() {
    let mut beginning = converged_cluster(1, 1, 2);
    let kubernetes =
        KubernetesSpec { bundle: "ab".repeat(32), version: "1.20.2".to_owned(), ..KubernetesSpec::default() };
    beginning.cluster.kubernetes =
        Some(WantedKubernetes { spec: kubernetes, removing: false, pending_rotations: Vec::new() });
    beginning.cluster.declared_roles =
        vec![DesiredDeclaration { role: "web".to_owned(), digest: [1; 32], withdrawn: false }];
    let CuratorAnswer::Observed(seen) = &mut beginning.cluster.observed else { panic!("not seen") };
    seen.kubernetes = ObservedKubernetes::Absent;
    assert_eq!(
        step_lines(&forecast_cluster(beginning.clone(), now())),
        [
            "role web is declared",
            "its curators receive the Kubernetes spec",
            "m1 is given kubernetes-controller",
            "m2 is given kubernetes-worker",
            "converged: ",
        ]
    );
    let mut going = run_to_end(beginning);
    going.cluster.kubernetes.as_mut().unwrap().removing = true;
    going.cluster.declared_roles[0].withdrawn = true;
    let messages = step_lines(&forecast_cluster(going, now()));
    assert_eq!(
        messages,
        [
            "role web is withdrawn",
            "m2 gives up kubernetes-worker",
            "the declaration of role web is deleted",
            "m1 gives up kubernetes-controller",
            "its curators delete their Kubernetes settings and keys",
            "the record of Kubernetes is deleted",
            "converged: ",
        ]
    );
}

#[test]
fn upgrade_goes_controllers_first_and_rolls_back_workers_first() {
    let mut beginning = converged_cluster(3, 2, 5);
    let bundle =
        |digits: &str, version: &str| BundleRef { digest: digits.repeat(32), version: version.to_owned() };
    let (from, to) = (bundle("ab", "1.20.2"), bundle("cd", "1.21.0"));
    let kubernetes = KubernetesSpec {
        bundle: from.digest.clone(),
        version: from.version.clone(),
        ..KubernetesSpec::default()
    };
    beginning.cluster.kubernetes =
        Some(WantedKubernetes { spec: kubernetes, removing: false, pending_rotations: Vec::new() });
    let CuratorAnswer::Observed(seen) = &mut beginning.cluster.observed else { panic!("not seen") };
    seen.kubernetes = ObservedKubernetes::Absent;
    let mut runs = run_to_end(beginning);
    let release = ReleaseProgress { roll_out: "r1".to_owned(), pause_reason: None, outcome: None };
    let upgrade = ClusterUpgrade {
        id: "u1".to_owned(),
        bundles: Some((from, to)),
        rolling_back: false,
        parallelism: 1,
        node_deadline: Duration::from_mins(15),
        pause_reason: None,
        release: Some(release),
        conflicting_roll_out: None,
        requested_nodes: BTreeMap::new(),
    };
    runs.cluster.upgrade = Some(upgrade.clone());
    let forth = step_lines(&forecast_cluster(runs.clone(), now()));
    let order = |messages: &[String]| -> Vec<String> {
        let requested = messages.iter().filter(|line| line.contains("is ordered to run the bundle"));
        requested.map(|line| line.split(' ').next().unwrap().to_owned()).collect()
    };
    assert_eq!(forth[0], "its role servers are through");
    assert_eq!(order(&forth), ["m1", "m2", "m3", "m4", "m5"], "{forth:?}");
    assert_eq!(forth.last().unwrap(), "converged: ", "{forth:?}");
    assert!(forth.contains(&"its upgrade is done".to_owned()), "{forth:?}");

    runs.cluster.upgrade = Some(upgrade.clone());
    let mut there = run_to_end(runs);
    assert_eq!(there.cluster.kubernetes.as_ref().unwrap().spec.version, "1.21.0");
    let back = ClusterUpgrade { rolling_back: true, parallelism: 2, release: None, ..upgrade };
    there.cluster.upgrade = Some(back.clone());
    let messages = step_lines(&forecast_cluster(there.clone(), now()));
    assert_eq!(order(&messages), ["m4", "m5", "m1", "m2", "m3"], "{messages:?}");

    there.cluster.upgrade = Some(ClusterUpgrade { pause_reason: Some("kim paused it".to_owned()), ..back });
    let messages = step_lines(&forecast_cluster(there, now()));
    assert_eq!(messages, ["waiting: its upgrade is paused: kim paused it"]);
}
