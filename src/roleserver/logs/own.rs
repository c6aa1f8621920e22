//! The role server's own log.
//!
//! Who starts a role server keeps what it writes: systemd in its journal, the detached supervisor in `agent.log`. To be
//! read from afar it has to be in one place however that is, so a role server whose standard error is not that file already
//! writes its lines there, too. The file does not grow for ever ([`log::limit`]), and a disk that takes nothing is no reason
//! to be silent on standard error.

use std::fs::File;
use std::io::{Result, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use tracing_subscriber::fmt::MakeWriter;

use crate::roleserver::child::log;

/// Bytes that are written between two looks at how long the file is.
const LOOK: usize = 64 << 10;

#[derive(Debug)]
struct Open {
    path: PathBuf,
    file: File,
    unlooked: usize,
}

/// Writes lines to a file, or to nothing; cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct OwnLog(Arc<Mutex<Option<Open>>>);

impl OwnLog {
    /// To the file at `path`; to nothing where standard error is that file, or it cannot be opened.
    #[must_use]
    pub fn at(path: &Path) -> Self {
        Self::beside(path, rustix::fs::fstat(std::io::stderr()).ok().map(|stat| (stat.st_dev, stat.st_ino)))
    }

    /// The same, where standard error is the file of that device and number.
    fn beside(path: &Path, standard_error: Option<(u64, u64)>) -> Self {
        let opened = log::open(path).ok().filter(|file| {
            let is = file.metadata().ok().map(|data| (data.dev(), data.ino()));
            is.is_some() && is != standard_error
        });
        let opened = opened.map(|file| Open { path: path.to_owned(), file, unlooked: LOOK });
        Self(Arc::new(Mutex::new(opened)))
    }
}

impl<'a> MakeWriter<'a> for OwnLog {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl Write for OwnLog {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        if let Some(open) = self.0.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            open.unlooked += bytes.len();
            if open.unlooked >= LOOK {
                open.unlooked = 0;
                // A file that cannot be cut short now can be later.
                let _ = log::limit(&open.path);
            }
            // A full disk: the line is on standard error all the same.
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
        let mut own = OwnLog::beside(&path, None);
        own.make_writer().write_all(b"one\n").unwrap();
        own.write_all(b"two\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntwo\n");
        let data = std::fs::metadata(&path).unwrap();
        OwnLog::beside(&path, Some((data.dev(), data.ino()))).write_all(b"three\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntwo\n", "it came there by standard error");
        assert!(OwnLog::at(&directory.path().join("no/such/directory")).write_all(b"four\n").is_ok());
    }

    #[test]
    fn file_does_not_grow_for_ever() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.log");
        let mut own = OwnLog::beside(&path, None);
        let line = [b'x'; 8 << 10];
        for _ in 0..2_000 {
            own.write_all(&line).unwrap();
        }
        let length = std::fs::metadata(&path).unwrap().len();
        assert!(length <= log::LIMIT + (LOOK + line.len()) as u64, "{length} bytes");
        assert!(directory.path().join("agent.log.1").exists());
    }
}
