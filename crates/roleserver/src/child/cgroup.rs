//! Control groups, versions 1 and 2: create, limit, list and kill.
//!
//! A group defines which processes belong to a program, however often it has forked and whichever process has adopted
//! its children since, and limits all of them together. On a host with both versions the controllers are in version 1.
//! Version 2 has none there, but still shows what belongs together (cgroups(7);
//! `Documentation/admin-guide/cgroup-v2.rst` of Linux).
//!
//! Groups are created below that of the role server itself, so that a limit on the role server limits everything that
//! it runs. Where systemd started the role server, children have scopes instead ([`scope`][super::scope]). In version 2 a group that delegates controllers must hold no process, so the role server first moves into a
//! group of its own beside those of its children.
//!
//! A host may allow us no groups at all: in a container, or if the role server does not run as root. Then programs run
//! without limits, and only recorded programs are found again; [`CgroupMounts::is_none`] reports this.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal};

use crate::child::existing_cgroup::own_pids;
use crate::child::spec::ResourceLimits;
use crate::child::unit_group::lock_layout;
use crate::mountinfo::{self, Mount};

/// Mount point of version 2 on every host that has it alone.
const CGROUP2_ROOT: &str = "/sys/fs/cgroup";
/// The role server's own group, if it had to move.
pub(super) const AGENT_GROUP: &str = "agent";
/// Controllers of version 1 that the limits need.
pub(super) const CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];
/// The period in microseconds within which a share of a processor is granted.
pub(super) const CPU_PERIOD_US: u64 = 100_000;
/// The smallest quota that the kernel accepts.
const MIN_CPU_QUOTA_US: u64 = 1000;
/// A killed process that is not gone by then hangs in the kernel.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The control groups of this host, and this process's own group in each hierarchy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CgroupMounts {
    /// Own group in the hierarchy of version 2; `None` without one.
    pub(super) unified: Option<PathBuf>,
    /// Own groups in the hierarchies of version 1, by controller.
    pub(super) legacy: BTreeMap<&'static str, PathBuf>,
}

/// An operation on a control group that failed.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {} failed: {source}", path.display())]
pub struct CgroupError {
    operation: &'static str,
    path: PathBuf,
    source: Error,
}

pub(super) fn io_error(doing: &'static str, path: &Path) -> impl FnOnce(Error) -> CgroupError {
    move |source| CgroupError { operation: doing, path: path.to_owned(), source }
}

impl CgroupMounts {
    /// No groups at all.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// The mounts of this host in which this process may create groups.
    #[must_use]
    pub fn detect_host() -> Self {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mut found = Self::parse_host(&mountinfo::read_mountinfo().unwrap_or_default(), &own);
        let writable = |path: &PathBuf| rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok();
        found.unified.take_if(|path| !writable(path));
        found.legacy.retain(|_, path| writable(path));
        found
    }

    /// Parses `/proc/self/mountinfo` and `/proc/self/cgroup` (proc(5), cgroups(7)).
    #[must_use]
    pub fn parse_host(mountinfo: &str, own: &str) -> Self {
        let mut found = process_groups(mountinfo, own);
        let legacy = CONTROLLERS.into_iter().filter_map(|name| Some((name, found.remove(name)?))).collect();
        let mut mounts = Self { unified: found.remove(""), legacy };
        // A role server that replaced itself by `execve` is still in the group that the first one moved to.
        for path in mounts.unified.iter_mut().chain(mounts.legacy.values_mut()) {
            if path.ends_with(AGENT_GROUP) {
                path.pop();
            }
        }
        mounts
    }

    /// Whether this process can use no groups here.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.unified.is_none() && self.legacy.is_empty()
    }

    /// A group inside that of a child, in the form that runc expects: relative to runc's own group if each controller
    /// has a tree, and relative to the mount if all share one (`cgroupsPath` of the runtime specification; runc 1.1
    /// uses the group above its own instead of its own there). In hierarchies without a group of the child it is beside
    /// all others, so its name contains the instance name.
    #[must_use]
    pub fn nested_cgroup(&self, family: &str, name: &str) -> String {
        let inner = format!("{family}.{name}");
        match &self.unified {
            Some(own) if self.legacy.is_empty() => {
                let path = own.join(family).join(name).join(&inner);
                let below = path.strip_prefix(CGROUP2_ROOT).map(|below| Path::new("/").join(below));
                below.unwrap_or_else(|_| PathBuf::from(&inner)).to_string_lossy().into_owned()
            }
            _ => inner,
        }
    }

    /// Creates the group of one child with these limits.
    #[cfg(test)]
    pub(super) fn create_cgroup(
        &self,
        family: &str,
        name: &str,
        limits: &ResourceLimits,
    ) -> Result<Cgroup, CgroupError> {
        let group = self.make_cgroup(family, name)?;
        group.set_limits(limits)?;
        Ok(group)
    }

    /// Creates the group of one child, and leaves the limits of an existing one as they are. `family` distinguishes the
    /// children of one role server from another's.
    pub(super) fn make_cgroup(&self, family: &str, name: &str) -> Result<Cgroup, CgroupError> {
        let mut group = Cgroup::default();
        if let Some(own) = &self.unified {
            let above = own.join(family);
            let path = above.join(name);
            create_directory(&path)?;
            if self.legacy.is_empty() {
                enable_controllers(own, &above)?;
            }
            group.unified = Some(path);
        }
        for (controller, own) in &self.legacy {
            let path = own.join(family).join(name);
            create_directory(&path)?;
            group.legacy.insert((*controller).to_owned(), path);
        }
        Ok(group)
    }
}

/// The directory of a process's group in each mounted hierarchy, by controller (pure). Version 2 has the name "", and a
/// hierarchy of version 1 without a controller has that of its option, `name=systemd`.
///
/// `cgroups` is `/proc/PID/cgroup`, as this process reads it.
pub(super) fn process_groups(mountinfo: &str, cgroups: &str) -> BTreeMap<String, PathBuf> {
    // `ID:CONTROLLERS:PATH`. Version 2 has the id 0 and lists no controllers.
    let mut paths = BTreeMap::new();
    for line in cgroups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(id), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        if id == "0" {
            paths.insert("", path);
        }
        paths.extend(controllers.split(',').filter(|name| !name.is_empty()).map(|name| (name, path)));
    }
    let mut found = BTreeMap::new();
    for Mount { root, point, kind, options } in mountinfo::parse_mounts(mountinfo) {
        let names: Vec<&str> = match kind {
            "cgroup2" => vec![""],
            "cgroup" => options.split(',').collect(),
            _ => continue,
        };
        for name in names {
            let Some(path) = paths.get(name) else { continue };
            // The mount may show only a part of the tree.
            let below = if root == "/" { Some(*path) } else { path.strip_prefix(root) };
            let Some(below) = below.map(|below| below.trim_matches('/')) else { continue };
            let directory = if below.is_empty() { point.clone() } else { point.join(below) };
            found.entry(name.to_owned()).or_insert(directory);
        }
    }
    found
}

pub(super) fn create_directory(path: &Path) -> Result<(), CgroupError> {
    fs::create_dir_all(path).map_err(io_error("making the control group", path))
}

/// Delegates the available controllers to the groups below. Without any, there are no limits and no failure.
fn enable_controllers(own: &Path, above: &Path) -> Result<(), CgroupError> {
    let there = fs::read_to_string(own.join("cgroup.controllers")).unwrap_or_default();
    let there: Vec<_> =
        CONTROLLERS.into_iter().filter(|name| there.split_whitespace().any(|c| c == *name)).collect();
    if there.is_empty() {
        return Ok(());
    }
    let wanted: Vec<_> = there.iter().map(|name| format!("+{name}")).collect();
    for group in [own, above] {
        let file = group.join("cgroup.subtree_control");
        let has = fs::read_to_string(&file).unwrap_or_default();
        if there.iter().all(|name| has.split_whitespace().any(|has| has == *name)) {
            continue;
        }
        if let Err(error) = fs::write(&file, wanted.join(" ")) {
            // The group has processes in it, at least this one.
            if error.kind() != ErrorKind::ResourceBusy {
                return Err(io_error("delegating controllers to the children of", group)(error));
            }
            let moved = own.join(AGENT_GROUP);
            create_directory(&moved)?;
            fs::write(moved.join("cgroup.procs"), "0")
                .map_err(io_error("moving the role server into the control group", &moved))?;
            fs::write(&file, wanted.join(" "))
                .map_err(io_error("delegating controllers to the children of", group))?;
        }
    }
    Ok(())
}

/// The group of one child: a directory for each hierarchy that it is in.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Cgroup {
    pub(super) unified: Option<PathBuf>,
    pub(super) legacy: BTreeMap<String, PathBuf>,
    /// Name of the group inside it that its processes join; `None` if they join the group itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) leaf: Option<String>,
}

impl Cgroup {
    /// Its directory in each hierarchy.
    pub fn directories(&self) -> impl Iterator<Item = &PathBuf> {
        self.unified.iter().chain(self.legacy.values())
    }

    /// Moves the calling process into the group. Processes that it starts from then on are in it too.
    pub fn join(&self) -> Result<(), CgroupError> {
        for path in self.directories() {
            let mut path = path.clone();
            if let Some(leaf) = &self.leaf {
                path.push(leaf);
                create_directory(&path)?;
            }
            fs::write(path.join("cgroup.procs"), "0")
                .map_err(io_error("joining the control group", &path))?;
        }
        Ok(())
    }

    /// Sets the limits; those that are `None` are lifted.
    pub(super) fn set_limits(&self, limits: &ResourceLimits) -> Result<(), CgroupError> {
        let or =
            |value: Option<u64>, none: &str| value.map_or_else(|| none.to_owned(), |value| value.to_string());
        let quota = limits
            .cpu_millis
            .map(|millis| (millis.saturating_mul(CPU_PERIOD_US) / 1000).max(MIN_CPU_QUOTA_US));
        let set = |limited: bool, path: &Path, file: &str, value: String| {
            let file = path.join(file);
            // A kernel without this limit cannot lift it either.
            if !limited && !file.exists() {
                return Ok(());
            }
            fs::write(&file, value).map_err(io_error("setting the limit", &file))
        };
        let (memory, cpu, tasks) =
            (limits.memory_bytes.is_some(), limits.cpu_millis.is_some(), limits.tasks.is_some());
        if let Some(path) = self.unified.as_ref().filter(|_| self.legacy.is_empty()) {
            set(memory, path, "memory.max", or(limits.memory_bytes, "max"))?;
            set(cpu, path, "cpu.max", format!("{} {CPU_PERIOD_US}", or(quota, "max")))?;
            set(tasks, path, "pids.max", or(limits.tasks, "max"))?;
        }
        if let Some(path) = self.legacy.get("memory") {
            set(memory, path, "memory.limit_in_bytes", or(limits.memory_bytes, "-1"))?;
        }
        if let Some(path) = self.legacy.get("cpu") {
            set(cpu, path, "cpu.cfs_period_us", CPU_PERIOD_US.to_string())?;
            set(cpu, path, "cpu.cfs_quota_us", or(quota, "-1"))?;
        }
        if let Some(path) = self.legacy.get("pids") {
            set(tasks, path, "pids.max", or(limits.tasks, "max"))?;
        }
        Ok(())
    }

    /// The pids in the group and in groups below it, from all hierarchies: a program that creates groups need not
    /// create them in every one (runc 1.1 puts its containers elsewhere in version 2 if that is mounted beside version
    /// 1).
    pub fn pids(&self) -> Result<BTreeSet<i32>, CgroupError> {
        let mut pids = BTreeSet::new();
        for path in self.directories().flat_map(|path| nested_groups(path)) {
            pids.extend(own_pids(&path).map_err(io_error("reading the control group", &path))?);
        }
        Ok(pids)
    }

    /// A group that consists of these directories, which another program may have created.
    #[must_use]
    pub fn from_directories(directories: &[PathBuf]) -> Self {
        let named = |path: &PathBuf| (path.display().to_string(), path.clone());
        Self { legacy: directories.iter().map(named).collect(), ..Self::default() }
    }

    /// Kills every process in the group, and waits until it is empty. Returns how many there were. Blocks.
    pub fn kill(&self) -> Result<usize, CgroupError> {
        self.kill_except(None)
    }

    /// Sends SIGTERM to every process in the group, and kills those that remain after `patience`. Blocks.
    pub fn terminate(&self, patience: Duration) -> Result<usize, CgroupError> {
        let first = self.request_end(patience, None)?;
        self.kill()?;
        Ok(first)
    }

    /// Sends SIGTERM to every process in the group, except for programs with a file name that begins with `spared`, and
    /// waits until they have ended, for `patience` at most. Returns how many there were. Blocks.
    pub(super) fn request_end(&self, patience: Duration, spared: Option<&str>) -> Result<usize, CgroupError> {
        let first = self.pids_to_kill(spared)?;
        self.signal_pids(&first, Signal::TERM)?;
        let end = Instant::now() + patience;
        while Instant::now() < end && !self.pids_to_kill(spared)?.is_empty() {
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(first.len())
    }

    /// The pids to kill; programs whose file name begins with `spared` are left out.
    fn pids_to_kill(&self, spared: Option<&str>) -> Result<BTreeSet<i32>, CgroupError> {
        let mut all = self.pids()?;
        if let Some(spared) = spared {
            // A process that has ended meanwhile has no program, and is gone the next time.
            all.retain(|pid| {
                let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
                !program.file_name().is_some_and(|name| name.to_string_lossy().starts_with(spared))
            });
        }
        Ok(all)
    }

    /// As [`kill`][Self::kill], except for programs whose file name begins with `spared`.
    pub fn kill_except(&self, spared: Option<&str>) -> Result<usize, CgroupError> {
        let first = self.pids_to_kill(spared)?;
        let end = Instant::now() + KILL_TIMEOUT;
        let mut left = first.clone();
        while let (Some(&pid), Some(path)) = (left.first(), self.directories().next()) {
            if Instant::now() >= end {
                let hangs = format!("process {pid} does not end, not even when killed");
                return Err(io_error("emptying the control group", path)(Error::new(
                    ErrorKind::TimedOut,
                    hangs,
                )));
            }
            // All at once if the kernel can (Linux 5.14), so that none escapes by a fork meanwhile.
            let at_once = spared.is_none() && fs::write(path.join("cgroup.kill"), "1").is_ok();
            if !at_once || !self.legacy.is_empty() {
                self.signal_pids(&left, Signal::KILL)?;
            }
            std::thread::sleep(POLL_INTERVAL);
            left = self.pids_to_kill(spared)?;
        }
        Ok(first.len())
    }

    fn signal_pids(&self, pids: &BTreeSet<i32>, signal: Signal) -> Result<(), CgroupError> {
        for pid in pids {
            let Some(Ok(handle)) =
                Pid::from_raw(*pid).map(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()))
            else {
                continue;
            };
            // Once the pidfd is open, the pid cannot be reused unnoticed; it is still one of this group.
            if self.pids()?.contains(pid) {
                // A process that has ended meanwhile needs no signal.
                let _ = rustix::process::pidfd_send_signal(&handle, signal);
            }
        }
        Ok(())
    }

    /// Removes the group if it is empty, and that of its instance if it was the last one there. A group that is not
    /// empty stays, and is found again.
    pub fn remove(&self) {
        let _layout = lock_layout();
        for path in self.directories() {
            for inner in nested_groups(path).into_iter().rev() {
                let _ = fs::remove_dir(inner);
            }
            if let Some(family) = path.parent() {
                let _ = fs::remove_dir(family);
            }
        }
    }
}

/// A group and all groups inside it, each before those inside it.
pub(super) fn nested_groups(group: &Path) -> Vec<PathBuf> {
    let mut all = vec![group.to_owned()];
    let mut next = 0;
    while let Some(path) = all.get(next) {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        let groups = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let groups: Vec<PathBuf> = groups.map(|entry| entry.path()).collect();
        all.extend(groups);
        next += 1;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
24 1 0:21 / /proc rw,relatime - proc proc rw
30 28 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
31 28 0:27 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
32 28 0:28 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
33 28 0:29 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate
";
    const HYBRID_OWN: &str = "\
5:name=systemd:/system.slice/roleserver.service
4:memory:/system.slice/roleserver.service
3:cpu,cpuacct:/
0::/system.slice/roleserver.service
";

    #[test]
    fn groups_are_found_where_the_host_has_them() {
        let found = CgroupMounts::parse_host(HYBRID, HYBRID_OWN);
        let first = [
            ("cpu", PathBuf::from("/sys/fs/cgroup/cpu,cpuacct")),
            ("memory", "/sys/fs/cgroup/memory/system.slice/roleserver.service".into()),
        ];
        let unified = Some("/sys/fs/cgroup/unified/system.slice/roleserver.service".into());
        assert_eq!(found, CgroupMounts { unified, legacy: first.into() });
        let second = "28 1 0:25 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n";
        let unified = Some(PathBuf::from("/sys/fs/cgroup/a.slice"));
        for own in ["0::/a.slice\n", "0::/a.slice/agent\n"] {
            assert_eq!(
                CgroupMounts::parse_host(second, own),
                CgroupMounts { unified: unified.clone(), legacy: BTreeMap::new() }
            );
        }
        assert!(CgroupMounts::parse_host("", "").is_none());
        assert!(CgroupMounts::parse_host("28 1 0:25 / /sys/fs/cgroup rw - cgroup2", "garbage").is_none());
    }

    #[test]
    fn only_the_mounted_part_of_the_tree_is_used() {
        let part = "28 1 0:25 /docker/abc /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n";
        let found = |own| CgroupMounts::parse_host(part, own).unified;
        assert_eq!(found("0::/docker/abc/x\n"), Some("/sys/fs/cgroup/x".into()));
        assert_eq!(found("0::/docker/abc\n"), Some("/sys/fs/cgroup".into()));
        assert_eq!(found("0::/elsewhere\n"), None);
    }

    /// Directories and files stand in for a hierarchy; `tests/all/roleserver/children.rs` uses a real one.
    #[test]
    fn limits_are_written_in_the_format_of_each_version() {
        let root = tempfile::tempdir().unwrap();
        let limits = ResourceLimits { memory_bytes: Some(1 << 20), cpu_millis: Some(1500), tasks: Some(7) };
        let read = |group: &Path, file: &str| fs::read_to_string(group.join(file)).unwrap();
        let second = CgroupMounts { unified: Some(root.path().join("two")), legacy: BTreeMap::new() };
        let group = second.create_cgroup("family", "web", &limits).unwrap();
        let path = root.path().join("two/family/web");
        assert_eq!(group.unified.as_deref(), Some(&*path));
        assert_eq!((read(&path, "memory.max"), read(&path, "pids.max")), ("1048576".into(), "7".into()));
        assert_eq!(read(&path, "cpu.max"), "150000 100000");
        group.set_limits(&ResourceLimits { cpu_millis: Some(1), ..ResourceLimits::default() }).unwrap();
        assert_eq!((read(&path, "memory.max"), read(&path, "cpu.max")), ("max".into(), "1000 100000".into()));

        let first = CONTROLLERS.map(|name| (name, root.path().join(name)));
        let both = CgroupMounts { unified: second.unified, legacy: first.into() };
        both.create_cgroup("family", "web2", &limits).unwrap();
        let of = |name: &str| root.path().join(name).join("family/web2");
        assert_eq!(read(&of("memory"), "memory.limit_in_bytes"), "1048576");
        assert_eq!(read(&of("cpu"), "cpu.cfs_quota_us"), "150000");
        assert_eq!(read(&of("pids"), "pids.max"), "7");
        assert!(!root.path().join("two/family/web2/pids.max").exists(), "version 1 has the controllers");
    }

    #[test]
    fn where_there_are_no_groups_nothing_is_limited_and_nothing_fails() {
        let group = CgroupMounts::none()
            .create_cgroup("family", "web", &ResourceLimits { tasks: Some(1), ..ResourceLimits::default() })
            .unwrap();
        assert_eq!(group, Cgroup::default());
        group.join().unwrap();
        assert_eq!((group.pids().unwrap(), group.kill().unwrap()), (BTreeSet::new(), 0));
        group.remove();
    }
}
