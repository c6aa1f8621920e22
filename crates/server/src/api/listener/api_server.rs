//! API server: start, routes and graceful shutdown.
//!
//! Its certificate has the same sources as that of the callback server. Like that one, the API server publishes a
//! session with its endpoints and the CA certificates that verify it. So a reader of the BMDB can find every server of
//! the fleet and verify each.
//!
//! Shutdown: the server accepts no more connections, streams end with a status that sends clients to another server,
//! calls in progress are answered, and the session is closed.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{get, post};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost_reflect::DescriptorPool;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic_health::ServingStatus;
use tonic_health::server::{HealthReporter, health_reporter};

use crate::api::context::ApiContext;
use crate::api::credential_checks::CredentialChecks;
use crate::api::listener::auth::{ApiRates, AuthLayer, auth_middleware};
use crate::api::listener::openapi;
use crate::api::listener::operator_acceptor::{ApiStream, accept_operators};
use crate::api::listener::transcode::{self, Transcoder};
use crate::api::listener::unread_body::announce_close;
use crate::api::services::FleetServices;
use crate::api::stream_limits::StreamLimits;
use crate::endpoint_registration::EndpointRegistration;
use crate::error::ServerError;
use crate::gate_metrics::{GatePressure, open_gate};
use crate::tls::certificate_rejection::CertificateRejections;
use crate::tls::server_certificate::{
    CertificateNames, CertificateRefusal, CertificateSource, RenewalClock, ServerCertificate, endpoint_hosts,
    served_expiry_text,
};
use crate::tls::server_config::operator_server_config;
use bmdb::connection::Bmdb;
use bmdb::connection::read_pool::ReadPool;
use bmdb::engine::session::{Session, Sessions};
use bmdb::metrics::Metrics;
use model::signed_artefact::signing_configuration::SigningConfiguration;
use proto::fleet::DESCRIPTORS;
use transport::gate::limits::{GateLimits, ListenerKind};

/// Component of an API server's session.
pub const COMPONENT: &str = "api";

const LISTEN_FLAG: &str = "--api_listen_address";
const SWEEP_INTERVAL: Duration = Duration::from_mins(1);
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);
const KEEPALIVE_INTERVAL: Duration = Duration::from_mins(1);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
const CALLS_PER_CONNECTION: u32 = 100;
const HEADER_LIMIT: u32 = 16 << 10;
/// Database connections for the credentials of streams, one look-up per second and credential. In the pool of
/// authentication they would wait behind the calls of busy clients, and streams end if they wait for ten seconds.
const CHECK_CONNECTIONS: u32 = 1;

/// Settings with which an API server starts.
#[derive(Clone, Debug)]
pub struct ApiSettings {
    /// Listen address; port 0 selects a free port.
    pub listen_address: SocketAddr,
    /// `HOST:PORT` under which operators reach this server. Empty: the listen address.
    pub endpoints: Vec<String>,
    /// Source of its certificate: files or the BMDB's authority.
    pub certificate: CertificateSource,
    /// Interval and clock for renewing the certificate.
    pub renewal: RenewalClock,
    /// Rate limits by source and by credential.
    pub rates: ApiRates,
    /// Limits on connections, by source and in all.
    pub limits: GateLimits,
    /// Most watches at once.
    pub max_watches: usize,
    /// Most database connections for queries.
    pub read_pool_connections: u32,
    /// Most database connections for authentication, and for finding the machines that calls name.
    pub auth_pool_connections: u32,
    /// Keys that verify the signatures of uploads.
    pub signing: Arc<SigningConfiguration>,
}

/// A running API server.
#[derive(Debug)]
pub struct ApiServer {
    /// The address on which it listens.
    pub local_addr: SocketAddr,
    /// CA certificates that verify it, DER. Empty: the trust store of the client.
    pub ca_certificates: Vec<Vec<u8>>,
    /// Why the present files of its certificate are refused.
    pub certificate_refusal: CertificateRefusal,
    task: JoinHandle<()>,
}

impl ApiServer {
    /// Waits until the server has stopped, which it does after its token was cancelled.
    pub async fn wait_until_stopped(self) {
        if let Err(error) = self.task.await {
            tracing::error!(%error, "the API server did not end in order");
        }
    }
}

/// Starts an API server that runs until `stop`.
pub async fn serve_api(
    bmdb: Bmdb,
    sessions: Sessions,
    settings: ApiSettings,
    metrics: Metrics,
    stop: CancellationToken,
) -> Result<ApiServer, ServerError> {
    let address = settings.listen_address;
    let listening = |source| ServerError::Listen { address, flag: LISTEN_FLAG, source };
    let listener = TcpListener::bind(address).await.map_err(listening)?;
    let local_addr = listener.local_addr().map_err(listening)?;
    let endpoints = match settings.endpoints.as_slice() {
        [] => vec![local_addr.to_string()],
        given => given.to_vec(),
    };
    let mut names = endpoint_hosts(&endpoints)?;
    // Clients on this host may use these names.
    names.extend(["localhost", "127.0.0.1", "::1"].map(ToOwned::to_owned));
    names.sort_unstable();
    names.dedup();
    // Without an endpoint nobody has promised operators a name: a certificate from files need not be for the listen
    // address.
    let names = CertificateNames { issued: names, required: endpoint_hosts(&settings.endpoints)? };
    let certificate =
        ServerCertificate::load(&settings.certificate, &bmdb, names, (settings.renewal.now)()).await?;
    let certificate = certificate.for_listener("API");
    let config = operator_server_config(certificate.served.clone())?;
    let authorities = certificate.subscribe_ca_certificates();
    let ca_certificates = authorities.borrow().clone();
    let certificate_refusal = certificate.subscribe_refusal();
    let descriptors = DescriptorPool::decode(DESCRIPTORS)
        .map_err(|error| ServerError::ApiDescriptors(error.to_string()))?;
    let read_pool = ReadPool::connect(&bmdb, settings.read_pool_connections).await?;
    let auth_pool = ReadPool::connect(&bmdb, settings.auth_pool_connections).await?;
    let check_pool = ReadPool::connect(&bmdb, CHECK_CONNECTIONS).await?;
    let checks = CredentialChecks::new(check_pool.clone());
    let auth = Arc::new(AuthLayer::new(
        auth_pool.clone(),
        checks.clone(),
        settings.rates,
        metrics.clone(),
        stop.clone(),
    ));
    let context = ApiContext {
        bmdb,
        read_pool: read_pool.clone(),
        auth_pool: auth_pool.clone(),
        credential_checks: checks,
        signing: settings.signing,
        watch_limits: StreamLimits::new(settings.max_watches),
        stop: stop.clone(),
    };
    let (health, router) = build_router(&context, auth.clone(), &descriptors)?;
    let pressure = GatePressure::default();
    let gate = open_gate(ListenerKind::Api, settings.limits, metrics.clone(), pressure.clone(), |_| ());

    let rejections = CertificateRejections::default();
    // Clients that have the authority's certificates can verify any certificate that is served.
    let details = {
        let (endpoints, served) = (endpoints.clone(), certificate.served.clone());
        let rejections = rejections.clone();
        move || {
            let ca_certificates: Vec<String> =
                authorities.borrow().iter().map(|der| STANDARD.encode(der)).collect();
            serde_json::json!({
                "endpoints": endpoints,
                "ca_certificates": ca_certificates,
                "certificate_ends": served_expiry_text(&served, &authorities),
                "turned_away_at": pressure.text(),
                "certificate_rejected_at": rejections.time_text(),
                "certificate_rejection": rejections.label(),
            })
        }
    };
    let check_interval = settings.renewal.check_interval;
    let registration = EndpointRegistration::new(sessions.clone(), COMPONENT, details, metrics);
    let session = registration.start_session().await?;
    let (accepted, connections) = mpsc::channel(64);
    let accepting = accept_operators(listener, config, gate, rejections, accepted, stop.clone());
    let task = tokio::spawn(run_server(ApiServerTasks {
        acceptor: tokio::spawn(accepting),
        certificate_renewal: tokio::spawn(certificate.run_renewal(settings.renewal, stop.clone())),
        rate_limit_sweep: tokio::spawn(sweep_rate_limits(auth, stop.clone())),
        registration: tokio::spawn(registration.keep_registered(session, check_interval, stop.clone())),
        connections,
        router,
        health,
        sessions,
        read_pools: [read_pool, auth_pool, check_pool],
        stop,
    }));
    tracing::info!(%local_addr, ?endpoints, "answering operators");
    Ok(ApiServer { local_addr, ca_certificates, certificate_refusal, task })
}

/// All routes: the gRPC services behind authentication, the same as JSON, and the health service.
fn build_router(
    context: &ApiContext,
    auth: Arc<AuthLayer>,
    descriptors: &DescriptorPool,
) -> Result<(HealthReporter, Router), ServerError> {
    let unreadable = |error: tonic_reflection::server::Error| ServerError::ApiDescriptors(error.to_string());
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let (reporter, health) = health_reporter();
    let grpc = Routes::new(health)
        .add_service(reflection().build_v1().map_err(unreadable)?)
        .add_service(reflection().build_v1alpha().map_err(unreadable)?)
        .prepare()
        .into_axum_router()
        .fallback_service(FleetServices::new(context))
        .layer(from_fn_with_state(auth.clone(), auth_middleware));
    let api_state = openapi::OpenApiState::new(descriptors, auth.clone());
    let transcoder = Transcoder::new(descriptors, auth, grpc.clone());
    let router = Router::new()
        .route("/openapi.json", get(openapi::serve_document).with_state(api_state))
        .route("/api/{*rpc}", post(transcode::handle_json_call).with_state(transcoder))
        .fallback_service(grpc)
        .layer(from_fn(announce_close));
    Ok((reporter, router))
}

struct ApiServerTasks {
    acceptor: JoinHandle<()>,
    certificate_renewal: JoinHandle<()>,
    rate_limit_sweep: JoinHandle<()>,
    registration: JoinHandle<Option<Session>>,
    connections: mpsc::Receiver<ApiStream>,
    router: Router,
    health: HealthReporter,
    sessions: Sessions,
    read_pools: [ReadPool; 3],
    stop: CancellationToken,
}

async fn run_server(parts: ApiServerTasks) {
    serve_calls(parts.router, parts.health, parts.connections, parts.stop).await;
    for (name, task) in [
        ("acceptor", parts.acceptor),
        ("certificate renewal", parts.certificate_renewal),
        ("rate limit sweep", parts.rate_limit_sweep),
    ] {
        if let Err(error) = task.await {
            tracing::error!(%error, name, "a part of the API server ended early");
        }
    }
    if let Ok(Some(session)) = parts.registration.await
        && let Err(error) = parts.sessions.close(&session, "the API server stopped").await
    {
        tracing::warn!(%error, "the API server's session will be closed by the reaper");
    }
    for read_pool in parts.read_pools {
        read_pool.bmdb().close().await;
    }
}

/// Serves calls until `stop`, and then those in progress for a grace period.
async fn serve_calls(
    router: Router,
    health: HealthReporter,
    connections: mpsc::Receiver<ApiStream>,
    stop: CancellationToken,
) {
    let incoming = ReceiverStream::new(connections).map(Ok::<_, io::Error>);
    let serving = Server::builder()
        .accept_http1(true)
        .timeout(CALL_TIMEOUT)
        .max_concurrent_streams(CALLS_PER_CONNECTION)
        .http2_max_header_list_size(HEADER_LIMIT)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_routes(Routes::from(router))
        .serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
    let late = async {
        stop.cancelled().await;
        // The empty name means the whole server.
        health.set_service_status("", ServingStatus::NotServing).await;
        tokio::time::sleep(SHUTDOWN_GRACE).await;
    };
    tokio::select! {
        ended = serving => {
            if let Err(error) = ended {
                tracing::error!(%error, "the API server ended");
            }
        }
        () = late => tracing::warn!("calls of operators were cut off after the grace period"),
    }
}

async fn sweep_rate_limits(auth: Arc<AuthLayer>, stop: CancellationToken) {
    while stop.run_until_cancelled(tokio::time::sleep(SWEEP_INTERVAL)).await.is_some() {
        auth.forget_idle();
    }
}
