//! The limit of open files of programs that are started.
//!
//! A program of ours raises its own soft limit to the hard one, because it serves many connections. The limit is
//! inherited. What we start may call `select`, which breaks with descriptors above 1,024, the soft limit nearly
//! everywhere. So each program that is started gets the usual limit again.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The soft limit of programs that are started.
const USUAL_FILES: u64 = 1024;

/// The soft limit that a program gets which a process with this limit starts: the usual one, and never a higher one.
/// `None` means no limit.
fn child_files(soft: Option<u64>) -> u64 {
    soft.unwrap_or(USUAL_FILES).min(USUAL_FILES)
}

/// A command that gives its program the usual limit of open files.
pub trait UsualFileLimit {
    /// Lowers the soft limit in the new process, before its program begins. A command that replaces this process
    /// lowers that of this process.
    fn usual_file_limit(&mut self) -> &mut Self;
}

impl UsualFileLimit for Command {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_get_the_usual_limit_or_a_lower_one() {
        for (soft, child) in [(Some(1_048_576), 1024), (Some(1024), 1024), (Some(256), 256), (None, 1024)] {
            assert_eq!(child_files(soft), child, "{soft:?}");
        }
    }

    #[test]
    fn program_is_started_with_the_usual_limit() {
        let maximum = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).unwrap();
        let output = Command::new("sh").args(["-c", "ulimit -Sn"]).usual_file_limit().output().unwrap();
        let expected = child_files(maximum).to_string();
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), expected);
        assert_eq!(getrlimit(Resource::Nofile).current, maximum, "the limit of this process stays");
    }
}
