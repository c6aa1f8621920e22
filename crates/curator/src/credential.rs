//! Issued certificates and revocations, as etcd stores them.
//!
//! The holder keeps the certificate itself. These records store whose it is and until when it is valid, so that an
//! owner sees who could act, and can revoke any of it. Both records of a certificate are deleted once it has expired.
//! The revocation of a node stays until the node is deleted, and that of an owner key stays for ever.

use std::fmt;

use curator_client::certificate::{IssuedCertificate, Serial, Validity};
use curator_client::node_id::{NodeId, PublicKey};
use curator_client::pki::is_owner_name;
use etcd::key_space::{CERTIFICATES, KeyError, REVOKED_CERTIFICATES, REVOKED_NODES, REVOKED_OWNERS};
use etcd::record::{self, RecordError};
use model::time::{Timestamp, parse_timestamp};
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
}

impl Credential {
    /// The record of a certificate that was just issued.
    #[must_use]
    pub(crate) fn from_issued(issued: &IssuedCertificate, holder: CredentialHolder, key: PublicKey) -> Self {
        Self { serial: issued.serial, holder, key, validity: issued.validity }
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
        wire::Credential {
            serial: self.serial.to_string(),
            public_key: self.key.0.to_vec(),
            not_before_ms: self.validity.not_before.timestamp_millis(),
            not_after_ms: self.validity.not_after.timestamp_millis(),
            revoked,
            holder: Some(holder),
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
        let holder = match kept.holder {
            Some(wire::credential::Holder::NodeId(id)) => {
                CredentialHolder::Node(id.parse().map_err(|_| fault("its node id is invalid".to_owned()))?)
            }
            Some(wire::credential::Holder::Owner(name)) if is_owner_name(&name) => {
                CredentialHolder::Owner(name)
            }
            _ => return Err(fault("it names no holder".to_owned())),
        };
        Ok(Self {
            serial,
            holder,
            key: PublicKey::from_slice(&kept.public_key).map_err(fault)?,
            validity: Validity {
                not_before: parse_timestamp("not_before", kept.not_before_ms).map_err(fault)?,
                not_after: parse_timestamp("not_after", kept.not_after_ms).map_err(fault)?,
            },
        })
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
    use curator_client::testing::{at, key, node_id};

    use super::*;

    fn credential(holder: CredentialHolder) -> Credential {
        let validity = Validity { not_before: at(1), not_after: at(100) };
        Credential { serial: Serial::new([3; 16]), holder, key: key(1), validity }
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
