//! The limit of open files: a program raises its own, and programs that it starts get the usual one back.
//!
//! The soft limit is 1,024 nearly everywhere, because a program that calls `select` breaks with descriptors above it.
//! A program that does not may raise its soft limit to the hard one itself, and that is what units intend with
//! `LimitNOFILE=1024:1048576`. The limit is inherited, so whatever we start would break in our place.

use std::fmt;
use std::os::unix::process::CommandExt as _;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::gate::limits::MIN_FILES;

/// The soft limit of programs that we start.
const CHILD_FILES: u64 = 1024;
/// Most files that we want. A kernel may allow a billion, and some code scans all possible descriptors.
const MAX_FILES: u64 = 1 << 20;

/// The process may open too few files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooFewFiles(u64);

impl fmt::Display for TooFewFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "this process may open {} files and needs at least {MIN_FILES}: raise its hard limit, with \
             LimitNOFILE=1024:1048576 in its systemd unit or with `ulimit -Hn`",
            self.0
        )
    }
}

impl std::error::Error for TooFewFiles {}

/// The soft limit to set for these two limits; `None` in them means no limit.
fn raised_limit(soft: Option<u64>, hard: Option<u64>) -> Option<u64> {
    let wanted = hard.unwrap_or(MAX_FILES).min(MAX_FILES);
    soft.is_some_and(|soft| soft < wanted).then_some(wanted)
}

/// Whether so many files are enough.
pub fn check_files(files: u64) -> Result<(), TooFewFiles> {
    if files < MIN_FILES { Err(TooFewFiles(files)) } else { Ok(()) }
}

/// Raises the soft limit of this process to its hard one, and returns how many files it may open.
pub fn raise_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    if let Some(raised) = raised_limit(limit.current, limit.maximum) {
        let wanted = Rlimit { current: Some(raised), maximum: limit.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, wanted) {
            tracing::warn!(%error, wanted = raised, "the limit of open files cannot be raised");
        }
    }
    available_files()
}

/// How many files this process may open.
#[must_use]
pub fn available_files() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(MAX_FILES)
}

/// The soft limit that a program gets which a process with this limit starts: the usual one, and never a higher one.
#[must_use]
pub fn child_files(soft: Option<u64>) -> u64 {
    soft.unwrap_or(CHILD_FILES).min(CHILD_FILES)
}

/// A command whose program gets the usual limit of open files.
pub trait UsualFileLimit {
    /// Lowers the soft limit in the new process, before its program begins. A command that replaces this process
    /// lowers that of this process.
    fn usual_file_limit(&mut self) -> &mut Self;
}

impl UsualFileLimit for std::process::Command {
    fn usual_file_limit(&mut self) -> &mut Self {
        let lower = || -> std::io::Result<()> {
            let limit = getrlimit(Resource::Nofile);
            let lowered = Rlimit { current: Some(child_files(limit.current)), maximum: limit.maximum };
            Ok(setrlimit(Resource::Nofile, lowered)?)
        };
        // SAFETY: between `fork` and `exec`, the closure only makes two system calls. It allocates nothing and takes no
        // lock, which another thread may have held at the time of the `fork`.
        unsafe { self.pre_exec(lower) }
    }
}

impl UsualFileLimit for tokio::process::Command {
    fn usual_file_limit(&mut self) -> &mut Self {
        self.as_std_mut().usual_file_limit();
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft_limit_is_raised_to_the_hard_one_within_reason() {
        for (soft, hard, raised) in [
            (Some(1024), Some(1_048_576), Some(1_048_576)),
            (Some(1024), Some(4096), Some(4096)),
            (Some(1024), Some(1024), None),
            (Some(1024), None, Some(MAX_FILES)),
            (Some(1024), Some(1 << 30), Some(MAX_FILES)),
            (Some(1 << 30), Some(1 << 30), None),
            (None, None, None),
        ] {
            assert_eq!(raised_limit(soft, hard), raised, "{soft:?} {hard:?}");
        }
    }

    #[test]
    fn children_get_the_usual_limit_or_a_lower_one() {
        for (soft, child) in [(Some(1_048_576), 1024), (Some(1024), 1024), (Some(256), 256), (None, 1024)] {
            assert_eq!(child_files(soft), child, "{soft:?}");
        }
    }

    #[test]
    fn program_is_started_with_the_usual_limit() {
        let raised = raise_limit();
        let mut command = std::process::Command::new("sh");
        let output = command.args(["-c", "ulimit -Sn"]).usual_file_limit().output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), raised.min(1024).to_string());
        assert_eq!(available_files(), raised, "the limit of this process stays");
    }

    #[test]
    fn too_few_files_are_one_sentence_with_a_remedy() {
        assert_eq!(check_files(512), Ok(()));
        let text = check_files(256).unwrap_err().to_string();
        assert_eq!(
            text,
            "this process may open 256 files and needs at least 512: raise its hard limit, with \
             LimitNOFILE=1024:1048576 in its systemd unit or with `ulimit -Hn`"
        );
    }
}
