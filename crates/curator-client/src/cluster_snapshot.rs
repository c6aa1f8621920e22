//! Cluster snapshots: all records at one etcd revision, for backup and restore.
//!
//! A snapshot consists of records, not of etcd's own files. Restoring one needs neither the same release of etcd nor
//! any of etcd's tools. It also decides record by record what continues and what does not, because an etcd member that
//! is gone must not come back with its record. All records are read at one revision, so a snapshot never shows one
//! record as it was before a change and another one as it was after that change.
//!
//! A holder of a snapshot controls the cluster: the authority's key is in it. `Debug` shows none of the values.

use std::collections::BTreeMap;
use std::fmt;

use etcd::client::Listing;
use etcd::key_space::{KeyError, LEADER, NODES, REVOKED_CERTIFICATES, REVOKED_NODES};
use etcd::record::RecordError;
use model::time::{Timestamp, parse_timestamp};
use prost::Message as _;
use proto::curator::v1 as wire;
use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use uuid::Uuid;

use crate::cluster::{self, Cluster};
use crate::node::Node;
use crate::node_id::NodeId;
use crate::pki::Authority;

/// The snapshot format that this release writes and reads.
const FORMAT: u32 = 1;
/// The largest encoded snapshot, in bytes: enough for thousands of nodes with all their certificates.
pub const MAX_SNAPSHOT_BYTES: usize = 64 << 20;

/// All records of a cluster at one etcd revision.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterSnapshot {
    /// Id of the cluster.
    pub cluster: Uuid,
    /// Name of the cluster, as its record has it.
    pub name: String,
    /// How often the cluster had been restored from a snapshot.
    pub epoch: u64,
    /// The etcd revision at which all records were read.
    pub revision: i64,
    /// Wall-clock time of the snapshot.
    pub taken_at: Timestamp,
    /// Every record by its etcd key, except election candidates, which are bound to leases.
    pub records: BTreeMap<String, Vec<u8>>,
}

impl fmt::Debug for ClusterSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterSnapshot")
            .field("cluster", &self.cluster)
            .field("epoch", &self.epoch)
            .field("revision", &self.revision)
            .field("records", &self.records.len())
            .finish_non_exhaustive()
    }
}

/// Why a snapshot cannot be taken or used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClusterSnapshotError {
    /// A record cannot be decoded.
    #[error("the snapshot cannot be used: {0}")]
    Record(#[from] RecordError),
    /// An etcd key cannot be built.
    #[error("the snapshot cannot be used: {0}")]
    Key(#[from] KeyError),
    /// It is incomplete, or contradicts itself.
    #[error("the snapshot cannot be used: {0}; take another one, or restore an older one")]
    Invalid(String),
    /// A newer release wrote it.
    #[error("the snapshot has format {0}, and this release understands {FORMAT}: update the role server")]
    NewerFormat(u32),
    /// Its encoded size exceeds [`MAX_SNAPSHOT_BYTES`].
    #[error("the records of the cluster make a snapshot of {0} bytes; {MAX_SNAPSHOT_BYTES} is the maximum")]
    TooLarge(usize),
}

/// SHA-256 of an encoded snapshot, by which it is identified.
#[must_use]
pub fn snapshot_digest(encoded: &[u8]) -> [u8; SHA256_OUTPUT_LEN] {
    let mut known_by = [0; SHA256_OUTPUT_LEN];
    known_by.copy_from_slice(digest(&SHA256, encoded).as_ref());
    known_by
}

impl ClusterSnapshot {
    /// Builds a snapshot from records that were listed at one revision.
    pub fn from_listing(listing: Listing, now: Timestamp) -> Result<Self, ClusterSnapshotError> {
        let records: BTreeMap<String, Vec<u8>> = listing
            .records
            .into_iter()
            .filter(|record| !LEADER.range().contains(&record.key))
            .map(|record| (record.key, record.value))
            .collect();
        let (cluster, _) = cluster_and_authority(&records)?;
        let (name, epoch) = (cluster.name, cluster.epoch);
        Ok(Self { cluster: cluster.id, name, epoch, revision: listing.revision, taken_at: now, records })
    }

    /// Encodes the snapshot for transfer and storage.
    pub fn encode(&self) -> Result<Vec<u8>, ClusterSnapshotError> {
        let records = self
            .records
            .iter()
            .map(|(key, value)| wire::SnapshotRecord { key: key.clone(), value: value.clone() });
        let message = wire::Snapshot {
            format: FORMAT,
            cluster_id: self.cluster.to_string(),
            name: self.name.clone(),
            epoch: self.epoch,
            revision: self.revision,
            taken_at_ms: self.taken_at.timestamp_millis(),
            records: records.collect(),
        };
        match message.encoded_len() {
            size if size > MAX_SNAPSHOT_BYTES => Err(ClusterSnapshotError::TooLarge(size)),
            _ => Ok(message.encode_to_vec()),
        }
    }

    /// Decodes a snapshot and checks that a cluster can be restored from it: it has the cluster, the authority of that
    /// very cluster, and nodes that can be decoded.
    pub fn decode(encoded: &[u8]) -> Result<Self, ClusterSnapshotError> {
        let broken = |fault: &str| ClusterSnapshotError::Invalid(fault.to_owned());
        if encoded.len() > MAX_SNAPSHOT_BYTES {
            return Err(ClusterSnapshotError::TooLarge(encoded.len()));
        }
        let message = wire::Snapshot::decode(encoded)
            .map_err(|error| ClusterSnapshotError::Invalid(error.to_string()))?;
        match message.format {
            FORMAT => {}
            0 => return Err(broken("it has no format number, so it is not a snapshot")),
            newer => return Err(ClusterSnapshotError::NewerFormat(newer)),
        }
        let taken_at =
            parse_timestamp("taken_at", message.taken_at_ms).map_err(ClusterSnapshotError::Invalid)?;
        let count = message.records.len();
        let records: BTreeMap<String, Vec<u8>> =
            message.records.into_iter().map(|record| (record.key, record.value)).collect();
        if records.len() != count {
            return Err(broken("it has a key twice"));
        }
        let (cluster, authority) = cluster_and_authority(&records)?;
        if cluster.id.to_string() != message.cluster_id || cluster.epoch != message.epoch {
            return Err(broken("it names another cluster than its records do"));
        }
        if authority.anchor().cluster != cluster.id {
            return Err(broken("its authority is that of another cluster"));
        }
        let snapshot = Self {
            cluster: cluster.id,
            name: cluster.name,
            epoch: cluster.epoch,
            revision: message.revision,
            taken_at,
            records,
        };
        snapshot.nodes()?;
        Ok(snapshot)
    }

    /// The cluster and its authority.
    pub fn cluster_and_authority(&self) -> Result<(Cluster, Authority), ClusterSnapshotError> {
        cluster_and_authority(&self.records)
    }

    /// Its nodes, in order of their ids.
    pub fn nodes(&self) -> Result<Vec<Node>, ClusterSnapshotError> {
        let of_nodes = NODES.range();
        let nodes = self.records.iter().filter(|(key, _)| of_nodes.contains(key));
        Ok(nodes.map(|(key, value)| Node::decode(key, value)).collect::<Result<_, _>>()?)
    }

    /// Revocations of certificates and of nodes that it has and an older snapshot of the cluster lacks, by their etcd keys.
    ///
    /// Those of owners' keys are left out: the cluster in the older snapshot may accept only a key that was replaced since.
    #[must_use]
    pub fn revocations_since(&self, older: &Self) -> BTreeMap<String, Vec<u8>> {
        let ranges = [REVOKED_CERTIFICATES.range(), REVOKED_NODES.range()];
        let revoked = self.records.iter().filter(|(key, _)| {
            ranges.iter().any(|range| range.contains(key)) && !older.records.contains_key(*key)
        });
        revoked.map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    /// The nodes that were consensus members.
    pub fn consensus_members(&self) -> Result<Vec<NodeId>, ClusterSnapshotError> {
        let nodes = self.nodes()?.into_iter();
        Ok(nodes.filter(|node| node.roles.consensus_member.is_some()).map(|node| node.id).collect())
    }
}

fn cluster_and_authority(
    records: &BTreeMap<String, Vec<u8>>,
) -> Result<(Cluster, Authority), ClusterSnapshotError> {
    let one = |key: &str| {
        records.get(key).ok_or_else(|| ClusterSnapshotError::Invalid(format!("it has no record {key}")))
    };
    let (cluster_key, authority_key) = (cluster::cluster_record_key()?, cluster::authority_record_key()?);
    let cluster = Cluster::decode(&cluster_key, one(&cluster_key)?)?;
    Ok((cluster, cluster::decode_authority(&authority_key, one(&authority_key)?)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{at, authority, node_id, snapshot};

    #[test]
    fn revocations_since_an_older_snapshot_are_those_of_certificates_and_nodes() {
        let (older, mut newer) = (snapshot(), snapshot());
        let keys =
            ["revoked-certificates/a", "revoked-nodes/b", "revoked-owners/c", "certificates/a", "later/d"];
        for key in keys {
            newer.records.insert(format!("/shepherd/curator/{key}"), key.into());
        }
        let found: Vec<String> = newer.revocations_since(&older).into_keys().collect();
        assert_eq!(found, ["/shepherd/curator/revoked-certificates/a", "/shepherd/curator/revoked-nodes/b"]);
        assert!(newer.revocations_since(&newer).is_empty());
        assert!(older.revocations_since(&newer).is_empty());
    }

    #[test]
    fn snapshot_round_trips_and_its_digest_depends_on_its_bytes() {
        let taken = snapshot();
        assert_eq!((taken.epoch, taken.revision, taken.name.as_str()), (2, 40, "ams"));
        assert_eq!(taken.consensus_members().unwrap(), [node_id(1), node_id(2)]);
        assert!(!taken.records.keys().any(|key| LEADER.range().contains(key)), "a lease is over by then");
        let encoded = taken.encode().unwrap();
        assert_eq!(ClusterSnapshot::decode(&encoded).unwrap(), taken);
        assert_eq!(taken.encode().unwrap(), encoded, "the same records make the same bytes");
        let mut changed = encoded.clone();
        changed.push(0);
        assert_ne!(snapshot_digest(&changed), snapshot_digest(&encoded));
    }

    #[test]
    fn unrestorable_snapshot_is_rejected_with_a_reason() {
        let without = |key: String| {
            let mut snapshot = snapshot();
            snapshot.records.remove(&key);
            ClusterSnapshot::decode(&snapshot.encode().unwrap()).unwrap_err().to_string()
        };
        assert!(
            without(cluster::cluster_record_key().unwrap())
                .contains("no record /shepherd/curator/global/cluster")
        );
        assert!(without(cluster::authority_record_key().unwrap()).contains("no record"));
        let mut other = snapshot();
        let stored = cluster::encode_authority(&authority(2));
        other.records.insert(cluster::authority_record_key().unwrap(), stored);
        let error = ClusterSnapshot::decode(&other.encode().unwrap()).unwrap_err().to_string();
        assert!(error.contains("that of another cluster"), "{error}");
        let mut damaged = snapshot();
        damaged.records.insert(Node::etcd_key(&node_id(3)).unwrap(), vec![0xff]);
        let error = ClusterSnapshot::decode(&damaged.encode().unwrap()).unwrap_err().to_string();
        assert!(error.contains(&node_id(3).to_string()), "{error}");
        let encoded = snapshot().encode().unwrap();
        assert!(ClusterSnapshot::decode(&encoded[..encoded.len() - 1]).is_err());
        assert!(ClusterSnapshot::decode(&[]).unwrap_err().to_string().contains("no format"));
        let newer = wire::Snapshot { format: FORMAT + 1, ..Default::default() }.encode_to_vec();
        assert_eq!(
            ClusterSnapshot::decode(&newer).unwrap_err(),
            ClusterSnapshotError::NewerFormat(FORMAT + 1)
        );
    }

    #[test]
    fn no_snapshot_without_a_cluster() {
        let error =
            ClusterSnapshot::from_listing(Listing { records: Vec::new(), revision: 40 }, at(7)).unwrap_err();
        assert!(error.to_string().contains("no record"), "{error}");
    }

    #[test]
    fn debug_output_does_not_leak_secrets() {
        let secret = hex::encode(authority(1).pkcs8());
        let shown = format!("{:?}", snapshot());
        assert!(!shown.contains(&secret[40..]) && shown.contains("records: 5"), "{shown}");
    }
}
