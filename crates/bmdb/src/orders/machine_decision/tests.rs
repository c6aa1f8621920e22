//! Tests of orders about one machine: what each of them changes, and which have no effect.

use std::time::Duration;

use super::*;
use crate::orders::order::OutcomeKind;
use model::facts::{AgentStarted, HeartbeatFact, Postponement, PowerOrder, Quarantine, Recovery, Retirement};
use model::power_order::PowerOrderKind;
use model::signed_artefact::key_replacement::KeyReplacement;
use model::time::{after, before};

fn empty_facts() -> MachineFacts {
    MachineFacts::empty(model::ids::MachineId(uuid::Uuid::from_u128(1)), Timestamp::UNIX_EPOCH)
}

#[test]
fn release_without_effect_is_distinguished_from_one_that_is_not_needed() {
    let mut facts = empty_facts();
    let released =
        |facts: &MachineFacts, quarantine| release_machine(facts, quarantine, "by kim: done").output.kind;
    assert_eq!(released(&facts, false), OutcomeKind::Already, "no hold");
    assert_eq!(released(&facts, true), OutcomeKind::Already, "no quarantine");
    facts.quarantine =
        Some(model::facts::Quarantine { since: Timestamp::UNIX_EPOCH, reason: "by lee".into() });
    assert_eq!(released(&facts, false), OutcomeKind::NoEffect, "it stays quarantined");
    assert_eq!(released(&facts, true), OutcomeKind::Changed);
}

fn now() -> Timestamp {
    "2026-11-20T18:00:00Z".parse().unwrap()
}

/// A machine with an agent that reported just now.
fn reporting_facts() -> MachineFacts {
    let mut facts = empty_facts();
    facts.agent_started = Some(AgentStarted {
        started_at: Timestamp::UNIX_EPOCH,
        public_key: vec![7; 32],
        boot_id: None,
        fence: 1,
    });
    facts.heartbeat = Some(HeartbeatFact {
        received_at: now(),
        boot_id: "boot".into(),
        incarnation: "first".into(),
        sequence: 1,
    });
    facts.listening_since = Some(Timestamp::UNIX_EPOCH);
    facts
}

fn hold_on(facts: &mut MachineFacts, until: Option<Timestamp>) {
    let (reason, by) = ("a disk".into(), "lee".into());
    facts.hold = Some(Hold { scope: HoldScope::Everything, reason, by, until });
}

fn replace_keys(facts: &mut MachineFacts, expires_at: Timestamp) {
    facts.key_replacement = Some(KeyReplacement {
        keys: vec!["key".into()],
        reason: "lost".into(),
        by: "lee".into(),
        ordered_at: Timestamp::UNIX_EPOCH,
        expires_at,
    });
}

type Change = fn(&mut MachineFacts);

#[test]
fn retry_has_no_effect_on_a_machine_that_waits_for_something_else() {
    use OutcomeKind::{Already, NoEffect};
    let cases: [(&str, Change, OutcomeKind); 13] = [
        ("it reports", |_| (), Already),
        ("it has never reported", |facts| facts.heartbeat = None, NoEffect),
        ("it is held", |facts| hold_on(facts, None), NoEffect),
        ("its hold lasts", |facts| hold_on(facts, Some(after(now(), Duration::from_secs(1)))), NoEffect),
        ("its hold is over", |facts| hold_on(facts, Some(now())), Already),
        (
            "it is quarantined",
            |facts| facts.quarantine = Some(Quarantine { since: now(), reason: "by lee".into() }),
            NoEffect,
        ),
        (
            "it is recovered",
            |facts| {
                facts.recovery = Some(Recovery {
                    started_at: now(),
                    rung: 0,
                    last_action: None,
                    attempts: 0,
                    next_check_at: now(),
                    note: String::new(),
                    obstacle: None,
                });
            },
            NoEffect,
        ),
        (
            "it is retired",
            |facts| facts.retirement = Some(Retirement::new("old".into(), "lee".into(), now())),
            NoEffect,
        ),
        (
            "it has a power order",
            |facts| {
                facts.power_order = Some(PowerOrder {
                    kind: PowerOrderKind::Reboot,
                    reason: "it hangs".into(),
                    by: "lee".into(),
                    ordered_at: now(),
                    intent: None,
                });
            },
            NoEffect,
        ),
        (
            "its keys are replaced",
            |facts| replace_keys(facts, after(now(), Duration::from_secs(1))),
            NoEffect,
        ),
        ("its key replacement is over", |facts| replace_keys(facts, now()), Already),
        (
            "its work is postponed",
            |facts| {
                let (reason, decided_at) = ("a budget".into(), "a.rs:1".into());
                facts
                    .postponements
                    .insert(Process::Recovery, Postponement { until: now(), reason, decided_at });
            },
            NoEffect,
        ),
        (
            "it is silent",
            |facts| {
                if let Some(heartbeat) = &mut facts.heartbeat {
                    heartbeat.received_at = before(now(), Duration::from_hours(24));
                }
            },
            NoEffect,
        ),
    ];
    for (case, change, expected) in cases {
        let mut facts = reporting_facts();
        change(&mut facts);
        let snapshot = MachineSnapshot { facts, now: now(), policy_version: 1 };
        let decided = retry_machine(&snapshot, &Policy::default(), "by kim");
        assert_eq!(decided.output.kind, expected, "{case}");
    }
}

#[test]
fn hold_and_priority_that_would_be_over_are_rejected() {
    let snapshot = MachineSnapshot {
        facts: empty_facts(),
        now: "2026-11-20T18:00:00Z".parse().unwrap(),
        policy_version: 1,
    };
    for (moment, rejected) in [("2026-11-20T18:00:00Z", true), ("2026-11-20T18:00:01Z", false)] {
        let until = Some(Expiry::At(moment.parse().unwrap()));
        let held = hold_machine(&snapshot, HoldScope::Everything, "a disk", "kim", until);
        let put = prioritize_machine(&snapshot, PriorityLevel::Urgent, "a disk", "kim", until);
        for found in [held, put] {
            let reason = found.err().map(|(reason, _)| reason);
            assert_eq!(reason, rejected.then_some(EXPIRY_PASSED), "{moment}");
        }
    }
}

#[test]
fn quarantine_and_labels_change_only_what_differs() {
    let mut facts =
        MachineFacts::empty(model::ids::MachineId(uuid::Uuid::from_u128(1)), Timestamp::UNIX_EPOCH);
    let decided = quarantine_machine(&facts, "by kim: its fan rattles");
    assert_eq!(decided.changes, [FactChange::Quarantined("by kim: its fan rattles".into())]);
    facts.quarantine =
        Some(model::facts::Quarantine { since: Timestamp::UNIX_EPOCH, reason: "by lee".into() });
    let again = quarantine_machine(&facts, "by kim");
    assert!(again.changes.is_empty() && again.output.message.contains("by lee"), "{again:?}");
    assert_eq!(again.output.kind, OutcomeKind::Already);

    let row = |value: &str| Labels::from([("row".to_owned(), value.to_owned())]);
    for (present, set, remove, expected) in [
        (Labels::new(), row("7"), vec![], Some("is labelled row=7")),
        (row("7"), row("7"), vec![], None),
        (row("7"), Labels::new(), vec!["row".to_owned()], Some("has no label any more")),
        (Labels::new(), Labels::new(), vec!["row".to_owned()], None),
    ] {
        let decided = label_machine(&present, &set, &remove, "by kim").unwrap();
        let output = decided.output.is_changed().then_some(decided.output.message.as_str());
        assert_eq!((output, decided.changes.is_empty()), (expected, expected.is_none()), "{present:?}");
    }
}
