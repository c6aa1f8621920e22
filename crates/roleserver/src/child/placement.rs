//! Place a child in a scope of its own, and find the groups of a child in both layouts.
//!
//! systemd moves the child's process by its pid. The process waits meanwhile ([`launch`][super::launch]), so nothing of
//! the program runs in the group of the unit. The call only queues a job, and even after the job a scope can be dead
//! while its process lives (systemd issue 36781). So a child counts as placed only if the job is done, the scope is
//! active, and the process is in its group.
//!
//! The path of a scope's group is what systemd reports. It is in the record of the child. Scopes of earlier starts, in
//! which survivors of the child may run, are found beside it by their names.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Error;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::child::cgroup::{Cgroup, CgroupError, io_error};
use crate::child::launch::read_record;
use crate::child::lifecycle::ChildContext;
use crate::child::limits::{find_missing_limits, name_limits, split_limits};
use crate::child::scope::{
    LEAF, SLICE, ScopeRecord, StartFacts, StartingUnit, find_starting_unit, scope_name, scope_number,
    scope_properties,
};
use crate::child::spec::ResourceLimits;
use crate::child::unit_group::lock_layout;
use crate::mountinfo;
use crate::systemd_manager::manager::{ScopeError, SystemdManager, UnitState};

/// How many names are tried when units of these names exist already.
const MAX_NAMES: u64 = 100;
/// How many scopes are made for one start if each is dead at once.
const MAX_DEAD: u32 = 3;
/// How long systemd may take to set limits: after it has changed properties of a scope, it answers first.
const LIMITS_TIMEOUT: Duration = Duration::from_secs(1);
const LIMITS_INTERVAL: Duration = Duration::from_millis(10);

/// The scopes of this role server.
#[derive(Clone, Debug)]
pub struct Scopes {
    /// The manager that makes them.
    pub manager: SystemdManager,
    /// The unit that this role server is the main process of.
    pub unit: StartingUnit,
    /// The mounts of this host, in the syntax of `/proc/self/mountinfo`, by which groups are found.
    pub mountinfo: String,
    /// Where the processes of this host are shown, to find the groups of one.
    pub proc: PathBuf,
    /// One lock for each child: a child that is moved is not started or stopped meanwhile.
    locks: Arc<Mutex<HashMap<String, Arc<Mutex<()>>>>>,
    /// Limits of children that systemd did not take, because it did not answer.
    missed_limits: Arc<Mutex<BTreeMap<String, ResourceLimits>>>,
}

/// Why a child has no scope.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct PlacementError {
    /// The reason, as a sentence.
    pub why: String,
    /// Whether systemd does not answer, so that it is useless to ask it for another child now.
    pub is_silence: bool,
}

impl From<String> for PlacementError {
    fn from(why: String) -> Self {
        Self { why, is_silence: false }
    }
}

impl From<ScopeError> for PlacementError {
    fn from(error: ScopeError) -> Self {
        let is_silence = matches!(&error, ScopeError::Manager(error) if error.is_silence());
        Self { why: error.to_string(), is_silence }
    }
}

/// The group of a child in today's layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreatedGroup {
    /// The group, with the limits that it can hold.
    pub group: Cgroup,
    /// The other limits; `None` if there are none.
    pub missed_limits: Option<ResourceLimits>,
}

/// A child in its scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedChild {
    /// The scope, for its record.
    pub scope: ScopeRecord,
    /// Its control group.
    pub group: Cgroup,
    /// Limits that its control group does not have although systemd accepted them; `None` if there are none.
    pub missed_limits: Option<ResourceLimits>,
}

impl PlacedChild {
    /// A child in a scope that was made with these limits. Blocks for a second if the group does not have one of them, and
    /// until `until` at the most.
    pub(super) fn in_scope(
        scope: ScopeRecord,
        group: Cgroup,
        limits: &ResourceLimits,
        until: Option<Instant>,
    ) -> Self {
        let missed_limits = wait_for_limits(&group, limits, until);
        Self { scope, group, missed_limits }
    }
}

impl Scopes {
    /// Scopes made by this manager, for children of this unit.
    #[must_use]
    pub fn new(manager: SystemdManager, unit: StartingUnit, mountinfo: String) -> Self {
        let proc = PathBuf::from("/proc");
        Self { manager, unit, mountinfo, proc, locks: Arc::default(), missed_limits: Arc::default() }
    }

    /// The scopes of this process, if systemd started it; `None` elsewhere, where children stay below the group of the
    /// role server.
    #[must_use]
    pub fn detect_host() -> Option<Self> {
        let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
        let parent_cgroups = fs::read_to_string(format!("/proc/{parent}/cgroup"));
        let facts = StartFacts {
            has_systemd: Path::new("/run/systemd/system").is_dir(),
            has_invocation_id: std::env::var_os("INVOCATION_ID").is_some(),
            own_cgroups: &fs::read_to_string("/proc/self/cgroup").unwrap_or_default(),
            parent_cgroups: parent_cgroups.as_deref().unwrap_or_default(),
        };
        if let Err(error) = &parent_cgroups
            && facts.has_systemd
            && facts.has_invocation_id
        {
            tracing::warn!(
                %error,
                parent,
                "it cannot be found out whether systemd started this role server, so programs get no scopes and would \
                 end with its unit; if /proc is mounted with hidepid, mount it with gid= of a group of this user"
            );
        }
        let unit = find_starting_unit(&facts)?;
        let manager = if unit.is_user { SystemdManager::own_user() } else { SystemdManager::system() };
        Some(Self::new(manager, unit, mountinfo::read_mountinfo().unwrap_or_default()))
    }

    /// The lock of a child.
    #[must_use]
    pub fn lock_of(&self, child: &str) -> Arc<Mutex<()>> {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        locks.entry(child.to_owned()).or_default().clone()
    }

    /// Remembers the limits of a child that have to be set once systemd answers, or that there are none.
    pub(super) fn remember_missed(&self, child: &str, limits: Option<ResourceLimits>) {
        let mut missed = self.missed_limits.lock().unwrap_or_else(PoisonError::into_inner);
        match limits {
            Some(limits) => missed.insert(child.to_owned(), limits),
            None => missed.remove(child),
        };
    }

    /// The first child with such limits; `None` if there is none.
    pub(super) fn first_missed(&self) -> Option<(String, ResourceLimits)> {
        let missed = self.missed_limits.lock().unwrap_or_else(PoisonError::into_inner);
        missed.first_key_value().map(|(child, limits)| (child.clone(), *limits))
    }

    /// The control group of the slice that has the scopes.
    #[must_use]
    pub fn slice_group(&self) -> String {
        format!("{}/{SLICE}", self.unit.manager_group)
    }

    /// Makes a scope with these processes, of which the first is the child's own. `first` is the number to begin with;
    /// names of existing units are skipped. Blocks.
    pub fn place(
        &self,
        (family, child): (&str, &str),
        pids: &[u32],
        limits: &ResourceLimits,
        first: u64,
    ) -> Result<PlacedChild, PlacementError> {
        let own = pids.first().copied().unwrap_or_default();
        let properties = scope_properties(child, pids, limits);
        let mut dead = 0;
        for number in first..first.saturating_add(MAX_NAMES) {
            let unit = scope_name(family, child, number);
            let state = match self.manager.start_scope(&unit, &properties) {
                Ok(state) => state,
                Err(ScopeError::Exists(_)) => continue,
                Err(error) => return Err(error.into()),
            };
            match self.check_scope(&unit, &state, own) {
                Ok(group) => {
                    self.remember_missed(child, None);
                    let scope = ScopeRecord { unit, control_group: state.control_group };
                    return Ok(PlacedChild::in_scope(scope, group, limits, self.manager.until));
                }
                Err(why) => {
                    dead += 1;
                    if dead == MAX_DEAD {
                        return Err(why.into());
                    }
                    tracing::warn!(
                        name = child,
                        unit,
                        reason = why,
                        "a scope cannot be used; the next is made"
                    );
                }
            }
        }
        let name = scope_name(family, child, first);
        Err(format!("units named {name} and so on, {MAX_NAMES} in all, exist already").into())
    }

    /// Checks that a scope is active and has the process.
    fn check_scope(&self, unit: &str, state: &UnitState, pid: u32) -> Result<Cgroup, String> {
        if state.active != "active" {
            return Err(format!("the scope {unit} is {} right after its start", state.active));
        }
        let group = Cgroup::at_path(&self.mountinfo, &state.control_group).with_process(pid);
        if group.is_empty() {
            return Err(format!(
                "process {pid} is not in the control group {} of the scope {unit}",
                state.control_group
            ));
        }
        Ok(group.with_leaf(LEAF))
    }
}

/// Waits until the group of a scope has these limits. Returns those that it does not have in time; `None` if there are
/// none. Blocks, for [`LIMITS_TIMEOUT`] at most, and not after `until`.
pub(super) fn wait_for_limits(
    group: &Cgroup,
    limits: &ResourceLimits,
    until: Option<Instant>,
) -> Option<ResourceLimits> {
    let end = Instant::now() + LIMITS_TIMEOUT;
    let end = until.map_or(end, |until| end.min(until));
    loop {
        let missing = find_missing_limits(limits, &group.read_limits());
        if missing == ResourceLimits::default() {
            return None;
        }
        if Instant::now() >= end {
            return Some(missing);
        }
        std::thread::sleep(LIMITS_INTERVAL);
    }
}

/// The scopes of a child below a slice, by their number.
#[must_use]
pub fn find_scopes(
    mountinfo: &str,
    slice_group: &str,
    (family, child): (&str, &str),
) -> BTreeMap<u64, ScopeRecord> {
    let mut found = BTreeMap::new();
    for directory in Cgroup::at_path(mountinfo, slice_group).directories() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let unit = entry.file_name().to_string_lossy().into_owned();
            if let Some(number) = scope_number(&unit, family, child) {
                let control_group = format!("{slice_group}/{unit}");
                found.insert(number, ScopeRecord { unit, control_group });
            }
        }
    }
    found
}

impl ChildContext {
    /// The mounts of this host, by which groups are found.
    pub(super) fn mountinfo(&self) -> String {
        match &self.scopes {
            Some(scopes) => scopes.mountinfo.clone(),
            None => mountinfo::read_mountinfo().unwrap_or_default(),
        }
    }

    /// All scopes that may hold processes of a child, by their number: below this role server's slice, and below that
    /// of its record, which may be another one if it was started in another way.
    #[must_use]
    pub fn find_scopes(&self, name: &str) -> BTreeMap<u64, ScopeRecord> {
        let recorded = read_record(&self.record_path(name)).and_then(|record| record.scope);
        let above = |scope: &ScopeRecord| Some(scope.control_group.rsplit_once('/')?.0.to_owned());
        let slices = [self.scopes.as_ref().map(Scopes::slice_group), recorded.as_ref().and_then(above)];
        if slices.iter().all(Option::is_none) {
            return BTreeMap::new();
        }
        let (family, mountinfo) = (self.instance_name(), self.mountinfo());
        slices.iter().flatten().flat_map(|slice| find_scopes(&mountinfo, slice, (&family, name))).collect()
    }

    /// Every group that may hold processes of a child: that of today's layout, and its scopes.
    #[must_use]
    pub fn find_group(&self, name: &str) -> Cgroup {
        let mountinfo = self.mountinfo();
        let scopes = self.find_scopes(name);
        let groups = scopes.values().map(|scope| Cgroup::at_path(&mountinfo, &scope.control_group));
        let own = self.mounts.find_cgroup(&self.instance_name(), name);
        if scopes.is_empty() {
            return own;
        }
        let all: Vec<PathBuf> = std::iter::once(own)
            .chain(groups)
            .flat_map(|group| group.directories().cloned().collect::<Vec<_>>())
            .collect();
        Cgroup::from_directories(&all)
    }

    /// Removes the group of a child that has ended. systemd removes those of scopes itself.
    pub fn remove_group(&self, name: &str) {
        self.mounts.find_cgroup(&self.instance_name(), name).remove();
    }

    /// The group that a running child is in, for processes that belong to it, such as probes.
    pub fn running_group(&self, name: &str, limits: &ResourceLimits) -> Result<Cgroup, CgroupError> {
        match read_record(&self.record_path(name)).and_then(|record| record.scope) {
            Some(scope) => Ok(Cgroup::at_path(&self.mountinfo(), &scope.control_group).with_leaf(LEAF)),
            None => self.create_group(name, limits).map(|created| created.group),
        }
    }

    /// Creates the group of a child in today's layout: below that of the role server.
    ///
    /// A limit for which the group has no controller: under systemd the child starts without it, because its scope will
    /// have it. Elsewhere nothing would set it later, and a group of version 2 that lacks a controller is an error.
    /// Version 1, and a host without groups that we may use, never had such an error: the caller warns.
    pub fn create_group(&self, name: &str, limits: &ResourceLimits) -> Result<CreatedGroup, CgroupError> {
        let _layout = lock_layout();
        let group = self.mounts.make_cgroup(&self.instance_name(), name)?;
        let all = (*limits, ResourceLimits::default());
        let (held, missed) = group.controllers().map_or(all, |has| split_limits(limits, &has));
        let missed_limits = Some(missed).filter(|missed| *missed != ResourceLimits::default());
        let alone = group.unified.as_ref().filter(|_| group.legacy.is_empty() && self.scopes.is_none());
        if let (Some(missed), Some(path)) = (&missed_limits, alone) {
            let why = format!(
                "no controller for the limit of {} is handed on to it; hand it on (cgroup.subtree_control of the \
                 groups above, or Delegate= of their unit), or remove the limit",
                name_limits(missed)
            );
            return Err(io_error("setting the limits of the control group", path)(Error::other(why)));
        }
        group.set_limits(&held)?;
        // As in a scope, so that the path of a group inside it is the same for runc.
        let group = if self.scopes.is_some() { group.with_leaf(LEAF) } else { group };
        Ok(CreatedGroup { group, missed_limits })
    }

    /// The number for the next scope of a child.
    #[must_use]
    pub fn next_scope_number(&self, name: &str) -> u64 {
        let recorded = read_record(&self.record_path(name)).and_then(|record| record.scope);
        let recorded = recorded.and_then(|scope| scope_number(&scope.unit, &self.instance_name(), name));
        let existing = self.find_scopes(name).last_key_value().map(|(number, _)| *number);
        recorded.max(existing).map_or(1, |last| last.saturating_add(1))
    }

    /// The path of a group inside that of a child, in the form that runc expects.
    #[must_use]
    pub fn nested_cgroup(&self, name: &str) -> String {
        let family = self.instance_name();
        match &self.scopes {
            // runc takes it as relative: in version 2 alone to the group above its own, which is then that of the child.
            Some(_) => format!("{family}.{name}"),
            None => self.mounts.nested_cgroup(&family, name),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::child::cgroup::CgroupMounts;

    /// An enrolment moves many children, and has to end in time.
    #[test]
    fn missing_limit_is_waited_for_no_longer_than_the_caller_may() {
        let root = tempfile::tempdir().unwrap();
        let group = Cgroup { unified: Some(root.path().to_owned()), ..Cgroup::default() };
        let limits = ResourceLimits { cpu_millis: Some(500), ..ResourceLimits::default() };
        let begun = Instant::now();
        assert_eq!(wait_for_limits(&group, &limits, Some(begun)), Some(limits));
        assert!(begun.elapsed() < LIMITS_TIMEOUT, "it waited as if there were time");
        fs::write(root.path().join("cpu.max"), "50000 100000\n").unwrap();
        assert_eq!(wait_for_limits(&group, &limits, Some(begun)), None);
    }

    /// Files stand in for the hierarchy. Without systemd nothing would set the limit later.
    #[test]
    fn limit_without_a_controller_is_refused_where_no_scope_will_have_it() {
        let root = tempfile::tempdir().unwrap();
        let children = ChildContext {
            directory: root.path().join("children"),
            mounts: CgroupMounts { unified: Some(root.path().join("tree")), ..CgroupMounts::none() },
            launcher: PathBuf::from("/proc/self/exe"),
            shutdown: CancellationToken::new(),
            scopes: None,
        };
        let group = root.path().join("tree").join(children.instance_name()).join("web");
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join("cgroup.controllers"), "memory pids\n").unwrap();
        let memory = ResourceLimits { memory_bytes: Some(1 << 20), ..ResourceLimits::default() };
        let created = children.create_group("web", &memory).unwrap();
        assert_eq!((created.group.leaf, created.missed_limits), (None, None));
        assert_eq!(fs::read_to_string(group.join("memory.max")).unwrap(), "1048576");
        let both = ResourceLimits { cpu_millis: Some(1500), ..memory };
        let error = children.create_group("web", &both).unwrap_err().to_string();
        assert!(error.contains("no controller for the limit of processors is handed on"), "{error}");
        assert!(!group.join("cpu.max").exists());
    }
}
