//! Only the holder of the key of an Ed25519 certificate gets in.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ED25519};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::sign::{CertifiedKey, Signer, SigningKey};
use rustls::{ClientConfig, RootCertStore, SignatureAlgorithm, SignatureScheme};
use shepherd::server::callback::callback_server::CallbackServer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::World;
use crate::harness::aloud::TestResult;
use crate::harness::callback::until;

/// Shows a certificate and signs with a key, whether or not they belong together, and whether or not the server
/// offered such a signature scheme.
#[derive(Debug)]
struct Shows(Arc<CertifiedKey>);

/// Signs with its own schemes. A client that keeps the rules shows no certificate at all if the server requested none
/// of its signature schemes, and the server's verdict on that certificate would never be seen.
#[derive(Debug)]
struct Stubborn(Arc<dyn SigningKey>);

impl SigningKey for Stubborn {
    fn choose_scheme(&self, _: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
        self.0.choose_scheme(&[
            SignatureScheme::ED25519,
            SignatureScheme::ECDSA_NISTP256_SHA256,
            SignatureScheme::RSA_PSS_SHA256,
        ])
    }

    fn algorithm(&self) -> SignatureAlgorithm {
        self.0.algorithm()
    }
}

impl rustls::client::ResolvesClientCert for Shows {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// Whether a peer that shows `chain` and signs with `pkcs8` can speak HTTP/2.
async fn gets_in(
    server: &CallbackServer,
    chain: Vec<CertificateDer<'static>>,
    pkcs8: &[u8],
) -> anyhow::Result<bool> {
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(pkcs8.to_vec()));
    let key = Arc::new(Stubborn(rustls::crypto::ring::sign::any_supported_type(&key)?));
    let mut config = builder(server, &rustls::version::TLS13)?
        .with_client_cert_resolver(Arc::new(Shows(Arc::new(CertifiedKey::new(chain, key)))));
    config.alpn_protocols = vec![b"h2".to_vec()];
    speaks(server, config).await
}

fn builder(
    server: &CallbackServer,
    version: &'static rustls::SupportedProtocolVersion,
) -> anyhow::Result<rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>> {
    let mut roots = RootCertStore::empty();
    for authority in &server.current_ca_certificates() {
        roots.add(authority.clone().into())?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Ok(ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[version])?
        .with_root_certificates(roots))
}

async fn speaks(server: &CallbackServer, config: ClientConfig) -> anyhow::Result<bool> {
    let stream = TcpStream::connect(server.local_addr).await?;
    let name = ServerName::from(server.local_addr.ip());
    let Ok(mut stream) = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await
    else {
        return Ok(false);
    };
    // In TLS 1.3 a client learns only with the first byte that it reads whether it was accepted.
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    let mut settings = [0; 9];
    let talk = async {
        stream.write_all(preface).await?;
        stream.flush().await?;
        stream.read_exact(&mut settings).await
    };
    let answered = tokio::time::timeout(Duration::from_secs(30), talk).await?;
    Ok(answered.is_ok() && settings[3] == 4)
}

fn self_signed(key: &KeyPair) -> anyhow::Result<CertificateDer<'static>> {
    Ok(CertificateParams::default().self_signed(key)?.der().clone())
}

#[tokio::test]
async fn only_who_has_the_key_of_an_ed25519_certificate_gets_in() -> TestResult {
    let world = World::new("gets_in").await?;
    let server = &world.listener.server;
    let (agent, _client) = world.agent().await?;
    let certificate = agent.identity.certificate_der().clone();
    let another = KeyPair::generate_for(&PKCS_ED25519)?;
    let ecdsa = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    // A key that belongs to nothing, made with `openssl req -x509 -newkey rsa:2048 -nodes`.
    let rsa = CertificateDer::from_pem_slice(include_bytes!("../data/rsa_certificate.pem"))?;
    let rsa_key = PrivateKeyDer::from_pem_slice(include_bytes!("../data/rsa_key.pem"))?;
    CertifiedKey::from_der(vec![rsa.clone()], rsa_key.clone_key(), &rustls::crypto::ring::default_provider())
        .context("the RSA certificate and its key")?;
    let (own, other, wrong_kind) = (agent.identity.pkcs8(), another.serialized_der(), ecdsa.serialized_der());
    assert!(gets_in(server, vec![certificate.clone()], own).await?, "its own key");
    let cases = [
        ("another's certificate", vec![certificate.clone()], other),
        ("another's certificate with an ECDSA key", vec![certificate.clone()], wrong_kind),
        ("an RSA certificate with its key", vec![rsa.clone()], rsa_key.secret_der()),
        ("an RSA certificate with an Ed25519 key", vec![rsa], other),
        ("an Ed25519 certificate with an RSA key", vec![certificate.clone()], rsa_key.secret_der()),
        ("an ECDSA certificate with its key", vec![self_signed(&ecdsa)?], wrong_kind),
        ("an ECDSA certificate with an Ed25519 key", vec![self_signed(&ecdsa)?], other),
        ("a chain", vec![certificate.clone(), self_signed(&another)?], own),
        ("a chain of itself", vec![certificate.clone(), certificate.clone()], own),
        ("no X.509 at all", vec![CertificateDer::from(vec![0x30, 0x82, 0xff, 0xff])], own),
        ("an empty certificate", vec![CertificateDer::from(Vec::new())], own),
        ("a huge certificate", vec![CertificateDer::from(vec![0x30; 60_000])], own),
    ];
    for (refused, (name, chain, key)) in (1..).zip(cases) {
        assert!(!gets_in(server, chain, key).await?, "{name}");
        // It is rejected because of its certificate, not because of its protocol.
        until(&format!("the refusal of {name} is counted"), async || {
            let counted =
                world.listener.counted("shepherd_tls_handshake_failures_total{reason=\"certificate\"}")?;
            Ok(counted == refused)
        })
        .await?;
    }
    let nothing = builder(server, &rustls::version::TLS13)?.with_no_client_auth();
    assert!(!speaks(server, nothing).await?, "no certificate");
    let old = builder(server, &rustls::version::TLS12)?
        .with_client_auth_cert(vec![certificate.clone()], agent.identity.private_key())?;
    assert!(!speaks(server, old).await?, "TLS 1.2");
    // Rejected connections leave nothing behind that would block others.
    assert!(gets_in(server, vec![certificate], own).await?);
    Ok(world.listener.stop().await?)
}
