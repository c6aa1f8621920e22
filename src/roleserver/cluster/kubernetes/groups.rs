//! The control groups of pods.
//!
//! The kubelet puts every pod below one group, which must be there before it begins, in each hierarchy of the host: of
//! version 1 all that are mounted, or that of version 2 where it is alone. A group of cpuset is of use only once it has
//! processors and memory nodes (cpuset(7)).
//!
//! The name of that group is this role server's own. Whatever is in it is of a pod, whoever started it and whoever has
//! adopted it since, and ends when the role goes.

use std::fs;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::roleserver::child::cgroup::Group;
use crate::roleserver::mountinfo;

/// What a group of cpuset must have of the one above it.
const OF_ABOVE: [&str; 2] = ["cpuset.cpus", "cpuset.mems"];
/// Controllers of version 2 that a kubelet needs or uses.
const CONTROLLERS: [&str; 5] = ["cpu", "cpuset", "hugetlb", "memory", "pids"];

/// The name of the group above those of all pods.
#[must_use]
pub fn name(family: &str) -> String {
    format!("{family}-pods")
}

/// The group above those of all pods: a directory for each hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pods {
    /// Those that must be there.
    needed: Vec<PathBuf>,
    /// One that is made by others, if at all: version 2 beside version 1.
    beside: Option<PathBuf>,
}

impl Pods {
    /// That of this host.
    #[must_use]
    pub fn of_this_host(family: &str) -> Self {
        Self::of(&mountinfo::read().unwrap_or_default(), family)
    }

    /// As `/proc/self/mountinfo` says it (proc(5)).
    #[must_use]
    pub fn of(mountinfo: &str, family: &str) -> Self {
        let (mut first, mut second) = (Vec::new(), None);
        for mount in mountinfo::mounts(mountinfo) {
            let path = mount.point.join(name(family));
            match mount.kind {
                "cgroup" if !first.contains(&path) => first.push(path),
                "cgroup2" if second.is_none() => second = Some(path),
                _ => {}
            }
        }
        if first.is_empty() {
            Self { needed: second.into_iter().collect(), beside: None }
        } else {
            Self { needed: first, beside: second }
        }
    }

    /// Makes it where it is not there yet. Blocks.
    pub fn make(&self) -> std::io::Result<()> {
        for path in &self.needed {
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
            for file in OF_ABOVE {
                if above.join("cgroup.controllers").exists() || !above.join(file).exists() {
                    continue;
                }
                let has = fs::read_to_string(path.join(file)).unwrap_or_default();
                if has.trim().is_empty() {
                    let of_above = fs::read_to_string(above.join(file)).map_err(failed)?;
                    fs::write(path.join(file), of_above.trim()).map_err(failed)?;
                }
            }
            hand_on(above).map_err(failed)?;
        }
        Ok(())
    }

    /// Ends all that is in it, and removes it with all groups in it. Blocks.
    pub fn end(&self, patience: Duration) -> std::io::Result<()> {
        let all: Vec<PathBuf> =
            self.needed.iter().chain(&self.beside).filter(|path| path.is_dir()).cloned().collect();
        let group = Group::of(&all);
        let ended = group.end(patience).map_err(Error::other)?;
        if ended > 0 {
            tracing::warn!(processes = ended, "what was left of pods was ended");
        }
        group.remove();
        Ok(())
    }
}

/// Lets the groups below one of version 2 have the controllers that there are.
fn hand_on(group: &Path) -> std::io::Result<()> {
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
            assert_eq!(Pods::of(&mountinfo, FAMILY), Pods { needed, beside }, "{mountinfo}");
        }
    }

    /// Directories and files stand in for hierarchies.
    #[test]
    fn group_has_what_a_kubelet_needs_and_making_it_again_changes_nothing() {
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
        let pods = Pods { needed, beside: None };
        pods.make().unwrap();
        assert_eq!((read("cpuset/p/cpuset.cpus"), read("cpuset/p/cpuset.mems")), ("0-1".into(), "0".into()));
        assert_eq!(read("unified/cgroup.subtree_control"), "+cpu +cpuset +pids");
        write("cpuset/p/cpuset.cpus", "1");
        pods.make().unwrap();
        assert_eq!(read("cpuset/p/cpuset.cpus"), "1", "somebody has chosen");
    }
}
