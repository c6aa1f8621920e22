//! What one node has of Kubernetes: its part of the pods' addresses, its own bundle where it was given one, and which
//! generation of keys it may be told ([`turns`](crate::curator::kubernetes::turns)).
//!
//! A worker gets the lowest part that no node has, with the write that gives it the role, and keeps it until it is deleted:
//! pods of one that lost the role for a while may still be there. No two nodes ever have one part, because the write is
//! refused where any of these records was written since all of them were read.
//!
//! What is of a node that is gone, or missing to one that is there, is put right by the leader in the background: a leader
//! of an older release, which knows nothing of these records, may have deleted a node.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message as _;

use crate::curator::kubernetes::refusal::Refusal;
use crate::curator::kubernetes::settings::Settings;
use crate::curator::membership::Nodes;
use crate::curator::node::Node;
use crate::curator::node_id::NodeId;
use crate::curator::roles::Order;
use crate::etcd::key_space::{KUBERNETES_NODES, KeyError};
use crate::etcd::record::{self, RecordError, moment};
use crate::model::kubernetes::ranges::Range;
use crate::model::role::Role;
use crate::model::time::Timestamp;
use crate::proto::curator::v1 as wire;

/// What one node has.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Allotment {
    /// Its part of the pods' addresses.
    pub part: Option<Range>,
    /// Its own bundle.
    pub bundle: Option<Bundle>,
    /// Which generation of authorities and keys it may be told; none where it has been told nothing.
    pub told: Option<Told>,
}

/// What a node may be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    /// Which generation.
    pub generation: u64,
    /// Since when.
    pub at: Timestamp,
}

/// A bundle, and where it is fetched where no shepherd is reached; that may be empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bundle {
    /// SHA-256 in hexadecimal digits.
    pub digest: String,
    /// Where it is fetched.
    pub url: String,
}

/// What all nodes have.
pub type Allotments = BTreeMap<NodeId, Allotment>;

impl Allotment {
    /// Where it stands in etcd.
    pub fn etcd_key(node: &NodeId) -> Result<String, KeyError> {
        KUBERNETES_NODES.key(node)
    }

    /// Whose record has this key.
    pub fn node_of(key: &str) -> Result<NodeId, RecordError> {
        let id = KUBERNETES_NODES.id(key).map_err(|error| RecordError::new(key, error.to_string()))?;
        id.parse()
            .map_err(|error: crate::curator::node_id::NoNodeId| RecordError::new(key, error.to_string()))
    }

    /// As it is stored.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let bundle = self.bundle.clone().unwrap_or(Bundle { digest: String::new(), url: String::new() });
        wire::KubernetesNodeRecord {
            format: record::FORMAT,
            pod_range: self.part.map(|part| part.to_string()).unwrap_or_default(),
            bundle: bundle.digest,
            bundle_url: bundle.url,
            told_generation: self.told.map_or(0, |told| told.generation),
            told_at_ms: self.told.map_or(0, |told| told.at.timestamp_millis()),
        }
        .encode_to_vec()
    }

    /// Reads what is stored under `key`.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let record = record::decode(key, bytes, |record: &wire::KubernetesNodeRecord| record.format)?;
        let part = match record.pod_range.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|_| RecordError::new(key, "its range for pods is none"))?),
        };
        let bundle = Bundle { digest: record.bundle, url: record.bundle_url };
        let told = match record.told_generation {
            0 => None,
            generation => {
                let at = moment("told_at", record.told_at_ms).map_err(|why| RecordError::new(key, why))?;
                Some(Told { generation, at })
            }
        };
        Ok(Self { part, bundle: (!bundle.digest.is_empty()).then_some(bundle), told })
    }
}

/// Whether an order about roles can be carried out as far as Kubernetes is concerned, and what the node is to have then
/// where that is something else than before.
pub fn given(
    node: &Node,
    order: &Order,
    settings: Option<&Settings>,
    all: &Allotments,
) -> Result<Option<Allotment>, Refusal> {
    let has = node.roles.names();
    let new = |role: &Role| order.give.contains(role) && !has.contains(role);
    for role in [Role::KubernetesController, Role::KubernetesWorker] {
        if new(&role) && settings.is_none() {
            return Err(Refusal::NoRole { node: node.id, role });
        }
    }
    match settings {
        Some(settings) if order.give.contains(&Role::KubernetesWorker) => part(node.id, settings, all),
        _ => Ok(None),
    }
}

/// What a worker is to have where it has no part yet.
fn part(node: NodeId, settings: &Settings, all: &Allotments) -> Result<Option<Allotment>, Refusal> {
    let ranges = settings.ranges();
    let own = all.get(&node).cloned().unwrap_or_default();
    if own.part.is_some_and(|part| ranges.has(part)) {
        return Ok(None);
    }
    let taken: BTreeSet<Range> = all.values().filter_map(|allotment| allotment.part).collect();
    let none = Refusal::NoPart { node, count: ranges.nodes(), pods: ranges.pods() };
    let part = ranges.lowest_free(&taken).ok_or(none)?;
    Ok(Some(Allotment { part: Some(part), ..own }))
}

/// What is wrong with these records, where nobody writes them otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Amiss {
    /// It is of a node that is not there, or of a Kubernetes that is not there.
    Nobodys(NodeId),
    /// A worker is to have this.
    Missing(NodeId, Allotment),
}

/// The first thing to be put right, if there is one. A worker for which there is no part goes on without.
#[must_use]
pub fn amiss(settings: Option<&Settings>, nodes: &Nodes, all: &Allotments) -> Option<Amiss> {
    let gone = all.keys().find(|node| settings.is_none() || !nodes.contains_key(node));
    if let Some(node) = gone {
        return Some(Amiss::Nobodys(*node));
    }
    let settings = settings?;
    let workers = nodes.values().filter(|node| node.roles.kubernetes_worker);
    let missing = |node: &Node| Some(Amiss::Missing(node.id, part(node.id, settings, all).ok().flatten()?));
    workers.into_iter().find_map(missing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curator::kubernetes::settings::tests::settings;
    use crate::curator::node::tests::{at, up};
    use crate::curator::node_id::tests::node_id;

    fn range(text: &str) -> Range {
        text.parse().unwrap()
    }

    fn with(part: &str) -> Allotment {
        Allotment { part: Some(range(part)), ..Allotment::default() }
    }

    fn give(names: &[&str]) -> Order {
        Order { give: names.iter().map(|name| name.parse().unwrap()).collect(), ..Order::default() }
    }

    fn worker(number: u8) -> Node {
        let mut node = up(number);
        node.roles.kubernetes_worker = true;
        node
    }

    const W: &str = "kubernetes-worker";
    const K: &str = "kubernetes-controller";

    #[test]
    fn record_reads_back_as_it_was_written() {
        let bundle = Bundle { digest: "ab".repeat(32), url: "http://a/b".to_owned() };
        let key = Allotment::etcd_key(&node_id(1)).unwrap();
        assert_eq!(Allotment::node_of(&key).unwrap(), node_id(1));
        for kept in [
            Allotment::default(),
            with("10.128.1.0/24"),
            Allotment { bundle: Some(bundle.clone()), ..Allotment::default() },
            Allotment { bundle: Some(bundle), ..with("10.128.1.0/24") },
            Allotment { told: Some(Told { generation: 7, at: at(3) }), ..Allotment::default() },
        ] {
            assert_eq!(Allotment::decode(&key, &kept.encode()).unwrap(), kept);
        }
        assert!(Allotment::decode(&key, &[]).is_err());
        let broken =
            wire::KubernetesNodeRecord { format: 1, pod_range: "x".to_owned(), ..Default::default() };
        let error = Allotment::decode(&key, &broken.encode_to_vec()).unwrap_err().to_string();
        assert!(error.contains(&key) && error.contains("range for pods"), "{error}");
    }

    #[test]
    fn worker_gets_the_lowest_part_that_nobody_has_and_keeps_it() {
        let settings = settings();
        let mut all = Allotments::new();
        for (number, expected) in [(1, "10.128.0.0/24"), (2, "10.128.1.0/24"), (3, "10.128.2.0/24")] {
            let given = given(&up(number), &give(&[W]), Some(&settings), &all).unwrap().unwrap();
            assert_eq!(given, with(expected));
            all.insert(node_id(number), given);
        }
        // Asked again, and for one that has it, nothing is new.
        assert_eq!(given(&up(2), &give(&[W]), Some(&settings), &all).unwrap(), None);
        assert_eq!(given(&worker(2), &give(&[W, "web"]), Some(&settings), &all).unwrap(), None);
        // What was freed is taken again, and what others have is not, however many there are.
        all.remove(&node_id(1));
        assert_eq!(given(&up(4), &give(&[W]), Some(&settings), &all).unwrap(), Some(with("10.128.0.0/24")));
        all.insert(node_id(4), with("10.128.0.0/24"));
        all.remove(&node_id(2));
        assert_eq!(given(&up(5), &give(&[W]), Some(&settings), &all).unwrap(), Some(with("10.128.1.0/24")));
        all.insert(node_id(5), with("10.128.1.0/24"));
        all.insert(node_id(6), with("10.128.3.0/24"));
        let refusal = given(&up(7), &give(&[W]), Some(&settings), &all).unwrap_err();
        assert_eq!(refusal.code(), tonic::Code::FailedPrecondition);
        assert!(refusal.to_string().contains("all 4 parts of 10.128.0.0/22"), "{refusal}");
        assert!(given(&up(7), &give(&["web"]), Some(&settings), &all).unwrap().is_none());
    }

    #[test]
    fn what_it_has_beside_stays_with_a_node_that_becomes_a_worker() {
        let bundle = Some(Bundle { digest: "ab".repeat(32), url: String::new() });
        let told = Some(Told { generation: 7, at: at(3) });
        let own = Allotment { bundle: bundle.clone(), told, ..Allotment::default() };
        let all = Allotments::from([(node_id(1), own)]);
        let given = given(&up(1), &give(&[W]), Some(&settings()), &all).unwrap().unwrap();
        assert_eq!(given, Allotment { bundle, told, ..with("10.128.0.0/24") });
    }

    #[test]
    fn role_of_a_kubernetes_that_is_not_there_is_given_to_nobody_who_lacks_it() {
        let none = Allotments::new();
        for role in [W, K] {
            let refusal = given(&up(1), &give(&["web", role]), None, &none).unwrap_err();
            assert_eq!(refusal.code(), tonic::Code::FailedPrecondition);
            assert!(refusal.to_string().contains(role), "{refusal}");
        }
        // Roles of before there was such a thing, and orders about others.
        assert_eq!(given(&worker(1), &give(&[W]), None, &none).unwrap(), None);
        assert_eq!(given(&up(1), &give(&["web"]), None, &none).unwrap(), None);
        let take = Order { take: give(&[W, K]).give, ..Order::default() };
        assert_eq!(given(&worker(1), &take, None, &none).unwrap(), None);
    }

    #[test]
    fn what_is_amiss_is_put_right_one_by_one() {
        let settings = settings();
        let nodes: Nodes = [worker(1), worker(2), up(3)].into_iter().map(|node| (node.id, node)).collect();
        let mut all = Allotments::from([
            (node_id(2), with("10.128.0.0/24")),
            (node_id(3), with("10.128.1.0/24")),
            (node_id(9), with("10.128.2.0/24")),
        ]);
        assert_eq!(amiss(Some(&settings), &nodes, &all), Some(Amiss::Nobodys(node_id(9))));
        all.remove(&node_id(9));
        let missing = Amiss::Missing(node_id(1), with("10.128.2.0/24"));
        assert_eq!(amiss(Some(&settings), &nodes, &all), Some(missing));
        all.insert(node_id(1), with("10.128.2.0/24"));
        assert_eq!(amiss(Some(&settings), &nodes, &all), None);
        // Of a Kubernetes before, with other ranges.
        all.insert(node_id(1), with("192.168.0.0/24"));
        assert_eq!(
            amiss(Some(&settings), &nodes, &all),
            Some(Amiss::Missing(node_id(1), with("10.128.2.0/24")))
        );
        assert_eq!(amiss(None, &nodes, &all), Some(Amiss::Nobodys(node_id(1))));
        assert_eq!(amiss(None, &nodes, &Allotments::new()), None);
    }
}
