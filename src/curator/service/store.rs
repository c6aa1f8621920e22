//! The records of a cluster as its leader reads and writes them.
//!
//! Every write is guarded by the leader's lock, and by each record as it was read: between two calls of one leader there
//! is no other order. Whoever finds that a record has changed meanwhile decides anew from the start.
//!
//! # A crowd at one record
//!
//! Two hundred machines that register with one ticket all write its record. Were every one of them to try again beside the
//! others, one would win each time, and the unlucky ones would lose until they are sent away. So whoever has lost a race
//! decides alone from then on: the first look of everybody is made side by side, and losers have their turn one after the
//! other, in the order in which they lost. Whoever comes later waits for those before him. That holds for all records
//! and not for each: a decision takes two questions to etcd, and what it will read is not known before.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::RwLock;

use crate::curator::cluster::{self, Cluster};
use crate::curator::credential::{Credential, Revocation};
use crate::curator::kubernetes::allotment::{Allotment, Allotments};
use crate::curator::kubernetes::keys::{Keys as KubernetesKeys, keys_key};
use crate::curator::kubernetes::settings::{Settings as KubernetesSettings, settings_key};
use crate::curator::membership::Nodes;
use crate::curator::node::Node;
use crate::curator::node_id::{NodeId, PublicKey};
use crate::curator::pki::{Authority, Serial};
use crate::curator::service::failure::Failure;
use crate::curator::tickets::{Ticket, TicketId};
use crate::etcd::client::{Client, Record};
use crate::etcd::guard::{Change, Expected, Guard, Unchanged};
use crate::etcd::key_space::{
    CERTIFICATES, DECLARATIONS, KUBERNETES_NODES, NODES, Prefix, REVOKED_CERTIFICATES, TICKETS,
};
use crate::etcd::namespace::Keys;
use crate::etcd::record::RecordError;
use crate::model::declaration::Declaration;
use crate::model::role::DeclaredRole;

/// How often a decision is made, at most, because records changed while it was being made. Beside whoever decides alone
/// there are only those who write without a decision.
const TRIES: u32 = 10;

/// A record as it was read.
#[derive(Clone, Debug)]
pub struct Stored<T> {
    /// What it says.
    pub value: T,
    /// The store's revision of it.
    pub revision: i64,
}

/// All nodes as they were at one moment.
#[derive(Clone, Debug, Default)]
pub struct StoredNodes {
    /// Their records.
    pub nodes: Nodes,
    /// The store's revision of each.
    pub revisions: BTreeMap<NodeId, i64>,
}

/// What all nodes have of Kubernetes, as it was at one moment.
#[derive(Clone, Debug, Default)]
pub struct StoredAllotments {
    /// Their records.
    pub all: Allotments,
    /// The store's revision of each.
    pub revisions: BTreeMap<NodeId, i64>,
    /// The store's revision at that moment.
    pub at: i64,
}

impl StoredAllotments {
    /// A write of one of them, if it is as it was read. What no node has is no record.
    pub fn put(&self, node: &NodeId, allotment: &Allotment) -> Result<Change, Failure> {
        let expected = self.revisions.get(node).map_or(Expected::Absent, |at| Expected::At(*at));
        let key = Allotment::etcd_key(node)?;
        if *allotment == Allotment::default() {
            return Ok(Change::Delete { key, expected });
        }
        Ok(Change::Put { key, value: allotment.encode(), expected })
    }

    /// Which generations of authorities and keys nodes may be told.
    pub fn told(&self) -> impl Iterator<Item = u64> + '_ {
        self.all.values().filter_map(|allotment| allotment.told).map(|told| told.generation)
    }

    /// That none of them was written since.
    #[must_use]
    pub fn unchanged(&self) -> Unchanged {
        Unchanged { keys: Keys::Under(KUBERNETES_NODES.range().start), since: self.at }
    }
}

/// The records, as long as the guard holds.
#[derive(Clone, Debug)]
pub struct Store {
    client: Client,
    guard: Guard,
    /// Held by all who decide for the first time, and by one of those who have lost a race. Fair: tokio's is.
    turns: Arc<RwLock<()>>,
}

impl Store {
    /// The records of the cluster that this client speaks to, under an election that was won.
    #[must_use]
    pub fn new(client: Client, guard: Guard) -> Self {
        Self { client, guard, turns: Arc::default() }
    }

    /// etcd itself.
    #[must_use]
    pub const fn client(&self) -> &Client {
        &self.client
    }

    /// The cluster.
    pub async fn cluster(&self) -> Result<Option<Stored<Cluster>>, Failure> {
        self.one(cluster::cluster_key()?, Cluster::decode).await
    }

    /// Its authority.
    pub async fn authority(&self) -> Result<Option<Stored<Authority>>, Failure> {
        self.one(cluster::authority_key()?, cluster::decode_authority).await
    }

    /// A node.
    pub async fn node(&self, id: &NodeId) -> Result<Option<Stored<Node>>, Failure> {
        self.one(Node::etcd_key(id)?, Node::decode).await
    }

    /// All nodes.
    pub async fn nodes(&self) -> Result<StoredNodes, Failure> {
        let mut nodes = StoredNodes::default();
        for stored in self.all(&NODES, Node::decode).await? {
            nodes.revisions.insert(stored.value.id, stored.revision);
            nodes.nodes.insert(stored.value.id, stored.value);
        }
        Ok(nodes)
    }

    /// A ticket.
    pub async fn ticket(&self, id: TicketId) -> Result<Option<Stored<Ticket>>, Failure> {
        self.one(TICKETS.key(id)?, Ticket::decode).await
    }

    /// All tickets.
    pub async fn tickets(&self) -> Result<Vec<Stored<Ticket>>, Failure> {
        self.all(&TICKETS, Ticket::decode).await
    }

    /// The declaration of a role.
    pub async fn declaration(&self, role: &DeclaredRole) -> Result<Option<Stored<Declaration>>, Failure> {
        self.one(DECLARATIONS.key(role)?, Declaration::decode).await
    }

    /// All declarations, in order of their names.
    pub async fn declarations(&self) -> Result<Vec<Stored<Declaration>>, Failure> {
        self.all(&DECLARATIONS, Declaration::decode).await
    }

    /// What is kept of a certificate.
    pub async fn credential(&self, serial: Serial) -> Result<Option<Stored<Credential>>, Failure> {
        self.one(Credential::etcd_key(serial)?, Credential::decode).await
    }

    /// What is kept of all certificates.
    pub async fn credentials(&self) -> Result<Vec<Stored<Credential>>, Failure> {
        self.all(&CERTIFICATES, Credential::decode).await
    }

    /// Whether all certificates of a node are refused.
    pub async fn is_revoked(&self, node: NodeId) -> Result<bool, Failure> {
        let key = Revocation::Node(node).etcd_key()?;
        Ok(self.one(key, Revocation::decode).await?.is_some())
    }

    /// Whether an owner's key was removed.
    pub async fn is_removed(&self, owner: PublicKey) -> Result<bool, Failure> {
        let key = Revocation::Owner(owner).etcd_key()?;
        Ok(self.one(key, Revocation::decode).await?.is_some())
    }

    /// Certificates that are refused.
    pub async fn revoked_certificates(&self) -> Result<Vec<Stored<Revocation>>, Failure> {
        self.all(&REVOKED_CERTIFICATES, Revocation::decode).await
    }

    /// What Kubernetes is to be.
    pub async fn kubernetes(&self) -> Result<Option<Stored<KubernetesSettings>>, Failure> {
        self.one(settings_key()?, KubernetesSettings::decode).await
    }

    /// What signs in Kubernetes.
    pub async fn kubernetes_keys(&self) -> Result<Option<Stored<KubernetesKeys>>, Failure> {
        self.one(keys_key()?, KubernetesKeys::decode).await
    }

    /// What all nodes have of Kubernetes.
    pub async fn allotments(&self) -> Result<StoredAllotments, Failure> {
        let listing = self.client.list(&Keys::Under(KUBERNETES_NODES.range().start)).await?;
        let mut stored = StoredAllotments { at: listing.revision, ..StoredAllotments::default() };
        for record in &listing.records {
            let node = Allotment::node_of(&record.key)?;
            stored.all.insert(node, Allotment::decode(&record.key, &record.value)?);
            stored.revisions.insert(node, record.mod_revision);
        }
        Ok(stored)
    }

    /// Makes all these changes or none, and none if any of these was written meanwhile.
    pub async fn write_while(&self, changes: &[Change], unchanged: &Unchanged) -> Result<(), Failure> {
        self.client.write_while(&self.guard, changes, unchanged).await?;
        Ok(())
    }

    /// Makes all these changes or none.
    pub async fn write(&self, changes: &[Change]) -> Result<(), Failure> {
        self.client.write(&self.guard, changes).await?;
        Ok(())
    }

    /// Reads, decides and writes: all of it anew where a record changed between the look at it and the write, and then
    /// beside nobody else who decides.
    pub async fn decide<T, Deciding>(&self, attempt: impl Fn() -> Deciding) -> Result<T, Failure>
    where
        Deciding: Future<Output = Result<T, Failure>>,
    {
        let first = {
            let _beside_others = self.turns.read().await;
            attempt().await
        };
        let mut answer = first;
        let _alone = match &answer {
            Err(Failure::Changed(_)) => self.turns.write().await,
            _ => return answer,
        };
        for tries in 1..TRIES {
            let Err(Failure::Changed(keys)) = &answer else { break };
            tracing::debug!(keys, tries, "a record changed while it was being written");
            answer = attempt().await;
        }
        answer
    }

    async fn one<T>(
        &self,
        key: String,
        decode: impl Fn(&str, &[u8]) -> Result<T, RecordError>,
    ) -> Result<Option<Stored<T>>, Failure> {
        let record = self.client.read(&self.guard, &key).await?;
        Ok(record.map(|record| stored(&record, decode)).transpose()?)
    }

    async fn all<T>(
        &self,
        prefix: &Prefix,
        decode: impl Fn(&str, &[u8]) -> Result<T, RecordError>,
    ) -> Result<Vec<Stored<T>>, Failure> {
        let listing = self.client.list(&Keys::Under(prefix.range().start)).await?;
        Ok(listing.records.iter().map(|record| stored(record, &decode)).collect::<Result<_, _>>()?)
    }
}

fn stored<T>(
    record: &Record,
    decode: impl Fn(&str, &[u8]) -> Result<T, RecordError>,
) -> Result<Stored<T>, RecordError> {
    Ok(Stored { value: decode(&record.key, &record.value)?, revision: record.mod_revision })
}

/// A write of a record that was read as `known`.
#[must_use]
pub fn put<T>(key: String, value: Vec<u8>, known: Option<&Stored<T>>) -> Change {
    let expected = known.map_or(Expected::Absent, |known| Expected::At(known.revision));
    Change::Put { key, value, expected }
}

/// A write of a node's record that was read at this revision.
pub fn put_node(node: &Node, revision: Option<i64>) -> Result<Change, Failure> {
    let expected = revision.map_or(Expected::Absent, Expected::At);
    Ok(Change::Put { key: Node::etcd_key(&node.id)?, value: node.encode()?, expected })
}
