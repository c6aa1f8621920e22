//! Retiring machines: what operators may order about it, the facts that this changes, and the order to a
//! provider, recorded before it is given.
//!
//! The order is an intent that stays in the machine's facts. Whoever finds it there, after a crash or a lost
//! answer, gives the same order again under the same intent: a provider carries out an intent once.

use sqlx::PgConnection;

use crate::bmdb::action::{Done, by};
use crate::bmdb::change::FactChange;
use crate::bmdb::connection::Doing;
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::{Snapshot, read};
use crate::bmdb::intent::count_budget;
use crate::bmdb::policy::policy_of_version;
use crate::bmdb::power_order::PowerChange;
use crate::bmdb::schedule::reschedule;
use crate::bmdb::work::{Decision, Work, lock_leased};
use crate::model::access::Role;
use crate::model::disturb::{Refusal, may_release};
use crate::model::ids::{IntentId, MachineId};
use crate::model::policy::Policy;
use crate::model::process::Process;
use crate::model::retirement::{Stage, may_waive};
use crate::model::telling::absolute;

/// Kind of the intents, and name of the budget.
pub const RELEASE: &str = "release";

/// A change of a machine's retirement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RetirementChange {
    /// It is to be retired.
    Requested {
        /// Why.
        reason: String,
        /// Who asks for it.
        by: String,
        /// Whether it is to be wiped before it is given back.
        wipe: bool,
    },
    /// It stays, unless its provider was told to take it back.
    Cleared,
    /// It need not be wiped after all, as this person says.
    WipeWaived(String),
    /// Its provider is about to be told, under this intent.
    ReleaseOrdered(IntentId),
    /// It is over, and how.
    Finished(String),
    /// Its provider lists it although it is over, or does no more.
    Listed(bool),
}

const WHAT: &str = "changing a retirement";

/// Writes one change. The caller holds the machine's due rows.
pub(crate) async fn apply(
    tx: &mut PgConnection,
    machine: MachineId,
    change: &RetirementChange,
) -> Result<(), BmdbError> {
    let id = machine.0;
    match change {
        RetirementChange::Requested { reason, by, wipe } => {
            sqlx::query_file!("sql/retirement/insert.sql", id, reason, by, wipe).execute(tx).await
        }
        RetirementChange::Cleared => sqlx::query_file!("sql/retirement/delete.sql", id).execute(tx).await,
        RetirementChange::WipeWaived(by) => {
            sqlx::query_file!("sql/retirement/waive_wipe.sql", id, by).execute(tx).await
        }
        RetirementChange::ReleaseOrdered(intent) => {
            sqlx::query_file!("sql/retirement/mark_release_ordered.sql", id, intent.0).execute(tx).await
        }
        RetirementChange::Finished(outcome) => {
            sqlx::query_file!("sql/retirement/mark_finished.sql", id, outcome).execute(tx).await
        }
        RetirementChange::Listed(listed) => {
            sqlx::query_file!("sql/retirement/set_listed.sql", id, listed).execute(tx).await
        }
    }
    .doing(WHAT)?;
    Ok(())
}

/// A refusal of an order: a reason for programs, and a sentence that goes on after the machine's name.
pub type Refused = (&'static str, String);

/// The beginning of a retirement, on behalf of `who`.
pub fn retire(snapshot: &Snapshot, wipe: bool, reason: &str, who: &str) -> Result<Decision<Done>, Refused> {
    if let Some(present) = &snapshot.facts.retirement {
        if present.finished_at.is_some() {
            return Ok(Done::nothing("is retired already; nothing was changed"));
        }
        if present.wipe == wipe {
            let said = format!(
                "is being retired already, by {}: {}; nothing was changed",
                present.by, present.reason
            );
            return Ok(Done::nothing(said));
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
    let held = match snapshot.facts.hold.as_ref().filter(|hold| hold.holds_at(snapshot.now)) {
        Some(hold) => format!("; {} holds it, and it is not given back before that is over", hold.by),
        None => String::new(),
    };
    let mut changes = vec![FactChange::Retirement(requested)];
    // What is given back is not switched any more.
    changes.extend(snapshot.facts.power_order.as_ref().map(|_| FactChange::Power(PowerChange::Ended)));
    Ok(Done::changed(
        changes,
        "RetirementRequested",
        format!("{}{how}", by(who, Some(reason))),
        format!("is being retired{how}: work under way on it is told to stop, and nothing else begins{held}"),
    ))
}

/// The end of a retirement that has not come to its provider, ordered by somebody of this role.
///
/// Whoever cancels one with a wipe can order one without: that is as much as to waive the wipe.
pub fn cancel(snapshot: &Snapshot, by: &str, role: Role) -> Result<Decision<Done>, Refused> {
    let Some(present) = &snapshot.facts.retirement else {
        return Ok(Done::nothing("is not being retired; nothing was changed"));
    };
    if present.finished_at.is_some() {
        let said = "is retired, and stays so: a tombstone is never adopted again. Nothing was changed";
        return Err(("RETIRED", said.to_owned()));
    }
    if let Some(order) = present.release {
        let said = format!(
            "cannot stay any more: its provider was told to take it back {}. Nothing was changed",
            absolute(order.at)
        );
        return Err(("RELEASE_ORDERED", said));
    }
    if present.wipe && present.wipe_waived.is_none() && role < Role::Admin {
        let said = format!(
            "is to be wiped before it is given back, as {} ordered, and only an admin may cancel that; ask one. \
             Nothing was changed",
            present.by
        );
        return Err(("NOT_AN_ADMIN", said));
    }
    Ok(Done::changed(
        [FactChange::Retirement(RetirementChange::Cleared)].into_iter().chain(forget_waits()).collect(),
        "RetirementCancelled",
        format!("{by} (was: {})", present.reason),
        "stays: its retirement is cancelled, and it goes on where it was",
    ))
}

/// Leaves out the stage that a retirement is at, on behalf of `who`. A release that is left out leaves nothing
/// more to be done, and ends it.
pub fn waive(
    snapshot: &Snapshot,
    policy: &Policy,
    stage: Stage,
    reason: &str,
    who: &str,
) -> Result<Decision<Done>, Refused> {
    may_waive(&snapshot.facts, policy, stage, snapshot.now)
        .map_err(|said| ("NOT_WAIVABLE", format!("{said}; nothing was changed")))?;
    let waived = format!("its release was waived by {who}: {reason}");
    let ordered = snapshot.facts.retirement.as_ref().and_then(|retirement| retirement.release);
    let (change, said) = match (stage, ordered) {
        (Stage::Release, None) => (
            RetirementChange::Finished(waived),
            "is retired, and was not given back; it is never adopted again, and its agent is heard no more",
        ),
        (Stage::Release, Some(order)) => (
            RetirementChange::Finished(format!(
                "its release was ordered {}, and whether it was carried out is not known; {waived}",
                absolute(order.at)
            )),
            "is retired; its release was ordered, and whether it was carried out is not known; it is never \
             adopted again, and its agent is heard no more",
        ),
        _ => (RetirementChange::WipeWaived(who.to_owned()), "is not wiped; its provider is to take it back"),
    };
    Ok(Done::changed(
        [FactChange::Retirement(change)].into_iter().chain(forget_waits()).collect(),
        "StageWaived",
        format!("{stage}, {}", by(who, Some(reason))),
        said,
    ))
}

/// What failed at one stage, or before a person changed their mind, says nothing of what comes next.
fn forget_waits() -> [FactChange; 2] {
    [FactChange::BackoffCleared(Process::Retirement), FactChange::PostponementCleared(Process::Retirement)]
}

/// The answer to a request to tell a provider to take a machine back.
#[derive(Clone, Debug)]
pub enum Leave {
    /// Recorded: tell it, at once, under this intent.
    Granted(IntentId),
    /// Nothing was recorded.
    Refused(Refusal),
}

impl Work {
    /// Asks whether this work's machine may be given back to `provider`, and records the order when it may be.
    pub async fn begin_release(&self, provider: &str) -> Result<Leave, BmdbError> {
        let (machine, lease) = (self.machine(), self.lease());
        let (bmdb, provider) = (self.bmdb().clone(), provider.to_owned());
        self.bmdb()
            .transact("recording an intent", move |tx| {
                let (bmdb, provider) = (bmdb.clone(), provider.clone());
                Box::pin(async move {
                    let rows = lock_leased(tx, lease, machine).await?;
                    let snapshot = read(tx, machine).await?;
                    let policy = policy_of_version(&bmdb, tx, snapshot.policy_version).await?;
                    let window = policy.release_budget.window;
                    let circumstances = count_budget(tx, machine, RELEASE, window, None).await?;
                    if let Err(refusal) = may_release(&snapshot.facts, &circumstances, &policy, snapshot.now)
                    {
                        return Ok(Leave::Refused(refusal));
                    }
                    let ordered =
                        snapshot.facts.retirement.as_ref().and_then(|retirement| retirement.release);
                    if let Some(order) = ordered {
                        return Ok(Leave::Granted(order.intent));
                    }
                    let intent = IntentId::generate();
                    apply(tx, machine, &RetirementChange::ReleaseOrdered(intent)).await?;
                    reschedule(&bmdb, tx, machine, &rows).await?;
                    sqlx::query_file!(
                        "sql/intent/insert.sql",
                        intent.0,
                        RELEASE,
                        provider,
                        machine.0,
                        lease.session.0,
                        lease.fence,
                        "its provider is told to take it back"
                    )
                    .execute(tx)
                    .await
                    .doing("recording an intent")?;
                    Ok(Leave::Granted(intent))
                })
            })
            .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::facts::{Hold, HoldScope, MachineFacts, ReleaseOrder, Retirement, Waiver};
    use crate::model::time::Timestamp;

    fn snapshot(retirement: Option<Retirement>) -> Snapshot {
        let now = Timestamp::from_timestamp(1_800_000_000, 0).unwrap();
        let mut facts = MachineFacts::unknown(MachineId::generate(), now);
        facts.retirement = retirement;
        Snapshot { facts, now, policy_version: 1 }
    }

    fn retiring() -> Retirement {
        let at = Timestamp::from_timestamp(1_799_999_990, 0).unwrap();
        Retirement::new("old".to_owned(), "kim".to_owned(), at)
    }

    fn outcome(decided: Result<Decision<Done>, Refused>) -> (usize, String) {
        match decided {
            Ok(decision) => (decision.changes.len(), decision.answer.said),
            Err((reason, said)) => (0, format!("{reason}: {said}")),
        }
    }

    #[test]
    fn orders_say_what_they_find() {
        let order = ReleaseOrder { intent: IntentId::generate(), at: retiring().requested_at };
        let ordered = Retirement { release: Some(order), ..retiring() };
        let over = Retirement { finished_at: Some(order.at), ..retiring() };
        let wiping = Retirement { wipe: true, ..retiring() };
        let retire =
            |found: Option<Retirement>, wipe| outcome(retire(&snapshot(found), wipe, "new one", "lee"));
        let cancel_as = |found: Option<Retirement>, role| outcome(cancel(&snapshot(found), "by lee", role));
        let cancel = |found: Option<Retirement>| cancel_as(found, Role::Operator);
        let waiver = Waiver { at: order.at, by: "kim".into() };
        let wipe_waived = Retirement { wipe_waived: Some(waiver), ..wiping.clone() };
        let late = Timestamp::from_timestamp(1_799_990_000, 0).unwrap();
        let overdue = Retirement { requested_at: late, ..retiring() };
        let overdue_ordered = Retirement { requested_at: late, ..ordered.clone() };
        let waive = |found: Option<Retirement>, stage| {
            outcome(waive(&snapshot(found), &Policy::default(), stage, "it is shredded", "lee"))
        };
        for ((changes, said), expected, part) in [
            (retire(None, false), 1, "is being retired: work under way"),
            (retire(None, true), 1, "is being retired, to be wiped first"),
            (retire(Some(retiring()), false), 0, "is being retired already, by kim: old"),
            (
                retire(Some(retiring()), true),
                0,
                "RETIRING_OTHERWISE: is being retired already, without a wipe",
            ),
            (retire(Some(over.clone()), false), 0, "is retired already"),
            (cancel(None), 0, "is not being retired"),
            (cancel(Some(retiring())), 3, "stays"),
            (cancel(Some(ordered)), 0, "RELEASE_ORDERED: cannot stay any more"),
            (cancel(Some(over.clone())), 0, "RETIRED: is retired, and stays so"),
            (
                cancel(Some(wiping.clone())),
                0,
                "NOT_AN_ADMIN: is to be wiped before it is given back, as kim ordered, and only an admin",
            ),
            (cancel_as(Some(wiping.clone()), Role::Admin), 3, "stays"),
            (cancel(Some(wipe_waived)), 3, "stays"),
            (waive(Some(wiping), Stage::Wipe), 3, "is not wiped"),
            (waive(Some(overdue), Stage::Release), 3, "is retired, and was not given back"),
            (
                waive(Some(overdue_ordered.clone()), Stage::Release),
                3,
                "is retired; its release was ordered, and whether it was carried out is not known",
            ),
            (waive(Some(retiring()), Stage::Release), 0, "NOT_WAIVABLE: is at the stage release"),
            (waive(Some(over), Stage::Release), 0, "NOT_WAIVABLE: is retired already"),
        ] {
            assert_eq!(changes, expected, "{said}");
            assert!(said.starts_with(part), "{said}");
        }
        let found = snapshot(Some(overdue_ordered));
        let waived = super::waive(&found, &Policy::default(), Stage::Release, "it is gone", "lee").unwrap();
        let FactChange::Retirement(RetirementChange::Finished(kept)) = &waived.changes[0] else { panic!() };
        assert!(
            kept.contains("whether it was carried out is not known; its release was waived by lee"),
            "{kept}"
        );
    }

    #[test]
    fn held_machine_is_told_to_wait() {
        let mut held = snapshot(None);
        let hold = Hold { scope: HoldScope::Power, reason: "r".into(), by: "kim".into(), until: None };
        held.facts.hold = Some(hold);
        let (_, said) = outcome(retire(&held, false, "old", "lee"));
        assert!(said.ends_with("kim holds it, and it is not given back before that is over"), "{said}");
    }
}
