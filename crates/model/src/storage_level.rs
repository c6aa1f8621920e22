//! When a file system has too little space or too few inodes: the thresholds, in one place. *Pure.*
//!
//! Role servers and shepherds measure the file systems that they write to, and report one that fills up before it is
//! full. A large disk has room for a long time when a tenth of it is free, so each threshold is a share of the file
//! system with an upper bound.
//!
//! A level ends only when a quarter more than its threshold is free. So a file system at the threshold is reported once,
//! and not with every write.

use std::path::PathBuf;

use crate::byte_size::ByteSize;

/// The available share of a file system at or below which it is nearly full, in per cent, and the bound of that share.
const LOW_SPACE: Threshold = Threshold { percent: 10, limit: 5 << 30 };
/// The same for a file system that counts as full: a file of some size may no longer fit.
const EXHAUSTED_SPACE: Threshold = Threshold { percent: 1, limit: 64 << 20 };
/// The same for inodes that run out.
const LOW_INODES: Threshold = Threshold { percent: 5, limit: 50_000 };
/// The same for inodes that count as used up.
const EXHAUSTED_INODES: Threshold = Threshold { percent: 1, limit: 1000 };

/// A share of a total, and its upper bound.
#[derive(Clone, Copy, Debug)]
struct Threshold {
    percent: u64,
    limit: u64,
}

impl Threshold {
    /// What may be available of `total` at this threshold.
    fn of_total(self, total: u64) -> u64 {
        (total / 100)
            .saturating_mul(self.percent)
            .max(total.saturating_mul(self.percent) / 100)
            .min(self.limit)
    }
}

/// Size of a file system, and what of it is available.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileSystemUsage {
    /// Its size in bytes; 0 where it has none.
    pub bytes: u64,
    /// Bytes that a program of this user may still write.
    pub available_bytes: u64,
    /// Most files and directories; 0 where it has no such limit.
    pub inodes: u64,
    /// How many files this user may still create.
    pub available_inodes: u64,
}

/// How much of one resource is available.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum StorageLevel {
    /// Enough: nothing is reported.
    #[default]
    Sufficient,
    /// It runs out: an operator has time to act.
    Low,
    /// Writes fail, or will within moments.
    Exhausted,
}

impl StorageLevel {
    /// The level of a resource of which `available` of `total` is available, and which had the level `self` before.
    fn next(self, available: u64, total: u64, low: Threshold, exhausted: Threshold) -> Self {
        if total == 0 {
            return Self::Sufficient;
        }
        let is_within = |threshold: Threshold, level: Self| {
            let most = threshold.of_total(total);
            available <= if self >= level { most + most / 4 } else { most }
        };
        if is_within(exhausted, Self::Exhausted) {
            Self::Exhausted
        } else if is_within(low, Self::Low) {
            Self::Low
        } else {
            Self::Sufficient
        }
    }
}

/// The levels of a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileSystemLevels {
    /// The level of its bytes.
    pub space: StorageLevel,
    /// The level of its inodes.
    pub inodes: StorageLevel,
}

impl FileSystemLevels {
    /// The levels of a file system that had the levels `self` before.
    #[must_use]
    pub fn next(self, usage: FileSystemUsage) -> Self {
        Self {
            space: self.space.next(usage.available_bytes, usage.bytes, LOW_SPACE, EXHAUSTED_SPACE),
            inodes: self.inodes.next(usage.available_inodes, usage.inodes, LOW_INODES, EXHAUSTED_INODES),
        }
    }

    /// What is wrong, as the end of a sentence that begins with the file system; `None` if enough is available. It has no
    /// measured number, so that it stays the same while the level does: each change is written to the database.
    #[must_use]
    pub fn describe(self) -> Option<String> {
        let space = match self.space {
            StorageLevel::Sufficient => None,
            StorageLevel::Low => Some(format!(
                "is nearly full: at most {} % or {} are available",
                LOW_SPACE.percent,
                ByteSize(LOW_SPACE.limit).humanize()
            )),
            StorageLevel::Exhausted => Some("is full".to_owned()),
        };
        let inodes = match self.inodes {
            StorageLevel::Sufficient => None,
            StorageLevel::Low => Some(format!(
                "is nearly out of inodes: at most {} % or {} are available",
                LOW_INODES.percent, LOW_INODES.limit
            )),
            StorageLevel::Exhausted => Some("has no inodes for more files".to_owned()),
        };
        let parts: Vec<String> = space.into_iter().chain(inodes).collect();
        (!parts.is_empty()).then(|| parts.join(" and "))
    }

    /// Whether writes fail, or will within moments.
    #[must_use]
    pub fn is_exhausted(self) -> bool {
        self.space == StorageLevel::Exhausted || self.inodes == StorageLevel::Exhausted
    }
}

/// A directory that is written to, as its file system was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryUsage {
    /// The path of the directory.
    pub path: PathBuf,
    /// What it contains, for people.
    pub content: &'static str,
    /// The device number of its file system.
    pub device: u64,
    /// What is available on that file system.
    pub usage: FileSystemUsage,
}

/// A file system that is written to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasuredFileSystem {
    /// The first directory on it.
    pub path: PathBuf,
    /// What the directories on it contain.
    pub contents: Vec<&'static str>,
    /// The device number that identifies it.
    pub device: u64,
    /// What is available on it.
    pub usage: FileSystemUsage,
    /// How much of its space and of its inodes is available.
    pub levels: FileSystemLevels,
}

impl MeasuredFileSystem {
    /// What is wrong with it, as a sentence with what to do; `None` if enough is available.
    #[must_use]
    pub fn describe(&self) -> Option<String> {
        let shortage = self.levels.describe()?;
        let consequence = if self.levels.is_exhausted() {
            "nothing there can be written until there is space"
        } else {
            "free space or enlarge it before writes fail"
        };
        let (path, contents) = (self.path.display(), self.contents.join(", "));
        Some(format!("the file system of {path} ({contents}) {shortage}; {consequence}"))
    }
}

/// The file systems of these directories, each once. `before` has their former levels.
#[must_use]
pub fn group_directories(
    directories: Vec<DirectoryUsage>,
    before: &[MeasuredFileSystem],
) -> Vec<MeasuredFileSystem> {
    let mut systems: Vec<MeasuredFileSystem> = Vec::new();
    for DirectoryUsage { path, content, device, usage } in directories {
        if let Some(system) = systems.iter_mut().find(|system| system.device == device) {
            system.contents.push(content);
            continue;
        }
        let former = before.iter().find(|former| former.device == device);
        let levels = former.map_or_else(FileSystemLevels::default, |former| former.levels).next(usage);
        systems.push(MeasuredFileSystem { path, contents: vec![content], device, usage, levels });
    }
    systems
}

#[cfg(test)]
mod tests {
    use super::StorageLevel::{Exhausted, Low, Sufficient};
    use super::*;

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;

    fn space(bytes: u64, available_bytes: u64) -> FileSystemUsage {
        FileSystemUsage { bytes, available_bytes, ..FileSystemUsage::default() }
    }

    #[test]
    fn level_of_space_follows_share_and_bound_and_ends_with_some_room() {
        let small = 100 * MIB;
        for (usage, before, level) in [
            (space(small, 11 * MIB), Sufficient, Sufficient),
            (space(small, 10 * MIB), Sufficient, Low),
            (space(small, 12 * MIB), Low, Low),
            (space(small, 13 * MIB), Low, Sufficient),
            (space(small, MIB), Low, Exhausted),
            (space(small, MIB + MIB / 5), Exhausted, Exhausted),
            (space(small, 2 * MIB), Exhausted, Low),
            (space(small, 50 * MIB), Exhausted, Sufficient),
            (space(small, 0), Sufficient, Exhausted),
            // A tenth of a large disk is enough.
            (space(4000 * GIB, 6 * GIB), Sufficient, Sufficient),
            (space(4000 * GIB, 5 * GIB), Sufficient, Low),
            (space(4000 * GIB, 64 * MIB), Low, Exhausted),
            (space(u64::MAX, u64::MAX), Low, Sufficient),
            // No file system that has a size.
            (space(0, 0), Low, Sufficient),
        ] {
            let next = FileSystemLevels { space: before, inodes: Sufficient }.next(usage);
            assert_eq!((next.space, next.inodes), (level, Sufficient), "{usage:?} {before:?}");
        }
    }

    #[test]
    fn level_of_inodes_is_sufficient_where_there_is_no_limit() {
        let inodes = |inodes: u64, available_inodes: u64| FileSystemUsage {
            inodes,
            available_inodes,
            ..space(100 * GIB, 50 * GIB)
        };
        for (usage, level) in [
            (inodes(0, 0), Sufficient),
            (inodes(1000, 51), Sufficient),
            (inodes(1000, 50), Low),
            (inodes(1000, 10), Exhausted),
            (inodes(20, 1), Low),
            (inodes(20, 0), Exhausted),
            (inodes(100_000_000, 50_001), Sufficient),
            (inodes(100_000_000, 50_000), Low),
            (inodes(100_000_000, 1000), Exhausted),
        ] {
            let next = FileSystemLevels::default().next(usage);
            assert_eq!((next.space, next.inodes), (Sufficient, level), "{usage:?}");
        }
    }

    #[test]
    fn sentence_has_what_runs_out() {
        let describe = |space, inodes| FileSystemLevels { space, inodes }.describe();
        assert_eq!(describe(Sufficient, Sufficient), None);
        assert_eq!(describe(Low, Sufficient).unwrap(), "is nearly full: at most 10 % or 5 GiB are available");
        assert_eq!(
            describe(Exhausted, Low).unwrap(),
            "is full and is nearly out of inodes: at most 5 % or 50000 are available"
        );
        assert_eq!(describe(Sufficient, Exhausted).unwrap(), "has no inodes for more files");
        assert!(FileSystemLevels { space: Low, inodes: Exhausted }.is_exhausted());
        assert!(!FileSystemLevels { space: Low, inodes: Low }.is_exhausted());
    }

    #[test]
    fn directories_of_one_file_system_are_one_entry_with_its_former_level() {
        let directory = |path: &str, content, device, available_mib: u64| DirectoryUsage {
            path: path.into(),
            content,
            device,
            usage: space(100 * MIB, available_mib * MIB),
        };
        let read = |mib| {
            vec![
                directory("/a", "keys", 1, mib),
                directory("/b", "etcd", 2, 50),
                directory("/a/c", "logs", 1, mib),
            ]
        };
        let first = group_directories(read(10), &[]);
        assert_eq!(first.len(), 2, "{first:?}");
        assert_eq!((&*first[0].contents, first[0].levels.space), (&["keys", "logs"][..], Low));
        assert_eq!(first[1].describe(), None);
        assert_eq!(
            first[0].describe().unwrap(),
            "the file system of /a (keys, logs) is nearly full: at most 10 % or 5 GiB are available; free space or enlarge \
             it before writes fail"
        );
        assert_eq!(group_directories(read(12), &first)[0].levels.space, Low, "the former level counts");
        assert_eq!(group_directories(read(12), &[])[0].levels.space, Sufficient);
        let full = group_directories(read(0), &first);
        assert_eq!(
            full[0].describe().unwrap(),
            "the file system of /a (keys, logs) is full; nothing there can be written until there is space"
        );
        assert!(group_directories(Vec::new(), &full).is_empty());
    }
}
