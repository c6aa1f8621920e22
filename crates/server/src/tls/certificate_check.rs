//! Check of a certificate from files: would the other side accept it now, for every name of the endpoints?
//!
//! Agents and operators verify a server with the verifier of rustls, by the certificates that they were given or by
//! their host's trust store. The same verifier with the same certificates judges here, before the certificate is
//! served: for `--check`, at the start and at each reload. A trust store of another host cannot be read, so this host's
//! is used in its place.
//!
//! The error of the verifier decides. The parsed certificates only supply the words: which of them, until when, for
//! which names.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use model::time::Timestamp;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::crypto::ring;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, Error, RootCertStore};
use x509_parser::prelude::{GeneralName, X509Certificate};

/// A name for which the other side would reject a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedName {
    /// Host name or address of an endpoint.
    pub name: String,
    /// The reason, as a part of a sentence.
    pub reason: String,
}

/// Verifies a chain for all names by these CA certificates, DER; without any, by this host's trust store.
pub fn check_chain(
    chain: &[CertificateDer<'_>],
    ca_certificates: &[Vec<u8>],
    names: &[String],
    now: SystemTime,
) -> Result<(), RejectedName> {
    let Some(first) = names.first() else { return Ok(()) };
    let rejected = |name: &str, reason: String| RejectedName { name: name.to_owned(), reason };
    let roots = build_roots(ca_certificates).map_err(|reason| rejected(first, reason))?;
    let time = UnixTime::since_unix_epoch(now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default());
    if roots.is_empty() {
        // The verifier cannot be built without one.
        let error = Error::InvalidCertificate(CertificateError::UnknownIssuer);
        return Err(rejected(first, explain_rejection(&error, chain, first, true, time)));
    }
    let provider = Arc::new(ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
        .build()
        .map_err(|error| rejected(first, error.to_string()))?;
    let Some((leaf, intermediates)) = chain.split_first() else {
        return Err(rejected(first, "the file has no certificate".to_owned()));
    };
    for name in names {
        let server_name = ServerName::try_from(name.clone())
            .map_err(|_| rejected(name, "TLS can verify no such name".to_owned()))?;
        verifier.verify_server_cert(leaf, intermediates, &server_name, &[], time).map_err(|error| {
            rejected(name, explain_rejection(&error, chain, name, ca_certificates.is_empty(), time))
        })?;
    }
    Ok(())
}

fn build_roots(ca_certificates: &[Vec<u8>]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for der in ca_certificates {
        roots
            .add(CertificateDer::from(der.as_slice()))
            .map_err(|error| format!("its CA certificate cannot be used: {error}"))?;
    }
    if ca_certificates.is_empty() {
        // Unreadable certificates of the store are skipped, as in every TLS client.
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    }
    Ok(roots)
}

/// The reason in words.
fn explain_rejection(
    error: &Error,
    chain: &[CertificateDer<'_>],
    name: &str,
    by_trust_store: bool,
    time: UnixTime,
) -> String {
    let parsed: Vec<X509Certificate<'_>> = chain
        .iter()
        .filter_map(|der| x509_parser::parse_x509_certificate(der).ok().map(|(_, certificate)| certificate))
        .collect();
    let Some(leaf) = parsed.first() else { return error.to_string() };
    if leaf.is_ca() {
        return "its first certificate is that of a CA, which no TLS client accepts as a server's; put the server's own \
                certificate first, issued with basicConstraints=CA:FALSE"
            .to_owned();
    }
    let Error::InvalidCertificate(problem) = error else { return error.to_string() };
    match problem {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            explain_dates(&parsed, time).unwrap_or_else(|| "it has expired".to_owned())
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            explain_dates(&parsed, time).unwrap_or_else(|| "it is not valid yet".to_owned())
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            explain_names(leaf, name)
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "its extended key usage is not that of a server; issue it with serverAuth".to_owned()
        }
        CertificateError::UnknownIssuer => explain_issuer(&parsed, by_trust_store),
        CertificateError::BadSignature => {
            "the signature of one of its certificates was not made by the CA of that name; it may be a CA of before, \
             with the same name"
                .to_owned()
        }
        _ => error.to_string(),
    }
}

/// The first certificate that is not valid at that time.
fn explain_dates(parsed: &[X509Certificate<'_>], time: UnixTime) -> Option<String> {
    let now = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    let date = |seconds: i64| {
        Timestamp::from_timestamp(seconds, 0)
            .map_or_else(|| seconds.to_string(), |at| at.to_rfc3339_opts(chrono::SecondsFormat::Secs, true))
    };
    parsed.iter().enumerate().find_map(|(index, certificate)| {
        let validity = certificate.validity();
        let (begin, end) = (validity.not_before.timestamp(), validity.not_after.timestamp());
        let number = index + 1;
        if end < now {
            Some(format!("certificate {number} of its chain expired on {}", date(end)))
        } else if begin > now {
            Some(format!("certificate {number} of its chain is not valid before {}", date(begin)))
        } else {
            None
        }
    })
}

fn explain_names(leaf: &X509Certificate<'_>, name: &str) -> String {
    let names = alternative_names(leaf);
    if !names.is_empty() {
        return format!("it is for {} and not for {name}", names.join(", "));
    }
    "it has no subject alternative name, and TLS clients do not read the common name; issue it with \
     subjectAltName"
        .to_owned()
}

/// The host names and addresses that a certificate is for.
fn alternative_names(leaf: &X509Certificate<'_>) -> Vec<String> {
    let Ok(Some(extension)) = leaf.subject_alternative_name() else { return Vec::new() };
    let text = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => {
            let v4 = <[u8; 4]>::try_from(*bytes).ok().map(IpAddr::from);
            let v6 = <[u8; 16]>::try_from(*bytes).ok().map(IpAddr::from);
            v4.or(v6).map(|address| address.to_string())
        }
        _ => None,
    };
    extension.value.general_names.iter().filter_map(text).collect()
}

/// Why no chain leads to a trusted CA.
fn explain_issuer(parsed: &[X509Certificate<'_>], by_trust_store: bool) -> String {
    for (index, pair) in parsed.windows(2).enumerate() {
        let issuer = pair[0].issuer();
        if issuer == pair[1].subject() {
            continue;
        }
        if let Some(place) = parsed.iter().position(|other| other.subject() == issuer) {
            return format!(
                "its chain is in another order: certificate {} of the file was issued by certificate {}; put each \
                 certificate before that of its issuer",
                index + 1,
                place + 1
            );
        }
    }
    let issuer = parsed.last().map_or_else(String::new, |last| last.issuer().to_string());
    if by_trust_store {
        format!(
            "its chain ends with a certificate of {issuer:?}, which the trust store of this host does not contain; add \
             the missing certificates to the file, or give --agent_endpoint_ca_certificate_path"
        )
    } else {
        format!("no CA certificate that agents are given issued it: its chain ends with one of {issuer:?}")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rcgen::{
        BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    };

    use super::*;

    const DAY: Duration = Duration::from_hours(24);

    struct Authority {
        key: KeyPair,
        params: CertificateParams,
        der: CertificateDer<'static>,
    }

    fn named(common: &str, names: &[&str]) -> CertificateParams {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name.push(DnType::CommonName, common);
        params
    }

    fn authority(common: &str, parent: Option<&Authority>) -> Authority {
        let key = KeyPair::generate().unwrap();
        let mut params = named(common, &[]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = match parent {
            None => params.self_signed(&key).unwrap(),
            Some(parent) => {
                let issuer = Issuer::from_params(&parent.params, &parent.key);
                params.signed_by(&key, &issuer).unwrap()
            }
        };
        Authority { der: certificate.der().clone(), key, params }
    }

    fn issue(parent: &Authority, params: &CertificateParams) -> CertificateDer<'static> {
        let issuer = Issuer::from_params(&parent.params, &parent.key);
        params.signed_by(&KeyPair::generate().unwrap(), &issuer).unwrap().der().clone()
    }

    fn check(chain: &[&CertificateDer<'static>], ca: &[&CertificateDer<'static>], name: &str) -> String {
        let chain: Vec<_> = chain.iter().copied().cloned().collect();
        let ca: Vec<Vec<u8>> = ca.iter().map(|der| der.to_vec()).collect();
        let checked = check_chain(&chain, &ca, &[name.to_owned()], SystemTime::now());
        checked.err().map(|rejected| rejected.reason).unwrap_or_default()
    }

    #[test]
    fn rejection_is_explained_by_what_is_wrong() {
        let now = SystemTime::now();
        let root = authority("Root", None);
        let intermediate = authority("Intermediate", Some(&root));
        let stranger = authority("Stranger", None);
        let host = "shepherd.example";
        let leaf = issue(&intermediate, &named("leaf", &[host, "192.0.2.1"]));
        let mut params = named("old", &[host]);
        params.not_after = (now - DAY).into();
        let expired = issue(&intermediate, &params);
        let mut params = named("young", &[host]);
        params.not_before = (now + DAY).into();
        let early = issue(&intermediate, &params);
        let nameless = issue(&intermediate, &named(host, &[]));
        let mut params = named("client", &[host]);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let client = issue(&intermediate, &params);
        let (r, i, s) = (&root.der, &intermediate.der, &stranger.der);
        for (what, chain, ca, name, part) in [
            ("good", vec![&leaf, i, r], vec![r], host, ""),
            ("good by address", vec![&leaf, i], vec![r], "192.0.2.1", ""),
            // The order matters to no verifier once the root is known.
            ("mixed with its root", vec![&leaf, r, i], vec![r], host, ""),
            (
                "mixed",
                vec![&leaf, r, i],
                vec![s],
                host,
                "certificate 1 of the file was issued by certificate 3",
            ),
            ("a CA", vec![r], vec![r], host, "is that of a CA"),
            ("expired", vec![&expired, i], vec![r], host, "certificate 1 of its chain expired on 20"),
            ("not yet", vec![&early, i], vec![r], host, "certificate 1 of its chain is not valid before 20"),
            (
                "other name",
                vec![&leaf, i],
                vec![r],
                "else.example",
                "it is for shepherd.example, 192.0.2.1 and not",
            ),
            ("common name", vec![&nameless, i], vec![r], host, "no subject alternative name"),
            ("client", vec![&client, i], vec![r], host, "issue it with serverAuth"),
            (
                "other root",
                vec![&leaf, i],
                vec![s],
                host,
                "no CA certificate that agents are given issued it",
            ),
            ("no intermediate", vec![&leaf], vec![r], host, "ends with one of \"CN=Intermediate\""),
        ] {
            let reason = check(&chain, &ca, name);
            assert!(reason.contains(part) && reason.is_empty() == part.is_empty(), "{what}: {reason}");
        }
    }

    #[test]
    fn every_name_is_checked() {
        let root = authority("Root", None);
        let leaf = issue(&root, &named("leaf", &["a.example"]));
        let names = ["a.example".to_owned(), "b.example".to_owned()];
        let rejected = check_chain(&[leaf], &[root.der.to_vec()], &names, SystemTime::now()).unwrap_err();
        assert_eq!(rejected.name, "b.example");
        assert_eq!(check_chain(&[], &[], &[], SystemTime::now()), Ok(()));
    }
}
