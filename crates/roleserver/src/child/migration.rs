//! Move running children of the layout before into scopes, with their pids unchanged.
//!
//! Earlier releases kept children below the control group of the unit, and so does this one while systemd does not
//! answer. Such a child ends with the unit. It is moved as soon as possible: when the role server starts, from time to
//! time while it runs, and by an enrolment before it restarts the unit.
//!
//! A child is moved in this order, and each step finds what an interrupted one has done:
//!
//! 1. The record of the child names its old group, which marks the move as unfinished. Later steps need that name, and
//!    the group of a child outside the unit cannot be found by its process any more. It also has the groups that the
//!    child made inside its own, as runc does, with their processes: systemd moves all into one group.
//! 2. systemd makes a scope with all processes of the child. A scope that an interrupted move has made is found by the
//!    process in it. The record names the scope, too. A release before this one reads the same record, and finds the
//!    process.
//! 3. The recorded groups are made inside the scope, with their processes. The child's own processes go into the group
//!    [`LEAF`], because the scope hands controllers on and must hold none. Processes that were started meanwhile follow,
//!    in the old group or in that of the scope.
//!    After an interruption between steps 2 and 3, a recorded process goes to its group if it is in the scope. Processes
//!    that an inner group has started between the record and the interruption are unknown, and go into [`LEAF`]. The
//!    scope limits them, and refuses them devices, in either group.
//! 4. The old group is removed.
//! 5. The state of runc names the new groups, and the scope refuses devices to a container as its group did.
//! 6. The record names the old group and its inner groups no more. From now on it is a child like one that was started
//!    in a scope.
//!
//! A move that is unfinished is taken up by each later pass, from step 3 if there is a scope, until all have succeeded.
//!
//! When the last child has moved, the controllers are taken back from the group of the unit. Otherwise systemd could not
//! put the next role server into it, and each later start would end with 219/CGROUP.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::child::cgroup::{Cgroup, CgroupMounts};
use crate::child::launch::{ChildRecord, read_record};
use crate::child::lifecycle::ChildContext;
use crate::child::limits::{find_missing_limits, merge_limits};
use crate::child::placement::{PlacedChild, PlacementError, Scopes};
use crate::child::process_move::{
    follow, groups_to_move, inner_groups, merge_groups, move_inner_groups, to_records,
};
use crate::child::runc_state::follow_container;
use crate::child::scope::{LEAF, ScopeRecord, StartingUnit, limit_properties, manager_path};
use crate::child::spec::ResourceLimits;
use crate::systemd_manager::connection::ManagerError;
use crate::systemd_manager::manager::SystemdManager;

/// How long an enrolment tries again to move the children before it restarts the unit without that, and how often.
const PROTECT_TIMEOUT: Duration = Duration::from_secs(10);
/// When the last attempt has ended. It is later, because a manager that answers may need time for many children.
pub const PROTECT_LIMIT: Duration = Duration::from_secs(20);
const PROTECT_INTERVAL: Duration = Duration::from_secs(1);
/// How often a scope is requested; a process that ends meanwhile makes systemd refuse.
const MAX_ATTEMPTS: u32 = 3;

/// What a migration has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MigrationReport {
    /// Children that were moved into scopes.
    pub moved: Vec<String>,
    /// Children that are in no scope, or not with all their processes, each with the reason.
    pub left: BTreeMap<String, String>,
    /// Those of them that the end of the unit would end.
    pub in_unit: BTreeSet<String>,
    /// Children that are in scopes while a step of their move has failed, each with the reason.
    pub unfinished: BTreeMap<String, String>,
    /// Limits that children outside scopes should have and do not have.
    pub missed_limits: BTreeMap<String, ResourceLimits>,
    /// Limits that children should have and their scopes do not have.
    pub missed_in_scopes: BTreeMap<String, ResourceLimits>,
}

/// Moves the children of a unit's role server, from outside the unit: an enrolment calls this before it restarts the
/// unit. Nothing happens if systemd does not know the unit, or if it has no group. `mountinfo` has the mounts of this
/// host, in the syntax of `/proc/self/mountinfo`. Blocks.
pub fn migrate_children_of_unit(
    state_directory: &Path,
    manager: &SystemdManager,
    unit: &str,
    mountinfo: &str,
) -> Result<MigrationReport, ManagerError> {
    let group = manager.read_unit(unit)?.map(|state| state.control_group).unwrap_or_default();
    if group.is_empty() {
        return Ok(MigrationReport::default());
    }
    let manager_group = manager.control_group()?;
    let is_user = manager_group.rsplit('/').next().is_some_and(|last| last.starts_with("user@"));
    let unit = StartingUnit { manager_group, unit_group: group.clone(), is_user };
    let children = ChildContext {
        directory: state_directory.join("children"),
        mounts: CgroupMounts::at_path(mountinfo, &group),
        launcher: PathBuf::from("/proc/self/exe"),
        shutdown: CancellationToken::new(),
        scopes: Some(Scopes::new(manager.clone(), unit, mountinfo.to_owned())),
    };
    Ok(migrate_children(&children))
}

/// Moves the children as [`migrate_children_of_unit`] does. Returns a warning for each child that will end with the
/// unit. A machine without children needs no answer of systemd. All calls have ended after [`PROTECT_LIMIT`], and at
/// `until`.
#[must_use]
pub fn protect_children(
    state_directory: &Path,
    manager: &SystemdManager,
    unit: &str,
    mountinfo: &str,
    until: Instant,
) -> Vec<String> {
    let directory = state_directory.join("children");
    if !fs::read_dir(&directory).is_ok_and(|mut records| records.next().is_some()) {
        return Vec::new();
    }
    let warning = |what: &str, why: &str| {
        format!("{what} will end when {unit} is restarted, because no scope has it: {why}")
    };
    // A restart ends what was not moved, so a manager that is busy gets more than one chance.
    let begin = Instant::now();
    let end = until.min(begin + PROTECT_TIMEOUT);
    let manager = SystemdManager { until: Some(until.min(begin + PROTECT_LIMIT)), ..manager.clone() };
    let migrated = loop {
        let migrated = migrate_children_of_unit(state_directory, &manager, unit, mountinfo);
        let is_complete = migrated.as_ref().is_ok_and(|report| report.left.is_empty());
        if is_complete || Instant::now() >= end {
            break migrated;
        }
        std::thread::sleep(PROTECT_INTERVAL);
    };
    match migrated {
        Ok(report) => report.left.iter().map(|(child, why)| warning(child, why)).collect(),
        Err(error) => {
            let why = error.to_string();
            names_outside_scopes(&directory).iter().map(|child| warning(child, &why)).collect()
        }
    }
}

/// Children that run outside scopes by their records, for when nobody knows the group of the unit.
fn names_outside_scopes(directory: &Path) -> Vec<String> {
    let children = ChildContext {
        directory: directory.to_owned(),
        mounts: CgroupMounts::none(),
        launcher: PathBuf::new(),
        shutdown: CancellationToken::new(),
        scopes: None,
    };
    let is_outside = |name: &String| {
        read_record(&children.record_path(name))
            .filter(|record| record.scope.is_none() || record.unfinished_move.is_some())
            .is_some_and(|record| record.instance.is_alive())
    };
    children.recorded_names().into_iter().filter(is_outside).collect()
}

/// Moves all children of today's layout into scopes, then takes the controllers back from the group of the unit. Does
/// nothing where there are no scopes, or no such child. Blocks.
#[must_use]
pub fn migrate_children(children: &ChildContext) -> MigrationReport {
    let mut report = MigrationReport::default();
    let Some(scopes) = &children.scopes else { return report };
    let mut unreachable: Option<String> = None;
    for name in children.names_to_move() {
        let lock = scopes.lock_of(&name);
        let _guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        // A manager that does not answer would take its whole deadline for each child.
        let moved = match &unreachable {
            Some(why) if children.needs_move(&name) => Err(why.clone().into()),
            Some(_) => Ok(false),
            None => move_child(children, scopes, &name),
        };
        if let Some(missed) = children.refresh_missed_limits(&name) {
            report.missed_in_scopes.insert(name.clone(), missed);
        }
        match moved {
            Ok(true) => {
                tracing::info!(name, "a running program was moved into a systemd scope of its own");
                report.moved.push(name);
            }
            Ok(false) => {}
            Err(PlacementError { why, is_silence }) => {
                if is_silence {
                    unreachable = Some(why.clone());
                }
                if children.ends_with_unit(scopes, &name) {
                    report.in_unit.insert(name.clone());
                }
                let failed =
                    if children.is_in_scope(&name) { &mut report.unfinished } else { &mut report.left };
                failed.insert(name, why);
            }
        }
    }
    let missed = |name: &String| {
        let record = read_record(&children.record_path(name)).filter(|record| record.scope.is_none())?;
        Some((name.clone(), record.missed_limits?))
    };
    report.missed_limits = report.left.keys().filter_map(missed).collect();
    if report.left.is_empty() {
        children.mounts.take_controllers_back(&children.instance_name());
    }
    report
}

impl ChildContext {
    /// Children that are recorded, or that have a group in today's layout.
    fn names_to_move(&self) -> BTreeSet<String> {
        self.recorded_names().into_iter().chain(self.mounts.group_names(&self.instance_name())).collect()
    }

    /// The record of a child that runs.
    fn running_record(&self, name: &str) -> Option<ChildRecord> {
        read_record(&self.record_path(name)).filter(|record| record.instance.is_alive())
    }

    /// Whether processes of a child are in its group in the unit.
    fn has_group_in_unit(&self, name: &str) -> bool {
        has_processes(&self.mounts.find_cgroup(&self.instance_name(), name))
    }

    /// Whether a running child is in a scope with all its processes.
    fn is_in_scope(&self, name: &str) -> bool {
        let is_inside = |record: ChildRecord| {
            record.scope.is_some() && !record.unfinished_move.as_ref().is_some_and(has_processes)
        };
        !self.has_group_in_unit(name) && self.running_record(name).is_some_and(is_inside)
    }

    /// Whether a child has to be moved, or a move of it is unfinished.
    fn needs_move(&self, name: &str) -> bool {
        let has_to = |record: ChildRecord| record.scope.is_none() || record.unfinished_move.is_some();
        self.has_group_in_unit(name) || self.running_record(name).is_some_and(has_to)
    }

    /// Whether systemd would end processes of a child together with the unit. In version 1 systemd looks at a hierarchy of
    /// its own, where the child is in the group of the unit itself.
    fn ends_with_unit(&self, scopes: &Scopes, name: &str) -> bool {
        let is_in_unit = |record: ChildRecord| {
            let shown = fs::read_to_string(scopes.proc.join(record.instance.pid.to_string()).join("cgroup"));
            let shown = shown.unwrap_or_default();
            let below = manager_path(&shown).and_then(|path| path.strip_prefix(&scopes.unit.unit_group));
            below.is_some_and(|below| below.is_empty() || below.starts_with('/'))
        };
        self.has_group_in_unit(name) || self.running_record(name).is_some_and(is_in_unit)
    }
}

fn has_processes(group: &Cgroup) -> bool {
    !group.pids().unwrap_or_default().is_empty()
}

/// Changes the record of a running child. Nothing is recorded of one that has ended.
fn update_record(
    children: &ChildContext,
    name: &str,
    running: &mut Option<ChildRecord>,
    change: impl FnOnce(&mut ChildRecord),
) -> Result<(), PlacementError> {
    let Some(record) = running else { return Ok(()) };
    let before = record.clone();
    change(record);
    if *record == before {
        return Ok(());
    }
    let written = record.write(&children.record_path(name));
    written.map_err(|error| format!("recording the move of {name} failed: {error}").into())
}

/// Moves one child, or completes its move; returns whether there was anything to do.
fn move_child(children: &ChildContext, scopes: &Scopes, name: &str) -> Result<bool, PlacementError> {
    let family = children.instance_name();
    let in_unit = children.mounts.find_cgroup(&family, name);
    let record = read_record(&children.record_path(name));
    // The handle keeps the pid from being used by another process.
    let opened = record.as_ref().map(|record| record.instance.open_pidfd()).transpose();
    let handle = opened.map_err(|error| error.to_string())?.flatten();
    let mut running = record.filter(|_| handle.is_some());
    let known = running.as_ref().and_then(|record| record.scope.clone());
    let unfinished = running.as_ref().and_then(|record| record.unfinished_move.clone());
    let is_unfinished = unfinished.is_some();
    let own = own_pid(running.as_ref());
    // A child without a record, such as shims, is found by any of its processes.
    let guide = own.filter(|_| known.is_none()).or_else(|| first_pid(&in_unit));
    let outside = guide.map_or_else(Cgroup::default, |pid| {
        let around = find_group_around(scopes, pid, &family, name);
        if in_unit.clone().with_process(pid).is_empty() {
            around
        } else {
            around.completed_by(in_unit.clone())
        }
    });
    let recorded = unfinished.filter(|group| !group.is_empty());
    let outside = match recorded {
        // An earlier release recorded no group outside that of the unit.
        Some(recorded) if known.is_none() => recorded.completed_by(outside),
        Some(recorded) => recorded,
        None => outside,
    };
    let is_outside = !outside.is_empty() && outside != in_unit;
    let old = if is_outside { outside } else { in_unit.clone() };
    let in_old = old.pids().map_err(|error| error.to_string())?;
    if in_old.is_empty() && !is_unfinished && (running.is_none() || known.is_some()) {
        old.remove();
        return Ok(false);
    }
    let found = inner_groups(&old);
    let recorded = running.as_ref().map(|record| record.unfinished_groups.as_slice()).unwrap_or_default();
    let groups = merge_groups(recorded, &found);
    update_record(children, name, &mut running, |record| {
        record.unfinished_move = Some(old.clone());
        record.unfinished_groups = to_records(&groups);
    })?;
    let scope = match known {
        Some(scope) => scope,
        None => place_running(children, scopes, name, &mut running, &old)?,
    };
    let new = Cgroup::at_path(&scopes.mountinfo, &scope.control_group).with_leaf(LEAF);
    let failed =
        |error: std::io::Error| format!("moving the processes of {name} into {} failed: {error}", scope.unit);
    let groups = groups_to_move(&groups, &found, &new).map_err(failed)?;
    let listed: BTreeSet<i32> = groups.values().flatten().copied().collect();
    move_inner_groups(&groups, &new)
        .and_then(|()| follow(scopes, (&old, &new), &scope.unit, &listed))
        .map_err(failed)?;
    old.remove();
    let state = children.directory.join(name).join("bundle/state").join(name);
    follow_container(scopes, &state, (&old, &new), &scope.unit)?;
    update_record(children, name, &mut running, |record| {
        record.unfinished_move = None;
        record.unfinished_groups = Vec::new();
    })?;
    // Processes of another start may be in the unit besides. The child has a scope now, so this ends there.
    if is_outside && !in_unit.pids().map_err(|error| error.to_string())?.is_empty() {
        move_child(children, scopes, name)?;
    }
    Ok(true)
}

fn own_pid(running: Option<&ChildRecord>) -> Option<u32> {
    running.and_then(|record| u32::try_from(record.instance.pid).ok())
}

fn first_pid(group: &Cgroup) -> Option<u32> {
    group.pids().unwrap_or_default().first().and_then(|pid| u32::try_from(*pid).ok())
}

/// Finds or makes the scope of a child that has been outside scopes, and records it.
fn place_running(
    children: &ChildContext,
    scopes: &Scopes,
    name: &str,
    running: &mut Option<ChildRecord>,
    old: &Cgroup,
) -> Result<ScopeRecord, PlacementError> {
    let own = own_pid(running.as_ref());
    let missed = running.as_ref().and_then(|record| record.missed_limits).unwrap_or_default();
    let limits = merge_limits(&old.read_limits(), &missed);
    let placed = match find_scope_of(children, scopes, name, own, &limits) {
        Some(placed) => placed,
        None => request_scope(children, scopes, name, (own, old), &limits)?,
    };
    update_record(children, name, running, |record| {
        record.scope = Some(placed.scope.clone());
        record.missed_limits = placed.missed_limits;
    })?;
    Ok(placed.scope)
}

/// The group of a child that one of its processes is in, in those hierarchies in which that is a group of the child. Two
/// such groups are not below the group of the unit:
///
/// * A detached supervisor, which the unit has replaced since, may have run in the scope of a session, and its children
///   below that.
/// * In version 1, systemd gives a unit no group for a controller that nobody has requested. The role server is in the
///   group above then, and the child with its limits below that.
fn find_group_around(scopes: &Scopes, pid: u32, family: &str, name: &str) -> Cgroup {
    let shown = fs::read_to_string(scopes.proc.join(pid.to_string()).join("cgroup")).unwrap_or_default();
    Cgroup::around_process(&scopes.mountinfo, &shown, family, name).with_process(pid)
}

/// A scope that has the process already: its record was not written. It gets limits that it lacks.
fn find_scope_of(
    children: &ChildContext,
    scopes: &Scopes,
    name: &str,
    own: Option<u32>,
    limits: &ResourceLimits,
) -> Option<PlacedChild> {
    let own = own?;
    let (scope, group) = children.find_scopes(name).into_values().find_map(|scope| {
        let group = Cgroup::at_path(&scopes.mountinfo, &scope.control_group).with_process(own);
        (!group.is_empty()).then_some((scope, group))
    })?;
    complete_limits(scopes, name, (&scope, &group), limits);
    Some(PlacedChild::in_scope(scope, group, limits, scopes.manager.until))
}

/// Sets limits that a scope lacks: an earlier release, which was interrupted, has requested it without those of a group
/// outside that of the unit. The old groups may be gone, so what the scope has and they do not stays.
fn complete_limits(
    scopes: &Scopes,
    name: &str,
    (scope, group): (&ScopeRecord, &Cgroup),
    limits: &ResourceLimits,
) {
    let present = group.read_limits();
    if find_missing_limits(limits, &present) == ResourceLimits::default() {
        return;
    }
    let all = merge_limits(limits, &present);
    if let Err(error) = scopes.manager.set_properties(&scope.unit, &limit_properties(&all)) {
        scopes.remember_missed(name, error.is_silence().then_some(all));
        tracing::warn!(%error, unit = scope.unit, "the limits of a scope that an interrupted move has made were not set");
    }
}

fn request_scope(
    children: &ChildContext,
    scopes: &Scopes,
    name: &str,
    (own, old): (Option<u32>, &Cgroup),
    limits: &ResourceLimits,
) -> Result<PlacedChild, PlacementError> {
    let mut last = PlacementError::from(format!("{name} has no process any more"));
    for _ in 0..MAX_ATTEMPTS {
        let others = old.pids().map_err(|error| error.to_string())?;
        let others = others.into_iter().filter_map(|pid| u32::try_from(pid).ok());
        let pids: Vec<u32> = own.into_iter().chain(others.filter(|pid| Some(*pid) != own)).collect();
        if pids.is_empty() {
            return Err(last);
        }
        let number = children.next_scope_number(name);
        match scopes.place((&children.instance_name(), name), &pids, limits, number) {
            Ok(placed) => return Ok(placed),
            Err(error) if error.is_silence => return Err(error),
            Err(error) => last = error,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::ProcessInstance;

    #[test]
    fn only_running_children_outside_scopes_are_in_danger() {
        let directory = tempfile::tempdir().unwrap();
        let instance = ProcessInstance::current().unwrap();
        let ended = ProcessInstance { start_time: instance.start_time + 1, ..instance.clone() };
        let scope = ScopeRecord { unit: "a.scope".to_owned(), control_group: "/a.scope".to_owned() };
        for (name, instance, scope) in
            [("ended", &ended, None), ("inside", &instance, Some(scope)), ("outside", &instance, None)]
        {
            let record = ChildRecord {
                instance: instance.clone(),
                spec_sha256: "5a".to_owned(),
                declared_sha256: None,
                scope,
                missed_limits: None,
                unfinished_move: None,
                unfinished_groups: Vec::new(),
            };
            fs::create_dir(directory.path().join(name)).unwrap();
            record.write(&directory.path().join(name).join("process.json")).unwrap();
        }
        assert_eq!(names_outside_scopes(directory.path()), ["outside"]);
    }
}
