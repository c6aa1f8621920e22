//! Files of a self-update: trial, result, candidate, previous program.
//!
//! In the state directory: `update.json`, the release on trial; `release.json`, the outcome of the newest order;
//! `release.part`, the part of a release that was fetched so far. Beside the program at the stable path: `….candidate`,
//! the program that is or was tried, and `….previous`, the one before it. Each of these files is replaced as a whole.

use std::fs::{File, Permissions, TryLockError};
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use model::signed_artefact::RELEASE_REFUSED;
use model::signed_artefact::signature::{FileVerification, VerificationError};
use ring::digest;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::atomic_file::{self, Durability};
use crate::disk;
use crate::process::file_digest;
use crate::signing_store::SignedBy;
use crate::state_format::check_format;
use crate::update::decision::{Trial, UpdateResult};

/// The files in a state directory and beside a program.
#[derive(Clone, Debug)]
pub struct UpdateFiles {
    directory: PathBuf,
}

/// A release that is ready to run, beside the stable program.
#[derive(Debug)]
pub struct StagedProgram {
    /// Path of the candidate.
    pub path: PathBuf,
    /// The open file that was verified.
    pub file: File,
}

/// Decides between the candidate and its watchdog, which are two processes: the first one to claim the open record of a
/// trial ends that trial. Returns whether it is this one. The claim lasts until the file is closed.
///
/// The claim is a lock in the kernel, so that it never waits for the disk. On a file system without locks, each of the two
/// gets it, and the time alone decides.
#[must_use]
pub fn claim_trial(record: &File) -> bool {
    !matches!(record.try_lock(), Err(TryLockError::WouldBlock))
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

    /// Opens the record of the trial, for [`claim_trial`]; `None` if it cannot be opened.
    #[must_use]
    pub fn open_trial(&self) -> Option<File> {
        File::open(self.trial_path()).ok()
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

    /// Copies the fetched release beside the program at `stable`, ready to run, and verifies its digest and, with
    /// `signed_by`, its signature. The error is a sentence.
    ///
    /// It is in the directory of the stable program, so that it can take its name in one step. That directory is then
    /// known to be writable, and programs can be run from it. The file stays open after it was verified, because another
    /// file may get its name.
    pub fn stage_candidate(
        &self,
        stable: &Path,
        sha256: &str,
        signed_by: Option<&SignedBy>,
    ) -> Result<StagedProgram, String> {
        let path = sibling_path(stable, ".candidate");
        let failed =
            |error: std::io::Error| format!("putting the release at {} failed: {error}", path.display());
        let copy = || -> std::io::Result<File> {
            remove_file(&path)?;
            std::fs::copy(self.part_path(), &path)?;
            std::fs::set_permissions(&path, Permissions::from_mode(0o755))?;
            let file = File::open(&path)?;
            disk::sync_file(&file, &path)?;
            Ok(file)
        };
        let file = copy().map_err(failed)?;
        let (digest, signature) = read_program(&file, signed_by).map_err(failed)?;
        if digest != sha256 {
            return Err(format!(
                "{RELEASE_REFUSED}{} has changed meanwhile: its digest is not that of the order",
                path.display()
            ));
        }
        signature.map_err(|error| format!("{RELEASE_REFUSED}{error}"))?;
        // A leftover of the download does no harm.
        let _ = remove_file(&self.part_path());
        Ok(StagedProgram { path, file })
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

/// Why a candidate did not get the name of the stable program.
#[derive(Debug, thiserror::Error)]
pub enum PromotionError {
    /// The file with the candidate's name is not the one that was verified and run.
    #[error("{} is not what was verified, because another file got its name", .0.display())]
    Swapped(PathBuf),
    /// An operation on the file system failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl PromotionError {
    /// Why the candidate does not stay, as the first part of a sentence.
    #[must_use]
    pub fn failure(&self) -> String {
        match self {
            Self::Swapped(_) => format!("{RELEASE_REFUSED}{self}"),
            Self::Io(error) => format!("it could not take the place of the former release ({error})"),
        }
    }
}

/// Gives the candidate the stable program's name in one step; the former program stays as `….previous`. After an error the
/// former program has its name.
pub fn promote_candidate(trial: &Trial) -> Result<(), PromotionError> {
    promote_with_link(trial, link_former)
}

fn link_former(stable: &Path, previous: &Path) -> std::io::Result<()> {
    std::fs::hard_link(stable, previous)
}

/// The same with this function that makes a hard link.
fn promote_with_link(
    trial: &Trial,
    hard_link: impl FnOnce(&Path, &Path) -> std::io::Result<()>,
) -> Result<(), PromotionError> {
    let directory = trial.stable.parent().unwrap_or_else(|| Path::new("/"));
    let swapped = || PromotionError::Swapped(trial.candidate.clone());
    let candidate = File::open(&trial.candidate)?;
    if file_digest(&candidate)? != trial.sha256 {
        return Err(swapped());
    }
    let previous = sibling_path(&trial.stable, ".previous");
    remove_file(&previous)?;
    // Some file systems have no hard links. Without the former program, there would be no way back from here.
    if let Err(error) = hard_link(&trial.stable, &previous) {
        tracing::info!(%error, "the former release is copied, because it cannot be linked");
        std::fs::copy(&trial.stable, &previous)?;
        disk::sync_file(&File::open(&previous)?, &previous)?;
    }
    std::fs::rename(&trial.candidate, &trial.stable)?;
    let (tried, renamed) = (candidate.metadata()?, std::fs::metadata(&trial.stable)?);
    if (tried.dev(), tried.ino()) != (renamed.dev(), renamed.ino()) {
        // Another file got the candidate's name after the digest was compared.
        std::fs::rename(&previous, &trial.stable)?;
        return Err(swapped());
    }
    Ok(disk::sync_file(&File::open(directory)?, directory)?)
}

/// Verifies the signature of a program. The error is a sentence.
pub fn verify_program(path: &Path, signed_by: &SignedBy) -> Result<(), String> {
    let read = File::open(path).and_then(|file| read_program(&file, Some(signed_by)));
    let (_, signature) = read.map_err(|error| format!("reading {} failed: {error}", path.display()))?;
    signature.map_err(|error| error.to_string())
}

/// Reads a program to its end: its digest, and whether its signature is valid.
fn read_program(
    mut file: &File,
    signed_by: Option<&SignedBy>,
) -> std::io::Result<(String, Result<(), VerificationError>)> {
    let mut verification =
        signed_by.map(|signed_by| FileVerification::begin(&signed_by.signature, &signed_by.key)).transpose();
    let mut context = digest::Context::new(&digest::SHA256);
    let mut buffer = vec![0; 1 << 16];
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        context.update(&buffer[..count]);
        if let Ok(Some(verification)) = &mut verification {
            verification.update(&buffer[..count]);
        }
    }
    let signature =
        verification.and_then(|verification| verification.map_or(Ok(()), FileVerification::finish));
    Ok((hex::encode(context.finish()), signature))
}

fn remove_file(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let bytes = std::fs::read(path).ok()?;
    check_format(&bytes)
        .and_then(|()| serde_json::from_slice(&bytes).map_err(|error| error.to_string()))
        .inspect_err(|error| tracing::warn!(error, path = %path.display(), "a damaged file is ignored"))
        .ok()
}

fn write_json(path: &Path, value: &impl Serialize) -> std::io::Result<()> {
    atomic_file::replace_hint(path, &serde_json::to_vec_pretty(value)?, Durability::Durable)
}

#[cfg(test)]
mod tests {
    use model::signed_artefact::signature::ArtefactSignature;
    use model::signed_artefact::signing_key::SigningKey;
    use testkit::damage::Damage;

    use super::*;
    use crate::process::ProcessInstance;

    fn digest(bytes: &[u8]) -> String {
        hex::encode(ring::digest::digest(&ring::digest::SHA256, bytes))
    }

    /// Signature of the program `new` with this key.
    const KEY: &str = "RWQBAQEBAQEBAIqI4910CfGV/VLbLTy6XXLKZwm/HZQSG/N0iAG0D29c";
    const SIGNATURE: &str = concat!(
        "untrusted comment: signature from minisign secret key\n",
        "RUQBAQEBAQEBACSmFDJHbQ6RAUCE8I7cN55XlFmBPECqB2DoAm6uJbJjpZvBymjAuHKhevJv1Zy9so7qpQNl2kHg7JkTev+oBA8=\n",
        "trusted comment: shepherd kind=release name=roleserver version=1.4.0 architecture=x86_64 minimum-version=1.2.0\n",
        "JvcY3HIgHoSvb0GoE+Ct8PU4mIOehlpW7YzmcZS9CRSZcKu6bgtD7hkKrqLBrlmzq5EymQU41Bmc+eGO4u/5Dw==\n",
    );

    #[test]
    fn only_a_release_with_a_valid_signature_is_staged_and_its_bytes_stay_open() {
        let directory = tempfile::tempdir().unwrap();
        let files = UpdateFiles::in_state_directory(directory.path());
        let stable = directory.path().join("roleserver");
        let signed_by = SignedBy {
            signature: ArtefactSignature::parse(SIGNATURE).unwrap(),
            key: SigningKey::parse(KEY).unwrap(),
        };
        for content in ["odd", "ne", "new\n"] {
            std::fs::write(files.part_path(), content).unwrap();
            let error =
                files.stage_candidate(&stable, &digest(content.as_bytes()), Some(&signed_by)).unwrap_err();
            assert!(
                error.starts_with("the release was refused: its signature is not valid"),
                "{content}: {error}"
            );
        }
        std::fs::write(files.part_path(), "new").unwrap();
        let staged = files.stage_candidate(&stable, &digest(b"new"), Some(&signed_by)).unwrap();
        // What happens to the name does not change what was verified.
        std::fs::remove_file(&staged.path).unwrap();
        std::fs::write(&staged.path, "odd").unwrap();
        let mut bytes = vec![0; 3];
        std::os::unix::fs::FileExt::read_exact_at(&staged.file, &mut bytes, 0).unwrap();
        assert_eq!(bytes, b"new");
    }

    /// The trial of the program `new` in place of `old`.
    fn trial_of(stable: &Path, candidate: PathBuf) -> Trial {
        Trial {
            generation: 1,
            sha256: digest(b"new"),
            former: digest(b"old"),
            stable: stable.to_owned(),
            candidate,
            boot_id: "b".to_owned(),
            until_ms: 1,
            patience_ms: 1,
            instance: ProcessInstance { pid: 1, start_time: 1, boot_id: "b".to_owned() },
            minimum_version: None,
            failure: None,
        }
    }

    #[test]
    fn candidate_replaces_the_stable_program_which_is_kept_as_previous() {
        let directory = tempfile::tempdir().unwrap();
        let files = UpdateFiles::in_state_directory(directory.path());
        let stable = directory.path().join("roleserver");
        std::fs::write(&stable, "old").unwrap();
        assert!(
            files.stage_candidate(&stable, &digest(b"new"), None).unwrap_err().contains("failed"),
            "nothing was fetched"
        );
        std::fs::write(files.part_path(), "odd").unwrap();
        assert!(
            files
                .stage_candidate(&stable, &digest(b"new"), None)
                .unwrap_err()
                .contains("has changed meanwhile")
        );
        std::fs::write(files.part_path(), "new").unwrap();
        let candidate = files.stage_candidate(&stable, &digest(b"new"), None).unwrap().path;
        assert_eq!(std::fs::metadata(&candidate).unwrap().permissions().mode() & 0o777, 0o755);
        assert_eq!(std::fs::read(&stable).unwrap(), b"old", "the stable path changes only when it is proven");
        let trial = trial_of(&stable, candidate);
        files.write_trial(&trial).unwrap();
        assert_eq!(files.read_trial(), Some(trial.clone()));
        promote_candidate(&trial).unwrap();
        assert_eq!(std::fs::read(&stable).unwrap(), b"new");
        assert_eq!(std::fs::read(sibling_path(&stable, ".previous")).unwrap(), b"old");
        let failure = promote_candidate(&trial).unwrap_err().failure();
        assert!(failure.starts_with("it could not take the place of the former release ("), "{failure}");
        // A file system without hard links.
        let no_link = |_: &Path, _: &Path| Err(std::io::Error::from(ErrorKind::Unsupported));
        let stage = |content: &str| {
            std::fs::write(files.part_path(), content).unwrap();
            files.stage_candidate(&stable, &digest(content.as_bytes()), None).unwrap();
            Trial { sha256: digest(content.as_bytes()), ..trial.clone() }
        };
        promote_with_link(&stage("newer"), no_link).unwrap();
        assert_eq!(std::fs::read(&stable).unwrap(), b"newer");
        assert_eq!(std::fs::read(sibling_path(&stable, ".previous")).unwrap(), b"new");
        // Another file gets the name of the candidate after its digest was compared.
        let odd = directory.path().join("odd");
        std::fs::write(&odd, "odd").unwrap();
        let newest = stage("newest");
        let swap = |stable: &Path, previous: &Path| {
            std::fs::rename(&odd, &newest.candidate)?;
            no_link(stable, previous)
        };
        let failure = promote_with_link(&newest, swap).unwrap_err().failure();
        let expected = format!(
            "the release was refused: {} is not what was verified, because another file got its name",
            newest.candidate.display()
        );
        assert_eq!(failure, expected);
        assert_eq!(std::fs::read(&stable).unwrap(), b"newer", "the former program is lost");
        files.remove_trial().unwrap();
        files.remove_trial().unwrap();
        assert_eq!(files.read_trial(), None);
        let concluded = UpdateResult { generation: 1, ..UpdateResult::default() };
        files.write_result(&concluded).unwrap();
        assert_eq!(files.read_result(), concluded);
        for damage in Damage::ALL {
            files.write_trial(&trial).unwrap();
            files.write_result(&concluded).unwrap();
            let written = (Some(trial.clone()), concluded.clone());
            assert_eq!((files.read_trial(), files.read_result()), written, "{damage:?}");
            for path in [files.trial_path(), files.result_path()] {
                damage.inflict(&path).unwrap();
            }
            let damaged = (files.read_trial(), files.read_result());
            assert_eq!(damaged, (None, UpdateResult::default()), "{damage:?}");
        }
        files.write_trial(&trial).unwrap();
        assert_eq!(files.read_trial(), Some(trial), "a directory was in its place");
    }

    /// Requires that the work waits for the disk below a directory.
    #[cfg(debug_assertions)]
    fn require_wait(directory: &Path, work: impl FnOnce() + Send + 'static) {
        let blocked = disk::fault::block_syncs(directory);
        let worker = std::thread::spawn(work);
        while blocked.waiting() == 0 {
            assert!(!worker.is_finished(), "nothing waits for the disk");
            std::thread::yield_now();
        }
        drop(blocked);
        worker.join().unwrap();
    }

    #[cfg(debug_assertions)]
    type Promotion = fn(&Trial) -> Result<(), PromotionError>;

    #[cfg(debug_assertions)]
    #[test]
    fn program_is_durable_before_it_is_used() {
        let directory = tempfile::tempdir().unwrap();
        let files = UpdateFiles::in_state_directory(directory.path());
        let stable = directory.path().join("roleserver");
        std::fs::write(&stable, "old").unwrap();
        let trial = trial_of(&stable, sibling_path(&stable, ".candidate"));
        let promotions: [Promotion; 2] = [
            promote_candidate,
            // A file system without hard links.
            |trial| promote_with_link(trial, |_, _| Err(std::io::Error::from(ErrorKind::Unsupported))),
        ];
        for promote in promotions {
            std::fs::write(files.part_path(), "new").unwrap();
            let (staging, program) = (files.clone(), stable.clone());
            require_wait(directory.path(), move || {
                staging.stage_candidate(&program, &digest(b"new"), None).unwrap();
            });
            let trial = trial.clone();
            require_wait(directory.path(), move || promote(&trial).unwrap());
        }
    }
}
