//! Control groups, version 1, 2 or both, as the host has them.
//!
//! A group tells what belongs to a program, however often that has forked and whoever has adopted its children since, and
//! limits all of it together. On a host with both versions the controllers are where version 1 has them, and version 2 has
//! none but still tells what belongs together (cgroups(7); `Documentation/admin-guide/cgroup-v2.rst` of Linux).
//!
//! Groups are made below that of the role server itself, so that whoever limits the role server limits all that it runs.
//! In version 2 a group that hands controllers on must hold no process: the role server moves into a group of its own
//! beside those of its children first.
//!
//! A host may let us have no groups at all: in a container, or where the role server is no root. Then programs run without
//! limits, and only what was written down is found again; [`Mounts::is_none`] says so.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal};

use crate::roleserver::child::spec::Limits;
use crate::roleserver::mountinfo::{self, Mount};

/// Where version 2 is mounted on every host that has it alone.
const UNIFIED: &str = "/sys/fs/cgroup";
/// The group of the role server itself, where it had to move.
const OWN: &str = "agent";
/// Controllers of version 1 that limits need.
const CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];
/// Microseconds in which a share of a processor is given out.
const PERIOD: u64 = 100_000;
/// The kernel gives out no less.
const LEAST_QUOTA: u64 = 1000;
/// A process that was killed and is not gone by then hangs in the kernel.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(10);

/// Where this host has control groups, and where in them this process is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mounts {
    /// Of version 2.
    unified: Option<PathBuf>,
    /// Of version 1, by controller.
    first: BTreeMap<&'static str, PathBuf>,
}

/// Why a group is not as it should be.
#[derive(Debug, thiserror::Error)]
#[error("{doing} {} failed: {source}", path.display())]
pub struct CgroupError {
    doing: &'static str,
    path: PathBuf,
    source: Error,
}

fn failed(doing: &'static str, path: &Path) -> impl FnOnce(Error) -> CgroupError {
    move |source| CgroupError { doing, path: path.to_owned(), source }
}

impl Mounts {
    /// No groups at all.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// Those of this host, in which this process may make groups.
    #[must_use]
    pub fn of_this_host() -> Self {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let mut found = Self::of(&mountinfo::read().unwrap_or_default(), &own);
        let writable = |path: &PathBuf| rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok();
        found.unified.take_if(|path| !writable(path));
        found.first.retain(|_, path| writable(path));
        found
    }

    /// What `/proc/self/mountinfo` and `/proc/self/cgroup` say (proc(5), cgroups(7)).
    #[must_use]
    pub fn of(mountinfo: &str, own: &str) -> Self {
        // `ID:CONTROLLERS:PATH`, where version 2 has the id 0 and names none.
        let mut paths = BTreeMap::new();
        for line in own.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(id), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            if id == "0" {
                paths.insert("", path);
            }
            paths.extend(controllers.split(',').filter(|name| !name.is_empty()).map(|name| (name, path)));
        }
        let mut mounts = Self::default();
        for Mount { root, point, kind, options } in mountinfo::mounts(mountinfo) {
            let below = |name: &str| {
                let own = paths.get(name)?;
                // What is mounted may be a part of the tree alone.
                let own = if root == "/" { own } else { own.strip_prefix(root)? };
                let own = own.trim_matches('/');
                Some(if own.is_empty() { point.clone() } else { point.join(own) })
            };
            match kind {
                "cgroup2" => mounts.unified = mounts.unified.take().or_else(|| below("")),
                "cgroup" => {
                    for name in CONTROLLERS {
                        if options.split(',').any(|option| option == name)
                            && let Some(path) = below(name)
                        {
                            mounts.first.entry(name).or_insert(path);
                        }
                    }
                }
                _ => {}
            }
        }
        // A role server that became another one by itself is still where the first one went.
        for path in mounts.unified.iter_mut().chain(mounts.first.values_mut()) {
            if path.ends_with(OWN) {
                path.pop();
            }
        }
        mounts
    }

    /// Whether there are no groups here.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.unified.is_none() && self.first.is_empty()
    }

    /// A group inside that of a child, as runc takes it: from its own on where each controller has a tree, and from the
    /// mount on where all share one (`cgroupsPath` of the runtime specification; runc 1.1 takes the group above its own
    /// for its own there). In hierarchies that have no group of the child, it is one beside all others, and so it carries
    /// the family in its name.
    #[must_use]
    pub fn inner(&self, family: &str, name: &str) -> String {
        let inner = format!("{family}.{name}");
        match &self.unified {
            Some(own) if self.first.is_empty() => {
                let path = own.join(family).join(name).join(&inner);
                let below = path.strip_prefix(UNIFIED).map(|below| Path::new("/").join(below));
                below.unwrap_or_else(|_| PathBuf::from(&inner)).to_string_lossy().into_owned()
            }
            _ => inner,
        }
    }

    /// Makes the group of one child, with these limits. `family` tells the children of one role server from another's.
    pub fn group(&self, family: &str, name: &str, limits: &Limits) -> Result<Group, CgroupError> {
        let mut group = Group::default();
        if let Some(own) = &self.unified {
            let above = own.join(family);
            let path = above.join(name);
            make(&path)?;
            if self.first.is_empty() {
                hand_on(own, &above)?;
            }
            group.unified = Some(path);
        }
        for (controller, own) in &self.first {
            let path = own.join(family).join(name);
            make(&path)?;
            group.first.insert((*controller).to_owned(), path);
        }
        group.limit(limits)?;
        Ok(group)
    }
}

fn make(path: &Path) -> Result<(), CgroupError> {
    fs::create_dir_all(path).map_err(failed("making the control group", path))
}

/// Lets the groups below have the controllers that there are. Without any there are no limits, and no failure.
fn hand_on(own: &Path, above: &Path) -> Result<(), CgroupError> {
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
            // Processes stand in it, at least this one.
            if error.kind() != ErrorKind::ResourceBusy {
                return Err(failed("handing controllers on from", group)(error));
            }
            let moved = own.join(OWN);
            make(&moved)?;
            fs::write(moved.join("cgroup.procs"), "0").map_err(failed("moving to", &moved))?;
            fs::write(&file, wanted.join(" ")).map_err(failed("handing controllers on from", group))?;
        }
    }
    Ok(())
}

/// The group of one child: a directory for each hierarchy that it is in.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Group {
    unified: Option<PathBuf>,
    first: BTreeMap<String, PathBuf>,
}

impl Group {
    fn directories(&self) -> impl Iterator<Item = &PathBuf> {
        self.unified.iter().chain(self.first.values())
    }

    /// Moves the calling process into it. What that starts from then on is in it too.
    pub fn join(&self) -> Result<(), CgroupError> {
        for path in self.directories() {
            fs::write(path.join("cgroup.procs"), "0").map_err(failed("joining the control group", path))?;
        }
        Ok(())
    }

    /// Sets its limits; those that are none are lifted.
    pub fn limit(&self, limits: &Limits) -> Result<(), CgroupError> {
        let or =
            |value: Option<u64>, none: &str| value.map_or_else(|| none.to_owned(), |value| value.to_string());
        let quota = limits.cpu_millis.map(|millis| (millis.saturating_mul(PERIOD) / 1000).max(LEAST_QUOTA));
        let set = |limited: bool, path: &Path, file: &str, value: String| {
            let file = path.join(file);
            // A kernel without that limit cannot lift it either.
            if !limited && !file.exists() {
                return Ok(());
            }
            fs::write(&file, value).map_err(failed("setting the limit", &file))
        };
        let (memory, cpu, tasks) =
            (limits.memory_bytes.is_some(), limits.cpu_millis.is_some(), limits.tasks.is_some());
        if let Some(path) = self.unified.as_ref().filter(|_| self.first.is_empty()) {
            set(memory, path, "memory.max", or(limits.memory_bytes, "max"))?;
            set(cpu, path, "cpu.max", format!("{} {PERIOD}", or(quota, "max")))?;
            set(tasks, path, "pids.max", or(limits.tasks, "max"))?;
        }
        if let Some(path) = self.first.get("memory") {
            set(memory, path, "memory.limit_in_bytes", or(limits.memory_bytes, "-1"))?;
        }
        if let Some(path) = self.first.get("cpu") {
            set(cpu, path, "cpu.cfs_period_us", PERIOD.to_string())?;
            set(cpu, path, "cpu.cfs_quota_us", or(quota, "-1"))?;
        }
        if let Some(path) = self.first.get("pids") {
            set(tasks, path, "pids.max", or(limits.tasks, "max"))?;
        }
        Ok(())
    }

    /// The pids of those in it, and in groups that somebody made inside it: in any hierarchy, because whoever makes groups
    /// need not make them in all (runc 1.1 puts what it runs elsewhere in version 2, where that is mounted beside version 1).
    pub fn processes(&self) -> Result<BTreeSet<i32>, CgroupError> {
        let mut pids = BTreeSet::new();
        for path in self.directories().flat_map(|path| inside(path)) {
            match fs::read_to_string(path.join("cgroup.procs")) {
                // One of another pid namespace is told as 0.
                Ok(text) => {
                    pids.extend(
                        text.lines().filter_map(|line| line.parse().ok()).filter(|pid: &i32| *pid > 0),
                    );
                }
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(failed("reading the control group", &path)(error)),
            }
        }
        Ok(pids)
    }

    /// A group that is these directories, whoever made them.
    #[must_use]
    pub fn of(directories: &[PathBuf]) -> Self {
        let named = |path: &PathBuf| (path.display().to_string(), path.clone());
        Self { unified: None, first: directories.iter().map(named).collect() }
    }

    /// Kills all that is in it, and waits until it is empty; says how many there were. Blocks.
    pub fn kill(&self) -> Result<usize, CgroupError> {
        self.kill_but(None)
    }

    /// Asks all that is in it to end, and kills what has not by then. Blocks.
    pub fn end(&self, patience: Duration) -> Result<usize, CgroupError> {
        let first = self.processes()?;
        self.signal_each(&first, Signal::TERM)?;
        let end = Instant::now() + patience;
        while Instant::now() < end && !self.processes()?.is_empty() {
            std::thread::sleep(PAUSE);
        }
        self.kill()?;
        Ok(first.len())
    }

    /// Those that are killed where programs are spared whose file has a name that begins so.
    fn unspared(&self, spared: Option<&str>) -> Result<BTreeSet<i32>, CgroupError> {
        let mut all = self.processes()?;
        if let Some(spared) = spared {
            // One that has ended meanwhile has no program, and is gone the next time.
            all.retain(|pid| {
                let program = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
                !program.file_name().is_some_and(|name| name.to_string_lossy().starts_with(spared))
            });
        }
        Ok(all)
    }

    /// The same as [`kill`][Self::kill], but for programs whose file has a name that begins so.
    pub fn kill_but(&self, spared: Option<&str>) -> Result<usize, CgroupError> {
        let first = self.unspared(spared)?;
        let end = Instant::now() + PATIENCE;
        let mut left = first.clone();
        while let (Some(&pid), Some(path)) = (left.first(), self.directories().next()) {
            if Instant::now() >= end {
                let hangs = format!("process {pid} does not end, not even when killed");
                return Err(failed("emptying the control group", path)(Error::new(
                    ErrorKind::TimedOut,
                    hangs,
                )));
            }
            // All at once where the kernel can (Linux 5.14), so that none forks away meanwhile.
            let at_once = spared.is_none() && fs::write(path.join("cgroup.kill"), "1").is_ok();
            if !at_once || !self.first.is_empty() {
                self.signal_each(&left, Signal::KILL)?;
            }
            std::thread::sleep(PAUSE);
            left = self.unspared(spared)?;
        }
        Ok(first.len())
    }

    fn signal_each(&self, pids: &BTreeSet<i32>, signal: Signal) -> Result<(), CgroupError> {
        for pid in pids {
            let Some(Ok(handle)) =
                Pid::from_raw(*pid).map(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()))
            else {
                continue;
            };
            // Once it is opened the pid cannot change hands unseen; it is still one of these.
            if self.processes()?.contains(pid) {
                // One that has ended meanwhile needs it no more.
                let _ = rustix::process::pidfd_send_signal(&handle, signal);
            }
        }
        Ok(())
    }

    /// Removes it, when it is empty, and that of its family, when it was the last one there. One that is not stays, and
    /// is found again.
    pub fn remove(&self) {
        for path in self.directories() {
            for inner in inside(path).into_iter().rev() {
                let _ = fs::remove_dir(inner);
            }
            if let Some(family) = path.parent() {
                let _ = fs::remove_dir(family);
            }
        }
    }
}

/// A group and all inside it, each before what is inside it.
fn inside(group: &Path) -> Vec<PathBuf> {
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
        let found = Mounts::of(HYBRID, HYBRID_OWN);
        let first = [
            ("cpu", PathBuf::from("/sys/fs/cgroup/cpu,cpuacct")),
            ("memory", "/sys/fs/cgroup/memory/system.slice/roleserver.service".into()),
        ];
        let unified = Some("/sys/fs/cgroup/unified/system.slice/roleserver.service".into());
        assert_eq!(found, Mounts { unified, first: first.into() });
        let second = "28 1 0:25 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n";
        let unified = Some(PathBuf::from("/sys/fs/cgroup/a.slice"));
        for own in ["0::/a.slice\n", "0::/a.slice/agent\n"] {
            assert_eq!(Mounts::of(second, own), Mounts { unified: unified.clone(), first: BTreeMap::new() });
        }
        assert!(Mounts::of("", "").is_none());
        assert!(Mounts::of("28 1 0:25 / /sys/fs/cgroup rw - cgroup2", "garbage").is_none());
    }

    #[test]
    fn part_of_the_tree_that_is_mounted_is_all_there_is() {
        let part = "28 1 0:25 /docker/abc /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n";
        let found = |own| Mounts::of(part, own).unified;
        assert_eq!(found("0::/docker/abc/x\n"), Some("/sys/fs/cgroup/x".into()));
        assert_eq!(found("0::/docker/abc\n"), Some("/sys/fs/cgroup".into()));
        assert_eq!(found("0::/elsewhere\n"), None);
    }

    /// Directories and files stand in for a hierarchy; a real one is in `tests/all/roleserver/children.rs`.
    #[test]
    fn limits_are_written_as_each_version_wants_them() {
        let root = tempfile::tempdir().unwrap();
        let limits = Limits { memory_bytes: Some(1 << 20), cpu_millis: Some(1500), tasks: Some(7) };
        let read = |group: &Path, file: &str| fs::read_to_string(group.join(file)).unwrap();
        let second = Mounts { unified: Some(root.path().join("two")), first: BTreeMap::new() };
        let group = second.group("family", "web", &limits).unwrap();
        let path = root.path().join("two/family/web");
        assert_eq!(group.unified.as_deref(), Some(&*path));
        assert_eq!((read(&path, "memory.max"), read(&path, "pids.max")), ("1048576".into(), "7".into()));
        assert_eq!(read(&path, "cpu.max"), "150000 100000");
        group.limit(&Limits { cpu_millis: Some(1), ..Limits::default() }).unwrap();
        assert_eq!((read(&path, "memory.max"), read(&path, "cpu.max")), ("max".into(), "1000 100000".into()));

        let first = CONTROLLERS.map(|name| (name, root.path().join(name)));
        let both = Mounts { unified: second.unified, first: first.into() };
        both.group("family", "web2", &limits).unwrap();
        let of = |name: &str| root.path().join(name).join("family/web2");
        assert_eq!(read(&of("memory"), "memory.limit_in_bytes"), "1048576");
        assert_eq!(read(&of("cpu"), "cpu.cfs_quota_us"), "150000");
        assert_eq!(read(&of("pids"), "pids.max"), "7");
        assert!(!root.path().join("two/family/web2/pids.max").exists(), "version 1 has the controllers");
    }

    #[test]
    fn where_there_are_no_groups_nothing_is_limited_and_nothing_fails() {
        let group =
            Mounts::none().group("family", "web", &Limits { tasks: Some(1), ..Limits::default() }).unwrap();
        assert_eq!(group, Group::default());
        group.join().unwrap();
        assert_eq!((group.processes().unwrap(), group.kill().unwrap()), (BTreeSet::new(), 0));
        group.remove();
    }
}
