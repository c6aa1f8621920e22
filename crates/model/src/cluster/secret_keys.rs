//! Keys that the Kubernetes Secrets of a cluster are encrypted with: their state, and what each step makes of it.
//!
//! The shepherd makes a key, seals it in the database, and sends it to the controllers of the cluster by orders. Each of
//! them writes a file for its API server. etcd has what the API servers encrypted, and none of the keys. The plan
//! ([`plan::secret_keys`](crate::cluster::plan::secret_keys)) takes the steps.
//!
//! # Stages
//!
//! | stage | providers of an API server, the first of which writes | ends when |
//! | --- | --- | --- |
//! | new | none: the cluster never had Kubernetes | Kubernetes is desired, and each controller knows the order |
//! | prepared | none: its API servers write in plain text | each controller has known the order for an hour |
//! | reading | former key, next key | each controller reads with the next key |
//! | writing | next key, former key | each controller writes with it |
//! | rewriting | next key, former key | every Secret was written again |
//! | settled | key | another key is ordered |
//!
//! An API server that writes with a key which another one cannot read with would make Secrets unreadable there. So every
//! controller has to run with one list before the next one is sent, a silent controller too.
//!
//! Where Secrets were stored in plain text, the provider `identity` takes the place of the former key. After a restore
//! of the cluster, each key that the snapshot may need is a former key.
//!
//! # Former keys
//!
//! A key is dropped from the controllers after the rewriting. It stays sealed in the database until every snapshot is
//! younger than that: a restore needs the keys of its snapshot.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::time::Timestamp;

/// Name of the provider that stores Secrets in plain text.
pub const PLAIN_PROVIDER: &str = "identity";
/// Bytes of a key, as the provider `secretbox` needs them.
pub const KEY_BYTES: usize = 32;

/// The stage of the encryption of Secrets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SecretsStage {
    /// The cluster never had a controller, so etcd has no Secret.
    New,
    /// API servers store Secrets in plain text, and controllers have to know the order for an hour.
    Prepared,
    /// Controllers begin to read with the next key.
    Reading,
    /// Controllers begin to write with it.
    Writing,
    /// Every Secret is written again.
    Rewriting,
    /// Every Secret is encrypted with the key that writes.
    Settled,
}

impl SecretsStage {
    /// The name in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Prepared => "prepared",
            Self::Reading => "reading",
            Self::Writing => "writing",
            Self::Rewriting => "rewriting",
            Self::Settled => "settled",
        }
    }

    /// Whether controllers get keys in this stage.
    #[must_use]
    pub const fn has_keys(self) -> bool {
        !matches!(self, Self::New | Self::Prepared)
    }

    /// Whether a key is being replaced, or the first one introduced.
    #[must_use]
    pub const fn is_rotating(self) -> bool {
        matches!(self, Self::Reading | Self::Writing | Self::Rewriting)
    }
}

impl fmt::Display for SecretsStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A key, without its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretKey {
    /// Its number, from 1 on. A number is not used again.
    pub number: u32,
    /// The first digits of its SHA-256. Two keys of one number differ after a restore of the database.
    pub fingerprint: String,
    /// When it was made.
    pub created_at: Timestamp,
    /// Since when no Secret in etcd needs it; `None` while controllers have it.
    pub dropped_at: Option<Timestamp>,
}

impl SecretKey {
    /// The name by which an API server stores which key it used.
    #[must_use]
    pub fn name(&self) -> String {
        format!("key{}-{}", self.number, self.fingerprint)
    }
}

/// An operator's order to replace the key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretsRotationOrder {
    /// When it was ordered.
    pub ordered_at: Timestamp,
    /// Name of the operator who ordered it.
    pub ordered_by: String,
}

/// The state of the keys of one cluster, as the database has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretKeys {
    /// How far the keys have reached controllers and Secrets.
    pub stage: SecretsStage,
    /// When the stage began. In [`SecretsStage::Prepared`] it is set again while a controller does not know the order.
    pub since: Timestamp,
    /// Since when the stage is [`SecretsStage::Prepared`]; `None` in other stages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prepared_at: Option<Timestamp>,
    /// The keys that are sealed in the database, oldest first.
    pub keys: Vec<SecretKey>,
    /// Number of the key that writes; `None`: Secrets are written in plain text.
    pub current: Option<u32>,
    /// Whether etcd may have Secrets in plain text.
    pub may_be_plain: bool,
    /// Since when etcd has none in plain text, apart from its own history.
    pub encrypted_at: Option<Timestamp>,
    /// Time of the order for the restore that these keys were brought back for last.
    pub restored_for: Option<Timestamp>,
    /// The order to replace the key that has not begun, or is carried out.
    pub rotation: Option<SecretsRotationOrder>,
}

/// What a machine reports of the encryption of Secrets. Lists are names of providers, separated by spaces.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SecretsReport {
    /// The list in its newest order; empty without one.
    pub ordered: String,
    /// Whether that order demands that Secrets be written again.
    pub rewrite: bool,
    /// The list that its API server was started with, or the one in its order if it has no API server.
    pub running: String,
    /// The key that it has written every Secret again with; empty: none.
    pub rewritten: String,
}

/// What the shepherd does next with the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SecretsStep {
    /// Wait until controllers have known the order for long enough.
    Prepare,
    /// Make a key: the first one, or the next one.
    Generate,
    /// Let the newest key write.
    Write,
    /// Have every Secret written again.
    Rewrite,
    /// Drop every key but the one that writes.
    Drop,
    /// Delete this key, which no snapshot needs.
    Forget(u32),
    /// Let controllers read with every key that a snapshot may need. The time is that of the order for the restore.
    BringBack(Timestamp),
}

impl fmt::Display for SecretsStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prepare => f.write_str("the encryption of its Kubernetes Secrets is prepared"),
            Self::Generate => f.write_str("a key for its Kubernetes Secrets is made"),
            Self::Write => f.write_str("its Kubernetes Secrets are written with the newest key from now on"),
            Self::Rewrite => f.write_str("its Kubernetes Secrets are written again"),
            Self::Drop => f.write_str("the former keys of its Kubernetes Secrets are dropped"),
            Self::Forget(number) => write!(f, "the former key {number} of its Kubernetes Secrets is deleted"),
            Self::BringBack(_) => {
                f.write_str("the keys that Kubernetes Secrets in the snapshot may need are brought back")
            }
        }
    }
}

impl SecretKeys {
    /// The state of a cluster that is created now.
    #[must_use]
    pub const fn new(now: Timestamp) -> Self {
        Self {
            stage: SecretsStage::New,
            since: now,
            prepared_at: None,
            keys: Vec::new(),
            current: None,
            may_be_plain: false,
            encrypted_at: None,
            restored_for: None,
            rotation: None,
        }
    }

    /// The key that writes; `None`: Secrets are written in plain text.
    #[must_use]
    pub fn current_key(&self) -> Option<&SecretKey> {
        self.keys.iter().find(|key| Some(key.number) == self.current)
    }

    /// The key of this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&SecretKey> {
        self.keys.iter().find(|key| key.name() == name)
    }

    /// The providers of every API server; `None` is the one that stores plain text. Empty: there are no keys yet.
    #[must_use]
    pub fn providers(&self) -> Vec<Option<&SecretKey>> {
        if !self.stage.has_keys() {
            return Vec::new();
        }
        let current = self.current_key();
        let others = self.keys.iter().rev().filter(|key| key.dropped_at.is_none());
        let others = others.filter(|key| Some(key.number) != self.current).map(Some);
        let plain = (self.may_be_plain && current.is_some()).then_some(None);
        [current].into_iter().chain(others).chain(plain).collect()
    }

    /// The names of the providers, separated by spaces.
    #[must_use]
    pub fn provider_list(&self) -> String {
        let name = |key: Option<&SecretKey>| key.map_or_else(|| PLAIN_PROVIDER.to_owned(), SecretKey::name);
        self.providers().into_iter().map(name).collect::<Vec<_>>().join(" ")
    }

    /// The number of the next key.
    #[must_use]
    pub fn next_number(&self) -> u32 {
        self.keys.iter().map(|key| key.number).max().unwrap_or(0) + 1
    }

    /// Former keys that no snapshot needs. `oldest_snapshot`: when the oldest one was taken.
    #[must_use]
    pub fn find_unneeded(&self, oldest_snapshot: Option<Timestamp>) -> Option<u32> {
        let is_unneeded = |key: &&SecretKey| {
            key.dropped_at.is_some_and(|dropped| oldest_snapshot.is_none_or(|oldest| oldest > dropped))
        };
        self.keys.iter().find(is_unneeded).map(|key| key.number)
    }

    /// The state after a step. `fingerprint` is that of the key that [`SecretsStep::Generate`] makes, and
    /// `oldest_snapshot` the time of the oldest snapshot.
    #[must_use]
    pub fn advance(
        &self,
        step: SecretsStep,
        fingerprint: &str,
        oldest_snapshot: Option<Timestamp>,
        now: Timestamp,
    ) -> Self {
        let mut next = Self { since: now, ..self.clone() };
        match step {
            SecretsStep::Prepare => {
                (next.stage, next.may_be_plain) = (SecretsStage::Prepared, true);
                next.prepared_at.get_or_insert(now);
            }
            SecretsStep::Generate => {
                next.prepared_at = None;
                let number = self.next_number();
                let fingerprint = fingerprint.to_owned();
                next.keys.push(SecretKey { number, fingerprint, created_at: now, dropped_at: None });
                if self.stage == SecretsStage::New {
                    // There is nothing that was written otherwise.
                    next.stage = SecretsStage::Settled;
                    (next.current, next.encrypted_at) = (Some(number), Some(now));
                } else {
                    next.stage = SecretsStage::Reading;
                }
            }
            SecretsStep::Write => {
                next.stage = SecretsStage::Writing;
                next.current = self.keys.iter().map(|key| key.number).max();
            }
            SecretsStep::Rewrite => next.stage = SecretsStage::Rewriting,
            SecretsStep::Drop => {
                next.stage = SecretsStage::Settled;
                for key in next.keys.iter_mut().filter(|key| Some(key.number) != self.current) {
                    key.dropped_at.get_or_insert(now);
                }
                next.encrypted_at.get_or_insert(now);
                next.may_be_plain = false;
                // One that was ordered after this key was made begins after it.
                let made_at = self.current_key().map(|key| key.created_at);
                next.rotation.take_if(|order| made_at.is_some_and(|made_at| made_at >= order.ordered_at));
            }
            SecretsStep::Forget(number) => {
                next.keys.retain(|key| key.number != number);
                next.since = self.since;
            }
            SecretsStep::BringBack(ordered_at) => {
                for key in &mut next.keys {
                    key.dropped_at = None;
                }
                let was_plain = |since: Timestamp| oldest_snapshot.is_none_or(|oldest| oldest <= since);
                next.may_be_plain |= self.encrypted_at.is_none_or(was_plain);
                if next.may_be_plain {
                    // Snapshots of the restored cluster have plain text, too, until every Secret is written again.
                    next.encrypted_at = None;
                }
                next.restored_for = Some(ordered_at);
                if self.stage != SecretsStage::Reading {
                    next.stage = SecretsStage::Writing;
                }
            }
        }
        next
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn at(second: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + second, 0).unwrap()
    }

    /// The state after these steps, each a second after the one before. Fingerprints are the seconds.
    pub(crate) fn after_steps(begin: SecretKeys, steps: &[SecretsStep]) -> SecretKeys {
        let mut state = begin;
        for (second, step) in (1_i64..).zip(steps) {
            state = state.advance(*step, &format!("f{second}"), None, at(second));
        }
        state
    }

    #[test]
    fn secrets_of_a_new_cluster_are_encrypted_from_the_first_one_on() {
        let state = after_steps(SecretKeys::new(at(0)), &[SecretsStep::Generate]);
        assert_eq!((state.stage, state.provider_list().as_str()), (SecretsStage::Settled, "key1-f1"));
        assert!(!state.may_be_plain);
    }

    #[test]
    fn each_list_has_the_key_that_wrote_before() {
        use SecretsStep::{Drop, Generate, Prepare, Rewrite, Write};
        let steps = [Prepare, Generate, Write, Rewrite, Drop, Generate, Write, Rewrite, Drop];
        let expected = [
            "",
            "identity key1-f2",
            "key1-f2 identity",
            "key1-f2 identity",
            "key1-f2",
            "key1-f2 key2-f6",
            "key2-f6 key1-f2",
            "key2-f6 key1-f2",
            "key2-f6",
        ];
        for (count, expected) in (1..).zip(expected) {
            let state = after_steps(SecretKeys::new(at(0)), &steps[..count]);
            assert_eq!(state.provider_list(), expected, "after {count} steps");
        }
    }

    #[test]
    fn former_key_stays_until_every_snapshot_is_younger_than_its_end() {
        use SecretsStep::{Drop, Generate, Rewrite, Write};
        let state = after_steps(SecretKeys::new(at(0)), &[Generate, Generate, Write, Rewrite, Drop]);
        assert_eq!(state.keys[0].dropped_at, Some(at(5)));
        for (oldest, expected) in
            [(Some(at(2)), None), (Some(at(5)), None), (Some(at(6)), Some(1)), (None, Some(1))]
        {
            assert_eq!(state.find_unneeded(oldest), expected, "{oldest:?}");
        }
        let forgotten = state.advance(SecretsStep::Forget(1), "", None, at(9));
        assert_eq!((forgotten.keys.len(), forgotten.since), (1, state.since));
        assert_eq!(forgotten.next_number(), 3, "a number is not used again");
    }

    #[test]
    fn restore_brings_every_key_back_that_the_snapshot_may_need() {
        use SecretsStep::{Drop, Generate, Prepare, Rewrite, Write};
        let rotated = after_steps(SecretKeys::new(at(0)), &[Generate, Generate, Write, Rewrite, Drop]);
        let restored = rotated.advance(SecretsStep::BringBack(at(20)), "", Some(at(3)), at(21));
        assert_eq!(restored.provider_list(), "key2-f2 key1-f1");
        assert_eq!((restored.stage, restored.restored_for), (SecretsStage::Writing, Some(at(20))));

        let steps = [Prepare, Generate, Write, Rewrite, Drop];
        let adopted = after_steps(SecretKeys::new(at(0)), &steps);
        for (oldest, expected) in [(4, "key1-f2 identity"), (6, "key1-f2")] {
            let restored = adopted.advance(SecretsStep::BringBack(at(20)), "", Some(at(oldest)), at(21));
            assert_eq!(restored.provider_list(), expected, "the oldest snapshot is of second {oldest}");
        }
        // A snapshot that was taken before the restored Secrets were written again has plain text, too. Older ones are gone.
        let restored = adopted.advance(SecretsStep::BringBack(at(20)), "", Some(at(4)), at(21));
        let settled = restored.advance(Rewrite, "", None, at(22)).advance(Drop, "", None, at(25));
        for (oldest, expected) in [(23, "key1-f2 identity"), (26, "key1-f2")] {
            let again = settled.advance(SecretsStep::BringBack(at(30)), "", Some(at(oldest)), at(31));
            assert_eq!(again.provider_list(), expected, "the oldest snapshot is of second {oldest}");
        }
        // A key that was made and has not written yet stays the next one.
        let reading = after_steps(SecretKeys::new(at(0)), &[Generate, Generate]);
        let restored = reading.advance(SecretsStep::BringBack(at(20)), "", Some(at(3)), at(21));
        assert_eq!(
            (restored.stage, restored.provider_list().as_str()),
            (SecretsStage::Reading, "key1-f1 key2-f2")
        );
    }

    #[test]
    fn time_of_the_preparation_begins_once_and_ends_with_the_first_key() {
        use SecretsStep::{Generate, Prepare};
        let prepared = after_steps(SecretKeys::new(at(0)), &[Prepare, Prepare]);
        assert_eq!((prepared.since, prepared.prepared_at), (at(2), Some(at(1))));
        assert_eq!(prepared.advance(Generate, "f", None, at(3)).prepared_at, None);
    }

    #[test]
    fn order_ends_with_a_key_that_was_made_after_it() {
        use SecretsStep::{Drop, Generate, Rewrite, Write};
        let writing = after_steps(SecretKeys::new(at(0)), &[Generate, Generate, Write, Rewrite]);
        for (second, stays) in [(1, false), (2, false), (3, true)] {
            let rotation = SecretsRotationOrder { ordered_at: at(second), ordered_by: "kim".to_owned() };
            let state = SecretKeys { rotation: Some(rotation), ..writing.clone() };
            assert_eq!(state.advance(Drop, "", None, at(9)).rotation.is_some(), stays, "{second}");
        }
    }

    #[test]
    fn state_is_the_same_after_it_was_stored() {
        use SecretsStep::{Drop, Generate, Rewrite, Write};
        let state = after_steps(SecretKeys::new(at(0)), &[Generate, Generate, Write, Rewrite, Drop]);
        let stored = serde_json::to_value(&state).unwrap();
        assert_eq!(serde_json::from_value::<SecretKeys>(stored.clone()).unwrap(), state);
        assert_eq!(stored["stage"], "settled");
    }
}
