//! A TCP connection that reports to its gate, and fails once the gate has closed it.

use std::future::Future as _;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::sync::WaitForCancellationFutureOwned;

use crate::gate::Place;

/// An accepted connection. Its place is free again once it is dropped.
#[derive(Debug)]
pub struct GatedStream {
    stream: TcpStream,
    peer: SocketAddr,
    place: Place,
    spoken: bool,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl GatedStream {
    pub(super) fn new(stream: TcpStream, peer: SocketAddr, place: Place) -> Self {
        let closed = Box::pin(place.closed().clone().cancelled_owned());
        Self { stream, peer, place, spoken: false, closed }
    }

    /// The place of this connection.
    #[must_use]
    pub const fn place(&self) -> &Place {
        &self.place
    }

    /// The address of the peer.
    #[must_use]
    pub const fn peer_address(&self) -> SocketAddr {
        self.peer
    }

    /// The connection itself.
    #[must_use]
    pub const fn tcp(&self) -> &TcpStream {
        &self.stream
    }

    /// An error once the gate has closed the connection. The caller is woken when that happens.
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        if self.closed.as_mut().poll(context).is_ready() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }
}

impl Drop for GatedStream {
    fn drop(&mut self) {
        self.place.remove();
    }
}

impl AsyncRead for GatedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(context)?;
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if !self.spoken && buffer.filled().len() > before {
            self.spoken = true;
            self.place.record_bytes();
        }
        read
    }
}

impl AsyncWrite for GatedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use crate::gate::limits::{GateLimits, ListenerKind};
    use crate::gate::table::{CloseReason, GateCounts};
    use crate::gate::{Gate, GateEvent, NoPlace};

    use super::*;

    type Reasons = Arc<Mutex<Vec<CloseReason>>>;

    async fn gate(limits: GateLimits) -> (Gate, TcpListener, SocketAddr, Reasons) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let reasons = Reasons::default();
        let seen = reasons.clone();
        let gate = Gate::new(limits, move |event| {
            if let GateEvent::Closed(closed) = event {
                seen.lock().unwrap().push(closed.reason);
            }
        });
        (gate, listener, address, reasons)
    }

    fn limits() -> GateLimits {
        GateLimits { per_source: 1, ..GateLimits::for_listener(ListenerKind::Api, 1024) }
    }

    #[tokio::test]
    async fn displaced_connection_ends_while_it_is_read() {
        let (gate, listener, address, reasons) = gate(limits()).await;
        let mut near = TcpStream::connect(address).await.unwrap();
        let mut first = gate.accept(&listener).await;
        let reading = tokio::spawn(async move { first.read(&mut [0]).await.map_err(|error| error.kind()) });
        let _other = TcpStream::connect(address).await.unwrap();
        let second = gate.accept(&listener).await;
        assert_eq!(reading.await.unwrap(), Err(io::ErrorKind::ConnectionAborted));
        assert_eq!(near.read(&mut [0]).await.unwrap(), 0, "the peer sees the end");
        assert_eq!(*reasons.lock().unwrap(), [CloseReason::Displaced]);
        assert!(!second.place().is_closed());
        drop(second);
        assert_eq!(gate.counts(), GateCounts::default());
    }

    #[tokio::test]
    async fn first_byte_changes_the_class_and_a_credential_keeps_the_place() {
        let (gate, listener, address, reasons) = gate(limits()).await;
        let mut near = TcpStream::connect(address).await.unwrap();
        let mut spoken = gate.accept(&listener).await;
        near.write_all(b"x").await.unwrap();
        spoken.read_exact(&mut [0]).await.unwrap();
        let _silent = (TcpStream::connect(address).await.unwrap(), gate.accept(&listener).await);
        assert_eq!(gate.counts().unproven, 2, "one of each class");
        spoken.place().finish_handshake();
        assert_eq!(spoken.place().prove(), Ok(()));
        assert_eq!(gate.counts(), GateCounts { handshakes: 1, unproven: 1, proven: 1 });
        assert!(reasons.lock().unwrap().is_empty());
    }

    #[tokio::test]
    async fn connection_without_a_place_can_be_answered_and_ends_then() {
        let deadline = Duration::from_millis(20);
        let (gate, listener, address, reasons) =
            gate(GateLimits { proven: 1, after_refusal: deadline, ..limits() }).await;
        let _first = TcpStream::connect(address).await.unwrap();
        let first = gate.accept(&listener).await;
        assert_eq!(first.place().prove(), Ok(()));
        for closes_itself in [false, true] {
            let mut near = TcpStream::connect(address).await.unwrap();
            let mut far = gate.accept(&listener).await;
            let answered = far.place().begin_request();
            assert_eq!(far.place().prove(), Err(NoPlace));
            far.write_all(b"no").await.unwrap();
            near.read_exact(&mut [0; 2]).await.unwrap();
            drop(answered);
            if closes_itself {
                drop(near);
            } else {
                let (accepting, mut byte) = (gate.accept(&listener), [0]);
                tokio::select! {
                    ended = far.read(&mut byte) => {
                        assert_eq!(ended.map_err(|error| error.kind()), Err(io::ErrorKind::ConnectionAborted));
                    }
                    _ = accepting => unreachable!("nobody connects"),
                }
            }
        }
        assert_eq!(*reasons.lock().unwrap(), [CloseReason::Full, CloseReason::Full]);
        assert_eq!(gate.counts(), GateCounts { handshakes: 1, unproven: 0, proven: 1 });
        assert!(!first.place().is_closed());
    }

    #[tokio::test]
    async fn silent_connection_ends_at_its_deadline_while_nobody_connects() {
        let deadline = Duration::from_millis(20);
        let (gate, listener, address, reasons) =
            gate(GateLimits { handshake: Some(deadline), ..limits() }).await;
        let mut near = TcpStream::connect(address).await.unwrap();
        let mut far = gate.accept(&listener).await;
        let accepting = tokio::spawn(async move { drop(gate.accept(&listener).await) });
        assert_eq!(
            far.read(&mut [0]).await.map_err(|error| error.kind()),
            Err(io::ErrorKind::ConnectionAborted)
        );
        drop(far);
        assert_eq!(near.read(&mut [0]).await.unwrap(), 0);
        assert_eq!(*reasons.lock().unwrap(), [CloseReason::TimedOut]);
        accepting.abort();
    }
}
