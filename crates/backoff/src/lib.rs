//! Exponential backoff with jitter: how long to wait before the next try.
//!
//! What fails is tried again after a delay that grows with each failure in a row. So a peer that is overloaded or away
//! gets fewer calls the longer that lasts. [`ExponentialBackoff`] has the three numbers of such a delay. Each user
//! keeps them in a constant beside the code that waits, and counts the failures itself, because only the user knows
//! what ends them: a success, a message, a run that lasted long enough.
//!
//! # The jitter rule
//!
//! A delay is between half of its nominal length and all of it ([`jitter`]). Clients that failed together, because a
//! shepherd, an etcd or a database restarted, do not come back together. There is one rule, and this is the one that
//! holds for every user:
//!
//! * *No delay is near zero.* Three curators that retry at once keep a restarted etcd from coming up. A rule that draws
//!   from the whole delay, from zero on, gives some of them such a retry.
//! * *No delay is longer than the maximum of its policy.* Limits can rely on it: agents are back before a machine
//!   counts as silent, and all tries of an order fit into the time in which it is retried. A rule that adds to both
//!   sides exceeds the maximum.
//! * *The spread grows with the delay.* Half of a long delay separates a whole fleet. A tenth of it does not.
//!
//! One kind of retry keeps its own rule, transactions of the database that lose against each other: see
//! `connection/transaction.rs` of the crate `bmdb`. Their pauses are milliseconds, and only the spread separates two
//! that lost together.
//!
//! The price is that a delay is three quarters of its nominal length on average. A policy whose shortest delay matters
//! starts with twice that.
//!
//! A delay that no crowd waits for needs no jitter: that of the probes of a service, of the restarts of one agent, or of
//! the single call by which a circuit breaker tests a provider. Those use [`ExponentialBackoff::nominal`] and
//! [`ExponentialBackoff::next_nominal`].
//!
//! # What is not a retry
//!
//! An interval between two actions that succeed, such as heartbeats and polls, keeps its mean: [`spread_interval`]
//! makes it a little shorter or longer.
//!
//! Work that failed on a machine has its own growth, in `backoff.rs` of the crate `model`: whole seconds, computed from
//! the interval that the database stores. Its jitter is [`spread_interval`] too, because operators read the interval
//! that they configured.
//!
//! # Notes for the next user
//!
//! Everything here is pure: there is no clock and no source of random numbers. A `roll` is uniform in 0..1, and callers
//! pass `rand::random()`. Tests pass 1 for the nominal delay and 0 for half of it. A roll outside of 0..1 counts as the
//! nearer end, and one that is not a number as 1.

use std::time::Duration;

/// A delay that grows with each failure in a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExponentialBackoff {
    /// Nominal delay after the first failure. More than zero.
    pub initial: Duration,
    /// Factor from one nominal delay to the next. Less than 1, or not a number, counts as 1.
    pub factor: f64,
    /// Longest delay, jitter included.
    pub max: Duration,
}

impl ExponentialBackoff {
    /// For tasks and services of a host that are restarted, and for what they fetch: half a second at first, half as
    /// long again each time, a minute at most.
    pub const DEFAULT: Self =
        Self { initial: Duration::from_millis(500), factor: 1.5, max: Duration::from_mins(1) };

    /// The delay after this many failures in a row, with jitter. No failure counts as one.
    #[must_use]
    pub fn delay(&self, failures: u32, roll: f64) -> Duration {
        jitter(self.nominal(failures), roll)
    }

    /// The delay after this many failures in a row, without jitter. No failure counts as one.
    #[must_use]
    pub fn nominal(&self, failures: u32) -> Duration {
        let steps = i32::try_from(failures.saturating_sub(1)).unwrap_or(i32::MAX);
        scale(self.initial, self.factor.max(1.0).powi(steps)).min(self.max)
    }

    /// The delay after one that was this long, without jitter: for users that store the last delay, not the failures.
    #[must_use]
    pub fn next_nominal(&self, last: Duration) -> Duration {
        scale(last, self.factor.max(1.0)).max(self.initial).min(self.max)
    }
}

/// Makes a delay random: half of it is fixed, and a random part of the other half is added.
#[must_use]
pub fn jitter(delay: Duration, roll: f64) -> Duration {
    // Rounding must not make it longer.
    scale(delay, 0.5 + clamp_roll(roll) / 2.0).min(delay)
}

/// Makes an interval shorter or longer by up to this fraction of it. A roll of 0.5 leaves it as it is. A fraction outside
/// of 0..1 counts as the nearer end, and one that is not a number as 0.
#[must_use]
pub fn spread_interval(interval: Duration, fraction: f64, roll: f64) -> Duration {
    let fraction = if fraction.is_nan() { 0.0 } else { fraction.clamp(0.0, 1.0) };
    scale(interval, 1.0 - fraction + 2.0 * fraction * clamp_roll(roll))
}

fn clamp_roll(roll: f64) -> f64 {
    if roll.is_nan() { 1.0 } else { roll.clamp(0.0, 1.0) }
}

/// A product that is too large is the longest duration.
fn scale(duration: Duration, factor: f64) -> Duration {
    Duration::try_from_secs_f64(duration.as_secs_f64() * factor).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn millis(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    const fn doubling(initial: Duration, max: Duration) -> ExponentialBackoff {
        ExponentialBackoff { initial, factor: 2.0, max }
    }

    #[test]
    fn nominal_delay_grows_by_its_factor_up_to_its_maximum() {
        let plain = |factor| ExponentialBackoff { initial: millis(100), factor, max: millis(5000) };
        for (policy, expected) in [
            (plain(2.0), [100, 100, 200, 400, 800, 1600, 3200, 5000, 5000]),
            (plain(1.5), [100, 100, 150, 225, 337, 506, 759, 1139, 1708]),
            (plain(1.0), [100; 9]),
            // A constant delay stays as it is.
            (plain(0.5), [100; 9]),
            (plain(f64::NAN), [100; 9]),
            (plain(f64::INFINITY), [100, 100, 5000, 5000, 5000, 5000, 5000, 5000, 5000]),
            // The maximum also limits the first delay.
            (doubling(millis(100), millis(30)), [30; 9]),
        ] {
            for (failures, milliseconds) in (0..).zip(expected) {
                assert_eq!(policy.nominal(failures).as_millis(), milliseconds, "{policy:?} {failures}");
            }
        }
        assert_eq!(plain(2.0).nominal(u32::MAX), millis(5000));
        assert_eq!(plain(1.0).nominal(u32::MAX), millis(100));
        assert_eq!(doubling(millis(1), Duration::MAX).nominal(u32::MAX), Duration::MAX);
    }

    #[test]
    fn default_delay_grows_by_half_up_to_a_minute() {
        let backoff = ExponentialBackoff::DEFAULT;
        let nominal: Vec<_> =
            [1, 2, 3, 12, 13, 14].map(|failures| backoff.delay(failures, 1.0).as_millis()).into();
        assert_eq!(nominal, [500, 750, 1125, 43_248, 60_000, 60_000]);
        assert_eq!(backoff.delay(0, 1.0), millis(500));
        assert_eq!(backoff.delay(u32::MAX, 1.0), Duration::from_mins(1));
    }

    #[test]
    fn half_of_each_delay_is_random() {
        let backoff = ExponentialBackoff::DEFAULT;
        for (failures, roll, expected) in [
            (1, 0.0, millis(250)),
            (1, 0.5, millis(375)),
            (1, 1.0, millis(500)),
            (50, 0.0, Duration::from_secs(30)),
            (50, 1.0, Duration::from_mins(1)),
            // Outside of 0..1.
            (1, -1.0, millis(250)),
            (1, 7.0, millis(500)),
            (1, f64::NEG_INFINITY, millis(250)),
            (1, f64::INFINITY, millis(500)),
            (1, f64::NAN, millis(500)),
            (50, f64::NAN, Duration::from_mins(1)),
        ] {
            assert_eq!(backoff.delay(failures, roll), expected, "{failures} {roll}");
        }
        assert_eq!(jitter(Duration::ZERO, 0.5), Duration::ZERO);
        assert_eq!(jitter(Duration::MAX, 1.0), Duration::MAX);
    }

    #[test]
    fn next_delay_follows_from_the_last_one() {
        let backoff = doubling(Duration::from_secs(30), Duration::from_mins(5));
        for (last, expected) in [(0, 30), (10, 30), (30, 60), (60, 120), (240, 300), (300, 300), (9000, 300)]
        {
            let next = backoff.next_nominal(Duration::from_secs(last));
            assert_eq!(next, Duration::from_secs(expected), "{last}");
        }
        assert_eq!(backoff.next_nominal(Duration::MAX), Duration::from_mins(5));
        assert_eq!(doubling(millis(50), millis(20)).next_nominal(millis(20)), millis(20));
    }

    #[test]
    fn interval_is_spread_to_both_sides() {
        for (fraction, roll, expected) in [
            (0.1, 0.0, 27_000),
            (0.1, 0.5, 30_000),
            (0.1, 1.0, 33_000),
            (0.25, 0.0, 22_500),
            (0.25, 1.0, 37_500),
            (0.25, 7.0, 37_500),
            (0.25, -1.0, 22_500),
            (0.25, f64::NAN, 37_500),
            (0.0, 1.0, 30_000),
        ] {
            let found = spread_interval(Duration::from_secs(30), fraction, roll);
            assert_eq!(found, millis(expected), "{fraction} {roll}");
        }
        assert_eq!(spread_interval(Duration::MAX, 0.1, 1.0), Duration::MAX);
        for (fraction, roll, expected) in
            [(2.0, 0.0, 0), (2.0, 1.0, 60), (-1.0, 0.0, 30), (f64::NAN, 0.0, 30)]
        {
            let found = spread_interval(Duration::from_secs(30), fraction, roll);
            assert_eq!(found, Duration::from_secs(expected), "{fraction} {roll}");
        }
    }

    proptest! {
        #[test]
        fn delays_stay_within_half_and_all_of_a_nominal_one_that_never_shrinks(
            initial in 1_u64..100_000, max in 1_u64..10_000_000, factor in 0.0_f64..10.0,
            failures in 0_u32..10_000, roll in 0.0_f64..1.0
        ) {
            let (initial, max) = (millis(initial), millis(max));
            let backoff = ExponentialBackoff { initial, factor, max };
            let nominal = backoff.nominal(failures);
            prop_assert!(nominal >= initial.min(max) && nominal <= max);
            prop_assert!(backoff.nominal(failures + 1) >= nominal);
            let delay = backoff.delay(failures, roll);
            prop_assert!(delay <= nominal && delay >= nominal / 2, "{delay:?} of {nominal:?}");
        }
    }
}
