//! Keeping a process's sessions alive, and its work in step with the database.
//!
//! Sessions are renewed on a thread of their own (`renewal.rs`). After each
//! round, and apart from it because it uses the common pool and runtime, which
//! others may have exhausted, what the database says the sessions hold is
//! compared with what the process thinks:
//!
//! * work whose schedule now says something else (an operator's hold, a retire)
//!   is told to stop;
//! * work the process thinks it has and the database says it has not is told to
//!   stop;
//! * work that nobody here knows, left behind by a claim whose answer was lost,
//!   is cancelled.
//!
//! The same task cancels work items that were dropped without being ended.

use std::collections::HashSet;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::renewal::{self, Signals};
use crate::bmdb::session::{Abandoned, Keeper, Session, Sessions, lock};
use crate::bmdb::work::{FIRST_PAUSE, LONGEST_PAUSE, cancel_in_database};
use crate::model::ids::{MachineId, SessionId};
use crate::model::process::Lane;

impl Keeper {
    /// Starts renewing at once; what it returns compares and cancels until `stop`, and then cancels
    /// what was dropped before it ends, which takes no longer than the sessions last. Dropped instead
    /// of awaited to its end, it ends the renewing too.
    ///
    /// Stop it only after everything that holds a session has ended: a session that is still open
    /// then is lost. Fails when the thread for renewing cannot be started.
    pub fn keep(
        self,
        stop: &CancellationToken,
    ) -> Result<impl Future<Output = ()> + Send + use<>, BmdbError> {
        // Of its own, so that the end of `stop` for others is not ours to bring about.
        let signals = Signals { stop: stop.child_token(), ..Signals::default() };
        renewal::start(self.sessions.clone(), signals.clone())?;
        let over = signals.over.clone().drop_guard();
        Ok(async move {
            self.attend(&signals).await;
            drop(over);
            signals.ended.cancelled().await;
        })
    }

    async fn attend(mut self, signals: &Signals) {
        let mut comparing: JoinSet<()> = JoinSet::new();
        let mut cancelling: JoinSet<()> = JoinSet::new();
        loop {
            tokio::select! {
                () = signals.stop.cancelled() => break,
                () = signals.ended.cancelled() => {
                    tracing::error!("the thread that renews sessions ended in the middle");
                    break;
                }
                Some(abandoned) = self.abandoned.recv() => {
                    cancelling.spawn(cancel_until_over(self.sessions.clone(), abandoned));
                }
                () = signals.renewed.notified(), if comparing.is_empty() => {
                    comparing.spawn(compare_in_time(self.sessions.clone()));
                }
                Some(_) = comparing.join_next() => {}
                Some(_) = cancelling.join_next() => {}
            }
        }
        self.abandoned.close();
        while let Some(abandoned) = self.abandoned.recv().await {
            cancelling.spawn(cancel_until_over(self.sessions.clone(), abandoned));
        }
        // With the database away this ends when the sessions are over, which the thread still sees.
        while cancelling.join_next().await.is_some() {}
    }
}

async fn compare_in_time(sessions: Sessions) {
    // What is given up here is the waiting: the statements run in tasks of their own.
    let limit = sessions.inner.interval.max(Duration::from_secs(5));
    let look = async {
        if let Err(error) = compare(&sessions).await {
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

async fn compare(sessions: &Sessions) -> Result<(), BmdbError> {
    let open = sessions.open();
    let mut claiming: HashSet<SessionId> = claiming_now(&open);
    let known: HashSet<(SessionId, MachineId, Lane, i64)> = held(&open);
    let found = rows_of(&sessions.inner.bmdb, &open).await?;
    claiming.extend(claiming_now(&open));
    let mut present = HashSet::new();
    for row in found {
        let Some(session) = open.iter().find(|session| session.id() == row.session) else { continue };
        present.insert((row.session, row.machine, row.lane, row.fence));
        let live = lock(&session.state.live).get(&(row.machine, row.lane)).cloned();
        match live {
            Some(live) if live.fence == row.fence => {
                if row.due_process.as_deref() != Some(row.process.as_str()) {
                    live.stop(&format!(
                        "the machine is not due for {} any more: {}",
                        row.process, row.reason
                    ));
                }
            }
            // It may have been finished between our query and this line, or be a claim whose
            // answer is still on its way.
            _ if claiming.contains(&row.session) => {}
            _ => adopt_and_cancel(sessions, session, &row),
        }
    }
    for (id, machine, lane, fence) in known.difference(&present) {
        let Some(session) = open.iter().find(|session| session.id() == *id) else { continue };
        let live = lock(&session.state.live).get(&(*machine, *lane)).cloned();
        if let Some(live) = live.filter(|live| live.fence == *fence) {
            live.stop("the database says that the lease is gone");
        }
    }
    Ok(())
}

fn adopt_and_cancel(sessions: &Sessions, session: &Session, row: &HeldRow) {
    tracing::warn!(machine = %row.machine, lane = %row.lane, fence = row.fence, "cancelling work that nobody here knows");
    sessions.abandon(Abandoned {
        session: session.clone(),
        machine: row.machine,
        lane: row.lane,
        fence: row.fence,
        because: "claimed, but the answer to the claim was lost".into(),
    });
}

fn claiming_now(open: &[Session]) -> HashSet<SessionId> {
    open.iter().filter(|session| *lock(&session.state.claiming) > 0).map(Session::id).collect()
}

fn held(open: &[Session]) -> HashSet<(SessionId, MachineId, Lane, i64)> {
    open.iter()
        .flat_map(|session| {
            let live = lock(&session.state.live);
            live.iter()
                .map(|((machine, lane), work)| (session.id(), *machine, *lane, work.fence))
                .collect::<Vec<_>>()
        })
        .collect()
}

pub(crate) struct HeldRow {
    pub(crate) session: SessionId,
    pub(crate) machine: MachineId,
    pub(crate) lane: Lane,
    pub(crate) fence: i64,
    pub(crate) process: String,
    due_process: Option<String>,
    reason: String,
}

/// What the database says that these sessions hold.
pub(crate) async fn rows_of(bmdb: &Bmdb, sessions: &[Session]) -> Result<Vec<HeldRow>, BmdbError> {
    let ids: Vec<Uuid> = sessions.iter().map(|session| session.id().0).collect();
    let rows = bmdb
        .statement("reading what sessions hold", move |pool| {
            let ids = ids.clone();
            Box::pin(
                async move { sqlx::query_file!("sql/work/list_of_sessions.sql", &ids).fetch_all(pool).await },
            )
        })
        .await?;
    rows.into_iter()
        .filter(|row| row.held)
        .map(|row| {
            Ok(HeldRow {
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
    /// Hands a work item to the canceller.
    pub(crate) fn abandon(&self, abandoned: Abandoned) {
        self.inner.pending.send_modify(|count| *count += 1);
        if self.inner.abandoned.send(abandoned).is_err() {
            // The keeper has stopped: the session is not renewed either, and the reaper frees it.
            self.inner.pending.send_modify(|count| *count -= 1);
        }
    }
}

async fn cancel_until_over(sessions: Sessions, abandoned: Abandoned) {
    let Abandoned { session, machine, lane, fence, because } = abandoned;
    let mut pause = FIRST_PAUSE;
    loop {
        match cancel_in_database(&sessions.inner.bmdb, session.id(), machine, lane, fence, &because).await {
            Ok(_) => break,
            Err(error) if session.lost().is_cancelled() => {
                tracing::warn!(%machine, %lane, fence, %error, "left to the reaper");
                break;
            }
            Err(error) => {
                tracing::warn!(%machine, %lane, fence, %error, "cannot cancel work; trying again");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
    sessions.inner.pending.send_modify(|count| *count -= 1);
}
