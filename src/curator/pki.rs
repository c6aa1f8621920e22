//! The cluster's own authority: what it signs, and for how long.
//!
//! One Ed25519 key, made when a cluster is bootstrapped, signs the certificates of all its nodes and owners;
//! it never leaves the cluster, and everybody knows the certificate that the authority signed for itself. A
//! node's certificate names the node in its common name and in its only DNS name, and is good for both ends
//! of a connection. An owner's is good for the client's end alone and has no DNS name, so that neither is
//! ever taken for the other (`peer.rs`).
//!
//! A certificate is for a key that its holder made and never shows. Asking again with the same key makes
//! another certificate for the same node: nothing is lost with an answer that is lost.
//!
//! Certificates end. What was stolen is then worthless by itself, and what is revoked has to be remembered no
//! longer than that. A node asks for a new one when a third of its time is left; one that was off for longer
//! comes back with its key alone.
//!
//! Time, serial numbers and keys are given by the caller.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ED25519, PublicKeyData, SanType, SerialNumber, SignatureAlgorithm,
};
use uuid::Uuid;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::curator::node_id::{NodeId, PublicKey};
use crate::model::time::{Timestamp, after, before, between};

/// How long an authority is good for.
pub const AUTHORITY_LIFETIME: Duration = Duration::from_hours(100 * 365 * 24);
/// How long a node's certificate is good for.
pub const NODE_LIFETIME: Duration = Duration::from_hours(30 * 24);
/// How long the certificate of a member of etcd is good for. As long as the authority: members that were all off for
/// longer than their certificates last would have no quorum, and so nobody who could give them others.
pub const PEER_LIFETIME: Duration = AUTHORITY_LIFETIME;
/// The longest that an owner's certificate is good for.
pub const LONGEST_OWNER_LIFETIME: Duration = Duration::from_hours(30 * 24);
/// How far before the issuer's clock a certificate begins, for peers whose clocks are late.
pub const CLOCK_SKEW: Duration = Duration::from_mins(5);

/// The name that every member of etcd has in the certificate that it shows to the others.
pub const ETCD_PEER: &str = "etcd peer";

/// What the organisation in an owner's certificate says.
pub(super) const OWNER: &str = "owner";
/// What the common name of an authority begins with; the cluster's UUID follows.
const AUTHORITY: &str = "cluster ";

/// A certificate's serial number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Serial([u8; 16]);

impl Serial {
    /// Takes 16 random bytes, of which two bits are set so that the number has 16 bytes and is positive.
    #[must_use]
    pub const fn new(mut random: [u8; 16]) -> Self {
        random[0] = random[0] & 0x7f | 0x40;
        Self(random)
    }

    /// Reads the number in a certificate, if it is one of ours.
    pub(super) fn from_certificate(raw: &[u8]) -> Option<Self> {
        raw.try_into().ok().map(Self).filter(|serial| *serial == Self::new(serial.0))
    }
}

impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Serial({self})")
    }
}

/// A text that is no serial number of ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no serial number of a certificate of this cluster: it has 32 lower-case hexadecimal digits"
)]
pub struct NoSerial(String);

impl FromStr for Serial {
    type Err = NoSerial;

    fn from_str(text: &str) -> Result<Self, NoSerial> {
        let refused = || NoSerial(text.chars().take(100).collect());
        let mut raw = [0; 16];
        hex::decode_to_slice(text, &mut raw).map_err(|_| refused())?;
        Self::from_certificate(&raw).filter(|serial| serial.to_string() == text).ok_or_else(refused)
    }
}

/// From when until when a certificate is good, both included, to the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// The first moment.
    pub from: Timestamp,
    /// The last one.
    pub until: Timestamp,
}

impl Validity {
    /// From now, and a little before, for this long.
    #[must_use]
    pub fn starting(now: Timestamp, lifetime: Duration) -> Self {
        Self { from: before(now, CLOCK_SKEW), until: after(now, lifetime) }
    }

    /// Whether `now` is in it.
    #[must_use]
    pub fn holds_at(&self, now: Timestamp) -> bool {
        self.from <= now && now <= self.until
    }

    /// That of a certificate in DER.
    #[must_use]
    pub fn read(certificate: &[u8]) -> Option<Self> {
        X509Certificate::from_der(certificate).ok().and_then(|(_, certificate)| Self::of(&certificate))
    }

    pub(super) fn of(certificate: &X509Certificate<'_>) -> Option<Self> {
        let validity = certificate.validity();
        let moment = |seconds| Timestamp::from_timestamp(seconds, 0);
        let (from, until) = (validity.not_before.timestamp(), validity.not_after.timestamp());
        Some(Self { from: moment(from)?, until: moment(until)? })
    }
}

/// What the holder of a certificate is to do about its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// Nothing before this moment.
    NotBefore(Timestamp),
    /// Ask for a new one, with the one there is.
    Due,
    /// Come back with the key alone; the certificate is refused.
    Expired,
}

/// Decides about a renewal: it is due when a third of the time is left.
#[must_use]
pub fn renewal(validity: Validity, now: Timestamp) -> Renewal {
    let due = after(validity.from, between(validity.from, validity.until) / 3 * 2);
    if now > validity.until {
        Renewal::Expired
    } else if now >= due {
        Renewal::Due
    } else {
        Renewal::NotBefore(due)
    }
}

/// Why no authority came to be, or why it signed nothing.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// The key is none.
    #[error("the authority of the cluster has no usable key: it is no Ed25519 key in PKCS#8")]
    NoKey,
    /// The certificate is none of an authority of ours.
    #[error("this is no certificate of a cluster's authority: {0}")]
    NoAuthority(String),
    /// Key and certificate are not of one authority.
    #[error("the key is not that of the certificate of cluster {0}: one of both is of another cluster")]
    OtherKey(Uuid),
    /// Nobody could use such a certificate.
    #[error("no certificate was issued: {0}")]
    Useless(String),
    /// It could not be signed.
    #[error("no certificate could be signed: {0}")]
    Signing(#[from] rcgen::Error),
}

/// What everybody knows of an authority: enough to verify what it signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Anchor {
    /// Its certificate, DER.
    pub certificate: Vec<u8>,
    /// The cluster.
    pub cluster: Uuid,
    /// Its key.
    pub key: PublicKey,
    /// How long it is good for.
    pub validity: Validity,
}

impl Anchor {
    /// Reads the certificate of an authority, which must have signed itself.
    pub fn parse(der: &[u8]) -> Result<Self, PkiError> {
        let refused = |reason: &str| PkiError::NoAuthority(reason.to_owned());
        let (rest, certificate) =
            X509Certificate::from_der(der).map_err(|_| refused("it is no X.509 certificate in DER"))?;
        if !rest.is_empty() {
            return Err(refused("something stands behind it"));
        }
        let key = ed25519_key(&certificate).ok_or_else(|| refused("its key is not of Ed25519"))?;
        let constraints = certificate.basic_constraints().ok().flatten();
        if !constraints.is_some_and(|constraints| constraints.value.ca) {
            return Err(refused("it may sign no others"));
        }
        if certificate.issuer() != certificate.subject() || !is_signed_by(&certificate, &key) {
            return Err(refused("it did not sign itself"));
        }
        let cluster = common_name(certificate.subject())
            .and_then(|name| name.strip_prefix(AUTHORITY)?.parse().ok())
            .ok_or_else(|| refused("it names no cluster"))?;
        let validity = Validity::of(&certificate).ok_or_else(|| refused("its time is out of range"))?;
        Ok(Self { certificate: der.to_vec(), cluster, key, validity })
    }
}

/// The authority of a cluster. `Debug` shows what everybody knows.
pub struct Authority {
    anchor: Anchor,
    key: KeyPair,
}

/// A certificate that was signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// DER.
    pub certificate: Vec<u8>,
    /// Its number.
    pub serial: Serial,
    /// From when until when it is good.
    pub validity: Validity,
}

impl Authority {
    /// Makes the authority of a new cluster, of an Ed25519 key in PKCS#8 that was made for it.
    pub fn create(cluster: Uuid, pkcs8: &[u8], serial: Serial, validity: Validity) -> Result<Self, PkiError> {
        let key = key_pair(pkcs8)?;
        let mut params = parameters(serial, validity)?;
        params.distinguished_name = authority_name(cluster);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key)?;
        Ok(Self { anchor: Anchor::parse(certificate.der())?, key })
    }

    /// Takes an authority as it was kept.
    pub fn load(certificate: &[u8], pkcs8: &[u8]) -> Result<Self, PkiError> {
        let (anchor, key) = (Anchor::parse(certificate)?, key_pair(pkcs8)?);
        if key.der_bytes() != anchor.key.0 {
            return Err(PkiError::OtherKey(anchor.cluster));
        }
        Ok(Self { anchor, key })
    }

    /// What everybody may know of it.
    #[must_use]
    pub const fn anchor(&self) -> &Anchor {
        &self.anchor
    }

    /// Its key in PKCS#8, the secret of the cluster.
    #[must_use]
    pub fn pkcs8(&self) -> &[u8] {
        self.key.serialized_der()
    }

    /// Signs a certificate for the node with this key.
    pub fn issue_node(
        &self,
        key: &PublicKey,
        serial: Serial,
        validity: Validity,
    ) -> Result<Issued, PkiError> {
        let name = NodeId::of(key).to_string();
        let dns = name.as_str().try_into().map_err(PkiError::Signing)?;
        self.issue(key, serial, validity, |params| {
            params.distinguished_name.push(DnType::CommonName, name);
            params.subject_alt_names = vec![SanType::DnsName(dns)];
            params.extended_key_usages =
                vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        })
    }

    /// Signs a certificate by which a member of etcd proves itself to the others, at this address.
    ///
    /// etcd asks of its peers the one name that all of these have, and the authority gives it to consensus members
    /// alone: a node's own certificate, or an owner's, opens no member's port. Nor is this one a node's.
    pub fn issue_peer(
        &self,
        key: &PublicKey,
        address: IpAddr,
        serial: Serial,
        validity: Validity,
    ) -> Result<Issued, PkiError> {
        self.issue(key, serial, validity, |params| {
            params.distinguished_name.push(DnType::CommonName, ETCD_PEER);
            params.subject_alt_names = vec![SanType::IpAddress(address)];
            params.extended_key_usages =
                vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        })
    }

    /// Signs a certificate that makes the holder of this key an owner: 1 to 63 letters, digits, dots, dashes
    /// and underscores name who that is.
    pub fn issue_owner(
        &self,
        name: &str,
        key: &PublicKey,
        serial: Serial,
        validity: Validity,
    ) -> Result<Issued, PkiError> {
        if !is_owner_name(name) {
            let name: String = name.chars().take(100).collect();
            return Err(PkiError::Useless(format!(
                "{name:?} names no owner: a name has 1 to 63 letters, digits, dots, dashes and underscores, and is no \
                 node id"
            )));
        }
        let lifetime = between(validity.from, validity.until);
        if lifetime > LONGEST_OWNER_LIFETIME + CLOCK_SKEW {
            let days = LONGEST_OWNER_LIFETIME.as_secs() / 86_400;
            return Err(PkiError::Useless(format!(
                "an owner's certificate is good for {days} days at the most"
            )));
        }
        self.issue(key, serial, validity, |params| {
            params.distinguished_name.push(DnType::OrganizationName, OWNER);
            params.distinguished_name.push(DnType::CommonName, name);
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        })
    }

    fn issue(
        &self,
        key: &PublicKey,
        serial: Serial,
        validity: Validity,
        name: impl FnOnce(&mut CertificateParams),
    ) -> Result<Issued, PkiError> {
        // Nothing outlives who signed it.
        let validity = Validity { until: validity.until.min(self.anchor.validity.until), ..validity };
        let mut params = parameters(serial, validity)?;
        params.distinguished_name = DistinguishedName::new();
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        name(&mut params);
        let mut authority = CertificateParams::default();
        authority.distinguished_name = authority_name(self.anchor.cluster);
        let certificate = params.signed_by(&Subject(*key), &Issuer::from_params(&authority, &self.key))?;
        Ok(Issued { certificate: certificate.der().to_vec(), serial, validity })
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("anchor", &self.anchor).finish_non_exhaustive()
    }
}

/// A key to be certified, of which only the public half is known.
struct Subject(PublicKey);

impl PublicKeyData for Subject {
    fn der_bytes(&self) -> &[u8] {
        &self.0.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ED25519
    }
}

/// Whether this can be the name of an owner.
pub(super) fn is_owner_name(name: &str) -> bool {
    (1..=63).contains(&name.len())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        && name.parse::<NodeId>().is_err()
}

/// The key in a certificate, if it is one of Ed25519.
pub(super) fn ed25519_key(certificate: &X509Certificate<'_>) -> Option<PublicKey> {
    let info = certificate.public_key();
    let of_ed25519 = info.algorithm.algorithm == x509_parser::oid_registry::OID_SIG_ED25519;
    let whole = info.subject_public_key.unused_bits == 0;
    PublicKey::from_slice(&info.subject_public_key.data).ok().filter(|_| of_ed25519 && whole)
}

/// Whether the key signed the certificate.
pub(super) fn is_signed_by(certificate: &X509Certificate<'_>, key: &PublicKey) -> bool {
    certificate.signature_algorithm.algorithm == x509_parser::oid_registry::OID_SIG_ED25519
        && ring::signature::UnparsedPublicKey::new(&ring::signature::ED25519, &key.0)
            .verify(certificate.tbs_certificate.as_ref(), &certificate.signature_value.data)
            .is_ok()
}

/// The one common name in a distinguished name.
pub(super) fn common_name<'a>(name: &'a x509_parser::x509::X509Name<'_>) -> Option<&'a str> {
    let mut names = name.iter_common_name();
    match (names.next(), names.next()) {
        (Some(name), None) => name.as_str().ok(),
        _ => None,
    }
}

fn authority_name(cluster: Uuid) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, format!("{AUTHORITY}{cluster}"));
    name
}

fn key_pair(pkcs8: &[u8]) -> Result<KeyPair, PkiError> {
    let key = KeyPair::try_from(pkcs8).map_err(|_| PkiError::NoKey)?;
    if key.algorithm() == &PKCS_ED25519 { Ok(key) } else { Err(PkiError::NoKey) }
}

pub(super) fn parameters(serial: Serial, validity: Validity) -> Result<CertificateParams, PkiError> {
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let year_9999 = 253_402_300_799;
    let moment = |at: Timestamp| {
        let seconds = u64::try_from(at.timestamp()).ok().filter(|seconds| *seconds <= year_9999);
        seconds.map(|seconds| epoch + Duration::from_secs(seconds))
    };
    let (Some(not_before), Some(not_after)) = (moment(validity.from), moment(validity.until)) else {
        return Err(PkiError::Useless("it would be good before 1970 or after 9999".to_owned()));
    };
    if not_after <= not_before {
        return Err(PkiError::Useless("it would end before it begins".to_owned()));
    }
    let mut params = CertificateParams::default();
    (params.not_before, params.not_after) = (not_before, not_after);
    params.serial_number = Some(SerialNumber::from_slice(&serial.0));
    Ok(params)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier as _;
    use rustls::pki_types::{CertificateDer, ServerName, UnixTime};

    use super::*;
    use crate::curator::node::tests::at;

    /// An Ed25519 key that is told from others by one number, in PKCS#8 (RFC 8410).
    pub(crate) fn pkcs8(number: u8) -> Vec<u8> {
        let mut der = hex::decode("302e020100300506032b657004220420").unwrap();
        der.extend([number; 32]);
        der
    }

    /// The public half of that key.
    pub(crate) fn public(number: u8) -> PublicKey {
        PublicKey::from_slice(key_pair(&pkcs8(number)).unwrap().der_bytes()).unwrap()
    }

    pub(crate) fn serial(number: u8) -> Serial {
        Serial::new([number; 16])
    }

    /// From second 0 to second 1000.
    pub(crate) fn validity() -> Validity {
        Validity { from: at(0), until: at(1000) }
    }

    pub(crate) fn authority(number: u8) -> Authority {
        let long = Validity { from: at(-1000), until: at(1_000_000) };
        Authority::create(Uuid::from_bytes([number; 16]), &pkcs8(number), serial(number), long).unwrap()
    }

    fn server_verdict(authority: &Authority, certificate: &[u8], name: &str) -> Result<(), rustls::Error> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from(authority.anchor().certificate.clone())).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
        let now = UnixTime::since_unix_epoch(Duration::from_secs(at(1).timestamp().try_into().unwrap()));
        let certificate = CertificateDer::from(certificate.to_vec());
        let name = ServerName::try_from(name.to_owned()).unwrap();
        verifier.verify_server_cert(&certificate, &[], &name, &[], now).map(drop)
    }

    #[test]
    fn authority_survives_keeping() {
        let made = authority(1);
        let kept = Authority::load(&made.anchor().certificate, made.pkcs8()).unwrap();
        assert_eq!(kept.anchor(), made.anchor());
        assert_eq!(kept.anchor().cluster, Uuid::from_bytes([1; 16]));
        assert_eq!(kept.anchor().validity, Validity { from: at(-1000), until: at(1_000_000) });
        // What it signs before and after is the same: nothing but the arguments counts.
        let issue = |authority: &Authority| authority.issue_node(&public(7), serial(3), validity()).unwrap();
        assert_eq!(issue(&kept), issue(&made));
    }

    #[test]
    fn key_and_certificate_of_two_authorities_are_refused() {
        let (one, other) = (authority(1), authority(2));
        let error = Authority::load(&one.anchor().certificate, other.pkcs8()).unwrap_err();
        assert!(matches!(error, PkiError::OtherKey(_)), "{error}");
        assert!(matches!(Authority::load(&one.anchor().certificate, b"secret"), Err(PkiError::NoKey)));
        let ecdsa = KeyPair::generate().unwrap();
        assert!(matches!(
            Authority::load(&one.anchor().certificate, &ecdsa.serialize_der()),
            Err(PkiError::NoKey)
        ));
    }

    #[test]
    fn what_is_no_authority_is_no_anchor() {
        let authority = authority(1);
        let leaf = authority.issue_node(&public(7), serial(3), validity()).unwrap().certificate;
        let mut longer = authority.anchor().certificate.clone();
        longer.push(0);
        let mut broken = authority.anchor().certificate.clone();
        *broken.last_mut().unwrap() ^= 1;
        for (der, said) in [
            (leaf, "may sign no others"),
            (longer, "stands behind"),
            (broken, "did not sign itself"),
            (vec![], "no X.509"),
        ] {
            let error = Anchor::parse(&der).unwrap_err().to_string();
            assert!(error.contains(said), "{said}: {error}");
        }
    }

    #[test]
    fn tls_clients_take_a_node_by_its_id_and_by_no_other_name() {
        let authority = authority(1);
        let node = authority.issue_node(&public(7), serial(3), validity()).unwrap().certificate;
        let name = NodeId::of(&public(7)).to_string();
        assert_eq!(server_verdict(&authority, &node, &name), Ok(()));
        assert!(server_verdict(&authority, &node, "example.com").is_err());
        assert!(server_verdict(&authority, &node, &NodeId::of(&public(8)).to_string()).is_err());
        assert!(server_verdict(&self::authority(2), &node, &name).is_err(), "of another cluster");
        let owner = authority.issue_owner("kim", &public(7), serial(3), validity()).unwrap().certificate;
        assert!(server_verdict(&authority, &owner, &name).is_err(), "an owner serves nothing");
    }

    #[test]
    fn certificate_says_what_it_was_issued_for() {
        let authority = authority(1);
        let issued = authority.issue_node(&public(7), serial(3), validity()).unwrap();
        let (_, parsed) = X509Certificate::from_der(&issued.certificate).unwrap();
        assert_eq!(Validity::of(&parsed), Some(validity()));
        assert_eq!(Serial::from_certificate(parsed.raw_serial()), Some(serial(3)));
        assert_eq!(ed25519_key(&parsed), Some(public(7)));
        assert!(is_signed_by(&parsed, &authority.anchor().key) && !is_signed_by(&parsed, &public(7)));
    }

    #[test]
    fn certificate_ends_no_later_than_its_authority() {
        let late = Validity { from: at(0), until: at(2_000_000) };
        let issued = authority(1).issue_node(&public(7), serial(3), late).unwrap();
        assert_eq!(issued.validity.until, at(1_000_000));
    }

    #[test]
    fn certificate_that_nobody_could_use_is_not_issued() {
        let authority = authority(1);
        let ends_first = Validity { from: at(1), until: at(1) };
        assert!(matches!(authority.issue_node(&public(7), serial(3), ends_first), Err(PkiError::Useless(_))));
        let ancient = Validity { from: Timestamp::MIN_UTC, until: at(1) };
        assert!(matches!(authority.issue_node(&public(7), serial(3), ancient), Err(PkiError::Useless(_))));
        let long_name = "k".repeat(64);
        let node_name = NodeId::of(&public(7)).to_string();
        for name in ["", "a b", "kim@example", "kim\n", &long_name, &node_name] {
            let error = authority.issue_owner(name, &public(7), serial(3), validity()).unwrap_err();
            assert!(error.to_string().contains("names no owner"), "{name:?}: {error}");
        }
        let long = Validity::starting(at(0), LONGEST_OWNER_LIFETIME + Duration::from_secs(1));
        assert!(matches!(
            authority.issue_owner("kim", &public(7), serial(3), long),
            Err(PkiError::Useless(_))
        ));
        let longest = Validity::starting(at(0), LONGEST_OWNER_LIFETIME);
        assert!(authority.issue_owner("kim", &public(7), serial(3), longest).is_ok());
    }

    #[test]
    fn end_of_time_is_no_panic() {
        let forever = Validity::starting(Timestamp::MAX_UTC, Duration::MAX);
        let made = Authority::create(Uuid::nil(), &pkcs8(1), serial(1), forever);
        assert!(matches!(made, Err(PkiError::Useless(_))));
    }

    #[test]
    fn renewal_is_due_when_a_third_of_the_time_is_left() {
        let validity = Validity { from: at(0), until: at(900) };
        for (second, expected) in [
            (-5, Renewal::NotBefore(at(600))),
            (0, Renewal::NotBefore(at(600))),
            (599, Renewal::NotBefore(at(600))),
            (600, Renewal::Due),
            (900, Renewal::Due),
            (901, Renewal::Expired),
        ] {
            assert_eq!(renewal(validity, at(second)), expected, "{second}");
        }
    }

    #[test]
    fn serial_number_reads_back_and_is_always_16_bytes_and_positive() {
        for random in [[0; 16], [0xff; 16], [0x80; 16]] {
            let serial = Serial::new(random);
            assert!((0x40..0x80).contains(&serial.0[0]));
            assert_eq!(serial.to_string().parse::<Serial>().unwrap(), serial);
        }
        let upper = serial(0x4a).to_string().to_uppercase();
        for wrong in ["", "00112233445566778899aabbccddeeff", &upper, "4a"] {
            assert!(wrong.parse::<Serial>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn secret_of_the_cluster_is_in_no_text() {
        let shown = format!("{:?}", authority(0x5a));
        assert!(!shown.contains(&"90, ".repeat(32)) && !shown.contains(&"5a".repeat(32)), "{shown}");
        assert!(shown.contains("cluster"));
    }
}
