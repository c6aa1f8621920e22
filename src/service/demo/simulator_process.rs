//! The simulator as a child process of a demo.
//!
//! It outlives the service and ends with the demo.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use clap::ValueEnum as _;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};

use crate::service::demo::flags::DemoFlags;
use crate::service::demo::fleet_service::find_roleserver;
use crate::service::failure::ExitFailure;
use hardening::file_limit::UsualFileLimit as _;

/// How long the simulator may take to start, and to stop.
const START_TIMEOUT: Duration = Duration::from_secs(30);
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of lines of its log that are shown when it fails.
const SHOWN_LINES: usize = 10;

/// A running simulator. Killed when dropped.
pub(super) struct SimulatorProcess {
    child: Child,
    url: String,
    log: PathBuf,
    /// The simulator ends when this pipe is closed: with this process, however it ends.
    _stdin: ChildStdin,
}

impl SimulatorProcess {
    /// Starts the simulator with its files in `directory`, and waits until it listens at `address`.
    pub(super) async fn start(
        me: &Path,
        demo: &DemoFlags,
        directory: &Path,
        address: SocketAddr,
    ) -> Result<Self, ExitFailure> {
        let wrong = |what: &str, error: &dyn std::fmt::Display| {
            ExitFailure::failed(format!("cannot start the simulator: {what}: {error}"))
        };
        let log = directory.join("simulator.log");
        let errors = std::fs::File::create(&log).map_err(|error| wrong("its log", &error))?;
        let faults = demo.faults.to_possible_value();
        let faults = faults.map(|value| value.get_name().to_owned()).unwrap_or_default();
        let mut command = Command::new(me);
        command
            .args(["simulator", "--listen_address", &address.to_string(), "--state_path"])
            .arg(directory.join("simulator.json"))
            .args(["--machine_count", &demo.machines.to_string(), "--seed", &demo.seed.to_string()])
            .args(["--fault_profile", &faults, "--exit_with_parent"])
            // With this program the machines can be nodes of clusters.
            .args(
                find_roleserver(me)
                    .into_iter()
                    .flat_map(|program| ["--roleserver_path".into(), program.into_os_string()]),
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            // Ctrl-C reaches a terminal's whole process group, but the machines must outlive the service.
            .process_group(0)
            .kill_on_drop(true);
        hardening::restore_core_limit(command.as_std_mut().usual_file_limit());
        let mut child = command.spawn().map_err(|error| wrong("its program", &error))?;
        let stdout = child.stdout.take().ok_or_else(|| wrong("its output", &"is not to be had"))?;
        let mut lines = BufReader::new(stdout).lines();
        let line = match tokio::time::timeout(START_TIMEOUT, lines.next_line()).await {
            Ok(Ok(Some(line))) => line,
            Ok(Ok(None)) => return Err(wrong("it ended", &last_lines(&log))),
            Ok(Err(error)) => return Err(wrong("its output", &error)),
            Err(_) => {
                return Err(wrong(
                    &format!("it was not ready within {} seconds", START_TIMEOUT.as_secs()),
                    &last_lines(&log),
                ));
            }
        };
        let url =
            line.strip_prefix("listening on ").ok_or_else(|| wrong("it announced no URL", &line))?.to_owned();
        // `wait` closes the child's stdin if the child still owns it, so it is taken out first.
        let hold = child.stdin.take().ok_or_else(|| wrong("its input", &"is not to be had"))?;
        Ok(Self { child, url, log, _stdin: hold })
    }

    /// The URL of its provider API.
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Returns if it ends by itself, which it should not.
    pub(super) async fn wait_for_exit(&mut self) -> ExitFailure {
        // An error of `wait` does not matter: there is nothing left to wait for.
        let _ = self.child.wait().await;
        ExitFailure::failed(format!(
            "the simulator ended by itself; its log ends:\n{}",
            last_lines(&self.log)
        ))
    }

    /// Stops the simulator, and kills it after `STOP_TIMEOUT`.
    pub(super) async fn stop(mut self) {
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok());
        if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
            // An error means that it has ended already, which is just as good.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        if tokio::time::timeout(STOP_TIMEOUT, self.child.wait()).await.is_err() {
            let _ = self.child.kill().await;
        }
    }
}

fn last_lines(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n")
}
