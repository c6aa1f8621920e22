//! Where the simulated fleet is kept: in a directory that goes with us, or in one that stays.
//!
//! A directory that stays has a mark, which is also what one demo at a time has
//! locked. Without the mark nothing in it is ours: `--dir /var/lib/shepherd`
//! must neither run machines of a demo on a site's database nor, with `--fresh`,
//! remove its keys.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use crate::service::demo::DemoFlags;
use crate::service::failure::Failure;
use crate::service::scratch::Scratch;

/// What tells the directory of a demo from others.
const MARK: &str = "shepherd-demo.lock";
/// What a kept demo has in its directory besides.
const KEPT: [&str; 8] = [
    "simulator.json",
    "simulator.json.disks",
    "simulator.json.calls.jsonl",
    "simulator.log",
    "bmdb",
    "ssh_key",
    "secrets.key",
    "agent_address",
];

/// Where the simulated fleet is kept.
pub(super) enum FleetDirectory {
    /// Goes with us.
    Scratch(Scratch),
    /// Stays; ours alone for as long as the file is locked.
    Kept { path: PathBuf, _lock: File },
}

impl FleetDirectory {
    /// The directory of a demo: emptied of an earlier fleet when that is asked for.
    pub(super) fn open(demo: &DemoFlags) -> Result<Self, Failure> {
        let Some(path) = &demo.dir else {
            return Scratch::create("shepherd-demo").map(Self::Scratch);
        };
        let failed = |what: &str, error: io::Error| {
            Failure::failed(format!("cannot use --dir {}: {what}: {error}", path.display()))
        };
        // PostgreSQL runs in another directory than we do.
        let path = &std::path::absolute(path).map_err(|error| failed("its path", error))?;
        // Entered by the user that PostgreSQL runs as, too; keys in it have modes of their own.
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(path)
            .map_err(|error| failed("it cannot be made", error))?;
        if !path.join(MARK).exists()
            && let Some(foreign) = KEPT.iter().find(|name| path.join(name).exists())
        {
            return Err(Failure::usage(format!(
                "--dir {} is no directory of a demo, and holds {foreign}, which a demo would use or remove; give \
                 another directory",
                path.display()
            )));
        }
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path.join(MARK))
            .map_err(|error| failed(MARK, error))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Failure::usage(format!(
                    "another demo runs in --dir {}; end it with Ctrl-C, or give another directory",
                    path.display()
                )));
            }
            Err(TryLockError::Error(error)) => return Err(failed(MARK, error)),
        }
        if demo.fresh {
            for name in KEPT {
                remove(&path.join(name))
                    .map_err(|error| failed(&format!("{name} cannot be removed"), error))?;
            }
        }
        Ok(Self::Kept { path: path.clone(), _lock: lock })
    }

    /// Where it is, if it stays.
    pub(super) fn kept(&self) -> Option<&Path> {
        match self {
            Self::Scratch(_) => None,
            Self::Kept { path, .. } => Some(path),
        }
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Scratch(scratch) => scratch.path(),
            Self::Kept { path, .. } => path,
        }
    }
}

/// Removes a file or a directory, if there is one.
fn remove(path: &Path) -> io::Result<()> {
    let removed = match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::IsADirectory => fs::remove_dir_all(path),
        removed => removed,
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
