//! ECDSA P-256 signers: Kubernetes authorities and the service-account key.
//!
//! An authority is such a key with a certificate that it signed for itself. Each authority has a name of its own that
//! contains the serial number of that certificate: during a rotation two authorities are trusted for the same purpose,
//! and a verifier that builds a chain by names must find the right one at once.
//!
//! The key that signs service-account tokens is such a key as well, without a certificate: API servers get its public
//! key as it is.
//!
//! Time, serial numbers and keys come from the caller, as everywhere; the signatures themselves are random.

use std::fmt;
use std::net::IpAddr;

use curator_client::certificate::{IssuedCertificate, Serial, Validity, common_name};
use curator_client::pki::{PkiError, certificate_params};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType, SignatureAlgorithm,
};
use uuid::Uuid;
use x509_parser::prelude::{FromDer as _, X509Certificate};

/// The bytes before the point in an ECDSA P-256 public key (RFC 5480): the algorithm, and that no bit is unused.
const SPKI_PREFIX: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86,
    0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];

/// Why a key cannot be used, or did not sign.
#[derive(Debug, thiserror::Error)]
pub enum SignerError {
    /// The request is invalid: nobody could use such a certificate or key.
    #[error("no certificate was issued: {0}")]
    InvalidRequest(String),
    /// The stored key or certificate cannot be used.
    #[error("a key of Kubernetes cannot be used: {0}")]
    InvalidKey(&'static str),
    /// The certificate could not be signed.
    #[error("no certificate could be signed: {0}")]
    Signing(#[from] rcgen::Error),
}

impl From<PkiError> for SignerError {
    fn from(error: PkiError) -> Self {
        match error {
            PkiError::InvalidRequest(why) => Self::InvalidRequest(why),
            PkiError::Signing(error) => Self::Signing(error),
            PkiError::InvalidKey | PkiError::InvalidAuthority(_) | PkiError::KeyMismatch(_) => {
                Self::InvalidKey("it belongs to something else")
            }
        }
    }
}

/// An ECDSA P-256 public key: an uncompressed point of the curve.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct P256PublicKey([u8; 65]);

impl P256PublicKey {
    /// Parses a public key as the API has it: `SubjectPublicKeyInfo` in DER, the point uncompressed.
    pub fn from_spki(der: &[u8]) -> Result<Self, SignerError> {
        let wanted = || {
            SignerError::InvalidRequest(
                "its key is none of ECDSA P-256: SubjectPublicKeyInfo in DER with an uncompressed point is wanted"
                    .to_owned(),
            )
        };
        let point = der.strip_prefix(&SPKI_PREFIX).ok_or_else(wanted)?;
        let point: [u8; 65] = point.try_into().map_err(|_| wanted())?;
        // A key agreement checks that the point is on the curve; no other function here does.
        let curve = &ring::agreement::ECDH_P256;
        let random = ring::rand::SystemRandom::new();
        let own = ring::agreement::EphemeralPrivateKey::generate(curve, &random).map_err(|_| wanted())?;
        let theirs = ring::agreement::UnparsedPublicKey::new(curve, point);
        ring::agreement::agree_ephemeral(own, &theirs, |_| ()).map_err(|_| wanted())?;
        Ok(Self(point))
    }

    /// The public key as the API has it, see [`P256PublicKey::from_spki`].
    #[must_use]
    pub fn to_spki(self) -> Vec<u8> {
        [&SPKI_PREFIX[..], &self.0[..]].concat()
    }
}

impl fmt::Debug for P256PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "P256PublicKey({})", hex::encode(self.0))
    }
}

impl PublicKeyData for P256PublicKey {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

/// The subject of a certificate, and what the certificate is valid for.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct CertificateSubject {
    /// The group of the holder; empty for none.
    pub organisation: String,
    /// The common name of the holder.
    pub name: String,
    /// DNS names of the holder.
    pub dns: Vec<String>,
    /// IP addresses of the holder.
    pub addresses: Vec<IpAddr>,
    /// Whether it is valid for a server.
    pub server_auth: bool,
    /// Whether it is valid for a client.
    pub client_auth: bool,
}

/// A signing key. `Debug` shows the public half alone.
#[derive(Clone, PartialEq, Eq)]
pub struct Signer {
    certificate: Vec<u8>,
    pkcs8: Vec<u8>,
    public_key: P256PublicKey,
}

/// Generates a key, in PKCS#8.
pub fn generate_key() -> Result<Vec<u8>, SignerError> {
    Ok(KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?.serialize_der())
}

impl Signer {
    /// A key that signs no certificates.
    pub fn without_certificate(pkcs8: &[u8]) -> Result<Self, SignerError> {
        let key = parse_key_pair(pkcs8)?;
        Ok(Self { certificate: Vec::new(), pkcs8: pkcs8.to_vec(), public_key: public_key_from(&key)? })
    }

    /// A new authority of a cluster, from a key that was generated for it.
    pub fn new_authority(
        purpose: &str,
        cluster: Uuid,
        pkcs8: &[u8],
        serial: Serial,
        validity: Validity,
    ) -> Result<Self, SignerError> {
        let key = parse_key_pair(pkcs8)?;
        let mut params = certificate_params(serial, validity)?;
        let number = serial.to_string();
        let number = number.get(..16).unwrap_or(&number);
        params.distinguished_name =
            distinguished_name(&cluster.to_string(), &format!("kubernetes {purpose} {number}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let certificate = params.self_signed(&key)?.der().to_vec();
        Self::load(&certificate, pkcs8)
    }

    /// Loads a stored key: an authority, or a key with an empty `certificate`.
    pub fn load(certificate: &[u8], pkcs8: &[u8]) -> Result<Self, SignerError> {
        let bare = Self::without_certificate(pkcs8)?;
        if certificate.is_empty() {
            return Ok(bare);
        }
        let (rest, parsed) = X509Certificate::from_der(certificate)
            .map_err(|_| SignerError::InvalidKey("its certificate is no X.509 certificate in DER"))?;
        if !rest.is_empty() {
            return Err(SignerError::InvalidKey("there are bytes after its certificate"));
        }
        if !parsed.basic_constraints().ok().flatten().is_some_and(|constraints| constraints.value.ca) {
            return Err(SignerError::InvalidKey("its certificate is not that of an authority"));
        }
        if parsed.public_key().raw != bare.public_key.to_spki() {
            return Err(SignerError::InvalidKey("its certificate is that of another key"));
        }
        Ok(Self { certificate: certificate.to_vec(), ..bare })
    }

    /// The certificate of an authority, DER; empty for a key without one.
    #[must_use]
    pub fn certificate(&self) -> &[u8] {
        &self.certificate
    }

    /// The secret private key, in PKCS#8.
    #[must_use]
    pub fn pkcs8(&self) -> &[u8] {
        &self.pkcs8
    }

    /// The public half of the key.
    #[must_use]
    pub const fn public_key(&self) -> P256PublicKey {
        self.public_key
    }

    /// Signs a certificate for `key`. It expires no later than the authority.
    pub fn issue_certificate(
        &self,
        subject: &CertificateSubject,
        key: &P256PublicKey,
        serial: Serial,
        validity: Validity,
    ) -> Result<IssuedCertificate, SignerError> {
        let broken = |what| move || SignerError::InvalidKey(what);
        let (_, own) = X509Certificate::from_der(&self.certificate)
            .map_err(|_| SignerError::InvalidKey("it is no authority, and signs no certificates"))?;
        let until = Validity::from_x509(&own).ok_or_else(broken("its certificate has no time"))?.not_after;
        let name = common_name(own.subject()).ok_or_else(broken("its certificate has no name"))?;
        let cluster = own.subject().iter_organization().next().and_then(|name| name.as_str().ok());
        let mut authority = CertificateParams::default();
        authority.distinguished_name = distinguished_name(cluster.unwrap_or_default(), name);

        // No certificate outlives the authority that signed it.
        let validity = Validity { not_after: validity.not_after.min(until), ..validity };
        let mut params = certificate_params(serial, validity)?;
        params.distinguished_name = distinguished_name(&subject.organisation, &subject.name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        let usages = [
            (subject.server_auth, ExtendedKeyUsagePurpose::ServerAuth),
            (subject.client_auth, ExtendedKeyUsagePurpose::ClientAuth),
        ];
        params.extended_key_usages =
            usages.into_iter().filter_map(|(wanted, usage)| wanted.then_some(usage)).collect();
        for dns in &subject.dns {
            params.subject_alt_names.push(SanType::DnsName(dns.as_str().try_into()?));
        }
        params.subject_alt_names.extend(subject.addresses.iter().copied().map(SanType::IpAddress));
        let certificate =
            params.signed_by(key, &Issuer::from_params(&authority, &parse_key_pair(&self.pkcs8)?))?;
        Ok(IssuedCertificate { certificate: certificate.der().to_vec(), serial, validity })
    }
}

impl fmt::Debug for Signer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signer").field("point", &self.public_key).finish_non_exhaustive()
    }
}

fn distinguished_name(organisation: &str, name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    if !organisation.is_empty() {
        distinguished.push(DnType::OrganizationName, organisation);
    }
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn parse_key_pair(pkcs8: &[u8]) -> Result<KeyPair, SignerError> {
    let none = SignerError::InvalidKey("it is no key of ECDSA P-256 in PKCS#8");
    match KeyPair::try_from(pkcs8) {
        Ok(key) if key.algorithm() == &PKCS_ECDSA_P256_SHA256 => Ok(key),
        _ => Err(none),
    }
}

fn public_key_from(key: &KeyPair) -> Result<P256PublicKey, SignerError> {
    let point = key.der_bytes().try_into();
    point.map(P256PublicKey).map_err(|_| SignerError::InvalidKey("its public half is no point"))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use curator_client::testing::{at, pkcs8 as ed25519, serial, validity};
    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier as _;
    use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
    use rustls::server::WebPkiClientVerifier;

    use super::*;

    pub(crate) fn signer(purpose: &str, number: u8) -> Signer {
        let long = Validity { not_before: at(-1000), not_after: at(1_000_000) };
        let key = generate_key().unwrap();
        Signer::new_authority(purpose, Uuid::from_bytes([7; 16]), &key, serial(number), long).unwrap()
    }

    pub(crate) fn component_key() -> P256PublicKey {
        Signer::without_certificate(&generate_key().unwrap()).unwrap().public_key()
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

    /// Whether a client that trusts these authorities accepts the certificate as that of a server with this name.
    pub(crate) fn is_valid_server(signers: &[&Signer], certificate: &[u8], name: &str) -> bool {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(roots(signers), provider).build().unwrap();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let certificate = CertificateDer::from(certificate.to_vec());
        verifier.verify_server_cert(&certificate, &[], &name, &[], second(1)).is_ok()
    }

    /// Whether a server that trusts these authorities accepts the certificate as that of a client.
    pub(crate) fn is_valid_client(signers: &[&Signer], certificate: &[u8]) -> bool {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots(signers), provider).build().unwrap();
        verifier.verify_client_cert(&CertificateDer::from(certificate.to_vec()), &[], second(1)).is_ok()
    }

    fn both() -> CertificateSubject {
        CertificateSubject {
            organisation: "group".to_owned(),
            name: "holder".to_owned(),
            dns: vec!["a.example".to_owned()],
            addresses: vec![[10, 0, 0, 7].into()],
            server_auth: true,
            client_auth: true,
        }
    }

    #[test]
    fn certificate_is_valid_for_its_usages_under_its_authority_only() {
        let (one, other) = (signer("servers", 1), signer("servers", 2));
        let key = component_key();
        for (serving, calling) in [(true, true), (true, false), (false, true)] {
            let subject = CertificateSubject { server_auth: serving, client_auth: calling, ..both() };
            let issued = one.issue_certificate(&subject, &key, serial(3), validity()).unwrap();
            assert_eq!(is_valid_server(&[&one], &issued.certificate, "a.example"), serving);
            assert_eq!(is_valid_server(&[&one, &other], &issued.certificate, "10.0.0.7"), serving);
            assert_eq!(is_valid_client(&[&other, &one], &issued.certificate), calling);
            assert!(!is_valid_server(&[&one], &issued.certificate, "b.example"));
            assert!(!is_valid_server(&[&one], &issued.certificate, "10.0.0.8"));
            assert!(!is_valid_server(&[&other], &issued.certificate, "a.example"), "of another authority");
            assert!(!is_valid_client(&[&other], &issued.certificate), "of another authority");
        }
        let issued = one.issue_certificate(&both(), &key, serial(3), validity()).unwrap();
        let (_, parsed) = X509Certificate::from_der(&issued.certificate).unwrap();
        assert_eq!(parsed.public_key().raw, key.to_spki());
        assert_eq!(parsed.subject().to_string(), "O=group, CN=holder");
        assert_eq!(Validity::from_x509(&parsed), Some(validity()));
    }

    #[test]
    fn stored_authority_signs_the_same() {
        let made = signer("clients", 1);
        let kept = Signer::load(made.certificate(), made.pkcs8()).unwrap();
        assert_eq!(kept, made);
        let issued = kept.issue_certificate(&both(), &component_key(), serial(3), validity()).unwrap();
        assert!(is_valid_client(&[&made], &issued.certificate));
        let (_, parsed) = X509Certificate::from_der(made.certificate()).unwrap();
        let name = common_name(parsed.subject()).unwrap();
        assert!(name.starts_with("kubernetes clients ") && name.len() <= 64, "{name}");
    }

    #[test]
    fn certificate_ends_no_later_than_its_authority() {
        let late = Validity { not_before: at(0), not_after: at(2_000_000) };
        let issued = signer("etcd", 1).issue_certificate(&both(), &component_key(), serial(3), late).unwrap();
        assert_eq!(issued.validity.not_after, at(1_000_000));
    }

    #[test]
    fn key_of_another_authority_is_rejected() {
        let (one, other) = (signer("etcd", 1), signer("etcd", 2));
        let leaf =
            one.issue_certificate(&both(), &one.public_key(), serial(3), validity()).unwrap().certificate;
        let mut longer = one.certificate().to_vec();
        longer.push(0);
        for (certificate, pkcs8, text) in [
            (one.certificate(), other.pkcs8(), "of another key"),
            (one.certificate(), &ed25519(1)[..], "no key of ECDSA P-256"),
            (&leaf, one.pkcs8(), "not that of an authority"),
            (&longer, one.pkcs8(), "bytes after its certificate"),
            (b"x", one.pkcs8(), "no X.509"),
            (b"", b"", "no key of ECDSA P-256"),
        ] {
            let error = Signer::load(certificate, pkcs8).unwrap_err().to_string();
            assert!(error.contains(text), "{text}: {error}");
        }
        let bare = Signer::without_certificate(one.pkcs8()).unwrap();
        assert!(
            bare.issue_certificate(&both(), &one.public_key(), serial(3), validity()).is_err(),
            "it is no authority"
        );
    }

    #[test]
    fn unsupported_component_key_is_rejected() {
        let good = component_key().to_spki();
        assert_eq!(P256PublicKey::from_spki(&good).unwrap().to_spki(), good);
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
            let error = P256PublicKey::from_spki(wrong).unwrap_err();
            assert!(
                matches!(error, SignerError::InvalidRequest(_)) && error.to_string().contains("P-256"),
                "{error}"
            );
        }
    }

    #[test]
    fn debug_output_does_not_leak_the_key() {
        let signer = signer("etcd", 1);
        let shown = format!("{signer:?}");
        let secret = hex::encode(&signer.pkcs8()[36..68]);
        assert!(!shown.contains(&secret) && !shown.contains("pkcs8"), "{shown}");
    }
}
