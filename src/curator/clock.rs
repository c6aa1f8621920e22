//! The time as a curator has it.
//!
//! The time of day says whether a certificate or a ticket is still good; how long this process has been running says
//! how long a node has been silent, because the time of day jumps. A test brings clocks of its own.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::model::time::Timestamp;

/// Both clocks.
#[derive(Clone)]
pub struct Clock {
    now: Arc<dyn Fn() -> Timestamp + Send + Sync>,
    running: Arc<dyn Fn() -> Duration + Send + Sync>,
}

impl Clock {
    /// Those of this host.
    #[must_use]
    pub fn host() -> Self {
        let began = Instant::now();
        Self::new(|| SystemTime::now().into(), move || began.elapsed())
    }

    /// Any others; `running` must never fall.
    pub fn new(
        now: impl Fn() -> Timestamp + Send + Sync + 'static,
        running: impl Fn() -> Duration + Send + Sync + 'static,
    ) -> Self {
        Self { now: Arc::new(now), running: Arc::new(running) }
    }

    /// The time of day.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        (self.now)()
    }

    /// Time since some moment.
    #[must_use]
    pub fn running(&self) -> Duration {
        (self.running)()
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}
