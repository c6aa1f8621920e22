//! When a tracker requests statements from all other curators than the followed one.
//!
//! All nodes of a cluster notice in the same moment that the leader has changed. If each of them requested all other
//! curators at once, every curator would have a handshake with every node in that second, and again each minute from then
//! on. So a round waits for a random part of [`ROUND_SPREAD`], unless the node has no statement, or follows nobody until
//! there is a newer one. The first round of a tracker is due at once, and so is one with an address that was not requested
//! before: its curator has to prove itself before the leader leaves it out.
//!
//! The schedule outlives what is followed. A false leader that ends each connection after a moment would otherwise put off
//! the next round each time. Another followed curator can only bring it forward.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::Instant;

/// Time between the starts of two rounds, without the random part.
pub(super) const ROUND_INTERVAL: Duration = Duration::from_mins(1);
/// The rounds of all nodes are spread over this time.
pub(super) const ROUND_SPREAD: Duration = Duration::from_secs(15);

/// How long a round is put off. `part` is random, from 0 to less than 1. *Pure.*
pub(super) fn round_delay(waits_for_statement: bool, part: f64) -> Duration {
    if waits_for_statement { Duration::ZERO } else { ROUND_SPREAD.mul_f64(part) }
}

/// When the next round is due, and which addresses the last one has requested.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RoundSchedule {
    /// The addresses of the last complete round, and the one that was followed meanwhile.
    requested: BTreeSet<String>,
    /// The start of the next round; `None` before the first complete one.
    due: Option<Instant>,
}

impl RoundSchedule {
    /// When a round through these addresses starts; `None` if it is due at once.
    pub(super) fn next_start(&self, others: &BTreeSet<String>) -> Option<Instant> {
        self.due.filter(|_| others.is_subset(&self.requested))
    }

    /// Another curator is followed: the next round starts at this time at the latest.
    pub(super) fn bring_forward(&mut self, latest: Instant) {
        self.due = self.due.map(|due| due.min(latest));
    }

    /// A round through these addresses is complete, and the next one starts at `due`.
    pub(super) fn complete_round(&mut self, requested: BTreeSet<String>, due: Instant) {
        *self = Self { requested, due: Some(due) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(addresses: &[&str]) -> BTreeSet<String> {
        addresses.iter().map(|address| (*address).to_owned()).collect()
    }

    #[test]
    fn routine_rounds_are_spread_and_one_that_is_waited_for_is_not() {
        for (waits_for_statement, part, expected) in [
            (false, 0.0, Duration::ZERO),
            (false, 0.5, Duration::from_millis(7_500)),
            (false, 0.999, Duration::from_millis(14_985)),
            (true, 0.5, Duration::ZERO),
            (true, 0.999, Duration::ZERO),
        ] {
            assert_eq!(round_delay(waits_for_statement, part), expected, "{waits_for_statement} {part}");
        }
    }

    #[test]
    fn first_round_and_one_with_a_new_address_are_due_at_once() {
        let now = Instant::now();
        let mut schedule = RoundSchedule::default();
        schedule.bring_forward(now + ROUND_SPREAD);
        assert_eq!(schedule.next_start(&set(&[])), None, "there was no round yet");
        let due = now + ROUND_INTERVAL;
        schedule.complete_round(set(&["a:1", "b:1", "c:1"]), due);
        for (others, expected) in [
            (set(&["b:1", "c:1"]), Some(due)),
            // The curator that was followed before is none that was never requested.
            (set(&["a:1", "b:1"]), Some(due)),
            (set(&["b:1", "d:1"]), None),
        ] {
            assert_eq!(schedule.next_start(&others), expected, "{others:?}");
        }
    }

    /// A false leader ends each connection after a moment.
    #[test]
    fn curators_that_are_followed_one_after_the_other_put_off_no_round() {
        let now = Instant::now();
        let mut schedule = RoundSchedule::default();
        schedule.complete_round(set(&["a:1"]), now + ROUND_INTERVAL);
        let first = now + Duration::from_secs(9);
        for second in 0..60 {
            schedule.bring_forward(first + Duration::from_secs(second));
            assert_eq!(schedule.next_start(&set(&["a:1"])), Some(first), "{second}");
        }
    }
}
