//! Exponential backoff with jitter after work on a machine failed.
//!
//! Whole seconds, rounded up, at least one. The first failure waits `initial`, each later one the previous wait times
//! `exponent`, never more than `maximum`. An exponent of 1 (or less, or no number) waits `initial` each time. The
//! published sequence for 1.1 from one second is 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17.
//!
//! The interval stored in the BMDB is the exact one. The moment until which the machine is left alone has ±10 % of
//! jitter, so that a thousand machines that failed together do not come back together.
//!
//! Users know this rule, and the database stores its intervals. So the growth is here, and not in the crate `backoff`,
//! which has that of all other retries.

use std::time::Duration;

use backoff::spread_interval;
use serde::{Deserialize, Serialize};

use crate::time::{Span, Timestamp, after};

/// The parameters of a growing delay.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackoffPolicy {
    /// Wait after the first failure.
    pub initial: Span,
    /// Longest wait between two attempts.
    pub maximum: Span,
    /// Factor from one wait to the next.
    pub exponent: f64,
}

impl BackoffPolicy {
    /// The wait after another failure, given the wait after the one before it.
    #[must_use]
    pub fn next_interval(&self, last: Option<Duration>) -> Duration {
        let initial = whole_seconds(self.initial.0).max(1);
        let maximum = whole_seconds(self.maximum.0).max(initial);
        let exponent = if self.exponent > 1.0 { self.exponent } else { 1.0 };
        let seconds = match last {
            Some(last) if exponent > 1.0 => next_seconds(whole_seconds(last).max(1), exponent, maximum),
            _ => initial,
        };
        Duration::from_secs(seconds.clamp(1, maximum))
    }
}

fn whole_seconds(duration: Duration) -> u64 {
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0))
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "waits are hours, far below 2^52 seconds; a product beyond the maximum is cut off before the cast"
)]
fn next_seconds(last: u64, exponent: f64, maximum: u64) -> u64 {
    // The tolerance undoes binary noise: 10 × 1.1 is 11.000000000000002, and rounding that up
    // would skip a step of the published sequence.
    let next = (last as f64 * exponent - 1e-9).ceil();
    if next.is_finite() && next < maximum as f64 { next as u64 } else { maximum }
}

/// Spreads `interval` by up to ±10 %. `roll` is uniform in 0..1; 0.5 leaves it as it is.
#[must_use]
pub fn add_jitter(interval: Duration, roll: f64) -> Duration {
    spread_interval(interval, 0.1, roll)
}

/// What is stored about a process that failed on a machine and has not succeeded since.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackoffFact {
    /// Failures in a row.
    pub failures: u32,
    /// Exact length of the present wait.
    pub last_interval: Duration,
    /// End of the present wait, jitter included.
    pub until: Timestamp,
    /// What failed, as a sentence.
    pub cause: String,
}

impl BackoffFact {
    /// The record after one more failure at `now`.
    #[must_use]
    pub fn after_failure(
        previous: Option<&Self>,
        backoff: &BackoffPolicy,
        cause: String,
        now: Timestamp,
        roll: f64,
    ) -> Self {
        let last_interval = backoff.next_interval(previous.map(|fact| fact.last_interval));
        Self {
            failures: previous.map_or(0, |fact| fact.failures).saturating_add(1),
            last_interval,
            until: after(now, add_jitter(last_interval, roll)),
            cause,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn backoff(initial_ms: u64, maximum_s: u64, exponent: f64) -> BackoffPolicy {
        BackoffPolicy {
            initial: Span(Duration::from_millis(initial_ms)),
            maximum: Span::seconds(maximum_s),
            exponent,
        }
    }

    fn sequence(backoff: BackoffPolicy, length: usize) -> Vec<u64> {
        let mut last = None;
        (0..length)
            .map(|_| {
                let next = backoff.next_interval(last);
                last = Some(next);
                next.as_secs()
            })
            .collect()
    }

    #[test]
    fn sequence_of_exponent_1_1_is_the_published_one() {
        let expected = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17];
        assert_eq!(sequence(backoff(1_000, 100, 1.1), 14), expected);
    }

    #[test]
    fn out_of_range_parameters_are_clamped() {
        for (parameters, expected) in [
            (backoff(0, 100, 2.0), [1, 2, 4, 8]),
            (backoff(1_500, 100, 2.0), [2, 4, 8, 16]),
            (backoff(5_000, 1, 2.0), [5, 5, 5, 5]),
            (backoff(3_000, 100, 0.0), [3, 3, 3, 3]),
            (backoff(3_000, 100, 0.5), [3, 3, 3, 3]),
            (backoff(3_000, 100, 1.0), [3, 3, 3, 3]),
            (backoff(3_000, 100, f64::NAN), [3, 3, 3, 3]),
            (backoff(3_000, 10, 2.0), [3, 6, 10, 10]),
            (backoff(3_000, 100, f64::INFINITY), [3, 100, 100, 100]),
            (backoff(1_000, 86_400, 1e300), [1, 86_400, 86_400, 86_400]),
        ] {
            assert_eq!(sequence(parameters, 4), expected, "{parameters:?}");
        }
    }

    proptest! {
        #[test]
        fn waits_never_shrink_and_never_pass_the_maximum(
            initial in 0_u64..100_000, maximum in 0_u64..100_000, exponent in 0.0_f64..10.0
        ) {
            let parameters = backoff(initial, maximum, exponent);
            let waits = sequence(parameters, 50);
            let ceiling = maximum.max(initial.div_ceil(1_000)).max(1);
            prop_assert!(waits.windows(2).all(|pair| pair[0] <= pair[1]));
            prop_assert!(waits.iter().all(|wait| (1..=ceiling).contains(wait)));
        }

        #[test]
        fn jitter_stays_within_a_tenth(seconds in 1_u64..1_000_000, roll in 0.0_f64..1.0) {
            let exact = Duration::from_secs(seconds);
            let spread = add_jitter(exact, roll);
            prop_assert!(spread >= exact.mul_f64(0.8999) && spread <= exact.mul_f64(1.1001));
        }
    }
}
