//! Node records: state, roles and labels, validated on read and write.
//!
//! There is one record per node, under its id, in the encoding of `proto/shepherd/curator/v1/storage.proto`. A record
//! that breaks a rule is neither written nor read. So every decision may rely on the rules, and none has to handle a
//! node that breaks them.
//!
//! The rules: the id is derived from the key, and is the one in the etcd key; a Kubernetes controller is a consensus
//! member; a node that is not up has no roles. The status in a record has rules of its own
//! ([`node_status`](crate::node_status)).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use etcd::key_space::{KeyError, NODES};
use etcd::record::{self, InvalidRecord, RecordError};
use model::ids::MachineId;
use model::label::{self, Labels};
use model::node_role::{self, DeclaredRole, NodeRole};
use model::time::{Timestamp, parse_timestamp};
use prost::Message as _;
use proto::curator::v1 as wire;

use crate::node_id::{NodeId, PublicKey};
use crate::node_status::NodeStatus;
use crate::ticket_id::TicketId;

/// The state of a node in its lifecycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NodeState {
    /// Registered with a ticket, and not approved yet.
    New,
    /// Approved, and not committed yet.
    Standby,
    /// Part of the cluster.
    Up,
    /// Permanently out of the cluster.
    Decommissioned,
}

impl NodeState {
    /// The state as messages have it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Standby => "on standby",
            Self::Up => "up",
            Self::Decommissioned => "decommissioned",
        }
    }

    /// The state as a number of the API.
    #[must_use]
    pub const fn to_wire(self) -> wire::NodeState {
        match self {
            Self::New => wire::NodeState::New,
            Self::Standby => wire::NodeState::Standby,
            Self::Up => wire::NodeState::Up,
            Self::Decommissioned => wire::NodeState::Decommissioned,
        }
    }

    /// The state of a number of the API; the error is part of a sentence.
    pub fn from_wire(state: i32) -> Result<Self, String> {
        match wire::NodeState::try_from(state) {
            Ok(wire::NodeState::New) => Ok(Self::New),
            Ok(wire::NodeState::Standby) => Ok(Self::Standby),
            Ok(wire::NodeState::Up) => Ok(Self::Up),
            Ok(wire::NodeState::Decommissioned) => Ok(Self::Decommissioned),
            Ok(wire::NodeState::Unspecified) | Err(_) => {
                Err(format!("its state is {state}, which does not exist"))
            }
        }
    }
}

/// What a node needs to run its etcd member.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ConsensusMember {
    /// etcd's number for this membership; with another number, the data directory is worthless.
    pub member_id: u64,
    /// Peer URLs of the other members when this was written, for the first start of etcd.
    pub peers: BTreeMap<NodeId, String>,
}

/// The roles of a node, with what it needs for them.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct NodeRoles {
    /// The node runs etcd and a curator.
    pub consensus_member: Option<ConsensusMember>,
    /// The node runs the Kubernetes control plane.
    pub kubernetes_controller: bool,
    /// The node runs Kubernetes workloads.
    pub kubernetes_worker: bool,
    /// Roles that operators declared.
    pub declared: BTreeSet<DeclaredRole>,
}

impl NodeRoles {
    /// The names of the roles, in the order in which nodes are described.
    #[must_use]
    pub fn names(&self) -> BTreeSet<NodeRole> {
        let built_in = [
            (self.consensus_member.is_some(), NodeRole::ConsensusMember),
            (self.kubernetes_controller, NodeRole::KubernetesController),
            (self.kubernetes_worker, NodeRole::KubernetesWorker),
        ];
        let built_in = built_in.into_iter().filter_map(|(has, role)| has.then_some(role));
        built_in.chain(self.declared.iter().cloned().map(NodeRole::Declared)).collect()
    }

    /// Whether the node has no role.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn to_wire(&self) -> wire::NodeRoles {
        wire::NodeRoles {
            consensus_member: self.consensus_member.as_ref().map(|role| wire::ConsensusMember {
                member_id: role.member_id,
                peers: role
                    .peers
                    .iter()
                    .map(|(node, url)| wire::ConsensusPeer {
                        node_id: node.to_string(),
                        peer_url: url.clone(),
                    })
                    .collect(),
            }),
            kubernetes_controller: self.kubernetes_controller,
            kubernetes_worker: self.kubernetes_worker,
            declared_roles: self.declared.iter().map(ToString::to_string).collect(),
        }
    }

    fn from_wire(roles: wire::NodeRoles) -> Result<Self, String> {
        let consensus_member = match roles.consensus_member {
            None => None,
            Some(role) => {
                let peers =
                    role.peers.into_iter().map(|peer| Ok((parse_node_id(&peer.node_id)?, peer.peer_url)));
                Some(ConsensusMember {
                    member_id: role.member_id,
                    peers: peers.collect::<Result<_, String>>()?,
                })
            }
        };
        let declared = roles.declared_roles.iter().map(|name| name.parse().map_err(error_text));
        Ok(Self {
            consensus_member,
            kubernetes_controller: roles.kubernetes_controller,
            kubernetes_worker: roles.kubernetes_worker,
            declared: declared.collect::<Result<_, String>>()?,
        })
    }
}

/// The record of a node.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// The node's id, derived from its key.
    pub id: NodeId,
    /// The Ed25519 public key that the node proves.
    pub key: PublicKey,
    /// The machine it runs on; `None` if the node named none.
    pub machine: Option<MachineId>,
    /// The state in its lifecycle.
    pub state: NodeState,
    /// When it entered that state.
    pub state_since: Timestamp,
    /// The roles that the node runs.
    pub roles: NodeRoles,
    /// The status it reported last; `None` before the first report.
    pub status: Option<NodeStatus>,
    /// Labels, from registration or set by owners.
    pub labels: Labels,
    /// When it registered first.
    pub registered_at: Timestamp,
    /// The ticket it registered with; `None` for the node that bootstrapped the cluster.
    pub ticket: Option<TicketId>,
    /// The address that an owner assigned to it; `None` if its connections prove its address.
    pub assigned_address: Option<IpAddr>,
}

impl Node {
    /// A new node without machine, roles, status or labels.
    #[must_use]
    pub fn new(key: PublicKey, state: NodeState, now: Timestamp) -> Self {
        Self {
            id: NodeId::from_key(&key),
            key,
            machine: None,
            state,
            state_since: now,
            roles: NodeRoles::default(),
            status: None,
            labels: Labels::new(),
            registered_at: now,
            ticket: None,
            assigned_address: None,
        }
    }

    /// The etcd key of the record.
    pub fn etcd_key(id: &NodeId) -> Result<String, KeyError> {
        NODES.key(id)
    }

    /// The node as the API shows it.
    #[must_use]
    pub fn to_wire(&self) -> wire::Node {
        wire::Node {
            node_id: self.id.to_string(),
            public_key: self.key.0.to_vec(),
            machine_id: self.machine.map(|machine| machine.to_string()).unwrap_or_default(),
            state: self.state.to_wire().into(),
            roles: Some(self.roles.to_wire()),
            status: self.status.as_ref().map(NodeStatus::to_wire),
            labels: self.labels.clone(),
            registered_at_ms: self.registered_at.timestamp_millis(),
            state_since_ms: self.state_since.timestamp_millis(),
        }
    }

    /// Encodes the record for etcd.
    ///
    /// Times are stored in milliseconds.
    pub fn encode(&self) -> Result<Vec<u8>, InvalidRecord> {
        self.validate().map_err(|fault| InvalidRecord { subject: self.id.to_string(), fault })?;
        let record = wire::NodeRecord {
            format: record::FORMAT,
            node: Some(self.to_wire()),
            ticket_id: self.ticket.as_ref().map(ToString::to_string).unwrap_or_default(),
            assigned_address: self.assigned_address.map(|address| address.to_string()).unwrap_or_default(),
        };
        Ok(record.encode_to_vec())
    }

    /// Decodes the record that is stored under `key`.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let fault = |fault: String| RecordError::new(key, fault);
        let id = NODES.id_of(key).map_err(|error| fault(error.to_string()))?;
        let record = record::decode(key, bytes, |record: &wire::NodeRecord| record.format)?;
        let ticket = match record.ticket_id.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|error| fault(error_text(error)))?),
        };
        let assigned_address: Option<IpAddr> = match record.assigned_address.as_str() {
            "" => None,
            text => Some(
                text.parse().map_err(|_| fault("its assigned address is not an IP address".to_owned()))?,
            ),
        };
        let node = record.node.ok_or_else(|| fault("it has no node".to_owned()))?;
        let node = Self { assigned_address, ..Self::from_wire(node, ticket).map_err(fault)? };
        if node.id.to_string() != id {
            return Err(fault(format!("it is that of {}", node.id)));
        }
        Ok(node)
    }

    /// Reads a node from an API message; the error is part of a sentence.
    pub fn from_wire(node: wire::Node, ticket: Option<TicketId>) -> Result<Self, String> {
        let status = match node.status {
            None => None,
            Some(status) => Some(NodeStatus::from_report(
                &status,
                parse_timestamp("reported_at", status.reported_at_ms)?,
            )?),
        };
        for (key, value) in &node.labels {
            label::check_label_key(key).and_then(|()| label::check_label_value(value))?;
        }
        let machine = match node.machine_id.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|_| {
                let shown: String = text.chars().take(100).collect();
                format!("its machine is {shown:?}, which is no UUID")
            })?),
        };
        let node = Self {
            id: parse_node_id(&node.node_id)?,
            key: PublicKey::from_slice(&node.public_key)?,
            machine,
            state: NodeState::from_wire(node.state)?,
            state_since: parse_timestamp("state_since", node.state_since_ms)?,
            roles: NodeRoles::from_wire(node.roles.unwrap_or_default())?,
            status,
            labels: node.labels,
            registered_at: parse_timestamp("registered_at", node.registered_at_ms)?,
            ticket,
            assigned_address: None,
        };
        node.validate()?;
        Ok(node)
    }

    /// Checks the rules of the module docs.
    fn validate(&self) -> Result<(), String> {
        if NodeId::from_key(&self.key) != self.id {
            return Err(format!(
                "its id is {}, and that of its key {}",
                self.id,
                NodeId::from_key(&self.key)
            ));
        }
        if self.roles.kubernetes_controller && self.roles.consensus_member.is_none() {
            return Err(format!(
                "it is a {} and no {}",
                NodeRole::KubernetesController,
                NodeRole::ConsensusMember
            ));
        }
        if self.state != NodeState::Up && !self.roles.is_empty() {
            return Err(format!(
                "it is {} and has roles: {}",
                self.state.as_str(),
                node_role::join_names(self.roles.names())
            ));
        }
        Ok(())
    }
}

fn parse_node_id(text: &str) -> Result<NodeId, String> {
    text.parse().map_err(error_text)
}

fn error_text(error: impl std::error::Error) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node_status::tests::sample_report;
    use crate::testing::{at, key, node_id, up};

    fn full() -> Node {
        Node {
            machine: Some("11111111-1111-4111-8111-111111111111".parse().unwrap()),
            roles: NodeRoles {
                consensus_member: Some(ConsensusMember {
                    member_id: u64::MAX,
                    peers: BTreeMap::from([(node_id(9), "https://10.0.0.9:7834".to_owned())]),
                }),
                kubernetes_controller: true,
                kubernetes_worker: true,
                declared: BTreeSet::from(["web".parse().unwrap(), "database".parse().unwrap()]),
            },
            status: Some(NodeStatus::from_report(&sample_report(), at(3)).unwrap()),
            labels: Labels::from([("row".to_owned(), "7".to_owned())]),
            ticket: Some("00112233445566ff".parse().unwrap()),
            assigned_address: Some([10, 0, 0, 7].into()),
            state_since: at(2),
            ..Node::new(key(7), NodeState::Up, at(1))
        }
    }

    fn stored(node: &Node) -> wire::NodeRecord {
        wire::NodeRecord::decode(node.encode().unwrap().as_slice()).unwrap()
    }

    #[test]
    fn record_round_trips_with_every_field() {
        for node in [full(), up(3), Node::new(key(4), NodeState::New, at(0))] {
            let key = Node::etcd_key(&node.id).unwrap();
            assert_eq!(Node::decode(&key, &node.encode().unwrap()).unwrap(), node);
        }
        let record = stored(&full());
        let node = record.node.unwrap();
        // A field that was lost on the way would be empty here.
        assert!(!node.machine_id.is_empty() && !node.labels.is_empty() && !record.ticket_id.is_empty());
        let status = node.status.unwrap();
        assert_eq!((status.services.len(), status.kubernetes.is_some()), (1, true));
        assert_eq!(node.roles.unwrap().declared_roles, ["database", "web"], "in order of the alphabet");
    }

    #[test]
    fn encoding_is_deterministic() {
        assert_eq!(full().encode().unwrap(), full().encode().unwrap());
    }

    #[test]
    fn unreadable_record_error_names_key_and_fault() {
        type Change = fn(&mut wire::NodeRecord);
        fn node(record: &mut wire::NodeRecord) -> &mut wire::Node {
            record.node.as_mut().unwrap()
        }
        let cases: [(Change, &str); 16] = [
            (|record| record.node = None, "no node"),
            (|record| record.format = 2, "format 2"),
            (|record| record.ticket_id = "7".to_owned(), "ticket"),
            (|record| record.assigned_address = "7".to_owned(), "not an IP address"),
            (|record| node(record).node_id = "7".to_owned(), "no node id"),
            (|record| node(record).node_id = node_id(8).to_string(), "that of its key"),
            (|record| node(record).public_key = vec![1], "1 bytes"),
            (|record| node(record).machine_id = "7".to_owned(), "no UUID"),
            (|record| node(record).state = 0, "its state is 0"),
            (|record| node(record).state = 9, "its state is 9"),
            (|record| node(record).state = wire::NodeState::Standby.into(), "on standby and has roles"),
            (
                |record| node(record).roles.as_mut().unwrap().consensus_member = None,
                "and no consensus-member",
            ),
            (
                |record| {
                    node(record).roles.as_mut().unwrap().declared_roles.push("consensus-member".to_owned());
                },
                "built-in",
            ),
            (
                |record| drop(node(record).labels.insert("-".to_owned(), String::new())),
                "not a valid key of a label",
            ),
            (|record| node(record).registered_at_ms = 0, "registered_at"),
            (|record| node(record).status.as_mut().unwrap().external_address.clear(), "external_address"),
        ];
        let key = Node::etcd_key(&full().id).unwrap();
        for (change, text) in cases {
            let mut record = stored(&full());
            change(&mut record);
            let error = Node::decode(&key, &record.encode_to_vec()).unwrap_err();
            assert_eq!(error.key, key);
            let sentence = error.to_string();
            assert!(sentence.contains(text) && sentence.contains(&key), "{text}: {sentence}");
        }
    }

    #[test]
    fn record_under_another_key_is_refused() {
        let bytes = up(3).encode().unwrap();
        let other = Node::etcd_key(&node_id(4)).unwrap();
        assert!(Node::decode(&other, &bytes).unwrap_err().to_string().contains("it is that of"));
        assert!(Node::decode("/elsewhere/x", &bytes).is_err());
    }

    #[test]
    fn record_that_breaks_an_invariant_is_not_written() {
        let mut controller = up(3);
        controller.roles.kubernetes_controller = true;
        let mut gone = up(3);
        (gone.state, gone.roles.kubernetes_worker) = (NodeState::Decommissioned, true);
        let mut other = up(3);
        other.id = node_id(4);
        for node in [controller, gone, other] {
            let error = node.encode().unwrap_err().to_string();
            assert!(error.contains("was not written"), "{error}");
        }
    }
}
