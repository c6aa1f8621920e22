//! TLS connection with its peer.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;
use transport::gate::stream::GatedStream;

/// A connection from the peer `P`, which the handshake identified. It fails once its gate has closed it; the server
/// reads all the time, so it notices.
pub struct TrackedConnection<P> {
    stream: TlsStream<GatedStream>,
    peer: P,
}

impl<P> TrackedConnection<P> {
    /// Wraps the stream of a peer with a verified certificate.
    pub(crate) const fn new(stream: TlsStream<GatedStream>, peer: P) -> Self {
        Self { stream, peer }
    }
}

impl<P: Clone + Send + Sync + 'static> Connected for TrackedConnection<P> {
    type ConnectInfo = P;

    fn connect_info(&self) -> P {
        self.peer.clone()
    }
}

impl<P: Unpin> AsyncRead for TrackedConnection<P> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<P: Unpin> AsyncWrite for TrackedConnection<P> {
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
