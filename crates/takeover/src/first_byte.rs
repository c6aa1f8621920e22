//! Detects a hung SSH server by the first byte it sends.
//!
//! The kernel of a hung machine still accepts connections. In contrast to a slow server, not one byte arrives: every
//! SSH server sends its version line unprompted, before anything that takes it time (RFC 4253, section 4.2).

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

/// Wraps the connection; passes everything on, and reports the first byte.
pub(super) struct FirstByteDetector {
    stream: TcpStream,
    received: watch::Sender<bool>,
}

/// Waits for the first byte of the connection.
pub(super) struct FirstByteReceiver(watch::Receiver<bool>);

impl FirstByteDetector {
    pub(super) fn new(stream: TcpStream) -> (Self, FirstByteReceiver) {
        let (sender, receiver) = watch::channel(false);
        (Self { stream, received: sender }, FirstByteReceiver(receiver))
    }
}

impl FirstByteReceiver {
    /// Returns at `until` if no byte has arrived by then. Never returns if one has, or if the connection ended.
    pub(super) async fn wait_for_silence(mut self, until: Instant) {
        if timeout_at(until, self.0.wait_for(|reported| *reported)).await.is_err() {
            return;
        }
        std::future::pending::<()>().await;
    }
}

impl AsyncRead for FirstByteDetector {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.received.send_if_modified(|reported| !std::mem::replace(reported, true));
        }
        read
    }
}

impl AsyncWrite for FirstByteDetector {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
