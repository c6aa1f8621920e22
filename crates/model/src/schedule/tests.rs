//! Tests: when each kind of work is due.

use std::time::Duration;

use super::*;
use crate::backoff::BackoffFact;
use crate::facts::{Hold, NeedsHuman, Quarantine, Recovery, RecoveryAction};
use crate::ids::MachineId;
use crate::needs_human::Obstacle;
use crate::policy::DisruptionKind;
use crate::priority::Priority;
use crate::sample_machine::{at, enrolled_machine, provided_machine, ready_machine};

fn healthy_machine() -> MachineFacts {
    ready_machine(100)
}

fn access(facts: &MachineFacts, now: i64) -> (Option<Process>, Option<i64>, bool, Phase) {
    let due = next_due(facts, Lane::Access, &Policy::default(), at(now));
    (due.process, due.ready_at.map(|ready| (ready - at(0)).num_seconds()), due.timer, due.phase)
}

#[test]
fn machine_is_due_for_what_its_facts_say() {
    use Phase as P;
    use Process::{AgentStart, Recovery};
    let unknown = MachineFacts::empty(MachineId::generate(), at(0));
    let mut no_address = provided_machine();
    no_address.provider_record.as_mut().unwrap().address = None;
    let mut provisioning = provided_machine();
    provisioning.provider_record.as_mut().unwrap().status = ProviderStatus::Provisioning;
    let mut restarted = healthy_machine();
    restarted.agent_started.as_mut().unwrap().started_at = at(500);
    let mut deaf = healthy_machine();
    deaf.listening_since = None;
    let mut returned = healthy_machine();
    returned.listening_since = Some(at(5_000));
    for (name, facts, now, expected) in [
        ("unknown", unknown, 5, (None, None, false, P::New)),
        ("no address", no_address, 5, (None, None, false, P::Provisioning)),
        ("provisioning", provisioning, 5, (None, None, false, P::Provisioning)),
        ("provided", provided_machine(), 5, (Some(AgentStart), Some(0), false, P::Provided)),
        ("started", enrolled_machine(), 20, (Some(Recovery), Some(10 + 1800), true, P::AgentStarting)),
        ("never reported", enrolled_machine(), 1810, (Some(Recovery), Some(1810), false, P::Silent)),
        ("healthy", healthy_machine(), 200, (Some(Recovery), Some(100 + 600), true, P::Ready)),
        ("silent", healthy_machine(), 700, (Some(Recovery), Some(700), false, P::Silent)),
        ("started again", restarted, 700, (Some(Recovery), Some(500 + 600), true, P::Ready)),
        ("nobody listens", deaf, 9_000, (Some(Recovery), Some(9_600), true, P::Ready)),
        ("we were away", returned, 5_100, (Some(Recovery), Some(5_600), true, P::Ready)),
    ] {
        assert_eq!(access(&facts, now), expected, "{name}");
    }
}

#[test]
fn holds_and_waits_postpone_work() {
    let hold = |scope, until: Option<i64>| Hold {
        scope,
        reason: "disk swap".into(),
        by: "kim".into(),
        until: until.map(at),
    };
    let mut stopped = provided_machine();
    stopped.hold = Some(hold(HoldScope::Everything, None));
    let mut held_a_while = provided_machine();
    held_a_while.hold = Some(hold(HoldScope::Everything, Some(300)));
    let mut hold_over = provided_machine();
    hold_over.hold = Some(hold(HoldScope::Everything, Some(3)));
    let mut held_power = healthy_machine();
    held_power.hold = Some(hold(HoldScope::Power, None));
    let mut held_recovery = healthy_machine();
    held_recovery.hold = Some(hold(HoldScope::Recovery, None));
    let mut failed = provided_machine();
    failed.backoffs.insert(
        Process::AgentStart,
        BackoffFact {
            failures: 3,
            last_interval: Duration::from_mins(1),
            until: at(70),
            cause: "no route".into(),
        },
    );
    let mut quarantined = healthy_machine();
    quarantined.quarantine = Some(Quarantine { since: at(0), reason: "twice".into() });
    let mut needs_human = healthy_machine();
    needs_human.needs_human = Some(NeedsHuman {
        since: at(0),
        reason: "dead".into(),
        obstacle: Obstacle::LadderExhausted,
        reporting_since: None,
    });
    let start = Some(Process::AgentStart);
    let recovery = Some(Process::Recovery);
    for (name, facts, expected) in [
        ("held", stopped, (None, None, false, Phase::Provided)),
        ("held for a while", held_a_while, (start, Some(300), false, Phase::Provided)),
        ("hold over", hold_over, (start, Some(0), false, Phase::Provided)),
        ("power held", held_power, (recovery, Some(700), true, Phase::Ready)),
        ("recovery held", held_recovery, (None, None, false, Phase::Ready)),
        ("backoff", failed.clone(), (start, Some(70), false, Phase::Provided)),
        ("quarantined", quarantined, (None, None, false, Phase::Quarantined)),
        ("needs human", needs_human, (None, None, false, Phase::NeedsHuman)),
    ] {
        assert_eq!(access(&facts, 200), expected, "{name}");
    }
    assert_eq!(next_due(&failed, Lane::Access, &Policy::default(), at(20)).priority, 2);
}

#[test]
fn only_a_healthy_machine_has_the_healthy_reason() {
    let reason = |facts: &MachineFacts| next_due(facts, Lane::Access, &Policy::default(), at(110)).reason;
    let mut held = healthy_machine();
    held.hold = Some(Hold {
        scope: HoldScope::Everything,
        reason: "disk swap".into(),
        by: "kim".into(),
        until: Some(at(10_000)),
    });
    for (facts, expected) in
        [(healthy_machine(), true), (held, false), (enrolled_machine(), false), (provided_machine(), false)]
    {
        assert_eq!(is_healthy_reason(&reason(&facts)), expected, "{}", reason(&facts));
    }
}

#[test]
fn rebooting_machine_yields_to_a_newly_silent_one() {
    let ladder = |step| {
        let mut facts = healthy_machine();
        facts.recovery = Some(Recovery {
            started_at: at(700),
            rung: 1,
            last_action: Some(RecoveryAction {
                step,
                acted_at: at(700),
                deadline: at(1600),
                boot_id_before: None,
            }),
            attempts: 1,
            next_check_at: at(760),
            note: "waits for it to come up".into(),
            obstacle: None,
        });
        next_due(&facts, Lane::Access, &Policy::default(), at(800)).priority
    };
    assert_eq!(next_due(&healthy_machine(), Lane::Access, &Policy::default(), at(800)).priority, 1);
    assert_eq!(ladder(DisruptionKind::RestartAgent), 1);
    assert_eq!((ladder(DisruptionKind::Reboot), ladder(DisruptionKind::PowerCycle)), (2, 2));
}

#[test]
fn operator_priority_overrides_automatic_yielding() {
    let reported = |level, until: Option<i64>| Priority {
        level,
        reason: "a customer waits".into(),
        by: "kim".into(),
        since: at(0),
        until: until.map(at),
    };
    let backoff = |failures| BackoffFact {
        failures,
        last_interval: Duration::from_mins(1),
        until: at(70),
        cause: "no route to host".into(),
    };
    for (name, priority, failures, expected, lapsed) in [
        ("no priority set", None, 0, 1, None),
        ("failed often", None, 3, 2, None),
        ("urgent", Some(reported(PriorityLevel::Urgent, None)), 0, 0, None),
        ("urgent, though it failed often", Some(reported(PriorityLevel::Urgent, Some(300))), 3, 0, None),
        ("low", Some(reported(PriorityLevel::Low, None)), 0, 2, None),
        ("over", Some(reported(PriorityLevel::Urgent, Some(200))), 0, 1, Some(0)),
        ("over, and failed often", Some(reported(PriorityLevel::Urgent, Some(200))), 3, 2, Some(0)),
    ] {
        let mut facts = provided_machine();
        facts.priority = priority;
        if failures > 0 {
            facts.backoffs.insert(Process::AgentStart, backoff(failures));
        }
        for lane in [Lane::Access, Lane::Observe] {
            let due = next_due(&facts, lane, &Policy::default(), at(200));
            let expected = if lane == Lane::Observe && expected == 2 && failures > 0 { 1 } else { expected };
            assert_eq!((due.priority, due.expired_priority), (expected, lapsed), "{name}, {lane}");
        }
    }
}

#[test]
fn waiting_for_a_person_says_how_else_it_may_end() {
    let mut facts = provided_machine();
    facts.needs_human = Some(NeedsHuman {
        since: at(0),
        reason: "tried in vain".into(),
        obstacle: Obstacle::LadderExhausted,
        reporting_since: None,
    });
    let reason = |facts: &MachineFacts| next_due(facts, Lane::Access, &Policy::default(), at(9)).reason;
    assert_eq!(reason(&facts), "waits for a person: tried in vain");
    facts.agent_started = enrolled_machine().agent_started;
    assert_eq!(
        reason(&facts),
        "waits for a person, or for its agent to report for 10m without a gap: tried in vain"
    );
}

#[test]
fn decision_records_its_reason_and_code_location() {
    let due = next_due(&provided_machine(), Lane::Access, &Policy::default(), at(1));
    assert_eq!(due.reason, "has no role server yet");
    assert!(due.decided_at.file().ends_with("schedule.rs") && due.decided_at.line() > 1);
    let other = next_due(&healthy_machine(), Lane::Access, &Policy::default(), at(1));
    assert_ne!(other.decided_at.line(), due.decided_at.line());
}

#[test]
fn provider_is_polled_often_until_its_answer_is_stable() {
    let policy = Policy::default();
    let mut facts = provided_machine();
    let ready = |facts: &MachineFacts| {
        (next_due(facts, Lane::Observe, &policy, at(50)).ready_at.unwrap() - at(0)).num_seconds()
    };
    assert_eq!(ready(&facts), 0);
    facts.provider_record.as_mut().unwrap().polled_at = Some(at(50));
    assert_eq!(ready(&facts), 50 + 60);
    facts.provider_record.as_mut().unwrap().unchanged = true;
    assert_eq!(ready(&facts), 50 + 1800);
    facts.provider_record.as_mut().unwrap().status = ProviderStatus::Missing;
    assert_eq!(ready(&facts), 50 + 60);
}

#[test]
fn due_row_keeps_its_place_and_is_never_armed_in_the_past() {
    let due = next_due(&provided_machine(), Lane::Access, &Policy::default(), at(50));
    let stored = |process, ready: Option<i64>| StoredDue { process, ready_at: ready.map(at), timer: false };
    let start = Some(Process::AgentStart);
    assert_eq!(armed_ready_at(&stored(None, None), &due, at(50)), Some(at(50)));
    assert_eq!(armed_ready_at(&stored(start, Some(20)), &due, at(50)), Some(at(20)));
    assert_eq!(armed_ready_at(&stored(start, Some(90)), &due, at(50)), Some(at(50)));
    assert_eq!(armed_ready_at(&stored(Some(Process::Recovery), Some(20)), &due, at(50)), Some(at(50)));
    let later = DueWork { ready_at: Some(at(70)), ..due };
    assert_eq!(armed_ready_at(&stored(start, Some(20)), &later, at(50)), Some(at(70)));
}

#[test]
fn ordered_replacement_of_signing_keys_waits_for_no_silence_and_hides_none() {
    let order = |expires: i64| KeyReplacement {
        keys: Vec::new(),
        reason: "the safe burnt".into(),
        by: "kim".into(),
        ordered_at: at(110),
        expires_at: at(expires),
    };
    let with_order =
        |expires: i64| MachineFacts { key_replacement: Some(order(expires)), ..healthy_machine() };
    let failed = |until: i64| {
        let mut facts = with_order(100_000);
        let interval = Duration::from_secs(10);
        let backoff =
            BackoffFact { failures: 1, last_interval: interval, until: at(until), cause: "no route".into() };
        facts.backoffs.insert(Process::AgentStart, backoff);
        facts
    };
    let mut no_address = with_order(100_000);
    no_address.provider_record.as_mut().unwrap().address = None;
    let silent = silence_deadline(&healthy_machine(), &Policy::default()).unwrap();
    let silent = (silent - at(0)).num_seconds();
    let recovery = (Some(Process::Recovery), Some(silent), true);
    let start = |at| (Some(Process::AgentStart), Some(at), false);
    for (name, facts, now, expected) in [
        ("ordered", with_order(100_000), 120, start(110)),
        ("it is over", with_order(115), 120, recovery),
        (
            "the machine is silent",
            with_order(100_000),
            silent,
            (Some(Process::Recovery), Some(silent), false),
        ),
        ("it failed", failed(130), 120, start(130)),
        ("it failed for long", failed(silent), 120, recovery),
        ("no address", no_address, 120, recovery),
    ] {
        let (process, ready_at, timer, _) = access(&facts, now);
        assert_eq!((process, ready_at, timer), expected, "{name}");
    }
    let due = next_due(&with_order(100_000), Lane::Access, &Policy::default(), at(120));
    assert!(
        due.reason.starts_with("kim ordered that a takeover replaces its pinned signing keys"),
        "{due:?}"
    );
    assert_eq!(due.deadline, Some(at(100_000)));
}
