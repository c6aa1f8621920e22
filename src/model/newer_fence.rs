//! A fence that a machine has seen and that this BMDB never gave: when that is proof, and for how long.
//!
//! Such a fence was given by what this database has forgotten, or by another
//! database. Until a person says that this one counts, nothing may be ordered of
//! the machine: each work item that is lost against it raises our fence by one, so
//! that after enough of them the machine would take our orders for the newer ones.
//!
//! Therefore the proof does not end when our fence has caught up with it. It ends
//! when the fence was lifted, which declaring a restoration does by more than any
//! number of tries can ([`LIFT`]). Nothing but the two numbers decides: no clock,
//! and no record of a declaration that a later backup might not hold.

use crate::model::time::Timestamp;

/// How far declaring a restoration lifts fences: more than a machine claimed every minute uses up in a
/// hundred years, and an `INT8` holds it a billion times over.
pub const LIFT: i64 = 100_000_000;
/// What is given beyond a fence that was heard, for it to be answered: half the lift. The other half is for
/// what was claimed between the backup and its loss.
pub const ANSWERED_BEYOND: i64 = LIFT / 2;

/// Proof that a machine has seen more than this BMDB has given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewerFence {
    /// When it was heard.
    pub heard: Timestamp,
    /// The fence.
    pub fence: i64,
}

impl NewerFence {
    /// What it proves that `fence` was heard, now that this BMDB has given `given` to the machine; `None` once
    /// fences were lifted beyond it.
    #[must_use]
    pub const fn proof(heard: Timestamp, fence: i64, given: i64) -> Option<Self> {
        if fence > given.saturating_sub(ANSWERED_BEYOND) { Some(Self { heard, fence }) } else { None }
    }

    /// Why nothing is ordered of the machine, and what a person can do.
    #[must_use]
    pub fn sentence(&self) -> String {
        format!(
            "its agent has seen fence {} from somebody whom this database does not know: it was restored from a \
             backup, or another database works on the same machine. Nothing is ordered of it: if this database is \
             the one that counts, stop every shepherd and declare it with `shepherdctl declare restored`; if it is \
             not, stop its shepherds",
            self.fence
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tries_do_not_answer_a_newer_fence_and_a_declared_restoration_does() {
        let at = Timestamp::UNIX_EPOCH;
        for (name, fence, given, counts) in [
            ("just restored", 20, 5, true),
            ("one try short of it", 20, 19, true),
            ("caught up with by tries", 20, 20, true),
            ("passed by tries", 20, 21, true),
            ("passed by a century of tries", 20, 20 + ANSWERED_BEYOND - 1, true),
            ("lifted", 20, 5 + LIFT, false),
            ("lifted, and much was claimed since the backup", 40_000_000, 5 + LIFT, false),
            ("heard after it was lifted", 5 + LIFT + 7, 5 + LIFT, true),
            ("restored from before a declaration, and declared once", 9 + LIFT, 5 + LIFT, true),
            ("the same, declared again", 9 + LIFT, 5 + 2 * LIFT, false),
            ("an agent that says anything", i64::MAX, 5 + LIFT, true),
            ("a database that says anything", 1, i64::MIN, true),
        ] {
            let proof = NewerFence::proof(at, fence, given);
            assert_eq!(proof.is_some(), counts, "{name}");
            assert!(proof.is_none_or(|proof| proof.fence == fence), "{name}");
        }
    }
}
