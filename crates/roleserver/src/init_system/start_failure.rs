//! Why systemd does not start the agent: its exit status, the mount of the program, `SELinux`.
//!
//! An enrolment that waited in vain asks systemd once, and returns the answer with the end of the agent's log. The log
//! alone is empty when the program was never executed, and then an operator has only these facts.

use std::path::Path;

use crate::init_system::systemd::Systemd;
use crate::mountinfo;

/// What is read of the unit (systemd.exec(5), "Process Exit Codes").
const STATES: &str = "ActiveState,SubState,Result,ExecMainCode,ExecMainStatus";
/// The text of EROFS in lower case, as the C library and Rust print it.
const READ_ONLY_ERROR: &str = "read-only file system";

/// Facts about a program that does not run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StartFacts {
    /// The exit status of the unit's main process.
    pub exit_status: Option<i32>,
    /// Why systemd says that the unit failed; empty or `success` if it does not.
    pub result: String,
    /// Options of the mount that the program is on, and of its file system.
    pub mount_options: String,
    /// The mount point of that file system.
    pub mount_point: String,
    /// Whether `SELinux` enforces a policy.
    pub selinux_enforces: bool,
    /// Whether the log of the agent names a write that a read-only file system refused. `/usr` is read-only on many hosts
    /// on which the agent runs, so the mount alone explains nothing.
    pub log_names_read_only: bool,
}

impl StartFacts {
    /// Parses the output of `systemctl show` and of `/proc/self/mountinfo`, and the end of the agent's log.
    #[must_use]
    pub fn parse(shown: &str, mountinfo: &str, program: &Path, selinux: &str, log: &str) -> Self {
        let value =
            |name: &str| shown.lines().filter_map(|line| line.split_once('=')).find(|(key, _)| *key == name);
        let (mount_point, mount_options) = mountinfo::find_mount_options(mountinfo, program)
            .map_or_else(Default::default, |(point, options)| (point.display().to_string(), options));
        Self {
            exit_status: value("ExecMainStatus").and_then(|(_, status)| status.trim().parse().ok()),
            result: value("Result").map(|(_, result)| result.trim().to_owned()).unwrap_or_default(),
            mount_options,
            mount_point,
            selinux_enforces: selinux.trim() == "1",
            log_names_read_only: log.to_lowercase().contains(READ_ONLY_ERROR),
        }
    }

    fn has_option(&self, name: &str) -> bool {
        self.mount_options.split(',').any(|option| option == name)
    }
}

/// The failure as the end of a sentence; `None` if the facts explain nothing.
#[must_use]
pub fn explain_start_failure(facts: &StartFacts, program: &Path) -> Option<String> {
    let program = program.display();
    match facts.exit_status {
        Some(203) if facts.has_option("noexec") => Some(format!(
            "systemd could not execute {program} (203/EXEC), because {} is mounted noexec; give another path by \
             --agent_target_path",
            facts.mount_point
        )),
        Some(203) if facts.selinux_enforces => Some(format!(
            "systemd could not execute {program} (203/EXEC), and SELinux is enforcing: it may not start programs below \
             /root or /home, nor one without the label of a program; leave --agent_target_path out, or run `restorecon` \
             on it"
        )),
        Some(203) => Some(format!(
            "systemd could not execute {program} (203/EXEC): it is not there, not executable, or a security policy \
             forbids it"
        )),
        Some(219) => Some(
            "systemd could not make the control group of the unit (219/CGROUP): programs that hold controllers are left \
             in it; `systemd-cgls -u roleserver.service` lists them"
                .to_owned(),
        ),
        _ if facts.has_option("ro") && facts.log_names_read_only => {
            Some(format!("{} with {program} on it is mounted read-only", facts.mount_point))
        }
        Some(status) if !matches!(facts.result.as_str(), "" | "success") => {
            Some(format!("systemd reports {} with status {status}", facts.result))
        }
        _ => None,
    }
}

/// Reads the facts of this host and explains them. `log` is the end of the agent's log. Blocks.
pub(super) fn read_start_failure(systemd: &Systemd, program: &Path, log: &str) -> Option<String> {
    let shown = systemd.show_unit(STATES).unwrap_or_default();
    let mounts = mountinfo::read_mountinfo().unwrap_or_default();
    let selinux = std::fs::read_to_string("/sys/fs/selinux/enforce").unwrap_or_default();
    explain_start_failure(&StartFacts::parse(&shown, &mounts, program, &selinux, log), program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_is_named() {
        let mounts = "20 1 8:1 / / rw,relatime - ext4 /dev/a rw\n\
                      21 20 8:2 / /home rw,noexec,nosuid - ext4 /dev/b rw\n\
                      22 20 8:3 / /usr ro,relatime - ext4 /dev/c rw\n";
        let shown = |status: i32, result: &str| {
            format!("ActiveState=activating\nResult={result}\nExecMainCode=1\nExecMainStatus={status}\n")
        };
        let (usual, home, usr) =
            ("/opt/shepherd/bin/roleserver", "/home/a/roleserver", "/usr/local/lib/shepherd/bin/roleserver");
        let refused =
            "error: writing /usr/local/lib/shepherd/state/a failed: Read-only file system (os error 30)";
        for (shown, program, selinux, log, expected) in [
            (shown(203, "exit-code"), home, "1\n", "", Some("(203/EXEC), because /home is mounted noexec")),
            (shown(203, "exit-code"), usual, "1\n", "", Some("(203/EXEC), and SELinux is enforcing")),
            (shown(203, "exit-code"), usual, "0\n", "", Some("(203/EXEC): it is not there")),
            (shown(203, "exit-code"), usual, "", "", Some("(203/EXEC): it is not there")),
            (shown(219, "exit-code"), usual, "", "", Some("(219/CGROUP)")),
            (
                shown(1, "exit-code"),
                usr,
                "",
                refused,
                Some("/usr with /usr/local/lib/shepherd/bin/roleserver on it is mounted read-only"),
            ),
            // Read-only as the image of the host has it, and the agent writes nothing there.
            (
                shown(1, "exit-code"),
                usr,
                "",
                "the key is damaged",
                Some("systemd reports exit-code with status 1"),
            ),
            (shown(0, "success"), usr, "", "", None),
            // The refused write is on another file system than the program.
            (shown(1, "exit-code"), usual, "", refused, Some("systemd reports exit-code with status 1")),
            (shown(1, "exit-code"), usual, "", "", Some("systemd reports exit-code with status 1")),
            (shown(0, "success"), usual, "", "", None),
            (String::new(), usual, "", "", None),
        ] {
            let program = Path::new(program);
            let explained =
                explain_start_failure(&StartFacts::parse(&shown, mounts, program, selinux, log), program);
            match expected {
                None => assert_eq!(explained, None, "{shown}"),
                Some(part) => {
                    assert!(explained.as_ref().is_some_and(|text| text.contains(part)), "{explained:?}");
                }
            }
        }
    }
}
