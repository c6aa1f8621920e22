//! Renewing a process's sessions, on a thread that nothing else uses.
//!
//! A session that is not renewed in time stops the work of its worker, so this must not wait for
//! anything that the rest of the process does. It has a thread with a runtime of its own and a
//! connection of its own: neither a handler that computes for seconds on every thread of the common
//! runtime, nor an exhausted pool, costs a session.
//!
//! All sessions are renewed in one statement. Errors are outlived: only the local deadline ends a
//! session here. A round has a limit of its own, after which its connection is given up for a new
//! one: behind a network that swallows packets the old one would be waited for long after the network
//! is back. Rows that somebody has locked share a part of that limit, however many they are, so that
//! they cannot hold up the others' next renewal.

use std::collections::HashSet;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use sqlx::{Connection as _, PgConnection};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::bmdb::connection::Doing;
use crate::bmdb::error::{BmdbError, Remedy, remedy};
use crate::bmdb::session::{Session, Sessions, boot_time, lock};

const RENEWING: &str = "renewing sessions";
/// How often the statement for all sessions is sent before each session is renewed alone.
const RENEWAL_TRIES: u32 = 3;
/// How long the connection's end is waited for. It only spares the server a line in its log.
const GOODBYE: Duration = Duration::from_millis(500);

/// What the thread and the rest of the keeper tell each other.
#[derive(Clone, Debug, Default)]
pub(crate) struct Signals {
    /// To the thread: renew nothing more. Sessions that run out are still lost.
    pub(crate) stop: CancellationToken,
    /// To the thread: end.
    pub(crate) over: CancellationToken,
    /// From the thread: a round of renewals succeeded.
    pub(crate) renewed: Arc<Notify>,
    /// From the thread: it has ended, in whatever way.
    pub(crate) ended: CancellationToken,
}

/// Starts the thread.
pub(crate) fn start(sessions: Sessions, signals: Signals) -> Result<(), BmdbError> {
    let failed = |error: std::io::Error| BmdbError::Task {
        what: "starting the thread that renews sessions",
        reason: error.to_string(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let keep = move || {
        let _ended = signals.ended.clone().drop_guard();
        let _unkept = LoseAll(sessions.clone());
        runtime.block_on(renew_until_over(&sessions, &signals));
        // A name that is being looked up at this moment is not waited for.
        runtime.shutdown_background();
    };
    thread::Builder::new().name("session-keeper".to_owned()).spawn(keep).map_err(failed)?;
    Ok(())
}

/// A session that nobody renews any more is over.
struct LoseAll(Sessions);

impl Drop for LoseAll {
    fn drop(&mut self) {
        for session in self.0.open() {
            lose(&self.0, &session, "nobody renews it any more");
        }
    }
}

async fn renew_until_over(sessions: &Sessions, signals: &Signals) {
    let interval = sessions.inner.interval;
    let mut look = tokio::time::interval((interval / 16).max(Duration::from_millis(5)));
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut renewing: JoinSet<Option<PgConnection>> = JoinSet::new();
    let mut connection = None;
    let mut next_renewal = Instant::now();
    loop {
        tokio::select! {
            () = signals.over.cancelled() => break,
            Some(renewed) = renewing.join_next() => {
                connection = renewed.ok().flatten();
                if connection.is_some() {
                    signals.renewed.notify_one();
                }
            }
            _ = look.tick() => {
                lose_overdue(sessions);
                if !signals.stop.is_cancelled() && renewing.is_empty() && Instant::now() >= next_renewal {
                    next_renewal = Instant::now() + interval / 4;
                    renewing.spawn(renew_in_time(sessions.clone(), connection.take()));
                }
            }
        }
    }
    if let Some(connection) = connection {
        drop(tokio::time::timeout(GOODBYE, connection.close()).await);
    }
}

fn lose_overdue(sessions: &Sessions) {
    for session in sessions.open() {
        if session.remaining().is_zero() {
            lose(sessions, &session, "it could not be renewed in time");
        }
    }
}

fn lose(sessions: &Sessions, session: &Session, because: &str) {
    tracing::warn!(session = %session.id(), because, "a session is over");
    sessions.inner.bmdb.metrics().sessions_lost.inc();
    lock(&sessions.inner.open).remove(&session.id());
    session.lose(because);
}

/// One round of renewals. Gives the connection back if it is good for another one.
async fn renew_in_time(sessions: Sessions, connection: Option<PgConnection>) -> Option<PgConnection> {
    let open = sessions.open();
    if open.is_empty() {
        return connection;
    }
    // A renewal that is given up half-way takes its connection with it, so no transaction stays
    // open; whether it happened, the next one shows.
    let limit = sessions.inner.interval.mul_f64(0.4);
    let metrics = sessions.inner.bmdb.metrics();
    match tokio::time::timeout(limit, renew(&sessions, &open, connection)).await {
        Ok(Ok(connection)) => {
            metrics.renewed();
            Some(connection)
        }
        Ok(Err(error)) => {
            metrics.renewal_failed();
            tracing::warn!(%error, sessions = open.len(), "cannot renew sessions; trying again until their deadline");
            None
        }
        Err(_) => {
            metrics.renewal_failed();
            tracing::warn!(
                sessions = open.len(),
                "renewing sessions was not answered within {limit:?}; trying again on another connection"
            );
            None
        }
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
    let renewed = renew_all(&mut connection, open).await?;
    let mut rest = Vec::new();
    for session in open {
        if renewed.contains(&session.id().0) {
            session.renewed(sent_at);
        } else {
            rest.push(session);
        }
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

/// Renews all sessions in one statement, those that somebody has locked excepted, and returns those it renewed: none
/// when the server refused the statement, because it ran too long or lost against another transaction.
async fn renew_all(connection: &mut PgConnection, open: &[Session]) -> Result<HashSet<Uuid>, BmdbError> {
    let ids: Vec<Uuid> = open.iter().map(|session| session.id().0).collect();
    for _ in 0..RENEWAL_TRIES {
        match sqlx::query_file_scalar!("sql/session/renew.sql", &ids).fetch_all(&mut *connection).await {
            Ok(renewed) => return Ok(renewed.into_iter().collect()),
            // Where transactions are SERIALIZABLE, a renewal may lose against a claim that read the same session.
            Err(error) if remedy(&error, false) == Remedy::Again => {}
            Err(sqlx::Error::Database(_)) => break,
            Err(error) => return Err(error).doing(RENEWING),
        }
    }
    Ok(HashSet::new())
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
    sqlx::query_file!("sql/session/set_statement_timeout.sql", limit)
        .fetch_one(connection)
        .await
        .doing(RENEWING)?;
    Ok(())
}
