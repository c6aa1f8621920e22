//! What is kept of certificates: those that were issued, and those that are refused.
//!
//! A certificate itself is kept by whoever has it. What is kept here says whose it is and until when, so that an owner
//! sees who could act, and can end any of it. Both records of a certificate go once it has ended by itself; that a
//! node's are refused stays until the node is deleted, and that an owner's key was removed stays for ever.

use std::fmt;

use prost::Message as _;

use crate::curator::node_id::{NodeId, PublicKey};
use crate::curator::pki::{Issued, Serial, Validity, is_owner_name};
use crate::etcd::key_space::{CERTIFICATES, KeyError, REVOKED_CERTIFICATES, REVOKED_NODES, REVOKED_OWNERS};
use crate::etcd::record::{self, RecordError, moment};
use crate::model::time::Timestamp;
use crate::proto::curator::v1 as wire;

/// Whose a certificate is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A node's.
    Node(NodeId),
    /// An owner's, by name.
    Owner(String),
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(id) => write!(f, "node {id}"),
            Self::Owner(name) => write!(f, "owner {name}"),
        }
    }
}

/// A certificate that was issued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credential {
    /// Its number.
    pub serial: Serial,
    /// Whose it is.
    pub holder: Holder,
    /// The key it certifies.
    pub key: PublicKey,
    /// From when until when it is good.
    pub validity: Validity,
}

impl Credential {
    /// What is to be kept of a certificate that was just issued.
    #[must_use]
    pub fn of(issued: &Issued, holder: Holder, key: PublicKey) -> Self {
        Self { serial: issued.serial, holder, key, validity: issued.validity }
    }

    /// Its key in etcd.
    pub fn etcd_key(serial: Serial) -> Result<String, KeyError> {
        CERTIFICATES.key(serial)
    }

    /// As owners see it.
    #[must_use]
    pub fn to_wire(&self, revoked: bool) -> wire::Credential {
        let holder = match &self.holder {
            Holder::Node(id) => wire::credential::Holder::NodeId(id.to_string()),
            Holder::Owner(name) => wire::credential::Holder::Owner(name.clone()),
        };
        wire::Credential {
            serial: self.serial.to_string(),
            public_key: self.key.0.to_vec(),
            not_before_ms: self.validity.from.timestamp_millis(),
            not_after_ms: self.validity.until.timestamp_millis(),
            revoked,
            holder: Some(holder),
        }
    }

    /// As it is stored.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let credential = Some(self.to_wire(false));
        wire::CertificateRecord { format: record::FORMAT, credential }.encode_to_vec()
    }

    /// Reads what is stored under `key`.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let fault = |fault: String| RecordError::new(key, fault);
        let record = record::decode(key, bytes, |record: &wire::CertificateRecord| record.format)?;
        let kept = record.credential.unwrap_or_default();
        let serial = serial_in(key, CERTIFICATES.id(key))?;
        if kept.serial != serial.to_string() {
            return Err(fault("it is that of another certificate".to_owned()));
        }
        let holder = match kept.holder {
            Some(wire::credential::Holder::NodeId(id)) => {
                Holder::Node(id.parse().map_err(|_| fault("its node is none".to_owned()))?)
            }
            Some(wire::credential::Holder::Owner(name)) if is_owner_name(&name) => Holder::Owner(name),
            _ => return Err(fault("it does not say whose it is".to_owned())),
        };
        Ok(Self {
            serial,
            holder,
            key: PublicKey::from_slice(&kept.public_key).map_err(fault)?,
            validity: Validity {
                from: moment("not_before", kept.not_before_ms).map_err(fault)?,
                until: moment("not_after", kept.not_after_ms).map_err(fault)?,
            },
        })
    }
}

/// Something that is refused before it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Revocation {
    /// One certificate, and when it ends by itself.
    Certificate(Serial, Timestamp),
    /// All certificates of a node.
    Node(NodeId),
    /// All certificates for an owner's key.
    Owner(PublicKey),
}

impl Revocation {
    /// Where it stands in etcd.
    pub fn etcd_key(&self) -> Result<String, KeyError> {
        match self {
            Self::Certificate(serial, _) => REVOKED_CERTIFICATES.key(serial),
            Self::Node(node) => REVOKED_NODES.key(node),
            Self::Owner(key) => REVOKED_OWNERS.key(key),
        }
    }

    /// As it is stored: refused since `now`, by whom.
    #[must_use]
    pub fn encode(&self, revoked_by: &str, now: Timestamp) -> Vec<u8> {
        let (revoked_at_ms, revoked_by) = (now.timestamp_millis(), revoked_by.to_owned());
        match self {
            Self::Certificate(_, until) => wire::RevokedCertificateRecord {
                format: record::FORMAT,
                until_ms: until.timestamp_millis(),
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

    /// Reads what is stored under `key`.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        if REVOKED_NODES.id(key).is_ok() {
            record::decode(key, bytes, |record: &wire::RevokedNodeRecord| record.format)?;
            return node_in(key).map(Self::Node);
        }
        if REVOKED_OWNERS.id(key).is_ok() {
            record::decode(key, bytes, |record: &wire::RevokedOwnerRecord| record.format)?;
            let fault = || RecordError::new(key, "it names no key".to_owned());
            return Self::owner_of(key).map(Self::Owner).ok_or_else(fault);
        }
        let serial = serial_in(key, REVOKED_CERTIFICATES.id(key))?;
        let record = record::decode(key, bytes, |record: &wire::RevokedCertificateRecord| record.format)?;
        let until = moment("until", record.until_ms).map_err(|fault| RecordError::new(key, fault))?;
        Ok(Self::Certificate(serial, until))
    }

    /// What a key stands for, whatever its value.
    #[must_use]
    pub fn serial_of(key: &str) -> Option<Serial> {
        REVOKED_CERTIFICATES.id(key).ok()?.parse().ok()
    }

    /// The node that a key stands for, whatever its value.
    #[must_use]
    pub fn node_of(key: &str) -> Option<NodeId> {
        node_in(key).ok()
    }

    /// The owner's key that a key of etcd stands for, whatever its value.
    #[must_use]
    pub fn owner_of(key: &str) -> Option<PublicKey> {
        let bytes = hex::decode(REVOKED_OWNERS.id(key).ok()?).ok()?;
        PublicKey::from_slice(&bytes).ok()
    }
}

fn serial_in<E: fmt::Display>(key: &str, id: Result<&str, E>) -> Result<Serial, RecordError> {
    let id = id.map_err(|error| RecordError::new(key, error.to_string()))?;
    id.parse().map_err(|error: crate::curator::pki::NoSerial| RecordError::new(key, error.to_string()))
}

fn node_in(key: &str) -> Result<NodeId, RecordError> {
    let id = REVOKED_NODES.id(key).map_err(|error| RecordError::new(key, error.to_string()))?;
    id.parse().map_err(|error: crate::curator::node_id::NoNodeId| RecordError::new(key, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curator::node::tests::at;
    use crate::curator::node_id::tests::{key, node_id};

    fn credential(holder: Holder) -> Credential {
        let validity = Validity { from: at(1), until: at(100) };
        Credential { serial: Serial::new([3; 16]), holder, key: key(1), validity }
    }

    #[test]
    fn credential_reads_back_as_it_was_stored() {
        for holder in [Holder::Node(node_id(1)), Holder::Owner("kim".to_owned())] {
            let credential = credential(holder);
            let place = Credential::etcd_key(credential.serial).unwrap();
            assert_eq!(Credential::decode(&place, &credential.encode()).unwrap(), credential);
            let elsewhere = Credential::etcd_key(Serial::new([4; 16])).unwrap();
            let error = Credential::decode(&elsewhere, &credential.encode()).unwrap_err().to_string();
            assert!(error.contains("another certificate"), "{error}");
        }
        let nobodys = credential(Holder::Owner("../kim".to_owned()));
        let place = Credential::etcd_key(nobodys.serial).unwrap();
        let error = Credential::decode(&place, &nobodys.encode()).unwrap_err().to_string();
        assert!(error.contains("whose it is"), "{error}");
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
        assert_eq!(Revocation::node_of(&place), Some(node_id(2)));
        assert_eq!((Revocation::serial_of(&place), Revocation::owner_of(&place)), (None, None));
        let place = Revocation::Owner(key(2)).etcd_key().unwrap();
        assert_eq!((Revocation::owner_of(&place), Revocation::node_of(&place)), (Some(key(2)), None));
    }
}
