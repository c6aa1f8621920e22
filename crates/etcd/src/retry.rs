//! Delays of retries against etcd.

use std::time::Duration;

use backoff::ExponentialBackoff;

/// The delays after failures of etcd.
///
/// They are short, because etcd is on this host and its absence holds up a whole cluster. None is near zero, because
/// three curators that retry at once keep a restarted etcd from coming up.
pub const RETRY_BACKOFF: ExponentialBackoff =
    ExponentialBackoff { initial: Duration::from_millis(100), factor: 2.0, max: Duration::from_secs(5) };

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_up_to_five_seconds_and_is_never_zero() {
        let milliseconds = [100, 100, 200, 400, 800, 1600, 3200, 5000, 5000];
        for (failures, expected) in (0..).zip(milliseconds) {
            assert_eq!(RETRY_BACKOFF.delay(failures, 1.0), Duration::from_millis(expected), "{failures}");
            assert_eq!(RETRY_BACKOFF.delay(failures, 0.0), Duration::from_millis(expected / 2), "{failures}");
        }
        assert_eq!(RETRY_BACKOFF.delay(u32::MAX, 7.0), Duration::from_secs(5));
        assert_eq!(RETRY_BACKOFF.delay(1, f64::NEG_INFINITY), Duration::from_millis(50));
    }
}
