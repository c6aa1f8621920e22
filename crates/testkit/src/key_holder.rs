//! A key for tests, with what it can show in a TLS handshake.

use std::sync::Arc;

use anyhow::Result;
use curator_client::identity::Identity;
use curator_client::node_id::{NodeId, PublicKey};
use curator_client::tls::certified_key;
use rustls::sign::CertifiedKey;

/// A key with its node id.
pub struct Holder {
    /// The private key, in memory only.
    pub identity: Identity,
    /// The public key of `identity`.
    pub key: PublicKey,
    /// The id of a node with this key.
    pub id: NodeId,
}

impl Holder {
    /// Generates a new key.
    pub fn new() -> Result<Self> {
        let identity = Identity::generate()?;
        let key = PublicKey(identity.public_key());
        Ok(Self { identity, key, id: NodeId::from_key(&key) })
    }

    /// The key with the certificate that it signed for itself.
    pub fn itself(&self) -> Result<Arc<CertifiedKey>> {
        Ok(certified_key(self.identity.certificate_der(), self.identity.pkcs8())?)
    }

    /// The key with a certificate that another key signed.
    pub fn with(&self, certificate: &[u8]) -> Result<Arc<CertifiedKey>> {
        Ok(certified_key(certificate, self.identity.pkcs8())?)
    }
}
