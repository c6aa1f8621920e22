//! The API server as a whole: what it is made of, and ending it in order.
//!
//! Its certificate comes from where the callback server's does. Like that one it makes itself known by a
//! session, with the endpoints it is reached at and what it is to be verified against, so that whoever may
//! read the BMDB can find every server of the fleet and knows each for what it is.
//!
//! The end: no more connections are taken, streams are told to go elsewhere, calls under way are answered,
//! the session is closed.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::middleware::from_fn_with_state;
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

use crate::bmdb::connection::Bmdb;
use crate::bmdb::look::Looks;
use crate::bmdb::metrics::Metrics;
use crate::bmdb::session::{Session, Sessions};
use crate::proto::fleet::DESCRIPTORS;
use crate::proto::fleet::v1::approvals_server::ApprovalsServer;
use crate::proto::fleet::v1::artefacts_server::ArtefactsServer;
use crate::proto::fleet::v1::audit_server::AuditServer;
use crate::proto::fleet::v1::backoffs_server::BackoffsServer;
use crate::proto::fleet::v1::budgets_server::BudgetsServer;
use crate::proto::fleet::v1::cluster_credentials_server::ClusterCredentialsServer;
use crate::proto::fleet::v1::cluster_kubernetes_server::ClusterKubernetesServer;
use crate::proto::fleet::v1::clusters_server::ClustersServer;
use crate::proto::fleet::v1::credentials_server::CredentialsServer;
use crate::proto::fleet::v1::issues_server::IssuesServer;
use crate::proto::fleet::v1::logs_server::LogsServer;
use crate::proto::fleet::v1::loops_server::LoopsServer;
use crate::proto::fleet::v1::machines_server::MachinesServer;
use crate::proto::fleet::v1::orders_server::OrdersServer;
use crate::proto::fleet::v1::plan_server::PlanServer;
use crate::proto::fleet::v1::policy_server::PolicyServer;
use crate::proto::fleet::v1::providers_server::ProvidersServer;
use crate::proto::fleet::v1::schedule_server::ScheduleServer;
use crate::proto::fleet::v1::sessions_server::SessionsServer;
use crate::proto::fleet::v1::statistics_server::StatisticsServer;
use crate::proto::fleet::v1::updates_server::UpdatesServer;
use crate::proto::fleet::v1::work_server::WorkServer;
use crate::server::api::approvals::ApprovalsService;
use crate::server::api::artefacts::{ArtefactsService, PUT_LIMIT};
use crate::server::api::audits::AuditService;
use crate::server::api::budgets::BudgetsService;
use crate::server::api::cluster_credentials::ClusterCredentialsService;
use crate::server::api::cluster_kubernetes::ClusterKubernetesService;
use crate::server::api::clusters::ClustersService;
use crate::server::api::credentials::CredentialsService;
use crate::server::api::door::{ApiRates, Door, guard};
use crate::server::api::fleet::FleetService;
use crate::server::api::listener::{ApiStream, accept};
use crate::server::api::logs::LogsService;
use crate::server::api::loops::LoopsService;
use crate::server::api::machines::MachinesService;
use crate::server::api::many::OrdersService;
use crate::server::api::openapi;
use crate::server::api::outlook::OutlookService;
use crate::server::api::site::Site;
use crate::server::api::transcode::{self, REQUEST_LIMIT, Transcoder};
use crate::server::api::updates::UpdatesService;
use crate::server::api::watches::Watches;
use crate::server::api::whole::Whole;
use crate::server::callback_server::host_of;
use crate::server::certificate::{Certificate, CertificateSource, RenewalClock, ends_of};
use crate::server::error::ServerError;
use crate::server::presence::Presence;
use crate::server::tls::operator_config;

/// Component of the session that an API server holds.
pub const COMPONENT: &str = "api";

const LISTEN_FLAG: &str = "--api_listen_address";
const FORGET_IDLE: Duration = Duration::from_mins(1);
const CALL_LIMIT: Duration = Duration::from_secs(30);
const GRACE: Duration = Duration::from_secs(5);
const KEEPALIVE: Duration = Duration::from_mins(1);
const KEEPALIVE_ANSWER: Duration = Duration::from_secs(20);
const CALLS_PER_CONNECTION: u32 = 100;
const HEADER_LIMIT: u32 = 16 << 10;

/// What an API server is started with.
#[derive(Clone, Debug)]
pub struct ApiSettings {
    /// Where to listen; port 0 takes a free one.
    pub listen_address: SocketAddr,
    /// `HOST:PORT` under which operators reach this server. Empty: the address listened on.
    pub endpoints: Vec<String>,
    /// Its certificate.
    pub certificate: CertificateSource,
    /// When it is looked at again.
    pub renewal: RenewalClock,
    /// How often somebody may call.
    pub rates: ApiRates,
    /// Most connections at once.
    pub connections: usize,
    /// Most watches at once.
    pub watches: usize,
    /// Most connections to the database for looking.
    pub database_connections: u32,
    /// Most connections to it for letting calls in, and for finding the machines they name.
    pub door_connections: u32,
}

/// An API server that runs.
#[derive(Debug)]
pub struct ApiServer {
    /// Where it listens.
    pub local_addr: SocketAddr,
    /// What it is verified against, DER. Empty: the trust store of whoever calls.
    pub ca_certificates: Vec<Vec<u8>>,
    ended: JoinHandle<()>,
}

impl ApiServer {
    /// Waits until it has ended, which it does after its token was cancelled.
    pub async fn ended(self) {
        if let Err(error) = self.ended.await {
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
    let mut names = endpoints.iter().map(|endpoint| host_of(endpoint)).collect::<Result<Vec<_>, _>>()?;
    // Whoever sits at this host may call it so.
    names.extend(["localhost", "127.0.0.1", "::1"].map(ToOwned::to_owned));
    names.sort_unstable();
    names.dedup();
    let certificate = Certificate::get(&settings.certificate, &bmdb, names, (settings.renewal.now)()).await?;
    let config = operator_config(certificate.shown.clone())?;
    let authorities = certificate.authorities();
    let ca_certificates = authorities.borrow().clone();
    let contracts =
        DescriptorPool::decode(DESCRIPTORS).map_err(|error| ServerError::Contracts(error.to_string()))?;
    let looks = Looks::connect(&bmdb, settings.database_connections).await?;
    let first_looks = Looks::connect(&bmdb, settings.door_connections).await?;
    let door = Arc::new(Door::new(first_looks.clone(), settings.rates, metrics.clone(), stop.clone()));
    let site = Site {
        bmdb,
        looks: looks.clone(),
        first_looks: first_looks.clone(),
        door: door.clone(),
        watches: Watches::new(settings.watches),
        stop: stop.clone(),
    };
    let (health, router) = router(site, &contracts)?;

    // Those who have taken the authority's certificates verify by them whatever certificate is shown.
    let known = {
        let (endpoints, shown) = (endpoints.clone(), certificate.shown.clone());
        move || {
            let authorities: Vec<String> =
                authorities.borrow().iter().map(|der| STANDARD.encode(der)).collect();
            serde_json::json!({
                "endpoints": endpoints,
                "ca_certificates": authorities,
                "certificate_ends": ends_of(&shown),
            })
        }
    };
    let look_again = settings.renewal.look_again;
    let presence = Presence::new(sessions.clone(), COMPONENT, known, metrics);
    let session = presence.start().await?;
    let (accepted, connections) = mpsc::channel(64);
    let accepting = accept(listener, config, settings.connections, accepted, stop.clone());
    let ended = tokio::spawn(run(Parts {
        accepting: tokio::spawn(accepting),
        freshening: tokio::spawn(certificate.keep_fresh(settings.renewal, stop.clone())),
        forgetting: tokio::spawn(forget_idle(door, stop.clone())),
        presence: tokio::spawn(presence.stay(session, look_again, stop.clone())),
        connections,
        router,
        health,
        sessions,
        looks: [looks, first_looks],
        stop,
    }));
    tracing::info!(%local_addr, ?endpoints, "answering operators");
    Ok(ApiServer { local_addr, ca_certificates, ended })
}

/// Every way in: the services by gRPC behind their door, and the same as JSON; and what says whether they
/// serve.
fn router(site: Site, contracts: &DescriptorPool) -> Result<(HealthReporter, Router), ServerError> {
    let unreadable = |error: tonic_reflection::server::Error| ServerError::Contracts(error.to_string());
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let (reporter, health) = health_reporter();
    let fleet = FleetService { site: site.clone() };
    let outlook = OutlookService { whole: Whole::new(site.clone()) };
    let door = site.door.clone();
    let grpc = Routes::new(health)
        .add_service(reflection().build_v1().map_err(unreadable)?)
        .add_service(reflection().build_v1alpha().map_err(unreadable)?)
        .add_service(
            MachinesServer::new(MachinesService { site: site.clone() })
                .max_decoding_message_size(REQUEST_LIMIT),
        )
        .add_service(SessionsServer::new(fleet.clone()).max_decoding_message_size(REQUEST_LIMIT))
        .add_service(WorkServer::new(fleet.clone()).max_decoding_message_size(REQUEST_LIMIT))
        .add_service(ScheduleServer::new(fleet.clone()).max_decoding_message_size(REQUEST_LIMIT))
        .add_service(BackoffsServer::new(fleet.clone()).max_decoding_message_size(REQUEST_LIMIT))
        .add_service(ProvidersServer::new(fleet.clone()).max_decoding_message_size(REQUEST_LIMIT))
        .add_service(PolicyServer::new(fleet.clone()).max_decoding_message_size(REQUEST_LIMIT))
        .add_service(StatisticsServer::new(fleet).max_decoding_message_size(REQUEST_LIMIT))
        .add_service(PlanServer::new(outlook.clone()).max_decoding_message_size(REQUEST_LIMIT))
        .add_service(IssuesServer::new(outlook).max_decoding_message_size(REQUEST_LIMIT))
        .add_service(
            CredentialsServer::new(CredentialsService { site: site.clone() })
                .max_decoding_message_size(REQUEST_LIMIT),
        )
        .add_service(
            LoopsServer::new(LoopsService { site: site.clone() }).max_decoding_message_size(REQUEST_LIMIT),
        )
        .add_service(
            ApprovalsServer::new(ApprovalsService { site: site.clone() })
                .max_decoding_message_size(REQUEST_LIMIT),
        )
        .add_service(
            ArtefactsServer::new(ArtefactsService { site: site.clone() })
                .max_decoding_message_size(PUT_LIMIT),
        )
        .add_service(
            BudgetsServer::new(BudgetsService { site: site.clone() })
                .max_decoding_message_size(REQUEST_LIMIT),
        )
        .add_service(
            ClustersServer::new(ClustersService { site: site.clone() })
                .max_decoding_message_size(REQUEST_LIMIT),
        )
        .add_service(
            ClusterCredentialsServer::new(ClusterCredentialsService { site: site.clone() })
                .max_decoding_message_size(REQUEST_LIMIT),
        )
        .add_service(
            LogsServer::new(LogsService { site: site.clone() }).max_decoding_message_size(REQUEST_LIMIT),
        )
        .add_service(
            ClusterKubernetesServer::new(ClusterKubernetesService { site: site.clone() })
                .max_decoding_message_size(REQUEST_LIMIT),
        )
        .add_service(
            UpdatesServer::new(UpdatesService { site: site.clone() })
                .max_decoding_message_size(REQUEST_LIMIT),
        )
        .add_service(
            OrdersServer::new(OrdersService { site: site.clone() }).max_decoding_message_size(REQUEST_LIMIT),
        )
        .add_service(AuditServer::new(AuditService { site }).max_decoding_message_size(REQUEST_LIMIT))
        .prepare()
        .into_axum_router()
        .layer(from_fn_with_state(door.clone(), guard));
    let told = openapi::Told::new(contracts, door.clone());
    let transcoder = Transcoder::new(contracts, door, grpc.clone());
    let router = Router::new()
        .route("/openapi.json", get(openapi::tell).with_state(told))
        .route("/api/{*rpc}", post(transcode::call).with_state(transcoder))
        .fallback_service(grpc);
    Ok((reporter, router))
}

struct Parts {
    accepting: JoinHandle<()>,
    freshening: JoinHandle<()>,
    forgetting: JoinHandle<()>,
    presence: JoinHandle<Option<Session>>,
    connections: mpsc::Receiver<ApiStream>,
    router: Router,
    health: HealthReporter,
    sessions: Sessions,
    looks: [Looks; 2],
    stop: CancellationToken,
}

async fn run(parts: Parts) {
    serve(parts.router, parts.health, parts.connections, parts.stop).await;
    for (name, task) in
        [("accepting", parts.accepting), ("freshening", parts.freshening), ("forgetting", parts.forgetting)]
    {
        if let Err(error) = task.await {
            tracing::error!(%error, name, "a part of the API server ended early");
        }
    }
    if let Ok(Some(session)) = parts.presence.await
        && let Err(error) = parts.sessions.close(&session, "the API server stopped").await
    {
        tracing::warn!(%error, "the API server's session will be closed by the reaper");
    }
    for looks in parts.looks {
        looks.bmdb().close().await;
    }
}

/// Answers calls until `stop`, and then those under way, for a grace period.
async fn serve(
    router: Router,
    health: HealthReporter,
    connections: mpsc::Receiver<ApiStream>,
    stop: CancellationToken,
) {
    let incoming = ReceiverStream::new(connections).map(Ok::<_, io::Error>);
    let serving = Server::builder()
        .accept_http1(true)
        .timeout(CALL_LIMIT)
        .max_concurrent_streams(CALLS_PER_CONNECTION)
        .http2_max_header_list_size(HEADER_LIMIT)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE_ANSWER))
        .add_routes(Routes::from(router))
        .serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
    let late = async {
        stop.cancelled().await;
        // The empty name is the server as a whole.
        health.set_service_status("", ServingStatus::NotServing).await;
        tokio::time::sleep(GRACE).await;
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

async fn forget_idle(door: Arc<Door>, stop: CancellationToken) {
    while stop.run_until_cancelled(tokio::time::sleep(FORGET_IDLE)).await.is_some() {
        door.forget_idle();
    }
}
