//! Work items: one claimed lane of a machine, from the claim to its end.
//!
//! A claim returns [`Work`]. It is ended by exactly one of [`Work::finish`], [`Work::fail`], [`Work::postpone`] and
//! [`Work::cancel`], which consume it. If it is dropped in any other way, it is cancelled in the background, and
//! shutdown waits for that.
//!
//! This file is what a worker uses. `ending` is the private half: the transactions and retries by which work ends.
//! `lease` is the right to write that the other transactions of a worker check.
//!
//! # Fencing
//!
//! Each claim of a lane has a fence, which grows with every claim. Every transaction of a worker locks the machine's
//! due rows and checks that its session holds the lane with this fence. So a worker that lost its lease, for whatever
//! reason, writes nothing any more. Outward calls cannot be checked by the database: [`Work::outward_call_limit`]
//! bounds them by the time for which nobody else can have the machine.

use std::future::poll_fn;
use std::panic::Location;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::connection::Bmdb;
use crate::connection::error::BmdbError;
use crate::engine::change_machine::{Decision, WriteAuthority, change_machine};
use crate::engine::fact_change::FactChange;
use crate::engine::facts::MachineSnapshot;
use crate::engine::session::{LiveWork, NOT_RENEWED, Session, Sessions, lock_mutex};
use crate::engine::work::ending::{Completion, strip_nul};
use crate::engine::work::lease::WorkLease;
use model::backoff::BackoffPolicy;
use model::facts::Postponement;
use model::ids::MachineId;
use model::process::Process;
use model::time::Timestamp;

pub(crate) mod ending;
pub(crate) mod lease;

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
        let until = tokio::time::Instant::now() + granted;
        let mut call = pin!(call);
        // A timeout alone lets the call go on before it looks at the clock. After a freeze of this process that would
        // send what waited for an answer of before.
        let before_limit = poll_fn(|context| {
            if tokio::time::Instant::now() >= until {
                return Poll::Pending;
            }
            call.as_mut().poll(context)
        });
        tokio::time::timeout_at(until, before_limit)
            .await
            .map_err(|_| BmdbError::OutwardCallTimedOut { after: granted })
    }

    /// Runs the handler of this work until it ends or must stop. `None` if it must: [`Work::stop_reason`] has the reason.
    ///
    /// It is not polled again once the session is over, even if nothing has cancelled [`Work::stop`] yet: see
    /// [`Session::run_while_open`].
    pub async fn run_while_held<F: Future>(&self, handler: F) -> Option<F::Output> {
        tokio::select! {
            biased;
            () = self.live.cancel.cancelled() => None,
            outcome = self.session.run_while_open(handler) => {
                if outcome.is_none() {
                    self.live.stop(self.session.loss_reason().unwrap_or(NOT_RENEWED));
                }
                outcome
            }
        }
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
}
