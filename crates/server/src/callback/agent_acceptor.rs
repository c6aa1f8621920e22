//! Accept agents' TLS connections.
//!
//! The accept loop never waits for a peer. Each handshake is a task, and the [gate](transport::gate) of the listener
//! bounds their number and their time. A stream reaches tonic only after its peer has proven a key. The first heartbeat
//! shows which agent owns the key, and only then the gate counts the connection as proven: anyone can generate a key.
//! Until then it has a deadline, and gives way when there are too many.
//!
//! While the database is away, no connection can be authenticated. An agent that sent a heartbeat and got that error
//! keeps its connection for some minutes, so that the fleet does not start with handshakes when the database
//! comes back. The connection still counts as unproven.

use std::net::SocketAddr;
use std::sync::Arc;

use rustls::ServerConfig;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use transport::accept::{HandshakeError, accept_tls};
use transport::gate::limits::{GateLimits, ListenerKind};
use transport::gate::stream::GatedStream;
use transport::gate::table::CloseReason;
use transport::gate::{Gate, GateEvent, Place};

use crate::gate_metrics::{GatePressure, as_gauge, open_gate};
use crate::tls::certificate_rejection::{CertificateRejections, find_rejection};
use crate::tls::client_verifier::verified_agent_key;
use crate::tls::tracked_connection::TrackedConnection;
use bmdb::metrics::Metrics;
use bmdb::metrics::labels::ByReason;

/// The peer of a connection.
#[derive(Clone, Debug)]
pub struct AgentPeer {
    /// The Ed25519 key that the peer has proven.
    pub public_key: [u8; 32],
    /// The network address of the peer.
    pub address: SocketAddr,
    /// Its place in the gate. The gate learns there that the key is an agent's.
    pub place: Place,
}

/// A connection of a peer that has proven a key.
pub type AgentStream = TrackedConnection<AgentPeer>;

/// The gate of the callback listener.
pub(super) fn agent_gate(limits: GateLimits, metrics: &Metrics, pressure: GatePressure) -> Gate {
    let counted = metrics.clone();
    open_gate(ListenerKind::Callback, limits, metrics.clone(), pressure, move |event| {
        record_agent_event(&counted, event);
    })
}

/// Counts an event in the metrics that only this listener has.
fn record_agent_event(metrics: &Metrics, event: GateEvent) {
    match event {
        GateEvent::Counts(counts) => {
            metrics.handshakes_open.set(as_gauge(counts.handshakes));
            let unproven = counts.unproven.saturating_sub(counts.handshakes);
            metrics.agent_connections_unproven.set(as_gauge(unproven));
            metrics.agent_connections.set(as_gauge(unproven + counts.proven));
        }
        GateEvent::AcceptFailed => count_failure(metrics, "accept"),
        GateEvent::Closed(closed) if closed.in_handshake => count_failure(metrics, closed.reason.as_str()),
        GateEvent::Closed(closed) => {
            let reason = match closed.reason {
                CloseReason::TimedOut => "unauthenticated",
                other => other.as_str(),
            };
            metrics.agent_connections_closed.get_or_create(&ByReason { reason }).inc();
        }
    }
}

/// Accepts connections until `stop`, and passes on those whose handshake succeeds.
pub async fn accept_agents(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    gate: Gate,
    metrics: Metrics,
    rejections: CertificateRejections,
    accepted: mpsc::Sender<AgentStream>,
    stop: CancellationToken,
) {
    let acceptor = TlsAcceptor::from(config);
    // Dropped at the end, which aborts every handshake in progress.
    let mut handshakes: JoinSet<()> = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = handshakes.join_next() => {}
            stream = gate.accept(&listener) => {
                let (metrics, rejections) = (metrics.clone(), rejections.clone());
                let accepted = accepted.clone();
                handshakes.spawn(handle_connection(acceptor.clone(), stream, metrics, rejections, accepted));
            }
        }
    }
}

async fn handle_connection(
    acceptor: TlsAcceptor,
    stream: GatedStream,
    metrics: Metrics,
    rejections: CertificateRejections,
    accepted: mpsc::Sender<AgentStream>,
) {
    let address = stream.peer_address();
    match accept_agent(&acceptor, stream).await {
        // The receiver is dropped when the server is stopping.
        Ok(stream) => drop(accepted.send(stream).await),
        Err(Some(HandshakeFailure::Rejected(reason))) => {
            if rejections.record(reason) {
                tracing::warn!(%address, reason, "a client rejected the certificate of the callback server");
            }
            count_failure(&metrics, reason);
        }
        Err(Some(HandshakeFailure::Other(reason))) => {
            tracing::debug!(%address, reason, "a handshake failed");
            count_failure(&metrics, reason);
        }
        Err(None) => tracing::debug!(%address, "the gate closed a connection during its handshake"),
    }
}

/// Why a handshake failed, as a fixed label for the metric, so that a peer cannot create labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HandshakeFailure {
    /// The peer sent an alert that rejects the server's certificate.
    Rejected(&'static str),
    /// A failure that says nothing about that certificate.
    Other(&'static str),
}

/// The stream of a peer that has proven a key, or why its handshake failed; `None` if the gate has counted that.
async fn accept_agent(
    acceptor: &TlsAcceptor,
    stream: GatedStream,
) -> Result<AgentStream, Option<HandshakeFailure>> {
    let (address, place) = (stream.peer_address(), stream.place().clone());
    let stream = accept_tls(acceptor, stream).await.map_err(|error| classify_failure(&error))?;
    let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let public_key = certificate
        .and_then(|der| verified_agent_key(der).ok())
        .ok_or(HandshakeFailure::Other("certificate"))?;
    Ok(TrackedConnection::new(stream, AgentPeer { public_key, address, place }))
}

fn count_failure(metrics: &Metrics, reason: &'static str) {
    metrics.handshake_failures.get_or_create(&ByReason { reason }).inc();
}

fn classify_failure(error: &HandshakeError) -> Option<HandshakeFailure> {
    if let Some(reason) = find_rejection(error) {
        return Some(HandshakeFailure::Rejected(reason));
    }
    let HandshakeError::Failed(error) = error else { return None };
    Some(match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented) => {
            HandshakeFailure::Other("certificate")
        }
        Some(rustls::Error::AlertReceived(_)) => HandshakeFailure::Other("alert_other"),
        Some(_) => HandshakeFailure::Other("protocol"),
        None => HandshakeFailure::Other("connection"),
    })
}
