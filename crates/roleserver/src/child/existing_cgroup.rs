//! Control groups that exist already: by path, by process, with the limits that they have.
//!
//! A scope is made by systemd, which reports the path of its group from the root of each hierarchy. The directories of
//! that path depend on what is mounted where.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::child::cgroup::{CONTROLLERS, CPU_PERIOD_US, Cgroup, CgroupMounts, process_groups};
use crate::child::spec::ResourceLimits;

/// Version 1 reports no limit of memory as a number near this one.
const UNLIMITED_BYTES: u64 = 1 << 62;

impl CgroupMounts {
    /// The group of a child where it exists; empty if it exists nowhere.
    ///
    /// In version 1, systemd makes a group of the unit for a controller as soon as any unit beside it needs that controller,
    /// and moves the processes of the unit there. The group of a child stays where the role server has made it, with its
    /// limits: below one of the groups above.
    #[must_use]
    pub fn find_cgroup(&self, family: &str, name: &str) -> Cgroup {
        let existing = |own: &Path| Some(own.join(family).join(name)).filter(|path| path.is_dir());
        let above = |own: &PathBuf| own.ancestors().find_map(existing);
        Cgroup {
            unified: self.unified.as_deref().and_then(existing),
            legacy: self
                .legacy
                .iter()
                .filter_map(|(controller, own)| Some(((*controller).to_owned(), above(own)?)))
                .collect(),
            leaf: None,
        }
    }

    /// The groups of the process with this path in each hierarchy.
    #[must_use]
    pub fn at_path(mountinfo: &str, path: &str) -> Self {
        if !path.starts_with('/') || path.split('/').any(|part| part == "..") {
            return Self::none();
        }
        Self::parse_host(mountinfo, &format!("0::{path}\n1:{}:{path}\n", CONTROLLERS.join(",")))
    }
}

impl Cgroup {
    /// The group at this path in each hierarchy that has it; empty if none has.
    #[must_use]
    pub fn at_path(mountinfo: &str, path: &str) -> Self {
        let CgroupMounts { mut unified, mut legacy } = CgroupMounts::at_path(mountinfo, path);
        unified.take_if(|path| !path.is_dir());
        legacy.retain(|_, path| path.is_dir());
        let legacy = legacy.into_iter().map(|(name, path)| (name.to_owned(), path)).collect();
        Self { unified, legacy, leaf: None }
    }

    /// The group of a child that a process with these control groups (`/proc/PID/cgroup`) is in, or in a group inside it;
    /// empty if it is in no group of that child (pure). `family` and `name` are those of the child.
    #[must_use]
    pub fn around_process(mountinfo: &str, cgroups: &str, family: &str, name: &str) -> Self {
        let end = Path::new(family).join(name);
        let mut found = process_groups(mountinfo, cgroups);
        let mut take = |hierarchy: &str| {
            let group = found.remove(hierarchy)?;
            group.ancestors().find(|path| path.ends_with(&end)).map(Path::to_owned)
        };
        let unified = take("");
        let legacy = CONTROLLERS.into_iter().filter_map(|name| Some((name.to_owned(), take(name)?)));
        Self { unified, legacy: legacy.collect(), leaf: None }
    }

    /// Whether it is in no hierarchy.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.unified.is_none() && self.legacy.is_empty()
    }

    /// The same group in those hierarchies in which it has this process.
    #[must_use]
    pub fn with_process(mut self, pid: u32) -> Self {
        let has = |path: &Path| {
            let group = Self::from_directories(&[path.to_owned()]);
            let pids = group.pids().unwrap_or_default();
            i32::try_from(pid).is_ok_and(|pid| pids.contains(&pid))
        };
        self.unified.take_if(|path| !has(path));
        self.legacy.retain(|_, path| has(path));
        self
    }

    /// The same group, and the other one in those hierarchies in which this one is not (pure).
    #[must_use]
    pub fn completed_by(mut self, other: Self) -> Self {
        self.unified = self.unified.or(other.unified);
        for (controller, path) in other.legacy {
            self.legacy.entry(controller).or_insert(path);
        }
        self
    }

    /// The same group. Where version 2 is alone, processes join a group of this name inside it: only there must a group
    /// that hands controllers on hold no process.
    #[must_use]
    pub fn with_leaf(self, name: &str) -> Self {
        let leaf = (self.unified.is_some() && self.legacy.is_empty()).then(|| name.to_owned());
        Self { leaf, ..self }
    }

    /// The controllers by which the group can limit its processes; `None` if that is not known.
    pub(super) fn controllers(&self) -> Option<BTreeSet<String>> {
        match &self.unified {
            Some(path) if self.legacy.is_empty() => {
                let text = fs::read_to_string(path.join("cgroup.controllers")).ok()?;
                Some(text.split_whitespace().map(str::to_owned).collect())
            }
            _ => Some(self.legacy.keys().cloned().collect()),
        }
    }

    /// The limits that the group has now.
    #[must_use]
    pub fn read_limits(&self) -> ResourceLimits {
        let read = |path: Option<&PathBuf>, file: &str| std::fs::read_to_string(path?.join(file)).ok();
        let number = |text: Option<String>| text?.trim().parse::<u64>().ok();
        if self.legacy.is_empty() {
            let unified = self.unified.as_ref();
            return ResourceLimits {
                memory_bytes: number(read(unified, "memory.max")),
                cpu_millis: read(unified, "cpu.max").as_deref().and_then(parse_cpu_max),
                tasks: number(read(unified, "pids.max")),
            };
        }
        let quota = number(read(self.legacy.get("cpu"), "cpu.cfs_quota_us"));
        let period = number(read(self.legacy.get("cpu"), "cpu.cfs_period_us")).unwrap_or(CPU_PERIOD_US);
        ResourceLimits {
            memory_bytes: number(read(self.legacy.get("memory"), "memory.limit_in_bytes"))
                .filter(|bytes| *bytes < UNLIMITED_BYTES),
            cpu_millis: quota.and_then(|quota| quota.saturating_mul(1000).checked_div(period)),
            tasks: number(read(self.legacy.get("pids"), "pids.max")),
        }
    }
}

/// Parses `QUOTA PERIOD` or `max PERIOD` into thousandths of a processor.
fn parse_cpu_max(text: &str) -> Option<u64> {
    let (quota, period) = text.trim().split_once(' ')?;
    quota.parse::<u64>().ok()?.saturating_mul(1000).checked_div(period.parse().ok()?)
}

/// The processes of a group, without those of the groups inside it; none if it is gone.
///
/// In version 2, a group that runc makes inside one with processes can have threads alone. It has no list of processes:
/// that of the group above has them, too. Here they are found by their threads.
pub(super) fn own_pids(group: &Path) -> std::io::Result<BTreeSet<i32>> {
    match fs::read_to_string(group.join("cgroup.procs")) {
        Ok(text) => Ok(parse_pids(&text).collect()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(BTreeSet::new()),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::OPNOTSUPP.raw_os_error()) => {
            let threads = fs::read_to_string(group.join("cgroup.threads")).unwrap_or_default();
            Ok(parse_pids(&threads).filter_map(process_of_thread).collect())
        }
        Err(error) => Err(error),
    }
}

/// A process of another pid namespace is listed as 0.
fn parse_pids(text: &str) -> impl Iterator<Item = i32> {
    text.lines().filter_map(|line| line.parse().ok()).filter(|pid: &i32| *pid > 0)
}

fn process_of_thread(thread: i32) -> Option<i32> {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(kind: &str, point: &Path, options: &str) -> String {
        format!("30 28 0:26 / {} rw - {kind} {kind} {options}\n", point.display())
    }

    #[test]
    fn group_is_found_in_each_hierarchy_that_has_it() {
        let root = tempfile::tempdir().unwrap();
        let (two, memory) = (root.path().join("two"), root.path().join("memory"));
        std::fs::create_dir_all(two.join("shepherd.slice/a.scope/main")).unwrap();
        let both = mount("cgroup2", &two, "rw") + &mount("cgroup", &memory, "rw,memory");
        let alone = mount("cgroup2", &two, "rw");
        let path = "/shepherd.slice/a.scope";
        let found = Cgroup::at_path(&both, path);
        assert_eq!(found.directories().collect::<Vec<_>>(), [&two.join("shepherd.slice/a.scope")]);
        for nothing in
            ["/shepherd.slice/b.scope", "shepherd.slice/a.scope", "/x/../shepherd.slice/a.scope", ""]
        {
            assert!(Cgroup::at_path(&both, nothing).is_empty(), "{nothing}");
        }
        std::fs::create_dir_all(memory.join("shepherd.slice/a.scope")).unwrap();
        assert_eq!(
            Cgroup::at_path(&both, path).with_leaf("main").leaf,
            None,
            "version 1 has the controllers"
        );
        let alone = Cgroup::at_path(&alone, path).with_leaf("main");
        assert_eq!(alone.leaf.as_deref(), Some("main"));
        std::fs::write(two.join("shepherd.slice/a.scope/main/cgroup.procs"), "12\n").unwrap();
        assert!(!alone.clone().with_process(12).is_empty(), "in a group inside it");
        assert!(alone.with_process(1).is_empty());
    }

    #[test]
    fn group_of_a_child_is_found_around_its_process_wherever_it_is() {
        let two = mount("cgroup2", Path::new("/two"), "rw");
        let both = two.clone() + &mount("cgroup", Path::new("/memory"), "rw,memory");
        for (mountinfo, cgroups, unified, memory) in [
            (&two, "0::/user.slice/session-3.scope/f/web\n", Some("/user.slice/session-3.scope/f/web"), None),
            // In a group that runc made.
            (&two, "0::/session-3.scope/f/web/f.web\n", Some("/session-3.scope/f/web"), None),
            (&two, "0::/session-3.scope\n", None, None),
            (&two, "0::/session-3.scope/f/other\n", None, None),
            (&two, "0::/session-3.scope/another/web\n", None, None),
            (&two, "0::/session-3.scope/xf/web\n", None, None),
            (&both, "4:memory:/a/f/web\n1:name=systemd:/a\n0::/a\n", None, Some("/a/f/web")),
            (&both, "4:memory:/a/f/web\n0::/b/f/web\n", Some("/b/f/web"), Some("/a/f/web")),
            (&two, "", None, None),
        ] {
            let expected = Cgroup {
                unified: unified.map(|path| PathBuf::from(format!("/two{path}"))),
                legacy: memory
                    .map(|path| ("memory".to_owned(), PathBuf::from(format!("/memory{path}"))))
                    .into_iter()
                    .collect(),
                leaf: None,
            };
            assert_eq!(Cgroup::around_process(mountinfo, cgroups, "f", "web"), expected, "{cgroups}");
        }
    }

    #[test]
    fn limits_are_read_as_they_were_set() {
        let root = tempfile::tempdir().unwrap();
        let limits = ResourceLimits { memory_bytes: Some(1 << 20), cpu_millis: Some(1500), tasks: Some(7) };
        let second = CgroupMounts { unified: Some(root.path().join("two")), ..CgroupMounts::none() };
        let first = CgroupMounts {
            legacy: CONTROLLERS.map(|name| (name, root.path().join(name))).into(),
            ..CgroupMounts::none()
        };
        for mounts in [second, first] {
            for limits in [ResourceLimits::default(), limits] {
                mounts.create_cgroup("family", "web", &limits).unwrap();
                assert_eq!(mounts.find_cgroup("family", "web").read_limits(), limits);
            }
            assert!(mounts.find_cgroup("family", "other").is_empty());
            let unit = |own: &PathBuf| own.join("system.slice/roleserver.service");
            let later = CgroupMounts {
                unified: mounts.unified.as_ref().map(unit),
                legacy: mounts.legacy.iter().map(|(name, own)| (*name, unit(own))).collect(),
            };
            let expected = if mounts.legacy.is_empty() { ResourceLimits::default() } else { limits };
            assert_eq!(later.find_cgroup("family", "web").read_limits(), expected, "a group above");
        }
    }
}
