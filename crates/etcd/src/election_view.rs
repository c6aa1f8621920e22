//! The role of one candidate, from the keys of an election as they were last seen.
//!
//! No I/O: `election.rs` feeds it the events of etcd, and reads the role after each of them.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::guard::LeaderGuard;

/// The candidate that leads, as a follower sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ElectedLeader {
    /// Name of the candidate.
    pub name: String,
    /// The guard of its writes. Another election of the same candidate has another one.
    pub guard: LeaderGuard,
}

/// The role of a candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CandidateRole {
    /// This candidate leads, and writes with this guard.
    Leader(LeaderGuard),
    /// Another candidate leads, which is known.
    Follower(ElectedLeader),
    /// It does not lead, and the leader is not known.
    Unknown,
}

/// The value of a candidate's key, as JSON.
#[derive(Serialize, Deserialize)]
struct CandidateValue {
    name: String,
    ttl_seconds: u64,
}

/// Encodes the value of a candidate's key.
#[must_use]
pub fn encode_candidate(name: &str, ttl: Duration) -> Vec<u8> {
    let stored = CandidateValue { name: name.to_owned(), ttl_seconds: ttl.as_secs() };
    // A text and a number can always be written as JSON.
    serde_json::to_vec(&stored).unwrap_or_default()
}

/// The name of the candidate in the value of its key; `None` if the value is not one of ours.
#[must_use]
pub fn candidate_name(value: &[u8]) -> Option<String> {
    serde_json::from_slice::<CandidateValue>(value).ok().map(|stored| stored.name)
}

/// The keys of an election as they were last seen.
#[derive(Debug, Default)]
pub struct ElectionView {
    /// Whether all keys that existed at the start have been seen.
    pub is_complete: bool,
    /// By create revision: the first leads. A new key has a higher revision than all others, so the first one stays
    /// first until its key is gone, however old this view is.
    by_creation: BTreeMap<i64, CandidateKey>,
}

#[derive(Debug)]
struct CandidateKey {
    key: String,
    name: Option<String>,
}

impl ElectionView {
    /// Records that a key exists and was created at this revision.
    pub fn put_key(&mut self, key: String, value: &[u8], create_revision: i64) {
        self.delete_key(&key);
        self.by_creation.insert(create_revision, CandidateKey { key, name: candidate_name(value) });
    }

    /// Records that a key is gone.
    pub fn delete_key(&mut self, key: &str) {
        self.by_creation.retain(|_, place| place.key != key);
    }

    /// The role of the owner of this key, whose lease is known to live. `seen` is whether the keys are watched now.
    #[must_use]
    pub fn candidate_role(&self, own: &LeaderGuard, seen: bool) -> CandidateRole {
        let own_is_there =
            self.by_creation.get(&own.create_revision).is_some_and(|place| place.key == own.key);
        if !self.is_complete || !own_is_there {
            return CandidateRole::Unknown;
        }
        match self.by_creation.first_key_value() {
            Some((_, first)) if first.key == own.key => CandidateRole::Leader(own.clone()),
            // The last leader that was seen may have been replaced while the keys were not watched.
            Some((&create_revision, CandidateKey { key, name: Some(name) })) if seen => {
                let guard = LeaderGuard { key: key.clone(), create_revision };
                CandidateRole::Follower(ElectedLeader { name: name.clone(), guard })
            }
            _ => CandidateRole::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard(create_revision: i64) -> LeaderGuard {
        LeaderGuard { key: "/leader/own".to_owned(), create_revision }
    }

    fn election_view(keys: &[(&str, &str, i64)]) -> ElectionView {
        let mut places = ElectionView { is_complete: true, ..ElectionView::default() };
        for (key, name, create_revision) in keys {
            let value = encode_candidate(name, Duration::from_secs(10));
            places.put_key(format!("/leader/{key}"), &value, *create_revision);
        }
        places
    }

    #[test]
    fn oldest_key_leads_and_the_others_follow() {
        let all = election_view(&[("own", "a", 7), ("other", "b", 5), ("third", "c", 9)]);
        let leading = LeaderGuard { key: "/leader/other".to_owned(), create_revision: 5 };
        assert_eq!(
            all.candidate_role(&guard(7), true),
            CandidateRole::Follower(ElectedLeader { name: "b".to_owned(), guard: leading })
        );
        assert_eq!(
            all.candidate_role(&guard(7), false),
            CandidateRole::Unknown,
            "who leads now is not known"
        );
        let mut first = election_view(&[("own", "a", 7), ("other", "b", 5), ("third", "c", 9)]);
        first.delete_key("/leader/other");
        assert_eq!(first.candidate_role(&guard(7), true), CandidateRole::Leader(guard(7)));
        assert_eq!(
            first.candidate_role(&guard(7), false),
            CandidateRole::Leader(guard(7)),
            "the lease decides, not the view"
        );
    }

    #[test]
    fn candidate_without_its_key_has_no_role() {
        let mut unseen = election_view(&[("own", "a", 7)]);
        unseen.is_complete = false;
        assert_eq!(unseen.candidate_role(&guard(7), true), CandidateRole::Unknown);
        assert_eq!(election_view(&[]).candidate_role(&guard(7), true), CandidateRole::Unknown);
        assert_eq!(
            election_view(&[("other", "b", 9)]).candidate_role(&guard(7), true),
            CandidateRole::Unknown
        );
        let again = election_view(&[("own", "a", 8)]);
        assert_eq!(again.candidate_role(&guard(7), true), CandidateRole::Unknown, "the key of another life");
    }

    #[test]
    fn leader_without_a_name_cannot_be_followed() {
        let mut all = election_view(&[("own", "a", 7)]);
        all.put_key("/leader/odd".to_owned(), b"?", 3);
        assert_eq!(all.candidate_role(&guard(7), true), CandidateRole::Unknown);
    }

    #[test]
    fn recreated_key_queues_last() {
        let mut all = election_view(&[("other", "b", 5), ("own", "a", 7)]);
        all.put_key("/leader/other".to_owned(), &encode_candidate("b", Duration::from_secs(1)), 9);
        assert_eq!(all.candidate_role(&guard(7), true), CandidateRole::Leader(guard(7)));
    }
}
