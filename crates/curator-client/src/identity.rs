//! An Ed25519 key pair with a self-signed certificate: the identity of an agent, node or owner.
//!
//! A machine makes its key pair once and keeps it for as long as the state directory lives; the shepherd pins the
//! public half of the agent's at enrolment. TLS needs a certificate around the key, so the identity signs one for
//! itself. Nothing in that certificate is trusted: only the key in it and the handshake signature count. It is built
//! from constants and the key, so it is the same at every start.

use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SerialNumber};
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

/// An Ed25519 key pair with a certificate it signed for itself.
///
/// `Debug` shows the public half alone.
pub struct Identity {
    pkcs8: Vec<u8>,
    public_key: [u8; 32],
    certificate: CertificateDer<'static>,
}

/// Why an identity could not be created or loaded.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The system's random source failed.
    #[error("no key could be made: the system's random source failed")]
    NoRandomness,
    /// The bytes are no Ed25519 key in PKCS#8.
    #[error("the key is no Ed25519 key in PKCS#8 ({0})")]
    InvalidKey(String),
    /// The certificate around the key could not be made.
    #[error("no certificate could be made around the key: {0}")]
    Certificate(#[from] rcgen::Error),
}

impl Identity {
    /// Makes a new key pair.
    pub fn generate() -> Result<Self, IdentityError> {
        let document = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new())
            .map_err(|ring::error::Unspecified| IdentityError::NoRandomness)?;
        Self::from_pkcs8(document.as_ref())
    }

    /// Loads a stored key pair, as [`Identity::pkcs8`] returned it.
    pub fn from_pkcs8(pkcs8: &[u8]) -> Result<Self, IdentityError> {
        let pair = Ed25519KeyPair::from_pkcs8(pkcs8)
            .map_err(|error| IdentityError::InvalidKey(error.to_string()))?;
        let public_key =
            pair.public_key().as_ref().try_into().map_err(|_| {
                IdentityError::InvalidKey("its public half does not have 32 bytes".to_owned())
            })?;
        let certificate = self_sign(pkcs8)?;
        Ok(Self { pkcs8: pkcs8.to_vec(), public_key, certificate })
    }

    /// The public half, as enrolment reports it.
    #[must_use]
    pub const fn public_key(&self) -> [u8; 32] {
        self.public_key
    }

    /// The certificate that the callback server is shown, DER.
    #[must_use]
    pub fn certificate_der(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// The whole key pair in PKCS#8, a secret.
    #[must_use]
    pub fn pkcs8(&self) -> &[u8] {
        &self.pkcs8
    }

    /// The private key in the form that rustls needs.
    #[must_use]
    pub fn private_key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.pkcs8.clone()))
    }
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").field("public_key", &hex::encode(self.public_key)).finish_non_exhaustive()
    }
}

fn self_sign(pkcs8: &[u8]) -> Result<CertificateDer<'static>, rcgen::Error> {
    let key = KeyPair::try_from(pkcs8)?;
    let mut params = CertificateParams::default();
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, "roleserver");
    params.distinguished_name = name;
    params.serial_number = Some(SerialNumber::from(1_u64));
    Ok(params.self_signed(&key)?.der().clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_key_restores_the_same_identity() {
        let made = Identity::generate().unwrap();
        let kept = Identity::from_pkcs8(made.pkcs8()).unwrap();
        assert_eq!(made.public_key(), kept.public_key());
        assert_eq!(made.certificate_der(), kept.certificate_der());
        assert_ne!(made.public_key(), Identity::generate().unwrap().public_key());
    }

    #[test]
    fn certificate_carries_the_key_and_its_own_signature() {
        let identity = Identity::generate().unwrap();
        let (rest, certificate) = x509_parser::parse_x509_certificate(identity.certificate_der()).unwrap();
        assert!(rest.is_empty());
        assert_eq!(certificate.public_key().subject_public_key.data.as_ref(), identity.public_key());
        assert_eq!(certificate.issuer(), certificate.subject());
    }

    #[test]
    fn invalid_key_is_rejected_without_leaking_it() {
        let error = Identity::from_pkcs8(b"very secret").unwrap_err().to_string();
        assert!(error.starts_with("the key is no Ed25519 key in PKCS#8"), "{error}");
        assert!(!error.contains("secret"));
        let shown = format!("{:?}", Identity::generate().unwrap());
        assert!(!shown.contains("pkcs8"), "{shown}");
    }
}
