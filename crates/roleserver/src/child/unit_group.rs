//! The group of the role server itself: which children have groups below it, and who changes that.
//!
//! In version 2, the group hands its controllers on while a child has a group below it, and takes them back after the last
//! child has moved. Two threads must not do both at once: the one that makes the group of a first child would find its
//! directory or its controllers gone.

use std::collections::BTreeSet;
use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::child::cgroup::{AGENT_GROUP, CgroupMounts};

/// The group is that of the process, and so is its lock.
static LAYOUT: Mutex<()> = Mutex::new(());

/// Keeps other threads from adding or removing groups of children. A thread that has the lock of a child may take this one,
/// and not the other way round.
pub(super) fn lock_layout() -> MutexGuard<'static, ()> {
    LAYOUT.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CgroupMounts {
    /// Names of the children that have a group below this process's own.
    pub(super) fn group_names(&self, family: &str) -> BTreeSet<String> {
        let own = self.unified.iter().chain(self.legacy.values());
        let entries = own.flat_map(|own| fs::read_dir(own.join(family)).into_iter().flatten().flatten());
        entries
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect()
    }

    /// Takes the controllers back from the groups below this process's own, where no child has a group there any more:
    /// all of them, because runc hands on every controller of each group above its own.
    pub(super) fn take_controllers_back(&self, family: &str) {
        let _layout = lock_layout();
        let Some(own) = self.unified.as_ref().filter(|_| self.legacy.is_empty()) else { return };
        // A child without processes may have left it.
        let _ = fs::remove_dir(own.join(family));
        if own.join(family).exists() {
            return;
        }
        let file = own.join("cgroup.subtree_control");
        let enabled = fs::read_to_string(&file).unwrap_or_default();
        let change: Vec<String> = enabled.split_whitespace().map(|name| format!("-{name}")).collect();
        if change.is_empty() {
            return;
        }
        if let Err(error) = fs::write(&file, change.join(" ")) {
            tracing::warn!(
                %error,
                path = %file.display(),
                "the controllers were not taken back from the group of the unit, so systemd may refuse its next start \
                 with 219/CGROUP"
            );
            return;
        }
        // The role server goes back to where systemd had put it.
        let moved = own.join(AGENT_GROUP);
        for pid in fs::read_to_string(moved.join("cgroup.procs")).unwrap_or_default().lines() {
            let _ = fs::write(own.join("cgroup.procs"), pid);
        }
        let _ = fs::remove_dir(moved);
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::child::lifecycle::ChildContext;
    use crate::child::spec::ResourceLimits;

    /// The hierarchy is made of plain files.
    #[test]
    fn controllers_are_taken_back_when_no_child_is_left() {
        let root = tempfile::tempdir().unwrap();
        let own = root.path().join("unit");
        let mounts = CgroupMounts { unified: Some(own.clone()), ..CgroupMounts::none() };
        fs::create_dir_all(own.join("family/web")).unwrap();
        let file = own.join("cgroup.subtree_control");
        fs::write(&file, "cpu io memory\n").unwrap();
        assert_eq!(mounts.group_names("family"), BTreeSet::from(["web".to_owned()]));
        mounts.take_controllers_back("family");
        assert_eq!(fs::read_to_string(&file).unwrap(), "cpu io memory\n", "a child has a group there");
        fs::remove_dir(own.join("family/web")).unwrap();
        mounts.take_controllers_back("family");
        assert_eq!(fs::read_to_string(&file).unwrap(), "-cpu -io -memory");
        assert!(!own.join("family").exists());
    }

    /// The hierarchy is made of plain directories. Without the lock, the directory above the new group is removed in between.
    #[test]
    fn first_group_is_made_while_controllers_are_taken_back() {
        let root = tempfile::tempdir().unwrap();
        let own = root.path().join("unit");
        fs::create_dir(&own).unwrap();
        let children = ChildContext {
            directory: root.path().join("children"),
            mounts: CgroupMounts { unified: Some(own), ..CgroupMounts::none() },
            launcher: PathBuf::new(),
            shutdown: CancellationToken::new(),
            scopes: None,
        };
        std::thread::scope(|threads| {
            let starts = threads.spawn(|| {
                for _ in 0..5000 {
                    children.create_group("web", &ResourceLimits::default()).unwrap();
                    children.remove_group("web");
                }
            });
            while !starts.is_finished() {
                children.mounts.take_controllers_back(&children.instance_name());
            }
            starts.join().unwrap();
        });
    }
}
