//! Prometheus endpoint: HTTP server for metrics and health checks.
//!
//! `/metrics` returns all metrics of this process as text: as OpenMetrics for clients that accept it, as Prometheus
//! does, and in the older format for others. `/healthz` returns 200 while the BMDB answers, and 503 with a sentence
//! while it does not. It reports whether this process can do its work, not whether it should be restarted: a shepherd
//! without its database pauses and goes on.
//!
//! Nobody who calls here has a credential. So the connections have a [gate](transport::gate), and health checks have one
//! database connection of their own: a flood of them takes none from heartbeats and loops. Checks that come while one
//! is under way share its result (`HealthCheck`).
//!
//! The listener has no session, because nobody looks for it in the BMDB. The process publishes in another session when
//! its gate last turned a connection away ([`MetricsServer::turned_away`]).

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::{IncomingStream, Listener};
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::error::ServerError;
use crate::gate_metrics::{GatePressure, open_gate};
use bmdb::connection::Bmdb;
use bmdb::connection::read_pool::ReadPool;
use bmdb::metrics::Metrics;
use bmdb::metrics::registry::MetricRegistry;
use model::time::Timestamp;
use transport::gate::limits::{GateLimits, ListenerKind};
use transport::gate::stream::GatedStream;
use transport::gate::{Gate, Place};

const LISTEN_FLAG: &str = "--metrics_listen_address";
const HEALTH_CHECK_TIMEOUT: Duration = Duration::from_secs(2);
/// Database connections for health checks.
const HEALTH_CONNECTIONS: u32 = 1;
/// How long the result of a health check is the answer to others.
const HEALTH_RESULT_AGE: Duration = Duration::from_millis(500);
/// Most health checks that wait for a result at once.
const MAX_HEALTH_CHECKS: usize = 64;
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);
const OPEN_METRICS: &str = "application/openmetrics-text";
const OPEN_METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A running metrics server.
#[derive(Debug)]
pub struct MetricsServer {
    /// The address on which it listens.
    pub local_addr: SocketAddr,
    /// When it last turned a connection away, by this host's clock; `None` if it never did.
    pub turned_away: watch::Receiver<Option<Timestamp>>,
    task: JoinHandle<()>,
}

impl MetricsServer {
    /// Waits until the server has stopped, which it does after its token was cancelled.
    pub async fn wait_until_stopped(self) {
        if let Err(error) = self.task.await {
            tracing::error!(%error, "the metrics server did not end in order");
        }
    }
}

#[derive(Clone)]
struct MetricsServerState {
    health: Arc<HealthCheck>,
    metrics: Metrics,
}

/// A listener with a gate for its connections.
struct GatedListener {
    gate: Gate,
    listener: TcpListener,
}

impl Listener for GatedListener {
    type Io = GatedStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (GatedStream, SocketAddr) {
        let stream = self.gate.accept(&self.listener).await;
        let peer = stream.peer_address();
        (stream, peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// The place of the connection of a request.
#[derive(Clone)]
struct ConnectionPlace(Place);

impl Connected<IncomingStream<'_, GatedListener>> for ConnectionPlace {
    fn connect_info(stream: IncomingStream<'_, GatedListener>) -> Self {
        Self(stream.io().place().clone())
    }
}

/// Reports each request to the gate.
async fn count_request(
    ConnectInfo(place): ConnectInfo<ConnectionPlace>,
    request: Request,
    next: Next,
) -> Response {
    let _answered = place.0.begin_request();
    next.run(request).await
}

/// The text of a health check that failed.
type Unhealthy = &'static str;

/// Checks the health of the database, one check at a time.
struct HealthCheck {
    pool: ReadPool,
    waiting: Semaphore,
    last: Mutex<Option<(Instant, Result<(), Unhealthy>)>>,
}

impl HealthCheck {
    fn new(pool: ReadPool) -> Self {
        Self { pool, waiting: Semaphore::new(MAX_HEALTH_CHECKS), last: Mutex::new(None) }
    }

    /// The result of a check that is at most [`HEALTH_RESULT_AGE`] old.
    async fn check(&self) -> Result<(), Unhealthy> {
        let Ok(_waiting) = self.waiting.try_acquire() else {
            return Err("too many health checks wait for the BMDB; try again");
        };
        let mut last = self.last.lock().await;
        if let Some((at, result)) = *last
            && at.elapsed() < HEALTH_RESULT_AGE
        {
            return result;
        }
        let result = match tokio::time::timeout(HEALTH_CHECK_TIMEOUT, self.pool.bmdb().read_policy()).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => {
                tracing::debug!(%error, "not healthy");
                Err("the BMDB cannot be queried")
            }
            Err(_) => Err("the BMDB does not answer"),
        };
        *last = Some((Instant::now(), result));
        result
    }
}

/// Serves metrics and health until `stop`.
pub async fn serve_metrics(
    bmdb: &Bmdb,
    metrics: Metrics,
    address: SocketAddr,
    limits: GateLimits,
    stop: CancellationToken,
) -> Result<MetricsServer, ServerError> {
    let listening = |source| ServerError::Listen { address, flag: LISTEN_FLAG, source };
    let listener = TcpListener::bind(address).await.map_err(listening)?;
    let local_addr = listener.local_addr().map_err(listening)?;
    let health = Arc::new(HealthCheck::new(ReadPool::connect(bmdb, HEALTH_CONNECTIONS).await?));
    let router = Router::new()
        .route("/metrics", get(show_metrics))
        .route("/healthz", get(show_health))
        .with_state(MetricsServerState { health: health.clone(), metrics: metrics.clone() })
        .layer(from_fn(count_request))
        .into_make_service_with_connect_info::<ConnectionPlace>();
    let pressure = GatePressure::default();
    let turned_away = pressure.subscribe();
    let gate = open_gate(ListenerKind::Metrics, limits, metrics, pressure, |_| ());
    let serving = axum::serve(GatedListener { gate, listener }, router)
        .with_graceful_shutdown(stop.clone().cancelled_owned());
    let ended = tokio::spawn(async move {
        // A client that keeps its connection open must not keep the process alive.
        let late = async {
            stop.cancelled().await;
            tokio::time::sleep(SHUTDOWN_GRACE).await;
        };
        tokio::select! {
            ended = serving => {
                if let Err(error) = ended {
                    tracing::error!(%error, "the metrics server ended");
                }
            }
            () = late => {}
        }
        health.pool.bmdb().close().await;
    });
    tracing::info!(%local_addr, "showing metrics");
    Ok(MetricsServer { local_addr, turned_away, task: ended })
}

async fn show_metrics(State(shown): State<MetricsServerState>, headers: HeaderMap) -> Response {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let takes_open_metrics = accepted.into_iter().any(|accepted| accepted.contains(OPEN_METRICS));
    let (content_type, text) = if takes_open_metrics {
        (OPEN_METRICS_TYPE, shown.metrics.with_registry(MetricRegistry::encode_openmetrics))
    } else {
        (PLAIN_TYPE, shown.metrics.with_registry(MetricRegistry::encode_prometheus_text))
    };
    match text {
        Ok(text) => ([(header::CONTENT_TYPE, content_type)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn show_health(State(shown): State<MetricsServerState>) -> Response {
    match shown.health.check().await {
        Ok(()) => "ok\n".into_response(),
        Err(text) => (StatusCode::SERVICE_UNAVAILABLE, format!("{text}\n")).into_response(),
    }
}
