//! Humanize durations and timestamps.
//!
//! Every timestamp is by the database's clock, and so is the `now` that it is compared with.

use std::time::Duration;

use crate::time::{Timestamp, between};

/// A duration in its two largest units: `12s`, `3m`, `2h05m`, `4d3h`.
#[must_use]
pub fn humanize_duration(span: Duration) -> String {
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
pub fn relative_time(at: Timestamp, now: Timestamp) -> String {
    if at > now {
        match between(now, at) {
            moment if moment < Duration::from_secs(1) => "at once".to_owned(),
            span => format!("in {}", humanize_duration(span)),
        }
    } else {
        match between(at, now) {
            moment if moment < Duration::from_secs(1) => "just now".to_owned(),
            span => format!("{} ago", humanize_duration(span)),
        }
    }
}

/// A timestamp to the second, in UTC: `2026-11-20T14:03:07+00:00`. The command line shows each text of this form in the
/// time zone of its user. It is one word, which is never split, and can be typed where a time is expected.
#[must_use]
pub fn absolute_time(at: Timestamp) -> String {
    at.format("%Y-%m-%dT%H:%M:%S%:z").to_string()
}

/// Relative and absolute time: `in 5m (2026-11-20T14:03:07+00:00)`.
#[must_use]
pub fn relative_and_absolute_time(at: Timestamp, now: Timestamp) -> String {
    format!("{} ({})", relative_time(at, now), absolute_time(at))
}

/// How long something lasts that ends at `until`: `for 2h00m (until 2026-11-20T14:03:07+00:00)`.
#[must_use]
pub fn remaining_time(until: Timestamp, now: Timestamp) -> String {
    format!("for {} (until {})", humanize_duration(between(now, until)), absolute_time(until))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    #[test]
    fn durations_show_two_units() {
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
            assert_eq!(humanize_duration(Duration::from_secs(seconds)), expected);
        }
    }

    #[test]
    fn times_are_past_future_or_now() {
        assert_eq!(relative_time(at(-61), at(0)), "1m01s ago");
        assert_eq!(relative_time(at(300), at(0)), "in 5m");
        assert_eq!(relative_time(at(0), at(0)), "just now");
        assert_eq!(relative_and_absolute_time(at(300), at(0)), "in 5m (2027-01-15T08:05:00+00:00)");
        assert_eq!(remaining_time(at(7200), at(0)), "for 2h00m (until 2027-01-15T10:00:00+00:00)");
    }
}
