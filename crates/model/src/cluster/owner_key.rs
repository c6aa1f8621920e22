//! Rotation of the shepherd's owner key for a cluster.
//!
//! Curators identify an owner by a key, and issue certificates for an hour to its holder. The shepherd's key is
//! generated when the cluster is founded. It is replaced when an operator orders it, or when it reaches the age that
//! the policy sets.
//!
//! # Steps
//!
//! 1. *Generate* the next key, and seal it. No curator has it yet.
//! 2. *Register* it: the curators let it claim certificates beside the current key, and it claims one.
//! 3. *Activate* it: only now the next key becomes the current one, and the one before becomes a former key.
//! 4. *Revoke* the former key: the curators refuse it, and every certificate for it.
//! 5. *Delete* it, once every stored snapshot is sure to contain a later key.
//!
//! Each step can be repeated. A step that is not recorded is done again, so a crash between any two leaves a current
//! key that works. The next step follows from the record and from the key that the curators accept, and from nothing
//! that a shepherd has in memory.
//!
//! # When a key is refused
//!
//! The current key, the next one and the former ones are tried in this order. After a restore of the database from a
//! backup, the next key may work while the current one does not: then the activation is made up for. A former key works
//! in a cluster that was restored from an older snapshot. It registers the current key again, and every former key is
//! revoked again. If no key is accepted, a person has to help, and an issue reports it.

use std::fmt;

use crate::humanize::humanize_duration;
use crate::time::{Span, Timestamp, between};

/// Age at which a key is replaced if the policy sets none.
pub const DEFAULT_ROTATION_INTERVAL: Span = Span::hours(30 * 24);
/// Shortest time between scheduled rotations: each costs the curators two writes, and leaves a former key until all
/// older snapshots are deleted.
pub const MIN_ROTATION_INTERVAL: Span = Span::hours(1);

/// Public half of an Ed25519 key.
pub type OwnerPublicKey = [u8; 32];

/// An operator's order to rotate the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerKeyRotationRequest {
    /// When the rotation was ordered.
    pub requested_at: Timestamp,
    /// Operator who ordered the rotation.
    pub requested_by: String,
}

/// A key that was the current one before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormerKey {
    /// Public half of the key.
    pub key: OwnerPublicKey,
    /// When another key replaced it.
    pub replaced_at: Timestamp,
    /// When the curators began to refuse it; `None` until that is recorded, and again after a restore.
    pub removed_at: Option<Timestamp>,
}

/// The record of the shepherd's keys for a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerKeys {
    /// When the current key became the current one.
    pub current_since: Timestamp,
    /// The operator's order to rotate, if one is pending.
    pub rotation_request: Option<OwnerKeyRotationRequest>,
    /// The key that will replace the current one, if it is generated.
    pub next: Option<OwnerPublicKey>,
    /// Keys that were current before, newest first.
    pub former: Vec<FormerKey>,
    /// When the oldest stored snapshot was taken; `None` if none is stored.
    pub oldest_snapshot: Option<Timestamp>,
    /// When the curators began to refuse every key; `None` while they accept one.
    pub rejected_since: Option<Timestamp>,
}

/// One of the shepherd's keys for a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerKeySlot {
    /// The key in force now.
    Current,
    /// The key that will replace the current one.
    Next(OwnerPublicKey),
    /// A key that was the current one before.
    Former(OwnerPublicKey),
}

/// The next step of a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnerKeyStep {
    /// Generate and seal the next key.
    Generate,
    /// Have the curators accept this key, current or next, and use it from then on.
    Register(OwnerKeySlot),
    /// Make the next key the current one.
    Activate(OwnerPublicKey),
    /// Have the curators refuse a former key.
    Revoke(OwnerPublicKey),
    /// Delete the record of a former key.
    Delete(OwnerPublicKey),
}

impl fmt::Display for OwnerKeyStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Generate => "making another key",
            Self::Register(OwnerKeySlot::Next(_)) => "having its curators take the next key",
            Self::Register(_) => "having its curators take the key in force again",
            Self::Activate(_) => "letting the next key be in force",
            Self::Revoke(_) => "having its curators refuse a former key",
            Self::Delete(_) => "forgetting a former key",
        })
    }
}

/// The keys in the order in which they are tried.
#[must_use]
pub fn keys_to_try(keys: &OwnerKeys) -> Vec<OwnerKeySlot> {
    let former = keys.former.iter().map(|former| OwnerKeySlot::Former(former.key));
    [OwnerKeySlot::Current].into_iter().chain(keys.next.map(OwnerKeySlot::Next)).chain(former).collect()
}

/// The next step if the curators accept the key `by`. `every`: the age at which a key is replaced; zero: only by order.
#[must_use]
pub fn next_rotation_step(
    keys: &OwnerKeys,
    by: OwnerKeySlot,
    every: Span,
    now: Timestamp,
) -> Option<OwnerKeyStep> {
    match by {
        OwnerKeySlot::Next(key) => return Some(OwnerKeyStep::Activate(key)),
        // The cluster was restored from a snapshot before the rotation.
        OwnerKeySlot::Former(_) => return Some(OwnerKeyStep::Register(OwnerKeySlot::Current)),
        OwnerKeySlot::Current => {}
    }
    // This comes first, whatever else is due: until then two keys open the cluster.
    if let Some(former) = keys.former.iter().find(|former| former.removed_at.is_none()) {
        return Some(OwnerKeyStep::Revoke(former.key));
    }
    if let Some(next) = keys.next {
        return Some(OwnerKeyStep::Register(OwnerKeySlot::Next(next)));
    }
    if keys.rotation_request.is_some() || is_rotation_due(keys, every, now) {
        return Some(OwnerKeyStep::Generate);
    }
    let over = keys.former.iter().find(|former| is_needed_by_no_snapshot(former, keys));
    over.map(|former| OwnerKeyStep::Delete(former.key))
}

/// Whether the current key has reached the age `every`.
fn is_rotation_due(keys: &OwnerKeys, every: Span, now: Timestamp) -> bool {
    !every.0.is_zero() && between(keys.current_since, now) >= every.0
}

/// Whether no stored snapshot would bring the cluster back with this key and without a later one. A snapshot taken
/// after the curators removed the key certainly contains a later one.
fn is_needed_by_no_snapshot(former: &FormerKey, keys: &OwnerKeys) -> bool {
    match (former.removed_at, keys.oldest_snapshot) {
        (Some(removed), Some(oldest)) => removed < oldest,
        // Without snapshots nothing can bring the key back.
        (Some(_), None) => true,
        (None, _) => false,
    }
}

/// The pending part of a rotation, for people; `None` if nothing is due.
#[must_use]
pub fn rotation_wait_reason(keys: &OwnerKeys, every: Span, now: Timestamp) -> Option<String> {
    if let Some(since) = keys.rejected_since {
        return Some(format!(
            "its curators have refused every key that the shepherd has for it for {}; run: shepherdctl explain cluster-key-refused",
            humanize_duration(between(since, now))
        ));
    }
    if let Some(OwnerKeyRotationRequest { requested_at: at, requested_by: by }) = &keys.rotation_request {
        let ago = humanize_duration(between(*at, now));
        return Some(format!("the shepherd's key for it has to be replaced, as {by} ordered {ago} ago"));
    }
    if keys.next.is_some() || is_rotation_due(keys, every, now) {
        let age = humanize_duration(between(keys.current_since, now));
        return Some(format!("the shepherd's key for it, which is {age} old, has to be replaced"));
    }
    let left = keys.former.iter().filter(|former| former.removed_at.is_none()).count();
    match left {
        0 => None,
        1 => Some("its curators have to reject a former key of the shepherd".to_owned()),
        _ => Some(format!("its curators have to reject {left} former keys of the shepherd")),
    }
}

/// Checks an interval between rotations; the error is a part of a sentence.
pub fn check_rotation_interval(every: Span) -> Result<(), String> {
    if !every.0.is_zero() && every < MIN_ROTATION_INTERVAL {
        return Err(format!(
            "{every} is too short for a key: give at least {MIN_ROTATION_INTERVAL}, or 0s for never"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
