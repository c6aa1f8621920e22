//! A connection to one curator.
//!
//! It connects when it is first used, and again when the connection was lost; what it connects to is always the same
//! address. Who may answer there is what the configuration of TLS says. When it is over, everything that goes through it
//! fails, streams that are open included.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, Join, ReadBuf, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint};

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(5);
/// A curator that was cut off is noticed within the sum of both.
const KEEPALIVE: Duration = Duration::from_secs(5);
const KEEPALIVE_ANSWER: Duration = Duration::from_secs(5);

/// A channel to the curator at `host:port`. Must be made within a tokio runtime.
#[must_use]
pub fn dial(address: &str, config: Arc<ClientConfig>) -> Channel {
    dial_until(address, config, &CancellationToken::new())
}

/// The same, until `over`.
#[must_use]
pub fn dial_until(address: &str, config: Arc<ClientConfig>, over: &CancellationToken) -> Channel {
    Endpoint::from_static("http://curator")
        .connect_timeout(CONNECT)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE_ANSWER)
        .keep_alive_while_idle(true)
        .connect_with_connector_lazy(Dialler { address: address.into(), config, over: over.clone() })
}

#[derive(Clone)]
struct Dialler {
    address: Arc<str>,
    config: Arc<ClientConfig>,
    over: CancellationToken,
}

impl Service<Uri> for Dialler {
    type Response = TokioIo<Join<Until<ReadHalf<TlsStream<TcpStream>>>, WriteHalf<TlsStream<TcpStream>>>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Self { address, config, over } = self.clone();
        Box::pin(async move {
            let connecting = async {
                let stream = TcpStream::connect(&*address).await?;
                stream.set_nodelay(true)?;
                // Who answers is told by its certificate, and by no name of a host.
                let name = ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into());
                TlsConnector::from(config).connect(name, stream).await
            };
            match tokio::time::timeout(CONNECT, connecting).await {
                Ok(Ok(stream)) => {
                    let (stream, written) = tokio::io::split(stream);
                    let read = Until { stream, over: Box::pin(over.cancelled_owned()) };
                    Ok(TokioIo::new(tokio::io::join(read, written)))
                }
                Ok(Err(error)) => {
                    Err(io::Error::new(error.kind(), format!("connecting to the curator {address}: {error}")))
                }
                Err(_) => Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("the curator {address} took no connection within {} s", CONNECT.as_secs()),
                )),
            }
        })
    }
}

/// The reading half of a connection that breaks when it is over. Whoever uses it reads all the time, and so finds out.
pub struct Until<S> {
    stream: S,
    over: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Until<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.over.as_mut().poll(context).is_ready() {
            let said = "the cluster was restored, and this curator is of before";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, said)));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}
