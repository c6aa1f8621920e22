//! TLS connection with its peer, a guard, and cancellation.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

/// A connection from the peer `P`, which the handshake identified. The guard `K` is dropped with it.
pub struct TrackedConnection<P, K> {
    stream: TlsStream<TcpStream>,
    peer: P,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
    _guard: K,
}

impl<P, K> TrackedConnection<P, K> {
    /// Wraps a stream. Reading fails once `over` is cancelled; the server reads all the time, so it notices.
    pub(crate) fn new(stream: TlsStream<TcpStream>, peer: P, over: CancellationToken, kept: K) -> Self {
        Self { stream, peer, closed: Box::pin(over.cancelled_owned()), _guard: kept }
    }
}

impl<P: Clone + Send + Sync + 'static, K> Connected for TrackedConnection<P, K> {
    type ConnectInfo = P;

    fn connect_info(&self) -> P {
        self.peer.clone()
    }
}

impl<P: Unpin, K: Unpin> AsyncRead for TrackedConnection<P, K> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.closed.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<P: Unpin, K: Unpin> AsyncWrite for TrackedConnection<P, K> {
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
