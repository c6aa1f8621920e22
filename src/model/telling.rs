//! Moments and spans as people say them.
//!
//! Every moment is one of the database's clock, and so is the `now` that it is
//! told against.

use std::time::Duration;

use crate::model::time::{Timestamp, between};

/// A span in its two largest units: `12s`, `3m`, `2h05m`, `4d3h`.
#[must_use]
pub fn rough(span: Duration) -> String {
    let seconds = span.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    if minutes == 0 {
        format!("{seconds}s")
    } else if minutes < 10 && !seconds.is_multiple_of(60) {
        format!("{minutes}m{:02}s", seconds % 60)
    } else if hours == 0 {
        format!("{minutes}m")
    } else if days == 0 {
        format!("{hours}h{:02}m", minutes % 60)
    } else {
        format!("{days}d{}h", hours % 24)
    }
}

/// How far `at` is from `now`: `3m ago`, `in 5m`, `just now`.
#[must_use]
pub fn relative(at: Timestamp, now: Timestamp) -> String {
    if at > now {
        match between(now, at) {
            moment if moment < Duration::from_secs(1) => "at once".to_owned(),
            span => format!("in {}", rough(span)),
        }
    } else {
        match between(at, now) {
            moment if moment < Duration::from_secs(1) => "just now".to_owned(),
            span => format!("{} ago", rough(span)),
        }
    }
}

/// A moment to the second, on the database's clock.
#[must_use]
pub fn absolute(at: Timestamp) -> String {
    at.format("%Y-%m-%d %H:%M:%S UTC").to_string()
}

/// Both: `in 5m (2026-11-20 14:03:07 UTC)`.
#[must_use]
pub fn both(at: Timestamp, now: Timestamp) -> String {
    format!("{} ({})", relative(at, now), absolute(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    #[test]
    fn spans_are_said_in_two_units() {
        for (seconds, expected) in [
            (0, "0s"),
            (59, "59s"),
            (60, "1m"),
            (61, "1m01s"),
            (599, "9m59s"),
            (601, "10m"),
            (3599, "59m"),
            (3600, "1h00m"),
            (7500, "2h05m"),
            (86_400 * 4 + 3 * 3600, "4d3h"),
        ] {
            assert_eq!(rough(Duration::from_secs(seconds)), expected);
        }
    }

    #[test]
    fn moments_are_before_after_or_just_now() {
        assert_eq!(relative(at(-61), at(0)), "1m01s ago");
        assert_eq!(relative(at(300), at(0)), "in 5m");
        assert_eq!(relative(at(0), at(0)), "just now");
        assert_eq!(both(at(300), at(0)), "in 5m (2027-01-15 08:05:00 UTC)");
    }
}
