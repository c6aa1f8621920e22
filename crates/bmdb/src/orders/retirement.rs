//! Retiring machines: orders, facts, and the release to the provider under an intent.
//!
//! The release is an intent that stays in the machine's facts, recorded before the provider is called. A worker that
//! finds it there, after a crash or a lost answer, calls the provider again under the same intent: a provider carries
//! out an intent once.

use crate::connection::DbContext;
use crate::connection::error::BmdbError;
use crate::engine::change_machine::Decision;
use crate::engine::fact_change::FactChange;
use crate::engine::fact_change::power::PowerChange;
use crate::engine::fact_change::retirement::{RetirementChange, apply_retirement_change};
use crate::engine::facts::{MachineSnapshot, read_snapshot};
use crate::engine::intent::{RELEASE_KIND, lock_disruption_context};
use crate::engine::policy::policy_at_version;
use crate::engine::schedule::reschedule_machine;
use crate::engine::work::Work;
use crate::engine::work::lease::lock_due_rows_leased;
use crate::orders::order::{OrderOutcome, OrderRejection, format_attribution};
use model::access::AccessRole;
use model::disruption::{DisruptionDenied, may_release};
use model::event_name::RETIREMENT_CANCELLED;
use model::humanize::absolute_time;
use model::ids::IntentId;
use model::policy::Policy;
use model::process::Process;
use model::retirement::{RetirementStage, check_waiver};

/// Begins a retirement, on behalf of `who`.
///
/// With `keep_authority` the authority of the machine's cluster is not replaced when the machine leaves it. That can be
/// ordered for a retirement that is under way as well, and not be taken back.
pub fn retire_machine(
    snapshot: &MachineSnapshot,
    (wipe, keep_authority): (bool, bool),
    reason: &str,
    who: &str,
) -> Result<Decision<OrderOutcome>, OrderRejection> {
    if let Some(present) = &snapshot.facts.retirement {
        if present.finished_at.is_some() {
            return Ok(OrderOutcome::already("is retired already; nothing was changed"));
        }
        if present.wipe == wipe && keep_authority {
            return Ok(OrderOutcome::changed(
                vec![FactChange::Retirement(RetirementChange::AuthorityKept)],
                "AuthorityKept",
                format_attribution(who, Some(reason)),
                format!(
                    "is being retired already, by {}: {}; its cluster keeps its authority from now on",
                    present.by, present.reason
                ),
            ));
        }
        if present.wipe == wipe {
            let text = format!(
                "is being retired already, by {}: {}; nothing was changed",
                present.by, present.reason
            );
            return Ok(OrderOutcome::already(text));
        }
        let how = if present.wipe { "with" } else { "without" };
        return Err((
            "RETIRING_OTHERWISE",
            format!(
                "is being retired already, {how} a wipe, by {}: {}; cancel that first. Nothing was changed",
                present.by, present.reason
            ),
        ));
    }
    let requested = RetirementChange::Requested { reason: reason.to_owned(), by: who.to_owned(), wipe };
    let how = if wipe { ", to be wiped first" } else { "" };
    let held = match snapshot.facts.hold.as_ref().filter(|hold| hold.is_active_at(snapshot.now)) {
        Some(hold) => format!("; {} holds it, and it is not returned before the hold ends", hold.by),
        None => String::new(),
    };
    let mut changes = vec![FactChange::Retirement(requested)];
    changes.extend(keep_authority.then_some(FactChange::Retirement(RetirementChange::AuthorityKept)));
    // A machine that is being released is not switched any more.
    changes.extend(snapshot.facts.power_order.as_ref().map(|_| FactChange::Power(PowerChange::Ended)));
    Ok(OrderOutcome::changed(
        changes,
        "RetirementRequested",
        format!("{}{how}", format_attribution(who, Some(reason))),
        format!(
            "is being retired{how}: work under way on it is ordered to stop, and nothing else begins{held}"
        ),
    ))
}

/// Cancels a retirement whose release has not been sent to the provider, by order of an operator of this role.
///
/// An operator who cancels one with a wipe can order one without, so cancelling it takes the same right as waiving the
/// wipe.
pub fn cancel_retirement(
    snapshot: &MachineSnapshot,
    by: &str,
    role: AccessRole,
) -> Result<Decision<OrderOutcome>, OrderRejection> {
    let Some(present) = &snapshot.facts.retirement else {
        return Ok(OrderOutcome::already("is not being retired; nothing was changed"));
    };
    if present.finished_at.is_some() {
        let text = "is retired, and stays so: a tombstone is never adopted again. Nothing was changed";
        return Err(("RETIRED", text.to_owned()));
    }
    if let Some(order) = present.release {
        let text = format!(
            "cannot stay any more: its provider was ordered to take it back {}. Nothing was changed",
            absolute_time(order.recorded_at)
        );
        return Err(("RELEASE_ORDERED", text));
    }
    if present.is_wipe_pending() && role < AccessRole::Admin {
        let text = format!(
            "will be wiped before it is given back, as {} ordered, and only an admin may cancel that; ask one. \
             Nothing was changed",
            present.by
        );
        return Err(("NOT_AN_ADMIN", text));
    }
    Ok(OrderOutcome::changed(
        [FactChange::Retirement(RetirementChange::Cleared)].into_iter().chain(clear_waits()).collect(),
        RETIREMENT_CANCELLED,
        format!("{by} (was: {})", present.reason),
        "stays in the fleet: its retirement is cancelled, and its former work continues",
    ))
}

/// Skips the stage that a retirement is at, on behalf of `who`. If the release is skipped, nothing remains to be done,
/// and the retirement ends. `cluster` is the cluster that the machine is a part of.
pub fn waive_stage(
    snapshot: &MachineSnapshot,
    policy: &Policy,
    cluster: Option<&str>,
    stage: RetirementStage,
    reason: &str,
    who: &str,
) -> Result<Decision<OrderOutcome>, OrderRejection> {
    check_waiver(&snapshot.facts, policy, cluster, stage, snapshot.now)
        .map_err(|error| ("NOT_WAIVABLE", format!("{error}; nothing was changed")))?;
    let waived = format!("its release was waived by {who}: {reason}");
    let ordered = snapshot.facts.retirement.as_ref().and_then(|retirement| retirement.release);
    let (change, text) = match (stage, ordered) {
        (RetirementStage::Release, None) => (
            RetirementChange::Finished(waived),
            "is retired, and was not given back; it is never adopted again, and heartbeats of its agent are rejected",
        ),
        (RetirementStage::Release, Some(order)) => (
            RetirementChange::Finished(format!(
                "its release was ordered {}, and whether it was carried out is not known; {waived}",
                absolute_time(order.recorded_at)
            )),
            "is retired; its release was ordered, and whether it was carried out is not known; it is never \
             adopted again, and heartbeats of its agent are rejected",
        ),
        _ => (RetirementChange::WipeWaived(who.to_owned()), "is not wiped; its provider is to take it back"),
    };
    Ok(OrderOutcome::changed(
        [FactChange::Retirement(change)].into_iter().chain(clear_waits()).collect(),
        "StageWaived",
        format!("{stage}, {}", format_attribution(who, Some(reason))),
        text,
    ))
}

/// Failures at one stage, or before an operator changed the order, do not predict what comes next.
fn clear_waits() -> [FactChange; 2] {
    [FactChange::BackoffCleared(Process::Retirement), FactChange::PostponementCleared(Process::Retirement)]
}

/// The answer to a request to release a machine to its provider.
#[derive(Clone, Debug)]
pub enum ReleasePermission {
    /// Recorded: call the provider, at once, under this intent.
    Granted(IntentId),
    /// Not allowed now; nothing was recorded.
    Denied(DisruptionDenied),
}

impl Work {
    /// Requests permission to release this work's machine to `provider`, and records the release if it is allowed.
    pub async fn begin_release(&self, provider: &str) -> Result<ReleasePermission, BmdbError> {
        let (machine, lease) = (self.machine(), self.lease());
        let (bmdb, provider) = (self.bmdb().clone(), provider.to_owned());
        self.bmdb()
            .transact_with("recording an intent", (bmdb, provider), move |tx, (bmdb, provider)| {
                Box::pin(async move {
                    let rows = lock_due_rows_leased(tx, lease, machine).await?;
                    let snapshot = read_snapshot(tx, machine).await?;
                    let policy = policy_at_version(bmdb, tx, snapshot.policy_version).await?;
                    let window = policy.release_budget.window;
                    let circumstances =
                        lock_disruption_context(tx, machine, RELEASE_KIND, window, None).await?;
                    if let Err(refusal) = may_release(&snapshot.facts, &circumstances, &policy, snapshot.now)
                    {
                        return Ok(ReleasePermission::Denied(refusal));
                    }
                    let ordered =
                        snapshot.facts.retirement.as_ref().and_then(|retirement| retirement.release);
                    if let Some(order) = ordered {
                        return Ok(ReleasePermission::Granted(order.intent));
                    }
                    let intent = IntentId::generate();
                    apply_retirement_change(tx, machine, &RetirementChange::ReleaseOrdered(intent)).await?;
                    reschedule_machine(bmdb, tx, machine, &rows).await?;
                    sqlx::query_file!(
                        "../../sql/intent/insert.sql",
                        intent.0,
                        RELEASE_KIND,
                        provider,
                        machine.0,
                        lease.session.0,
                        lease.fence,
                        "its provider is ordered to take it back"
                    )
                    .execute(tx)
                    .await
                    .context("recording an intent")?;
                    Ok(ReleasePermission::Granted(intent))
                })
            })
            .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::facts::{Hold, HoldScope, MachineFacts, ReleaseOrder, Retirement, Waiver};
    use model::ids::MachineId;
    use model::time::Timestamp;

    fn snapshot(retirement: Option<Retirement>) -> MachineSnapshot {
        let now = Timestamp::from_timestamp(1_800_000_000, 0).unwrap();
        let mut facts = MachineFacts::empty(MachineId::generate(), now);
        facts.retirement = retirement;
        MachineSnapshot { facts, now, policy_version: 1 }
    }

    fn retiring() -> Retirement {
        let at = Timestamp::from_timestamp(1_799_999_990, 0).unwrap();
        Retirement::new("old".to_owned(), "kim".to_owned(), at)
    }

    fn outcome(decided: Result<Decision<OrderOutcome>, OrderRejection>) -> (usize, String) {
        match decided {
            Ok(decision) => (decision.changes.len(), decision.output.message),
            Err((reason, text)) => (0, format!("{reason}: {text}")),
        }
    }

    #[test]
    fn order_messages_describe_the_state() {
        let order = ReleaseOrder { intent: IntentId::generate(), recorded_at: retiring().requested_at };
        let ordered = Retirement { release: Some(order), ..retiring() };
        let over = Retirement { finished_at: Some(order.recorded_at), ..retiring() };
        let wiping = Retirement { wipe: true, ..retiring() };
        let retire = |found: Option<Retirement>, wipe| {
            outcome(retire_machine(&snapshot(found), (wipe, false), "new one", "lee"))
        };
        let keep = |found: Option<Retirement>, wipe| {
            outcome(retire_machine(&snapshot(found), (wipe, true), "it is shredded", "lee"))
        };
        let cancel_as =
            |found: Option<Retirement>, role| outcome(cancel_retirement(&snapshot(found), "by lee", role));
        let cancel = |found: Option<Retirement>| cancel_as(found, AccessRole::Operator);
        let waiver = Waiver { waived_at: order.recorded_at, by: "kim".into() };
        let wipe_waived = Retirement { wipe_waived: Some(waiver), ..wiping.clone() };
        let late = Timestamp::from_timestamp(1_799_990_000, 0).unwrap();
        let overdue = Retirement { requested_at: late, ..retiring() };
        let overdue_ordered = Retirement { requested_at: late, ..ordered.clone() };
        let waive = |found: Option<Retirement>, stage| {
            outcome(waive_stage(&snapshot(found), &Policy::default(), None, stage, "it is shredded", "lee"))
        };
        for ((changes, text), expected, part) in [
            (retire(None, false), 1, "is being retired: work under way"),
            (retire(None, true), 1, "is being retired, to be wiped first"),
            (retire(Some(retiring()), false), 0, "is being retired already, by kim: old"),
            (
                retire(Some(retiring()), true),
                0,
                "RETIRING_OTHERWISE: is being retired already, without a wipe",
            ),
            (retire(Some(over.clone()), false), 0, "is retired already"),
            (keep(None, false), 2, "is being retired: work under way"),
            (
                keep(Some(retiring()), false),
                1,
                "is being retired already, by kim: old; its cluster keeps its authority",
            ),
            (keep(Some(retiring()), true), 0, "RETIRING_OTHERWISE: is being retired already, without a wipe"),
            (keep(Some(over.clone()), false), 0, "is retired already"),
            (cancel(None), 0, "is not being retired"),
            (cancel(Some(retiring())), 3, "stays"),
            (cancel(Some(ordered)), 0, "RELEASE_ORDERED: cannot stay any more"),
            (cancel(Some(over.clone())), 0, "RETIRED: is retired, and stays so"),
            (
                cancel(Some(wiping.clone())),
                0,
                "NOT_AN_ADMIN: will be wiped before it is given back, as kim ordered, and only an admin",
            ),
            (cancel_as(Some(wiping.clone()), AccessRole::Admin), 3, "stays"),
            (cancel(Some(wipe_waived)), 3, "stays"),
            (waive(Some(wiping), RetirementStage::Wipe), 3, "is not wiped"),
            (waive(Some(overdue), RetirementStage::Release), 3, "is retired, and was not given back"),
            (
                waive(Some(overdue_ordered.clone()), RetirementStage::Release),
                3,
                "is retired; its release was ordered, and whether it was carried out is not known",
            ),
            (waive(Some(retiring()), RetirementStage::Release), 0, "NOT_WAIVABLE: is at the stage release"),
            (waive(Some(over), RetirementStage::Release), 0, "NOT_WAIVABLE: is retired already"),
        ] {
            assert_eq!(changes, expected, "{text}");
            assert!(text.starts_with(part), "{text}");
        }
        let found = snapshot(Some(overdue_ordered));
        let (policy, stage) = (Policy::default(), RetirementStage::Release);
        let waived = super::waive_stage(&found, &policy, None, stage, "it is gone", "lee").unwrap();
        let FactChange::Retirement(RetirementChange::Finished(kept)) = &waived.changes[0] else { panic!() };
        assert!(
            kept.contains("whether it was carried out is not known; its release was waived by lee"),
            "{kept}"
        );
    }

    #[test]
    fn retiring_a_machine_on_hold_mentions_the_hold() {
        let mut held = snapshot(None);
        let hold = Hold { scope: HoldScope::Power, reason: "r".into(), by: "kim".into(), until: None };
        held.facts.hold = Some(hold);
        let (_, text) = outcome(retire_machine(&held, (false, false), "old", "lee"));
        assert!(text.ends_with("kim holds it, and it is not returned before the hold ends"), "{text}");
    }
}
