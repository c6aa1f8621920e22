//! Watch cache of nodes: events since a change number, deletions included.
//!
//! A watcher keeps one number, that of the last change it received, and queries what came after. Of each node it gets
//! the newest state alone, a deletion included, however often the node changed meanwhile. So nothing is stored per
//! watcher, slow or fast, and a thousand watchers cost no more memory than one. The last 10,000 deletions are
//! remembered; a watcher that was away for more of them has to start a new watch. No I/O.

use std::collections::BTreeMap;
use std::sync::Arc;

use curator_client::node::Node;
use curator_client::node_id::NodeId;

/// Most deletions that are remembered.
const MAX_DELETIONS: usize = 10_000;

/// An event of one node: its newest state, or its deletion.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeEvent {
    /// The node exists, in this state.
    Present(Arc<Node>),
    /// The node was deleted.
    Deleted(NodeId),
}

/// The watcher was away for so long that deletions since then are forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("more nodes were deleted since the last answer to this watch than are remembered; start a new watch")]
pub struct Expired;

/// All nodes and recent deletions, by the number of the last change of each.
#[derive(Debug, Default)]
pub struct NodeCache {
    nodes: BTreeMap<NodeId, CacheEntry>,
    by_change: BTreeMap<u64, NodeId>,
    latest: u64,
    deletions: usize,
    /// Number of the newest deletion that was forgotten; zero if none was.
    newest_dropped: u64,
}

#[derive(Debug)]
struct CacheEntry {
    changed_at: u64,
    node: Option<Arc<Node>>,
}

impl NodeCache {
    /// Number of the last change; zero before the first.
    #[must_use]
    pub const fn latest_change(&self) -> u64 {
        self.latest
    }

    /// The node with this id, if it exists.
    #[must_use]
    pub fn get(&self, id: &NodeId) -> Option<&Arc<Node>> {
        self.nodes.get(id)?.node.as_ref()
    }

    /// Every node that exists, in order of their ids.
    pub fn nodes(&self) -> impl Iterator<Item = &Arc<Node>> {
        self.nodes.values().filter_map(|entry| entry.node.as_ref())
    }

    /// Stores the newest state of a node.
    pub fn put(&mut self, node: Node) {
        self.insert_change(node.id, Some(Arc::new(node)));
    }

    /// Records the deletion of a node.
    pub fn delete(&mut self, id: NodeId) {
        if self.get(&id).is_some() {
            self.insert_change(id, None);
            self.deletions += 1;
            self.drop_old_deletions();
        }
    }

    fn insert_change(&mut self, id: NodeId, node: Option<Arc<Node>>) {
        self.latest += 1;
        let entry = CacheEntry { changed_at: self.latest, node };
        if let Some(before) = self.nodes.insert(id, entry) {
            self.by_change.remove(&before.changed_at);
            self.deletions -= usize::from(before.node.is_none());
        }
        self.by_change.insert(self.latest, id);
    }

    fn drop_old_deletions(&mut self) {
        if self.deletions <= MAX_DELETIONS {
            return;
        }
        let gone = |id: &NodeId| self.nodes.get(id).is_some_and(|entry| entry.node.is_none());
        let Some((number, id)) = self.by_change.iter().find(|(_, id)| gone(id)).map(|(n, id)| (*n, *id))
        else {
            return;
        };
        self.by_change.remove(&number);
        self.nodes.remove(&id);
        self.deletions -= 1;
        self.newest_dropped = number;
    }

    /// Events after the change of this number, ordered by the last change of each node.
    pub fn events_since(&self, number: u64) -> Result<Vec<NodeEvent>, Expired> {
        if number < self.newest_dropped {
            return Err(Expired);
        }
        Ok(self.by_change.range(number + 1..).map(|(_, id)| self.event(id)).collect())
    }

    /// The event of one node after the change of this number, if it changed.
    #[must_use]
    pub fn event_for(&self, id: &NodeId, number: u64) -> Option<NodeEvent> {
        self.nodes.get(id).filter(|entry| entry.changed_at > number).map(|_| self.event(id))
    }

    fn event(&self, id: &NodeId) -> NodeEvent {
        self.get(id).map_or(NodeEvent::Deleted(*id), |node| NodeEvent::Present(node.clone()))
    }
}

#[cfg(test)]
mod tests {
    use curator_client::testing::{node_id, up};

    use super::*;

    fn events_text(cache: &NodeCache, number: u64) -> Vec<String> {
        let tell = |news: &NodeEvent| match news {
            NodeEvent::Present(node) => format!("+{}", node.id),
            NodeEvent::Deleted(id) => format!("-{id}"),
        };
        cache.events_since(number).unwrap().iter().map(tell).collect()
    }

    #[test]
    fn watcher_gets_the_newest_state_of_each_node_in_change_order() {
        let mut cache = NodeCache::default();
        assert_eq!(events_text(&cache, 0), Vec::<String>::new());
        for number in [1, 2, 3, 1] {
            cache.put(up(number));
        }
        let ids = |numbers: &[i16]| -> Vec<String> {
            let tell = |number: &i16| {
                let id = node_id(u8::try_from(number.abs()).unwrap());
                if *number > 0 { format!("+{id}") } else { format!("-{id}") }
            };
            numbers.iter().map(tell).collect()
        };
        assert_eq!(events_text(&cache, 0), ids(&[2, 3, 1]));
        assert_eq!(events_text(&cache, 3), ids(&[1]));
        let seen = cache.latest_change();
        cache.delete(node_id(2));
        cache.delete(node_id(9));
        assert_eq!(events_text(&cache, seen), ids(&[-2]), "what never was is not deleted");
        assert_eq!(cache.nodes().count(), 2);
        cache.put(up(2));
        assert_eq!(events_text(&cache, seen), ids(&[2]), "one that is back is there, and not deleted before");
        assert_eq!(cache.event_for(&node_id(2), seen), Some(NodeEvent::Present(Arc::new(up(2)))));
        assert_eq!(cache.event_for(&node_id(3), seen), None);
        assert_eq!(cache.event_for(&node_id(9), 0), None);
    }

    #[test]
    fn watcher_that_missed_dropped_deletions_gets_expired() {
        let mut cache = NodeCache::default();
        let key = |number: u32| {
            let mut bytes = [0; 32];
            bytes[..4].copy_from_slice(&number.to_be_bytes());
            curator_client::node_id::PublicKey(bytes)
        };
        let node = |number| Node { key: key(number), id: NodeId::from_key(&key(number)), ..up(1) };
        for number in 0..=u32::try_from(MAX_DELETIONS).unwrap() {
            cache.put(node(number));
        }
        let before = cache.latest_change();
        for number in 0..u32::try_from(MAX_DELETIONS).unwrap() {
            cache.delete(node(number).id);
        }
        assert_eq!(cache.events_since(before).unwrap().len(), MAX_DELETIONS);
        cache.delete(node(u32::try_from(MAX_DELETIONS).unwrap()).id);
        assert_eq!(cache.events_since(before), Err(Expired));
        assert_eq!(cache.events_since(before + 1).unwrap().len(), MAX_DELETIONS);
        assert_eq!(cache.nodes.len(), MAX_DELETIONS);
        assert_eq!(cache.by_change.len(), MAX_DELETIONS);
    }
}
