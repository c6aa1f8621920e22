//! Restoring a cluster from a snapshot, under a new epoch.
//!
//! The cluster is restored on one node with a fresh etcd.
//!
//! # Two clusters with one id
//!
//! The lost members may come back with their old disks. Most of them together are a working cluster of the same id,
//! with the same authority, known to nodes that are still alive. Two clusters with one identity would give two answers
//! to who belongs to it. So the restored one is distinguished by its *epoch*, one more than any epoch known so far:
//!
//! * etcd derives the ids of its cluster and of its members from the epoch, among other things
//!   (`--initial-cluster-token`). Members of different epochs reject each other's messages by these ids, and a node
//!   that bootstraps a later epoch never starts a data directory of an earlier one. So old and new members can never
//!   form one etcd, whatever addresses they have.
//! * The epoch is in the record of the cluster, which is written with the last transaction of the restore. The first
//!   leader signs it in a statement of the authority ([`statement`](curator_client::statement)). Every caller stores the
//!   highest epoch that it has received, durably, before it follows that epoch, and follows no curator of a lower one
//!   ([`leader_channel`](curator_client::leader_channel)). A caller that knows of the restored cluster never follows the
//!   old one again.
//! * A caller that has a statement believes no epoch without a signature. Consensus members could sign a false one,
//!   because they hold the authority's key; it gains them nothing that they do not have. A caller without a statement
//!   believes the epoch that a curator reports with the leader. A node of the cluster at the address of a curator could
//!   report one to it that does not exist. An epoch far beyond the highest known one is never accepted, so that epochs
//!   never run out.
//!
//! A node that got the new epoch neither from the restored cluster nor from a shepherd may follow old curators, where
//! most of them are alive. It follows the new ones as soon as one of the two sends it the epoch. Whatever old curators
//! ordered until then ends with that. What was written there is lost, like everything that was written after the
//! snapshot.
//!
//! # What is restored
//!
//! Everything but consensus: nodes, with their keys and their roles other than consensus member and Kubernetes
//! controller; tickets, with the uses so far; role declarations; certificates and revocations; and the authority. Of
//! Kubernetes: the settings, the authorities and keys, which are assigned to all nodes again, and what the snapshot
//! has of each node's allocation. The only consensus member is the node that restores; others get the role as in any
//! cluster. Election candidates are gone with their leases.
//!
//! An order to restore an older snapshot carries the revocations of certificates and nodes that a later snapshot has. They are
//! written as if they were in the older one, so that a certificate that was revoked stays revoked.
//!
//! # With an image of etcd
//!
//! The etcd may have been restored from an image, for the objects of Kubernetes in it. It has the records of before, too:
//! consensus members that are gone, an epoch that is over. So the curator's own records are deleted and written again from
//! the snapshot, as in an empty etcd, and nothing else is touched.
//!
//! # A crash in the middle
//!
//! The cluster's own record is written last, with the authority and the node that restores. As long as it is missing,
//! all records of the curator in etcd are deleted and written again. Nobody else can read or write in between, because
//! no curator runs before that.

use std::collections::BTreeMap;
use std::sync::Arc;

use curator_client::cluster::{self, Cluster};
use curator_client::cluster_snapshot::{ClusterSnapshot, ClusterSnapshotError};
use curator_client::node::Node;
use curator_client::node_status::NodeStatus;
use etcd::client::Client;
use etcd::key_space::{KUBERNETES_NODES, LEADER, NODES, ROOT};
use etcd::namespace;

use crate::bootstrap::BootstrapError;
use crate::credential::Revocation;
use crate::kubernetes::keys::{KubernetesKeys, keys_record_key};
use crate::kubernetes::node_allocation::NodeAllocation;

/// Most records in one transaction; etcd accepts 128 operations.
const MAX_RECORDS_PER_WRITE: usize = 100;
/// Most bytes in one transaction, unless it has a single record; etcd accepts 1.5 MiB.
const MAX_BYTES_PER_WRITE: usize = 512 << 10;

/// The source of a restored cluster.
#[derive(Clone, Debug)]
pub struct RestoreSource {
    /// All records of the cluster at one revision.
    pub snapshot: Arc<ClusterSnapshot>,
    /// The epoch of the restored cluster, higher than any before.
    pub epoch: u64,
    /// Whether the etcd was restored from an image. It has the records of before then, of a lower epoch.
    pub over_image: bool,
    /// Revocations of certificates and nodes of after the snapshot, by their etcd keys.
    pub revocations: BTreeMap<String, Vec<u8>>,
}

/// The records of the restored cluster. Its one consensus member is `own`.
fn restored_records(
    snapshot: &ClusterSnapshot,
    own: &Node,
    epoch: u64,
) -> Result<BTreeMap<String, Vec<u8>>, BootstrapError> {
    if snapshot.records.contains_key(&Revocation::Node(own.id).etcd_key()?) {
        // The revocation stays, and its curator would be the only one.
        return Err(BootstrapError::Rejected(format!(
            "the credentials of {} are revoked in the snapshot, so its curator could not lead. Restore the cluster on \
             another machine, or let this one make a new key",
            own.id
        )));
    }
    let (cluster_key, kubernetes_keys) = (cluster::cluster_record_key()?, keys_record_key()?);
    let mut records = BTreeMap::new();
    for (key, value) in &snapshot.records {
        let value = if LEADER.range().contains(key) {
            continue;
        } else if *key == cluster_key {
            Cluster { epoch, ..Cluster::decode(key, value)? }.encode()
        } else if *key == kubernetes_keys {
            KubernetesKeys::decode(key, value)?.after_restore().encode()
        } else if KUBERNETES_NODES.range().contains(key) {
            // The leader would delete this allocation as well, but until then its pod range would be taken.
            let node = NodeAllocation::node_from_key(key)?;
            if node != own.id && !snapshot.records.contains_key(&Node::etcd_key(&node)?) {
                continue;
            }
            // No assignment of an earlier generation is valid after the restore.
            NodeAllocation { assigned: None, ..NodeAllocation::decode(key, value)? }.encode()
        } else if NODES.range().contains(key) {
            without_consensus(Node::decode(key, value)?).encode()?
        } else {
            value.clone()
        };
        records.insert(key.clone(), value);
    }
    records.insert(Node::etcd_key(&own.id)?, own.encode()?);
    Ok(records)
}

/// The snapshot with revocations of after it. An order carries no other records.
fn add_revocations(
    snapshot: &ClusterSnapshot,
    revocations: &BTreeMap<String, Vec<u8>>,
) -> Result<ClusterSnapshot, BootstrapError> {
    let mut snapshot = snapshot.clone();
    for (key, value) in revocations {
        if matches!(Revocation::decode(key, value)?, Revocation::Owner(_)) {
            let text =
                format!("an order to restore it carries the record {key}, and may carry revocations alone");
            return Err(BootstrapError::Rejected(text));
        }
        snapshot.records.entry(key.clone()).or_insert_with(|| value.clone());
    }
    Ok(snapshot)
}

/// The node without the consensus role and what depends on it: the controller role and the curator's port.
fn without_consensus(mut node: Node) -> Node {
    if node.roles.consensus_member.take().is_some() {
        node.roles.kubernetes_controller = false;
        node.status = node.status.map(|status| NodeStatus { curator_port: None, ..status });
    }
    node
}

/// Writes the records of the restored cluster into this etcd, which has one member, or finds that this was done before.
pub(super) async fn restore_cluster(
    client: &Client,
    restoring: &RestoreSource,
    own: &Node,
) -> Result<(), BootstrapError> {
    let snapshot = &restoring.snapshot;
    let cluster_key = cluster::cluster_record_key()?;
    if let Some(record) = client.get(&cluster_key).await? {
        let present = Cluster::decode(&cluster_key, &record.value)?;
        if present.id != snapshot.cluster {
            let existing = present.id;
            return Err(BootstrapError::OtherCluster { requested: snapshot.cluster, existing });
        }
        if present.epoch == restoring.epoch {
            return Ok(());
        }
        if !restoring.over_image || present.epoch > restoring.epoch {
            return Err(BootstrapError::OtherEpoch {
                cluster: present.id,
                requested: restoring.epoch,
                existing: present.epoch,
            });
        }
    }
    let snapshot = add_revocations(snapshot, &restoring.revocations)?;
    let mut records = restored_records(&snapshot, own, restoring.epoch)?;
    // Start again after an interrupted restore.
    client.delete_unguarded(&namespace::KeySelector::Prefix(ROOT.to_owned())).await?;
    let mut last = Vec::new();
    for key in [cluster_key, cluster::authority_record_key()?, Node::etcd_key(&own.id)?] {
        let missing = || ClusterSnapshotError::Invalid(format!("it has no record {key}"));
        let value = records.remove(&key).ok_or_else(missing)?;
        last.push((key, value));
    }
    // The last part is written last, so its records exist only if all others do.
    for part in split_into_writes(records).into_iter().chain([last]) {
        if !client.create_unguarded("records of a snapshot", &part).await? {
            let sentence = "another client writes into this etcd, which must have the restored records alone";
            return Err(BootstrapError::Rejected(sentence.to_owned()));
        }
    }
    Ok(())
}

/// Splits records into parts that etcd accepts in one transaction.
fn split_into_writes(records: BTreeMap<String, Vec<u8>>) -> Vec<Vec<(String, Vec<u8>)>> {
    let mut parts: Vec<Vec<(String, Vec<u8>)>> = Vec::new();
    let mut bytes = 0;
    for (key, value) in records {
        let size = key.len() + value.len();
        if let Some(part) = parts
            .last_mut()
            .filter(|part| part.len() < MAX_RECORDS_PER_WRITE && bytes + size <= MAX_BYTES_PER_WRITE)
        {
            bytes += size;
            part.push((key, value));
        } else {
            bytes = size;
            parts.push(vec![(key, value)]);
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use curator_client::testing::{member, node_id, public, snapshot, up};
    use etcd::key_space::{CERTIFICATES, DECLARATIONS, REVOKED_NODES, TICKETS};

    use super::*;

    fn decoded(records: &BTreeMap<String, Vec<u8>>, number: u8) -> Node {
        let key = Node::etcd_key(&node_id(number)).unwrap();
        Node::decode(&key, &records[&key]).unwrap()
    }

    #[test]
    fn restored_cluster_has_one_member_a_later_epoch_and_all_else() {
        let mut taken = snapshot();
        for prefix in [&TICKETS, &CERTIFICATES, &REVOKED_NODES, &DECLARATIONS] {
            taken.records.insert(prefix.key("a").unwrap(), b"as it is".to_vec());
        }
        taken.records.insert(format!("{ROOT}later/a"), b"of a later release".to_vec());
        taken.records.insert(LEADER.key("7").unwrap(), b"gone".to_vec());
        let mut busy = up(3);
        busy.roles.declared.insert("web".parse().unwrap());
        taken.records.insert(Node::etcd_key(&busy.id).unwrap(), busy.encode().unwrap());
        let own = member(7);
        let records = restored_records(&taken, &own, 9).unwrap();

        let cluster_key = cluster::cluster_record_key().unwrap();
        let before = Cluster::decode(&cluster_key, &taken.records[&cluster_key]).unwrap();
        assert_eq!(
            Cluster::decode(&cluster_key, &records[&cluster_key]).unwrap(),
            Cluster { epoch: 9, ..before }
        );
        for (number, is_member) in [(1, false), (2, false), (3, false), (7, true)] {
            let node = decoded(&records, number);
            assert_eq!(node.roles.consensus_member.is_some(), is_member, "{number}");
            assert!(is_member || !node.roles.kubernetes_controller, "{number}");
            assert!(is_member || node.status.is_none_or(|status| status.curator_port.is_none()), "{number}");
        }
        assert_eq!(decoded(&records, 3), busy, "a node that was no member is unchanged");
        assert_eq!(decoded(&records, 7), own);
        let mut same = taken.records.clone();
        same.retain(|key, _| !NODES.range().contains(key) && !LEADER.range().contains(key));
        same.remove(&cluster_key);
        for (key, value) in &same {
            assert_eq!(records.get(key), Some(value), "{key}");
        }
        assert_eq!(records.len(), same.len() + 5, "{:?}", records.keys());
    }

    #[test]
    fn restoring_node_replaces_its_former_record() {
        let records = restored_records(&snapshot(), &member(1), 3).unwrap();
        assert_eq!(decoded(&records, 1), member(1));
    }

    #[test]
    fn cluster_is_not_restored_on_a_revoked_node() {
        let mut taken = snapshot();
        taken.records.insert(REVOKED_NODES.key(node_id(1)).unwrap(), b"revoked".to_vec());
        let error = restored_records(&taken, &member(1), 3).unwrap_err().to_string();
        assert!(
            error.contains("are revoked in the snapshot") && error.contains("another machine"),
            "{error}"
        );
        assert!(restored_records(&taken, &member(7), 3).is_ok());
    }

    #[test]
    fn what_was_revoked_after_the_snapshot_stays_revoked() {
        let taken = snapshot();
        let record = |revocation: Revocation| {
            (revocation.etcd_key().unwrap(), revocation.encode("kim", taken.taken_at))
        };
        let (key, value) = record(Revocation::Node(node_id(2)));
        assert!(!taken.records.contains_key(&key));
        let with = add_revocations(&taken, &BTreeMap::from([(key.clone(), value.clone())])).unwrap();
        let records = restored_records(&with, &member(7), 3).unwrap();
        assert_eq!(records.get(&key), Some(&value), "what was revoked is valid again");
        let own = BTreeMap::from([record(Revocation::Node(node_id(7)))]);
        assert!(restored_records(&add_revocations(&taken, &own).unwrap(), &member(7), 3).is_err());
        for other in [
            BTreeMap::from([record(Revocation::Owner(public(2)))]),
            BTreeMap::from([(format!("{ROOT}later/a"), b"no revocation".to_vec())]),
        ] {
            assert!(add_revocations(&taken, &other).is_err(), "{other:?}");
        }
    }

    #[test]
    fn unreadable_record_is_not_restored() {
        let mut taken = snapshot();
        taken.records.insert(Node::etcd_key(&node_id(4)).unwrap(), vec![0xff]);
        let error = restored_records(&taken, &member(7), 3).unwrap_err().to_string();
        assert!(error.contains(&node_id(4).to_string()), "{error}");
    }

    #[test]
    fn writes_fit_etcd_limits_and_lose_no_record() {
        let records: BTreeMap<String, Vec<u8>> = (0..250)
            .map(|number| {
                (format!("/{number:03}"), vec![7; if number == 30 { MAX_BYTES_PER_WRITE + 1 } else { 10 }])
            })
            .collect();
        let parts = split_into_writes(records.clone());
        for part in &parts {
            let bytes: usize = part.iter().map(|(key, value)| key.len() + value.len()).sum();
            assert!(
                part.len() <= MAX_RECORDS_PER_WRITE && (bytes <= MAX_BYTES_PER_WRITE || part.len() == 1),
                "{}",
                part.len()
            );
        }
        assert_eq!(parts.into_iter().flatten().collect::<BTreeMap<_, _>>(), records);
    }
}
