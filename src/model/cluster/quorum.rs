//! How many machines of a cluster may be disturbed at once.

/// Members that must be left so that most of all members are.
#[must_use]
pub const fn majority(members: usize) -> usize {
    members / 2 + 1
}

/// Whether one of `members` may go for a while when `others_up` of the other members are well.
#[must_use]
pub const fn bears_the_loss_of_one(members: usize, others_up: usize) -> bool {
    others_up >= majority(members)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_of_all_members_are_left() {
        for (members, others_up, expected) in [
            // One member alone is the whole cluster: nobody but a person stops it.
            (1, 0, false),
            (2, 1, false),
            (3, 2, true),
            (3, 1, false),
            (4, 3, true),
            (4, 2, false),
            (5, 3, true),
            (5, 2, false),
        ] {
            assert_eq!(bears_the_loss_of_one(members, others_up), expected, "{members} {others_up}");
        }
    }
}
