//! What one node has of Kubernetes: pod range (pod CIDR), own bundle, assigned key generation.
//!
//! How generations are assigned: [`key_rollout`](crate::kubernetes::key_rollout).
//!
//! A worker gets the lowest pod range that no node has, in the same write that gives it the role. It keeps the range
//! until it is deleted, because pods of a node that lost the role for a while may still run. No two nodes ever have the
//! same range: the write is rejected if any of these records was written since all of them were read.
//!
//! In the background the leader deletes records of nodes that no longer exist and adds missing ones: a leader of an
//! older release, which does not know these records, may have deleted a node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use curator_client::node::Node;
use curator_client::node_id::NodeId;
use etcd::key_space::{KUBERNETES_NODES, KeyError};
use etcd::record::{self, RecordError};
use model::kubernetes::address_ranges::Ipv4Range;
use model::node_role::NodeRole;
use model::time::{Timestamp, parse_timestamp};
use prost::Message as _;
use proto::curator::v1 as wire;

use crate::kubernetes::error::KubernetesError;
use crate::kubernetes::settings::KubernetesSettings;
use crate::membership::Nodes;
use crate::role_orders::RoleOrder;

/// What one node has of Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct NodeAllocation {
    /// Its part of the pod network; `None` until it becomes a worker.
    pub pod_range: Option<Ipv4Range>,
    /// The bundle it runs instead of that of the settings, if any.
    pub bundle: Option<BundleRef>,
    /// The key generation assigned to it; `None` before the first assignment.
    pub assigned: Option<AssignedGeneration>,
}

/// The key generation that a node may be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AssignedGeneration {
    /// Generation of the Kubernetes keys.
    pub generation: u64,
    /// When it was assigned.
    pub assigned_at: Timestamp,
}

/// A bundle and a URL to fetch it from when no shepherd is reachable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BundleRef {
    /// SHA-256 in hexadecimal digits.
    pub digest: String,
    /// The URL to fetch it from; may be empty.
    pub url: String,
}

/// The allocations of all nodes.
pub type NodeAllocations = BTreeMap<NodeId, NodeAllocation>;

impl NodeAllocation {
    /// The etcd key of the record.
    pub fn etcd_key(node: &NodeId) -> Result<String, KeyError> {
        KUBERNETES_NODES.key(node)
    }

    /// The node whose record has this etcd key.
    pub fn node_from_key(key: &str) -> Result<NodeId, RecordError> {
        let id = KUBERNETES_NODES.id_of(key).map_err(|error| RecordError::new(key, error.to_string()))?;
        id.parse()
            .map_err(|error: curator_client::node_id::InvalidNodeId| RecordError::new(key, error.to_string()))
    }

    /// Encodes the record for etcd.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let bundle = self.bundle.clone().unwrap_or(BundleRef { digest: String::new(), url: String::new() });
        wire::KubernetesNodeRecord {
            format: record::FORMAT,
            pod_range: self.pod_range.map(|part| part.to_string()).unwrap_or_default(),
            bundle: bundle.digest,
            bundle_url: bundle.url,
            notified_generation: self.assigned.map_or(0, |generation| generation.generation),
            notified_at_ms: self.assigned.map_or(0, |generation| generation.assigned_at.timestamp_millis()),
        }
        .encode_to_vec()
    }

    /// Decodes the record that is stored under `key`.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let record = record::decode(key, bytes, |record: &wire::KubernetesNodeRecord| record.format)?;
        let part = match record.pod_range.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|_| RecordError::new(key, "its pod range is invalid"))?),
        };
        let bundle = BundleRef { digest: record.bundle, url: record.bundle_url };
        let assigned_generation = match record.notified_generation {
            0 => None,
            generation => {
                let at = parse_timestamp("notified_at", record.notified_at_ms)
                    .map_err(|why| RecordError::new(key, why))?;
                Some(AssignedGeneration { generation, assigned_at: at })
            }
        };
        Ok(Self {
            pod_range: part,
            bundle: (!bundle.digest.is_empty()).then_some(bundle),
            assigned: assigned_generation,
        })
    }
}

/// Checks that the cluster's Kubernetes allows an order about roles. Returns the node's new allocation if the order
/// changes it.
pub fn plan_allocation(
    node: &Node,
    order: &RoleOrder,
    settings: Option<&KubernetesSettings>,
    all: &NodeAllocations,
) -> Result<Option<NodeAllocation>, KubernetesError> {
    let has = node.roles.names();
    let new = |role: &NodeRole| order.add.contains(role) && !has.contains(role);
    for role in [NodeRole::KubernetesController, NodeRole::KubernetesWorker] {
        if new(&role) && settings.is_none() {
            return Err(KubernetesError::RoleNeedsKubernetes { node: node.id, role });
        }
        if let (true, Some(IpAddr::V6(address))) = (new(&role), node_address(node)) {
            return Err(KubernetesError::Ipv6Node { node: node.id, role, address });
        }
    }
    match settings {
        Some(settings) if order.add.contains(&NodeRole::KubernetesWorker) => {
            allocate_pod_range(node.id, settings, all)
        }
        _ => Ok(None),
    }
}

/// The address at which other nodes reach it; `None` before its first report.
fn node_address(node: &Node) -> Option<IpAddr> {
    node.assigned_address.or_else(|| Some(node.status.as_ref()?.address))
}

/// The new allocation of a worker that has no pod range yet; `None` if it has one.
fn allocate_pod_range(
    node: NodeId,
    settings: &KubernetesSettings,
    all: &NodeAllocations,
) -> Result<Option<NodeAllocation>, KubernetesError> {
    let ranges = settings.ranges();
    let own = all.get(&node).cloned().unwrap_or_default();
    if own.pod_range.is_some_and(|part| ranges.is_node_range(part)) {
        return Ok(None);
    }
    let taken: BTreeSet<Ipv4Range> = all.values().filter_map(|allotment| allotment.pod_range).collect();
    let none =
        KubernetesError::PodRangesExhausted { node, count: ranges.max_nodes(), pod_range: ranges.pods() };
    let part = ranges.lowest_free_node_range(&taken).ok_or(none)?;
    Ok(Some(NodeAllocation { pod_range: Some(part), ..own }))
}

/// An inconsistency in these records that no call corrects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inconsistency {
    /// A record of a node that does not exist, or of a Kubernetes that does not exist.
    Orphaned(NodeId),
    /// A worker lacks its pod range; its record must become this.
    Missing(NodeId, NodeAllocation),
}

/// The first inconsistency to correct, if there is one. Workers for which no pod range is left are skipped.
#[must_use]
pub fn find_inconsistency(
    settings: Option<&KubernetesSettings>,
    nodes: &Nodes,
    all: &NodeAllocations,
) -> Option<Inconsistency> {
    let gone = all.keys().find(|node| settings.is_none() || !nodes.contains_key(node));
    if let Some(node) = gone {
        return Some(Inconsistency::Orphaned(*node));
    }
    let settings = settings?;
    let workers = nodes.values().filter(|node| node.roles.kubernetes_worker);
    let missing = |node: &Node| {
        Some(Inconsistency::Missing(node.id, allocate_pod_range(node.id, settings, all).ok().flatten()?))
    };
    workers.into_iter().find_map(missing)
}

#[cfg(test)]
mod tests {
    use curator_client::testing::{at, node_id, up};

    use super::*;
    use crate::kubernetes::settings::tests::settings;

    fn range(text: &str) -> Ipv4Range {
        text.parse().unwrap()
    }

    fn with(part: &str) -> NodeAllocation {
        NodeAllocation { pod_range: Some(range(part)), ..NodeAllocation::default() }
    }

    fn order_adding(names: &[&str]) -> RoleOrder {
        RoleOrder { add: names.iter().map(|name| name.parse().unwrap()).collect(), ..RoleOrder::default() }
    }

    fn worker(number: u8) -> Node {
        let mut node = up(number);
        node.roles.kubernetes_worker = true;
        node
    }

    const W: &str = "kubernetes-worker";
    const K: &str = "kubernetes-controller";

    #[test]
    fn record_round_trips() {
        let bundle = BundleRef { digest: "ab".repeat(32), url: "http://a/b".to_owned() };
        let key = NodeAllocation::etcd_key(&node_id(1)).unwrap();
        assert_eq!(NodeAllocation::node_from_key(&key).unwrap(), node_id(1));
        for kept in [
            NodeAllocation::default(),
            with("10.128.1.0/24"),
            NodeAllocation { bundle: Some(bundle.clone()), ..NodeAllocation::default() },
            NodeAllocation { bundle: Some(bundle), ..with("10.128.1.0/24") },
            NodeAllocation {
                assigned: Some(AssignedGeneration { generation: 7, assigned_at: at(3) }),
                ..NodeAllocation::default()
            },
        ] {
            assert_eq!(NodeAllocation::decode(&key, &kept.encode()).unwrap(), kept);
        }
        assert!(NodeAllocation::decode(&key, &[]).is_err());
        let broken =
            wire::KubernetesNodeRecord { format: 1, pod_range: "x".to_owned(), ..Default::default() };
        let error = NodeAllocation::decode(&key, &broken.encode_to_vec()).unwrap_err().to_string();
        assert!(error.contains(&key) && error.contains("pod range"), "{error}");
    }

    #[test]
    fn worker_gets_the_lowest_free_pod_range_and_keeps_it() {
        let settings = settings();
        let mut all = NodeAllocations::new();
        for (number, expected) in [(1, "10.128.0.0/24"), (2, "10.128.1.0/24"), (3, "10.128.2.0/24")] {
            let given =
                plan_allocation(&up(number), &order_adding(&[W]), Some(&settings), &all).unwrap().unwrap();
            assert_eq!(given, with(expected));
            all.insert(node_id(number), given);
        }
        // Repeating the order, or adding the role to a worker that has a range, changes nothing.
        assert_eq!(plan_allocation(&up(2), &order_adding(&[W]), Some(&settings), &all).unwrap(), None);
        assert_eq!(
            plan_allocation(&worker(2), &order_adding(&[W, "web"]), Some(&settings), &all).unwrap(),
            None
        );
        // A freed range is allocated again; ranges of other nodes are not, however many there are.
        all.remove(&node_id(1));
        assert_eq!(
            plan_allocation(&up(4), &order_adding(&[W]), Some(&settings), &all).unwrap(),
            Some(with("10.128.0.0/24"))
        );
        all.insert(node_id(4), with("10.128.0.0/24"));
        all.remove(&node_id(2));
        assert_eq!(
            plan_allocation(&up(5), &order_adding(&[W]), Some(&settings), &all).unwrap(),
            Some(with("10.128.1.0/24"))
        );
        all.insert(node_id(5), with("10.128.1.0/24"));
        all.insert(node_id(6), with("10.128.3.0/24"));
        let refusal = plan_allocation(&up(7), &order_adding(&[W]), Some(&settings), &all).unwrap_err();
        assert_eq!(refusal.code(), tonic::Code::FailedPrecondition);
        assert!(refusal.to_string().contains("all 4 parts of 10.128.0.0/22"), "{refusal}");
        assert!(plan_allocation(&up(7), &order_adding(&["web"]), Some(&settings), &all).unwrap().is_none());
    }

    #[test]
    fn node_that_becomes_a_worker_keeps_its_other_allocations() {
        let bundle = Some(BundleRef { digest: "ab".repeat(32), url: String::new() });
        let generation = Some(AssignedGeneration { generation: 7, assigned_at: at(3) });
        let own =
            NodeAllocation { bundle: bundle.clone(), assigned: generation, ..NodeAllocation::default() };
        let all = NodeAllocations::from([(node_id(1), own)]);
        let given = plan_allocation(&up(1), &order_adding(&[W]), Some(&settings()), &all).unwrap().unwrap();
        assert_eq!(given, NodeAllocation { bundle, assigned: generation, ..with("10.128.0.0/24") });
    }

    #[test]
    fn kubernetes_role_is_not_added_to_a_node_with_an_ipv6_address() {
        let none = NodeAllocations::new();
        let settings = settings();
        let mut node = up(1);
        node.status.as_mut().unwrap().address = "2001:db8::7".parse().unwrap();
        for role in [W, K] {
            let refusal = plan_allocation(&node, &order_adding(&[role]), Some(&settings), &none).unwrap_err();
            assert_eq!(refusal.code(), tonic::Code::FailedPrecondition);
            let text = refusal.to_string();
            assert!(text.contains(role) && text.contains("2001:db8::7") && text.contains("IPv4"), "{text}");
        }
        // Other roles are no matter of Kubernetes, and an owner may assign another address.
        assert_eq!(plan_allocation(&node, &order_adding(&["web"]), Some(&settings), &none).unwrap(), None);
        node.assigned_address = Some("10.0.0.1".parse().unwrap());
        assert!(plan_allocation(&node, &order_adding(&[W]), Some(&settings), &none).unwrap().is_some());
    }

    #[test]
    fn kubernetes_role_is_not_added_without_kubernetes() {
        let none = NodeAllocations::new();
        for role in [W, K] {
            let refusal = plan_allocation(&up(1), &order_adding(&["web", role]), None, &none).unwrap_err();
            assert_eq!(refusal.code(), tonic::Code::FailedPrecondition);
            assert!(refusal.to_string().contains(role), "{refusal}");
        }
        // Roles from before the settings existed, and orders about other roles.
        assert_eq!(plan_allocation(&worker(1), &order_adding(&[W]), None, &none).unwrap(), None);
        assert_eq!(plan_allocation(&up(1), &order_adding(&["web"]), None, &none).unwrap(), None);
        let take = RoleOrder { remove: order_adding(&[W, K]).add, ..RoleOrder::default() };
        assert_eq!(plan_allocation(&worker(1), &take, None, &none).unwrap(), None);
    }

    #[test]
    fn inconsistencies_are_repaired_one_by_one() {
        let settings = settings();
        let nodes: Nodes = [worker(1), worker(2), up(3)].into_iter().map(|node| (node.id, node)).collect();
        let mut all = NodeAllocations::from([
            (node_id(2), with("10.128.0.0/24")),
            (node_id(3), with("10.128.1.0/24")),
            (node_id(9), with("10.128.2.0/24")),
        ]);
        assert_eq!(
            find_inconsistency(Some(&settings), &nodes, &all),
            Some(Inconsistency::Orphaned(node_id(9)))
        );
        all.remove(&node_id(9));
        let missing = Inconsistency::Missing(node_id(1), with("10.128.2.0/24"));
        assert_eq!(find_inconsistency(Some(&settings), &nodes, &all), Some(missing));
        all.insert(node_id(1), with("10.128.2.0/24"));
        assert_eq!(find_inconsistency(Some(&settings), &nodes, &all), None);
        // A range of an earlier Kubernetes, with other ranges.
        all.insert(node_id(1), with("192.168.0.0/24"));
        assert_eq!(
            find_inconsistency(Some(&settings), &nodes, &all),
            Some(Inconsistency::Missing(node_id(1), with("10.128.2.0/24")))
        );
        assert_eq!(find_inconsistency(None, &nodes, &all), Some(Inconsistency::Orphaned(node_id(1))));
        assert_eq!(find_inconsistency(None, &nodes, &NodeAllocations::new()), None);
    }
}
