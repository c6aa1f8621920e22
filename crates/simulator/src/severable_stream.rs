//! TCP stream that fails when its machine goes down.
//!
//! russh runs a session in a task of its own, which cannot be aborted from outside. The end of its input ends the
//! session and its connection. Without this, a machine that lost power would continue to answer clients that were
//! logged in.

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// A connection that fails once its token is cancelled.
pub(crate) struct SeverableStream {
    stream: TcpStream,
    token: CancellationToken,
    severed: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl SeverableStream {
    /// Wraps a stream, which `cut` ends.
    pub(crate) fn new(stream: TcpStream, cut: CancellationToken) -> Self {
        Self { stream, token: cut.clone(), severed: Box::pin(cut.cancelled_owned()) }
    }
}

impl AsyncRead for SeverableStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.severed.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(std::io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for SeverableStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        // A writer that is blocked here is woken by the reading half, which ends for both.
        if self.token.is_cancelled() {
            return Poll::Ready(Err(std::io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn nothing_is_sent_after_severing() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        let cut = CancellationToken::new();
        let mut server = SeverableStream::new(server, cut.clone());
        server.write_all(b"a").await.unwrap();
        cut.cancel();
        let error = server.write_all(b"b").await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionAborted);
        drop(server);
        let mut bytes = Vec::new();
        client.read_to_end(&mut bytes).await.unwrap();
        assert_eq!(bytes, b"a");
    }

    #[tokio::test]
    async fn severing_wakes_a_waiting_reader() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        let cut = CancellationToken::new();
        let mut server = SeverableStream::new(server, cut.clone());
        client.write_all(b"a").await.unwrap();
        assert_eq!(server.read_u8().await.unwrap(), b'a');
        let waiting = tokio::spawn(async move { server.read_u8().await });
        cut.cancel();
        let error = waiting.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionAborted);
        assert_eq!(client.read(&mut [0]).await.unwrap(), 0, "the peer sees the end");
    }
}
