//! Power by hand: the order, the facts that it changes, and its intent, recorded before anything is sent.

use sqlx::PgConnection;

use crate::bmdb::action::{Done, by};
use crate::bmdb::change::{FactChange, apply as apply_change};
use crate::bmdb::connection::Doing;
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::{Snapshot, read};
use crate::bmdb::intent::count_budget;
use crate::bmdb::policy::policy_of_version;
use crate::bmdb::retirement::Refused;
use crate::bmdb::schedule::reschedule;
use crate::bmdb::work::{Decision, Work, lock_leased};
use crate::model::disturb::{Refusal, may_switch};
use crate::model::facts::{MachineFacts, Recovery};
use crate::model::ids::{IntentId, MachineId};
use crate::model::policy::Rung;
use crate::model::power_order::{Switch, hold_of, ladder_after, may_order};
use crate::model::process::Process;

/// A change of what is ordered of a machine's power.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PowerChange {
    /// It is to be switched.
    Ordered {
        /// How.
        switch: Switch,
        /// Why.
        reason: String,
        /// Who orders it.
        by: String,
    },
    /// It is about to be, under this intent.
    Begun(IntentId),
    /// It is done, or given up.
    Ended,
}

const WHAT: &str = "changing an order about power";

/// Writes one change. The caller holds the machine's due rows.
pub(crate) async fn apply(
    tx: &mut PgConnection,
    machine: MachineId,
    change: &PowerChange,
) -> Result<(), BmdbError> {
    let id = machine.0;
    match change {
        PowerChange::Ordered { switch, reason, by } => {
            sqlx::query_file!("sql/power_order/insert.sql", id, switch.as_str(), reason, by).execute(tx).await
        }
        PowerChange::Begun(intent) => {
            sqlx::query_file!("sql/power_order/mark_started.sql", id, intent.0).execute(tx).await
        }
        PowerChange::Ended => sqlx::query_file!("sql/power_order/delete.sql", id).execute(tx).await,
    }
    .doing(WHAT)?;
    Ok(())
}

/// An order to switch a machine, on behalf of `who`.
pub fn switch(
    snapshot: &Snapshot,
    switch: Switch,
    reason: &str,
    who: &str,
) -> Result<Decision<Done>, Refused> {
    let (facts, now) = (&snapshot.facts, snapshot.now);
    may_order(facts, switch, now)?;
    if let Some(present) = &facts.power_order {
        return Ok(Done::nothing(format!(
            "is to be {} already, by {}: {}; nothing was changed",
            switch.participle(),
            present.by,
            present.reason
        )));
    }
    let ordered = PowerChange::Ordered { switch, reason: reason.to_owned(), by: who.to_owned() };
    let mut changes = vec![FactChange::Power(ordered)];
    let hold = hold_of(facts, switch, reason, who, now);
    let also = match (&hold, facts.hold.as_ref().filter(|hold| hold.holds_at(now))) {
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
    changes.extend(hold.map(FactChange::Held));
    changes.extend(forget_waits());
    Ok(Done::changed(
        changes,
        "PowerOrdered",
        format!("{switch}, {}", by(who, Some(reason))),
        format!("is to be {}{also}", switch.participle()),
    ))
}

/// The end of an order that was not begun.
pub fn cancel(facts: &MachineFacts, by: &str) -> Result<Decision<Done>, Refused> {
    let Some(present) = &facts.power_order else {
        return Ok(Done::nothing("has no order about its power; nothing was changed"));
    };
    if present.begun.is_some() {
        let said = format!("is being {} already; nothing was changed", present.switch.participle());
        return Err(("BEGUN", said));
    }
    let held = match present.switch {
        Switch::Off if facts.hold.is_some() => "; the hold stays until `release`",
        _ => "",
    };
    Ok(Done::changed(
        [FactChange::Power(PowerChange::Ended)].into_iter().chain(forget_waits()).collect(),
        "PowerOrderCancelled",
        format!("{by} (was: {}, {})", present.switch, present.reason),
        format!("is not {}{held}", present.switch.participle()),
    ))
}

fn forget_waits() -> [FactChange; 2] {
    [FactChange::BackoffCleared(Process::Power), FactChange::PostponementCleared(Process::Power)]
}

/// The answer to a request to carry out an order.
#[derive(Clone, Debug)]
pub enum Leave {
    /// Recorded: go on, at once.
    Granted {
        /// The intent to name to the provider.
        intent: IntentId,
        /// The ladder as it was recorded, with the step that it counts as.
        ladder: Option<(Recovery, Rung)>,
    },
    /// Nothing was recorded.
    Refused(Refusal),
}

impl Work {
    /// Asks whether `switch` may be carried out now, and records it when it may be: the intent, and where the
    /// ladder stands.
    pub async fn begin_switch(&self, switch: Switch, provider: &str) -> Result<Leave, BmdbError> {
        let (machine, lease) = (self.machine(), self.lease());
        let (bmdb, provider) = (self.bmdb().clone(), provider.to_owned());
        self.bmdb()
            .transact("recording an intent", move |tx| {
                let (bmdb, provider) = (bmdb.clone(), provider.clone());
                Box::pin(async move {
                    let rows = lock_leased(tx, lease, machine).await?;
                    let snapshot = read(tx, machine).await?;
                    let policy = policy_of_version(&bmdb, tx, snapshot.policy_version).await?;
                    let kind = switch.intent_kind();
                    let window = switch
                        .disturbance()
                        .and_then(|step| policy.budgets.get(&step))
                        .map(|budget| budget.window)
                        .unwrap_or_default();
                    let circumstances = count_budget(tx, machine, kind, window, None).await?;
                    let (facts, now) = (&snapshot.facts, snapshot.now);
                    if let Err(refusal) = may_switch(facts, switch, &circumstances, &policy, now) {
                        return Ok(Leave::Refused(refusal));
                    }
                    // `may_switch` says no where there is none.
                    let Some(order) = &facts.power_order else { return Err(BmdbError::LeaseLost) };
                    let ladder = ladder_after(facts, order, &policy, now);
                    match (&ladder, switch) {
                        (Some((recovery, _)), _) => {
                            apply_change(tx, machine, &FactChange::Recovery(recovery.clone())).await?;
                            // Whoever orders it takes it up again: there is something new to watch.
                            if facts.needs_human.is_some() {
                                apply_change(tx, machine, &FactChange::NeedsHumanCleared).await?;
                            }
                        }
                        (None, Switch::Off) if facts.recovery.is_some() => {
                            apply_change(tx, machine, &FactChange::RecoveryCleared).await?;
                        }
                        (None, _) => {}
                    }
                    let intent = if let Some(begun) = order.begun {
                        begun.intent
                    } else {
                        let intent = IntentId::generate();
                        apply(tx, machine, &PowerChange::Begun(intent)).await?;
                        sqlx::query_file!(
                            "sql/intent/insert.sql",
                            intent.0,
                            kind,
                            provider,
                            machine.0,
                            lease.session.0,
                            lease.fence,
                            format!("{} ordered to {}", order.by, switch.phrase())
                        )
                        .execute(&mut *tx)
                        .await
                        .doing("recording an intent")?;
                        intent
                    };
                    reschedule(&bmdb, tx, machine, &rows).await?;
                    Ok(Leave::Granted { intent, ladder })
                })
            })
            .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::facts::{Begun, Hold, HoldScope, PowerOrder, Provided};
    use crate::model::provider_status::ProviderStatus;
    use crate::model::time::Timestamp;

    fn snapshot(order: Option<(Switch, bool)>, hold: Option<HoldScope>) -> Snapshot {
        let now = Timestamp::from_timestamp(1_800_000_000, 0).unwrap();
        let mut facts = MachineFacts::unknown(MachineId::generate(), now);
        facts.provided = Some(Provided {
            provider: "sim".into(),
            provider_id: "sim-1".into(),
            reservation: None,
            address: None,
            ssh_port: None,
            ssh_user: None,
            location: None,
            status: ProviderStatus::Running,
            at: now,
            looked_at: None,
            unchanged: false,
        });
        facts.power_order = order.map(|(switch, begun)| PowerOrder {
            switch,
            reason: "it hangs".into(),
            by: "kim".into(),
            at: now,
            begun: begun.then(|| Begun { intent: IntentId::generate(), at: now }),
        });
        facts.hold = hold.map(|scope| Hold { scope, reason: "r".into(), by: "lee".into(), until: None });
        Snapshot { facts, now, policy_version: 1 }
    }

    #[test]
    fn orders_say_what_they_find_and_what_follows() {
        use HoldScope::{Power, Recovery};
        let order = |found: &Snapshot, what| match switch(found, what, "new one", "lee") {
            Ok(decision) => (decision.changes.len(), decision.answer.said),
            Err((reason, said)) => (0, format!("{reason}: {said}")),
        };
        for (order, changes, said) in [
            (order(&snapshot(None, None), Switch::Reboot), 3, "is to be rebooted"),
            (
                order(&snapshot(None, None), Switch::Off),
                4,
                "is to be switched off; it is held (recovery) from now on",
            ),
            (order(&snapshot(None, Some(Recovery)), Switch::Off), 3, "is to be switched off"),
            (order(&snapshot(None, Some(Recovery)), Switch::On), 3, "is to be switched on; it is still held"),
            (order(&snapshot(None, Some(Power)), Switch::On), 0, "HELD: is held (power) by lee: r"),
            (
                order(&snapshot(Some((Switch::Off, false)), None), Switch::Off),
                0,
                "is to be switched off already, by kim: it hangs",
            ),
            (
                order(&snapshot(Some((Switch::Off, false)), None), Switch::On),
                0,
                "ORDERED_OTHERWISE: is to be switched off already",
            ),
        ] {
            assert_eq!(order.0, changes, "{}", order.1);
            assert!(order.1.starts_with(said), "{}", order.1);
        }
    }

    #[test]
    fn order_is_cancelled_until_it_is_begun() {
        let cancelled = |found: &Snapshot| match cancel(&found.facts, "by lee") {
            Ok(decision) => (decision.changes.len(), decision.answer.said),
            Err((reason, said)) => (0, format!("{reason}: {said}")),
        };
        for (order, hold, changes, said) in [
            (None, None, 0, "has no order about its power"),
            (Some((Switch::Cycle, false)), None, 3, "is not switched off and on"),
            (Some((Switch::Off, false)), Some(HoldScope::Recovery), 3, "is not switched off; the hold stays"),
            (Some((Switch::Reboot, true)), None, 0, "BEGUN: is being rebooted already"),
        ] {
            let (count, told) = cancelled(&snapshot(order, hold));
            assert_eq!(count, changes, "{told}");
            assert!(told.starts_with(said), "{told}");
        }
    }
}
