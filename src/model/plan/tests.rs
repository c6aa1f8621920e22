//! Futures of small fleets.

use super::*;
use crate::model::facts::{
    Acted, AgentStarted, Heartbeat, Hold, HoldScope, PowerOrder, Provided, Recovery, Retirement,
};
use crate::model::newer_fence::NewerFence;
use crate::model::policy::Budget;
use crate::model::power_order::Switch;
use crate::model::provider_status::ProviderStatus;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
}

/// Machine number `number`, that the provider was asked about at 0, and will be each half hour.
pub(super) fn provided(number: u8) -> MachineFacts {
    let mut facts = MachineFacts::unknown(MachineId(uuid::Uuid::from_u128(u128::from(number))), at(-9000));
    facts.listening_since = Some(at(-9000));
    facts.provided = Some(Provided {
        provider: "rack-a".into(),
        provider_id: number.to_string(),
        reservation: None,
        address: Some("192.0.2.1".into()),
        ssh_port: None,
        ssh_user: None,
        location: None,
        status: ProviderStatus::Running,
        at: at(-8000),
        looked_at: Some(at(0)),
        unchanged: true,
    });
    facts
}

/// The same with an agent that was heard so many seconds ago.
pub(super) fn heard(number: u8, ago: i64) -> MachineFacts {
    let mut facts = provided(number);
    let boot_id = Some("b".to_owned());
    facts.agent_started = Some(AgentStarted { at: at(-7000), public_key: vec![1; 32], boot_id, fence: 1 });
    facts.heartbeat =
        Some(Heartbeat { at: at(-ago), boot_id: "b".into(), incarnation: "i".into(), sequence: 1 });
    facts
}

pub(super) fn fleet(machines: Vec<MachineFacts>, policy: Policy) -> FleetView {
    let state = |facts: MachineFacts| MachineState {
        phase_index: phase_of(&facts, &policy, at(0)).to_string(),
        phase_since: at(-5),
        newer_fence: None,
        cluster: None,
        lanes: Lane::ALL
            .into_iter()
            .map(|lane| StoredLane {
                lane,
                armed: Armed { process: None, ready_at: None, timer: false },
                not_before: None,
                working: false,
            })
            .collect(),
        facts,
    };
    let machines = machines.into_iter().map(state).collect();
    FleetView {
        at: at(0),
        policy: Arc::new(policy),
        machines,
        disturbed: Vec::new(),
        released: Vec::new(),
        pauses: Vec::new(),
    }
}

/// (seconds, machine, process, the beginning of what is done) within `minutes`.
fn future(fleet: &FleetView, minutes: u64) -> Vec<(i64, u128, &'static str, String)> {
    let plan = plan(fleet, Span::minutes(minutes));
    assert!(!plan.cut);
    let told = plan.rows.into_iter().map(|row| {
        let what = row.what.chars().take(12).collect();
        ((row.at - at(0)).num_seconds(), row.name.machine.as_u128(), row.process, what)
    });
    told.collect()
}

fn row(seconds: i64, machine: u128, process: &'static str, what: &str) -> (i64, u128, &'static str, String) {
    (seconds, machine, process, what.to_owned())
}

#[test]
fn a_new_machine_is_taken_over_and_then_only_looked_at() {
    let told = future(&fleet(vec![provided(1)], Policy::default()), 61);
    assert_eq!(
        told,
        [
            row(0, 1, "AgentStart", "put the role"),
            row(1800, 1, "Update", "ask its prov"),
            row(3600, 1, "Update", "ask its prov"),
        ]
    );
}

#[test]
fn a_healthy_machine_is_left_alone_and_a_silent_one_is_brought_back() {
    assert_eq!(future(&fleet(vec![heard(1, 5)], Policy::default()), 29), []);
    assert_eq!(
        future(&fleet(vec![heard(1, 300)], Policy::default()), 29),
        [row(300, 1, "Recovery", "restart the "), row(301, 1, "Recovery", "end its reco")]
    );
    let mut deaf = heard(1, 300);
    deaf.listening_since = None;
    assert_eq!(future(&fleet(vec![deaf], Policy::default()), 29), [], "nobody would notice");
}

#[test]
fn a_hold_puts_off_and_a_hold_without_end_ends_it() {
    let held = |until| {
        let mut facts = heard(1, 700);
        let (reason, by) = ("disks".to_owned(), "kim".to_owned());
        facts.hold = Some(Hold { scope: HoldScope::Everything, reason, by, until });
        future(&fleet(vec![facts], Policy::default()), 29)
    };
    assert_eq!(held(None), []);
    assert_eq!(held(Some(at(600))).first(), Some(&row(600, 1, "Recovery", "restart the ")));
}

#[test]
fn machine_is_given_back_once_and_then_nothing_happens_to_it() {
    let leaving = |number, wipe| {
        let mut facts = heard(number, 700);
        let asked = Retirement::new("old".into(), "kim".into(), at(-1));
        facts.retirement = Some(Retirement { wipe, ..asked });
        facts
    };
    let policy =
        Policy { release_budget: Budget { count: 1, window: Span::minutes(5) }, ..Policy::default() };
    let machines = vec![leaving(1, false), leaving(2, false), leaving(3, true)];
    let mut fleet = fleet(machines, policy);
    // Of the first one, and of one that was given back before.
    fleet.released = vec![at(-200)];
    assert_eq!(
        future(&fleet, 60),
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
fn machine_is_switched_by_order_and_watched_until_it_is_back() {
    let ordered = |number, switch, asked| {
        let mut facts = heard(number, 0);
        let (reason, by) = ("a new kernel".into(), "kim".into());
        facts.power_order = Some(PowerOrder { switch, reason, by, at: at(asked), begun: None });
        facts
    };
    let policy = Policy::default();
    let minutes = i64::try_from(policy.power_order_timeout.0.as_secs() / 60).unwrap();
    let machines = vec![
        ordered(1, Switch::Reboot, 0),
        ordered(2, Switch::Off, 0),
        ordered(3, Switch::Cycle, -60 * minutes),
    ];
    let rows = future(&fleet(machines, policy), 2);
    let of = |machine| rows.iter().filter(|row| row.1 == machine).cloned().collect::<Vec<_>>();
    let first = of(1);
    assert_eq!(first[0], row(0, 1, "Power", "reboot it"));
    assert!(first[1..].iter().any(|row| row.2 == "Recovery" && row.3 == "put the role"), "{first:?}");
    assert!(first.last().is_some_and(|row| row.3 == "end its reco"), "{first:?}");
    assert_eq!(of(2)[0], row(0, 2, "Power", "switch it of"));
    assert_eq!(of(3)[0], row(0, 3, "Power", "give up to s"));
}

#[test]
fn one_machine_uses_up_the_budget_of_another() {
    let mut policy = Policy::default();
    policy.budgets.insert(Disturbance::RestartAgent, Budget { count: 1, window: Span::minutes(5) });
    let told = future(&fleet(vec![heard(2, 700), heard(1, 700)], policy), 20);
    assert_eq!(
        told,
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
fn a_brake_holds_all_of_many_until_its_window_has_passed() {
    let mut policy = Policy::default();
    policy.recovery_brake.window = Span::seconds(40);
    policy.recovery_brake.at_least = 2;
    // Silent since the fifth second before now, by the index.
    let told = future(&fleet(vec![heard(1, 700), heard(2, 700)], policy), 2);
    let begun = told.iter().filter(|row| row.3 == "restart the ").map(|row| (row.0, row.1));
    let put_off = told.iter().filter(|row| row.3 == "put it off: ").map(|row| (row.0, row.1));
    assert_eq!(put_off.collect::<Vec<_>>(), [(0, 1), (0, 2), (15, 1), (15, 2), (30, 1), (30, 2)]);
    assert_eq!(begun.collect::<Vec<_>>(), [(45, 1), (45, 2)], "none of them is lately silent by then");
}

#[test]
fn a_brake_counts_all_that_fall_silent_at_one_moment_before_the_first_of_them_is_helped() {
    let mut policy = Policy::default();
    policy.recovery_brake.window = Span::seconds(40);
    policy.recovery_brake.at_least = 2;
    let told = future(&fleet(vec![heard(1, 570), heard(2, 570)], policy), 2);
    let begun = told.iter().filter(|row| row.3 == "restart the ").map(|row| (row.0, row.1));
    let put_off = told.iter().filter(|row| row.3 == "put it off: ").map(|row| (row.0, row.1));
    assert_eq!(put_off.collect::<Vec<_>>(), [(30, 1), (30, 2), (45, 1), (45, 2), (60, 1), (60, 2)]);
    assert_eq!(begun.collect::<Vec<_>>(), [(75, 1), (75, 2)]);
}

#[test]
fn a_reboot_is_followed_by_a_new_agent_at_the_next_look() {
    let policy = Policy { ladder: Policy::default().ladder[1..].to_vec(), ..Policy::default() };
    let told = future(&fleet(vec![heard(1, 700)], policy), 5);
    assert_eq!(
        told,
        [
            row(0, 1, "Recovery", "reboot the m"),
            row(60, 1, "Recovery", "put the role"),
            row(61, 1, "Recovery", "end its reco"),
        ]
    );
}

#[test]
fn nothing_is_ordered_of_machines_that_have_seen_a_newer_fence() {
    let rebooted = |number| {
        let mut facts = heard(number, 700);
        facts.recovery = Some(Recovery {
            started_at: at(-60),
            rung: 1,
            acted: Some(Acted {
                step: Disturbance::Reboot,
                at: at(-60),
                deadline: at(540),
                boot_id_before: Some("b".into()),
            }),
            tries: 1,
            next_at: at(0),
            note: "rebooted".into(),
            obstacle: None,
        });
        facts
    };
    let mut fleet = fleet(vec![provided(1), heard(2, 700), rebooted(3)], Policy::default());
    let told = future(&fleet, 5);
    for ordered in [
        row(0, 1, "AgentStart", "put the role"),
        row(0, 2, "Recovery", "restart the "),
        row(0, 3, "Recovery", "put the role"),
    ] {
        assert!(told.contains(&ordered), "{ordered:?} is not in {told:?}");
    }
    for machine in &mut fleet.machines {
        machine.newer_fence = Some(NewerFence { heard: at(-9), fence: 20 });
    }
    assert_eq!(
        future(&fleet, 29),
        [
            row(0, 1, "AgentStart", "call a perso"),
            row(0, 2, "Recovery", "call a perso"),
            row(0, 3, "Recovery", "call a perso"),
        ]
    );
}

#[test]
fn work_that_is_under_way_is_told_so_and_a_loss_is_waited_out() {
    let mut fleet = fleet(vec![provided(1), provided(2)], Policy::default());
    for machine in &mut fleet.machines {
        machine.lanes[0].armed =
            Armed { process: Some(Process::AgentStart), ready_at: Some(at(-3)), timer: false };
    }
    fleet.machines[0].lanes[0].working = true;
    fleet.machines[1].lanes[0].not_before = Some(at(60));
    let plan = plan(&fleet, Span::minutes(5));
    let told: Vec<_> = plan.rows.iter().map(|row| ((row.at - at(0)).num_seconds(), row.under_way)).collect();
    assert_eq!(told, [(0, true), (60, false)]);
    let only = plan.only(Some(fleet.machines[1].facts.machine), Some(Process::AgentStart));
    assert_eq!(only.rows.len(), 1);
}

#[test]
fn what_a_paused_loop_would_begin_is_left_out_up_to_the_end_of_the_pause() {
    let pause = |of, provider: Option<&str>, until| Pause {
        of,
        provider: provider.map(str::to_owned),
        reason: "r".into(),
        by: "kim".into(),
        since: at(-60),
        until,
    };
    let mut fleet = fleet(vec![provided(1), provided(2)], Policy::default());
    fleet.machines[1].facts.provided.as_mut().unwrap().provider = "rack-b".into();
    fleet.machines[1].lanes[0].working = true;
    let begun = |fleet: &FleetView| -> Vec<(i64, u128)> {
        let told = future(fleet, 20);
        told.into_iter().filter(|row| row.2 == "AgentStart").map(|row| (row.0, row.1)).collect()
    };
    assert_eq!(begun(&fleet), [(0, 1), (0, 2)]);
    for (pauses, expected) in [
        // What is under way goes on.
        (vec![pause(Loop::Initializer, None, None)], vec![(0, 2)]),
        (vec![pause(Loop::Initializer, None, Some(at(600)))], vec![(0, 2), (600, 1)]),
        (vec![pause(Loop::Initializer, Some("rack-b"), None)], vec![(0, 1), (0, 2)]),
        (vec![pause(Loop::Recoverer, None, None)], vec![(0, 1), (0, 2)]),
    ] {
        fleet.pauses = pauses;
        assert_eq!(begun(&fleet), expected, "{:?}", fleet.pauses);
        assert_eq!(plan(&fleet, Span::minutes(1)).paused, fleet.pauses, "and it says so");
    }
}

fn in_cluster(health: &str, seen: i64) -> InCluster {
    InCluster {
        name: "ams".to_owned(),
        founded: true,
        leaving: false,
        health: Some(health.to_owned()),
        voter: false,
        votes: Some((3, 3)),
        seen_at: Some(at(seen)),
        disturbed: None,
    }
}

#[test]
fn machine_that_its_curator_hears_is_left_alone_for_as_long_as_curators_answer() {
    let mut fleet = fleet(vec![heard(1, 700)], Policy::default());
    fleet.machines[0].cluster = Some(in_cluster("healthy", -3));
    let plan = super::plan(&fleet, Span::minutes(20));
    assert!(plan.rows.len() > 20, "{plan:?}");
    let said = "put it off: unreachable by us, healthy to its curator (cluster ams)";
    assert!(plan.rows.iter().all(|row| row.what == said), "{:?}", plan.rows);

    // They fell silent before: what they said last counts for a while, and they may be down.
    fleet.machines[0].cluster = Some(in_cluster("healthy", -300));
    let told = future(&fleet, 20);
    let begun: Vec<i64> = told.iter().filter(|row| row.3 == "restart the ").map(|row| row.0).collect();
    assert_eq!(begun.first(), Some(&300), "{told:?}");
}

#[test]
fn machines_of_one_cluster_are_disturbed_one_after_the_other() {
    let silent = || Some(in_cluster("silent", -3));
    let policy = Policy { ladder: Policy::default().ladder[1..].to_vec(), ..Policy::default() };
    let mut fleet = fleet(vec![heard(1, 700), heard(2, 700), heard(3, 700)], policy);
    fleet.machines[0].cluster = silent();
    fleet.machines[1].cluster = silent();
    fleet.machines[2].cluster = Some(InCluster { name: "fra".to_owned(), ..in_cluster("silent", -3) });
    let told = future(&fleet, 5);
    let reboots: Vec<(i64, u128)> =
        told.iter().filter(|row| row.3 == "reboot the m").map(|row| (row.0, row.1)).collect();
    assert_eq!(reboots[..2], [(0, 1), (0, 3)], "one of each: {told:?}");
    assert!(matches!(reboots[2..], [(later, 2)] if later > 60), "the other one when that is well: {told:?}");
    assert!(told.contains(&row(0, 2, "Recovery", "put it off: ")), "{told:?}");
}
