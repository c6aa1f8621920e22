//! TLS configuration of the listeners: TLS 1.3, and a served certificate that can be replaced.
//!
//! There is no session resumption. A resumed session would replace a new signature by one made hours ago, and agents
//! keep their connections anyway.

use std::sync::{Arc, PoisonError, RwLock};

use rustls::pki_types::CertificateDer;
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{Error, ServerConfig};

use crate::tls::client_verifier::AgentVerifier;

/// The served certificate; can be replaced while connections come in.
pub struct ReloadableCertificate {
    current: RwLock<Arc<CertifiedKey>>,
}

impl std::fmt::Debug for ReloadableCertificate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShownCertificate").finish_non_exhaustive()
    }
}

impl ReloadableCertificate {
    /// Serves `first` until it is replaced.
    #[must_use]
    pub fn new(first: CertifiedKey) -> Self {
        Self { current: RwLock::new(Arc::new(first)) }
    }

    /// Serves `next` to all new connections.
    pub fn replace(&self, next: CertifiedKey) {
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(next);
    }

    /// The certificate that is currently served, DER.
    #[must_use]
    pub fn certificate(&self) -> Option<CertificateDer<'static>> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).cert.first().cloned()
    }
}

impl ResolvesServerCert for ReloadableCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

/// TLS 1.3 for agents: requires a proven key and serves the certificate of `shown`.
pub fn agent_server_config(shown: Arc<ReloadableCertificate>) -> Result<Arc<ServerConfig>, Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Arc::new(AgentVerifier::new(&provider));
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(shown);
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// TLS 1.3 for operators: a client certificate is optional, and must have the form of an agent's.
pub fn operator_server_config(shown: Arc<ReloadableCertificate>) -> Result<Arc<ServerConfig>, Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Arc::new(AgentVerifier::new(&provider).optional());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(shown);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}
