//! Plans changes of Kubernetes Node objects: role labels, deletion.
//!
//! A kubelet creates the object of its own node and writes nearly all of it. Two things are forbidden to it and are
//! left to the reconciler: labels below `node-role.kubernetes.io` (Kubernetes, "`NodeRestriction`"), and the deletion
//! of the object once nothing runs on the node any more.
//!
//! # When an object is deleted
//!
//! An object is deleted when the curator has no record of its node or has decommissioned it, or when the node has no
//! worker role and reports no kubelet any more. While it still reports one, its pods are being moved, for which the
//! kubelet needs the object. A kubelet whose object was deleted would not create it again before it restarts. So in
//! doubt the object stays: a record that cannot be read decides nothing, and an object is deleted only in the observed
//! state.
//!
//! The objects must be read before the records. A node has its record, with the role, before its kubelet creates the
//! object. In the other order, a node that is just starting would be taken for one that is gone.
//!
//! # Which objects
//!
//! Only objects whose name is one of our node ids. Nodes that others have added are not touched.

use std::collections::BTreeMap;

use etcd::client::Record;
use etcd::key_space::NODES;
use etcd::record;
use model::kubernetes::bundle_manifest::KUBELET;
use proto::curator::v1 as wire;
use serde_json::{Map, Value, json};

use crate::objects::object_kind::{ObjectKey, is_terminating, label, resource_version};
use crate::objects::object_plan::Precondition;

/// The label of nodes that run pods.
pub const WORKER_LABEL: &str = "node-role.kubernetes.io/worker";
/// The label of nodes that run the control plane of Kubernetes.
pub const CONTROL_PLANE_LABEL: &str = "node-role.kubernetes.io/control-plane";

/// The change of one Node object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeObjectChange {
    /// Delete it, if it is still in the observed state.
    Delete(Precondition),
    /// Apply this merge patch (RFC 7386), if it is still in the observed state.
    Patch(Value),
}

/// What a record shows of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RecordedNode {
    /// The record cannot be decoded.
    Unreadable,
    /// The node is a node of Kubernetes, or was one and still runs a kubelet.
    KubernetesNode { worker: bool, controller: bool },
    /// The node is no node of Kubernetes.
    NotKubernetes,
}

/// Plans the changes of these Node objects, with the records that were read after them.
///
/// Sorted by name. Objects that are as they should be are left out.
#[must_use]
pub fn plan_node_changes(objects: &[Value], records: &[Record]) -> Vec<(ObjectKey, NodeObjectChange)> {
    let reports: BTreeMap<&str, RecordedNode> = records
        .iter()
        .filter_map(|record| Some((record.key.strip_prefix(&NODES.range().start)?, recorded_node(record))))
        .collect();
    let mut all: Vec<(ObjectKey, NodeObjectChange)> = objects
        .iter()
        .filter_map(|object| {
            let key = ObjectKey::from_object(object);
            if !is_node_id(&key.name) || is_terminating(object) {
                return None;
            }
            let change = match reports.get(key.name.as_str()).unwrap_or(&RecordedNode::NotKubernetes) {
                RecordedNode::Unreadable => None,
                RecordedNode::NotKubernetes => {
                    Some(NodeObjectChange::Delete(Precondition::from_object(object)))
                }
                RecordedNode::KubernetesNode { worker, controller } => {
                    label_patch(object, &[(WORKER_LABEL, *worker), (CONTROL_PLANE_LABEL, *controller)])
                }
            };
            change.map(|change| (key, change))
        })
        .collect();
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    all
}

/// Whether the text is a node id of the curator: `node-` and 32 lower-case hexadecimal digits.
///
/// The curator's own type is not available here: objects outlive the records that would name them.
fn is_node_id(name: &str) -> bool {
    let digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    name.strip_prefix("node-").is_some_and(|digits| digits.len() == 32 && digits.bytes().all(digit))
}

fn recorded_node(record: &Record) -> RecordedNode {
    let read = record::decode(&record.key, &record.value, |node: &wire::NodeRecord| node.format);
    let Ok(wire::NodeRecord { node: Some(node), .. }) = read else { return RecordedNode::Unreadable };
    let roles = node.roles.clone().unwrap_or_default();
    let kubernetes = node.status.as_ref().and_then(|status| status.kubernetes.as_ref());
    let has_kubelet = kubernetes.is_some_and(|kubernetes_status| {
        kubernetes_status.components.iter().any(|component| component.name == KUBELET)
    });
    if node.state() == wire::NodeState::Decommissioned || !(roles.kubernetes_worker || has_kubelet) {
        return RecordedNode::NotKubernetes;
    }
    RecordedNode::KubernetesNode { worker: roles.kubernetes_worker, controller: roles.kubernetes_controller }
}

/// The patch that adds missing labels and removes the others; `None` if the labels are right.
fn label_patch(object: &Value, wanted: &[(&str, bool)]) -> Option<NodeObjectChange> {
    let labels: Map<String, Value> = wanted
        .iter()
        .filter(|(name, wanted)| *wanted != label(object, name).is_some())
        .map(|(name, wanted)| ((*name).to_owned(), if *wanted { json!("") } else { Value::Null }))
        .collect();
    let changes = !labels.is_empty();
    let version = resource_version(object);
    changes
        .then(|| NodeObjectChange::Patch(json!({"metadata": {"resourceVersion": version, "labels": labels}})))
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    const NODE: &str = "node-00112233445566778899aabbccddeeff";

    fn object(name: &str, labels: &[&str]) -> Value {
        let labels: Map<String, Value> = labels.iter().map(|name| ((*name).to_owned(), json!(""))).collect();
        json!({"metadata": {"name": name, "uid": "u", "resourceVersion": "7", "labels": labels}})
    }

    fn node(change: impl FnOnce(&mut wire::Node)) -> Record {
        let mut node = wire::Node {
            node_id: NODE.to_owned(),
            state: wire::NodeState::Up.into(),
            roles: Some(wire::NodeRoles::default()),
            status: Some(wire::NodeStatus::default()),
            ..Default::default()
        };
        change(&mut node);
        let stored = wire::NodeRecord { format: record::FORMAT, node: Some(node), ..Default::default() };
        record(stored.encode_to_vec())
    }

    fn record(value: Vec<u8>) -> Record {
        Record { key: NODES.key(NODE).unwrap(), value, create_revision: 1, mod_revision: 1 }
    }

    fn roles(node: &mut wire::Node) -> &mut wire::NodeRoles {
        node.roles.get_or_insert_default()
    }

    fn runs(node: &mut wire::Node, components: &[&str]) {
        let component =
            |name: &&str| wire::KubernetesComponentStatus { name: (*name).to_owned(), ..Default::default() };
        let components = components.iter().map(component).collect();
        node.status.get_or_insert_default().kubernetes =
            Some(wire::KubernetesStatus { components, ..Default::default() });
    }

    fn about(object: &Value, records: &[Record]) -> Option<NodeObjectChange> {
        let all = plan_node_changes(std::slice::from_ref(object), records);
        all.into_iter().next().map(|(key, change)| {
            assert_eq!(key, ObjectKey { namespace: None, name: NODE.to_owned() });
            change
        })
    }

    fn labels(labels: &Value) -> NodeObjectChange {
        NodeObjectChange::Patch(json!({"metadata": {"resourceVersion": "7", "labels": labels}}))
    }

    #[test]
    fn object_is_deleted_only_when_its_node_is_certainly_gone() {
        let seen = object(NODE, &[WORKER_LABEL]);
        let gone = Some(NodeObjectChange::Delete(Precondition::from_object(&seen)));
        let empty = wire::NodeRecord { format: record::FORMAT, node: None, ..Default::default() };
        let newer = wire::NodeRecord { format: record::FORMAT + 1, ..empty.clone() };
        for (what, records, expected) in [
            ("no record", vec![], gone.clone()),
            ("no role, and nothing reported", vec![node(|node| node.status = None)], gone.clone()),
            ("no role, and nothing runs", vec![node(|_| {})], gone.clone()),
            ("roles were never reported", vec![node(|node| node.roles = None)], gone.clone()),
            ("what runs is no kubelet", vec![node(|node| runs(node, &["kube-apiserver"]))], gone.clone()),
            (
                "it still hands over",
                vec![node(|node| runs(node, &["containerd", KUBELET]))],
                Some(labels(&json!({WORKER_LABEL: null}))),
            ),
            (
                "it has the role, and has reported nothing yet",
                vec![node(|node| roles(node).kubernetes_worker = true)],
                None,
            ),
            (
                "it is decommissioned, whatever it reported last",
                vec![node(|node| {
                    roles(node).kubernetes_worker = true;
                    runs(node, &[KUBELET]);
                    node.set_state(wire::NodeState::Decommissioned);
                })],
                gone,
            ),
            ("garbage", vec![record(b"\xff".to_vec())], None),
            ("a record without a node", vec![record(empty.encode_to_vec())], None),
            ("a record of a newer release", vec![record(newer.encode_to_vec())], None),
        ] {
            assert_eq!(about(&seen, &records), expected, "{what}");
        }
    }

    #[test]
    fn roles_become_labels_and_other_labels_stay() {
        let other = "node-role.kubernetes.io/gpu";
        let worker = |node: &mut wire::Node| roles(node).kubernetes_worker = true;
        let both = |node: &mut wire::Node| {
            worker(node);
            roles(node).kubernetes_controller = true;
        };
        for (labelled, record, expected) in [
            (&[][..], node(worker), Some(labels(&json!({WORKER_LABEL: ""})))),
            (&[other], node(worker), Some(labels(&json!({WORKER_LABEL: ""})))),
            (&[other, WORKER_LABEL], node(worker), None),
            (
                &[WORKER_LABEL, CONTROL_PLANE_LABEL],
                node(worker),
                Some(labels(&json!({CONTROL_PLANE_LABEL: null}))),
            ),
            (&[], node(both), Some(labels(&json!({WORKER_LABEL: "", CONTROL_PLANE_LABEL: ""})))),
            (&[WORKER_LABEL, CONTROL_PLANE_LABEL], node(both), None),
        ] {
            assert_eq!(about(&object(NODE, labelled), &[record]), expected, "{labelled:?}");
        }
    }

    #[test]
    fn foreign_and_terminating_objects_are_ignored() {
        let mut ending = object(NODE, &[]);
        ending["metadata"]["deletionTimestamp"] = json!("2030-01-01T00:00:00Z");
        let upper = NODE.to_uppercase();
        for left in [ending, object("virtual-kubelet", &[]), object("node-1", &[]), object(&upper, &[])] {
            assert_eq!(plan_node_changes(std::slice::from_ref(&left), &[]), [], "{left}");
        }
    }
}
