//! Concurrency limits per source of calls without a credential.
//!
//! A source is an IPv4 address, or the /64 network of an IPv6 address. One source gets only a part of all permits, so
//! it cannot lock out the others. Connections are limited by the [gate](transport::gate).

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use transport::gate::source::Source;

/// The inverse share of all permits that one source may have: a quarter.
const SOURCE_SHARE: usize = 4;

/// Limits calls without a credential, in total and per source.
pub(super) struct SourceLimiter {
    permits: Arc<Semaphore>,
    by_source: Mutex<HashMap<[u8; 32], usize>>,
    max_per_source: usize,
}

/// A permit that is released when it is dropped.
pub struct SourcePermit {
    limiter: Arc<SourceLimiter>,
    source: [u8; 32],
    _permit: OwnedSemaphorePermit,
}

impl SourceLimiter {
    pub(super) fn new(max_permits: usize) -> Arc<Self> {
        Arc::new(Self {
            permits: Arc::new(Semaphore::new(max_permits.min(Semaphore::MAX_PERMITS))),
            by_source: Mutex::default(),
            max_per_source: max_permits.div_ceil(SOURCE_SHARE),
        })
    }

    /// Acquires a permit for a source; `None` if it or the total is at the limit.
    pub(super) fn try_acquire(self: &Arc<Self>, source: [u8; 32]) -> Option<SourcePermit> {
        let permit = self.permits.clone().try_acquire_owned().ok()?;
        let mut by_source = self.by_source.lock().unwrap_or_else(PoisonError::into_inner);
        let held = by_source.entry(source).or_default();
        if *held >= self.max_per_source {
            return None;
        }
        *held += 1;
        Some(SourcePermit { limiter: self.clone(), source, _permit: permit })
    }
}

impl Drop for SourcePermit {
    fn drop(&mut self) {
        let mut by_source = self.limiter.by_source.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = by_source.get_mut(&self.source) {
            *held -= 1;
            if *held == 0 {
                by_source.remove(&self.source);
            }
        }
    }
}

/// The key by which a source is limited.
pub(super) fn source_key(address: IpAddr) -> [u8; 32] {
    let mut key = [0; 32];
    match Source::from_address(address).address() {
        IpAddr::V4(address) => key[..4].copy_from_slice(&address.octets()),
        IpAddr::V6(address) => key[4..12].copy_from_slice(&address.octets()[..8]),
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_source_cannot_take_all_permits() {
        let limiter = SourceLimiter::new(8);
        let held = [limiter.try_acquire([1; 32]), limiter.try_acquire([1; 32])];
        assert!(held.iter().all(Option::is_some));
        assert!(limiter.try_acquire([1; 32]).is_none(), "a quarter is enough for one");
        let others: Vec<Option<SourcePermit>> =
            (2..10).map(|source| limiter.try_acquire([source; 32])).collect();
        assert_eq!(others.iter().flatten().count(), 6, "and there is an end to all of them");
        drop((held, others));
        assert!(limiter.try_acquire([1; 32]).is_some());
        assert!(limiter.by_source.lock().unwrap().is_empty(), "nothing is remembered of who has gone");
    }

    #[test]
    fn a_network_is_one_source() {
        let key = |text: &str| source_key(text.parse().unwrap());
        assert_eq!(key("2001:db8:1:2::1"), key("2001:db8:1:2:ffff::9"));
        assert_ne!(key("2001:db8:1:2::1"), key("2001:db8:1:3::1"));
        assert_ne!(key("192.0.2.1"), key("192.0.2.2"));
        assert_eq!(key("::ffff:192.0.2.1"), key("192.0.2.1"));
    }
}
