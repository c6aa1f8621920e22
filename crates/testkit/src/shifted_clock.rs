//! A clock that a test moves.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime};

use chrono::TimeDelta;
use curator_client::clock::Clock;
use model::time::Timestamp;

/// A clock that a test moves.
#[derive(Clone)]
pub struct Shifted {
    by_seconds: Arc<AtomicU32>,
    began: Instant,
}

impl Shifted {
    pub(crate) fn new() -> Self {
        Self { by_seconds: Arc::default(), began: Instant::now() }
    }

    /// The time on this clock.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        Timestamp::from(SystemTime::now()) + TimeDelta::seconds(self.by_seconds.load(Ordering::SeqCst).into())
    }

    /// Moves the clock forward by this many seconds at once.
    pub fn pass(&self, seconds: u32) {
        self.by_seconds.fetch_add(seconds, Ordering::SeqCst);
    }

    /// The clock of one host, which is ahead of this one by as many seconds.
    pub(crate) fn clock_ahead(&self, by_seconds: Arc<AtomicU32>) -> Clock {
        let (wall, running) = (self.clone(), self.clock());
        Clock::new(
            move || wall.now() + TimeDelta::seconds(by_seconds.load(Ordering::SeqCst).into()),
            move || running.monotonic(),
        )
    }

    /// The clock as a curator or a client takes it.
    #[must_use]
    pub fn clock(&self) -> Clock {
        let (wall, running) = (self.clone(), self.clone());
        Clock::new(
            move || wall.now(),
            move || {
                let by = running.by_seconds.load(Ordering::SeqCst);
                running.began.elapsed() + Duration::from_secs(by.into())
            },
        )
    }
}
