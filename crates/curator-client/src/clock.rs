//! The curator's clocks: wall-clock time, and a monotonic one for silence.
//!
//! Wall-clock time decides whether a certificate or a ticket is still valid. Wall-clock time can jump, so how long a
//! node has been silent is measured by how long this process has been running. Tests pass clocks of their own.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use model::time::Timestamp;

/// How far the clocks of two nodes may differ. It is more than any call takes.
///
/// A leader whose clock differs by more from those of most consensus members steps down. Nodes accept what a leader signs
/// within it: if they accepted less, a leader that stays could delay each revocation.
pub const MAX_CLOCK_DIFFERENCE: Duration = Duration::from_mins(30);

/// A wall clock and a monotonic clock; clones share both.
#[derive(Clone)]
pub struct Clock {
    now: Arc<dyn Fn() -> Timestamp + Send + Sync>,
    monotonic: Arc<dyn Fn() -> Duration + Send + Sync>,
}

impl Clock {
    /// The clocks of this host.
    #[must_use]
    pub fn system() -> Self {
        let began = Instant::now();
        Self::new(|| SystemTime::now().into(), move || began.elapsed())
    }

    /// Other clocks, for tests; `running` must never decrease.
    pub fn new(
        now: impl Fn() -> Timestamp + Send + Sync + 'static,
        running: impl Fn() -> Duration + Send + Sync + 'static,
    ) -> Self {
        Self { now: Arc::new(now), monotonic: Arc::new(running) }
    }

    /// The wall-clock time, which may jump.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        (self.now)()
    }

    /// Time since a fixed moment; never decreases.
    #[must_use]
    pub fn monotonic(&self) -> Duration {
        (self.monotonic)()
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}
