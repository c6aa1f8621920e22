//! A false curator: a server over TLS that claims to lead, with any certificate and any statement. It serves discovery
//! of the leader and nothing else.
//!
//! A [`SlowPath`] leads to an honest curator, slower than the false one ends its answers.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

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
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// How many handshakes may be under way.
const HANDSHAKES: usize = 16;
/// After how many further watches of the false curator a connection is forwarded.
const RELEASED_AFTER: usize = 3;
/// How often these watches are counted.
const RELEASE_POLL_INTERVAL: Duration = Duration::from_millis(5);

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

/// How often it was called, and what ends its streams.
#[derive(Debug, Default)]
struct Calls {
    watches: AtomicUsize,
    statements: AtomicUsize,
    /// Cancelled when each watch ends after the first message.
    ended: CancellationToken,
    /// Whether watches that begin now never end.
    is_lasting: AtomicBool,
}

/// A running false curator. It ends with this value.
pub(super) struct FalseCurator {
    /// `host:port` of the listener.
    pub(super) address: String,
    calls: Arc<Calls>,
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
        let calls = Arc::new(Calls::default());
        let service = LeaderServer::new(FalseLeader { claims, calls: calls.clone() });
        let mut server = JoinSet::new();
        server.spawn(async move {
            // It ends when the test does.
            let _ = Server::builder().serve_with_incoming(service, incoming).await;
        });
        Ok(Self { address, calls, _server: server })
    }

    /// How often a client began to follow it.
    pub(super) fn watches(&self) -> usize {
        self.calls.watches.load(Ordering::SeqCst)
    }

    /// Whether the watches that begin from now on never end.
    pub(super) fn set_lasting(&self, is_lasting: bool) {
        self.calls.is_lasting.store(is_lasting, Ordering::SeqCst);
    }

    /// From now on each watch ends after its first message, except for those that never end.
    pub(super) fn end_watches(&self) {
        self.calls.ended.cancel();
    }

    /// How often a client requested the statement.
    pub(super) fn statements(&self) -> usize {
        self.calls.statements.load(Ordering::SeqCst)
    }
}

struct FalseLeader {
    claims: FalseClaims,
    calls: Arc<Calls>,
}

#[tonic::async_trait]
impl Leader for FalseLeader {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<wire::WatchLeaderResponse, Status>> + Send>>;

    async fn watch(
        &self,
        _: Request<wire::WatchLeaderRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        self.calls.watches.fetch_add(1, Ordering::SeqCst);
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
        let is_lasting = self.calls.is_lasting.load(Ordering::SeqCst);
        let ended = if is_lasting { CancellationToken::new() } else { self.calls.ended.clone() };
        let rest = futures::stream::pending().take_until(ended.cancelled_owned());
        Ok(Response::new(Box::pin(first.chain(rest))))
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
        self.calls.statements.fetch_add(1, Ordering::SeqCst);
        let (statement, _) = self.claims.statement.clone().ok_or_else(|| Status::not_found("none"))?;
        Ok(Response::new(wire::GetStatementResponse { statement: Some(statement), time_ms: 0 }))
    }
}

/// A listener that forwards each connection to an honest curator, but only after a false curator was followed again
/// several times. It ends with this value.
pub(super) struct SlowPath {
    /// `host:port` of the listener.
    pub(super) address: String,
    accepted: Arc<AtomicUsize>,
    _server: JoinSet<()>,
}

impl SlowPath {
    /// Starts the listener in front of this address.
    pub(super) async fn start(honest: String, false_curator: &FalseCurator) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?.to_string();
        let accepted = Arc::new(AtomicUsize::new(0));
        let (count, calls) = (accepted.clone(), false_curator.calls.clone());
        let mut server = JoinSet::new();
        server.spawn(async move {
            let mut forwarded = JoinSet::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                let (honest, calls) = (honest.clone(), calls.clone());
                let released = calls.watches.load(Ordering::SeqCst) + RELEASED_AFTER;
                forwarded.spawn(async move {
                    while calls.watches.load(Ordering::SeqCst) < released {
                        tokio::time::sleep(RELEASE_POLL_INTERVAL).await;
                    }
                    // An error ends the connection, as the client expects it.
                    if let Ok(mut upstream) = TcpStream::connect(honest).await {
                        let _ = tokio::io::copy_bidirectional(&mut stream, &mut upstream).await;
                    }
                });
            }
        });
        Ok(Self { address, accepted, _server: server })
    }

    /// How many connections were accepted.
    pub(super) fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }
}
