//! Replacement of pinned keys without a chain of rotations, for keys that are lost.
//!
//! A lost key signs no rotation. An admin then orders that the next takeover of a machine pins the keys of the shepherds
//! in place of those that the machine has. The two-person rule covers the order. It names the keys, so that the takeover
//! pins those that the admins have seen, and it is used once: the takeover ends it. It also ends by itself.
//!
//! The order reaches the machine only with an enrolment, over SSH, where root is trusted anyway. No heartbeat carries it.

use crate::signed_artefact::signing_key::SigningKey;
use crate::time::{Span, Timestamp};

/// How long an order may wait for its takeover.
pub const REPLACEMENT_TTL: Span = Span::hours(24);

/// An order to replace the keys that a machine has pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyReplacement {
    /// The line of each new key.
    pub keys: Vec<String>,
    /// Why, in the operator's words.
    pub reason: String,
    /// The operator who ordered it.
    pub by: String,
    /// When it was ordered.
    pub ordered_at: Timestamp,
    /// When it ends by itself.
    pub expires_at: Timestamp,
}

/// What a takeover does with the keys that a machine has pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PinnedKeyAction {
    /// The machine keeps them.
    Keep,
    /// The machine replaces them by those of this shepherd.
    Replace,
    /// The order is for other keys than those of this shepherd. The text says so in a sentence.
    OtherKeys(String),
}

impl KeyReplacement {
    /// Whether it is still in force at `now`.
    #[must_use]
    pub fn is_active_at(&self, now: Timestamp) -> bool {
        self.expires_at > now
    }

    /// Whether it is for exactly these keys, in any order.
    #[must_use]
    pub fn is_for(&self, keys: &[SigningKey]) -> bool {
        self.keys.len() == keys.len()
            && keys.iter().all(|key| self.keys.iter().any(|line| line == key.as_str()))
    }

    /// The order and who gave it, as a sentence about the machine.
    #[must_use]
    pub fn describe(&self) -> String {
        let ids =
            self.keys.iter().filter_map(|line| SigningKey::parse(line).ok()).map(|key| key.id().to_string());
        let ids: Vec<String> = ids.collect();
        format!(
            "{} ordered that a takeover replaces its pinned signing keys by {}: {}",
            self.by,
            ids.join(", "),
            self.reason
        )
    }
}

/// Decides what a takeover at `now`, by a shepherd with these keys, does with the pinned keys of a machine.
#[must_use]
pub fn decide_pinned_keys(
    order: Option<&KeyReplacement>,
    keys: &[SigningKey],
    now: Timestamp,
) -> PinnedKeyAction {
    match order.filter(|order| order.is_active_at(now)) {
        None => PinnedKeyAction::Keep,
        Some(order) if order.is_for(keys) => PinnedKeyAction::Replace,
        Some(_) => PinnedKeyAction::OtherKeys(
            "its pinned signing keys are to be replaced by other keys than those of this shepherd; give all shepherds the \
             same --signing_keys_path, and order the replacement again if the keys have changed since"
                .to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c";
    const SECOND: &str = "RWQCAgICAgICAIE5dw6ofRdfVqNUZsNMfszLjYqRtO43ol32D1uPybOU";

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn order(keys: &[&str]) -> KeyReplacement {
        KeyReplacement {
            keys: keys.iter().map(|&key| key.to_owned()).collect(),
            reason: "the safe burnt".to_owned(),
            by: "kim".to_owned(),
            ordered_at: at(0),
            expires_at: at(60),
        }
    }

    #[test]
    fn order_names_the_new_keys() {
        assert_eq!(
            order(&[FIRST, SECOND]).describe(),
            "kim ordered that a takeover replaces its pinned signing keys by 0001010101010101, 0002020202020202: the safe \
             burnt"
        );
    }

    #[test]
    fn keys_are_replaced_by_the_ordered_ones_in_time() {
        let other = |action: &PinnedKeyAction| matches!(action, PinnedKeyAction::OtherKeys(_));
        let key = |line: &str| SigningKey::parse(line).unwrap();
        let both = [key(SECOND), key(FIRST)];
        for (name, order, keys, now, expected) in [
            ("no order", None, &both[..], 0, Some(PinnedKeyAction::Keep)),
            ("both", Some(order(&[FIRST, SECOND])), &both[..], 59, Some(PinnedKeyAction::Replace)),
            ("too late", Some(order(&[FIRST, SECOND])), &both[..], 60, Some(PinnedKeyAction::Keep)),
            ("one more", Some(order(&[FIRST])), &both[..], 0, None),
            ("one less", Some(order(&[FIRST, SECOND])), &both[..1], 0, None),
            ("another", Some(order(&[FIRST])), &both[..1], 0, None),
            ("none", Some(order(&[FIRST])), &both[..0], 0, None),
        ] {
            let action = decide_pinned_keys(order.as_ref(), keys, at(now));
            match expected {
                Some(expected) => assert_eq!(action, expected, "{name}"),
                None => assert!(other(&action), "{name}: {action:?}"),
            }
        }
    }
}
