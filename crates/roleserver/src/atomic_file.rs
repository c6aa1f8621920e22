//! Atomic file replacement: temporary file, fsync, rename, fsync of the directory.
//!
//! After a crash in the middle the old file or the new one exists, and never a half. That is also true of a loss of power,
//! except for files that do not wait for the disk ([`Durability::UntilPowerLoss`]). A machine that loses power in the
//! middle of an enrolment must come back with the old fence or the new one, not with none.
//!
//! A write that fails, as on a full disk, removes its temporary file. One that a crash leaves is removed by the next
//! start ([`leftovers`][crate::leftovers]).
//!
//! No file can take the place of a directory. A hint, which may be lost, moves it out of the way ([`replace_hint`]). Where
//! truth should be, the directory stays for a person.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Result, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::disk;

/// What survives a loss of power after a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// The new file survives.
    Durable,
    /// The old file, an empty one or a part may be there instead. It is for hints about this boot alone, such as records of
    /// running processes: none of these survives a loss of power, and a damaged hint counts as absent.
    UntilPowerLoss,
}

/// What is added to the name of a directory that was in the place of a hint.
const MOVED_DIRECTORY: &str = ".damaged";

/// Distinguishes the temporary files of this process.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// Replaces a file, readable by its owner alone. Other tasks of the role server go on meanwhile
/// ([`disk::run_beside`]).
pub fn replace_file(path: &Path, bytes: &[u8], durability: Durability) -> Result<()> {
    let nowhere =
        || Error::new(ErrorKind::InvalidInput, format!("{} is no file in a directory", path.display()));
    let (directory, name) = path.parent().zip(path.file_name()).ok_or_else(nowhere)?;
    // Two writers of one file may overlap: tasks of this process, or a dying process and its successor. None of them may
    // rename what the other has half written.
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{}.{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    let temporary = directory.join(hidden);
    let write = || -> Result<()> {
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(bytes)?;
        if durability == Durability::Durable {
            disk::sync_file(&file, path)?;
        }
        std::fs::rename(&temporary, path)?;
        if durability == Durability::Durable {
            disk::sync_file(&File::open(directory)?, directory)?;
        }
        Ok(())
    };
    disk::run_beside(path, write).inspect_err(|_| {
        // No half-written file stays. If the removal fails too, that adds nothing to the first error.
        let _ = std::fs::remove_file(&temporary);
    })
}

/// Replaces a hint, also if a directory is in its place ([`clear_directory`]).
pub fn replace_hint(path: &Path, bytes: &[u8], durability: Durability) -> Result<()> {
    match replace_file(path, bytes, durability) {
        Err(error) if error.kind() == ErrorKind::IsADirectory => {
            disk::run_beside(path, || clear_directory(path))?;
            replace_file(path, bytes, durability)
        }
        outcome => outcome,
    }
}

/// Removes an empty directory. Another one gets the name with `.damaged` at its end, where a person finds what is in it. If
/// such a one is there already, the directory stays, and that is the error.
pub fn clear_directory(path: &Path) -> Result<()> {
    std::fs::remove_dir(path).or_else(|_| {
        let mut moved = path.as_os_str().to_owned();
        moved.push(MOVED_DIRECTORY);
        std::fs::rename(path, moved)
    })
}

/// Removes the temporary files of writers that ended in the middle of a write, in a directory. This process must not be
/// writing there. The file of another process that still runs stays. Returns how many were removed.
pub fn remove_leftovers(directory: &Path) -> Result<usize> {
    let mut removed = 0;
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let Some(writer) = entry.file_name().to_str().and_then(parse_writer) else { continue };
        let is_running = writer != std::process::id() && Path::new("/proc").join(writer.to_string()).exists();
        if !is_running && entry.file_type()?.is_file() {
            match std::fs::remove_file(entry.path()) {
                // Its writer renamed it meanwhile, and ended.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                done => {
                    done?;
                    removed += 1;
                }
            }
        }
    }
    Ok(removed)
}

/// The process that writes a temporary file of this name; `None` for another file.
fn parse_writer(name: &str) -> Option<u32> {
    let (rest, number) = name.strip_prefix('.')?.rsplit_once('.')?;
    let (target, process) = rest.rsplit_once('.')?;
    number.parse::<u64>().ok()?;
    process.parse().ok().filter(|_| !target.is_empty())
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
                replace_file(&path, text.as_bytes(), durability).unwrap();
                assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
            }
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
        let taken = directory.path().join("taken");
        std::fs::create_dir_all(taken.join("full")).unwrap();
        assert!(replace_file(&taken, b"x", Durability::Durable).is_err());
        assert!(replace_file(Path::new("/"), b"x", Durability::Durable).is_err());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2, "no temporary file stays");
    }

    #[test]
    fn directory_in_the_place_of_a_hint_makes_room_and_nothing_in_it_is_lost() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("hint");
        std::fs::create_dir(&path).unwrap();
        replace_hint(&path, b"one", Durability::Durable).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"one");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "an empty one is removed");
        let fill = |text: &str| {
            std::fs::remove_file(&path).unwrap();
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join("file"), text).unwrap();
        };
        fill("first");
        replace_hint(&path, b"two", Durability::UntilPowerLoss).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        let moved = directory.path().join("hint.damaged/file");
        assert_eq!(std::fs::read_to_string(&moved).unwrap(), "first");
        fill("second");
        assert!(replace_hint(&path, b"three", Durability::Durable).is_err(), "one is there already");
        assert_eq!(std::fs::read_to_string(path.join("file")).unwrap(), "second");
        assert_eq!(std::fs::read_to_string(&moved).unwrap(), "first");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2, "no temporary file stays");
    }

    #[test]
    fn half_written_files_of_ended_processes_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let own = std::process::id();
        // Larger than any process id (proc(5), `pid_max`).
        let ended = 5_000_000;
        let removed = [format!(".a.json.{ended}.0"), format!(".a.json.{own}.7")];
        let other = [".1.0", ".a.json.x.0", ".a.json", "a.json.1.0", ".a.json.1.0"];
        for name in removed.iter().map(String::as_str).chain(other) {
            std::fs::write(directory.path().join(name), "half").unwrap();
        }
        std::fs::create_dir(directory.path().join(format!(".b.{ended}.0"))).unwrap();
        assert_eq!(remove_leftovers(directory.path()).unwrap(), removed.len());
        for name in &removed {
            assert!(!directory.path().join(name).exists(), "{name}");
        }
        for name in other {
            assert!(directory.path().join(name).exists(), "{name}");
        }
        assert_eq!(remove_leftovers(directory.path()).unwrap(), 0);
        assert!(remove_leftovers(&directory.path().join("missing")).is_err());
    }
}
