//! By what components were started, as a number for each combination of a bundle and a generation of keys.
//!
//! A component carries the number that it was started by as the revision of what is declared of it
//! ([`Wanted::revision`][crate::roleserver::cluster::services::wanted::Wanted]), which is written down with it. So what runs,
//! also what another role server started, can be said by what it runs: never by what it should run by.

use serde::{Deserialize, Serialize};

use crate::roleserver::cluster::files::{Files, FilesError};

const NAME: &str = "kubernetes-runs.json";
/// So many are kept: one that runs is among the last two.
const MOST: usize = 32;

/// A bundle, and a generation of authorities and keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Its number.
    pub number: u64,
    /// The generation.
    pub generation: u64,
    /// The digest of the bundle, in hexadecimal digits.
    pub bundle: String,
    /// The version of Kubernetes in it.
    pub version: String,
}

/// Those of this node, the newest last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Runs(Vec<Run>);

impl Runs {
    /// What is kept; nothing also of a file that is damaged.
    #[must_use]
    pub fn read(files: &Files) -> Self {
        files.read_up_to(NAME, 1 << 20).ok().flatten().unwrap_or_default()
    }

    /// Keeps it.
    pub fn write(&self, files: &Files) -> Result<(), FilesError> {
        files.write(NAME, self)
    }

    /// The number of this combination, which is a new one if it is; `now`, in milliseconds since 1970, keeps apart those of
    /// before the file was lost.
    pub fn number(&mut self, generation: u64, bundle: &str, version: &str, now: i64) -> u64 {
        if let Some(known) = self.0.iter().find(|run| run.generation == generation && run.bundle == bundle) {
            return known.number;
        }
        let next =
            self.0.last().map_or(0, |last| last.number + 1).max(u64::try_from(now).unwrap_or(0)).max(1);
        let (bundle, version) = (bundle.to_owned(), version.to_owned());
        self.0.push(Run { number: next, generation, bundle, version });
        let surplus = self.0.len().saturating_sub(MOST);
        self.0.drain(..surplus);
        next
    }

    /// What has this number.
    #[must_use]
    pub fn get(&self, number: u64) -> Option<&Run> {
        self.0.iter().find(|run| run.number == number)
    }

    /// Where it stands among the others; what nobody knows any more comes first.
    #[must_use]
    pub fn place(&self, number: u64) -> Option<usize> {
        self.0.iter().position(|run| run.number == number)
    }

    /// The newest.
    #[must_use]
    pub fn last(&self) -> Option<&Run> {
        self.0.last()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn combination_keeps_its_number_and_no_number_means_two() {
        let mut runs = Runs::default();
        let first = runs.number(1, "a", "1.20.2", 1000);
        assert_eq!(first, 1000);
        assert_eq!(runs.number(1, "a", "1.20.2", 5000), first);
        assert_eq!(runs.number(2, "a", "1.20.2", 0), 1001);
        assert_eq!(runs.number(1, "b", "1.20.3", 0), 1002);
        assert_eq!(runs.number(1, "a", "1.20.2", 0), first, "it was taken back");
        for generation in 10..60 {
            runs.number(generation, "a", "1.20.2", 0);
        }
        assert_eq!((runs.0.len(), runs.get(first)), (MOST, None));
        let directory = tempfile::tempdir().unwrap();
        let files = Files::of(directory.path());
        assert_eq!(Runs::read(&files), Runs::default());
        runs.write(&files).unwrap();
        assert_eq!(Runs::read(&files), runs);
    }
}
