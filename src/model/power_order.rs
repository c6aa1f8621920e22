//! Power by hand: what a person may order, and what becomes of it.
//!
//! A person may order a reboot, or power on, off, or off and on. The order is a fact of the machine until it is
//! carried out, cannot be, or has waited for too long ([`next`]). The loop that carries it out is not the
//! recoverer: a paused recovery, or one that a brake holds, keeps nobody from switching a machine by hand.
//!
//! What follows a reboot is the ladder's to watch: its machine stands where it would stand had the ladder
//! rebooted it, so that one that does not come back is climbed further on. A machine that is switched off is held,
//! because the ladder would else bring it back.
//!
//! The provider is told under one intent, however often it must be told. A reboot over SSH knows no intents, so one
//! that may have been given is not given again.

use std::fmt;
use std::str::FromStr;

use crate::model::facts::{Hold, HoldScope, MachineFacts, PowerOrder, Recovery};
use crate::model::policy::{Disturbance, Policy, Rung};
use crate::model::process::UnknownName;
use crate::model::recovery::begun;
use crate::model::telling::absolute;
use crate::model::time::{Span, Timestamp, after};

/// What may be ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Switch {
    /// Reboot it.
    Reboot,
    /// Give it power.
    On,
    /// Cut its power.
    Off,
    /// Cut its power, then give it.
    Cycle,
}

impl Switch {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Reboot, Self::On, Self::Off, Self::Cycle];

    /// The name used in the database and by people.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Reboot => "reboot",
            Self::On => "on",
            Self::Off => "off",
            Self::Cycle => "cycle",
        }
    }

    /// As the end of "an order to".
    #[must_use]
    pub const fn phrase(self) -> &'static str {
        match self {
            Self::Reboot => "reboot it",
            Self::On => "switch it on",
            Self::Off => "switch it off",
            Self::Cycle => "switch it off and on",
        }
    }

    /// As the middle of "it is to be".
    #[must_use]
    pub const fn participle(self) -> &'static str {
        match self {
            Self::Reboot => "rebooted",
            Self::On => "switched on",
            Self::Off => "switched off",
            Self::Cycle => "switched off and on",
        }
    }

    /// Whose budget it uses up. Power for a machine that has it changes nothing, and disturbs nobody who has none.
    #[must_use]
    pub const fn disturbance(self) -> Option<Disturbance> {
        match self {
            Self::Reboot => Some(Disturbance::Reboot),
            Self::Off | Self::Cycle => Some(Disturbance::PowerCycle),
            Self::On => None,
        }
    }

    /// Kind of its intents.
    #[must_use]
    pub const fn intent_kind(self) -> &'static str {
        match self.disturbance() {
            Some(step) => step.as_str(),
            None => "power-on",
        }
    }

    /// Whether its machine is to report afterwards, from another boot.
    #[must_use]
    pub const fn reboots(self) -> bool {
        !matches!(self, Self::Off)
    }
}

impl fmt::Display for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Switch {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|one| one.as_str() == name).ok_or_else(|| UnknownName {
            what: "order about power",
            name: name.to_owned(),
            known: "reboot, on, off, cycle",
        })
    }
}

/// A no, with a reason for programs and a sentence that goes on after the machine's name.
pub type No = (&'static str, String);

/// Whether `switch` may be ordered of a machine at `now`.
pub fn may_order(facts: &MachineFacts, switch: Switch, now: Timestamp) -> Result<(), No> {
    if facts.provided.is_none() {
        let said = "cannot be switched: no provider has handed it over yet. Nothing was changed";
        return Err(("NOT_PROVIDED", said.to_owned()));
    }
    if facts.retirement.is_some() {
        let said = "is being retired, or was; cancel that first where it can be. Nothing was changed";
        return Err(("RETIRING", said.to_owned()));
    }
    if let Some(quarantine) = &facts.quarantine {
        let said = format!(
            "is quarantined, so that it may be somebody else's: {}; `release --quarantine` ends that. Nothing was \
             changed",
            quarantine.reason
        );
        return Err(("QUARANTINED", said));
    }
    if let Some(hold) = held(facts, now) {
        let said = format!(
            "is held ({}) by {}: {}; release it first. Nothing was changed",
            hold.scope.as_str(),
            hold.by,
            hold.reason
        );
        return Err(("HELD", said));
    }
    match &facts.power_order {
        Some(present) if present.switch != switch => Err((
            "ORDERED_OTHERWISE",
            format!(
                "is to be {} already, by {}: {}; wait for that, or cancel it with `power cancel`. Nothing was changed",
                present.switch.participle(),
                present.by,
                present.reason
            ),
        )),
        _ => Ok(()),
    }
}

/// The hold that keeps power as it is at `now`.
#[must_use]
pub fn held(facts: &MachineFacts, now: Timestamp) -> Option<&Hold> {
    let hold = facts.hold.as_ref().filter(|hold| hold.holds_at(now))?;
    matches!(hold.scope, HoldScope::Everything | HoldScope::Power).then_some(hold)
}

/// The hold that an order to switch off comes with, unless something as lasting is there.
#[must_use]
pub fn hold_of(facts: &MachineFacts, switch: Switch, reason: &str, by: &str, now: Timestamp) -> Option<Hold> {
    let lasts = facts.hold.as_ref().is_some_and(|hold| hold.holds_at(now) && hold.until.is_none());
    (switch == Switch::Off && !lasts).then(|| Hold {
        scope: HoldScope::Recovery,
        reason: format!("switched off: {reason}"),
        by: by.to_owned(),
        until: None,
    })
}

/// How an order can be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way<'a> {
    /// The provider is told.
    Provider,
    /// Something is run on the machine, over SSH.
    Ssh,
    /// There is none, for this reason.
    None(&'a str),
}

/// What is to be done about an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Carry it out, under the intent that it may have.
    CarryOut,
    /// It may have been carried out: watch what comes of it.
    Taken,
    /// Nobody can, or nobody could in time: it is over.
    GiveUp(String),
}

/// What is to be done about `order` at `now`.
#[must_use]
pub fn next(order: &PowerOrder, way: Way<'_>, policy: &Policy, now: Timestamp) -> Next {
    if let Some(why) = lapsed(order, policy, now) {
        return Next::GiveUp(why);
    }
    // What may have been sent over SSH is not sent again; whether it was, the ladder finds out.
    if order.begun.is_some() && way == Way::Ssh {
        return Next::Taken;
    }
    match way {
        Way::None(reason) => Next::GiveUp(format!("cannot be carried out: {reason}")),
        Way::Provider | Way::Ssh => Next::CarryOut,
    }
}

/// Why an order is given up at `now`, if its time is over.
#[must_use]
pub fn lapsed(order: &PowerOrder, policy: &Policy, now: Timestamp) -> Option<String> {
    let lapses = lapses(order, policy);
    let limit = policy.power_order_timeout;
    (lapses <= now).then(|| match order.begun {
        Some(_) => format!("was given, and what became of it was not heard within {limit}"),
        None => format!("was not carried out by {}, {limit} after it was given", absolute(lapses)),
    })
}

/// When an order is given up that could not be carried out.
#[must_use]
pub fn lapses(order: &PowerOrder, policy: &Policy) -> Timestamp {
    after(order.at, policy.power_order_timeout.0)
}

/// Where the ladder stands after an order: as after its own step of that kind. `None` where nothing is to be heard:
/// of a machine that is switched off, or was never given an agent; and where a person keeps recovery away.
#[must_use]
pub fn ladder_after(
    facts: &MachineFacts,
    order: &PowerOrder,
    policy: &Policy,
    now: Timestamp,
) -> Option<(Recovery, Rung)> {
    let held = facts.hold.as_ref().is_some_and(|hold| hold.holds_at(now));
    if !order.switch.reboots() || facts.agent_started.is_none() || held {
        return None;
    }
    let step = order.switch.disturbance().unwrap_or(Disturbance::PowerCycle);
    let found = policy.ladder.iter().enumerate().find(|(_, rung)| rung.step == step);
    // A ladder without such a rung: nothing is above it but a person.
    let (index, rung) = found.map_or(
        (policy.ladder.len(), Rung { step, deadline: Span::minutes(10), tries: 1 }),
        |(index, rung)| (index, *rung),
    );
    let mut ladder = begun(facts, index, step, rung.deadline, 1, now);
    // Given again: it may have come back since the first time, and is not to come back once more.
    let before = facts.recovery.as_ref().and_then(|recovery| recovery.acted.as_ref());
    if let (Some(_), Some(acted), Some(before)) = (order.begun, &mut ladder.acted, before)
        && before.step == step
    {
        acted.boot_id_before.clone_from(&before.boot_id_before);
    }
    Some((ladder, rung))
}

/// What the ladder notes of an order that was carried out.
#[must_use]
pub fn note(order: &PowerOrder) -> String {
    format!("{} ordered to {}: {}; waits for its report", order.by, order.switch.phrase(), order.reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::facts::{AgentStarted, Begun, Heartbeat, Provided, Quarantine, Retirement};
    use crate::model::ids::{IntentId, MachineId};
    use crate::model::provider_status::ProviderStatus;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn machine() -> MachineFacts {
        let mut facts = MachineFacts::unknown(MachineId::generate(), at(0));
        facts.provided = Some(Provided {
            provider: "sim".into(),
            provider_id: "sim-1".into(),
            reservation: None,
            address: Some("192.0.2.1".into()),
            ssh_port: None,
            ssh_user: None,
            location: None,
            status: ProviderStatus::Running,
            at: at(0),
            looked_at: None,
            unchanged: false,
        });
        facts.agent_started = Some(AgentStarted { at: at(0), public_key: vec![], boot_id: None, fence: 1 });
        facts
    }

    fn order(switch: Switch, begun: bool) -> PowerOrder {
        PowerOrder {
            switch,
            reason: "it hangs".into(),
            by: "kim".into(),
            at: at(0),
            begun: begun.then(|| Begun { intent: IntentId::generate(), at: at(1) }),
        }
    }

    fn hold(scope: HoldScope, until: Option<i64>) -> Hold {
        Hold { scope, reason: "r".into(), by: "lee".into(), until: until.map(at) }
    }

    #[test]
    fn order_is_refused_where_somebody_or_something_stands_against_it() {
        let with = |change: fn(&mut MachineFacts)| {
            let mut facts = machine();
            change(&mut facts);
            facts
        };
        for (name, facts, expected) in [
            ("well", machine(), None),
            ("nobody's", with(|facts| facts.provided = None), Some("NOT_PROVIDED")),
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
            ("ordered", with(|facts| facts.power_order = Some(order(Switch::Reboot, false))), None),
            (
                "ordered otherwise",
                with(|facts| facts.power_order = Some(order(Switch::Off, false))),
                Some("ORDERED_OTHERWISE"),
            ),
        ] {
            let refused = may_order(&facts, Switch::Reboot, at(100)).err();
            assert_eq!(refused.as_ref().map(|(reason, _)| *reason), expected, "{name}: {refused:?}");
            assert!(refused.is_none_or(|(_, said)| said.ends_with("Nothing was changed")), "{name}");
        }
    }

    #[test]
    fn order_is_carried_out_once_over_ssh_and_under_one_intent_elsewhere() {
        let policy = Policy::default();
        let late = policy.power_order_timeout.0.as_secs().cast_signed();
        for (name, begun, way, now, expected) in [
            ("new", false, Way::Provider, 10, "CarryOut"),
            ("new, over SSH", false, Way::Ssh, 10, "CarryOut"),
            ("told before", true, Way::Provider, 10, "CarryOut"),
            ("run before", true, Way::Ssh, 10, "Taken"),
            (
                "no way",
                false,
                Way::None("it is this host"),
                10,
                "GiveUp(\"cannot be carried out: it is this host",
            ),
            ("just in time", false, Way::Provider, late - 1, "CarryOut"),
            ("too late", false, Way::Provider, late, "GiveUp(\"was not carried out by "),
            ("too late, and told", true, Way::Provider, late, "GiveUp(\"was given, and what became of it"),
        ] {
            let next = format!("{:?}", next(&order(Switch::Reboot, begun), way, &policy, at(now)));
            assert!(next.starts_with(expected), "{name}: {next}");
        }
    }

    #[test]
    fn ladder_watches_what_is_to_come_back() {
        let policy = Policy::default();
        let stands = |facts: &MachineFacts, switch| {
            ladder_after(facts, &order(switch, false), &policy, at(100)).map(|(ladder, rung)| {
                (ladder.rung, ladder.tries, rung.step, ladder.acted.map(|acted| acted.at))
            })
        };
        let reboot = Some((1, 1, Disturbance::Reboot, Some(at(100))));
        let cycle = Some((2, 1, Disturbance::PowerCycle, Some(at(100))));
        let mut held = machine();
        held.hold = Some(hold(HoldScope::Recovery, None));
        let mut without = machine();
        without.agent_started = None;
        for (name, facts, switch, expected) in [
            ("rebooted", machine(), Switch::Reboot, reboot),
            ("off and on", machine(), Switch::Cycle, cycle),
            ("on", machine(), Switch::On, cycle),
            ("off", machine(), Switch::Off, None),
            ("held", held, Switch::On, None),
            ("no agent", without, Switch::Reboot, None),
        ] {
            assert_eq!(stands(&facts, switch), expected, "{name}");
        }
        // Back already when the order is given again: the boot that it is in now is the proof.
        let mut back = machine();
        let mut beat = |boot: &str| {
            let beat = Heartbeat { at: at(50), boot_id: boot.into(), incarnation: "i".into(), sequence: 1 };
            back.heartbeat = Some(beat);
            back.clone()
        };
        let (first, _) = ladder_after(&beat("old"), &order(Switch::Reboot, false), &policy, at(60)).unwrap();
        let again = MachineFacts { recovery: Some(first), ..beat("new") };
        let (ladder, _) = ladder_after(&again, &order(Switch::Reboot, true), &policy, at(100)).unwrap();
        let acted = ladder.acted.unwrap();
        assert_eq!((acted.boot_id_before.as_deref(), acted.at), (Some("old"), at(100)));
        let bare = Policy { ladder: Vec::new(), ..Policy::default() };
        let (ladder, _) = ladder_after(&machine(), &order(Switch::Reboot, false), &bare, at(100)).unwrap();
        assert_eq!(ladder.rung, 0);
    }

    #[test]
    fn machine_that_is_switched_off_is_held_for_good() {
        let held = |present: Option<Hold>, switch| {
            let facts = MachineFacts { hold: present, ..machine() };
            hold_of(&facts, switch, "r", "kim", at(100)).map(|hold| hold.reason)
        };
        let own = Some("switched off: r".to_owned());
        assert_eq!(held(None, Switch::Off), own);
        assert_eq!(held(Some(hold(HoldScope::Recovery, Some(500))), Switch::Off), own);
        assert_eq!(held(Some(hold(HoldScope::Recovery, None)), Switch::Off), None);
        assert_eq!(held(None, Switch::Cycle), None);
    }
}
