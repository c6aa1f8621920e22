//! A false curator: a server over TLS that claims to lead, with any certificate and any statement. It serves discovery
//! of the leader and nothing else.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Result;
use curator_client::node_id::NodeId;
use curator_client::tls::server_config;
use futures::{Stream, StreamExt as _};
use proto::curator::v1 as wire;
use proto::curator::v1::leader_server::{Leader, LeaderServer};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// How many handshakes may be under way.
const HANDSHAKES: usize = 16;

/// What the false curator claims.
#[derive(Clone, Debug)]
pub(super) struct FalseClaims {
    /// The node that it claims to be. It names it as the leader, too.
    pub(super) node: NodeId,
    /// The epoch in its messages.
    pub(super) epoch: u64,
    /// The statement that it serves, and the number that it announces.
    pub(super) statement: Option<(wire::SignedStatement, u64)>,
}

/// How often it was called.
#[derive(Debug, Default)]
struct CallCounts {
    watches: AtomicUsize,
    statements: AtomicUsize,
}

/// A running false curator. It ends with this value.
pub(super) struct FalseCurator {
    /// `host:port` of the listener.
    pub(super) address: String,
    counts: Arc<CallCounts>,
    _server: JoinSet<()>,
}

impl FalseCurator {
    /// Starts the server, which shows this certificate.
    pub(super) async fn start(shown: Arc<CertifiedKey>, claims: FalseClaims) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?.to_string();
        let acceptor = TlsAcceptor::from(server_config(Arc::new(SingleCertAndKey::from(shown)))?);
        let accepted = futures::stream::unfold(listener, |listener| async move {
            let accepted: std::io::Result<TcpStream> = listener.accept().await.map(|(stream, _)| stream);
            Some((accepted, listener))
        });
        let incoming = accepted
            .map(move |accepted| {
                let acceptor = acceptor.clone();
                async move { acceptor.accept(accepted.ok()?).await.ok() }
            })
            .buffer_unordered(HANDSHAKES)
            .filter_map(std::future::ready)
            .map(Ok::<_, Infallible>);
        let counts = Arc::new(CallCounts::default());
        let service = LeaderServer::new(FalseLeader { claims, counts: counts.clone() });
        let mut server = JoinSet::new();
        server.spawn(async move {
            // It ends when the test does.
            let _ = Server::builder().serve_with_incoming(service, incoming).await;
        });
        Ok(Self { address, counts, _server: server })
    }

    /// How often a client began to follow it.
    pub(super) fn watches(&self) -> usize {
        self.counts.watches.load(Ordering::SeqCst)
    }

    /// How often a client requested the statement.
    pub(super) fn statements(&self) -> usize {
        self.counts.statements.load(Ordering::SeqCst)
    }
}

struct FalseLeader {
    claims: FalseClaims,
    counts: Arc<CallCounts>,
}

#[tonic::async_trait]
impl Leader for FalseLeader {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<wire::WatchLeaderResponse, Status>> + Send>>;

    async fn watch(
        &self,
        _: Request<wire::WatchLeaderRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        self.counts.watches.fetch_add(1, Ordering::SeqCst);
        let FalseClaims { node, epoch, statement } = &self.claims;
        let response = wire::WatchLeaderResponse {
            leader_node_id: node.to_string(),
            // The client uses the address at which it reached the curator.
            leader_address: String::new(),
            leader_port: 0,
            responding_node_id: node.to_string(),
            epoch: *epoch,
            statement_number: statement.as_ref().map_or(0, |(_, number)| *number),
        };
        let first = futures::stream::once(std::future::ready(Ok(response)));
        Ok(Response::new(Box::pin(first.chain(futures::stream::pending()))))
    }

    async fn get_ca_certificate(
        &self,
        _: Request<wire::GetCaCertificateRequest>,
    ) -> Result<Response<wire::GetCaCertificateResponse>, Status> {
        Err(Status::unimplemented("a false curator"))
    }

    async fn get_statement(
        &self,
        _: Request<wire::GetStatementRequest>,
    ) -> Result<Response<wire::GetStatementResponse>, Status> {
        self.counts.statements.fetch_add(1, Ordering::SeqCst);
        let (statement, _) = self.claims.statement.clone().ok_or_else(|| Status::not_found("none"))?;
        Ok(Response::new(wire::GetStatementResponse { statement: Some(statement), time_ms: 0 }))
    }
}
