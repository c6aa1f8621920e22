//! The logs of this machine, by name.
//!
//! A log has the name of what writes it: `roleserver`, `etcd`, `web/server` for a service of a declared role. A
//! requested name is looked up among the existing logs, so no name leads to any other file.

use std::path::{Path, PathBuf};

use model::log_request::{MAX_LOG_NAMES, ROLESERVER_LOG};
use serde::Deserialize;

use crate::cluster::services::desired::ServiceId;
use crate::logs::ring::LogRing;

/// The record of a service beside its log; it has the name of the service.
const RECORD_FILE: &str = "service.json";
/// The largest record that is read, in bytes.
const MAX_RECORD_BYTES: u64 = 1 << 20;

/// Where the lines of a log are.
#[derive(Clone, Debug)]
pub enum LogLocation {
    /// In a file; older lines are in the file of the same name with `.1`.
    File(PathBuf),
    /// In memory, on a simulated machine.
    Ring(LogRing),
}

impl LogLocation {
    fn byte_count(&self) -> u64 {
        match self {
            Self::File(path) => std::fs::metadata(path).map_or(0, |data| data.len()),
            Self::Ring(ring) => ring.lines_from(0).0.iter().map(|line| line.len() as u64 + 1).sum(),
        }
    }
}

/// One log of the machine.
#[derive(Clone, Debug)]
pub struct LogSource {
    /// The name in requests, such as `etcd` or `web/server`.
    pub name: String,
    /// The file or the buffer with its lines.
    pub location: LogLocation,
    /// Its size in bytes.
    pub bytes: u64,
}

/// No log of the machine has the requested name.
#[derive(Clone, Debug)]
pub struct UnknownLog {
    /// A sentence with the names that exist.
    pub message: String,
    /// The logs that exist.
    pub logs: Vec<LogSource>,
}

/// The logs of one machine.
#[derive(Clone, Debug)]
pub struct LogSources {
    agent_log: LogLocation,
    children: Option<PathBuf>,
}

impl LogSources {
    /// The logs of the role server with this state directory; `own` is the path of its own log.
    #[must_use]
    pub fn of_state_directory(own: PathBuf, state_directory: &Path) -> Self {
        Self { agent_log: LogLocation::File(own), children: Some(state_directory.join("children")) }
    }

    /// The logs of a role server whose own log is in memory; with a state directory, also those of its children.
    #[must_use]
    pub fn of_ring(ring: LogRing, state_directory: Option<&Path>) -> Self {
        Self {
            agent_log: LogLocation::Ring(ring),
            children: state_directory.map(|directory| directory.join("children")),
        }
    }

    /// All logs, the role server's own first. Blocks.
    #[must_use]
    pub fn list_logs(&self) -> Vec<LogSource> {
        let log =
            |name: String, place: LogLocation| LogSource { bytes: place.byte_count(), name, location: place };
        let mut others = Vec::new();
        let children = self.children.iter().filter_map(|children| std::fs::read_dir(children).ok());
        for entry in children.flatten().flatten() {
            let path = entry.path().join("output.log");
            let Ok(child) = entry.file_name().into_string() else { continue };
            if path.is_file() {
                others.push(log(log_name(&entry.path(), &child), LogLocation::File(path)));
            }
        }
        others.sort_by(|a, b| a.name.cmp(&b.name));
        let own = match &self.agent_log {
            LogLocation::File(path) if !path.is_file() => None,
            own => Some(log(ROLESERVER_LOG.to_owned(), own.clone())),
        };
        own.into_iter().chain(others).take(MAX_LOG_NAMES).collect()
    }

    /// The log of this name; an error lists the logs that exist. Blocks.
    pub fn find_log(&self, name: &str) -> Result<LogSource, UnknownLog> {
        let logs = self.list_logs();
        if let Some(found) = logs.iter().find(|log| log.name == name) {
            return Ok(found.clone());
        }
        let names: Vec<_> = logs.iter().map(|log| log.name.as_str()).collect();
        let message = match names.as_slice() {
            [] => format!("this machine has no log {name:?}, nor any other"),
            names => format!("this machine has no log {name:?}; there are: {}", names.join(", ")),
        };
        Err(UnknownLog { message, logs })
    }
}

#[derive(Deserialize)]
struct ServiceRecord {
    id: ServiceId,
}

/// The name of a child's log: for a service the one in its record, if its own name does not contain it.
fn log_name(directory: &Path, child: &str) -> String {
    use std::io::Read as _;
    let noted = || {
        let mut text = Vec::new();
        std::fs::File::open(directory.join(RECORD_FILE))
            .ok()?
            .take(MAX_RECORD_BYTES)
            .read_to_end(&mut text)
            .ok()?;
        serde_json::from_slice::<ServiceRecord>(&text)
            .ok()
            .map(|note| note.id)
            .filter(|id| id.child_name() == child)
    };
    match ServiceId::from_child_name(child).or_else(noted) {
        Some(id) => id.to_string(),
        None => child.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_named_after_what_writes_them() {
        let state = tempfile::tempdir().unwrap();
        let children = state.path().join("children");
        let long = ServiceId { role: "r".repeat(63), service: "s".repeat(63) };
        let write = |directory: &str, file: &str, text: &str| {
            let directory = children.join(directory);
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(directory.join(file), text).unwrap();
        };
        let own = state.path().join("agent.log");
        let source = LogSources::of_state_directory(own.clone(), state.path());
        assert!(source.list_logs().is_empty());
        let unknown = source.find_log("etcd").unwrap_err();
        assert_eq!(unknown.message, "this machine has no log \"etcd\", nor any other");
        assert!(unknown.logs.is_empty());
        write("etcd", "output.log", "one\n");
        write("web_server", "output.log", "");
        write(&long.child_name(), "output.log", "");
        write(&long.child_name(), RECORD_FILE, &serde_json::json!({ "id": &long, "more": 1 }).to_string());
        write("silent", "process.json", "{}");
        std::fs::write(&own, "x").unwrap();
        let there: Vec<_> = source.list_logs().into_iter().map(|log| (log.name, log.bytes)).collect();
        let of_long = format!("{}/{}", long.role, long.service);
        let expected = [("roleserver", 1), ("etcd", 4), (&of_long, 0), ("web/server", 0)];
        assert_eq!(there, expected.map(|(name, bytes)| (name.to_owned(), bytes)));
        for odd in ["", "web_server", "../agent", "/etc/passwd", "etcd/output.log"] {
            let unknown = source.find_log(odd).unwrap_err();
            assert!(unknown.message.contains("there are: roleserver, etcd, "), "{}", unknown.message);
            assert_eq!(unknown.logs.len(), 4, "{odd}");
        }
        assert!(
            matches!(source.find_log("web/server").unwrap().location, LogLocation::File(path) if path.is_file())
        );
    }
}
