//! Client certificates of people for the curators of a cluster.
//!
//! [`certificate_request`](crate::cluster::certificate_request) decides about a request and about its certificate. The
//! key is an Ed25519 key, and a certificate can be revoked: then the curators refuse every certificate for that key.

use crate::cluster::certificate_request::{CertificateRequest, MIN_LIFETIME, SignedCertificate};
use crate::time::Span;

/// Longest lifetime of a certificate.
pub const MAX_LIFETIME: Span = Span::hours(30 * 24);

/// A request for a certificate for the curators, and its outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterCredential {
    /// The request. Its key is a raw Ed25519 public key.
    pub request: CertificateRequest,
    /// Serial number, 32 hexadecimal digits; `None` until signed.
    pub serial: Option<String>,
}

impl AsRef<CertificateRequest> for ClusterCredential {
    fn as_ref(&self) -> &CertificateRequest {
        &self.request
    }
}

/// A certificate that the curators signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssuedCertificate {
    /// The certificate, and when it expires.
    pub signed: SignedCertificate,
    /// Serial number, 32 hexadecimal digits.
    pub serial: String,
}

/// Checks the lifetime of a request; the error is a sentence.
pub fn check_lifetime(lifetime: Span) -> Result<(), String> {
    if lifetime < MIN_LIFETIME || lifetime > MAX_LIFETIME {
        return Err(format!(
            "a certificate for a cluster is good for {MIN_LIFETIME} to {MAX_LIFETIME}, not for {lifetime}"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lifetime_is_from_a_minute_to_thirty_days() {
        assert_eq!(check_lifetime(MIN_LIFETIME), Ok(()));
        assert_eq!(check_lifetime(MAX_LIFETIME), Ok(()));
        for bad in [Span::seconds(59), Span::hours(30 * 24 + 1)] {
            assert!(check_lifetime(bad).unwrap_err().contains("is good for"), "{bad}");
        }
    }
}
