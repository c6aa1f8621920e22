//! How long to wait before etcd is asked again after it failed.
//!
//! Short, because etcd is on this host and its absence holds up a whole cluster; never nothing, because three
//! curators that ask without a pause keep an etcd that comes back from coming back. Half of each pause is random.

use std::time::Duration;

/// The longest pause between two tries.
pub const LONGEST: Duration = Duration::from_secs(5);

const SHORTEST: Duration = Duration::from_millis(100);

/// The pause after so many failures in a row; none counts as one. `random` is from 0 to 1.
#[must_use]
pub fn after_failure(failures: u32, random: f64) -> Duration {
    let doublings = failures.saturating_sub(1);
    let whole = SHORTEST.saturating_mul(2_u32.saturating_pow(doublings)).min(LONGEST);
    whole.mul_f64(0.5 + random.clamp(0.0, 1.0) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

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
