//! What survives a restart, and the locks on it.
//!
//! One directory is one agent identity. Each file in it has one writer, so no
//! two processes ever undo each other's writing (the time has two, and whichever
//! wrote last was told it last):
//!
//! | file | written by | what |
//! | --- | --- | --- |
//! | `identity.pk8` | enroll, once | the private key, mode 0600 |
//! | `enrolment.json` | enroll | who the machine is, whose, highest fences, settings |
//! | `agent.json` | run | the running agent process |
//! | `learned.json` | run | settings that came with an answer |
//! | `last_heartbeat.json` | run | for `roleserver status` |
//! | `time.json` | enroll, run | what time it was, as a shepherd said |
//! | `supervisor.json` | supervise | the detached supervisor |
//! | `agent.log` | supervise and the agent's standard error, or else run | the log of the agent ([`crate::roleserver::logs::own`]) |
//! | `update.json`, `release.json`, `release.part` | run | the release on trial, and how the last one ended ([`crate::roleserver::update`]) |
//! | `cluster/` | run | its part in a cluster ([`crate::roleserver::cluster::files`]) |
//! | `children/` | run | programs that run beside it ([`crate::roleserver::child`]) |
//!
//! A file is replaced, never rewritten ([`durable`][]).

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::curator::identity::{Identity, IdentityError};
use crate::roleserver::durable::{self, Durability};
use crate::roleserver::enrolment::{Enrolment, Settings};
use crate::roleserver::known_time::Told;
use crate::roleserver::running::Process;

/// The largest state file that is read. Settings with 4 MiB of certificates, twice, fit.
const FILE_LIMIT_BYTES: u64 = 16 << 20;

/// The directory of one agent identity.
#[derive(Clone, Debug)]
pub struct StateDirectory {
    path: PathBuf,
}

/// What a lock keeps a second process from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// Being the agent.
    Agent,
    /// Keeping the agent alive.
    Supervisor,
    /// Enrolling.
    Enroll,
}

/// A lock, held until it is dropped or its process dies.
#[derive(Debug)]
pub struct Held {
    file: File,
}

impl Drop for Held {
    /// Given back, not only closed: a program that is just being started has the file as well until it runs.
    fn drop(&mut self) {
        // What cannot be unlocked is unlocked when the last who has it closes it.
        let _ = self.file.unlock();
    }
}

/// Settings that came with an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Learned {
    /// The enrolment they change; a later one overrules them.
    pub revision: u64,
    /// The settings.
    pub settings: Settings,
    /// Settings that worked, until these have.
    pub fallback: Option<Settings>,
}

/// What became of the newest heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastHeartbeat {
    /// The boot it happened in.
    pub boot_id: String,
    /// Milliseconds of that boot.
    pub at_milliseconds: u64,
    /// The start of the agent that sent it.
    pub incarnation: Uuid,
    /// Where to.
    pub endpoint: String,
    /// What went wrong; none when it was delivered.
    pub error: Option<String>,
    /// When the newest one was delivered in this boot.
    pub delivered_at_milliseconds: Option<u64>,
}

/// Why the directory could not be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// There is no place for it.
    #[error("no home directory is known to keep the state in; give --state_dir")]
    NoPlace,
    /// The system said no.
    #[error("{doing} {path} failed: {source}", path = path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// What happened.
        source: std::io::Error,
    },
    /// A file is not what this program writes.
    #[error(
        "the state file {path} is damaged ({reason}); look at it, then remove it and let the shepherd \
         enrol this machine again", path = path.display()
    )]
    Damaged {
        /// Which.
        path: PathBuf,
        /// How.
        reason: String,
    },
    /// No key could be made.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// Somebody else holds the lock.
    #[error(
        "another role server already {does} in {path}; stop that one, or give this one its own --state_dir",
        path = path.display()
    )]
    Locked {
        /// What the other one does.
        does: &'static str,
        /// Where.
        path: PathBuf,
    },
}

impl StateDirectory {
    /// Where the state is when nobody says otherwise.
    pub fn default_path(root: bool, home: Option<&Path>) -> Result<PathBuf, StateError> {
        match home {
            _ if root => Ok(PathBuf::from("/var/lib/roleserver")),
            Some(home) if home.is_absolute() => Ok(home.join(".local/state/roleserver")),
            _ => Err(StateError::NoPlace),
        }
    }

    /// Opens the directory, making it (mode 0700) if it is not there.
    pub fn open(path: &Path) -> Result<Self, StateError> {
        let io = |doing| move |source| StateError::Io { doing, path: path.to_owned(), source };
        let path = std::path::absolute(path).map_err(io("finding the state directory"))?;
        DirBuilder::new().recursive(true).mode(0o700).create(&path).map_err(|source| StateError::Io {
            doing: "making the state directory",
            path: path.clone(),
            source,
        })?;
        Ok(Self { path })
    }

    /// Names the directory without making it.
    #[must_use]
    pub const fn at(path: PathBuf) -> Self {
        Self { path }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the agent's log is, and what its detached supervisor has to say.
    #[must_use]
    pub fn log_path(&self) -> PathBuf {
        self.path.join("agent.log")
    }

    /// What the machine keeps of being enrolled; none when it never was.
    pub fn enrolment(&self) -> Result<Option<Enrolment>, StateError> {
        self.read("enrolment.json")
    }

    /// Keeps an enrolment; it is on the disk when this returns.
    pub fn keep_enrolment(&self, enrolment: &Enrolment) -> Result<(), StateError> {
        self.write_json("enrolment.json", enrolment, Durability::Durable)
    }

    /// The settings learnt since the enrolment of that revision.
    pub fn learned(&self, revision: u64) -> Result<Option<Learned>, StateError> {
        Ok(self.read::<Learned>("learned.json")?.filter(|learned| learned.revision == revision))
    }

    /// Keeps settings that came with an answer.
    pub fn keep_learned(&self, learned: &Learned) -> Result<(), StateError> {
        self.write_json("learned.json", learned, Durability::Durable)
    }

    /// What time it was when a shepherd last said it.
    pub fn told_time(&self) -> Result<Option<Told>, StateError> {
        self.read("time.json")
    }

    /// Keeps the time that a shepherd said; what follows a loss of power begins from it.
    pub fn keep_told_time(&self, told: &Told) -> Result<(), StateError> {
        self.write_json("time.json", told, Durability::Durable)
    }

    /// The recorded agent process; whether it still runs is the record's to say.
    pub fn agent(&self) -> Result<Option<Process>, StateError> {
        self.read("agent.json")
    }

    /// Records the agent process.
    pub fn record_agent(&self, process: &Process) -> Result<(), StateError> {
        self.write_json("agent.json", process, Durability::UntilPowerLoss)
    }

    /// The recorded supervisor process.
    pub fn supervisor(&self) -> Result<Option<Process>, StateError> {
        self.read("supervisor.json")
    }

    /// Records the supervisor process.
    pub fn record_supervisor(&self, process: &Process) -> Result<(), StateError> {
        self.write_json("supervisor.json", process, Durability::UntilPowerLoss)
    }

    /// What became of the newest heartbeat.
    pub fn last_heartbeat(&self) -> Result<Option<LastHeartbeat>, StateError> {
        self.read("last_heartbeat.json")
    }

    /// Notes what became of a heartbeat.
    pub fn note_heartbeat(&self, last: &LastHeartbeat) -> Result<(), StateError> {
        self.write_json("last_heartbeat.json", last, Durability::UntilPowerLoss)
    }

    /// The key that was made here; none before the first enrolment.
    pub fn identity(&self) -> Result<Option<Identity>, StateError> {
        let path = self.path.join("identity.pk8");
        let Some(pkcs8) = read_if_there(&path)? else { return Ok(None) };
        let damaged = |error: IdentityError| StateError::Damaged { path, reason: error.to_string() };
        Identity::from_pkcs8(&pkcs8).map(Some).map_err(damaged)
    }

    /// The key that was made here, made now if there is none.
    pub fn identity_or_new(&self) -> Result<Identity, StateError> {
        if let Some(identity) = self.identity()? {
            return Ok(identity);
        }
        let identity = Identity::generate()?;
        self.write("identity.pk8", identity.pkcs8(), Durability::Durable)?;
        Ok(identity)
    }

    /// Takes a lock, or says who may hold it.
    pub fn lock(&self, lock: Lock) -> Result<Held, StateError> {
        let (name, does) = match lock {
            Lock::Agent => ("agent.lock", "runs"),
            Lock::Supervisor => ("supervisor.lock", "supervises"),
            Lock::Enroll => ("enroll.lock", "is being enrolled"),
        };
        let path = self.path.join(name);
        let opened = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        // A disk with an error is remounted read-only; the lock is made of no bytes and holds there, too.
        let opened = match opened {
            Err(error) if error.kind() == ErrorKind::ReadOnlyFilesystem => File::open(&path),
            opened => opened,
        };
        let locking = |source| StateError::Io { doing: "locking", path: path.clone(), source };
        let file = opened.map_err(locking)?;
        match file.try_lock() {
            Ok(()) => Ok(Held { file }),
            Err(TryLockError::WouldBlock) => Err(StateError::Locked { does, path: self.path.clone() }),
            Err(TryLockError::Error(source)) => Err(locking(source)),
        }
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, StateError> {
        let path = self.path.join(name);
        let Some(bytes) = read_if_there(&path)? else { return Ok(None) };
        serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|error| StateError::Damaged { path, reason: printable(&error) })
    }

    fn write_json(
        &self,
        name: &str,
        value: &impl Serialize,
        durability: Durability,
    ) -> Result<(), StateError> {
        let mut bytes = serde_json::to_vec_pretty(value)
            .map_err(|error| StateError::Damaged { path: self.path.join(name), reason: error.to_string() })?;
        bytes.push(b'\n');
        self.write(name, &bytes, durability)
    }

    fn write(&self, name: &str, bytes: &[u8], durability: Durability) -> Result<(), StateError> {
        let path = self.path.join(name);
        durable::replace(&path, bytes, durability).map_err(|source| StateError::Io {
            doing: "writing",
            path,
            source,
        })
    }
}

fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, StateError> {
    let reading = |source| StateError::Io { doing: "reading", path: path.to_owned(), source };
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(reading)?,
    };
    let mut bytes = Vec::new();
    let read = file.take(FILE_LIMIT_BYTES + 1).read_to_end(&mut bytes).map_err(reading)?;
    if u64::try_from(read).unwrap_or(u64::MAX) > FILE_LIMIT_BYTES {
        let reason = format!("it has more than {FILE_LIMIT_BYTES} bytes");
        return Err(StateError::Damaged { path: path.to_owned(), reason });
    }
    Ok(Some(bytes))
}

/// What a reader said, which may quote what it read, as a terminal may show it.
fn printable(error: &serde_json::Error) -> String {
    error.to_string().chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn directory() -> (tempfile::TempDir, StateDirectory) {
        let parent = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(&parent.path().join("deep/state")).unwrap();
        (parent, state)
    }

    #[test]
    fn place_follows_the_user() {
        let path = |root, home: Option<&str>| StateDirectory::default_path(root, home.map(Path::new));
        assert_eq!(path(true, Some("/root")).unwrap(), Path::new("/var/lib/roleserver"));
        assert_eq!(path(false, Some("/home/a")).unwrap(), Path::new("/home/a/.local/state/roleserver"));
        assert!(matches!(path(false, None), Err(StateError::NoPlace)));
        assert!(matches!(path(false, Some("a")), Err(StateError::NoPlace)));
    }

    #[test]
    fn key_is_made_once_and_is_nobody_elses() {
        let (_parent, state) = directory();
        assert!(state.identity().unwrap().is_none());
        let made = state.identity_or_new().unwrap();
        assert_eq!(state.identity_or_new().unwrap().public_key(), made.public_key());
        let permissions = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(permissions(&state.path().join("identity.pk8")), 0o600);
        assert_eq!(permissions(state.path()), 0o700);
    }

    #[test]
    fn damaged_file_says_which_and_what_to_do() {
        let (_parent, state) = directory();
        for name in ["enrolment.json", "identity.pk8"] {
            std::fs::write(state.path().join(name), "{\"machine_id\": ").unwrap();
        }
        for error in [state.enrolment().unwrap_err(), state.identity_or_new().unwrap_err()] {
            let text = error.to_string();
            assert!(text.contains("is damaged") && text.contains("enrol this machine again"), "{text}");
        }
    }

    /// What parses but could not be used is damage, too: an agent without an endpoint has nothing to do.
    #[test]
    fn settings_that_could_not_be_used_are_damage() {
        let (_parent, state) = directory();
        for (settings, said) in [
            (r#"{"endpoints":[],"ca_certificates":[],"heartbeat_interval_seconds":0}"#, "endpoints is empty"),
            (
                r#"{"endpoints":["a:1"],"ca_certificates":[],"heartbeat_interval_seconds":4000000000}"#,
                "heartbeat_interval_seconds is 4000000000",
            ),
            (
                r#"{"endpoints":["a:1"],"ca_certificates":["AAAA"],"heartbeat_interval_seconds":0}"#,
                "ca_certificates: CA certificate 1 of 1 is no X.509",
            ),
        ] {
            let text = format!(r#"{{"revision":1,"settings":{settings},"fallback":null}}"#);
            std::fs::write(state.path().join("learned.json"), text).unwrap();
            let error = state.learned(1).unwrap_err().to_string();
            assert!(error.contains("learned.json is damaged") && error.contains(said), "{error}");
        }
    }

    #[test]
    fn file_larger_than_any_state_is_not_read_into_memory() {
        let (_parent, state) = directory();
        let file = File::create(state.path().join("enrolment.json")).unwrap();
        // A hole: it has this size without taking the room.
        file.set_len(1 << 40).unwrap();
        let error = state.enrolment().unwrap_err().to_string();
        assert!(error.contains("enrolment.json is damaged (it has more than 16777216 bytes)"), "{error}");
    }

    #[test]
    fn learned_settings_end_with_their_enrolment() {
        let (_parent, state) = directory();
        let settings = Settings::new(&["a:1".to_owned()], &[], 0).unwrap();
        let learned = Learned { revision: 3, settings, fallback: None };
        state.keep_learned(&learned).unwrap();
        assert_eq!(state.learned(3).unwrap(), Some(learned));
        assert_eq!(state.learned(4).unwrap(), None);
    }

    #[test]
    fn second_holder_is_refused_until_the_first_lets_go() {
        let (_parent, state) = directory();
        let first = state.lock(Lock::Agent).unwrap();
        let error = state.lock(Lock::Agent).unwrap_err().to_string();
        assert!(error.starts_with("another role server already runs in "), "{error}");
        assert!(state.lock(Lock::Supervisor).is_ok());
        drop(first);
        assert!(state.lock(Lock::Agent).is_ok());
    }

    #[test]
    fn failed_write_leaves_nothing_behind() {
        let (_parent, state) = directory();
        std::fs::create_dir(state.path().join("agent.json")).unwrap();
        let process = Process::this(1, "00".to_owned()).unwrap();
        assert!(state.record_agent(&process).is_err());
        assert_eq!(std::fs::read_dir(state.path()).unwrap().count(), 1);
    }
}
