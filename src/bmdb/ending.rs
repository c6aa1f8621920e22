//! The transaction that ends a work item.
//!
//! It is the statement sequence that runs most often, so it has as few as can be right: the session and
//! the machine's rows are locked; the facts change; they are read; and one statement writes what the
//! lane is due for next, gives the lease back and tells history. Reading cannot be joined with
//! anything: a statement that waits for a row sees that row new and every other table old.

use sqlx::PgConnection;

use crate::bmdb::change::{FactChange, apply};
use crate::bmdb::connection::{Bmdb, Doing};
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::{Snapshot, read};
use crate::bmdb::policy::policy_of_version;
use crate::bmdb::schedule::{LastLane, reschedule_after};
use crate::bmdb::work::{Lease, lock_leased};
use crate::model::backoff::{Backoff, BackoffFact};
use crate::model::facts::Postponement;
use crate::model::ids::MachineId;
use crate::model::process::Process;
use crate::model::schedule::RULES_VERSION;

/// How a work item ends.
#[derive(Clone, Debug)]
pub(crate) enum Ending {
    /// As done, with what it changed and a word for history.
    Finished { changes: Vec<FactChange>, detail: String },
    /// Undone, without having failed.
    PutOff { changes: Vec<FactChange>, wait: Postponement },
    /// As failed. `roll` is uniform in 0..1; `backoff` overrules the policy's.
    Failed { changes: Vec<FactChange>, cause: String, backoff: Option<Backoff>, roll: f64 },
}

/// Ends the work item that `lease` holds, if it still does.
pub(crate) async fn end_in_database(
    bmdb: &Bmdb,
    lease: Lease,
    machine: MachineId,
    process: Process,
    ending: &Ending,
) -> Result<(), BmdbError> {
    let (inner, ending) = (bmdb.clone(), ending.clone());
    bmdb.transact("ending work", move |tx| {
        let (bmdb, ending) = (inner.clone(), ending.clone());
        Box::pin(async move {
            let rows = lock_leased(tx, lease, machine).await?;
            let (event, detail, snapshot) = match ending {
                Ending::Finished { changes, detail } => {
                    ("Finished", detail, finish(tx, machine, process, &changes).await?)
                }
                Ending::PutOff { mut changes, wait } => {
                    let detail = wait.reason.clone();
                    changes.push(FactChange::Postponed(process, wait));
                    ("PutOff", detail, changed(tx, machine, &changes).await?)
                }
                Ending::Failed { mut changes, cause, backoff, roll } => {
                    let before = read(tx, machine).await?;
                    // By the row, not by what was read of it last: a process that has only just
                    // connected knows nothing but the defaults.
                    let policy = policy_of_version(&bmdb, tx, before.policy_version).await?;
                    let backoff = backoff.unwrap_or_else(|| policy.backoff_of(process));
                    let previous = before.facts.backoffs.get(&process);
                    let fact =
                        BackoffFact::after_failure(previous, &backoff, cause.clone(), before.now, roll);
                    changes.push(FactChange::Backoff(process, fact));
                    changes.push(FactChange::PostponementCleared(process));
                    ("Failed", cause, changed(tx, machine, &changes).await?)
                }
            };
            let last = reschedule_after(process, &bmdb, tx, &rows, snapshot).await?;
            if matches!(process, Process::Recovery | Process::Retirement | Process::Power) {
                // Those that take steps. They settle them themselves, unless that failed.
                sqlx::query_file!("sql/intent/resolve_unknown.sql", machine.0, lease.session.0, lease.fence)
                    .execute(&mut *tx)
                    .await
                    .doing("settling intents")?;
            }
            give_back(tx, lease, machine, process, &last, (event, &detail)).await
        })
    })
    .await
}

/// Changes facts, and reads them all.
async fn changed(
    tx: &mut PgConnection,
    machine: MachineId,
    changes: &[FactChange],
) -> Result<Snapshot, BmdbError> {
    for change in changes {
        apply(tx, machine, change).await?;
    }
    read(tx, machine).await
}

/// As [`changed`], with nothing left of earlier failures and waits of `process`. Nearly always there are
/// none, which what was read tells: they change only under the locks held here.
async fn finish(
    tx: &mut PgConnection,
    machine: MachineId,
    process: Process,
    changes: &[FactChange],
) -> Result<Snapshot, BmdbError> {
    let snapshot = changed(tx, machine, changes).await?;
    let mut left = Vec::new();
    if snapshot.facts.backoffs.contains_key(&process) {
        left.push(FactChange::BackoffCleared(process));
    }
    if snapshot.facts.postponements.contains_key(&process) {
        left.push(FactChange::PostponementCleared(process));
    }
    if left.is_empty() { Ok(snapshot) } else { changed(tx, machine, &left).await }
}

async fn give_back(
    tx: &mut PgConnection,
    lease: Lease,
    machine: MachineId,
    process: Process,
    last: &LastLane,
    (event, detail): (&str, &str),
) -> Result<(), BmdbError> {
    let due = &last.plan.due;
    let ended = sqlx::query_file_scalar!(
        "sql/work/complete.sql",
        machine.0,
        lease.lane.as_str(),
        lease.session.0,
        lease.fence,
        due.process.map(Process::as_str),
        last.plan.provider,
        i64::from(due.priority),
        last.plan.ready_at,
        due.timer,
        due.reason,
        last.plan.decided_at(),
        due.deadline,
        due.phase.as_str(),
        i64::from(RULES_VERSION),
        last.policy_version,
        event,
        process.as_str(),
        detail,
    )
    .fetch_one(tx)
    .await
    .doing("giving back a lease")?;
    if ended == 1 { Ok(()) } else { Err(BmdbError::LeaseLost) }
}

/// A text as the database takes it: what a machine or a provider said may hold the one character that
/// no database text can, and its work must end all the same.
pub(crate) fn storable(text: String) -> String {
    if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text }
}
