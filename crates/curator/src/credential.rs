//! Issued certificates and revocations, as etcd stores them.
//!
//! The holder keeps the certificate itself. These records store whose it is and until when it is valid, so that an
//! owner sees who could act, and can revoke any of it. Both records of a certificate are deleted a week after it has
//! expired, or later ([`record_retention`](crate::record_retention)). The revocation of a node stays until the node is deleted, and that of an owner key stays for ever.
//!
//! A node has several certificates: its own, that of its curator and that of its etcd member. The record says which one
//! it is. Records of releases that did not write this are distinguished by their holder and their validity, because only
//! a certificate of an etcd member was longer valid than a node's. So a curator's certificate with a record that lost its
//! kind is taken for the node's. It is then in no list of revoked curators, and it ends a day after it was issued.

use std::fmt;

use curator_client::certificate::{CLOCK_SKEW, IssuedCertificate, Serial, Validity};
use curator_client::node_id::{NodeId, PublicKey};
use curator_client::pki::{NODE_LIFETIME, is_owner_name};
use etcd::key_space::{CERTIFICATES, KeyError, REVOKED_CERTIFICATES, REVOKED_NODES, REVOKED_OWNERS};
use etcd::record::{self, RecordError};
use model::time::{Timestamp, between, parse_timestamp};
use prost::Message as _;
use proto::curator::v1 as wire;

/// The subject of a certificate: a node or an owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CredentialHolder {
    /// A node, by its id.
    Node(NodeId),
    /// An owner, by name.
    Owner(String),
}

impl fmt::Display for CredentialHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(id) => write!(f, "node {id}"),
            Self::Owner(name) => write!(f, "owner {name}"),
        }
    }
}

/// What a certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CertificateKind {
    /// It identifies a node.
    Node,
    /// The curator on a consensus member shows it.
    Curator,
    /// The etcd member on a node shows it to the others.
    EtcdPeer {
        /// The number that etcd gave to the membership. 0: not recorded.
        member: u64,
    },
    /// It makes its holder an owner.
    Owner,
}

impl CertificateKind {
    /// The kind and the number of the etcd member, as records have them.
    const fn to_wire(self) -> (wire::CertificateKind, u64) {
        match self {
            Self::Node => (wire::CertificateKind::Node, 0),
            Self::Curator => (wire::CertificateKind::Curator, 0),
            Self::EtcdPeer { member } => (wire::CertificateKind::EtcdPeer, member),
            Self::Owner => (wire::CertificateKind::Owner, 0),
        }
    }

    /// The kind of a record. A record without a kind that this release knows has the kind that its holder and its
    /// validity permit. The error is a part of a sentence.
    fn from_wire(
        kind: wire::CertificateKind,
        member: u64,
        holder: &CredentialHolder,
        validity: Validity,
    ) -> Result<Self, String> {
        let is_node = matches!(holder, CredentialHolder::Node(_));
        match kind {
            wire::CertificateKind::Node if is_node => Ok(Self::Node),
            wire::CertificateKind::Curator if is_node => Ok(Self::Curator),
            wire::CertificateKind::EtcdPeer if is_node => Ok(Self::EtcdPeer { member }),
            wire::CertificateKind::Owner | wire::CertificateKind::Unspecified if !is_node => Ok(Self::Owner),
            wire::CertificateKind::Unspecified => {
                let lifetime = between(validity.not_before, validity.not_after);
                let is_longer_than_a_nodes = lifetime > NODE_LIFETIME + 2 * CLOCK_SKEW;
                Ok(if is_longer_than_a_nodes { Self::EtcdPeer { member: 0 } } else { Self::Node })
            }
            other => Err(format!("its kind is {}, and its holder is {holder}", other.as_str_name())),
        }
    }
}

/// A certificate that was issued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Credential {
    /// Serial number of the certificate.
    pub(crate) serial: Serial,
    /// The node or owner that it was issued to.
    pub(crate) holder: CredentialHolder,
    /// The key it certifies.
    pub(crate) key: PublicKey,
    /// From when until when it is valid.
    pub(crate) validity: Validity,
    /// What it is for.
    pub(crate) kind: CertificateKind,
}

impl Credential {
    /// The record of a certificate that was just issued.
    #[must_use]
    pub(crate) fn from_issued(
        issued: &IssuedCertificate,
        holder: CredentialHolder,
        key: PublicKey,
        kind: CertificateKind,
    ) -> Self {
        Self { serial: issued.serial, holder, key, validity: issued.validity, kind }
    }

    /// The etcd key of the record.
    pub(crate) fn etcd_key(serial: Serial) -> Result<String, KeyError> {
        CERTIFICATES.key(serial)
    }

    /// The credential as the API shows it to owners.
    #[must_use]
    pub(crate) fn to_wire(&self, revoked: bool) -> wire::Credential {
        let holder = match &self.holder {
            CredentialHolder::Node(id) => wire::credential::Holder::NodeId(id.to_string()),
            CredentialHolder::Owner(name) => wire::credential::Holder::Owner(name.clone()),
        };
        let (kind, member_id) = self.kind.to_wire();
        wire::Credential {
            serial: self.serial.to_string(),
            public_key: self.key.0.to_vec(),
            not_before_ms: self.validity.not_before.timestamp_millis(),
            not_after_ms: self.validity.not_after.timestamp_millis(),
            revoked,
            holder: Some(holder),
            kind: kind.into(),
            member_id,
        }
    }

    /// Encodes the record for etcd.
    #[must_use]
    pub(crate) fn encode(&self) -> Vec<u8> {
        let credential = Some(self.to_wire(false));
        wire::CertificateRecord { format: record::FORMAT, credential }.encode_to_vec()
    }

    /// Decodes the record that is stored under `key`.
    pub(crate) fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let fault = |fault: String| RecordError::new(key, fault);
        let record = record::decode(key, bytes, |record: &wire::CertificateRecord| record.format)?;
        let kept = record.credential.unwrap_or_default();
        let serial = parse_serial(key, CERTIFICATES.id_of(key))?;
        if kept.serial != serial.to_string() {
            return Err(fault("it is that of another certificate".to_owned()));
        }
        let kind = kept.kind();
        let holder = match kept.holder {
            Some(wire::credential::Holder::NodeId(id)) => {
                CredentialHolder::Node(id.parse().map_err(|_| fault("its node id is invalid".to_owned()))?)
            }
            Some(wire::credential::Holder::Owner(name)) if is_owner_name(&name) => {
                CredentialHolder::Owner(name)
            }
            _ => return Err(fault("it names no holder".to_owned())),
        };
        let validity = Validity {
            not_before: parse_timestamp("not_before", kept.not_before_ms).map_err(fault)?,
            not_after: parse_timestamp("not_after", kept.not_after_ms).map_err(fault)?,
        };
        let kind = CertificateKind::from_wire(kind, kept.member_id, &holder, validity).map_err(fault)?;
        let key = PublicKey::from_slice(&kept.public_key).map_err(fault)?;
        Ok(Self { serial, holder, key, validity, kind })
    }
}

/// Most certificates that a node has of one kind, of those that have not ended; of an etcd member, for one membership.
///
/// The lists of revoked certificates have bounds: a statement has 4,096 of curators, and etcd stores no record beyond
/// 1.5 MiB, which bounds the list of peers. Without this limit, the key of a consensus member would be enough to request
/// so many that its own revocation fits into no list. A curator needs two a day, a membership needs one, and a node
/// two a month: a node with a full disk would leave a record in etcd with each attempt to renew its own.
const MAX_CERTIFICATES: usize = 64;

/// A node has so many certificates of one kind that it gets no further one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no certificate was issued: {0} has {max} of this kind that have not ended, and needs one. If somebody else has its \
     key, revoke its credentials. If it loses what it gets, mend its disk. A consensus member gets others after its role \
     was removed and added again, and a node gets another one for its key when its own has ended",
    max = MAX_CERTIFICATES
)]
pub(crate) struct TooManyCertificates(pub(crate) NodeId);

/// Checks that a node may get another certificate of this kind. `credentials` are the certificates that were issued.
pub(crate) fn check_certificate_count<'c>(
    credentials: impl IntoIterator<Item = &'c Credential>,
    node: NodeId,
    kind: CertificateKind,
    now: Timestamp,
) -> Result<(), TooManyCertificates> {
    let holder = CredentialHolder::Node(node);
    let counts = |credential: &&Credential| {
        credential.kind == kind && credential.holder == holder && !credential.validity.has_ended(now)
    };
    if credentials.into_iter().filter(counts).count() < MAX_CERTIFICATES {
        Ok(())
    } else {
        Err(TooManyCertificates(node))
    }
}

/// A certificate, a node or an owner key whose certificates are rejected before they expire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Revocation {
    /// One certificate, and when it expires.
    Certificate(Serial, Timestamp),
    /// All certificates of a node.
    Node(NodeId),
    /// All certificates for an owner key.
    Owner(PublicKey),
}

impl Revocation {
    /// The etcd key of the record.
    pub(crate) fn etcd_key(&self) -> Result<String, KeyError> {
        match self {
            Self::Certificate(serial, _) => REVOKED_CERTIFICATES.key(serial),
            Self::Node(node) => REVOKED_NODES.key(node),
            Self::Owner(key) => REVOKED_OWNERS.key(key),
        }
    }

    /// Encodes the record for etcd: revoked at `now`, by the caller named in `revoked_by`.
    #[must_use]
    pub(crate) fn encode(&self, revoked_by: &str, now: Timestamp) -> Vec<u8> {
        let (revoked_at_ms, revoked_by) = (now.timestamp_millis(), revoked_by.to_owned());
        match self {
            Self::Certificate(_, until) => wire::RevokedCertificateRecord {
                format: record::FORMAT,
                expires_at_ms: until.timestamp_millis(),
                revoked_at_ms,
                revoked_by,
            }
            .encode_to_vec(),
            Self::Node(_) => {
                wire::RevokedNodeRecord { format: record::FORMAT, revoked_at_ms, revoked_by }.encode_to_vec()
            }
            Self::Owner(_) => {
                wire::RevokedOwnerRecord { format: record::FORMAT, revoked_at_ms, revoked_by }.encode_to_vec()
            }
        }
    }

    /// Decodes the record that is stored under `key`.
    pub(crate) fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        if REVOKED_NODES.id_of(key).is_ok() {
            record::decode(key, bytes, |record: &wire::RevokedNodeRecord| record.format)?;
            return parse_node_id(key).map(Self::Node);
        }
        if REVOKED_OWNERS.id_of(key).is_ok() {
            record::decode(key, bytes, |record: &wire::RevokedOwnerRecord| record.format)?;
            let fault = || RecordError::new(key, "it names no key".to_owned());
            return Self::owner_from_key(key).map(Self::Owner).ok_or_else(fault);
        }
        let serial = parse_serial(key, REVOKED_CERTIFICATES.id_of(key))?;
        let record = record::decode(key, bytes, |record: &wire::RevokedCertificateRecord| record.format)?;
        let until =
            parse_timestamp("until", record.expires_at_ms).map_err(|fault| RecordError::new(key, fault))?;
        Ok(Self::Certificate(serial, until))
    }

    /// The serial number in an etcd key of a revoked certificate, whatever its value; `None` for other keys.
    #[must_use]
    pub(crate) fn serial_from_key(key: &str) -> Option<Serial> {
        REVOKED_CERTIFICATES.id_of(key).ok()?.parse().ok()
    }

    /// The node id in an etcd key of a revoked node, whatever its value; `None` for other keys.
    #[must_use]
    pub(crate) fn node_from_key(key: &str) -> Option<NodeId> {
        parse_node_id(key).ok()
    }

    /// The owner key in an etcd key of a revoked owner key, whatever its value; `None` for other keys.
    #[must_use]
    pub(crate) fn owner_from_key(key: &str) -> Option<PublicKey> {
        let bytes = hex::decode(REVOKED_OWNERS.id_of(key).ok()?).ok()?;
        PublicKey::from_slice(&bytes).ok()
    }
}

fn parse_serial<E: fmt::Display>(key: &str, id: Result<&str, E>) -> Result<Serial, RecordError> {
    let id = id.map_err(|error| RecordError::new(key, error.to_string()))?;
    id.parse()
        .map_err(|error: curator_client::certificate::InvalidSerial| RecordError::new(key, error.to_string()))
}

fn parse_node_id(key: &str) -> Result<NodeId, RecordError> {
    let id = REVOKED_NODES.id_of(key).map_err(|error| RecordError::new(key, error.to_string()))?;
    id.parse()
        .map_err(|error: curator_client::node_id::InvalidNodeId| RecordError::new(key, error.to_string()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use curator_client::pki::{AUTHORITY_LIFETIME, MAX_OWNER_LIFETIME};
    use curator_client::testing::{at, key, node_id};
    use model::time::after;

    use super::*;

    fn credential(holder: CredentialHolder) -> Credential {
        let kind = match holder {
            CredentialHolder::Node(_) => CertificateKind::Node,
            CredentialHolder::Owner(_) => CertificateKind::Owner,
        };
        let validity = Validity { not_before: at(1), not_after: at(100) };
        Credential { serial: Serial::new([3; 16]), holder, key: key(1), validity, kind }
    }

    /// The kind that is read from a record which has this kind and this number of a member.
    fn read_kind(credential: &Credential, kind: i32, member_id: u64) -> Result<CertificateKind, RecordError> {
        let stored = wire::Credential { kind, member_id, ..credential.to_wire(false) };
        let record = wire::CertificateRecord { format: record::FORMAT, credential: Some(stored) };
        let place = Credential::etcd_key(credential.serial).unwrap();
        Credential::decode(&place, &record.encode_to_vec()).map(|credential| credential.kind)
    }

    #[test]
    fn kind_is_read_back_and_found_for_records_without_one() {
        let (node, owner) = (CredentialHolder::Node(node_id(1)), CredentialHolder::Owner("kim".to_owned()));
        for (holder, kind) in [
            (&node, CertificateKind::Node),
            (&node, CertificateKind::Curator),
            (&node, CertificateKind::EtcdPeer { member: 0 }),
            (&node, CertificateKind::EtcdPeer { member: u64::MAX }),
            (&owner, CertificateKind::Owner),
        ] {
            let credential = Credential { kind, ..credential(holder.clone()) };
            let place = Credential::etcd_key(credential.serial).unwrap();
            assert_eq!(Credential::decode(&place, &credential.encode()).unwrap(), credential);
        }
        // A release without kinds wrote none of the fields. A number that a later release may use counts as none.
        let node_lifetime = NODE_LIFETIME + 2 * CLOCK_SKEW;
        let peer = CertificateKind::EtcdPeer { member: 0 };
        for (holder, lifetime, expected) in [
            (&node, Duration::from_hours(24), CertificateKind::Node),
            (&node, node_lifetime, CertificateKind::Node),
            (&node, node_lifetime + Duration::from_secs(1), peer),
            (&node, AUTHORITY_LIFETIME, peer),
            (&owner, MAX_OWNER_LIFETIME, CertificateKind::Owner),
            (&owner, AUTHORITY_LIFETIME, CertificateKind::Owner),
        ] {
            let validity = Validity { not_before: at(1), not_after: after(at(1), lifetime) };
            let credential = Credential { validity, ..credential(holder.clone()) };
            for kind in [0, 1_000] {
                assert_eq!(read_kind(&credential, kind, 0), Ok(expected), "{holder} {lifetime:?} {kind}");
            }
        }
        for (holder, kind) in [
            (&node, wire::CertificateKind::Owner),
            (&owner, wire::CertificateKind::Node),
            (&owner, wire::CertificateKind::Curator),
            (&owner, wire::CertificateKind::EtcdPeer),
        ] {
            let error = read_kind(&credential(holder.clone()), kind.into(), 0).unwrap_err().to_string();
            assert!(error.contains("its kind is") && error.contains(&holder.to_string()), "{error}");
        }
    }

    #[test]
    fn node_gets_a_bounded_number_of_certificates_of_each_kind() {
        let (curator, peer) = (CertificateKind::Curator, CertificateKind::EtcdPeer { member: 7 });
        let holder = || CredentialHolder::Node(node_id(1));
        let issued = |kind, count| vec![Credential { kind, ..credential(holder()) }; count];
        let (full, refused) = (MAX_CERTIFICATES, Err(TooManyCertificates(node_id(1))));
        for (what, credentials, kind, second, expected) in [
            ("none", Vec::new(), curator, 1, Ok(())),
            ("one fewer", issued(curator, full - 1), curator, 1, Ok(())),
            ("as many", issued(curator, full), curator, 1, refused),
            ("more, of a release without the limit", issued(curator, full + 9), curator, 1, refused),
            ("they end now", issued(curator, full), curator, 100, refused),
            ("they have ended", issued(curator, full), curator, 101, Ok(())),
            ("of another kind", issued(CertificateKind::Node, full), curator, 1, Ok(())),
            ("of the node", issued(CertificateKind::Node, full), CertificateKind::Node, 1, refused),
            ("for one membership", issued(peer, full), peer, 1, refused),
            (
                "for another membership",
                issued(CertificateKind::EtcdPeer { member: 6 }, full),
                peer,
                1,
                Ok(()),
            ),
        ] {
            assert_eq!(
                check_certificate_count(&credentials, node_id(1), kind, at(second)),
                expected,
                "{what}"
            );
            let other = check_certificate_count(&credentials, node_id(2), kind, at(second));
            assert_eq!(other, Ok(()), "another node: {what}");
        }
        let text = TooManyCertificates(node_id(1)).to_string();
        assert!(text.contains(&node_id(1).to_string()) && text.contains("64 of this kind"), "{text}");
    }

    #[test]
    fn credential_reads_back_as_it_was_stored() {
        for holder in [CredentialHolder::Node(node_id(1)), CredentialHolder::Owner("kim".to_owned())] {
            let credential = credential(holder);
            let place = Credential::etcd_key(credential.serial).unwrap();
            assert_eq!(Credential::decode(&place, &credential.encode()).unwrap(), credential);
            let elsewhere = Credential::etcd_key(Serial::new([4; 16])).unwrap();
            let error = Credential::decode(&elsewhere, &credential.encode()).unwrap_err().to_string();
            assert!(error.contains("another certificate"), "{error}");
        }
        let nobodys = credential(CredentialHolder::Owner("../kim".to_owned()));
        let place = Credential::etcd_key(nobodys.serial).unwrap();
        let error = Credential::decode(&place, &nobodys.encode()).unwrap_err().to_string();
        assert!(error.contains("names no holder"), "{error}");
    }

    #[test]
    fn revocation_reads_back_as_it_was_stored() {
        for revocation in [
            Revocation::Certificate(Serial::new([3; 16]), at(100)),
            Revocation::Node(node_id(2)),
            Revocation::Owner(key(2)),
        ] {
            let place = revocation.etcd_key().unwrap();
            let stored = revocation.encode("owner kim", at(5));
            assert_eq!(Revocation::decode(&place, &stored).unwrap(), revocation);
            assert!(Revocation::decode(&place, &[]).is_err(), "an empty value is no record");
        }
        let place = Revocation::Node(node_id(2)).etcd_key().unwrap();
        assert_eq!(Revocation::node_from_key(&place), Some(node_id(2)));
        assert_eq!((Revocation::serial_from_key(&place), Revocation::owner_from_key(&place)), (None, None));
        let place = Revocation::Owner(key(2)).etcd_key().unwrap();
        assert_eq!(
            (Revocation::owner_from_key(&place), Revocation::node_from_key(&place)),
            (Some(key(2)), None)
        );
    }
}
