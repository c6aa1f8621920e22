//! Directory of a demo: temporary, or persistent and locked.
//!
//! A persistent directory has a marker file, which one demo at a time has locked. A directory without it that contains
//! anything does not belong to a demo: `--state_dir /var/lib/shepherd` must not run the machines of a demo on a production database,
//! and must not remove its keys with `--fresh`.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use crate::service::demo::flags::DemoFlags;
use crate::service::demo::reserved_port::DemoListener;
use crate::service::demo::saved_context::{CA_FILE, CONTEXTS_FILE, TOKEN_FILE};
use crate::service::failure::ExitFailure;
use crate::service::scratch::ScratchDirectory;

/// The marker and lock file of a demo's directory.
const LOCK_FILE: &str = "shepherd-demo.lock";
/// The other files in a persistent directory.
const FLEET_FILES: [&str; 14] = [
    "simulator.json",
    "simulator.json.disks",
    "simulator.json.calls.jsonl",
    "simulator.log",
    "bmdb",
    "ssh_key",
    "secrets.key",
    DemoListener::Agents.file_name(),
    DemoListener::Api.file_name(),
    DemoListener::Metrics.file_name(),
    DemoListener::Provider.file_name(),
    CONTEXTS_FILE,
    TOKEN_FILE,
    CA_FILE,
];

/// The directory of the simulated fleet.
pub(super) enum FleetDirectory {
    /// Temporary: removed when the demo ends.
    Scratch(ScratchDirectory),
    /// Persistent, and locked for this process as long as the file is open.
    Persistent { path: PathBuf, _lock: File },
}

impl FleetDirectory {
    /// Opens the directory of a demo, and removes an earlier fleet if `--fresh` is set.
    pub(super) fn open(demo: &DemoFlags) -> Result<Self, ExitFailure> {
        let Some(path) = &demo.state_dir else {
            return ScratchDirectory::create("shepherd-demo").map(Self::Scratch);
        };
        let failed = |what: &str, error: io::Error| {
            ExitFailure::failed(format!("cannot use --state_dir {}: {what}: {error}", path.display()))
        };
        // PostgreSQL runs in another working directory than this process.
        let path = &std::path::absolute(path).map_err(|error| failed("its path", error))?;
        // The user that PostgreSQL runs as must be able to enter it. The keys in it have their own modes.
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(path)
            .map_err(|error| failed("it cannot be made", error))?;
        if !path.join(LOCK_FILE).exists()
            && let Some(foreign) = first_entry(path).map_err(|error| failed("it cannot be listed", error))?
        {
            return Err(ExitFailure::usage(format!(
                "--state_dir {} is not a directory of a demo, and contains {}; give an empty directory, or one that does \
                 not exist",
                path.display(),
                foreign.display()
            )));
        }
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path.join(LOCK_FILE))
            .map_err(|error| failed(LOCK_FILE, error))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(ExitFailure::usage(format!(
                    "another demo runs in --state_dir {}; end it with Ctrl-C, or give another directory",
                    path.display()
                )));
            }
            Err(TryLockError::Error(error)) => return Err(failed(LOCK_FILE, error)),
        }
        if demo.fresh {
            for name in FLEET_FILES {
                remove_path(&path.join(name))
                    .map_err(|error| failed(&format!("{name} cannot be removed"), error))?;
            }
        }
        Ok(Self::Persistent { path: path.clone(), _lock: lock })
    }

    /// The path of a persistent directory.
    pub(super) fn persistent_path(&self) -> Option<&Path> {
        match self {
            Self::Scratch(_) => None,
            Self::Persistent { path, .. } => Some(path),
        }
    }

    /// The path, temporary or persistent.
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Scratch(scratch) => scratch.path(),
            Self::Persistent { path, .. } => path,
        }
    }
}

/// The name of the first entry of a directory in the order of names; `None` if it is empty.
fn first_entry(path: &Path) -> io::Result<Option<PathBuf>> {
    let names: io::Result<Vec<_>> =
        fs::read_dir(path)?.map(|entry| Ok(PathBuf::from(entry?.file_name()))).collect();
    Ok(names?.into_iter().min())
}

/// Removes a file or a directory, if it exists.
fn remove_path(path: &Path) -> io::Result<()> {
    let removed = match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::IsADirectory => fs::remove_dir_all(path),
        removed => removed,
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
