//! What is done about the objects of nodes: which go, and which roles they are said to have.
//!
//! A kubelet makes the object of its own node and says nearly all of it. What it may not do stays for whoever keeps the
//! built-in objects: a label below `node-role.kubernetes.io` (Kubernetes, "`NodeRestriction`"), and to have the object
//! deleted once nothing runs on the node any more.
//!
//! # When an object goes
//!
//! When the curator has no record of its node or has decommissioned it, or when the node has not the role of a worker and
//! says of no kubelet any more. Until it says so, its pods are still being handed over, for which the kubelet needs the
//! object. A kubelet whose object goes would not make it again before it is started anew, so in doubt it stays: a record
//! that cannot be read decides nothing, and an object is deleted only as it was seen.
//!
//! The objects must have been read before the records were. A node has its record, with the role, before its kubelet makes
//! the object; the other way round, one that is just beginning would be taken for one that is gone.
//!
//! # Whose objects
//!
//! Those whose name is a node id of ours. Whoever adds other nodes looks after them.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::etcd::client::Record;
use crate::etcd::key_space::NODES;
use crate::etcd::record;
use crate::model::kubernetes::bundle::KUBELET;
use crate::proto::curator::v1 as wire;
use crate::reconciler::objects::kind::{Key, is_ending, label, resource_version};
use crate::reconciler::objects::plan::Precondition;

/// The label of those that run pods.
pub const WORKER: &str = "node-role.kubernetes.io/worker";
/// The label of those that run the control plane of Kubernetes.
pub const CONTROL_PLANE: &str = "node-role.kubernetes.io/control-plane";

/// What is done about one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Amendment {
    /// It goes, if it is as it was seen.
    Delete(Precondition),
    /// It is changed in this (RFC 7386), if it is as it was seen.
    Change(Value),
}

/// What a record says of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    /// Nobody can read it.
    Unknown,
    /// It is a node of Kubernetes, or was and has not ended.
    Is { worker: bool, controller: bool },
    /// It is none.
    IsNone,
}

/// What is done about the objects, of which there are these, with the records as they were read after them.
///
/// In order of their names; nothing of one that is as it should be.
#[must_use]
pub fn amendments(objects: &[Value], records: &[Record]) -> Vec<(Key, Amendment)> {
    let said: BTreeMap<&str, Said> = records
        .iter()
        .filter_map(|record| Some((record.key.strip_prefix(&NODES.range().start)?, said(record))))
        .collect();
    let mut all: Vec<(Key, Amendment)> = objects
        .iter()
        .filter_map(|object| {
            let key = Key::of(object);
            if !is_node_id(&key.name) || is_ending(object) {
                return None;
            }
            let amendment = match said.get(key.name.as_str()).unwrap_or(&Said::IsNone) {
                Said::Unknown => None,
                Said::IsNone => Some(Amendment::Delete(Precondition::of(object))),
                Said::Is { worker, controller } => {
                    change(object, &[(WORKER, *worker), (CONTROL_PLANE, *controller)])
                }
            };
            amendment.map(|amendment| (key, amendment))
        })
        .collect();
    all.sort_by(|(a, _), (b, _)| a.cmp(b));
    all
}

/// Whether the curator could have a node of this id: `node-` and 32 lower-case hexadecimal digits.
///
/// The curator has a type for it, which is not known here: objects outlive the records that would name them.
fn is_node_id(name: &str) -> bool {
    let digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    name.strip_prefix("node-").is_some_and(|digits| digits.len() == 32 && digits.bytes().all(digit))
}

fn said(record: &Record) -> Said {
    let read = record::decode(&record.key, &record.value, |node: &wire::NodeRecord| node.format);
    let Ok(wire::NodeRecord { node: Some(node), .. }) = read else { return Said::Unknown };
    let roles = node.roles.clone().unwrap_or_default();
    let kubernetes = node.status.as_ref().and_then(|status| status.kubernetes.as_ref());
    let has_kubelet =
        kubernetes.is_some_and(|said| said.components.iter().any(|component| component.name == KUBELET));
    if node.state() == wire::NodeState::Decommissioned || !(roles.kubernetes_worker || has_kubelet) {
        return Said::IsNone;
    }
    Said::Is { worker: roles.kubernetes_worker, controller: roles.kubernetes_controller }
}

/// What makes an object carry the labels that it should, and not the others; nothing where it is so.
fn change(object: &Value, wanted: &[(&str, bool)]) -> Option<Amendment> {
    let labels: Map<String, Value> = wanted
        .iter()
        .filter(|(name, wanted)| *wanted != label(object, name).is_some())
        .map(|(name, wanted)| ((*name).to_owned(), if *wanted { json!("") } else { Value::Null }))
        .collect();
    let changes = !labels.is_empty();
    let version = resource_version(object);
    changes.then(|| Amendment::Change(json!({"metadata": {"resourceVersion": version, "labels": labels}})))
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
        let stored = wire::NodeRecord { format: record::FORMAT, node: Some(node), ticket_id: String::new() };
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

    fn about(object: &Value, records: &[Record]) -> Option<Amendment> {
        let all = amendments(std::slice::from_ref(object), records);
        all.into_iter().next().map(|(key, amendment)| {
            assert_eq!(key, Key { namespace: None, name: NODE.to_owned() });
            amendment
        })
    }

    fn labels(labels: &Value) -> Amendment {
        Amendment::Change(json!({"metadata": {"resourceVersion": "7", "labels": labels}}))
    }

    #[test]
    fn object_goes_when_nothing_of_its_node_is_left_and_in_doubt_it_stays() {
        let seen = object(NODE, &[WORKER]);
        let gone = Some(Amendment::Delete(Precondition::of(&seen)));
        let empty = wire::NodeRecord { format: record::FORMAT, node: None, ticket_id: String::new() };
        let newer = wire::NodeRecord { format: record::FORMAT + 1, ..empty.clone() };
        for (what, records, expected) in [
            ("no record", vec![], gone.clone()),
            ("no role, and nothing said", vec![node(|node| node.status = None)], gone.clone()),
            ("no role, and nothing runs", vec![node(|_| {})], gone.clone()),
            ("roles were never said", vec![node(|node| node.roles = None)], gone.clone()),
            ("what runs is no kubelet", vec![node(|node| runs(node, &["kube-apiserver"]))], gone.clone()),
            (
                "it still hands over",
                vec![node(|node| runs(node, &["containerd", KUBELET]))],
                Some(labels(&json!({WORKER: null}))),
            ),
            (
                "it has the role, and has said nothing yet",
                vec![node(|node| roles(node).kubernetes_worker = true)],
                None,
            ),
            (
                "it is decommissioned, whatever it said last",
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
    fn roles_are_said_by_labels_and_no_other_label_is_touched() {
        let other = "node-role.kubernetes.io/gpu";
        let worker = |node: &mut wire::Node| roles(node).kubernetes_worker = true;
        let both = |node: &mut wire::Node| {
            worker(node);
            roles(node).kubernetes_controller = true;
        };
        for (labelled, record, expected) in [
            (&[][..], node(worker), Some(labels(&json!({WORKER: ""})))),
            (&[other], node(worker), Some(labels(&json!({WORKER: ""})))),
            (&[other, WORKER], node(worker), None),
            (&[WORKER, CONTROL_PLANE], node(worker), Some(labels(&json!({CONTROL_PLANE: null})))),
            (&[], node(both), Some(labels(&json!({WORKER: "", CONTROL_PLANE: ""})))),
            (&[WORKER, CONTROL_PLANE], node(both), None),
        ] {
            assert_eq!(about(&object(NODE, labelled), &[record]), expected, "{labelled:?}");
        }
    }

    #[test]
    fn objects_of_others_and_those_that_end_already_are_left() {
        let mut ending = object(NODE, &[]);
        ending["metadata"]["deletionTimestamp"] = json!("2030-01-01T00:00:00Z");
        let upper = NODE.to_uppercase();
        for left in [ending, object("virtual-kubelet", &[]), object("node-1", &[]), object(&upper, &[])] {
            assert_eq!(amendments(std::slice::from_ref(&left), &[]), [], "{left}");
        }
    }
}
