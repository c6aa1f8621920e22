//! The role server's own log file, bounded in size.
//!
//! The standard error of a role server goes to systemd's journal, or to `agent.log` if the detached supervisor started
//! it. To be read remotely it must be in one place in both cases. So a role server whose standard error is not that
//! file already also writes its lines there. The file is truncated when it grows too large
//! ([`log::truncate_if_large`]), and a full disk does not silence standard error.

use std::fs::File;
use std::io::{Result, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::child::log;

/// Bytes that are written between two checks of the file's size.
const CHECK_BYTES: usize = 64 << 10;

#[derive(Debug)]
struct OpenLog {
    path: PathBuf,
    file: File,
    unchecked_bytes: usize,
}

/// Writes lines to a file, or nowhere; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct OwnLog(Arc<Mutex<Option<OpenLog>>>);

impl OwnLog {
    /// Appends to the file at `path`. It writes nowhere if standard error is that file, or the file cannot be opened.
    #[must_use]
    pub fn open_path(path: &Path) -> Self {
        Self::open_unless_stderr(
            path,
            rustix::fs::fstat(std::io::stderr()).ok().map(|stat| (stat.st_dev, stat.st_ino)),
        )
    }

    /// As [`open_path`](Self::open_path), with the device and inode number of standard error.
    fn open_unless_stderr(path: &Path, standard_error: Option<(u64, u64)>) -> Self {
        let opened = log::open_log(path).ok().filter(|file| {
            let is = file.metadata().ok().map(|data| (data.dev(), data.ino()));
            is.is_some() && is != standard_error
        });
        let opened = opened.map(|file| OpenLog { path: path.to_owned(), file, unchecked_bytes: CHECK_BYTES });
        Self(Arc::new(Mutex::new(opened)))
    }
}

impl Write for OwnLog {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        if let Some(open) = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            open.unchecked_bytes += bytes.len();
            if open.unchecked_bytes >= CHECK_BYTES {
                open.unchecked_bytes = 0;
                // A file that cannot be truncated now may be later.
                let _ = log::truncate_if_large(&open.path);
            }
            // If the disk is full, the line is still on standard error.
            let _ = open.file.write_all(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_go_to_the_file_unless_they_are_there_already() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.log");
        let mut own = OwnLog::open_unless_stderr(&path, None);
        own.clone().write_all(b"one\n").unwrap();
        own.write_all(b"two\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntwo\n");
        let data = std::fs::metadata(&path).unwrap();
        OwnLog::open_unless_stderr(&path, Some((data.dev(), data.ino()))).write_all(b"three\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntwo\n", "it came there by standard error");
        assert!(OwnLog::open_path(&directory.path().join("no/such/directory")).write_all(b"four\n").is_ok());
    }

    #[test]
    fn file_does_not_grow_for_ever() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.log");
        let mut own = OwnLog::open_unless_stderr(&path, None);
        let line = [b'x'; 8 << 10];
        for _ in 0..2_000 {
            own.write_all(&line).unwrap();
        }
        let length = std::fs::metadata(&path).unwrap().len();
        assert!(length <= log::MAX_LOG_BYTES + (CHECK_BYTES + line.len()) as u64, "{length} bytes");
        assert!(directory.path().join("agent.log.1").exists());
    }
}
