//! Admins, counted as people, and which of them may be revoked.
//!
//! The two-person rule needs two people who can approve. One person may have several credentials, so people are counted
//! by name, as [`crate::two_person_rule`] distinguishes them.
//!
//! Who revokes the others until one admin is left has ended the rule in effect, and locked everybody out. So such a
//! revocation needs a second person itself, and the last admin is not revoked by a call at all. An admin who approves
//! nothing yet is no second person: a thief could have got that credential past one careless approval. Nor is an admin
//! with a credential that expires soon: the thief would only have to wait.

use std::collections::BTreeSet;

use uuid::Uuid;

use crate::plain_text::fold_name;
use crate::time::{Span, Timestamp, after};
use crate::two_person_rule::WaitingTime;

/// Fewest people who must be admins when the rule is switched on, and whom a revocation leaves without a second person.
pub const MIN_ADMINS: usize = 2;

/// A credential that can approve an order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminCredential {
    /// Id of its row in the database.
    pub id: Uuid,
    /// Name of its owner, as it is stored.
    pub name: String,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it expires; `None` is never.
    pub expires_at: Option<Timestamp>,
}

/// A credential that expires sooner than this counts for no second person. Within a day the people who are left can
/// create another one, whenever they work.
pub const LASTING: Span = Span::hours(24);

/// How many different people have these credentials, as far as they can be distinguished.
#[must_use]
pub fn count_people<'a>(admins: impl IntoIterator<Item = &'a AdminCredential>) -> usize {
    admins.into_iter().map(|admin| fold_name(&admin.name)).collect::<BTreeSet<_>>().len()
}

/// Those of these credentials that count for no second person: they are new, and approve nothing yet, or expire soon.
#[must_use]
pub fn find_uncounted(admins: &[AdminCredential], time: WaitingTime, now: Timestamp) -> Vec<Uuid> {
    let ends_soon =
        |admin: &AdminCredential| admin.expires_at.is_some_and(|end| end <= after(now, LASTING.0));
    let uncounted = |admin: &&AdminCredential| !time.is_over(admin.created_at, now) || ends_soon(admin);
    admins.iter().filter(uncounted).map(|admin| admin.id).collect()
}

/// The decision on the revocation of a credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RevocationDecision {
    /// Enough admins are left, or as many as before.
    Allowed,
    /// The two-person rule is on, and fewer than two admins are left, or fewer than two who approve orders now and in a
    /// day.
    ApprovalRequired,
    /// It leaves no admin.
    LastAdmin,
}

/// Decides whether a credential may be revoked by a call, when these are the `admins` now. Those of `uncounted` are no
/// second person.
#[must_use]
pub fn decide_revocation(
    rule_is_on: bool,
    admins: &[AdminCredential],
    uncounted: &[Uuid],
    revoked: Uuid,
) -> RevocationDecision {
    let fewer = |counted: &[&AdminCredential]| {
        let left = count_people(counted.iter().copied().filter(|admin| admin.id != revoked));
        (left < count_people(counted.iter().copied())).then_some(left)
    };
    let all: Vec<&AdminCredential> = admins.iter().collect();
    let approving: Vec<&AdminCredential> =
        all.iter().copied().filter(|admin| !uncounted.contains(&admin.id)).collect();
    let (left, left_approving) = (fewer(&all), fewer(&approving));
    let too_few = |left: Option<usize>| left.is_some_and(|left| left < MIN_ADMINS);
    if left == Some(0) {
        RevocationDecision::LastAdmin
    } else if rule_is_on && (too_few(left) || too_few(left_approving)) {
        RevocationDecision::ApprovalRequired
    } else {
        RevocationDecision::Allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn admin((id, name): (u128, &str)) -> AdminCredential {
        AdminCredential {
            id: Uuid::from_u128(id),
            name: name.to_owned(),
            created_at: at(-100_000),
            expires_at: None,
        }
    }

    #[test]
    fn new_admins_wait_unless_they_are_older_than_the_rule() {
        let admins: Vec<AdminCredential> = [(1, -100_000), (2, -3_600), (3, -3_599), (4, -10), (5, 10)]
            .into_iter()
            .map(|(id, seconds)| AdminCredential { created_at: at(seconds), ..admin((id, "kim")) })
            .collect();
        let hour = Span::hours(1);
        for (length, rule_since, expected) in [
            (hour, None, &[3, 4, 5][..]),
            (hour, Some(-200_000), &[3, 4, 5]),
            (hour, Some(-3_599), &[4, 5]),
            (hour, Some(-10), &[5]),
            // The clock was wrong when the rule was switched on: nobody is older than that.
            (hour, Some(1), &[3, 4, 5]),
            (Span::default(), None, &[5]),
            (Span::hours(24 * 30), None, &[1, 2, 3, 4, 5]),
        ] {
            let time = WaitingTime { length, rule_since: rule_since.map(at) };
            let expected: Vec<Uuid> = expected.iter().copied().map(Uuid::from_u128).collect();
            assert_eq!(find_uncounted(&admins, time, at(0)), expected, "{length} {rule_since:?}");
        }
        assert!(find_uncounted(&[], WaitingTime { length: hour, rule_since: None }, at(0)).is_empty());
    }

    #[test]
    fn admin_who_expires_soon_is_no_second_person() {
        let time = WaitingTime { length: Span::hours(1), rule_since: None };
        for (expires, expected) in
            [(None, false), (Some(1), true), (Some(24 * 3_600), true), (Some(24 * 3_600 + 1), false)]
        {
            let max = AdminCredential { expires_at: expires.map(at), ..admin((3, "max")) };
            let admins = [admin((1, "kim")), admin((2, "lee")), max];
            let uncounted = find_uncounted(&admins, time, at(0));
            assert_eq!(uncounted == [Uuid::from_u128(3)], expected, "{expires:?} {uncounted:?}");
            let decision = decide_revocation(true, &admins, &uncounted, Uuid::from_u128(2));
            assert_eq!(
                decision == RevocationDecision::ApprovalRequired,
                expected,
                "{expires:?} {decision:?}"
            );
        }
    }

    #[test]
    fn people_are_counted_by_name() {
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

    #[test]
    fn last_admin_stays_and_last_but_one_needs_a_second_person() {
        use RevocationDecision::{Allowed, ApprovalRequired, LastAdmin};
        let (one, two) = (&[(1, "kim")][..], &[(1, "kim"), (2, "lee")][..]);
        let (three, twice) = (&[(1, "kim"), (2, "lee"), (3, "max")][..], &[(1, "kim"), (2, "Kim")][..]);
        for (rule_is_on, admins, revoked, expected) in [
            (false, one, 1, LastAdmin),
            (true, one, 1, LastAdmin),
            // A viewer, or what is no credential of an admin any more.
            (true, one, 9, Allowed),
            (true, two, 9, Allowed),
            (false, two, 2, Allowed),
            (true, two, 2, ApprovalRequired),
            (true, two, 1, ApprovalRequired),
            (true, three, 3, Allowed),
            // The person has another token.
            (true, twice, 1, Allowed),
            (false, twice, 2, Allowed),
            (true, &[][..], 1, Allowed),
        ] {
            let admins: Vec<AdminCredential> = admins.iter().copied().map(admin).collect();
            let decision = decide_revocation(rule_is_on, &admins, &[], Uuid::from_u128(revoked));
            assert_eq!(decision, expected, "{rule_is_on} {admins:?} {revoked}");
        }
    }

    #[test]
    fn admin_who_approves_nothing_yet_is_no_second_person() {
        use RevocationDecision::{Allowed, ApprovalRequired, LastAdmin};
        let admins: Vec<AdminCredential> =
            [(1, "kim"), (2, "lee"), (3, "mallory"), (4, "mallory")].into_iter().map(admin).collect();
        for (rule_is_on, count, waiting, revoked, expected) in [
            (true, 3, &[][..], 2, Allowed),
            (true, 3, &[3][..], 2, ApprovalRequired),
            (true, 3, &[3][..], 1, ApprovalRequired),
            (true, 4, &[3][..], 2, Allowed),
            (true, 4, &[3, 4][..], 2, ApprovalRequired),
            // The new one goes without another person.
            (true, 3, &[3][..], 3, Allowed),
            (true, 2, &[2][..], 2, ApprovalRequired),
            (true, 2, &[1, 2][..], 2, ApprovalRequired),
            (false, 3, &[3][..], 2, Allowed),
            (true, 1, &[1][..], 1, LastAdmin),
        ] {
            let waiting: Vec<Uuid> = waiting.iter().copied().map(Uuid::from_u128).collect();
            let decision =
                decide_revocation(rule_is_on, &admins[..count], &waiting, Uuid::from_u128(revoked));
            assert_eq!(decision, expected, "{rule_is_on} {count} {waiting:?} {revoked}");
        }
    }
}
