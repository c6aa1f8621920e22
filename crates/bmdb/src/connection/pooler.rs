//! Poolers: those on which a shepherd cannot work are refused by name, before anything starts.
//!
//! A pooler that pools transactions gives each transaction of a connection to another session of the server. Settings,
//! prepared statements and `LISTEN` belong to a session, so they are lost or met by others. It is found by the process
//! that serves a connection: while a second connection holds a transaction, the first one is served by another process,
//! or waits where the pool has one session. Several tries are needed, because the pool may give the first connection
//! the same session again. A server or a network may pause once, so that one wait proves nothing. A pooler that pools
//! statements begins no transaction.
//!
//! Pgpool-II sends reads to standbys, which are behind. It alone answers `SHOW pool_version`.

use std::io;
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _, Executor as _, PgConnection, Row as _};

use crate::connection::dialect::Dialect;
use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext as _};

const OPERATION: &str = "looking for a pooler";
/// How often the processes that serve two connections are compared.
const PROBES: u32 = 3;
/// How long the first connection waits for a session that the second one may have.
const WAIT_LIMIT: Duration = Duration::from_secs(3);
/// How long the second connection waits for a session.
const SECOND_LIMIT: Duration = Duration::from_secs(6);
/// How long all of it may take.
const PROBE_LIMIT: Duration = Duration::from_secs(20);
const SECOND_WAITS: &str = "the second one is not served: a pooler in between has fewer than two sessions for it (raise \
    default_pool_size of PgBouncer), or the server does not answer";
const READ_BACKEND: &str = include_str!("../../../../sql/connection/read_backend.sql");
const READ_PGPOOL_VERSION: &str = include_str!("../../../../sql/connection/read_pgpool_version.sql");
const READ_PGPOOL_BALANCING: &str = include_str!("../../../../sql/connection/read_pgpool_balancing.sql");
const BEGIN: &str = include_str!("../../../../sql/transaction/begin.sql");
const ROLLBACK: &str = include_str!("../../../../sql/transaction/rollback.sql");

impl Bmdb {
    /// Fails with a sentence if there is a pooler in between on which a shepherd cannot work.
    pub async fn refuse_poolers(&self) -> Result<(), BmdbError> {
        // Not every CockroachDB gives each session a number of its own.
        if self.dialect() != Dialect::Postgres {
            return Ok(());
        }
        probe_server(&self.inner.route.used_options(), self.settings().address()).await
    }
}

/// Connects to a PostgreSQL twice, and fails with a sentence if there is a pooler in between on which a shepherd cannot
/// work. Nothing is left in a session of the server: no prepared statement, and no setting.
pub(super) async fn probe_server(options: &PgConnectOptions, address: String) -> Result<(), BmdbError> {
    let probe = async {
        let mut first = options.connect().await?;
        let mut second = options.connect().await?;
        let spreads_reads = spreads_reads(&mut first).await?;
        let pools_transactions = pools_transactions(&mut first, &mut second).await?;
        // A pooler may have closed a connection that it refused something on.
        drop(first.close().await);
        drop(second.close().await);
        Ok::<_, sqlx::Error>(match (pools_transactions, spreads_reads) {
            (Some(true), _) => Some(BmdbError::TransactionPooling { address }),
            (None, _) => Some(BmdbError::TooFewConnections { address, shortage: SECOND_WAITS.to_owned() }),
            (Some(false), true) => Some(BmdbError::ReadsSpread { address }),
            (Some(false), false) => None,
        })
    };
    let found = match tokio::time::timeout(PROBE_LIMIT, probe).await {
        Ok(found) => found,
        Err(elapsed) => Err(sqlx::Error::Io(io::Error::from(elapsed))),
    };
    found.context(OPERATION)?.map_or(Ok(()), Err)
}

/// What an error of the first prepared statement of a connection shows, after [`probe_server`] found nothing; `None` for
/// any other error.
pub(super) fn session_fault(code: &str, address: String) -> Option<BmdbError> {
    match code {
        // Another client prepared one of that name before.
        "42P05" => Some(BmdbError::SessionsNotReset { address }),
        // Another session has it.
        "26000" => Some(BmdbError::TransactionPooling { address }),
        _ => None,
    }
}

/// Whether Pgpool-II answers, and sends reads to standbys.
async fn spreads_reads(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    match connection.fetch_one(sqlx::raw_sql(READ_PGPOOL_VERSION)).await {
        // PostgreSQL knows no such setting.
        Err(sqlx::Error::Database(_)) => Ok(false),
        Err(error) => Err(error),
        Ok(_) => match connection.fetch_one(sqlx::raw_sql(READ_PGPOOL_BALANCING)).await {
            Ok(row) => Ok(row.try_get::<String, _>(0)? != "off"),
            Err(sqlx::Error::Database(_)) => Ok(true),
            Err(error) => Err(error),
        },
    }
}

/// How the first connection is served while the second one holds a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Service {
    /// By its own session.
    Own,
    /// By a session that is not its own.
    Shared,
    /// Not at all within the limit: the second connection may have the only session, or the server paused.
    Waits,
}

/// How it is served, from the process that served it before, the one that serves the second connection, and the one
/// that serves it then.
fn judge_service(before: i32, second: i32, during: Option<i32>) -> Service {
    match during {
        None => Service::Waits,
        Some(during) if during != before || before == second => Service::Shared,
        Some(_) => Service::Own,
    }
}

/// Whether the sessions of the server are given to transactions, from all that was seen so far.
fn shows_pooled_transactions(seen: &[Service]) -> bool {
    let count = |service: Service| seen.iter().filter(|found| **found == service).count();
    count(Service::Shared) > 0 || count(Service::Waits) > 1
}

/// Whether the sessions of the server are given to transactions or statements instead of connections; `None` if the
/// second connection gets no session.
async fn pools_transactions(
    first: &mut PgConnection,
    second: &mut PgConnection,
) -> Result<Option<bool>, sqlx::Error> {
    let mut seen = Vec::new();
    for _ in 0..PROBES {
        let before = read_backend(first).await?;
        let Ok(held) = tokio::time::timeout(SECOND_LIMIT, begin_transaction(second)).await else {
            return Ok(None);
        };
        let held = match held {
            Err(error) if refuses_transactions(&error) => return Ok(Some(true)),
            held => held?,
        };
        let during = tokio::time::timeout(WAIT_LIMIT, read_backend(first)).await.ok().transpose()?;
        second.execute(sqlx::raw_sql(ROLLBACK)).await?;
        seen.push(judge_service(before, held, during));
        if shows_pooled_transactions(&seen) {
            return Ok(Some(true));
        }
    }
    Ok(Some(false))
}

/// Begins a transaction. Returns the process of the server that serves it.
async fn begin_transaction(connection: &mut PgConnection) -> Result<i32, sqlx::Error> {
    connection.execute(sqlx::raw_sql(BEGIN)).await?;
    read_backend(connection).await
}

/// Whether `PgBouncer` ended a connection because it pools statements, and a transaction was begun.
fn refuses_transactions(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|error| error.message().contains("statement pooling mode"))
}

/// The process of the server that serves a connection at this moment.
async fn read_backend(connection: &mut PgConnection) -> Result<i32, sqlx::Error> {
    connection.fetch_one(sqlx::raw_sql(READ_BACKEND)).await?.try_get(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_session_counts_at_once_and_a_wait_only_twice() {
        for (probes, is_pooled) in [
            (vec![(1, 2, Some(1)), (1, 2, Some(1)), (1, 2, Some(1))], false),
            (vec![(1, 2, Some(3))], true),
            (vec![(1, 1, Some(1))], true),
            (vec![(1, 2, Some(1)), (1, 2, Some(2))], true),
            (vec![(1, 2, None)], false),
            (vec![(1, 2, None), (1, 2, Some(1)), (1, 2, Some(1))], false),
            (vec![(1, 2, None), (1, 2, Some(1)), (1, 2, None)], true),
            (vec![(1, 1, None), (1, 1, None)], true),
        ] {
            let seen: Vec<Service> = probes
                .iter()
                .map(|(before, second, during)| judge_service(*before, *second, *during))
                .collect();
            assert_eq!(shows_pooled_transactions(&seen), is_pooled, "{probes:?}");
        }
    }

    #[test]
    fn prepared_statement_of_another_client_is_no_pool_of_transactions() {
        for (code, part) in [
            ("42P05", Some("set server_reset_query = DISCARD ALL")),
            ("26000", Some("behind a pooler that pools transactions")),
            ("42501", None),
        ] {
            let fault = session_fault(code, "db:5432/bmdb".to_owned()).map(|fault| fault.to_string());
            assert_eq!(fault.is_some(), part.is_some(), "{code}: {fault:?}");
            assert!(fault.unwrap_or_default().contains(part.unwrap_or_default()), "{code}");
        }
    }
}
