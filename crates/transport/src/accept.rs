//! Accept TLS connections: the handshake of a connection that a gate admitted.
//!
//! A listener does not know its peers, and a peer that sends nothing must cost little and not for long. So an accept
//! loop never waits for a peer: it runs handshakes beside each other, and the [gate](crate::gate) of the listener bounds
//! their number and their time.

use std::io;
use std::time::Duration;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::gate::stream::GatedStream;

/// Pause of an accept loop after an error. The usual one is "too many open files", and the pause lets some connections
/// end.
pub const ACCEPT_ERROR_PAUSE: Duration = Duration::from_millis(50);

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The gate has closed the connection: it took too long, or gave way to another one. The gate has counted it.
    #[error("the gate has closed the connection")]
    Closed,
    /// The connection broke, or one end rejected the other. An error of rustls is inside.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

/// Performs the handshake of an accepted connection, for as long as its gate allows, and reports its end to the gate.
pub async fn accept_tls(
    acceptor: &TlsAcceptor,
    stream: GatedStream,
) -> Result<TlsStream<GatedStream>, HandshakeError> {
    let place = stream.place().clone();
    let ended = acceptor.accept(stream).await;
    if place.is_closed() {
        return Err(HandshakeError::Closed);
    }
    let stream = ended?;
    place.finish_handshake();
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rcgen::PKCS_ED25519;
    use rustls::pki_types::ServerName;
    use rustls::version::TLS13;
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::{TcpListener, TcpStream};
    use tokio_rustls::TlsConnector;

    use super::*;
    use crate::gate::Gate;
    use crate::gate::limits::{GateLimits, ListenerKind};
    use crate::gate::table::GateCounts;
    use crate::signature::AcceptedSignatures;
    use crate::testing::{AnyCertificate, Party, client, server};
    use crate::verifier::ServerVerifier;

    fn acceptor() -> TlsAcceptor {
        TlsAcceptor::from(server(None, &Party::generate(&PKCS_ED25519), &TLS13))
    }

    /// Both ends of a connection, and the gate with this deadline.
    async fn connect(deadline: Duration) -> (TcpStream, GatedStream, Gate, TcpListener) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let limits = GateLimits::for_listener(ListenerKind::Api, 1024);
        let gate = Gate::new(GateLimits { handshake: Some(deadline), ..limits }, |_| ());
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (near, gate.accept(&listener).await, gate, listener)
    }

    #[tokio::test]
    async fn silent_peer_ends_at_the_deadline() {
        let (_near, far, gate, listener) = connect(Duration::from_millis(20)).await;
        let acceptor = acceptor();
        let ended = tokio::select! {
            ended = accept_tls(&acceptor, far) => ended,
            _ = gate.accept(&listener) => unreachable!("nobody connects"),
        };
        assert!(matches!(ended, Err(HandshakeError::Closed)), "{ended:?}");
        assert_eq!(gate.counts(), GateCounts::default());
    }

    #[tokio::test]
    async fn peer_without_tls_fails_with_the_error_of_rustls() {
        let (mut near, far, _gate, _listener) = connect(Duration::from_mins(1)).await;
        near.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        let ended = accept_tls(&acceptor(), far).await;
        let Err(HandshakeError::Failed(error)) = &ended else { panic!("{ended:?}") };
        assert!(
            error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<rustls::Error>),
            "{error:?}"
        );
    }

    #[tokio::test]
    async fn finished_handshake_returns_the_stream_without_delay() {
        let (near, far, gate, _listener) = connect(Duration::from_mins(1)).await;
        let verifier = Arc::new(ServerVerifier::new(AnyCertificate, AcceptedSignatures::Ed25519));
        let connector = TlsConnector::from(client(verifier, None));
        let name = ServerName::try_from("server.example").unwrap();
        let acceptor = acceptor();
        let (client, server) = tokio::join!(connector.connect(name, near), accept_tls(&acceptor, far));
        client.unwrap();
        assert!(server.unwrap().get_ref().0.tcp().nodelay().unwrap());
        assert_eq!(gate.counts(), GateCounts::default(), "it was dropped");
    }
}
