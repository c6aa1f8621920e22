//! What keeps the agent alive, and making sure that it does.
//!
//! Where systemd is PID 1, root gets a system unit and an ordinary user with a
//! user manager a user unit; everybody else gets a detached supervisor
//! ([`crate::roleserver::supervise`]).
//!
//! After an enrolment the right agent runs: the same program, started for the
//! newest revision of the enrolment. One that already is that is left alone;
//! any other (dead, hung, older program, lower fence) is stopped and started
//! anew. A takeover claims with a higher fence each time, so a takeover of a
//! hung agent always ends in a fresh one.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::proto::agent::v1 as wire;
use crate::roleserver::child::log;
use crate::roleserver::running::Process;
use crate::roleserver::state_directory::StateDirectory;
use crate::roleserver::supervise;
use crate::roleserver::systemd::{self, Systemd, SystemdError};

/// How long an agent may take to end when asked.
const GRACE: Duration = Duration::from_secs(5);
/// How long a started agent may take to record itself, on a host that has little time for it. With what stopping
/// the one before takes at most it is less than an enrolment's SSH command is given.
const START: Duration = Duration::from_secs(30);

/// What a person asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// systemd where it runs, detached elsewhere.
    Auto,
    /// A systemd unit or nothing.
    Systemd,
    /// A detached supervisor, whatever else there is.
    Detached,
    /// Somebody else keeps `roleserver run` alive.
    External,
}

/// What is found on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// systemd is PID 1.
    pub systemd: bool,
    /// This program runs as root.
    pub root: bool,
    /// A systemd user manager runs for this user.
    pub user_manager: bool,
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// A unit of the system manager.
    SystemUnit,
    /// A unit of the user's manager.
    UserUnit,
    /// A detached supervisor.
    Detached,
    /// Nothing.
    External,
}

/// Why no agent runs.
#[derive(Debug, thiserror::Error)]
pub enum SupervisionError {
    /// The wish cannot be fulfilled on this host.
    #[error("--supervision systemd was asked for, but no systemd manager for this user runs here")]
    NoSystemd,
    /// The system said no.
    #[error("{doing} failed: {source}")]
    Io {
        /// What was being done.
        doing: String,
        /// What happened.
        source: std::io::Error,
    },
    /// The state directory said no.
    #[error(transparent)]
    State(#[from] crate::roleserver::state_directory::StateError),
    /// systemd said no.
    #[error(transparent)]
    Systemd(#[from] SystemdError),
    /// The agent was started and is not there.
    #[error("the agent was started but does not run after {} s; it last said: {said}", START.as_secs())]
    DoesNotRun {
        /// The end of its log.
        said: String,
    },
}

/// The agent that should run.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The program file.
    pub program: PathBuf,
    /// Its digest.
    pub program_sha256: String,
    /// The revision of the enrolment.
    pub revision: u64,
}

/// Chooses.
pub const fn plan(wish: Wish, host: Host) -> Result<Plan, SupervisionError> {
    match wish {
        Wish::External => Ok(Plan::External),
        Wish::Auto | Wish::Systemd if host.systemd && host.root => Ok(Plan::SystemUnit),
        Wish::Auto | Wish::Systemd if host.systemd && host.user_manager => Ok(Plan::UserUnit),
        Wish::Detached | Wish::Auto => Ok(Plan::Detached),
        Wish::Systemd => Err(SupervisionError::NoSystemd),
    }
}

/// Looks at the host.
#[must_use]
pub fn look() -> Host {
    let uid = rustix::process::geteuid();
    Host {
        systemd: Path::new("/run/systemd/system").is_dir(),
        root: uid.is_root(),
        user_manager: systemd::runtime_directory().join("systemd/private").exists(),
    }
}

/// Makes sure that the wanted agent runs; returns what keeps it alive and what
/// did not stop that.
pub fn ensure(
    plan: Plan,
    systemd: &Systemd,
    state: &StateDirectory,
    wanted: &Wanted,
) -> Result<(wire::Supervision, Vec<String>), SupervisionError> {
    match plan {
        Plan::External => {
            // Whoever keeps the agent alive starts the right one when the wrong one ends.
            if !runs(state, wanted)?
                && let Some(agent) = state.agent()?
            {
                stop(&agent, "agent")?;
            }
            Ok((wire::Supervision::External, Vec::new()))
        }
        Plan::Detached => {
            ensure_detached(state, wanted)?;
            Ok((wire::Supervision::Detached, Vec::new()))
        }
        Plan::SystemUnit => {
            ensure_unit(systemd, state, wanted)?;
            Ok((wire::Supervision::Systemd, Vec::new()))
        }
        Plan::UserUnit => match ensure_unit(systemd, state, wanted) {
            Ok(()) => Ok((wire::Supervision::Systemd, systemd::linger().err().into_iter().collect())),
            // A user manager may refuse what a process may still do.
            Err(error) => {
                ensure_detached(state, wanted)?;
                Ok((wire::Supervision::Detached, vec![format!("no systemd user unit: {error}")]))
            }
        },
    }
}

fn ensure_detached(state: &StateDirectory, wanted: &Wanted) -> Result<(), SupervisionError> {
    let supervised = state
        .supervisor()?
        .is_some_and(|process| process.is_alive() && process.program_sha256 == wanted.program_sha256);
    if supervised && runs(state, wanted)? {
        return Ok(());
    }
    stop_detached(state)?;
    let output = || log::open(&state.log_path()).map(Stdio::from);
    let io = |source| SupervisionError::Io { doing: "starting the supervisor".to_owned(), source };
    // `supervise` makes its own session; all it has of ours is closed here, or
    // the SSH session would wait for it.
    Command::new(&wanted.program)
        .arg("supervise")
        .arg("--state_dir")
        .arg(state.path())
        .current_dir("/")
        .stdin(supervise::no_input().map_err(io)?)
        .stdout(output().map_err(io)?)
        .stderr(output().map_err(io)?)
        .spawn()
        .map_err(io)?;
    wait_until_it_runs(state, wanted)
}

fn ensure_unit(systemd: &Systemd, state: &StateDirectory, wanted: &Wanted) -> Result<(), SupervisionError> {
    let unchanged = !systemd.install(&wanted.program, state.path())?;
    systemd.enable()?;
    if unchanged && runs(state, wanted)? {
        return Ok(());
    }
    // A machine may have been enrolled before systemd could be used.
    if let Some(supervisor) = state.supervisor()? {
        stop(&supervisor, "supervisor")?;
    }
    systemd.restart()?;
    wait_until_it_runs(state, wanted)
}

fn stop_detached(state: &StateDirectory) -> Result<(), SupervisionError> {
    // The supervisor first: it would start the agent again.
    if let Some(supervisor) = state.supervisor()? {
        stop(&supervisor, "supervisor")?;
    }
    if let Some(agent) = state.agent()? {
        stop(&agent, "agent")?;
    }
    Ok(())
}

fn stop(process: &Process, what: &str) -> Result<(), SupervisionError> {
    let doing = || format!("stopping the {what}, process {}", process.pid);
    process.stop(GRACE).map_err(|source| SupervisionError::Io { doing: doing(), source })
}

fn runs(state: &StateDirectory, wanted: &Wanted) -> Result<bool, SupervisionError> {
    Ok(state.agent()?.is_some_and(|agent| {
        agent.is_alive() && agent.revision == wanted.revision && agent.program_sha256 == wanted.program_sha256
    }))
}

fn wait_until_it_runs(state: &StateDirectory, wanted: &Wanted) -> Result<(), SupervisionError> {
    let end = Instant::now() + START;
    while !runs(state, wanted)? {
        if Instant::now() >= end {
            return Err(SupervisionError::DoesNotRun { said: end_of_log(state) });
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn end_of_log(state: &StateDirectory) -> String {
    let text = std::fs::read(state.log_path()).unwrap_or_default();
    let tail = String::from_utf8_lossy(&text[text.len().saturating_sub(2000)..]).into_owned();
    let lines: Vec<_> = tail.lines().rev().take(3).collect();
    if lines.is_empty() {
        "nothing".to_owned()
    } else {
        lines.into_iter().rev().collect::<Vec<_>>().join(" / ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roleserver::systemd::UNIT;

    #[test]
    fn plan_follows_the_wish_and_the_host() {
        let host = |systemd, root, user_manager| Host { systemd, root, user_manager };
        for (wish, host, expected) in [
            (Wish::Auto, host(true, true, false), Some(Plan::SystemUnit)),
            (Wish::Auto, host(true, false, true), Some(Plan::UserUnit)),
            (Wish::Auto, host(true, false, false), Some(Plan::Detached)),
            (Wish::Auto, host(false, true, true), Some(Plan::Detached)),
            (Wish::Systemd, host(true, true, true), Some(Plan::SystemUnit)),
            (Wish::Systemd, host(true, false, false), None),
            (Wish::Systemd, host(false, true, false), None),
            (Wish::Detached, host(true, true, true), Some(Plan::Detached)),
            (Wish::External, host(true, true, true), Some(Plan::External)),
        ] {
            assert_eq!(plan(wish, host).ok(), expected, "{wish:?} {host:?}");
        }
    }

    /// A manager whose `systemctl` notes what it is asked, and fails when asked for `fails`.
    fn manager(root: &Path, fails: &str) -> Systemd {
        let script = root.join("systemctl");
        let log = root.join("calls");
        let text = format!(
            "#!/bin/sh\n[ -n \"$XDG_RUNTIME_DIR\" ] || exit 5\necho \"$@\" >> {}\n[ \"$1\" != \"{fails}\" ] || {{ echo Access denied >&2; exit 4; }}\n",
            log.display()
        );
        std::fs::write(&script, text).unwrap();
        // Through the shell: a file that was just written may still be open for writing in a
        // process that another test is starting, and cannot be executed then.
        let systemctl = vec!["sh".to_owned(), script.display().to_string()];
        Systemd {
            systemctl,
            units: root.join("units"),
            wanted_by: "multi-user.target",
            runtime_directory: Some(root.join("runtime")),
        }
    }

    fn wanted() -> Wanted {
        Wanted { program: "/opt/roleserver".into(), program_sha256: "5a".to_owned(), revision: 3 }
    }

    #[test]
    fn unit_is_installed_once_and_left_alone_while_the_right_agent_runs() {
        let root = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(&root.path().join("state")).unwrap();
        // This process stands in for the agent that the manager would start.
        state.record_agent(&Process::this(3, "5a".to_owned()).unwrap()).unwrap();
        let systemd = manager(root.path(), "nothing");
        let calls = || std::fs::read_to_string(root.path().join("calls")).unwrap();
        let (supervision, warnings) = ensure(Plan::SystemUnit, &systemd, &state, &wanted()).unwrap();
        assert_eq!((supervision, warnings), (wire::Supervision::Systemd, vec![]));
        let first = "daemon-reload\nenable roleserver.service\nrestart roleserver.service\n";
        assert_eq!(calls(), first);
        let unit = std::fs::read_to_string(systemd.units.join(UNIT)).unwrap();
        assert!(unit.contains("\"/opt/roleserver\" run"), "{unit}");
        assert_eq!(std::fs::read_dir(&systemd.units).unwrap().count(), 1, "no temporary file stays");

        ensure(Plan::SystemUnit, &systemd, &state, &wanted()).unwrap();
        assert_eq!(calls(), format!("{first}enable roleserver.service\n"));
    }

    #[test]
    fn refusing_manager_is_quoted() {
        let root = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(&root.path().join("state")).unwrap();
        let systemd = manager(root.path(), "enable");
        let error = ensure(Plan::SystemUnit, &systemd, &state, &wanted()).unwrap_err().to_string();
        assert!(error.ends_with("systemctl enable roleserver.service` failed: Access denied"), "{error}");
    }
}
