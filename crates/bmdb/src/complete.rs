//! Completing a work item in one transaction: facts, schedule, lease, history.
//!
//! It is the statement sequence that runs most often, so it has as few statements as possible: lock the session and the
//! machine's rows; change the facts; read them; and, in one statement, write what the lane is due for next, release the
//! lease and record history. The read cannot be joined with anything: a statement that waits for a row sees that row
//! new and every other table old.

use sqlx::PgConnection;

use crate::connection::{Bmdb, DbContext};
use crate::error::BmdbError;
use crate::fact_change::{FactChange, apply_fact_change};
use crate::facts::{MachineSnapshot, read_snapshot};
use crate::policy::policy_at_version;
use crate::schedule::{EndedLanePlan, reschedule_after_work};
use crate::work::{WorkLease, lock_due_rows_leased};
use model::backoff::{BackoffFact, BackoffPolicy};
use model::facts::Postponement;
use model::ids::MachineId;
use model::process::Process;
use model::schedule::RULES_VERSION;

/// How a work item ends.
#[derive(Clone, Debug)]
pub(crate) enum Completion {
    /// Done, with the facts it changed and a detail for history.
    Finished { changes: Vec<FactChange>, detail: String },
    /// Not done, without having failed.
    Postponed { changes: Vec<FactChange>, wait: Postponement },
    /// Failed. `jitter` is uniform in 0..1; `backoff` overrides the policy's.
    Failed { changes: Vec<FactChange>, cause: String, backoff: Option<BackoffPolicy>, jitter: f64 },
}

/// Completes the work item that `lease` holds, if it still does.
pub(crate) async fn complete_work(
    bmdb: &Bmdb,
    lease: WorkLease,
    machine: MachineId,
    process: Process,
    ending: &Completion,
) -> Result<(), BmdbError> {
    let (inner, ending) = (bmdb.clone(), ending.clone());
    bmdb.transact("ending work", move |tx| {
        let (bmdb, ending) = (inner.clone(), ending.clone());
        Box::pin(async move {
            let rows = lock_due_rows_leased(tx, lease, machine).await?;
            let (event, detail, snapshot) = match ending {
                Completion::Finished { changes, detail } => {
                    ("Finished", detail, apply_finished(tx, machine, process, &changes).await?)
                }
                Completion::Postponed { mut changes, wait } => {
                    let detail = wait.reason.clone();
                    changes.push(FactChange::Postponed(process, wait));
                    ("PutOff", detail, apply_and_read(tx, machine, &changes).await?)
                }
                Completion::Failed { mut changes, cause, backoff, jitter: roll } => {
                    let before = read_snapshot(tx, machine).await?;
                    // By the version in the row, not by the policy read last: a process that has only just connected
                    // knows nothing but the defaults.
                    let policy = policy_at_version(&bmdb, tx, before.policy_version).await?;
                    let backoff = backoff.unwrap_or_else(|| policy.backoff_of(process));
                    let previous = before.facts.backoffs.get(&process);
                    let fact =
                        BackoffFact::after_failure(previous, &backoff, cause.clone(), before.now, roll);
                    changes.push(FactChange::Backoff(process, fact));
                    changes.push(FactChange::PostponementCleared(process));
                    ("Failed", cause, apply_and_read(tx, machine, &changes).await?)
                }
            };
            let last = reschedule_after_work(process, &bmdb, tx, &rows, snapshot).await?;
            if matches!(process, Process::Recovery | Process::Retirement | Process::Power) {
                // Workers that take steps resolve them themselves, unless that failed.
                sqlx::query_file!(
                    "../../sql/intent/resolve_unknown.sql",
                    machine.0,
                    lease.session.0,
                    lease.fence
                )
                .execute(&mut *tx)
                .await
                .context("settling intents")?;
            }
            release_work_lease(tx, lease, machine, process, &last, (event, &detail)).await
        })
    })
    .await
}

/// Applies changes of facts, and reads all facts.
async fn apply_and_read(
    tx: &mut PgConnection,
    machine: MachineId,
    changes: &[FactChange],
) -> Result<MachineSnapshot, BmdbError> {
    for change in changes {
        apply_fact_change(tx, machine, change).await?;
    }
    read_snapshot(tx, machine).await
}

/// As [`apply_and_read`], and clears earlier failures and waits of `process`. Nearly always there are none, which the
/// facts that were read show: they change only under the locks held here.
async fn apply_finished(
    tx: &mut PgConnection,
    machine: MachineId,
    process: Process,
    changes: &[FactChange],
) -> Result<MachineSnapshot, BmdbError> {
    let snapshot = apply_and_read(tx, machine, changes).await?;
    let mut left = Vec::new();
    if snapshot.facts.backoffs.contains_key(&process) {
        left.push(FactChange::BackoffCleared(process));
    }
    if snapshot.facts.postponements.contains_key(&process) {
        left.push(FactChange::PostponementCleared(process));
    }
    if left.is_empty() { Ok(snapshot) } else { apply_and_read(tx, machine, &left).await }
}

async fn release_work_lease(
    tx: &mut PgConnection,
    lease: WorkLease,
    machine: MachineId,
    process: Process,
    last: &EndedLanePlan,
    (event, detail): (&str, &str),
) -> Result<(), BmdbError> {
    let due = &last.plan.due;
    let ended = sqlx::query_file_scalar!(
        "../../sql/work/complete.sql",
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
    .context("giving back a lease")?;
    if ended == 1 { Ok(()) } else { Err(BmdbError::LeaseLost) }
}

/// A text as the database accepts it: a text from a machine or a provider may contain NUL, the one character that no
/// database text can, and its work must end all the same.
pub(crate) fn strip_nul(text: String) -> String {
    if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text }
}
