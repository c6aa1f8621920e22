//! All nodes as they are, in the order in which they last changed.
//!
//! Whoever follows keeps one number, that of the last change he was told, and asks what came after. Of each node he gets
//! the newest state alone, a deletion included, however often it changed meanwhile; so nothing is kept for anybody who
//! follows, slow or fast, and a thousand followers cost no more memory than one. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::curator::node::Node;
use crate::curator::node_id::NodeId;

/// Deletions that are remembered.
const MOST_DELETIONS: usize = 10_000;

/// What became of a node: it is so, or it is gone.
#[derive(Clone, Debug, PartialEq)]
pub enum News {
    /// It exists and is so.
    Present(Arc<Node>),
    /// It exists no longer.
    Deleted(NodeId),
}

/// Who follows has not asked for so long that deletions since then are forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("more nodes were deleted since this watch was last answered than are remembered; watch anew")]
pub struct TooLate;

/// The nodes.
#[derive(Debug, Default)]
pub struct Chronicle {
    nodes: BTreeMap<NodeId, Entry>,
    order: BTreeMap<u64, NodeId>,
    latest: u64,
    deletions: usize,
    /// A deletion of this number was forgotten.
    forgotten: u64,
}

#[derive(Debug)]
struct Entry {
    changed: u64,
    node: Option<Arc<Node>>,
}

impl Chronicle {
    /// Number of the last change; zero before the first.
    #[must_use]
    pub const fn latest(&self) -> u64 {
        self.latest
    }

    /// A node, if it is there.
    #[must_use]
    pub fn get(&self, id: &NodeId) -> Option<&Arc<Node>> {
        self.nodes.get(id)?.node.as_ref()
    }

    /// Every node that is there, in order of their ids.
    pub fn present(&self) -> impl Iterator<Item = &Arc<Node>> {
        self.nodes.values().filter_map(|entry| entry.node.as_ref())
    }

    /// A node is so.
    pub fn put(&mut self, node: Node) {
        self.change(node.id, Some(Arc::new(node)));
    }

    /// A node is gone.
    pub fn delete(&mut self, id: NodeId) {
        if self.get(&id).is_some() {
            self.change(id, None);
            self.deletions += 1;
            self.forget();
        }
    }

    fn change(&mut self, id: NodeId, node: Option<Arc<Node>>) {
        self.latest += 1;
        let entry = Entry { changed: self.latest, node };
        if let Some(before) = self.nodes.insert(id, entry) {
            self.order.remove(&before.changed);
            self.deletions -= usize::from(before.node.is_none());
        }
        self.order.insert(self.latest, id);
    }

    fn forget(&mut self) {
        if self.deletions <= MOST_DELETIONS {
            return;
        }
        let gone = |id: &NodeId| self.nodes.get(id).is_some_and(|entry| entry.node.is_none());
        let Some((number, id)) = self.order.iter().find(|(_, id)| gone(id)).map(|(n, id)| (*n, *id)) else {
            return;
        };
        self.order.remove(&number);
        self.nodes.remove(&id);
        self.deletions -= 1;
        self.forgotten = number;
    }

    /// What changed after the change of this number, in the order of the last change of each.
    pub fn since(&self, number: u64) -> Result<Vec<News>, TooLate> {
        if number < self.forgotten {
            return Err(TooLate);
        }
        Ok(self.order.range(number + 1..).map(|(_, id)| self.news(id)).collect())
    }

    /// What became of one node after the change of this number, if anything.
    #[must_use]
    pub fn news_of(&self, id: &NodeId, number: u64) -> Option<News> {
        self.nodes.get(id).filter(|entry| entry.changed > number).map(|_| self.news(id))
    }

    fn news(&self, id: &NodeId) -> News {
        self.get(id).map_or(News::Deleted(*id), |node| News::Present(node.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curator::node::tests::up;
    use crate::curator::node_id::tests::node_id;

    fn told(chronicle: &Chronicle, number: u64) -> Vec<String> {
        let tell = |news: &News| match news {
            News::Present(node) => format!("+{}", node.id),
            News::Deleted(id) => format!("-{id}"),
        };
        chronicle.since(number).unwrap().iter().map(tell).collect()
    }

    #[test]
    fn follower_gets_the_newest_of_each_node_in_the_order_of_changes() {
        let mut chronicle = Chronicle::default();
        assert_eq!(told(&chronicle, 0), Vec::<String>::new());
        for number in [1, 2, 3, 1] {
            chronicle.put(up(number));
        }
        let ids = |numbers: &[i16]| -> Vec<String> {
            let tell = |number: &i16| {
                let id = node_id(u8::try_from(number.abs()).unwrap());
                if *number > 0 { format!("+{id}") } else { format!("-{id}") }
            };
            numbers.iter().map(tell).collect()
        };
        assert_eq!(told(&chronicle, 0), ids(&[2, 3, 1]));
        assert_eq!(told(&chronicle, 3), ids(&[1]));
        let seen = chronicle.latest();
        chronicle.delete(node_id(2));
        chronicle.delete(node_id(9));
        assert_eq!(told(&chronicle, seen), ids(&[-2]), "what never was is not deleted");
        assert_eq!(chronicle.present().count(), 2);
        chronicle.put(up(2));
        assert_eq!(told(&chronicle, seen), ids(&[2]), "one that is back is there, and not deleted before");
        assert_eq!(chronicle.news_of(&node_id(2), seen), Some(News::Present(Arc::new(up(2)))));
        assert_eq!(chronicle.news_of(&node_id(3), seen), None);
        assert_eq!(chronicle.news_of(&node_id(9), 0), None);
    }

    #[test]
    fn deletions_are_forgotten_in_the_end_and_a_follower_that_missed_one_is_told_so() {
        let mut chronicle = Chronicle::default();
        let key = |number: u32| {
            let mut bytes = [0; 32];
            bytes[..4].copy_from_slice(&number.to_be_bytes());
            crate::curator::node_id::PublicKey(bytes)
        };
        let node = |number| Node { key: key(number), id: NodeId::of(&key(number)), ..up(1) };
        for number in 0..=u32::try_from(MOST_DELETIONS).unwrap() {
            chronicle.put(node(number));
        }
        let before = chronicle.latest();
        for number in 0..u32::try_from(MOST_DELETIONS).unwrap() {
            chronicle.delete(node(number).id);
        }
        assert_eq!(chronicle.since(before).unwrap().len(), MOST_DELETIONS);
        chronicle.delete(node(u32::try_from(MOST_DELETIONS).unwrap()).id);
        assert_eq!(chronicle.since(before), Err(TooLate));
        assert_eq!(chronicle.since(before + 1).unwrap().len(), MOST_DELETIONS);
        assert_eq!(chronicle.nodes.len(), MOST_DELETIONS);
        assert_eq!(chronicle.order.len(), MOST_DELETIONS);
    }
}
