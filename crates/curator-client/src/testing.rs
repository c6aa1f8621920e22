//! Keys, nodes, certificates, a statement and a snapshot for tests. One number determines each.

#![allow(
    clippy::missing_panics_doc,
    clippy::unwrap_used,
    reason = "only tests call these, and a panic is how a test fails"
)]

use std::collections::BTreeMap;

use etcd::client::{Listing, Record};
use etcd::key_space::LEADER;
use model::time::Timestamp;
use proto::curator::v1 as wire;
use rcgen::{KeyPair, PublicKeyData as _};
use uuid::Uuid;

use crate::certificate::{Serial, Validity};
use crate::cluster::{self, Cluster};
use crate::cluster_snapshot::ClusterSnapshot;
use crate::node::{ConsensusMember, Node, NodeState};
use crate::node_id::{NodeId, PublicKey};
use crate::node_status::NodeStatus;
use crate::pki::Authority;
use crate::statement::Statement;

/// A key that is determined by one number.
#[must_use]
pub fn key(number: u8) -> PublicKey {
    let mut key = [number; 32];
    key[31] = 0xff;
    PublicKey(key)
}

/// The id of the node with the key of that number.
#[must_use]
pub fn node_id(number: u8) -> NodeId {
    NodeId::from_key(&key(number))
}

/// This many seconds after the time at which tests begin.
#[must_use]
pub fn at(second: i64) -> Timestamp {
    Timestamp::from_timestamp(1_800_000_000 + second, 0).unwrap()
}

/// A node that is up and has reported its address.
#[must_use]
pub fn up(number: u8) -> Node {
    let status = wire::NodeStatus { external_address: format!("10.0.0.{number}"), ..Default::default() };
    Node {
        status: Some(NodeStatus::from_report(&status, at(0)).unwrap()),
        ..Node::new(key(number), NodeState::Up, at(0))
    }
}

/// A node that is up and a consensus member.
#[must_use]
pub fn member(number: u8) -> Node {
    let mut node = up(number);
    node.roles.consensus_member = Some(ConsensusMember { member_id: number.into(), peers: BTreeMap::new() });
    node
}

/// An Ed25519 key that is determined by one number, in PKCS#8 (RFC 8410).
#[must_use]
pub fn pkcs8(number: u8) -> Vec<u8> {
    let mut der = hex::decode("302e020100300506032b657004220420").unwrap();
    der.extend([number; 32]);
    der
}

/// The public half of the key of that number.
#[must_use]
pub fn public(number: u8) -> PublicKey {
    PublicKey::from_slice(KeyPair::try_from(pkcs8(number)).unwrap().der_bytes()).unwrap()
}

/// A serial number that is determined by one number.
#[must_use]
pub fn serial(number: u8) -> Serial {
    Serial::new([number; 16])
}

/// From second 0 to second 1000.
#[must_use]
pub fn validity() -> Validity {
    Validity { not_before: at(0), not_after: at(1000) }
}

/// The authority of the cluster whose id repeats that number.
#[must_use]
pub fn authority(number: u8) -> Authority {
    authority_of(number, number)
}

/// An authority with the key of the second number, of the cluster with the id that repeats the first.
#[must_use]
pub fn authority_of(cluster: u8, key: u8) -> Authority {
    let long = Validity { not_before: at(-1000), not_after: at(1_000_000) };
    Authority::create(Uuid::from_bytes([cluster; 16]), &pkcs8(key), serial(key), long).unwrap()
}

/// A statement of the first authority that was signed at second 0 and lists two revoked certificates.
#[must_use]
pub fn statement(epoch: u64, number: u64) -> Statement {
    let anchor = authority(1).anchor().clone();
    Statement {
        cluster: anchor.cluster,
        epoch,
        number,
        issued_at: at(0),
        authorities: vec![anchor],
        revoked: BTreeMap::from([(serial(3), at(500)), (serial(4), at(600))]),
    }
}

/// A snapshot of a cluster of two consensus members and a node without roles.
#[must_use]
pub fn snapshot() -> ClusterSnapshot {
    let cluster = Cluster {
        id: authority(1).anchor().cluster,
        name: "ams".to_owned(),
        created_at: at(5),
        owner_keys: vec![key(9)],
        epoch: 2,
    };
    let mut records = vec![
        (cluster::cluster_record_key().unwrap(), cluster.encode()),
        (cluster::authority_record_key().unwrap(), cluster::encode_authority(&authority(1))),
        (LEADER.key("32695").unwrap(), b"node".to_vec()),
    ];
    for node in [member(1), member(2), up(3)] {
        records.push((Node::etcd_key(&node.id).unwrap(), node.encode().unwrap()));
    }
    let record = |(key, value): (String, Vec<u8>)| Record { key, value, create_revision: 1, mod_revision: 1 };
    let listing = Listing { records: records.into_iter().map(record).collect(), revision: 40 };
    ClusterSnapshot::from_listing(listing, at(7)).unwrap()
}
