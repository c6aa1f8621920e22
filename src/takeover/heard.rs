//! A connection that tells whether the other side has said anything yet.
//!
//! The kernel of a hanging machine still accepts connections. What tells it from
//! a slow server is that not one byte comes: every SSH server sends its version
//! line unasked, before anything that takes it time (RFC 4253, section 4.2).

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

/// The connection's half; passes everything on.
pub(super) struct Heard {
    stream: TcpStream,
    said: watch::Sender<bool>,
}

/// The waiting half.
pub(super) struct Said(watch::Receiver<bool>);

impl Heard {
    pub(super) fn new(stream: TcpStream) -> (Self, Said) {
        let (said, receiver) = watch::channel(false);
        (Self { stream, said }, Said(receiver))
    }
}

impl Said {
    /// Returns when nothing has been said by `until`; never when something was, or the connection ended.
    pub(super) async fn nothing_by(mut self, until: Instant) {
        if timeout_at(until, self.0.wait_for(|said| *said)).await.is_err() {
            return;
        }
        std::future::pending::<()>().await;
    }
}

impl AsyncRead for Heard {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.said.send_if_modified(|said| !std::mem::replace(said, true));
        }
        read
    }
}

impl AsyncWrite for Heard {
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
