//! Listeners: what an attacker serves in the place of a curator, and what the ports of etcd's members answer.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustls::pki_types::ServerName;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, Error};
use shepherd::curator::membership::peer_url;
use shepherd::curator_client::node_id::NodeId;
use shepherd::curator_client::tls::server_config;
use shepherd::proto::curator::v1 as wire;
use shepherd::transport::config;
use shepherd::transport::signature::AcceptedSignatures;
use shepherd::transport::verifier::{AnyServer, ServerVerifier};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::{Grpc, StreamingService};
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use super::super::node::Node;
use crate::harness::etcd_servers::{in_time, until};

/// How long a peer port has time to refuse a certificate before it gets a request. It refuses one that it does not like
/// after the client's part of the handshake has ended.
const REFUSAL_TIME: Duration = Duration::from_secs(2);

/// What an attacker answers in the place of the leading curator.
#[derive(Clone)]
pub(super) struct Script {
    /// The node of the attacker, which it names as the leader.
    pub(super) leader: NodeId,
    /// The epoch that it reports.
    pub(super) epoch: u64,
    /// Statements that it sends in turn, with their names.
    pub(super) statements: Vec<(&'static str, wire::SignedStatement)>,
    /// The record of the node that calls, with the role `web`.
    pub(super) record: wire::Node,
    /// The service of the role `web`.
    pub(super) service: wire::Service,
}

impl Script {
    /// Names this node as the leader, and has no statements and no service.
    pub(super) fn leading(leader: NodeId) -> Self {
        let (record, service) = (wire::Node::default(), wire::Service::default());
        Self { leader, epoch: 0, statements: Vec::new(), record, service }
    }
}

/// What those who connected to a false curator did.
#[derive(Clone, Debug, Default)]
pub(super) struct Requests {
    /// The calls that were made, by their names.
    pub(super) calls: BTreeMap<String, u32>,
    /// The statements that were sent, by their names.
    pub(super) statements: BTreeMap<&'static str, u32>,
    /// Handshakes that the client ended because of the certificate.
    pub(super) refused_handshakes: u32,
    /// Handshakes that ended for another reason.
    pub(super) broken_handshakes: Vec<String>,
}

/// A server with the key of an attacker, at the address of a curator. It ends with this value.
pub(super) struct FalseCurator {
    requests: Arc<Mutex<Requests>>,
    _tasks: JoinSet<()>,
}

impl FalseCurator {
    /// Listens at the address of a curator that is off.
    pub(super) async fn start(at: SocketAddr, own: Arc<CertifiedKey>, script: Script) -> Result<Self> {
        let mut listener = None;
        until("the address of the curator is free", async || {
            listener = TcpListener::bind(at).await.ok();
            Ok(listener.is_some())
        })
        .await?;
        let listener = listener.context("no listener")?;
        let acceptor = TlsAcceptor::from(server_config(Arc::new(SingleCertAndKey::from(own)))?);
        let requests = Arc::new(Mutex::new(Requests::default()));
        let service = FalseServices { script: Arc::new(script), requests: requests.clone() };
        let (sender, connections) = mpsc::channel(8);
        let mut tasks = JoinSet::new();
        let counted = requests.clone();
        tasks.spawn(async move {
            let mut handshakes = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, sender, counted) = (acceptor.clone(), sender.clone(), counted.clone());
                handshakes.spawn(async move {
                    match acceptor.accept(stream).await {
                        // The receiver lives as long as the test.
                        Ok(stream) => drop(sender.send(Ok::<_, std::io::Error>(stream)).await),
                        Err(error) if is_alert(&error) => locked(&counted).refused_handshakes += 1,
                        Err(error) => locked(&counted).broken_handshakes.push(error.to_string()),
                    }
                });
            }
        });
        tasks.spawn(async move {
            let connections = ReceiverStream::new(connections);
            // It ends when the test does.
            let _ = tonic::transport::Server::builder().serve_with_incoming(service, connections).await;
        });
        Ok(Self { requests, _tasks: tasks })
    }

    /// What was requested so far.
    pub(super) fn requests(&self) -> Requests {
        locked(&self.requests).clone()
    }
}

fn locked(requests: &Mutex<Requests>) -> MutexGuard<'_, Requests> {
    requests.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the other end refused the handshake, by an alert.
fn is_alert(error: &std::io::Error) -> bool {
    let tls = error.get_ref().and_then(|error| error.downcast_ref::<Error>());
    matches!(tls, Some(Error::AlertReceived(_)))
}

/// The services of the false curator, on one connection.
#[derive(Clone)]
struct FalseServices {
    script: Arc<Script>,
    requests: Arc<Mutex<Requests>>,
}

impl FalseServices {
    /// The next statement in turn.
    fn next_statement(&self) -> Option<wire::SignedStatement> {
        let mut requests = locked(&self.requests);
        let count: u32 = requests.statements.values().sum();
        let turn = usize::try_from(count).unwrap_or_default() % self.script.statements.len().max(1);
        let (name, statement) = self.script.statements.get(turn)?;
        *requests.statements.entry(*name).or_default() += 1;
        Some(statement.clone())
    }

    async fn answer(self, request: http::Request<Body>) -> http::Response<Body> {
        let method = request.uri().path().replace("/shepherd.curator.v1.", "");
        *locked(&self.requests).calls.entry(method.clone()).or_default() += 1;
        let script = &self.script;
        match method.as_str() {
            "Leader/GetStatement" => {
                let statement = self.next_statement();
                let response = wire::GetStatementResponse { statement, time_ms: 0 };
                respond(request, response, End::AfterIt).await
            }
            "Leader/Watch" => {
                let own = script.leader.to_string();
                let response = wire::WatchLeaderResponse {
                    leader_node_id: own.clone(),
                    responding_node_id: own,
                    epoch: script.epoch,
                    ..Default::default()
                };
                respond(request, response, End::Never).await
            }
            "Nodes/Watch" => {
                let event = Some(wire::node_event::Event::Present(script.record.clone()));
                let event = Some(wire::NodeEvent { event });
                respond(request, wire::WatchResponse { event }, End::Never).await
            }
            "Declarations/WatchOwn" => {
                let services = vec![script.service.clone()];
                let declaration =
                    wire::Declaration { role: "web".to_owned(), services, revision: 1, ..Default::default() };
                let response = wire::WatchOwnDeclarationsResponse {
                    declarations: vec![declaration],
                    ..Default::default()
                };
                respond(request, response, End::Never).await
            }
            _ => Status::unavailable("the false curator has noted this call").into_http(),
        }
    }
}

impl Service<http::Request<Body>> for FalseServices {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let services = self.clone();
        Box::pin(async move { Ok(services.answer(request).await) })
    }
}

/// When the response to a call ends.
#[derive(Clone, Copy)]
enum End {
    AfterIt,
    Never,
}

/// Responds with one message. Requests are decoded as messages without fields.
async fn respond<M: prost::Message + Default + 'static>(
    request: http::Request<Body>,
    message: M,
    end: End,
) -> http::Response<Body> {
    let codec: ProstCodec<M, wire::GetClusterRequest> = ProstCodec::default();
    Grpc::new(codec).streaming(OneMessage { message: Some(message), end }, request).await
}

struct OneMessage<M> {
    message: Option<M>,
    end: End,
}

impl<M: Send + 'static> StreamingService<wire::GetClusterRequest> for OneMessage<M> {
    type Response = M;
    type ResponseStream = Pin<Box<dyn Stream<Item = Result<M, Status>> + Send>>;
    type Future = std::future::Ready<Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, _: Request<Streaming<wire::GetClusterRequest>>) -> Self::Future {
        let message = tokio_stream::iter(self.message.take().map(Ok::<_, Status>));
        let responses: Self::ResponseStream = match self.end {
            End::AfterIt => Box::pin(message),
            End::Never => Box::pin(message.chain(tokio_stream::pending())),
        };
        std::future::ready(Ok(Response::new(responses)))
    }
}

/// What a peer port of etcd did with a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PeerAnswer {
    /// It refused the certificate, or closed the connection without an answer.
    Refused,
    /// It answered with this head and body.
    Served(String),
}

/// The port at which a member of etcd serves the others.
pub(crate) fn peer_port(member: &Node) -> Result<SocketAddr> {
    let url = peer_url(member.address);
    Ok(url.strip_prefix("https://").context("another URL")?.parse()?)
}

/// Requests the list of members from the peer port of a member of etcd.
pub(crate) async fn request_members(at: SocketAddr, own: Arc<CertifiedKey>) -> Result<PeerAnswer> {
    request_peer(at, own, b"GET /members HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\n\r\n").await
}

/// The same from this address of the host.
pub(crate) async fn request_members_from(
    source: IpAddr,
    at: SocketAddr,
    own: Arc<CertifiedKey>,
) -> Result<PeerAnswer> {
    request_peer_from(Some(source), at, own, b"GET /members HTTP/1.1\r\nHost: etcd\r\n\r\n").await
}

/// Sends a request to the peer port of a member of etcd. A port that nobody serves is an error.
pub(super) async fn request_peer(
    at: SocketAddr,
    own: Arc<CertifiedKey>,
    request: &[u8],
) -> Result<PeerAnswer> {
    request_peer_from(None, at, own, request).await
}

/// Connects from this address of the host, or from the one that the route gives.
async fn connect_from(source: Option<IpAddr>, at: SocketAddr) -> Result<TcpStream> {
    let connected = match source {
        None => TcpStream::connect(at).await,
        Some(source) => {
            let socket = TcpSocket::new_v4()?;
            socket.bind(SocketAddr::new(source, 0))?;
            socket.connect(at).await
        }
    };
    connected.with_context(|| format!("no etcd serves {at}"))
}

async fn request_peer_from(
    source: Option<IpAddr>,
    at: SocketAddr,
    own: Arc<CertifiedKey>,
    request: &[u8],
) -> Result<PeerAnswer> {
    let config = peer_config(own)?;
    let mut last = String::new();
    for _ in 0..10 {
        let stream = connect_from(source, at).await?;
        let name = ServerName::IpAddress(Ipv4Addr::LOCALHOST.into());
        let mut stream = match TlsConnector::from(config.clone()).connect(name, stream).await {
            Ok(stream) => stream,
            Err(error) if is_alert(&error) => return Ok(PeerAnswer::Refused),
            Err(error) => bail!("the handshake with {at} failed: {error}"),
        };
        let mut first = [0_u8];
        match tokio::time::timeout(REFUSAL_TIME, stream.read(&mut first)).await {
            Ok(Err(error)) if is_alert(&error) => return Ok(PeerAnswer::Refused),
            // etcd ends a connection with a revoked serial number without an alert.
            Ok(Ok(0)) => return Ok(PeerAnswer::Refused),
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                return Ok(PeerAnswer::Refused);
            }
            Ok(other) => last = format!("it did otherwise: {other:?}"),
            // It waits for the request.
            Err(_) => match in_time("an answer of etcd", exchange(&mut stream, request)).await? {
                Ok(answer) => return Ok(PeerAnswer::Served(answer)),
                // It may have been too busy to refuse in time. Then the request reached nothing, and is made again.
                Err(error) => last = format!("{error:#}"),
            },
        }
    }
    bail!("the peer port {at} neither refused nor answered: {last}")
}

/// A connection to the peer port of a member of etcd, on which it has answered a request.
pub(super) async fn open_peer(at: SocketAddr, own: Arc<CertifiedKey>) -> Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(at).await.with_context(|| format!("no etcd serves {at}"))?;
    let name = ServerName::IpAddress(Ipv4Addr::LOCALHOST.into());
    let mut stream = TlsConnector::from(peer_config(own)?).connect(name, stream).await?;
    let request = b"GET /members HTTP/1.1\r\nHost: etcd\r\n\r\n";
    let answer = in_time("an answer of etcd", exchange(&mut stream, request)).await??;
    ensure!(answer.starts_with("HTTP/1.1 200"), "etcd answers {answer}");
    Ok(stream)
}

/// Sends a request, and reads the head of the response and as much of the body as the head announces. etcd leaves the
/// connection open.
async fn exchange(stream: &mut TlsStream<TcpStream>, request: &[u8]) -> Result<String> {
    stream.write_all(request).await?;
    let mut answer: Vec<u8> = Vec::new();
    loop {
        if let Some(answer) = complete_answer(&answer)? {
            return Ok(answer);
        }
        let read = stream.read_buf(&mut answer).await?;
        ensure!(read > 0, "it closed the connection");
    }
}

/// The response, once all of it has arrived.
fn complete_answer(answer: &[u8]) -> Result<Option<String>> {
    let text = String::from_utf8_lossy(answer).into_owned();
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return Ok(None) };
    ensure!(head.starts_with("HTTP/1.1 "), "it answered {head}");
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
    let length: usize = length.unwrap_or("0").parse()?;
    Ok((body.len() >= length).then_some(text))
}

/// TLS as another member of etcd has it, without any check of the other end.
fn peer_config(own: Arc<CertifiedKey>) -> Result<Arc<ClientConfig>> {
    let verifier = ServerVerifier::new(AnyServer, AcceptedSignatures::Ed25519);
    let mut config = Arc::unwrap_or_clone(config::client_config(verifier, Some(own))?);
    // HTTP/1.1, as etcd's members speak it.
    config.alpn_protocols.clear();
    Ok(Arc::new(config))
}
