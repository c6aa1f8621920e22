//! Power control: whether a power order is accepted, its next step, and the recovery ladder after it.
//!
//! The order is a fact of the machine until it is carried out, cannot be carried out, or has waited for too long
//! ([`next_power_step`]). The power controller carries it out, not the recoverer: a paused recovery, or one that a
//! brake holds, stops no operator from switching a machine by hand.
//!
//! The recovery ladder watches a machine after an ordered reboot. The machine is where it would be had the ladder
//! rebooted it, so the ladder goes on if it does not come back. A machine that is switched off gets a hold, because the
//! ladder would otherwise bring it back.
//!
//! The provider gets every repetition of an order under one intent. A reboot over SSH has no intents, so one that may
//! have been sent is not sent again.

use crate::facts::{Hold, HoldScope, MachineFacts, PowerOrder, Recovery};
use crate::humanize::absolute_time;
use crate::policy::{DisruptionKind, Policy, Rung};
use crate::power_order::PowerOrderKind;
use crate::recovery::start_step;
use crate::time::{Span, Timestamp, after};

/// A rejection: a reason for programs, and a sentence that follows the machine's name.
pub type PowerOrderRejection = (&'static str, String);

/// Whether `switch` may be ordered for a machine at `now`.
pub fn check_power_order(
    facts: &MachineFacts,
    switch: PowerOrderKind,
    now: Timestamp,
) -> Result<(), PowerOrderRejection> {
    if facts.provider_record.is_none() {
        let text = "cannot be switched: no provider has handed it over yet. Nothing was changed";
        return Err(("NOT_PROVIDED", text.to_owned()));
    }
    if facts.retirement.is_some() {
        let text = "is being retired, or was; cancel that first where it can be. Nothing was changed";
        return Err(("RETIRING", text.to_owned()));
    }
    if let Some(quarantine) = &facts.quarantine {
        let text = format!(
            "is quarantined, so that it may be somebody else's: {}; `release --quarantine` ends that. Nothing was \
             changed",
            quarantine.reason
        );
        return Err(("QUARANTINED", text));
    }
    if let Some(hold) = power_hold(facts, now) {
        let text = format!(
            "is held ({}) by {}: {}; release it first. Nothing was changed",
            hold.scope.as_str(),
            hold.by,
            hold.reason
        );
        return Err(("HELD", text));
    }
    match &facts.power_order {
        Some(present) if present.kind != switch => Err((
            "ORDERED_OTHERWISE",
            format!(
                "is already ordered to be {}, by {}: {}; wait for that, or cancel it with `power cancel`. \
                 Nothing was changed",
                present.kind.participle(),
                present.by,
                present.reason
            ),
        )),
        _ => Ok(()),
    }
}

/// The hold in force at `now` that forbids power actions.
#[must_use]
pub fn power_hold(facts: &MachineFacts, now: Timestamp) -> Option<&Hold> {
    let hold = facts.hold.as_ref().filter(|hold| hold.is_active_at(now))?;
    matches!(hold.scope, HoldScope::Everything | HoldScope::Power).then_some(hold)
}

/// The hold that an order to switch off sets, unless a hold without an end is in force.
#[must_use]
pub fn implied_hold(
    facts: &MachineFacts,
    switch: PowerOrderKind,
    reason: &str,
    by: &str,
    now: Timestamp,
) -> Option<Hold> {
    let lasts = facts.hold.as_ref().is_some_and(|hold| hold.is_active_at(now) && hold.until.is_none());
    (switch == PowerOrderKind::Off && !lasts).then(|| Hold {
        scope: HoldScope::Recovery,
        reason: format!("switched off: {reason}"),
        by: by.to_owned(),
        until: None,
    })
}

/// How an order can be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerRoute<'a> {
    /// By a call to the provider.
    Provider,
    /// By a command on the machine, over SSH.
    Ssh,
    /// Not at all, for this reason.
    Unavailable(&'a str),
}

/// The next step for an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PowerOrderStep {
    /// Carry it out, under its intent if it has one.
    Execute,
    /// It may have been carried out: watch what follows.
    Watch,
    /// It cannot be carried out, or could not be in time: it ends.
    GiveUp(String),
}

/// The next step for `order` at `now`.
#[must_use]
pub fn next_power_step(
    order: &PowerOrder,
    way: PowerRoute<'_>,
    policy: &Policy,
    now: Timestamp,
) -> PowerOrderStep {
    if let Some(why) = lapse_reason(order, policy, now) {
        return PowerOrderStep::GiveUp(why);
    }
    // What may have been sent over SSH is not sent again. The ladder finds out whether it was.
    if order.intent.is_some() && way == PowerRoute::Ssh {
        return PowerOrderStep::Watch;
    }
    match way {
        PowerRoute::Unavailable(reason) => PowerOrderStep::GiveUp(format!("cannot be carried out: {reason}")),
        PowerRoute::Provider | PowerRoute::Ssh => PowerOrderStep::Execute,
    }
}

/// Why an order is given up at `now`; `None` while it has time.
#[must_use]
pub fn lapse_reason(order: &PowerOrder, policy: &Policy, now: Timestamp) -> Option<String> {
    let lapses = lapses_at(order, policy);
    let limit = policy.power_order_timeout;
    (lapses <= now).then(|| match order.intent {
        Some(_) => format!("was given, and its result was not reported within {limit}"),
        None => format!("was not carried out by {}, {limit} after it was given", absolute_time(lapses)),
    })
}

/// When an order that could not be carried out is given up.
#[must_use]
pub fn lapses_at(order: &PowerOrder, policy: &Policy) -> Timestamp {
    after(order.ordered_at, policy.power_order_timeout.0)
}

/// The ladder after an order: as after its own step of that kind. `None` where no report is expected, because the
/// machine is switched off or never had an agent, and where a hold keeps recovery away.
#[must_use]
pub fn recovery_after(
    facts: &MachineFacts,
    order: &PowerOrder,
    policy: &Policy,
    now: Timestamp,
) -> Option<(Recovery, Rung)> {
    let held = facts.hold.as_ref().is_some_and(|hold| hold.is_active_at(now));
    if !order.kind.reboots() || facts.agent_started.is_none() || held {
        return None;
    }
    let step = order.kind.disruption().unwrap_or(DisruptionKind::PowerCycle);
    let found = policy.ladder.iter().enumerate().find(|(_, rung)| rung.step == step);
    // A ladder without such a rung: after it only a person is left.
    let (index, rung) = found.map_or(
        (policy.ladder.len(), Rung { step, deadline: Span::minutes(10), tries: 1 }),
        |(index, rung)| (index, *rung),
    );
    let mut ladder = start_step(facts, index, step, rung.deadline, 1, now);
    // The order was repeated: the machine may have come back since the first time, and need not come back once more.
    let before = facts.recovery.as_ref().and_then(|recovery| recovery.last_action.as_ref());
    if let (Some(_), Some(acted), Some(before)) = (order.intent, &mut ladder.last_action, before)
        && before.step == step
    {
        acted.boot_id_before.clone_from(&before.boot_id_before);
    }
    Some((ladder, rung))
}

/// The note of the ladder on an order that was carried out.
#[must_use]
pub fn recovery_note(order: &PowerOrder) -> String {
    format!("{} ordered to {}: {}; waits for its report", order.by, order.kind.phrase(), order.reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{HeartbeatFact, Quarantine, RecordedIntent, Retirement};
    use crate::ids::IntentId;
    use crate::sample_machine::{at, enrolled_machine, heartbeat};

    fn order(switch: PowerOrderKind, begun: bool) -> PowerOrder {
        PowerOrder {
            kind: switch,
            reason: "it hangs".into(),
            by: "kim".into(),
            ordered_at: at(0),
            intent: begun.then(|| RecordedIntent { intent: IntentId::generate(), recorded_at: at(1) }),
        }
    }

    fn hold(scope: HoldScope, until: Option<i64>) -> Hold {
        Hold { scope, reason: "r".into(), by: "lee".into(), until: until.map(at) }
    }

    #[test]
    fn order_is_rejected_when_something_blocks_it() {
        let with = |change: fn(&mut MachineFacts)| {
            let mut facts = enrolled_machine();
            change(&mut facts);
            facts
        };
        for (name, facts, expected) in [
            ("well", enrolled_machine(), None),
            ("nobody's", with(|facts| facts.provider_record = None), Some("NOT_PROVIDED")),
            (
                "leaving",
                with(|facts| facts.retirement = Some(Retirement::new("old".into(), "kim".into(), at(0)))),
                Some("RETIRING"),
            ),
            (
                "quarantined",
                with(|facts| facts.quarantine = Some(Quarantine { since: at(0), reason: "twice".into() })),
                Some("QUARANTINED"),
            ),
            ("held", with(|facts| facts.hold = Some(hold(HoldScope::Everything, None))), Some("HELD")),
            ("power held", with(|facts| facts.hold = Some(hold(HoldScope::Power, Some(200)))), Some("HELD")),
            ("no more held", with(|facts| facts.hold = Some(hold(HoldScope::Power, Some(50)))), None),
            ("recovery held", with(|facts| facts.hold = Some(hold(HoldScope::Recovery, None))), None),
            ("ordered", with(|facts| facts.power_order = Some(order(PowerOrderKind::Reboot, false))), None),
            (
                "ordered otherwise",
                with(|facts| facts.power_order = Some(order(PowerOrderKind::Off, false))),
                Some("ORDERED_OTHERWISE"),
            ),
        ] {
            let refused = check_power_order(&facts, PowerOrderKind::Reboot, at(100)).err();
            assert_eq!(refused.as_ref().map(|(reason, _)| *reason), expected, "{name}: {refused:?}");
            assert!(refused.is_none_or(|(_, text)| text.ends_with("Nothing was changed")), "{name}");
        }
    }

    #[test]
    fn order_runs_once_over_ssh_and_under_one_intent_elsewhere() {
        let policy = Policy::default();
        let late = policy.power_order_timeout.0.as_secs().cast_signed();
        for (name, begun, way, now, expected) in [
            ("new", false, PowerRoute::Provider, 10, "Execute"),
            ("new, over SSH", false, PowerRoute::Ssh, 10, "Execute"),
            ("begun before", true, PowerRoute::Provider, 10, "Execute"),
            ("run before", true, PowerRoute::Ssh, 10, "Watch"),
            (
                "no way",
                false,
                PowerRoute::Unavailable("it is this host"),
                10,
                "GiveUp(\"cannot be carried out: it is this host",
            ),
            ("just in time", false, PowerRoute::Provider, late - 1, "Execute"),
            ("too late", false, PowerRoute::Provider, late, "GiveUp(\"was not carried out by "),
            ("too late, and begun", true, PowerRoute::Provider, late, "GiveUp(\"was given, and its result"),
        ] {
            let next = format!(
                "{:?}",
                next_power_step(&order(PowerOrderKind::Reboot, begun), way, &policy, at(now))
            );
            assert!(next.starts_with(expected), "{name}: {next}");
        }
    }

    #[test]
    fn recovery_watches_machines_that_reboot() {
        let policy = Policy::default();
        let stands = |facts: &MachineFacts, switch| {
            recovery_after(facts, &order(switch, false), &policy, at(100)).map(|(ladder, rung)| {
                (ladder.rung, ladder.attempts, rung.step, ladder.last_action.map(|acted| acted.acted_at))
            })
        };
        let reboot = Some((1, 1, DisruptionKind::Reboot, Some(at(100))));
        let cycle = Some((2, 1, DisruptionKind::PowerCycle, Some(at(100))));
        let mut held = enrolled_machine();
        held.hold = Some(hold(HoldScope::Recovery, None));
        let mut without = enrolled_machine();
        without.agent_started = None;
        for (name, facts, switch, expected) in [
            ("rebooted", enrolled_machine(), PowerOrderKind::Reboot, reboot),
            ("off and on", enrolled_machine(), PowerOrderKind::Cycle, cycle),
            ("on", enrolled_machine(), PowerOrderKind::On, cycle),
            ("off", enrolled_machine(), PowerOrderKind::Off, None),
            ("held", held, PowerOrderKind::On, None),
            ("no agent", without, PowerOrderKind::Reboot, None),
        ] {
            assert_eq!(stands(&facts, switch), expected, "{name}");
        }
        // The machine is back when the order is repeated: its present boot is the proof.
        let mut back = enrolled_machine();
        let mut beat = |boot: &str| {
            back.heartbeat = Some(HeartbeatFact { boot_id: boot.into(), ..heartbeat(50) });
            back.clone()
        };
        let (first, _) =
            recovery_after(&beat("old"), &order(PowerOrderKind::Reboot, false), &policy, at(60)).unwrap();
        let again = MachineFacts { recovery: Some(first), ..beat("new") };
        let (ladder, _) =
            recovery_after(&again, &order(PowerOrderKind::Reboot, true), &policy, at(100)).unwrap();
        let acted = ladder.last_action.unwrap();
        assert_eq!((acted.boot_id_before.as_deref(), acted.acted_at), (Some("old"), at(100)));
        let bare = Policy { ladder: Vec::new(), ..Policy::default() };
        let (ladder, _) =
            recovery_after(&enrolled_machine(), &order(PowerOrderKind::Reboot, false), &bare, at(100))
                .unwrap();
        assert_eq!(ladder.rung, 0);
    }

    #[test]
    fn powered_off_machine_is_held_without_end() {
        let held = |present: Option<Hold>, switch| {
            let facts = MachineFacts { hold: present, ..enrolled_machine() };
            implied_hold(&facts, switch, "r", "kim", at(100)).map(|hold| hold.reason)
        };
        let own = Some("switched off: r".to_owned());
        assert_eq!(held(None, PowerOrderKind::Off), own);
        assert_eq!(held(Some(hold(HoldScope::Recovery, Some(500))), PowerOrderKind::Off), own);
        assert_eq!(held(Some(hold(HoldScope::Recovery, None)), PowerOrderKind::Off), None);
        assert_eq!(held(None, PowerOrderKind::Cycle), None);
    }
}
