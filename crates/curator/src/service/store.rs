//! Typed, guarded access to the cluster's records in etcd, with retry on conflict.
//!
//! Every write is conditional on the leader's lock, and on the revision of each record as it was read: there is no
//! other order between two calls of one leader. If a record has changed meanwhile, the call decides again from the
//! start.
//!
//! # Many writers of one record
//!
//! Two hundred machines that register with one ticket all write its record. If all of them retried side by side, one
//! would win each time, and the unlucky ones would lose until they are rejected. So a call that has lost a race decides
//! alone from then on. First attempts run side by side, and losers take turns, in the order in which they lost. Later
//! calls wait for those before them. The lock is for all records and not for each: a decision takes two requests to
//! etcd, and which records it will read is not known before.

use std::collections::BTreeMap;
use std::sync::Arc;

use curator_client::authority_ring::AuthorityRing;
use curator_client::certificate::Serial;
use curator_client::cluster::{self, Cluster};
use curator_client::node::Node;
use curator_client::node_id::{NodeId, PublicKey};
use curator_client::pki_revocation_list::PeerRevocations;
use curator_client::ticket_id::TicketId;
use etcd::client::{Client, Record};
use etcd::guard::{ExpectedRevision, KeyChange, LeaderGuard, UnchangedKeys};
use etcd::key_space::{
    CERTIFICATES, DECLARATIONS, KUBERNETES_NODES, KeyPrefix, NODES, REVOKED_CERTIFICATES, TICKETS,
};
use etcd::namespace::KeySelector;
use etcd::record::RecordError;
use model::node_role::DeclaredRole;
use model::role_declaration::RoleDeclaration;
use proto::curator::v1::SignedStatement;
use tokio::sync::RwLock;

use crate::credential::{Credential, Revocation};
use crate::kubernetes::keys::{KubernetesKeys, keys_record_key};
use crate::kubernetes::node_allocation::{NodeAllocation, NodeAllocations};
use crate::kubernetes::settings::{KubernetesSettings, settings_record_key};
use crate::membership::Nodes;
use crate::role_declaration::decode_declaration;
use crate::service::error::ServiceError;
use crate::statement_record::{decode_statement, statement_record_key};
use crate::tickets::Ticket;

/// Most attempts of one decision that finds its records changed. While a call decides alone, the only other writers are
/// those that write without a decision.
const MAX_ATTEMPTS: u32 = 10;

/// A record and the revision it was read at.
#[derive(Clone, Debug)]
pub struct Versioned<T> {
    /// The record as it was decoded.
    pub value: T,
    /// etcd's mod revision of the record.
    pub revision: i64,
}

/// All nodes, read at one revision.
#[derive(Clone, Debug, Default)]
pub struct StoredNodes {
    /// The node records by their ids.
    pub nodes: Nodes,
    /// etcd's mod revision of each record.
    pub revisions: BTreeMap<NodeId, i64>,
}

/// The Kubernetes allocations of all nodes, read at one revision.
#[derive(Clone, Debug, Default)]
pub(super) struct StoredAllocations {
    /// The allocations by node id.
    pub(super) allocations: NodeAllocations,
    /// etcd's mod revision of each record.
    pub(super) revisions: BTreeMap<NodeId, i64>,
    /// etcd's revision of the listing.
    pub(super) revision: i64,
}

impl StoredAllocations {
    /// A write of one allocation, on condition that it is unchanged. An empty allocation deletes the record.
    pub(super) fn allocation_change(
        &self,
        node: &NodeId,
        allocation: &NodeAllocation,
    ) -> Result<KeyChange, ServiceError> {
        let expected =
            self.revisions.get(node).map_or(ExpectedRevision::Absent, |at| ExpectedRevision::At(*at));
        let key = NodeAllocation::etcd_key(node)?;
        if *allocation == NodeAllocation::default() {
            return Ok(KeyChange::Delete { key, expected });
        }
        Ok(KeyChange::Put { key, value: allocation.encode(), expected })
    }

    /// The key generations assigned to nodes, with duplicates.
    pub(super) fn assigned_generations(&self) -> impl Iterator<Item = u64> + '_ {
        self.allocations
            .values()
            .filter_map(|allocation| allocation.assigned)
            .map(|generation| generation.generation)
    }

    /// The condition that no allocation was written since they were read.
    #[must_use]
    pub(super) fn unchanged_keys(&self) -> UnchangedKeys {
        UnchangedKeys { keys: KeySelector::Prefix(KUBERNETES_NODES.range().start), revision: self.revision }
    }
}

/// The records of the cluster, accessible while the guard holds.
#[derive(Clone, Debug)]
pub(super) struct Store {
    client: Client,
    guard: LeaderGuard,
    /// Read-locked by first attempts, write-locked by one call that has lost a race. Tokio's lock is fair.
    decision_lock: Arc<RwLock<()>>,
}

impl Store {
    /// The store of the cluster that this client is connected to, under a won election.
    #[must_use]
    pub(super) fn new(client: Client, guard: LeaderGuard) -> Self {
        Self { client, guard, decision_lock: Arc::default() }
    }

    /// The etcd client, without the guard.
    #[must_use]
    pub(super) const fn client(&self) -> &Client {
        &self.client
    }

    /// Reads the cluster's record.
    pub(super) async fn cluster(&self) -> Result<Option<Versioned<Cluster>>, ServiceError> {
        self.read_one(cluster::cluster_record_key()?, Cluster::decode).await
    }

    /// Reads the cluster's authorities.
    pub(super) async fn authorities(&self) -> Result<Option<Versioned<AuthorityRing>>, ServiceError> {
        self.read_one(cluster::authority_record_key()?, AuthorityRing::decode).await
    }

    /// Reads the newest statement of the cluster's authority.
    pub(super) async fn statement(&self) -> Result<Option<Versioned<SignedStatement>>, ServiceError> {
        self.read_one(statement_record_key()?, decode_statement).await
    }

    /// Reads the record of a node.
    pub(super) async fn node(&self, id: &NodeId) -> Result<Option<Versioned<Node>>, ServiceError> {
        self.read_one(Node::etcd_key(id)?, Node::decode).await
    }

    /// Reads the records of all nodes.
    pub(super) async fn nodes(&self) -> Result<StoredNodes, ServiceError> {
        let mut nodes = StoredNodes::default();
        for stored in self.read_all(&NODES, Node::decode).await? {
            nodes.revisions.insert(stored.value.id, stored.revision);
            nodes.nodes.insert(stored.value.id, stored.value);
        }
        Ok(nodes)
    }

    /// Reads the record of a ticket.
    pub(super) async fn ticket(&self, id: TicketId) -> Result<Option<Versioned<Ticket>>, ServiceError> {
        self.read_one(TICKETS.key(id)?, Ticket::decode).await
    }

    /// Reads the records of all tickets.
    pub(super) async fn tickets(&self) -> Result<Vec<Versioned<Ticket>>, ServiceError> {
        self.read_all(&TICKETS, Ticket::decode).await
    }

    /// Reads the declaration of a role.
    pub(super) async fn declaration(
        &self,
        role: &DeclaredRole,
    ) -> Result<Option<Versioned<RoleDeclaration>>, ServiceError> {
        self.read_one(DECLARATIONS.key(role)?, decode_declaration).await
    }

    /// Reads all declarations, in order of their names.
    pub(super) async fn declarations(&self) -> Result<Vec<Versioned<RoleDeclaration>>, ServiceError> {
        self.read_all(&DECLARATIONS, decode_declaration).await
    }

    /// Reads the record of an issued certificate.
    pub(super) async fn credential(
        &self,
        serial: Serial,
    ) -> Result<Option<Versioned<Credential>>, ServiceError> {
        self.read_one(Credential::etcd_key(serial)?, Credential::decode).await
    }

    /// Reads the records of all issued certificates.
    pub(super) async fn credentials(&self) -> Result<Vec<Versioned<Credential>>, ServiceError> {
        self.read_all(&CERTIFICATES, Credential::decode).await
    }

    /// Like [`Store::credentials`], without the revisions of the records. Also returns etcd's revision at the reading.
    pub(super) async fn credentials_at(&self) -> Result<(Vec<Credential>, i64), ServiceError> {
        let (stored, revision) = self.read_all_at(&CERTIFICATES, Credential::decode).await?;
        Ok((stored.into_iter().map(|stored| stored.value).collect(), revision))
    }

    /// Whether all certificates of a node are revoked.
    pub(super) async fn is_node_revoked(&self, node: NodeId) -> Result<bool, ServiceError> {
        let key = Revocation::Node(node).etcd_key()?;
        Ok(self.read_one(key, Revocation::decode).await?.is_some())
    }

    /// Whether an owner key was removed.
    pub(super) async fn is_owner_removed(&self, owner: PublicKey) -> Result<bool, ServiceError> {
        let key = Revocation::Owner(owner).etcd_key()?;
        Ok(self.read_one(key, Revocation::decode).await?.is_some())
    }

    /// Reads the revocations of single certificates.
    pub(super) async fn revoked_certificates(&self) -> Result<Vec<Versioned<Revocation>>, ServiceError> {
        self.read_all(&REVOKED_CERTIFICATES, Revocation::decode).await
    }

    /// Reads the list of revoked peers of etcd.
    pub(super) async fn peer_revocations(&self) -> Result<Option<Versioned<PeerRevocations>>, ServiceError> {
        self.read_one(PeerRevocations::etcd_key()?, PeerRevocations::decode).await
    }

    /// Reads the Kubernetes settings.
    pub(super) async fn kubernetes(&self) -> Result<Option<Versioned<KubernetesSettings>>, ServiceError> {
        self.read_one(settings_record_key()?, KubernetesSettings::decode).await
    }

    /// Reads the Kubernetes signing keys.
    pub(super) async fn kubernetes_keys(&self) -> Result<Option<Versioned<KubernetesKeys>>, ServiceError> {
        self.read_one(keys_record_key()?, KubernetesKeys::decode).await
    }

    /// Reads the Kubernetes allocations of all nodes.
    pub(super) async fn allocations(&self) -> Result<StoredAllocations, ServiceError> {
        let listing = self.client.list(&KeySelector::Prefix(KUBERNETES_NODES.range().start)).await?;
        let mut stored = StoredAllocations { revision: listing.revision, ..StoredAllocations::default() };
        for record in &listing.records {
            let node = NodeAllocation::node_from_key(&record.key)?;
            stored.allocations.insert(node, NodeAllocation::decode(&record.key, &record.value)?);
            stored.revisions.insert(node, record.mod_revision);
        }
        Ok(stored)
    }

    /// Makes all these changes or none; none if any of the `unchanged` keys was written meanwhile.
    pub(super) async fn write_if_unchanged(
        &self,
        changes: &[KeyChange],
        unchanged: &UnchangedKeys,
    ) -> Result<(), ServiceError> {
        self.client.write_if_unchanged(&self.guard, changes, unchanged).await?;
        Ok(())
    }

    /// Makes all these changes or none.
    pub(super) async fn write(&self, changes: &[KeyChange]) -> Result<(), ServiceError> {
        self.client.write_guarded(&self.guard, changes).await?;
        Ok(())
    }

    /// Runs `attempt`, which reads, decides and writes. If a record changed between read and write, it is run again,
    /// and from then on no other decision runs beside it.
    pub(super) async fn retry_on_conflict<T, Deciding>(
        &self,
        attempt: impl Fn() -> Deciding,
    ) -> Result<T, ServiceError>
    where
        Deciding: Future<Output = Result<T, ServiceError>>,
    {
        let first = {
            let _beside_others = self.decision_lock.read().await;
            attempt().await
        };
        let mut answer = first;
        let _alone = match &answer {
            Err(ServiceError::Conflict(_)) => self.decision_lock.write().await,
            _ => return answer,
        };
        for tries in 1..MAX_ATTEMPTS {
            let Err(ServiceError::Conflict(keys)) = &answer else { break };
            tracing::debug!(keys, attempts = tries, "a record changed while it was being written");
            answer = attempt().await;
        }
        answer
    }

    async fn read_one<T>(
        &self,
        key: String,
        decode: impl Fn(&str, &[u8]) -> Result<T, RecordError>,
    ) -> Result<Option<Versioned<T>>, ServiceError> {
        let record = self.client.read_guarded(&self.guard, &key).await?;
        Ok(record.map(|record| decode_versioned(&record, decode)).transpose()?)
    }

    async fn read_all<T>(
        &self,
        prefix: &KeyPrefix,
        decode: impl Fn(&str, &[u8]) -> Result<T, RecordError>,
    ) -> Result<Vec<Versioned<T>>, ServiceError> {
        Ok(self.read_all_at(prefix, decode).await?.0)
    }

    async fn read_all_at<T>(
        &self,
        prefix: &KeyPrefix,
        decode: impl Fn(&str, &[u8]) -> Result<T, RecordError>,
    ) -> Result<(Vec<Versioned<T>>, i64), ServiceError> {
        let listing = self.client.list(&KeySelector::Prefix(prefix.range().start)).await?;
        let records = listing.records.iter().map(|record| decode_versioned(record, &decode));
        Ok((records.collect::<Result<_, _>>()?, listing.revision))
    }
}

fn decode_versioned<T>(
    record: &Record,
    decode: impl Fn(&str, &[u8]) -> Result<T, RecordError>,
) -> Result<Versioned<T>, RecordError> {
    Ok(Versioned { value: decode(&record.key, &record.value)?, revision: record.mod_revision })
}

/// A write of a record, on condition that it still is as it was read in `known`.
#[must_use]
pub fn record_change<T>(key: String, value: Vec<u8>, known: Option<&Versioned<T>>) -> KeyChange {
    let expected = known.map_or(ExpectedRevision::Absent, |known| ExpectedRevision::At(known.revision));
    KeyChange::Put { key, value, expected }
}

/// A write of a node's record, on condition that it still has this revision.
pub fn node_change(node: &Node, revision: Option<i64>) -> Result<KeyChange, ServiceError> {
    let expected = revision.map_or(ExpectedRevision::Absent, ExpectedRevision::At);
    Ok(KeyChange::Put { key: Node::etcd_key(&node.id)?, value: node.encode()?, expected })
}
