//! Rate limiter of calls by key: a public key, a credential or a source address.
//!
//! Agents and operators are limited by the same rule. A key has a burst and a period, and the number of keys is
//! bounded.

use std::num::NonZeroU32;
use std::sync::{Arc, PoisonError, RwLock};

use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};

use model::time::Rate;

/// Most keys with a tracked rate. It is bounded because anyone can generate keys.
const MAX_TRACKED_KEYS: usize = 250_000;

/// Rate limits of calls by key.
pub struct CallRateLimiter {
    quota: Quota,
    max_keys: usize,
    by_key: RwLock<Arc<DefaultKeyedRateLimiter<[u8; 32]>>>,
}

impl CallRateLimiter {
    /// Creates a limiter with the same rate for every key.
    #[must_use]
    pub fn new(rate: Rate) -> Self {
        Self::with_max_keys(MAX_TRACKED_KEYS, rate)
    }

    fn with_max_keys(remembered: usize, rate: Rate) -> Self {
        let quota = Quota::with_period(rate.period.0).unwrap_or(Quota::per_second(NonZeroU32::MIN));
        let quota = quota.allow_burst(rate.burst);
        Self { quota, max_keys: remembered, by_key: RwLock::new(Arc::new(RateLimiter::keyed(quota))) }
    }

    pub(crate) fn allows(&self, key: [u8; 32]) -> bool {
        self.current_limiter().check_key(&key).is_ok()
    }

    /// The rates by key, which are cleared when there are too many.
    ///
    /// Clearing gives each key its burst once more, which a peer with that many keys has anyway. A shared rate instead
    /// would reject honest agents.
    fn current_limiter(&self) -> Arc<DefaultKeyedRateLimiter<[u8; 32]>> {
        let known = self.by_key.read().unwrap_or_else(PoisonError::into_inner).clone();
        if known.len() < self.max_keys {
            return known;
        }
        let mut by_key = self.by_key.write().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have cleared it first.
        if by_key.len() >= self.max_keys {
            *by_key = Arc::new(RateLimiter::keyed(self.quota));
        }
        by_key.clone()
    }

    /// Removes keys that have not called for long.
    pub fn forget_idle(&self) {
        let by_key = self.by_key.read().unwrap_or_else(PoisonError::into_inner).clone();
        by_key.retain_recent();
        by_key.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_limit_is_per_key() {
        let rates = CallRateLimiter::new("1h,2".parse().unwrap());
        let calls = |key: u8| (0..4).filter(|_| rates.allows([key; 32])).count();
        assert_eq!((calls(1), calls(2)), (2, 2));
        rates.forget_idle();
        assert_eq!((calls(1), calls(3)), (0, 2));
    }

    #[test]
    fn many_new_keys_take_no_calls_from_other_keys() {
        let rates = CallRateLimiter::with_max_keys(100, "1h,2".parse().unwrap());
        for made in 0..1000_u16 {
            let mut key = [7; 32];
            key[..2].copy_from_slice(&made.to_be_bytes());
            assert!(rates.allows(key), "{made}");
            assert!(rates.by_key.read().unwrap().len() <= 100);
        }
        assert!(rates.allows([1; 32]));
    }
}
