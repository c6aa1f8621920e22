//! Quorum arithmetic: majority, tolerated failures.

/// The smallest majority of so many members.
#[must_use]
pub(super) const fn majority(members: usize) -> usize {
    members / 2 + 1
}

/// Whether one of `members` may fail or be disrupted while `others_up` of the other members are healthy.
#[must_use]
pub(super) const fn tolerates_one_failure(members: usize, others_up: usize) -> bool {
    others_up >= majority(members)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn majority_remains_after_one_failure() {
        for (members, others_up, expected) in [
            // A single member is the whole cluster: only a person may stop it.
            (1, 0, false),
            (2, 1, false),
            (3, 2, true),
            (3, 1, false),
            (4, 3, true),
            (4, 2, false),
            (5, 3, true),
            (5, 2, false),
        ] {
            assert_eq!(tolerates_one_failure(members, others_up), expected, "{members} {others_up}");
        }
    }
}
