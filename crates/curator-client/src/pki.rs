//! The cluster's certificate authority: node, owner and etcd peer certificates. Those of curators are in
//! `pki_curator.rs`.
//!
//! One Ed25519 key, created when a cluster is bootstrapped, signs the certificates of all its nodes, owners and etcd
//! members. It leaves the cluster only inside a snapshot. Everybody knows the certificate that the authority signed for
//! itself. A node's certificate has the node id as its common name and as its only DNS name, and is valid for both ends
//! of a connection. An owner's certificate is valid for the client's end alone and has no DNS name. So neither is ever
//! taken for the other ([`peer_identity`](crate::peer_identity)).
//!
//! A certificate is for a key that its holder generated and never shows. A repeated request with the same key gets
//! another certificate for the same node, so a lost response loses nothing.
//!
//! Certificates expire. A stolen one is then worthless by itself, and a revocation needs to be stored no longer than
//! that. A node requests a new certificate when a third of the lifetime is left. A node that was down for longer joins
//! again with its key alone. Members of etcd that were all down for longer need an order of their shepherd
//! ([`peer_renewal`](crate::peer_renewal)).
//!
//! Time, serial numbers and keys come from the caller.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use model::time::{Timestamp, between};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ED25519, PublicKeyData, SanType, SerialNumber, SignatureAlgorithm,
};
use uuid::Uuid;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::certificate::{
    CLOCK_SKEW, IssuedCertificate, Serial, Validity, common_name, ed25519_key, is_signed_by,
};
use crate::node_id::{NodeId, PublicKey};

/// Lifetime of an authority.
pub const AUTHORITY_LIFETIME: Duration = Duration::from_hours(100 * 365 * 24);
/// Lifetime of a node's certificate.
pub const NODE_LIFETIME: Duration = Duration::from_hours(30 * 24);
/// Lifetime of the certificate that a curator shows.
pub const CURATOR_LIFETIME: Duration = Duration::from_hours(24);
/// Lifetime of an etcd member's peer certificate. Releases that renewed none issued certificates that last as long as the
/// authority.
pub const PEER_LIFETIME: Duration = Duration::from_hours(30 * 24);
/// The longest lifetime of an owner's certificate.
pub const MAX_OWNER_LIFETIME: Duration = Duration::from_hours(30 * 24);
/// The common name in the peer certificate of every etcd member.
pub const ETCD_PEER_NAME: &str = "etcd peer";

/// The organisation in an owner's certificate.
pub(super) const OWNER_ORGANIZATION: &str = "owner";
/// The organisation in a curator's certificate.
pub(super) const CURATOR_ORGANIZATION: &str = "curator";
/// Prefix of an authority's common name; the cluster's UUID follows.
const AUTHORITY_NAME_PREFIX: &str = "cluster ";

/// Why an authority cannot be created or loaded, or did not sign.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    /// The key is no Ed25519 key in PKCS#8.
    #[error("the authority of the cluster has no usable key: it is no Ed25519 key in PKCS#8")]
    InvalidKey,
    /// The certificate is not that of an authority of ours.
    #[error("this is no certificate of a cluster's authority: {0}")]
    InvalidAuthority(String),
    /// Key and certificate belong to different authorities.
    #[error(
        "the key does not belong to the certificate of cluster {0}: one of the two is of another cluster"
    )]
    KeyMismatch(Uuid),
    /// The request is invalid: nobody could use such a certificate.
    #[error("no certificate was issued: {0}")]
    InvalidRequest(String),
    /// The certificate could not be signed.
    #[error("no certificate could be signed: {0}")]
    Signing(#[from] rcgen::Error),
}

/// The public part of an authority: enough to verify what it signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustAnchor {
    /// The authority's self-signed certificate, DER.
    pub certificate: Vec<u8>,
    /// Id of the cluster.
    pub cluster: Uuid,
    /// Public key of the authority.
    pub key: PublicKey,
    /// Validity of the authority's certificate.
    pub validity: Validity,
}

impl TrustAnchor {
    /// Parses the certificate of an authority, which must be self-signed.
    pub fn parse(der: &[u8]) -> Result<Self, PkiError> {
        let refused = |reason: &str| PkiError::InvalidAuthority(reason.to_owned());
        let (rest, certificate) =
            X509Certificate::from_der(der).map_err(|_| refused("it is no X.509 certificate in DER"))?;
        if !rest.is_empty() {
            return Err(refused("there are bytes after its end"));
        }
        let key = ed25519_key(&certificate).ok_or_else(|| refused("its key is not of Ed25519"))?;
        let constraints = certificate.basic_constraints().ok().flatten();
        if !constraints.is_some_and(|constraints| constraints.value.ca) {
            return Err(refused("it is not the certificate of an authority"));
        }
        if certificate.issuer() != certificate.subject() || !is_signed_by(&certificate, &key) {
            return Err(refused("it did not sign itself"));
        }
        let cluster = common_name(certificate.subject())
            .and_then(|name| name.strip_prefix(AUTHORITY_NAME_PREFIX)?.parse().ok())
            .ok_or_else(|| refused("it names no cluster"))?;
        let validity =
            Validity::from_x509(&certificate).ok_or_else(|| refused("its time is out of range"))?;
        Ok(Self { certificate: der.to_vec(), cluster, key, validity })
    }

    /// SHA-256 of the certificate, by which nodes report the authority.
    #[must_use]
    pub fn fingerprint(&self) -> Vec<u8> {
        ring::digest::digest(&ring::digest::SHA256, &self.certificate).as_ref().to_vec()
    }
}

/// The authority of a cluster. `Debug` shows the public part alone.
pub struct Authority {
    anchor: TrustAnchor,
    key: KeyPair,
}

impl Authority {
    /// Creates the authority of a new cluster, from an Ed25519 key in PKCS#8 that was generated for it.
    pub fn create(cluster: Uuid, pkcs8: &[u8], serial: Serial, validity: Validity) -> Result<Self, PkiError> {
        let key = parse_key_pair(pkcs8)?;
        let mut params = certificate_params(serial, validity)?;
        params.distinguished_name = authority_name(cluster);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key)?;
        Ok(Self { anchor: TrustAnchor::parse(certificate.der())?, key })
    }

    /// Loads a stored authority; key and certificate must match.
    pub fn load(certificate: &[u8], pkcs8: &[u8]) -> Result<Self, PkiError> {
        let (anchor, key) = (TrustAnchor::parse(certificate)?, parse_key_pair(pkcs8)?);
        if key.der_bytes() != anchor.key.0 {
            return Err(PkiError::KeyMismatch(anchor.cluster));
        }
        Ok(Self { anchor, key })
    }

    /// The public part of the authority.
    #[must_use]
    pub const fn anchor(&self) -> &TrustAnchor {
        &self.anchor
    }

    /// The authority's key in PKCS#8, the secret of the cluster.
    #[must_use]
    pub fn pkcs8(&self) -> &[u8] {
        self.key.serialized_der()
    }

    /// The authority's key, which signs.
    pub(super) const fn signing_key(&self) -> &KeyPair {
        &self.key
    }

    /// Signs a certificate for the node with this key.
    pub fn issue_node_certificate(
        &self,
        key: &PublicKey,
        serial: Serial,
        validity: Validity,
    ) -> Result<IssuedCertificate, PkiError> {
        self.issue_for_node(key, serial, validity, None)
    }

    /// Signs a certificate with the names of the node with this key, for both ends of a connection.
    pub(super) fn issue_for_node(
        &self,
        key: &PublicKey,
        serial: Serial,
        validity: Validity,
        organization: Option<&str>,
    ) -> Result<IssuedCertificate, PkiError> {
        let name = NodeId::from_key(key).to_string();
        let dns = name.as_str().try_into().map_err(PkiError::Signing)?;
        self.sign_certificate(key, serial, validity, |params| {
            if let Some(organization) = organization {
                params.distinguished_name.push(DnType::OrganizationName, organization);
            }
            params.distinguished_name.push(DnType::CommonName, name);
            params.subject_alt_names = vec![SanType::DnsName(dns)];
            params.extended_key_usages =
                vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        })
    }

    /// Signs the peer certificate of an etcd member at this address.
    ///
    /// etcd requires that a peer's certificate has the common name [`ETCD_PEER_NAME`], and the authority gives that
    /// name to consensus members alone. So a node's own certificate, or an owner's, opens no member's port. Nor is this
    /// one accepted as a node's.
    pub fn issue_etcd_peer_certificate(
        &self,
        key: &PublicKey,
        address: IpAddr,
        serial: Serial,
        validity: Validity,
    ) -> Result<IssuedCertificate, PkiError> {
        self.sign_certificate(key, serial, validity, |params| {
            params.distinguished_name.push(DnType::CommonName, ETCD_PEER_NAME);
            params.subject_alt_names = vec![SanType::IpAddress(address)];
            params.extended_key_usages =
                vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        })
    }

    /// Signs an owner certificate for this key. `name` identifies the owner: 1 to 63 letters, digits, dots, dashes and
    /// underscores.
    pub fn issue_owner_certificate(
        &self,
        name: &str,
        key: &PublicKey,
        serial: Serial,
        validity: Validity,
    ) -> Result<IssuedCertificate, PkiError> {
        if !is_owner_name(name) {
            let name: String = name.chars().take(100).collect();
            return Err(PkiError::InvalidRequest(format!(
                "{name:?} names no owner: a name has 1 to 63 letters, digits, dots, dashes and underscores, and is no \
                 node id"
            )));
        }
        let lifetime = between(validity.not_before, validity.not_after);
        if lifetime > MAX_OWNER_LIFETIME + CLOCK_SKEW {
            let days = MAX_OWNER_LIFETIME.as_secs() / 86_400;
            return Err(PkiError::InvalidRequest(format!(
                "an owner's certificate is good for {days} days at the most"
            )));
        }
        self.sign_certificate(key, serial, validity, |params| {
            params.distinguished_name.push(DnType::OrganizationName, OWNER_ORGANIZATION);
            params.distinguished_name.push(DnType::CommonName, name);
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        })
    }

    /// Signs a certificate for this key. `name` adds the names and what it is good for.
    pub(super) fn sign_certificate(
        &self,
        key: &PublicKey,
        serial: Serial,
        validity: Validity,
        name: impl FnOnce(&mut CertificateParams),
    ) -> Result<IssuedCertificate, PkiError> {
        // No certificate outlives the authority that signed it.
        let validity =
            Validity { not_after: validity.not_after.min(self.anchor.validity.not_after), ..validity };
        let mut params = certificate_params(serial, validity)?;
        params.distinguished_name = DistinguishedName::new();
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        name(&mut params);
        let mut authority = CertificateParams::default();
        authority.distinguished_name = authority_name(self.anchor.cluster);
        let issuer = Issuer::from_params(&authority, self.signing_key());
        let certificate = params.signed_by(&SubjectKey(*key), &issuer)?;
        Ok(IssuedCertificate { certificate: certificate.der().to_vec(), serial, validity })
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("anchor", &self.anchor).finish_non_exhaustive()
    }
}

/// A key to certify, of which only the public half is known.
struct SubjectKey(PublicKey);

impl PublicKeyData for SubjectKey {
    fn der_bytes(&self) -> &[u8] {
        &self.0.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ED25519
    }
}

/// Whether this can be the name of an owner.
#[must_use]
pub fn is_owner_name(name: &str) -> bool {
    (1..=63).contains(&name.len())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        && name.parse::<NodeId>().is_err()
}

/// The name of the authority of a cluster.
pub(super) fn authority_name(cluster: Uuid) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, format!("{AUTHORITY_NAME_PREFIX}{cluster}"));
    name
}

fn parse_key_pair(pkcs8: &[u8]) -> Result<KeyPair, PkiError> {
    let key = KeyPair::try_from(pkcs8).map_err(|_| PkiError::InvalidKey)?;
    if key.algorithm() == &PKCS_ED25519 { Ok(key) } else { Err(PkiError::InvalidKey) }
}

/// Parameters of a certificate with this serial number and validity.
pub fn certificate_params(serial: Serial, validity: Validity) -> Result<CertificateParams, PkiError> {
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let year_9999 = 253_402_300_799;
    let moment = |at: Timestamp| {
        let seconds = u64::try_from(at.timestamp()).ok().filter(|seconds| *seconds <= year_9999);
        seconds.map(|seconds| epoch + Duration::from_secs(seconds))
    };
    let (Some(not_before), Some(not_after)) = (moment(validity.not_before), moment(validity.not_after))
    else {
        return Err(PkiError::InvalidRequest("it would be good before 1970 or after 9999".to_owned()));
    };
    if not_after <= not_before {
        return Err(PkiError::InvalidRequest("it would end before it begins".to_owned()));
    }
    let mut params = CertificateParams::default();
    (params.not_before, params.not_after) = (not_before, not_after);
    params.serial_number = Some(SerialNumber::from_slice(serial.as_bytes()));
    Ok(params)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier as _;
    use rustls::pki_types::{CertificateDer, ServerName, UnixTime};

    use super::*;
    use crate::testing::{at, authority, pkcs8, public, serial, validity};

    fn verify_server(authority: &Authority, certificate: &[u8], name: &str) -> Result<(), rustls::Error> {
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
    fn authority_round_trips() {
        let made = authority(1);
        let kept = Authority::load(&made.anchor().certificate, made.pkcs8()).unwrap();
        assert_eq!(kept.anchor(), made.anchor());
        assert_eq!(kept.anchor().cluster, Uuid::from_bytes([1; 16]));
        assert_eq!(kept.anchor().validity, Validity { not_before: at(-1000), not_after: at(1_000_000) });
        // The stored authority signs the same certificate: only the arguments count.
        let issue = |authority: &Authority| {
            authority.issue_node_certificate(&public(7), serial(3), validity()).unwrap()
        };
        assert_eq!(issue(&kept), issue(&made));
    }

    #[test]
    fn key_and_certificate_of_two_authorities_are_refused() {
        let (one, other) = (authority(1), authority(2));
        let error = Authority::load(&one.anchor().certificate, other.pkcs8()).unwrap_err();
        assert!(matches!(error, PkiError::KeyMismatch(_)), "{error}");
        assert!(matches!(Authority::load(&one.anchor().certificate, b"secret"), Err(PkiError::InvalidKey)));
        let ecdsa = KeyPair::generate().unwrap();
        assert!(matches!(
            Authority::load(&one.anchor().certificate, &ecdsa.serialize_der()),
            Err(PkiError::InvalidKey)
        ));
    }

    #[test]
    fn certificate_of_no_authority_is_no_trust_anchor() {
        let authority = authority(1);
        let leaf = authority.issue_node_certificate(&public(7), serial(3), validity()).unwrap().certificate;
        let mut longer = authority.anchor().certificate.clone();
        longer.push(0);
        let mut broken = authority.anchor().certificate.clone();
        *broken.last_mut().unwrap() ^= 1;
        for (der, text) in [
            (leaf, "not the certificate of an authority"),
            (longer, "bytes after its end"),
            (broken, "did not sign itself"),
            (vec![], "no X.509"),
        ] {
            let error = TrustAnchor::parse(&der).unwrap_err().to_string();
            assert!(error.contains(text), "{text}: {error}");
        }
    }

    #[test]
    fn tls_clients_accept_a_node_by_its_id_only() {
        let authority = authority(1);
        let node = authority.issue_node_certificate(&public(7), serial(3), validity()).unwrap().certificate;
        let name = NodeId::from_key(&public(7)).to_string();
        assert_eq!(verify_server(&authority, &node, &name), Ok(()));
        assert!(verify_server(&authority, &node, "example.com").is_err());
        assert!(verify_server(&authority, &node, &NodeId::from_key(&public(8)).to_string()).is_err());
        assert!(verify_server(&self::authority(2), &node, &name).is_err(), "of another cluster");
        let owner =
            authority.issue_owner_certificate("kim", &public(7), serial(3), validity()).unwrap().certificate;
        assert!(verify_server(&authority, &owner, &name).is_err(), "an owner serves nothing");
    }

    #[test]
    fn certificate_says_what_it_was_issued_for() {
        let authority = authority(1);
        let issued = authority.issue_node_certificate(&public(7), serial(3), validity()).unwrap();
        let (_, parsed) = X509Certificate::from_der(&issued.certificate).unwrap();
        assert_eq!(Validity::from_x509(&parsed), Some(validity()));
        assert_eq!(Serial::from_certificate(parsed.raw_serial()), Some(serial(3)));
        assert_eq!(ed25519_key(&parsed), Some(public(7)));
        assert!(is_signed_by(&parsed, &authority.anchor().key) && !is_signed_by(&parsed, &public(7)));
    }

    #[test]
    fn certificate_ends_no_later_than_its_authority() {
        let late = Validity { not_before: at(0), not_after: at(2_000_000) };
        let issued = authority(1).issue_node_certificate(&public(7), serial(3), late).unwrap();
        assert_eq!(issued.validity.not_after, at(1_000_000));
    }

    #[test]
    fn unusable_certificate_is_not_issued() {
        let authority = authority(1);
        let ends_first = Validity { not_before: at(1), not_after: at(1) };
        assert!(matches!(
            authority.issue_node_certificate(&public(7), serial(3), ends_first),
            Err(PkiError::InvalidRequest(_))
        ));
        let ancient = Validity { not_before: Timestamp::MIN_UTC, not_after: at(1) };
        assert!(matches!(
            authority.issue_node_certificate(&public(7), serial(3), ancient),
            Err(PkiError::InvalidRequest(_))
        ));
        let long_name = "k".repeat(64);
        let node_name = NodeId::from_key(&public(7)).to_string();
        for name in ["", "a b", "kim@example", "kim\n", &long_name, &node_name] {
            let error =
                authority.issue_owner_certificate(name, &public(7), serial(3), validity()).unwrap_err();
            assert!(error.to_string().contains("names no owner"), "{name:?}: {error}");
        }
        let long = Validity::starting(at(0), MAX_OWNER_LIFETIME + Duration::from_secs(1));
        assert!(matches!(
            authority.issue_owner_certificate("kim", &public(7), serial(3), long),
            Err(PkiError::InvalidRequest(_))
        ));
        let longest = Validity::starting(at(0), MAX_OWNER_LIFETIME);
        assert!(authority.issue_owner_certificate("kim", &public(7), serial(3), longest).is_ok());
    }

    #[test]
    fn out_of_range_time_does_not_panic() {
        let forever = Validity::starting(Timestamp::MAX_UTC, Duration::MAX);
        let made = Authority::create(Uuid::nil(), &pkcs8(1), serial(1), forever);
        assert!(matches!(made, Err(PkiError::InvalidRequest(_))));
    }

    #[test]
    fn debug_output_does_not_leak_the_authority_key() {
        let shown = format!("{:?}", authority(0x5a));
        assert!(!shown.contains(&"90, ".repeat(32)) && !shown.contains(&"5a".repeat(32)), "{shown}");
        assert!(shown.contains("cluster"));
    }
}
