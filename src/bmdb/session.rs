//! Sessions: leases of the right to work, and what a process knows of its own.
//!
//! Expiry is an event in the database, the committed update of `closed_at`. A
//! process must have stopped acting *before* that, so it counts a deadline of
//! its own: taken before the renewal was sent, on a clock that runs while the
//! machine is suspended, and a tenth shorter. When that passes, everything the
//! session held is cancelled here, whatever the database would say if it could
//! be asked.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::bmdb::connection::{Bmdb, Doing};
use crate::bmdb::error::BmdbError;
use crate::model::ids::{MachineId, ProcessId, SessionId};
use crate::model::process::Lane;

/// Time since boot, suspension included.
pub(crate) fn boot_time() -> Duration {
    let now = clock_gettime(ClockId::Boottime);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// Locks a mutex whose holder may have panicked: what it guards is plain data, whole at any time.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
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
    lost_because: OnceLock<String>,
    /// Claims under way whose rows may be in `work` without being in `live` yet.
    pub(crate) claiming: Mutex<u32>,
    pub(crate) live: Mutex<HashMap<(MachineId, Lane), LiveWork>>,
}

/// A work item of a session, as far as the keeper needs it.
#[derive(Clone, Debug)]
pub(crate) struct LiveWork {
    pub(crate) fence: i64,
    pub(crate) cancel: CancellationToken,
    pub(crate) because: Arc<OnceLock<String>>,
}

impl LiveWork {
    /// Tells the work to stop, and why. The first reason counts.
    pub(crate) fn stop(&self, because: &str) {
        if self.because.set(because.to_owned()).is_ok() {
            self.cancel.cancel();
        }
    }
}

impl Session {
    /// Its id.
    #[must_use]
    pub fn id(&self) -> SessionId {
        self.state.id
    }

    /// Cancelled when the session is over for this process.
    #[must_use]
    pub fn lost(&self) -> &CancellationToken {
        &self.state.lost
    }

    /// Why it is over, if it is.
    #[must_use]
    pub fn lost_because(&self) -> Option<&str> {
        self.state.lost_because.get().map(String::as_str)
    }

    /// How long this process may still act for it if no renewal succeeds.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        if self.state.lost.is_cancelled() {
            return Duration::ZERO;
        }
        lock(&self.state.deadline).saturating_sub(boot_time())
    }

    pub(crate) fn renewed(&self, sent_at: Duration) {
        let until = sent_at + self.state.interval.mul_f64(0.9);
        let mut deadline = lock(&self.state.deadline);
        *deadline = (*deadline).max(until);
    }

    pub(crate) fn lose(&self, because: &str) {
        if self.state.lost_because.set(because.to_owned()).is_err() {
            return;
        }
        // Whoever hears of the loss finds the work stopped. What is taken on between the two is stopped behind it.
        self.stop_all(because);
        self.state.lost.cancel();
        self.stop_all(because);
    }

    fn stop_all(&self, because: &str) {
        for work in lock(&self.state.live).values() {
            work.stop(because);
        }
    }
}

/// A work item to cancel in the database because whoever had it dropped it.
#[derive(Debug)]
pub(crate) struct Abandoned {
    pub(crate) session: Session,
    pub(crate) machine: MachineId,
    pub(crate) lane: Lane,
    pub(crate) fence: i64,
    pub(crate) because: String,
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
    pub(crate) abandoned: mpsc::UnboundedSender<Abandoned>,
    /// Work items handed to the canceller and not yet cancelled.
    pub(crate) pending: tokio::sync::watch::Sender<usize>,
}

impl Sessions {
    /// The sessions of a process, each renewed so as to last `interval`. Nothing is renewed, and
    /// nothing dropped is cancelled, until [`Keeper::keep`] runs.
    #[must_use]
    pub fn new(bmdb: Bmdb, process: ProcessId, interval: Duration) -> (Self, Keeper) {
        let (abandoned, receiver) = mpsc::unbounded_channel();
        let pending = tokio::sync::watch::Sender::new(0);
        let inner =
            SessionsInner { bmdb, process, interval, open: Mutex::new(HashMap::new()), abandoned, pending };
        let sessions = Self { inner: Arc::new(inner) };
        (sessions.clone(), Keeper { sessions, abandoned: receiver })
    }

    /// The database they stand in.
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
        lock(&self.inner.open).values().cloned().collect()
    }

    /// Starts a session for `component`.
    pub async fn start(&self, component: &str, details: serde_json::Value) -> Result<Session, BmdbError> {
        self.start_lasting(component, details, Duration::ZERO).await
    }

    /// The same, where what is done under the session takes so long that it has to last for `least` at the least.
    ///
    /// It is renewed as often as the others, and its machines and leases are free so much later once it is lost.
    pub async fn start_lasting(
        &self,
        component: &str,
        details: serde_json::Value,
        least: Duration,
    ) -> Result<Session, BmdbError> {
        let lasts = self.inner.interval.max(least);
        let id = SessionId::generate();
        let runtime_info = runtime_info(details);
        let (component, process) = (component.to_owned(), self.inner.process);
        let interval = i64::try_from(lasts.as_millis()).unwrap_or(i64::MAX);
        let sent_at = boot_time();
        self.inner
            .bmdb
            .statement("starting a session", move |pool| {
                let (component, runtime_info) = (component.clone(), runtime_info.clone());
                Box::pin(async move {
                    sqlx::query_file!(
                        "sql/session/start.sql",
                        id.0,
                        process.0,
                        component,
                        runtime_info,
                        interval
                    )
                    .execute(pool)
                    .await
                })
            })
            .await?;
        let state = SessionState {
            id,
            interval: lasts,
            deadline: Mutex::new(sent_at + lasts.mul_f64(0.9)),
            lost: CancellationToken::new(),
            lost_because: OnceLock::new(),
            claiming: Mutex::new(0),
            live: Mutex::new(HashMap::new()),
        };
        let session = Session { state: Arc::new(state) };
        lock(&self.inner.open).insert(id, session.clone());
        Ok(session)
    }

    /// Closes a session. One that still holds work is left to the reaper, so that the loss is told.
    pub async fn close(&self, session: &Session, reason: &str) -> Result<(), BmdbError> {
        let (id, reason) = (session.id(), reason.to_owned());
        let why = reason.clone();
        // Two statements: one that waits for the row and looks for work at once would see the row
        // as it is and the work as it was, and close the session under a claim that has not
        // committed yet.
        let closed = self
            .inner
            .bmdb
            .transact("closing a session", move |tx| {
                let why = why.clone();
                Box::pin(async move {
                    let what = "closing a session";
                    sqlx::query_file!("sql/session/lock.sql", id.0)
                        .fetch_optional(&mut *tx)
                        .await
                        .doing(what)?;
                    sqlx::query_file!("sql/session/close.sql", id.0, why).fetch_optional(tx).await.doing(what)
                })
            })
            .await;
        lock(&self.inner.open).remove(&id);
        session.lose(&reason);
        closed.map(drop)
    }

    /// Waits until every dropped work item has been cancelled in the database, or its session is over.
    pub async fn drained(&self) {
        let mut pending = self.inner.pending.subscribe();
        // The sender lives as long as `self`, so this cannot fail.
        drop(pending.wait_for(|count| *count == 0).await);
    }
}

/// The task's half of [`Sessions`]: see `keeper.rs`.
#[derive(Debug)]
pub struct Keeper {
    pub(crate) sessions: Sessions,
    pub(crate) abandoned: mpsc::UnboundedReceiver<Abandoned>,
}

impl Sessions {
    /// Adds what this process says of itself, under one of its sessions, for people who look at the table.
    pub async fn tell(&self, session: &Session, details: serde_json::Value) -> Result<(), BmdbError> {
        let id = session.id().0;
        self.inner
            .bmdb
            .statement("telling what a session is for", move |pool| {
                let details = details.clone();
                Box::pin(async move {
                    sqlx::query_file!("sql/session/merge_runtime_info.sql", id, details)
                        .execute(pool)
                        .await
                        .map(drop)
                })
            })
            .await
    }
}

/// Who holds a session: for people who look at the table.
fn runtime_info(mut details: serde_json::Value) -> serde_json::Value {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if let Some(object) = details.as_object_mut() {
        object.insert("host".into(), host.into());
        object.insert("pid".into(), std::process::id().into());
        object.insert("version".into(), env!("CARGO_PKG_VERSION").into());
    }
    details
}

/// Takes part in a transaction for a session: fails when it is over.
pub(crate) async fn guard(tx: &mut sqlx::PgConnection, session: SessionId) -> Result<(), BmdbError> {
    sqlx::query_file!("sql/session/guard.sql", session.0)
        .fetch_optional(tx)
        .await
        .doing("checking a session")?
        .map(drop)
        .ok_or(BmdbError::SessionOver)
}
