//! TLS 1.3 configurations for servers and clients whose verifier is one of ours.
//!
//! No session is resumed. In a resumed session neither end shows its certificate or signs again, so a peer whose
//! certificate expired or whose key was replaced would come back.

use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::ring;
use rustls::server::{NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{ClientConfig, Error, ServerConfig};

use crate::verifier::{ClientCertificateCheck, ClientVerifier, ServerCertificateCheck, ServerVerifier};

/// HTTP/2, which gRPC needs, as a protocol of TLS (ALPN).
pub const HTTP_2: &[u8] = b"h2";
/// HTTP/1.1 as a protocol of TLS (ALPN).
pub const HTTP_1_1: &[u8] = b"http/1.1";

/// TLS for a server that shows the certificate of `shown` and speaks these protocols.
pub fn server_config(
    verifier: ClientVerifier<impl ClientCertificateCheck + 'static>,
    shown: Arc<dyn ResolvesServerCert>,
    protocols: &[&[u8]],
) -> Result<Arc<ServerConfig>, Error> {
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(Arc::new(verifier))
        .with_cert_resolver(shown);
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// TLS for a client that speaks HTTP/2. It shows `own` to every server, whatever authorities the server names.
pub fn client_config(
    verifier: ServerVerifier<impl ServerCertificateCheck + 'static>,
    own: Option<Arc<CertifiedKey>>,
) -> Result<Arc<ClientConfig>, Error> {
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match own {
        Some(own) => config.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(own))),
        None => config.with_no_client_auth(),
    };
    config.alpn_protocols = vec![HTTP_2.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use rcgen::PKCS_ED25519;
    use rustls::HandshakeKind;
    use rustls::version::{TLS12, TLS13};

    use super::*;
    use crate::signature::AcceptedSignatures;
    use crate::testing::{AnyCertificate, Party, client, run_handshake, server};
    use crate::verifier::ClientAuth;

    fn our_server(auth: ClientAuth, protocols: &[&[u8]]) -> Arc<ServerConfig> {
        let shown = Party::generate(&PKCS_ED25519).certified_key();
        let verifier = ClientVerifier::new(AnyCertificate, auth);
        server_config(verifier, Arc::new(SingleCertAndKey::from(shown)), protocols).unwrap()
    }

    fn our_client(own: Option<&Party>) -> Arc<ClientConfig> {
        let verifier = ServerVerifier::new(AnyCertificate, AcceptedSignatures::Tls12);
        client_config(verifier, own.map(|own| Arc::new(own.certified_key()))).unwrap()
    }

    #[tokio::test]
    async fn both_ends_agree_on_http_2_and_identify_the_client() {
        let own = Party::generate(&PKCS_ED25519);
        let (near, far) = (our_client(Some(&own)), our_server(ClientAuth::Required, &[HTTP_2, HTTP_1_1]));
        let ended = run_handshake(near, far).await;
        assert_eq!((ended.client, ended.server), (Ok(()), Ok(())));
        assert_eq!(ended.protocol.as_deref(), Some(HTTP_2));
        assert_eq!(ended.client_certificate.as_deref(), Some(&own.certificate[..]));
    }

    #[tokio::test]
    async fn neither_end_resumes_a_session_of_a_peer_that_would() {
        let (own, other) = (Party::generate(&PKCS_ED25519), Party::generate(&PKCS_ED25519));
        let verifier = ServerVerifier::new(AnyCertificate, AcceptedSignatures::Tls12);
        let resuming_client = client(Arc::new(verifier), Some(&own));
        let resuming_server = server(None, &other, &TLS13);
        for (near, far, second) in [
            (resuming_client.clone(), resuming_server.clone(), HandshakeKind::Resumed),
            (our_client(Some(&own)), resuming_server, HandshakeKind::Full),
            (resuming_client, our_server(ClientAuth::Optional, &[HTTP_2]), HandshakeKind::Full),
        ] {
            run_handshake(near.clone(), far.clone()).await;
            assert_eq!(run_handshake(near, far).await.kind, Some(second));
        }
    }

    #[tokio::test]
    async fn no_protocol_in_common_ends_the_handshake() {
        let ended = run_handshake(our_client(None), our_server(ClientAuth::Optional, &[HTTP_1_1])).await;
        assert_eq!(ended.server, Err(Error::NoApplicationProtocol));
        assert!(ended.client.is_err());
    }

    #[tokio::test]
    async fn tls_1_2_is_not_offered() {
        let old = Party::generate(&PKCS_ED25519);
        assert!(run_handshake(our_client(None), server(None, &old, &TLS12)).await.client.is_err());
        let verifier = Arc::new(ServerVerifier::new(AnyCertificate, AcceptedSignatures::Tls12));
        let mut config = Arc::unwrap_or_clone(client(verifier, Some(&old)));
        config.alpn_protocols = vec![HTTP_2.to_vec()];
        let ended = run_handshake(Arc::new(config), our_server(ClientAuth::Required, &[HTTP_2])).await;
        assert_eq!((ended.client, ended.server), (Ok(()), Ok(())), "the same client with TLS 1.3");
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let old = builder
            .with_protocol_versions(&[&TLS12])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(ServerVerifier::new(
                AnyCertificate,
                AcceptedSignatures::Tls12,
            )))
            .with_no_client_auth();
        let ended = run_handshake(Arc::new(old), our_server(ClientAuth::Optional, &[HTTP_2])).await;
        assert!(ended.server.is_err());
    }
}
