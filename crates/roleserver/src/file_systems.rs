//! Watch on the file systems that the role server and its programs write to.
//!
//! A disk that fills up stops etcd, services and pods long before the machine is silent. So the role server measures the
//! file systems of its state, of etcd, of Kubernetes and of its logs every few seconds. One that is nearly full becomes a
//! [finding](HostFindings), and so an issue, while there is time to act. Its numbers are metrics.
//!
//! # On a full disk
//!
//! The role server continues. Heartbeats need no disk. A state file that cannot be written stays as it was, without a
//! half-written file beside it ([`atomic_file`](crate::atomic_file)), and is written when its content next changes or
//! with the next heartbeat. A log that is too long is shortened without its copy ([`log`](crate::child::log)). As soon as
//! there is space, everything continues and the finding ends.
//!
//! # Threads
//!
//! `statvfs` waits for a disk that does not answer. It has a thread of its own, and until it returns, the former
//! findings stay.

use std::path::{Path, PathBuf};
use std::time::Duration;

use model::host_finding::{HostFinding, HostFindingKind};
use model::storage_level::{FileSystemLevels, FileSystemUsage};
use supervisor::context::{Runnable, Starting};
use supervisor::watch_cell::WatchCell;

use crate::cluster::files::ClusterFiles;
use crate::host_findings::HostFindings;

/// The source of the findings of this file.
const SOURCE: &str = "file-systems";
/// Time between two measurements.
const WATCH_INTERVAL: Duration = Duration::from_secs(5);
/// Where the kubelet has the logs of pods.
const POD_LOGS: &str = "/var/log/pods";

/// A directory whose file system is watched, and what it contains, for people.
type WatchedDirectory = (PathBuf, &'static str);

/// A file system, as it was measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasuredFileSystem {
    /// The first watched directory on it.
    pub path: PathBuf,
    /// What the watched directories on it contain.
    pub contents: Vec<&'static str>,
    /// The device number that identifies it.
    pub device: u64,
    /// Its size, and what is available.
    pub usage: FileSystemUsage,
    /// How much of its space and of its inodes is available.
    pub levels: FileSystemLevels,
}

/// The runnable that measures the file systems below a state directory and reports those that fill up.
#[must_use]
pub fn watch_file_systems(
    state: &Path,
    findings: HostFindings,
    measured: WatchCell<Vec<MeasuredFileSystem>>,
) -> Runnable {
    let directories = watched_directories(state);
    Runnable::new(move |starting: Starting| {
        let (directories, findings, measured) = (directories.clone(), findings.clone(), measured.clone());
        async move {
            let healthy = starting.mark_healthy();
            healthy.scope().until_cancelled(keep_measuring(&directories, &findings, &measured)).await?;
            Err(healthy.scope().cancelled().await.into())
        }
    })
}

async fn keep_measuring(
    directories: &[WatchedDirectory],
    findings: &HostFindings,
    measured: &WatchCell<Vec<MeasuredFileSystem>>,
) {
    let mut systems = Vec::new();
    loop {
        let (directories, before) = (directories.to_vec(), systems.clone());
        // A measurement that panicked changes nothing.
        if let Ok(next) = tokio::task::spawn_blocking(move || measure(&directories, &before)).await {
            systems = next;
            findings.set(SOURCE, find_shortages(&systems));
            measured.set(systems.clone());
        }
        tokio::time::sleep(WATCH_INTERVAL).await;
    }
}

/// Every directory that the role server or one of its programs writes to. Not all of them exist on every machine.
fn watched_directories(state: &Path) -> Vec<WatchedDirectory> {
    let cluster = ClusterFiles::in_state_directory(state);
    let kubernetes = state.join("cluster/kubernetes");
    let mut directories = vec![
        (state.to_owned(), "state files and logs"),
        (state.join("children"), "programs and their logs"),
        (cluster.etcd_directory(), "etcd"),
        (kubernetes.clone(), "Kubernetes"),
        (kubernetes.join("kubernetes-worker_containerd/root"), "containerd"),
        (kubernetes.join("kubernetes-worker_kubelet/root"), "volumes of pods"),
    ];
    // Beside a role server without Kubernetes, they are those of another kubelet.
    if kubernetes.exists() {
        directories.push((POD_LOGS.into(), "logs of pods"));
    }
    directories
}

/// Measures the file systems of the directories that exist. Directories on one file system are one entry. Blocks.
fn measure(directories: &[WatchedDirectory], before: &[MeasuredFileSystem]) -> Vec<MeasuredFileSystem> {
    let mut systems: Vec<MeasuredFileSystem> = Vec::new();
    for (path, content) in directories {
        let Ok((device, usage)) = read_usage(path) else { continue };
        if let Some(system) = systems.iter_mut().find(|system| system.device == device) {
            system.contents.push(content);
            continue;
        }
        let former = before.iter().find(|former| former.device == device);
        let levels = former.map_or_else(FileSystemLevels::default, |former| former.levels).next(usage);
        systems.push(MeasuredFileSystem {
            path: path.clone(),
            contents: vec![*content],
            device,
            usage,
            levels,
        });
    }
    systems
}

/// The device of the file system that a path is on, and its usage.
fn read_usage(path: &Path) -> rustix::io::Result<(u64, FileSystemUsage)> {
    let device = rustix::fs::stat(path)?.st_dev;
    let read = rustix::fs::statvfs(path)?;
    let bytes = |blocks: u64| blocks.saturating_mul(read.f_frsize);
    let usage = FileSystemUsage {
        bytes: bytes(read.f_blocks),
        available_bytes: bytes(read.f_bavail),
        inodes: read.f_files,
        available_inodes: read.f_favail,
    };
    Ok((device, usage))
}

/// The findings about file systems that fill up. *Pure.*
fn find_shortages(systems: &[MeasuredFileSystem]) -> Vec<HostFinding> {
    let findings = systems.iter().filter_map(|system| {
        let shortage = system.levels.describe()?;
        let path = system.path.display();
        let consequence = if system.levels.is_exhausted() {
            "nothing there can be written; heartbeats continue, and everything else does as soon as there is space"
        } else {
            "free space or enlarge it before writes fail"
        };
        Some(HostFinding {
            kind: HostFindingKind::StorageLow,
            message: format!(
                "the file system of {path} ({}) {shortage}; {consequence}",
                system.contents.join(", ")
            ),
        })
    });
    findings.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    use model::storage_level::StorageLevel;

    #[test]
    fn directories_of_one_file_system_are_one_entry_and_missing_ones_are_none() {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path();
        std::fs::create_dir_all(state.join("cluster/etcd")).unwrap();
        let directories = watched_directories(state);
        assert!(!directories.iter().any(|(path, _)| path == Path::new(POD_LOGS)));
        let systems = measure(&directories, &[]);
        assert_eq!(systems.len(), 1, "{systems:?}");
        assert_eq!(
            (&*systems[0].path, &*systems[0].contents),
            (state, &["state files and logs", "etcd"][..])
        );
        assert!(systems[0].usage.bytes > 0 && systems[0].usage.available_bytes <= systems[0].usage.bytes);
        std::fs::create_dir_all(state.join("cluster/kubernetes")).unwrap();
        assert!(watched_directories(state).iter().any(|(path, _)| path == Path::new(POD_LOGS)));
        assert!(measure(&[(state.join("missing"), "x")], &systems).is_empty());
    }

    #[test]
    fn level_of_a_file_system_depends_on_the_former_one() {
        let directory = tempfile::tempdir().unwrap();
        let directories = [(directory.path().to_owned(), "state")];
        let mut former = measure(&directories, &[]);
        former[0].levels.space = StorageLevel::Exhausted;
        let next = measure(&directories, &former);
        assert_eq!(next[0].levels, former[0].levels.next(next[0].usage));
    }

    #[test]
    fn finding_has_the_path_and_what_is_on_it() {
        let system = |space| MeasuredFileSystem {
            path: "/var/lib/roleserver".into(),
            contents: vec!["state files and logs", "etcd"],
            device: 7,
            usage: FileSystemUsage::default(),
            levels: FileSystemLevels { space, inodes: StorageLevel::Sufficient },
        };
        assert!(find_shortages(&[system(StorageLevel::Sufficient)]).is_empty());
        let found = find_shortages(&[system(StorageLevel::Low), system(StorageLevel::Exhausted)]);
        let messages: Vec<&str> = found.iter().map(|finding| finding.message.as_str()).collect();
        assert_eq!(
            messages,
            [
                "the file system of /var/lib/roleserver (state files and logs, etcd) is nearly full: at most 10 % or 5 GiB \
                 are available; free space or enlarge it before writes fail",
                "the file system of /var/lib/roleserver (state files and logs, etcd) is full; nothing there can be \
                 written; heartbeats continue, and everything else does as soon as there is space",
            ]
        );
        assert!(found.iter().all(|finding| finding.kind == HostFindingKind::StorageLow));
    }
}
