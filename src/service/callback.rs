//! What listens in this process: the callback server, the API and the metrics.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::metrics::Metrics;
use crate::bmdb::secret::SecretsKey;
use crate::bmdb::session::Sessions;
use crate::model::time::{Rate, Span};
use crate::server::accept::ConnectionLimits;
use crate::server::api::door::ApiRates;
use crate::server::api::server::{ApiServer, ApiSettings, serve_api};
use crate::server::callback_server::{CallbackServer, CallbackSettings, serve_agents};
use crate::server::certificate::{Authorities, Certificate, CertificateSource, RenewalClock};
use crate::server::error::ServerError;
use crate::server::metrics::{MetricsServer, serve_metrics};
use crate::service::failure::Failure;
use crate::service::flags::Component;
use crate::service::plan::ServicePlan;
use crate::service::preflight::server_failure;

/// What listens in this process.
pub struct Callback {
    agents: Option<CallbackServer>,
    metrics: Option<MetricsServer>,
    api: Option<ApiServer>,
    stop: CancellationToken,
    /// What agents check a callback server against.
    pub authorities: Authorities,
    freshening: Option<JoinHandle<()>>,
}

impl Callback {
    /// Where metrics are shown, if they are.
    #[must_use]
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(|metrics| metrics.local_addr)
    }

    /// Where operators are answered, if they are.
    #[must_use]
    pub fn api_address(&self) -> Option<SocketAddr> {
        self.api.as_ref().map(|api| api.local_addr)
    }

    /// Stops listening; calls under way are answered first.
    pub async fn stop(self) {
        self.stop.cancel();
        if let Some(agents) = self.agents {
            agents.ended().await;
        }
        if let Some(metrics) = self.metrics {
            metrics.ended().await;
        }
        if let Some(api) = self.api {
            api.ended().await;
        }
        if let Some(freshening) = self.freshening
            && let Err(error) = freshening.await
        {
            tracing::error!(%error, "reading the certificate again did not end in order");
        }
    }
}

/// How often operators may call: far above what a person or a program that waits for answers does.
fn operator_rates() -> ApiRates {
    let rate = |milliseconds, burst| Rate {
        period: Span(std::time::Duration::from_millis(milliseconds)),
        burst: std::num::NonZeroU32::MIN.saturating_add(burst),
    };
    ApiRates { source: rate(10, 399), credential: rate(20, 199) }
}

/// Most connections of operators, watches of theirs, and connections of the API to the database: for what is
/// shown, and for letting calls in, which many watches must not delay.
const OPERATOR_CONNECTIONS: usize = 1000;
const OPERATOR_WATCHES: usize = 200;
const API_DATABASE_CONNECTIONS: u32 = 4;
const API_DOOR_CONNECTIONS: u32 = 2;

/// How often one agent may call: far above any heartbeat interval, far below what hurts.
fn agent_rate() -> Rate {
    Rate {
        period: Span(std::time::Duration::from_millis(200)),
        burst: std::num::NonZeroU32::MIN.saturating_add(19),
    }
}

/// Starts what the plan wants to listen. Where this process hears no agents itself, it still
/// learns what agents check the others against.
pub async fn start(
    plan: &ServicePlan,
    bmdb: &Bmdb,
    sessions: &Sessions,
    secrets: Option<Arc<SecretsKey>>,
    metrics: Metrics,
) -> Result<Callback, Failure> {
    let stop = CancellationToken::new();
    let certificate = certificate_source(plan, secrets.as_ref())?;
    let mut callback = Callback {
        agents: None,
        metrics: None,
        api: None,
        stop: stop.clone(),
        authorities: watch::Sender::new(Vec::new()).subscribe(),
        freshening: None,
    };
    let started = start_parts(plan, bmdb, sessions, (certificate, secrets), metrics, &mut callback).await;
    if let Err(error) = started {
        callback.stop().await;
        return Err(server_failure(&error));
    }
    Ok(callback)
}

async fn start_parts(
    plan: &ServicePlan,
    bmdb: &Bmdb,
    sessions: &Sessions,
    (certificate, secrets): (CertificateSource, Option<Arc<SecretsKey>>),
    metrics: Metrics,
    callback: &mut Callback,
) -> Result<(), ServerError> {
    let stop = callback.stop.clone();
    if plan.components.contains(&Component::Callback) {
        let settings = CallbackSettings {
            listen_address: plan.flags.agent_listen_address,
            endpoints: plan.endpoints.clone(),
            certificate: certificate.clone(),
            secrets,
            renewal: RenewalClock::default(),
            agent_rate: agent_rate(),
            limits: ConnectionLimits::default(),
        };
        let agents =
            serve_agents(bmdb.clone(), sessions.clone(), settings, metrics.clone(), stop.clone()).await?;
        callback.authorities = agents.authorities.clone();
        callback.agents = Some(agents);
    } else {
        let found = Certificate::get(&certificate, bmdb, Vec::new(), std::time::SystemTime::now()).await?;
        callback.authorities = found.authorities();
        callback.freshening = Some(tokio::spawn(found.keep_fresh(RenewalClock::default(), stop.clone())));
    }
    if plan.components.contains(&Component::Api) {
        let settings = ApiSettings {
            listen_address: plan.flags.api_listen_address,
            endpoints: plan.flags.api_endpoint.clone(),
            certificate,
            renewal: RenewalClock::default(),
            rates: operator_rates(),
            connections: OPERATOR_CONNECTIONS,
            watches: OPERATOR_WATCHES,
            database_connections: API_DATABASE_CONNECTIONS,
            door_connections: API_DOOR_CONNECTIONS,
        };
        let api = serve_api(bmdb.clone(), sessions.clone(), settings, metrics.clone(), stop.clone());
        callback.api = Some(api.await?);
    }
    if let Some(address) = plan.flags.metrics_listen_address {
        callback.metrics = Some(serve_metrics(bmdb.clone(), metrics, address, stop).await?);
    }
    Ok(())
}

/// The key that secrets are sealed with, made where there is a place for it and none yet.
pub fn secrets_key(path: Option<&Path>) -> Result<Option<Arc<SecretsKey>>, Failure> {
    let open = |path| SecretsKey::open(path).map_err(|error| Failure::usage(error.to_string()));
    Ok(path.map(open).transpose()?.map(Arc::new))
}

fn certificate_source(
    plan: &ServicePlan,
    secrets: Option<&Arc<SecretsKey>>,
) -> Result<CertificateSource, Failure> {
    let flags = &plan.flags;
    if let (Some(certificate), Some(key)) = (&flags.agent_tls_certificate_path, &flags.agent_tls_key_path) {
        return Ok(CertificateSource::Files {
            certificate: certificate.clone(),
            key: key.clone(),
            authority: flags.agent_endpoint_ca_certificate_path.clone(),
        });
    }
    let key = secrets.ok_or_else(|| {
        Failure::usage(
            "give --secrets_key_path FILE: the key that seals the callback server's CA, made if absent",
        )
    })?;
    Ok(CertificateSource::Shared(key.clone()))
}
