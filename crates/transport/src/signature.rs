//! Handshake signatures: which ones a verifier accepts, and their verification.
//!
//! A peer signs the transcript of the handshake with the key of its certificate. The scheme is the peer's choice, and
//! rustls does not compare it with the schemes that were offered, so a verifier has to.

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{WebPkiSupportedAlgorithms, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::CertificateDer;
use rustls::{CertificateError, DigitallySignedStruct, Error, PeerIncompatible, SignatureScheme};

/// The handshake signatures that a verifier accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptedSignatures {
    /// Ed25519 in TLS 1.3: for peers with a key that one of our programs generated.
    Ed25519,
    /// Every scheme of the provider in TLS 1.3: for our own servers with a certificate that an operator chose.
    Tls13,
    /// Every scheme of the provider in TLS 1.2 and 1.3: for servers that are not ours.
    Tls12,
}

/// Verifies that a peer holds the key of its certificate.
#[derive(Debug)]
pub(crate) struct SignatureVerifier {
    algorithms: WebPkiSupportedAlgorithms,
    accepted: AcceptedSignatures,
}

impl SignatureVerifier {
    pub(crate) fn new(accepted: AcceptedSignatures) -> Self {
        Self { algorithms: ring::default_provider().signature_verification_algorithms, accepted }
    }

    pub(crate) fn accepted(&self) -> AcceptedSignatures {
        self.accepted
    }

    pub(crate) fn verify_tls12(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        match self.accepted {
            AcceptedSignatures::Tls12 => {
                verify_tls12_signature(message, certificate, signature, &self.algorithms)
            }
            // The one error of rustls for a wrong signature scheme. It mentions QUIC, which is not used here.
            AcceptedSignatures::Ed25519 | AcceptedSignatures::Tls13 => {
                Err(Error::PeerIncompatible(PeerIncompatible::Tls13RequiredForQuic))
            }
        }
    }

    pub(crate) fn verify_tls13(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        if self.accepted == AcceptedSignatures::Ed25519 && signature.scheme != SignatureScheme::ED25519 {
            return Err(Error::InvalidCertificate(CertificateError::BadSignature));
        }
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    /// The schemes that are offered to the peer.
    pub(crate) fn schemes(&self) -> Vec<SignatureScheme> {
        match self.accepted {
            AcceptedSignatures::Ed25519 => vec![SignatureScheme::ED25519],
            AcceptedSignatures::Tls13 | AcceptedSignatures::Tls12 => self.algorithms.supported_schemes(),
        }
    }
}
