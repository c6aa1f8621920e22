//! Prometheus endpoint: HTTP server for metrics and health checks.
//!
//! `/metrics` returns all metrics of this process as text: as OpenMetrics for clients that accept it, as Prometheus
//! does, and in the older format for others. `/healthz` returns 200 while the BMDB answers, and 503 with a sentence
//! while it does not. It reports whether this process can do its work, not whether it should be restarted: a shepherd
//! without its database pauses and goes on.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::error::ServerError;
use bmdb::connection::Bmdb;
use bmdb::metrics::Metrics;
use bmdb::metrics::registry::MetricRegistry;

const LISTEN_FLAG: &str = "--metrics_listen_address";
const HEALTH_CHECK_TIMEOUT: Duration = Duration::from_secs(2);
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);
const OPEN_METRICS: &str = "application/openmetrics-text";
const OPEN_METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A running metrics server.
#[derive(Debug)]
pub struct MetricsServer {
    /// The address on which it listens.
    pub local_addr: SocketAddr,
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
    bmdb: Bmdb,
    metrics: Metrics,
}

/// Serves metrics and health until `stop`.
pub async fn serve_metrics(
    bmdb: Bmdb,
    metrics: Metrics,
    address: SocketAddr,
    stop: CancellationToken,
) -> Result<MetricsServer, ServerError> {
    let listening = |source| ServerError::Listen { address, flag: LISTEN_FLAG, source };
    let listener = TcpListener::bind(address).await.map_err(listening)?;
    let local_addr = listener.local_addr().map_err(listening)?;
    let router = Router::new()
        .route("/metrics", get(show_metrics))
        .route("/healthz", get(show_health))
        .with_state(MetricsServerState { bmdb, metrics });
    let serving = axum::serve(listener, router).with_graceful_shutdown(stop.clone().cancelled_owned());
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
    });
    tracing::info!(%local_addr, "showing metrics");
    Ok(MetricsServer { local_addr, task: ended })
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
    let away = |text: &str| (StatusCode::SERVICE_UNAVAILABLE, format!("{text}\n")).into_response();
    match tokio::time::timeout(HEALTH_CHECK_TIMEOUT, shown.bmdb.read_policy()).await {
        Ok(Ok(_)) => "ok\n".into_response(),
        Ok(Err(error)) => {
            tracing::debug!(%error, "not healthy");
            away("the BMDB cannot be queried")
        }
        Err(_) => away("the BMDB does not answer"),
    }
}
