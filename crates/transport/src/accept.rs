//! Accept TLS connections: the handshake within a deadline.
//!
//! A listener does not know its peers, and a peer that sends nothing must cost little and not for long. So an accept
//! loop never waits for a peer: it runs handshakes beside each other, and each has a deadline.

use std::io;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// Pause of an accept loop after an error. The usual one is "too many open files", and the pause lets some connections
/// end.
pub const ACCEPT_ERROR_PAUSE: Duration = Duration::from_millis(50);

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// It was not finished before its deadline.
    #[error("the handshake took too long")]
    Timeout,
    /// The connection broke, or one end rejected the other. An error of rustls is inside.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

/// Performs the handshake of an accepted connection within `timeout`.
pub async fn accept_tls(
    acceptor: &TlsAcceptor,
    stream: TcpStream,
    timeout: Duration,
) -> Result<TlsStream<TcpStream>, HandshakeError> {
    let handshake = async {
        stream.set_nodelay(true)?;
        acceptor.accept(stream).await
    };
    match tokio::time::timeout(timeout, handshake).await {
        Ok(ended) => Ok(ended?),
        Err(_) => Err(HandshakeError::Timeout),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rcgen::PKCS_ED25519;
    use rustls::pki_types::ServerName;
    use rustls::version::TLS13;
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::TcpListener;
    use tokio_rustls::TlsConnector;

    use super::*;
    use crate::signature::AcceptedSignatures;
    use crate::testing::{AnyCertificate, Party, client, server};
    use crate::verifier::ServerVerifier;

    fn acceptor() -> TlsAcceptor {
        TlsAcceptor::from(server(None, &Party::generate(&PKCS_ED25519), &TLS13))
    }

    /// Both ends of a connection.
    async fn connect() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (near, listener.accept().await.unwrap().0)
    }

    #[tokio::test]
    async fn silent_peer_ends_at_the_deadline() {
        let (_near, far) = connect().await;
        let ended = accept_tls(&acceptor(), far, Duration::from_millis(20)).await;
        assert!(matches!(ended, Err(HandshakeError::Timeout)), "{ended:?}");
    }

    #[tokio::test]
    async fn peer_without_tls_fails_with_the_error_of_rustls() {
        let (mut near, far) = connect().await;
        near.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        let ended = accept_tls(&acceptor(), far, Duration::from_mins(1)).await;
        let Err(HandshakeError::Failed(error)) = &ended else { panic!("{ended:?}") };
        assert!(
            error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<rustls::Error>),
            "{error:?}"
        );
    }

    #[tokio::test]
    async fn finished_handshake_returns_the_stream_without_delay() {
        let (near, far) = connect().await;
        let verifier = Arc::new(ServerVerifier::new(AnyCertificate, AcceptedSignatures::Ed25519));
        let connector = TlsConnector::from(client(verifier, None));
        let name = ServerName::try_from("server.example").unwrap();
        let acceptor = acceptor();
        let (client, server) =
            tokio::join!(connector.connect(name, near), accept_tls(&acceptor, far, Duration::from_mins(1)));
        client.unwrap();
        assert!(server.unwrap().get_ref().0.nodelay().unwrap());
    }
}
