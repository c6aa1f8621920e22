//! The boot clock: boot id and milliseconds since boot.
//!
//! A heartbeat's position in time is (boot id, milliseconds of `CLOCK_BOOTTIME`). No wall clock is read, because a
//! machine whose clock is wrong must still count as alive, and the boot clock grows over restarts of the agent and over
//! suspension. A simulated machine has a clock of its own.

use std::io;

/// The kernel's file with the boot id.
const BOOT_ID_PATH: &str = "/proc/sys/kernel/random/boot_id";

/// A clock that returns the boot and the time since it began.
pub trait BootClock: std::fmt::Debug + Send + Sync {
    /// UUID of the running boot, hyphenated lower case.
    fn boot_id(&self) -> String;
    /// Milliseconds since that boot began, never falling.
    fn milliseconds(&self) -> u64;
}

/// The clock of the host this program runs on.
#[derive(Clone, Debug)]
pub struct HostClock {
    boot_id: String,
}

impl HostClock {
    /// Reads the boot id once; it cannot change while the program lives.
    pub fn read() -> io::Result<Self> {
        let boot_id = std::fs::read_to_string(BOOT_ID_PATH).map_err(|error| {
            let sentence = format!("{BOOT_ID_PATH} cannot be read: {error}; is /proc mounted?");
            io::Error::new(error.kind(), sentence)
        })?;
        Ok(Self { boot_id: boot_id.trim().to_owned() })
    }
}

impl BootClock for HostClock {
    fn boot_id(&self) -> String {
        self.boot_id.clone()
    }

    fn milliseconds(&self) -> u64 {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let nanoseconds = u64::try_from(time.tv_nsec).unwrap_or(0);
        seconds * 1000 + nanoseconds / 1_000_000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_clock_names_this_boot_and_does_not_fall() {
        let clock = HostClock::read().unwrap();
        assert!(uuid::Uuid::parse_str(&clock.boot_id()).is_ok());
        let first = clock.milliseconds();
        assert!(first > 0);
        assert!(clock.milliseconds() >= first);
    }
}
