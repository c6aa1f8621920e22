//! Timestamps, spans and rates.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A moment by the database's clock.
pub type Timestamp = DateTime<Utc>;

/// `at` plus `by`; the end of representable time if the sum is beyond it.
#[must_use]
pub fn after(at: Timestamp, by: Duration) -> Timestamp {
    TimeDelta::from_std(by).ok().and_then(|by| at.checked_add_signed(by)).unwrap_or(Timestamp::MAX_UTC)
}

/// `at` minus `by`; the beginning of representable time if the difference is before it.
#[must_use]
pub fn before(at: Timestamp, by: Duration) -> Timestamp {
    TimeDelta::from_std(by).ok().and_then(|by| at.checked_sub_signed(by)).unwrap_or(Timestamp::MIN_UTC)
}

/// How long after `from` the moment `to` is; zero when it is not after.
#[must_use]
pub fn between(from: Timestamp, to: Timestamp) -> Duration {
    (to - from).to_std().unwrap_or(Duration::ZERO)
}

/// Milliseconds since 1970-01-01 UTC of a host's clock, as role servers get them; at least 1.
#[must_use]
pub fn unix_milliseconds(at: SystemTime) -> i64 {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX).max(1)
}

/// Parses a timestamp that a record must have; the error is a part of a sentence.
pub fn parse_timestamp(field: &str, milliseconds: i64) -> Result<Timestamp, String> {
    match Timestamp::from_timestamp_millis(milliseconds) {
        Some(at) if milliseconds > 0 => Ok(at),
        _ => Err(format!("{field} is {milliseconds}, and milliseconds since 1970 are wanted")),
    }
}

/// A duration in the format of flags and configuration: `250ms`, `30m`, `1h30m`.
///
/// It is serialised in the same format, so that a person can read a stored policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Span(pub Duration);

impl Span {
    /// A span of whole seconds.
    #[must_use]
    pub const fn seconds(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }

    /// A span of whole minutes.
    #[must_use]
    pub const fn minutes(minutes: u64) -> Self {
        Self(Duration::from_secs(minutes * 60))
    }

    /// A span of whole hours.
    #[must_use]
    pub const fn hours(hours: u64) -> Self {
        Self(Duration::from_secs(hours * 3600))
    }

    /// Whole milliseconds, as columns store them.
    #[must_use]
    pub fn milliseconds(self) -> i64 {
        i64::try_from(self.0.as_millis()).unwrap_or(i64::MAX)
    }

    /// Whole milliseconds as a float, for intervals in statements.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "285,000 years in milliseconds are 2^53")]
    pub fn float_milliseconds(self) -> f64 {
        self.0.as_millis() as f64
    }
}

impl From<Span> for Duration {
    fn from(span: Span) -> Self {
        span.0
    }
}

const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX);
        if rest == 0 {
            return f.write_str("0s");
        }
        for (unit, milliseconds) in UNITS {
            if rest >= milliseconds {
                write!(f, "{}{unit}", rest / milliseconds)?;
                rest %= milliseconds;
            }
        }
        Ok(())
    }
}

/// Why a text is not a span or a rate.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum TimeParseError {
    /// Not of the form `30m`.
    #[error("{0:?} is not a duration; write for example 250ms, 5s, 30m or 1h30m")]
    Span(String),
    /// Not of the form `250ms,8`.
    #[error(
        "{0:?} is not a rate; write PERIOD,COUNT, for example 250ms,8: a bucket of 8 refilled by one every 250ms"
    )]
    Rate(String),
}

impl FromStr for Span {
    type Err = TimeParseError;

    fn from_str(text: &str) -> Result<Self, TimeParseError> {
        let error = || TimeParseError::Span(text.to_owned());
        if text == "0" {
            return Ok(Self(Duration::ZERO));
        }
        let mut rest = text;
        let mut total: u64 = 0;
        while !rest.is_empty() {
            let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(error)?;
            let (number, tail) = rest.split_at(digits);
            let unit_length = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
            let (unit, tail) = tail.split_at(unit_length);
            let number: u64 = number.parse().map_err(|_| error())?;
            let milliseconds = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(error)?.1;
            total = number
                .checked_mul(milliseconds)
                .and_then(|part| total.checked_add(part))
                .ok_or_else(error)?;
            rest = tail;
        }
        if text.is_empty() {
            return Err(error());
        }
        Ok(Self(Duration::from_millis(total)))
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// A token bucket written `PERIOD,COUNT`: it holds COUNT and gains one every PERIOD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Time in which one token is added; never zero.
    pub period: Span,
    /// Number of tokens in a full bucket.
    pub burst: NonZeroU32,
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{}", self.period, self.burst)
    }
}

impl FromStr for Rate {
    type Err = TimeParseError;

    fn from_str(text: &str) -> Result<Self, TimeParseError> {
        let error = || TimeParseError::Rate(text.to_owned());
        let (period, burst) = text.split_once(',').ok_or_else(error)?;
        let period: Span = period.trim().parse().map_err(|_| error())?;
        let burst: NonZeroU32 = burst.trim().parse().map_err(|_| error())?;
        if period.0.is_zero() {
            return Err(error());
        }
        Ok(Self { period, burst })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_read_back_as_they_are_written() {
        for text in ["250ms", "5s", "30m", "1h30m", "4h", "2d3h", "1m1ms"] {
            assert_eq!(text.parse::<Span>().unwrap().to_string(), text);
        }
        assert_eq!("90s".parse::<Span>().unwrap().to_string(), "1m30s");
        assert_eq!("0".parse::<Span>().unwrap(), Span::default());
    }

    #[test]
    fn invalid_spans_are_rejected() {
        for text in ["", "5", "s", "5x", "-1s", "1.5h", "5 s", "99999999999999999999s", "300000000000d"] {
            assert_eq!(text.parse::<Span>(), Err(TimeParseError::Span(text.to_owned())), "{text}");
        }
    }

    #[test]
    fn rates_read_as_period_and_count() {
        let rate: Rate = "250ms,8".parse().unwrap();
        assert_eq!((rate.period.0, rate.burst.get()), (Duration::from_millis(250), 8));
        for text in ["250ms", "0s,1", "1s,0", ",8", "1s,x"] {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
    }

    #[test]
    fn arithmetic_stops_at_the_ends_of_time() {
        assert_eq!(after(Timestamp::MAX_UTC, Duration::from_secs(1)), Timestamp::MAX_UTC);
        assert_eq!(before(Timestamp::MIN_UTC, Duration::MAX), Timestamp::MIN_UTC);
        assert_eq!(between(Timestamp::MAX_UTC, Timestamp::MIN_UTC), Duration::ZERO);
    }
}
