//! A key of ECDSA P-256 that signs, and what it signs.
//!
//! An authority is such a key with a certificate that it signed for itself. Each has a name of its own, with the number of
//! that certificate in it: while one is being replaced, two are trusted for the same purpose, and whoever builds a chain
//! by names must find the right one at once.
//!
//! What tokens of service accounts are signed with is such a key as well, with no certificate: API servers are given its
//! public half as it is.
//!
//! As everywhere, time, serial numbers and keys are given by the caller; the signatures themselves are random.

use std::fmt;
use std::net::IpAddr;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType, SignatureAlgorithm,
};
use uuid::Uuid;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::curator::pki::{Issued, PkiError, Serial, Validity, common_name, parameters};

/// What stands before the point in a public key of ECDSA P-256 (RFC 5480): the algorithm, and that no bit is unused.
const BEFORE_POINT: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86,
    0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];

/// Why a key is not used, or signed nothing.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// Nobody could use such a certificate, or such a key.
    #[error("no certificate was issued: {0}")]
    Useless(String),
    /// What was kept cannot be used.
    #[error("a key of Kubernetes cannot be used: {0}")]
    Broken(&'static str),
    /// It could not be signed.
    #[error("no certificate could be signed: {0}")]
    Signing(#[from] rcgen::Error),
}

impl From<PkiError> for KeyError {
    fn from(error: PkiError) -> Self {
        match error {
            PkiError::Useless(why) => Self::Useless(why),
            PkiError::Signing(error) => Self::Signing(error),
            PkiError::NoKey | PkiError::NoAuthority(_) | PkiError::OtherKey(_) => {
                Self::Broken("it is one of something else")
            }
        }
    }
}

/// The public half of a key of ECDSA P-256, which is a point of the curve.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PublicPoint([u8; 65]);

impl PublicPoint {
    /// Reads a public key as it is sent: `SubjectPublicKeyInfo` in DER, the point uncompressed.
    pub fn from_spki(der: &[u8]) -> Result<Self, KeyError> {
        let wanted = || {
            KeyError::Useless(
                "its key is none of ECDSA P-256: SubjectPublicKeyInfo in DER with an uncompressed point is wanted"
                    .to_owned(),
            )
        };
        let point = der.strip_prefix(&BEFORE_POINT).ok_or_else(wanted)?;
        let point: [u8; 65] = point.try_into().map_err(|_| wanted())?;
        // Whoever agrees on a secret looks whether the point is one of the curve; nothing else here says so.
        let curve = &ring::agreement::ECDH_P256;
        let random = ring::rand::SystemRandom::new();
        let own = ring::agreement::EphemeralPrivateKey::generate(curve, &random).map_err(|_| wanted())?;
        let theirs = ring::agreement::UnparsedPublicKey::new(curve, point);
        ring::agreement::agree_ephemeral(own, &theirs, |_| ()).map_err(|_| wanted())?;
        Ok(Self(point))
    }

    /// As it is sent.
    #[must_use]
    pub fn to_spki(self) -> Vec<u8> {
        [&BEFORE_POINT[..], &self.0[..]].concat()
    }
}

impl fmt::Debug for PublicPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicPoint({})", hex::encode(self.0))
    }
}

impl PublicKeyData for PublicPoint {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

/// Whose a certificate is, and what it is good for.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Subject {
    /// The group that its holder is in; empty for none.
    pub organisation: String,
    /// Who its holder is.
    pub name: String,
    /// Names that its holder is reached by.
    pub dns: Vec<String>,
    /// Addresses that its holder is reached at.
    pub addresses: Vec<IpAddr>,
    /// Whether it is good for serving.
    pub serves: bool,
    /// Whether it is good for calling.
    pub calls: bool,
}

/// A key that signs. `Debug` shows what everybody may know.
#[derive(Clone, PartialEq, Eq)]
pub struct Signer {
    certificate: Vec<u8>,
    pkcs8: Vec<u8>,
    point: PublicPoint,
}

/// Makes a key, in PKCS#8.
pub fn new_key() -> Result<Vec<u8>, KeyError> {
    Ok(KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?.serialize_der())
}

impl Signer {
    /// A key that signs no certificates.
    pub fn bare(pkcs8: &[u8]) -> Result<Self, KeyError> {
        let key = key_pair(pkcs8)?;
        Ok(Self { certificate: Vec::new(), pkcs8: pkcs8.to_vec(), point: point(&key)? })
    }

    /// A new authority of a cluster, of a key that was made for it.
    pub fn authority(
        purpose: &str,
        cluster: Uuid,
        pkcs8: &[u8],
        serial: Serial,
        validity: Validity,
    ) -> Result<Self, KeyError> {
        let key = key_pair(pkcs8)?;
        let mut params = parameters(serial, validity)?;
        let number = serial.to_string();
        let number = number.get(..16).unwrap_or(&number);
        params.distinguished_name =
            distinguished(&cluster.to_string(), &format!("kubernetes {purpose} {number}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let certificate = params.self_signed(&key)?.der().to_vec();
        Self::load(&certificate, pkcs8)
    }

    /// Takes a key as it was kept: an authority, or one without a certificate.
    pub fn load(certificate: &[u8], pkcs8: &[u8]) -> Result<Self, KeyError> {
        let bare = Self::bare(pkcs8)?;
        if certificate.is_empty() {
            return Ok(bare);
        }
        let (rest, parsed) = X509Certificate::from_der(certificate)
            .map_err(|_| KeyError::Broken("its certificate is no X.509 certificate in DER"))?;
        if !rest.is_empty() {
            return Err(KeyError::Broken("something stands behind its certificate"));
        }
        if !parsed.basic_constraints().ok().flatten().is_some_and(|constraints| constraints.value.ca) {
            return Err(KeyError::Broken("its certificate may sign no others"));
        }
        if parsed.public_key().raw != bare.point.to_spki() {
            return Err(KeyError::Broken("its certificate is that of another key"));
        }
        Ok(Self { certificate: certificate.to_vec(), ..bare })
    }

    /// The certificate of an authority, DER; empty where it is none.
    #[must_use]
    pub fn certificate(&self) -> &[u8] {
        &self.certificate
    }

    /// The secret, PKCS#8.
    #[must_use]
    pub fn pkcs8(&self) -> &[u8] {
        &self.pkcs8
    }

    /// The public half.
    #[must_use]
    pub const fn point(&self) -> PublicPoint {
        self.point
    }

    /// Signs a certificate.
    pub fn issue(
        &self,
        subject: &Subject,
        key: &PublicPoint,
        serial: Serial,
        validity: Validity,
    ) -> Result<Issued, KeyError> {
        let broken = |what| move || KeyError::Broken(what);
        let (_, own) = X509Certificate::from_der(&self.certificate)
            .map_err(|_| KeyError::Broken("it is no authority, and signs no certificates"))?;
        let until = Validity::of(&own).ok_or_else(broken("its certificate has no time"))?.until;
        let name = common_name(own.subject()).ok_or_else(broken("its certificate has no name"))?;
        let cluster = own.subject().iter_organization().next().and_then(|name| name.as_str().ok());
        let mut authority = CertificateParams::default();
        authority.distinguished_name = distinguished(cluster.unwrap_or_default(), name);

        // Nothing outlives who signed it.
        let validity = Validity { until: validity.until.min(until), ..validity };
        let mut params = parameters(serial, validity)?;
        params.distinguished_name = distinguished(&subject.organisation, &subject.name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        let usages = [
            (subject.serves, ExtendedKeyUsagePurpose::ServerAuth),
            (subject.calls, ExtendedKeyUsagePurpose::ClientAuth),
        ];
        params.extended_key_usages =
            usages.into_iter().filter_map(|(wanted, usage)| wanted.then_some(usage)).collect();
        for dns in &subject.dns {
            params.subject_alt_names.push(SanType::DnsName(dns.as_str().try_into()?));
        }
        params.subject_alt_names.extend(subject.addresses.iter().copied().map(SanType::IpAddress));
        let certificate = params.signed_by(key, &Issuer::from_params(&authority, &key_pair(&self.pkcs8)?))?;
        Ok(Issued { certificate: certificate.der().to_vec(), serial, validity })
    }
}

impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signer").field("point", &self.point).finish_non_exhaustive()
    }
}

fn distinguished(organisation: &str, name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    if !organisation.is_empty() {
        distinguished.push(DnType::OrganizationName, organisation);
    }
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn key_pair(pkcs8: &[u8]) -> Result<KeyPair, KeyError> {
    let none = KeyError::Broken("it is no key of ECDSA P-256 in PKCS#8");
    match KeyPair::try_from(pkcs8) {
        Ok(key) if key.algorithm() == &PKCS_ECDSA_P256_SHA256 => Ok(key),
        _ => Err(none),
    }
}

fn point(key: &KeyPair) -> Result<PublicPoint, KeyError> {
    let point = key.der_bytes().try_into();
    point.map(PublicPoint).map_err(|_| KeyError::Broken("its public half is no point"))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier as _;
    use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
    use rustls::server::WebPkiClientVerifier;

    use super::*;
    use crate::curator::node::tests::at;
    use crate::curator::pki::tests::{pkcs8 as ed25519, serial, validity};

    pub(crate) fn signer(purpose: &str, number: u8) -> Signer {
        let long = Validity { from: at(-1000), until: at(1_000_000) };
        let key = new_key().unwrap();
        Signer::authority(purpose, Uuid::from_bytes([7; 16]), &key, serial(number), long).unwrap()
    }

    pub(crate) fn component_key() -> PublicPoint {
        Signer::bare(&new_key().unwrap()).unwrap().point()
    }

    fn roots(signers: &[&Signer]) -> Arc<rustls::RootCertStore> {
        let mut roots = rustls::RootCertStore::empty();
        for signer in signers {
            roots.add(CertificateDer::from(signer.certificate().to_vec())).unwrap();
        }
        Arc::new(roots)
    }

    fn second(second: i64) -> UnixTime {
        UnixTime::since_unix_epoch(Duration::from_secs(at(second).timestamp().try_into().unwrap()))
    }

    /// Whether a client that trusts these takes it as that of a server of this name.
    pub(crate) fn serves(signers: &[&Signer], certificate: &[u8], name: &str) -> bool {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(roots(signers), provider).build().unwrap();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let certificate = CertificateDer::from(certificate.to_vec());
        verifier.verify_server_cert(&certificate, &[], &name, &[], second(1)).is_ok()
    }

    /// Whether a server that trusts these takes it as that of a client.
    pub(crate) fn calls(signers: &[&Signer], certificate: &[u8]) -> bool {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots(signers), provider).build().unwrap();
        verifier.verify_client_cert(&CertificateDer::from(certificate.to_vec()), &[], second(1)).is_ok()
    }

    fn both() -> Subject {
        Subject {
            organisation: "group".to_owned(),
            name: "holder".to_owned(),
            dns: vec!["a.example".to_owned()],
            addresses: vec![[10, 0, 0, 7].into()],
            serves: true,
            calls: true,
        }
    }

    #[test]
    fn what_an_authority_signs_is_good_for_what_it_says_and_by_that_authority_alone() {
        let (one, other) = (signer("servers", 1), signer("servers", 2));
        let key = component_key();
        for (serving, calling) in [(true, true), (true, false), (false, true)] {
            let subject = Subject { serves: serving, calls: calling, ..both() };
            let issued = one.issue(&subject, &key, serial(3), validity()).unwrap();
            assert_eq!(serves(&[&one], &issued.certificate, "a.example"), serving);
            assert_eq!(serves(&[&one, &other], &issued.certificate, "10.0.0.7"), serving);
            assert_eq!(calls(&[&other, &one], &issued.certificate), calling);
            assert!(!serves(&[&one], &issued.certificate, "b.example"));
            assert!(!serves(&[&one], &issued.certificate, "10.0.0.8"));
            assert!(!serves(&[&other], &issued.certificate, "a.example"), "of another authority");
            assert!(!calls(&[&other], &issued.certificate), "of another authority");
        }
        let issued = one.issue(&both(), &key, serial(3), validity()).unwrap();
        let (_, parsed) = X509Certificate::from_der(&issued.certificate).unwrap();
        assert_eq!(parsed.public_key().raw, key.to_spki());
        assert_eq!(parsed.subject().to_string(), "O=group, CN=holder");
        assert_eq!(Validity::of(&parsed), Some(validity()));
    }

    #[test]
    fn authority_signs_the_same_once_it_was_kept() {
        let made = signer("clients", 1);
        let kept = Signer::load(made.certificate(), made.pkcs8()).unwrap();
        assert_eq!(kept, made);
        let issued = kept.issue(&both(), &component_key(), serial(3), validity()).unwrap();
        assert!(calls(&[&made], &issued.certificate));
        let (_, parsed) = X509Certificate::from_der(made.certificate()).unwrap();
        let name = common_name(parsed.subject()).unwrap();
        assert!(name.starts_with("kubernetes clients ") && name.len() <= 64, "{name}");
    }

    #[test]
    fn certificate_ends_no_later_than_its_authority() {
        let late = Validity { from: at(0), until: at(2_000_000) };
        let issued = signer("etcd", 1).issue(&both(), &component_key(), serial(3), late).unwrap();
        assert_eq!(issued.validity.until, at(1_000_000));
    }

    #[test]
    fn what_is_no_key_of_its_authority_is_refused() {
        let (one, other) = (signer("etcd", 1), signer("etcd", 2));
        let leaf = one.issue(&both(), &one.point(), serial(3), validity()).unwrap().certificate;
        let mut longer = one.certificate().to_vec();
        longer.push(0);
        for (certificate, pkcs8, said) in [
            (one.certificate(), other.pkcs8(), "of another key"),
            (one.certificate(), &ed25519(1)[..], "no key of ECDSA P-256"),
            (&leaf, one.pkcs8(), "may sign no others"),
            (&longer, one.pkcs8(), "stands behind"),
            (b"x", one.pkcs8(), "no X.509"),
            (b"", b"", "no key of ECDSA P-256"),
        ] {
            let error = Signer::load(certificate, pkcs8).unwrap_err().to_string();
            assert!(error.contains(said), "{said}: {error}");
        }
        let bare = Signer::bare(one.pkcs8()).unwrap();
        assert!(bare.issue(&both(), &one.point(), serial(3), validity()).is_err(), "it is no authority");
    }

    #[test]
    fn key_that_components_would_not_take_is_refused() {
        let good = component_key().to_spki();
        assert_eq!(PublicPoint::from_spki(&good).unwrap().to_spki(), good);
        let mut off_the_curve = good.clone();
        *off_the_curve.last_mut().unwrap() ^= 1;
        let mut compressed = good.clone();
        compressed[26] = 2;
        let mut another_curve = good.clone();
        another_curve[22] = 0x22;
        let of_ed25519 = hex::decode("302a300506032b6570032100").unwrap();
        for wrong in [
            &b""[..],
            &good[..90],
            &[&good[..], &[0]].concat(),
            &off_the_curve,
            &compressed,
            &another_curve,
            &of_ed25519,
        ] {
            let error = PublicPoint::from_spki(wrong).unwrap_err();
            assert!(matches!(error, KeyError::Useless(_)) && error.to_string().contains("P-256"), "{error}");
        }
    }

    #[test]
    fn secret_is_in_no_text() {
        let signer = signer("etcd", 1);
        let shown = format!("{signer:?}");
        let secret = hex::encode(&signer.pkcs8()[36..68]);
        assert!(!shown.contains(&secret) && !shown.contains("pkcs8"), "{shown}");
    }
}
