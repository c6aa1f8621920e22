//! Build the trust store that callback servers are verified against.
//!
//! It has the certificates of an enrolment or a response, or those of the machine's own trust store if none were given.
//! They are parsed where they enter: a bundle that nothing can be verified against would cut the machine off for good.

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;

/// Why a trust store could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrustError {
    /// One of the given certificates is malformed.
    #[error("CA certificate {number} of {count} is no X.509 certificate in DER ({reason})")]
    InvalidCertificate {
        /// Its position, counted from 1.
        number: usize,
        /// How many certificates were given.
        count: usize,
        /// The error of the parser.
        reason: String,
    },
    /// None were given and the machine's own trust store is empty.
    #[error(
        "no CA certificate was given and this machine's own trust store is empty; \
         give the shepherd --agent_endpoint_ca_certificate_path, or install ca-certificates here"
    )]
    EmptySystemStore,
}

/// Builds the store from DER certificates, or from the machine's own store if there are none.
pub fn build_trust_store(certificates: &[Vec<u8>]) -> Result<RootCertStore, TrustError> {
    let mut roots = RootCertStore::empty();
    for (index, der) in certificates.iter().enumerate() {
        roots.add(CertificateDer::from(der.as_slice())).map_err(|error| TrustError::InvalidCertificate {
            number: index + 1,
            count: certificates.len(),
            reason: error.to_string(),
        })?;
    }
    if certificates.is_empty() {
        // Unreadable certificates of the store are skipped, as in every TLS client.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            return Err(TrustError::EmptySystemStore);
        }
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use curator_client::identity::Identity;

    use super::*;

    #[test]
    fn broken_certificate_is_named_by_its_place() {
        let good = Identity::generate().unwrap().certificate_der().to_vec();
        assert_eq!(build_trust_store(std::slice::from_ref(&good)).unwrap().len(), 1);
        let error = build_trust_store(&[good, b"-----BEGIN CERTIFICATE-----".to_vec()]).unwrap_err();
        assert!(error.to_string().starts_with("CA certificate 2 of 2 is no X.509"), "{error}");
    }
}
