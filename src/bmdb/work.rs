//! Live work: one machine's lane, held under a session and a fence.
//!
//! [`Work`] is what a claim hands out. It is ended by exactly one of
//! [`Work::finish`], [`Work::fail`], [`Work::put_off`] and [`Work::cancel`],
//! which consume it; dropped in any other way, it is cancelled in the
//! background, and shutdown waits for that.
//!
//! The answer to a commit can be lost. Then history decides: an end with this
//! fence under this session is ours; a lease still held means that nothing
//! happened and it is tried again; anything else means that the lease was lost,
//! and nothing was written.

use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sqlx::PgConnection;
use tokio_util::sync::CancellationToken;

use crate::bmdb::change::{FactChange, apply};
use crate::bmdb::connection::Bmdb;
use crate::bmdb::ending::{Ending, end_in_database, storable};
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::{Snapshot, read};
use crate::bmdb::lease::{NamedLease, lock_lease};
use crate::bmdb::schedule::{DueRow, lock, lock_under, reschedule, tell};
use crate::bmdb::session::{Abandoned, LiveWork, Session, Sessions, lock as lock_mutex};
use crate::model::backoff::Backoff;
use crate::model::facts::Postponement;
use crate::model::ids::{MachineId, SessionId};
use crate::model::process::{Lane, Process};
use crate::model::time::Timestamp;

/// The pause before an end that could not be written is tried again; it doubles up to the longest.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// See [`FIRST_PAUSE`].
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Changes to write and lines of history to add, decided on a snapshot.
#[derive(Clone, Debug, Default)]
pub struct Decision<T> {
    /// Facts to change.
    pub changes: Vec<FactChange>,
    /// (event, detail) lines for the machine's history.
    pub events: Vec<(String, String)>,
    /// What the caller wants to know.
    pub answer: T,
}

/// The right to write under a lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lease {
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
    waited: Option<Duration>,
    taken: Instant,
    ended: bool,
}

impl Work {
    /// Takes charge of a work item that the database says is this session's.
    pub(crate) fn take(
        sessions: &Sessions,
        session: &Session,
        machine: MachineId,
        process: Process,
        fence: i64,
    ) -> Self {
        let live = LiveWork { fence, cancel: CancellationToken::new(), because: Arc::default() };
        lock_mutex(&session.state.live).insert((machine, process.lane()), live.clone());
        if session.lost().is_cancelled() {
            live.stop(session.lost_because().unwrap_or("the session is over"));
        }
        Self {
            sessions: sessions.clone(),
            session: session.clone(),
            machine,
            process,
            live,
            waited: None,
            taken: Instant::now(),
            ended: false,
        }
    }

    /// The same, claimed so many seconds after it became due.
    pub(crate) fn having_waited(mut self, seconds: Option<f64>) -> Self {
        self.waited = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        self
    }

    /// How long after it became due it was claimed; `None` when the answer to the claim was lost.
    #[must_use]
    pub fn waited(&self) -> Option<Duration> {
        self.waited
    }

    /// How long ago the claim was answered.
    #[must_use]
    pub fn held_for(&self) -> Duration {
        self.taken.elapsed()
    }

    /// The machine.
    #[must_use]
    pub fn machine(&self) -> MachineId {
        self.machine
    }

    /// The process.
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

    /// The database it stands in.
    #[must_use]
    pub fn bmdb(&self) -> &Bmdb {
        &self.sessions.inner.bmdb
    }

    /// Cancelled when the work must stop: its session is over, or the machine is not due for it any
    /// more.
    #[must_use]
    pub fn stop(&self) -> &CancellationToken {
        &self.live.cancel
    }

    /// Why it must stop, if it must.
    #[must_use]
    pub fn stop_reason(&self) -> Option<&str> {
        self.live.because.get().map(String::as_str)
    }

    /// How long an outward call may take that would take `limit` at the most, if it begins now.
    ///
    /// A machine whose session was lost is nobody else's before the session's end and the policy's
    /// outward limit after it. So a call that nobody can call back, and that nobody is there to cut
    /// off because the lease is renewed no more, must be over by then; what a machine itself refuses
    /// by its fence may take longer. Fails when none may begin: the work was told to stop, or its
    /// session is over.
    pub fn may_call_out(&self, limit: Duration) -> Result<Duration, BmdbError> {
        if self.live.cancel.is_cancelled() {
            return Err(BmdbError::LeaseLost);
        }
        let remaining = self.session.remaining();
        if remaining.is_zero() {
            return Err(BmdbError::SessionOver);
        }
        let (_, policy) = self.bmdb().policy();
        Ok(limit.min(remaining + policy.outward_limit.0))
    }

    /// Makes an outward call that takes `limit` at the most, if it may begin now, and cuts it off
    /// when [`Work::may_call_out`] says so.
    pub async fn call_out<F: Future>(&self, limit: Duration, call: F) -> Result<F::Output, BmdbError> {
        let granted = self.may_call_out(limit)?;
        tokio::time::timeout(granted, call).await.map_err(|_| BmdbError::CutOff { after: granted })
    }

    pub(crate) fn lease(&self) -> Lease {
        Lease { session: self.session.id(), lane: self.process.lane(), fence: self.live.fence }
    }

    /// What is known of the machine now.
    pub async fn snapshot(&self) -> Result<Snapshot, BmdbError> {
        self.bmdb().snapshot(self.machine).await
    }

    /// Changes facts in the middle of the work, decided on what is known under the lock.
    pub async fn record<T, F>(&self, decide: F) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: Fn(&Snapshot) -> Decision<T> + Send + Sync + 'static,
    {
        change_machine(self.bmdb(), Under::Work(self.lease()), self.machine, decide).await
    }

    /// Ends the work as done: clears the process's backoff and postponement, writes `changes`.
    pub async fn finish(self, changes: Vec<FactChange>, detail: impl Into<String>) -> Result<(), BmdbError> {
        self.end(Ending::Finished { changes, detail: storable(detail.into()) }).await
    }

    /// Ends the work undone, to be due again at `until`, without counting as a failure.
    #[track_caller]
    pub fn put_off(
        self,
        changes: Vec<FactChange>,
        until: Timestamp,
        reason: impl Into<String>,
    ) -> impl Future<Output = Result<(), BmdbError>> {
        let place = Location::caller();
        let decided_at = format!("{}:{}", place.file(), place.line());
        let wait = Postponement { until, reason: storable(reason.into()), decided_at };
        self.end(Ending::PutOff { changes, wait })
    }

    /// Ends the work as failed: grows the process's backoff (by `backoff`, or by policy) and writes
    /// `changes`.
    pub async fn fail(
        self,
        changes: Vec<FactChange>,
        cause: impl Into<String>,
        backoff: Option<Backoff>,
    ) -> Result<(), BmdbError> {
        let cause = storable(cause.into());
        self.end(Ending::Failed { changes, cause, backoff, roll: rand::random() }).await
    }

    /// Ends the work as if it had not begun.
    pub async fn cancel(mut self, because: impl Into<String>) -> Result<(), BmdbError> {
        let lease = self.lease();
        let because = storable(because.into());
        let mut pause = FIRST_PAUSE;
        loop {
            // Cancelling twice does no harm, so it does not matter whether an answer was only lost.
            let cancelled = cancel_in_database(
                self.bmdb(),
                lease.session,
                self.machine,
                lease.lane,
                lease.fence,
                &because,
            );
            match cancelled.await {
                Ok(_) => {
                    self.forget();
                    return Ok(());
                }
                Err(error) if error.is_transient() && !self.session.lost().is_cancelled() => {
                    tracing::debug!(machine = %self.machine, %error, "cannot cancel work; trying again");
                }
                // Drop hands it to the canceller, which tries until the session is over.
                Err(error) => return Err(error),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn forget(&mut self) {
        self.ended = true;
        let mut live = lock_mutex(&self.session.state.live);
        let key = (self.machine, self.process.lane());
        if live.get(&key).is_some_and(|known| known.fence == self.live.fence) {
            live.remove(&key);
        }
    }

    async fn end(mut self, ending: Ending) -> Result<(), BmdbError> {
        let mut pause = FIRST_PAUSE;
        loop {
            let error =
                match end_in_database(self.bmdb(), self.lease(), self.machine, self.process, &ending).await {
                    Ok(()) => {
                        self.forget();
                        return Ok(());
                    }
                    Err(error) => error,
                };
            match error {
                // Nothing was written, or it was and the answer is lost: history knows.
                BmdbError::LeaseLost | BmdbError::SessionOver | BmdbError::UnknownOutcome(_) => {}
                ref other if other.is_transient() && !self.session.lost().is_cancelled() => {}
                other => return Err(other),
            }
            match self.became_of_end().await {
                Ok(Became::Ours) => {
                    self.forget();
                    return Ok(());
                }
                Ok(Became::StillHeld) if !self.session.lost().is_cancelled() => {}
                Ok(Became::Lost | Became::StillHeld) => {
                    self.forget();
                    return Err(BmdbError::LeaseLost);
                }
                Err(unknown) if self.session.lost().is_cancelled() => {
                    self.forget();
                    return Err(unknown);
                }
                Err(_) => {}
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn became_of_end(&self) -> Result<Became, BmdbError> {
        let lease = self.lease();
        let what = "looking up how a work item ended";
        let machine = self.machine.0;
        let end = self
            .bmdb()
            .statement(what, move |pool| {
                Box::pin(async move {
                    sqlx::query_file!("sql/work/read_end.sql", machine, lease.lane.as_str(), lease.fence)
                        .fetch_optional(pool)
                        .await
                })
            })
            .await?;
        Ok(match end {
            None => Became::StillHeld,
            Some(row) => {
                let ours = row.session_id == Some(lease.session.0)
                    && matches!(row.event.as_str(), "Finished" | "Failed" | "PutOff");
                if ours { Became::Ours } else { Became::Lost }
            }
        })
    }
}

enum Became {
    Ours,
    StillHeld,
    Lost,
}

impl Drop for Work {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let because = self.stop_reason().unwrap_or("it was neither finished nor failed").to_owned();
        let lease = self.lease();
        self.forget();
        self.sessions.abandon(Abandoned {
            session: self.session.clone(),
            machine: self.machine,
            lane: lease.lane,
            fence: lease.fence,
            because,
        });
    }
}

/// Locks a machine's due rows under a lease. Fails when its session is over, or when none of them is held
/// by it.
pub(crate) async fn lock_leased(
    tx: &mut PgConnection,
    lease: Lease,
    machine: MachineId,
) -> Result<Vec<DueRow>, BmdbError> {
    let rows = lock_under(tx, lease.session, machine).await?;
    let held = rows.iter().any(|row| {
        row.lane == lease.lane && row.lease_session == Some(lease.session.0) && row.fence == lease.fence
    });
    if held { Ok(rows) } else { Err(BmdbError::LeaseLost) }
}

/// Cancels a work item, if the session still holds it. Says whether it did.
pub(crate) async fn cancel_in_database(
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
                    "sql/work/cancel.sql",
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
    /// Changes facts of a machine outside any work, decided on what is known under the lock.
    ///
    /// `decide` is pure: it may run again after a conflict.
    pub async fn change_machine<T, F>(&self, machine: MachineId, decide: F) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: Fn(&Snapshot) -> Decision<T> + Send + Sync + 'static,
    {
        change_machine(self, Under::Nobody, machine, decide).await
    }

    /// The same under a named lease: nothing is written once that is lost.
    pub async fn change_machine_under<T, F>(
        &self,
        lease: &NamedLease,
        machine: MachineId,
        decide: F,
    ) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: Fn(&Snapshot) -> Decision<T> + Send + Sync + 'static,
    {
        change_machine(self, Under::Named(lease.clone()), machine, decide).await
    }
}

/// The right by which facts are changed.
pub(crate) enum Under {
    /// An operator's.
    Nobody,
    /// That of the work on the machine.
    Work(Lease),
    /// That of a named thing.
    Named(NamedLease),
}

pub(crate) async fn change_machine<T, F>(
    bmdb: &Bmdb,
    under: Under,
    machine: MachineId,
    decide: F,
) -> Result<T, BmdbError>
where
    T: Send + 'static,
    F: Fn(&Snapshot) -> Decision<T> + Send + Sync + 'static,
{
    let (inner, decide, under) = (bmdb.clone(), Arc::new(decide), Arc::new(under));
    bmdb.transact("changing facts", move |tx| {
        let (bmdb, decide, under) = (inner.clone(), decide.clone(), under.clone());
        Box::pin(async move {
            let rows = match &*under {
                Under::Nobody => lock(tx, machine).await?,
                Under::Work(lease) => lock_leased(tx, *lease, machine).await?,
                Under::Named(lease) => {
                    lock_lease(tx, lease).await?;
                    lock(tx, machine).await?
                }
            };
            let decision = decide(&read(tx, machine).await?);
            if decision.changes.is_empty() && decision.events.is_empty() {
                return Ok(decision.answer);
            }
            for change in &decision.changes {
                apply(tx, machine, change).await?;
            }
            reschedule(&bmdb, tx, machine, &rows).await?;
            for (event, detail) in &decision.events {
                tell(tx, machine, event, detail).await?;
            }
            Ok(decision.answer)
        })
    })
    .await
}
