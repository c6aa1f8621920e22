//! The watch cache of etcd records. The leader serves from it; a follower only recognises the members of the cluster.
//!
//! One task watches etcd for all watches of clients, and for the auth router, which checks with every call whether the
//! certificate is still accepted. So watchers cost etcd nothing. The one exception is the call that follows the leader
//! (`leader_service`): each of its clients has a watch in etcd. The cache is a moment behind etcd. Before a peer is
//! rejected because of its node's cached state, etcd is read. A revocation returns once the cache shows it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use curator_client::node::{Node, NodeState};
use curator_client::node_id::NodeId;
use curator_client::peer_identity::Revocations;
use etcd::client::Client;
use etcd::key_space::{
    DECLARATIONS, KUBERNETES, KUBERNETES_NODES, KeyPrefix, NODES, REVOKED_CERTIFICATES, REVOKED_NODES,
    REVOKED_OWNERS,
};
use etcd::key_watcher::{KeyEvent, KeyWatcher};
use etcd::namespace::KeySelector;
use etcd::record::RecordError;
use model::node_role::DeclaredRole;
use model::role_declaration::RoleDeclaration;
use tokio::sync::watch;

use crate::credential::Revocation;
use crate::kubernetes::keys::{KubernetesKeys, keys_record_key};
use crate::kubernetes::node_allocation::{NodeAllocation, NodeAllocations};
use crate::kubernetes::settings::{KubernetesSettings, settings_record_key};
use crate::role_declaration::decode_declaration;
use crate::service::node_watch_cache::NodeCache;

/// The records as they were last received.
#[derive(Debug, Default)]
pub(super) struct CachedRecords {
    /// All nodes, with recent deletions.
    pub(super) nodes: NodeCache,
    /// Revoked certificates, nodes and owner keys.
    pub(super) revocations: Revocations,
    /// Declarations of operators' roles.
    pub(super) declarations: BTreeMap<DeclaredRole, Arc<RoleDeclaration>>,
    /// The Kubernetes records of the cluster.
    pub(super) kubernetes: CachedKubernetes,
}

/// The cached records of Kubernetes.
#[derive(Debug, Default)]
pub(super) struct CachedKubernetes {
    /// The settings; `None` if the cluster has no Kubernetes.
    pub(super) settings: Option<Arc<KubernetesSettings>>,
    /// The signing keys; `None` if there never was Kubernetes.
    pub(super) keys: Option<Arc<KubernetesKeys>>,
    /// The allocations of all nodes.
    pub(super) allocations: NodeAllocations,
    /// Etcd keys of records that cannot be decoded. A node that needs one gets an error, rather than the answer that it
    /// is missing.
    unreadable: BTreeSet<String>,
}

impl CachedKubernetes {
    /// The etcd key of an unreadable record that this node's setup depends on, if any.
    #[must_use]
    pub(super) fn unreadable_for(&self, node: &NodeId) -> Option<&str> {
        let others = |key: &str| NodeAllocation::node_from_key(key).is_ok_and(|other| other != *node);
        self.unreadable.iter().map(String::as_str).find(|key| !others(key))
    }
}

/// The cached records, and counters that notify of changes.
#[derive(Debug)]
pub(super) struct RecordCache {
    records: RwLock<CachedRecords>,
    changes: watch::Sender<u64>,
    trust_changes: watch::Sender<u64>,
}

/// A decoded record that the cache has received.
enum CacheUpdate {
    Node(Box<Node>),
    Declaration(Arc<RoleDeclaration>),
    Revocation(Revocation),
    KubernetesSettings(Arc<KubernetesSettings>),
    KubernetesKeys(Arc<KubernetesKeys>),
    NodeAllocation(NodeId, NodeAllocation),
}

impl RecordCache {
    /// An empty cache; [`RecordCache::watch_etcd`] fills it.
    #[must_use]
    pub(super) fn new() -> Self {
        Self {
            records: RwLock::default(),
            changes: watch::Sender::new(0),
            trust_changes: watch::Sender::new(0),
        }
    }

    /// The records as they are cached now. The read lock must not be held across anything slow.
    pub(super) fn records(&self) -> RwLockReadGuard<'_, CachedRecords> {
        self.records.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// A counter of all changes, from now on.
    #[must_use]
    pub(super) fn subscribe_changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// A counter of changes that may invalidate certificates: revocations, and nodes that are no longer up.
    #[must_use]
    pub(super) fn subscribe_trust_changes(&self) -> watch::Receiver<u64> {
        self.trust_changes.subscribe()
    }

    /// Waits until the cached records satisfy `holds`.
    pub(super) async fn wait_until(&self, holds: impl Fn(&CachedRecords) -> bool) {
        let mut changes = self.subscribe_changes();
        while !holds(&self.records()) {
            if changes.changed().await.is_err() {
                // Unreachable while `self` lives.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Watches etcd until the future is dropped. It sets `ready` once every record that existed at the beginning is
    /// cached.
    pub(super) async fn watch_etcd(&self, client: &Client, ready: watch::Sender<bool>) {
        let mut nodes = watch_prefix(client, &NODES, |key, value| {
            Node::decode(key, value).map(|node| CacheUpdate::Node(Box::new(node)))
        });
        let mut declarations = watch_prefix(client, &DECLARATIONS, |key, value| {
            decode_declaration(key, value).map(|declaration| CacheUpdate::Declaration(Arc::new(declaration)))
        });
        let revocation =
            |key: &str, value: &[u8]| Revocation::decode(key, value).map(CacheUpdate::Revocation);
        let mut certificates = watch_prefix(client, &REVOKED_CERTIFICATES, revocation);
        let mut revoked_nodes = watch_prefix(client, &REVOKED_NODES, revocation);
        let mut removed_owners = watch_prefix(client, &REVOKED_OWNERS, revocation);
        let mut kubernetes = watch_prefix(client, &KUBERNETES, decode_kubernetes);
        let mut allotments = watch_prefix(client, &KUBERNETES_NODES, |key, value| {
            Ok(CacheUpdate::NodeAllocation(
                NodeAllocation::node_from_key(key)?,
                NodeAllocation::decode(key, value)?,
            ))
        });
        let mut backlogs = 7;
        loop {
            let event = tokio::select! {
                event = nodes.next_event() => event,
                event = declarations.next_event() => event,
                event = certificates.next_event() => event,
                event = revoked_nodes.next_event() => event,
                event = removed_owners.next_event() => event,
                event = kubernetes.next_event() => event,
                event = allotments.next_event() => event,
            };
            match event {
                Ok(KeyEvent::Put { key, value, .. }) => {
                    self.records_mut().kubernetes.unreadable.remove(&key);
                    self.apply_update(value);
                }
                Ok(KeyEvent::Deleted { key }) => self.apply_deletion(&key),
                Ok(KeyEvent::BacklogDone) => {
                    backlogs -= 1;
                    if backlogs == 0 {
                        ready.send_replace(true);
                    }
                }
                // The cache keeps the former value of the record, and writes to the record fail with its name.
                Err(error) => {
                    tracing::error!(%error, "a record of the cluster cannot be decoded; the cache keeps the former one");
                    if [&KUBERNETES, &KUBERNETES_NODES].iter().any(|prefix| prefix.id_of(&error.key).is_ok())
                    {
                        self.records_mut().kubernetes.unreadable.insert(error.key);
                        self.notify_watchers(false);
                    }
                }
            }
        }
    }

    fn apply_update(&self, record: CacheUpdate) {
        let mut distrust = false;
        {
            let mut seen = self.records_mut();
            match record {
                CacheUpdate::Node(node) => {
                    let was_up = seen.nodes.get(&node.id).is_some_and(|known| known.state == NodeState::Up);
                    distrust = was_up && node.state != NodeState::Up;
                    seen.nodes.put(*node);
                }
                CacheUpdate::Declaration(declaration) => {
                    seen.declarations.insert(declaration.role().clone(), declaration);
                }
                CacheUpdate::Revocation(revocation) => {
                    distrust = true;
                    match revocation {
                        Revocation::Certificate(serial, until) => {
                            seen.revocations.serials.insert(serial, until);
                        }
                        Revocation::Node(node) => {
                            seen.revocations.nodes.insert(node);
                        }
                        Revocation::Owner(key) => {
                            seen.revocations.owners.insert(key);
                        }
                    }
                }
                CacheUpdate::KubernetesSettings(settings) => seen.kubernetes.settings = Some(settings),
                CacheUpdate::KubernetesKeys(keys) => seen.kubernetes.keys = Some(keys),
                CacheUpdate::NodeAllocation(node, allocation) => {
                    seen.kubernetes.allocations.insert(node, allocation);
                }
            }
        }
        self.notify_watchers(distrust);
    }

    fn apply_deletion(&self, key: &str) {
        let node = NODES.id_of(key).ok().and_then(|id| id.parse().ok());
        {
            let mut seen = self.records_mut();
            seen.kubernetes.unreadable.remove(key);
            if let Some(id) = node {
                seen.nodes.delete(id);
            } else if let Ok(id) = NodeAllocation::node_from_key(key) {
                seen.kubernetes.allocations.remove(&id);
            } else if settings_record_key().is_ok_and(|settings| settings == key) {
                seen.kubernetes.settings = None;
            } else if keys_record_key().is_ok_and(|keys| keys == key) {
                seen.kubernetes.keys = None;
            } else if let Some(role) = DECLARATIONS.id_of(key).ok().and_then(|role| role.parse().ok()) {
                let role: DeclaredRole = role;
                seen.declarations.remove(&role);
            } else if let Some(serial) = Revocation::serial_from_key(key) {
                seen.revocations.serials.remove(&serial);
            } else if let Some(id) = Revocation::node_from_key(key) {
                seen.revocations.nodes.remove(&id);
            } else if let Some(key) = Revocation::owner_from_key(key) {
                seen.revocations.owners.remove(&key);
            }
        }
        self.notify_watchers(node.is_some());
    }

    fn records_mut(&self) -> RwLockWriteGuard<'_, CachedRecords> {
        self.records.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn notify_watchers(&self, distrust: bool) {
        self.changes.send_modify(|count| *count += 1);
        if distrust {
            self.trust_changes.send_modify(|count| *count += 1);
        }
    }
}

/// Decodes a Kubernetes singleton record: settings or keys.
fn decode_kubernetes(key: &str, value: &[u8]) -> Result<CacheUpdate, RecordError> {
    let at = |place: Result<String, etcd::key_space::KeyError>| place.is_ok_and(|place| place == key);
    if at(settings_record_key()) {
        KubernetesSettings::decode(key, value)
            .map(|settings| CacheUpdate::KubernetesSettings(Arc::new(settings)))
    } else if at(keys_record_key()) {
        KubernetesKeys::decode(key, value).map(|keys| CacheUpdate::KubernetesKeys(Arc::new(keys)))
    } else {
        Err(RecordError::new(key, "this release does not know such a record"))
    }
}

fn watch_prefix<D>(client: &Client, prefix: &KeyPrefix, decode: D) -> KeyWatcher<D>
where
    D: FnMut(&str, &[u8]) -> Result<CacheUpdate, RecordError>,
{
    KeyWatcher::new(client, KeySelector::Prefix(prefix.range().start), decode)
}

#[cfg(test)]
mod tests {
    use curator_client::certificate::Serial;
    use curator_client::testing::{at, node_id, up};

    use super::*;

    #[test]
    fn certificates_are_rechecked_only_after_a_trust_change() {
        let view = RecordCache::new();
        let mut distrust = view.subscribe_trust_changes();
        let mut since = |change: &dyn Fn()| {
            change();
            let changed = distrust.has_changed().unwrap();
            distrust.mark_unchanged();
            changed
        };
        let serial = Serial::new([1; 16]);
        let revoked = Revocation::Certificate(serial, at(9));
        let key = revoked.etcd_key().unwrap();
        assert!(!since(&|| view.apply_update(CacheUpdate::Node(Box::new(up(1))))), "a node that came");
        assert!(!since(&|| view.apply_update(CacheUpdate::Node(Box::new(up(1))))), "a node that changed");
        let over = Node { state: NodeState::Decommissioned, ..up(1) };
        assert!(
            since(&|| view.apply_update(CacheUpdate::Node(Box::new(over.clone())))),
            "a node that is out"
        );
        assert!(since(&|| view.apply_update(CacheUpdate::Revocation(revoked.clone()))), "a revocation");
        assert!(view.records().revocations.serials.contains_key(&serial));
        assert!(!since(&|| view.apply_deletion(&key)), "the end of what was revoked");
        assert!(view.records().revocations.serials.is_empty());
        assert!(
            since(&|| view.apply_deletion(&Node::etcd_key(&node_id(1)).unwrap())),
            "a node that is forgotten"
        );
        assert_eq!(view.records().nodes.nodes().count(), 0);
    }
}
