//! Install, enable and restart the systemd unit of the agent.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use transport::gate::open_files::UsualFileLimit as _;

/// The name of the unit.
pub const UNIT: &str = "roleserver.service";

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
        }
    }

    /// The text of the unit.
    fn unit_text(&self, program: &Path, state: &Path) -> String {
        let mut text = String::from(
            "# Written by `roleserver enroll`; changes are overwritten.\n\
             [Unit]\n\
             Description=Shepherd role server\n\
             Wants=network-online.target\n\
             After=network-online.target\n\
             # A machine that stops calling is a machine that somebody has to visit.\n\
             StartLimitIntervalSec=0\n\n\
             [Service]\n",
        );
        let _ = writeln!(text, "ExecStart={} run --state_dir {}", quote_path(program), quote_path(state));
        text.push_str(
            "Restart=always\nRestartSec=2\nTimeoutStopSec=10\nLimitNOFILE=1024:1048576\n\n[Install]\n",
        );
        let _ = writeln!(text, "WantedBy={}", self.wanted_by);
        text
    }

    /// Writes the unit unless it is up to date; returns whether it did.
    pub fn install_unit(&self, program: &Path, state: &Path) -> Result<bool, SystemdError> {
        let path = self.units.join(UNIT);
        let text = self.unit_text(program, state);
        if std::fs::read_to_string(&path).is_ok_and(|kept| kept == text) {
            return Ok(false);
        }
        let io = |source| SystemdError::Io { operation: format!("writing {}", path.display()), source };
        std::fs::create_dir_all(&self.units).map_err(io)?;
        let temporary = self.units.join(format!(".{UNIT}.{}", std::process::id()));
        // Synced before the rename: a machine that loses power now must not boot into an empty unit.
        let replace = || {
            let mut file = std::fs::File::create(&temporary)?;
            file.write_all(text.as_bytes()).and_then(|()| file.sync_all())?;
            std::fs::rename(&temporary, &path)
        };
        replace().map_err(|error| {
            let _ = std::fs::remove_file(&temporary);
            io(error)
        })?;
        self.run_systemctl(["daemon-reload"])?;
        Ok(true)
    }

    /// Enables the unit, so that it starts at boot.
    pub fn enable_unit(&self) -> Result<(), SystemdError> {
        self.run_systemctl(["enable", UNIT])
    }

    /// Restarts the unit, or starts it.
    pub fn restart_unit(&self) -> Result<(), SystemdError> {
        self.run_systemctl(["restart", UNIT])
    }

    fn run_systemctl<const N: usize>(&self, arguments: [&str; N]) -> Result<(), SystemdError> {
        let (program, first) = match self.systemctl.split_first() {
            Some((program, first)) => (program.as_str(), first),
            None => ("systemctl", &[][..]),
        };
        let command = [&[program.to_owned()][..], first, &arguments.map(str::to_owned)].concat().join(" ");
        let output = Command::new(program)
            .args(first)
            .args(arguments)
            .envs(self.runtime_directory.iter().map(|directory| ("XDG_RUNTIME_DIR", directory)))
            .stdin(Stdio::null())
            .usual_file_limit()
            .output()
            .map_err(|source| SystemdError::Io { operation: format!("calling `{command}`"), source })?;
        if output.status.success() {
            return Ok(());
        }
        Err(SystemdError::CommandFailed { command, output: error_output(&output) })
    }
}

/// The runtime directory of this user's manager, whether or not one runs.
#[must_use]
pub fn runtime_directory() -> PathBuf {
    PathBuf::from(format!("/run/user/{}", rustix::process::geteuid().as_raw()))
}

/// Enables lingering for this user: without it, a user's units end with the user's last session (loginctl(1)).
pub fn enable_linger() -> Result<(), String> {
    let warn = |why: String| {
        format!("the agent may end with the user's last session: loginctl enable-linger: {why}")
    };
    match Command::new("loginctl").arg("enable-linger").stdin(Stdio::null()).usual_file_limit().output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(warn(error_output(&output))),
        Err(error) => Err(warn(error.to_string())),
    }
}

fn error_output(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let text = text.trim();
    if text.is_empty() { output.status.to_string() } else { text.chars().take(500).collect() }
}

/// Quotes a path as one word of `ExecStart=` (systemd.service(5), "Command lines").
fn quote_path(path: &Path) -> String {
    let text = path.display().to_string();
    let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%").replace('$', "$$");
    format!("\"{text}\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_restarts_for_ever_and_quotes_its_paths() {
        let unit = Systemd::system().unit_text(Path::new("/root/role server"), Path::new("/var/lib/100%"));
        assert!(
            unit.contains("ExecStart=\"/root/role server\" run --state_dir \"/var/lib/100%%\"\n"),
            "{unit}"
        );
        for line in ["Restart=always", "StartLimitIntervalSec=0", "WantedBy=multi-user.target"] {
            assert!(unit.lines().any(|found| found == line), "{unit}");
        }
    }
}
