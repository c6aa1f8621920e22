//! The control group above all pods.
//!
//! The kubelet puts every pod below one group, which must exist before it starts, in each hierarchy of the host: in all
//! mounted hierarchies of version 1, or in that of version 2 if it is the only one. A cpuset group is usable only once
//! it has processors and memory nodes (cpuset(7)).
//!
//! The name of the group belongs to this role server. Every process in it belongs to a pod, no matter which role server
//! started it or adopted it, and is killed when the role ends.

use std::fs;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::child::cgroup::Cgroup;
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

/// The group above all pods: one directory in each hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodCgroups {
    /// Directories that have to exist.
    required: Vec<PathBuf>,
    /// A directory that others may create: version 2 beside version 1.
    optional: Option<PathBuf>,
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
        let (mut first, mut second) = (Vec::new(), None);
        for mount in mountinfo::parse_mounts(mountinfo) {
            let path = mount.point.join(cgroup_name(family));
            match mount.kind {
                "cgroup" if !first.contains(&path) => first.push(path),
                "cgroup2" if second.is_none() => second = Some(path),
                _ => {}
            }
        }
        if first.is_empty() {
            Self { required: second.into_iter().collect(), optional: None }
        } else {
            Self { required: first, optional: second }
        }
    }

    /// Creates the group where it does not exist. Blocks.
    pub fn create(&self) -> std::io::Result<()> {
        for path in &self.required {
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
        let all: Vec<PathBuf> =
            self.required.iter().chain(&self.optional).filter(|path| path.is_dir()).cloned().collect();
        let group = Cgroup::from_directories(&all);
        let ended = group.terminate(patience).map_err(Error::other)?;
        if ended > 0 {
            tracing::warn!(processes = ended, "leftover processes of pods were stopped");
        }
        group.remove();
        Ok(())
    }
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
        for (mountinfo, needed, beside) in [
            (first.clone(), vec![path("/c/cpu"), path("/c/memory")], None),
            (format!("{second}{first}"), vec![path("/c/cpu"), path("/c/memory")], Some(path("/c/unified"))),
            (second, vec![path("/c/unified")], None),
            ("garbage\n".to_owned(), vec![], None),
        ] {
            assert_eq!(
                PodCgroups::parse_host(&mountinfo, FAMILY),
                PodCgroups { required: needed, optional: beside },
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
        let pods = PodCgroups { required: needed, optional: None };
        pods.create().unwrap();
        assert_eq!((read("cpuset/p/cpuset.cpus"), read("cpuset/p/cpuset.mems")), ("0-1".into(), "0".into()));
        assert_eq!(read("unified/cgroup.subtree_control"), "+cpu +cpuset +pids");
        write("cpuset/p/cpuset.cpus", "1");
        pods.create().unwrap();
        assert_eq!(read("cpuset/p/cpuset.cpus"), "1", "somebody has chosen");
    }
}
