//! Connection pool: acquiring, testing, returning and abandoning connections, and the gauge of those in use.
//!
//! A connection behind a network that swallows packets answers nothing for ever. So each test of a connection has a
//! limit, and a connection that did not answer within the limit of its transaction or statement leaves the pool:
//! closing it ends the transaction.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::encoding::{EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::Gauge;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection, PgConnection, PgPool, Postgres};

use crate::connection::access::{Access, is_read_only};
use crate::connection::error::{BmdbError, describe_error};
use crate::connection::session_plan::SessionPlan;
use crate::connection::settings::ConnectionSettings;
use crate::connection::{Bmdb, DedicatedRoute, Inner};
use crate::metrics::Metrics;
use crate::metrics::registry::Label;

/// How long a connection may take to answer when it is tested.
const TEST_LIMIT: Duration = Duration::from_secs(2);
/// How long a connection of the pool is waited for.
const ACQUIRE_LIMIT: Duration = Duration::from_secs(10);
/// How long it is waited for before the hosts are searched, where there are several.
const SEARCH_AFTER: Duration = Duration::from_secs(1);
/// A pause after a connection that failed at once.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Why a new connection of a pool could not be prepared the last time, and when. A pool hides that behind its own
/// timeout. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(super) struct PrepareFailure(Arc<Mutex<Option<(Instant, String)>>>);

impl PrepareFailure {
    fn record(&self, error: &sqlx::Error) {
        // Without the beginning that sqlx adds, because the reason becomes such an error again.
        let reason = match error {
            sqlx::Error::Io(error) => error.to_string(),
            other => describe_error(other),
        };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), reason));
    }

    /// The reason, if it is not older than that.
    fn since(&self, earliest: Instant) -> Option<String> {
        let last = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        last.filter(|(at, _)| *at >= earliest).map(|(_, reason)| reason)
    }
}

/// The pool of a handle with these settings.
///
/// Each connection is tested when it returns to the pool, and when it leaves the pool unless it returned within the last
/// second. Where the server must take writes, one is also tested every second, so that connections that are never idle
/// and only read leave a server that became a reader, too.
pub(super) fn new_pool(
    settings: &ConnectionSettings,
    options: PgConnectOptions,
    plan: SessionPlan,
    failure: PrepareFailure,
) -> PgPool {
    let access = plan.access();
    let (began, last_test) = (Instant::now(), AtomicU64::new(0));
    PgPoolOptions::new()
        .max_connections(settings.max_connections)
        .acquire_timeout(ACQUIRE_LIMIT)
        .idle_timeout(Duration::from_mins(5))
        .max_lifetime(settings.connection_lifetime)
        .test_before_acquire(false)
        .after_connect(move |connection, _| {
            let (plan, failure) = (plan.clone(), failure.clone());
            Box::pin(async move { plan.prepare(connection).await.inspect_err(|error| failure.record(error)) })
        })
        .before_acquire(move |connection, meta| {
            let second = began.elapsed().as_secs();
            let is_due =
                access == Access::ReadWrite && last_test.fetch_max(second, Ordering::Relaxed) < second;
            // It answered when it was returned to the pool.
            let is_tested = meta.idle_for < Duration::from_secs(1) && !is_due;
            Box::pin(async move { if is_tested { Ok(true) } else { check_usable(connection, access).await } })
        })
        .after_release(|connection, _| {
            Box::pin(async move {
                // The pool tests it in a moment, within the limit that is set there.
                if RETURNING_TO_POOL.try_with(|()| ()).is_ok() {
                    Ok(true)
                } else {
                    check_usable(connection, Access::Any).await
                }
            })
        })
        .connect_lazy_with(options)
}

impl Bmdb {
    /// Connections of the common pool that are idle, and those in use.
    fn pool_usage(&self) -> (u64, u64) {
        let pool = &self.inner.pool;
        let idle = u64::try_from(pool.num_idle()).unwrap_or(u64::MAX);
        (idle, u64::from(pool.size()).saturating_sub(idle))
    }

    /// A pool of one connection for a listener, which is closed with it. With several hosts it leads to the one that can be
    /// used now.
    pub(crate) async fn listener_pool(&self) -> Result<PgPool, sqlx::Error> {
        let settings = ConnectionSettings { max_connections: 1, ..self.settings().clone() };
        let DedicatedRoute { route, plan } = &self.inner.dedicated;
        if route.has_choice() {
            drop(self.open_dedicated_connection().await?.close().await);
        }
        Ok(new_pool(&settings, route.used_options(), plan.clone(), PrepareFailure::default()))
    }

    /// A connection of the pool. With several hosts, the pool follows the one that can be used: a connection to another one
    /// is not waited for any longer.
    async fn acquire_from_used_host(&self) -> Result<PoolConnection<Postgres>, sqlx::Error> {
        let Inner { pool, route, plan, failure, .. } = &*self.inner;
        if !route.has_choice() {
            return pool.acquire().await;
        }
        let accept = plan.acceptance();
        let until = Instant::now() + ACQUIRE_LIMIT;
        let mut used = route.subscribe();
        loop {
            used.mark_unchanged();
            let search = async {
                while Instant::now() < until {
                    tokio::time::sleep(SEARCH_AFTER).await;
                    if let Err(error) = route.search(&accept).await {
                        failure.record(&error);
                    }
                }
            };
            let error = tokio::select! {
                acquired = pool.acquire() => match acquired {
                    Err(error) if !matches!(error, sqlx::Error::PoolClosed) => error,
                    acquired => return acquired,
                },
                changed = used.changed() => match changed {
                    Ok(()) if Instant::now() < until => continue,
                    _ => sqlx::Error::PoolTimedOut,
                },
                () = search => sqlx::Error::PoolTimedOut,
            };
            // An error of the host in use alone is none of the others.
            route.search(&accept).await?;
            if Instant::now() >= until {
                return Err(error);
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    pub(super) async fn acquire_connection(
        &self,
        what: &'static str,
    ) -> Result<PoolConnection<Postgres>, BmdbError> {
        let requested_at = Instant::now();
        let connection = self.acquire_from_used_host().await;
        self.metrics().pool_wait.observe(requested_at.elapsed().as_secs_f64());
        connection.map_err(|source| {
            self.metrics().count_transaction(what, "failed");
            let is_timeout = matches!(source, sqlx::Error::PoolTimedOut);
            let reason = is_timeout.then(|| self.inner.failure.since(requested_at)).flatten();
            let source = reason.map_or(source, |reason| io::Error::other(reason).into());
            BmdbError::Statement { operation: what, source }
        })
    }

    /// Abandons a connection that has not answered for longer than the server lets anything take: the network swallows
    /// what is sent. It is taken from the pool, and closing it ends its transaction.
    pub(super) fn abandon_connection(
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
pub(super) fn release_connection(mut connection: PoolConnection<Postgres>) {
    tokio::spawn(
        RETURNING_TO_POOL
            .scope((), async move { tokio::time::timeout(TEST_LIMIT, connection.return_to_pool()).await }),
    );
}

/// Whether a pooled connection still answers, and takes writes if it must. The pool's own test waits for ever for one
/// behind a network that swallows packets, and closing the pool would then wait for it.
async fn check_usable(connection: &mut PgConnection, access: Access) -> Result<bool, sqlx::Error> {
    let test = async {
        match access {
            Access::Any => connection.ping().await.map(|()| true),
            Access::ReadWrite => is_read_only(connection).await.map(|is_reader| !is_reader),
        }
    };
    tokio::time::timeout(TEST_LIMIT, test).await.unwrap_or(Err(sqlx::Error::PoolTimedOut))
}

/// Connections of the common pool, by whether they are idle or in use.
#[derive(Debug)]
struct PoolConnectionsGauge(Bmdb);

impl EncodeMetric for PoolConnectionsGauge {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let (idle, used) = self.0.pool_usage();
        for (state, count) in [("idle", idle), ("used", used)] {
            encoder.encode_family(&[("state", state)])?.encode_gauge(&count)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }
}

impl Bmdb {
    /// Registers the metrics of this handle and its clones, and the gauge of its pool.
    pub fn register_metrics(&self, metrics: &Metrics) {
        self.metrics().register(metrics);
        let most: Gauge = Gauge::default();
        most.set(i64::from(self.settings().max_connections));
        metrics.register(|book| {
            book.add_process_metric(
                "bmdb_pool_connections",
                "Connections to the BMDB in the common pool",
                &[Label::one_of("state", ["idle", "used"])],
                PoolConnectionsGauge(self.clone()),
            );
            book.add_process_metric(
                "bmdb_pool_connections_limit",
                "Maximum number of connections of the common pool",
                &[],
                most,
            );
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_counts_for_those_who_waited_when_it_happened() {
        let failure = PrepareFailure::default();
        let before = Instant::now();
        assert_eq!(failure.since(before), None);
        failure.clone().record(&io::Error::other("the server is read-only").into());
        assert_eq!(failure.since(before).as_deref(), Some("the server is read-only"));
        assert_eq!(failure.since(Instant::now() + Duration::from_secs(1)), None);
    }
}
