//! A connection that was let in: what goes over it, who is at the other end, and what it holds until it ends.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

/// A connection from `P`, which is known from its handshake; `K` is dropped with it.
pub struct Carried<P, K> {
    stream: TlsStream<TcpStream>,
    peer: P,
    over: Pin<Box<WaitForCancellationFutureOwned>>,
    _kept: K,
}

impl<P, K> Carried<P, K> {
    /// Breaks once `over` is cancelled: what serves it reads all the time, and so finds out.
    pub(super) fn new(stream: TlsStream<TcpStream>, peer: P, over: CancellationToken, kept: K) -> Self {
        Self { stream, peer, over: Box::pin(over.cancelled_owned()), _kept: kept }
    }
}

impl<P: Clone + Send + Sync + 'static, K> Connected for Carried<P, K> {
    type ConnectInfo = P;

    fn connect_info(&self) -> P {
        self.peer.clone()
    }
}

impl<P: Unpin, K: Unpin> AsyncRead for Carried<P, K> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.over.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<P: Unpin, K: Unpin> AsyncWrite for Carried<P, K> {
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
