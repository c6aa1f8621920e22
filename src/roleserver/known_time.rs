//! What time it is, as a shepherd said.
//!
//! A machine's own clock may be anywhere: a battery that is empty starts it in
//! 1970, a technician sets it to local time, nothing corrects it before there is
//! a network. The certificate of a callback server has a time to be valid in,
//! and a machine that judges it by such a clock never calls again. So the
//! shepherd says its time with the enrolment and with each answer, and the
//! machine remembers where in its boot that was.
//!
//! Within that boot the time is known from then on: the boot clock counts the
//! same whatever the wall clock does. After a reboot nobody knows how long the
//! machine was off; it is *at least* as late as was said last, and that long has
//! passed since the boot. The last time is kept on the disk for this, at the
//! first answer of each start and then each hour, not with each heartbeat.
//!
//! What was said last replaces what was said before, an earlier time too: were
//! only later ones believed, one shepherd whose clock ran a year ahead would
//! have shut out all others for good.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use rustls::pki_types::UnixTime;
use serde::{Deserialize, Serialize};

use crate::roleserver::clock::BootClock;

/// So much later, what was said is worth another write.
const KEEP_EACH_MS: u64 = 3_600_000;
/// A difference from what was kept that is worth a write at once.
const KEEP_DIFFERENCE_MS: u64 = 60_000;

/// A time that a shepherd said, and where in a boot it did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    /// Milliseconds since 1970-01-01 UTC.
    pub unix_ms: u64,
    /// The boot in which it was said.
    pub boot_id: String,
    /// Milliseconds of that boot.
    pub boot_ms: u64,
}

impl Told {
    /// What is said now; none when nothing was (0) or nonsense (before 1970).
    pub fn here(clock: &dyn BootClock, unix_ms: i64) -> Option<Self> {
        let unix_ms = u64::try_from(unix_ms).ok().filter(|said| *said > 0)?;
        Some(Self { unix_ms, boot_id: clock.boot_id(), boot_ms: clock.milliseconds() })
    }

    /// What time it was at `boot_ms` of the same boot, by this.
    const fn at(&self, boot_ms: u64) -> u64 {
        self.unix_ms.saturating_add(boot_ms.saturating_sub(self.boot_ms))
    }

    /// Whether `next` says so much more than this that it should be written down.
    fn is_outdated_by(&self, next: &Self) -> bool {
        self.boot_id != next.boot_id
            || next.boot_ms.saturating_sub(self.boot_ms) >= KEEP_EACH_MS
            || next.unix_ms.abs_diff(self.at(next.boot_ms)) >= KEEP_DIFFERENCE_MS
    }
}

/// What can be said of the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// It is that time.
    Exactly(UnixTime),
    /// It is that time or, after a reboot, any later one.
    AtLeast(UnixTime),
}

/// The time, as far as a shepherd said it.
#[derive(Debug)]
pub struct KnownTime {
    clock: Arc<dyn BootClock>,
    memory: RwLock<Memory>,
}

#[derive(Debug)]
struct Memory {
    told: Option<Told>,
    /// What the disk has, as far as this start of the agent knows; none until it has kept something.
    kept: Option<Told>,
}

impl KnownTime {
    /// Knows what was kept.
    #[must_use]
    pub fn new(clock: Arc<dyn BootClock>, told: Option<Told>) -> Self {
        Self { clock, memory: RwLock::new(Memory { told, kept: None }) }
    }

    /// Hears what time it is, in milliseconds since 1970; 0 says nothing. Returns what should be
    /// written down now, if anything.
    pub fn hear(&self, unix_ms: i64) -> Option<Told> {
        let told = Told::here(&*self.clock, unix_ms)?;
        let mut memory = self.memory.write().unwrap_or_else(PoisonError::into_inner);
        memory.told = Some(told.clone());
        if memory.kept.as_ref().is_some_and(|kept| !kept.is_outdated_by(&told)) {
            return None;
        }
        memory.kept = Some(told.clone());
        Some(told)
    }

    /// What time it is; none when nobody ever said it.
    #[must_use]
    pub fn now(&self) -> Option<Known> {
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        let told = memory.told.as_ref()?;
        let boot_ms = self.clock.milliseconds();
        let unix = |ms| UnixTime::since_unix_epoch(Duration::from_millis(ms));
        Some(if told.boot_id == self.clock.boot_id() {
            Known::Exactly(unix(told.at(boot_ms)))
        } else {
            Known::AtLeast(unix(told.unix_ms.saturating_add(boot_ms)))
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Mutex;

    use super::*;

    /// A boot clock that a test turns.
    #[derive(Debug)]
    pub(crate) struct Turned(Mutex<(&'static str, u64)>);

    impl Turned {
        pub(crate) fn new() -> Arc<Self> {
            Arc::new(Self(Mutex::new(("first", 1000))))
        }

        pub(crate) fn turn(&self, boot: &'static str, milliseconds: u64) {
            *self.0.lock().unwrap() = (boot, milliseconds);
        }
    }

    impl BootClock for Turned {
        fn boot_id(&self) -> String {
            self.0.lock().unwrap().0.to_owned()
        }

        fn milliseconds(&self) -> u64 {
            self.0.lock().unwrap().1
        }
    }

    fn exactly(ms: u64) -> Known {
        Known::Exactly(UnixTime::since_unix_epoch(Duration::from_millis(ms)))
    }

    fn at_least(ms: u64) -> Known {
        Known::AtLeast(UnixTime::since_unix_epoch(Duration::from_millis(ms)))
    }

    #[test]
    fn time_goes_on_with_the_boot_and_is_a_floor_after_a_reboot() {
        let clock = Turned::new();
        let time = KnownTime::new(clock.clone(), None);
        assert_eq!(time.now(), None);
        assert_eq!(time.hear(0), None);
        assert_eq!(time.hear(-5), None);
        assert_eq!(time.now(), None, "nothing was said");
        let told = time.hear(500_000).unwrap();
        clock.turn("first", 4000);
        assert_eq!(time.now(), Some(exactly(503_000)));
        clock.turn("second", 2000);
        assert_eq!(time.now(), Some(at_least(502_000)));
        let after = KnownTime::new(clock.clone(), Some(told));
        assert_eq!(after.now(), Some(at_least(502_000)), "it was kept");
        after.hear(900_000);
        assert_eq!(after.now(), Some(exactly(900_000)));
    }

    #[test]
    fn earlier_time_is_believed_too() {
        let time = KnownTime::new(Turned::new(), None);
        time.hear(900_000_000);
        time.hear(500_000);
        assert_eq!(time.now(), Some(exactly(500_000)));
    }

    #[test]
    fn time_is_written_down_at_first_each_hour_and_when_it_jumps() {
        let clock = Turned::new();
        let kept = Told::here(&*clock, 500_000);
        let time = KnownTime::new(clock.clone(), kept);
        assert!(time.hear(500_000).is_some(), "each start of the agent writes it once");
        for minute in 1..60 {
            clock.turn("first", 1000 + minute * 60_000);
            assert_eq!(time.hear(500_000 + i64::try_from(minute).unwrap() * 60_000), None, "{minute}");
        }
        clock.turn("first", 1000 + 3_600_000);
        assert!(time.hear(500_000 + 3_600_000).is_some());
        assert_eq!(time.hear(500_000 + 3_659_000), None);
        assert!(time.hear(500_000 + 3_660_000).is_some(), "a minute off");
    }
}
