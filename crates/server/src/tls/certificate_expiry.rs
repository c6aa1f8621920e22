//! Expiry of a served chain: when clients stop to accept it.
//!
//! A client verifies each certificate from the server's own up to a root that it trusts. So the chain ends when the first of
//! them expires, which may be an intermediate long before the server's own. Certificates of the file that are on no way to
//! a root, such as a former root that signed the present one, do not count.
//!
//! Clients differ about an expired root: rustls accepts it, and OpenSSL does not. So the root counts, too. Where several
//! announced CAs have the name of the issuer, as in a rotation, the one that lasts longest counts.

use std::time::SystemTime;

use model::time::Timestamp;
use rustls::pki_types::CertificateDer;
use x509_parser::prelude::X509Certificate;

/// When the first certificate that clients need expires; `None` for a chain without a readable one.
pub(super) fn find_chain_end(chain: &[CertificateDer<'_>], announced: &[Vec<u8>]) -> Option<Timestamp> {
    let parsed: Vec<X509Certificate<'_>> = chain.iter().filter_map(|der| parse_certificate(der)).collect();
    let roots: Vec<X509Certificate<'_>> = announced.iter().filter_map(|der| parse_certificate(der)).collect();
    let end_of = |certificate: &X509Certificate<'_>| certificate.validity().not_after.timestamp();
    let mut current = parsed.first()?;
    let mut end = end_of(current);
    // Each certificate is used once at most, so that a circle of issuers ends.
    for _ in &parsed {
        let issued = |issuer: &&X509Certificate<'_>| issuer.subject() == current.issuer();
        if let Some(root) = roots.iter().filter(issued).map(end_of).max() {
            end = end.min(root);
            break;
        }
        let Some(issuer) = parsed.iter().filter(issued).max_by_key(|issuer| end_of(issuer)) else { break };
        end = end.min(end_of(issuer));
        current = issuer;
    }
    Timestamp::from_timestamp(end, 0)
}

/// Whether clients accept a chain no longer at that time.
pub(super) fn is_expired_at(chain: &[CertificateDer<'_>], announced: &[Vec<u8>], at: SystemTime) -> bool {
    find_chain_end(chain, announced).is_none_or(|end| end <= Timestamp::from(at))
}

fn parse_certificate(der: &[u8]) -> Option<X509Certificate<'_>> {
    x509_parser::parse_x509_certificate(der).ok().map(|(_, parsed)| parsed)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

    use super::*;

    /// A certificate of this name that ends after so many days; without an issuer it is self-signed.
    fn issue(
        common: &str,
        days: u64,
        issuer: Option<&(CertificateParams, KeyPair)>,
    ) -> (CertificateDer<'static>, (CertificateParams, KeyPair)) {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, common);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.not_after = at(days).into();
        let key = KeyPair::generate().unwrap();
        let certificate = match issuer {
            None => params.self_signed(&key),
            Some((params_of, key_of)) => params.signed_by(&key, &Issuer::from_params(params_of, key_of)),
        };
        (certificate.unwrap().der().clone(), (params, key))
    }

    fn at(days: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_hours(24 * days)
    }

    #[test]
    fn first_certificate_on_the_way_to_a_root_decides() {
        let (root, by_root) = issue("root", 30_000, None);
        let (short_root, _) = issue("root", 20_100, None);
        let (middle, by_middle) = issue("middle", 20_500, Some(&by_root));
        let (long_middle, _) = issue("middle", 29_000, Some(&by_root));
        let (leaf, _) = issue("leaf", 25_000, Some(&by_middle));
        let (short_leaf, _) = issue("leaf", 20_200, Some(&by_middle));
        let (stranger, _) = issue("stranger", 20_001, None);
        for (what, chain, announced, days) in [
            ("the leaf", vec![&short_leaf, &middle, &root], vec![&root], 20_200),
            ("the intermediate", vec![&leaf, &middle], vec![&root], 20_500),
            ("the intermediate, in another order", vec![&leaf, &root, &middle], vec![&root], 20_500),
            ("the intermediate, by a trust store", vec![&leaf, &middle], vec![], 20_500),
            ("the root", vec![&leaf, &long_middle], vec![&short_root], 20_100),
            ("the root in the chain", vec![&leaf, &long_middle, &short_root], vec![], 20_100),
            ("the new root", vec![&leaf, &long_middle], vec![&short_root, &root], 25_000),
            ("no other CA", vec![&leaf, &long_middle, &stranger], vec![&stranger, &root], 25_000),
            ("an announced intermediate", vec![&leaf, &stranger], vec![&middle], 20_500),
            ("the only one", vec![&root], vec![&root], 30_000),
        ] {
            let chain: Vec<_> = chain.into_iter().cloned().collect();
            let announced: Vec<Vec<u8>> = announced.into_iter().map(|der| der.to_vec()).collect();
            assert_eq!(find_chain_end(&chain, &announced), Some(at(days).into()), "{what}");
            assert!(is_expired_at(&chain, &announced, at(days)), "{what}");
            assert!(!is_expired_at(&chain, &announced, at(days - 1)), "{what}");
        }
        assert_eq!(find_chain_end(&[], &[]), None);
    }
}
