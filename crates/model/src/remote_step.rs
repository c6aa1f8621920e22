//! Remote commands of a takeover, as exact strings.
//!
//! A shepherd runs only these three commands on a machine. Each is one SSH exec request of the form
//!
//! ```text
//! 'sh' '-c' '<script>' 'shepherd-<step>' '<argument>' …
//! ```
//!
//! so that the name of the step appears in the machine's process list, and a simulated machine can recognise the step
//! without running a shell. The name and the arguments are the contract, defined here. The script's text belongs to
//! `takeover` and may change with any release.
//!
//! | step | standard input | standard output |
//! | --- | --- | --- |
//! | probe | nothing | [`PROBE_BEGIN`], then `key=value` lines ([`probe_key`]) |
//! | upload | the role server's binary | [`UPLOAD_BEGIN`], then `digest=<hex>` |
//! | enroll | `EnrollRequest` | [`ENROLL_BEGIN`], a line feed, then `EnrollResponse` and nothing more |
//!
//! Output before the begin line was written by the login shell's start files and is ignored. A path that does not begin
//! with `/` is relative to the remote user's home.
//!
//! Root would run the program, so no other user of the machine may be able to change it. A probe reports if one can
//! ([`probe_key::UNSAFE`]), because another path may be safe. The other steps end with [`UNSAFE_PATH`] before they do
//! anything.

use crate::shell_words::{self, NulInWord};

/// Path of the role server where no better place is known, relative to the home of the SSH user.
pub const DEFAULT_AGENT_PATH: &str = ".local/lib/shepherd/roleserver";

/// First line of a probe's output.
pub const PROBE_BEGIN: &str = "shepherd-probe-begin";
/// First line of an upload's output.
pub const UPLOAD_BEGIN: &str = "shepherd-upload-begin";
/// The line before an enrolment's protobuf response.
pub const ENROLL_BEGIN: &str = "shepherd-enroll-begin";

/// Exit status of an upload and of an enrolment: other users of the machine can change the file at the path, or a
/// directory on the way to it. Standard error has the reason.
pub const UNSAFE_PATH: u32 = 47;

/// Keys in the output of a probe.
pub mod probe_key {
    /// Output of `uname -s`: `Linux`.
    pub const OS: &str = "os";
    /// Output of `uname -m`: `x86_64`, `aarch64`, ….
    pub const ARCH: &str = "arch";
    /// The remote user's name.
    pub const USER: &str = "user";
    /// The remote user's home.
    pub const HOME: &str = "home";
    /// The digest program of the machine: `sha256sum`, `openssl`, `shasum` or `none`.
    pub const SHA256: &str = "sha256";
    /// SHA-256 of the file at the path in lower case hex, or `none` when there is no such file.
    pub const DIGEST: &str = "digest";
    /// Number of the remote user.
    pub const UID: &str = "uid";
    /// `1` while `SELinux` enforces a policy.
    pub const SELINUX: &str = "selinux";
    /// Why other users can change the file at the path, or a directory on the way to it; empty if they cannot. The file is
    /// not looked at then.
    pub const UNSAFE: &str = "unsafe";
    /// A directory that may get the program, in several lines: first that of the path, then those of a list.
    pub const PLACE: &str = "place";
}

/// Exit statuses of the upload script; `takeover` has the sentence for each.
pub mod upload_status {
    /// The directory cannot be made or written.
    pub const DIRECTORY: u32 = 41;
    /// Writing failed: no space, read-only, a quota.
    pub const WRITE: u32 = 42;
    /// Fewer or more bytes arrived than were announced.
    pub const SIZE: u32 = 43;
    /// The bytes that arrived have another digest.
    pub const DIGEST: u32 = 44;
    /// The file cannot be made executable: a filesystem mounted `noexec`.
    pub const NO_EXEC: u32 = 45;
    /// The finished file cannot be moved to its path.
    pub const RENAME: u32 = 46;
}

/// One of the commands, with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RemoteStep {
    /// Reports what the machine is and what is at `path`.
    Probe {
        /// Path of the role server.
        path: String,
    },
    /// Stores standard input at `path`, whole or not at all.
    Upload {
        /// Where to store it.
        path: String,
        /// Lower case hex of the content.
        sha256: String,
        /// Size of the content in bytes.
        size: u64,
    },
    /// Runs `path enroll`, with the request on standard input.
    Enroll {
        /// The role server's program.
        path: String,
    },
}

impl RemoteStep {
    /// Name of the step in the command: `shepherd-probe`, `shepherd-upload` or `shepherd-enroll`.
    #[must_use]
    pub const fn marker(&self) -> &'static str {
        match self {
            Self::Probe { .. } => "shepherd-probe",
            Self::Upload { .. } => "shepherd-upload",
            Self::Enroll { .. } => "shepherd-enroll",
        }
    }

    /// The exec string that runs `script` with this step's name and arguments.
    ///
    /// # Errors
    ///
    /// [`NulInWord`] when the path holds a NUL character.
    pub fn to_command(&self, script: &str) -> Result<String, NulInWord> {
        let mut words = vec!["sh".to_owned(), "-c".to_owned(), script.to_owned(), self.marker().to_owned()];
        match self {
            Self::Probe { path } | Self::Enroll { path } => words.push(path.clone()),
            Self::Upload { path, sha256, size } => {
                words.extend([path.clone(), sha256.clone(), size.to_string()]);
            }
        }
        shell_words::join(&words)
    }

    /// Recognises an exec string made by [`RemoteStep::to_command`]; `None` for any other.
    #[must_use]
    pub fn parse(command: &str) -> Option<Self> {
        let words = shell_words::split(command)?;
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words.as_slice() {
            ["sh", "-c", _, "shepherd-probe", path] => Some(Self::Probe { path: (*path).to_owned() }),
            ["sh", "-c", _, "shepherd-upload", path, sha256, size] => Some(Self::Upload {
                path: (*path).to_owned(),
                sha256: (*sha256).to_owned(),
                size: size.parse().ok()?,
            }),
            ["sh", "-c", _, "shepherd-enroll", path] => Some(Self::Enroll { path: (*path).to_owned() }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_is_recognised_from_its_command() {
        for step in [
            RemoteStep::Probe { path: DEFAULT_AGENT_PATH.to_owned() },
            RemoteStep::Upload { path: "/opt/a b's/agent".to_owned(), sha256: "ab".repeat(32), size: 7 },
            RemoteStep::Enroll { path: "/root/roleserver".to_owned() },
        ] {
            let command = step.to_command("echo \"$1\"; exit 0").unwrap();
            assert_eq!(RemoteStep::parse(&command), Some(step));
        }
    }

    #[test]
    fn a_command_of_another_shape_is_no_step() {
        for command in [
            "",
            "reboot",
            "sh -c 'x' shepherd-probe",
            "sh -c 'x' shepherd-upload /p abc many",
            "sh -c 'x' shepherd-probe /p; reboot",
        ] {
            assert_eq!(RemoteStep::parse(command), None, "{command}");
        }
    }
}
