//! Decides whether the clock of the leading curator is wrong, by those of the other consensus members (pure).
//!
//! The leader's clock is in everything that it signs. Certificates of curators and statements count for a day. So nodes
//! follow nobody while a leader is a day slow. If it is more than half an hour fast, each of its statements is of the future until the
//! next one replaces it. Such a leader keeps its lease, and no other one leads.
//!
//! A clock is wrong if more than half of all consensus members agree on another time. The leader is not one of them, so
//! nothing is decided in a cluster of one or two members. A single member that lies decides nothing either.
//!
//! A clock that is not wrong is not therefore right. What nobody can take back needs a clock that others confirm
//! ([`record_retention`](crate::record_retention)).

use std::time::Duration;

use curator_client::clock::MAX_CLOCK_DIFFERENCE;

/// How far the right time is ahead of the leader's clock, in milliseconds, if its clock is wrong.
///
/// `members`: the number of all consensus members. `offsets`: how far the clocks of the others are ahead, as far as they
/// are known.
#[must_use]
pub(crate) fn find_wrong_clock(members: usize, offsets: &[i64]) -> Option<i64> {
    let mut away: Vec<i64> = offsets.iter().copied().filter(|offset| is_away(*offset)).collect();
    away.sort_unstable();
    away.iter().enumerate().find_map(|(first, lowest)| {
        let agree =
            away[first..].iter().take_while(|offset| !is_away(offset.saturating_sub(*lowest))).count();
        (agree > members / 2).then(|| away[first + agree / 2])
    })
}

/// Whether other clocks confirm that of the leader: with its own, more than half of all consensus members have its time.
///
/// At least one of them is another one, so nothing confirms the clock of a single member.
#[must_use]
pub(crate) fn is_confirmed(members: usize, offsets: &[i64]) -> bool {
    let agree = offsets.iter().filter(|offset| !is_away(**offset)).count();
    agree > 0 && agree + 1 > members / 2
}

/// Whether clocks with this difference, in milliseconds, do not agree.
#[must_use]
pub(crate) fn is_away(difference: i64) -> bool {
    Duration::from_millis(difference.unsigned_abs()) > MAX_CLOCK_DIFFERENCE
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: i64 = 60_000;
    const DAY: i64 = 24 * 60 * MINUTE;

    #[test]
    fn clock_is_wrong_if_most_members_agree_on_another_time() {
        for (what, members, offsets, expected) in [
            ("alone", 1, vec![], None),
            ("one of two differs", 2, vec![DAY], None),
            ("all agree", 3, vec![0, 5], None),
            ("as far as clocks may differ", 3, vec![30 * MINUTE, 30 * MINUTE], None),
            ("both others are ahead", 3, vec![30 * MINUTE + 1, 31 * MINUTE], Some(31 * MINUTE)),
            ("both others are ten years behind", 3, vec![-3650 * DAY, -3650 * DAY], Some(-3650 * DAY)),
            ("one of the others is wrong", 3, vec![0, DAY], None),
            ("all three differ", 3, vec![DAY, 2 * DAY], None),
            ("before and after", 3, vec![-31 * MINUTE, 31 * MINUTE], None),
            ("one is not known", 3, vec![DAY], None),
            ("three of five agree", 5, vec![DAY, 0, DAY + MINUTE, DAY - MINUTE], Some(DAY)),
            ("two of five are ahead", 5, vec![DAY, DAY, 0, 0], None),
            ("two of four agree", 4, vec![DAY, DAY, 0], None),
            ("no time at all", 3, vec![i64::MIN, i64::MIN], Some(i64::MIN)),
            ("extremes", 3, vec![i64::MIN, i64::MAX], None),
        ] {
            assert_eq!(find_wrong_clock(members, &offsets), expected, "{what}");
        }
    }

    #[test]
    fn clock_is_confirmed_by_most_members_and_never_by_itself() {
        for (what, members, offsets, expected) in [
            ("alone", 1, vec![], false),
            ("the other of two agrees", 2, vec![-30 * MINUTE], true),
            ("the other of two differs", 2, vec![-30 * MINUTE - 1], false),
            ("the other of two is not known", 2, vec![], false),
            ("one of three agrees", 3, vec![0], true),
            ("one of three agrees and one differs", 3, vec![0, DAY], true),
            ("one of three differs and one is not known", 3, vec![-3650 * DAY], false),
            ("both others differ", 3, vec![DAY, -DAY], false),
            ("half of four", 4, vec![0], false),
            ("three of four", 4, vec![0, 0], true),
            ("two of five", 5, vec![0, DAY, DAY], false),
            ("three of five", 5, vec![0, 0, DAY], true),
        ] {
            assert_eq!(is_confirmed(members, &offsets), expected, "{what}");
        }
    }
}
