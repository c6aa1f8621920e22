//! The state directory: what survives a restart, and the lock files.
//!
//! One directory is one agent identity. Each file in it has one writer, so no two processes ever undo each other's
//! writing (the time has two, and the later writer has the later time; signing keys have two, which take turns by
//! [`Lock::SigningKeys`] and keep what the other one wrote):
//!
//! | file | written by | kind | what |
//! | --- | --- | --- | --- |
//! | `identity.pk8` | enroll, once | truth | the private key, mode 0600 |
//! | `enrolment.json` | enroll | truth | ids of machine and database, highest fences, settings |
//! | `agent.json` | run | hint | the running agent process |
//! | `signing.json` | enroll, run | truth | pinned signing keys, and the lowest accepted versions ([`signing_store`][]) |
//! | `learned.json` | run | hint | settings that came with a response |
//! | `last_heartbeat.json` | run | hint | for `roleserver status` |
//! | `time.json` | enroll, run | hint | the time that a shepherd last reported |
//! | `supervisor.json` | supervise | hint | the detached supervisor |
//! | `agent.log` | supervise and the agent's standard error, else run | log | the agent's log ([`own_log`][]) |
//! | `update.json`, `release.json`, `release.part` | run | hint | the trial, and the last result ([`update`][]) |
//! | `cluster/` | run | both | its part in a cluster ([`crate::cluster::files`] lists its truth) |
//! | `children/` | run | hint | programs that run beside it ([`crate::child`]) |
//!
//! A file is replaced, never rewritten ([`atomic_file`][]).
//!
//! # Truth and hints
//!
//! Nothing can replace *truth*: without the key it is another machine, and a guessed fence would obey a shepherd that
//! was replaced. Damaged truth is an error that names the file and the way back, and stays as it is.
//!
//! A *hint* saves time, and is found out or learnt again without it: the process that holds a lock
//! ([`StateDirectory::find_agent_process`]), the settings of the enrolment, the machine's own clock. A damaged hint
//! (empty after a loss of power, truncated, of another release) is logged, counts as absent, and is replaced with its
//! next value. It never refuses an enrolment. Only `roleserver status` shows the damage, and its
//! error states that the file is replaced.
//!
//! `last_heartbeat.json` and `children/NAME/process.json` do not wait for the disk, because they are about this boot alone:
//! after a loss of power no process runs, and `roleserver status` shows no heartbeat of another boot. So a loss of power can
//! damage them more often than the others. So can it damage `children/NAME/service.json`, which is durable when a service
//! starts: its changes do not wait either, and `files.json` beside it has what a later boot needs
//! ([`record_files`][crate::cluster::services::record_files]).
//!
//! One hint cannot always be found out again: `children/NAME/process.json`, the record of a running program. A program
//! in a scope of systemd that is recognized there is adopted. Any other is ended, with SIGTERM and its stop time, and
//! started again: two of one kind must never run at once ([`crate::child`]).
//!
//! A file is also damaged if its format is that of a newer release ([`state_format`][]), or if a directory is in its
//! place. A hint that is written moves such a directory out of the way ([`atomic_file::replace_hint`]).
//!
//! [`own_log`]: crate::logs::own_log
//! [`signing_store`]: crate::signing_store
//! [`state_format`]: crate::state_format
//! [`update`]: crate::update

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use curator_client::identity::Identity;
use model::plain_text::replace_hidden;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use trusted_file::private_file::{PrivateFileError, read_private_file};
use trusted_file::unchangeable_path::{ChangeableError, check_directory};
use uuid::Uuid;

use crate::agent::settings::AgentSettings;
use crate::atomic_file::{self, Durability};
use crate::enrolment::Enrolment;
use crate::lock_holder;
use crate::process::ProcessRecord;
use crate::state_error::StateError;
use crate::state_format::check_format;
use crate::trusted_time::TimeSample;

/// Name of the file with the pinned signing keys.
const SIGNING_FILE: &str = "signing.json";
/// The largest state file that is read. Settings with 4 MiB of certificates, twice, fit.
const FILE_LIMIT_BYTES: u64 = 16 << 20;
/// Time between two attempts to take a lock.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The directory of one agent identity.
#[derive(Clone, Debug)]
pub struct StateDirectory {
    path: PathBuf,
}

/// The activity that only one process at a time may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// Running the agent (`roleserver run`).
    Agent,
    /// Keeping the agent alive.
    Supervisor,
    /// Accepting an enrolment request (`roleserver enroll`).
    Enroll,
    /// Writing the pinned signing keys: held from reading them to writing them.
    SigningKeys,
}

impl Lock {
    const fn file_name(self) -> &'static str {
        match self {
            Self::Agent => "agent.lock",
            Self::Supervisor => "supervisor.lock",
            Self::Enroll => "enroll.lock",
            Self::SigningKeys => "signing.lock",
        }
    }
}

/// A lock, held until it is dropped or its process dies.
#[derive(Debug)]
pub struct LockGuard {
    file: File,
}

impl Drop for LockGuard {
    /// Unlocks the file instead of only closing it: a program that is being started at this moment has inherited the
    /// descriptor, and would hold the lock until its `execve`.
    fn drop(&mut self) {
        // If unlocking fails, the lock ends when its last open descriptor is closed.
        let _ = self.file.unlock();
    }
}

/// Settings that came with a response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LearnedSettings {
    /// The enrolment that they change; a later one overrules them.
    pub revision: u64,
    /// The settings in use since then.
    pub settings: AgentSettings,
    /// Settings that worked, until the new ones have worked.
    pub fallback: Option<AgentSettings>,
}

/// The pinned signing keys and the lowest accepted versions, as their file has them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredSigningTrust {
    /// The line of each key.
    pub keys: Vec<String>,
    /// Version of the rotation that named the keys; `None` for those that were pinned first.
    #[serde(default)]
    pub rotation: Option<String>,
    /// Lowest accepted versions, by kind and name.
    #[serde(default)]
    pub minimum_versions: BTreeMap<String, BTreeMap<String, String>>,
    /// Whether declarations that give root must be signed.
    #[serde(default)]
    pub requires_signed_declarations: bool,
}

/// The outcome of the newest heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastHeartbeat {
    /// The boot it happened in.
    pub boot_id: String,
    /// Milliseconds of that boot at the last attempt.
    pub at_milliseconds: u64,
    /// The start of the agent that sent it.
    pub incarnation: Uuid,
    /// The endpoint that it was sent to.
    pub endpoint: String,
    /// The error, as a sentence; `None` if it was delivered.
    pub error: Option<String>,
    /// Milliseconds of the boot at the newest delivery; `None` if there was none in this boot.
    pub delivered_at_milliseconds: Option<u64>,
}

impl StateDirectory {
    /// The default path of the state directory.
    pub fn default_path(root: bool, home: Option<&Path>) -> Result<PathBuf, StateError> {
        match home {
            _ if root => Ok(PathBuf::from("/var/lib/roleserver")),
            Some(home) if home.is_absolute() => Ok(home.join(".local/state/roleserver")),
            _ => Err(StateError::NoHomeDirectory),
        }
    }

    /// Opens the directory, creating it (mode 0700) if it does not exist.
    pub fn open(path: &Path) -> Result<Self, StateError> {
        let io = |doing| move |source| StateError::Io { operation: doing, path: path.to_owned(), source };
        let path = std::path::absolute(path).map_err(io("finding the state directory"))?;
        DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(|source| StateError::Io {
            operation: "making the state directory",
            path: path.clone(),
            source,
        })?;
        // A user who can write there can give this machine another key and another shepherd.
        check_directory(&path)?;
        Ok(Self { path })
    }

    /// Opens the directory without creating it. If there is none, there is no state in it, which each reader reports.
    pub fn open_existing(path: &Path) -> Result<Self, StateError> {
        let path = std::path::absolute(path).map_err(|source| StateError::Io {
            operation: "finding the state directory",
            path: path.to_owned(),
            source,
        })?;
        match check_directory(&path) {
            Err(ChangeableError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
            checked => checked?,
        }
        Ok(Self { path })
    }

    /// Refers to the directory without creating or checking it.
    #[must_use]
    pub const fn from_path(path: PathBuf) -> Self {
        Self { path }
    }

    /// The absolute path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path of the log of the agent and its detached supervisor.
    #[must_use]
    pub fn log_path(&self) -> PathBuf {
        self.path.join("agent.log")
    }

    /// Reads the enrolment of the machine; `None` if it was never enrolled.
    pub fn read_enrolment(&self) -> Result<Option<Enrolment>, StateError> {
        self.read_json("enrolment.json")
    }

    /// Writes an enrolment; it is durable when this returns.
    pub fn write_enrolment(&self, enrolment: &Enrolment) -> Result<(), StateError> {
        self.write_truth("enrolment.json", enrolment)
    }

    /// Reads the settings learned since the enrolment of that revision; `None` if there are none.
    pub fn read_learned_settings(&self, revision: u64) -> Result<Option<LearnedSettings>, StateError> {
        Ok(self.read_hint::<LearnedSettings>("learned.json")?.filter(|learned| learned.revision == revision))
    }

    /// Writes settings that came with a response.
    pub fn write_learned_settings(&self, learned: &LearnedSettings) -> Result<(), StateError> {
        self.write_hint("learned.json", learned, Durability::Durable)
    }

    /// Reads the pinned signing keys; `None` if none were ever pinned.
    pub fn read_signing_trust(&self) -> Result<Option<StoredSigningTrust>, StateError> {
        self.read_json(SIGNING_FILE).map_err(|error| match error {
            StateError::Damaged { reason, .. } => self.damaged_signing_trust(reason),
            error => error,
        })
    }

    /// The error for pinned signing keys that cannot be used.
    #[must_use]
    pub fn damaged_signing_trust(&self, reason: String) -> StateError {
        StateError::DamagedSigningTrust { path: self.path.join(SIGNING_FILE), reason }
    }

    /// Writes the pinned signing keys; they are durable when this returns.
    pub fn write_signing_trust(&self, trust: &StoredSigningTrust) -> Result<(), StateError> {
        self.write_truth(SIGNING_FILE, trust)
    }

    /// Reads the time that a shepherd last reported.
    pub fn read_time_sample(&self) -> Result<Option<TimeSample>, StateError> {
        self.read_hint("time.json")
    }

    /// Writes the time that a shepherd reported; after a loss of power it is the lower bound.
    pub fn write_time_sample(&self, sample: &TimeSample) -> Result<(), StateError> {
        self.write_hint("time.json", sample, Durability::Durable)
    }

    /// The agent process: by its record, or as the holder of its lock if there is no record that can be read. It may not
    /// run any more.
    #[must_use]
    pub fn find_agent_process(&self) -> Option<ProcessRecord> {
        self.find_process(self.read_agent_process(), Lock::Agent)
    }

    /// The supervisor process: by its record, or as the holder of its lock if there is no record that can be read. It may
    /// not run any more.
    #[must_use]
    pub fn find_supervisor_process(&self) -> Option<ProcessRecord> {
        self.find_process(self.read_supervisor_process(), Lock::Supervisor)
    }

    fn find_process(
        &self,
        read: Result<Option<ProcessRecord>, StateError>,
        lock: Lock,
    ) -> Option<ProcessRecord> {
        let recorded = read.unwrap_or_else(|error| {
            tracing::warn!(%error, "the record of a process is ignored, and replaced when one starts");
            if let StateError::DamagedHint { path, .. } = &error {
                // Another process may have replaced or removed it. If it stays, it is ignored again.
                let _ = match std::fs::remove_file(path) {
                    Err(error) if error.kind() == ErrorKind::IsADirectory => {
                        atomic_file::clear_directory(path)
                    }
                    removed => removed,
                };
            }
            None
        });
        recorded.or_else(|| self.find_lock_holder(lock))
    }

    /// The process that holds a lock; `None` if there is none, or if it cannot be found out.
    #[must_use]
    pub fn find_lock_holder(&self, lock: Lock) -> Option<ProcessRecord> {
        let instance = lock_holder::find_lock_holder(&self.path.join(lock.file_name()))?;
        // What it runs is not known, so it is not taken for the wanted process, and is replaced.
        Some(ProcessRecord { instance, program_sha256: String::new(), revision: 0 })
    }

    /// Reads the record of the agent process, which may not run any more.
    pub fn read_agent_process(&self) -> Result<Option<ProcessRecord>, StateError> {
        self.read_hint("agent.json")
    }

    /// Writes the record of the agent process.
    pub fn record_agent(&self, process: &ProcessRecord) -> Result<(), StateError> {
        self.write_hint("agent.json", process, Durability::Durable)
    }

    /// Reads the record of the supervisor process.
    pub fn read_supervisor_process(&self) -> Result<Option<ProcessRecord>, StateError> {
        self.read_hint("supervisor.json")
    }

    /// Writes the record of the supervisor process.
    pub fn record_supervisor(&self, process: &ProcessRecord) -> Result<(), StateError> {
        self.write_hint("supervisor.json", process, Durability::Durable)
    }

    /// Reads the outcome of the newest heartbeat.
    pub fn read_last_heartbeat(&self) -> Result<Option<LastHeartbeat>, StateError> {
        self.read_hint("last_heartbeat.json")
    }

    /// Writes the outcome of a heartbeat. After a loss of power it would say nothing, so it does not wait for the disk.
    pub fn write_last_heartbeat(&self, last: &LastHeartbeat) -> Result<(), StateError> {
        self.write_hint("last_heartbeat.json", last, Durability::UntilPowerLoss)
    }

    /// Reads the private key; `None` before the first enrolment.
    pub fn read_identity(&self) -> Result<Option<Identity>, StateError> {
        let path = self.path.join("identity.pk8");
        let damaged = |reason| StateError::Damaged { path: path.clone(), reason };
        let pkcs8 = match read_private_file("the key of this machine", &path) {
            Err(error) if error.is_not_found() => return Ok(None),
            Err(PrivateFileError::NotAFile { .. }) => {
                return Err(damaged("it is not a regular file".to_owned()));
            }
            Err(PrivateFileError::TooLarge { .. }) => {
                return Err(damaged("it is larger than a key".to_owned()));
            }
            read => read.map_err(StateError::KeyFile)?,
        };
        Identity::from_pkcs8(&pkcs8).map(Some).map_err(|error| damaged(error.to_string()))
    }

    /// Reads the private key, generating one if there is none.
    pub fn read_or_create_identity(&self) -> Result<Identity, StateError> {
        if let Some(identity) = self.read_identity()? {
            return Ok(identity);
        }
        let identity = Identity::generate()?;
        let path = self.path.join("identity.pk8");
        let written = atomic_file::replace_file(&path, identity.pkcs8(), Durability::Durable);
        written.map_err(|source| writing_failed(path, source))?;
        Ok(identity)
    }

    /// Takes a lock that is held for a moment, and waits for it up to `patience`. It blocks.
    pub fn wait_for_lock(&self, lock: Lock, patience: Duration) -> Result<LockGuard, StateError> {
        let end = Instant::now() + patience;
        loop {
            match self.acquire_lock(lock) {
                Err(StateError::Locked { .. }) if Instant::now() < end => {
                    std::thread::sleep(LOCK_POLL_INTERVAL);
                }
                outcome => return outcome,
            }
        }
    }

    /// Takes a lock; the error names what the holder does.
    pub fn acquire_lock(&self, lock: Lock) -> Result<LockGuard, StateError> {
        let does = match lock {
            Lock::Agent => "runs",
            Lock::Supervisor => "supervises",
            Lock::Enroll => "is being enrolled",
            Lock::SigningKeys => "writes signing keys",
        };
        let path = self.path.join(lock.file_name());
        let opened = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        // A disk with an error is remounted read-only; the lock has no bytes and works there, too.
        let opened = match opened {
            Err(error) if error.kind() == ErrorKind::ReadOnlyFilesystem => File::open(&path),
            opened => opened,
        };
        let locking = |source| StateError::Io { operation: "locking", path: path.clone(), source };
        let file = opened.map_err(locking)?;
        match file.try_lock() {
            Ok(()) => Ok(LockGuard { file }),
            Err(TryLockError::WouldBlock) => Err(StateError::Locked { does, path: self.path.clone() }),
            Err(TryLockError::Error(source)) => Err(locking(source)),
        }
    }

    /// Reads a hint. Its damage is an error of its own, because it needs no person.
    fn read_hint<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, StateError> {
        self.read_json(name).map_err(|error| match error {
            StateError::Damaged { path, reason } => StateError::DamagedHint { path, reason },
            error => error,
        })
    }

    fn read_json<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, StateError> {
        let path = self.path.join(name);
        let Some(bytes) = read_optional(&path)? else { return Ok(None) };
        check_format(&bytes)
            .and_then(|()| serde_json::from_slice(&bytes).map_err(|error| printable_error(&error)))
            .map(Some)
            .map_err(|reason| StateError::Damaged { path, reason })
    }

    /// Replaces truth; it is durable when this returns. A directory in its place is an error.
    fn write_truth(&self, name: &str, value: &impl Serialize) -> Result<(), StateError> {
        let (path, bytes) = self.encode_json(name, value)?;
        atomic_file::replace_file(&path, &bytes, Durability::Durable)
            .map_err(|source| writing_failed(path, source))
    }

    /// Replaces a hint. A directory in its place is moved away.
    fn write_hint(
        &self,
        name: &str,
        value: &impl Serialize,
        durability: Durability,
    ) -> Result<(), StateError> {
        let (path, bytes) = self.encode_json(name, value)?;
        atomic_file::replace_hint(&path, &bytes, durability).map_err(|source| writing_failed(path, source))
    }

    fn encode_json(&self, name: &str, value: &impl Serialize) -> Result<(PathBuf, Vec<u8>), StateError> {
        let path = self.path.join(name);
        match serde_json::to_vec_pretty(value) {
            Ok(mut bytes) => {
                bytes.push(b'\n');
                Ok((path, bytes))
            }
            Err(error) => Err(StateError::Damaged { path, reason: error.to_string() }),
        }
    }
}

const fn writing_failed(path: PathBuf, source: std::io::Error) -> StateError {
    StateError::Io { operation: "writing", path, source }
}

fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, StateError> {
    let reading = |source| StateError::Io { operation: "reading", path: path.to_owned(), source };
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(reading)?,
    };
    let mut bytes = Vec::new();
    let read = match file.take(FILE_LIMIT_BYTES + 1).read_to_end(&mut bytes) {
        Err(error) if error.kind() == ErrorKind::IsADirectory => {
            return Err(StateError::Damaged {
                path: path.to_owned(),
                reason: "it is a directory".to_owned(),
            });
        }
        read => read.map_err(reading)?,
    };
    if u64::try_from(read).unwrap_or(u64::MAX) > FILE_LIMIT_BYTES {
        let reason = format!("it has more than {FILE_LIMIT_BYTES} bytes");
        return Err(StateError::Damaged { path: path.to_owned(), reason });
    }
    Ok(Some(bytes))
}

/// The error of the JSON parser, which may quote its input, without hidden characters.
fn printable_error(error: &serde_json::Error) -> String {
    replace_hidden(&error.to_string(), &[])
}

#[cfg(test)]
mod tests;
