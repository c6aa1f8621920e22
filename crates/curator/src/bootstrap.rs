//! Bootstrapping a cluster: the first records, in one transaction.
//!
//! The first node of a cluster has no curator to call. So it writes what a curator needs (the cluster, the authority,
//! its own record and the first statement) into its own etcd. It does so in one transaction, which is applied only if none of these records
//! exists. A node that was interrupted at any point does all of it again, with the authority that it created the first
//! time. It then finds its own records and gets another certificate.
//!
//! If etcd holds another cluster, or the same cluster without this node, bootstrapping fails and changes nothing.

use std::net::IpAddr;
use std::sync::Arc;

use curator_client::certificate::{IssuedCertificate, Serial, Validity};
use curator_client::cluster::{self, Cluster};
use curator_client::cluster_snapshot::ClusterSnapshotError;
use curator_client::node::{ConsensusMember, Node, NodeRoles, NodeState};
use curator_client::node_id::{NodeId, PublicKey};
use curator_client::node_status::NodeStatus;
use curator_client::pki::{AUTHORITY_LIFETIME, Authority, CURATOR_LIFETIME, NODE_LIFETIME, PkiError};
use curator_client::statement::StatementError;
use etcd::client::{Client, EtcdError};
use etcd::key_space::KeyError;
use etcd::members::MemberId;
use etcd::record::{InvalidRecord, RecordError};
use model::ids::MachineId;
use model::label::Labels;
use model::time::Timestamp;
use ring::rand::SystemRandom;
use ring::signature::Ed25519KeyPair;
use uuid::Uuid;

use crate::credential::{CertificateKind, Credential, CredentialHolder, Revocation};
use crate::entitlement::{check_peer_certificate, peer_lifetime};
use crate::node_labels;
use crate::node_lifecycle;
use crate::restore::{RestoreSource, restore_cluster};
use crate::statement_plan::found_statement;
use crate::statement_record::{encode_statement, statement_record_key};

/// The input of [`bootstrap_cluster`].
#[derive(Clone, Debug)]
pub struct BootstrapRequest {
    /// The authority of the cluster, from [`create_authority`]. The caller keeps it until bootstrapping is finished: it
    /// signs what the first etcd member needs before etcd runs.
    pub authority: Arc<Authority>,
    /// The name of the cluster.
    pub name: String,
    /// Keys that may claim an owner's certificate.
    pub owner_keys: Vec<PublicKey>,
    /// The key of the first node.
    pub node_key: PublicKey,
    /// The machine it runs on.
    pub machine: Option<MachineId>,
    /// Labels of the first node.
    pub labels: Labels,
    /// The address at which others reach the first node, if it is known already.
    pub address: Option<IpAddr>,
    /// The snapshot to restore the cluster from; `None` for a new cluster.
    pub restore: Option<RestoreSource>,
}

impl BootstrapRequest {
    /// How often the cluster was restored, this time included.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.restore.as_ref().map_or(0, |restoring| restoring.epoch)
    }
}

/// What the first node gets from bootstrapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootstrapResult {
    /// The certificate of the node, DER.
    pub certificate: Vec<u8>,
    /// The certificate of the authority, DER.
    pub ca_certificate: Vec<u8>,
}

/// Why a cluster was not bootstrapped.
#[derive(Debug, thiserror::Error)]
pub enum BootstrapError {
    /// The request or the records in etcd are invalid; the text names the reason.
    #[error("the cluster was not founded: {0}")]
    Rejected(String),
    /// The authority of the cluster in this etcd is not replaced by an order; the text names the reason.
    #[error("the authority of the cluster was not replaced: {0}")]
    AuthorityNotReplaced(String),
    /// This etcd holds another cluster.
    #[error(
        "the cluster {requested} was not founded: this etcd holds cluster {existing} of another authority already. Remove \
         its data directory if that cluster is over"
    )]
    OtherCluster {
        /// Id of the cluster to bootstrap.
        requested: Uuid,
        /// Id of the cluster that etcd holds.
        existing: Uuid,
    },
    /// This etcd holds the cluster at another epoch.
    #[error(
        "the cluster {cluster} was not restored: this etcd holds it of epoch {existing}, and epoch {requested} was ordered. \
         Have the machine leave the cluster before it restores it again"
    )]
    OtherEpoch {
        /// Id of the cluster, the same in both.
        cluster: Uuid,
        /// The epoch to restore the cluster to.
        requested: u64,
        /// The epoch that etcd holds.
        existing: u64,
    },
    /// The cluster exists, and this node does not belong to it.
    #[error("the cluster exists, and this node is not part of it: {0}")]
    NodeNotInCluster(#[from] node_lifecycle::LifecycleError),
    /// The peer certificate of the etcd member is none of this cluster.
    #[error(
        "the certificate of this node's etcd member was not recorded, because it cannot be parsed: remove \
         cluster/etcd/peer.crt from the state directory of this node and restart its role server, which requests another"
    )]
    UnreadablePeerCertificate,
    /// The system's random source failed.
    #[error("no key could be made for the authority of the cluster: the system's random source failed")]
    NoRandomness,
    /// A call to etcd failed.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    /// A record in etcd cannot be decoded.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A record breaks a rule and must not be written.
    #[error(transparent)]
    InvalidRecord(#[from] InvalidRecord),
    /// An etcd key cannot be built.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The snapshot to restore cannot be used.
    #[error(transparent)]
    Snapshot(#[from] ClusterSnapshotError),
    /// The authority or a certificate cannot be created.
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// The first statement cannot be signed.
    #[error(transparent)]
    Statement(#[from] StatementError),
    /// The certificate that was signed has not what its kind may have.
    #[error(transparent)]
    Entitlement(#[from] crate::entitlement::EntitlementError),
}

/// Bootstraps a cluster in this etcd, which has one member, or finds that this was done before.
pub async fn bootstrap_cluster(
    client: &Client,
    founding: &BootstrapRequest,
    now: Timestamp,
) -> Result<BootstrapResult, BootstrapError> {
    cluster::validate_name(&founding.name).map_err(BootstrapError::Rejected)?;
    node_labels::validate_labels(&founding.labels).map_err(BootstrapError::Rejected)?;
    if founding.owner_keys.is_empty() {
        let sentence = "it would have no owner, so nobody could give orders";
        return Err(BootstrapError::Rejected(sentence.to_owned()));
    }
    let (cluster_key, authority_key) = (cluster::cluster_record_key()?, cluster::authority_record_key()?);
    let id = NodeId::from_key(&founding.node_key);
    let node_key = Node::etcd_key(&id)?;
    if let Some(restoring) = &founding.restore {
        let member = client.status().await?.member_id;
        restore_cluster(client, restoring, &first_node_record(founding, member, now)).await?;
    } else if client.get(&authority_key).await?.is_none() {
        let member = client.status().await?.member_id;
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
            (node_key.clone(), first_node_record(founding, member, now).encode()?),
            (
                statement_record_key()?,
                encode_statement(&found_statement(authority.anchor(), now).sign(authority)?.to_wire()),
            ),
        ];
        // If another process was faster, its records are found and compared below.
        client.create_unguarded("the first records of a cluster", &first).await?;
    }
    let missing =
        |what: &str| BootstrapError::Rejected(format!("etcd holds a part of a cluster, and no {what}"));
    let record = client.get(&cluster_key).await?.ok_or_else(|| missing("cluster"))?;
    let present = Cluster::decode(&cluster_key, &record.value)?;
    let record = client.get(&authority_key).await?.ok_or_else(|| missing("authority"))?;
    let authority = cluster::decode_authority(&authority_key, &record.value)?;
    if authority.anchor() != founding.authority.anchor() {
        let wanted = founding.authority.anchor().cluster;
        return Err(BootstrapError::OtherCluster { requested: wanted, existing: present.id });
    }
    let node = client.get(&node_key).await?;
    let node = node.map(|record| Node::decode(&node_key, &record.value)).transpose()?;
    node_lifecycle::check_credentials(node.as_ref(), id, &founding.node_key)?;

    let certificate = issue_node_certificate(client, &authority, founding.node_key, now).await?;
    Ok(BootstrapResult { certificate, ca_certificate: authority.anchor().certificate.clone() })
}

/// Signs a certificate for the node that runs this etcd, without a curator.
///
/// A process that can read this etcd can already read the authority's key, so calling a curator would add no security.
/// And no curator may be running: this is the only member, or all members were down for longer than their certificates
/// last.
pub async fn renew_from_local_etcd(
    client: &Client,
    node_key: PublicKey,
    now: Timestamp,
) -> Result<Vec<u8>, BootstrapError> {
    let (authority, node, revoked) = read_local_etcd(client, &node_key).await?;
    node_lifecycle::check_join(node.as_ref(), &node_key, revoked)?;
    issue_node_certificate(client, &authority, node_key, now).await
}

/// Signs a certificate for the curator on the node that runs this etcd, without another curator. It is recorded before
/// it is returned.
///
/// The reasons are those of [`renew_from_local_etcd`]. A node that loses its role meanwhile has a certificate for a
/// curator although it is no member any more; the record says so.
pub async fn issue_curator_from_local_etcd(
    client: &Client,
    node_key: PublicKey,
    now: Timestamp,
) -> Result<Vec<u8>, BootstrapError> {
    let (authority, node, revoked) = read_local_etcd(client, &node_key).await?;
    node_lifecycle::check_curator(node.as_ref(), &node_key, revoked)?;
    let validity = Validity::starting(now, CURATOR_LIFETIME);
    let issued = authority.issue_curator_certificate(&node_key, Serial::new(rand::random()), validity)?;
    record_issued(client, issued, node_key, CertificateKind::Curator).await
}

/// Signs a certificate for the member of etcd at this address, which is the one that `client` uses, without a curator. It
/// is recorded before it is returned.
///
/// The reasons are those of [`renew_from_local_etcd`].
pub async fn issue_peer_from_local_etcd(
    client: &Client,
    node_key: PublicKey,
    address: IpAddr,
    now: Timestamp,
) -> Result<Vec<u8>, BootstrapError> {
    let (authority, node, revoked) = read_local_etcd(client, &node_key).await?;
    node_lifecycle::check_curator(node.as_ref(), &node_key, revoked)?;
    let stated = client.get(&statement_record_key()?).await?.is_some();
    let (lifetime, member) = (peer_lifetime(stated), client.status().await?.member_id);
    let (serial, validity) = (Serial::new(rand::random()), Validity::starting(now, lifetime));
    let issued = authority.issue_etcd_peer_certificate(&node_key, address, serial, validity)?;
    check_peer_certificate(&issued.certificate, address, lifetime)?;
    record_issued(client, issued, node_key, CertificateKind::EtcdPeer { member }).await
}

/// The authority of the cluster in this etcd, the record of the node with this key, and whether its credentials are
/// revoked.
async fn read_local_etcd(
    client: &Client,
    node_key: &PublicKey,
) -> Result<(Authority, Option<Node>, bool), BootstrapError> {
    let missing = || BootstrapError::Rejected("etcd holds no cluster".to_owned());
    let key = cluster::authority_record_key()?;
    let record = client.get(&key).await?.ok_or_else(missing)?;
    let authority = cluster::decode_authority(&key, &record.value)?;
    let id = NodeId::from_key(node_key);
    let key = Node::etcd_key(&id)?;
    let node = client.get(&key).await?.map(|record| Node::decode(&key, &record.value)).transpose()?;
    let revoked = client.get(&Revocation::Node(id).etcd_key()?).await?.is_some();
    Ok((authority, node, revoked))
}

async fn issue_node_certificate(
    client: &Client,
    authority: &Authority,
    node_key: PublicKey,
    now: Timestamp,
) -> Result<Vec<u8>, BootstrapError> {
    let validity = Validity::starting(now, NODE_LIFETIME);
    let issued = authority.issue_node_certificate(&node_key, Serial::new(rand::random()), validity)?;
    record_issued(client, issued, node_key, CertificateKind::Node).await
}

/// Records a certificate of the node with this key, and returns it.
async fn record_issued(
    client: &Client,
    issued: IssuedCertificate,
    node_key: PublicKey,
    kind: CertificateKind,
) -> Result<Vec<u8>, BootstrapError> {
    let holder = CredentialHolder::Node(NodeId::from_key(&node_key));
    let credential = Credential::from_issued(&issued, holder, node_key, kind);
    crate::entitlement::check_credential(&issued.certificate, &credential)?;
    client.put_unguarded(&Credential::etcd_key(issued.serial)?, &credential.encode()).await?;
    Ok(issued.certificate)
}

/// Records the certificate of the etcd member that runs here, which has the number `member`. A record that exists gets
/// this number.
///
/// The first member has its certificate before there is an etcd to record it in, and a member of a release that recorded
/// no numbers has a record without one. etcd may also have started as a later member of its node than the one that the
/// certificate was issued for. The list of revoked peers needs the right number.
pub async fn register_peer_certificate(
    client: &Client,
    node_key: PublicKey,
    certificate: &[u8],
    member: u64,
) -> Result<(), BootstrapError> {
    let parsed = Serial::from_der(certificate).zip(Validity::from_der(certificate));
    let (serial, validity) = parsed.ok_or(BootstrapError::UnreadablePeerCertificate)?;
    let (key, kind) = (Credential::etcd_key(serial)?, CertificateKind::EtcdPeer { member });
    let holder = CredentialHolder::Node(NodeId::from_key(&node_key));
    let own = Credential { serial, holder, key: node_key, validity, kind };
    let recorded = client.get(&key).await?;
    let recorded = recorded.map(|record| Credential::decode(&key, &record.value)).transpose()?;
    if recorded.is_some_and(|recorded| recorded.kind == kind) {
        return Ok(());
    }
    // Nobody else writes this record: the leader wrote it, if it did, before it handed the certificate out.
    client.put_unguarded(&key, &own.encode()).await?;
    tracing::info!(%serial, member = %MemberId(member), "the certificate of this etcd member was recorded");
    Ok(())
}

/// Creates the authority of a new cluster.
pub fn create_authority(cluster: Uuid, now: Timestamp) -> Result<Authority, BootstrapError> {
    let key = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new())
        .map_err(|ring::error::Unspecified| BootstrapError::NoRandomness)?;
    let validity = Validity::starting(now, AUTHORITY_LIFETIME);
    Ok(Authority::create(cluster, key.as_ref(), Serial::new(rand::random()), validity)?)
}

fn first_node_record(founding: &BootstrapRequest, member: u64, now: Timestamp) -> Node {
    let status = founding.address.map(|address| NodeStatus {
        address,
        curator_port: None,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        boot_id: String::new(),
        services: Vec::new(),
        kubernetes: None,
        authority: None,
        reported_at: now,
    });
    Node {
        machine: founding.machine,
        labels: founding.labels.clone(),
        status,
        roles: NodeRoles {
            consensus_member: Some(ConsensusMember {
                member_id: member,
                peers: std::collections::BTreeMap::new(),
            }),
            ..NodeRoles::default()
        },
        ..Node::new(founding.node_key, NodeState::Up, now)
    }
}
