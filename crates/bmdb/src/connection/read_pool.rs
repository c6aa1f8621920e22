//! Read pool for the API, and read-only transactions: one moment, no locks, a limit.
//!
//! A person who reads must not be able to slow down a fleet. So what people see is read in a read-only transaction
//! ([`Bmdb::transact_read_only`]), and lists go through indexes a page at a time and stop at their limit.
//!
//! Reads for the API go through a pool of its own, of few connections, so that they cost the fleet nothing noticeable:
//! a client that sends too many waits for other clients, and never for the loops, nor they for it. A read holds its
//! snapshot for five seconds at most: it may take half of that, and the statement that is under way then, or the
//! silence of a host that stalls, as long again.
//!
//! Results over all machines are read by the same handle in pages, each a statement with the same limit
//! ([`ReadPool::bmdb`], `fleet/view.rs`).
//!
//! A read that takes longer is given up, and retried with another snapshot. Its limit is one of wall-clock time, and a
//! host that is busy for a moment must not make the API answer that it is unavailable.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use sqlx::{Executor, PgConnection};
use tokio::time::Instant;

use crate::connection::attempt::{AnyResult, Attempt, attempt_with, result_of};
use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext};

const BEGIN: &str = include_str!("../../../../sql/inspect/begin_read_only_short.sql");
/// For a handle without short limits.
const BEGIN_LONG: &str = include_str!("../../../../sql/inspect/begin_read_only.sql");
const OPERATION: &str = "reading what to show";
/// How long a read may take, the limit that `inspect/begin_read_only_short.sql` sets for each of its statements.
const READ_TIMEOUT: Duration = Duration::from_millis(2500);
/// The same for a command that reads for itself; each of its statements ends sooner.
const LONG_READ_TIMEOUT: Duration = Duration::from_mins(1);
/// How often a read that took longer is retried.
const MAX_RETRIES: u32 = 3;

/// A handle that reads and never writes; cheap to clone.
#[derive(Clone, Debug)]
pub struct ReadPool {
    bmdb: Bmdb,
}

impl ReadPool {
    /// A pool of `most` connections to the database of `bmdb`.
    pub async fn connect(bmdb: &Bmdb, most: u32) -> Result<Self, BmdbError> {
        let mut settings = bmdb.settings().clone();
        settings.application.push_str(" api");
        settings.max_connections = most;
        settings.short_reads = true;
        Ok(Self { bmdb: Bmdb::connect(settings).await? })
    }

    /// Reads through a handle that was connected for it, or that one command has for everything.
    #[must_use]
    pub const fn from_handle(bmdb: Bmdb) -> Self {
        Self { bmdb }
    }

    /// The handle itself, for code that caches the policy or reads in pages.
    #[must_use]
    pub fn bmdb(&self) -> &Bmdb {
        &self.bmdb
    }

    /// Reads without arguments, or with those that can be copied: see [`Self::read_with`].
    pub async fn read<T, F>(&self, body: F) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, BmdbError>> + Send + Sync + 'static,
    {
        self.read_with(body, |tx, body| body(tx)).await
    }

    /// Runs `body` at one moment of the database. It may run several times, and gets `arguments` by reference. The
    /// limits are those of the handle: short ones in a server
    /// ([`ConnectionSettings::short_reads`](crate::connection::settings::ConnectionSettings::short_reads)).
    pub async fn read_with<A, T, F>(&self, arguments: A, body: F) -> Result<T, BmdbError>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection, &'c A) -> BoxFuture<'c, Result<T, BmdbError>>
            + Send
            + Sync
            + 'static,
    {
        result_of(OPERATION, self.read_attempt(attempt_with(arguments, body).into()).await?)
    }

    async fn read_attempt(&self, attempt: Arc<dyn Attempt<BmdbError>>) -> Result<AnyResult, BmdbError> {
        let mut again = 0;
        loop {
            match self.read_once(attempt.clone()).await {
                Err(error) if again < MAX_RETRIES && is_timeout(&error) => again += 1,
                looked => return looked,
            }
        }
    }

    async fn read_once(&self, attempt: Arc<dyn Attempt<BmdbError>>) -> Result<AnyResult, BmdbError> {
        let (begin, limit) = if self.bmdb.settings().short_reads {
            (BEGIN, READ_TIMEOUT)
        } else {
            (BEGIN_LONG, LONG_READ_TIMEOUT)
        };
        self.bmdb
            .transact_with(OPERATION, attempt, move |tx, attempt| {
                Box::pin(async move {
                    tx.execute(sqlx::raw_sql(begin)).await.context(OPERATION)?;
                    let began = Instant::now();
                    match tokio::time::timeout(limit, attempt.run(tx)).await {
                        Err(_) => Err(BmdbError::ReadTimedOut { limit }),
                        // The server closes the connection of a client that stalls, which the client may notice only as
                        // a connection error.
                        Ok(Err(error)) if began.elapsed() >= limit && error.is_transient() => {
                            Err(BmdbError::ReadTimedOut { limit })
                        }
                        Ok(looked) => looked,
                    }
                })
            })
            .await
    }
}

/// Codes of what the server ended for taking too long: a statement, and a transaction without a statement.
const TIMEOUT_CODES: [&str; 2] = ["57014", "25P03"];

/// Whether a read was given up because it took too long.
fn is_timeout(error: &BmdbError) -> bool {
    match error {
        BmdbError::ReadTimedOut { .. } => true,
        BmdbError::Statement { source: sqlx::Error::Database(error), .. } => {
            error.code().is_some_and(|code| TIMEOUT_CODES.contains(&&*code))
        }
        _ => false,
    }
}

impl Bmdb {
    /// Reads without arguments, or with those that can be copied: see [`Self::transact_read_only_with`].
    pub async fn transact_read_only<T, F>(&self, body: F) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, BmdbError>> + Send + Sync + 'static,
    {
        self.transact_read_only_with(body, |tx, body| body(tx)).await
    }

    /// Runs `body` at one moment of the database: read-only, without locks, ended by the server after seconds. It may
    /// run several times, and gets `arguments` by reference.
    pub async fn transact_read_only_with<A, T, F>(&self, arguments: A, body: F) -> Result<T, BmdbError>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection, &'c A) -> BoxFuture<'c, Result<T, BmdbError>>
            + Send
            + Sync
            + 'static,
    {
        result_of(OPERATION, self.read_only_attempt(attempt_with(arguments, body)).await?)
    }

    async fn read_only_attempt(&self, attempt: Box<dyn Attempt<BmdbError>>) -> Result<AnyResult, BmdbError> {
        if self.settings().short_reads {
            return ReadPool::from_handle(self.clone()).read_attempt(attempt.into()).await;
        }
        self.transact_with(OPERATION, attempt, |tx, attempt| {
            Box::pin(async move {
                tx.execute(sqlx::raw_sql(BEGIN_LONG)).await.context(OPERATION)?;
                attempt.run(tx).await
            })
        })
        .await
    }
}
