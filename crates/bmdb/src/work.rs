//! Live work: one claimed lane of a machine, and how it is completed, postponed, failed or cancelled.
//!
//! A claim returns [`Work`]. It is ended by exactly one of [`Work::finish`], [`Work::fail`], [`Work::postpone`] and
//! [`Work::cancel`], which consume it. If it is dropped in any other way, it is cancelled in the background, and
//! shutdown waits for that.
//!
//! The answer to a commit can be lost. Then history decides. An end with this fence under this session is ours. A lease
//! that is still held means that nothing happened, and the end is tried again. Anything else means that the lease was
//! lost, and nothing was written.

use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sqlx::PgConnection;
use tokio_util::sync::CancellationToken;

use crate::complete::{Completion, complete_work, strip_nul};
use crate::connection::Bmdb;
use crate::error::BmdbError;
use crate::fact_change::{FactChange, apply_fact_change};
use crate::facts::{MachineSnapshot, read_snapshot};
use crate::named_lease::{NamedLease, lock_named_lease};
use crate::schedule::{DueRow, lock_due_rows, lock_due_rows_for_session, record_event, reschedule_machine};
use crate::session::{AbandonedWork, LiveWork, Session, Sessions, lock_mutex};
use model::backoff::BackoffPolicy;
use model::facts::Postponement;
use model::ids::{MachineId, SessionId};
use model::process::{Lane, Process};
use model::time::Timestamp;

/// The first pause before an end that could not be written is tried again; it doubles up to [`MAX_RETRY_PAUSE`].
pub(crate) const MIN_RETRY_PAUSE: Duration = Duration::from_millis(20);
/// The longest such pause: see [`MIN_RETRY_PAUSE`].
pub(crate) const MAX_RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Changes to write and lines of history to add, decided on a snapshot.
#[derive(Clone, Debug, Default)]
pub struct Decision<T> {
    /// Changes of facts to apply.
    pub changes: Vec<FactChange>,
    /// (event, detail) lines for the machine's history.
    pub events: Vec<(String, String)>,
    /// The value returned to the caller.
    pub output: T,
}

/// The right to write under a lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkLease {
    pub(crate) session: SessionId,
    pub(crate) lane: Lane,
    pub(crate) fence: i64,
}

/// A live work item.
#[derive(Debug)]
pub struct Work {
    sessions: Sessions,
    session: Session,
    machine: MachineId,
    process: Process,
    live: LiveWork,
    queue_delay: Option<Duration>,
    claimed_at: Instant,
    ended: bool,
}

impl Work {
    /// Takes charge of a work item that the database has under this session.
    pub(crate) fn from_claim(
        sessions: &Sessions,
        session: &Session,
        machine: MachineId,
        process: Process,
        fence: i64,
    ) -> Self {
        let live = LiveWork { fence, cancel: CancellationToken::new(), stop_reason: Arc::default() };
        lock_mutex(&session.state.live_work).insert((machine, process.lane()), live.clone());
        if session.lost().is_cancelled() {
            live.stop(session.loss_reason().unwrap_or("the session is over"));
        }
        Self {
            sessions: sessions.clone(),
            session: session.clone(),
            machine,
            process,
            live,
            queue_delay: None,
            claimed_at: Instant::now(),
            ended: false,
        }
    }

    /// Sets how many seconds after it became due it was claimed.
    pub(crate) fn with_queue_delay(mut self, seconds: Option<f64>) -> Self {
        self.queue_delay = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        self
    }

    /// How long after it became due it was claimed; `None` when the answer to the claim was lost.
    #[must_use]
    pub fn queue_delay(&self) -> Option<Duration> {
        self.queue_delay
    }

    /// How long ago the claim was answered.
    #[must_use]
    pub fn time_since_claim(&self) -> Duration {
        self.claimed_at.elapsed()
    }

    /// Id of the machine.
    #[must_use]
    pub fn machine(&self) -> MachineId {
        self.machine
    }

    /// The process that the machine is due for.
    #[must_use]
    pub fn process(&self) -> Process {
        self.process
    }

    /// The fence: higher than that of any earlier claim of this machine's lane.
    #[must_use]
    pub fn fence(&self) -> i64 {
        self.live.fence
    }

    /// The session it is held under.
    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The database that the work item is in.
    #[must_use]
    pub fn bmdb(&self) -> &Bmdb {
        &self.sessions.inner.bmdb
    }

    /// Cancelled when the work must stop: its session is over, or the machine is not due for it any more.
    #[must_use]
    pub fn stop(&self) -> &CancellationToken {
        &self.live.cancel
    }

    /// Why it must stop; `None` if it need not.
    #[must_use]
    pub fn stop_reason(&self) -> Option<&str> {
        self.live.stop_reason.get().map(String::as_str)
    }

    /// How long an outward call that needs at most `limit` may take, if it begins now.
    ///
    /// A machine whose session was lost belongs to nobody else until the session's end plus the policy's outward limit.
    /// A call cannot be taken back, and once the lease is not renewed any more no process may be left to cut it off, so
    /// it must end by then. A call that the machine itself rejects by its fence may take longer. Fails when no call may
    /// begin: the work was stopped, or its session is over.
    pub fn outward_call_limit(&self, limit: Duration) -> Result<Duration, BmdbError> {
        if self.live.cancel.is_cancelled() {
            return Err(BmdbError::LeaseLost);
        }
        let remaining = self.session.remaining();
        if remaining.is_zero() {
            return Err(BmdbError::SessionEnded);
        }
        let (_, policy) = self.bmdb().policy();
        Ok(limit.min(remaining + policy.outward_limit.0))
    }

    /// Makes an outward call that takes at most `limit`, if it may begin now, and cuts it off after
    /// [`Work::outward_call_limit`].
    pub async fn run_outward_call<F: Future>(
        &self,
        limit: Duration,
        call: F,
    ) -> Result<F::Output, BmdbError> {
        let granted = self.outward_call_limit(limit)?;
        tokio::time::timeout(granted, call)
            .await
            .map_err(|_| BmdbError::OutwardCallTimedOut { after: granted })
    }

    pub(crate) fn lease(&self) -> WorkLease {
        WorkLease { session: self.session.id(), lane: self.process.lane(), fence: self.live.fence }
    }

    /// The machine's facts as they are now.
    pub async fn snapshot(&self) -> Result<MachineSnapshot, BmdbError> {
        self.bmdb().read_machine_snapshot(self.machine).await
    }

    /// Changes facts in the middle of the work, decided on a snapshot that is read under the lock.
    pub async fn record_changes<T, F>(&self, decide: F) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: Fn(&MachineSnapshot) -> Decision<T> + Send + Sync + 'static,
    {
        change_machine(self.bmdb(), WriteAuthority::Work(self.lease()), self.machine, decide).await
    }

    /// Ends the work as done: clears the process's backoff and postponement, and writes `changes`.
    pub async fn finish(self, changes: Vec<FactChange>, detail: impl Into<String>) -> Result<(), BmdbError> {
        self.complete(Completion::Finished { changes, detail: strip_nul(detail.into()) }).await
    }

    /// Ends the work undone. The machine is due again at `until`, and no failure is counted.
    #[track_caller]
    pub fn postpone(
        self,
        changes: Vec<FactChange>,
        until: Timestamp,
        reason: impl Into<String>,
    ) -> impl Future<Output = Result<(), BmdbError>> {
        let place = Location::caller();
        let decided_at = format!("{}:{}", place.file(), place.line());
        let wait = Postponement { until, reason: strip_nul(reason.into()), decided_at };
        self.complete(Completion::Postponed { changes, wait })
    }

    /// Ends the work as failed: grows the process's backoff (by `backoff`, or by policy) and writes
    /// `changes`.
    pub async fn fail(
        self,
        changes: Vec<FactChange>,
        cause: impl Into<String>,
        backoff: Option<BackoffPolicy>,
    ) -> Result<(), BmdbError> {
        let cause = strip_nul(cause.into());
        self.complete(Completion::Failed { changes, cause, backoff, jitter: rand::random() }).await
    }

    /// Ends the work as if it had not begun.
    pub async fn cancel(mut self, because: impl Into<String>) -> Result<(), BmdbError> {
        let lease = self.lease();
        let because = strip_nul(because.into());
        let mut pause = MIN_RETRY_PAUSE;
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
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_RETRY_PAUSE);
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

    async fn complete(mut self, ending: Completion) -> Result<(), BmdbError> {
        let mut pause = MIN_RETRY_PAUSE;
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
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_RETRY_PAUSE);
        }
    }

    async fn resolve_unknown_commit(&self) -> Result<CommitOutcome, BmdbError> {
        let lease = self.lease();
        let what = "looking up how a work item ended";
        let machine = self.machine.0;
        let end = self
            .bmdb()
            .statement(what, move |pool| {
                Box::pin(async move {
                    sqlx::query_file!(
                        "../../sql/work/read_end.sql",
                        machine,
                        lease.lane.as_str(),
                        lease.fence
                    )
                    .fetch_optional(pool)
                    .await
                })
            })
            .await?;
        Ok(match end {
            None => CommitOutcome::NotCommitted,
            Some(row) => {
                let ours = row.session_id == Some(lease.session.0)
                    && matches!(row.event.as_str(), "Finished" | "Failed" | "PutOff");
                if ours { CommitOutcome::Committed } else { CommitOutcome::LeaseLost }
            }
        })
    }
}

enum CommitOutcome {
    Committed,
    NotCommitted,
    LeaseLost,
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

/// Locks a machine's due rows under a lease. Fails when its session is over, or when it holds none of them.
pub(crate) async fn lock_due_rows_leased(
    tx: &mut PgConnection,
    lease: WorkLease,
    machine: MachineId,
) -> Result<Vec<DueRow>, BmdbError> {
    let rows = lock_due_rows_for_session(tx, lease.session, machine).await?;
    let held = rows.iter().any(|row| {
        row.lane == lease.lane && row.lease_session == Some(lease.session.0) && row.fence == lease.fence
    });
    if held { Ok(rows) } else { Err(BmdbError::LeaseLost) }
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
    let because = because.to_owned();
    let cancelled = bmdb
        .statement("cancelling work", move |pool| {
            let because = because.clone();
            Box::pin(async move {
                sqlx::query_file_scalar!(
                    "../../sql/work/cancel.sql",
                    session.0,
                    machine.0,
                    lane.as_str(),
                    fence,
                    because
                )
                .fetch_one(pool)
                .await
            })
        })
        .await?;
    Ok(cancelled > 0)
}

impl Bmdb {
    /// Changes facts of a machine outside any work, decided on a snapshot that is read under the lock.
    ///
    /// `decide` is pure: it may run again after a conflict.
    pub async fn change_machine<T, F>(&self, machine: MachineId, decide: F) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: Fn(&MachineSnapshot) -> Decision<T> + Send + Sync + 'static,
    {
        change_machine(self, WriteAuthority::Operator, machine, decide).await
    }

    /// The same under a named lease: nothing is written once the lease is lost.
    pub async fn change_machine_under_lease<T, F>(
        &self,
        lease: &NamedLease,
        machine: MachineId,
        decide: F,
    ) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: Fn(&MachineSnapshot) -> Decision<T> + Send + Sync + 'static,
    {
        change_machine(self, WriteAuthority::Named(lease.clone()), machine, decide).await
    }
}

/// The right to change facts.
pub(crate) enum WriteAuthority {
    /// The right of an operator's order.
    Operator,
    /// The right of the work on the machine.
    Work(WorkLease),
    /// The right of the holder of a named lease.
    Named(NamedLease),
}

pub(crate) async fn change_machine<T, F>(
    bmdb: &Bmdb,
    under: WriteAuthority,
    machine: MachineId,
    decide: F,
) -> Result<T, BmdbError>
where
    T: Send + 'static,
    F: Fn(&MachineSnapshot) -> Decision<T> + Send + Sync + 'static,
{
    let (inner, decide, under) = (bmdb.clone(), Arc::new(decide), Arc::new(under));
    bmdb.transact("changing facts", move |tx| {
        let (bmdb, decide, under) = (inner.clone(), decide.clone(), under.clone());
        Box::pin(async move {
            let rows = match &*under {
                WriteAuthority::Operator => lock_due_rows(tx, machine).await?,
                WriteAuthority::Work(lease) => lock_due_rows_leased(tx, *lease, machine).await?,
                WriteAuthority::Named(lease) => {
                    lock_named_lease(tx, lease).await?;
                    lock_due_rows(tx, machine).await?
                }
            };
            let decision = decide(&read_snapshot(tx, machine).await?);
            if decision.changes.is_empty() && decision.events.is_empty() {
                return Ok(decision.output);
            }
            for change in &decision.changes {
                apply_fact_change(tx, machine, change).await?;
            }
            reschedule_machine(&bmdb, tx, machine, &rows).await?;
            for (event, detail) in &decision.events {
                record_event(tx, machine, event, detail).await?;
            }
            Ok(decision.output)
        })
    })
    .await
}
