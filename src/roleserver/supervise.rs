//! The process that starts the agent again, where no init system does it.
//!
//! `roleserver supervise` leads a session of its own, so it outlives the SSH
//! session that enrolled the machine, and does one thing: run `roleserver run`
//! and, when that ends, run it again. It does not survive a reboot; then the
//! shepherd sees silence and takes the machine over once more.

use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::roleserver::child::log;
use crate::roleserver::state_directory::StateDirectory;

/// How long an agent may take to end when asked.
const GRACE: Duration = Duration::from_secs(5);
/// An agent that ran this long was not ended by what it was started with.
const SETTLED: Duration = Duration::from_mins(1);
const LONGEST_PAUSE: Duration = Duration::from_mins(1);
const LOG_CHECK: Duration = Duration::from_mins(1);

/// Why supervising ended.
#[derive(Debug, thiserror::Error)]
#[error("{doing} failed: {source}")]
pub struct SuperviseError {
    doing: &'static str,
    source: std::io::Error,
}

fn failed(doing: &'static str) -> impl FnOnce(std::io::Error) -> SuperviseError {
    move |source| SuperviseError { doing, source }
}

/// The pause before the agent is started again, after so many quick ends in a row.
#[must_use]
pub fn pause(quick_ends: u32) -> Duration {
    Duration::from_secs(1)
        .saturating_mul(2_u32.saturating_pow(quick_ends.saturating_sub(1)))
        .min(LONGEST_PAUSE)
}

/// Keeps `program run` alive until SIGTERM or SIGINT, then ends it too.
pub async fn supervise(program: &Path, state: &StateDirectory) -> Result<(), SuperviseError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(failed("listening for SIGTERM"))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed("listening for SIGINT"))?;
    // The end of an SSH session may say this to all it started; it is not meant for us.
    let mut hangup = signal(SignalKind::hangup()).map_err(failed("listening for SIGHUP"))?;
    let mut quick_ends = 0;
    loop {
        let started = Instant::now();
        let ended = match start(program, state) {
            Ok(mut child) => {
                match watch(&mut child, state, [&mut terminate, &mut interrupt], &mut hangup).await? {
                    Some(status) => format!("the agent ended ({status})"),
                    None => return end(child).await,
                }
            }
            // No memory, no process left, a disk that answers no more: all of that may pass.
            Err(error) => format!("the agent could not be started ({error})"),
        };
        quick_ends = if started.elapsed() >= SETTLED { 1 } else { quick_ends + 1 };
        let pause = pause(quick_ends);
        tracing::warn!(pause_seconds = pause.as_secs(), "{ended}; it is started again");
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
        }
    }
}

/// A standard input that has ended. There may be no `/dev/null` to stand in for it.
pub fn no_input() -> std::io::Result<Stdio> {
    let (read, _ended_when_dropped) = std::io::pipe()?;
    Ok(read.into())
}

fn start(program: &Path, state: &StateDirectory) -> std::io::Result<Child> {
    // An agent that nobody can read calls; one that was not started does not.
    let output = || log::open(&state.log_path()).map_or_else(|_| Stdio::inherit(), Stdio::from);
    Command::new(program)
        .arg("run")
        .arg("--state_dir")
        .arg(state.path())
        .stdin(no_input()?)
        .stdout(output())
        .stderr(output())
        .kill_on_drop(true)
        .spawn()
}

/// Waits for the agent's end; `None` when somebody wants the end of both.
async fn watch(
    child: &mut Child,
    state: &StateDirectory,
    [terminate, interrupt]: [&mut Signal; 2],
    hangup: &mut Signal,
) -> Result<Option<ExitStatus>, SuperviseError> {
    loop {
        tokio::select! {
            status = child.wait() => return status.map(Some).map_err(failed("waiting for the agent")),
            _ = terminate.recv() => return Ok(None),
            _ = interrupt.recv() => return Ok(None),
            _ = hangup.recv() => {}
            () = tokio::time::sleep(LOG_CHECK) => {
                if let Err(error) = log::limit(&state.log_path()) {
                    tracing::warn!(%error, "the agent's log could not be shortened");
                }
            }
        }
    }
}

async fn end(mut child: Child) -> Result<(), SuperviseError> {
    let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(rustix::process::Pid::from_raw);
    if let Some(pid) = pid {
        // Our own child that was not reaped yet: the pid is still its.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
    if tokio::time::timeout(GRACE, child.wait()).await.is_err() {
        child.kill().await.map_err(failed("killing the agent"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::fs::OpenOptions;
    use std::os::unix::fs::OpenOptionsExt as _;

    #[test]
    fn pause_grows_with_quick_ends_up_to_a_minute() {
        let seconds: Vec<_> = (1..=8).map(|ends| pause(ends).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(pause(0), Duration::from_secs(1));
        assert_eq!(pause(u32::MAX), LONGEST_PAUSE);
    }

    #[tokio::test]
    async fn program_that_cannot_be_started_is_tried_again() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(directory.path()).unwrap();
        let (program, marker) = (directory.path().join("program"), directory.path().join("ran"));
        let supervising = tokio::spawn({
            let (program, state) = (program.clone(), state.clone());
            async move { supervise(&program, &state).await.map_err(|error| error.to_string()) }
        });
        let text = format!("#!/bin/sh\ntouch {}\nexec sleep 60\n", marker.display());
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o700).open(&program).unwrap();
        std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
        drop(file);
        let ran = async {
            while !marker.exists() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_mins(1), ran).await.unwrap();
        // Ends its child, too.
        supervising.abort();
    }
}
