//! Accept agents' TLS connections: bounded handshakes, pre-auth deadline.
//!
//! The accept loop never waits for a peer. Each handshake is a task with a deadline, and `half_open.rs` bounds their
//! number. A stream reaches tonic only after its peer has proven a key. The first heartbeat shows which agent owns the
//! key. This module waits for it for a while (`preauth.rs`), and closes a stream that does not authenticate as if its
//! peer had disconnected.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use transport::accept::{ACCEPT_ERROR_PAUSE, HandshakeError, accept_tls};

use crate::callback::half_open::{HalfOpenLimits, HalfOpenSet, PeerNetwork};
use crate::callback::preauth::{PreAuthGuard, PreAuthOutcome, PreAuthTimeouts, PreAuthWatcher};
use crate::tls::client_verifier::verified_agent_key;
use crate::tls::tracked_connection::TrackedConnection;
use bmdb::metrics::Metrics;
use bmdb::metrics::labels::ByReason;

/// Limits on the resources that peers can make us use.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Longest duration of a handshake.
    pub handshake: Duration,
    /// Limits on handshakes in progress.
    pub half_open: HalfOpenLimits,
    /// How long a connection may stay unauthenticated.
    pub preauth_timeouts: PreAuthTimeouts,
    /// Limits on connections that are not authenticated yet.
    pub preauth: HalfOpenLimits,
    /// Most connections at once.
    pub connections: usize,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
            half_open: HalfOpenLimits::default(),
            preauth_timeouts: PreAuthTimeouts::default(),
            // After an outage, more agents than this reconnect at once from behind one address translator.
            preauth: HalfOpenLimits { per_network: 4096, total: 50_000 },
            connections: 200_000,
        }
    }
}

/// The peer of a connection.
#[derive(Clone, Debug)]
pub struct AgentPeer {
    /// The Ed25519 key that the peer has proven.
    pub public_key: [u8; 32],
    /// The network address of the peer.
    pub address: SocketAddr,
    /// Receives the result when the key is found to be an agent's.
    pub preauth: Arc<PreAuthGuard>,
}

/// A connection whose peer has proven a key. It is closed if the key turns out to be no agent's.
pub type AgentStream = TrackedConnection<AgentPeer, ConnectionGuard>;

/// A connection's slot; the metric counts it until it is dropped.
pub struct ConnectionGuard {
    metrics: Metrics,
    _permit: OwnedSemaphorePermit,
}

/// A stream, with what is needed to wait for its first heartbeat.
struct PreAuthStream {
    stream: AgentStream,
    preauth: PreAuthWatcher,
    close: CancellationToken,
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.metrics.agent_connections.dec();
    }
}

/// Accepts connections until `stop`, and passes on those whose handshake succeeds.
pub async fn accept_agents(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    limits: ConnectionLimits,
    metrics: Metrics,
    accepted: mpsc::Sender<AgentStream>,
    stop: CancellationToken,
) {
    let acceptor = Arc::new(AgentAcceptor {
        acceptor: TlsAcceptor::from(config),
        limits,
        metrics,
        half_open: Mutex::new(HalfOpenSet::new(limits.half_open)),
        preauth: Mutex::new(HalfOpenSet::new(limits.preauth)),
        permits: Arc::new(Semaphore::new(limits.connections.min(Semaphore::MAX_PERMITS))),
        accepted,
    });
    // Dropped at the end, which aborts every handshake in progress.
    let mut handshakes: JoinSet<()> = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = handshakes.join_next() => {}
            connection = listener.accept() => match connection {
                Ok((stream, address)) => {
                    handshakes.spawn(acceptor.clone().handle_connection(stream, address));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot take a connection");
                    acceptor.count_failure("accept");
                    tokio::time::sleep(ACCEPT_ERROR_PAUSE).await;
                }
            },
        }
    }
}

struct AgentAcceptor {
    acceptor: TlsAcceptor,
    limits: ConnectionLimits,
    metrics: Metrics,
    half_open: Mutex<HalfOpenSet>,
    preauth: Mutex<HalfOpenSet>,
    permits: Arc<Semaphore>,
    accepted: mpsc::Sender<AgentStream>,
}

impl AgentAcceptor {
    async fn handle_connection(self: Arc<Self>, stream: TcpStream, address: SocketAddr) {
        match self.accept_agent(stream, address).await {
            Ok(pending) => self.await_authentication(pending, address).await,
            Err(reason) => {
                tracing::debug!(%address, reason, "a handshake failed");
                self.count_failure(reason);
            }
        }
    }

    /// Passes a stream on, and closes it if it does not authenticate.
    async fn await_authentication(&self, pending: PreAuthStream, address: SocketAddr) {
        let PreAuthStream { stream, preauth, close } = pending;
        let ticket = self.with_preauth(|open| open.admit(PeerNetwork::from_address(address.ip())));
        // The receiver is dropped when the server is stopping.
        drop(self.accepted.send(stream).await);
        let ended = preauth.wait_for_auth(self.limits.preauth_timeouts, &ticket.evicted).await;
        self.with_preauth(|open| open.remove(&ticket));
        let reason = match ended {
            PreAuthOutcome::Authenticated | PreAuthOutcome::Closed => return,
            PreAuthOutcome::Evicted => "evicted",
            PreAuthOutcome::TimedOut => "unauthenticated",
        };
        close.cancel();
        tracing::debug!(%address, reason, "a connection that proved no agent was closed");
        self.metrics.agent_connections_closed.get_or_create(&ByReason { reason }).inc();
    }

    async fn accept_agent(
        &self,
        stream: TcpStream,
        address: SocketAddr,
    ) -> Result<PreAuthStream, &'static str> {
        let ticket = self.with_half_open(|open| open.admit(PeerNetwork::from_address(address.ip())));
        let outcome = tokio::select! {
            outcome = accept_tls(&self.acceptor, stream, self.limits.handshake) => {
                outcome.map_err(|error| handshake_failure_reason(&error))
            }
            () = ticket.evicted.cancelled() => Err("evicted"),
        };
        self.with_half_open(|open| open.remove(&ticket));
        let stream = outcome?;
        let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let public_key = certificate.and_then(|der| verified_agent_key(der).ok()).ok_or("certificate")?;
        let permit = self.permits.clone().try_acquire_owned().map_err(|_| "full")?;
        self.metrics.agent_connections.inc();
        let (guard, preauth) = PreAuthGuard::new();
        let peer = AgentPeer { public_key, address, preauth: Arc::new(guard) };
        let close = CancellationToken::new();
        let counted = ConnectionGuard { metrics: self.metrics.clone(), _permit: permit };
        let stream = TrackedConnection::new(stream, peer, close.clone(), counted);
        Ok(PreAuthStream { stream, preauth, close })
    }

    fn with_preauth<T>(&self, change: impl FnOnce(&mut HalfOpenSet) -> T) -> T {
        let mut open = self.preauth.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut open);
        self.metrics.agent_connections_unproven.set(i64::try_from(open.count()).unwrap_or(i64::MAX));
        result
    }

    fn with_half_open<T>(&self, change: impl FnOnce(&mut HalfOpenSet) -> T) -> T {
        let mut open = self.half_open.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut open);
        self.metrics.handshakes_open.set(i64::try_from(open.count()).unwrap_or(i64::MAX));
        result
    }

    fn count_failure(&self, reason: &'static str) {
        self.metrics.handshake_failures.get_or_create(&ByReason { reason }).inc();
    }
}

/// A fixed label for the metric, so that a peer cannot create labels.
fn handshake_failure_reason(error: &HandshakeError) -> &'static str {
    let HandshakeError::Failed(error) = error else { return "timeout" };
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented) => "certificate",
        Some(_) => "protocol",
        None => "connection",
    }
}
