//! Unknown fence: proof that a machine has seen a fence this BMDB never issued.
//!
//! Such a fence was issued by this database before it was restored from a backup, or by another database. Until an
//! operator declares that this one counts, no order may be given to the machine. Each work item that is lost against
//! the unknown fence raises our fence by one, so after enough of them the machine would accept our orders as the newer
//! ones.
//!
//! Therefore the proof does not end when our fence has caught up with it. It ends when the fence was lifted: declaring
//! a restoration lifts it by more than any number of attempts can ([`FENCE_LIFT`]). Only the two numbers decide. No
//! clock counts, and no record of a declaration, which a later backup might not contain.

use crate::time::Timestamp;

/// How far the declaration of a restoration lifts fences: more than a machine claimed every minute uses up in a hundred
/// years. An `INT8` holds it a billion times over.
pub const FENCE_LIFT: i64 = 100_000_000;
/// How far our fence must be above a reported one for the report to prove nothing: half the lift. The other half is for
/// claims between the backup and its loss.
pub const ANSWER_MARGIN: i64 = FENCE_LIFT / 2;

/// Proof that a machine has seen a fence this BMDB has not issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownFence {
    /// When the fence was reported.
    pub reported_at: Timestamp,
    /// The fence that the machine reported.
    pub fence: i64,
}

impl UnknownFence {
    /// The proof from a report of `fence`, now that this BMDB has issued `given` to the machine; `None` once fences
    /// were lifted beyond it.
    #[must_use]
    pub const fn from_report(last_contact: Timestamp, fence: i64, given: i64) -> Option<Self> {
        if fence > given.saturating_sub(ANSWER_MARGIN) {
            Some(Self { reported_at: last_contact, fence })
        } else {
            None
        }
    }

    /// Why no order is given to the machine, and what a person can do.
    #[must_use]
    pub fn describe(&self) -> String {
        format!(
            "its agent has seen fence {}, which this database never issued: the database was restored from a \
             backup, or another database works on the same machine. The machine receives no orders: if this \
             database is the one that counts, stop every shepherd and declare it with `shepherdctl declare \
             restored`; if it is \
             not, stop its shepherds",
            self.fence
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_declared_restore_clears_an_unknown_fence() {
        let at = Timestamp::UNIX_EPOCH;
        for (name, fence, given, counts) in [
            ("just restored", 20, 5, true),
            ("one try short of it", 20, 19, true),
            ("caught up with by tries", 20, 20, true),
            ("passed by tries", 20, 21, true),
            ("passed by a century of tries", 20, 20 + ANSWER_MARGIN - 1, true),
            ("lifted", 20, 5 + FENCE_LIFT, false),
            ("lifted, and much was claimed since the backup", 40_000_000, 5 + FENCE_LIFT, false),
            ("reported after it was lifted", 5 + FENCE_LIFT + 7, 5 + FENCE_LIFT, true),
            ("restored from before a declaration, and declared once", 9 + FENCE_LIFT, 5 + FENCE_LIFT, true),
            ("the same, declared again", 9 + FENCE_LIFT, 5 + 2 * FENCE_LIFT, false),
            ("an agent that says anything", i64::MAX, 5 + FENCE_LIFT, true),
            ("a database that says anything", 1, i64::MIN, true),
        ] {
            let proof = UnknownFence::from_report(at, fence, given);
            assert_eq!(proof.is_some(), counts, "{name}");
            assert!(proof.is_none_or(|proof| proof.fence == fence), "{name}");
        }
    }
}
