//! When a tracker requests statements from all other curators than the followed one.
//!
//! The rounds run as long as the tracker does, whether a curator is followed or not. A false leader that ends each
//! connection after a moment, or lists dead addresses alone, puts off no round and does not end the one that is under way.
//!
//! All nodes of a cluster notice in the same moment that the leader has changed. If each of them requested all other
//! curators at once, every curator would have a handshake with every node in that second, and again each minute from then
//! on. So a round waits for a random part of [`ROUND_SPREAD`], unless the node has no statement, or follows nobody until
//! there is a newer one. The first round of a tracker is due at once.
//!
//! An address that was not requested since the last round is requested at once and alone: its curator has to prove itself
//! before the leader leaves it out. The others keep their time, because every node gets the new list in the same moment.
//!
//! Another followed curator brings the next round forward, once, and not before [`MIN_ROUND_INTERVAL`] has passed.
//! Otherwise a false leader that ends each connection after a moment, or has several addresses, could have every node
//! request the honest curators all the time.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::Instant;

/// Time between the starts of two rounds, without the random part.
pub(super) const ROUND_INTERVAL: Duration = Duration::from_mins(1);
/// Shortest time between the starts of two rounds, however often another curator is followed.
const MIN_ROUND_INTERVAL: Duration = Duration::from_secs(30);
/// The rounds of all nodes are spread over this time.
pub(super) const ROUND_SPREAD: Duration = Duration::from_secs(15);

/// How long a round is put off. `part` is random, from 0 to less than 1. *Pure.*
pub(super) fn round_delay(waits_for_statement: bool, part: f64) -> Duration {
    if waits_for_statement { Duration::ZERO } else { ROUND_SPREAD.mul_f64(part) }
}

/// What a tracker requests next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NextRequest {
    /// A round through all addresses is due.
    Round,
    /// These addresses alone are requested, because they are new.
    New(BTreeSet<String>),
    /// The next round starts at this time.
    At(Instant),
}

/// When the next round is due, and which addresses were requested since the last one began.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RoundSchedule {
    /// The addresses of the last complete round and those that were requested since then, the followed one included.
    requested: BTreeSet<String>,
    /// The start of the next round; `None` before the first complete one.
    due: Option<Instant>,
    /// Before this, no other followed curator starts a round; `None` before the first complete one.
    earliest: Option<Instant>,
    /// Whether another followed curator has brought the next round forward.
    is_brought_forward: bool,
}

impl RoundSchedule {
    /// The start of the next round; `None` before the first complete one.
    #[cfg(test)]
    pub(super) const fn due(&self) -> Option<Instant> {
        self.due
    }

    /// What is requested next, if these are the addresses of the other curators.
    pub(super) fn next_request(&self, others: &BTreeSet<String>, now: Instant) -> NextRequest {
        let Some(due) = self.due.filter(|due| *due > now) else { return NextRequest::Round };
        let new: BTreeSet<String> = others.difference(&self.requested).cloned().collect();
        if new.is_empty() { NextRequest::At(due) } else { NextRequest::New(new) }
    }

    /// Another curator is followed: the next round starts at this time at the latest, but not too soon after the last
    /// one. Only the first call before each round counts.
    pub(super) fn bring_forward(&mut self, latest: Instant) {
        if !self.is_brought_forward {
            let start = self.earliest.map_or(latest, |earliest| earliest.max(latest));
            self.due = self.due.map(|due| due.min(start));
            self.is_brought_forward = true;
        }
    }

    /// These addresses were requested outside a round.
    pub(super) fn record_requested(&mut self, addresses: impl IntoIterator<Item = String>) {
        self.requested.extend(addresses);
    }

    /// A round through these addresses, which began at `start`, is complete. The next one starts at `due`.
    pub(super) fn complete_round(&mut self, requested: BTreeSet<String>, start: Instant, due: Instant) {
        let earliest = Some(start + MIN_ROUND_INTERVAL);
        *self = Self { requested, due: Some(due), earliest, is_brought_forward: false };
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
    fn first_round_and_a_new_address_are_due_at_once_and_the_others_keep_their_time() {
        let now = Instant::now();
        let mut schedule = RoundSchedule::default();
        schedule.bring_forward(now + ROUND_SPREAD);
        assert_eq!(schedule.next_request(&set(&[]), now), NextRequest::Round, "there was no round yet");
        let due = now + ROUND_INTERVAL;
        schedule.complete_round(set(&["a:1", "b:1", "c:1"]), now, due);
        for (others, expected) in [
            (set(&["b:1", "c:1"]), NextRequest::At(due)),
            // The curator that was followed before is none that was never requested.
            (set(&["a:1", "b:1"]), NextRequest::At(due)),
            (set(&["b:1", "d:1"]), NextRequest::New(set(&["d:1"]))),
        ] {
            assert_eq!(schedule.next_request(&others, now), expected, "{others:?}");
            assert_eq!(schedule.next_request(&others, due), NextRequest::Round, "{others:?}");
        }
        schedule.record_requested(set(&["d:1"]));
        let all = set(&["b:1", "d:1"]);
        assert_eq!(schedule.next_request(&all, now), NextRequest::At(due), "it is requested again");
    }

    /// A false leader ends each connection after a moment.
    #[test]
    fn curators_that_are_followed_one_after_the_other_bring_a_round_forward_once() {
        let now = Instant::now();
        let mut schedule = RoundSchedule::default();
        let first = now + Duration::from_secs(39);
        for _ in 0..2 {
            schedule.complete_round(set(&["a:1"]), now, now + ROUND_INTERVAL);
            for second in [39, 40, 60, 38, 1] {
                schedule.bring_forward(now + Duration::from_secs(second));
                let next = schedule.next_request(&set(&["a:1"]), now);
                assert_eq!(next, NextRequest::At(first), "{second}");
            }
        }
    }

    /// A false leader has two addresses. It lets the node follow the other one as soon as a round is complete.
    #[test]
    fn curators_that_are_followed_in_turns_double_the_rounds_at_most() {
        let begin = Instant::now();
        let (mut schedule, mut start, mut rounds) = (RoundSchedule::default(), begin, 0);
        let minutes = 10;
        while start < begin + ROUND_INTERVAL * minutes {
            schedule.complete_round(set(&["a:1"]), start, start + ROUND_INTERVAL);
            schedule.bring_forward(start + ROUND_SPREAD / 2);
            start = schedule.due().unwrap();
            rounds += 1;
        }
        assert_eq!(rounds, 2 * minutes, "every node requests the honest curators all the time");
    }
}
