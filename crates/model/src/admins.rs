//! Admins, counted as people.
//!
//! The two-person rule needs two people who can approve. One person may have several credentials, so people are counted
//! by name, as [`crate::two_person_rule`] distinguishes them.

use std::collections::BTreeSet;

use uuid::Uuid;

use crate::plain_text::fold_name;

/// Fewest people who must be admins when the rule is switched on.
pub const MIN_ADMINS: usize = 2;

/// A credential that can approve an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminCredential {
    /// Id of its row in the database.
    pub id: Uuid,
    /// Name of its owner, as it is stored.
    pub name: String,
}

/// How many different people have these credentials, as far as they can be distinguished.
#[must_use]
pub fn count_people<'a>(admins: impl IntoIterator<Item = &'a AdminCredential>) -> usize {
    admins.into_iter().map(|admin| fold_name(&admin.name)).collect::<BTreeSet<_>>().len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_are_counted_by_name() {
        let admin =
            |(id, name): (u128, &str)| AdminCredential { id: Uuid::from_u128(id), name: name.to_owned() };
        for (names, expected) in [
            (&[][..], 0),
            (&[(1, "kim")][..], 1),
            (&[(1, "kim"), (2, "Kim "), (3, "k\u{200b}im")][..], 1),
            (&[(1, "kim"), (2, "lee")][..], 2),
            (&[(1, "kim"), (2, "lee"), (3, "max"), (4, "max")][..], 3),
        ] {
            let admins: Vec<AdminCredential> = names.iter().copied().map(admin).collect();
            assert_eq!(count_people(&admins), expected, "{names:?}");
        }
    }
}
