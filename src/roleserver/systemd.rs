//! The unit that keeps the agent alive where systemd runs.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The name of the unit.
pub const UNIT: &str = "roleserver.service";

/// Why systemd does not keep the agent.
#[derive(Debug, thiserror::Error)]
pub enum SystemdError {
    /// The system said no.
    #[error("{doing} failed: {source}")]
    Io {
        /// What was being done.
        doing: String,
        /// What happened.
        source: std::io::Error,
    },
    /// systemd said no.
    #[error("`{command}` failed: {output}")]
    Refused {
        /// What was called.
        command: String,
        /// What it said.
        output: String,
    },
}

/// Where units go and what drives them; given, so that a test need not be a systemd host.
#[derive(Clone, Debug)]
pub struct Systemd {
    /// The program and the arguments before the verb.
    pub systemctl: Vec<String>,
    /// The directory of unit files.
    pub units: PathBuf,
    /// The target that wants the unit.
    pub wanted_by: &'static str,
    /// Where a user's manager listens. A session that no PAM module opened is not told.
    pub runtime_directory: Option<PathBuf>,
}

impl Systemd {
    /// The system manager.
    #[must_use]
    pub fn system() -> Self {
        Self {
            systemctl: vec!["systemctl".to_owned()],
            units: PathBuf::from("/etc/systemd/system"),
            wanted_by: "multi-user.target",
            runtime_directory: None,
        }
    }

    /// The user's manager.
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
    #[must_use]
    pub fn unit(&self, program: &Path, state: &Path) -> String {
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
        let _ = writeln!(text, "ExecStart={} run --state_dir {}", quoted(program), quoted(state));
        text.push_str("Restart=always\nRestartSec=2\nTimeoutStopSec=10\n\n[Install]\n");
        let _ = writeln!(text, "WantedBy={}", self.wanted_by);
        text
    }

    /// Writes the unit unless it is there as it should be; tells whether it did.
    pub fn install(&self, program: &Path, state: &Path) -> Result<bool, SystemdError> {
        let path = self.units.join(UNIT);
        let text = self.unit(program, state);
        if std::fs::read_to_string(&path).is_ok_and(|kept| kept == text) {
            return Ok(false);
        }
        let io = |source| SystemdError::Io { doing: format!("writing {}", path.display()), source };
        std::fs::create_dir_all(&self.units).map_err(io)?;
        let temporary = self.units.join(format!(".{UNIT}.{}", std::process::id()));
        // On the disk before it has its name: a machine that loses power now must not boot into an empty unit.
        let replace = || {
            let mut file = std::fs::File::create(&temporary)?;
            file.write_all(text.as_bytes()).and_then(|()| file.sync_all())?;
            std::fs::rename(&temporary, &path)
        };
        replace().map_err(|error| {
            let _ = std::fs::remove_file(&temporary);
            io(error)
        })?;
        self.call(["daemon-reload"])?;
        Ok(true)
    }

    /// Starts the unit with the next boot, too.
    pub fn enable(&self) -> Result<(), SystemdError> {
        self.call(["enable", UNIT])
    }

    /// Starts the unit anew.
    pub fn restart(&self) -> Result<(), SystemdError> {
        self.call(["restart", UNIT])
    }

    fn call<const N: usize>(&self, arguments: [&str; N]) -> Result<(), SystemdError> {
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
            .output()
            .map_err(|source| SystemdError::Io { doing: format!("calling `{command}`"), source })?;
        if output.status.success() {
            return Ok(());
        }
        Err(SystemdError::Refused { command, output: said(&output) })
    }
}

/// Where this user's manager listens, if there is one.
#[must_use]
pub fn runtime_directory() -> PathBuf {
    PathBuf::from(format!("/run/user/{}", rustix::process::geteuid().as_raw()))
}

/// A user's units end with the user's last session unless the user lingers.
pub fn linger() -> Result<(), String> {
    let warn = |why: String| {
        format!("the agent may end with the user's last session: loginctl enable-linger: {why}")
    };
    match Command::new("loginctl").arg("enable-linger").stdin(Stdio::null()).output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(warn(said(&output))),
        Err(error) => Err(warn(error.to_string())),
    }
}

fn said(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let text = text.trim();
    if text.is_empty() { output.status.to_string() } else { text.chars().take(500).collect() }
}

/// A path as one word of `ExecStart=` (systemd.service(5), "Command lines").
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%").replace('$', "$$");
    format!("\"{text}\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_restarts_for_ever_and_quotes_its_paths() {
        let unit = Systemd::system().unit(Path::new("/root/role server"), Path::new("/var/lib/100%"));
        assert!(
            unit.contains("ExecStart=\"/root/role server\" run --state_dir \"/var/lib/100%%\"\n"),
            "{unit}"
        );
        for line in ["Restart=always", "StartLimitIntervalSec=0", "WantedBy=multi-user.target"] {
            assert!(unit.lines().any(|found| found == line), "{unit}");
        }
    }
}
