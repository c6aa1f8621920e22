//! The control group above all pods.
//!
//! The kubelet puts every pod below one group, which must exist before it starts, in each hierarchy of the host: in all
//! mounted hierarchies of version 1, or in that of version 2 if it is the only one. A cpuset group is usable only once
//! it has processors and memory nodes (cpuset(7)).
//!
//! With the cgroup driver `systemd`, which is used on version 2 alone, that group is a slice. The kubelet derives its
//! name from the same setting. Its directory is made here too, because the kubelet looks for it before it asks systemd
//! for the first slice below it; systemd takes the directory as it is.
//!
//! The name of the group belongs to this role server. Every process in it belongs to a pod, no matter which role server
//! started it or adopted it, and is killed when the role ends.

use std::fs;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::child::cgroup::Cgroup;
use crate::cluster::kubernetes::cgroup_driver::{CgroupDriver, RunningPods};
use crate::mountinfo;

/// Files that a cpuset group copies from its parent.
const INHERITED_FILES: [&str; 2] = ["cpuset.cpus", "cpuset.mems"];
/// Controllers of version 2 that a kubelet needs or uses.
const CONTROLLERS: [&str; 5] = ["cpu", "cpuset", "hugetlb", "memory", "pids"];

/// Name of the group above all pods.
#[must_use]
pub fn cgroup_name(family: &str) -> String {
    format!("{family}-pods")
}

/// Name of the slice above all pods: `-` separates the levels of slices, so the kubelet replaces it in a name.
#[must_use]
pub fn slice_name(family: &str) -> String {
    format!("{}.slice", cgroup_name(family).replace('-', "_"))
}

/// The group above all pods: one directory in each hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodCgroups {
    /// Directories that have to exist.
    required: Vec<PathBuf>,
    /// A directory that others may create: version 2 beside version 1.
    optional: Option<PathBuf>,
    /// The directory of the slice; `None` unless version 2 is the only one.
    slice: Option<PathBuf>,
}

impl PodCgroups {
    /// The groups of this host.
    #[must_use]
    pub fn detect_host(family: &str) -> Self {
        Self::parse_host(&mountinfo::read_mountinfo().unwrap_or_default(), family)
    }

    /// Parses the groups from `/proc/self/mountinfo` (proc(5)).
    #[must_use]
    pub fn parse_host(mountinfo: &str, family: &str) -> Self {
        let (mut first, mut second, mut slice) = (Vec::new(), None, None);
        for mount in mountinfo::parse_mounts(mountinfo) {
            let path = mount.point.join(cgroup_name(family));
            match mount.kind {
                "cgroup" if !first.contains(&path) => first.push(path),
                "cgroup2" if second.is_none() => {
                    second = Some(path);
                    slice = Some(mount.point.join(slice_name(family)));
                }
                _ => {}
            }
        }
        if first.is_empty() {
            Self { required: second.into_iter().collect(), optional: None, slice }
        } else {
            Self { required: first, optional: second, slice: None }
        }
    }

    /// Whether the slice exists, because systemd has pods in it or had.
    #[must_use]
    pub fn has_slice(&self) -> bool {
        self.slice.as_ref().is_some_and(|path| path.is_dir())
    }

    /// Where processes of pods run now.
    pub fn find_running(&self) -> std::io::Result<RunningPods> {
        Ok(RunningPods {
            in_cgroupfs: has_processes(self.required.iter().chain(&self.optional))?,
            in_slice: has_processes(self.slice.iter())?,
        })
    }

    /// The directories that have to exist for a driver.
    fn directories(&self, driver: CgroupDriver) -> &[PathBuf] {
        match driver {
            CgroupDriver::Cgroupfs => &self.required,
            CgroupDriver::Systemd => self.slice.as_slice(),
        }
    }

    /// Creates the group where it does not exist. Blocks.
    pub fn create(&self, driver: CgroupDriver) -> std::io::Result<()> {
        for path in self.directories(driver) {
            let failed = |error: Error| {
                Error::new(
                    error.kind(),
                    format!("making the control group {} failed: {error}", path.display()),
                )
            };
            match fs::create_dir(path) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(failed(error)),
                _ => {}
            }
            let Some(above) = path.parent() else { continue };
            for file in INHERITED_FILES {
                if above.join("cgroup.controllers").exists() || !above.join(file).exists() {
                    continue;
                }
                let has = fs::read_to_string(path.join(file)).unwrap_or_default();
                if has.trim().is_empty() {
                    let of_above = fs::read_to_string(above.join(file)).map_err(failed)?;
                    fs::write(path.join(file), of_above.trim()).map_err(failed)?;
                }
            }
            enable_controllers(above).map_err(failed)?;
        }
        Ok(())
    }

    /// Ends all processes in the group, and removes it with its subgroups. Processes get `patience` before they are
    /// killed. Blocks.
    pub fn terminate(&self, patience: Duration) -> std::io::Result<()> {
        terminate_groups(self.required.iter().chain(&self.optional).chain(&self.slice), patience)
    }

    /// Ends what the other driver left: pods of a drained node that belong to it. Their successors get groups of
    /// `driver`. Blocks.
    pub fn terminate_other(&self, driver: CgroupDriver, patience: Duration) -> std::io::Result<()> {
        match driver {
            CgroupDriver::Cgroupfs => terminate_groups(self.slice.iter(), patience),
            CgroupDriver::Systemd => terminate_groups(self.required.iter().chain(&self.optional), patience),
        }
    }
}

/// Whether a process is in one of these groups, or in a group inside one. A group that does not exist has none.
fn has_processes<'p>(paths: impl Iterator<Item = &'p PathBuf>) -> std::io::Result<bool> {
    let all: Vec<PathBuf> = paths.cloned().collect();
    let pids = Cgroup::from_directories(&all).pids().map_err(Error::other)?;
    Ok(!pids.is_empty())
}

fn terminate_groups<'p>(paths: impl Iterator<Item = &'p PathBuf>, patience: Duration) -> std::io::Result<()> {
    let all: Vec<PathBuf> = paths.filter(|path| path.is_dir()).cloned().collect();
    if all.is_empty() {
        return Ok(());
    }
    let group = Cgroup::from_directories(&all);
    let ended = group.terminate(patience).map_err(Error::other)?;
    if ended > 0 {
        tracing::warn!(processes = ended, "leftover processes of pods were stopped");
    }
    group.remove();
    Ok(())
}

/// Enables the available controllers for the children of a group of version 2.
fn enable_controllers(group: &Path) -> std::io::Result<()> {
    let Ok(there) = fs::read_to_string(group.join("cgroup.controllers")) else { return Ok(()) };
    let file = group.join("cgroup.subtree_control");
    let has = fs::read_to_string(&file).unwrap_or_default();
    let is_in = |text: &str, name: &str| text.split_whitespace().any(|word| word == name);
    let lacking: Vec<String> = CONTROLLERS
        .into_iter()
        .filter(|name| is_in(&there, name) && !is_in(&has, name))
        .map(|name| format!("+{name}"))
        .collect();
    if lacking.is_empty() { Ok(()) } else { fs::write(&file, lacking.join(" ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAMILY: &str = "roleserver-0123456789ab";

    #[test]
    fn group_is_in_each_hierarchy_of_version_1_or_in_that_of_version_2_alone() {
        let line = |kind: &str, point: &str| format!("30 28 0:26 / {point} rw - {kind} {kind} rw\n");
        let first = line("cgroup", "/c/cpu") + &line("cgroup", "/c/memory");
        let second = line("cgroup2", "/c/unified");
        let path = |point: &str| PathBuf::from(point).join(format!("{FAMILY}-pods"));
        let slice = PathBuf::from("/c/unified/roleserver_0123456789ab_pods.slice");
        for (mountinfo, needed, beside, slice) in [
            (first.clone(), vec![path("/c/cpu"), path("/c/memory")], None, None),
            (
                format!("{second}{first}"),
                vec![path("/c/cpu"), path("/c/memory")],
                Some(path("/c/unified")),
                None,
            ),
            (second, vec![path("/c/unified")], None, Some(slice)),
            ("garbage\n".to_owned(), vec![], None, None),
        ] {
            assert_eq!(
                PodCgroups::parse_host(&mountinfo, FAMILY),
                PodCgroups { required: needed, optional: beside, slice },
                "{mountinfo}"
            );
        }
    }

    /// Directories and files take the place of hierarchies.
    #[test]
    fn group_has_what_a_kubelet_needs_and_is_created_once() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let read = |path: &str| fs::read_to_string(root.path().join(path)).unwrap();
        write("cpuset/cpuset.cpus", "0-1\n");
        write("cpuset/cpuset.mems", "0\n");
        write("unified/cgroup.controllers", "cpuset cpu io memory pids\n");
        write("unified/cgroup.subtree_control", "memory\n");
        let needed = vec![root.path().join("cpuset/p"), root.path().join("unified/p")];
        let slice = Some(root.path().join("unified/p.slice"));
        let pods = PodCgroups { required: needed, optional: None, slice };
        pods.create(CgroupDriver::Cgroupfs).unwrap();
        assert!(!pods.has_slice());
        assert_eq!((read("cpuset/p/cpuset.cpus"), read("cpuset/p/cpuset.mems")), ("0-1".into(), "0".into()));
        assert_eq!(read("unified/cgroup.subtree_control"), "+cpu +cpuset +pids");
        write("cpuset/p/cpuset.cpus", "1");
        pods.create(CgroupDriver::Cgroupfs).unwrap();
        assert_eq!(read("cpuset/p/cpuset.cpus"), "1", "somebody has chosen");
        pods.create(CgroupDriver::Systemd).unwrap();
        assert!(pods.has_slice());
        assert_eq!(pods.find_running().unwrap(), RunningPods::default());
        write("unified/p.slice/p-pod7.slice/a.scope/cgroup.procs", "12\n");
        assert_eq!(pods.find_running().unwrap(), RunningPods { in_cgroupfs: false, in_slice: true });
        write("cpuset/p/kubepods/pod7/cgroup.procs", "13\n");
        assert_eq!(pods.find_running().unwrap(), RunningPods { in_cgroupfs: true, in_slice: true });
        fs::remove_dir_all(root.path().join("unified/p.slice/p-pod7.slice")).unwrap();
        fs::remove_dir_all(root.path().join("cpuset/p/kubepods")).unwrap();
        pods.terminate_other(CgroupDriver::Cgroupfs, Duration::ZERO).unwrap();
        assert!(!pods.has_slice(), "no pod of the other driver stays");
        assert!(root.path().join("unified/p").is_dir());
    }
}
