//! Files of a self-update: trial, result, candidate, previous program.
//!
//! In the state directory: `update.json`, the release on trial; `release.json`, the outcome of the newest order;
//! `release.part`, the part of a release that was fetched so far. Beside the program at the stable path: `….candidate`,
//! the program that is or was tried, and `….previous`, the one before it. Each of these files is replaced as a whole.

use std::fs::{File, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::atomic_file::{self, Durability};
use crate::disk;
use crate::process::program_digest;
use crate::update::decision::{Trial, UpdateResult};

/// The files in a state directory and beside a program.
#[derive(Clone, Debug)]
pub struct UpdateFiles {
    directory: PathBuf,
}

/// The path of a program with a suffix, in the same directory.
fn sibling_path(program: &Path, what: &str) -> PathBuf {
    let mut name = program.as_os_str().to_owned();
    name.push(what);
    PathBuf::from(name)
}

impl UpdateFiles {
    /// The files of this state directory.
    #[must_use]
    pub fn in_state_directory(state_directory: &Path) -> Self {
        Self { directory: state_directory.to_owned() }
    }

    fn trial_path(&self) -> PathBuf {
        self.directory.join("update.json")
    }

    fn result_path(&self) -> PathBuf {
        self.directory.join("release.json")
    }

    /// Path of the file that a release is fetched to.
    #[must_use]
    pub fn part_path(&self) -> PathBuf {
        self.directory.join("release.part")
    }

    /// Reads the trial. A damaged file counts as none: then the program that was started stays.
    #[must_use]
    pub fn read_trial(&self) -> Option<Trial> {
        read_json(&self.trial_path())
    }

    /// Writes the trial; it is durable when this returns.
    pub fn write_trial(&self, trial: &Trial) -> std::io::Result<()> {
        write_json(&self.trial_path(), trial)
    }

    /// Removes the record of the trial.
    pub fn remove_trial(&self) -> std::io::Result<()> {
        let remove = || {
            match std::fs::remove_file(self.trial_path()) {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                other => other?,
            }
            disk::sync_file(&File::open(&self.directory)?, &self.directory)
        };
        disk::run_beside(&self.trial_path(), remove)
    }

    /// Reads the outcome of the newest order.
    #[must_use]
    pub fn read_result(&self) -> UpdateResult {
        read_json(&self.result_path()).unwrap_or_default()
    }

    /// Writes the outcome of an order; it is durable when this returns.
    pub fn write_result(&self, concluded: &UpdateResult) -> std::io::Result<()> {
        write_json(&self.result_path(), concluded)
    }

    /// Copies the fetched release beside the program at `stable`, ready to run, and verifies its digest. Returns its
    /// path.
    ///
    /// It is in the directory of the stable program, so that it can take its name in one step. That directory is then
    /// known to be writable, and programs can be run from it.
    pub fn stage_candidate(&self, stable: &Path, sha256: &str) -> Result<PathBuf, String> {
        let candidate = sibling_path(stable, ".candidate");
        let staged = || -> std::io::Result<String> {
            remove_file(&candidate)?;
            std::fs::copy(self.part_path(), &candidate)?;
            std::fs::set_permissions(&candidate, Permissions::from_mode(0o755))?;
            File::open(&candidate)?.sync_all()?;
            program_digest(&candidate)
        };
        match staged() {
            Ok(digest) if digest == sha256 => {
                // A leftover of the download does no harm.
                let _ = remove_file(&self.part_path());
                Ok(candidate)
            }
            Ok(_) => Err(format!(
                "{} has changed meanwhile: its digest is not that of the order",
                candidate.display()
            )),
            Err(error) => Err(format!("putting the release at {} failed: {error}", candidate.display())),
        }
    }

    /// Removes a candidate that has failed.
    pub fn remove_candidate(&self, stable: &Path) {
        if let Err(error) =
            remove_file(&sibling_path(stable, ".candidate")).and_then(|()| remove_file(&self.part_path()))
        {
            tracing::warn!(%error, "a release that is not tried any more stays on the disk");
        }
    }
}

/// Gives the candidate the stable program's name in one step; the former program stays as `….previous`.
pub fn promote_candidate(trial: &Trial) -> std::io::Result<()> {
    let directory = trial.stable.parent().unwrap_or_else(|| Path::new("/"));
    if program_digest(&trial.candidate)? != trial.sha256 {
        let why = format!("{} is not what was tried", trial.candidate.display());
        return Err(std::io::Error::new(ErrorKind::InvalidData, why));
    }
    let previous = sibling_path(&trial.stable, ".previous");
    remove_file(&previous)?;
    // A filesystem without hard links keeps no former program; that is no reason to stay with it.
    if let Err(error) = std::fs::hard_link(&trial.stable, &previous) {
        tracing::warn!(%error, "the former release could not be kept for a rollback");
    }
    std::fs::rename(&trial.candidate, &trial.stable)?;
    File::open(directory)?.sync_all()
}

fn remove_file(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let bytes = std::fs::read(path).ok()?;
    serde_json::from_slice(&bytes)
        .inspect_err(|error| tracing::warn!(%error, path = %path.display(), "a damaged file is ignored"))
        .ok()
}

fn write_json(path: &Path, value: &impl Serialize) -> std::io::Result<()> {
    atomic_file::replace_file(path, &serde_json::to_vec_pretty(value)?, Durability::Durable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::ProcessInstance;

    fn digest(bytes: &[u8]) -> String {
        hex::encode(ring::digest::digest(&ring::digest::SHA256, bytes))
    }

    #[test]
    fn candidate_replaces_the_stable_program_which_is_kept_as_previous() {
        let directory = tempfile::tempdir().unwrap();
        let files = UpdateFiles::in_state_directory(directory.path());
        let stable = directory.path().join("roleserver");
        std::fs::write(&stable, "old").unwrap();
        assert!(
            files.stage_candidate(&stable, &digest(b"new")).unwrap_err().contains("failed"),
            "nothing was fetched"
        );
        std::fs::write(files.part_path(), "odd").unwrap();
        assert!(
            files.stage_candidate(&stable, &digest(b"new")).unwrap_err().contains("has changed meanwhile")
        );
        std::fs::write(files.part_path(), "new").unwrap();
        let candidate = files.stage_candidate(&stable, &digest(b"new")).unwrap();
        assert_eq!(std::fs::metadata(&candidate).unwrap().permissions().mode() & 0o777, 0o755);
        assert_eq!(std::fs::read(&stable).unwrap(), b"old", "the stable path changes only when it is proven");
        let trial = Trial {
            generation: 1,
            sha256: digest(b"new"),
            former: digest(b"old"),
            stable: stable.clone(),
            candidate,
            boot_id: "b".to_owned(),
            until_ms: 1,
            patience_ms: 1,
            instance: ProcessInstance { pid: 1, start_time: 1, boot_id: "b".to_owned() },
        };
        files.write_trial(&trial).unwrap();
        assert_eq!(files.read_trial(), Some(trial.clone()));
        promote_candidate(&trial).unwrap();
        assert_eq!(std::fs::read(&stable).unwrap(), b"new");
        assert_eq!(std::fs::read(sibling_path(&stable, ".previous")).unwrap(), b"old");
        assert!(promote_candidate(&trial).is_err(), "there is nothing more to promote");
        files.remove_trial().unwrap();
        files.remove_trial().unwrap();
        assert_eq!(files.read_trial(), None);
        let concluded = UpdateResult { generation: 1, error: None };
        files.write_result(&concluded).unwrap();
        assert_eq!(files.read_result(), concluded);
        std::fs::write(directory.path().join("update.json"), "{").unwrap();
        std::fs::write(directory.path().join("release.json"), "{").unwrap();
        assert_eq!((files.read_trial(), files.read_result()), (None, UpdateResult::default()));
    }
}
