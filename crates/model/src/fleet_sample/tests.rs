//! Tests: what one machine adds to a count.

use super::*;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
}

fn machine(phase: &str) -> SampledMachine {
    SampledMachine {
        at: at(1_000),
        phase: phase.to_owned(),
        phase_since: at(900),
        deadline: None,
        lanes: Vec::new(),
        backoffs: Vec::new(),
        provider: Some("rack".to_owned()),
        location: Some("here".to_owned()),
        agent_started: true,
        heartbeat_at: Some(at(980)),
        installation: InstallationState::None,
        is_held: false,
        hardware: Some((64, 8)),
    }
}

fn count(machines: &[SampledMachine]) -> FleetSample {
    let mut tally = FleetTally::new(Policy::default());
    for machine in machines {
        tally.add_machine(machine);
    }
    tally.into_sample(Vec::new(), Vec::new())
}

#[test]
fn a_fleet_is_counted_once_in_each_minute() {
    assert_eq!(truncate_to_minute(at(59)), at(0));
    assert_eq!(truncate_to_minute(at(60)), at(60));
    for (latest, now, due) in [
        (None, at(0), true),
        (Some(at(0)), at(59), false),
        (Some(at(0)), at(60), true),
        (Some(at(600)), at(60), false),
    ] {
        assert_eq!(is_sample_due(latest, now), due, "{latest:?} at {now}");
    }
}

#[test]
fn machines_are_counted_by_phase_with_oldest_and_overdue() {
    let old = SampledMachine { phase_since: at(400), deadline: Some(at(999)), ..machine("Recovering") };
    let exactly = SampledMachine { deadline: Some(at(1_000)), ..machine("Recovering") };
    let sample = count(&[machine("Ready"), old, exactly, machine("Napping")]);
    let phase =
        |machines, oldest_seconds, over_deadline| PhaseSample { machines, oldest_seconds, over_deadline };
    assert_eq!(sample.phases["Ready"], phase(1, 100.0, 0));
    assert_eq!(sample.phases["Recovering"], phase(2, 600.0, 1));
    assert_eq!(sample.phases[OTHER], phase(1, 100.0, 0));
    assert_eq!(sample.phases["Silent"], PhaseSample::default());
    assert_eq!(sample.phases.len(), Phase::ALL.len() + 1);
}

#[test]
fn due_work_counts_as_waiting_until_it_is_claimed() {
    let lane = |process: &str, ready: i64| SampledLane {
        process: Some(process.to_owned()),
        ready_at: Some(at(ready)),
        ..SampledLane::default()
    };
    let mut seen = machine("Ready");
    seen.lanes = vec![
        lane("Update", 940),
        lane("Update", 999),
        lane("Update", 1_001),
        SampledLane { is_leased: true, ..lane("AgentStart", 900) },
        SampledLane { timer: true, ..lane("Recovery", 900) },
        lane("Polishing", 1_000),
    ];
    seen.backoffs = vec!["AgentStart".to_owned(), "Polishing".to_owned()];
    let sample = count(&[seen]);
    assert_eq!(sample.due["Update"], DueSample { machines: 2, oldest_seconds: 60.0 });
    assert_eq!(sample.due["AgentStart"], DueSample::default());
    assert_eq!(sample.due["Recovery"], DueSample::default());
    assert_eq!(sample.due[OTHER], DueSample { machines: 1, oldest_seconds: 0.0 });
    assert_eq!((sample.backoffs["AgentStart"], sample.backoffs[OTHER]), (1, 1));
}

#[test]
fn heartbeats_count_by_their_age_and_only_of_machines_with_an_agent() {
    let silence = i64::try_from(Policy::default().recovery_silence_timeout.0.as_secs()).unwrap();
    let observed = |seconds| SampledMachine { heartbeat_at: Some(at(1_000 - seconds)), ..machine("Ready") };
    let gone = SampledMachine { agent_started: false, ..observed(1) };
    let sample = count(&[
        observed(0),
        observed(1),
        observed(2),
        observed(silence - 1),
        observed(silence),
        observed(9_000),
        gone,
    ]);
    assert_eq!(sample.facts["heartbeating"], 4);
    assert_eq!(sample.facts["agent-started"], 6);
    let ages = &sample.heartbeat_ages;
    assert_eq!((ages.counts[0], ages.counts[1], ages.counts[AGE_BOUNDS.len()]), (2, 1, 1));
    assert_eq!(ages.counts.iter().sum::<u64>(), 6);
    assert!((ages.sum_seconds - f64::from(i32::try_from(2 * silence + 9_002).unwrap())).abs() < 1e-6);
}

#[test]
fn retired_machine_is_counted_in_its_phase_and_nowhere_else() {
    let retired = SampledMachine { is_held: true, heartbeat_at: Some(at(-900_000)), ..machine("Retired") };
    let nowhere = SampledMachine { provider: None, ..retired.clone() };
    let sample = count(&[retired, nowhere]);
    assert_eq!(sample.phases["Retired"].machines, 2);
    assert!(sample.facts.values().all(|machines| *machines == 0), "{:?}", sample.facts);
    assert_eq!(sample.heartbeat_ages, count(&[]).heartbeat_ages);
    assert!(sample.places.is_empty());
    // A retiring machine still counts.
    assert_eq!(count(&[machine("Retiring")]).facts["agent-started"], 1);
}

#[test]
fn hardware_is_summed_by_location_and_locations_are_bounded() {
    let elsewhere = |location: String| SampledMachine { location: Some(location), ..machine("Ready") };
    let mut machines = vec![machine("Ready"), machine("Ready"), machine("Retired")];
    machines.push(SampledMachine { hardware: None, ..machine("Ready") });
    machines.push(SampledMachine { location: None, ..machine("New") });
    machines.push(SampledMachine { provider: None, ..machine("New") });
    let sample = count(&machines);
    let place = |location: &str, machines, memory_bytes, cpu_threads| LocationSample {
        provider: "rack".to_owned(),
        location: location.to_owned(),
        machines,
        memory_bytes,
        cpu_threads,
    };
    assert_eq!(sample.places, [place("", 1, 64, 8), place("here", 3, 128, 16)]);
    assert_eq!(sample.facts["without-provider"], 1);

    machines.extend((0..500).map(|n| elsewhere(format!("row {n}\n"))));
    machines.push(elsewhere("x".repeat(1_000)));
    machines.push(elsewhere(OTHER.to_owned()));
    let sample = count(&machines);
    assert_eq!(sample.places.len(), MAX_LOCATIONS, "the rest stands under the place that is called so");
    let all: u64 = sample.places.iter().map(|place| place.machines).sum();
    assert_eq!(all, 4 + 502);
    assert!(sample.places.contains(&place("here", 3, 128, 16)));
    assert!(sample.places.iter().all(|place| place.location.len() <= MAX_LOCATION_CHARS));
    assert!(!sample.places.iter().any(|place| place.location.contains('\n')));
}

#[test]
fn samples_of_this_and_other_releases_deserialize() {
    let brake = |kind: &str, scope: &str| SampledBrake { kind: kind.to_owned(), scope: scope.to_owned() };
    let mut tally = FleetTally::new(Policy::default());
    tally.add_machine(&machine("Ready"));
    let work = vec![("Update".to_owned(), 2), ("Polishing".to_owned(), 1)];
    let sample = tally.into_sample(work, vec![brake("recovery", "far"), brake("unheard-of", "rack")]);
    assert_eq!(sample.brakes, [brake("recovery", "far")]);
    assert_eq!(sample.brake_scopes(), ["*", "far", "rack"]);
    assert_eq!((sample.work["Update"], sample.work[OTHER]), (2, 1));
    let text = serde_json::to_string(&sample).unwrap();
    assert_eq!(serde_json::from_str::<FleetSample>(&text).unwrap(), sample);
    let other = "{\"phases\": {\"Ready\": {\"machines\": 3, \"youngest\": 1}}, \"moods\": {}}";
    assert_eq!(serde_json::from_str::<FleetSample>(other).unwrap().phases["Ready"].machines, 3);
    let former = "{\"clusters\": {\"stages\": {\"settled\": 2, \"ending\": 1, \"changing\": 3}}}";
    let stages = serde_json::from_str::<FleetSample>(former).unwrap().clusters.stages;
    let stages: Vec<(&str, u64)> = stages.iter().map(|(stage, count)| (stage.as_str(), *count)).collect();
    assert_eq!(stages, [("changing", 3), ("converged", 2), ("deleting", 1)]);
}

#[test]
fn clusters_are_counted_by_stage_and_only_active_ones_must_answer() {
    let cluster = |stage, lives, seen: Option<i64>, snapshot: Option<i64>| SampledCluster {
        at: at(1_000),
        stage,
        is_active: lives,
        observed_at: seen.map(at),
        snapshot_at: snapshot.map(at),
        kubernetes: None,
        upgrade_paused: None,
    };
    let mut tally = FleetTally::new(Policy::default());
    for cluster in [
        cluster("converged", true, Some(990), Some(400)),
        cluster("converged", true, Some(940), Some(900)),
        cluster("changing", true, Some(939), None),
        cluster("changing", true, None, None),
        cluster("restoring", false, Some(10), Some(10)),
        cluster("waiting for machines", false, None, None),
        cluster("of a newer release", false, None, None),
    ] {
        tally.add_cluster(&cluster);
    }
    let clusters = tally.into_sample(Vec::new(), Vec::new()).clusters;
    let stages: Vec<(&str, u64)> =
        clusters.stages.iter().map(|(stage, count)| (stage.as_str(), *count)).collect();
    let expected = [
        ("changing", 2),
        ("converged", 2),
        ("deleting", 0),
        ("founding", 0),
        ("other", 1),
        ("restoring", 1),
        ("waiting-for-machines", 1),
    ];
    assert_eq!(stages, expected);
    assert_eq!((clusters.unheard, clusters.oldest_snapshot_seconds), (2, 600.0));
}

#[test]
fn kubernetes_is_counted_for_active_clusters() {
    let mut tally = FleetTally::new(Policy::default());
    for (lives, kubernetes, upgrade_paused) in [
        (true, Some((1, 2)), Some(true)),
        (true, Some((0, 3)), Some(false)),
        (true, Some((4, 0)), None),
        (true, None, Some(false)),
        (false, Some((70, 70)), Some(true)),
    ] {
        tally.add_cluster(&SampledCluster {
            at: at(1_000),
            stage: "converged",
            is_active: lives,
            observed_at: Some(at(990)),
            snapshot_at: None,
            kubernetes: kubernetes.map(|(unwell, behind)| SampledKubernetes {
                unhealthy_components: unwell,
                nodes_behind: behind,
            }),
            upgrade_paused,
        });
    }
    let clusters = tally.into_sample(Vec::new(), Vec::new()).clusters;
    assert_eq!((clusters.kubernetes, clusters.components_unwell, clusters.nodes_behind), (3, 5, 5));
    assert_eq!((clusters.upgrades_going, clusters.upgrades_paused), (2, 1));
}

#[test]
fn cluster_stages_match_their_labels() {
    for stage in STAGES {
        assert_eq!(stage_label(stage), stage.replace(' ', "-"));
    }
    for (deleting, founded, machines, settled) in [
        (true, true, 1, true),
        (false, false, 0, false),
        (false, false, 1, false),
        (false, true, 1, false),
        (false, true, 1, true),
    ] {
        let stage = crate::cluster::view::cluster_stage(deleting, founded, machines, settled);
        assert!(STAGES.contains(&stage), "{stage}");
    }
}
