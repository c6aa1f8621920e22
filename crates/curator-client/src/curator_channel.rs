//! A lazily connected gRPC channel to one curator, over mutual TLS.
//!
//! It connects on first use, and again when the connection was lost, always to the same address. The TLS configuration
//! decides who may answer there. When the channel is cancelled, everything that goes through it fails, open streams
//! included. If this side does not accept the certificate of a peer, that is a
//! [`CuratorRefused`](crate::curator_refusal::CuratorRefused) among the causes of the error.
//!
//! A channel with a clock also ends a connection when the certificate that its peer showed has ended. A list of revoked
//! curators contains no such certificate, so a connection that outlasts it could never be revoked.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use model::time::between;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, Join, ReadBuf, ReadHalf, WriteHalf};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::Sleep;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};

use crate::certificate::Validity;
use crate::clock::Clock;
use crate::curator_refusal::connection_error;

/// Timeout of the TCP connect and TLS handshake together.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A curator that was cut off is noticed within the sum of interval and timeout.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Opens a channel to the curator at `host:port`. Must be called within a tokio runtime.
#[must_use]
pub fn open_channel(address: &str, config: Arc<ClientConfig>) -> Channel {
    connect_lazily(CuratorConnector::new(address, config))
}

/// Like [`open_channel`], until `over` is cancelled. With a clock, a connection lasts no longer than the certificate of
/// its peer; the next one is made with the certificate that the curator shows then.
#[must_use]
pub fn open_channel_until(
    address: &str,
    config: Arc<ClientConfig>,
    over: &CancellationToken,
    clock: Option<Clock>,
) -> Channel {
    connect_lazily(CuratorConnector { cancel: over.clone(), clock, ..CuratorConnector::new(address, config) })
}

/// Like [`open_channel`], from this address of the host, so that tests are clients at several addresses.
#[cfg(any(test, feature = "testing"))]
#[must_use]
pub fn open_channel_from(source: IpAddr, address: &str, config: Arc<ClientConfig>) -> Channel {
    connect_lazily(CuratorConnector { source: Some(source), ..CuratorConnector::new(address, config) })
}

fn connect_lazily(connector: CuratorConnector) -> Channel {
    Endpoint::from_static("http://curator")
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_with_connector_lazy(connector)
}

async fn connect_from(source: Option<IpAddr>, address: &str) -> io::Result<TcpStream> {
    let Some(source) = source else { return TcpStream::connect(address).await };
    let remote: SocketAddr = address.parse().map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let socket = if source.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.bind(SocketAddr::new(source, 0))?;
    socket.connect(remote).await
}

#[derive(Clone)]
struct CuratorConnector {
    address: Arc<str>,
    config: Arc<ClientConfig>,
    cancel: CancellationToken,
    /// The address to connect from; `None` leaves the choice to the host.
    source: Option<IpAddr>,
    /// Decides when the certificate of the peer has ended; `None`: the connection may outlast it.
    clock: Option<Clock>,
}

impl CuratorConnector {
    fn new(address: &str, config: Arc<ClientConfig>) -> Self {
        Self { address: address.into(), config, cancel: CancellationToken::new(), source: None, clock: None }
    }
}

/// How long the certificate that the peer showed is still valid; `None` if it showed none that can be read.
fn remaining_validity(stream: &TlsStream<TcpStream>, clock: &Clock) -> Option<Duration> {
    let (_, session) = stream.get_ref();
    let validity = Validity::from_der(session.peer_certificates()?.first()?)?;
    Some(between(clock.now(), validity.not_after))
}

impl Service<Uri> for CuratorConnector {
    type Response =
        TokioIo<Join<CancellableRead<ReadHalf<TlsStream<TcpStream>>>, WriteHalf<TlsStream<TcpStream>>>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Self { address, config, cancel: over, source, clock } = self.clone();
        Box::pin(async move {
            let connecting = async {
                let stream = connect_from(source, &address).await?;
                stream.set_nodelay(true)?;
                // The certificate identifies the curator, so the host name is a dummy.
                let name = ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into());
                TlsConnector::from(config).connect(name, stream).await
            };
            match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
                Ok(Ok(stream)) => {
                    let remaining = clock.and_then(|clock| remaining_validity(&stream, &clock));
                    let expired = remaining.map(|remaining| Box::pin(tokio::time::sleep(remaining)));
                    let (stream, written) = tokio::io::split(stream);
                    let cancelled = Box::pin(over.cancelled_owned());
                    let read = CancellableRead { stream, cancelled, expired };
                    Ok(TokioIo::new(tokio::io::join(read, written)))
                }
                Ok(Err(error)) => Err(connection_error(&address, &error)),
                Err(_) => Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!(
                        "the curator {address} accepted no connection within {} s",
                        CONNECT_TIMEOUT.as_secs()
                    ),
                )),
            }
        })
    }
}

/// The read half of a connection; it fails once the channel is cancelled or the peer's certificate has ended. HTTP/2
/// reads all the time, so it notices the failure at once.
struct CancellableRead<S> {
    stream: S,
    cancelled: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Ends when the certificate of the peer does.
    expired: Option<Pin<Box<Sleep>>>,
}

impl<S: AsyncRead + Unpin> AsyncRead for CancellableRead<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.cancelled.as_mut().poll(context).is_ready() {
            let text =
                "this curator is not followed any more: its cluster was restored or made another statement";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, text)));
        }
        if self.expired.as_mut().is_some_and(|expired| expired.as_mut().poll(context).is_ready()) {
            let text = "the certificate that this curator showed has ended; connect again";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, text)));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}
