//! The simulator of a demo: a process of its own, which outlives the service and ends with the demo.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use clap::ValueEnum as _;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};

use crate::service::demo::DemoFlags;
use crate::service::demo::fleet_service::roleserver;
use crate::service::failure::Failure;

/// How long the simulator may take to start, and to end.
const START_LIMIT: Duration = Duration::from_secs(30);
const END_LIMIT: Duration = Duration::from_secs(10);
/// Lines of its log that are shown when it fails.
const SHOWN_LINES: usize = 10;

/// A simulator that runs. Killed when dropped.
pub(super) struct Simulator {
    child: Child,
    url: String,
    log: PathBuf,
    /// The simulator ends when this does: with us, however we end.
    _hold: ChildStdin,
}

impl Simulator {
    /// Starts it, with what it keeps in `directory`, and waits until it listens.
    pub(super) async fn start(me: &Path, demo: &DemoFlags, directory: &Path) -> Result<Self, Failure> {
        let wrong = |what: &str, error: &dyn std::fmt::Display| {
            Failure::failed(format!("cannot start the simulator: {what}: {error}"))
        };
        let log = directory.join("simulator.log");
        let errors = std::fs::File::create(&log).map_err(|error| wrong("its log", &error))?;
        let faults = demo.faults.to_possible_value();
        let faults = faults.map(|value| value.get_name().to_owned()).unwrap_or_default();
        let mut child = Command::new(me)
            .args(["simulator", "--listen", "127.0.0.1:0", "--state"])
            .arg(directory.join("simulator.json"))
            .args(["--machines", &demo.machines.to_string(), "--seed", &demo.seed.to_string()])
            .args(["--faults", &faults, "--exit_with_parent"])
            // With it the machines can be nodes of clusters.
            .args(
                roleserver(me)
                    .into_iter()
                    .flat_map(|program| ["--roleserver".into(), program.into_os_string()]),
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            // Ctrl-C reaches a terminal's whole group; the machines must outlive the service.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| wrong("its program", &error))?;
        let stdout = child.stdout.take().ok_or_else(|| wrong("its output", &"is not to be had"))?;
        let mut lines = BufReader::new(stdout).lines();
        let line = match tokio::time::timeout(START_LIMIT, lines.next_line()).await {
            Ok(Ok(Some(line))) => line,
            Ok(Ok(None)) => return Err(wrong("it ended", &last_lines(&log))),
            Ok(Err(error)) => return Err(wrong("its output", &error)),
            Err(_) => {
                return Err(wrong(
                    &format!("it was not ready within {} seconds", START_LIMIT.as_secs()),
                    &last_lines(&log),
                ));
            }
        };
        let url = line.strip_prefix("listening on ").ok_or_else(|| wrong("it said", &line))?.to_owned();
        // Waiting for a child closes the end of the pipe that it still owns.
        let hold = child.stdin.take().ok_or_else(|| wrong("its input", &"is not to be had"))?;
        Ok(Self { child, url, log, _hold: hold })
    }

    /// Where its provider API is.
    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Returns when it has ended by itself, which it should not.
    pub(super) async fn died(&mut self) -> Failure {
        // Whatever waiting says, there is nothing left to wait for.
        let _ = self.child.wait().await;
        Failure::failed(format!("the simulator ended by itself; it said:\n{}", last_lines(&self.log)))
    }

    /// Ends it.
    pub(super) async fn end(mut self) {
        let pid = self.child.id().and_then(|pid| i32::try_from(pid).ok());
        if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
            // Gone already is as good.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        if tokio::time::timeout(END_LIMIT, self.child.wait()).await.is_err() {
            let _ = self.child.kill().await;
        }
    }
}

fn last_lines(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(SHOWN_LINES)..].join("\n")
}
