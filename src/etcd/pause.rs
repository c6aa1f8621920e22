//! How long to wait before etcd is asked again: after it failed, and between two listings of a follower.
//!
//! After a failure: short, because etcd is on this host and its absence holds up a whole cluster; never nothing, because three
//! curators that ask without a pause keep an etcd that comes back from coming back. Half of each pause is random.

use std::time::Duration;

/// The longest pause between two tries.
pub const LONGEST: Duration = Duration::from_secs(5);

/// The mean interval between two listings of a follower that watches.
///
/// It bounds how long a follower can miss an event that etcd lost. A member that falls silent is noticed as late as that.
///
/// The price, for a member of a cluster of a thousand nodes: it has some fifteen followers, and three of them list
/// everything that there is of the nodes, up to 2 MB each. That is 600 kB and five pages a second, read from an etcd on the
/// same host. A follower of which there is one for each node needs a longer interval.
pub const LISTING: Duration = Duration::from_secs(10);

const SHORTEST: Duration = Duration::from_millis(100);

/// The pause after so many failures in a row; none counts as one. `random` is from 0 to 1.
#[must_use]
pub fn after_failure(failures: u32, random: f64) -> Duration {
    let doublings = failures.saturating_sub(1);
    let whole = SHORTEST.saturating_mul(2_u32.saturating_pow(doublings)).min(LONGEST);
    whole.mul_f64(0.5 + random.clamp(0.0, 1.0) / 2.0)
}

/// The pause before the next listing: a quarter more or less than the interval, so that followers which began together
/// do not stay together. `random` is from 0 to 1.
#[must_use]
pub fn between_listings(interval: Duration, random: f64) -> Duration {
    interval.mul_f64(0.75 + random.clamp(0.0, 1.0) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listings_come_a_quarter_earlier_or_later_than_the_interval() {
        for (random, seconds) in [(0.0, 7.5), (0.5, 10.0), (1.0, 12.5), (7.0, 12.5), (-1.0, 7.5)] {
            assert_eq!(between_listings(LISTING, random), Duration::from_secs_f64(seconds), "{random}");
        }
    }

    #[test]
    fn pause_doubles_up_to_five_seconds_and_is_never_nothing() {
        let milliseconds = [100, 100, 200, 400, 800, 1600, 3200, 5000, 5000];
        for (failures, expected) in (0..).zip(milliseconds) {
            assert_eq!(after_failure(failures, 1.0), Duration::from_millis(expected), "{failures}");
            assert_eq!(after_failure(failures, 0.0), Duration::from_millis(expected / 2), "{failures}");
        }
        assert_eq!(after_failure(u32::MAX, 7.0), LONGEST);
        assert_eq!(after_failure(1, f64::NEG_INFINITY), SHORTEST / 2);
    }
}
