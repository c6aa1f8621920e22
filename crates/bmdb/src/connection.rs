//! Connection pool, transactions with retry, and time limits of the BMDB.
//!
//! Every transaction runs in a task of its own that nobody aborts. A worker that is cancelled drops the future that
//! waits for it, never the transaction: dropped half-way, a connection would go back to its pool with a transaction
//! open. The server's own timeouts, set on every connection, bound a transaction instead. Where not even those arrive,
//! because the network swallows what is sent, the connection is abandoned with its transaction, and the outcome is
//! unknown.

use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use futures::future::BoxFuture;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions, Connection, PgConnection, PgPool, Postgres};
use tokio::sync::watch;

use crate::error::{BmdbError, Remedy, conflict_backoff, is_lock_not_available, remedy_for};
use crate::metrics::BmdbMetrics;
use crate::phase_exits;
use crate::transaction::{AttemptOutcome, result_label, try_once};
use model::policy::Policy;

/// Which database the BMDB is, as far as transactions and notifications go. Correctness needs neither `NOTIFY` nor
/// `SKIP LOCKED`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dialect {
    /// PostgreSQL: READ COMMITTED, with `LISTEN` and `NOTIFY`.
    #[value(help = "PostgreSQL: READ COMMITTED, with LISTEN and NOTIFY")]
    Postgres,
    /// `CockroachDB`: SERIALIZABLE, without notifications.
    ///
    /// `SKIP LOCKED` is sent in both dialects, because every statement that uses it loses nothing by skipping a row too
    /// many: a renewal asks for that row alone, a heartbeat is stored alone, a claim counts its candidates without
    /// locks and tries again, and the reaper and the timers come back to it with their next pass.
    #[value(help = "CockroachDB: SERIALIZABLE, without LISTEN and NOTIFY")]
    Cockroachdb,
}

impl Dialect {
    /// The name in flags and answers, the same in every program.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Postgres => "postgres",
            Self::Cockroachdb => "cockroachdb",
        }
    }

    /// The isolation level that every transaction runs at, as the server spells it.
    #[must_use]
    pub const fn isolation(self) -> &'static str {
        match self {
            Self::Postgres => "read committed",
            Self::Cockroachdb => "serializable",
        }
    }

    /// Whether `LISTEN` and `NOTIFY` are used. Without them, loops poll.
    #[must_use]
    pub const fn notifies(self) -> bool {
        matches!(self, Self::Postgres)
    }
}

/// Settings of a connection to the BMDB.
#[derive(Clone)]
pub struct ConnectionSettings {
    /// Host, port, user, password and TLS.
    pub options: PgConnectOptions,
    /// The dialect of the database.
    pub dialect: Dialect,
    /// Most connections of the common pool; one more is used to renew sessions.
    pub max_connections: u32,
    /// Name shown in the server's list of connections.
    pub application: String,
    /// Whether it reads for clients on the network, so that reads hold nothing for long (`read_pool.rs`).
    pub short_reads: bool,
    /// First parts of `search_path`, for tests with a clock of their own.
    pub search_path: Option<String>,
}

impl ConnectionSettings {
    /// Settings for a URL of the form `postgres://user@host:5432/database`.
    pub fn from_url(url: &str, application: &str) -> Result<Self, BmdbError> {
        let scheme_is_right = url.starts_with("postgres://") || url.starts_with("postgresql://");
        if !scheme_is_right {
            return Err(BmdbError::InvalidUrl { reason: "it does not begin with postgres://".into() });
        }
        let options: PgConnectOptions = url.parse().map_err(|error: sqlx::Error| BmdbError::InvalidUrl {
            reason: redacted_url_error(&error, url),
        })?;
        Ok(Self {
            options,
            dialect: Dialect::Postgres,
            max_connections: 16,
            application: application.to_owned(),
            short_reads: false,
            search_path: None,
        })
    }

    /// Host, port and database for people, without credentials.
    #[must_use]
    pub fn address(&self) -> String {
        let database = self.options.get_database().unwrap_or("(default database)");
        match self.options.get_socket() {
            Some(socket) => format!("{}/{database}", socket.display()),
            None => format!("{}:{}/{database}", self.options.get_host(), self.options.get_port()),
        }
    }

    fn connect_options(&self) -> PgConnectOptions {
        let (silence, statement) = if self.short_reads { ("2500ms", "2500ms") } else { ("5s", "10s") };
        let mut settings = vec![
            ("default_transaction_isolation", self.dialect.isolation().to_owned()),
            ("idle_in_transaction_session_timeout", silence.to_owned()),
            ("statement_timeout", statement.to_owned()),
            ("lock_timeout", "5s".to_owned()),
            ("tcp_keepalives_idle", "10".to_owned()),
            ("tcp_keepalives_interval", "5".to_owned()),
            ("tcp_keepalives_count", "3".to_owned()),
            ("jit", "off".to_owned()),
            ("TimeZone", "UTC".to_owned()),
        ];
        if let Some(search_path) = &self.search_path {
            settings.push(("search_path", search_path.clone()));
        }
        self.options
            .clone()
            .application_name(&self.application)
            .options(settings)
            .log_slow_statements(tracing::log::LevelFilter::Debug, Duration::from_secs(1))
            .log_statements(tracing::log::LevelFilter::Trace)
    }
}

/// A URL parser's message, with the password removed.
fn redacted_url_error(error: &sqlx::Error, url: &str) -> String {
    let text = error.to_string();
    // sqlx begins with the remark that this is about configuration, which the operator who gave a URL knows.
    let text = text.strip_prefix("error with configuration: ").unwrap_or(&text).to_owned();
    let secret = url.split('@').next().and_then(|user| user.rsplit(':').next()).unwrap_or_default();
    if secret.is_empty() { text } else { text.replace(secret, "…") }
}

/// A handle on the BMDB; cheap to clone.
#[derive(Clone)]
pub struct Bmdb {
    inner: Arc<Inner>,
}

struct Inner {
    pool: PgPool,
    options: PgConnectOptions,
    settings: ConnectionSettings,
    policy: watch::Sender<(i64, Arc<Policy>)>,
    metrics: BmdbMetrics,
}

impl std::fmt::Debug for Bmdb {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bmdb").field("place", &self.inner.settings.address()).finish_non_exhaustive()
    }
}

/// How often a transaction that loses against others is run before that is an error. Beside six others on small tables
/// a SERIALIZABLE one was observed to lose every second time: with twelve tries a busy host would fail a heartbeat
/// every few thousand.
const MAX_ATTEMPTS: u32 = 24;
/// How long closing waits: longer than any transaction may take.
const CLOSE_LIMIT: Duration = Duration::from_secs(30);
/// How long the answer to one statement is waited for: a little longer than `statement_timeout`.
const STATEMENT_LIMIT: Duration = Duration::from_secs(12);
/// How long a transaction may take, its statements and the pauses between them.
const TRANSACTION_LIMIT: Duration = Duration::from_secs(25);
/// How long a connection may take to answer when it is tested.
const TEST_LIMIT: Duration = Duration::from_secs(2);

impl Bmdb {
    /// Connects, and fails with a sentence when the server does not answer within ten seconds.
    ///
    /// Touches nothing: the schema may be missing or of any version.
    pub async fn connect(settings: ConnectionSettings) -> Result<Self, BmdbError> {
        let options = settings.connect_options();
        let pool = PgPoolOptions::new()
            .max_connections(settings.max_connections)
            .acquire_timeout(Duration::from_secs(10))
            .idle_timeout(Duration::from_mins(5))
            .test_before_acquire(false)
            .before_acquire(|connection, meta| {
                Box::pin(async move {
                    // It answered when it was returned to the pool.
                    if meta.idle_for < Duration::from_secs(1) {
                        Ok(true)
                    } else {
                        check_alive(connection).await
                    }
                })
            })
            .after_release(|connection, _| {
                Box::pin(async move {
                    // The pool tests it in a moment, within the limit that is set there.
                    if RETURNING_TO_POOL.try_with(|()| ()).is_ok() {
                        Ok(true)
                    } else {
                        check_alive(connection).await
                    }
                })
            })
            .connect_lazy_with(options.clone());
        // A pool hides why it cannot connect behind its own timeout; a single connection reports it.
        let first = tokio::time::timeout(Duration::from_secs(10), options.connect()).await;
        let reason = match first {
            Ok(Ok(mut connection)) => {
                let isolation = sqlx::query_file_scalar!("../../sql/schema/read_isolation.sql")
                    .fetch_one(&mut connection)
                    .await;
                let isolation = isolation.context("asking for the isolation level")?;
                drop(connection.close().await);
                if isolation != settings.dialect.isolation() {
                    return Err(BmdbError::Isolation {
                        place: settings.address(),
                        found: isolation,
                        dialect: settings.dialect,
                    });
                }
                let policy = watch::Sender::new((0, Arc::new(Policy::default())));
                let inner = Inner { pool, options, settings, policy, metrics: BmdbMetrics::default() };
                return Ok(Self { inner: Arc::new(inner) });
            }
            Ok(Err(error)) => unreachable_reason(&error),
            Err(_) => "no answer within 10 seconds".to_owned(),
        };
        Err(BmdbError::Unreachable { address: settings.address(), reason })
    }

    /// The common pool of connections.
    #[must_use]
    pub fn pool(&self) -> &PgPool {
        &self.inner.pool
    }

    /// Connections of the common pool that are idle, and those in use.
    pub(crate) fn pool_usage(&self) -> (u64, u64) {
        let pool = &self.inner.pool;
        let idle = u64::try_from(pool.num_idle()).unwrap_or(u64::MAX);
        (idle, u64::from(pool.size()).saturating_sub(idle))
    }

    /// A connection outside the pool: sessions are renewed on one, so that no other work delays that.
    pub(crate) async fn open_connection(&self) -> Result<PgConnection, sqlx::Error> {
        self.inner.options.connect().await
    }

    /// The dialect of the database.
    #[must_use]
    pub fn dialect(&self) -> Dialect {
        self.inner.settings.dialect
    }

    /// The settings it was connected with.
    #[must_use]
    pub fn settings(&self) -> &ConnectionSettings {
        &self.inner.settings
    }

    /// Metrics of this handle and its clones.
    #[must_use]
    pub fn metrics(&self) -> &BmdbMetrics {
        &self.inner.metrics
    }

    /// The policy as last read, with its version.
    #[must_use]
    pub fn policy(&self) -> (i64, Arc<Policy>) {
        self.inner.policy.borrow().clone()
    }

    /// A receiver that is notified whenever another policy was read.
    #[must_use]
    pub fn policy_changes(&self) -> watch::Receiver<(i64, Arc<Policy>)> {
        self.inner.policy.subscribe()
    }

    /// Remembers a policy that was read or written; an older version never replaces a newer one.
    pub(crate) fn cache_policy(&self, version: i64, policy: Policy) {
        self.inner.policy.send_if_modified(|known| {
            let newer = version > known.0;
            if newer {
                *known = (version, Arc::new(policy));
            }
            newer
        });
    }

    /// Closes every connection, after the transactions under way. Connections behind a network that
    /// swallows packets are left to the kernel after a while: nobody should have to kill a shepherd
    /// because its database is gone.
    pub async fn close(&self) {
        if tokio::time::timeout(CLOSE_LIMIT, self.inner.pool.close()).await.is_err() {
            tracing::warn!(database = %self.inner.settings.address(), "some connections to the BMDB did not close in time");
        }
    }

    /// Runs a transaction in a task of its own, and again whenever it loses against others.
    ///
    /// `body` may run several times and must have no effect but its statements. An error it returns rolls everything
    /// back.
    pub async fn transact<T, F>(&self, what: &'static str, body: F) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, BmdbError>> + Send + Sync + 'static,
    {
        let bmdb = self.clone();
        run_in_task(what, async move {
            for attempt in 0..MAX_ATTEMPTS {
                let mut connection = bmdb.acquire_connection(what).await?;
                // If `body` panics, a transaction is open.
                connection.close_on_drop();
                let tried = phase_exits::collect_exits(try_once(what, &mut connection, &body));
                let Ok(((tried, is_sound), left)) = tokio::time::timeout(TRANSACTION_LIMIT, tried).await
                else {
                    return Err(bmdb.abandon_connection(what, connection, TRANSACTION_LIMIT));
                };
                if is_sound {
                    release_connection(connection);
                } else {
                    drop(connection.detach());
                }
                match tried {
                    AttemptOutcome::Finished(result) => {
                        bmdb.metrics().count_transaction(what, result_label(&result));
                        if result.is_ok() {
                            phase_exits::count_exits(bmdb.metrics(), left);
                        }
                        return result;
                    }
                    AttemptOutcome::Failed { error, committing } => {
                        bmdb.handle_failed_attempt(what, error, committing, attempt).await?;
                    }
                }
            }
            bmdb.metrics().count_transaction(what, "failed");
            Err(BmdbError::Conflict { operation: what, tries: MAX_ATTEMPTS })
        })
        .await
    }

    /// Runs one statement that commits itself, in a task of its own, and again whenever it loses against others. If the
    /// answer is lost, the error is [`BmdbError::UnknownOutcome`].
    pub async fn statement<T, F>(&self, what: &'static str, body: F) -> Result<T, BmdbError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, sqlx::Error>> + Send + 'static,
    {
        let bmdb = self.clone();
        run_in_task(what, async move {
            for attempt in 0..MAX_ATTEMPTS {
                let mut connection = bmdb.acquire_connection(what).await?;
                let tried = tokio::time::timeout(STATEMENT_LIMIT, body(&mut connection));
                let Ok(tried) = tried.await else {
                    return Err(bmdb.abandon_connection(what, connection, STATEMENT_LIMIT));
                };
                release_connection(connection);
                match tried {
                    Ok(value) => {
                        bmdb.metrics().count_transaction(what, "done");
                        return Ok(value);
                    }
                    Err(error) => bmdb.handle_failed_attempt(what, error, true, attempt).await?,
                }
            }
            bmdb.metrics().count_transaction(what, "failed");
            Err(BmdbError::Conflict { operation: what, tries: MAX_ATTEMPTS })
        })
        .await
    }

    async fn acquire_connection(&self, what: &'static str) -> Result<PoolConnection<Postgres>, BmdbError> {
        let requested_at = Instant::now();
        let connection = self.inner.pool.acquire().await;
        self.metrics().pool_wait.observe(requested_at.elapsed().as_secs_f64());
        connection.map_err(|source| {
            self.metrics().count_transaction(what, "failed");
            BmdbError::Statement { operation: what, source }
        })
    }

    /// Decides about a failed attempt: a pause before the next one, or an error.
    async fn handle_failed_attempt(
        &self,
        what: &'static str,
        error: sqlx::Error,
        committing: bool,
        attempt: u32,
    ) -> Result<(), BmdbError> {
        match remedy_for(&error, committing) {
            Remedy::Retry => {
                self.metrics().count_transaction(what, "retried");
                tokio::time::sleep(conflict_backoff(attempt, rand::random())).await;
                Ok(())
            }
            Remedy::ResolveOutcome => {
                self.metrics().count_transaction(what, "unknown");
                Err(BmdbError::UnknownOutcome(error.to_string()))
            }
            Remedy::Fail => {
                self.metrics()
                    .count_transaction(what, if is_lock_not_available(&error) { "locked" } else { "failed" });
                Err(BmdbError::Statement { operation: what, source: error })
            }
        }
    }

    /// Abandons a connection that has not answered for longer than the server lets anything take: the network swallows
    /// what is sent. It is taken from the pool, and closing it ends its transaction.
    fn abandon_connection(
        &self,
        what: &'static str,
        connection: PoolConnection<Postgres>,
        limit: Duration,
    ) -> BmdbError {
        drop(connection.detach());
        self.metrics().count_transaction(what, "unknown");
        BmdbError::UnknownOutcome(format!("no answer within {} s", limit.as_secs()))
    }
}

tokio::task_local! {
    /// Set while [`release_connection`] puts a connection back, which limits how long that takes.
    static RETURNING_TO_POOL: ();
}

/// Puts a connection back into its pool, as dropping it would, but within a limit. The pool tests it then. A network
/// that swallows packets from that moment on would let the test wait for an answer that never comes, and a task that
/// closes the pool wait for the test.
fn release_connection(mut connection: PoolConnection<Postgres>) {
    tokio::spawn(
        RETURNING_TO_POOL
            .scope((), async move { tokio::time::timeout(TEST_LIMIT, connection.return_to_pool()).await }),
    );
}

/// Whether a pooled connection still answers. The pool's own test waits for ever for one behind a
/// network that swallows packets, and closing the pool would then wait for it.
async fn check_alive(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    match tokio::time::timeout(TEST_LIMIT, connection.ping()).await {
        Ok(answer) => answer.map(|()| true),
        Err(_) => Err(sqlx::Error::PoolTimedOut),
    }
}

async fn run_in_task<T: Send + 'static>(
    what: &'static str,
    body: impl Future<Output = Result<T, BmdbError>> + Send + 'static,
) -> Result<T, BmdbError> {
    match tokio::spawn(body).await {
        Ok(result) => result,
        Err(ended) => Err(BmdbError::TaskFailed { operation: what, reason: ended.to_string() }),
    }
}

/// Why the server cannot be reached, without the password that some messages repeat.
fn unreachable_reason(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Io(io) => match io.to_string().strip_prefix("invalid peer certificate: ") {
            Some(why) => format!(
                "TLS failed: its certificate is not to be trusted ({why}); name the CA that it comes from by \
                 sslrootcert=FILE in the URL, and the host as the certificate does"
            ),
            None => io.to_string(),
        },
        sqlx::Error::Tls(tls) => format!("TLS failed: {tls}"),
        sqlx::Error::Database(refusal) => refusal.message().to_owned(),
        other => other.to_string(),
    }
}

/// Adds to an error what was being done when a statement failed.
pub(crate) trait DbContext<T> {
    /// Wraps the database's error with the operation.
    fn context(self, what: &'static str) -> Result<T, BmdbError>;
}

impl<T> DbContext<T> for Result<T, sqlx::Error> {
    fn context(self, what: &'static str) -> Result<T, BmdbError> {
        self.map_err(|source| BmdbError::Statement { operation: what, source })
    }
}
