//! Singleton records: the cluster and its certificate authority.
//!
//! Both are written in the transaction that bootstraps the cluster, before any curator runs. After that only the owner
//! keys of the cluster change: a key is added beside the existing ones, and is removed once another one is known to
//! work. A removed key is revoked for ever, in the same transaction that changes the cluster's record, and can never be
//! added again.
//!
//! The authority's key is the secret of the cluster: a reader of its record can make itself a node or an owner. No
//! response but a snapshot contains it, and `Debug` shows the public half alone.

use etcd::key_space::{GLOBAL, KeyError};
use etcd::record::{self, RecordError};
use model::time::{Timestamp, parse_timestamp};
use prost::Message as _;
use proto::curator::v1 as wire;
use uuid::Uuid;

use crate::node_id::PublicKey;
use crate::pki::Authority;

/// Most owner keys of a cluster. The limit keeps the list short enough for a person to review.
const MAX_OWNER_KEYS: usize = 16;
/// The longest name of a cluster, in bytes.
const MAX_NAME_BYTES: usize = 63;

/// A cluster as it was bootstrapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Its id, which its authority's certificate names.
    pub id: Uuid,
    /// The name that its owner gave it.
    pub name: String,
    /// When it was bootstrapped.
    pub created_at: Timestamp,
    /// Keys that may claim an owner certificate.
    pub owner_keys: Vec<PublicKey>,
    /// How often it was restored from a snapshot.
    pub epoch: u64,
}

/// Why an owner key is not added or removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OwnerKeyError {
    /// The key was an owner key once, and was removed.
    #[error("key {0} was removed and cannot be added again: create another one")]
    Removed(PublicKey),
    /// The cluster has as many owner keys as it may have.
    #[error("{MAX_OWNER_KEYS} keys are owner keys already, which is the maximum: remove one first")]
    TooMany,
    /// The call was made with this very key, so nothing shows that another one works.
    #[error(
        "key {0} is the one that this call was made with: claim a certificate with another owner's key, and remove this \
         one with that"
    )]
    InUse(PublicKey),
    /// Without this key nobody could give orders any more.
    #[error("key {0} is the last owner key: add another one first")]
    Last(PublicKey),
}

impl OwnerKeyError {
    /// The gRPC code of the response.
    #[must_use]
    pub const fn code(&self) -> tonic::Code {
        match self {
            Self::TooMany => tonic::Code::ResourceExhausted,
            Self::Removed(_) | Self::InUse(_) | Self::Last(_) => tonic::Code::FailedPrecondition,
        }
    }
}

/// The etcd key of the cluster's record.
pub fn cluster_record_key() -> Result<String, KeyError> {
    GLOBAL.key("cluster")
}

/// The etcd key of the authority's record.
pub fn authority_record_key() -> Result<String, KeyError> {
    GLOBAL.key("authority")
}

/// Checks that this can be the name of a cluster; the error is part of a sentence.
pub fn validate_name(name: &str) -> Result<(), String> {
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control) {
        let shown: String = name.chars().take(100).collect();
        return Err(format!(
            "{shown:?} is not a valid name of a cluster: a name has 1 to {MAX_NAME_BYTES} bytes, all printable"
        ));
    }
    Ok(())
}

impl Cluster {
    /// The cluster with one more owner key; `None` if it is an owner key already. `removed` states whether it was an
    /// owner key once and was removed.
    pub fn with_owner_key(&self, key: PublicKey, removed: bool) -> Result<Option<Self>, OwnerKeyError> {
        if removed {
            return Err(OwnerKeyError::Removed(key));
        }
        if self.owner_keys.contains(&key) {
            return Ok(None);
        }
        if self.owner_keys.len() >= MAX_OWNER_KEYS {
            return Err(OwnerKeyError::TooMany);
        }
        let mut more = self.clone();
        more.owner_keys.push(key);
        Ok(Some(more))
    }

    /// The cluster without this owner key, ordered by the holder of the key `by`.
    pub fn without_owner_key(&self, key: PublicKey, by: PublicKey) -> Result<Self, OwnerKeyError> {
        if key == by {
            return Err(OwnerKeyError::InUse(key));
        }
        let mut fewer = self.clone();
        fewer.owner_keys.retain(|known| *known != key);
        if fewer.owner_keys.is_empty() {
            return Err(OwnerKeyError::Last(key));
        }
        Ok(fewer)
    }

    /// Encodes the record for etcd.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        wire::ClusterRecord {
            format: record::FORMAT,
            cluster_id: self.id.to_string(),
            name: self.name.clone(),
            created_at_ms: self.created_at.timestamp_millis(),
            owner_keys: self.owner_keys.iter().map(|key| key.0.to_vec()).collect(),
            epoch: self.epoch,
        }
        .encode_to_vec()
    }

    /// Decodes the record that is stored under `key`.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let fault = |fault: String| RecordError::new(key, fault);
        let record = record::decode(key, bytes, |record: &wire::ClusterRecord| record.format)?;
        let owner_keys = record.owner_keys.iter().map(|key| PublicKey::from_slice(key));
        validate_name(&record.name).map_err(fault)?;
        Ok(Self {
            id: record.cluster_id.parse().map_err(|_| fault("its id is no UUID".to_owned()))?,
            created_at: parse_timestamp("created_at", record.created_at_ms).map_err(fault)?,
            owner_keys: owner_keys.collect::<Result<_, _>>().map_err(fault)?,
            epoch: record.epoch,
            name: record.name,
        })
    }
}

/// Encodes the authority for etcd. The bytes are secret.
#[must_use]
pub fn encode_authority(authority: &Authority) -> Vec<u8> {
    wire::AuthorityRecord {
        format: record::FORMAT,
        certificate: authority.anchor().certificate.clone(),
        private_key: authority.pkcs8().to_vec(),
        ..Default::default()
    }
    .encode_to_vec()
}

/// Decodes the authority that signs, which is stored under `key`. The error reveals nothing of it. The whole record is an
/// [`AuthorityRing`](crate::authority_ring::AuthorityRing).
pub fn decode_authority(key: &str, bytes: &[u8]) -> Result<Authority, RecordError> {
    let record = record::decode(key, bytes, |record: &wire::AuthorityRecord| record.format)?;
    Authority::load(&record.certificate, &record.private_key)
        .map_err(|error| RecordError::new(key, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{at, authority, key};

    fn cluster() -> Cluster {
        Cluster {
            id: Uuid::from_u128(7),
            name: "ams".to_owned(),
            created_at: at(5),
            owner_keys: vec![key(1), key(2)],
            epoch: 3,
        }
    }

    #[test]
    fn cluster_reads_back_as_it_was_stored() {
        let stored = cluster().encode();
        assert_eq!(Cluster::decode(&cluster_record_key().unwrap(), &stored).unwrap(), cluster());
        let odd = Cluster { name: String::new(), ..cluster() };
        let error = Cluster::decode("/a/b", &odd.encode()).unwrap_err().to_string();
        assert!(error.contains("/a/b") && error.contains("not a valid name of a cluster"), "{error}");
    }

    #[test]
    fn owner_key_is_added_and_removed_with_another_key() {
        let keys =
            |keys: &[u8]| Cluster { owner_keys: keys.iter().map(|&byte| key(byte)).collect(), ..cluster() };
        let two = keys(&[1, 2]);
        assert_eq!(two.with_owner_key(key(3), false), Ok(Some(keys(&[1, 2, 3]))));
        assert_eq!(two.with_owner_key(key(2), false), Ok(None));
        // The format decides, and not what the record contains.
        for byte in [2, 3] {
            assert_eq!(two.with_owner_key(key(byte), true), Err(OwnerKeyError::Removed(key(byte))));
        }
        let full: Vec<u8> = (0..16).collect();
        assert_eq!(keys(&full).with_owner_key(key(77), false), Err(OwnerKeyError::TooMany));
        assert_eq!(keys(&full).with_owner_key(key(7), false), Ok(None));

        assert_eq!(two.without_owner_key(key(1), key(2)), Ok(keys(&[2])));
        assert_eq!(two.without_owner_key(key(9), key(2)), Ok(two.clone()), "it never was one");
        assert_eq!(two.without_owner_key(key(2), key(2)), Err(OwnerKeyError::InUse(key(2))));
        // The caller has a certificate, but no key that may claim one.
        assert_eq!(keys(&[1]).without_owner_key(key(1), key(7)), Err(OwnerKeyError::Last(key(1))));
    }

    #[test]
    fn authority_signs_the_same_once_it_was_stored() {
        let stored = encode_authority(&authority(1));
        let read = decode_authority(&authority_record_key().unwrap(), &stored).unwrap();
        assert_eq!(read.anchor(), authority(1).anchor());
        assert_eq!(read.pkcs8(), authority(1).pkcs8());
    }

    #[test]
    fn authority_error_does_not_leak_its_key() {
        let other = wire::AuthorityRecord {
            format: record::FORMAT,
            certificate: authority(1).anchor().certificate.clone(),
            private_key: authority(2).pkcs8().to_vec(),
            ..Default::default()
        };
        let error = decode_authority("/a", &other.encode_to_vec()).unwrap_err();
        assert!(error.to_string().contains("one of the two is of another cluster"), "{error}");
        let secret = hex::encode(authority(2).pkcs8());
        assert!(!format!("{error} {error:?}").contains(&secret[40..]));
    }

    #[test]
    fn name_is_one_printable_line() {
        for (name, good) in
            [("ams-1", true), ("Rack 7, row 2", true), ("", false), ("a\nb", false), (&"x".repeat(64), false)]
        {
            assert_eq!(validate_name(name).is_ok(), good, "{name:?}");
        }
    }
}
