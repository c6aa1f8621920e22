//! A lazily connected gRPC channel to one curator, over mutual TLS.
//!
//! It connects on first use, and again when the connection was lost, always to the same address. The TLS configuration
//! decides who may answer there. When the channel is cancelled, everything that goes through it fails, open streams
//! included. A peer whose certificate this side does not accept is a [`CuratorRefused`] among the causes of the error.

use std::error::Error;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use rustls::{CertificateError, ClientConfig};
use tokio::io::{AsyncRead, Join, ReadBuf, ReadHalf, WriteHalf};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};

/// Timeout of the TCP connect and TLS handshake together.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A curator that was cut off is noticed within the sum of interval and timeout.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// The handshake with a curator ended because its certificate was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("connecting to the curator {address}: {reason}")]
pub struct CuratorRefused {
    /// `host:port` of the curator.
    pub address: String,
    /// Why its certificate was not accepted.
    pub reason: String,
}

/// Finds a refused certificate among the causes of an error.
#[must_use]
pub fn find_refusal(error: &(dyn Error + 'static)) -> Option<&CuratorRefused> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        let refused = inner.and_then(|inner| inner.downcast_ref::<CuratorRefused>());
        if refused.is_some() {
            return refused;
        }
        cause = error.source();
    }
    None
}

/// Opens a channel to the curator at `host:port`. Must be called within a tokio runtime.
#[must_use]
pub fn open_channel(address: &str, config: Arc<ClientConfig>) -> Channel {
    open_channel_until(address, config, &CancellationToken::new())
}

/// Like [`open_channel`], until `over` is cancelled.
#[must_use]
pub fn open_channel_until(address: &str, config: Arc<ClientConfig>, over: &CancellationToken) -> Channel {
    connect_lazily(address, config, over, None)
}

/// Like [`open_channel`], from this address of the host, so that tests are clients at several addresses.
#[cfg(any(test, feature = "testing"))]
#[must_use]
pub fn open_channel_from(source: IpAddr, address: &str, config: Arc<ClientConfig>) -> Channel {
    connect_lazily(address, config, &CancellationToken::new(), Some(source))
}

fn connect_lazily(
    address: &str,
    config: Arc<ClientConfig>,
    over: &CancellationToken,
    source: Option<IpAddr>,
) -> Channel {
    Endpoint::from_static("http://curator")
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_with_connector_lazy(CuratorConnector {
            address: address.into(),
            config,
            cancel: over.clone(),
            source,
        })
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
        let Self { address, config, cancel: over, source } = self.clone();
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
                    let (stream, written) = tokio::io::split(stream);
                    let read = CancellableRead { stream, cancelled: Box::pin(over.cancelled_owned()) };
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

fn connection_error(address: &str, error: &io::Error) -> io::Error {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    if let Some(rustls::Error::InvalidCertificate(CertificateError::Other(reason))) = tls {
        let refused = CuratorRefused { address: address.to_owned(), reason: reason.0.to_string() };
        return io::Error::new(error.kind(), refused);
    }
    io::Error::new(error.kind(), format!("connecting to the curator {address}: {error}"))
}

/// The read half of a connection; it fails once the channel is cancelled. HTTP/2 reads all the time, so it notices the
/// failure at once.
struct CancellableRead<S> {
    stream: S,
    cancelled: Pin<Box<WaitForCancellationFutureOwned>>,
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
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

#[cfg(test)]
mod tests {
    use tonic::Status;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("the handshake failed")]
    struct HandshakeError(#[source] io::Error);

    #[test]
    fn refused_certificate_is_found_among_the_causes() {
        let other = rustls::OtherError(Arc::new(io::Error::other("it is no curator")));
        let tls = rustls::Error::InvalidCertificate(CertificateError::Other(other));
        let tls = io::Error::new(io::ErrorKind::InvalidData, tls);
        let error = connection_error("10.0.0.1:7835", &tls);
        assert_eq!(error.to_string(), "connecting to the curator 10.0.0.1:7835: it is no curator");
        let status = Status::from_error(Box::new(HandshakeError(error)));
        let refused = find_refusal(&status).map(ToString::to_string);
        assert_eq!(refused.as_deref(), Some("connecting to the curator 10.0.0.1:7835: it is no curator"));
        let lost = connection_error("10.0.0.1:7835", &io::Error::other("connection reset"));
        assert_eq!(lost.to_string(), "connecting to the curator 10.0.0.1:7835: connection reset");
        assert_eq!(find_refusal(&Status::from_error(Box::new(lost))), None);
    }
}
