//! The fleet as it stands on disk.
//!
//! The file is what makes the simulator outlive everything: a shepherd that
//! crashed finds the machines it created, and a restarted simulator is the same
//! fleet with the same keys, fences and intents. It is replaced as a whole
//! (temporary file, fsync, rename, fsync of the directory), and whatever a caller
//! was told is in it before the answer is sent. A fence that was forgotten would
//! let an older holder in; an intent that was forgotten would make a second
//! machine.
//!
//! Host keys and boot ids are not stored: they follow from the seed.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::net::Ipv4Addr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use crate::model::ids::IntentId;
use crate::roleserver::enrolment::{Enrolment, Settings};
use crate::simulator::machine::Machine;
use crate::simulator::seed::Seed;

/// Version of the file's shape.
pub const VERSION: u32 = 1;
/// How many power and reboot intents of a machine are remembered.
const REMEMBERED_INTENTS: usize = 64;

/// The whole fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetState {
    /// [`VERSION`].
    pub version: u32,
    /// What it was made from.
    pub seed: Seed,
    /// How many API calls were counted, for the faults drawn from that number.
    pub api_calls: u64,
    /// Every machine, by index.
    pub machines: Vec<Record>,
}

/// One machine with everything on its disk and at its provider.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// The provider's id of the machine.
    pub id: String,
    /// The provider's name of the capacity it is made from.
    pub reservation: String,
    /// Its state.
    pub machine: Machine,
    /// The intent it was handed out under; `None` while nobody has it.
    pub intent: Option<IntentId>,
    /// The loopback port of its SSH server; 0 before it has one.
    pub ssh_port: u16,
    /// Digest of every file uploaded to it, by path.
    pub uploads: BTreeMap<String, String>,
    /// Who it is enrolled with, by the rules of the real role server.
    pub enrolment: Option<Enrolment>,
    /// Settings its agent falls back to while the newest have not worked yet.
    pub fallback: Option<Settings>,
    /// Its agent's key pair, PKCS#8 in hex; none before the first enrolment.
    pub identity: Option<String>,
    /// How often it was taken back from whoever had it. Each has it under another id.
    #[serde(default)]
    pub taken_back: u64,
    /// Where it is reached as a node of a cluster; none before it could be one.
    #[serde(default)]
    pub node_address: Option<Ipv4Addr>,
    /// Power and reboot intents carried out, oldest first: asked again, they are not repeated.
    pub intents: VecDeque<IntentId>,
}

/// The state file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Reading, writing or locking failed.
    #[error("the simulator's state file {path}: cannot {doing}: {source}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// What happened.
        source: std::io::Error,
    },
    /// Its content is not a fleet.
    #[error(
        "the simulator's state file {path} holds no fleet this release can read: {source}; move it away to start a new one"
    )]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: serde_json::Error,
    },
    /// It was made from another seed.
    #[error(
        "the simulator's state file {path} holds a fleet of seed {found}, not {asked}; give --seed {found}, or another --state"
    )]
    Seed {
        /// The file.
        path: PathBuf,
        /// The seed in it.
        found: u64,
        /// The seed asked for.
        asked: u64,
    },
    /// Another simulator has it.
    #[error(
        "the simulator's state file {0} is in use by another simulator; stop that one, or give another --state"
    )]
    InUse(PathBuf),
}

impl FleetState {
    /// A fleet of machines that were never switched on.
    #[must_use]
    pub fn new(seed: Seed, machines: u32, now: DateTime<Utc>) -> Self {
        let mut state = Self { version: VERSION, seed, api_calls: 0, machines: Vec::new() };
        state.grow(machines, now);
        state
    }

    /// Adds machines until there are as many as asked for. Never removes any: a machine that
    /// vanishes is a fault, and not what a smaller number means.
    pub fn grow(&mut self, machines: u32, now: DateTime<Utc>) {
        let present = u32::try_from(self.machines.len()).unwrap_or(u32::MAX);
        self.machines.extend((present..machines).map(|index| Record {
            id: format!("sim-{:04}", index + 1),
            reservation: format!("slot-{:04}", index + 1),
            machine: Machine::new(index, now),
            intent: None,
            ssh_port: 0,
            uploads: BTreeMap::new(),
            enrolment: None,
            fallback: None,
            identity: None,
            taken_back: 0,
            node_address: None,
            intents: VecDeque::new(),
        }));
    }

    /// The place of a machine in the fleet.
    #[must_use]
    pub fn position(&self, id: &str) -> Option<usize> {
        self.machines.iter().position(|record| record.id == id)
    }

    /// Reads a fleet; `None` when there is no file.
    pub fn load(path: &Path) -> Result<Option<Self>, StateError> {
        let text = match std::fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(StateError::Io { doing: "read it", path: path.to_owned(), source }),
        };
        let unreadable = |source| StateError::Content { path: path.to_owned(), source };
        let state: Self = serde_json::from_slice(&text).map_err(unreadable)?;
        if state.version != VERSION {
            let found = state.version;
            return Err(unreadable(serde::de::Error::custom(format!(
                "it has version {found}, not {VERSION}"
            ))));
        }
        Ok(Some(state))
    }

    /// Replaces the file with this fleet.
    pub fn save(&self, path: &Path) -> Result<(), StateError> {
        let failed = |doing| move |source| StateError::Io { doing, path: path.to_owned(), source };
        let text = serde_json::to_vec(self)
            .map_err(|source| StateError::Content { path: path.to_owned(), source })?;
        let temporary = sibling(path, ".new");
        // It holds the agents' private keys.
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&temporary)
            .map_err(failed("create a new version of it"))?;
        file.write_all(&text).map_err(failed("write a new version of it"))?;
        file.sync_all().map_err(failed("write a new version of it"))?;
        std::fs::rename(&temporary, path).map_err(failed("put a new version of it in place"))?;
        File::open(directory_of(path))
            .and_then(|directory| directory.sync_all())
            .map_err(failed("put a new version of it in place"))
    }
}

impl Record {
    /// Takes the machine back from whoever has it: nothing of theirs stays, and its id is never given again.
    pub fn take_back(&mut self, intent: IntentId) {
        self.note_intent(intent);
        self.taken_back += 1;
        self.id = format!("sim-{:04}-{}", self.machine.index + 1, self.taken_back + 1);
        self.intent = None;
        self.uploads.clear();
        self.enrolment = None;
        self.fallback = None;
        self.identity = None;
    }

    /// Notes that an intent is carried out; `false` when it already was.
    pub fn note_intent(&mut self, intent: IntentId) -> bool {
        if self.intents.contains(&intent) {
            return false;
        }
        self.intents.push_back(intent);
        if self.intents.len() > REMEMBERED_INTENTS {
            self.intents.pop_front();
        }
        true
    }
}

/// The right to a state file, for as long as it is held.
#[derive(Debug)]
pub struct StateLock {
    file: File,
}

impl Drop for StateLock {
    /// Given back, not only closed: a program that this process is just starting has the file as well, until it
    /// is the program, and would keep the lock that long.
    fn drop(&mut self) {
        // What cannot be unlocked is unlocked when the last who has it closes it.
        let _ = self.file.unlock();
    }
}

impl StateLock {
    /// Takes it, or says that another simulator has it. It ends with the process, however it ends.
    pub fn take(path: &Path) -> Result<Self, StateError> {
        let failed = |source| StateError::Io { doing: "lock it", path: path.to_owned(), source };
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(sibling(path, ".lock"))
            .map_err(failed)?;
        match file.try_lock() {
            Ok(()) => Ok(Self { file }),
            Err(std::fs::TryLockError::WouldBlock) => Err(StateError::InUse(path.to_owned())),
            Err(std::fs::TryLockError::Error(source)) => Err(failed(source)),
        }
    }
}

fn sibling(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fleet_survives_its_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fleet.json");
        assert_eq!(FleetState::load(&path).unwrap(), None);
        let mut state = FleetState::new(Seed(3), 2, DateTime::UNIX_EPOCH);
        state.machines[1].intent = Some(IntentId::generate());
        state.machines[1].identity = Some("30".into());
        state.save(&path).unwrap();
        assert_eq!(FleetState::load(&path).unwrap(), Some(state.clone()));
        state.grow(4, DateTime::UNIX_EPOCH);
        state.grow(1, DateTime::UNIX_EPOCH);
        assert_eq!(state.machines.len(), 4);
        assert_eq!(state.position("sim-0004"), Some(3));
    }

    #[test]
    fn a_file_that_is_no_fleet_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fleet.json");
        std::fs::write(&path, "{\"version\":").unwrap();
        let error = FleetState::load(&path).unwrap_err().to_string();
        assert!(error.contains("fleet.json") && error.contains("line 1"), "{error}");
        let newer = FleetState { version: VERSION + 1, ..FleetState::new(Seed(3), 1, DateTime::UNIX_EPOCH) };
        newer.save(&path).unwrap();
        let error = FleetState::load(&path).unwrap_err().to_string();
        assert!(error.contains("version 2, not 1"), "{error}");
    }

    #[test]
    fn one_simulator_has_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fleet.json");
        let held = StateLock::take(&path).unwrap();
        assert!(matches!(StateLock::take(&path), Err(StateError::InUse(_))));
        // As a child has it between fork and exec.
        let inherited = held.file.try_clone().unwrap();
        drop(held);
        StateLock::take(&path).unwrap();
        drop(inherited);
    }

    #[test]
    fn an_intent_is_carried_out_once() {
        let mut state = FleetState::new(Seed(3), 1, DateTime::UNIX_EPOCH);
        let intent = IntentId::generate();
        assert!(state.machines[0].note_intent(intent));
        assert!(!state.machines[0].note_intent(intent));
        for _ in 0..REMEMBERED_INTENTS {
            assert!(state.machines[0].note_intent(IntentId::generate()));
        }
        assert_eq!(state.machines[0].intents.len(), REMEMBERED_INTENTS);
    }
}
