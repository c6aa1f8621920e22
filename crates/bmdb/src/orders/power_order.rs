//! Manual power orders (reboot, on, off, cycle), with their intent.
//!
//! The intent is recorded before anything is sent to the provider.

use crate::connection::DbContext;
use crate::connection::error::BmdbError;
use crate::engine::change_machine::Decision;
use crate::engine::fact_change::power::{PowerChange, apply_power_change};
use crate::engine::fact_change::{FactChange, apply_fact_change as apply_change};
use crate::engine::facts::{MachineSnapshot, read_snapshot};
use crate::engine::intent::lock_disruption_context;
use crate::engine::policy::policy_at_version;
use crate::engine::schedule::reschedule_machine;
use crate::engine::work::Work;
use crate::engine::work::lease::lock_due_rows_leased;
use crate::orders::order::{OrderOutcome, OrderRejection, format_attribution};
use model::disruption::{DisruptionDenied, may_switch_power};
use model::event_name::{POWER_ORDER_CANCELLED, POWER_ORDERED};
use model::facts::{MachineFacts, Recovery};
use model::ids::IntentId;
use model::policy::Rung;
use model::power_control::{check_power_order, implied_hold, recovery_after};
use model::power_order::PowerOrderKind;
use model::process::Process;
use model::recent_step::format_order_detail;

/// Orders that a machine be switched, on behalf of `who`.
pub fn order_switch(
    snapshot: &MachineSnapshot,
    switch: PowerOrderKind,
    reason: &str,
    who: &str,
) -> Result<Decision<OrderOutcome>, OrderRejection> {
    let (facts, now) = (&snapshot.facts, snapshot.now);
    check_power_order(facts, switch, now)?;
    if let Some(present) = &facts.power_order {
        return Ok(OrderOutcome::already(format!(
            "is already ordered to be {}, by {}: {}; nothing was changed",
            switch.participle(),
            present.by,
            present.reason
        )));
    }
    let ordered = PowerChange::Ordered { switch, reason: reason.to_owned(), by: who.to_owned() };
    let mut changes = vec![FactChange::Power(ordered)];
    let hold = implied_hold(facts, switch, reason, who, now);
    let also = match (&hold, facts.hold.as_ref().filter(|hold| hold.is_active_at(now))) {
        (Some(_), _) => {
            "; it is held (recovery) from now on, so that nothing switches it on again before `release`"
        }
        (None, Some(_)) if switch.reboots() => {
            "; it is still held, so that nobody watches whether it comes back"
        }
        (None, _) if switch.reboots() && facts.agent_started.is_some() => {
            "; recovery watches whether it comes back"
        }
        (None, _) => "",
    };
    changes.extend(hold.map(FactChange::HoldSet));
    changes.extend(clear_waits());
    Ok(OrderOutcome::changed(
        changes,
        POWER_ORDERED,
        format!("{switch}, {}", format_attribution(who, Some(reason))),
        format!("will be {}{also}", switch.participle()),
    ))
}

/// Cancels an order that was not begun.
pub fn cancel_power_order(facts: &MachineFacts, by: &str) -> Result<Decision<OrderOutcome>, OrderRejection> {
    let Some(present) = &facts.power_order else {
        return Ok(OrderOutcome::already("has no reboot or power order; nothing was changed"));
    };
    if present.intent.is_some() {
        let text = format!("is being {} already; nothing was changed", present.kind.participle());
        return Err(("BEGUN", text));
    }
    let held = match present.kind {
        PowerOrderKind::Off if facts.hold.is_some() => "; the hold stays until `release`",
        _ => "",
    };
    Ok(OrderOutcome::changed(
        [FactChange::Power(PowerChange::Ended)].into_iter().chain(clear_waits()).collect(),
        POWER_ORDER_CANCELLED,
        format!("{by} (was: {}, {})", present.kind, present.reason),
        format!("will not be {}{held}", present.kind.participle()),
    ))
}

fn clear_waits() -> [FactChange; 2] {
    [FactChange::BackoffCleared(Process::Power), FactChange::PostponementCleared(Process::Power)]
}

/// The answer to a request to carry out a power order.
#[derive(Clone, Debug)]
pub enum SwitchPermission {
    /// Recorded: proceed, at once.
    Granted {
        /// The intent to pass to the provider.
        intent: IntentId,
        /// The ladder as it was recorded, with the rung that the switch counts as; `None` if it counts as none.
        ladder: Option<(Recovery, Rung)>,
    },
    /// Not allowed now; nothing was recorded.
    Denied(DisruptionDenied),
}

impl Work {
    /// Requests permission to carry out `switch` now, and records it if it is allowed: the intent, and the state of the
    /// ladder.
    pub async fn begin_switch(
        &self,
        switch: PowerOrderKind,
        provider: &str,
    ) -> Result<SwitchPermission, BmdbError> {
        let (machine, lease) = (self.machine(), self.lease());
        let (bmdb, provider) = (self.bmdb().clone(), provider.to_owned());
        self.bmdb()
            .transact_with("recording an intent", (bmdb, provider), move |tx, (bmdb, provider)| {
                Box::pin(async move {
                    let rows = lock_due_rows_leased(tx, lease, machine).await?;
                    let snapshot = read_snapshot(tx, machine).await?;
                    let policy = policy_at_version(bmdb, tx, snapshot.policy_version).await?;
                    let kind = switch.intent_kind();
                    let window = switch
                        .disruption()
                        .and_then(|step| policy.budgets.get(&step))
                        .map(|budget| budget.window)
                        .unwrap_or_default();
                    let circumstances = lock_disruption_context(tx, machine, kind, window, None).await?;
                    let (facts, now) = (&snapshot.facts, snapshot.now);
                    if let Err(refusal) = may_switch_power(facts, switch, &circumstances, &policy, now) {
                        return Ok(SwitchPermission::Denied(refusal));
                    }
                    // `may_switch_power` rejects it if there is no order.
                    let Some(order) = &facts.power_order else { return Err(BmdbError::LeaseLost) };
                    let ladder = recovery_after(facts, order, &policy, now);
                    match (&ladder, switch) {
                        (Some((recovery, _)), _) => {
                            apply_change(tx, machine, &FactChange::Recovery(recovery.clone())).await?;
                            // An operator who orders a switch takes the machine up again: there is something new to
                            // watch.
                            if facts.needs_human.is_some() {
                                apply_change(tx, machine, &FactChange::NeedsHumanCleared).await?;
                            }
                        }
                        (None, PowerOrderKind::Off) if facts.recovery.is_some() => {
                            apply_change(tx, machine, &FactChange::RecoveryCleared).await?;
                        }
                        (None, _) => {}
                    }
                    let intent = if let Some(begun) = order.intent {
                        begun.intent
                    } else {
                        let intent = IntentId::generate();
                        apply_power_change(tx, machine, &PowerChange::Started(intent)).await?;
                        sqlx::query_file!(
                            "../../sql/intent/insert.sql",
                            intent.0,
                            kind,
                            provider,
                            machine.0,
                            lease.session.0,
                            lease.fence,
                            format_order_detail(&order.by, switch)
                        )
                        .execute(&mut *tx)
                        .await
                        .context("recording an intent")?;
                        intent
                    };
                    reschedule_machine(bmdb, tx, machine, &rows).await?;
                    Ok(SwitchPermission::Granted { intent, ladder })
                })
            })
            .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::facts::{Hold, HoldScope, PowerOrder, ProviderRecord, RecordedIntent};
    use model::ids::MachineId;
    use model::provider_status::ProviderStatus;
    use model::time::Timestamp;

    fn snapshot(order: Option<(PowerOrderKind, bool)>, hold: Option<HoldScope>) -> MachineSnapshot {
        let now = Timestamp::from_timestamp(1_800_000_000, 0).unwrap();
        let mut facts = MachineFacts::empty(MachineId::generate(), now);
        facts.provider_record = Some(ProviderRecord {
            provider: "sim".into(),
            provider_id: "sim-1".into(),
            reservation: None,
            address: None,
            ssh_port: None,
            ssh_user: None,
            location: None,
            status: ProviderStatus::Running,
            acquired_at: now,
            polled_at: None,
            unchanged: false,
        });
        facts.power_order = order.map(|(switch, begun)| PowerOrder {
            kind: switch,
            reason: "it hangs".into(),
            by: "kim".into(),
            ordered_at: now,
            intent: begun.then(|| RecordedIntent { intent: IntentId::generate(), recorded_at: now }),
        });
        facts.hold = hold.map(|scope| Hold { scope, reason: "r".into(), by: "lee".into(), until: None });
        MachineSnapshot { facts, now, policy_version: 1 }
    }

    #[test]
    fn order_messages_describe_state_and_consequences() {
        use HoldScope::{Power, Recovery};
        let order = |found: &MachineSnapshot, what| match order_switch(found, what, "new one", "lee") {
            Ok(decision) => (decision.changes.len(), decision.output.message),
            Err((reason, text)) => (0, format!("{reason}: {text}")),
        };
        for (order, changes, text) in [
            (order(&snapshot(None, None), PowerOrderKind::Reboot), 3, "will be rebooted"),
            (
                order(&snapshot(None, None), PowerOrderKind::Off),
                4,
                "will be switched off; it is held (recovery) from now on",
            ),
            (order(&snapshot(None, Some(Recovery)), PowerOrderKind::Off), 3, "will be switched off"),
            (
                order(&snapshot(None, Some(Recovery)), PowerOrderKind::On),
                3,
                "will be switched on; it is still held",
            ),
            (order(&snapshot(None, Some(Power)), PowerOrderKind::On), 0, "HELD: is held (power) by lee: r"),
            (
                order(&snapshot(Some((PowerOrderKind::Off, false)), None), PowerOrderKind::Off),
                0,
                "is already ordered to be switched off, by kim: it hangs",
            ),
            (
                order(&snapshot(Some((PowerOrderKind::Off, false)), None), PowerOrderKind::On),
                0,
                "ORDERED_OTHERWISE: is already ordered to be switched off",
            ),
        ] {
            assert_eq!(order.0, changes, "{}", order.1);
            assert!(order.1.starts_with(text), "{}", order.1);
        }
    }

    #[test]
    fn order_can_be_cancelled_until_it_has_started() {
        let cancelled = |found: &MachineSnapshot| match cancel_power_order(&found.facts, "by lee") {
            Ok(decision) => (decision.changes.len(), decision.output.message),
            Err((reason, text)) => (0, format!("{reason}: {text}")),
        };
        for (order, hold, changes, text) in [
            (None, None, 0, "has no reboot or power order"),
            (Some((PowerOrderKind::Cycle, false)), None, 3, "will not be switched off and on"),
            (
                Some((PowerOrderKind::Off, false)),
                Some(HoldScope::Recovery),
                3,
                "will not be switched off; the hold stays",
            ),
            (Some((PowerOrderKind::Reboot, true)), None, 0, "BEGUN: is being rebooted already"),
        ] {
            let (count, message) = cancelled(&snapshot(order, hold));
            assert_eq!(count, changes, "{message}");
            assert!(message.starts_with(text), "{message}");
        }
    }
}
