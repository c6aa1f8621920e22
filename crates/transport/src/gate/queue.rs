//! Connections of one class by source: the busiest source, and the oldest connection of each.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use crate::gate::source::Source;

/// Number of a connection. A later connection has a higher one.
pub(super) type ConnectionId = u64;

/// Connections by source. Each operation takes logarithmic time, because a flood calls it thousands of times a second.
#[derive(Debug, Default)]
pub(super) struct Queue {
    by_source: HashMap<Source, BTreeSet<ConnectionId>>,
    /// The number of connections of each source, and its oldest one. The last entry is the busiest source; of several,
    /// the one with the oldest connection.
    ranking: BTreeSet<(usize, Reverse<ConnectionId>, Source)>,
    count: usize,
}

impl Queue {
    pub(super) const fn count(&self) -> usize {
        self.count
    }

    pub(super) fn count_of(&self, source: Source) -> usize {
        self.by_source.get(&source).map_or(0, BTreeSet::len)
    }

    pub(super) fn insert(&mut self, source: Source, id: ConnectionId) {
        self.change(source, |own| own.insert(id));
    }

    pub(super) fn remove(&mut self, source: Source, id: ConnectionId) {
        self.change(source, |own| own.remove(&id));
    }

    pub(super) fn oldest_of(&self, source: Source) -> Option<ConnectionId> {
        self.by_source.get(&source)?.first().copied()
    }

    pub(super) fn oldest_of_busiest(&self) -> Option<ConnectionId> {
        self.ranking.last().map(|(_, Reverse(oldest), _)| *oldest)
    }

    fn change(&mut self, source: Source, change: impl FnOnce(&mut BTreeSet<ConnectionId>) -> bool) {
        let own = self.by_source.entry(source).or_default();
        let before = own.len();
        if let Some(oldest) = own.first() {
            self.ranking.remove(&(before, Reverse(*oldest), source));
        }
        change(own);
        let after = own.len();
        if let Some(oldest) = own.first() {
            self.ranking.insert((after, Reverse(*oldest), source));
        } else {
            self.by_source.remove(&source);
        }
        self.count = self.count + after - before;
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    fn source(last: u8) -> Source {
        Source::from_address(IpAddr::from([192, 0, 2, last]))
    }

    #[test]
    fn busiest_source_is_that_with_most_and_then_with_the_oldest() {
        let mut queue = Queue::default();
        assert_eq!(queue.oldest_of_busiest(), None);
        for (last, id) in [(1, 1), (2, 2), (2, 3)] {
            queue.insert(source(last), id);
        }
        assert_eq!(queue.oldest_of_busiest(), Some(2), "source 2 has two");
        queue.remove(source(2), 2);
        assert_eq!(queue.oldest_of_busiest(), Some(1), "both have one, and that of source 1 is older");
        assert_eq!((queue.count(), queue.count_of(source(2)), queue.oldest_of(source(2))), (2, 1, Some(3)));
    }

    #[test]
    fn nothing_is_left_of_removed_connections() {
        let mut queue = Queue::default();
        queue.insert(source(1), 1);
        queue.remove(source(1), 1);
        queue.remove(source(1), 1);
        assert_eq!((queue.count(), queue.by_source.len(), queue.ranking.len()), (0, 0, 0));
    }
}
