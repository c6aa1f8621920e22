//! Rate limit of a loop's statements: a token bucket written `PERIOD,COUNT`.

use std::num::NonZeroU32;
use std::sync::Arc;

use governor::clock::DefaultClock;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};

use crate::model::time::Rate;

/// Limits how often something is done. Cheap to clone; the clones share the bucket.
#[derive(Clone, Debug)]
pub struct Limiter(Arc<RateLimiter<NotKeyed, InMemoryState, DefaultClock>>);

impl Limiter {
    /// A bucket that holds the rate's count and gains one token each period.
    #[must_use]
    pub fn new(rate: Rate) -> Self {
        // A period of zero cannot be written as a rate; a second is the harmless reading of one.
        let quota = Quota::with_period(rate.period.0).unwrap_or_else(|| Quota::per_second(NonZeroU32::MIN));
        Self(Arc::new(RateLimiter::direct(quota.allow_burst(rate.burst))))
    }

    /// Waits for a token and takes it.
    pub async fn ready(&self) {
        self.0.until_ready().await;
    }
}
