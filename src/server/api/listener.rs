//! Taking operators' connections: TLS 1.3, with a client certificate or without.
//!
//! As for agents, the loop that takes connections never waits for a peer: each handshake is a task with a
//! deadline, and there is an end to how many connections there may be. Far fewer come here, so whoever is
//! one too many is refused.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use ring::digest;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;

const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);

/// Who is at the other end of a connection.
#[derive(Clone, Debug)]
pub struct ApiPeer {
    /// SHA-256 of the certificate it showed and proved, DER.
    pub certificate: Option<[u8; 32]>,
    /// Where it connects from.
    pub address: SocketAddr,
}

/// A connection.
pub struct ApiStream {
    stream: TlsStream<TcpStream>,
    peer: ApiPeer,
    _permit: OwnedSemaphorePermit,
}

/// Takes connections until `stop`, `most` at once, and hands on those whose handshake succeeds.
pub async fn accept(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    most: usize,
    accepted: mpsc::Sender<ApiStream>,
    stop: CancellationToken,
) {
    let acceptor = TlsAcceptor::from(config);
    let permits = Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS)));
    // Dropped at the end, and with it every handshake still under way.
    let mut handshakes: JoinSet<()> = JoinSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = handshakes.join_next() => {}
            connection = listener.accept() => match connection {
                Ok((stream, address)) => {
                    let Ok(permit) = permits.clone().try_acquire_owned() else {
                        tracing::warn!(%address, most, "too many connections to the API; one was refused");
                        continue;
                    };
                    handshakes.spawn(let_in(acceptor.clone(), stream, address, permit, accepted.clone()));
                }
                // Mostly "too many open files": the pause lets some of them end.
                Err(error) => {
                    tracing::warn!(%error, "cannot take a connection to the API");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
        }
    }
}

async fn let_in(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    address: SocketAddr,
    permit: OwnedSemaphorePermit,
    accepted: mpsc::Sender<ApiStream>,
) {
    let shaken = tokio::time::timeout(HANDSHAKE_LIMIT, async {
        stream.set_nodelay(true)?;
        acceptor.accept(stream).await
    });
    match shaken.await {
        Ok(Ok(stream)) => {
            let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
            let peer = ApiPeer { certificate: certificate.map(|der| fingerprint(der)), address };
            // The receiver is gone when the server is being stopped.
            drop(accepted.send(ApiStream { stream, peer, _permit: permit }).await);
        }
        Ok(Err(error)) => tracing::debug!(%address, %error, "a handshake with an operator failed"),
        Err(_) => tracing::debug!(%address, "a handshake with an operator took too long"),
    }
}

/// SHA-256 of a certificate, DER.
#[must_use]
pub fn fingerprint(der: &[u8]) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest::digest(&digest::SHA256, der).as_ref());
    bytes
}

impl Connected for ApiStream {
    type ConnectInfo = ApiPeer;

    fn connect_info(&self) -> ApiPeer {
        self.peer.clone()
    }
}

impl AsyncRead for ApiStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for ApiStream {
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
