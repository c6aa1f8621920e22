//! Mutual TLS 1.3 between curators and their callers: verifiers and configurations.
//!
//! Both ends prove the keys of the certificates that they show. A curator requests a certificate and accepts any: the
//! peer is identified for each call, with the revocations of that moment, and a rejection has a message
//! ([`crate::peer_identity`]). A handshake offers neither. A caller accepts only a node of the cluster that it
//! means, and if it knows which node to expect, only that one.
//!
//! Only TLS 1.3 with Ed25519 is allowed, because nothing else is ever certified here. No session is resumed, because a
//! resumed one relies on a signature made long ago.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible,
    ServerConfig, SignatureScheme,
};

use crate::clock::Clock;
use crate::node_id::NodeId;
use crate::peer_identity::{Peer, Revocations, identify_peer};
use crate::pki::TrustAnchor;

/// Largest certificate that is parsed, in bytes; ours have some 500.
const MAX_CERTIFICATE_BYTES: usize = 8192;

/// A key and its certificate in the form that TLS uses.
pub fn certified_key(certificate: &[u8], pkcs8: &[u8]) -> Result<Arc<CertifiedKey>, Error> {
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(pkcs8.to_vec()));
    let chain = vec![CertificateDer::from(certificate.to_vec())];
    CertifiedKey::from_der(chain, key, &ring::default_provider()).map(Arc::new)
}

/// TLS for a curator. It shows the certificate of `shown`, and accepts any certificate whose key the peer proves.
pub fn server_config(shown: Arc<dyn ResolvesServerCert>) -> Result<Arc<ServerConfig>, Error> {
    let provider = Arc::new(ring::default_provider());
    let verifier = Arc::new(AnyClientVerifier(SignatureVerifier::new(&provider)));
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(shown);
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// TLS to a node of the cluster with this authority. `own` is the client's certificate; `expected` is the only node
/// accepted.
pub fn client_config(
    anchor: TrustAnchor,
    expected: Option<NodeId>,
    own: Option<Arc<CertifiedKey>>,
    clock: Clock,
) -> Result<Arc<ClientConfig>, Error> {
    let provider = Arc::new(ring::default_provider());
    let verifier = Arc::new(ClusterNodeVerifier {
        signature_verifier: SignatureVerifier::new(&provider),
        anchor,
        expected,
        clock,
    });
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let mut config = match own {
        Some(own) => config.with_client_cert_resolver(Arc::new(FixedClientCert(own))),
        None => config.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

/// Verifies that the peer holds the key of its certificate.
#[derive(Debug)]
struct SignatureVerifier {
    algorithms: WebPkiSupportedAlgorithms,
}

impl SignatureVerifier {
    fn new(provider: &CryptoProvider) -> Self {
        Self { algorithms: provider.signature_verification_algorithms }
    }

    fn verify(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        if signature.scheme != SignatureScheme::ED25519 {
            return Err(Error::PeerIncompatible(PeerIncompatible::NoSignatureSchemesInCommon));
        }
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }
}

fn check_certificate_size(certificate: &CertificateDer<'_>) -> Result<(), Error> {
    if certificate.len() > MAX_CERTIFICATE_BYTES {
        return Err(Error::InvalidCertificate(CertificateError::BadEncoding));
    }
    Ok(())
}

const fn tls12_rejected() -> Error {
    Error::PeerIncompatible(PeerIncompatible::Tls13RequiredForQuic)
}

#[derive(Debug)]
struct AnyClientVerifier(SignatureVerifier);

impl ClientCertVerifier for AnyClientVerifier {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        check_certificate_size(end_entity)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(tls12_rejected())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// Why the server is not the expected node.
#[derive(thiserror::Error)]
enum WrongServer {
    #[error(transparent)]
    InvalidCertificate(#[from] crate::peer_identity::PeerError),
    #[error("the other end is {0}, and a node of the cluster was meant")]
    NotANode(Peer),
    #[error("the other end is node {found}, and {expected} was meant")]
    OtherNode { found: NodeId, expected: NodeId },
}

/// The message itself, because rustls shows errors that it does not know by `Debug`.
impl fmt::Debug for WrongServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[derive(Debug)]
struct ClusterNodeVerifier {
    signature_verifier: SignatureVerifier,
    anchor: TrustAnchor,
    expected: Option<NodeId>,
    clock: Clock,
}

impl ClusterNodeVerifier {
    fn verify_node(&self, end_entity: &[u8], more: usize) -> Result<(), WrongServer> {
        if more > 0 {
            return Err(crate::peer_identity::PeerError::UnexpectedChain(more + 1).into());
        }
        // Only a curator knows the revocations, so none are checked here. A node that is no longer in the cluster
        // cannot pass for the leader: the connection to the leader accepts only the node that was named as leader.
        match identify_peer(&[end_entity], &self.anchor, &Revocations::default(), self.clock.now())? {
            Peer::Node { id, .. } => match self.expected {
                Some(expected) if expected != id => Err(WrongServer::OtherNode { found: id, expected }),
                _ => Ok(()),
            },
            other => Err(WrongServer::NotANode(other)),
        }
    }
}

impl ServerCertVerifier for ClusterNodeVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        check_certificate_size(end_entity)?;
        let verdict = self.verify_node(end_entity, intermediates.len());
        verdict.map(|()| ServerCertVerified::assertion()).map_err(|error| {
            Error::InvalidCertificate(CertificateError::Other(rustls::OtherError(Arc::new(error))))
        })
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(tls12_rejected())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.signature_verifier.verify(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// One certificate for every connection, whatever authorities the server names; a curator names none.
struct FixedClientCert(Arc<CertifiedKey>);

impl fmt::Debug for FixedClientCert {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FixedClientCert")
    }
}

impl rustls::client::ResolvesClientCert for FixedClientCert {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}
