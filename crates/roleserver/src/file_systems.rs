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

use hardening::own_usage::{FileSystem, read_file_system};
use model::host_finding::{HostFinding, HostFindingKind};
use model::storage_level::{DirectoryUsage, MeasuredFileSystem, group_directories};
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

/// A directory on a file system that is watched, and what it contains, for people.
type WatchedDirectory = (PathBuf, &'static str);

/// The runnable that measures the file systems below a state directory and reports those that fill up.
#[must_use]
pub fn watch_file_systems(
    state: &Path,
    findings: HostFindings,
    measured: WatchCell<Vec<MeasuredFileSystem>>,
) -> Runnable {
    let state = state.to_owned();
    Runnable::new(move |starting: Starting| {
        let (state, findings, measured) = (state.clone(), findings.clone(), measured.clone());
        async move {
            let healthy = starting.mark_healthy();
            healthy.scope().until_cancelled(keep_measuring(&state, &findings, &measured)).await?;
            Err(healthy.scope().cancelled().await.into())
        }
    })
}

async fn keep_measuring(
    state: &Path,
    findings: &HostFindings,
    measured: &WatchCell<Vec<MeasuredFileSystem>>,
) {
    let mut systems = Vec::new();
    loop {
        let (state, before) = (state.to_owned(), systems.clone());
        let measuring = tokio::task::spawn_blocking(move || measure(&watched_directories(&state), &before));
        // A measurement that panicked changes nothing.
        if let Ok(next) = measuring.await {
            systems = next;
            findings.set(SOURCE, find_shortages(&systems));
            measured.set(systems.clone());
        }
        tokio::time::sleep(WATCH_INTERVAL).await;
    }
}

/// Every directory that the role server or one of its programs writes to. Not all of them exist on every machine. Blocks.
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

/// Measures the file systems of the directories that exist. Blocks.
fn measure(directories: &[WatchedDirectory], before: &[MeasuredFileSystem]) -> Vec<MeasuredFileSystem> {
    let read = directories.iter().filter_map(|(path, content)| {
        let FileSystem { device, usage } = read_file_system(path).ok()?;
        Some(DirectoryUsage { path: path.clone(), content, device, usage })
    });
    group_directories(read.collect(), before)
}

/// The findings about file systems that fill up. *Pure.*
fn find_shortages(systems: &[MeasuredFileSystem]) -> Vec<HostFinding> {
    let messages = systems.iter().filter_map(MeasuredFileSystem::describe);
    messages.map(|message| HostFinding { kind: HostFindingKind::StorageLow, message }).collect()
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
}
