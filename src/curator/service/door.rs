//! Who is let in, and to whom of us.
//!
//! Each call is judged before anything of it is read: by the certificate of its connection as it is worth at this
//! moment, by whether this curator leads, by the one table of who may make it. A method that has no row is answered
//! like one that does not exist.
//!
//! What asks who leads is answered to anybody and its certificate is not looked at: a node whose certificate has
//! expired finds the leader by this, to come back with its key.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio_util::sync::CancellationToken;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};

use crate::curator::peer::Peer;
use crate::curator::permissions::{Refusal, Row, authorise};
use crate::curator::service::credentials::CredentialsService;
use crate::curator::service::declarations::DeclarationsService;
use crate::curator::service::kubernetes::KubernetesService;
use crate::curator::service::leader::{Caller, Leading, ShownCertificates, over};
use crate::curator::service::management::ManagementService;
use crate::curator::service::nodes::NodesService;
use crate::curator::service::registration::RegistrationService;
use crate::curator::service::snapshots::SnapshotsService;
use crate::curator::service::tickets::TicketsService;
use crate::curator::service::who_leads::WhoLeads;
use crate::proto::curator::v1::credentials_server::CredentialsServer;
use crate::proto::curator::v1::declarations_server::DeclarationsServer;
use crate::proto::curator::v1::kubernetes_server::KubernetesServer;
use crate::proto::curator::v1::leader_server::LeaderServer;
use crate::proto::curator::v1::management_server::ManagementServer;
use crate::proto::curator::v1::nodes_server::NodesServer;
use crate::proto::curator::v1::registration_server::RegistrationServer;
use crate::proto::curator::v1::snapshots_server::SnapshotsServer;
use crate::proto::curator::v1::tickets_server::TicketsServer;

/// The largest request. A declaration with its files is the largest there is.
const REQUEST_LIMIT: usize = 4 << 20;

type Answer = http::Response<Body>;
type Answering = Pin<Box<dyn Future<Output = Result<Answer, Infallible>> + Send>>;

/// What a curator serves, as long as nothing changes in who leads.
#[derive(Clone)]
pub struct Door {
    who_leads: LeaderServer<WhoLeads>,
    leader: Option<Leader>,
    ended: CancellationToken,
}

/// What the one that leads serves.
#[derive(Clone)]
struct Leader {
    leading: Arc<Leading>,
    registration: RegistrationServer<RegistrationService>,
    nodes: NodesServer<NodesService>,
    declarations: DeclarationsServer<DeclarationsService>,
    kubernetes: KubernetesServer<KubernetesService>,
    management: ManagementServer<ManagementService>,
    tickets: TicketsServer<TicketsService>,
    credentials: CredentialsServer<CredentialsService>,
    snapshots: SnapshotsServer<SnapshotsService>,
}

impl Door {
    /// The door of one that follows.
    #[must_use]
    pub fn of_follower(who_leads: WhoLeads, ended: CancellationToken) -> Self {
        Self { who_leads: LeaderServer::new(who_leads), leader: None, ended }
    }

    /// The door of the one that leads.
    #[must_use]
    pub fn of_leader(who_leads: WhoLeads, leading: Arc<Leading>) -> Self {
        let ended = leading.ended.clone();
        let leader = Leader {
            registration: RegistrationServer::new(RegistrationService(leading.clone())),
            nodes: NodesServer::new(NodesService(leading.clone())),
            declarations: DeclarationsServer::new(DeclarationsService(leading.clone()))
                .max_decoding_message_size(REQUEST_LIMIT),
            kubernetes: KubernetesServer::new(KubernetesService(leading.clone())),
            management: ManagementServer::new(ManagementService(leading.clone())),
            tickets: TicketsServer::new(TicketsService(leading.clone())),
            credentials: CredentialsServer::new(CredentialsService(leading.clone())),
            snapshots: SnapshotsServer::new(SnapshotsService(leading.clone())),
            leading,
        };
        Self { who_leads: LeaderServer::new(who_leads), leader: Some(leader), ended }
    }

    /// Who calls, if the call may be made.
    async fn let_in(&self, path: &str, shown: ShownCertificates) -> Result<Caller, Status> {
        let refused = |refusal: Refusal| Status::new(refusal.code(), refusal.to_string());
        let open = authorise(path, &Peer::Unauthenticated, self.leader.is_some());
        let peer = match (open, &self.leader) {
            (Ok(row), _) => return Ok(Caller { peer: Peer::Unauthenticated, row, shown }),
            (Err(refusal), None) => return Err(refused(refusal)),
            (Err(_), Some(leader)) => leader.leading.identify(&shown).await?,
        };
        let row = authorise(path, &peer, true).map_err(refused)?;
        Ok(Caller { peer, row, shown })
    }

    async fn answer(mut self, mut request: http::Request<Body>) -> Result<Answer, Infallible> {
        let shown = request.extensions().get::<ShownCertificates>().cloned().unwrap_or_default();
        let path = request.uri().path().to_owned();
        let caller = match self.let_in(&path, shown).await {
            Ok(caller) => caller,
            Err(status) => return Ok(status.into_http()),
        };
        let row: &'static Row = caller.row;
        request.extensions_mut().insert(caller);
        let service = row.method.split('/').next().unwrap_or_default();
        match (service, &mut self.leader) {
            ("Leader", _) => self.who_leads.call(request).await,
            ("Registration", Some(leader)) => leader.registration.call(request).await,
            ("Nodes", Some(leader)) => leader.nodes.call(request).await,
            ("Declarations", Some(leader)) => leader.declarations.call(request).await,
            ("Kubernetes", Some(leader)) => leader.kubernetes.call(request).await,
            ("Management", Some(leader)) => leader.management.call(request).await,
            ("Tickets", Some(leader)) => leader.tickets.call(request).await,
            ("Credentials", Some(leader)) => leader.credentials.call(request).await,
            ("Snapshots", Some(leader)) => leader.snapshots.call(request).await,
            _ => Ok(Status::unimplemented(format!("{} is not served here", row.method)).into_http()),
        }
    }
}

impl Service<http::Request<Body>> for Door {
    type Response = Answer;
    type Error = Infallible;
    type Future = Answering;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Answering {
        let door = self.clone();
        Box::pin(async move {
            let ended = door.ended.clone();
            // Whatever an answer was made from may belong to another leader by now.
            let answer = ended.run_until_cancelled_owned(Box::pin(door.answer(request))).await;
            answer.unwrap_or_else(|| Ok(over().into_http()))
        })
    }
}
