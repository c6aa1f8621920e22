//! Metrics and health over HTTP, for monitoring.
//!
//! `/metrics` is everything this process counts, as text: as OpenMetrics for whoever says that it takes that, as
//! Prometheus does, and in the older format for everybody else.
//! `/healthz` answers 200 while the BMDB answers and 503 with a sentence while
//! it does not. It says whether this process can do its work, not whether it
//! should be restarted: a shepherd without its database pauses and goes on.

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

use crate::bmdb::connection::Bmdb;
use crate::bmdb::metric_book::Book;
use crate::bmdb::metrics::Metrics;
use crate::server::error::ServerError;

const LISTEN_FLAG: &str = "--metrics_listen_address";
const PATIENCE: Duration = Duration::from_secs(2);
const GRACE: Duration = Duration::from_secs(2);
const OPEN_METRICS: &str = "application/openmetrics-text";
const OPEN_METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A metrics server that runs.
#[derive(Debug)]
pub struct MetricsServer {
    /// Where it listens.
    pub local_addr: SocketAddr,
    ended: JoinHandle<()>,
}

impl MetricsServer {
    /// Waits until it has ended, which it does after its token was cancelled.
    pub async fn ended(self) {
        if let Err(error) = self.ended.await {
            tracing::error!(%error, "the metrics server did not end in order");
        }
    }
}

#[derive(Clone)]
struct Shown {
    bmdb: Bmdb,
    metrics: Metrics,
}

/// Shows metrics and health until `stop`.
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
        .with_state(Shown { bmdb, metrics });
    let serving = axum::serve(listener, router).with_graceful_shutdown(stop.clone().cancelled_owned());
    let ended = tokio::spawn(async move {
        // Somebody who keeps a connection open must not keep the process.
        let late = async {
            stop.cancelled().await;
            tokio::time::sleep(GRACE).await;
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
    Ok(MetricsServer { local_addr, ended })
}

async fn show_metrics(State(shown): State<Shown>, headers: HeaderMap) -> Response {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let takes_open_metrics = accepted.into_iter().any(|accepted| accepted.contains(OPEN_METRICS));
    let (content_type, text) = if takes_open_metrics {
        (OPEN_METRICS_TYPE, shown.metrics.read(Book::open_metrics))
    } else {
        (PLAIN_TYPE, shown.metrics.read(Book::plain))
    };
    match text {
        Ok(text) => ([(header::CONTENT_TYPE, content_type)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn show_health(State(shown): State<Shown>) -> Response {
    let away = |said: &str| (StatusCode::SERVICE_UNAVAILABLE, format!("{said}\n")).into_response();
    match tokio::time::timeout(PATIENCE, shown.bmdb.read_policy()).await {
        Ok(Ok(_)) => "ok\n".into_response(),
        Ok(Err(error)) => {
            tracing::debug!(%error, "not healthy");
            away("the BMDB cannot be asked")
        }
        Err(_) => away("the BMDB does not answer"),
    }
}
