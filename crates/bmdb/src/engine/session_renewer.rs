//! Runs session renewal and reconciles held work with the database.
//!
//! Sessions are renewed on a thread of their own (`renewal_thread.rs`). After each round, the work that the database
//! has under the sessions is compared with the work of the process. This is apart from the renewal because it uses the
//! common pool and runtime, which others may have exhausted:
//!
//! * work whose schedule has changed (an operator's hold, a retirement) is stopped;
//! * work of the process that the database does not have any more is stopped;
//! * work that no worker here knows, left behind by a claim whose answer was lost, is cancelled.
//!
//! The same task cancels work items that were dropped without being ended.

use std::collections::HashSet;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::connection::Bmdb;
use crate::connection::error::BmdbError;
use crate::engine::renewal_thread::{self, RenewalSignals};
use crate::engine::session::{AbandonedWork, Session, SessionRenewer, Sessions, lock_mutex};
use crate::engine::work::ending::{END_BACKOFF, cancel_work};
use model::ids::{MachineId, SessionId};
use model::process::Lane;

impl SessionRenewer {
    /// Starts renewing at once. The returned future reconciles and cancels until `stop`; it then cancels dropped work
    /// before it ends, which takes no longer than the sessions last. If it is dropped instead of awaited to its end,
    /// renewing ends too.
    ///
    /// Stop it only after everything that holds a session has ended: a session that is still open then is lost. Fails
    /// when the thread for renewing cannot be started.
    pub fn run(self, stop: &CancellationToken) -> Result<impl Future<Output = ()> + Send + use<>, BmdbError> {
        // A child token, because we must not cancel `stop` for others.
        let signals = RenewalSignals { stop: stop.child_token(), ..RenewalSignals::default() };
        renewal_thread::start_thread(self.sessions.clone(), signals.clone())?;
        let over = signals.shut_down.clone().drop_guard();
        Ok(async move {
            self.reconcile_until_stopped(&signals).await;
            drop(over);
            signals.ended.cancelled().await;
        })
    }

    async fn reconcile_until_stopped(mut self, signals: &RenewalSignals) {
        let mut comparing: JoinSet<()> = JoinSet::new();
        let mut cancelling: JoinSet<()> = JoinSet::new();
        loop {
            tokio::select! {
                () = signals.stop.cancelled() => break,
                () = signals.ended.cancelled() => {
                    tracing::error!("the thread that renews sessions ended in the middle");
                    break;
                }
                Some(abandoned) = self.cancellations.recv() => {
                    cancelling.spawn(cancel_with_retry(self.sessions.clone(), abandoned));
                }
                () = signals.renewed.notified(), if comparing.is_empty() => {
                    comparing.spawn(reconcile_with_timeout(self.sessions.clone()));
                }
                Some(_) = comparing.join_next() => {}
                Some(_) = cancelling.join_next() => {}
            }
        }
        self.cancellations.close();
        while let Some(abandoned) = self.cancellations.recv().await {
            cancelling.spawn(cancel_with_retry(self.sessions.clone(), abandoned));
        }
        // With the database away this ends when the sessions are over, which the thread still detects.
        while cancelling.join_next().await.is_some() {}
    }
}

async fn reconcile_with_timeout(sessions: Sessions) {
    // Only the waiting is given up here: the statements run in tasks of their own.
    let limit = sessions.inner.interval.max(Duration::from_secs(5));
    let look = async {
        if let Err(error) = reconcile_work(&sessions).await {
            tracing::warn!(%error, "cannot compare held work with the database");
        }
        if let Err(error) = sessions.inner.bmdb.read_policy().await {
            tracing::warn!(%error, "cannot read the policy");
        }
    };
    if tokio::time::timeout(limit, look).await.is_err() {
        tracing::warn!("comparing held work with the database was not answered within {limit:?}");
    }
}

async fn reconcile_work(sessions: &Sessions) -> Result<(), BmdbError> {
    let open = sessions.open();
    let mut claiming: HashSet<SessionId> = sessions_with_claims(&open);
    let known: HashSet<(SessionId, MachineId, Lane, i64)> = local_work(&open);
    let found = list_session_work(&sessions.inner.bmdb, &open).await?;
    claiming.extend(sessions_with_claims(&open));
    let mut present = HashSet::new();
    for row in found {
        let Some(session) = open.iter().find(|session| session.id() == row.session) else { continue };
        present.insert((row.session, row.machine, row.lane, row.fence));
        let live = lock_mutex(&session.state.live_work).get(&(row.machine, row.lane)).cloned();
        match live {
            Some(live) if live.fence == row.fence => {
                if row.due_process.as_deref() != Some(row.process.as_str()) {
                    live.stop(&format!(
                        "the machine is not due for {} any more: {}",
                        row.process, row.reason
                    ));
                }
            }
            // It may have been finished between our query and this line, or belong to a claim whose answer is still on
            // its way.
            _ if claiming.contains(&row.session) => {}
            _ => cancel_unknown_work(sessions, session, &row),
        }
    }
    for (id, machine, lane, fence) in known.difference(&present) {
        let Some(session) = open.iter().find(|session| session.id() == *id) else { continue };
        let live = lock_mutex(&session.state.live_work).get(&(*machine, *lane)).cloned();
        if let Some(live) = live.filter(|live| live.fence == *fence) {
            live.stop("the database says that the lease is gone");
        }
    }
    Ok(())
}

fn cancel_unknown_work(sessions: &Sessions, session: &Session, row: &SessionWorkRow) {
    tracing::warn!(machine = %row.machine, lane = %row.lane, fence = row.fence, "cancelling work that nobody here knows");
    sessions.enqueue_cancellation(AbandonedWork {
        session: session.clone(),
        machine: row.machine,
        lane: row.lane,
        fence: row.fence,
        reason: "claimed, but the answer to the claim was lost".into(),
    });
}

fn sessions_with_claims(open: &[Session]) -> HashSet<SessionId> {
    open.iter()
        .filter(|session| *lock_mutex(&session.state.claims_in_progress) > 0)
        .map(Session::id)
        .collect()
}

fn local_work(open: &[Session]) -> HashSet<(SessionId, MachineId, Lane, i64)> {
    open.iter()
        .flat_map(|session| {
            let live = lock_mutex(&session.state.live_work);
            live.iter()
                .map(|((machine, lane), work)| (session.id(), *machine, *lane, work.fence))
                .collect::<Vec<_>>()
        })
        .collect()
}

pub(crate) struct SessionWorkRow {
    pub(crate) session: SessionId,
    pub(crate) machine: MachineId,
    pub(crate) lane: Lane,
    pub(crate) fence: i64,
    pub(crate) process: String,
    due_process: Option<String>,
    reason: String,
}

/// The work that the database has under these sessions.
pub(crate) async fn list_session_work(
    bmdb: &Bmdb,
    sessions: &[Session],
) -> Result<Vec<SessionWorkRow>, BmdbError> {
    let ids: Vec<Uuid> = sessions.iter().map(|session| session.id().0).collect();
    let rows = bmdb
        .statement_with("reading what sessions hold", ids, move |pool, ids| {
            Box::pin(sqlx::query_file!("../../sql/work/list_of_sessions.sql", ids).fetch_all(pool))
        })
        .await?;
    rows.into_iter()
        .filter(|row| row.is_leased)
        .map(|row| {
            Ok(SessionWorkRow {
                session: SessionId(row.session_id),
                machine: MachineId(row.machine_id),
                lane: row.lane.parse().map_err(|error| BmdbError::Corrupt(format!("{error}")))?,
                fence: row.fence,
                process: row.process,
                due_process: row.due_process,
                reason: row.reason,
            })
        })
        .collect()
}

impl Sessions {
    /// Passes a work item to the canceller.
    pub(crate) fn enqueue_cancellation(&self, abandoned: AbandonedWork) {
        self.inner.pending_cancellations.send_modify(|count| *count += 1);
        if self.inner.cancellations.send(abandoned).is_err() {
            // The session renewer has stopped: the session is not renewed either, and the reaper frees it.
            self.inner.pending_cancellations.send_modify(|count| *count -= 1);
        }
    }
}

async fn cancel_with_retry(sessions: Sessions, abandoned: AbandonedWork) {
    let AbandonedWork { session, machine, lane, fence, reason: because } = abandoned;
    let mut failures = 0_u32;
    loop {
        match cancel_work(&sessions.inner.bmdb, session.id(), machine, lane, fence, &because).await {
            Ok(_) => break,
            Err(error) if session.lost().is_cancelled() => {
                tracing::warn!(%machine, %lane, fence, %error, "left to the reaper");
                break;
            }
            Err(error) => {
                tracing::warn!(%machine, %lane, fence, %error, "cannot cancel work; trying again");
                failures = failures.saturating_add(1);
                tokio::time::sleep(END_BACKOFF.delay(failures, rand::random())).await;
            }
        }
    }
    sessions.inner.pending_cancellations.send_modify(|count| *count -= 1);
}
