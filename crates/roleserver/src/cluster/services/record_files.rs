//! The files that record a service on the disk: `service.json`, its [`RunRecord`], and `files.json`.
//!
//! They are beside the record of its process, in the directory of the child. The run record contains what the service was
//! started with, and is written before the start. With it the next role server knows whether a running service still is
//! the desired one.
//!
//! # After a loss of power
//!
//! The record is durable before a start. Its changes while the service runs do not wait for the disk, and a file system
//! that does not flush a file before it is renamed can lose the record with such a change. So the one thing that a later
//! boot needs of it, which files were written for the service, is also in a file of its own, `files.json`. Only a start
//! replaces that, before the record, and durably.
//!
//! Durable changes of the record would be no smaller. The event loop records an exit, and must not wait for the disk. A
//! queue beside it would need the order of all writes to one record: those of a start, which must be durable before the
//! program runs, and a removal, after which an old write would bring the record back.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::atomic_file::{self, Durability};
use crate::cluster::services::desired::ServiceId;
use crate::cluster::services::service_state::RunRecord;

const RECORD_FILE: &str = "service.json";
/// The [`WrittenFiles`] of a service, beside its run record.
const FILES_FILE: &str = "files.json";

/// A file of a service's record could not be written.
#[derive(Debug, thiserror::Error)]
#[error("writing {} failed: {source}", .path.display())]
pub struct RecordError {
    /// The file that was not replaced.
    path: PathBuf,
    /// Error of the system call.
    source: std::io::Error,
}

/// What the last start has written for a service, for when its run record is lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct WrittenFiles {
    /// Role and name of the service, which the name of a child may not have in full.
    id: ServiceId,
    /// Paths of the files.
    files: BTreeSet<String>,
}

/// Reads the run record of a child, which has a directory of its name in `children`. If it is damaged, the result is an empty
/// record of the service, with the files that its last start has written; `None` if nothing names the service.
pub(super) fn read_record(children: &Path, name: &str) -> Option<RunRecord> {
    let directory = children.join(name);
    let path = directory.join(RECORD_FILE);
    read_json::<RunRecord>(&path).filter(|note| note.id.child_name() == name).or_else(|| {
        tracing::warn!(path = %path.display(), "the run record of a service is lost");
        let written = read_json::<WrittenFiles>(&directory.join(FILES_FILE));
        match written.filter(|written| written.id.child_name() == name) {
            Some(WrittenFiles { id, files }) => Some(RunRecord { files, ..RunRecord::missing(id) }),
            None => ServiceId::from_child_name(name).map(RunRecord::missing),
        }
    })
}

/// Writes the run record of a service that is about to be started, and which files were written for it. Both are durable
/// when this returns.
pub(super) fn record_start(children: &Path, note: &RunRecord) -> Result<(), RecordError> {
    let written = WrittenFiles { id: note.id.clone(), files: note.files.clone() };
    let path = children.join(note.id.child_name()).join(FILES_FILE);
    // Most starts are those of an unchanged declaration.
    if read_json::<WrittenFiles>(&path).as_ref() != Some(&written) {
        write_json(children, &note.id, FILES_FILE, &written, Durability::Durable)?;
    }
    write_json(children, &note.id, RECORD_FILE, note, Durability::Durable)
}

/// Writes a change of the run record that only matters in this boot. It does not wait for the disk.
pub(super) fn write_record(children: &Path, note: &RunRecord) -> Result<(), RecordError> {
    write_json(children, &note.id, RECORD_FILE, note, Durability::UntilPowerLoss)
}

/// The value in a file; `None` if there is none that can be read.
fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

fn write_json(
    children: &Path,
    id: &ServiceId,
    file: &str,
    value: &impl Serialize,
    durability: Durability,
) -> Result<(), RecordError> {
    use std::os::unix::fs::DirBuilderExt as _;
    let directory = children.join(id.child_name());
    let path = directory.join(file);
    let write = || {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        atomic_file::replace_hint(&path, &serde_json::to_vec(value)?, durability)
    };
    write().map_err(|source| RecordError { path: path.clone(), source })
}

#[cfg(test)]
mod tests {
    use testkit::damage::{Damage, restore};

    use super::*;

    /// A file system may lose the record with a change that does not wait for the disk.
    #[test]
    fn lost_record_has_the_files_of_the_last_start() {
        for service in ["server", &"s".repeat(100)] {
            let root = tempfile::tempdir().unwrap();
            let children = root.path().join("children");
            let id = ServiceId { role: "web".to_owned(), service: service.to_owned() };
            let path = children.join(id.child_name()).join(RECORD_FILE);
            for files in [["a", "b/c"], ["a", "d"]] {
                let files: BTreeSet<String> = files.map(str::to_owned).into();
                let started = RunRecord {
                    digest: "5a".to_owned(),
                    revision: 3,
                    files: files.clone(),
                    ..RunRecord::missing(id.clone())
                };
                record_start(&children, &started).unwrap();
                let changed = RunRecord { revision: 4, ..started };
                write_record(&children, &changed).unwrap();
                let found = || read_record(&children, &id.child_name());
                assert_eq!(found().as_ref(), Some(&changed));
                for damage in [Damage::Empty, Damage::Truncated, Damage::NotUtf8, Damage::Directory] {
                    let whole = damage.inflict(&path).unwrap();
                    let expected = RunRecord { files: files.clone(), ..RunRecord::missing(id.clone()) };
                    assert_eq!(
                        found(),
                        Some(expected),
                        "{damage:?}: files of a former declaration would stay"
                    );
                    restore(&path, &whole).unwrap();
                }
            }
        }
    }
}
