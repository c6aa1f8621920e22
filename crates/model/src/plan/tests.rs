//! Tests: plans of small fleets.

use super::*;
use crate::facts::{
    AgentStarted, Hold, HoldScope, PowerOrder, ProviderRecord, Recovery, RecoveryAction, Retirement,
};
use crate::policy::Budget;
use crate::power_order::PowerOrderKind;
use crate::sample_machine::{agent_started, at, heartbeat, provider_record};
use crate::unknown_fence::UnknownFence;

/// Machine number `number`, whose provider was queried at 0 and is queried each half hour.
pub(super) fn provided_machine(number: u8) -> MachineFacts {
    let mut facts = MachineFacts::empty(MachineId(uuid::Uuid::from_u128(u128::from(number))), at(-9000));
    facts.listening_since = Some(at(-9000));
    facts.provider_record = Some(ProviderRecord {
        provider_id: number.to_string(),
        acquired_at: at(-8000),
        polled_at: Some(at(0)),
        unchanged: true,
        ..provider_record()
    });
    facts
}

/// The same with an agent that reported so many seconds ago.
pub(super) fn reporting_machine(number: u8, ago: i64) -> MachineFacts {
    let mut facts = provided_machine(number);
    facts.agent_started = Some(AgentStarted { boot_id: Some("b".to_owned()), ..agent_started(-7000) });
    facts.heartbeat = Some(heartbeat(-ago));
    facts
}

pub(super) fn fleet_view(machines: Vec<MachineFacts>, policy: Policy) -> FleetView {
    let state = |facts: MachineFacts| MachineState {
        phase_index: phase_of(&facts, &policy, at(0)).to_string(),
        phase_since: at(-5),
        unknown_fence: None,
        cluster: None,
        lanes: Lane::ALL
            .into_iter()
            .map(|lane| StoredLane {
                lane,
                stored_due: StoredDue { process: None, ready_at: None, timer: false },
                not_before: None,
                is_working: false,
            })
            .collect(),
        facts,
    };
    let machines = machines.into_iter().map(state).collect();
    FleetView {
        at: at(0),
        policy: Arc::new(policy),
        machines,
        recent_disruptions: Vec::new(),
        recent_releases: Vec::new(),
        pauses: Vec::new(),
    }
}

/// (seconds, machine, process, the beginning of the action) within `minutes`.
fn plan_rows(fleet: &FleetView, minutes: u64) -> Vec<(i64, u128, &'static str, String)> {
    let plan = plan_fleet(fleet, Span::minutes(minutes));
    assert!(!plan.truncated);
    let reports = plan.rows.into_iter().map(|row| {
        let what = row.action.chars().take(12).collect();
        ((row.at - at(0)).num_seconds(), row.name.machine.as_u128(), row.process, what)
    });
    reports.collect()
}

fn row(seconds: i64, machine: u128, process: &'static str, what: &str) -> (i64, u128, &'static str, String) {
    (seconds, machine, process, what.to_owned())
}

#[test]
fn new_machine_is_taken_over_and_then_only_updated() {
    let reported = plan_rows(&fleet_view(vec![provided_machine(1)], Policy::default()), 61);
    assert_eq!(
        reported,
        [
            row(0, 1, "AgentStart", "put the role"),
            row(1800, 1, "Update", "ask its prov"),
            row(3600, 1, "Update", "ask its prov"),
        ]
    );
}

#[test]
fn healthy_machine_gets_no_work_and_a_silent_one_is_recovered() {
    assert_eq!(plan_rows(&fleet_view(vec![reporting_machine(1, 5)], Policy::default()), 29), []);
    assert_eq!(
        plan_rows(&fleet_view(vec![reporting_machine(1, 300)], Policy::default()), 29),
        [row(300, 1, "Recovery", "restart the "), row(301, 1, "Recovery", "end its reco")]
    );
    let mut deaf = reporting_machine(1, 300);
    deaf.listening_since = None;
    assert_eq!(plan_rows(&fleet_view(vec![deaf], Policy::default()), 29), [], "nobody would notice");
}

#[test]
fn hold_postpones_and_an_unlimited_hold_cancels() {
    let held = |until| {
        let mut facts = reporting_machine(1, 700);
        let (reason, by) = ("disks".to_owned(), "kim".to_owned());
        facts.hold = Some(Hold { scope: HoldScope::Everything, reason, by, until });
        plan_rows(&fleet_view(vec![facts], Policy::default()), 29)
    };
    assert_eq!(held(None), []);
    assert_eq!(held(Some(at(600))).first(), Some(&row(600, 1, "Recovery", "restart the ")));
}

#[test]
fn machine_is_released_once_and_then_idle() {
    let leaving = |number, wipe| {
        let mut facts = reporting_machine(number, 700);
        let retirement = Retirement::new("old".into(), "kim".into(), at(-1));
        facts.retirement = Some(Retirement { wipe, ..retirement });
        facts
    };
    let policy =
        Policy { release_budget: Budget { count: 1, window: Span::minutes(5) }, ..Policy::default() };
    let machines = vec![leaving(1, false), leaving(2, false), leaving(3, true)];
    let mut fleet = fleet_view(machines, policy);
    // The release of the first machine, and one before it.
    fleet.recent_releases = vec![at(-200)];
    assert_eq!(
        plan_rows(&fleet, 60),
        [
            row(0, 1, "Retirement", "put it off: "),
            row(0, 2, "Retirement", "put it off: "),
            row(100, 1, "Retirement", "give it back"),
            row(100, 2, "Retirement", "put it off: "),
            row(400, 2, "Retirement", "give it back"),
        ]
    );
}

#[test]
fn power_order_is_executed_and_watched_until_recovery() {
    let ordered = |number, switch, requested| {
        let mut facts = reporting_machine(number, 0);
        let (reason, by) = ("a new kernel".into(), "kim".into());
        facts.power_order =
            Some(PowerOrder { kind: switch, reason, by, ordered_at: at(requested), intent: None });
        facts
    };
    let policy = Policy::default();
    let minutes = i64::try_from(policy.power_order_timeout.0.as_secs() / 60).unwrap();
    let machines = vec![
        ordered(1, PowerOrderKind::Reboot, 0),
        ordered(2, PowerOrderKind::Off, 0),
        ordered(3, PowerOrderKind::Cycle, -60 * minutes),
    ];
    let rows = plan_rows(&fleet_view(machines, policy), 2);
    let of = |machine| rows.iter().filter(|row| row.1 == machine).cloned().collect::<Vec<_>>();
    let first = of(1);
    assert_eq!(first[0], row(0, 1, "Power", "reboot it"));
    assert!(first[1..].iter().any(|row| row.2 == "Recovery" && row.3 == "put the role"), "{first:?}");
    assert!(first.last().is_some_and(|row| row.3 == "end its reco"), "{first:?}");
    assert_eq!(of(2)[0], row(0, 2, "Power", "switch it of"));
    assert_eq!(of(3)[0], row(0, 3, "Power", "give up to s"));
}

#[test]
fn budget_is_shared_between_machines() {
    let mut policy = Policy::default();
    policy.budgets.insert(DisruptionKind::RestartAgent, Budget { count: 1, window: Span::minutes(5) });
    let reported =
        plan_rows(&fleet_view(vec![reporting_machine(2, 700), reporting_machine(1, 700)], policy), 20);
    assert_eq!(
        reported,
        [
            row(0, 1, "Recovery", "restart the "),
            row(0, 2, "Recovery", "put it off: "),
            row(1, 1, "Recovery", "end its reco"),
            row(300, 2, "Recovery", "restart the "),
            row(301, 2, "Recovery", "end its reco"),
        ]
    );
}

#[test]
fn brake_stops_recovery_until_its_window_has_passed() {
    let mut policy = Policy::default();
    policy.recovery_brake.window = Span::seconds(40);
    policy.recovery_brake.at_least = 2;
    // The index has them as silent since five seconds before now.
    let reported =
        plan_rows(&fleet_view(vec![reporting_machine(1, 700), reporting_machine(2, 700)], policy), 2);
    let begun = reported.iter().filter(|row| row.3 == "restart the ").map(|row| (row.0, row.1));
    let put_off = reported.iter().filter(|row| row.3 == "put it off: ").map(|row| (row.0, row.1));
    assert_eq!(put_off.collect::<Vec<_>>(), [(0, 1), (0, 2), (15, 1), (15, 2), (30, 1), (30, 2)]);
    assert_eq!(begun.collect::<Vec<_>>(), [(45, 1), (45, 2)], "none of them is lately silent by then");
}

#[test]
fn brake_counts_simultaneous_silence_before_any_recovery() {
    let mut policy = Policy::default();
    policy.recovery_brake.window = Span::seconds(40);
    policy.recovery_brake.at_least = 2;
    let reported =
        plan_rows(&fleet_view(vec![reporting_machine(1, 570), reporting_machine(2, 570)], policy), 2);
    let begun = reported.iter().filter(|row| row.3 == "restart the ").map(|row| (row.0, row.1));
    let put_off = reported.iter().filter(|row| row.3 == "put it off: ").map(|row| (row.0, row.1));
    assert_eq!(put_off.collect::<Vec<_>>(), [(30, 1), (30, 2), (45, 1), (45, 2), (60, 1), (60, 2)]);
    assert_eq!(begun.collect::<Vec<_>>(), [(75, 1), (75, 2)]);
}

#[test]
fn reboot_is_followed_by_agent_start_at_the_next_check() {
    let policy = Policy { ladder: Policy::default().ladder[1..].to_vec(), ..Policy::default() };
    let reported = plan_rows(&fleet_view(vec![reporting_machine(1, 700)], policy), 5);
    assert_eq!(
        reported,
        [
            row(0, 1, "Recovery", "reboot the m"),
            row(60, 1, "Recovery", "put the role"),
            row(61, 1, "Recovery", "end its reco"),
        ]
    );
}

#[test]
fn machines_with_an_unknown_fence_get_no_order() {
    let rebooted = |number| {
        let mut facts = reporting_machine(number, 700);
        facts.recovery = Some(Recovery {
            started_at: at(-60),
            rung: 1,
            last_action: Some(RecoveryAction {
                step: DisruptionKind::Reboot,
                acted_at: at(-60),
                deadline: at(540),
                boot_id_before: Some("b".into()),
            }),
            attempts: 1,
            next_check_at: at(0),
            note: "rebooted".into(),
            obstacle: None,
        });
        facts
    };
    let mut fleet =
        fleet_view(vec![provided_machine(1), reporting_machine(2, 700), rebooted(3)], Policy::default());
    let reported = plan_rows(&fleet, 5);
    for ordered in [
        row(0, 1, "AgentStart", "put the role"),
        row(0, 2, "Recovery", "restart the "),
        row(0, 3, "Recovery", "put the role"),
    ] {
        assert!(reported.contains(&ordered), "{ordered:?} is not in {reported:?}");
    }
    for machine in &mut fleet.machines {
        machine.unknown_fence = Some(UnknownFence { reported_at: at(-9), fence: 20 });
    }
    assert_eq!(
        plan_rows(&fleet, 29),
        [
            row(0, 1, "AgentStart", "call a perso"),
            row(0, 2, "Recovery", "call a perso"),
            row(0, 3, "Recovery", "call a perso"),
        ]
    );
}

#[test]
fn work_in_progress_is_marked_and_a_lost_session_is_waited_out() {
    let mut fleet = fleet_view(vec![provided_machine(1), provided_machine(2)], Policy::default());
    for machine in &mut fleet.machines {
        machine.lanes[0].stored_due =
            StoredDue { process: Some(Process::AgentStart), ready_at: Some(at(-3)), timer: false };
    }
    fleet.machines[0].lanes[0].is_working = true;
    fleet.machines[1].lanes[0].not_before = Some(at(60));
    let plan = plan_fleet(&fleet, Span::minutes(5));
    let reported: Vec<_> =
        plan.rows.iter().map(|row| ((row.at - at(0)).num_seconds(), row.in_progress)).collect();
    assert_eq!(reported, [(0, true), (60, false)]);
    let only = plan.restrict_to(Some(fleet.machines[1].facts.machine), Some(Process::AgentStart));
    assert_eq!(only.rows.len(), 1);
}

#[test]
fn paused_loop_starts_nothing_until_the_pause_ends() {
    let pause = |of, provider: Option<&str>, until| Pause {
        loop_kind: of,
        provider: provider.map(str::to_owned),
        reason: "r".into(),
        by: "kim".into(),
        since: at(-60),
        until,
    };
    let mut fleet = fleet_view(vec![provided_machine(1), provided_machine(2)], Policy::default());
    fleet.machines[1].facts.provider_record.as_mut().unwrap().provider = "rack-b".into();
    fleet.machines[1].lanes[0].is_working = true;
    let begun = |fleet: &FleetView| -> Vec<(i64, u128)> {
        let reported = plan_rows(fleet, 20);
        reported.into_iter().filter(|row| row.2 == "AgentStart").map(|row| (row.0, row.1)).collect()
    };
    assert_eq!(begun(&fleet), [(0, 1), (0, 2)]);
    for (pauses, expected) in [
        // Work under way goes on.
        (vec![pause(LoopKind::Initializer, None, None)], vec![(0, 2)]),
        (vec![pause(LoopKind::Initializer, None, Some(at(600)))], vec![(0, 2), (600, 1)]),
        (vec![pause(LoopKind::Initializer, Some("rack-b"), None)], vec![(0, 1), (0, 2)]),
        (vec![pause(LoopKind::Recoverer, None, None)], vec![(0, 1), (0, 2)]),
    ] {
        fleet.pauses = pauses;
        assert_eq!(begun(&fleet), expected, "{:?}", fleet.pauses);
        assert_eq!(plan_fleet(&fleet, Span::minutes(1)).pauses, fleet.pauses, "and it says so");
    }
}

fn cluster_context(health: &str, seen: i64) -> ClusterContext {
    ClusterContext {
        name: "ams".to_owned(),
        founded: true,
        leaving: false,
        health: Some(health.to_owned()),
        voter: false,
        votes: Some((3, 3)),
        observed_at: Some(at(seen)),
        other_disrupted: None,
    }
}

#[test]
fn machine_healthy_to_its_curator_is_not_recovered() {
    let mut fleet = fleet_view(vec![reporting_machine(1, 700)], Policy::default());
    fleet.machines[0].cluster = Some(cluster_context("healthy", -3));
    let plan = super::plan_fleet(&fleet, Span::minutes(20));
    assert!(plan.rows.len() > 20, "{plan:?}");
    let text = "put it off: unreachable by us, healthy to its curator (cluster ams)";
    assert!(plan.rows.iter().all(|row| row.action == text), "{:?}", plan.rows);

    // They fell silent earlier: the last report of the curators counts for a while, and by then they may be down.
    fleet.machines[0].cluster = Some(cluster_context("healthy", -300));
    let reported = plan_rows(&fleet, 20);
    let begun: Vec<i64> = reported.iter().filter(|row| row.3 == "restart the ").map(|row| row.0).collect();
    assert_eq!(begun.first(), Some(&300), "{reported:?}");
}

#[test]
fn machines_of_one_cluster_are_disrupted_one_at_a_time() {
    let silent = || Some(cluster_context("silent", -3));
    let policy = Policy { ladder: Policy::default().ladder[1..].to_vec(), ..Policy::default() };
    let mut fleet = fleet_view(
        vec![reporting_machine(1, 700), reporting_machine(2, 700), reporting_machine(3, 700)],
        policy,
    );
    fleet.machines[0].cluster = silent();
    fleet.machines[1].cluster = silent();
    fleet.machines[2].cluster =
        Some(ClusterContext { name: "fra".to_owned(), ..cluster_context("silent", -3) });
    let reported = plan_rows(&fleet, 5);
    let reboots: Vec<(i64, u128)> =
        reported.iter().filter(|row| row.3 == "reboot the m").map(|row| (row.0, row.1)).collect();
    assert_eq!(reboots[..2], [(0, 1), (0, 3)], "one of each: {reported:?}");
    assert!(
        matches!(reboots[2..], [(later, 2)] if later > 60),
        "the other one when that is well: {reported:?}"
    );
    assert!(reported.contains(&row(0, 2, "Recovery", "put it off: ")), "{reported:?}");
}
