//! The agent program on this host: read again when it changes, and checked each time before a machine gets it.
//!
//! Machines run the program as root. So it must be a role server, and only the user of this process and root may be able
//! to change it, or a directory on the way to it. Where there are signing keys, one of them must have signed it, unless the
//! policy allows unsigned releases: otherwise a thief of the signature would be as good as its author. The preflight, the
//! start and each takeover use the same check.
//!
//! The path is checked each time, before the program is read: a change of modes or owners changes no time of the file. After
//! the check, nobody else can exchange the program.
//!
//! A program that is refused is published until one is accepted. It is loaded again every few seconds, so that an operator
//! reads of it before a machine needs the program, and so that the refusal ends when the file is repaired.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{Mutex, watch};
use tokio_util::sync::CancellationToken;
use trusted_file::unchangeable_path::{FileUse, check_unchangeable};

use crate::bmdb::connection::Bmdb;
use crate::model::signed_artefact::signature::{ArtefactSignature, MAX_SIGNATURE_BYTES};
use crate::model::signed_artefact::signing_configuration::SigningConfiguration;
use crate::model::signed_artefact::signing_key::KeyId;
use crate::model::signed_artefact::{ExpectedFields, decide_acceptance};
use crate::model::text_file::decode_text;
use crate::takeover::agent_binary::{AgentBinary, AgentBinaryError};

/// Time between two checks of the program. A check of a file that has not changed reads only its metadata.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// What must be true of an agent program.
#[derive(Clone)]
pub enum AgentTrust {
    /// It may be any program: simulated machines take it and do not run it.
    Unchecked,
    /// It is a role server, nobody else can change it, and one of these keys signed it, if there are any.
    Checked(Arc<SigningConfiguration>),
}

/// The signature of an agent program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentSignature {
    /// It needs none: there are no signing keys, or no machine runs it.
    NotNeeded,
    /// It is valid, and from this key.
    Valid(KeyId),
    /// There is no file at this path.
    Absent(PathBuf),
}

/// An agent program that was read and checked.
#[derive(Clone, Debug)]
pub struct InspectedAgent {
    /// The program. All uploads of one version share one copy.
    pub binary: Arc<AgentBinary>,
    /// What the file beside the program proves.
    pub signature: AgentSignature,
}

/// Why an agent program is not installed on machines.
#[derive(Debug, thiserror::Error)]
pub enum AgentFileError {
    /// The file cannot be read, or is something else.
    #[error(transparent)]
    Binary(#[from] AgentBinaryError),
    /// Other users can change the file, or exchange it.
    #[error("--agent_executable_path {} cannot be trusted: {reason}", path.display())]
    Changeable {
        /// The path of the program.
        path: PathBuf,
        /// Which part of the path can be changed, and what to do.
        reason: String,
    },
    /// The signature beside the file cannot be used, or is not valid.
    #[error("--agent_executable_path {}, with the signature {}: {reason}", path.display(), signature.display())]
    Signature {
        /// The path of the program.
        path: PathBuf,
        /// The path of the signature.
        signature: PathBuf,
        /// What is wrong with the signature.
        reason: String,
    },
    /// There are signing keys, and no signature beside the file.
    #[error("--agent_executable_path {} is not signed, and this shepherd has signing keys; sign it with minisign and put the signature at {}, or, where releases are not signed, start a shepherd with --allow_unsigned_releases true", path.display(), signature.display())]
    Unsigned {
        /// The path of the program.
        path: PathBuf,
        /// The path at which the signature is expected.
        signature: PathBuf,
    },
}

/// When a file was changed last, and its length.
type FileStamp = (SystemTime, u64);

/// The stamps of a program and of the signature beside it; `None` for a signature that is absent.
type AgentStamp = (FileStamp, Option<FileStamp>);

/// The agent program on this host. It is read again when the file or its signature changes.
pub struct AgentFile {
    path: PathBuf,
    trust: AgentTrust,
    loaded: Mutex<Option<(AgentStamp, InspectedAgent)>>,
    refusal: watch::Sender<Option<String>>,
}

impl AgentFile {
    /// The program at `path`, which is not read yet.
    #[must_use]
    pub fn new(path: PathBuf, trust: AgentTrust) -> Self {
        Self { path, trust, loaded: Mutex::new(None), refusal: watch::Sender::new(None) }
    }

    /// Why the program was refused when it was last loaded, as a sentence; `None` if it was accepted.
    #[must_use]
    pub fn subscribe_refusal(&self) -> watch::Receiver<Option<String>> {
        self.refusal.subscribe()
    }

    /// Loads the program again and again until `stop`, by the present policy, so that a refusal is published.
    pub async fn run_checks(&self, bmdb: &Bmdb, stop: &CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(CHECK_INTERVAL)).await.is_some() {
            let (_, policy) = bmdb.policy();
            // A file system that does not answer must not delay the end. The refusal is published by `load`.
            let _ = stop.run_until_cancelled(self.load(policy.allow_unsigned_releases)).await;
        }
    }

    fn publish_refusal(&self, refusal: Option<String>) {
        self.refusal.send_if_modified(|published| {
            let is_changed = *published != refusal;
            if is_changed && let Some(reason) = &refusal {
                tracing::warn!(reason, "no machine gets the agent program until it is repaired");
            }
            *published = refusal;
            is_changed
        });
    }

    /// Loads the present program for machines. Fails for one without a signature that needs one, unless
    /// `allows_unsigned`.
    pub async fn load(&self, allows_unsigned: bool) -> Result<Arc<AgentBinary>, AgentFileError> {
        let loaded = self.load_acceptable(allows_unsigned).await;
        self.publish_refusal(loaded.as_ref().err().map(ToString::to_string));
        loaded
    }

    async fn load_acceptable(&self, allows_unsigned: bool) -> Result<Arc<AgentBinary>, AgentFileError> {
        let found = self.inspect().await?;
        match found.signature {
            AgentSignature::Absent(signature) if !allows_unsigned => {
                Err(AgentFileError::Unsigned { path: self.path.clone(), signature })
            }
            _ => Ok(found.binary),
        }
    }

    /// Loads the present program and its signature, which may be absent.
    pub async fn inspect(&self) -> Result<InspectedAgent, AgentFileError> {
        self.check_path().await?;
        let stamp = self.read_stamps().await;
        // The lock is held during the read: otherwise workers that start together would each read a copy of their own.
        let mut loaded = self.loaded.lock().await;
        if let Some(stamp) = &stamp
            && let Some((known, agent)) = &*loaded
            && known == stamp
        {
            return Ok(agent.clone());
        }
        let agent = self.read().await?;
        if let Some(stamp) = stamp {
            *loaded = Some((stamp, agent.clone()));
        }
        Ok(agent)
    }

    /// Checks that nobody else can change the program, if that is required. It reads only metadata of the path.
    async fn check_path(&self) -> Result<(), AgentFileError> {
        if matches!(self.trust, AgentTrust::Unchecked) {
            return Ok(());
        }
        let Err(reason) = check_path(self.path.clone()).await else { return Ok(()) };
        // A program that is missing has an error of its own, with another remedy. One that is there is not read, because
        // nothing limits here how many copies workers that start together would read.
        if !tokio::fs::metadata(&self.path).await.is_ok_and(|metadata| metadata.is_file()) {
            AgentBinary::load(&self.path).await?;
        }
        Err(AgentFileError::Changeable { path: self.path.clone(), reason })
    }

    /// The present stamps; `None` if they cannot be read.
    async fn read_stamps(&self) -> Option<AgentStamp> {
        let program = read_stamp(&self.path).await.ok()??;
        let signature = read_stamp(&signature_path(&self.path)).await.ok()?;
        Some((program, signature))
    }

    async fn read(&self) -> Result<InspectedAgent, AgentFileError> {
        let path = &self.path;
        let binary = Arc::new(AgentBinary::load(path).await?);
        let AgentTrust::Checked(signing) = &self.trust else {
            return Ok(InspectedAgent { binary, signature: AgentSignature::NotNeeded });
        };
        if !binary.is_role_server() {
            let reason = "it is another program than a role server".to_owned();
            return Err(AgentBinaryError::NotAnAgent { path: path.clone(), reason }.into());
        }
        let beside = signature_path(path);
        let signature = read_signature(&beside, signing, &binary).await.map_err(|reason| {
            AgentFileError::Signature { path: path.clone(), signature: beside.clone(), reason }
        })?;
        Ok(InspectedAgent { binary, signature })
    }
}

/// The path that minisign gives to the signature of a file.
#[must_use]
pub fn signature_path(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".minisig");
    name.into()
}

/// The stamp of a file; `None` if there is none.
async fn read_stamp(path: &Path) -> std::io::Result<Option<FileStamp>> {
    match tokio::fs::metadata(path).await {
        Ok(metadata) => Ok(Some((metadata.modified()?, metadata.len()))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Checks that nobody else can change a file. The error is a sentence. The file system may be one of the network that
/// does not answer.
async fn check_path(path: PathBuf) -> Result<(), String> {
    let check = move || {
        check_unchangeable(&path, FileUse::Configuration).map(drop).map_err(|error| error.to_string())
    };
    let checked = tokio::task::spawn_blocking(check).await;
    checked.unwrap_or_else(|error| Err(format!("the check of its path failed: {error}")))
}

/// Reads and verifies the signature of an agent, like that of a release. The error is the reason for which it is not
/// valid.
async fn read_signature(
    path: &Path,
    signing: &SigningConfiguration,
    agent: &AgentBinary,
) -> Result<AgentSignature, String> {
    if signing.keys().is_empty() {
        return Ok(AgentSignature::NotNeeded);
    }
    let length = match tokio::fs::metadata(path).await {
        Ok(metadata) => metadata.len(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(AgentSignature::Absent(path.to_owned()));
        }
        Err(error) => return Err(error.to_string()),
    };
    if length > u64::try_from(MAX_SIGNATURE_BYTES).unwrap_or(u64::MAX) {
        return Err(format!("it has more than {MAX_SIGNATURE_BYTES} bytes"));
    }
    let content = tokio::fs::read(path).await.map_err(|error| error.to_string())?;
    verify_signature(&content, signing, agent).map(AgentSignature::Valid)
}

/// Verifies the content of the file with a signature. Returns the id of its key.
fn verify_signature(
    content: &[u8],
    signing: &SigningConfiguration,
    agent: &AgentBinary,
) -> Result<KeyId, String> {
    let text = decode_text(content).map_err(|error| error.to_string())?;
    let signature = ArtefactSignature::parse(text).map_err(|error| error.to_string())?;
    let expected = ExpectedFields::release(agent.architecture().uname());
    let trust = signing.trust();
    let key = decide_acceptance(Some(&signature), &expected, &trust).map_err(|error| error.to_string())?;
    if let Some(key) = key {
        signature.verify(key, &agent.content()).map_err(|error| error.to_string())?;
    }
    Ok(signature.key_id())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::model::program_mark::ROLE_SERVER_MARK;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn new_file(path: &Path, trust: AgentTrust) -> AgentFile {
        AgentFile::new(path.to_owned(), trust)
    }

    /// A file that a check takes for a role server, in a directory of its own.
    fn write_role_server() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap().join("roleserver");
        let shell = fs::read("/bin/sh").unwrap();
        fs::write(&path, [shell.as_slice(), &ROLE_SERVER_MARK].concat()).unwrap();
        set_mode(&path, 0o644);
        (directory, path)
    }

    #[tokio::test]
    async fn program_is_checked_again_when_it_changes() {
        let (directory, path) = write_role_server();
        let root = directory.path().canonicalize().unwrap();
        let checked = new_file(&path, AgentTrust::Checked(Arc::default()));
        let refusal = checked.subscribe_refusal();
        let first = checked.load(false).await.unwrap();
        // Only the mode changes: the time and the length of the file stay.
        for (part, mode) in [(&path, 0o666), (&root, 0o757)] {
            set_mode(part, mode);
            let error = checked.load(true).await.unwrap_err().to_string();
            assert_eq!(
                error,
                format!(
                    "--agent_executable_path {} cannot be trusted: {1} can be changed by other users (mode {mode:04o}); \
                     run: chmod go-w {1}",
                    path.display(),
                    part.display()
                )
            );
            assert_eq!(*refusal.borrow(), Some(error), "a refusal is published");
            // Simulated machines do not run it.
            new_file(&path, AgentTrust::Unchecked).load(false).await.unwrap();
            set_mode(part, mode & 0o755);
            assert!(Arc::ptr_eq(&checked.load(false).await.unwrap(), &first), "it was read again");
            assert_eq!(*refusal.borrow(), None, "a refusal ends with a program that is accepted");
        }
        fs::remove_file(&path).unwrap();
        let error = checked.load(true).await.unwrap_err().to_string();
        assert!(error.starts_with("cannot read the agent program "), "{error}");
    }

    /// Each takeover and each check would read a copy of its own.
    #[tokio::test]
    async fn program_that_others_can_change_is_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().canonicalize().unwrap().join("roleserver");
        fs::write(&path, "no program").unwrap();
        set_mode(&path, 0o666);
        let error = new_file(&path, AgentTrust::Checked(Arc::default())).load(true).await.unwrap_err();
        assert!(matches!(error, AgentFileError::Changeable { .. }), "{error}");
    }

    #[tokio::test]
    async fn program_that_becomes_another_one_than_a_role_server_is_refused() {
        let (_directory, path) = write_role_server();
        let checked = new_file(&path, AgentTrust::Checked(Arc::default()));
        let refusal = checked.subscribe_refusal();
        checked.load(false).await.unwrap();
        let role_server = fs::read(&path).unwrap();
        fs::write(&path, fs::read("/bin/sh").unwrap()).unwrap();
        let error = checked.load(true).await.map(drop).map_err(|error| error.to_string());
        let expected = format!(
            "{} is not an agent program: it is another program than a role server; build one with `make roleserver` and \
             name it by --agent_executable_path",
            path.display()
        );
        assert_eq!(error, Err(expected.clone()));
        assert_eq!(*refusal.borrow(), Some(expected), "a refusal is published");
        // Simulated machines do not run it.
        new_file(&path, AgentTrust::Unchecked).load(false).await.unwrap();
        fs::write(&path, [role_server.as_slice(), &[0]].concat()).unwrap();
        checked.load(false).await.unwrap();
        assert_eq!(*refusal.borrow(), None, "a refusal ends with a program that is accepted");
    }
}
