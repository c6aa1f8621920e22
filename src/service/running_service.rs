//! Running service: its tasks, and their graceful shutdown.
//!
//! Each part stops before the parts that it needs. No new work is claimed; work under way may finish within the grace
//! period; the rest is cancelled in the database; then the listeners, the other tasks and the sessions end. The renewal
//! of sessions ends last, because sessions must be renewed until then. The whole stop has one deadline
//! ([`stop_deadline`][crate::service::stop_deadline]).

use std::time::Duration;

use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::bmdb::engine::session::Sessions;
use crate::manager::failpoint;
use crate::service::listeners::Listeners;
use crate::service::stop_deadline::{StopDeadline, StopStep};

/// A service that was started and not stopped.
pub struct RunningService {
    /// Sessions of this process.
    pub(super) sessions: Sessions,
    /// Tasks that hold no work. They end after the workers and the listeners.
    pub(super) tasks: JoinSet<()>,
    /// Loops and other tasks that work under sessions. They end first.
    pub(super) workers: JoinSet<()>,
    /// The listeners, once they are started.
    pub(super) listeners: Option<Listeners>,
    /// Cancelled when no new work may be claimed.
    pub(super) drain: CancellationToken,
    /// Cancelled when work under way must stop.
    pub(super) abort: CancellationToken,
    renewal_task: JoinHandle<()>,
    stop_renewal: CancellationToken,
    grace: Duration,
}

impl RunningService {
    /// A service of which only the renewal of sessions runs. `stop_renewal` ends that task. `grace` is how long work
    /// under way may go on after a stop.
    pub(super) fn new(
        sessions: Sessions,
        renewal_task: JoinHandle<()>,
        stop_renewal: CancellationToken,
        grace: Duration,
    ) -> Self {
        Self {
            sessions,
            tasks: JoinSet::new(),
            workers: JoinSet::new(),
            listeners: None,
            drain: CancellationToken::new(),
            abort: CancellationToken::new(),
            renewal_task,
            stop_renewal,
            grace,
        }
    }

    /// The listeners, if any were started.
    #[must_use]
    pub fn listeners(&self) -> Option<&Listeners> {
        self.listeners.as_ref()
    }

    /// A token that makes a present or future stop skip its grace period.
    #[must_use]
    pub fn abort_token(&self) -> CancellationToken {
        self.abort.clone()
    }

    /// Stops everything. Returns when no work of this process is live and every session is closed, or when the steps
    /// have used up their time. The deadline that it returns is for what is stopped after it.
    pub async fn stop(mut self) -> StopDeadline {
        self.drain.cancel();
        failpoint::hit("shutdown", "draining");
        tokio::select! {
            () = join_all(&mut self.workers) => {}
            () = self.abort.cancelled() => {}
            () = tokio::time::sleep(self.grace) => self.abort.cancel(),
        }
        let deadline = StopDeadline::from_now();
        if deadline.limit(StopStep::Work, join_all(&mut self.workers)).await.is_none() {
            self.workers.abort_all();
        }
        failpoint::hit("shutdown", "idle");
        if let Some(listeners) = self.listeners.take() {
            // Listeners that are dropped have stopped listening.
            let _ = deadline.limit(StopStep::Listeners, listeners.stop()).await;
        }
        if deadline.limit(StopStep::Tasks, join_all(&mut self.tasks)).await.is_none() {
            self.tasks.abort_all();
        }
        let _ = deadline.limit(StopStep::Sessions, self.sessions.wait_until_drained()).await;
        failpoint::hit("shutdown", "drained");
        self.stop_renewal.cancel();
        match deadline.limit(StopStep::Sessions, &mut self.renewal_task).await {
            Some(Ok(())) => {}
            Some(Err(error)) => tracing::error!(%error, "the renewal of sessions ended early"),
            None => self.renewal_task.abort(),
        }
        deadline
    }
}

/// Waits until every task has ended.
async fn join_all(tasks: &mut JoinSet<()>) {
    while tasks.join_next().await.is_some() {}
}
