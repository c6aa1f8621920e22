//! Connection to the BMDB: pool, transactions with retry, time limits, schema, reads, private server.
//!
//! [`Bmdb`] is the handle that everything else in this crate takes. It has a pool of connections, the policy as last
//! read, and the metrics of what it sends.
//!
//! # How it works
//!
//! * [`settings`] says where the database is and what is set on every connection; [`dialect`] which kind of database it
//!   is. [`url`] finds and masks passwords in URLs, `url_parameters` adapts URLs to sqlx, and [`tls_files`] reads and judges
//!   the files of certificates that they name.
//! * [`access`]: whether a server takes writes, and what happens to a connection to one that does not. `unreachable`
//!   states why a server cannot be reached.
//! * `durability` warns about a server that loses commits that it answered.
//! * [`budget`] compares the connections that are wanted with those that can be had.
//! * `session_plan` brings the settings of each connection into force, [`session_state`] refuses one that is not as it must
//!   be, and `pooler` finds poolers on which a shepherd cannot work.
//! * `host_list` reads the hosts of a URL, and `host_route` finds the one to connect to: the first that can be used.
//! * `direct` compares the server of dedicated connections, which can go around a pooler, with that of the pool.
//! * `pool` acquires connections, tests them within a limit, and abandons those that no longer answer.
//! * `transaction` runs a transaction ([`Bmdb::transact`]) or a single statement ([`Bmdb::statement`]), and again when
//!   it loses against others; `attempt` hides their types from what runs them. [`error`] decides for each error of the
//!   database whether to retry, to find out what happened, or to fail.
//! * [`read_pool`] reads at one moment of the database, without locks and with a limit: for people and for the API.
//! * [`schema`] brings the schema up to date. Every program checks its version before it works.
//! * [`private_postgres`] starts a server of its own, for the demo, for tests and for a site without PostgreSQL.
//!
//! # Invariants
//!
//! * Every transaction runs in a task of its own that nobody aborts. A worker that is cancelled drops the future that
//!   waits for it, never the transaction: dropped half-way, a connection would go back to its pool with a transaction
//!   open.
//! * Every transaction has a limit. The server's own timeouts, set on every connection, bound a transaction. Where not
//!   even those arrive, because the network swallows what is sent, the connection is abandoned with its transaction,
//!   and the outcome is unknown.
//! * No error, log line or display contains a password.
//! * Correctness does not depend on the dialect: `NOTIFY` and `SKIP LOCKED` only make things faster.
//!
//! # Notes for the next implementor
//!
//! * The body of a transaction may run several times. It has no effect but its statements, and computes again what it
//!   returns.
//! * The name of an operation ("claiming") is in error messages and is a label of a metric. It is a constant text,
//!   never made from data.
//! * After [`BmdbError::UnknownOutcome`] the transaction happened or not. The caller must be able to find out: by a
//!   fence in history, by an idempotency key in the audit, or because doing it again does no harm.

use std::sync::Arc;
use std::time::Duration;

use sqlx::{ConnectOptions as _, Connection as _, PgConnection, PgPool};
use tokio::sync::watch;

use crate::connection::access::{Access, accept_unprepared};
use crate::connection::dialect::Dialect;
use crate::connection::direct::{OPEN_LIMIT, ServerComparison, describe_mismatch};
use crate::connection::error::BmdbError;
use crate::connection::host_route::HostRoute;
use crate::connection::pool::{PrepareFailure, new_pool};
use crate::connection::pooler::{probe_server, session_fault};
use crate::connection::session_plan::{SessionPlan, UnmetSetting};
use crate::connection::session_state::{SessionFault, SessionState};
use crate::connection::settings::ConnectionSettings;
use crate::connection::tls_files::{read_tls_files, spawn_reads};
use crate::connection::unreachable::unreachable_reason;
use crate::metrics::database::BmdbMetrics;
use model::kubernetes::version::ReleaseVersion;
use model::policy::Policy;
use model::program_versions::postgres_version;
use model::time::Timestamp;

pub mod access;
mod attempt;
pub mod budget;
pub mod dialect;
mod direct;
mod durability;
pub mod error;
pub mod host_list;
mod host_route;
mod pool;
mod pooler;
pub mod private_postgres;
pub mod read_pool;
pub mod schema;
mod session_plan;
pub mod session_state;
pub mod settings;
pub mod tls_files;
pub(crate) mod transaction;
mod unreachable;
pub mod url;
mod url_parameters;

const READING: &str = "reading the settings of a connection";
/// How long closing waits: longer than any transaction may take.
const CLOSE_LIMIT: Duration = Duration::from_secs(30);

/// A handle on the BMDB; cheap to clone.
#[derive(Clone)]
pub struct Bmdb {
    inner: Arc<Inner>,
}

struct Inner {
    pool: PgPool,
    route: HostRoute,
    settings: ConnectionSettings,
    plan: SessionPlan,
    dedicated: DedicatedRoute,
    failure: PrepareFailure,
    policy: watch::Sender<(i64, Arc<Policy>)>,
    metrics: BmdbMetrics,
    server_version: Option<ReleaseVersion>,
    /// Why the files of certificates that the URLs name are refused, as a sentence.
    tls_refusal: watch::Sender<Option<String>>,
}

/// How connections outside the pool are opened.
#[derive(Clone)]
struct DedicatedRoute {
    route: HostRoute,
    plan: SessionPlan,
}

impl std::fmt::Debug for Bmdb {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bmdb").field("place", &self.inner.settings.address()).finish_non_exhaustive()
    }
}

impl Bmdb {
    /// Connects, and fails with a sentence when the server does not answer within ten seconds.
    ///
    /// Touches nothing: the schema may be missing or of any version.
    pub async fn connect(settings: ConnectionSettings) -> Result<Self, BmdbError> {
        let (route, direct) = (HostRoute::of_pool(&settings), HostRoute::of_direct_url(&settings));
        route.use_tls_contents(read_tls_files(&settings.tls_files).await?);
        if let (Some(url), Some(direct)) = (&settings.direct, &direct) {
            direct.use_tls_contents(read_tls_files(&url.tls_files).await?);
        }
        let plan = SessionPlan::new(&settings);
        // A pool hides why it cannot connect behind its own timeout; a single connection reports it.
        let accept = accept_unprepared(if route.has_choice() { settings.access } else { Access::Any });
        let first = tokio::time::timeout(Duration::from_secs(10), route.connect(&accept)).await;
        let reason = match first {
            Ok(Ok(mut connection)) => {
                // CockroachDB reports the version of a PostgreSQL that it resembles.
                let is_postgres = settings.dialect == Dialect::Postgres;
                let server_version =
                    connection.server_version_num().filter(|_| is_postgres).map(postgres_version);
                let address = settings.address();
                // A pooler dropped the options. If it gives the session to others, what is prepared or set now would
                // stay there.
                let in_force = plan.is_in_force(&mut connection).await.context(READING)?;
                if !in_force {
                    drop(connection.close().await);
                    probe_server(&route.used_options(), address.clone()).await?;
                    connection = route.used_options().connect().await.context(READING)?;
                }
                let session = read_session(&mut connection, &plan, in_force).await;
                drop(connection.close().await);
                let (state, unmet) = session.map_err(|source| {
                    let code = source.as_database_error().and_then(sqlx::error::DatabaseError::code);
                    let fault = session_fault(&code.unwrap_or_default(), address.clone());
                    fault.unwrap_or(BmdbError::Statement { operation: READING, source })
                })?;
                match plan.find_fault(&state) {
                    None => {}
                    Some(SessionFault::ReadOnly) => return Err(BmdbError::ReadOnly { address }),
                    Some(fault) => return Err(BmdbError::UnusableSession { address, fault }),
                }
                if let Some(UnmetSetting { name: setting, requested, found }) = unmet {
                    return Err(BmdbError::SettingNotInForce { address, setting, requested, found });
                }
                let plan = plan.with_schema(state.schema);
                let failure = PrepareFailure::default();
                let pool = new_pool(&settings, route.used_options(), plan.clone(), failure.clone());
                route.attach_pool(&pool);
                let policy = watch::Sender::new((0, Arc::new(Policy::default())));
                let metrics = BmdbMetrics::default();
                let dedicated = DedicatedRoute {
                    route: direct.unwrap_or_else(|| route.clone()),
                    plan: plan.with_comparison(ServerComparison::new(&settings, &route)),
                };
                let inner = Inner {
                    pool,
                    route,
                    settings,
                    plan,
                    dedicated,
                    failure,
                    policy,
                    metrics,
                    server_version,
                    tls_refusal: watch::Sender::new(None),
                };
                let bmdb = Self { inner: Arc::new(inner) };
                spawn_reads(&bmdb);
                return Ok(bmdb);
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

    /// A connection outside the pool, to the address of the pool.
    pub(crate) async fn open_connection(&self) -> Result<PgConnection, sqlx::Error> {
        self.inner.route.connect(&self.inner.plan.acceptance()).await
    }

    /// A connection outside the pool, by the direct URL if there is one: sessions are renewed on one, so that no other work
    /// delays that. Fails if it leads to another server than the pool.
    pub(crate) async fn open_dedicated_connection(&self) -> Result<PgConnection, sqlx::Error> {
        let DedicatedRoute { route, plan } = &self.inner.dedicated;
        route.connect(&plan.acceptance()).await
    }

    /// Connects by the direct URL, if there is one. Fails with a sentence when that cannot be, and when it leads to another
    /// server than the pool.
    pub async fn check_direct_url(&self) -> Result<(), BmdbError> {
        let Some(direct) = &self.inner.settings.direct else { return Ok(()) };
        let reason = match tokio::time::timeout(OPEN_LIMIT, self.open_dedicated_connection()).await {
            Ok(Ok(connection)) => {
                drop(connection.close().await);
                return Ok(());
            }
            Ok(Err(error)) => match describe_mismatch(&error) {
                Some(sentence) => return Err(BmdbError::DifferentServers(sentence)),
                None => unreachable_reason(&error),
            },
            Err(_) => format!("no answer within {} seconds", OPEN_LIMIT.as_secs()),
        };
        Err(BmdbError::Unreachable { address: format!("{} (--bmdb_direct_url)", direct.address()), reason })
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

    /// Version of the PostgreSQL, as it reported it when this handle connected; `None` for another server.
    #[must_use]
    pub fn server_version(&self) -> Option<ReleaseVersion> {
        self.inner.server_version
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
}

/// Brings the settings of the first connection into force. Returns what it is then, and a setting that is not in force.
async fn read_session(
    connection: &mut PgConnection,
    plan: &SessionPlan,
    in_force: bool,
) -> Result<(SessionState, Option<UnmetSetting>), sqlx::Error> {
    let unmet = if in_force { None } else { plan.apply(connection).await? };
    Ok((SessionState::read(connection).await?, unmet))
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

/// Reads the database's clock in a transaction.
pub async fn database_now(tx: &mut PgConnection) -> Result<Timestamp, BmdbError> {
    read_clock(tx).await.context("reading what to show")
}

/// Reads the database's clock.
pub(crate) async fn read_clock(connection: &mut PgConnection) -> Result<Timestamp, sqlx::Error> {
    sqlx::query_scalar!(r#"SELECT clock_timestamp() AS "now!""#).fetch_one(connection).await
}
