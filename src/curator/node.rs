//! A node as the cluster keeps it.
//!
//! One record per node, under its id, in the encoding of `proto/shepherd/curator/v1/storage.proto`. What is
//! in it is checked both ways: a record that breaks a rule is neither written nor read, so that every
//! decision may rely on the rules and none has to ask what to do about a node that cannot be.
//!
//! The rules: the id is that of the key, and of the key in etcd; a Kubernetes controller is a consensus
//! member; a node that is not up has no roles.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use prost::Message as _;

use crate::curator::kubernetes;
use crate::curator::node_id::{NodeId, PublicKey};
use crate::curator::tickets::TicketId;
use crate::etcd::key_space::{KeyError, NODES};
use crate::etcd::record::{self, BrokenRecord, RecordError, moment};
use crate::model::ids::MachineId;
use crate::model::label::{self, Labels};
use crate::model::role::{self, DeclaredRole, Role};
use crate::model::time::Timestamp;
use crate::proto::curator::v1 as wire;

/// Most services that a node reports on.
const MOST_SERVICES: usize = 256;
/// Longest text that a node says of itself, in bytes.
const LONGEST_TEXT: usize = 1000;

/// Where a node stands in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// Registered with a ticket; nobody has approved it.
    New,
    /// Approved; it has not committed.
    Standby,
    /// Part of the cluster.
    Up,
    /// Out of the cluster for ever.
    Decommissioned,
}

impl State {
    /// As it stands in sentences.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Standby => "on standby",
            Self::Up => "up",
            Self::Decommissioned => "decommissioned",
        }
    }

    /// As it is sent.
    #[must_use]
    pub const fn to_wire(self) -> wire::NodeState {
        match self {
            Self::New => wire::NodeState::New,
            Self::Standby => wire::NodeState::Standby,
            Self::Up => wire::NodeState::Up,
            Self::Decommissioned => wire::NodeState::Decommissioned,
        }
    }

    pub(super) fn from_wire(state: i32) -> Result<Self, String> {
        match wire::NodeState::try_from(state) {
            Ok(wire::NodeState::New) => Ok(Self::New),
            Ok(wire::NodeState::Standby) => Ok(Self::Standby),
            Ok(wire::NodeState::Up) => Ok(Self::Up),
            Ok(wire::NodeState::Decommissioned) => Ok(Self::Decommissioned),
            Ok(wire::NodeState::Unspecified) | Err(_) => Err(format!("its state is {state}, which is none")),
        }
    }
}

/// What a node needs to run its member of etcd.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ConsensusMember {
    /// etcd's number for this membership; another one makes what is in the data directory worthless.
    pub member: u64,
    /// Peer URLs of the other members when this was written, for the first start.
    pub peers: BTreeMap<NodeId, String>,
}

/// The roles of a node, with what it needs for them.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Roles {
    /// Runs etcd and a curator.
    pub consensus_member: Option<ConsensusMember>,
    /// Runs the Kubernetes control plane.
    pub kubernetes_controller: bool,
    /// Runs Kubernetes workloads.
    pub kubernetes_worker: bool,
    /// Operators' own.
    pub declared: BTreeSet<DeclaredRole>,
}

impl Roles {
    /// Their names, in the order in which nodes are described.
    #[must_use]
    pub fn names(&self) -> BTreeSet<Role> {
        let built_in = [
            (self.consensus_member.is_some(), Role::ConsensusMember),
            (self.kubernetes_controller, Role::KubernetesController),
            (self.kubernetes_worker, Role::KubernetesWorker),
        ];
        let built_in = built_in.into_iter().filter_map(|(has, role)| has.then_some(role));
        built_in.chain(self.declared.iter().cloned().map(Role::Declared)).collect()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn to_wire(&self) -> wire::NodeRoles {
        wire::NodeRoles {
            consensus_member: self.consensus_member.as_ref().map(|role| wire::ConsensusMember {
                member_id: role.member,
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
            declared: self.declared.iter().map(ToString::to_string).collect(),
        }
    }

    fn from_wire(roles: wire::NodeRoles) -> Result<Self, String> {
        let consensus_member = match roles.consensus_member {
            None => None,
            Some(role) => {
                let peers = role.peers.into_iter().map(|peer| Ok((node_id(&peer.node_id)?, peer.peer_url)));
                Some(ConsensusMember { member: role.member_id, peers: peers.collect::<Result<_, String>>()? })
            }
        };
        let declared = roles.declared.iter().map(|name| name.parse().map_err(sentence));
        Ok(Self {
            consensus_member,
            kubernetes_controller: roles.kubernetes_controller,
            kubernetes_worker: roles.kubernetes_worker,
            declared: declared.collect::<Result<_, String>>()?,
        })
    }
}

/// What a node said of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Status {
    /// Where others reach it.
    pub address: IpAddr,
    /// Port of its curator, if one runs.
    pub curator_port: Option<u16>,
    /// Version of its role server.
    pub version: String,
    /// Boot id of the running kernel.
    pub boot_id: String,
    /// How its services do; checked to be well-formed.
    pub services: Vec<wire::ServiceStatus>,
    /// What it runs of Kubernetes; checked to be well-formed.
    pub kubernetes: Option<wire::KubernetesStatus>,
    /// When the curator took it.
    pub reported_at: Timestamp,
}

impl Status {
    /// Takes what a node says of itself at `now`; the error names the field.
    pub fn from_report(report: &wire::NodeStatus, now: Timestamp) -> Result<Self, String> {
        let address: IpAddr = report.external_address.parse().map_err(|_| {
            format!(
                "external_address is {:?}, and an IP address is wanted",
                shortened(&report.external_address)
            )
        })?;
        if address.is_unspecified() || address.is_multicast() {
            return Err(format!("external_address is {address}, which reaches no node"));
        }
        let curator_port = match u16::try_from(report.curator_port) {
            Ok(0) => None,
            Ok(port) => Some(port),
            Err(_) => return Err(format!("curator_port is {}; the highest is 65535", report.curator_port)),
        };
        for (field, text) in [("version", &report.version), ("boot_id", &report.boot_id)] {
            if text.len() > LONGEST_TEXT {
                return Err(format!("{field} has {} bytes; {LONGEST_TEXT} are enough", text.len()));
            }
        }
        if report.services.len() > MOST_SERVICES {
            let count = report.services.len();
            return Err(format!("services has {count} entries; {MOST_SERVICES} are enough"));
        }
        report.services.iter().try_for_each(check_service)?;
        report.kubernetes.as_ref().map_or(Ok(()), kubernetes::status::check)?;
        Ok(Self {
            address,
            curator_port,
            version: report.version.clone(),
            boot_id: report.boot_id.clone(),
            services: report.services.clone(),
            kubernetes: report.kubernetes.clone(),
            reported_at: now,
        })
    }

    fn to_wire(&self) -> wire::NodeStatus {
        wire::NodeStatus {
            external_address: self.address.to_string(),
            curator_port: self.curator_port.unwrap_or(0).into(),
            version: self.version.clone(),
            boot_id: self.boot_id.clone(),
            services: self.services.clone(),
            reported_at_ms: self.reported_at.timestamp_millis(),
            kubernetes: self.kubernetes.clone(),
        }
    }
}

/// A node as the cluster keeps it.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Its id; that of its key.
    pub id: NodeId,
    /// Its key.
    pub key: PublicKey,
    /// The machine it runs on, if anybody said.
    pub machine: Option<MachineId>,
    /// Where it stands in its life.
    pub state: State,
    /// Since when.
    pub state_since: Timestamp,
    /// What it is to do.
    pub roles: Roles,
    /// What it said of itself, once it did.
    pub status: Option<Status>,
    /// What people say of it.
    pub labels: Labels,
    /// When it registered.
    pub registered_at: Timestamp,
    /// The ticket it registered with; none for the node that bootstrapped the cluster.
    pub ticket: Option<TicketId>,
}

impl Node {
    /// A node that has just come, and has nothing yet.
    #[must_use]
    pub fn new(key: PublicKey, state: State, now: Timestamp) -> Self {
        Self {
            id: NodeId::of(&key),
            key,
            machine: None,
            state,
            state_since: now,
            roles: Roles::default(),
            status: None,
            labels: Labels::new(),
            registered_at: now,
            ticket: None,
        }
    }

    /// Its key in etcd.
    pub fn etcd_key(id: &NodeId) -> Result<String, KeyError> {
        NODES.key(id)
    }

    /// As watchers see it.
    #[must_use]
    pub fn to_wire(&self) -> wire::Node {
        wire::Node {
            node_id: self.id.to_string(),
            public_key: self.key.0.to_vec(),
            machine_id: self.machine.map(|machine| machine.to_string()).unwrap_or_default(),
            state: self.state.to_wire().into(),
            roles: Some(self.roles.to_wire()),
            status: self.status.as_ref().map(Status::to_wire),
            labels: self.labels.clone(),
            registered_at_ms: self.registered_at.timestamp_millis(),
            state_since_ms: self.state_since.timestamp_millis(),
        }
    }

    /// As it is stored.
    ///
    /// Times are kept to the millisecond.
    pub fn encode(&self) -> Result<Vec<u8>, BrokenRecord> {
        self.check().map_err(|fault| BrokenRecord { whose: self.id.to_string(), fault })?;
        let record = wire::NodeRecord {
            format: record::FORMAT,
            node: Some(self.to_wire()),
            ticket_id: self.ticket.as_ref().map(ToString::to_string).unwrap_or_default(),
        };
        Ok(record.encode_to_vec())
    }

    /// Reads what is stored under `key`.
    pub fn decode(key: &str, bytes: &[u8]) -> Result<Self, RecordError> {
        let fault = |fault: String| RecordError::new(key, fault);
        let id = NODES.id(key).map_err(|error| fault(error.to_string()))?;
        let record = record::decode(key, bytes, |record: &wire::NodeRecord| record.format)?;
        let ticket = match record.ticket_id.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|error| fault(sentence(error)))?),
        };
        let node = record.node.ok_or_else(|| fault("it has no node".to_owned()))?;
        let node = Self::from_wire(node, ticket).map_err(fault)?;
        if node.id.to_string() != id {
            return Err(fault(format!("it is that of {}", node.id)));
        }
        Ok(node)
    }

    /// Takes a node as the curator sent it; the error is a part of a sentence.
    pub fn from_wire(node: wire::Node, ticket: Option<TicketId>) -> Result<Self, String> {
        let status = match node.status {
            None => None,
            Some(status) => {
                Some(Status::from_report(&status, moment("reported_at", status.reported_at_ms)?)?)
            }
        };
        for (key, value) in &node.labels {
            label::check_key(key).and_then(|()| label::check_value(value))?;
        }
        let machine = match node.machine_id.as_str() {
            "" => None,
            text => Some(
                text.parse()
                    .map_err(|_| format!("its machine is {:?}, which is no UUID", shortened(text)))?,
            ),
        };
        let node = Self {
            id: node_id(&node.node_id)?,
            key: PublicKey::from_slice(&node.public_key)?,
            machine,
            state: State::from_wire(node.state)?,
            state_since: moment("state_since", node.state_since_ms)?,
            roles: Roles::from_wire(node.roles.unwrap_or_default())?,
            status,
            labels: node.labels,
            registered_at: moment("registered_at", node.registered_at_ms)?,
            ticket,
        };
        node.check()?;
        Ok(node)
    }

    /// The rules that every record keeps.
    fn check(&self) -> Result<(), String> {
        if NodeId::of(&self.key) != self.id {
            return Err(format!("its id is {}, and that of its key {}", self.id, NodeId::of(&self.key)));
        }
        if self.roles.kubernetes_controller && self.roles.consensus_member.is_none() {
            return Err(format!("it is a {} and no {}", Role::KubernetesController, Role::ConsensusMember));
        }
        if self.state != State::Up && !self.roles.is_empty() {
            return Err(format!(
                "it is {} and has roles: {}",
                self.state.as_str(),
                role::told(self.roles.names())
            ));
        }
        Ok(())
    }
}

fn check_service(service: &wire::ServiceStatus) -> Result<(), String> {
    let name = |text: &str| format!("services has {:?}", shortened(text));
    service.role.parse::<DeclaredRole>().map_err(|error| format!("services: {error}"))?;
    if !role::is_name(&service.service) {
        return Err(format!("{}, which names no service", name(&service.service)));
    }
    if service.kind() == wire::service_status::Kind::Unspecified {
        return Err(format!("{} in state {}, which is none", name(&service.service), service.kind));
    }
    if service.message.len() > LONGEST_TEXT {
        return Err(format!("{} with a message of more than {LONGEST_TEXT} bytes", name(&service.service)));
    }
    Ok(())
}

fn node_id(text: &str) -> Result<NodeId, String> {
    text.parse().map_err(sentence)
}

fn sentence(error: impl std::error::Error) -> String {
    error.to_string()
}

fn shortened(text: &str) -> String {
    text.chars().take(100).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::curator::node_id::tests::{key, node_id};

    pub(crate) fn at(second: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + second, 0).unwrap()
    }

    /// A node that is up and has said its address.
    pub(crate) fn up(number: u8) -> Node {
        let status = wire::NodeStatus { external_address: format!("10.0.0.{number}"), ..Default::default() };
        Node {
            status: Some(Status::from_report(&status, at(0)).unwrap()),
            ..Node::new(key(number), State::Up, at(0))
        }
    }

    /// A node that is up and a member of etcd.
    pub(crate) fn member(number: u8) -> Node {
        let mut node = up(number);
        node.roles.consensus_member = Some(ConsensusMember { member: number.into(), peers: BTreeMap::new() });
        node
    }

    fn full() -> Node {
        let report = wire::NodeStatus {
            external_address: "2001:db8::7".to_owned(),
            curator_port: 7835,
            version: "1.2.3".to_owned(),
            boot_id: "b".to_owned(),
            services: vec![wire::ServiceStatus {
                role: "web".to_owned(),
                service: "server".to_owned(),
                kind: wire::service_status::Kind::BackingOff.into(),
                since_ms: 5,
                restarts: 2,
                message: "it ended with 1".to_owned(),
                declaration_revision: 3,
            }],
            reported_at_ms: 1,
            kubernetes: Some(kubernetes::status::tests::said()),
        };
        Node {
            machine: Some("11111111-1111-4111-8111-111111111111".parse().unwrap()),
            roles: Roles {
                consensus_member: Some(ConsensusMember {
                    member: u64::MAX,
                    peers: BTreeMap::from([(node_id(9), "https://10.0.0.9:7834".to_owned())]),
                }),
                kubernetes_controller: true,
                kubernetes_worker: true,
                declared: BTreeSet::from(["web".parse().unwrap(), "database".parse().unwrap()]),
            },
            status: Some(Status::from_report(&report, at(3)).unwrap()),
            labels: Labels::from([("row".to_owned(), "7".to_owned())]),
            ticket: Some("00112233445566ff".parse().unwrap()),
            state_since: at(2),
            ..Node::new(key(7), State::Up, at(1))
        }
    }

    fn stored(node: &Node) -> wire::NodeRecord {
        wire::NodeRecord::decode(node.encode().unwrap().as_slice()).unwrap()
    }

    #[test]
    fn record_reads_back_as_it_was_written_with_every_field() {
        for node in [full(), up(3), Node::new(key(4), State::New, at(0))] {
            let key = Node::etcd_key(&node.id).unwrap();
            assert_eq!(Node::decode(&key, &node.encode().unwrap()).unwrap(), node);
        }
        let record = stored(&full());
        let node = record.node.unwrap();
        // Were a field forgotten on the way, it would be empty here.
        assert!(!node.machine_id.is_empty() && !node.labels.is_empty() && !record.ticket_id.is_empty());
        let status = node.status.unwrap();
        assert_eq!((status.services.len(), status.kubernetes.is_some()), (1, true));
        assert_eq!(node.roles.unwrap().declared, ["database", "web"], "in order of the alphabet");
    }

    #[test]
    fn same_node_is_written_with_the_same_bytes() {
        assert_eq!(full().encode().unwrap(), full().encode().unwrap());
    }

    #[test]
    fn record_that_cannot_be_read_is_told_by_its_key_and_its_fault() {
        type Change = fn(&mut wire::NodeRecord);
        fn node(record: &mut wire::NodeRecord) -> &mut wire::Node {
            record.node.as_mut().unwrap()
        }
        let cases: [(Change, &str); 15] = [
            (|record| record.node = None, "no node"),
            (|record| record.format = 2, "format 2"),
            (|record| record.ticket_id = "7".to_owned(), "ticket"),
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
                |record| node(record).roles.as_mut().unwrap().declared.push("consensus-member".to_owned()),
                "built-in",
            ),
            (|record| drop(node(record).labels.insert("-".to_owned(), String::new())), "no key of a label"),
            (|record| node(record).registered_at_ms = 0, "registered_at"),
            (|record| node(record).status.as_mut().unwrap().external_address.clear(), "external_address"),
        ];
        let key = Node::etcd_key(&full().id).unwrap();
        for (change, said) in cases {
            let mut record = stored(&full());
            change(&mut record);
            let error = Node::decode(&key, &record.encode_to_vec()).unwrap_err();
            assert_eq!(error.key, key);
            let sentence = error.to_string();
            assert!(sentence.contains(said) && sentence.contains(&key), "{said}: {sentence}");
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
    fn record_that_breaks_a_rule_is_not_written() {
        let mut controller = up(3);
        controller.roles.kubernetes_controller = true;
        let mut gone = up(3);
        (gone.state, gone.roles.kubernetes_worker) = (State::Decommissioned, true);
        let mut other = up(3);
        other.id = node_id(4);
        for node in [controller, gone, other] {
            let error = node.encode().unwrap_err().to_string();
            assert!(error.contains("was not written"), "{error}");
        }
    }

    #[test]
    fn report_of_a_node_names_the_field_that_is_wrong() {
        let good = || full().status.unwrap().to_wire();
        assert!(Status::from_report(&good(), at(9)).is_ok());
        let service = || good().services[0].clone();
        let with = |service: wire::ServiceStatus| wire::NodeStatus { services: vec![service], ..good() };
        for (field, report) in [
            ("external_address", wire::NodeStatus { external_address: String::new(), ..good() }),
            ("external_address", wire::NodeStatus { external_address: "host".to_owned(), ..good() }),
            ("external_address", wire::NodeStatus { external_address: "0.0.0.0".to_owned(), ..good() }),
            ("external_address", wire::NodeStatus { external_address: "10.0.0.1:80".to_owned(), ..good() }),
            ("curator_port", wire::NodeStatus { curator_port: 65_536, ..good() }),
            ("version", wire::NodeStatus { version: "v".repeat(1001), ..good() }),
            ("services", wire::NodeStatus { services: vec![service(); 257], ..good() }),
            ("services", with(wire::ServiceStatus { role: "kubernetes-worker".to_owned(), ..service() })),
            ("services", with(wire::ServiceStatus { service: "a b".to_owned(), ..service() })),
            ("services", with(wire::ServiceStatus { kind: 0, ..service() })),
            ("services", with(wire::ServiceStatus { kind: 99, ..service() })),
            ("services", with(wire::ServiceStatus { message: "m".repeat(1001), ..service() })),
            (
                "kubernetes.bundle",
                wire::NodeStatus {
                    kubernetes: Some(wire::KubernetesStatus { bundle: "b".to_owned(), ..Default::default() }),
                    ..good()
                },
            ),
        ] {
            let error = Status::from_report(&report, at(9)).unwrap_err();
            assert!(error.starts_with(field), "{field}: {error}");
        }
    }

    #[test]
    fn report_is_dated_by_the_curator_and_not_by_the_node() {
        let report = wire::NodeStatus { reported_at_ms: 1, ..full().status.unwrap().to_wire() };
        assert_eq!(Status::from_report(&report, at(9)).unwrap().reported_at, at(9));
    }
}
