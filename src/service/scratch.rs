//! Directories that go when we go, in whatever way we go.
//!
//! A process that is killed outright removes nothing. Each directory therefore
//! has a guardian, a small shell script that holds the other end of a pipe from
//! us: when the pipe ends, it removes the directory. `bmdb/private_postgres.rs`
//! says why a pipe and not the kernel's parent-death signal. The guardian has a
//! process group of its own, because Ctrl-C on a terminal reaches the whole
//! group.

use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::model::ids::ProcessId;
use crate::service::failure::Failure;

const GUARDIAN: &str = include_str!("scratch_guardian.sh");

/// A directory that only we can enter, and that is gone when this is dropped or when we die.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    guardian: Child,
}

impl Scratch {
    /// Makes `PREFIX-ID` where temporary files go.
    pub fn create(prefix: &str) -> Result<Self, Failure> {
        let path = std::env::temp_dir().join(format!("{prefix}-{}", ProcessId::generate()));
        let failed = |what: &str, error: io::Error| {
            Failure::failed(format!("cannot make the directory {}: {what}{error}", path.display()))
        };
        // The guardian first: killed between the two, we would leave a directory that nobody removes.
        let mut guardian = Command::new("/bin/sh")
            .args(["-c", GUARDIAN, "shepherd-scratch-guardian"])
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|error| failed("nothing to remove it at the end: ", error))?;
        if let Err(error) = std::fs::DirBuilder::new().mode(0o700).create(&path) {
            drop(guardian.stdin.take());
            // It has nothing to do and ends at once.
            let _ = guardian.wait();
            return Err(failed("", error));
        }
        Ok(Self { path, guardian })
    }

    /// The directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
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
        let scratch = Scratch::create("shepherd-test-scratch").unwrap();
        let path = scratch.path().to_owned();
        std::fs::create_dir(path.join("inner")).unwrap();
        std::fs::write(path.join("inner/file"), "x").unwrap();
        drop(scratch);
        assert!(!path.exists());
    }
}
