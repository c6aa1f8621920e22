//! Taking connections, and shaking hands beside the loop that takes them.
//!
//! The loop never waits for a peer: each handshake is a task with a deadline,
//! and how many there may be is decided in `half_open.rs`. What comes out are
//! streams whose peer has proven a key, and tonic never sees another. Whose the
//! key is shows with the first heartbeat, which is awaited here for a while
//! (`unproven.rs`); a stream that proves nothing ends as if its peer had gone.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::bmdb::metrics::{ByReason, Metrics};
use crate::server::carried::Carried;
use crate::server::half_open::{HalfOpen, HalfOpenLimits, Source};
use crate::server::tls::agent_key;
use crate::server::unproven::{Awaited, Ended, Patience, Proof};

/// Limits on what peers can make us hold.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// How long a handshake may take.
    pub handshake: Duration,
    /// How many may be under way.
    pub half_open: HalfOpenLimits,
    /// How long a connection may prove no agent.
    pub patience: Patience,
    /// How many may have proven none yet.
    pub unproven: HalfOpenLimits,
    /// Most connections at once.
    pub connections: usize,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
            half_open: HalfOpenLimits::default(),
            patience: Patience::default(),
            // More than behind one address translator reconnect within a moment.
            unproven: HalfOpenLimits { per_source: 4096, overall: 50_000 },
            connections: 200_000,
        }
    }
}

/// Who is at the other end of a connection.
#[derive(Clone, Debug)]
pub struct AgentPeer {
    /// The Ed25519 key it has proven.
    pub public_key: [u8; 32],
    /// Where it connects from.
    pub address: SocketAddr,
    /// Told when the key turns out to be an agent's.
    pub proof: Arc<Proof>,
}

/// A connection whose peer has proven a key. It is over when it has to end because that is no agent's.
pub type AgentStream = Carried<AgentPeer, Counted>;

/// A connection's place, which is counted.
pub struct Counted {
    metrics: Metrics,
    _permit: OwnedSemaphorePermit,
}

/// A stream, and what its first heartbeat is awaited with.
struct Newcomer {
    stream: AgentStream,
    awaited: Awaited,
    expel: CancellationToken,
}

impl Drop for Counted {
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
        unproven: Mutex::new(HalfOpen::new(limits.unproven)),
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
    unproven: Mutex<HalfOpen>,
    permits: Arc<Semaphore>,
    accepted: mpsc::Sender<AgentStream>,
}

impl Door {
    async fn let_in(self: Arc<Self>, stream: TcpStream, address: SocketAddr) {
        match self.shake_hands(stream, address).await {
            Ok(newcomer) => self.await_proof(newcomer, address).await,
            Err(reason) => {
                tracing::debug!(%address, reason, "a handshake failed");
                self.count(reason);
            }
        }
    }

    /// Hands a stream on, and ends it when it proves nothing.
    async fn await_proof(&self, newcomer: Newcomer, address: SocketAddr) {
        let Newcomer { stream, awaited, expel } = newcomer;
        let ticket = self.with_unproven(|open| open.admit(Source::of(address.ip())));
        // The receiver is gone when the server is being stopped.
        drop(self.accepted.send(stream).await);
        let ended = awaited.ended(self.limits.patience, &ticket.gives_way).await;
        self.with_unproven(|open| open.leave(&ticket));
        let reason = match ended {
            Ended::Proven | Ended::Gone => return,
            Ended::GaveWay => "gave-way",
            Ended::Silent => "no-heartbeat",
        };
        expel.cancel();
        tracing::debug!(%address, reason, "a connection that proved no agent was closed");
        self.metrics.agent_connections_closed.get_or_create(&ByReason { reason }).inc();
    }

    async fn shake_hands(&self, stream: TcpStream, address: SocketAddr) -> Result<Newcomer, &'static str> {
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
        let (proof, awaited) = Proof::new();
        let peer = AgentPeer { public_key, address, proof: Arc::new(proof) };
        let expel = CancellationToken::new();
        let counted = Counted { metrics: self.metrics.clone(), _permit: permit };
        let stream = Carried::new(stream, peer, expel.clone(), counted);
        Ok(Newcomer { stream, awaited, expel })
    }

    fn with_unproven<T>(&self, change: impl FnOnce(&mut HalfOpen) -> T) -> T {
        let mut open = self.unproven.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut open);
        self.metrics.agent_connections_unproven.set(i64::try_from(open.count()).unwrap_or(i64::MAX));
        result
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
