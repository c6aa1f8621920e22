//! Whom the machine believes to be its shepherd.
//!
//! Certificates given at enrolment or by an answer, or the machine's own trust
//! store when none were given. Parsed where they enter: a bundle that nothing
//! can be verified against would cut the machine off for good.

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;

/// Why a trust store could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrustError {
    /// One of the given certificates is none.
    #[error("CA certificate {number} of {count} is no X.509 certificate in DER ({reason})")]
    NoCertificate {
        /// Its place, counted from 1.
        number: usize,
        /// How many there were.
        count: usize,
        /// What the parser said.
        reason: String,
    },
    /// None were given and the machine has none of its own.
    #[error(
        "no CA certificate was given and this machine's own trust store is empty; \
         give the shepherd --agent_endpoint_ca_certificate_path, or install ca-certificates here"
    )]
    EmptySystemStore,
}

/// Makes the store for the given DER certificates; the machine's own when there are none.
pub fn store(certificates: &[Vec<u8>]) -> Result<RootCertStore, TrustError> {
    let mut roots = RootCertStore::empty();
    for (index, der) in certificates.iter().enumerate() {
        roots.add(CertificateDer::from(der.as_slice())).map_err(|error| TrustError::NoCertificate {
            number: index + 1,
            count: certificates.len(),
            reason: error.to_string(),
        })?;
    }
    if certificates.is_empty() {
        // What cannot be read of the store is skipped, as every TLS client does.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if roots.is_empty() {
            return Err(TrustError::EmptySystemStore);
        }
    }
    Ok(roots)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curator::identity::Identity;

    #[test]
    fn broken_certificate_is_named_by_its_place() {
        let good = Identity::generate().unwrap().certificate_der().to_vec();
        assert_eq!(store(std::slice::from_ref(&good)).unwrap().len(), 1);
        let error = store(&[good, b"-----BEGIN CERTIFICATE-----".to_vec()]).unwrap_err();
        assert!(error.to_string().starts_with("CA certificate 2 of 2 is no X.509"), "{error}");
    }
}
