//! One TLS 1.3 connection to a callback server, dialled over all addresses (happy eyeballs, RFC 8305).
//!
//! The machine proves its key in the handshake. The server proves its name by a chain to the certificates that the
//! machine was given, valid at the time that `server_verifier.rs` determines. tonic's own client TLS also accepts TLS
//! 1.2 and uses the process-wide cryptography provider, which a library that runs beside others must not rely on. So
//! the handshake is made here.

use std::future::Future;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use curator_client::identity::Identity;
use curator_client::tls::certified_key;
use hyper_util::rt::TokioIo;
use proto::agent::v1::agent_callback_client::AgentCallbackClient;
use rustls::ClientConfig;
use rustls::client::VerifierBuilderError;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::transport::{Channel, Endpoint as Transport};

use crate::endpoint::Endpoint;
use crate::server_verifier::callback_server_verifier;
use crate::trust_store;
use crate::trusted_time::TrustedTime;

/// The largest response that is read.
const RESPONSE_LIMIT_BYTES: usize = 4 << 20;
const KEEPALIVE: Duration = Duration::from_mins(1);
/// How long one address of a name is tried alone.
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Why a callback server could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The trust store could not be built.
    #[error(transparent)]
    Trust(#[from] trust_store::TrustError),
    /// The certificate verifier could not be built.
    #[error("servers cannot be verified: {0}")]
    Verifier(#[from] VerifierBuilderError),
    /// TLS could not be set up with this identity.
    #[error("TLS could not be set up: {0}")]
    Tls(#[from] rustls::Error),
    /// The endpoint is malformed.
    #[error("{0}")]
    Endpoint(String),
    /// The connection could not be made.
    #[error("no connection: {0}")]
    Transport(String),
}

/// The TLS configuration of one identity and one set of CA certificates, verified by this machine's clock or by `time`.
pub fn client_config(
    identity: &Identity,
    ca_certificates: &[Vec<u8>],
    time: &Arc<TrustedTime>,
) -> Result<Arc<ClientConfig>, ConnectError> {
    let roots = trust_store::build_trust_store(ca_certificates)?;
    let verifier = callback_server_verifier(roots, time.clone())?;
    let own = certified_key(identity.certificate_der(), identity.pkcs8())?;
    Ok(transport::config::client_config(verifier, Some(own))?)
}

/// Connects, does the handshake and returns the client; the caller limits the time.
pub async fn connect_server(
    endpoint: &str,
    config: Arc<ClientConfig>,
) -> Result<AgentCallbackClient<Channel>, ConnectError> {
    let endpoint: Endpoint = endpoint.parse().map_err(|error| ConnectError::Endpoint(format!("{error}")))?;
    let server_name = ServerName::try_from(endpoint.host())
        .map_err(|_| ConnectError::Endpoint(format!("{endpoint} names no server that TLS could verify")))?;
    // The scheme is plain HTTP, or tonic would do TLS itself. The server sees the true origin.
    let transport = Transport::from_shared(format!("http://{endpoint}"))
        .and_then(|transport| transport.user_agent(concat!("roleserver/", env!("CARGO_PKG_VERSION"))))
        .map_err(|error| ConnectError::Endpoint(error_chain(&error)))?
        .http2_keep_alive_interval(KEEPALIVE);
    let transport = match format!("https://{endpoint}").parse() {
        Ok(origin) => transport.origin(origin),
        Err(_) => transport,
    };
    let connector = Connector { endpoint, server_name, tls: TlsConnector::from(config) };
    let channel = transport
        .connect_with_connector(connector)
        .await
        .map_err(|error| ConnectError::Transport(error_chain(&error)))?;
    Ok(AgentCallbackClient::new(channel).max_decoding_message_size(RESPONSE_LIMIT_BYTES))
}

/// An error with its causes, each text once.
#[must_use]
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut messages = vec![error.to_string()];
    let mut source = error.source();
    while let Some(error) = source {
        let text = error.to_string();
        if !messages.iter().any(|earlier| earlier.contains(&text)) {
            messages.push(text);
        }
        source = error.source();
    }
    messages.join(": ")
}

/// Connects to the first of a name's addresses that accepts a connection.
///
/// If an address has not responded for [`ATTEMPT_DELAY`], the next one is tried beside it (as in RFC 8305). A machine
/// with IPv6 addresses and no route to the IPv6 network gets no error, only silence, and one address after the other
/// would use up the whole time of a heartbeat.
async fn connect_any(addresses: Vec<SocketAddr>) -> std::io::Result<TcpStream> {
    let mut waiting = addresses.into_iter().peekable();
    let mut tries = JoinSet::new();
    let mut failure = std::io::Error::new(ErrorKind::NotFound, "the name has no address");
    loop {
        if let Some(address) = waiting.next() {
            tries.spawn(TcpStream::connect(address));
        }
        tokio::select! {
            ended = tries.join_next() => match ended {
                Some(Ok(Ok(stream))) => return Ok(stream),
                Some(Ok(Err(error))) => failure = error,
                Some(Err(error)) => failure = error.into(),
                None => return Err(failure),
            },
            () = tokio::time::sleep(ATTEMPT_DELAY), if waiting.peek().is_some() => {}
        }
    }
}

/// Opens the stream on which tonic then speaks HTTP/2.
struct Connector {
    endpoint: Endpoint,
    server_name: ServerName<'static>,
    tls: TlsConnector,
}

type ConnectFuture = Pin<Box<dyn Future<Output = std::io::Result<TokioIo<TlsStream<TcpStream>>>> + Send>>;

impl Service<Uri> for Connector {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = std::io::Error;
    type Future = ConnectFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> ConnectFuture {
        let address = (self.endpoint.host(), self.endpoint.port());
        let (tls, server_name) = (self.tls.clone(), self.server_name.clone());
        Box::pin(async move {
            let addresses = tokio::net::lookup_host(address).await?.collect();
            let stream = connect_any(addresses).await?;
            stream.set_nodelay(true)?;
            Ok(TokioIo::new(tls.connect(server_name, stream).await?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A listener that accepts no connection: its queue is full and stays so.
    fn silent() -> (rustix::fd::OwnedFd, Vec<std::net::TcpStream>, SocketAddr) {
        use rustix::net::{AddressFamily, SocketType, bind, getsockname, listen, socket};
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        listen(&socket, 0).unwrap();
        let address = SocketAddr::try_from(getsockname(&socket).unwrap()).unwrap();
        let mut queued = Vec::new();
        while let Ok(stream) = std::net::TcpStream::connect_timeout(&address, Duration::from_millis(300)) {
            queued.push(stream);
            assert!(queued.len() < 10, "the queue has no end");
        }
        (socket, queued, address)
    }

    #[tokio::test]
    async fn unresponsive_address_does_not_delay_the_next() {
        let (_socket, _queued, silent) = silent();
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let open = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let open = open.local_addr().map(|address| (open, address)).unwrap();
        let dialled =
            tokio::time::timeout(Duration::from_secs(10), connect_any(vec![silent, closed, open.1])).await;
        assert_eq!(dialled.unwrap().unwrap().peer_addr().unwrap(), open.1);
        let refused = connect_any(vec![closed]).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        assert_eq!(connect_any(Vec::new()).await.unwrap_err().to_string(), "the name has no address");
    }
}
