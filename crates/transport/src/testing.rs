//! Certificates, configurations and handshakes in memory, for the tests of this crate.

use std::io;
use std::sync::Arc;

use rcgen::{CertificateParams, KeyPair};
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::ring;
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::sign::{CertifiedKey, Signer, SigningKey, SingleCertAndKey};
use rustls::{
    ClientConfig, Error, HandshakeKind, ServerConfig, SignatureAlgorithm, SignatureScheme,
    SupportedProtocolVersion,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::verifier::{ClientCertificateCheck, ServerCertificateCheck};

/// Accepts every certificate, so that only the signature decides.
#[derive(Debug)]
pub(crate) struct AnyCertificate;

impl ServerCertificateCheck for AnyCertificate {
    fn check_server(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<(), Error> {
        Ok(())
    }
}

impl ClientCertificateCheck for AnyCertificate {
    fn check_client(&self, _: &CertificateDer<'_>, _: &[CertificateDer<'_>]) -> Result<(), Error> {
        Ok(())
    }
}

/// One end of a connection: a certificate, and a key that may belong to another one.
pub(crate) struct Party {
    pub(crate) certificate: CertificateDer<'static>,
    pub(crate) public_key: Vec<u8>,
    pkcs8: Vec<u8>,
}

impl Party {
    /// A new key with a certificate that it signed.
    pub(crate) fn generate(algorithm: &'static rcgen::SignatureAlgorithm) -> Self {
        let key = KeyPair::generate_for(algorithm).unwrap();
        let certificate = CertificateParams::default().self_signed(&key).unwrap().der().clone();
        Self { certificate, public_key: key.public_key_raw().to_vec(), pkcs8: key.serialize_der() }
    }

    /// The same certificate, shown by a peer that has another key.
    pub(crate) fn with_key_of(&self, other: &Self) -> Self {
        let (certificate, public_key) = (self.certificate.clone(), self.public_key.clone());
        Self { certificate, public_key, pkcs8: other.pkcs8.clone() }
    }

    pub(crate) fn certified_key(&self) -> CertifiedKey {
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.pkcs8.clone()));
        let key = Arc::new(UnofferedScheme(any_supported_type(&key).unwrap()));
        CertifiedKey::new(vec![self.certificate.clone()], key)
    }
}

/// Chooses its signature scheme without regard to the offer. A peer that follows the rules would end a handshake by
/// itself if none of its schemes were offered, and the verifier would never be called.
#[derive(Debug)]
struct UnofferedScheme(Arc<dyn SigningKey>);

impl SigningKey for UnofferedScheme {
    fn choose_scheme(&self, _: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
        self.0.choose_scheme(&[SignatureScheme::ED25519, SignatureScheme::ECDSA_NISTP256_SHA256])
    }

    fn algorithm(&self) -> SignatureAlgorithm {
        self.0.algorithm()
    }
}

/// A client that offers every version of TLS.
pub(crate) fn client(verifier: Arc<dyn ServerCertVerifier>, own: Option<&Party>) -> Arc<ClientConfig> {
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    Arc::new(match own {
        Some(own) => config.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(own.certified_key()))),
        None => config.with_no_client_auth(),
    })
}

/// A server that speaks one version of TLS.
pub(crate) fn server(
    verifier: Option<Arc<dyn ClientCertVerifier>>,
    own: &Party,
    version: &'static SupportedProtocolVersion,
) -> Arc<ServerConfig> {
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[version])
        .unwrap();
    let config = match verifier {
        Some(verifier) => config.with_client_cert_verifier(verifier),
        None => config.with_no_client_auth(),
    };
    Arc::new(config.with_cert_resolver(Arc::new(SingleCertAndKey::from(own.certified_key()))))
}

/// How a handshake ended at both ends. In TLS 1.3 a client finishes before the server rejects it.
#[derive(Debug)]
pub(crate) struct Handshake {
    pub(crate) client: Result<(), Error>,
    pub(crate) server: Result<(), Error>,
    /// The protocol that the server negotiated, if it finished.
    pub(crate) protocol: Option<Vec<u8>>,
    pub(crate) client_certificate: Option<Vec<u8>>,
    pub(crate) kind: Option<HandshakeKind>,
}

pub(crate) async fn run_handshake(client: Arc<ClientConfig>, server: Arc<ServerConfig>) -> Handshake {
    let (near, far) = tokio::io::duplex(64 << 10);
    let name = ServerName::try_from("server.example").unwrap();
    let (mut client, mut server) =
        tokio::join!(TlsConnector::from(client).connect(name, near), TlsAcceptor::from(server).accept(far));
    if let (Ok(client), Ok(server)) = (&mut client, &mut server) {
        // The tickets of TLS 1.3 follow the handshake, and a client receives them when it reads.
        server.write_all(b"!").await.unwrap();
        server.flush().await.unwrap();
        client.read_exact(&mut [0]).await.unwrap();
    }
    let connection = server.as_ref().ok().map(|stream| stream.get_ref().1);
    let shown = connection.and_then(|connection| connection.peer_certificates()?.first());
    Handshake {
        protocol: connection.and_then(|connection| connection.alpn_protocol()).map(<[u8]>::to_vec),
        client_certificate: shown.map(|certificate| certificate.to_vec()),
        kind: connection.and_then(|connection| connection.handshake_kind()),
        client: outcome(client.map(drop)),
        server: outcome(server.map(drop)),
    }
}

/// The error of TLS in an error of I/O.
fn outcome(ended: io::Result<()>) -> Result<(), Error> {
    ended.map_err(|error| {
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
        inner.cloned().unwrap_or_else(|| Error::General(error.to_string()))
    })
}
