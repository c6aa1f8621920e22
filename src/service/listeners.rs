//! Listeners of this process: callback server, API, metrics.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::engine::session::Sessions;
use crate::bmdb::fleet::secret::SecretsKey;
use crate::bmdb::metrics::Metrics;
use crate::model::time::{Rate, Span, Timestamp};
use crate::server::api::listener::api_server::{ApiServer, ApiSettings, serve_api};
use crate::server::api::listener::auth::ApiRates;
use crate::server::callback::callback_server::{CallbackServer, CallbackSettings, serve_agents};
use crate::server::error::ServerError;
use crate::server::metrics_server::{MetricsServer, serve_metrics};
use crate::server::tls::server_certificate::{
    CaCertificates, CertificateNames, CertificateRefusal, CertificateSource, RenewalClock, ServerCertificate,
    endpoint_hosts,
};
use crate::service::failure::{ExitFailure, server_failure};
use crate::service::flags::ServiceComponent;
use crate::service::service_plan::{API_AUTH_CONNECTIONS, API_DATABASE_CONNECTIONS, ServicePlan};
use crate::transport::gate::limits::{GateLimits, ListenerKind};
use crate::transport::gate::open_files::available_files;

/// The listeners of this process.
pub struct Listeners {
    callback_server: Option<CallbackServer>,
    metrics: Option<MetricsServer>,
    api: Option<ApiServer>,
    stop: CancellationToken,
    /// The CA certificates that agents verify a callback server with.
    pub authorities: CaCertificates,
    /// Why the present files of each certificate are refused.
    pub certificate_refusals: Vec<CertificateRefusal>,
    certificate_refresh: Option<JoinHandle<()>>,
}

impl Listeners {
    /// The address of the metrics server, if it runs.
    #[must_use]
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(|metrics| metrics.local_addr)
    }

    /// The API server, if it runs.
    #[must_use]
    pub fn api(&self) -> Option<&ApiServer> {
        self.api.as_ref()
    }

    /// When the metrics server last turned a connection away, by this host's clock; `None` if it never did or does not
    /// run.
    #[must_use]
    pub fn metrics_turned_away(&self) -> watch::Receiver<Option<Timestamp>> {
        let never = || watch::channel(None).1;
        self.metrics.as_ref().map_or_else(never, |metrics| metrics.turned_away.clone())
    }

    /// Stops listening. Calls under way are answered first.
    pub async fn stop(self) {
        self.stop.cancel();
        if let Some(server) = self.callback_server {
            server.wait_until_stopped().await;
        }
        if let Some(metrics) = self.metrics {
            metrics.wait_until_stopped().await;
        }
        if let Some(api) = self.api {
            api.wait_until_stopped().await;
        }
        if let Some(refresh) = self.certificate_refresh
            && let Err(error) = refresh.await
        {
            tracing::error!(%error, "the refresh of the certificate ended early");
        }
    }
}

/// Rate limits of operators' calls: far above what a person or a well-behaved program needs.
fn operator_rates() -> ApiRates {
    let rate = |milliseconds, burst| Rate {
        period: Span(std::time::Duration::from_millis(milliseconds)),
        burst: std::num::NonZeroU32::MIN.saturating_add(burst),
    };
    ApiRates { source: rate(10, 399), credential: rate(20, 199) }
}

/// Most watches of operators.
const OPERATOR_WATCHES: usize = 200;

/// Rate limit of one agent's calls: far above any heartbeat interval, far below what hurts.
fn agent_rate() -> Rate {
    Rate {
        period: Span(std::time::Duration::from_millis(200)),
        burst: std::num::NonZeroU32::MIN.saturating_add(19),
    }
}

/// Starts the listeners of the plan. If this process has no callback server, it still loads the CA certificates that
/// agents verify the others with.
pub async fn start_listeners(
    plan: &ServicePlan,
    bmdb: &Bmdb,
    sessions: &Sessions,
    secrets: Option<Arc<SecretsKey>>,
    metrics: Metrics,
) -> Result<Listeners, ExitFailure> {
    let stop = CancellationToken::new();
    let certificate = certificate_source(plan, secrets.as_ref())?;
    let mut listeners = Listeners {
        callback_server: None,
        metrics: None,
        api: None,
        stop: stop.clone(),
        authorities: watch::Sender::new(Vec::new()).subscribe(),
        certificate_refusals: Vec::new(),
        certificate_refresh: None,
    };
    let started = start_parts(plan, bmdb, sessions, (certificate, secrets), metrics, &mut listeners).await;
    if let Err(error) = started {
        listeners.stop().await;
        return Err(server_failure(&error));
    }
    Ok(listeners)
}

async fn start_parts(
    plan: &ServicePlan,
    bmdb: &Bmdb,
    sessions: &Sessions,
    (certificate, secrets): (CertificateSource, Option<Arc<SecretsKey>>),
    metrics: Metrics,
    listeners: &mut Listeners,
) -> Result<(), ServerError> {
    let stop = listeners.stop.clone();
    let files = available_files();
    let limits = |kind| GateLimits::for_listener(kind, files);
    if plan.components.contains(&ServiceComponent::Callback) {
        let settings = CallbackSettings {
            listen_address: plan.flags.agent_listen_address,
            endpoints: plan.endpoints.clone(),
            certificate: certificate.clone(),
            secrets,
            renewal: RenewalClock::default(),
            agent_rate: agent_rate(),
            limits: limits(ListenerKind::Callback),
            signing: plan.signing.clone(),
        };
        let agents =
            serve_agents(bmdb.clone(), sessions.clone(), settings, metrics.clone(), stop.clone()).await?;
        listeners.authorities = agents.ca_certificates.clone();
        listeners.certificate_refusals.push(agents.certificate_refusal.clone());
        listeners.callback_server = Some(agents);
    } else {
        let names = CertificateNames { issued: Vec::new(), required: endpoint_hosts(&plan.endpoints)? };
        let found = ServerCertificate::load(&certificate, bmdb, names, std::time::SystemTime::now()).await?;
        let found = found.for_listener("none: this process gives its CA to agents");
        listeners.authorities = found.subscribe_ca_certificates();
        listeners.certificate_refusals.push(found.subscribe_refusal());
        listeners.certificate_refresh =
            Some(tokio::spawn(found.run_renewal(RenewalClock::default(), stop.clone())));
    }
    if plan.components.contains(&ServiceComponent::Api) {
        let settings = ApiSettings {
            listen_address: plan.flags.api_listen_address,
            endpoints: plan.flags.api_endpoint.clone(),
            certificate,
            renewal: RenewalClock::default(),
            rates: operator_rates(),
            limits: limits(ListenerKind::Api),
            max_watches: OPERATOR_WATCHES,
            read_pool_connections: API_DATABASE_CONNECTIONS,
            auth_pool_connections: API_AUTH_CONNECTIONS,
            signing: plan.signing.clone(),
        };
        let api = serve_api(bmdb.clone(), sessions.clone(), settings, metrics.clone(), stop.clone()).await?;
        listeners.certificate_refusals.push(api.certificate_refusal.clone());
        listeners.api = Some(api);
    }
    if let Some(address) = plan.flags.metrics_listen_address {
        listeners.metrics =
            Some(serve_metrics(bmdb, metrics, address, limits(ListenerKind::Metrics), stop).await?);
    }
    Ok(())
}

/// Opens the key that seals secrets, and creates the file if it does not exist. `None` without a path.
pub fn open_secrets_key(path: Option<&Path>) -> Result<Option<Arc<SecretsKey>>, ExitFailure> {
    let open = |path| SecretsKey::open(path).map_err(|error| ExitFailure::usage(error.to_string()));
    Ok(path.map(open).transpose()?.map(Arc::new))
}

fn certificate_source(
    plan: &ServicePlan,
    secrets: Option<&Arc<SecretsKey>>,
) -> Result<CertificateSource, ExitFailure> {
    let flags = &plan.flags;
    if let (Some(certificate), Some(key)) = (&flags.agent_tls_certificate_path, &flags.agent_tls_key_path) {
        return Ok(CertificateSource::Files {
            certificate: certificate.clone(),
            key: key.clone(),
            ca_certificate: flags.agent_endpoint_ca_certificate_path.clone(),
        });
    }
    let key = secrets.ok_or_else(|| {
        ExitFailure::usage(
            "give --secrets_key_path FILE: the key that seals the callback server's CA, made if absent",
        )
    })?;
    Ok(CertificateSource::CallbackCa(key.clone()))
}
