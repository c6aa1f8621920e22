//! Detects a hung SSH server by the first byte it sends, and stores what it sends before its version line.
//!
//! The kernel of a hung machine still accepts connections. In contrast to a slow server, not one byte arrives: every
//! SSH server sends its version line unprompted, before anything that takes it time (RFC 4253, section 4.2).
//!
//! A server that turns a connection away often sends a line of text instead ("Not allowed at this time"). The SSH library
//! drops such lines, and they are the only explanation.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use model::excerpt::Excerpt;

/// Bytes of the beginning of a connection that are stored.
const GREETING_BYTES: usize = 1024;

/// The beginning of what the server sent.
#[derive(Clone, Default)]
pub(super) struct Greeting(Arc<Mutex<Vec<u8>>>);

impl Greeting {
    fn append(&self, bytes: &[u8]) {
        let mut stored = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let room = GREETING_BYTES.saturating_sub(stored.len());
        stored.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    /// The version line of an SSH server, without its end; `None` if it is incomplete, or too far behind.
    pub(super) fn version_line(&self) -> Option<String> {
        version_line(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The words before the version line of an SSH server; `None` if there are none.
    pub(super) fn words(&self) -> Option<Excerpt> {
        words_before_version(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn version_line(greeting: &[u8]) -> Option<String> {
    let mut lines =
        greeting.split_inclusive(|byte| *byte == b'\n').filter_map(|line| line.strip_suffix(b"\n"));
    let line = lines.find(|line| line.starts_with(b"SSH-"))?;
    Some(String::from_utf8_lossy(line).trim_end().to_owned())
}

fn words_before_version(greeting: &[u8]) -> Option<Excerpt> {
    let text = String::from_utf8_lossy(greeting);
    let lines: Vec<&str> = text.lines().take_while(|line| !line.starts_with("SSH-")).collect();
    Excerpt::from_start(&lines.join("\n"))
}

/// Wraps the connection; passes everything on, and reports the first byte.
pub(super) struct FirstByteDetector {
    stream: TcpStream,
    received: watch::Sender<bool>,
    greeting: Greeting,
}

/// Waits for the first byte of the connection.
pub(super) struct FirstByteReceiver(watch::Receiver<bool>);

impl FirstByteDetector {
    pub(super) fn new(stream: TcpStream) -> (Self, FirstByteReceiver) {
        let (sender, receiver) = watch::channel(false);
        (Self { stream, received: sender, greeting: Greeting::default() }, FirstByteReceiver(receiver))
    }

    /// A cell for the beginning of what the server sends.
    pub(super) fn greeting(&self) -> Greeting {
        self.greeting.clone()
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
            self.greeting.append(&buffer.filled()[before..]);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_before_the_version_line_are_stored() {
        let words = |bytes: &[u8]| words_before_version(bytes).map(|words| words.to_string());
        assert_eq!(words(b"Not allowed at this time\r\n").as_deref(), Some("Not allowed at this time"));
        assert_eq!(words(b"HTTP/1.1 400 Bad Request\r\n").as_deref(), Some("HTTP/1.1 400 Bad Request"));
        assert_eq!(words(b"closed\r\nSSH-2.0-x\r\n\0\0\x05").as_deref(), Some("closed"));
        assert_eq!(words(b"SSH-2.0-OpenSSH_10.2\r\n"), None);
        assert_eq!(words(b""), None);
        assert_eq!(version_line(b"closed\r\nSSH-2.0-x y\r\n\0\0\x05").as_deref(), Some("SSH-2.0-x y"));
        assert_eq!(version_line(b"closed\r\nSSH-2.0-x"), None);
        let greeting = Greeting::default();
        for _ in 0..3 {
            greeting.append(&[b'x'; 700]);
        }
        assert_eq!(greeting.0.lock().unwrap().len(), GREETING_BYTES);
    }
}
