//! Which logs a machine has, and where.
//!
//! A log has the name that people have for what writes it: `roleserver`, `etcd`, `web/server` for a service of a declared
//! role. What is asked for is looked up among the logs that there are, so no name leads to any other file.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::model::log_request::{MOST_NAMES, OWN};
use crate::roleserver::cluster::services::wanted::Id;
use crate::roleserver::logs::ring::Ring;

/// What is written down of a service beside its log; of it, which service it is.
const NOTE: &str = "service.json";
/// The largest that is read.
const NOTE_LIMIT: u64 = 1 << 20;

/// Where the lines of a log are.
#[derive(Clone, Debug)]
pub enum Place {
    /// In a file, and before that in the one of the same name with `.1`.
    File(PathBuf),
    /// In memory.
    Ring(Ring),
}

impl Place {
    fn bytes(&self) -> u64 {
        match self {
            Self::File(path) => std::fs::metadata(path).map_or(0, |data| data.len()),
            Self::Ring(ring) => ring.from(0).0.iter().map(|line| line.len() as u64 + 1).sum(),
        }
    }
}

/// A log.
#[derive(Clone, Debug)]
pub struct Log {
    /// As it is asked for.
    pub name: String,
    /// Where it is.
    pub place: Place,
    /// How long it is.
    pub bytes: u64,
}

/// The logs of one machine.
#[derive(Clone, Debug)]
pub struct Source {
    own: Place,
    children: Option<PathBuf>,
}

impl Source {
    /// Of the role server on this state directory.
    #[must_use]
    pub fn of(own: PathBuf, state_directory: &Path) -> Self {
        Self { own: Place::File(own), children: Some(state_directory.join("children")) }
    }

    /// Of one whose own log is in memory, and that may run something.
    #[must_use]
    pub fn of_ring(ring: Ring, state_directory: Option<&Path>) -> Self {
        Self { own: Place::Ring(ring), children: state_directory.map(|directory| directory.join("children")) }
    }

    /// All that there are, the role server's own first. Blocks.
    #[must_use]
    pub fn there(&self) -> Vec<Log> {
        let log = |name: String, place: Place| Log { bytes: place.bytes(), name, place };
        let mut others = Vec::new();
        let children = self.children.iter().filter_map(|children| std::fs::read_dir(children).ok());
        for entry in children.flatten().flatten() {
            let path = entry.path().join("output.log");
            let Ok(child) = entry.file_name().into_string() else { continue };
            if path.is_file() {
                others.push(log(name_of(&entry.path(), &child), Place::File(path)));
            }
        }
        others.sort_by(|a, b| a.name.cmp(&b.name));
        let own = match &self.own {
            Place::File(path) if !path.is_file() => None,
            own => Some(log(OWN.to_owned(), own.clone())),
        };
        own.into_iter().chain(others).take(MOST_NAMES).collect()
    }

    /// The one of this name; an error says which there are. Blocks.
    pub fn find(&self, name: &str) -> Result<Log, String> {
        let there = self.there();
        if let Some(found) = there.iter().find(|log| log.name == name) {
            return Ok(found.clone());
        }
        let names: Vec<_> = there.iter().map(|log| log.name.as_str()).collect();
        Err(match names.as_slice() {
            [] => format!("this machine has no log {name:?}, nor any other"),
            names => format!("this machine has no log {name:?}; there are: {}", names.join(", ")),
        })
    }
}

#[derive(Deserialize)]
struct Note {
    id: Id,
}

/// What people call the program of this name: a service by what is written down of it, where its own name does not say it.
fn name_of(directory: &Path, child: &str) -> String {
    use std::io::Read as _;
    let noted = || {
        let mut text = Vec::new();
        std::fs::File::open(directory.join(NOTE)).ok()?.take(NOTE_LIMIT).read_to_end(&mut text).ok()?;
        serde_json::from_slice::<Note>(&text).ok().map(|note| note.id).filter(|id| id.child() == child)
    };
    match Id::of_child(child).or_else(noted) {
        Some(id) => id.to_string(),
        None => child.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_called_as_people_call_what_writes_them() {
        let state = tempfile::tempdir().unwrap();
        let children = state.path().join("children");
        let long = Id { role: "r".repeat(63), service: "s".repeat(63) };
        let write = |directory: &str, file: &str, text: &str| {
            let directory = children.join(directory);
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(directory.join(file), text).unwrap();
        };
        let own = state.path().join("agent.log");
        let source = Source::of(own.clone(), state.path());
        assert!(source.there().is_empty());
        assert_eq!(source.find("etcd").unwrap_err(), "this machine has no log \"etcd\", nor any other");
        write("etcd", "output.log", "one\n");
        write("web_server", "output.log", "");
        write(&long.child(), "output.log", "");
        write(&long.child(), NOTE, &serde_json::json!({ "id": &long, "more": 1 }).to_string());
        write("silent", "process.json", "{}");
        std::fs::write(&own, "x").unwrap();
        let there: Vec<_> = source.there().into_iter().map(|log| (log.name, log.bytes)).collect();
        let of_long = format!("{}/{}", long.role, long.service);
        let expected = [("roleserver", 1), ("etcd", 4), (&of_long, 0), ("web/server", 0)];
        assert_eq!(there, expected.map(|(name, bytes)| (name.to_owned(), bytes)));
        for odd in ["", "web_server", "../agent", "/etc/passwd", "etcd/output.log"] {
            let said = source.find(odd).unwrap_err();
            assert!(said.contains("there are: roleserver, etcd, "), "{said}");
        }
        assert!(matches!(source.find("web/server").unwrap().place, Place::File(path) if path.is_file()));
    }
}
