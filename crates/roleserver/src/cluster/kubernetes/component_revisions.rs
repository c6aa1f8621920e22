//! Revision history: numbers for combinations of bundle, key generation and providers of Secrets.
//!
//! A component carries the number that it was started with as
//! [`DesiredService::revision`][crate::cluster::services::desired::DesiredService], which is stored in its
//! run record. So the status reports what a component runs with, even if another role server started it, and never what
//! it should run with.

use serde::{Deserialize, Serialize};

use crate::cluster::files::{ClusterFiles, ClusterFilesError};

const NAME: &str = "kubernetes-runs.json";
/// Number of revisions that are stored; a running component has one of the last two.
const MAX_REVISIONS: usize = 32;

/// A combination of a bundle, a generation of authorities and keys, and the providers of Secrets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComponentRevision {
    /// Its number, unique on this node.
    pub number: u64,
    /// Generation of authorities and keys.
    pub generation: u64,
    /// SHA-256 of the bundle, in hexadecimal digits.
    pub bundle: String,
    /// Version of Kubernetes in the bundle.
    pub version: String,
    /// Names of the providers of Secrets, separated by spaces; empty if they are not encrypted.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub secrets: String,
}

/// All stored revisions of this node, the newest last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevisionHistory(Vec<ComponentRevision>);

impl RevisionHistory {
    /// Reads the stored history; empty also for a damaged file.
    #[must_use]
    pub fn read(files: &ClusterFiles) -> Self {
        files.read_json_limited(NAME, 1 << 20).ok().flatten().unwrap_or_default()
    }

    /// Stores the history in `kubernetes-runs.json`.
    pub fn write(&self, files: &ClusterFiles) -> Result<(), ClusterFilesError> {
        files.write_hint(NAME, self)
    }

    /// The number of this combination; a new combination gets a new number. A new number is at least `now`, in
    /// milliseconds since 1970, so that numbers stay unique after the file was lost.
    pub fn revision_for(
        &mut self,
        generation: u64,
        bundle: &str,
        version: &str,
        secrets: &str,
        now: i64,
    ) -> u64 {
        let is_same = |run: &&ComponentRevision| {
            run.generation == generation && run.bundle == bundle && run.secrets == secrets
        };
        if let Some(known) = self.0.iter().find(is_same) {
            return known.number;
        }
        let next =
            self.0.last().map_or(0, |last| last.number + 1).max(u64::try_from(now).unwrap_or(0)).max(1);
        let [bundle, version, secrets] = [bundle, version, secrets].map(str::to_owned);
        self.0.push(ComponentRevision { number: next, generation, bundle, version, secrets });
        let surplus = self.0.len().saturating_sub(MAX_REVISIONS);
        self.0.drain(..surplus);
        next
    }

    /// The revision with this number, if it is stored.
    #[must_use]
    pub fn get(&self, number: u64) -> Option<&ComponentRevision> {
        self.0.iter().find(|run| run.number == number)
    }

    /// Its position in the history; `None`, which sorts first, if it is not stored any more.
    #[must_use]
    pub fn position(&self, number: u64) -> Option<usize> {
        self.0.iter().position(|run| run.number == number)
    }

    /// The newest revision, if there is one.
    #[must_use]
    pub fn last(&self) -> Option<&ComponentRevision> {
        self.0.last()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn combination_keeps_its_number_and_numbers_are_unique() {
        let mut runs = RevisionHistory::default();
        let first = runs.revision_for(1, "a", "1.20.2", "", 1000);
        assert_eq!(first, 1000);
        assert_eq!(runs.revision_for(1, "a", "1.20.2", "", 5000), first);
        assert_eq!(runs.revision_for(2, "a", "1.20.2", "", 0), 1001);
        assert_eq!(runs.revision_for(1, "b", "1.20.3", "", 0), 1002);
        assert_eq!(runs.revision_for(1, "b", "1.20.3", "key1-a", 0), 1003);
        assert_eq!(runs.revision_for(1, "a", "1.20.2", "", 0), first, "it was taken back");
        for generation in 10..60 {
            runs.revision_for(generation, "a", "1.20.2", "", 0);
        }
        assert_eq!((runs.0.len(), runs.get(first)), (MAX_REVISIONS, None));
        let directory = tempfile::tempdir().unwrap();
        let files = ClusterFiles::in_state_directory(directory.path());
        assert_eq!(RevisionHistory::read(&files), RevisionHistory::default());
        runs.write(&files).unwrap();
        assert_eq!(RevisionHistory::read(&files), runs);
    }
}
