//! Client certificate verifier for agents and operators: a self-signed Ed25519 certificate whose key the peer proves.
//!
//! An agent has a key and no CA that vouches for it, so it presents a certificate that it signed itself. The handshake
//! signature makes this safe: the peer must sign this connection's transcript with the key in the certificate. The
//! certificate alone proves nothing, because it is public. The BMDB decides later, with each heartbeat, whose key it
//! is.
//!
//! Only one form is accepted: a single small certificate with an Ed25519 key, signed by that key. Anything else is
//! rejected in the handshake, so that the rest of the program does not parse what it does not need.
//!
//! This file decides about the certificate. Its base in the crate `transport` verifies the handshake signature.

use rustls::pki_types::CertificateDer;
use rustls::{CertificateError, Error};
use transport::certificate::{check_size, ed25519_key, is_signed_by};
use transport::verifier::ClientCertificateCheck;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// The end of a certificate that Ed25519 signed (RFC 8410), up to the 64 bytes of the signature: the algorithm, and
/// the head of a bit string of whole bytes.
const SIGNATURE_PREFIX: &[u8] = &[0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x41, 0x00];

/// Accepts one certificate with an Ed25519 key, signed by this key.
#[derive(Debug)]
pub(super) struct SelfSignedKey;

impl ClientCertificateCheck for SelfSignedKey {
    fn check_client(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
    ) -> Result<(), Error> {
        // Validity is not checked: the key is pinned, and a machine's clock may be anywhere.
        if !intermediates.is_empty() {
            return Err(Error::InvalidCertificate(CertificateError::UnknownIssuer));
        }
        verified_agent_key(end_entity)?;
        Ok(())
    }
}

/// The Ed25519 key of a certificate that this key signed.
pub fn verified_agent_key(certificate: &CertificateDer<'_>) -> Result<[u8; 32], Error> {
    let malformed = || Error::InvalidCertificate(CertificateError::BadEncoding);
    check_size(certificate)?;
    let (rest, parsed) = X509Certificate::from_der(certificate).map_err(|_| malformed())?;
    if !rest.is_empty() {
        return Err(malformed());
    }
    let key = ed25519_key(&parsed)?;
    if parsed.issuer() != parsed.subject() {
        return Err(Error::InvalidCertificate(CertificateError::UnknownIssuer));
    }
    if !is_signed_by(&parsed, &key) {
        return Err(Error::InvalidCertificate(CertificateError::BadSignature));
    }
    // Data after the signed part is not covered by the signature, and the parser is lenient.
    let tail = certificate.len().checked_sub(SIGNATURE_PREFIX.len() + 64).ok_or_else(malformed)?;
    if !certificate[tail..].starts_with(SIGNATURE_PREFIX) {
        return Err(malformed());
    }
    Ok(key)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rcgen::{CertificateParams, Issuer, KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ED25519};
    use rustls::pki_types::UnixTime;
    use rustls::server::danger::ClientCertVerifier as _;
    use transport::verifier::{ClientAuth, ClientVerifier};

    use super::*;

    fn ed25519() -> KeyPair {
        KeyPair::generate_for(&PKCS_ED25519).unwrap()
    }

    fn self_signed(key: &KeyPair) -> CertificateDer<'static> {
        CertificateParams::default().self_signed(key).unwrap().der().clone()
    }

    fn verify(certificate: &CertificateDer<'_>, chain: &[CertificateDer<'_>]) -> bool {
        let verifier = ClientVerifier::new(SelfSignedKey, ClientAuth::Required);
        verifier.verify_client_cert(certificate, chain, UnixTime::now()).is_ok()
    }

    #[test]
    fn self_signed_ed25519_certificate_is_accepted_with_its_key() {
        let key = ed25519();
        let certificate = self_signed(&key);
        assert!(verify(&certificate, &[]));
        assert_eq!(verified_agent_key(&certificate).unwrap(), key.public_key_raw());
    }

    #[test]
    fn other_keys_and_chains_are_rejected() {
        let certificate = self_signed(&ed25519());
        assert!(!verify(&self_signed(&KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap()), &[]));
        assert!(!verify(&certificate, &[self_signed(&ed25519())]), "a chain");
        assert!(!verify(&certificate, std::slice::from_ref(&certificate)), "a chain of itself");
        let authority = ed25519();
        let issuer = Issuer::new(CertificateParams::default(), &authority);
        let leaf = CertificateParams::default().signed_by(&ed25519(), &issuer).unwrap();
        assert!(!verify(leaf.der(), &[]), "signed by another key of the same name");
    }

    #[test]
    fn every_byte_of_a_certificate_is_verified() {
        let certificate = self_signed(&ed25519());
        for at in 0..certificate.len() {
            let mut changed = certificate.to_vec();
            changed[at] ^= 1;
            assert!(!verify(&changed.into(), &[]), "byte {at}");
        }
        for length in 0..certificate.len() {
            assert!(!verify(&certificate[..length].to_vec().into(), &[]), "{length} bytes");
        }
        let mut longer = certificate.to_vec();
        longer.push(0);
        assert!(!verify(&longer.into(), &[]));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600), at in 0usize..300) {
            let _ = verified_agent_key(&bytes.clone().into());
            let mut certificate = self_signed(&ed25519()).to_vec();
            let at = at.min(certificate.len());
            let end = (at + bytes.len()).min(certificate.len());
            certificate.splice(at..end, bytes);
            let _ = verified_agent_key(&certificate.into());
        }
    }
}
