//! Restoring a cluster from a snapshot, on one node with a fresh etcd.
//!
//! # What must not be
//!
//! The members that were lost may come back with their old disks, and with most of them together they are a cluster that
//! works, of the same id, with the same authority, known to nodes that live on. Two clusters that both take themselves
//! for the one would give two answers to who belongs to it. So the restored one is told apart by its *epoch*, one more
//! than any that was heard of:
//!
//! * It is part of what etcd makes the numbers of its cluster and of its members from (`--initial-cluster-token`). Members
//!   of different epochs refuse each other's messages by those numbers, and a data directory of an earlier epoch is never
//!   started by a node that founds a later one. So old and new members can never be one etcd, whatever addresses they have.
//! * It stands in the record of the cluster, which is written with the last transaction of the restoration. Every curator
//!   says it where it is asked who leads, and everybody who asks keeps the highest epoch that he has heard, durably,
//!   before he follows it, and follows no curator of a lower one
//!   ([`leader_channel`](crate::curator::leader_channel)). Whoever has heard of the restored cluster is lost to the
//!   old one for ever.
//! * Nobody asks anybody else than those that the directory says or the shepherd ordered, which are consensus members: they
//!   hold the authority's key in any case, so that a false epoch gains nothing that they have not got. A node of the
//!   cluster that stands in for one of them, at its address, could say an epoch that there never was, and have others
//!   follow nobody until the shepherd restores the cluster once more: an epoch carries no signature yet. What is far
//!   beyond the highest that is known is believed from nobody, so that epochs never run out.
//!
//! A node that has heard neither of the restored cluster nor from a shepherd may follow old curators, where most of them
//! live: it follows the new ones as soon as one of either tells it. Whatever it was told until then by old curators ends
//! with that; what was written there is lost, as everything is that was written after the snapshot.
//!
//! # What goes on
//!
//! Everything but consensus: nodes, with their keys and roles of operators, tickets as far as they were used,
//! declarations, certificates and what was revoked of them, and the authority. Of Kubernetes, what it is to be, its
//! authorities and keys, which are told anew to all nodes, and what each node has of it that is in the snapshot. No node is a consensus member but the one
//! that restores; others are given the role as in any cluster. Candidates for leading are gone with their leases.
//!
//! # A crash in the middle
//!
//! The cluster's own record is written last, with the authority and the node that restores. While it is not there, all
//! that is there is removed, and written anew. Nobody else can read or write in between: no curator runs before.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::curator::bootstrap::FoundingError;
use crate::curator::cluster::{self, Cluster};
use crate::curator::kubernetes::allotment::Allotment;
use crate::curator::kubernetes::keys::{Keys, keys_key};
use crate::curator::node::{Node, Status};
use crate::curator::snapshot::{Snapshot, SnapshotError};
use crate::etcd::client::Client;
use crate::etcd::key_space::{KUBERNETES_NODES, LEADER, NODES, ROOT};
use crate::etcd::namespace;

/// Records of one transaction; etcd takes 128 operations.
const RECORDS: usize = 100;
/// Bytes of one transaction, if it has more than one record; etcd takes 1.5 MiB.
const BYTES: usize = 512 << 10;

/// What a cluster is restored from.
#[derive(Clone, Debug)]
pub struct Restoring {
    /// Its records.
    pub snapshot: Arc<Snapshot>,
    /// What tells the restored cluster from all before it.
    pub epoch: u64,
}

/// The records of the restored cluster, whose one consensus member is `own`.
pub fn restored(
    snapshot: &Snapshot,
    own: &Node,
    epoch: u64,
) -> Result<BTreeMap<String, Vec<u8>>, FoundingError> {
    let (cluster_key, kubernetes_keys) = (cluster::cluster_key()?, keys_key()?);
    let mut records = BTreeMap::new();
    for (key, value) in &snapshot.records {
        let value = if LEADER.range().contains(key) {
            continue;
        } else if *key == cluster_key {
            Cluster { epoch, ..Cluster::decode(key, value)? }.encode()
        } else if *key == kubernetes_keys {
            Keys::decode(key, value)?.restored().encode()
        } else if KUBERNETES_NODES.range().contains(key) {
            // The leader would remove it as well; until then nobody else could have its part.
            let node = Allotment::node_of(key)?;
            if node != own.id && !snapshot.records.contains_key(&Node::etcd_key(&node)?) {
                continue;
            }
            // Nothing that is told from now on was told before.
            Allotment { told: None, ..Allotment::decode(key, value)? }.encode()
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

/// A node that is no consensus member any more, and what follows from that.
fn without_consensus(mut node: Node) -> Node {
    if node.roles.consensus_member.take().is_some() {
        node.roles.kubernetes_controller = false;
        node.status = node.status.map(|status| Status { curator_port: None, ..status });
    }
    node
}

/// Writes the records of the restored cluster into this etcd, which has one member, or finds that this was done before.
pub(super) async fn restore(client: &Client, restoring: &Restoring, own: &Node) -> Result<(), FoundingError> {
    let snapshot = &restoring.snapshot;
    let cluster_key = cluster::cluster_key()?;
    if let Some(record) = client.get(&cluster_key).await? {
        let present = Cluster::decode(&cluster_key, &record.value)?;
        return match (present.id == snapshot.cluster, present.epoch == restoring.epoch) {
            (true, true) => Ok(()),
            (true, false) => Err(FoundingError::AnotherEpoch {
                cluster: present.id,
                wanted: restoring.epoch,
                present: present.epoch,
            }),
            (false, _) => Err(FoundingError::Another { wanted: snapshot.cluster, present: present.id }),
        };
    }
    let mut records = restored(snapshot, own, restoring.epoch)?;
    // What was cut off is begun anew.
    client.delete_unguarded(&namespace::Keys::Under(ROOT.to_owned())).await?;
    let mut last = Vec::new();
    for key in [cluster_key, cluster::authority_key()?, Node::etcd_key(&own.id)?] {
        let missing = || SnapshotError::Broken(format!("it has no record {key}"));
        let value = records.remove(&key).ok_or_else(missing)?;
        last.push((key, value));
    }
    // Whoever finds the last part finds all of it.
    for part in parts(records).into_iter().chain([last]) {
        if !client.create_unguarded("records of a snapshot", &part).await? {
            let sentence =
                "somebody else writes into this etcd, which is to hold what is restored and nothing else";
            return Err(FoundingError::Refused(sentence.to_owned()));
        }
    }
    Ok(())
}

/// Records in parts that etcd takes at once.
fn parts(records: BTreeMap<String, Vec<u8>>) -> Vec<Vec<(String, Vec<u8>)>> {
    let mut parts: Vec<Vec<(String, Vec<u8>)>> = Vec::new();
    let mut bytes = 0;
    for (key, value) in records {
        let size = key.len() + value.len();
        if let Some(part) = parts.last_mut().filter(|part| part.len() < RECORDS && bytes + size <= BYTES) {
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
    use super::*;
    use crate::curator::node::tests::{member, up};
    use crate::curator::node_id::tests::node_id;
    use crate::curator::snapshot::tests::snapshot;
    use crate::etcd::key_space::{CERTIFICATES, DECLARATIONS, REVOKED_NODES, TICKETS};

    fn decoded(records: &BTreeMap<String, Vec<u8>>, number: u8) -> Node {
        let key = Node::etcd_key(&node_id(number)).unwrap();
        Node::decode(&key, &records[&key]).unwrap()
    }

    #[test]
    fn restored_cluster_has_one_consensus_member_and_a_later_epoch_and_all_else_as_it_was() {
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
        let records = restored(&taken, &own, 9).unwrap();

        let cluster_key = cluster::cluster_key().unwrap();
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
        assert_eq!(decoded(&records, 3), busy, "whoever was no member is as before");
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
    fn node_that_restores_takes_the_place_of_what_it_was() {
        let records = restored(&snapshot(), &member(1), 3).unwrap();
        assert_eq!(decoded(&records, 1), member(1));
    }

    #[test]
    fn record_that_cannot_be_read_is_not_carried_over() {
        let mut taken = snapshot();
        taken.records.insert(Node::etcd_key(&node_id(4)).unwrap(), vec![0xff]);
        let error = restored(&taken, &member(7), 3).unwrap_err().to_string();
        assert!(error.contains(&node_id(4).to_string()), "{error}");
    }

    #[test]
    fn parts_are_as_small_as_etcd_takes_them_and_none_is_lost() {
        let records: BTreeMap<String, Vec<u8>> = (0..250)
            .map(|number| (format!("/{number:03}"), vec![7; if number == 30 { BYTES + 1 } else { 10 }]))
            .collect();
        let parts = parts(records.clone());
        for part in &parts {
            let bytes: usize = part.iter().map(|(key, value)| key.len() + value.len()).sum();
            assert!(part.len() <= RECORDS && (bytes <= BYTES || part.len() == 1), "{}", part.len());
        }
        assert_eq!(parts.into_iter().flatten().collect::<BTreeMap<_, _>>(), records);
    }
}
