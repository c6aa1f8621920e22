//! Tests: which machine of a roll-out gets its order next.

use super::*;

const NEW: [u8; 32] = [2; 32];
const OLD: [u8; 32] = [1; 32];

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
}

fn roll_out(parallelism: usize) -> RollOut {
    RollOut { sha256: NEW, parallelism, deadline: Duration::from_mins(2), pause_reason: None }
}

#[expect(clippy::unnecessary_wraps, reason = "as a member has it")]
fn report(generation: i64, sha256: [u8; 32], error: Option<&str>) -> Option<(ReleaseReport, Timestamp)> {
    Some((ReleaseReport { generation, sha256, error: error.map(str::to_owned), findings: Vec::new() }, at(0)))
}

fn member(number: u128) -> RollOutMachine {
    RollOutMachine {
        machine: MachineId(uuid::Uuid::from_u128(number)),
        name: format!("m{number}"),
        state: RollOutMachineState::Waiting,
        generation: None,
        state_since: at(0),
        report: report(0, OLD, None),
        phase: Phase::Ready,
        block_reason: None,
        is_retiring: false,
        node: None,
    }
}

fn ordered(number: u128) -> RollOutMachine {
    RollOutMachine { state: RollOutMachineState::Ordered, generation: Some(1), ..member(number) }
}

#[expect(clippy::unnecessary_wraps, reason = "as a member has it")]
fn node(cluster: &str, control_plane: bool) -> Option<RollOutNode> {
    let cluster = cluster.to_owned();
    Some(RollOutNode {
        cluster,
        control_plane,
        healthy: true,
        observed_at: Some(at(30)),
        all_members_reachable: true,
        etcd_full_since: None,
    })
}

fn none() -> BTreeSet<String> {
    BTreeSet::new()
}

fn orders(plan: &RollOutPlan) -> Vec<u128> {
    let of = |step: &RollOutStep| match step {
        RollOutStep::Order(machine) => Some(machine.0.as_u128()),
        _ => None,
    };
    plan.steps.iter().filter_map(of).collect()
}

#[test]
fn next_machine_is_ordered_when_earlier_ones_are_done() {
    let through = RollOutMachine { report: report(1, NEW, None), ..ordered(1) };
    for (what, first, expected) in [
        ("no machine has an order", member(1), vec![1]),
        ("it has an order", ordered(1), vec![]),
        ("it is through", through.clone(), vec![2]),
        ("it runs it and is silent", RollOutMachine { phase: Phase::Silent, ..through.clone() }, vec![]),
        (
            "it runs it, as a node that is well",
            RollOutMachine { node: node("a", false), ..through.clone() },
            vec![2],
        ),
        (
            "its curator has not looked since",
            RollOutMachine {
                node: Some(RollOutNode { observed_at: Some(at(10)), ..node("a", false).unwrap() }),
                ..through.clone()
            },
            vec![],
        ),
        (
            "its curator does not call it healthy",
            RollOutMachine {
                node: Some(RollOutNode { healthy: false, ..node("a", false).unwrap() }),
                ..through.clone()
            },
            vec![],
        ),
        (
            "another member of its control plane is not reached",
            RollOutMachine {
                node: Some(RollOutNode { all_members_reachable: false, ..node("a", true).unwrap() }),
                ..through.clone()
            },
            vec![],
        ),
        ("it ran it before", RollOutMachine { report: report(0, NEW, None), ..member(1) }, vec![2]),
        ("it leaves", RollOutMachine { is_retiring: true, ..member(1) }, vec![2]),
        ("somebody holds it", RollOutMachine { block_reason: Some("held".to_owned()), ..member(1) }, vec![2]),
        ("it is not well", RollOutMachine { phase: Phase::Recovering, ..member(1) }, vec![2]),
        ("it has no such role server", RollOutMachine { report: None, ..member(1) }, vec![2]),
    ] {
        let plan = plan_roll_out(&roll_out(1), &[first, member(2), member(3)], &none(), 9, at(40));
        assert_eq!(orders(&plan), expected, "{what}: {plan:?}");
        assert!(plan.wait_reasons.contains_key(&member(3).machine), "{what}: {plan:?}");
    }
}

#[test]
fn failure_pauses_the_roll_out_with_machine_and_reason() {
    let late = at(40 + 2 * 120 + 120);
    let runs = RollOutMachine { report: report(1, NEW, None), ..ordered(1) };
    for (what, first, now, expected) in [
        (
            "it gave it up",
            RollOutMachine { report: report(1, OLD, Some("no")), ..ordered(1) },
            at(40),
            "m1: no",
        ),
        (
            "it runs another one",
            RollOutMachine { report: report(1, OLD, None), ..ordered(1) },
            at(40),
            "m1: it runs another",
        ),
        ("it says nothing", ordered(1), late, "m1: it has not reported"),
        (
            "it gets not well",
            RollOutMachine { phase: Phase::Silent, ..runs },
            at(301),
            "m1: it runs the release and is not",
        ),
    ] {
        let plan = plan_roll_out(&roll_out(2), &[first, member(2)], &none(), 9, now);
        assert_eq!(orders(&plan), [0; 0], "{what}");
        // The pause comes first. Otherwise the next process finds no failure, and gives the order to the next
        // machine.
        let Some(RollOutStep::Pause(why)) = plan.steps.first() else { panic!("{what}: {plan:?}") };
        assert!(why.starts_with(expected), "{what}: {why}");
        assert!(matches!(plan.steps[1], RollOutStep::Conclude(_, RollOutMachineState::Failed, _)), "{what}");
    }
    let paused = RollOut { pause_reason: Some("kim".to_owned()), ..roll_out(2) };
    assert_eq!(plan_roll_out(&paused, &[member(1)], &none(), 9, at(40)).steps, []);
    // A machine that is done while the roll-out is paused counts as done.
    let through = RollOutMachine { report: report(1, NEW, None), ..ordered(1) };
    let steps = plan_roll_out(&paused, &[through, member(2)], &none(), 9, at(40)).steps;
    assert!(matches!(steps[..], [RollOutStep::Conclude(_, RollOutMachineState::Done, _)]), "{steps:?}");
}

#[test]
fn parallelism_is_bounded_and_one_per_control_plane() {
    let many: Vec<RollOutMachine> = (1..=5).map(member).collect();
    assert_eq!(orders(&plan_roll_out(&roll_out(3), &many, &none(), 9, at(40))), [1, 2, 3]);
    assert_eq!(
        orders(&plan_roll_out(&roll_out(3), &many, &none(), 2, at(40))),
        [1, 2],
        "no more than the budget allows"
    );
    let of = |number, cluster, part| RollOutMachine { node: node(cluster, part), ..member(number) };
    let all = [of(1, "a", true), of(2, "a", true), of(3, "b", true), of(4, "a", false), of(5, "a", true)];
    assert_eq!(orders(&plan_roll_out(&roll_out(9), &all, &none(), 9, at(40))), [1, 3, 4]);
    let first =
        RollOutMachine { state: RollOutMachineState::Ordered, generation: Some(1), ..of(1, "a", true) };
    assert_eq!(orders(&plan_roll_out(&roll_out(9), &[first, of(2, "a", true)], &none(), 9, at(40))), [0; 0]);
}

#[test]
fn clusters_of_other_roll_outs_are_not_disrupted() {
    let of = |number, cluster, part| RollOutMachine { node: node(cluster, part), ..member(number) };
    let machine =
        RollOutMachine { state: RollOutMachineState::Ordered, generation: Some(1), ..of(7, "a", true) };
    let elsewhere: BTreeSet<String> =
        disrupted_clusters(&[machine, of(8, "b", true), ordered(9)]).map(str::to_owned).collect();
    assert_eq!(elsewhere, BTreeSet::from(["a".to_owned()]));
    let all = [of(1, "a", true), of(2, "a", false), of(3, "b", true)];
    assert_eq!(orders(&plan_roll_out(&roll_out(9), &all, &elsewhere, 9, at(40))), [2, 3]);
}

#[test]
fn retiring_machine_is_skipped_not_failed() {
    let leaving = RollOutMachine { is_retiring: true, phase: Phase::Retiring, ..ordered(1) };
    for now in [at(40), at(100_000)] {
        let steps = plan_roll_out(&roll_out(1), &[leaving.clone(), member(2)], &none(), 9, now).steps;
        assert!(matches!(steps[0], RollOutStep::Conclude(_, RollOutMachineState::Skipped, _)), "{steps:?}");
        assert!(!steps.iter().any(|step| matches!(step, RollOutStep::Pause(_))), "{steps:?}");
    }
}

#[test]
fn roll_out_finishes_when_every_machine_is_done() {
    let through = RollOutMachine { report: report(1, NEW, None), ..ordered(1) };
    let failed = RollOutMachine { state: RollOutMachineState::Failed, ..member(2) };
    let steps = plan_roll_out(&roll_out(1), &[through, failed.clone()], &none(), 9, at(40)).steps;
    assert_eq!(steps.last(), Some(&RollOutStep::Finish));
    assert_eq!(plan_roll_out(&roll_out(1), &[failed, ordered(3)], &none(), 9, at(40)).steps, []);
    // The same if the last machine failed: nothing is left to pause for.
    let last = RollOutMachine { report: report(1, OLD, Some("no")), ..ordered(1) };
    assert_eq!(
        plan_roll_out(&roll_out(1), &[last], &none(), 9, at(40)).steps.last(),
        Some(&RollOutStep::Finish)
    );
}

#[test]
fn states_have_names() {
    for state in RollOutMachineState::ALL {
        assert_eq!(state.as_str().parse::<RollOutMachineState>().unwrap(), state);
    }
    assert!("odd".parse::<RollOutMachineState>().is_err());
}

#[test]
fn machines_of_a_full_etcd_get_no_order() {
    let full = |cluster, control_plane| {
        node(cluster, control_plane).map(|node| RollOutNode { etcd_full_since: Some(at(20)), ..node })
    };
    let silent = full("a", true).map(|node| RollOutNode { observed_at: None, ..node });
    for (what, node, waits) in [
        ("a member of the control plane", full("a", true), true),
        ("a worker", full("a", false), true),
        ("no curator answers", silent, true),
        ("etcd of another cluster has room", node("b", true), false),
    ] {
        let machines = [RollOutMachine { node, ..member(1) }];
        let plan = plan_roll_out(&roll_out(1), &machines, &none(), 9, at(40));
        assert_eq!(orders(&plan).is_empty(), waits, "{what}: {plan:?}");
        let reason = plan.wait_reasons.get(&machines[0].machine).cloned().unwrap_or_default();
        let expected = "the etcd of cluster a is full (alarm NOSPACE)";
        assert_eq!(reason.starts_with(expected), waits, "{what}: {reason}");
    }
    // A machine that has the order is judged as before.
    let ran = RollOutMachine { report: report(1, NEW, None), node: full("a", false), ..ordered(2) };
    let plan = plan_roll_out(&roll_out(1), &[ran], &none(), 9, at(40));
    assert!(plan.wait_reasons.is_empty() && plan.steps.len() == 2, "{plan:?}");
}
