//! The first records of a cluster.
//!
//! Before there is a curator there is nobody to ask, so the first node writes what a curator needs straight into its
//! own etcd, in one transaction that happens only where nothing of it is there: the cluster, the authority, the node
//! itself. A node that was interrupted at any point does all of it again, with the authority that it made the first time:
//! it then finds its own records, and is given another certificate.
//!
//! An etcd that holds another cluster, or the same one with this node unknown to it, is an error that changes nothing.

use std::net::IpAddr;
use std::sync::Arc;

use ring::rand::SystemRandom;
use ring::signature::Ed25519KeyPair;
use uuid::Uuid;

use crate::curator::cluster::{self, Cluster};
use crate::curator::credential::{Credential, Holder, Revocation};
use crate::curator::labels;
use crate::curator::life_cycle;
use crate::curator::node::{ConsensusMember, Node, Roles, State, Status};
use crate::curator::node_id::{NodeId, PublicKey};
use crate::curator::pki::{AUTHORITY_LIFETIME, Authority, NODE_LIFETIME, PkiError, Serial, Validity};
use crate::curator::restore::{Restoring, restore};
use crate::curator::snapshot::SnapshotError;
use crate::etcd::client::{Client, EtcdError};
use crate::etcd::key_space::KeyError;
use crate::etcd::record::{BrokenRecord, RecordError};
use crate::model::ids::MachineId;
use crate::model::label::Labels;
use crate::model::time::Timestamp;

/// What a cluster is founded with.
#[derive(Clone, Debug)]
pub struct Founding {
    /// Its authority, made for it by [`new_authority`] and kept until all is done: it signs what the first member of
    /// etcd needs before there is an etcd.
    pub authority: Arc<Authority>,
    /// The name of the cluster.
    pub name: String,
    /// Keys that may claim an owner's certificate.
    pub owner_keys: Vec<PublicKey>,
    /// The key of the first node.
    pub node_key: PublicKey,
    /// The machine it runs on.
    pub machine: Option<MachineId>,
    /// What is to be said of it.
    pub labels: Labels,
    /// Where others reach it, if that is known already.
    pub address: Option<IpAddr>,
    /// From what the cluster is brought back, if it is no new one.
    pub restoring: Option<Restoring>,
}

impl Founding {
    /// How often the cluster was restored, this time included.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.restoring.as_ref().map_or(0, |restoring| restoring.epoch)
    }
}

/// What the first node has of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Founded {
    /// The certificate of the node, DER.
    pub certificate: Vec<u8>,
    /// The certificate of the authority, DER.
    pub ca_certificate: Vec<u8>,
}

/// Why a cluster was not founded.
#[derive(Debug, thiserror::Error)]
pub enum FoundingError {
    /// What was asked cannot be.
    #[error("the cluster was not founded: {0}")]
    Refused(String),
    /// There is another one.
    #[error(
        "the cluster {wanted} was not founded: this etcd holds cluster {present} of another authority already. Remove \
         its data directory if that cluster is over"
    )]
    Another {
        /// What was to be founded.
        wanted: Uuid,
        /// What is there.
        present: Uuid,
    },
    /// It holds this cluster as it was restored at another time.
    #[error(
        "the cluster {cluster} was not restored: this etcd holds it of epoch {present}, and epoch {wanted} was ordered. \
         Have the machine leave the cluster before it restores it again"
    )]
    AnotherEpoch {
        /// Which.
        cluster: Uuid,
        /// What was to be made of it.
        wanted: u64,
        /// What is there.
        present: u64,
    },
    /// This node is none of the cluster.
    #[error("the cluster is there, and this node is no part of it: {0}")]
    NotOurs(#[from] life_cycle::Refusal),
    /// The system gave no randomness.
    #[error("no key could be made for the authority of the cluster: the system's random source failed")]
    NoRandomness,
    /// etcd did not do it.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    /// A record.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A record.
    #[error(transparent)]
    Broken(#[from] BrokenRecord),
    /// A key in etcd.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// What it was to be restored from.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The authority.
    #[error(transparent)]
    Pki(#[from] PkiError),
}

/// Founds a cluster in this etcd, which has one member, or finds that this was done before.
pub async fn bootstrap(
    client: &Client,
    founding: &Founding,
    now: Timestamp,
) -> Result<Founded, FoundingError> {
    cluster::check_name(&founding.name).map_err(FoundingError::Refused)?;
    labels::check(&founding.labels).map_err(FoundingError::Refused)?;
    if founding.owner_keys.is_empty() {
        let sentence = "it would have no owner, and nobody could ever order anything";
        return Err(FoundingError::Refused(sentence.to_owned()));
    }
    let (cluster_key, authority_key) = (cluster::cluster_key()?, cluster::authority_key()?);
    let id = NodeId::of(&founding.node_key);
    let node_key = Node::etcd_key(&id)?;
    if let Some(restoring) = &founding.restoring {
        let member = client.status().await?.member;
        restore(client, restoring, &first_node(founding, member, now)).await?;
    } else if client.get(&authority_key).await?.is_none() {
        let member = client.status().await?.member;
        let authority = &founding.authority;
        let record = Cluster {
            id: authority.anchor().cluster,
            name: founding.name.clone(),
            created_at: now,
            owner_keys: founding.owner_keys.clone(),
            epoch: 0,
        };
        let first = [
            (cluster_key.clone(), record.encode()),
            (authority_key.clone(), cluster::encode_authority(authority)),
            (node_key.clone(), first_node(founding, member, now).encode()?),
        ];
        // Whoever was faster is found below.
        client.create_unguarded("the first records of a cluster", &first).await?;
    }
    let missing =
        |what: &str| FoundingError::Refused(format!("etcd holds a part of a cluster, and no {what}"));
    let record = client.get(&cluster_key).await?.ok_or_else(|| missing("cluster"))?;
    let present = Cluster::decode(&cluster_key, &record.value)?;
    let record = client.get(&authority_key).await?.ok_or_else(|| missing("authority"))?;
    let authority = cluster::decode_authority(&authority_key, &record.value)?;
    if authority.anchor() != founding.authority.anchor() {
        let wanted = founding.authority.anchor().cluster;
        return Err(FoundingError::Another { wanted, present: present.id });
    }
    let node = client.get(&node_key).await?;
    let node = node.map(|record| Node::decode(&node_key, &record.value)).transpose()?;
    life_cycle::credentials_hold(node.as_ref(), id, &founding.node_key)?;

    let certificate = issue(client, &authority, founding.node_key, now).await?;
    Ok(Founded { certificate, ca_certificate: authority.anchor().certificate.clone() })
}

/// Signs a certificate for the node that has this etcd beside it, without a curator.
///
/// Whoever can read this etcd has the authority's key before him; to ask a curator would gain nothing, and where this is
/// the only member, or all members were off for longer than their certificates last, nobody is there to be asked.
pub async fn renew_beside_etcd(
    client: &Client,
    node_key: PublicKey,
    now: Timestamp,
) -> Result<Vec<u8>, FoundingError> {
    let missing = || FoundingError::Refused("etcd holds no cluster".to_owned());
    let key = cluster::authority_key()?;
    let record = client.get(&key).await?.ok_or_else(missing)?;
    let authority = cluster::decode_authority(&key, &record.value)?;
    let id = NodeId::of(&node_key);
    let key = Node::etcd_key(&id)?;
    let node = client.get(&key).await?.map(|record| Node::decode(&key, &record.value)).transpose()?;
    let revoked = client.get(&Revocation::Node(id).etcd_key()?).await?.is_some();
    life_cycle::join(node.as_ref(), &node_key, revoked)?;
    issue(client, &authority, node_key, now).await
}

async fn issue(
    client: &Client,
    authority: &Authority,
    node_key: PublicKey,
    now: Timestamp,
) -> Result<Vec<u8>, FoundingError> {
    let validity = Validity::starting(now, NODE_LIFETIME);
    let issued = authority.issue_node(&node_key, Serial::new(rand::random()), validity)?;
    let credential = Credential::of(&issued, Holder::Node(NodeId::of(&node_key)), node_key);
    client.put_unguarded(&Credential::etcd_key(issued.serial)?, &credential.encode()).await?;
    Ok(issued.certificate)
}

/// Makes the authority of a cluster that is to be founded.
pub fn new_authority(cluster: Uuid, now: Timestamp) -> Result<Authority, FoundingError> {
    let key = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new())
        .map_err(|ring::error::Unspecified| FoundingError::NoRandomness)?;
    let validity = Validity::starting(now, AUTHORITY_LIFETIME);
    Ok(Authority::create(cluster, key.as_ref(), Serial::new(rand::random()), validity)?)
}

fn first_node(founding: &Founding, member: u64, now: Timestamp) -> Node {
    let status = founding.address.map(|address| Status {
        address,
        curator_port: None,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        boot_id: String::new(),
        services: Vec::new(),
        kubernetes: None,
        reported_at: now,
    });
    Node {
        machine: founding.machine,
        labels: founding.labels.clone(),
        status,
        roles: Roles {
            consensus_member: Some(ConsensusMember { member, peers: std::collections::BTreeMap::new() }),
            ..Roles::default()
        },
        ..Node::new(founding.node_key, State::Up, now)
    }
}
