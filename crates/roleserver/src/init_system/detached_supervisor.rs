//! The detached supervisor: restarts the agent where there is no init system.
//!
//! `roleserver supervise` leads a session of its own, so it outlives the SSH session that enrolled the machine. It does
//! one thing: run `roleserver run` and, when that ends, run it again. It does not survive a reboot; then the shepherd
//! sees silence and takes the machine over once more.

use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use backoff::ExponentialBackoff;
use hardening::file_limit::UsualFileLimit as _;
use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::child::log;
use crate::process::empty_stdin;
use crate::state_directory::StateDirectory;

/// How long an agent may take to end after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// An agent that ran this long did not end because of how it was started.
const STABLE_AFTER: Duration = Duration::from_mins(1);
/// The delays before restarts.
const RESTART_BACKOFF: ExponentialBackoff =
    ExponentialBackoff { initial: Duration::from_secs(1), factor: 2.0, max: Duration::from_mins(1) };
const LOG_CHECK_INTERVAL: Duration = Duration::from_mins(1);

/// An operation that failed and ended the supervisor.
#[derive(Debug, thiserror::Error)]
#[error("{operation} failed: {source}")]
pub struct SupervisorError {
    operation: &'static str,
    source: std::io::Error,
}

fn io_error(doing: &'static str) -> impl FnOnce(std::io::Error) -> SupervisorError {
    move |source| SupervisorError { operation: doing, source }
}

/// Keeps `program run` alive until SIGTERM or SIGINT, then stops it too.
pub async fn supervise_agent(program: &Path, state: &StateDirectory) -> Result<(), SupervisorError> {
    let mut terminate = signal(SignalKind::terminate()).map_err(io_error("listening for SIGTERM"))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(io_error("listening for SIGINT"))?;
    // The end of an SSH session may send SIGHUP to all it started; it is not meant for us.
    let mut hangup = signal(SignalKind::hangup()).map_err(io_error("listening for SIGHUP"))?;
    let mut quick_ends = 0;
    loop {
        let started = Instant::now();
        let ended = match start_agent(program, state) {
            Ok(mut child) => {
                match watch_agent(&mut child, state, [&mut terminate, &mut interrupt], &mut hangup).await? {
                    Some(status) => format!("the agent ended ({status})"),
                    None => return stop_agent(child).await,
                }
            }
            // No memory, no free process, a disk that no longer responds: all of these may pass.
            Err(error) => format!("the agent could not be started ({error})"),
        };
        quick_ends = if started.elapsed() >= STABLE_AFTER { 1 } else { quick_ends + 1 };
        let pause = RESTART_BACKOFF.nominal(quick_ends);
        tracing::warn!(pause_seconds = pause.as_secs(), "{ended}; it is started again");
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
        }
    }
}

fn start_agent(program: &Path, state: &StateDirectory) -> std::io::Result<Child> {
    // An agent without a readable log still sends heartbeats; one that was not started does not.
    let output = || log::open_log(&state.log_path()).map_or_else(|_| Stdio::inherit(), Stdio::from);
    let mut command = Command::new(program);
    command
        .arg("run")
        .arg("--state_dir")
        .arg(state.path())
        .stdin(empty_stdin()?)
        .stdout(output())
        .stderr(output())
        .kill_on_drop(true);
    hardening::restore_core_limit(command.as_std_mut().usual_file_limit());
    command.spawn()
}

/// Waits for the agent's exit; `None` after a signal to end both.
async fn watch_agent(
    child: &mut Child,
    state: &StateDirectory,
    [terminate, interrupt]: [&mut Signal; 2],
    hangup: &mut Signal,
) -> Result<Option<ExitStatus>, SupervisorError> {
    loop {
        tokio::select! {
            status = child.wait() => return status.map(Some).map_err(io_error("waiting for the agent")),
            _ = terminate.recv() => return Ok(None),
            _ = interrupt.recv() => return Ok(None),
            _ = hangup.recv() => {}
            () = tokio::time::sleep(LOG_CHECK_INTERVAL) => {
                if let Err(error) = log::truncate_if_large(&state.log_path()) {
                    tracing::warn!(%error, "the agent's log could not be shortened");
                }
            }
        }
    }
}

async fn stop_agent(mut child: Child) -> Result<(), SupervisorError> {
    let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(rustix::process::Pid::from_raw);
    if let Some(pid) = pid {
        // Our own child that was not reaped yet: the pid is still its own.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
    if tokio::time::timeout(STOP_TIMEOUT, child.wait()).await.is_err() {
        child.kill().await.map_err(io_error("killing the agent"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::fs::OpenOptions;
    use std::os::unix::fs::OpenOptionsExt as _;

    #[test]
    fn restart_delay_grows_with_quick_exits_up_to_a_minute() {
        let seconds: Vec<_> = (1..=8).map(|ends| RESTART_BACKOFF.nominal(ends).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(RESTART_BACKOFF.nominal(0), Duration::from_secs(1));
        assert_eq!(RESTART_BACKOFF.nominal(u32::MAX), Duration::from_mins(1));
    }

    #[tokio::test]
    async fn program_that_cannot_be_started_is_tried_again() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(directory.path()).unwrap();
        let (program, marker) = (directory.path().join("program"), directory.path().join("ran"));
        let supervising = tokio::spawn({
            let (program, state) = (program.clone(), state.clone());
            async move { supervise_agent(&program, &state).await.map_err(|error| error.to_string()) }
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
        // This ends its child, too.
        supervising.abort();
    }
}
