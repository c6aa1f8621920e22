//! Disruption check: may this machine be disrupted, released or power-switched now?
//!
//! Every step that a user of the machine may notice makes this check first. It is denied when the machine has seen a
//! fence that this BMDB never issued, is being retired, is quarantined or is held by an operator; when it has just
//! reported; when its cluster objects; when a brake suspects ourselves; or when a budget is used up. A denial always
//! says why, and when to check again. No brake counts for what an operator ordered: a release and a power order.
//!
//! The disruption budget of a kind of step limits how many such steps start within a sliding window of time, over the
//! whole fleet.

use crate::cluster::disruption::{ClusterContext, disruption_objection};
use crate::facts::{HoldScope, MachineFacts};
use crate::policy::{Budget, DisruptionKind, Policy};
use crate::power_control::power_hold;
use crate::power_order::PowerOrderKind;
use crate::retirement::{RetirementStep, retirement_state};
use crate::time::{Span, Timestamp, after};
use crate::unknown_fence::UnknownFence;

/// The state of the fleet, as far as the check needs it.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct DisruptionContext {
    /// Disruptions of the kind in question that started within its budget's window.
    pub started_in_window: u32,
    /// When the oldest of them started.
    pub oldest_in_window: Option<Timestamp>,
    /// Why a brake holds recovery for this machine's provider, or for all; `None` when none does.
    pub brake: Option<String>,
    /// Proof that the machine has seen a fence which this BMDB never issued.
    pub unknown_fence: Option<UnknownFence>,
    /// The cluster that the machine belongs to, if any.
    pub cluster: Option<ClusterContext>,
}

/// The check failed: the step may not be taken now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DisruptionDenied {
    /// Why, as a sentence.
    pub reason: String,
    /// When to check again.
    pub retry_at: Timestamp,
}

/// How long a brake counts before it is checked again.
const BRAKE_RETRY: Span = Span::seconds(15);
/// How long to wait for a machine to leave its cluster before it is checked again.
const CLUSTER_RETRY: Span = Span::seconds(15);
/// How long a provider's list is distrusted before it is checked again. Lists are compared as often.
const LIST_RETRY: Span = Span::minutes(1);
/// How long a hold without an end counts before it is checked again.
const STOP_RETRY: Span = Span::minutes(5);

/// Whether `step` may be taken on the machine at `now`.
///
/// `decided_on` is when the facts were read that led to the step. A heartbeat after it means that they no longer hold.
pub fn may_disrupt(
    facts: &MachineFacts,
    step: DisruptionKind,
    circumstances: &DisruptionContext,
    policy: &Policy,
    decided_on: Timestamp,
    now: Timestamp,
) -> Result<(), DisruptionDenied> {
    let refuse = |reason: String, ask_again| Err(DisruptionDenied { reason, retry_at: ask_again });
    if let Some(newer) = &circumstances.unknown_fence {
        return refuse(newer.describe(), after(now, STOP_RETRY.0));
    }
    if facts.retirement.is_some() {
        return refuse("it is being retired".into(), after(now, STOP_RETRY.0));
    }
    if let Some(quarantine) = &facts.quarantine {
        return refuse(format!("it is quarantined: {}", quarantine.reason), after(now, STOP_RETRY.0));
    }
    if let Some(hold) = facts.hold.as_ref().filter(|hold| hold.is_active_at(now)) {
        let covered = match hold.scope {
            HoldScope::Everything | HoldScope::Recovery => true,
            HoldScope::Power => step.reboots(),
        };
        if covered {
            let until = hold.until.unwrap_or_else(|| after(now, STOP_RETRY.0));
            return refuse(format!("{} holds it ({}): {}", hold.by, hold.scope.as_str(), hold.reason), until);
        }
    }
    if let Some(heartbeat) = &facts.heartbeat
        && heartbeat.received_at > decided_on
    {
        return refuse("it reported a moment ago".into(), now);
    }
    if let Some((reason, ask_again)) =
        circumstances.cluster.as_ref().and_then(|cluster| disruption_objection(cluster, step, now))
    {
        return refuse(reason, ask_again);
    }
    // A ladder that has acted goes on: its machine is known to be in trouble, and stopping half-way up would leave it
    // without an agent.
    if facts.recovery.as_ref().is_none_or(|recovery| recovery.last_action.is_none())
        && let Some(brake) = &circumstances.brake
    {
        return refuse(brake.clone(), after(now, BRAKE_RETRY.0));
    }
    policy
        .budgets
        .get(&step)
        .map_or(Ok(()), |budget| check_disruption_budget(*budget, step.phrase(), circumstances, now))
}

/// Whether the machine may be released to its provider at `now`.
///
/// A brake on recovery does not matter here. It suspects that silent machines are well, and this one is released
/// because an operator ordered it. Sending the same order again uses up no more of the budget.
pub fn may_release(
    facts: &MachineFacts,
    circumstances: &DisruptionContext,
    policy: &Policy,
    now: Timestamp,
) -> Result<(), DisruptionDenied> {
    let refuse = |reason: String, ask_again| Err(DisruptionDenied { reason, retry_at: ask_again });
    let later = after(now, STOP_RETRY.0);
    if let Some(cluster) = &circumstances.cluster {
        let reason = format!("it is a part of cluster {}, which it leaves first", cluster.name);
        return refuse(reason, after(now, CLUSTER_RETRY.0));
    }
    let step = facts.retirement.as_ref().map(|retirement| retirement_state(retirement, policy).step);
    let Some(step @ (RetirementStep::Release | RetirementStep::RetryRelease(_))) = step else {
        return refuse("it is not to be given back".into(), later);
    };
    if let Some(newer) = &circumstances.unknown_fence {
        return refuse(newer.describe(), later);
    }
    if let Some(quarantine) = &facts.quarantine {
        let reason = &quarantine.reason;
        return refuse(format!("it is quarantined, so that it may be somebody else's: {reason}"), later);
    }
    if let Some(hold) = facts.hold.as_ref().filter(|hold| hold.is_active_at(now)) {
        let reason = format!("{} holds it ({}): {}", hold.by, hold.scope.as_str(), hold.reason);
        return refuse(reason, hold.until.unwrap_or(later));
    }
    match step {
        RetirementStep::RetryRelease(_) => Ok(()),
        _ => check_disruption_budget(policy.release_budget, "give machines back", circumstances, now),
    }
}

/// Whether an operator's power order may be carried out at `now`.
///
/// As for [`may_release`], no brake counts. Nor does it matter that the machine reports: the operator knew that.
pub fn may_switch_power(
    facts: &MachineFacts,
    switch: PowerOrderKind,
    circumstances: &DisruptionContext,
    policy: &Policy,
    now: Timestamp,
) -> Result<(), DisruptionDenied> {
    let later = after(now, STOP_RETRY.0);
    let refuse = |reason: String, ask_again| Err(DisruptionDenied { reason, retry_at: ask_again });
    let Some(order) = facts.power_order.as_ref().filter(|order| order.kind == switch) else {
        return refuse("the order was cancelled".into(), now);
    };
    if let Some(newer) = &circumstances.unknown_fence {
        return refuse(newer.describe(), later);
    }
    if facts.retirement.is_some() {
        return refuse("it is being retired".into(), later);
    }
    if let Some(quarantine) = &facts.quarantine {
        let reason = &quarantine.reason;
        return refuse(format!("it is quarantined, so that it may be somebody else's: {reason}"), later);
    }
    if let Some(hold) = power_hold(facts, now) {
        let reason = format!("{} holds it ({}): {}", hold.by, hold.scope.as_str(), hold.reason);
        return refuse(reason, hold.until.unwrap_or(later));
    }
    let budget = switch.disruption().filter(|_| order.intent.is_none());
    match budget.and_then(|step| Some((policy.budgets.get(&step)?, step))) {
        Some((budget, step)) => check_disruption_budget(*budget, step.phrase(), circumstances, now),
        None => Ok(()),
    }
}

/// Whether to trust a provider at `now` that reports a machine as missing, which ends a retirement for good. `brake` is
/// why no machine is taken from the provider, if that is so. Then its list cannot be right, and its report of one
/// machine comes from the same source.
pub fn may_trust_missing(brake: Option<&str>, now: Timestamp) -> Result<(), DisruptionDenied> {
    brake.map_or(Ok(()), |brake| {
        let why = brake.trim_start_matches("brake: ");
        Err(DisruptionDenied {
            reason: format!(
                "its provider reports that it no longer knows it, but its list is not trusted for now: {why}"
            ),
            retry_at: after(now, LIST_RETRY.0),
        })
    })
}

/// Denies when nothing is left of a budget.
fn check_disruption_budget(
    budget: Budget,
    what: &str,
    circumstances: &DisruptionContext,
    now: Timestamp,
) -> Result<(), DisruptionDenied> {
    if budget.count == 0 {
        // Nothing frees it until an operator changes the budget.
        return Err(DisruptionDenied {
            reason: format!("the budget to {what} allows none"),
            retry_at: after(now, BRAKE_RETRY.0),
        });
    }
    let used = circumstances.started_in_window;
    if used < budget.count {
        return Ok(());
    }
    let free = circumstances.oldest_in_window.map_or(now, |oldest| after(oldest, budget.window.0));
    Err(DisruptionDenied {
        reason: format!("the budget to {what} is used up ({used} in {})", budget.window),
        retry_at: free.max(after(now, std::time::Duration::from_secs(1))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{Hold, Quarantine, Recovery, RecoveryAction, ReleaseOrder, Retirement};
    use crate::ids::{IntentId, MachineId};
    use crate::sample_machine::{at, heartbeat};

    fn machine() -> MachineFacts {
        MachineFacts::empty(MachineId::generate(), at(0))
    }

    fn denied_until(
        facts: &MachineFacts,
        step: DisruptionKind,
        circumstances: &DisruptionContext,
    ) -> Option<(String, i64)> {
        may_disrupt(facts, step, circumstances, &Policy::default(), at(50), at(100))
            .err()
            .map(|refusal| (refusal.reason, (refusal.retry_at - at(0)).num_seconds()))
    }

    #[test]
    fn silent_machine_may_be_disrupted_when_nothing_objects() {
        for step in DisruptionKind::ALL {
            assert_eq!(denied_until(&machine(), step, &DisruptionContext::default()), None);
        }
    }

    #[test]
    fn hold_covers_what_its_scope_says() {
        let mut facts = machine();
        let covered =
            |facts: &MachineFacts, step| denied_until(facts, step, &DisruptionContext::default()).is_some();
        for (scope, restart, reboot) in [
            (HoldScope::Everything, true, true),
            (HoldScope::Recovery, true, true),
            (HoldScope::Power, false, true),
        ] {
            facts.hold = Some(Hold { scope, reason: "x".into(), by: "kim".into(), until: Some(at(200)) });
            assert_eq!(covered(&facts, DisruptionKind::RestartAgent), restart, "{scope:?}");
            assert_eq!(covered(&facts, DisruptionKind::Reboot), reboot, "{scope:?}");
            assert_eq!(covered(&facts, DisruptionKind::PowerCycle), reboot, "{scope:?}");
            facts.hold.as_mut().unwrap().until = Some(at(99));
            assert!(!covered(&facts, DisruptionKind::Reboot), "an expired hold holds nothing");
        }
    }

    #[test]
    fn quarantined_machine_is_never_disrupted() {
        let mut facts = machine();
        facts.quarantine = Some(Quarantine { since: at(0), reason: "gone from the list".into() });
        assert!(denied_until(&facts, DisruptionKind::RestartAgent, &DisruptionContext::default()).is_some());
    }

    #[test]
    fn machine_with_an_unknown_fence_gets_no_order_on_any_rung() {
        let newer = UnknownFence { reported_at: at(0), fence: 20 };
        let forgotten = DisruptionContext { unknown_fence: Some(newer), ..Default::default() };
        let mut facts = machine();
        for step in DisruptionKind::ALL {
            let (reason, again) = denied_until(&facts, step, &forgotten).unwrap();
            assert!(reason.contains("has seen fence 20") && reason.contains("declare restored"), "{reason}");
            assert_eq!(again, 400);
        }
        facts.recovery = Some(started_recovery());
        assert!(denied_until(&facts, DisruptionKind::Reboot, &forgotten).is_some());
    }

    fn started_recovery() -> Recovery {
        Recovery {
            started_at: at(10),
            rung: 0,
            last_action: Some(RecoveryAction {
                step: DisruptionKind::RestartAgent,
                acted_at: at(10),
                deadline: at(20),
                boot_id_before: None,
            }),
            attempts: 1,
            next_check_at: at(20),
            note: String::new(),
            obstacle: None,
        }
    }

    #[test]
    fn heartbeat_since_the_decision_forbids_the_step() {
        let mut facts = machine();
        facts.heartbeat = Some(heartbeat(50));
        assert_eq!(denied_until(&facts, DisruptionKind::Reboot, &DisruptionContext::default()), None);
        facts.heartbeat = Some(heartbeat(51));
        assert!(denied_until(&facts, DisruptionKind::Reboot, &DisruptionContext::default()).is_some());
    }

    #[test]
    fn brake_stops_new_ladders_and_lets_started_ones_continue() {
        let mut facts = machine();
        let braked = DisruptionContext { brake: Some("40 of 50 fell silent".into()), ..Default::default() };
        assert_eq!(denied_until(&facts, DisruptionKind::RestartAgent, &braked).unwrap().1, 115);
        facts.recovery = Some(started_recovery());
        assert_eq!(denied_until(&facts, DisruptionKind::Reboot, &braked), None);
    }

    #[test]
    fn machine_is_released_only_when_nothing_objects() {
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
        let quiet = DisruptionContext::default();
        let braked = DisruptionContext { brake: Some("40 of 50 fell silent".into()), ..quiet.clone() };
        let used =
            DisruptionContext { started_in_window: 100, oldest_in_window: Some(at(-300)), ..quiet.clone() };
        let newer = UnknownFence { reported_at: at(0), fence: 20 };
        let forgotten = DisruptionContext { unknown_fence: Some(newer), ..quiet.clone() };
        let cluster = ClusterContext {
            name: "ams".to_owned(),
            founded: true,
            leaving: true,
            health: None,
            voter: false,
            votes: Some((3, 3)),
            observed_at: Some(at(99)),
            other_disrupted: None,
        };
        let member = DisruptionContext { cluster: Some(cluster), ..quiet.clone() };
        let ordered = with(|facts| {
            let order = ReleaseOrder { intent: IntentId::generate(), recorded_at: at(1) };
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
            ("requested", retiring(), &quiet, None),
            ("a brake is on", retiring(), &braked, None),
            ("used up", retiring(), &used, Some("the budget to give machines back is used up (100 in 10m)")),
            ("ordered before", ordered.clone(), &used, None),
            ("newer fence", ordered, &forgotten, Some("has seen fence 20")),
            (
                "leaves its cluster",
                retiring(),
                &member,
                Some("it is a part of cluster ams, which it leaves first"),
            ),
            ("held", held, &quiet, Some("lee holds it (recovery): r")),
            ("quarantined", quarantined, &quiet, Some("it is quarantined")),
            ("to be wiped", wiping, &quiet, Some("it is not to be given back")),
            ("over", over, &quiet, Some("it is not to be given back")),
            ("not requested", machine(), &quiet, Some("it is not to be given back")),
        ] {
            let denied = may_release(&facts, circumstances, &Policy::default(), at(100)).err();
            let text = denied.map(|refusal| refusal.reason).unwrap_or_default();
            assert_eq!(text.is_empty(), refused.is_none(), "{name}: {text}");
            assert!(text.contains(refused.unwrap_or_default()), "{name}: {text}");
        }
    }

    #[test]
    fn missing_machine_is_not_trusted_while_the_provider_brake_holds() {
        assert_eq!(may_trust_missing(None, at(100)), Ok(()));
        let refusal = may_trust_missing(Some("brake: its list is empty"), at(100)).unwrap_err();
        assert!(refusal.reason.ends_with("is not trusted for now: its list is empty"), "{refusal:?}");
        assert_eq!(refusal.retry_at, at(160));
    }

    #[test]
    fn budget_is_available_again_when_its_oldest_use_expires() {
        let used = |count| DisruptionContext {
            started_in_window: count,
            oldest_in_window: Some(at(-300)),
            ..Default::default()
        };
        assert_eq!(denied_until(&machine(), DisruptionKind::Reboot, &used(19)), None);
        let (reason, again) = denied_until(&machine(), DisruptionKind::Reboot, &used(20)).unwrap();
        assert_eq!(again, 300);
        assert_eq!(reason, "the budget to reboot the machine is used up (20 in 10m)");
        let mut none = Policy::default();
        none.budgets.insert(DisruptionKind::Reboot, Budget { count: 0, window: Span::minutes(10) });
        let refused =
            may_disrupt(&machine(), DisruptionKind::Reboot, &used(0), &none, at(0), at(100)).unwrap_err();
        assert_eq!(refused.reason, "the budget to reboot the machine allows none");
        assert_eq!(
            refused.retry_at,
            at(115),
            "it is tried again when somebody may have set the budget, and not all the time"
        );
    }
}
