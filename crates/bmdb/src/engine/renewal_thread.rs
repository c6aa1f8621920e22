//! Session renewal on a dedicated thread, runtime and connection.
//!
//! A session that is not renewed in time stops the work of its worker, so renewal must not wait for anything that the
//! rest of the process does. It has a thread with a runtime of its own and a connection of its own: neither a handler
//! that computes for seconds on every thread of the common runtime, nor an exhausted pool, costs a session.
//!
//! All sessions are renewed in one statement. Errors are survived: only the local deadline ends a session here. A round
//! has a limit of its own, after which its connection is replaced by a new one: behind a network that swallows packets
//! the old one would be waited for long after the network is back. Rows that another client has locked share a part of
//! that limit, however many they are, so that they cannot delay the others' next renewal.
//!
//! The connection is opened when the thread starts, before any work takes the connections that the server has left.
//! It goes by the direct URL if there is one, around a pooler, and is used only if it leads to the server of the pool.
//! One to a server that refuses writes is replaced, and so is an old one. The old one is used until its successor is open:
//! a server without a free connection, or a name that does not resolve, costs no session.

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

use crate::connection::access::{is_reader_refusal, require_access};
use crate::connection::error::{BmdbError, Remedy, describe_error, remedy_for};
use crate::connection::{Bmdb, DbContext};
use crate::engine::session::{NOT_RENEWED, Session, Sessions, boot_time, lock_mutex};

const RENEWING: &str = "renewing sessions";
/// How often the statement for all sessions is sent before each session is renewed alone.
const RENEWAL_TRIES: u32 = 3;
/// How long the closing of the connection is waited for. It only spares the server a line in its log.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// Which part of the life of a connection passes before its replacement is tried again.
const REPLACEMENT_PAUSE: u32 = 10;

/// Signals between the thread and the rest of the session renewer.
#[derive(Clone, Debug, Default)]
pub(crate) struct RenewalSignals {
    /// To the thread: renew nothing any more. Sessions that expire are still lost.
    pub(crate) stop: CancellationToken,
    /// To the thread: end.
    pub(crate) shut_down: CancellationToken,
    /// From the thread: a round of renewals succeeded.
    pub(crate) renewed: Arc<Notify>,
    /// From the thread: it has ended, in whatever way.
    pub(crate) ended: CancellationToken,
}

/// Starts the renewal thread with its own runtime.
pub(crate) fn start_thread(sessions: Sessions, signals: RenewalSignals) -> Result<(), BmdbError> {
    let failed = |error: std::io::Error| BmdbError::TaskFailed {
        operation: "starting the thread that renews sessions",
        reason: error.to_string(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let keep = move || {
        let _ended = signals.ended.clone().drop_guard();
        let _unkept = LoseAllOnDrop(sessions.clone());
        runtime.block_on(run_renewals(&sessions, &signals));
        // Do not wait for a name that is being resolved at this moment.
        runtime.shutdown_background();
    };
    thread::Builder::new().name("session-renewal".to_owned()).spawn(keep).map_err(failed)?;
    Ok(())
}

/// Loses all sessions when the thread ends: a session that is not renewed any more is over.
struct LoseAllOnDrop(Sessions);

impl Drop for LoseAllOnDrop {
    fn drop(&mut self) {
        for session in self.0.open() {
            lose_session(&self.0, &session, "nobody renews it any more");
        }
    }
}

/// The connection that sessions are renewed on.
struct RenewalConnection {
    connection: PgConnection,
    /// When a new one is to take its place.
    replace_at: Instant,
}

impl RenewalConnection {
    async fn open(bmdb: &Bmdb) -> Result<Self, sqlx::Error> {
        let connection = bmdb.open_dedicated_connection().await?;
        Ok(Self { connection, replace_at: Instant::now() + bmdb.settings().connection_lifetime })
    }
}

async fn run_renewals(sessions: &Sessions, signals: &RenewalSignals) {
    let interval = sessions.inner.interval;
    let mut look = tokio::time::interval((interval / 16).max(Duration::from_millis(5)));
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut renewing: JoinSet<Option<RenewalConnection>> = JoinSet::new();
    let mut connection = None;
    let mut had_sessions = false;
    let mut next_renewal = Instant::now();
    loop {
        tokio::select! {
            () = signals.shut_down.cancelled() => break,
            Some(renewed) = renewing.join_next() => {
                connection = renewed.ok().flatten();
                if had_sessions && connection.is_some() {
                    signals.renewed.notify_one();
                }
            }
            _ = look.tick() => {
                lose_expired(sessions);
                if !signals.stop.is_cancelled() && renewing.is_empty() && Instant::now() >= next_renewal {
                    next_renewal = Instant::now() + interval / 4;
                    had_sessions |= !sessions.open().is_empty();
                    renewing.spawn(renew_with_timeout(sessions.clone(), connection.take()));
                }
            }
        }
    }
    if let Some(RenewalConnection { connection, .. }) = connection {
        drop(tokio::time::timeout(CLOSE_TIMEOUT, connection.close()).await);
    }
}

fn lose_expired(sessions: &Sessions) {
    for session in sessions.open() {
        if session.remaining().is_zero() {
            lose_session(sessions, &session, NOT_RENEWED);
        }
    }
}

fn lose_session(sessions: &Sessions, session: &Session, reason: &str) {
    tracing::warn!(session = %session.id(), reason, "a session is over");
    sessions.inner.bmdb.metrics().sessions_lost.inc();
    lock_mutex(&sessions.inner.open).remove(&session.id());
    session.mark_lost(reason);
}

/// One round of renewals. Returns the connection if it can be used for another one.
async fn renew_with_timeout(
    sessions: Sessions,
    connection: Option<RenewalConnection>,
) -> Option<RenewalConnection> {
    let open = sessions.open();
    // Without a session the connection is opened and tested: it must not be the one that a limit refuses later.
    // A renewal that is given up half-way takes its connection with it, so no transaction stays open; the next renewal
    // shows whether it happened.
    let limit = sessions.inner.interval.mul_f64(0.4);
    let metrics = sessions.inner.bmdb.metrics();
    let error = match tokio::time::timeout(limit, renew_sessions(&sessions, &open, connection)).await {
        Ok(Ok(connection)) => {
            if !open.is_empty() {
                metrics.count_renewal();
            }
            return Some(replace_if_old(&sessions, connection).await);
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {limit:?}"),
    };
    if open.is_empty() {
        tracing::warn!(error, "cannot keep a connection for renewals open; trying again");
    } else {
        metrics.count_renewal_failure();
        tracing::warn!(
            error,
            sessions = open.len(),
            "cannot renew sessions; trying again until their deadline"
        );
    }
    None
}

/// Puts a new connection in the place of an old one. Returns the old one if none can be opened: it renews sessions until
/// one can.
async fn replace_if_old(sessions: &Sessions, mut old: RenewalConnection) -> RenewalConnection {
    if Instant::now() < old.replace_at {
        return old;
    }
    let bmdb = &sessions.inner.bmdb;
    // It is short, so that the next renewal is not late.
    let limit = sessions.inner.interval / 5;
    let error = match tokio::time::timeout(limit, RenewalConnection::open(bmdb)).await {
        Ok(Ok(new)) => {
            drop(tokio::time::timeout(CLOSE_TIMEOUT, old.connection.close()).await);
            return new;
        }
        Ok(Err(error)) => describe_error(&error),
        Err(_) => format!("no answer within {limit:?}"),
    };
    tracing::info!(error, "cannot replace the connection for renewals by a new one yet; the old one is used");
    old.replace_at = Instant::now() + bmdb.settings().connection_lifetime / REPLACEMENT_PAUSE;
    old
}

async fn renew_sessions(
    sessions: &Sessions,
    open: &[Session],
    connection: Option<RenewalConnection>,
) -> Result<RenewalConnection, BmdbError> {
    let bmdb = &sessions.inner.bmdb;
    let interval = sessions.inner.interval;
    let mut open_connection = match connection {
        Some(connection) => connection,
        None => RenewalConnection::open(bmdb).await.context(RENEWING)?,
    };
    if open.is_empty() {
        test_connection(&mut open_connection.connection, bmdb)
            .await
            .context("testing the connection for renewals")?;
        return Ok(open_connection);
    }
    let connection = &mut open_connection.connection;
    set_statement_timeout(connection, interval / 5).await?;
    let sent_at = boot_time();
    let renewed = renew_all(connection, open).await?;
    let mut rest = Vec::new();
    for session in open {
        if renewed.contains(&session.id().0) {
            session.record_renewal(sent_at);
        } else {
            rest.push(session);
        }
    }
    if rest.is_empty() {
        return Ok(open_connection);
    }
    // Each locked row is waited for a little, and all of them together for no longer than this.
    let each = (interval / 10) / u32::try_from(rest.len()).unwrap_or(u32::MAX);
    set_statement_timeout(connection, each.max(Duration::from_millis(10))).await?;
    for session in rest {
        let sent_at = boot_time();
        let renewed = sqlx::query_file_scalar!("../../sql/session/renew_one.sql", session.id().0)
            .fetch_optional(&mut *connection)
            .await;
        apply_renewal(sessions, session, sent_at, renewed)?;
    }
    Ok(open_connection)
}

/// Fails for a connection that does not answer, or leads to a server that refuses writes that it must take.
async fn test_connection(connection: &mut PgConnection, bmdb: &Bmdb) -> Result<(), sqlx::Error> {
    connection.ping().await?;
    require_access(connection, bmdb.settings().access).await
}

/// Renews all sessions in one statement, except those that another client has locked, and returns those it renewed:
/// none when the server rejected the statement, because it ran too long or lost against another transaction.
async fn renew_all(connection: &mut PgConnection, open: &[Session]) -> Result<HashSet<Uuid>, BmdbError> {
    let ids: Vec<Uuid> = open.iter().map(|session| session.id().0).collect();
    for _ in 0..RENEWAL_TRIES {
        match sqlx::query_file_scalar!("../../sql/session/renew.sql", &ids).fetch_all(&mut *connection).await
        {
            Ok(renewed) => return Ok(renewed.into_iter().collect()),
            // Where transactions are SERIALIZABLE, a renewal may lose against a claim that read the same session.
            Err(error) if remedy_for(&error, false) == Remedy::Retry => {}
            Err(error) if is_reader_refusal(&error) => return Err(error).context(RENEWING),
            Err(sqlx::Error::Database(_)) => break,
            Err(error) => return Err(error).context(RENEWING),
        }
    }
    Ok(HashSet::new())
}

/// Applies the answer to one session's renewal. Fails when there was no answer.
fn apply_renewal(
    sessions: &Sessions,
    session: &Session,
    sent_at: Duration,
    renewed: Result<Option<Uuid>, sqlx::Error>,
) -> Result<(), BmdbError> {
    match renewed {
        Ok(Some(_)) => session.record_renewal(sent_at),
        Ok(None) => lose_session(sessions, session, "the database says it is over"),
        Err(error) if is_reader_refusal(&error) => return Err(error).context(RENEWING),
        Err(error @ sqlx::Error::Database(_)) => {
            let error = describe_error(&error);
            tracing::warn!(session = %session.id(), error, "cannot renew a session; trying again");
        }
        Err(error) => return Err(error).context(RENEWING),
    }
    Ok(())
}

async fn set_statement_timeout(connection: &mut PgConnection, limit: Duration) -> Result<(), BmdbError> {
    let limit = limit.as_millis().max(1).to_string();
    sqlx::query!("SELECT set_config('statement_timeout', $1, false)", limit)
        .fetch_one(connection)
        .await
        .context(RENEWING)?;
    Ok(())
}
