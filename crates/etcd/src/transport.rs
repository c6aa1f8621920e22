//! Transport to etcd: UNIX socket or TLS, round robin over endpoints.
//!
//! A node reaches the etcd on its own host by a UNIX socket, and others by TLS with client certificates.
//!
//! There may be several endpoints, all of one cluster. Each new connection begins its search one endpoint further than
//! the one before. The kernel still accepts connections for an etcd process that is stopped, so a fixed order would
//! choose that etcd each time.

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint as Transport};

/// How long one etcd may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// etcd closes connections that send a keepalive more often than every five seconds.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(6);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(4);

/// The address of an etcd.
#[derive(Clone, Debug)]
pub enum Endpoint {
    /// A UNIX socket. etcd authenticates nobody there: the socket's directory must be accessible to us alone (0700).
    Socket(PathBuf),
    /// TLS with client certificates, to another host.
    Tls {
        /// Name or address, and port.
        address: (String, u16),
        /// What its certificate must be for.
        server_name: ServerName<'static>,
        /// The trusted authorities and our certificate; [`client_tls_config`] makes one.
        config: Arc<ClientConfig>,
    },
}

/// The TLS configuration of a client: the authorities that etcd's certificate must come from, and our certificate and
/// key. Certificates are DER, our own before those that signed it.
///
/// The TLS provider is named here, because a library must not rely on the one that its process has chosen.
pub fn client_tls_config(
    authorities: &[CertificateDer<'_>],
    own_chain: Vec<CertificateDer<'static>>,
    own_key: PrivateKeyDer<'static>,
) -> Result<Arc<ClientConfig>, rustls::Error> {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority.clone().into_owned())?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_client_auth_cert(own_chain, own_key)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

/// A channel that connects when it is used, and reconnects when it has lost its connection.
pub(super) fn lazy_channel(endpoints: Arc<[Endpoint]>) -> Channel {
    let connector = EtcdConnector { endpoints, next_endpoint: Arc::new(AtomicUsize::new(0)) };
    Transport::from_static("http://etcd")
        .connect_timeout(CONNECT_TIMEOUT.saturating_mul(2))
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_with_connector_lazy(connector)
}

pub(super) trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for T {}
type BoxedStream = TokioIo<Box<dyn ByteStream>>;

#[derive(Clone)]
struct EtcdConnector {
    endpoints: Arc<[Endpoint]>,
    next_endpoint: Arc<AtomicUsize>,
}

impl Service<Uri> for EtcdConnector {
    type Response = BoxedStream;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<BoxedStream>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let (endpoints, first) = (self.endpoints.clone(), self.next_endpoint.fetch_add(1, Ordering::Relaxed));
        Box::pin(async move {
            let mut failure = io::Error::new(io::ErrorKind::NotFound, "there is no etcd to connect to");
            for turn in 0..endpoints.len() {
                let endpoint = &endpoints[first.wrapping_add(turn) % endpoints.len()];
                match tokio::time::timeout(CONNECT_TIMEOUT, open_connection(endpoint)).await {
                    Ok(Ok(stream)) => return Ok(TokioIo::new(stream)),
                    Ok(Err(error)) => failure = error,
                    Err(_) => failure = io::ErrorKind::TimedOut.into(),
                }
            }
            Err(failure)
        })
    }
}

/// Opens a connection, including the TLS handshake.
pub(super) async fn open_connection(endpoint: &Endpoint) -> io::Result<Box<dyn ByteStream>> {
    Ok(match endpoint {
        Endpoint::Socket(path) => Box::new(UnixStream::connect(path).await?),
        Endpoint::Tls { address, server_name, config } => {
            let stream = TcpStream::connect((address.0.as_str(), address.1)).await?;
            stream.set_nodelay(true)?;
            Box::new(TlsConnector::from(config.clone()).connect(server_name.clone(), stream).await?)
        }
    })
}
