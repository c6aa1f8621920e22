//! The keys of an election as they were last seen, and what they make of one candidate.
//!
//! No I/O: `election.rs` brings what etcd tells, and asks after each of it.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::etcd::guard::Guard;

/// Who leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// Name of the candidate.
    pub name: String,
    /// What its writes are guarded by. Another election of the same candidate has another.
    pub guard: Guard,
}

/// What a candidate is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It leads.
    Leader(Guard),
    /// Another leads.
    Follower(Leader),
    /// It does not lead, and does not know who does.
    Neither,
}

/// The value of a candidate's key.
#[derive(Serialize, Deserialize)]
struct Stored {
    name: String,
    ttl_seconds: u64,
}

/// The value of the key of a candidate.
#[must_use]
pub fn value_of(name: &str, ttl: Duration) -> Vec<u8> {
    let stored = Stored { name: name.to_owned(), ttl_seconds: ttl.as_secs() };
    // Text and a number are always JSON.
    serde_json::to_vec(&stored).unwrap_or_default()
}

/// The name of the candidate in the value of his key; none where that is not ours.
#[must_use]
pub fn name_in(value: &[u8]) -> Option<String> {
    serde_json::from_slice::<Stored>(value).ok().map(|stored| stored.name)
}

/// The keys of an election as they were last seen.
#[derive(Debug, Default)]
pub struct Places {
    /// Whether all that was there at the start has been seen.
    pub complete: bool,
    /// By when they were created: the first leads. Later keys come after all that are known, so that one who is first
    /// stays first until his key is gone, however old this view is.
    by_creation: BTreeMap<i64, Place>,
}

#[derive(Debug)]
struct Place {
    key: String,
    name: Option<String>,
}

impl Places {
    /// A key is there, and was created at this revision.
    pub fn put(&mut self, key: String, value: &[u8], create_revision: i64) {
        self.delete(&key);
        self.by_creation.insert(create_revision, Place { key, name: name_in(value) });
    }

    /// A key is gone.
    pub fn delete(&mut self, key: &str) {
        self.by_creation.retain(|_, place| place.key != key);
    }

    /// What the owner of this key is, whose lease is known to live. `seen` says whether etcd is in sight.
    #[must_use]
    pub fn standing(&self, own: &Guard, seen: bool) -> Standing {
        let own_is_there =
            self.by_creation.get(&own.create_revision).is_some_and(|place| place.key == own.key);
        if !self.complete || !own_is_there {
            return Standing::Neither;
        }
        match self.by_creation.first_key_value() {
            Some((_, first)) if first.key == own.key => Standing::Leader(own.clone()),
            // Who led when etcd was last seen may have been followed by another since.
            Some((&create_revision, Place { key, name: Some(name) })) if seen => {
                let guard = Guard { key: key.clone(), create_revision };
                Standing::Follower(Leader { name: name.clone(), guard })
            }
            _ => Standing::Neither,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(create_revision: i64) -> Guard {
        Guard { key: "/leader/own".to_owned(), create_revision }
    }

    fn places(keys: &[(&str, &str, i64)]) -> Places {
        let mut places = Places { complete: true, ..Places::default() };
        for (key, name, create_revision) in keys {
            let value = value_of(name, Duration::from_secs(10));
            places.put(format!("/leader/{key}"), &value, *create_revision);
        }
        places
    }

    #[test]
    fn first_key_leads_and_the_others_follow_it() {
        let all = places(&[("own", "a", 7), ("other", "b", 5), ("third", "c", 9)]);
        let guard = Guard { key: "/leader/other".to_owned(), create_revision: 5 };
        assert_eq!(all.standing(&own(7), true), Standing::Follower(Leader { name: "b".to_owned(), guard }));
        assert_eq!(all.standing(&own(7), false), Standing::Neither, "who leads now is not known");
        let mut first = places(&[("own", "a", 7), ("other", "b", 5), ("third", "c", 9)]);
        first.delete("/leader/other");
        assert_eq!(first.standing(&own(7), true), Standing::Leader(own(7)));
        assert_eq!(
            first.standing(&own(7), false),
            Standing::Leader(own(7)),
            "the lease decides, not the view"
        );
    }

    #[test]
    fn without_its_own_key_a_candidate_is_nothing() {
        let mut unseen = places(&[("own", "a", 7)]);
        unseen.complete = false;
        assert_eq!(unseen.standing(&own(7), true), Standing::Neither);
        assert_eq!(places(&[]).standing(&own(7), true), Standing::Neither);
        assert_eq!(places(&[("other", "b", 9)]).standing(&own(7), true), Standing::Neither);
        let again = places(&[("own", "a", 8)]);
        assert_eq!(again.standing(&own(7), true), Standing::Neither, "the key of another life");
    }

    #[test]
    fn leader_without_a_name_cannot_be_followed() {
        let mut all = places(&[("own", "a", 7)]);
        all.put("/leader/odd".to_owned(), b"?", 3);
        assert_eq!(all.standing(&own(7), true), Standing::Neither);
    }

    #[test]
    fn key_that_is_made_again_stands_behind() {
        let mut all = places(&[("other", "b", 5), ("own", "a", 7)]);
        all.put("/leader/other".to_owned(), &value_of("b", Duration::from_secs(1)), 9);
        assert_eq!(all.standing(&own(7), true), Standing::Leader(own(7)));
    }
}
