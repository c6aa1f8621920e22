//! Install, enable and restart the systemd unit of the agent.

use std::io::{Error, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use hardening::file_limit::UsualFileLimit as _;
use model::excerpt::Excerpt;

use crate::bounded_command::output_within;
use crate::init_system::unit::{self, UnitAction, UnitFacts};
use crate::init_system::unit_check::edited_unit_finding;

/// The name of the unit.
pub const UNIT: &str = "roleserver.service";
/// Where an edited unit file goes that does not start the right agent. systemd reads no file with this ending.
const EDITED_UNIT: &str = "roleserver.service.edited";

/// How long a call may take. A restart waits for the end of the agent, which may take as long as the unit says. A manager
/// that does not answer would otherwise be waited for as long as `systemctl` likes.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// What the installation of the unit did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstalledUnit {
    /// Whether the file was written, so that a running agent may be another one.
    pub changed: bool,
    /// A warning for the operator, as a sentence.
    pub warning: Option<String>,
}

/// Why the unit could not be installed or driven.
#[derive(Debug, thiserror::Error)]
pub enum SystemdError {
    /// An operation of the operating system failed.
    #[error("{operation} failed: {source}")]
    Io {
        /// The operation that failed.
        operation: String,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The called program ended with a failure.
    #[error("`{command}` failed: {output}")]
    CommandFailed {
        /// The command line that was called.
        command: String,
        /// The end of its output.
        output: String,
    },
}

/// Where units are installed and which program drives them; values, so that a test need not run on a systemd host.
#[derive(Clone, Debug)]
pub struct Systemd {
    /// The program and the arguments before the verb.
    pub systemctl: Vec<String>,
    /// The directory of unit files.
    pub units: PathBuf,
    /// The target that starts the unit (`WantedBy=`).
    pub wanted_by: &'static str,
    /// The runtime directory of the user's manager. A session that no PAM module opened does not have it in its
    /// environment.
    pub runtime_directory: Option<PathBuf>,
    /// When every call has ended at the latest, if the caller has to end; each call has a limit of its own besides.
    pub until: Option<Instant>,
}

impl Systemd {
    /// The system manager, for root.
    #[must_use]
    pub fn system() -> Self {
        Self {
            systemctl: vec!["systemctl".to_owned()],
            units: PathBuf::from("/etc/systemd/system"),
            wanted_by: "multi-user.target",
            runtime_directory: None,
            until: None,
        }
    }

    /// The user's manager, for an ordinary user.
    #[must_use]
    pub fn user(home: &Path) -> Self {
        Self {
            systemctl: vec!["systemctl".to_owned(), "--user".to_owned()],
            units: home.join(".config/systemd/user"),
            wanted_by: "default.target",
            runtime_directory: Some(runtime_directory()),
            until: None,
        }
    }

    /// The path of the unit file.
    #[must_use]
    pub fn unit_path(&self) -> PathBuf {
        self.units.join(UNIT)
    }

    /// Reads the unit file; `None` if there is none. A link was made by somebody, so it counts as an edited file.
    pub fn read_unit(&self) -> Result<Option<String>, SystemdError> {
        let path = self.unit_path();
        let io = |source| SystemdError::Io { operation: format!("reading {}", path.display()), source };
        match std::fs::symlink_metadata(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(io(error)),
            Ok(metadata) if !metadata.is_file() => Ok(Some(String::new())),
            Ok(_) => {
                std::fs::read(&path).map(|bytes| Some(String::from_utf8_lossy(&bytes).into())).map_err(io)
            }
        }
    }

    /// Makes the unit start this agent, unless it does already. The warning is about a file that somebody edited.
    pub fn install_unit(&self, program: &Path, state: &Path) -> Result<InstalledUnit, SystemdError> {
        let facts = UnitFacts {
            program: program.to_owned(),
            state: state.to_owned(),
            wanted_by: self.wanted_by.to_owned(),
        };
        let mut installed = InstalledUnit { changed: true, warning: None };
        match unit::action_at_enrolment(self.read_unit()?.as_deref(), &facts) {
            UnitAction::Nothing => installed.changed = false,
            UnitAction::KeepEdited => {
                installed.changed = false;
                installed.warning = Some(edited_unit_finding(&self.unit_path()).message);
            }
            UnitAction::Write(text) => self.write_unit(&text)?,
            UnitAction::ReplaceEdited(text) => {
                let (path, aside) = (self.unit_path(), self.units.join(EDITED_UNIT));
                let operation = || format!("keeping {} as {}", path.display(), aside.display());
                // A link may lead nowhere: then there is no text to keep.
                match std::fs::copy(&path, &aside) {
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    copied => {
                        copied.map_err(|source| SystemdError::Io { operation: operation(), source })?;
                    }
                }
                self.write_unit(&text)?;
                installed.warning = Some(format!(
                    "the unit file {} was edited and started another program, so it was replaced; the edited text is \
                     in {}",
                    path.display(),
                    aside.display()
                ));
            }
        }
        Ok(installed)
    }

    /// Replaces the unit file and reloads the manager. If it cannot be reloaded, the former file stays, so that the
    /// next call tries both again.
    pub fn write_unit(&self, text: &str) -> Result<(), SystemdError> {
        let former = std::fs::read(self.unit_path()).ok();
        self.replace_file(text.as_bytes())?;
        self.run_systemctl(["daemon-reload"]).map(drop).inspect_err(|_| {
            // The error of the reload is the one to report.
            let _ = match former {
                Some(former) => self.replace_file(&former),
                None => std::fs::remove_file(self.unit_path())
                    .map_err(|source| SystemdError::Io { operation: String::new(), source }),
            };
        })
    }

    fn replace_file(&self, bytes: &[u8]) -> Result<(), SystemdError> {
        let path = self.unit_path();
        let io = |source| SystemdError::Io { operation: format!("writing {}", path.display()), source };
        std::fs::create_dir_all(&self.units).map_err(io)?;
        let temporary = self.units.join(format!(".{UNIT}.{}", std::process::id()));
        // Synced before the rename: a machine that loses power now must not boot into an empty unit.
        let replace = || {
            let mut file = std::fs::File::create(&temporary)?;
            file.write_all(bytes).and_then(|()| file.sync_all())?;
            std::fs::rename(&temporary, &path)?;
            std::fs::File::open(&self.units)?.sync_all()
        };
        replace().map_err(|error| {
            let _ = std::fs::remove_file(&temporary);
            io(error)
        })
    }

    /// Reads settings and states of the unit, named in a list with commas, as lines `NAME=VALUE`.
    pub fn show_unit(&self, names: &str) -> Result<String, SystemdError> {
        self.run_systemctl(["show", UNIT, "--property", names])
    }

    /// Enables the unit, so that it starts at boot.
    pub fn enable_unit(&self) -> Result<(), SystemdError> {
        self.run_systemctl(["enable", UNIT]).map(drop)
    }

    /// Restarts the unit, or starts it.
    pub fn restart_unit(&self) -> Result<(), SystemdError> {
        self.run_systemctl(["restart", UNIT]).map(drop)
    }

    /// Enables lingering for this user: without it, a user's units end with the user's last session (loginctl(1)).
    pub fn enable_linger(&self) -> Result<(), String> {
        let warn = |why: String| {
            format!("the agent may end with the user's last session: loginctl enable-linger: {why}")
        };
        let mut command = Command::new("loginctl");
        command.arg("enable-linger").stdin(Stdio::null());
        match output_within(hardening::restore_core_limit(command.usual_file_limit()), self.call_limit()) {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(warn(error_output(&output))),
            Err(error) => Err(warn(error.to_string())),
        }
    }

    /// How long a call that begins now may take.
    fn call_limit(&self) -> Duration {
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        left.map_or(CALL_TIMEOUT, |left| left.min(CALL_TIMEOUT))
    }

    /// Stops the unit, also one that is about to be started again.
    pub fn stop_unit(&self) -> Result<(), SystemdError> {
        self.run_systemctl(["stop", UNIT]).map(drop)
    }

    /// Returns the standard output.
    fn run_systemctl<const N: usize>(&self, arguments: [&str; N]) -> Result<String, SystemdError> {
        let (program, first) = match self.systemctl.split_first() {
            Some((program, first)) => (program.as_str(), first),
            None => ("systemctl", &[][..]),
        };
        let command = [&[program.to_owned()][..], first, &arguments.map(str::to_owned)].concat().join(" ");
        let mut call = Command::new(program);
        call.args(first)
            .args(arguments)
            .envs(self.runtime_directory.iter().map(|directory| ("XDG_RUNTIME_DIR", directory)))
            .stdin(Stdio::null());
        let failed = |source| SystemdError::Io { operation: format!("calling `{command}`"), source };
        let limit = self.call_limit();
        if limit.is_zero() {
            return Err(failed(Error::new(ErrorKind::TimedOut, "no time is left for it")));
        }
        let output =
            output_within(hardening::restore_core_limit(call.usual_file_limit()), limit).map_err(failed)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Err(SystemdError::CommandFailed { command, output: error_output(&output) })
    }
}

/// The runtime directory of this user's manager, whether or not one runs.
#[must_use]
pub fn runtime_directory() -> PathBuf {
    PathBuf::from(format!("/run/user/{}", rustix::process::geteuid().as_raw()))
}

/// What the program wrote about its failure, or else how it ended.
fn error_output(output: &Output) -> String {
    let words = Excerpt::from_body(&output.stderr).or_else(|| Excerpt::from_body(&output.stdout));
    words.map_or_else(|| output.status.to_string(), |words| words.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_of_systemd_is_quoted_from_either_output() {
        let run = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).stdin(Stdio::null());
            error_output(&output_within(&mut command, CALL_TIMEOUT).unwrap())
        };
        assert_eq!(run("echo 'Unit is masked.' >&2; exit 1"), "Unit is masked.");
        assert_eq!(run("echo Access denied; exit 4"), "Access denied");
        assert_eq!(run("exit 4"), "exit status: 4");
    }

    #[test]
    fn systemctl_that_hangs_is_killed_at_the_limit() {
        let root = tempfile::tempdir().unwrap();
        let script = root.path().join("systemctl");
        std::fs::write(&script, "exec sleep 300\n").unwrap();
        let systemd = Systemd {
            systemctl: vec!["sh".to_owned(), script.display().to_string()],
            units: root.path().join("units"),
            wanted_by: "multi-user.target",
            runtime_directory: None,
            until: Some(Instant::now() + Duration::from_secs(2)),
        };
        let error = systemd.enable_unit().unwrap_err().to_string();
        assert!(error.contains("enable roleserver.service` failed: it took longer than"), "{error}");
        let error = systemd.restart_unit().unwrap_err().to_string();
        assert!(error.ends_with("restart roleserver.service` failed: no time is left for it"), "{error}");
        assert_eq!(Systemd { until: None, ..systemd }.call_limit(), CALL_TIMEOUT);
    }
}
