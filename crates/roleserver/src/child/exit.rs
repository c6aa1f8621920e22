//! Wait for a process to exit, including one that is not our child.
//!
//! A role server that took over from a dead one watches processes that were children of the dead one. A pidfd becomes
//! readable when a process ends (`pidfd_open(2)`), so it learns that they end, but not how: only a parent gets the
//! status.

use std::fmt;
use std::os::fd::{AsFd as _, OwnedFd};

use rustix::process::{WaitId, WaitIdOptions, waitid};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChildExit {
    /// By itself, with this status.
    Exited(i32),
    /// Killed by the signal with this number.
    Killed(i32),
    /// It ended; another process, its parent, has the status.
    Unknown,
}

impl fmt::Display for ChildExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(0) => f.write_str("it ended by itself with status 0 (success)"),
            Self::Exited(status) => write!(f, "it ended by itself with status {status}"),
            Self::Killed(signal) => write!(f, "signal {signal} ended it"),
            Self::Unknown => f.write_str(
                "it ended; its exit status is unknown, because it was not a child of this role server",
            ),
        }
    }
}

/// Waits until the process of this handle has ended.
///
/// Cancel-safe: after a drop, the exit can be waited for again.
pub async fn wait_for_exit(handle: &OwnedFd) -> std::io::Result<ChildExit> {
    // A copy, because a runtime watches a descriptor only once, and an aborted wait for the same handle may not be gone yet.
    let copy = handle.try_clone()?;
    // SAFETY: the descriptor is registered by its number. The registration owns it, so the number refers to nothing else
    // meanwhile. It is used only to wait.
    let watched = unsafe { AsyncFd::register_with_interest(copy, Interest::READABLE) }?;
    watched.readable().await?.retain_ready();
    reap_child(handle)
}

/// Reaps a child, so that no zombie stays.
fn reap_child(handle: &OwnedFd) -> std::io::Result<ChildExit> {
    match waitid(WaitId::PidFd(handle.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
        Ok(Some(status)) => Ok(match (status.exit_status(), status.terminating_signal()) {
            (Some(status), _) => ChildExit::Exited(status),
            (None, Some(signal)) => ChildExit::Killed(signal),
            (None, None) => ChildExit::Unknown,
        }),
        Ok(None) | Err(rustix::io::Errno::CHILD) => Ok(ChildExit::Unknown),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::process::{Command, Stdio};

    use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

    #[expect(clippy::zombie_processes, reason = "what is tested is who waits for it")]
    async fn exit_of(script: &str, signal: Option<Signal>) -> ChildExit {
        let child = Command::new("sh").args(["-c", script]).stdin(Stdio::null()).spawn().unwrap();
        let pid = Pid::from_child(&child);
        let handle = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        if let Some(signal) = signal {
            pidfd_send_signal(&handle, signal).unwrap();
        }
        wait_for_exit(&handle).await.unwrap()
    }

    #[tokio::test]
    async fn exit_can_be_waited_for_twice_at_once() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let handle = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        let (first, second) = (wait_for_exit(&handle), wait_for_exit(&handle));
        let killing = async { pidfd_send_signal(&handle, Signal::KILL).unwrap() };
        let (first, second, ()) = tokio::join!(first, second, killing);
        assert!(first.is_ok() && second.is_ok(), "{first:?} {second:?}");
        let _ = child.wait();
    }

    #[tokio::test]
    async fn parent_learns_how_its_child_exited() {
        assert_eq!(exit_of("exit 0", None).await, ChildExit::Exited(0));
        assert_eq!(exit_of("exit 3", None).await, ChildExit::Exited(3));
        assert_eq!(exit_of("exec sleep 600", Some(Signal::KILL)).await, ChildExit::Killed(9));
    }

    #[tokio::test]
    async fn others_learn_only_that_it_exited() {
        // A child of a child, which prints its pid.
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
        assert_eq!(wait_for_exit(&handle).await.unwrap(), ChildExit::Unknown);
        middle.wait().unwrap();
    }
}
