//! May this machine be disturbed now? The one question that every step asks
//! that whoever uses the machine may notice.
//!
//! The answer is no when a person said so, when the machine has just proved
//! that it lives, when it has seen orders of a database that is newer than ours,
//! when a brake suspects ourselves, or when as many machines as may be were
//! disturbed already. A no always says why and when to ask again.

use crate::model::cluster::disturb::{InCluster, objection};
use crate::model::facts::{HoldScope, MachineFacts};
use crate::model::newer_fence::NewerFence;
use crate::model::policy::{Budget, Disturbance, Policy};
use crate::model::power_order::{Switch, held};
use crate::model::retirement::{Step, next};
use crate::model::time::{Span, Timestamp, after};

/// What the fleet is going through, as far as the question needs it.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Circumstances {
    /// Disturbances of the kind in question that began within its budget's window.
    pub begun_in_window: u32,
    /// When the oldest of them began.
    pub oldest_in_window: Option<Timestamp>,
    /// Why recovery is held for this machine's provider, or for all, if it is.
    pub brake: Option<String>,
    /// Proof that the machine has seen a fence which this BMDB never gave.
    pub newer_fence: Option<NewerFence>,
    /// The cluster that the machine is a part of, if it is of one.
    pub cluster: Option<InCluster>,
}

/// A no.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Why, as a sentence.
    pub reason: String,
    /// When asking again makes sense.
    pub ask_again: Timestamp,
}

/// How long a brake is believed before it is asked again.
const BRAKE_PAUSE: Span = Span::seconds(15);
/// How long a machine is given to leave its cluster before it is looked at again.
const CLUSTER_PAUSE: Span = Span::seconds(15);
/// How long a provider's list is disbelieved before it is asked again; lists are compared as often.
const LIST_PAUSE: Span = Span::minutes(1);
/// How long a stop without an end is believed before it is asked again.
const STOP_PAUSE: Span = Span::minutes(5);

/// Whether `step` may be taken on the machine at `now`.
///
/// `decided_on` is when the facts were read that led to the step: a heartbeat after it means that
/// they no longer hold.
pub fn may_disturb(
    facts: &MachineFacts,
    step: Disturbance,
    circumstances: &Circumstances,
    policy: &Policy,
    decided_on: Timestamp,
    now: Timestamp,
) -> Result<(), Refusal> {
    let refuse = |reason: String, ask_again| Err(Refusal { reason, ask_again });
    if let Some(newer) = &circumstances.newer_fence {
        return refuse(newer.sentence(), after(now, STOP_PAUSE.0));
    }
    if facts.retirement.is_some() {
        return refuse("it is being retired".into(), after(now, STOP_PAUSE.0));
    }
    if let Some(quarantine) = &facts.quarantine {
        return refuse(format!("it is quarantined: {}", quarantine.reason), after(now, STOP_PAUSE.0));
    }
    if let Some(hold) = facts.hold.as_ref().filter(|hold| hold.holds_at(now)) {
        let covered = match hold.scope {
            HoldScope::Everything | HoldScope::Recovery => true,
            HoldScope::Power => step.reboots(),
        };
        if covered {
            let until = hold.until.unwrap_or_else(|| after(now, STOP_PAUSE.0));
            return refuse(format!("{} holds it ({}): {}", hold.by, hold.scope.as_str(), hold.reason), until);
        }
    }
    if let Some(heartbeat) = &facts.heartbeat
        && heartbeat.at > decided_on
    {
        return refuse("it reported a moment ago".into(), now);
    }
    if let Some((reason, ask_again)) =
        circumstances.cluster.as_ref().and_then(|cluster| objection(cluster, now))
    {
        return refuse(reason, ask_again);
    }
    // A ladder under way goes on: its machine is known to be in trouble, and stopping half-way up
    // would leave it without an agent.
    if facts.recovery.as_ref().is_none_or(|recovery| recovery.acted.is_none())
        && let Some(brake) = &circumstances.brake
    {
        return refuse(brake.clone(), after(now, BRAKE_PAUSE.0));
    }
    policy.budgets.get(&step).map_or(Ok(()), |budget| within(*budget, step.phrase(), circumstances, now))
}

/// Whether the machine's provider may be told at `now` to take it back.
///
/// Whether a brake holds recovery does not matter: it suspects that silent machines are well, and this one is
/// given back because a person said so. An order that was given once is given again without using up any more.
pub fn may_release(
    facts: &MachineFacts,
    circumstances: &Circumstances,
    policy: &Policy,
    now: Timestamp,
) -> Result<(), Refusal> {
    let refuse = |reason: String, ask_again| Err(Refusal { reason, ask_again });
    let later = after(now, STOP_PAUSE.0);
    if let Some(cluster) = &circumstances.cluster {
        let reason = format!("it is a part of cluster {}, which it leaves first", cluster.name);
        return refuse(reason, after(now, CLUSTER_PAUSE.0));
    }
    let step = facts.retirement.as_ref().map(|retirement| next(retirement, policy).step);
    let Some(step @ (Step::Release | Step::ReleaseAgain(_))) = step else {
        return refuse("it is not to be given back".into(), later);
    };
    if let Some(newer) = &circumstances.newer_fence {
        return refuse(newer.sentence(), later);
    }
    if let Some(quarantine) = &facts.quarantine {
        let reason = &quarantine.reason;
        return refuse(format!("it is quarantined, so that it may be somebody else's: {reason}"), later);
    }
    if let Some(hold) = facts.hold.as_ref().filter(|hold| hold.holds_at(now)) {
        let reason = format!("{} holds it ({}): {}", hold.by, hold.scope.as_str(), hold.reason);
        return refuse(reason, hold.until.unwrap_or(later));
    }
    match step {
        Step::ReleaseAgain(_) => Ok(()),
        _ => within(policy.release_budget, "give machines back", circumstances, now),
    }
}

/// Whether what a person ordered of a machine's power may be done at `now`.
///
/// No brake counts, as for [`may_release`]; nor that the machine reports: who ordered it knew.
pub fn may_switch(
    facts: &MachineFacts,
    switch: Switch,
    circumstances: &Circumstances,
    policy: &Policy,
    now: Timestamp,
) -> Result<(), Refusal> {
    let later = after(now, STOP_PAUSE.0);
    let refuse = |reason: String, ask_again| Err(Refusal { reason, ask_again });
    let Some(order) = facts.power_order.as_ref().filter(|order| order.switch == switch) else {
        return refuse("the order was cancelled".into(), now);
    };
    if let Some(newer) = &circumstances.newer_fence {
        return refuse(newer.sentence(), later);
    }
    if facts.retirement.is_some() {
        return refuse("it is being retired".into(), later);
    }
    if let Some(quarantine) = &facts.quarantine {
        let reason = &quarantine.reason;
        return refuse(format!("it is quarantined, so that it may be somebody else's: {reason}"), later);
    }
    if let Some(hold) = held(facts, now) {
        let reason = format!("{} holds it ({}): {}", hold.by, hold.scope.as_str(), hold.reason);
        return refuse(reason, hold.until.unwrap_or(later));
    }
    let budget = switch.disturbance().filter(|_| order.begun.is_none());
    match budget.and_then(|step| Some((policy.budgets.get(&step)?, step))) {
        Some((budget, step)) => within(*budget, step.phrase(), circumstances, now),
        None => Ok(()),
    }
}

/// Whether a provider may be believed at `now` that it does not know a machine any more, which ends a retirement
/// for good. `brake` is why no machine is taken from it, if that is so: then its list cannot be right, and what it
/// says of one machine comes from there.
pub fn may_believe_gone(brake: Option<&str>, now: Timestamp) -> Result<(), Refusal> {
    brake.map_or(Ok(()), |brake| {
        let why = brake.trim_start_matches("brake: ");
        Err(Refusal {
            reason: format!(
                "its provider says that it does not know it any more, and is not believed for now: {why}"
            ),
            ask_again: after(now, LIST_PAUSE.0),
        })
    })
}

/// Refuses when nothing is left of a budget.
fn within(budget: Budget, what: &str, circumstances: &Circumstances, now: Timestamp) -> Result<(), Refusal> {
    if budget.count == 0 {
        // Until a person sets it otherwise: nothing frees it.
        return Err(Refusal {
            reason: format!("the budget to {what} allows none"),
            ask_again: after(now, BRAKE_PAUSE.0),
        });
    }
    let used = circumstances.begun_in_window;
    if used < budget.count {
        return Ok(());
    }
    let free = circumstances.oldest_in_window.map_or(now, |oldest| after(oldest, budget.window.0));
    Err(Refusal {
        reason: format!("the budget to {what} is used up ({used} in {})", budget.window),
        ask_again: free.max(after(now, std::time::Duration::from_secs(1))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::facts::{Acted, Heartbeat, Hold, Quarantine, Recovery, ReleaseOrder, Retirement};
    use crate::model::ids::{IntentId, MachineId};

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn machine() -> MachineFacts {
        MachineFacts::unknown(MachineId::generate(), at(0))
    }

    fn ask(facts: &MachineFacts, step: Disturbance, circumstances: &Circumstances) -> Option<(String, i64)> {
        may_disturb(facts, step, circumstances, &Policy::default(), at(50), at(100))
            .err()
            .map(|refusal| (refusal.reason, (refusal.ask_again - at(0)).num_seconds()))
    }

    #[test]
    fn silent_machine_in_quiet_times_may_be_disturbed() {
        for step in Disturbance::ALL {
            assert_eq!(ask(&machine(), step, &Circumstances::default()), None);
        }
    }

    #[test]
    fn hold_covers_what_its_scope_says() {
        let mut facts = machine();
        let covered = |facts: &MachineFacts, step| ask(facts, step, &Circumstances::default()).is_some();
        for (scope, restart, reboot) in [
            (HoldScope::Everything, true, true),
            (HoldScope::Recovery, true, true),
            (HoldScope::Power, false, true),
        ] {
            facts.hold = Some(Hold { scope, reason: "x".into(), by: "kim".into(), until: Some(at(200)) });
            assert_eq!(covered(&facts, Disturbance::RestartAgent), restart, "{scope:?}");
            assert_eq!(covered(&facts, Disturbance::Reboot), reboot, "{scope:?}");
            assert_eq!(covered(&facts, Disturbance::PowerCycle), reboot, "{scope:?}");
            facts.hold.as_mut().unwrap().until = Some(at(99));
            assert!(!covered(&facts, Disturbance::Reboot), "an expired hold holds nothing");
        }
    }

    #[test]
    fn quarantined_machine_is_left_alone() {
        let mut facts = machine();
        facts.quarantine = Some(Quarantine { since: at(0), reason: "gone from the list".into() });
        assert!(ask(&facts, Disturbance::RestartAgent, &Circumstances::default()).is_some());
    }

    #[test]
    fn machine_that_has_seen_a_newer_fence_is_given_no_order_however_far_its_ladder_is() {
        let newer = NewerFence { heard: at(0), fence: 20 };
        let forgotten = Circumstances { newer_fence: Some(newer), ..Default::default() };
        let mut facts = machine();
        for step in Disturbance::ALL {
            let (reason, again) = ask(&facts, step, &forgotten).unwrap();
            assert!(reason.contains("has seen fence 20") && reason.contains("declare restored"), "{reason}");
            assert_eq!(again, 400);
        }
        facts.recovery = Some(under_way());
        assert!(ask(&facts, Disturbance::Reboot, &forgotten).is_some());
    }

    fn under_way() -> Recovery {
        Recovery {
            started_at: at(10),
            rung: 0,
            acted: Some(Acted {
                step: Disturbance::RestartAgent,
                at: at(10),
                deadline: at(20),
                boot_id_before: None,
            }),
            tries: 1,
            next_at: at(20),
            note: String::new(),
            obstacle: None,
        }
    }

    #[test]
    fn heartbeat_since_the_decision_forbids_the_step() {
        let mut facts = machine();
        let beat = |seconds| {
            Some(Heartbeat { at: at(seconds), boot_id: "b".into(), incarnation: "i".into(), sequence: 1 })
        };
        facts.heartbeat = beat(50);
        assert_eq!(ask(&facts, Disturbance::Reboot, &Circumstances::default()), None);
        facts.heartbeat = beat(51);
        assert!(ask(&facts, Disturbance::Reboot, &Circumstances::default()).is_some());
    }

    #[test]
    fn brake_holds_new_ladders_and_lets_old_ones_go_on() {
        let mut facts = machine();
        let braked = Circumstances { brake: Some("40 of 50 fell silent".into()), ..Default::default() };
        assert_eq!(ask(&facts, Disturbance::RestartAgent, &braked).unwrap().1, 115);
        facts.recovery = Some(under_way());
        assert_eq!(ask(&facts, Disturbance::Reboot, &braked), None);
    }

    #[test]
    fn machine_is_given_back_only_when_nobody_objects() {
        let retiring = || {
            let mut facts = machine();
            facts.retirement = Some(Retirement::new("old".into(), "kim".into(), at(0)));
            facts
        };
        let with = |change: fn(&mut MachineFacts)| {
            let mut facts = retiring();
            change(&mut facts);
            facts
        };
        let quiet = Circumstances::default();
        let braked = Circumstances { brake: Some("40 of 50 fell silent".into()), ..quiet.clone() };
        let used = Circumstances { begun_in_window: 100, oldest_in_window: Some(at(-300)), ..quiet.clone() };
        let newer = NewerFence { heard: at(0), fence: 20 };
        let forgotten = Circumstances { newer_fence: Some(newer), ..quiet.clone() };
        let ordered = with(|facts| {
            let order = ReleaseOrder { intent: IntentId::generate(), at: at(1) };
            facts.retirement.as_mut().unwrap().release = Some(order);
        });
        let held = with(|facts| {
            let scope = HoldScope::Recovery;
            facts.hold = Some(Hold { scope, reason: "r".into(), by: "lee".into(), until: None });
        });
        let quarantined =
            with(|facts| facts.quarantine = Some(Quarantine { since: at(0), reason: "twice".into() }));
        let wiping = with(|facts| facts.retirement.as_mut().unwrap().wipe = true);
        let over = with(|facts| facts.retirement.as_mut().unwrap().finished_at = Some(at(5)));
        for (name, facts, circumstances, refused) in [
            ("asked for", retiring(), &quiet, None),
            ("a brake is on", retiring(), &braked, None),
            ("used up", retiring(), &used, Some("the budget to give machines back is used up (100 in 10m)")),
            ("ordered before", ordered.clone(), &used, None),
            ("newer fence", ordered, &forgotten, Some("has seen fence 20")),
            ("held", held, &quiet, Some("lee holds it (recovery): r")),
            ("quarantined", quarantined, &quiet, Some("it is quarantined")),
            ("to be wiped", wiping, &quiet, Some("it is not to be given back")),
            ("over", over, &quiet, Some("it is not to be given back")),
            ("not asked for", machine(), &quiet, Some("it is not to be given back")),
        ] {
            let said = may_release(&facts, circumstances, &Policy::default(), at(100)).err();
            let said = said.map(|refusal| refusal.reason).unwrap_or_default();
            assert_eq!(said.is_empty(), refused.is_none(), "{name}: {said}");
            assert!(said.contains(refused.unwrap_or_default()), "{name}: {said}");
        }
    }

    #[test]
    fn provider_whose_list_cannot_be_right_is_not_believed_that_a_machine_is_gone() {
        assert_eq!(may_believe_gone(None, at(100)), Ok(()));
        let refusal = may_believe_gone(Some("brake: its list is empty"), at(100)).unwrap_err();
        assert!(refusal.reason.ends_with("is not believed for now: its list is empty"), "{refusal:?}");
        assert_eq!(refusal.ask_again, at(160));
    }

    #[test]
    fn budget_frees_when_its_oldest_use_leaves_the_window() {
        let used = |count| Circumstances {
            begun_in_window: count,
            oldest_in_window: Some(at(-300)),
            ..Default::default()
        };
        assert_eq!(ask(&machine(), Disturbance::Reboot, &used(19)), None);
        let (reason, again) = ask(&machine(), Disturbance::Reboot, &used(20)).unwrap();
        assert_eq!(again, 300);
        assert_eq!(reason, "the budget to reboot the machine is used up (20 in 10m)");
        let mut none = Policy::default();
        none.budgets.insert(Disturbance::Reboot, Budget { count: 0, window: Span::minutes(10) });
        let refused =
            may_disturb(&machine(), Disturbance::Reboot, &used(0), &none, at(0), at(100)).unwrap_err();
        assert_eq!(refused.reason, "the budget to reboot the machine allows none");
        assert_eq!(
            refused.ask_again,
            at(115),
            "asked again when somebody may have set it, and not all the time"
        );
    }
}
