//! The current time as a shepherd last reported it, carried forward by the boot clock.
//!
//! A machine's own clock may show any time: an empty battery starts it in 1970, a technician sets it to local time,
//! nothing corrects it before there is a network. The certificate of a callback server is valid for a limited time, and
//! a machine that verifies it by such a clock never calls again. So the shepherd reports its time with the enrolment
//! and with each response, and the machine stores it with the position in its boot.
//!
//! Within that boot the time is known from then on: the boot clock counts on, whatever the wall clock does. After a
//! reboot the time that the machine was off is unknown. The time is then *at least* the last reported one plus the time
//! since the boot. For this the last time is written to the disk at the first response of each start and then each
//! hour, not with each heartbeat.
//!
//! The last report replaces the one before, even if its time is earlier. If only later times counted, one shepherd
//! whose clock ran a year ahead would have shut out all others for good.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use rustls::pki_types::UnixTime;
use serde::{Deserialize, Serialize};

use crate::boot_clock::BootClock;

/// Milliseconds after which a new report is worth another write.
const SAVE_INTERVAL_MS: u64 = 3_600_000;
/// A difference in milliseconds from the stored time that is worth a write at once.
const SAVE_DIFFERENCE_MS: u64 = 60_000;

/// A time that a shepherd reported, and its position in a boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeSample {
    /// Milliseconds since 1970-01-01 UTC.
    pub unix_ms: u64,
    /// The boot in which it was reported.
    pub boot_id: String,
    /// Milliseconds of that boot at the report.
    pub boot_ms: u64,
}

impl TimeSample {
    /// A report of this moment; `None` if the field is unset (0) or invalid (before 1970).
    pub fn from_server_time(clock: &dyn BootClock, unix_ms: i64) -> Option<Self> {
        let unix_ms = u64::try_from(unix_ms).ok().filter(|value| *value > 0)?;
        Some(Self { unix_ms, boot_id: clock.boot_id(), boot_ms: clock.milliseconds() })
    }

    /// The time at `boot_ms` of the same boot, by this sample.
    const fn unix_ms_at(&self, boot_ms: u64) -> u64 {
        self.unix_ms.saturating_add(boot_ms.saturating_sub(self.boot_ms))
    }

    /// Whether `next` differs so much that it should be stored.
    fn is_outdated_by(&self, next: &Self) -> bool {
        self.boot_id != next.boot_id
            || next.boot_ms.saturating_sub(self.boot_ms) >= SAVE_INTERVAL_MS
            || next.unix_ms.abs_diff(self.unix_ms_at(next.boot_ms)) >= SAVE_DIFFERENCE_MS
    }
}

/// What is known about the current time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeEstimate {
    /// The time was reported in this boot.
    Exact(UnixTime),
    /// The time was reported before a reboot: it is this time or any later one.
    AtLeast(UnixTime),
}

/// The current time, as far as a shepherd reported it.
#[derive(Debug)]
pub struct TrustedTime {
    clock: Arc<dyn BootClock>,
    memory: RwLock<TimeState>,
}

#[derive(Debug)]
struct TimeState {
    latest: Option<TimeSample>,
    /// The sample on the disk, as far as this start of the agent knows; `None` until it has written one.
    saved: Option<TimeSample>,
}

impl TrustedTime {
    /// Begins with the stored sample, if there is one.
    #[must_use]
    pub fn new(clock: Arc<dyn BootClock>, sample: Option<TimeSample>) -> Self {
        Self { clock, memory: RwLock::new(TimeState { latest: sample, saved: None }) }
    }

    /// Records a reported time in milliseconds since 1970; 0 means that none was reported. Returns the sample that
    /// should be written now, if any.
    pub fn observe(&self, unix_ms: i64) -> Option<TimeSample> {
        let sample = TimeSample::from_server_time(&*self.clock, unix_ms)?;
        let mut memory = self.memory.write().unwrap_or_else(PoisonError::into_inner);
        memory.latest = Some(sample.clone());
        if memory.saved.as_ref().is_some_and(|kept| !kept.is_outdated_by(&sample)) {
            return None;
        }
        memory.saved = Some(sample.clone());
        Some(sample)
    }

    /// The current time; `None` if it was never reported.
    #[must_use]
    pub fn now(&self) -> Option<TimeEstimate> {
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        let sample = memory.latest.as_ref()?;
        let boot_ms = self.clock.milliseconds();
        let unix = |ms| UnixTime::since_unix_epoch(Duration::from_millis(ms));
        Some(if sample.boot_id == self.clock.boot_id() {
            TimeEstimate::Exact(unix(sample.unix_ms_at(boot_ms)))
        } else {
            TimeEstimate::AtLeast(unix(sample.unix_ms.saturating_add(boot_ms)))
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Mutex;

    use super::*;

    /// A boot clock that a test sets.
    #[derive(Debug)]
    pub(crate) struct ManualClock(Mutex<(&'static str, u64)>);

    impl ManualClock {
        pub(crate) fn new() -> Arc<Self> {
            Arc::new(Self(Mutex::new(("first", 1000))))
        }

        pub(crate) fn set_time(&self, boot: &'static str, milliseconds: u64) {
            *self.0.lock().unwrap() = (boot, milliseconds);
        }
    }

    impl BootClock for ManualClock {
        fn boot_id(&self) -> String {
            self.0.lock().unwrap().0.to_owned()
        }

        fn milliseconds(&self) -> u64 {
            self.0.lock().unwrap().1
        }
    }

    fn exactly(ms: u64) -> TimeEstimate {
        TimeEstimate::Exact(UnixTime::since_unix_epoch(Duration::from_millis(ms)))
    }

    fn at_least(ms: u64) -> TimeEstimate {
        TimeEstimate::AtLeast(UnixTime::since_unix_epoch(Duration::from_millis(ms)))
    }

    #[test]
    fn time_goes_on_with_the_boot_and_is_a_floor_after_a_reboot() {
        let clock = ManualClock::new();
        let time = TrustedTime::new(clock.clone(), None);
        assert_eq!(time.now(), None);
        assert_eq!(time.observe(0), None);
        assert_eq!(time.observe(-5), None);
        assert_eq!(time.now(), None, "a time that is not positive is ignored");
        let sample = time.observe(500_000).unwrap();
        clock.set_time("first", 4000);
        assert_eq!(time.now(), Some(exactly(503_000)));
        clock.set_time("second", 2000);
        assert_eq!(time.now(), Some(at_least(502_000)));
        let after = TrustedTime::new(clock.clone(), Some(sample));
        assert_eq!(after.now(), Some(at_least(502_000)), "it was kept");
        after.observe(900_000);
        assert_eq!(after.now(), Some(exactly(900_000)));
    }

    #[test]
    fn earlier_time_is_accepted_too() {
        let time = TrustedTime::new(ManualClock::new(), None);
        time.observe(900_000_000);
        time.observe(500_000);
        assert_eq!(time.now(), Some(exactly(500_000)));
    }

    #[test]
    fn time_is_saved_at_first_each_hour_and_when_it_jumps() {
        let clock = ManualClock::new();
        let kept = TimeSample::from_server_time(&*clock, 500_000);
        let time = TrustedTime::new(clock.clone(), kept);
        assert!(time.observe(500_000).is_some(), "each start of the agent writes it once");
        for minute in 1..60 {
            clock.set_time("first", 1000 + minute * 60_000);
            assert_eq!(time.observe(500_000 + i64::try_from(minute).unwrap() * 60_000), None, "{minute}");
        }
        clock.set_time("first", 1000 + 3_600_000);
        assert!(time.observe(500_000 + 3_600_000).is_some());
        assert_eq!(time.observe(500_000 + 3_659_000), None);
        assert!(time.observe(500_000 + 3_660_000).is_some(), "a minute off");
    }
}
