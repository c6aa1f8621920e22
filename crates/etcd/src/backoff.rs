//! Exponential backoff with jitter, for retries against etcd.
//!
//! After a failure the pause is short, because etcd is on this host and its absence holds up a whole cluster. It is
//! never zero, because three curators that retry without a pause keep a restarted etcd from coming up. Half of each
//! pause is random.

use std::time::Duration;

/// The longest pause between two attempts.
const MAX_BACKOFF: Duration = Duration::from_secs(5);

const MIN_BACKOFF: Duration = Duration::from_millis(100);

/// The pause after this many failures in a row; 0 counts as 1. `random` is from 0 to 1.
#[must_use]
pub fn backoff_after(failures: u32, random: f64) -> Duration {
    let doublings = failures.saturating_sub(1);
    let whole = MIN_BACKOFF.saturating_mul(2_u32.saturating_pow(doublings)).min(MAX_BACKOFF);
    whole.mul_f64(0.5 + random.clamp(0.0, 1.0) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_up_to_five_seconds_and_is_never_zero() {
        let milliseconds = [100, 100, 200, 400, 800, 1600, 3200, 5000, 5000];
        for (failures, expected) in (0..).zip(milliseconds) {
            assert_eq!(backoff_after(failures, 1.0), Duration::from_millis(expected), "{failures}");
            assert_eq!(backoff_after(failures, 0.0), Duration::from_millis(expected / 2), "{failures}");
        }
        assert_eq!(backoff_after(u32::MAX, 7.0), MAX_BACKOFF);
        assert_eq!(backoff_after(1, f64::NEG_INFINITY), MIN_BACKOFF / 2);
    }
}
