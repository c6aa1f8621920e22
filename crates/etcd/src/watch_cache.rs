//! The watch cache of a watcher: the newest value of each key, and the changes not yet taken by its reader. No I/O.
//!
//! Two sources feed it: watch events, and whole listings of the keys. They arrive in any order, because a listing takes
//! a while and events go on meanwhile. The store's revision orders them. An event counts if it is newer than the last
//! listing and than everything known of its key. A listing counts for the keys of which nothing newer is known. To know
//! that of a deleted key, the cache keeps its deletion until a listing is newer (a *tombstone*).
//!
//! So the state after a set of events and listings depends on the set alone, and an event that etcd loses is missing
//! only until the next listing.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;

use crate::client::{Listing, Record};

/// A key's value and its revisions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) value: Arc<[u8]>,
    pub(super) create_revision: i64,
    /// The revision of the first write that left these bytes, as far as the cache saw it.
    pub(super) mod_revision: i64,
    /// The revision of the last write. Zero if it may be the revision of another store.
    newest_revision: i64,
}

impl Entry {
    /// Whether a reader that has the other entry learns nothing from this one.
    fn says_the_same_as(&self, other: &Self) -> bool {
        self.create_revision == other.create_revision && self.value == other.value
    }
}

/// A change that the reader has not taken yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The key has this value.
    Put(String, Entry),
    /// The key is gone.
    Deleted(String),
    /// All keys that existed at the start have been taken.
    BacklogDone,
}

/// A place in the queue of changes.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Queued {
    Key(String),
    BacklogDone,
}

/// The cache. However slow its reader is, it holds at most two values and one place in the queue for each key.
#[derive(Debug, Default)]
pub(super) struct WatchCache {
    /// The revision of the newest listing; zero before the first.
    listed_revision: i64,
    entries: BTreeMap<String, Entry>,
    /// Keys that were deleted after the newest listing, with the revision of the deletion.
    tombstones: BTreeMap<String, i64>,
    /// The entry of each key that the reader took last.
    delivered: BTreeMap<String, Entry>,
    queue: VecDeque<Queued>,
    /// The keys in the queue, each once.
    queued: HashSet<String>,
    backlog_queued: bool,
}

impl WatchCache {
    /// Begins with a listing that was made while no watch ran. The listing counts, even if its revision is lower than
    /// the known ones: etcd may have lost its newest writes in a power failure of its hosts, and then continues from an
    /// older revision.
    pub(super) fn restart(&mut self, listing: Listing) {
        self.listed_revision = 0;
        self.tombstones.clear();
        for entry in self.entries.values_mut() {
            entry.newest_revision = 0;
        }
        self.take_in(listing);
        if !std::mem::replace(&mut self.backlog_queued, true) {
            self.queue.push_back(Queued::BacklogDone);
        }
    }

    /// Merges a listing that was made while events arrived. New entries are queued in the order of their writes, like
    /// events: a listing that is quicker than the events does not change the order.
    pub(super) fn merge(&mut self, mut listing: Listing) {
        listing.records.sort_by_key(|record| record.mod_revision);
        self.take_in(listing);
    }

    fn take_in(&mut self, listing: Listing) {
        let Listing { records, revision } = listing;
        if revision < self.listed_revision {
            return;
        }
        let listed: HashSet<&str> = records.iter().map(|record| record.key.as_str()).collect();
        let is_gone = |(key, entry): &(&String, &Entry)| {
            entry.newest_revision <= revision && !listed.contains(key.as_str())
        };
        let gone: Vec<String> = self.entries.iter().filter(is_gone).map(|(key, _)| key.clone()).collect();
        for key in gone {
            self.entries.remove(&key);
            self.enqueue(key);
        }
        for record in records {
            let is_deleted = self.tombstones.get(&record.key).is_some_and(|deleted| *deleted > revision);
            if !is_deleted {
                self.insert(record);
            }
        }
        self.listed_revision = revision;
        self.tombstones.retain(|_, deleted| *deleted > revision);
    }

    /// Applies the event of a write.
    pub(super) fn put(&mut self, record: Record) {
        let deleted = self.tombstones.get(&record.key).copied().unwrap_or(0);
        if record.mod_revision > self.listed_revision.max(deleted) {
            self.tombstones.remove(&record.key);
            self.insert(record);
        }
    }

    /// Applies the event of a deletion at this revision.
    pub(super) fn delete(&mut self, key: String, revision: i64) {
        let written = self.entries.get(&key).map_or(0, |entry| entry.newest_revision);
        if revision <= self.listed_revision.max(written) {
            return;
        }
        let deleted = self.tombstones.entry(key.clone()).or_default();
        *deleted = revision.max(*deleted);
        if self.entries.remove(&key).is_some() {
            self.enqueue(key);
        }
    }

    /// Takes the next change.
    pub(super) fn take(&mut self) -> Option<Change> {
        loop {
            let key = match self.queue.pop_front()? {
                Queued::BacklogDone => return Some(Change::BacklogDone),
                Queued::Key(key) => key,
            };
            self.queued.remove(&key);
            match self.entries.get(&key) {
                Some(entry) => {
                    let before = self.delivered.insert(key.clone(), entry.clone());
                    if before.is_none_or(|before| !before.says_the_same_as(entry)) {
                        return Some(Change::Put(key, entry.clone()));
                    }
                }
                None => {
                    if self.delivered.remove(&key).is_some() {
                        return Some(Change::Deleted(key));
                    }
                }
            }
        }
    }

    /// Inserts a record, unless a newer one exists.
    fn insert(&mut self, record: Record) {
        let Record { key, value, create_revision, mod_revision } = record;
        let new = Entry { value: value.into(), create_revision, mod_revision, newest_revision: mod_revision };
        match self.entries.get_mut(&key) {
            Some(entry) if entry.newest_revision >= mod_revision => {}
            // etcd may repeat itself, and bytes that stay the same are no change.
            Some(entry) if entry.says_the_same_as(&new) => entry.newest_revision = mod_revision,
            _ => {
                self.entries.insert(key.clone(), new);
                self.enqueue(key);
            }
        }
    }

    fn enqueue(&mut self, key: String) {
        if self.queued.insert(key.clone()) {
            self.queue.push_back(Queued::Key(key));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(key: &str, value: &str, mod_revision: i64) -> Record {
        Record { key: key.to_owned(), value: value.into(), create_revision: 1, mod_revision }
    }

    /// A listing at a revision: key, value, and the revision of the write.
    fn listing(revision: i64, records: &[(&str, &str, i64)]) -> Listing {
        let records = records.iter().map(|(key, value, written)| record(key, value, *written)).collect();
        Listing { records, revision }
    }

    /// All changes in the queue: `a=1`, `-a`, `|`.
    fn changes(cache: &mut WatchCache) -> String {
        let mut changes = Vec::new();
        while let Some(change) = cache.take() {
            changes.push(match change {
                Change::Put(key, entry) => format!("{key}={}", String::from_utf8_lossy(&entry.value)),
                Change::Deleted(key) => format!("-{key}"),
                Change::BacklogDone => "|".to_owned(),
            });
        }
        assert!(cache.queued.is_empty());
        changes.join(" ")
    }

    /// A cache that began with `a=1` and `b=1` at revision 5, and whose reader took both.
    fn begun() -> WatchCache {
        let mut cache = WatchCache::default();
        cache.restart(listing(5, &[("a", "1", 4), ("b", "1", 5)]));
        assert_eq!(changes(&mut cache), "a=1 b=1 |");
        cache
    }

    #[test]
    fn backlog_ends_once_and_before_later_changes() {
        let mut cache = WatchCache::default();
        assert_eq!(changes(&mut cache), "");
        cache.restart(listing(5, &[("a", "1", 4), ("b", "1", 5)]));
        cache.put(record("c", "1", 6));
        cache.put(record("a", "2", 7));
        assert_eq!(changes(&mut cache), "a=2 b=1 | c=1");
        let later = [("a", "2", 7), ("b", "1", 5), ("c", "1", 6)];
        cache.restart(listing(8, &later));
        cache.merge(listing(9, &later));
        assert_eq!(changes(&mut cache), "");
    }

    #[test]
    fn empty_backlog_is_still_completed() {
        let mut cache = WatchCache::default();
        cache.restart(listing(5, &[]));
        assert_eq!(changes(&mut cache), "|");
        cache.restart(listing(5, &[]));
        cache.merge(listing(6, &[]));
        assert_eq!(changes(&mut cache), "");
    }

    #[test]
    fn reader_takes_the_newest_value_and_none_twice() {
        let mut cache = begun();
        for number in 6..1000 {
            cache.put(record("a", &number.to_string(), number));
        }
        assert_eq!(cache.queue.len(), 1, "one place however many values");
        assert_eq!(changes(&mut cache), "a=999");
        cache.put(record("a", "2", 1000));
        cache.put(record("a", "999", 1001));
        assert_eq!(changes(&mut cache), "", "back to the value that was taken last");
        cache.put(record("new", "1", 1002));
        cache.delete("new".to_owned(), 1003);
        assert_eq!(changes(&mut cache), "", "the reader never knew of it");
        cache.delete("a".to_owned(), 1004);
        cache.put(record("a", "999", 1005));
        assert_eq!(changes(&mut cache), "", "gone and back as it was");
        cache.put(Record { create_revision: 1006, ..record("a", "999", 1006) });
        assert_eq!(changes(&mut cache), "a=999", "the same bytes in a key that was created again");
    }

    #[test]
    fn listing_finds_deletions_that_no_event_reported() {
        for merge in [WatchCache::merge, WatchCache::restart] {
            let mut cache = begun();
            cache.delete("b".to_owned(), 6);
            cache.delete("b".to_owned(), 6);
            assert_eq!(changes(&mut cache), "-b");
            merge(&mut cache, listing(8, &[("d", "1", 8)]));
            assert_eq!(changes(&mut cache), "-a d=1");
        }
    }

    #[test]
    fn listing_that_is_quicker_than_the_events_keeps_their_order() {
        let mut cache = begun();
        let written = [("a", "3", 7), ("b", "1", 5), ("c", "1", 6), ("d", "1", 8)];
        cache.merge(listing(8, &written));
        assert_eq!(changes(&mut cache), "c=1 a=3 d=1");
        for (key, value, revision) in written {
            cache.put(record(key, value, revision));
        }
        assert_eq!(changes(&mut cache), "");
    }

    #[test]
    fn deletion_of_a_key_that_the_reader_never_took_is_no_change() {
        let mut cache = WatchCache::default();
        cache.restart(listing(5, &[("a", "1", 4), ("b", "1", 5)]));
        cache.delete("a".to_owned(), 6);
        cache.merge(listing(7, &[]));
        assert_eq!(changes(&mut cache), "|");
    }

    #[test]
    fn empty_value_is_delivered() {
        let mut cache = WatchCache::default();
        cache.restart(listing(5, &[("a", "", 4)]));
        assert_eq!(changes(&mut cache), "a= |");
        cache.delete("a".to_owned(), 6);
        assert_eq!(changes(&mut cache), "-a");
    }

    #[test]
    fn listing_overwrites_nothing_that_is_newer() {
        let mut cache = begun();
        cache.put(record("a", "3", 8));
        cache.delete("b".to_owned(), 9);
        cache.put(record("c", "1", 10));
        // Made at revision 7, when `a` was 2, `b` was there and `c` was not; it arrives after the events.
        cache.merge(listing(7, &[("a", "2", 6), ("b", "1", 5)]));
        assert_eq!(changes(&mut cache), "a=3 -b c=1");
        cache.merge(listing(10, &[("a", "3", 8), ("c", "1", 10)]));
        assert_eq!(changes(&mut cache), "");
        assert!(cache.tombstones.is_empty(), "a newer listing says it all");
    }

    #[test]
    fn event_that_is_older_than_the_listing_is_no_change() {
        let mut cache = begun();
        cache.merge(listing(9, &[("a", "3", 8)]));
        assert_eq!(changes(&mut cache), "-b a=3");
        cache.put(record("a", "2", 6));
        cache.put(record("b", "2", 7));
        cache.delete("a".to_owned(), 7);
        assert_eq!(changes(&mut cache), "");
        cache.merge(listing(8, &[("b", "2", 7), ("a", "3", 8)]));
        assert_eq!(changes(&mut cache), "", "nor does an older listing count");
    }

    #[test]
    fn value_that_was_written_again_keeps_its_first_revision_and_its_newest_one_decides() {
        let mut cache = begun();
        cache.put(record("a", "1", 9));
        cache.merge(listing(8, &[("b", "1", 5)]));
        assert_eq!(changes(&mut cache), "", "the listing was made before `a` was written at 9");
        assert_eq!((cache.entries["a"].mod_revision, cache.entries["a"].newest_revision), (4, 9));
    }

    #[test]
    fn store_that_counts_from_an_older_revision_is_believed_after_a_restart() {
        let mut cache = begun();
        cache.put(record("a", "9", 90));
        cache.delete("b".to_owned(), 91);
        assert_eq!(changes(&mut cache), "a=9 -b");
        cache.restart(listing(7, &[("a", "1", 4), ("b", "1", 5)]));
        assert_eq!(changes(&mut cache), "a=1 b=1");
        cache.put(record("a", "2", 8));
        cache.delete("b".to_owned(), 9);
        assert_eq!(changes(&mut cache), "a=2 -b");
    }

    /// One write of a history: which key, and its value; `None` deletes it.
    type Write = (usize, Option<u8>);

    /// The keys after the first `writes` of a history. Revision 1 is that of the empty store.
    fn listing_after(history: &[Write], writes: usize) -> Listing {
        let mut records = BTreeMap::new();
        for ((key, value), revision) in history.iter().zip(2..).take(writes) {
            let key = format!("k{key}");
            let Some(value) = value else {
                records.remove(&key);
                continue;
            };
            let created = records.get(&key).map_or(revision, |record: &Record| record.create_revision);
            let new = Record { value: vec![*value], create_revision: created, ..record(&key, "", revision) };
            records.insert(key, new);
        }
        let revision = i64::try_from(writes).unwrap() + 1;
        Listing { records: records.into_values().collect(), revision }
    }

    proptest! {
        /// Events arrive in order, and some never arrive. A listing was made at any time before it arrives. After a
        /// last listing the reader has the current keys, and it took no value twice in a row.
        #[test]
        fn reader_ends_with_what_is_there(
            history in prop::collection::vec((0..3_usize, prop::option::of(0..3_u8)), 1..30),
            lost in prop::collection::vec(any::<bool>(), 30),
            // After this many events a listing arrives that was made this many writes earlier or later.
            listings in prop::collection::vec((0..30_usize, -5..5_isize), 0..6),
            taken in prop::collection::vec(any::<bool>(), 30),
        ) {
            let mut cache = WatchCache::default();
            cache.restart(listing_after(&history, 0));
            let mut reader: BTreeMap<String, (Arc<[u8]>, i64)> = BTreeMap::new();
            let mut read = |cache: &mut WatchCache| {
                while let Some(change) = cache.take() {
                    match change {
                        Change::Put(key, entry) => {
                            let new = (entry.value, entry.create_revision);
                            prop_assert_ne!(reader.insert(key, new.clone()), Some(new), "taken twice");
                        }
                        Change::Deleted(key) => prop_assert!(reader.remove(&key).is_some(), "never taken"),
                        Change::BacklogDone => {}
                    }
                }
                Ok(reader.clone())
            };
            for (index, (key, value)) in history.iter().enumerate() {
                for (_, offset) in listings.iter().filter(|(after, _)| *after == index) {
                    let made = index.saturating_add_signed(*offset).min(history.len());
                    cache.merge(listing_after(&history, made));
                }
                let there = listing_after(&history, index + 1);
                let key = format!("k{key}");
                if !lost[index] {
                    match (there.records.into_iter().find(|record| record.key == key), value) {
                        (Some(record), Some(_)) => cache.put(record),
                        _ => cache.delete(key, there.revision),
                    }
                }
                if taken[index] {
                    read(&mut cache)?;
                }
            }
            let last = listing_after(&history, history.len());
            cache.merge(last.clone());
            let expected = last.records.into_iter();
            let expected = expected.map(|record| (record.key, (record.value.into(), record.create_revision)));
            prop_assert_eq!(read(&mut cache)?, expected.collect());
        }
    }
}
