//! Taking connections, and shaking hands beside the loop that takes them.
//!
//! The loop never waits for a peer: each handshake is a task with a deadline,
//! and how many there may be is decided in `half_open.rs`. What comes out are
//! streams whose peer has proven a key, and tonic never sees another.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;

use crate::bmdb::metrics::{ByReason, Metrics};
use crate::server::half_open::{HalfOpen, HalfOpenLimits, Source};
use crate::server::tls::agent_key;

/// Limits on what peers can make us hold.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// How long a handshake may take.
    pub handshake: Duration,
    /// How many may be under way.
    pub half_open: HalfOpenLimits,
    /// Most connections at once.
    pub connections: usize,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
            half_open: HalfOpenLimits::default(),
            connections: 200_000,
        }
    }
}

/// Who is at the other end of a connection.
#[derive(Clone, Copy, Debug)]
pub struct AgentPeer {
    /// The Ed25519 key it has proven.
    pub public_key: [u8; 32],
    /// Where it connects from.
    pub address: SocketAddr,
}

/// A connection whose peer has proven a key.
pub struct AgentStream {
    stream: TlsStream<TcpStream>,
    peer: AgentPeer,
    metrics: Metrics,
    _permit: OwnedSemaphorePermit,
}

impl Drop for AgentStream {
    fn drop(&mut self) {
        self.metrics.agent_connections.dec();
    }
}

/// Takes connections until `stop`, and hands on those whose handshake succeeds.
pub async fn accept(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    limits: ConnectionLimits,
    metrics: Metrics,
    accepted: mpsc::Sender<AgentStream>,
    stop: CancellationToken,
) {
    let door = Arc::new(Door {
        acceptor: TlsAcceptor::from(config),
        limits,
        metrics,
        half_open: Mutex::new(HalfOpen::new(limits.half_open)),
        permits: Arc::new(Semaphore::new(limits.connections.min(Semaphore::MAX_PERMITS))),
        accepted,
    });
    // Dropped at the end, and with it every handshake still under way.
    let mut handshakes: JoinSet<()> = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = handshakes.join_next() => {}
            connection = listener.accept() => match connection {
                Ok((stream, address)) => {
                    handshakes.spawn(door.clone().let_in(stream, address));
                }
                // Mostly "too many open files": the pause lets some of them end.
                Err(error) => {
                    tracing::warn!(%error, "cannot take a connection");
                    door.count("accept");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
        }
    }
}

struct Door {
    acceptor: TlsAcceptor,
    limits: ConnectionLimits,
    metrics: Metrics,
    half_open: Mutex<HalfOpen>,
    permits: Arc<Semaphore>,
    accepted: mpsc::Sender<AgentStream>,
}

impl Door {
    async fn let_in(self: Arc<Self>, stream: TcpStream, address: SocketAddr) {
        match self.shake_hands(stream, address).await {
            // The receiver is gone when the server is being stopped.
            Ok(stream) => drop(self.accepted.send(stream).await),
            Err(reason) => {
                tracing::debug!(%address, reason, "a handshake failed");
                self.count(reason);
            }
        }
    }

    async fn shake_hands(&self, stream: TcpStream, address: SocketAddr) -> Result<AgentStream, &'static str> {
        let ticket = self.with_half_open(|open| open.admit(Source::of(address.ip())));
        let handshake = async {
            stream.set_nodelay(true)?;
            self.acceptor.accept(stream).await
        };
        let outcome = tokio::select! {
            outcome = tokio::time::timeout(self.limits.handshake, handshake) => outcome.map_err(|_| "timeout"),
            () = ticket.gives_way.cancelled() => Err("gave-way"),
        };
        self.with_half_open(|open| open.leave(&ticket));
        let stream = outcome?.map_err(|error| reason_of(&error))?;
        let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let public_key = certificate.and_then(|der| agent_key(der).ok()).ok_or("certificate")?;
        let permit = self.permits.clone().try_acquire_owned().map_err(|_| "full")?;
        self.metrics.agent_connections.inc();
        let peer = AgentPeer { public_key, address };
        Ok(AgentStream { stream, peer, metrics: self.metrics.clone(), _permit: permit })
    }

    fn with_half_open<T>(&self, change: impl FnOnce(&mut HalfOpen) -> T) -> T {
        let mut open = self.half_open.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut open);
        self.metrics.handshakes_open.set(i64::try_from(open.count()).unwrap_or(i64::MAX));
        result
    }

    fn count(&self, reason: &'static str) {
        self.metrics.handshake_failures.get_or_create(&ByReason { reason }).inc();
    }
}

/// A few words for the metric; a peer must not be able to make labels.
fn reason_of(error: &io::Error) -> &'static str {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented) => "certificate",
        Some(_) => "protocol",
        None => "connection",
    }
}

impl Connected for AgentStream {
    type ConnectInfo = AgentPeer;

    fn connect_info(&self) -> AgentPeer {
        self.peer
    }
}

impl AsyncRead for AgentStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for AgentStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
