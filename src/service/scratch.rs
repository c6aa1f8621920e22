//! Temporary directories removed even when the process is killed.
//!
//! A process that is killed cannot remove anything. Each directory therefore has a guardian, a small shell script that
//! reads from a pipe which this process holds open: when the pipe ends, it removes the directory.
//! `bmdb/connection/private_postgres/mod.rs` explains why it is a pipe and not the kernel's parent-death signal. The
//! guardian has a process group of its own, because Ctrl-C on a terminal reaches the whole group.

use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::model::ids::ProcessId;
use crate::service::failure::ExitFailure;
use hardening::file_limit::UsualFileLimit as _;

const GUARDIAN: &str = include_str!("scratch_guardian.sh");

/// A directory that only this user can enter. It is removed when this is dropped or when the process dies.
#[derive(Debug)]
pub struct ScratchDirectory {
    path: PathBuf,
    guardian: Child,
}

impl ScratchDirectory {
    /// Creates `PREFIX-ID` in the directory for temporary files.
    pub fn create(prefix: &str) -> Result<Self, ExitFailure> {
        let path = std::env::temp_dir().join(format!("{prefix}-{}", ProcessId::generate()));
        let failed = |what: &str, error: io::Error| {
            ExitFailure::failed(format!("cannot make the directory {}: {what}{error}", path.display()))
        };
        // The guardian starts first: a process killed between the two would leave a directory that nobody removes.
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", GUARDIAN, "shepherd-scratch-guardian"])
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0);
        let mut guardian = hardening::restore_core_limit(command.usual_file_limit())
            .spawn()
            .map_err(|error| failed("nothing to remove it at the end: ", error))?;
        if let Err(error) = std::fs::DirBuilder::new().mode(0o700).create(&path) {
            drop(guardian.stdin.take());
            // The guardian has nothing to do and ends at once.
            let _ = guardian.wait();
            return Err(failed("", error));
        }
        Ok(Self { path, guardian })
    }

    /// The path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ScratchDirectory {
    fn drop(&mut self) {
        drop(self.guardian.stdin.take());
        if let Err(error) = self.guardian.wait() {
            tracing::warn!(path = %self.path.display(), %error, "cannot tell whether the directory is removed");
        }
        if self.path.exists() {
            tracing::warn!(path = %self.path.display(), "cannot remove the directory");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_directory_is_gone_with_what_is_in_it() {
        let scratch = ScratchDirectory::create("shepherd-test-scratch").unwrap();
        let path = scratch.path().to_owned();
        std::fs::create_dir(path.join("inner")).unwrap();
        std::fs::write(path.join("inner/file"), "x").unwrap();
        drop(scratch);
        assert!(!path.exists());
    }
}
