//! State file of the simulated fleet.
//!
//! The file is what makes the simulator outlive everything: a shepherd that crashed finds the machines it created, and
//! a restarted simulator is the same fleet with the same keys, fences and intents. The file is replaced as a whole
//! (temporary file, fsync, rename, fsync of the directory), and every change is in it before its caller gets the
//! answer. A lost fence would let an older holder in; a lost intent would create a second machine.
//!
//! Host keys and boot ids are not stored: they are derived from the seed.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::net::Ipv4Addr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use chrono::{DateTime, Utc};
use model::ids::IntentId;
use roleserver::agent::settings::AgentSettings;
use roleserver::enrolment::Enrolment;
use serde::{Deserialize, Serialize};

use crate::machine::SimulatedMachine;
use crate::seed::Seed;

/// The version of the file format.
pub const VERSION: u32 = 1;
/// How many power and reboot intents of a machine are stored.
const MAX_INTENTS: usize = 64;

/// The state of the whole fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetState {
    /// Format of the file: [`VERSION`].
    pub version: u32,
    /// The seed that the fleet is derived from.
    pub seed: Seed,
    /// The number of API calls, from which their faults are drawn.
    pub api_calls: u64,
    /// All machines, by index.
    pub machines: Vec<MachineRecord>,
}

/// One machine with everything on its disk and at its provider.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineRecord {
    /// The provider's id of the machine.
    pub id: String,
    /// The provider's name of the capacity it is made from.
    pub reservation: String,
    /// Its state as a simulated machine.
    pub machine: SimulatedMachine,
    /// The intent that it was created under; `None` while it is unused capacity.
    pub intent: Option<IntentId>,
    /// The loopback port of its SSH server; 0 before it has one.
    pub ssh_port: u16,
    /// Digest of every file uploaded to it, by path.
    pub uploads: BTreeMap<String, String>,
    /// The shepherd it is enrolled with, by the rules of the real role server.
    pub enrolment: Option<Enrolment>,
    /// Settings its agent falls back to while the newest have not worked yet.
    pub fallback: Option<AgentSettings>,
    /// Its agent's key pair, PKCS#8 in hexadecimal; `None` before the first enrolment.
    pub identity: Option<String>,
    /// How often it was released. Each customer gets it under another id.
    #[serde(default)]
    pub taken_back: u64,
    /// Its address as a node of a cluster; `None` before it could be one.
    #[serde(default)]
    pub node_address: Option<Ipv4Addr>,
    /// Power and reboot intents carried out, oldest first. A repeated intent has no effect.
    pub intents: VecDeque<IntentId>,
}

/// Why the state file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Reading, writing or locking failed.
    #[error("the simulator's state file {path}: cannot {operation}: {source}")]
    Io {
        /// What was attempted, for the error message.
        operation: &'static str,
        /// The path of the state file.
        path: PathBuf,
        /// The error of the system.
        source: std::io::Error,
    },
    /// Its content is not a fleet.
    #[error(
        "the simulator's state file {path} holds no fleet this release can read: {source}; move it away to start a new one"
    )]
    Content {
        /// The path of the state file.
        path: PathBuf,
        /// The error of the JSON parser.
        source: serde_json::Error,
    },
    /// The fleet has another seed than the one given.
    #[error(
        "the simulator's state file {path} holds a fleet of seed {found}, not {requested}; give --seed {found}, or another --state_path"
    )]
    Seed {
        /// The path of the state file.
        path: PathBuf,
        /// The seed in the file.
        found: u64,
        /// The seed that was given.
        requested: u64,
    },
    /// Another simulator has locked it.
    #[error(
        "the simulator's state file {0} is in use by another simulator; stop that one, or give another --state_path"
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

    /// Adds machines until there are `machines` of them. Never removes any: a machine that vanishes is a fault, and not
    /// what a smaller number means.
    pub fn grow(&mut self, machines: u32, now: DateTime<Utc>) {
        let present = u32::try_from(self.machines.len()).unwrap_or(u32::MAX);
        self.machines.extend((present..machines).map(|index| MachineRecord {
            id: format!("sim-{:04}", index + 1),
            reservation: format!("slot-{:04}", index + 1),
            machine: SimulatedMachine::new(index, now),
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

    /// The index of a machine in the fleet.
    #[must_use]
    pub fn position(&self, id: &str) -> Option<usize> {
        self.machines.iter().position(|record| record.id == id)
    }

    /// Loads a fleet; `None` if the file does not exist.
    pub fn load(path: &Path) -> Result<Option<Self>, StateError> {
        let text = match std::fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => {
                return Err(StateError::Io { operation: "read it", path: path.to_owned(), source });
            }
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
        let failed = |doing| move |source| StateError::Io { operation: doing, path: path.to_owned(), source };
        let text = serde_json::to_vec(self)
            .map_err(|source| StateError::Content { path: path.to_owned(), source })?;
        let temporary = sibling(path, ".new");
        // The file contains the agents' private keys.
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

impl MachineRecord {
    /// Releases the machine: nothing of its customer remains, and its id is never used again.
    pub fn release(&mut self, intent: IntentId) {
        self.record_intent(intent);
        self.taken_back += 1;
        self.id = format!("sim-{:04}-{}", self.machine.index + 1, self.taken_back + 1);
        self.intent = None;
        self.uploads.clear();
        self.enrolment = None;
        self.fallback = None;
        self.identity = None;
    }

    /// Records that an intent is carried out. Returns `false` if it already was.
    pub fn record_intent(&mut self, intent: IntentId) -> bool {
        if self.intents.contains(&intent) {
            return false;
        }
        self.intents.push_back(intent);
        if self.intents.len() > MAX_INTENTS {
            self.intents.pop_front();
        }
        true
    }
}

/// An exclusive lock of a state file.
#[derive(Debug)]
pub struct StateLock {
    file: File,
}

impl Drop for StateLock {
    /// The file is unlocked, not only closed: a child process that is just being started has the file open too until
    /// its exec, and would keep the lock that long.
    fn drop(&mut self) {
        // If unlocking fails, the lock ends when the last process that has the file open closes it.
        let _ = self.file.unlock();
    }
}

impl StateLock {
    /// Locks the file. Fails if another simulator has locked it. The lock ends with the process, however it ends.
    pub fn acquire(path: &Path) -> Result<Self, StateError> {
        let failed = |source| StateError::Io { operation: "lock it", path: path.to_owned(), source };
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
        let held = StateLock::acquire(&path).unwrap();
        assert!(matches!(StateLock::acquire(&path), Err(StateError::InUse(_))));
        // A child process has the file open between fork and exec.
        let inherited = held.file.try_clone().unwrap();
        drop(held);
        StateLock::acquire(&path).unwrap();
        drop(inherited);
    }

    #[test]
    fn an_intent_is_carried_out_once() {
        let mut state = FleetState::new(Seed(3), 1, DateTime::UNIX_EPOCH);
        let intent = IntentId::generate();
        assert!(state.machines[0].record_intent(intent));
        assert!(!state.machines[0].record_intent(intent));
        for _ in 0..MAX_INTENTS {
            assert!(state.machines[0].record_intent(IntentId::generate()));
        }
        assert_eq!(state.machines[0].intents.len(), MAX_INTENTS);
    }
}
