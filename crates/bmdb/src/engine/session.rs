//! Sessions: leases of the right to work, with a local deadline.
//!
//! Expiry is an event in the database, the committed update of `closed_at`. A process must have stopped acting *before*
//! that, so it has a deadline of its own: counted from before the renewal was sent, on a clock that runs while the
//! machine is suspended, and a tenth shorter. When it passes, everything that the session held is cancelled here,
//! whether or not the database can be reached.

use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Poll;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext};
use model::ids::{MachineId, ProcessId, SessionId};
use model::process::Lane;

/// How long a start without an answer waits until its row is closed.
const UNCONFIRMED_CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// Why a session is over for a process that did not renew it before its own deadline.
pub(crate) const NOT_RENEWED: &str = "it could not be renewed in time";

/// Time since boot, suspension included.
#[must_use]
pub fn boot_time() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// Locks a mutex whose holder may have panicked: the guarded value is plain data, consistent at any time.
pub(crate) fn lock_mutex<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One session of this process; cheap to clone.
#[derive(Clone, Debug)]
pub struct Session {
    pub(crate) state: Arc<SessionState>,
}

#[derive(Debug)]
pub(crate) struct SessionState {
    pub(crate) id: SessionId,
    pub(crate) interval: Duration,
    /// Boot time at which this process stops acting for the session.
    deadline: Mutex<Duration>,
    lost: CancellationToken,
    loss_reason: OnceLock<String>,
    /// Claims under way whose rows may be in `work` without being in `live` yet.
    pub(crate) claims_in_progress: Mutex<u32>,
    pub(crate) live_work: Mutex<HashMap<(MachineId, Lane), LiveWork>>,
}

/// A work item of a session, as far as the session renewer needs it.
#[derive(Clone, Debug)]
pub(crate) struct LiveWork {
    pub(crate) fence: i64,
    pub(crate) cancel: CancellationToken,
    pub(crate) stop_reason: Arc<OnceLock<String>>,
}

impl LiveWork {
    /// Stops the work, with a reason. The first reason counts.
    pub(crate) fn stop(&self, because: &str) {
        if self.stop_reason.set(because.to_owned()).is_ok() {
            self.cancel.cancel();
        }
    }
}

impl Session {
    /// Id of the session's row.
    #[must_use]
    pub fn id(&self) -> SessionId {
        self.state.id
    }

    /// Cancelled when the session is over for this process.
    #[must_use]
    pub fn lost(&self) -> &CancellationToken {
        &self.state.lost
    }

    /// Why it is over for this process; `None` if it is not.
    #[must_use]
    pub fn loss_reason(&self) -> Option<&str> {
        self.state.loss_reason.get().map(String::as_str)
    }

    /// How long this process may still act for it if no renewal succeeds.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        if self.state.lost.is_cancelled() {
            return Duration::ZERO;
        }
        lock_mutex(&self.state.deadline).saturating_sub(boot_time())
    }

    /// Runs `future` until it ends or the session is over for this process; `None` if it is over.
    ///
    /// [`Session::lost`] alone is too late after a freeze of this process: what `future` waits for has come meanwhile, and
    /// it would continue before the thread that renews sessions has looked at the clock. So the clock is read before each
    /// poll.
    pub async fn run_while_open<F: Future>(&self, future: F) -> Option<F::Output> {
        let mut future = pin!(future);
        let mut lost = pin!(self.state.lost.cancelled());
        poll_fn(|context| {
            if lost.as_mut().poll(context).is_ready() || self.remaining().is_zero() {
                return Poll::Ready(None);
            }
            future.as_mut().poll(context).map(Some)
        })
        .await
    }

    pub(crate) fn record_renewal(&self, sent_at: Duration) {
        let until = sent_at + self.state.interval.mul_f64(0.9);
        let mut deadline = lock_mutex(&self.state.deadline);
        *deadline = (*deadline).max(until);
    }

    pub(crate) fn mark_lost(&self, because: &str) {
        if self.state.loss_reason.set(because.to_owned()).is_err() {
            return;
        }
        // A task that waits for the loss finds the work stopped. Work that is claimed between the two calls is stopped
        // by the second.
        self.stop_all_work(because);
        self.state.lost.cancel();
        self.stop_all_work(because);
    }

    fn stop_all_work(&self, because: &str) {
        for work in lock_mutex(&self.state.live_work).values() {
            work.stop(because);
        }
    }
}

/// A work item to cancel in the database because its worker dropped it.
#[derive(Debug)]
pub(crate) struct AbandonedWork {
    pub(crate) session: Session,
    pub(crate) machine: MachineId,
    pub(crate) lane: Lane,
    pub(crate) fence: i64,
    pub(crate) reason: String,
}

/// All sessions of one process.
#[derive(Clone, Debug)]
pub struct Sessions {
    pub(crate) inner: Arc<SessionsInner>,
}

#[derive(Debug)]
pub(crate) struct SessionsInner {
    pub(crate) bmdb: Bmdb,
    pub(crate) process: ProcessId,
    pub(crate) interval: Duration,
    pub(crate) open: Mutex<HashMap<SessionId, Session>>,
    pub(crate) cancellations: mpsc::UnboundedSender<AbandonedWork>,
    /// Work items that were passed to the canceller and are not cancelled yet.
    pub(crate) pending_cancellations: tokio::sync::watch::Sender<usize>,
}

impl Sessions {
    /// The sessions of a process, each renewed so that it lasts `interval`. Nothing is renewed, and no dropped work is
    /// cancelled, until [`SessionRenewer::run`] runs.
    #[must_use]
    pub fn new(bmdb: Bmdb, process: ProcessId, interval: Duration) -> (Self, SessionRenewer) {
        let (abandoned, receiver) = mpsc::unbounded_channel();
        let pending = tokio::sync::watch::Sender::new(0);
        let inner = SessionsInner {
            bmdb,
            process,
            interval,
            open: Mutex::new(HashMap::new()),
            cancellations: abandoned,
            pending_cancellations: pending,
        };
        let sessions = Self { inner: Arc::new(inner) };
        (sessions.clone(), SessionRenewer { sessions, cancellations: receiver })
    }

    /// The database that the sessions are in.
    #[must_use]
    pub fn bmdb(&self) -> &Bmdb {
        &self.inner.bmdb
    }

    /// The process these sessions belong to.
    #[must_use]
    pub fn process(&self) -> ProcessId {
        self.inner.process
    }

    /// The sessions that are neither closed nor lost.
    pub(crate) fn open(&self) -> Vec<Session> {
        lock_mutex(&self.inner.open).values().cloned().collect()
    }

    /// Starts a session for `component`.
    pub async fn start(&self, component: &str, details: serde_json::Value) -> Result<Session, BmdbError> {
        self.start_lasting_at_least(component, details, Duration::ZERO).await
    }

    /// As [`Sessions::start`], for work that takes so long that the session has to last for `least` at least.
    ///
    /// It is renewed as often as the others, and its machines and leases are freed that much later once it is lost.
    pub async fn start_lasting_at_least(
        &self,
        component: &str,
        details: serde_json::Value,
        least: Duration,
    ) -> Result<Session, BmdbError> {
        let lasts = self.inner.interval.max(least);
        let id = SessionId::generate();
        let runtime_info = runtime_info(details);
        let (arguments, process) = ((component.to_owned(), runtime_info), self.inner.process);
        let interval = i64::try_from(lasts.as_millis()).unwrap_or(i64::MAX);
        let started = self
            .inner
            .bmdb
            .statement_with("starting a session", arguments, move |pool, (component, runtime_info)| {
                Box::pin(async move {
                    // Not before a connection was waited for: the session would be over here before it is in the
                    // database, and stay open there.
                    let sent_at = boot_time();
                    sqlx::query!(
                        "INSERT INTO session (session_id, process_id, component, runtime_info, interval_ms,
                             started_at, deadline) VALUES ($1, $2, $3, $4, $5::INT8, clock_timestamp(),
                             clock_timestamp() + $5::INT8 * INTERVAL '1 millisecond')",
                        id.0,
                        process.0,
                        component,
                        runtime_info,
                        interval
                    )
                    .execute(pool)
                    .await
                    .map(|_| sent_at)
                })
            })
            .await;
        let sent_at = match started {
            Ok(sent_at) => sent_at,
            Err(error) => {
                if matches!(error, BmdbError::UnknownOutcome(_) | BmdbError::TaskFailed { .. }) {
                    self.close_unconfirmed(id).await;
                }
                return Err(error);
            }
        };
        let state = SessionState {
            id,
            interval: lasts,
            deadline: Mutex::new(sent_at + lasts.mul_f64(0.9)),
            lost: CancellationToken::new(),
            loss_reason: OnceLock::new(),
            claims_in_progress: Mutex::new(0),
            live_work: Mutex::new(HashMap::new()),
        };
        let session = Session { state: Arc::new(state) };
        lock_mutex(&self.inner.open).insert(id, session.clone());
        Ok(session)
    }

    /// Closes a session. One that still has work is left to the reaper, which records the loss.
    pub async fn close(&self, session: &Session, reason: &str) -> Result<(), BmdbError> {
        let closed = self.close_row(session.id(), reason.to_owned()).await;
        lock_mutex(&self.inner.open).remove(&session.id());
        session.mark_lost(reason);
        closed
    }

    async fn close_row(&self, id: SessionId, reason: String) -> Result<(), BmdbError> {
        // Two statements: one that waits for the row and reads work at the same time would see the row as it is and the
        // work as it was, and close the session under a claim that has not committed yet.
        let closed = self
            .inner
            .bmdb
            .transact_with("closing a session", reason, move |tx, reason| {
                Box::pin(async move {
                    let what = "closing a session";
                    // This waits for every transaction that acts for the session. Each one locks the row FOR
                    // KEY SHARE, for which an UPDATE of closed_at alone would not wait.
                    sqlx::query!("SELECT session_id FROM session WHERE session_id = $1 FOR UPDATE", id.0)
                        .fetch_optional(&mut *tx)
                        .await
                        .context(what)?;
                    sqlx::query_file!("../../sql/session/close.sql", id.0, reason)
                        .fetch_optional(tx)
                        .await
                        .context(what)
                })
            })
            .await;
        closed.map(drop)
    }

    /// Closes a session that may have been started, although no answer came. Nobody works under it. Otherwise its row would
    /// stay open until its deadline, and longer if every shepherd has ended by then.
    async fn close_unconfirmed(&self, id: SessionId) {
        let closed = self.close_row(id, "the answer to its start was lost".to_owned());
        // Only the waiting is given up: the transaction continues in a task of its own.
        match tokio::time::timeout(UNCONFIRMED_CLOSE_LIMIT, closed).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(session = %id, %error, "cannot close a session that may have been started; the reaper will");
            }
            Err(_) => {
                tracing::warn!(session = %id, "a session that may have been started is not closed yet; the reaper will");
            }
        }
    }

    /// Waits until every dropped work item has been cancelled in the database, or its session is over.
    pub async fn wait_until_drained(&self) {
        let mut pending = self.inner.pending_cancellations.subscribe();
        // The sender lives as long as `self`, so this cannot fail.
        drop(pending.wait_for(|count| *count == 0).await);
    }
}

/// The task's half of [`Sessions`]: see `session_renewer.rs`.
#[derive(Debug)]
pub struct SessionRenewer {
    pub(crate) sessions: Sessions,
    pub(crate) cancellations: mpsc::UnboundedReceiver<AbandonedWork>,
}

impl Sessions {
    /// Adds information about this process to one of its sessions, for people who read the table.
    pub async fn update_runtime_info(
        &self,
        session: &Session,
        details: serde_json::Value,
    ) -> Result<(), BmdbError> {
        let id = session.id().0;
        self.inner
            .bmdb
            .statement_with("recording what a session is for", details, move |pool, details| {
                Box::pin(async move {
                    sqlx::query!(
                        "UPDATE session SET runtime_info = runtime_info || $2
                         WHERE session_id = $1 AND closed_at IS NULL",
                        id,
                        details
                    )
                    .execute(pool)
                    .await
                    .map(drop)
                })
            })
            .await
    }
}

/// The owner of a session, for people who read the table.
fn runtime_info(mut details: serde_json::Value) -> serde_json::Value {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if let Some(object) = details.as_object_mut() {
        object.insert("host".into(), host.into());
        object.insert("pid".into(), std::process::id().into());
        object.insert("version".into(), env!("CARGO_PKG_VERSION").into());
    }
    details
}

/// Guards a transaction by a session: fails when the session is over.
pub(crate) async fn guard_session(tx: &mut sqlx::PgConnection, session: SessionId) -> Result<(), BmdbError> {
    sqlx::query_file!("../../sql/session/guard.sql", session.0)
        .fetch_optional(tx)
        .await
        .context("checking a session")?
        .map(drop)
        .ok_or(BmdbError::SessionEnded)
}

/// The runtime information that a session stores about its process.
#[derive(Default)]
pub(crate) struct RuntimeInfo {
    pub(crate) host: Option<String>,
    pub(crate) pid: Option<i64>,
    pub(crate) version: Option<String>,
}

impl RuntimeInfo {
    pub(crate) fn of(info: Option<&serde_json::Value>) -> Self {
        let Some(info) = info else { return Self::default() };
        let text = |key: &str| info.get(key).and_then(serde_json::Value::as_str).map(str::to_owned);
        Self {
            host: text("host"),
            pid: info.get("pid").and_then(serde_json::Value::as_i64),
            version: text("version"),
        }
    }
}
