//! Half-written files that a crash left, in all directories of the role server that have replaced files.
//!
//! Crashes in a row would otherwise fill a disk, and those of keys would keep secrets.

use std::fs;
use std::path::{Path, PathBuf};

use crate::atomic_file;

/// Any directory, in the place of a name.
const ANY: &str = "*";

/// Every directory with files that are replaced whole ([`atomic_file`]), below the state directory. The data of etcd, of
/// services and of pods is none of them.
const DIRECTORIES: [&[&str]; 7] = [
    &[],
    &["cluster"],
    &["cluster", "etcd"],
    // Keys and certificates of each part of Kubernetes.
    &["cluster", "kubernetes"],
    &["cluster", "kubernetes", ANY],
    // Records of each program that runs beside the role server.
    &["children", ANY],
    // What runc recorded of it.
    &["children", ANY, "bundle", "state", ANY],
];

/// Removes half-written files of processes that have ended. The caller is the only agent of this state directory, and writes
/// nothing there meanwhile. A failure is logged, and hides no other directory.
pub fn remove_all(state_directory: &Path) {
    for path in DIRECTORIES.iter().flat_map(|names| find_directories(state_directory, names)) {
        match atomic_file::remove_leftovers(&path) {
            Ok(0) => {}
            Ok(count) => {
                tracing::info!(count, path = %path.display(), "half-written files were removed");
            }
            Err(error) => {
                tracing::warn!(%error, path = %path.display(), "half-written files could not be removed");
            }
        }
    }
}

/// The directories of these names that exist. It follows no link: that may lead to files of somebody else.
fn find_directories(state_directory: &Path, names: &[&str]) -> Vec<PathBuf> {
    let mut found = vec![state_directory.to_owned()];
    for &name in names {
        let mut below = Vec::new();
        for directory in found {
            let candidates =
                if name == ANY { list_directory(&directory) } else { vec![directory.join(name)] };
            below.extend(candidates.into_iter().filter(|path| is_directory(path)));
        }
        found = below;
    }
    found
}

fn list_directory(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let entries = entries.unwrap_or_else(|error| {
        tracing::warn!(%error, path = %directory.display(), "half-written files below it cannot be found");
        Vec::new()
    });
    entries.iter().map(fs::DirEntry::path).collect()
}

fn is_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::os::unix::fs::symlink;

    /// Larger than any process id (proc(5), `pid_max`).
    const HALF: &str = ".a.5000000.0";

    fn half_written(directory: &Path) -> PathBuf {
        fs::create_dir_all(directory).unwrap();
        let path = directory.join(HALF);
        fs::write(&path, "half").unwrap();
        path
    }

    #[test]
    fn half_written_files_are_removed_from_every_directory_of_the_role_server() {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().join("state");
        remove_all(&state);
        let removed = [
            "",
            "cluster",
            "cluster/etcd",
            "cluster/kubernetes",
            "cluster/kubernetes/controller",
            "children/service_a",
            "children/service_a/bundle/state/service_a",
        ]
        .map(|place| half_written(&state.join(place)));
        let kept = [
            "cluster/etcd/data",
            "cluster/services/a",
            "cluster/kubernetes/kubernetes-worker_kubelet/root",
            "children/service_a/bundle/rootfs",
        ]
        .map(|place| half_written(&state.join(place)));
        let whole = state.join("children/service_a/process.json");
        fs::write(&whole, "{}").unwrap();
        // A link in the place of a directory, and one in the place of a file.
        let elsewhere = half_written(&directory.path().join("elsewhere"));
        symlink(directory.path().join("elsewhere"), state.join("children/service_b")).unwrap();
        symlink(directory.path().join("elsewhere"), state.join("cluster/kubernetes/worker")).unwrap();
        let link = state.join("cluster/.b.5000000.0");
        symlink(&whole, &link).unwrap();

        remove_all(&state);
        for path in &removed {
            assert!(!path.exists(), "{}", path.display());
        }
        for path in kept.iter().chain([&whole, &elsewhere, &link]) {
            assert!(path.exists(), "{}", path.display());
        }
    }

    #[test]
    fn linked_directory_of_the_cluster_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let elsewhere = half_written(&directory.path().join("elsewhere"));
        let state = directory.path().join("state");
        fs::create_dir(&state).unwrap();
        symlink(directory.path().join("elsewhere"), state.join("cluster")).unwrap();
        remove_all(&state);
        assert!(elsewhere.exists());
    }
}
