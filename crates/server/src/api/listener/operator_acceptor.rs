//! Accept operators' TLS connections.
//!
//! The connections use TLS 1.3, with or without a client certificate. As for agents, the accept loop never waits for a
//! peer: each handshake is a task, and the [gate](transport::gate) of the listener bounds the connections. A connection
//! is proven once a call on it has an accepted credential. Anyone can open others, so they give way.

use std::net::SocketAddr;
use std::sync::Arc;

use ring::digest;
use rustls::ServerConfig;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use transport::accept::accept_tls;
use transport::gate::stream::GatedStream;
use transport::gate::{Gate, Place};

use crate::tls::certificate_rejection::{CertificateRejections, find_rejection};
use crate::tls::tracked_connection::TrackedConnection;

/// The peer of a connection.
#[derive(Clone, Debug)]
pub struct ApiPeer {
    /// SHA-256 of the client certificate whose key the peer has proven, DER; `None` without one.
    pub certificate: Option<[u8; 32]>,
    /// The network address of the peer.
    pub address: SocketAddr,
    /// Its place in the gate. The gate learns there that a credential was accepted.
    pub place: Place,
}

/// A connection of an operator.
pub type ApiStream = TrackedConnection<ApiPeer>;

/// Accepts connections until `stop`, and passes them on after a successful handshake.
pub async fn accept_operators(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    gate: Gate,
    rejections: CertificateRejections,
    accepted: mpsc::Sender<ApiStream>,
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
                let (rejections, accepted) = (rejections.clone(), accepted.clone());
                handshakes.spawn(handle_connection(acceptor.clone(), stream, rejections, accepted));
            }
        }
    }
}

async fn handle_connection(
    acceptor: TlsAcceptor,
    stream: GatedStream,
    rejections: CertificateRejections,
    accepted: mpsc::Sender<ApiStream>,
) {
    let (address, place) = (stream.peer_address(), stream.place().clone());
    match accept_tls(&acceptor, stream).await {
        Ok(stream) => {
            let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
            let peer =
                ApiPeer { certificate: certificate.map(|der| certificate_fingerprint(der)), address, place };
            // The receiver is dropped when the server is stopping.
            drop(accepted.send(TrackedConnection::new(stream, peer)).await);
        }
        Err(error) => {
            if let Some(reason) = find_rejection(&error)
                && rejections.record(reason)
            {
                tracing::warn!(%address, reason, "a client rejected the certificate of the API");
            }
            tracing::debug!(%address, %error, "a handshake with an operator failed");
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
