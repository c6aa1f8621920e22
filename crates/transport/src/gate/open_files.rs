//! The limit of open files, which a program raises for itself.
//!
//! The soft limit is 1,024 nearly everywhere, because a program that calls `select` breaks with descriptors above it.
//! A program that does not may raise its soft limit to the hard one itself, and that is what units intend with
//! `LimitNOFILE=1024:1048576`. The limit is inherited: the crate `hardening` gives programs that we start the usual one
//! again.

use std::fmt;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::gate::limits::MIN_FILES;

/// Most files that we want. A kernel may allow a billion, and some code scans all possible descriptors.
const MAX_FILES: u64 = 1 << 20;

/// The process may open too few files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooFewFiles(u64);

impl fmt::Display for TooFewFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "this process may open {} files and needs at least {MIN_FILES}: raise its hard limit, with \
             LimitNOFILE=1024:1048576 in its systemd unit or with `ulimit -Hn`",
            self.0
        )
    }
}

impl std::error::Error for TooFewFiles {}

/// The soft limit to set for these two limits; `None` in them means no limit.
fn raised_limit(soft: Option<u64>, hard: Option<u64>) -> Option<u64> {
    let wanted = hard.unwrap_or(MAX_FILES).min(MAX_FILES);
    soft.is_some_and(|soft| soft < wanted).then_some(wanted)
}

/// Whether so many files are enough.
pub fn check_files(files: u64) -> Result<(), TooFewFiles> {
    if files < MIN_FILES { Err(TooFewFiles(files)) } else { Ok(()) }
}

/// Raises the soft limit of this process to its hard one, and returns how many files it may open.
pub fn raise_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    if let Some(raised) = raised_limit(limit.current, limit.maximum) {
        let limit = Rlimit { current: Some(raised), maximum: limit.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::warn!(%error, requested = raised, "the limit of open files cannot be raised");
        }
    }
    available_files()
}

/// How many files this process may open.
#[must_use]
pub fn available_files() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(MAX_FILES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft_limit_is_raised_to_the_hard_one_within_reason() {
        for (soft, hard, raised) in [
            (Some(1024), Some(1_048_576), Some(1_048_576)),
            (Some(1024), Some(4096), Some(4096)),
            (Some(1024), Some(1024), None),
            (Some(256), Some(256), None),
            (Some(1024), None, Some(MAX_FILES)),
            (Some(1024), Some(1 << 30), Some(MAX_FILES)),
            (Some(1 << 30), Some(1 << 30), None),
            (None, None, None),
        ] {
            assert_eq!(raised_limit(soft, hard), raised, "{soft:?} {hard:?}");
        }
    }

    #[test]
    fn too_few_files_are_one_sentence_with_a_remedy() {
        assert_eq!(check_files(512), Ok(()));
        let text = check_files(256).unwrap_err().to_string();
        assert_eq!(
            text,
            "this process may open 256 files and needs at least 512: raise its hard limit, with \
             LimitNOFILE=1024:1048576 in its systemd unit or with `ulimit -Hn`"
        );
    }
}
