//! Ending a work item: completion in one transaction, cancellation, and lost answers to a commit.
//!
//! # Completion
//!
//! It is the statement sequence that runs most often, so it has as few statements as possible: lock the session and the
//! machine's rows; change the facts; read them; and, in one statement, write what the lane is due for next, release the
//! lease and record history. The read cannot be joined with anything: a statement that waits for a row sees that row
//! new and every other table old.
//!
//! # Unknown outcomes
//!
//! The answer to a commit can be lost. Then history decides. An end with this fence under this session is ours. A lease
//! that is still held means that nothing happened, and the end is tried again. Anything else means that the lease was
//! lost, and nothing was written.
//!
//! # Cancellation
//!
//! Cancelling releases the lease and changes no fact: the machine stays due as it was, and no failure is counted. Facts
//! that the work recorded in the middle stay, and its open intents end with an unknown outcome. Cancelling twice does
//! no harm. A work item that is dropped goes to the canceller task (`session_renewer.rs`), which tries until its
//! session is over.

use std::time::Duration;

use backoff::ExponentialBackoff;
use sqlx::PgConnection;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext};
use crate::engine::fact_change::{FactChange, apply_fact_change};
use crate::engine::facts::{MachineSnapshot, read_snapshot};
use crate::engine::policy::policy_at_version;
use crate::engine::schedule::{EndedLanePlan, reschedule_after_work};
use crate::engine::session::{AbandonedWork, lock_mutex};
use crate::engine::work::Work;
use crate::engine::work::lease::{WorkLease, lock_due_rows_leased};
use model::backoff::{BackoffFact, BackoffPolicy};
use model::event_name::{FAILED, FINISHED, POSTPONED};
use model::facts::Postponement;
use model::ids::{MachineId, SessionId};
use model::process::{Lane, Process};
use model::schedule::RULES_VERSION;

/// The delays before an end that could not be written is tried again. The shortest is 20 ms.
pub(crate) const END_BACKOFF: ExponentialBackoff =
    ExponentialBackoff { initial: Duration::from_millis(40), factor: 2.0, max: Duration::from_secs(1) };

/// How a work item ends.
#[derive(Clone, Debug)]
pub(super) enum Completion {
    /// Done, with the facts it changed and a detail for history.
    Finished { changes: Vec<FactChange>, detail: String },
    /// Not done, without having failed.
    Postponed { changes: Vec<FactChange>, wait: Postponement },
    /// Failed. `jitter` is uniform in 0..1; `backoff` overrides the policy's.
    Failed { changes: Vec<FactChange>, cause: String, backoff: Option<BackoffPolicy>, jitter: f64 },
}

enum CommitOutcome {
    Committed,
    NotCommitted,
    LeaseLost,
}

impl Work {
    /// Ends the work as if it had not begun.
    pub async fn cancel(mut self, because: impl Into<String>) -> Result<(), BmdbError> {
        let lease = self.lease();
        let because = strip_nul(because.into());
        let mut failures = 0_u32;
        loop {
            // Cancelling twice does no harm, so it does not matter whether an answer was only lost.
            let cancelled =
                cancel_work(self.bmdb(), lease.session, self.machine, lease.lane, lease.fence, &because);
            match cancelled.await {
                Ok(_) => {
                    self.mark_ended();
                    return Ok(());
                }
                Err(error) if error.is_transient() && !self.session.lost().is_cancelled() => {
                    tracing::debug!(machine = %self.machine, %error, "cannot cancel work; trying again");
                }
                // Drop passes it to the canceller, which tries until the session is over.
                Err(error) => return Err(error),
            }
            failures = failures.saturating_add(1);
            tokio::time::sleep(END_BACKOFF.delay(failures, rand::random())).await;
        }
    }

    fn mark_ended(&mut self) {
        self.ended = true;
        let mut live = lock_mutex(&self.session.state.live_work);
        let key = (self.machine, self.process.lane());
        if live.get(&key).is_some_and(|known| known.fence == self.live.fence) {
            live.remove(&key);
        }
    }

    pub(super) async fn complete(mut self, ending: Completion) -> Result<(), BmdbError> {
        let mut failures = 0_u32;
        loop {
            let error =
                match complete_work(self.bmdb(), self.lease(), self.machine, self.process, &ending).await {
                    Ok(()) => {
                        self.mark_ended();
                        return Ok(());
                    }
                    Err(error) => error,
                };
            match error {
                // Nothing was written, or it was and the answer was lost: history decides.
                BmdbError::LeaseLost | BmdbError::SessionEnded | BmdbError::UnknownOutcome(_) => {}
                ref other if other.is_transient() && !self.session.lost().is_cancelled() => {}
                other => return Err(other),
            }
            match self.resolve_unknown_commit().await {
                Ok(CommitOutcome::Committed) => {
                    self.mark_ended();
                    return Ok(());
                }
                Ok(CommitOutcome::NotCommitted) if !self.session.lost().is_cancelled() => {}
                Ok(CommitOutcome::LeaseLost | CommitOutcome::NotCommitted) => {
                    self.mark_ended();
                    return Err(BmdbError::LeaseLost);
                }
                Err(unknown) if self.session.lost().is_cancelled() => {
                    self.mark_ended();
                    return Err(unknown);
                }
                Err(_) => {}
            }
            failures = failures.saturating_add(1);
            tokio::time::sleep(END_BACKOFF.delay(failures, rand::random())).await;
        }
    }

    async fn resolve_unknown_commit(&self) -> Result<CommitOutcome, BmdbError> {
        let lease = self.lease();
        let what = "looking up how a work item ended";
        let machine = self.machine.0;
        let end = self
            .bmdb()
            .statement(what, move |pool| {
                Box::pin(
                    sqlx::query!(
                        "SELECT event, session_id FROM history
                         WHERE machine_id = $1 AND lane = $2 AND fence = $3 AND edge = 'end'",
                        machine,
                        lease.lane.as_str(),
                        lease.fence
                    )
                    .fetch_optional(pool),
                )
            })
            .await?;
        Ok(match end {
            None => CommitOutcome::NotCommitted,
            Some(row) => {
                let ours = row.session_id == Some(lease.session.0)
                    && matches!(row.event.as_str(), FINISHED | FAILED | POSTPONED);
                if ours { CommitOutcome::Committed } else { CommitOutcome::LeaseLost }
            }
        })
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let because = self.stop_reason().unwrap_or("it was neither finished nor failed").to_owned();
        let lease = self.lease();
        self.mark_ended();
        self.sessions.enqueue_cancellation(AbandonedWork {
            session: self.session.clone(),
            machine: self.machine,
            lane: lease.lane,
            fence: lease.fence,
            reason: because,
        });
    }
}

/// Cancels a work item, if the session still holds it. Returns whether it did.
pub(crate) async fn cancel_work(
    bmdb: &Bmdb,
    session: SessionId,
    machine: MachineId,
    lane: Lane,
    fence: i64,
    because: &str,
) -> Result<bool, BmdbError> {
    let cancelled = bmdb
        .statement_with("cancelling work", because.to_owned(), move |pool, because| {
            Box::pin(
                sqlx::query_file_scalar!(
                    "../../sql/work/cancel.sql",
                    session.0,
                    machine.0,
                    lane.as_str(),
                    fence,
                    because
                )
                .fetch_one(pool),
            )
        })
        .await?;
    Ok(cancelled > 0)
}

/// Completes the work item that `lease` holds, if it still does.
async fn complete_work(
    bmdb: &Bmdb,
    lease: WorkLease,
    machine: MachineId,
    process: Process,
    ending: &Completion,
) -> Result<(), BmdbError> {
    let arguments = (bmdb.clone(), ending.clone());
    bmdb.transact_with("ending work", arguments, move |tx, (bmdb, ending)| {
        Box::pin(async move {
            let rows = lock_due_rows_leased(tx, lease, machine).await?;
            let (event, detail, snapshot) = match ending.clone() {
                Completion::Finished { changes, detail } => {
                    (FINISHED, detail, apply_finished(tx, machine, process, &changes).await?)
                }
                Completion::Postponed { mut changes, wait } => {
                    let detail = wait.reason.clone();
                    changes.push(FactChange::Postponed(process, wait));
                    (POSTPONED, detail, apply_and_read(tx, machine, &changes).await?)
                }
                Completion::Failed { mut changes, cause, backoff, jitter: roll } => {
                    let before = read_snapshot(tx, machine).await?;
                    // By the version in the row, not by the policy read last: a process that has only just connected
                    // knows nothing but the defaults.
                    let policy = policy_at_version(bmdb, tx, before.policy_version).await?;
                    let backoff = backoff.unwrap_or_else(|| policy.backoff_of(process));
                    let previous = before.facts.backoffs.get(&process);
                    let fact =
                        BackoffFact::after_failure(previous, &backoff, cause.clone(), before.now, roll);
                    changes.push(FactChange::Backoff(process, fact));
                    changes.push(FactChange::PostponementCleared(process));
                    (FAILED, cause, apply_and_read(tx, machine, &changes).await?)
                }
            };
            let last = reschedule_after_work(process, bmdb, tx, &rows, snapshot).await?;
            if matches!(process, Process::Recovery | Process::Retirement | Process::Power) {
                // Workers that take steps resolve them themselves, unless that failed.
                sqlx::query!(
                    "UPDATE intent
                     SET settled_at = clock_timestamp(), outcome = 'unknown: it was not written down'
                     WHERE machine_id = $1 AND session_id = $2 AND fence = $3 AND settled_at IS NULL",
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
pub(super) fn strip_nul(text: String) -> String {
    if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text }
}
