//! The way to etcd: a UNIX socket on this host, or TLS to another.
//!
//! There may be several etcd's to talk to, all of one cluster. Each new connection begins with the one after that of
//! the connection before: an etcd that is stopped still takes connections, and would be chosen for ever.

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint as Transport};

/// How long one etcd may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(3);
/// etcd closes connections that ask for a sign of life more often than every five seconds.
const KEEPALIVE: Duration = Duration::from_secs(6);
const KEEPALIVE_ANSWER: Duration = Duration::from_secs(4);

/// Where an etcd listens.
#[derive(Clone, Debug)]
pub enum Endpoint {
    /// A UNIX socket. etcd asks nobody there who he is: the directory it is in must be ours alone (0700).
    Socket(PathBuf),
    /// TLS.
    Tls {
        /// Name or address, and port.
        address: (String, u16),
        /// What its certificate must be for.
        server_name: ServerName<'static>,
        /// Whom to trust, and who we are; [`super::client::tls`] makes one.
        config: Arc<ClientConfig>,
    },
}

/// A channel that connects when it is used, and again when it has lost its connection.
pub(super) fn channel(endpoints: Arc<[Endpoint]>) -> Channel {
    let connector = Connector { endpoints, next: Arc::new(AtomicUsize::new(0)) };
    Transport::from_static("http://etcd")
        .connect_timeout(CONNECT.saturating_mul(2))
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE_ANSWER)
        .keep_alive_while_idle(true)
        .connect_with_connector_lazy(connector)
}

pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}
type Opened = TokioIo<Box<dyn Stream>>;

#[derive(Clone)]
struct Connector {
    endpoints: Arc<[Endpoint]>,
    next: Arc<AtomicUsize>,
}

impl Service<Uri> for Connector {
    type Response = Opened;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Opened>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let (endpoints, first) = (self.endpoints.clone(), self.next.fetch_add(1, Ordering::Relaxed));
        Box::pin(async move {
            let mut failure = io::Error::new(io::ErrorKind::NotFound, "there is no etcd to connect to");
            for turn in 0..endpoints.len() {
                let endpoint = &endpoints[first.wrapping_add(turn) % endpoints.len()];
                match tokio::time::timeout(CONNECT, open(endpoint)).await {
                    Ok(Ok(stream)) => return Ok(TokioIo::new(stream)),
                    Ok(Err(error)) => failure = error,
                    Err(_) => failure = io::ErrorKind::TimedOut.into(),
                }
            }
            Err(failure)
        })
    }
}

/// Opens a connection.
pub(super) async fn open(endpoint: &Endpoint) -> io::Result<Box<dyn Stream>> {
    Ok(match endpoint {
        Endpoint::Socket(path) => Box::new(UnixStream::connect(path).await?),
        Endpoint::Tls { address, server_name, config } => {
            let stream = TcpStream::connect((address.0.as_str(), address.1)).await?;
            stream.set_nodelay(true)?;
            Box::new(TlsConnector::from(config.clone()).connect(server_name.clone(), stream).await?)
        }
    })
}
