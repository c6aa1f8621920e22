//! What a leader sees of the records all the time, so that nobody who follows costs etcd anything.
//!
//! One task follows etcd for all watches, and for the door, which asks of every call whether its certificate is still
//! good. The view is a moment behind etcd. Whoever refuses something because of it looks into etcd first, and whoever
//! revoked something is answered once the view shows it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use tokio::sync::watch;

use crate::curator::credential::Revocation;
use crate::curator::kubernetes::allotment::{Allotment, Allotments};
use crate::curator::kubernetes::keys::{Keys as KubernetesKeys, keys_key};
use crate::curator::kubernetes::settings::{Settings as KubernetesSettings, settings_key};
use crate::curator::node::{Node, State};
use crate::curator::node_id::NodeId;
use crate::curator::peer::Revocations;
use crate::curator::service::chronicle::Chronicle;
use crate::etcd::client::Client;
use crate::etcd::key_space::{
    DECLARATIONS, KUBERNETES, KUBERNETES_NODES, NODES, Prefix, REVOKED_CERTIFICATES, REVOKED_NODES,
    REVOKED_OWNERS,
};
use crate::etcd::namespace::Keys;
use crate::etcd::record::RecordError;
use crate::etcd::value::{Event, Follower};
use crate::model::declaration::Declaration;
use crate::model::role::DeclaredRole;

/// The records as they were last seen.
#[derive(Debug, Default)]
pub struct Seen {
    /// Nodes.
    pub nodes: Chronicle,
    /// What is refused.
    pub revocations: Revocations,
    /// Declarations of roles.
    pub declarations: BTreeMap<DeclaredRole, Arc<Declaration>>,
    /// Kubernetes.
    pub kubernetes: SeenKubernetes,
}

/// What is seen of Kubernetes.
#[derive(Debug, Default)]
pub struct SeenKubernetes {
    /// What it is to be.
    pub settings: Option<Arc<KubernetesSettings>>,
    /// What signs in it.
    pub keys: Option<Arc<KubernetesKeys>>,
    /// What each node has of it.
    pub allotments: Allotments,
    /// Keys in etcd of records that cannot be read. Whoever needs one is told nothing, rather than that it is not there.
    unreadable: BTreeSet<String>,
}

impl SeenKubernetes {
    /// A record that cannot be read and that what a node is told depends on.
    #[must_use]
    pub fn unreadable_for(&self, node: &NodeId) -> Option<&str> {
        let others = |key: &str| Allotment::node_of(key).is_ok_and(|other| other != *node);
        self.unreadable.iter().map(String::as_str).find(|key| !others(key))
    }
}

/// What is seen, and that something changed.
#[derive(Debug)]
pub struct View {
    seen: RwLock<Seen>,
    changes: watch::Sender<u64>,
    distrust: watch::Sender<u64>,
}

/// A record as it is followed.
enum Followed {
    Node(Box<Node>),
    Declaration(Arc<Declaration>),
    Revocation(Revocation),
    Kubernetes(Arc<KubernetesSettings>),
    KubernetesKeys(Arc<KubernetesKeys>),
    Allotment(NodeId, Allotment),
}

impl View {
    /// A view that has seen nothing.
    #[must_use]
    pub fn new() -> Self {
        Self { seen: RwLock::default(), changes: watch::Sender::new(0), distrust: watch::Sender::new(0) }
    }

    /// What is seen now. Not to be held over anything that takes time.
    pub fn seen(&self) -> RwLockReadGuard<'_, Seen> {
        self.seen.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts changes, from now on.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Counts what makes certificates worthless: revocations, and nodes that are up no longer.
    #[must_use]
    pub fn distrust(&self) -> watch::Receiver<u64> {
        self.distrust.subscribe()
    }

    /// Waits until what is seen is so.
    pub async fn wait_until(&self, holds: impl Fn(&Seen) -> bool) {
        let mut changes = self.changes();
        while !holds(&self.seen()) {
            if changes.changed().await.is_err() {
                // Not while `self` lives.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Follows etcd until it is dropped; `ready` is told once, when all that was there at the beginning is seen.
    pub async fn follow(&self, client: &Client, ready: watch::Sender<bool>) {
        let mut nodes = follower(client, &NODES, |key, value| {
            Node::decode(key, value).map(|node| Followed::Node(Box::new(node)))
        });
        let mut declarations = follower(client, &DECLARATIONS, |key, value| {
            Declaration::decode(key, value).map(|declaration| Followed::Declaration(Arc::new(declaration)))
        });
        let revocation = |key: &str, value: &[u8]| Revocation::decode(key, value).map(Followed::Revocation);
        let mut certificates = follower(client, &REVOKED_CERTIFICATES, revocation);
        let mut revoked_nodes = follower(client, &REVOKED_NODES, revocation);
        let mut removed_owners = follower(client, &REVOKED_OWNERS, revocation);
        let mut kubernetes = follower(client, &KUBERNETES, kubernetes);
        let mut allotments = follower(client, &KUBERNETES_NODES, |key, value| {
            Ok(Followed::Allotment(Allotment::node_of(key)?, Allotment::decode(key, value)?))
        });
        let mut backlogs = 7;
        loop {
            let event = tokio::select! {
                event = nodes.next() => event,
                event = declarations.next() => event,
                event = certificates.next() => event,
                event = revoked_nodes.next() => event,
                event = removed_owners.next() => event,
                event = kubernetes.next() => event,
                event = allotments.next() => event,
            };
            match event {
                Ok(Event::Put { key, value, .. }) => {
                    self.change().kubernetes.unreadable.remove(&key);
                    self.put(value);
                }
                Ok(Event::Deleted { key }) => self.deleted(&key),
                Ok(Event::BacklogDone) => {
                    backlogs -= 1;
                    if backlogs == 0 {
                        ready.send_replace(true);
                    }
                }
                // What was seen of it before stays seen, and what is written to it is refused by name.
                Err(error) => {
                    tracing::error!(%error, "a record of the cluster is not seen as it is");
                    if [&KUBERNETES, &KUBERNETES_NODES].iter().any(|prefix| prefix.id(&error.key).is_ok()) {
                        self.change().kubernetes.unreadable.insert(error.key);
                        self.tell(false);
                    }
                }
            }
        }
    }

    fn put(&self, record: Followed) {
        let mut distrust = false;
        {
            let mut seen = self.change();
            match record {
                Followed::Node(node) => {
                    let was_up = seen.nodes.get(&node.id).is_some_and(|known| known.state == State::Up);
                    distrust = was_up && node.state != State::Up;
                    seen.nodes.put(*node);
                }
                Followed::Declaration(declaration) => {
                    seen.declarations.insert(declaration.role().clone(), declaration);
                }
                Followed::Revocation(revocation) => {
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
                Followed::Kubernetes(settings) => seen.kubernetes.settings = Some(settings),
                Followed::KubernetesKeys(keys) => seen.kubernetes.keys = Some(keys),
                Followed::Allotment(node, allotment) => {
                    seen.kubernetes.allotments.insert(node, allotment);
                }
            }
        }
        self.tell(distrust);
    }

    fn deleted(&self, key: &str) {
        let node = NODES.id(key).ok().and_then(|id| id.parse().ok());
        {
            let mut seen = self.change();
            seen.kubernetes.unreadable.remove(key);
            if let Some(id) = node {
                seen.nodes.delete(id);
            } else if let Ok(id) = Allotment::node_of(key) {
                seen.kubernetes.allotments.remove(&id);
            } else if settings_key().is_ok_and(|settings| settings == key) {
                seen.kubernetes.settings = None;
            } else if keys_key().is_ok_and(|keys| keys == key) {
                seen.kubernetes.keys = None;
            } else if let Some(role) = DECLARATIONS.id(key).ok().and_then(|role| role.parse().ok()) {
                let role: DeclaredRole = role;
                seen.declarations.remove(&role);
            } else if let Some(serial) = Revocation::serial_of(key) {
                seen.revocations.serials.remove(&serial);
            } else if let Some(id) = Revocation::node_of(key) {
                seen.revocations.nodes.remove(&id);
            } else if let Some(key) = Revocation::owner_of(key) {
                seen.revocations.owners.remove(&key);
            }
        }
        self.tell(node.is_some());
    }

    fn change(&self) -> RwLockWriteGuard<'_, Seen> {
        self.seen.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, distrust: bool) {
        self.changes.send_modify(|count| *count += 1);
        if distrust {
            self.distrust.send_modify(|count| *count += 1);
        }
    }
}

impl Default for View {
    fn default() -> Self {
        Self::new()
    }
}

/// Reads what there is one of in Kubernetes.
fn kubernetes(key: &str, value: &[u8]) -> Result<Followed, RecordError> {
    let at = |place: Result<String, crate::etcd::key_space::KeyError>| place.is_ok_and(|place| place == key);
    if at(settings_key()) {
        KubernetesSettings::decode(key, value).map(|settings| Followed::Kubernetes(Arc::new(settings)))
    } else if at(keys_key()) {
        KubernetesKeys::decode(key, value).map(|keys| Followed::KubernetesKeys(Arc::new(keys)))
    } else {
        Err(RecordError::new(key, "this release knows of no such thing"))
    }
}

fn follower<D>(client: &Client, prefix: &Prefix, decode: D) -> Follower<D>
where
    D: FnMut(&str, &[u8]) -> Result<Followed, RecordError>,
{
    Follower::new(client, Keys::Under(prefix.range().start), decode)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curator::node::tests::{at, up};
    use crate::curator::node_id::tests::node_id;
    use crate::curator::pki::Serial;

    #[test]
    fn certificates_are_looked_at_again_only_when_something_makes_them_worthless() {
        let view = View::new();
        let mut distrust = view.distrust();
        let mut since = |change: &dyn Fn()| {
            change();
            let changed = distrust.has_changed().unwrap();
            distrust.mark_unchanged();
            changed
        };
        let serial = Serial::new([1; 16]);
        let revoked = Revocation::Certificate(serial, at(9));
        let key = revoked.etcd_key().unwrap();
        assert!(!since(&|| view.put(Followed::Node(Box::new(up(1))))), "a node that came");
        assert!(!since(&|| view.put(Followed::Node(Box::new(up(1))))), "a node that changed");
        let over = Node { state: State::Decommissioned, ..up(1) };
        assert!(since(&|| view.put(Followed::Node(Box::new(over.clone())))), "a node that is out");
        assert!(since(&|| view.put(Followed::Revocation(revoked.clone()))), "a revocation");
        assert!(view.seen().revocations.serials.contains_key(&serial));
        assert!(!since(&|| view.deleted(&key)), "the end of what was revoked");
        assert!(view.seen().revocations.serials.is_empty());
        assert!(since(&|| view.deleted(&Node::etcd_key(&node_id(1)).unwrap())), "a node that is forgotten");
        assert_eq!(view.seen().nodes.present().count(), 0);
    }
}
