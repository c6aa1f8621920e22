//! Authenticates and authorizes every gRPC call, then routes it to its service.
//!
//! Each call is checked before anything of it is read: by the certificate of its connection as it counts at this
//! moment, by whether this curator leads, and by the one permission table. A method without a row gets the same
//! response as one that does not exist.
//!
//! Calls that find the leader are open to everybody, and no certificate is refused for them. So a node with an expired
//! certificate can find the leader and join again with its key.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use curator_client::peer_identity::Peer;
use http_body_util::BodyExt as _;
use proto::curator::v1::credentials_server::CredentialsServer;
use proto::curator::v1::declarations_server::DeclarationsServer;
use proto::curator::v1::kubernetes_server::KubernetesServer;
use proto::curator::v1::leader_server::LeaderServer;
use proto::curator::v1::management_server::ManagementServer;
use proto::curator::v1::nodes_server::NodesServer;
use proto::curator::v1::registration_server::RegistrationServer;
use proto::curator::v1::snapshots_server::SnapshotsServer;
use proto::curator::v1::tickets_server::TicketsServer;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use transport::gate::NoPlace;

use crate::permissions::{MethodPermission, PermissionError, authorize_call};
use crate::service::cluster_members::ClusterMembers;
use crate::service::credentials::CredentialsService;
use crate::service::declarations::DeclarationsService;
use crate::service::gate_monitor::GateMonitor;
use crate::service::kubernetes::KubernetesService;
use crate::service::leader_context::{Caller, LeaderContext, not_leader_status};
use crate::service::leader_service::LeaderService;
use crate::service::listener::CuratorPeer;
use crate::service::management::ManagementService;
use crate::service::nodes::NodesService;
use crate::service::registration::RegistrationService;
use crate::service::snapshots::SnapshotsService;
use crate::service::tickets::TicketsService;

/// The largest request, in bytes. The largest kind is a role declaration with its files.
const MAX_REQUEST_BYTES: usize = 4 << 20;

type HttpResponse = http::Response<Body>;
type ResponseFuture = Pin<Box<dyn Future<Output = Result<HttpResponse, Infallible>> + Send>>;

/// The services of a curator while its role in the election does not change.
#[derive(Clone)]
pub(super) struct AuthRouter {
    leader_service: LeaderServer<LeaderService>,
    members: ClusterMembers,
    leader_only: Option<LeaderOnlyServices>,
    ended: CancellationToken,
}

/// The services of the leader only.
#[derive(Clone)]
struct LeaderOnlyServices {
    leading: Arc<LeaderContext>,
    registration: RegistrationServer<RegistrationService>,
    nodes: NodesServer<NodesService>,
    declarations: DeclarationsServer<DeclarationsService>,
    kubernetes: KubernetesServer<KubernetesService>,
    management: ManagementServer<ManagementService>,
    tickets: TicketsServer<TicketsService>,
    credentials: CredentialsServer<CredentialsService>,
    snapshots: SnapshotsServer<SnapshotsService>,
}

impl AuthRouter {
    /// The router of a follower: only finding the leader is served.
    #[must_use]
    pub(super) fn for_follower(
        service: LeaderService,
        members: ClusterMembers,
        ended: CancellationToken,
    ) -> Self {
        Self { leader_service: LeaderServer::new(service), members, leader_only: None, ended }
    }

    /// The router of the leader. `gate` counts the calls that are rejected because their key makes too many.
    #[must_use]
    pub(super) fn for_leader(service: LeaderService, leading: Arc<LeaderContext>, gate: GateMonitor) -> Self {
        let ended = leading.ended.clone();
        let authorities = leading.authorities.subscribe();
        let members = ClusterMembers::new(authorities, leading.cache.clone(), leading.clock.clone());
        let leader = LeaderOnlyServices {
            registration: RegistrationServer::new(RegistrationService::new(leading.clone(), gate)),
            nodes: NodesServer::new(NodesService(leading.clone())),
            declarations: DeclarationsServer::new(DeclarationsService(leading.clone()))
                .max_decoding_message_size(MAX_REQUEST_BYTES),
            kubernetes: KubernetesServer::new(KubernetesService(leading.clone())),
            management: ManagementServer::new(ManagementService(leading.clone())),
            tickets: TicketsServer::new(TicketsService(leading.clone())),
            credentials: CredentialsServer::new(CredentialsService(leading.clone())),
            snapshots: SnapshotsServer::new(SnapshotsService(leading.clone())),
            leading,
        };
        Self { leader_service: LeaderServer::new(service), members, leader_only: Some(leader), ended }
    }

    /// The caller, if it may make the call. Proves its connection if the cluster issued its certificate, also for a call
    /// that needs none: a node may do nothing on it but find the leader.
    async fn authorize_caller(&self, path: &str, connection: &CuratorPeer) -> Result<Caller, Status> {
        let (shown, remote) = (connection.certificates.clone(), connection.remote);
        let refused = |refusal: PermissionError| Status::new(refusal.code(), refusal.to_string());
        let open = authorize_call(path, &Peer::Unauthenticated, self.leader_only.is_some());
        let peer = match (open, &self.leader_only) {
            (Ok(row), _) => {
                if self.members.include(&shown) {
                    connection.place.prove().map_err(no_place)?;
                }
                return Ok(Caller {
                    peer: Peer::Unauthenticated,
                    permission: row,
                    certificates: shown,
                    remote,
                });
            }
            (Err(refusal), None) => return Err(refused(refusal)),
            (Err(_), Some(leader)) => leader.leading.identify_peer(&shown).await?,
        };
        if !matches!(peer, Peer::Unauthenticated | Peer::Registering { .. }) {
            connection.place.prove().map_err(no_place)?;
        }
        let row = authorize_call(path, &peer, true).map_err(refused)?;
        Ok(Caller { peer, permission: row, certificates: shown, remote })
    }

    async fn route_call(mut self, mut request: http::Request<Body>) -> Result<HttpResponse, Infallible> {
        let Some(connection) = request.extensions().get::<CuratorPeer>().cloned() else {
            return Ok(Status::internal("this call has no connection: please report it").into_http());
        };
        let answered = connection.place.begin_request();
        let path = request.uri().path().to_owned();
        let caller = match self.authorize_caller(&path, &connection).await {
            Ok(caller) => caller,
            Err(status) => return Ok(status.into_http()),
        };
        let row: &'static MethodPermission = caller.permission;
        request.extensions_mut().insert(caller);
        let service = row.method.split('/').next().unwrap_or_default();
        let answer = match (service, &mut self.leader_only) {
            ("Leader", _) => self.leader_service.call(request).await,
            ("Registration", Some(leader)) => leader.registration.call(request).await,
            ("Nodes", Some(leader)) => leader.nodes.call(request).await,
            ("Declarations", Some(leader)) => leader.declarations.call(request).await,
            ("Kubernetes", Some(leader)) => leader.kubernetes.call(request).await,
            ("Management", Some(leader)) => leader.management.call(request).await,
            ("Tickets", Some(leader)) => leader.tickets.call(request).await,
            ("Credentials", Some(leader)) => leader.credentials.call(request).await,
            ("Snapshots", Some(leader)) => leader.snapshots.call(request).await,
            _ => Ok(Status::unimplemented(format!("{} is not served here", row.method)).into_http()),
        };
        // The request is being answered until the last message of its response.
        answer.map(|response| {
            response.map(|body| {
                Body::new(body.map_frame(move |frame| {
                    let _answered = &answered;
                    frame
                }))
            })
        })
    }
}

/// The client tries the next curator.
fn no_place(error: NoPlace) -> Status {
    Status::unavailable(error.to_string())
}

impl Service<http::Request<Body>> for AuthRouter {
    type Response = HttpResponse;
    type Error = Infallible;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> ResponseFuture {
        let router = self.clone();
        Box::pin(async move {
            let ended = router.ended.clone();
            // When the leadership ends, drop the response: its data may belong to another leader by now.
            let answer = ended.run_until_cancelled_owned(Box::pin(router.route_call(request))).await;
            answer.unwrap_or_else(|| Ok(not_leader_status().into_http()))
        })
    }
}
