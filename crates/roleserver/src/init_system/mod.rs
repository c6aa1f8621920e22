//! Choose what keeps the agent running (systemd unit, detached supervisor, external) and ensure that it does.
//!
//! If systemd is PID 1, root gets a system unit, and an ordinary user with a user manager gets a user unit
//! ([`systemd`][]). Everybody else gets a detached supervisor ([`detached_supervisor`][]).
//!
//! After an enrolment the right agent runs: the same program, started for the newest revision of the enrolment. An
//! agent that already matches is left alone; any other (dead, hung, older program, lower fence) is stopped, and a new
//! one is started. Each takeover claims with a higher fence, so a takeover of a hung agent always ends with a fresh
//! one.
//!
//! [`unit`](mod@unit) has the text of the unit. A role server that systemd started brings the file up to date
//! ([`own_unit`][]) and reports what is wrong with the unit ([`unit_check`][]). [`start_failure`][] explains why an
//! agent does not run.
//!
//! A supervisor is stopped before its agent, because it would start the agent again. Processes are found by their
//! records ([`crate::process`]), never by their names.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use hardening::file_limit::UsualFileLimit as _;
use proto::agent::v1 as wire;

use crate::child::log;
use crate::init_system::agent_process::{is_agent_running, stop_detached, stop_process, wait_for_agent};
use crate::init_system::systemd::{Systemd, SystemdError};
use crate::process::empty_stdin;
use crate::state_directory::StateDirectory;

mod agent_process;
pub mod detached_supervisor;
pub mod own_unit;
pub mod start_failure;
pub mod systemd;
pub mod unit;
pub mod unit_check;
mod unit_state;

/// How long an enrolment may take. It is less than the limit of its SSH command, so that the shepherd gets a response that
/// says what hangs. Each part has a limit of its own besides, and together they may be longer: then the later ones are cut.
pub const ENROLMENT_TIMEOUT: Duration = Duration::from_secs(55);

/// The value of the flag `--supervision`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SupervisionMode {
    /// systemd if it runs, else a detached supervisor.
    Auto,
    /// A systemd unit, or an error.
    Systemd,
    /// A detached supervisor, whatever else the host has.
    Detached,
    /// Something else keeps `roleserver run` alive.
    External,
}

/// The init system of the host, and the user's rights on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostInit {
    /// Whether systemd is PID 1.
    pub has_systemd: bool,
    /// Whether this program runs as root.
    pub is_root: bool,
    /// Whether a systemd user manager runs for this user.
    pub has_user_manager: bool,
}

/// The chosen way to keep the agent running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SupervisionPlan {
    /// A unit of the system manager.
    SystemUnit,
    /// A unit of the user's manager.
    UserUnit,
    /// A detached supervisor, started by the enrolment.
    Detached,
    /// Nothing is started; only a wrong agent is stopped.
    External,
}

/// Why no agent runs.
#[derive(Debug, thiserror::Error)]
pub enum SupervisionError {
    /// The requested mode is impossible on this host.
    #[error("--supervision systemd was requested, but no systemd manager for this user runs here")]
    NoSystemd,
    /// An operation on a process or a file failed.
    #[error("{operation} failed: {source}")]
    Io {
        /// The operation that failed.
        operation: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The state directory could not be read or written.
    #[error(transparent)]
    State(#[from] crate::state_error::StateError),
    /// systemd could not be driven.
    #[error(transparent)]
    Systemd(#[from] SystemdError),
    /// The agent was started and does not run.
    #[error("the agent was started but does not run after {} s; its log ends: {output}", after.as_secs())]
    DoesNotRun {
        /// How long it had.
        after: Duration,
        /// The end of its log.
        output: String,
    },
}

/// The agent that should run.
#[derive(Clone, Debug)]
pub struct DesiredAgent {
    /// The path of the program file.
    pub program: PathBuf,
    /// SHA-256 of the program, lower-case hexadecimal.
    pub program_sha256: String,
    /// The revision of the enrolment that the agent must run with.
    pub revision: u64,
}

/// Chooses what keeps the agent running, by mode and host.
pub const fn choose_supervision(
    mode: SupervisionMode,
    host: HostInit,
) -> Result<SupervisionPlan, SupervisionError> {
    match mode {
        SupervisionMode::External => Ok(SupervisionPlan::External),
        SupervisionMode::Auto | SupervisionMode::Systemd if host.has_systemd && host.is_root => {
            Ok(SupervisionPlan::SystemUnit)
        }
        SupervisionMode::Auto | SupervisionMode::Systemd if host.has_systemd && host.has_user_manager => {
            Ok(SupervisionPlan::UserUnit)
        }
        SupervisionMode::Detached | SupervisionMode::Auto => Ok(SupervisionPlan::Detached),
        SupervisionMode::Systemd => Err(SupervisionError::NoSystemd),
    }
}

/// Inspects the host and the current user.
#[must_use]
pub fn detect_host() -> HostInit {
    let uid = rustix::process::geteuid();
    HostInit {
        has_systemd: Path::new("/run/systemd/system").is_dir(),
        is_root: uid.is_root(),
        has_user_manager: systemd::runtime_directory().join("systemd/private").exists(),
    }
}

/// Ensures that the desired agent runs. Returns what keeps it alive, and warnings about problems that did not prevent
/// that.
///
/// `before_restart` is called right before a unit is restarted, which ends everything in its group: it moves the
/// children of the running agent out of it, and returns warnings. Everything but that has ended at `until`.
pub fn ensure_agent_runs(
    plan: SupervisionPlan,
    systemd: &Systemd,
    state: &StateDirectory,
    wanted: &DesiredAgent,
    before_restart: &dyn Fn() -> Vec<String>,
    until: Instant,
) -> Result<(wire::Supervision, Vec<String>), SupervisionError> {
    let systemd = &Systemd { until: Some(until), ..systemd.clone() };
    match plan {
        SupervisionPlan::External => {
            // The external supervisor starts the right agent when the wrong one ends.
            if !is_agent_running(state, wanted)
                && let Some(agent) = state.find_agent_process()
            {
                stop_process(&agent, "agent", until)?;
            }
            Ok((wire::Supervision::External, Vec::new()))
        }
        SupervisionPlan::Detached => {
            ensure_detached(state, wanted, until)?;
            Ok((wire::Supervision::Detached, Vec::new()))
        }
        SupervisionPlan::SystemUnit => {
            Ok((wire::Supervision::Systemd, ensure_unit(systemd, state, wanted, before_restart, until)?))
        }
        SupervisionPlan::UserUnit => match ensure_unit(systemd, state, wanted, before_restart, until) {
            Ok(mut warnings) => {
                warnings.extend(systemd.enable_linger().err());
                Ok((wire::Supervision::Systemd, warnings))
            }
            Err(error) => {
                // A user manager may reject what a process may still do. It starts such a unit again and again, until it
                // is stopped.
                if matches!(error, SupervisionError::DoesNotRun { .. })
                    && let Err(error) = systemd.stop_unit()
                {
                    tracing::warn!(%error, "the unit of an agent that does not run could not be stopped");
                }
                if unit_state::is_unit_running(systemd, state) {
                    if is_agent_running(state, wanted) {
                        return Ok((wire::Supervision::Systemd, vec![format!("the unit runs, but {error}")]));
                    }
                    return Err(error);
                }
                ensure_detached(state, wanted, until)?;
                Ok((wire::Supervision::Detached, vec![format!("no systemd user unit: {error}")]))
            }
        },
    }
}

fn ensure_detached(
    state: &StateDirectory,
    wanted: &DesiredAgent,
    until: Instant,
) -> Result<(), SupervisionError> {
    let supervised = state
        .find_supervisor_process()
        .is_some_and(|process| process.is_alive() && process.program_sha256 == wanted.program_sha256);
    if supervised && is_agent_running(state, wanted) {
        return Ok(());
    }
    stop_detached(state, until)?;
    let output = || log::open_log(&state.log_path()).map(Stdio::from);
    let io = |source| SupervisionError::Io { operation: "starting the supervisor".to_owned(), source };
    // `supervise` makes a session of its own. It inherits none of our standard streams, or the SSH session would wait
    // for it.
    let mut command = Command::new(&wanted.program);
    command
        .arg("supervise")
        .arg("--state_dir")
        .arg(state.path())
        .current_dir("/")
        .stdin(empty_stdin().map_err(io)?)
        .stdout(output().map_err(io)?)
        .stderr(output().map_err(io)?);
    hardening::restore_core_limit(command.usual_file_limit()).spawn().map_err(io)?;
    wait_for_agent(state, wanted, until)
}

/// Writes the unit and starts it. Returns warnings for the operator.
fn ensure_unit(
    systemd: &Systemd,
    state: &StateDirectory,
    wanted: &DesiredAgent,
    before_restart: &dyn Fn() -> Vec<String>,
    until: Instant,
) -> Result<Vec<String>, SupervisionError> {
    let installed = systemd.install_unit(&wanted.program, state.path())?;
    systemd.enable_unit()?;
    let mut warnings = Vec::from_iter(installed.warning);
    if !installed.changed && is_agent_running(state, wanted) {
        return Ok(warnings);
    }
    // The machine may have been enrolled before systemd could be used.
    if let Some(supervisor) = state.find_supervisor_process() {
        stop_process(&supervisor, "supervisor", until)?;
    }
    warnings.extend(before_restart());
    systemd.restart_unit()?;
    wait_for_agent(state, wanted, until).map_err(|error| explain_failure(error, systemd, wanted))?;
    Ok(warnings)
}

/// Adds what systemd knows of an agent that does not run.
fn explain_failure(error: SupervisionError, systemd: &Systemd, wanted: &DesiredAgent) -> SupervisionError {
    match error {
        SupervisionError::DoesNotRun { after, output } => {
            let reason = start_failure::read_start_failure(systemd, &wanted.program, &output);
            let reason = reason.map_or_else(String::new, |reason| format!("; {reason}"));
            SupervisionError::DoesNotRun { after, output: output + &reason }
        }
        other => other,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::child::migration::PROTECT_LIMIT;
    use crate::init_system::agent_process::{EXPLANATION_TIME, START_TIMEOUT};
    use crate::init_system::systemd::UNIT;
    use crate::process::ProcessRecord;

    #[test]
    fn supervision_follows_the_mode_and_the_host() {
        let host = |systemd, root, user_manager| HostInit {
            has_systemd: systemd,
            is_root: root,
            has_user_manager: user_manager,
        };
        for (mode, host, expected) in [
            (SupervisionMode::Auto, host(true, true, false), Some(SupervisionPlan::SystemUnit)),
            (SupervisionMode::Auto, host(true, false, true), Some(SupervisionPlan::UserUnit)),
            (SupervisionMode::Auto, host(true, false, false), Some(SupervisionPlan::Detached)),
            (SupervisionMode::Auto, host(false, true, true), Some(SupervisionPlan::Detached)),
            (SupervisionMode::Systemd, host(true, true, true), Some(SupervisionPlan::SystemUnit)),
            (SupervisionMode::Systemd, host(true, false, false), None),
            (SupervisionMode::Systemd, host(false, true, false), None),
            (SupervisionMode::Detached, host(true, true, true), Some(SupervisionPlan::Detached)),
            (SupervisionMode::External, host(true, true, true), Some(SupervisionPlan::External)),
        ] {
            assert_eq!(choose_supervision(mode, host).ok(), expected, "{mode:?} {host:?}");
        }
    }

    /// A manager with a `systemctl` that logs its calls, prints the file `shown` for `show`, and fails when it is called for
    /// `fails`.
    pub(crate) fn manager(root: &Path, fails: &str) -> Systemd {
        let script = root.join("systemctl");
        let log = root.join("calls");
        let text = format!(
            "#!/bin/sh\n[ -n \"$XDG_RUNTIME_DIR\" ] || exit 5\necho \"$@\" >> {}\n[ \"$1\" != show ] || cat {} 2>&-\n[ \"$1\" != \"{fails}\" ] || {{ echo Access denied >&2; exit 4; }}\n",
            log.display(),
            root.join("shown").display()
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
            until: None,
        }
    }

    fn far() -> Instant {
        Instant::now() + Duration::from_hours(1)
    }

    fn desired_agent() -> DesiredAgent {
        DesiredAgent { program: "/opt/roleserver".into(), program_sha256: "5a".to_owned(), revision: 3 }
    }

    #[test]
    fn unit_is_installed_once_while_the_right_agent_runs() {
        let root = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(&root.path().join("state")).unwrap();
        // This process stands in for the agent that the manager would start.
        state.record_agent(&ProcessRecord::current(3, "5a".to_owned()).unwrap()).unwrap();
        let systemd = manager(root.path(), "nothing");
        let calls = || std::fs::read_to_string(root.path().join("calls")).unwrap();
        // Children move when the unit is about to be restarted, and not without need.
        let moving = || {
            std::fs::write(root.path().join("calls"), calls() + "move\n").unwrap();
            vec!["moved".to_owned()]
        };
        let (supervision, warnings) = ensure_agent_runs(
            SupervisionPlan::SystemUnit,
            &systemd,
            &state,
            &desired_agent(),
            &moving,
            far(),
        )
        .unwrap();
        assert_eq!(supervision, wire::Supervision::Systemd);
        assert_eq!(warnings, ["moved"]);
        let first = "daemon-reload\nenable roleserver.service\nmove\nrestart roleserver.service\n";
        assert_eq!(calls(), first);
        let unit = std::fs::read_to_string(systemd.units.join(UNIT)).unwrap();
        assert!(unit.contains("\"/opt/roleserver\" run"), "{unit}");
        assert_eq!(std::fs::read_dir(&systemd.units).unwrap().count(), 1, "no temporary file stays");

        ensure_agent_runs(SupervisionPlan::SystemUnit, &systemd, &state, &desired_agent(), &moving, far())
            .unwrap();
        assert_eq!(calls(), format!("{first}enable roleserver.service\n"));
    }

    #[test]
    fn enrolment_ends_in_time_although_the_agent_does_not_run() {
        let root = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(&root.path().join("state")).unwrap();
        let systemd = manager(root.path(), "nothing");
        let begin = Instant::now();
        let until = begin + EXPLANATION_TIME + Duration::from_secs(8);
        let plan = SupervisionPlan::SystemUnit;
        let error =
            ensure_agent_runs(plan, &systemd, &state, &desired_agent(), &Vec::new, until).unwrap_err();
        assert!(error.to_string().starts_with("the agent was started but does not run after "), "{error}");
        assert!(begin.elapsed() < START_TIMEOUT, "it waited for the agent as if there were time");
        // An agent has time although the children took all of theirs, and the end of the one before its own.
        let stop = Duration::from_secs(10);
        let rest = ENROLMENT_TIMEOUT.saturating_sub(PROTECT_LIMIT + stop);
        assert!(rest >= Duration::from_secs(20), "{rest:?}");
    }

    #[test]
    fn edited_unit_is_kept_while_it_starts_the_right_program() {
        let root = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(&root.path().join("state")).unwrap();
        state.record_agent(&ProcessRecord::current(3, "5a".to_owned()).unwrap()).unwrap();
        let systemd = manager(root.path(), "nothing");
        let ensure = |agent: &DesiredAgent| {
            ensure_agent_runs(SupervisionPlan::SystemUnit, &systemd, &state, agent, &Vec::new, far())
                .unwrap()
                .1
        };
        let read = || std::fs::read_to_string(systemd.unit_path()).unwrap();
        assert!(ensure(&desired_agent()).is_empty());
        let edited = read().replace("RestartSec=2", "RestartSec=9");
        std::fs::write(systemd.unit_path(), &edited).unwrap();
        let warnings = ensure(&desired_agent());
        assert!(warnings[0].contains("was edited, so no release replaces it"), "{warnings:?}");
        assert_eq!(read(), edited);

        let warnings = ensure(&DesiredAgent { program: "/elsewhere/roleserver".into(), ..desired_agent() });
        assert!(warnings[0].ends_with("units/roleserver.service.edited"), "{warnings:?}");
        assert!(read().contains("\"/elsewhere/roleserver\" run"), "{}", read());
        let aside = std::fs::read_to_string(systemd.units.join("roleserver.service.edited")).unwrap();
        assert_eq!(aside, edited, "an edited text is never lost");
    }

    /// A detached supervisor beside the unit would start a second agent.
    #[test]
    fn detached_supervisor_replaces_a_user_unit_only_if_that_does_not_run() {
        let root = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(&root.path().join("state")).unwrap();
        // This process has both roles, so that a detached supervisor counts as started.
        let process = ProcessRecord::current(3, "5a".to_owned()).unwrap();
        state.record_supervisor(&process).unwrap();
        state.record_agent(&process).unwrap();
        let systemd = manager(root.path(), "enable");
        let ensure = |shown: &str| {
            std::fs::write(root.path().join("shown"), shown).unwrap();
            let plan = SupervisionPlan::UserUnit;
            ensure_agent_runs(plan, &systemd, &state, &desired_agent(), &Vec::new, far())
        };
        let (supervision, warnings) = ensure("ActiveState=active\n").unwrap();
        assert_eq!(supervision, wire::Supervision::Systemd);
        assert!(warnings[0].starts_with("the unit runs, but `"), "{warnings:?}");
        let (supervision, warnings) = ensure("ActiveState=inactive\n").unwrap();
        assert_eq!(supervision, wire::Supervision::Detached);
        assert!(warnings[0].starts_with("no systemd user unit: `"), "{warnings:?}");
        // The unit keeps another agent running.
        std::fs::remove_file(state.path().join("agent.json")).unwrap();
        let error = ensure("ActiveState=activating\n").unwrap_err().to_string();
        assert!(error.ends_with("systemctl enable roleserver.service` failed: Access denied"), "{error}");
    }

    #[test]
    fn systemctl_error_is_quoted() {
        let root = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(&root.path().join("state")).unwrap();
        let systemd = manager(root.path(), "enable");
        let error = ensure_agent_runs(
            SupervisionPlan::SystemUnit,
            &systemd,
            &state,
            &desired_agent(),
            &Vec::new,
            far(),
        )
        .unwrap_err()
        .to_string();
        assert!(error.ends_with("systemctl enable roleserver.service` failed: Access denied"), "{error}");
    }
}
