//! TLS configuration of the listeners: TLS 1.3, and a served certificate that can be replaced.
//!
//! The crate `transport` makes the configuration, verifies signatures and resumes no session. Agents keep their
//! connections anyway.

use std::sync::{Arc, PoisonError, RwLock};

use rustls::pki_types::CertificateDer;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{Error, ServerConfig};
use transport::config::{HTTP_1_1, HTTP_2, server_config};
use transport::verifier::{ClientAuth, ClientVerifier};

use crate::tls::client_verifier::SelfSignedKey;

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

    /// The certificate that is currently served, with those that follow it, DER.
    #[must_use]
    pub fn chain(&self) -> Vec<CertificateDer<'static>> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).cert.clone()
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
    server_config(ClientVerifier::new(SelfSignedKey, ClientAuth::Required), shown, &[HTTP_2])
}

/// TLS 1.3 for operators: a client certificate is optional, and must have the form of an agent's.
pub fn operator_server_config(shown: Arc<ReloadableCertificate>) -> Result<Arc<ServerConfig>, Error> {
    server_config(ClientVerifier::new(SelfSignedKey, ClientAuth::Optional), shown, &[HTTP_2, HTTP_1_1])
}
