//! Exponential backoff with jitter.

use std::time::Duration;

/// A delay that grows with each death of a runnable.
///
/// Each delay is between half and one and a half of its nominal length, so that runnables which died together do not
/// come back together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExponentialBackoff {
    /// Nominal delay after the first death.
    pub initial: Duration,
    /// Factor from one nominal delay to the next.
    pub factor: f64,
    /// Longest nominal delay before jitter.
    pub max: Duration,
}

impl ExponentialBackoff {
    /// Half a second at first, half as long again each time, a minute at the most.
    pub const DEFAULT: Self =
        Self { initial: Duration::from_millis(500), factor: 1.5, max: Duration::from_mins(1) };

    /// The delay after `deaths` deaths in a row (at least one); `random` is from 0 to 1.
    #[must_use]
    pub fn delay(&self, deaths: u32, random: f64) -> Duration {
        // Beyond this many every sensible delay has reached its maximum, and the power is still a finite number.
        let exponent = i32::try_from(deaths.saturating_sub(1).min(200)).unwrap_or(200);
        let nominal =
            (self.initial.as_secs_f64() * self.factor.max(1.0).powi(exponent)).min(self.max.as_secs_f64());
        Duration::try_from_secs_f64(nominal * (0.5 + random.clamp(0.0, 1.0))).unwrap_or(self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delay_grows_by_half_up_to_a_minute() {
        let nominal: Vec<_> = [1, 2, 3, 12, 13, 14]
            .map(|deaths| ExponentialBackoff::DEFAULT.delay(deaths, 0.5).as_millis())
            .into();
        assert_eq!(nominal, [500, 750, 1125, 43_248, 60_000, 60_000]);
        assert_eq!(ExponentialBackoff::DEFAULT.delay(0, 0.5), Duration::from_millis(500));
        assert_eq!(ExponentialBackoff::DEFAULT.delay(u32::MAX, 0.5), Duration::from_mins(1));
    }

    #[test]
    fn delay_is_spread_by_half() {
        assert_eq!(ExponentialBackoff::DEFAULT.delay(1, 0.0), Duration::from_millis(250));
        assert_eq!(ExponentialBackoff::DEFAULT.delay(1, 1.0), Duration::from_millis(750));
        assert_eq!(ExponentialBackoff::DEFAULT.delay(50, 1.0), Duration::from_secs(90));
        assert_eq!(
            ExponentialBackoff::DEFAULT.delay(1, f64::NAN).as_secs(),
            60,
            "a random number that is none"
        );
    }
}
