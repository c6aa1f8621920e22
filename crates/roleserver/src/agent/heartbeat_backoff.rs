//! Retry delays and jitter of heartbeats (pure).
//!
//! Retries are endless, because a machine that gives up calling is a machine that somebody has to visit. The longest
//! pause is four heartbeat intervals, and a minute at the most. If the silence limit is longer than that, a fleet whose
//! shepherd was away is back before any machine is suspected (by default 30 s and 10 min). Half of each pause is
//! random, so that the fleet does not come back as one wave.

use std::time::Duration;

use backoff::{ExponentialBackoff, jitter, spread_interval};

/// The longest pause between two attempts, however long the interval is.
const MAX_DELAY: Duration = Duration::from_mins(1);

const MIN_DELAY: Duration = Duration::from_secs(1);
const ENDPOINT_DELAY: Duration = Duration::from_millis(200);

/// The pause after `failures` failures in a row (at least one) with `endpoints` to try, if a heartbeat is due every
/// `interval`; `random` is from 0 to 1.
///
/// Every endpoint is tried once before the pause grows.
#[must_use]
pub fn retry_delay(failures: u32, endpoints: usize, interval: Duration, random: f64) -> Duration {
    let max = interval.saturating_mul(4).clamp(MIN_DELAY, MAX_DELAY);
    let backoff = ExponentialBackoff { initial: MIN_DELAY, factor: 2.0, max };
    let endpoints = u32::try_from(endpoints).unwrap_or(u32::MAX).max(1);
    let rounds = failures / endpoints;
    let whole = if failures.is_multiple_of(endpoints) && rounds > 0 {
        backoff.nominal(rounds)
    } else {
        ENDPOINT_DELAY
    };
    jitter(whole, random)
}

/// The pause between two heartbeats that arrive: the interval ±10 %.
#[must_use]
pub fn jittered_interval(interval: Duration, random: f64) -> Duration {
    spread_interval(interval, 0.1, random)
}

#[cfg(test)]
mod tests {
    use super::*;

    const USUAL: Duration = Duration::from_secs(30);

    #[test]
    fn pause_doubles_with_each_round_up_to_a_minute() {
        let milliseconds = [1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000];
        for (failures, expected) in (1..).zip(milliseconds) {
            let pause = |random| retry_delay(failures, 1, USUAL, random);
            assert_eq!(pause(1.0), Duration::from_millis(expected), "{failures}");
            assert_eq!(pause(0.0), Duration::from_millis(expected / 2), "{failures}");
        }
        assert_eq!(retry_delay(u32::MAX, 1, USUAL, 1.0), MAX_DELAY);
    }

    #[test]
    fn pause_stays_within_four_intervals() {
        for (interval, longest) in [(0, 1000), (200, 1000), (1000, 4000), (5000, 20_000), (600_000, 60_000)] {
            let pause = retry_delay(u32::MAX, 1, Duration::from_millis(interval), 1.0);
            assert_eq!(pause, Duration::from_millis(longest), "{interval}");
        }
    }

    #[test]
    fn other_endpoints_are_tried_before_the_pause_grows() {
        let pauses: Vec<_> =
            (1..=6).map(|failures| retry_delay(failures, 3, USUAL, 1.0).as_millis()).collect();
        assert_eq!(pauses, [200, 200, 1000, 200, 200, 2000]);
        assert_eq!(retry_delay(1, 0, USUAL, 1.0), Duration::from_secs(1));
    }

    #[test]
    fn heartbeats_spread_by_a_tenth() {
        let interval = Duration::from_secs(30);
        assert_eq!(jittered_interval(interval, 0.0), Duration::from_secs(27));
        assert_eq!(jittered_interval(interval, 1.0), Duration::from_secs(33));
    }
}
