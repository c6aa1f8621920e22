//! Callback server: start, run and graceful shutdown.
//!
//! The server listens before it publishes itself. Its session in the BMDB contains the endpoints under which agents
//! reach it, and every callback server sends agents the endpoints of all live sessions. The endpoints of a server that
//! stopped or died disappear with its session.
//!
//! Shutdown, in this order: the server accepts no more connections, calls in progress are answered, heartbeats that
//! still wait are stored, and the session is closed.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use crate::callback::agent_acceptor::{AgentStream, accept_agents, agent_gate};
use crate::callback::callback_service::CallbackService;
use crate::callback::file_downloads::{ArtefactSource, FileDownloads, FileSource};
use crate::callback::heartbeat_validation::MESSAGE_LIMIT;
use crate::callback::image_source::ImageSource;
use crate::callback::snapshot_source::SnapshotSource;
use crate::endpoint_registration::EndpointRegistration;
use crate::error::ServerError;
use crate::gate_metrics::GatePressure;
use crate::rate_limiter::CallRateLimiter;
use crate::tls::certificate_rejection::CertificateRejections;
use crate::tls::server_certificate::{
    CaCertificates, CertificateNames, CertificateRefusal, CertificateSource, RenewalClock, ServerCertificate,
    endpoint_hosts, served_expiry_text,
};
use crate::tls::server_config::agent_server_config;
use bmdb::connection::Bmdb;
use bmdb::engine::session::{Session, Sessions};
use bmdb::fleet::secret::SecretsKey;
use bmdb::machine::heartbeat::group_commit::{GroupCommit, HeartbeatQueue};
use bmdb::metrics::Metrics;
use model::signed_artefact::signing_configuration::SigningConfiguration;
use model::time::Rate;
use proto::agent::v1::agent_callback_server::AgentCallbackServer;
use transport::gate::limits::GateLimits;

/// Component of a callback server's session.
pub const COMPONENT: &str = "callback";

const LISTEN_FLAG: &str = "--agent_listen_address";
const ENDPOINT_REFRESH_INTERVAL: Duration = Duration::from_secs(5);
const RATE_LIMIT_SWEEP_INTERVAL: Duration = Duration::from_mins(1);
const CALL_TIMEOUT: Duration = Duration::from_secs(15);
const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_mins(1);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// An agent has one call in progress; the others are for its retries.
const CALLS_PER_CONNECTION: u32 = 4;
const HEADER_LIMIT: u32 = 16 << 10;

/// Settings with which a callback server starts.
#[derive(Clone, Debug)]
pub struct CallbackSettings {
    /// Listen address; port 0 selects a free port.
    pub listen_address: SocketAddr,
    /// `HOST:PORT` under which agents reach this server. Empty: the listen address.
    pub endpoints: Vec<String>,
    /// Source of its certificate: files or the BMDB's authority.
    pub certificate: CertificateSource,
    /// Key that unseals orders with secrets; without it this server sends no such orders.
    pub secrets: Option<Arc<SecretsKey>>,
    /// Interval and clock for renewing the certificate.
    pub renewal: RenewalClock,
    /// Rate limit of one agent.
    pub agent_rate: Rate,
    /// Limits on agents' connections.
    pub limits: GateLimits,
    /// Keys that releases must be signed with.
    pub signing: Arc<SigningConfiguration>,
}

/// A running callback server.
#[derive(Debug)]
pub struct CallbackServer {
    /// The address on which it listens.
    pub local_addr: SocketAddr,
    /// Endpoints under which agents reach it.
    pub endpoints: Vec<String>,
    /// The CA certificates that agents verify it with.
    pub ca_certificates: CaCertificates,
    /// Why the present files of its certificate are refused.
    pub certificate_refusal: CertificateRefusal,
    task: JoinHandle<()>,
}

impl CallbackServer {
    /// Waits until the server has stopped, which it does after its token was cancelled.
    pub async fn wait_until_stopped(self) {
        if let Err(error) = self.task.await {
            tracing::error!(%error, "the callback server did not end in order");
        }
    }

    /// The CA certificates that agents currently verify it with, DER. Empty: their own trust stores.
    #[must_use]
    pub fn current_ca_certificates(&self) -> Vec<Vec<u8>> {
        self.ca_certificates.borrow().clone()
    }
}

/// Starts a callback server that runs until `stop`.
pub async fn serve_agents(
    bmdb: Bmdb,
    sessions: Sessions,
    settings: CallbackSettings,
    metrics: Metrics,
    stop: CancellationToken,
) -> Result<CallbackServer, ServerError> {
    let address = settings.listen_address;
    let listening = |source| ServerError::Listen { address, flag: LISTEN_FLAG, source };
    let listener = TcpListener::bind(address).await.map_err(listening)?;
    let local_addr = listener.local_addr().map_err(listening)?;
    let mut endpoints = settings.endpoints.clone();
    if endpoints.is_empty() {
        endpoints.push(local_addr.to_string());
    }
    let hosts = endpoint_hosts(&endpoints)?;
    let names = CertificateNames { issued: hosts.clone(), required: hosts };
    let certificate =
        ServerCertificate::load(&settings.certificate, &bmdb, names, (settings.renewal.now)()).await?;
    let config = agent_server_config(certificate.served.clone())?;
    bmdb.read_policy().await?;
    let pressure = GatePressure::default();
    let gate = agent_gate(settings.limits, &metrics, pressure.clone());
    let rejections = CertificateRejections::default();
    let known = {
        let (endpoints, served) = (endpoints.clone(), certificate.served.clone());
        let (rejections, announced) = (rejections.clone(), certificate.subscribe_ca_certificates());
        move || {
            serde_json::json!({
                "endpoints": endpoints,
                "certificate_ends": served_expiry_text(&served, &announced),
                "turned_away_at": pressure.text(),
                "certificate_rejected_at": rejections.time_text(),
                "certificate_rejection": rejections.label(),
            })
        }
    };
    let registration = EndpointRegistration::new(sessions.clone(), COMPONENT, known, metrics.clone());
    let session = registration.start_session().await?;

    let check_interval = settings.renewal.check_interval;
    let authorities = certificate.subscribe_ca_certificates();
    let certificate_refusal = certificate.subscribe_refusal();
    let (sender, endpoints_alive) = watch::channel(endpoints.clone());
    let rate_limiter = Arc::new(CallRateLimiter::new(settings.agent_rate));
    let (heartbeats, group_commit) = HeartbeatQueue::new(bmdb.clone(), sessions.process(), metrics.clone());
    let service = CallbackService {
        heartbeats,
        bmdb: bmdb.clone(),
        endpoints: endpoints_alive,
        ca_certificates: authorities.clone(),
        rate_limiter: rate_limiter.clone(),
        downloads: FileDownloads::new(
            file_sources(&bmdb, settings.secrets.as_ref()),
            metrics.clone(),
            stop.clone(),
        ),
        secrets: settings.secrets,
        signing: settings.signing,
        metrics: metrics.clone(),
    };
    let (accepted, connections) = mpsc::channel(256);
    let accepting =
        accept_agents(listener, config, gate, metrics.clone(), rejections, accepted, stop.clone());
    let ended = tokio::spawn(run_server(CallbackServerTasks {
        acceptor: tokio::spawn(accepting),
        certificate_renewal: tokio::spawn(certificate.run_renewal(settings.renewal, stop.clone())),
        rate_limit_sweep: tokio::spawn(sweep_rate_limits(rate_limiter, stop.clone())),
        endpoint_refresh: tokio::spawn(refresh_endpoints(bmdb, endpoints.clone(), sender, stop.clone())),
        registration: tokio::spawn(registration.keep_registered(session, check_interval, stop.clone())),
        connections,
        service,
        group_commit,
        sessions,
        stop,
    }));
    tracing::info!(%local_addr, ?endpoints, "listening for agents");
    Ok(CallbackServer {
        local_addr,
        endpoints,
        ca_certificates: authorities,
        certificate_refusal,
        task: ended,
    })
}

/// The sources of the files that machines download.
fn file_sources(bmdb: &Bmdb, secrets: Option<&Arc<SecretsKey>>) -> Vec<Arc<dyn FileSource>> {
    let mut sources: Vec<Arc<dyn FileSource>> = vec![Arc::new(ArtefactSource(bmdb.clone()))];
    if let Some(secrets) = secrets {
        sources.push(Arc::new(SnapshotSource::new(bmdb.clone(), secrets.clone())));
        sources.push(Arc::new(ImageSource::new(bmdb.clone(), secrets.clone())));
    }
    sources
}

struct CallbackServerTasks {
    acceptor: JoinHandle<()>,
    certificate_renewal: JoinHandle<()>,
    rate_limit_sweep: JoinHandle<()>,
    endpoint_refresh: JoinHandle<()>,
    registration: JoinHandle<Option<Session>>,
    connections: mpsc::Receiver<AgentStream>,
    service: CallbackService,
    group_commit: GroupCommit,
    sessions: Sessions,
    stop: CancellationToken,
}

async fn run_server(parts: CallbackServerTasks) {
    let flush = CancellationToken::new();
    let committing = tokio::spawn(parts.group_commit.run(flush.clone()));
    serve_calls(parts.service, parts.connections, parts.stop).await;
    flush.cancel();
    for (name, task) in [
        ("acceptor", parts.acceptor),
        ("certificate renewal", parts.certificate_renewal),
        ("rate limit sweep", parts.rate_limit_sweep),
        ("endpoint refresh", parts.endpoint_refresh),
        ("group commit", committing),
    ] {
        if let Err(error) = task.await {
            tracing::error!(%error, name, "a part of the callback server ended early");
        }
    }
    if let Ok(Some(session)) = parts.registration.await
        && let Err(error) = parts.sessions.close(&session, "the callback server stopped").await
    {
        tracing::warn!(%error, "the callback server's session will be closed by the reaper");
    }
}

/// Serves calls until `stop`, and then those in progress for a grace period.
async fn serve_calls(
    service: CallbackService,
    connections: mpsc::Receiver<AgentStream>,
    stop: CancellationToken,
) {
    let service = AgentCallbackServer::new(service).max_decoding_message_size(MESSAGE_LIMIT);
    let incoming = ReceiverStream::new(connections).map(Ok::<_, io::Error>);
    let serving = Server::builder()
        .timeout(CALL_TIMEOUT)
        .max_concurrent_streams(CALLS_PER_CONNECTION)
        .http2_max_header_list_size(HEADER_LIMIT)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_service(service)
        .serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
    let late = async {
        stop.cancelled().await;
        tokio::time::sleep(SHUTDOWN_GRACE).await;
    };
    tokio::select! {
        ended = serving => {
            if let Err(error) = ended {
                tracing::error!(%error, "the callback server ended");
            }
        }
        () = late => tracing::warn!("calls of agents were cut off after the grace period"),
    }
}

/// Refreshes the endpoints of all callback servers every few seconds. While the database is away, they do not change.
async fn refresh_endpoints(
    bmdb: Bmdb,
    own: Vec<String>,
    sender: watch::Sender<Vec<String>>,
    stop: CancellationToken,
) {
    loop {
        match bmdb.live_callback_endpoints().await {
            Ok(mut alive) => {
                alive.extend(own.iter().cloned());
                alive.sort_unstable();
                alive.dedup();
                sender.send_if_modified(|known| {
                    let changed = *known != alive;
                    *known = alive;
                    changed
                });
            }
            Err(error) => tracing::debug!(%error, "cannot look for other callback servers"),
        }
        if stop.run_until_cancelled(tokio::time::sleep(ENDPOINT_REFRESH_INTERVAL)).await.is_none() {
            return;
        }
    }
}

async fn sweep_rate_limits(rate_limiter: Arc<CallRateLimiter>, stop: CancellationToken) {
    while stop.run_until_cancelled(tokio::time::sleep(RATE_LIMIT_SWEEP_INTERVAL)).await.is_some() {
        rate_limiter.forget_idle();
    }
}
