//! Files that are replaced, never rewritten.
//!
//! Temporary file, fsync, rename, fsync of the directory: after a crash in the middle of it there is the old file or the
//! new one, and never a half. A machine that loses power in the middle of an enrolment must come back with the old fence
//! or the new one, not with none.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Result, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// What a write is worth after the power went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// It is there.
    Durable,
    /// The old one may be there instead: for what speaks of running processes, of which none survives that.
    UntilPowerLoss,
}

/// Replaces a file, readable by its owner alone.
pub fn replace(path: &Path, bytes: &[u8], durability: Durability) -> Result<()> {
    let nowhere =
        || Error::new(ErrorKind::InvalidInput, format!("{} is no file in a directory", path.display()));
    let (directory, name) = path.parent().zip(path.file_name()).ok_or_else(nowhere)?;
    // One writer a file, but a dying one may overlap with its successor.
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{}", std::process::id()));
    let temporary = directory.join(hidden);
    let write = || -> Result<()> {
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(bytes)?;
        if durability == Durability::Durable {
            file.sync_all()?;
        }
        std::fs::rename(&temporary, path)?;
        if durability == Durability::Durable {
            File::open(directory)?.sync_all()?;
        }
        Ok(())
    };
    write().inspect_err(|_| {
        // Nothing half-done stays; that this may fail too adds nothing to the first error.
        let _ = std::fs::remove_file(&temporary);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_replaced_whole_and_nothing_else_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        for durability in [Durability::Durable, Durability::UntilPowerLoss] {
            for text in ["long text", "short"] {
                replace(&path, text.as_bytes(), durability).unwrap();
                assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
            }
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
        let taken = directory.path().join("taken");
        std::fs::create_dir_all(taken.join("full")).unwrap();
        assert!(replace(&taken, b"x", Durability::Durable).is_err());
        assert!(replace(Path::new("/"), b"x", Durability::Durable).is_err());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2, "no temporary file stays");
    }
}
