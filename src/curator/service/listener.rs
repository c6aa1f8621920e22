//! Taking connections, and ending them all.
//!
//! When a curator becomes something else than it was, every connection to it ends: a call that came before must not be
//! answered by what it is now, and whoever is connected must find out who leads. So calls under way are answered that it
//! is over, and a moment later connections are cut, whatever still goes on in them.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::StreamExt as _;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::Server;
use tonic::transport::server::Connected;

use crate::curator::service::door::Door;
use crate::curator::service::leader::ShownCertificates;

const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Handshakes at once: whoever opens connections and says nothing keeps others out for less than that limit.
const HANDSHAKES: usize = 1024;
const GRACE: Duration = Duration::from_millis(500);
/// Sooner than a node would count as silent.
const KEEPALIVE: Duration = Duration::from_secs(5);
const KEEPALIVE_ANSWER: Duration = Duration::from_secs(5);
const CALLS_PER_CONNECTION: u32 = 256;
const HEADER_LIMIT: u32 = 16 << 10;

/// Serves this door until `over`; all connections have ended when it returns.
pub async fn serve(
    listener: Arc<TcpListener>,
    config: Arc<ServerConfig>,
    door: Door,
    over: CancellationToken,
) {
    let cut = CancellationToken::new();
    // Dropped half-way, this ends all connections too.
    let _cut_at_the_end = cut.clone().drop_guard();
    let acceptor = TlsAcceptor::from(config);
    let handshake = |stream: TcpStream| let_in(acceptor.clone(), stream, cut.clone());
    let connections = futures::stream::unfold(listener, |listener| async {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => return Some((stream, listener)),
                Err(error) => wait_for_room(&error).await,
            }
        }
    });
    let connections = connections
        .map(handshake)
        .buffer_unordered(HANDSHAKES)
        .filter_map(std::future::ready)
        .map(Ok::<_, Infallible>);
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE_ANSWER))
        .max_concurrent_streams(CALLS_PER_CONNECTION)
        .http2_max_header_list_size(HEADER_LIMIT);
    let serving = server.serve_with_incoming_shutdown(door, connections, over.cancelled());
    let cutting = async {
        over.cancelled().await;
        tokio::time::sleep(GRACE).await;
        cut.cancel();
        std::future::pending::<()>().await;
    };
    tokio::select! {
        ended = serving => if let Err(error) = ended {
            tracing::error!(%error, "the curator's server ended");
        },
        () = cutting => {}
    }
}

/// Closes whatever connects: this curator does not know who leads, and nobody is to wait for it.
pub async fn turn_away(listener: &TcpListener) {
    loop {
        match listener.accept().await {
            Ok(connection) => drop(connection),
            Err(error) => wait_for_room(&error).await,
        }
    }
}

/// Mostly "too many open files": the pause lets some of them end.
async fn wait_for_room(error: &io::Error) {
    tracing::warn!(%error, "cannot take a connection to the curator");
    tokio::time::sleep(Duration::from_millis(50)).await;
}

async fn let_in(acceptor: TlsAcceptor, stream: TcpStream, cut: CancellationToken) -> Option<Connection> {
    let shaken = tokio::time::timeout(HANDSHAKE_LIMIT, async {
        stream.set_nodelay(true)?;
        acceptor.accept(stream).await
    });
    match shaken.await {
        Ok(Ok(stream)) => {
            let shown = stream.get_ref().1.peer_certificates().unwrap_or_default();
            let shown = shown.iter().map(|certificate| certificate.to_vec()).collect();
            Some(Connection { stream, shown, cut: Box::pin(cut.cancelled_owned()) })
        }
        Ok(Err(error)) => {
            tracing::debug!(%error, "a handshake with the curator failed");
            None
        }
        Err(_) => {
            tracing::debug!("a handshake with the curator took too long");
            None
        }
    }
}

/// A connection that can be cut.
struct Connection {
    stream: TlsStream<TcpStream>,
    shown: ShownCertificates,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Connection {
    fn is_cut(&mut self, context: &mut Context<'_>) -> bool {
        use std::future::Future as _;
        self.cut.as_mut().poll(context).is_ready()
    }
}

impl Connected for Connection {
    type ConnectInfo = ShownCertificates;

    fn connect_info(&self) -> ShownCertificates {
        self.shown.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_cut(context) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_read(context, to)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.is_cut(context) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_write(context, from)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.is_cut(context) {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
