//! Ed25519 certificates: their size, key and signature.
//!
//! Users that pin a key, or sign certificates themselves, decide about the rest of a certificate. These parts are the
//! same for all of them.

use rustls::pki_types::CertificateDer;
use rustls::{CertificateError, Error};
use x509_parser::oid_registry::OID_SIG_ED25519;
use x509_parser::prelude::X509Certificate;

/// Largest certificate that is parsed, in bytes. One with an Ed25519 key and a name needs about 300, and one that an
/// authority of ours signed about 500.
pub const MAX_CERTIFICATE_BYTES: usize = 4096;

/// Rejects a certificate that is too large to be parsed.
pub fn check_size(certificate: &CertificateDer<'_>) -> Result<(), Error> {
    if certificate.len() > MAX_CERTIFICATE_BYTES {
        return Err(Error::InvalidCertificate(CertificateError::BadEncoding));
    }
    Ok(())
}

/// The key of a certificate, which must be an Ed25519 key.
pub fn ed25519_key(certificate: &X509Certificate<'_>) -> Result<[u8; 32], Error> {
    let info = certificate.public_key();
    if info.algorithm.algorithm != OID_SIG_ED25519 {
        return Err(Error::InvalidCertificate(CertificateError::BadSignature));
    }
    let malformed = Error::InvalidCertificate(CertificateError::BadEncoding);
    if info.subject_public_key.unused_bits != 0 {
        return Err(malformed);
    }
    info.subject_public_key.data.as_ref().try_into().map_err(|_| malformed)
}

/// Whether this Ed25519 key signed the certificate.
#[must_use]
pub fn is_signed_by(certificate: &X509Certificate<'_>, key: &[u8; 32]) -> bool {
    certificate.signature_algorithm.algorithm == OID_SIG_ED25519
        && ring::signature::UnparsedPublicKey::new(&ring::signature::ED25519, key)
            .verify(certificate.tbs_certificate.as_ref(), &certificate.signature_value.data)
            .is_ok()
}

#[cfg(test)]
mod tests {
    use rcgen::{PKCS_ECDSA_P256_SHA256, PKCS_ED25519};
    use x509_parser::prelude::FromDer as _;

    use super::*;
    use crate::testing::Party;

    #[test]
    fn only_an_ed25519_key_is_found_and_only_the_signer_verifies() {
        let (own, other) = (Party::generate(&PKCS_ED25519), Party::generate(&PKCS_ED25519));
        let (_, certificate) = X509Certificate::from_der(&own.certificate).unwrap();
        let (_, another) = X509Certificate::from_der(&other.certificate).unwrap();
        let key = ed25519_key(&certificate).unwrap();
        assert_eq!(key.as_slice(), own.public_key);
        assert!(is_signed_by(&certificate, &key));
        assert!(!is_signed_by(&another, &key));

        let ecdsa = Party::generate(&PKCS_ECDSA_P256_SHA256);
        let (_, certificate) = X509Certificate::from_der(&ecdsa.certificate).unwrap();
        let error = ed25519_key(&certificate).unwrap_err();
        assert_eq!(error, Error::InvalidCertificate(CertificateError::BadSignature));
        assert!(!is_signed_by(&certificate, &key));
    }

    #[test]
    fn changed_certificate_is_not_signed() {
        let own = Party::generate(&PKCS_ED25519);
        let (_, certificate) = X509Certificate::from_der(&own.certificate).unwrap();
        let key = ed25519_key(&certificate).unwrap();
        // The last bytes are the signature.
        for at in own.certificate.len() - 64..own.certificate.len() {
            let mut changed = own.certificate.to_vec();
            changed[at] ^= 1;
            let (_, certificate) = X509Certificate::from_der(&changed).unwrap();
            assert!(!is_signed_by(&certificate, &key), "byte {at}");
        }
    }
}
