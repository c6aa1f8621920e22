//! What is written down of releases, and which program file has which name.
//!
//! In the state directory: `update.json`, what is on trial; `release.json`, how the newest order ended; `release.part`,
//! what was fetched so far. Beside the program at the stable path: `….candidate`, what is or was tried, and `….previous`,
//! what was there before it. All of these replace each other whole.

use std::fs::{File, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::roleserver::durable::{self, Durability};
use crate::roleserver::running::program_digest;
use crate::roleserver::update::decision::{Concluded, Trial};

/// Names of a state directory and beside a program.
#[derive(Clone, Debug)]
pub struct UpdateFiles {
    directory: PathBuf,
}

/// A program's name with something after it, in the same directory.
fn beside(program: &Path, what: &str) -> PathBuf {
    let mut name = program.as_os_str().to_owned();
    name.push(what);
    PathBuf::from(name)
}

impl UpdateFiles {
    /// Those of this state directory.
    #[must_use]
    pub fn of(state_directory: &Path) -> Self {
        Self { directory: state_directory.to_owned() }
    }

    fn update(&self) -> PathBuf {
        self.directory.join("update.json")
    }

    fn concluded_path(&self) -> PathBuf {
        self.directory.join("release.json")
    }

    /// Where a release is fetched to.
    #[must_use]
    pub fn part(&self) -> PathBuf {
        self.directory.join("release.part")
    }

    /// What is on trial. A file that is damaged says nothing: then the program that was started is what it is.
    #[must_use]
    pub fn trial(&self) -> Option<Trial> {
        read(&self.update())
    }

    /// Writes down what is on trial; it is on the disk when this returns.
    pub fn write_trial(&self, trial: &Trial) -> std::io::Result<()> {
        write(&self.update(), trial)
    }

    /// Forgets what was on trial.
    pub fn end_trial(&self) -> std::io::Result<()> {
        match std::fs::remove_file(self.update()) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            other => other?,
        }
        File::open(&self.directory)?.sync_all()
    }

    /// How the newest order ended.
    #[must_use]
    pub fn concluded(&self) -> Concluded {
        read(&self.concluded_path()).unwrap_or_default()
    }

    /// Writes down how an order ended; it is on the disk when this returns.
    pub fn conclude(&self, concluded: &Concluded) -> std::io::Result<()> {
        write(&self.concluded_path(), concluded)
    }

    /// Puts what was fetched beside the program at `stable`, ready to be run; gives its path. It has this digest.
    ///
    /// The directory is that of the stable program, so that it can take its name in one step, and is known by then to be
    /// one that can be written to and that programs can be run from.
    pub fn stage(&self, stable: &Path, sha256: &str) -> Result<PathBuf, String> {
        let candidate = beside(stable, ".candidate");
        let staged = || -> std::io::Result<String> {
            remove(&candidate)?;
            std::fs::copy(self.part(), &candidate)?;
            std::fs::set_permissions(&candidate, Permissions::from_mode(0o755))?;
            File::open(&candidate)?.sync_all()?;
            program_digest(&candidate)
        };
        match staged() {
            Ok(digest) if digest == sha256 => {
                // What is left of it is in nobody's way.
                let _ = remove(&self.part());
                Ok(candidate)
            }
            Ok(_) => Err(format!("{} is another file by now", candidate.display())),
            Err(error) => Err(format!("putting the release at {} failed: {error}", candidate.display())),
        }
    }

    /// Removes a candidate that has failed.
    pub fn unstage(&self, stable: &Path) {
        if let Err(error) = remove(&beside(stable, ".candidate")).and_then(|()| remove(&self.part())) {
            tracing::warn!(%error, "a release that is not tried any more stays on the disk");
        }
    }
}

/// Gives the candidate the stable program's name, in one step; the former one is kept as `….previous`.
pub fn promote(trial: &Trial) -> std::io::Result<()> {
    let directory = trial.stable.parent().unwrap_or_else(|| Path::new("/"));
    if program_digest(&trial.candidate)? != trial.sha256 {
        let why = format!("{} is not what was tried", trial.candidate.display());
        return Err(std::io::Error::new(ErrorKind::InvalidData, why));
    }
    let previous = beside(&trial.stable, ".previous");
    remove(&previous)?;
    // Where a filesystem knows no links, there is none kept: that is no reason to stay with the former one.
    if let Err(error) = std::fs::hard_link(&trial.stable, &previous) {
        tracing::warn!(%error, "the former release is not kept");
    }
    std::fs::rename(&trial.candidate, &trial.stable)?;
    File::open(directory)?.sync_all()
}

fn remove(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let bytes = std::fs::read(path).ok()?;
    serde_json::from_slice(&bytes)
        .inspect_err(|error| tracing::warn!(%error, path = %path.display(), "a damaged file is passed over"))
        .ok()
}

fn write(path: &Path, value: &impl Serialize) -> std::io::Result<()> {
    durable::replace(path, &serde_json::to_vec_pretty(value)?, Durability::Durable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::roleserver::running::Instance;

    fn digest(bytes: &[u8]) -> String {
        hex::encode(ring::digest::digest(&ring::digest::SHA256, bytes))
    }

    #[test]
    fn candidate_takes_the_stable_name_whole_and_the_former_one_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let files = UpdateFiles::of(directory.path());
        let stable = directory.path().join("roleserver");
        std::fs::write(&stable, "old").unwrap();
        assert!(files.stage(&stable, &digest(b"new")).unwrap_err().contains("failed"), "nothing was fetched");
        std::fs::write(files.part(), "odd").unwrap();
        assert!(files.stage(&stable, &digest(b"new")).unwrap_err().contains("another file"));
        std::fs::write(files.part(), "new").unwrap();
        let candidate = files.stage(&stable, &digest(b"new")).unwrap();
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
            instance: Instance { pid: 1, start_time: 1, boot_id: "b".to_owned() },
        };
        files.write_trial(&trial).unwrap();
        assert_eq!(files.trial(), Some(trial.clone()));
        promote(&trial).unwrap();
        assert_eq!(std::fs::read(&stable).unwrap(), b"new");
        assert_eq!(std::fs::read(beside(&stable, ".previous")).unwrap(), b"old");
        assert!(promote(&trial).is_err(), "there is nothing more to promote");
        files.end_trial().unwrap();
        files.end_trial().unwrap();
        assert_eq!(files.trial(), None);
        let concluded = Concluded { generation: 1, error: None };
        files.conclude(&concluded).unwrap();
        assert_eq!(files.concluded(), concluded);
        std::fs::write(directory.path().join("update.json"), "{").unwrap();
        std::fs::write(directory.path().join("release.json"), "{").unwrap();
        assert_eq!((files.trial(), files.concluded()), (None, Concluded::default()));
    }
}
