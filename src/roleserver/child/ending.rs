//! How a process ended, also one that is not a child of ours.
//!
//! A role server that took over from a dead one watches processes that were children of that one. It can learn when they
//! end, by a handle that becomes readable then (`pidfd_open(2)`), and not how: that is told to a parent alone.

use std::fmt;
use std::os::fd::{AsFd as _, OwnedFd};

use rustix::process::{WaitId, WaitIdOptions, waitid};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// By itself, with this status.
    Exited(i32),
    /// By this signal.
    Killed(i32),
    /// Somebody else was told.
    Unknown,
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(0) => f.write_str("it ended by itself, and said that all was well"),
            Self::Exited(status) => write!(f, "it ended by itself with status {status}"),
            Self::Killed(signal) => write!(f, "signal {signal} ended it"),
            Self::Unknown => {
                f.write_str("it ended; it was no child of this role server, which is not told how")
            }
        }
    }
}

/// Waits until the process of this handle has ended.
///
/// Whoever drops this has lost nothing: it can be waited for again.
pub async fn ended(handle: &OwnedFd) -> std::io::Result<Ending> {
    // SAFETY: it is registered by the number that it has, which stays its own for as long as it is borrowed here, and
    // nothing else is ever done with it but waiting and asking how the process ended.
    let watched = unsafe { AsyncFd::register_with_interest(handle.as_fd(), Interest::READABLE) }?;
    watched.readable().await?.retain_ready();
    reap(handle)
}

/// Takes note of the end of a child, so that nothing of it stays.
fn reap(handle: &OwnedFd) -> std::io::Result<Ending> {
    match waitid(WaitId::PidFd(handle.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
        Ok(Some(status)) => Ok(match (status.exit_status(), status.terminating_signal()) {
            (Some(status), _) => Ending::Exited(status),
            (None, Some(signal)) => Ending::Killed(signal),
            (None, None) => Ending::Unknown,
        }),
        Ok(None) | Err(rustix::io::Errno::CHILD) => Ok(Ending::Unknown),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::process::{Command, Stdio};

    use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

    #[expect(clippy::zombie_processes, reason = "what is tested is who waits for it")]
    async fn ending_of(script: &str, signal: Option<Signal>) -> Ending {
        let child = Command::new("sh").args(["-c", script]).stdin(Stdio::null()).spawn().unwrap();
        let pid = Pid::from_child(&child);
        let handle = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        if let Some(signal) = signal {
            pidfd_send_signal(&handle, signal).unwrap();
        }
        ended(&handle).await.unwrap()
    }

    #[tokio::test]
    async fn parent_is_told_how_its_child_ended() {
        assert_eq!(ending_of("exit 0", None).await, Ending::Exited(0));
        assert_eq!(ending_of("exit 3", None).await, Ending::Exited(3));
        assert_eq!(ending_of("exec sleep 600", Some(Signal::KILL)).await, Ending::Killed(9));
    }

    #[tokio::test]
    async fn others_are_told_that_it_ended() {
        // A child of a child, which says who it is.
        let mut middle = Command::new("sh")
            .args(["-c", "sleep 600 >/dev/null & echo $!; wait"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(middle.stdout.as_mut().unwrap()), &mut line)
            .unwrap();
        let pid = Pid::from_raw(line.trim().parse().unwrap()).unwrap();
        let handle = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        pidfd_send_signal(&handle, Signal::TERM).unwrap();
        assert_eq!(ended(&handle).await.unwrap(), Ending::Unknown);
        middle.wait().unwrap();
    }
}
