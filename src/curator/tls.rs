//! TLS between a curator and whoever calls it: both prove the keys of the certificates that they show.
//!
//! A curator asks for a certificate and takes any: who its peer is, is decided for each call, by what was revoked until
//! then, and told in words ([`crate::curator::peer`]). A handshake can tell neither. Whoever calls believes nobody but a
//! node of the cluster that it means, and, where it knows which node that should be, that one alone.
//!
//! TLS 1.3 with Ed25519 and nothing else, because nothing else is ever certified here; no session is resumed, because a
//! resumed one stands for a signature made long ago.

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

use crate::curator::clock::Clock;
use crate::curator::node_id::NodeId;
use crate::curator::peer::{Peer, Revocations, identify};
use crate::curator::pki::Anchor;

/// Largest certificate that is looked at; ours have some 500 bytes.
const CERTIFICATE_LIMIT: usize = 8192;

/// A key and the certificate for it, as TLS shows them.
pub fn certified(certificate: &[u8], pkcs8: &[u8]) -> Result<Arc<CertifiedKey>, Error> {
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(pkcs8.to_vec()));
    let chain = vec![CertificateDer::from(certificate.to_vec())];
    CertifiedKey::from_der(chain, key, &ring::default_provider()).map(Arc::new)
}

/// TLS for a curator, which shows what `shown` holds and takes whatever certificate its peer proves the key of.
pub fn server_config(shown: Arc<dyn ResolvesServerCert>) -> Result<Arc<ServerConfig>, Error> {
    let provider = Arc::new(ring::default_provider());
    let verifier = Arc::new(AnyPeer(Proof::new(&provider)));
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(shown);
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// TLS to a node of the cluster with this authority, as whoever `own` is; `expected` is the one node it must be.
pub fn client_config(
    anchor: Anchor,
    expected: Option<NodeId>,
    own: Option<Arc<CertifiedKey>>,
    clock: Clock,
) -> Result<Arc<ClientConfig>, Error> {
    let provider = Arc::new(ring::default_provider());
    let verifier = Arc::new(NodeOfCluster { proof: Proof::new(&provider), anchor, expected, clock });
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let mut config = match own {
        Some(own) => config.with_client_cert_resolver(Arc::new(Shown(own))),
        None => config.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

/// That the peer holds the key of its certificate.
#[derive(Debug)]
struct Proof {
    algorithms: WebPkiSupportedAlgorithms,
}

impl Proof {
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

fn small(certificate: &CertificateDer<'_>) -> Result<(), Error> {
    if certificate.len() > CERTIFICATE_LIMIT {
        return Err(Error::InvalidCertificate(CertificateError::BadEncoding));
    }
    Ok(())
}

const fn too_old() -> Error {
    Error::PeerIncompatible(PeerIncompatible::Tls13RequiredForQuic)
}

#[derive(Debug)]
struct AnyPeer(Proof);

impl ClientCertVerifier for AnyPeer {
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
        small(end_entity)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(too_old())
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

/// Why the other end is not the curator that was meant.
#[derive(thiserror::Error)]
enum NotMeant {
    #[error(transparent)]
    Refused(#[from] crate::curator::peer::Refusal),
    #[error("the other end is {0}, and a node of the cluster was meant")]
    NoNode(Peer),
    #[error("the other end is node {found}, and {expected} was meant")]
    Another { found: NodeId, expected: NodeId },
}

/// As the sentence that it is: rustls shows what it does not know itself by this.
impl fmt::Debug for NotMeant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[derive(Debug)]
struct NodeOfCluster {
    proof: Proof,
    anchor: Anchor,
    expected: Option<NodeId>,
    clock: Clock,
}

impl NodeOfCluster {
    fn judge(&self, end_entity: &[u8], more: usize) -> Result<(), NotMeant> {
        if more > 0 {
            return Err(crate::curator::peer::Refusal::Chain(more + 1).into());
        }
        // What is revoked only a curator knows; a node that is out of the cluster leads nobody to the leader, because
        // the leader proves to be the node that is said to lead.
        match identify(&[end_entity], &self.anchor, &Revocations::default(), self.clock.now())? {
            Peer::Node { id, .. } => match self.expected {
                Some(expected) if expected != id => Err(NotMeant::Another { found: id, expected }),
                _ => Ok(()),
            },
            other => Err(NotMeant::NoNode(other)),
        }
    }
}

impl ServerCertVerifier for NodeOfCluster {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        small(end_entity)?;
        let verdict = self.judge(end_entity, intermediates.len());
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
        Err(too_old())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.proof.verify(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// One certificate for every connection, whatever authorities the other end names: it names none.
struct Shown(Arc<CertifiedKey>);

impl fmt::Debug for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shown")
    }
}

impl rustls::client::ResolvesClientCert for Shown {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}
