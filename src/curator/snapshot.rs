//! A snapshot of a cluster: all its records as they were at one moment.
//!
//! It is made of records and not of etcd's own files: whoever restores it needs no etcd of the same release and no tool
//! of etcd's, and decides record by record what goes on and what does not, because a member of etcd that is gone must
//! not come back by being remembered. It is read at one revision, so it never shows one record as it was before a
//! change and another one as it was after it.
//!
//! Who holds a snapshot holds the cluster: the key of the authority is in it. `Debug` shows none of the values.

use std::collections::BTreeMap;
use std::fmt;

use prost::Message as _;
use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use uuid::Uuid;

use crate::curator::cluster::{self, Cluster};
use crate::curator::node::Node;
use crate::curator::node_id::NodeId;
use crate::curator::pki::Authority;
use crate::etcd::client::Listing;
use crate::etcd::key_space::{KeyError, LEADER, NODES};
use crate::etcd::record::{RecordError, moment};
use crate::model::time::Timestamp;
use crate::proto::curator::v1 as wire;

/// What this program understands of snapshots.
const FORMAT: u32 = 1;
/// The largest snapshot, encoded, in bytes: thousands of nodes with all their certificates.
pub const LIMIT: usize = 64 << 20;

/// All records of a cluster at one moment.
#[derive(Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The cluster as it was bootstrapped, or restored last.
    pub cluster: Uuid,
    /// Its name.
    pub name: String,
    /// How often it had been restored from a snapshot.
    pub epoch: u64,
    /// etcd's revision at that moment.
    pub revision: i64,
    /// When.
    pub taken_at: Timestamp,
    /// Every record by its key, but for candidates for leading, which are bound to leases.
    pub records: BTreeMap<String, Vec<u8>>,
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Snapshot")
            .field("cluster", &self.cluster)
            .field("epoch", &self.epoch)
            .field("revision", &self.revision)
            .field("records", &self.records.len())
            .finish_non_exhaustive()
    }
}

/// Why there is no snapshot, or none that can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// A record cannot be read.
    #[error("the snapshot cannot be used: {0}")]
    Record(#[from] RecordError),
    /// A key cannot be.
    #[error("the snapshot cannot be used: {0}")]
    Key(#[from] KeyError),
    /// It is not whole, or says what cannot be.
    #[error("the snapshot cannot be used: {0}; take another one, or restore an older one")]
    Broken(String),
    /// It is of a newer release.
    #[error("the snapshot has format {0}, and this release understands {FORMAT}: update the role server")]
    Newer(u32),
    /// It is too large.
    #[error("the records of the cluster make a snapshot of {0} bytes; {LIMIT} are the most")]
    TooLarge(usize),
}

/// What an encoded snapshot is known by.
#[must_use]
pub fn digest_of(encoded: &[u8]) -> [u8; SHA256_OUTPUT_LEN] {
    let mut known_by = [0; SHA256_OUTPUT_LEN];
    known_by.copy_from_slice(digest(&SHA256, encoded).as_ref());
    known_by
}

impl Snapshot {
    /// The snapshot that these records make, which were read at one moment.
    pub fn of(listing: Listing, now: Timestamp) -> Result<Self, SnapshotError> {
        let records: BTreeMap<String, Vec<u8>> = listing
            .records
            .into_iter()
            .filter(|record| !LEADER.range().contains(&record.key))
            .map(|record| (record.key, record.value))
            .collect();
        let (cluster, _) = what_there_is_one_of(&records)?;
        let (name, epoch) = (cluster.name, cluster.epoch);
        Ok(Self { cluster: cluster.id, name, epoch, revision: listing.revision, taken_at: now, records })
    }

    /// As it is sent and kept.
    pub fn encode(&self) -> Result<Vec<u8>, SnapshotError> {
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
            size if size > LIMIT => Err(SnapshotError::TooLarge(size)),
            _ => Ok(message.encode_to_vec()),
        }
    }

    /// Reads one, and whether it is one that a cluster can be restored from: it has the cluster, the authority of just
    /// that cluster, and nodes that can be read.
    pub fn decode(encoded: &[u8]) -> Result<Self, SnapshotError> {
        let broken = |fault: &str| SnapshotError::Broken(fault.to_owned());
        if encoded.len() > LIMIT {
            return Err(SnapshotError::TooLarge(encoded.len()));
        }
        let message =
            wire::Snapshot::decode(encoded).map_err(|error| SnapshotError::Broken(error.to_string()))?;
        match message.format {
            FORMAT => {}
            0 => return Err(broken("it says no format, so it is none")),
            newer => return Err(SnapshotError::Newer(newer)),
        }
        let taken_at = moment("taken_at", message.taken_at_ms).map_err(SnapshotError::Broken)?;
        let count = message.records.len();
        let records: BTreeMap<String, Vec<u8>> =
            message.records.into_iter().map(|record| (record.key, record.value)).collect();
        if records.len() != count {
            return Err(broken("it has a key twice"));
        }
        let (cluster, authority) = what_there_is_one_of(&records)?;
        if cluster.id.to_string() != message.cluster_id || cluster.epoch != message.epoch {
            return Err(broken("it says to be of another cluster than its records"));
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
    pub fn what_there_is_one_of(&self) -> Result<(Cluster, Authority), SnapshotError> {
        what_there_is_one_of(&self.records)
    }

    /// Its nodes, in order of their ids.
    pub fn nodes(&self) -> Result<Vec<Node>, SnapshotError> {
        let of_nodes = NODES.range();
        let nodes = self.records.iter().filter(|(key, _)| of_nodes.contains(key));
        Ok(nodes.map(|(key, value)| Node::decode(key, value)).collect::<Result<_, _>>()?)
    }

    /// The nodes that were consensus members.
    pub fn members(&self) -> Result<Vec<NodeId>, SnapshotError> {
        let nodes = self.nodes()?.into_iter();
        Ok(nodes.filter(|node| node.roles.consensus_member.is_some()).map(|node| node.id).collect())
    }
}

fn what_there_is_one_of(records: &BTreeMap<String, Vec<u8>>) -> Result<(Cluster, Authority), SnapshotError> {
    let one =
        |key: &str| records.get(key).ok_or_else(|| SnapshotError::Broken(format!("it has no record {key}")));
    let (cluster_key, authority_key) = (cluster::cluster_key()?, cluster::authority_key()?);
    let cluster = Cluster::decode(&cluster_key, one(&cluster_key)?)?;
    Ok((cluster, cluster::decode_authority(&authority_key, one(&authority_key)?)?))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::curator::node::tests::{at, member, up};
    use crate::curator::node_id::tests::{key, node_id};
    use crate::curator::pki::tests::authority;
    use crate::etcd::client::Record;

    /// A cluster of two members and a node without roles.
    pub(crate) fn records() -> Vec<(String, Vec<u8>)> {
        let cluster = Cluster {
            id: authority(1).anchor().cluster,
            name: "ams".to_owned(),
            created_at: at(5),
            owner_keys: vec![key(9)],
            epoch: 2,
        };
        let mut records = vec![
            (cluster::cluster_key().unwrap(), cluster.encode()),
            (cluster::authority_key().unwrap(), cluster::encode_authority(&authority(1))),
            (LEADER.key("32695").unwrap(), b"node".to_vec()),
        ];
        for node in [member(1), member(2), up(3)] {
            records.push((Node::etcd_key(&node.id).unwrap(), node.encode().unwrap()));
        }
        records
    }

    pub(crate) fn snapshot() -> Snapshot {
        Snapshot::of(listing(records()), at(7)).unwrap()
    }

    fn listing(records: Vec<(String, Vec<u8>)>) -> Listing {
        let record =
            |(key, value): (String, Vec<u8>)| Record { key, value, create_revision: 1, mod_revision: 1 };
        Listing { records: records.into_iter().map(record).collect(), revision: 40 }
    }

    #[test]
    fn snapshot_reads_back_as_it_was_taken_and_is_known_by_its_bytes() {
        let taken = snapshot();
        assert_eq!((taken.epoch, taken.revision, taken.name.as_str()), (2, 40, "ams"));
        assert_eq!(taken.members().unwrap(), [node_id(1), node_id(2)]);
        assert!(!taken.records.keys().any(|key| LEADER.range().contains(key)), "a lease is over by then");
        let encoded = taken.encode().unwrap();
        assert_eq!(Snapshot::decode(&encoded).unwrap(), taken);
        assert_eq!(taken.encode().unwrap(), encoded, "the same records make the same bytes");
        let mut changed = encoded.clone();
        changed.push(0);
        assert_ne!(digest_of(&changed), digest_of(&encoded));
    }

    #[test]
    fn what_no_cluster_can_be_restored_from_is_refused_in_words() {
        let without = |key: String| {
            let mut snapshot = snapshot();
            snapshot.records.remove(&key);
            Snapshot::decode(&snapshot.encode().unwrap()).unwrap_err().to_string()
        };
        assert!(
            without(cluster::cluster_key().unwrap()).contains("no record /shepherd/curator/global/cluster")
        );
        assert!(without(cluster::authority_key().unwrap()).contains("no record"));
        let mut other = snapshot();
        let stored = cluster::encode_authority(&authority(2));
        other.records.insert(cluster::authority_key().unwrap(), stored);
        let error = Snapshot::decode(&other.encode().unwrap()).unwrap_err().to_string();
        assert!(error.contains("that of another cluster"), "{error}");
        let mut damaged = snapshot();
        damaged.records.insert(Node::etcd_key(&node_id(3)).unwrap(), vec![0xff]);
        let error = Snapshot::decode(&damaged.encode().unwrap()).unwrap_err().to_string();
        assert!(error.contains(&node_id(3).to_string()), "{error}");
        let encoded = snapshot().encode().unwrap();
        assert!(Snapshot::decode(&encoded[..encoded.len() - 1]).is_err());
        assert!(Snapshot::decode(&[]).unwrap_err().to_string().contains("no format"));
        let newer = wire::Snapshot { format: FORMAT + 1, ..Default::default() }.encode_to_vec();
        assert_eq!(Snapshot::decode(&newer).unwrap_err(), SnapshotError::Newer(FORMAT + 1));
    }

    #[test]
    fn nothing_is_taken_where_there_is_no_cluster() {
        let error = Snapshot::of(listing(Vec::new()), at(7)).unwrap_err();
        assert!(error.to_string().contains("no record"), "{error}");
    }

    #[test]
    fn no_text_shows_a_secret_of_it() {
        let secret = hex::encode(authority(1).pkcs8());
        let shown = format!("{:?}", snapshot());
        assert!(!shown.contains(&secret[40..]) && shown.contains("records: 5"), "{shown}");
    }
}
