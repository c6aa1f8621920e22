//! Keeping a process's sessions alive, and its work in step with the database.
//!
//! One task per process renews all its sessions in one statement, on a
//! connection that nothing else uses. It outlives errors: only the local
//! deadline ends a session here. A round has a limit of its own, after which its
//! connection is given up for a new one: behind a network that swallows packets
//! the old one would be waited for long after the network is back. Rows that
//! somebody has locked share a part of that limit, however many they are, so
//! that they cannot hold up the others' next renewal.
//!
//! After each round, and apart from it because it uses the common pool, which
//! others may have exhausted, it compares what the database says the sessions
//! hold with what the process thinks:
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

use sqlx::PgConnection;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::bmdb::connection::{Bmdb, Doing};
use crate::bmdb::error::BmdbError;
use crate::bmdb::session::{Abandoned, Keeper, Session, Sessions, boot_time, lock};
use crate::bmdb::work::cancel_in_database;
use crate::model::ids::{MachineId, SessionId};
use crate::model::process::Lane;

const RENEWING: &str = "renewing sessions";

impl Keeper {
    /// Renews and compares until `stop`; then cancels what was dropped before it returns, which
    /// takes no longer than the sessions last.
    ///
    /// Stop it only after everything that holds a session has ended.
    pub async fn keep(mut self, stop: CancellationToken) {
        let interval = self.sessions.inner.interval;
        let mut look = tokio::time::interval((interval / 16).max(Duration::from_millis(5)));
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut renewing: JoinSet<Option<PgConnection>> = JoinSet::new();
        let mut comparing: JoinSet<()> = JoinSet::new();
        let mut cancelling: JoinSet<()> = JoinSet::new();
        let mut connection = None;
        let mut next_renewal = Instant::now();
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                Some(abandoned) = self.abandoned.recv() => {
                    cancelling.spawn(cancel_until_over(self.sessions.clone(), abandoned));
                }
                Some(renewed) = renewing.join_next() => {
                    connection = renewed.ok().flatten();
                    if connection.is_some() && comparing.is_empty() {
                        comparing.spawn(compare_in_time(self.sessions.clone()));
                    }
                }
                Some(_) = comparing.join_next() => {}
                Some(_) = cancelling.join_next() => {}
                _ = look.tick() => {
                    lose_overdue(&self.sessions);
                    if renewing.is_empty() && Instant::now() >= next_renewal {
                        next_renewal = Instant::now() + interval / 4;
                        renewing.spawn(renew_in_time(self.sessions.clone(), connection.take()));
                    }
                }
            }
        }
        self.abandoned.close();
        while let Some(abandoned) = self.abandoned.recv().await {
            cancelling.spawn(cancel_until_over(self.sessions.clone(), abandoned));
        }
        // With the database away this ends when the sessions are over, so that must still be seen.
        while !cancelling.is_empty() {
            tokio::select! {
                _ = cancelling.join_next() => {}
                _ = look.tick() => lose_overdue(&self.sessions),
            }
        }
    }
}

fn open_sessions(sessions: &Sessions) -> Vec<Session> {
    lock(&sessions.inner.open).values().cloned().collect()
}

fn lose_overdue(sessions: &Sessions) {
    for session in open_sessions(sessions) {
        if session.remaining().is_zero() {
            lose(sessions, &session, "it could not be renewed in time");
        }
    }
}

fn lose(sessions: &Sessions, session: &Session, because: &str) {
    tracing::warn!(session = %session.id(), because, "a session is over");
    lock(&sessions.inner.open).remove(&session.id());
    session.lose(because);
}

/// One round of renewals. Gives the connection back if it is good for another one.
async fn renew_in_time(sessions: Sessions, connection: Option<PgConnection>) -> Option<PgConnection> {
    let open = open_sessions(&sessions);
    if open.is_empty() {
        return connection;
    }
    // A renewal that is given up half-way takes its connection with it, so no transaction stays
    // open; whether it happened, the next one shows.
    let limit = sessions.inner.interval.mul_f64(0.4);
    match tokio::time::timeout(limit, renew(&sessions, &open, connection)).await {
        Ok(Ok(connection)) => Some(connection),
        Ok(Err(error)) => {
            tracing::warn!(%error, sessions = open.len(), "cannot renew sessions; trying again until their deadline");
            None
        }
        Err(_) => {
            tracing::warn!(
                sessions = open.len(),
                "renewing sessions was not answered within {limit:?}; trying again on another connection"
            );
            None
        }
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

async fn renew(
    sessions: &Sessions,
    open: &[Session],
    connection: Option<PgConnection>,
) -> Result<PgConnection, BmdbError> {
    let bmdb = &sessions.inner.bmdb;
    let interval = sessions.inner.interval;
    let mut connection = match connection {
        Some(connection) => connection,
        None => bmdb.connection().await.doing(RENEWING)?,
    };
    limit_statements(&mut connection, interval / 5).await?;
    let sent_at = boot_time();
    let (renewed, everyone_answered) = renew_all(bmdb, &mut connection, open).await?;
    let mut rest = Vec::new();
    for session in open {
        if renewed.contains(&session.id().0) {
            session.renewed(sent_at);
        } else {
            rest.push(session);
        }
    }
    if !everyone_answered {
        rest = renew_those_free(sessions, &mut connection, rest).await?;
    }
    if rest.is_empty() {
        return Ok(connection);
    }
    // Each locked row is waited for a little, and all of them together for no longer than this.
    let each = (interval / 10) / u32::try_from(rest.len()).unwrap_or(u32::MAX);
    limit_statements(&mut connection, each.max(Duration::from_millis(10))).await?;
    for session in rest {
        let sent_at = boot_time();
        let renewed = sqlx::query_file_scalar!("sql/session/renew_one.sql", session.id().0)
            .fetch_optional(&mut connection)
            .await;
        conclude(sessions, session, sent_at, renewed)?;
    }
    Ok(connection)
}

/// All sessions in one statement: those it renewed, and whether those it did not are locked or over
/// (instead of the whole statement having waited in vain for one of them).
async fn renew_all(
    bmdb: &Bmdb,
    connection: &mut PgConnection,
    open: &[Session],
) -> Result<(HashSet<Uuid>, bool), BmdbError> {
    let ids: Vec<Uuid> = open.iter().map(|session| session.id().0).collect();
    let renewed = if bmdb.dialect().skip_locked {
        sqlx::query_file_scalar!("sql/session/renew.sql", &ids).fetch_all(connection).await
    } else {
        sqlx::query_file_scalar!("sql/session/renew_waiting.sql", &ids).fetch_all(connection).await
    };
    match renewed {
        Ok(renewed) => Ok((renewed.into_iter().collect(), true)),
        Err(sqlx::Error::Database(_)) => Ok((HashSet::new(), false)),
        Err(error) => Err(error).doing(RENEWING),
    }
}

/// One by one those that nobody has locked; returns the others.
async fn renew_those_free<'s>(
    sessions: &Sessions,
    connection: &mut PgConnection,
    rest: Vec<&'s Session>,
) -> Result<Vec<&'s Session>, BmdbError> {
    let mut locked = Vec::new();
    for session in rest {
        let sent_at = boot_time();
        let renewed = sqlx::query_file_scalar!("sql/session/renew_nowait.sql", session.id().0)
            .fetch_optional(&mut *connection)
            .await;
        match renewed {
            Err(sqlx::Error::Database(_)) => locked.push(session),
            renewed => conclude(sessions, session, sent_at, renewed)?,
        }
    }
    Ok(locked)
}

/// What the answer to one session's renewal means. Fails when there was no answer.
fn conclude(
    sessions: &Sessions,
    session: &Session,
    sent_at: Duration,
    renewed: Result<Option<Uuid>, sqlx::Error>,
) -> Result<(), BmdbError> {
    match renewed {
        Ok(Some(_)) => session.renewed(sent_at),
        Ok(None) => lose(sessions, session, "the database says it is over"),
        Err(error @ sqlx::Error::Database(_)) => {
            tracing::warn!(session = %session.id(), %error, "cannot renew a session; trying again");
        }
        Err(error) => return Err(error).doing(RENEWING),
    }
    Ok(())
}

async fn limit_statements(connection: &mut PgConnection, limit: Duration) -> Result<(), BmdbError> {
    let limit = limit.as_millis().max(1).to_string();
    sqlx::query_file!("sql/session/limit.sql", limit).fetch_one(connection).await.doing(RENEWING)?;
    Ok(())
}

async fn compare(sessions: &Sessions) -> Result<(), BmdbError> {
    let open = open_sessions(sessions);
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
            Box::pin(async move { sqlx::query_file!("sql/work/of_sessions.sql", &ids).fetch_all(pool).await })
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
    let mut pause = Duration::from_millis(20);
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
                pause = (pause * 2).min(Duration::from_secs(1));
            }
        }
    }
    sessions.inner.pending.send_modify(|count| *count -= 1);
}
