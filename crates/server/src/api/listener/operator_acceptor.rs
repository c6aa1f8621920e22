//! Accept operators' TLS connections, limited in total and per source.
//!
//! The connections use TLS 1.3, with or without a client certificate. As for agents, the accept loop never waits for a
//! peer: each handshake is a task with a deadline, and the number of connections is bounded. Operators have far fewer
//! connections than agents, so one above the limit is rejected. A connection needs no credential, so one source gets
//! only a part of them and cannot lock out the others.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ring::digest;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use transport::accept::{ACCEPT_ERROR_PAUSE, HandshakeError, accept_tls};

use crate::api::listener::source_limits::{SourceLimiter, SourcePermit, source_key};
use crate::tls::tracked_connection::TrackedConnection;

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The peer of a connection.
#[derive(Clone, Debug)]
pub struct ApiPeer {
    /// SHA-256 of the client certificate whose key the peer has proven, DER; `None` without one.
    pub certificate: Option<[u8; 32]>,
    /// The network address of the peer.
    pub address: SocketAddr,
}

/// A connection with its permit.
pub type ApiStream = TrackedConnection<ApiPeer, SourcePermit>;

/// Accepts up to `max_connections` connections at once until `stop`, and passes on those whose handshake succeeds.
pub async fn accept_operators(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    max_connections: usize,
    accepted: mpsc::Sender<ApiStream>,
    stop: CancellationToken,
) {
    let acceptor = TlsAcceptor::from(config);
    let limiter = SourceLimiter::new(max_connections);
    // Dropped at the end, which aborts every handshake in progress.
    let mut handshakes: JoinSet<()> = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = handshakes.join_next() => {}
            connection = listener.accept() => match connection {
                Ok((stream, address)) => {
                    let Some(permit) = limiter.try_acquire(source_key(address.ip())) else {
                        tracing::warn!(%address, max_connections, "too many connections to the API; one was refused");
                        continue;
                    };
                    handshakes.spawn(handle_connection(acceptor.clone(), stream, address, permit, accepted.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot take a connection to the API");
                    tokio::time::sleep(ACCEPT_ERROR_PAUSE).await;
                }
            },
        }
    }
}

async fn handle_connection(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    address: SocketAddr,
    permit: SourcePermit,
    accepted: mpsc::Sender<ApiStream>,
) {
    match accept_tls(&acceptor, stream, HANDSHAKE_TIMEOUT).await {
        Ok(stream) => {
            let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
            let peer = ApiPeer { certificate: certificate.map(|der| certificate_fingerprint(der)), address };
            // The receiver is dropped when the server is stopping.
            drop(accepted.send(TrackedConnection::new(stream, peer, CancellationToken::new(), permit)).await);
        }
        Err(HandshakeError::Failed(error)) => {
            tracing::debug!(%address, %error, "a handshake with an operator failed");
        }
        Err(HandshakeError::Timeout) => {
            tracing::debug!(%address, "a handshake with an operator took too long");
        }
    }
}

/// SHA-256 of a certificate, DER.
#[must_use]
pub fn certificate_fingerprint(der: &[u8]) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest::digest(&digest::SHA256, der).as_ref());
    bytes
}
