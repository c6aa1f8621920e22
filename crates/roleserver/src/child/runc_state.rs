//! Make what runc recorded of a container follow the container into the scope it was moved to.
//!
//! A service in a root filesystem is a container of runc. Its state (`state.json`) names the groups that `runc exec` joins,
//! and its group refuses devices. Both belong to the group before the move.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::child::cgroup::{Cgroup, process_groups};
use crate::child::existing_cgroup::own_pids;
use crate::child::placement::{PlacementError, Scopes};
use crate::systemd_manager::value::Value as BusValue;

/// Makes what runc recorded of a container follow it into the scope with this unit name and group. Does nothing for a
/// child that has no such state. May be repeated.
///
/// # Errors
///
/// Why a step failed, as a sentence.
pub(super) fn follow_container(
    scopes: &Scopes,
    directory: &Path,
    (old, new): (&Cgroup, &Cgroup),
    unit: &str,
) -> Result<(), PlacementError> {
    let file = directory.join("state.json");
    if !file.exists() {
        return Ok(());
    }
    let updated = update_runc_state(scopes, &file, old, new).map_err(|error| {
        let file = file.display();
        format!("updating {file} failed, by which runc finds the control group of the container: {error}")
    });
    // Although the other step failed: each can hold without the other.
    let restricted = restrict_devices(scopes, unit);
    updated.map_err(PlacementError::from).and(restricted)
}

/// Makes the state of runc name the groups that its container is in now. Otherwise `runc exec`, by which such a service
/// is probed, would look for a group that is gone.
fn update_runc_state(scopes: &Scopes, file: &Path, old: &Cgroup, new: &Cgroup) -> std::io::Result<()> {
    let mut state: Value = serde_json::from_slice(&fs::read(file)?)?;
    let tops: BTreeMap<&str, &PathBuf> = new.by_hierarchy().collect();
    for (hierarchy, path) in old.by_hierarchy() {
        if let Some(new) = tops.get(hierarchy) {
            rename_paths(&mut state, path, new);
        }
    }
    if let Some(pid) = state.get("init_process_pid").and_then(Value::as_i64) {
        let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let lists = |group: &Path| {
            i32::try_from(pid).is_ok_and(|pid| own_pids(group).is_ok_and(|pids| pids.contains(&pid)))
        };
        correct_group_paths(&mut state, &process_groups(&scopes.mountinfo, &cgroups), lists);
    }
    let bytes = serde_json::to_vec(&state)?;
    crate::atomic_file::replace_file(file, &bytes, crate::atomic_file::Durability::UntilPowerLoss)
}

/// Replaces each path in `cgroup_paths` of such a state that does not list the container's first process by the group
/// that the process is in.
///
/// In version 1, runc makes a group in every hierarchy, and systemd moves a process in each that it manages: in that of
/// devices too, where the child itself has no group that could be renamed.
fn correct_group_paths(state: &mut Value, now: &BTreeMap<String, PathBuf>, lists: impl Fn(&Path) -> bool) {
    let Some(paths) = state.get_mut("cgroup_paths").and_then(Value::as_object_mut) else { return };
    for (hierarchy, path) in paths {
        let recorded = path.as_str().unwrap_or_default();
        match now.get(hierarchy) {
            Some(group) if !lists(Path::new(recorded)) => *path = group.to_string_lossy().into(),
            _ => {}
        }
    }
}

/// Refuses devices to the processes of a scope, apart from those that hold nothing, such as `/dev/null`, and terminals.
///
/// runc does so for the group of its container. The filter of a group in version 2, and the list of one in version 1,
/// do not follow processes into another group.
fn restrict_devices(scopes: &Scopes, unit: &str) -> Result<(), PlacementError> {
    let closed = [("DevicePolicy", BusValue::text("closed"))];
    scopes.manager.set_properties(unit, &closed).map_err(|error| PlacementError {
        why: format!("it can open devices that its archive contains: {error}"),
        is_silence: error.is_silence(),
    })
}

/// Replaces each string that is a path below `old` by the same path below `new` (pure).
fn rename_paths(value: &mut Value, old: &Path, new: &Path) {
    match value {
        Value::String(text) => {
            let relative = Path::new(text.as_str()).strip_prefix(old).ok().map(Path::to_owned);
            if let Some(relative) = relative {
                let path = if relative.as_os_str().is_empty() { new.to_owned() } else { new.join(relative) };
                *text = path.to_string_lossy().into_owned();
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| rename_paths(item, old, new)),
        Value::Object(fields) => fields.values_mut().for_each(|field| rename_paths(field, old, new)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_in_the_state_of_runc_follow_the_group() {
        let mut state = serde_json::json!({
            "id": "web",
            "cgroup_paths": {"": "/c/unit/f/web/f.web", "cpu": "/d/unit/f/web"},
            "config": {"cgroups": {"path": "/c/unit/f/webs"}, "list": ["/c/unit/f/web"], "number": 1},
        });
        rename_paths(&mut state, Path::new("/c/unit/f/web"), Path::new("/c/a.scope"));
        let expected = serde_json::json!({
            "id": "web",
            "cgroup_paths": {"": "/c/a.scope/f.web", "cpu": "/d/unit/f/web"},
            "config": {"cgroups": {"path": "/c/unit/f/webs"}, "list": ["/c/a.scope"], "number": 1},
        });
        assert_eq!(state, expected);
    }

    /// As Debian 12 has it in a container with version 1: systemd manages devices and moved the process, but nobody
    /// manages freezer.
    #[test]
    fn state_of_runc_names_the_group_of_the_container_in_each_hierarchy() {
        let mountinfo = "\
30 20 0:30 / /cg/memory rw - cgroup cgroup rw,memory
31 20 0:31 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct
32 20 0:32 /m1 /cg/devices rw - cgroup cgroup rw,devices
33 20 0:33 /m1 /cg/freezer rw - cgroup cgroup rw,freezer
34 20 0:34 / /cg/systemd rw - cgroup cgroup rw,name=systemd
35 20 0:35 / /cg/unified rw - cgroup2 cgroup2 rw
";
        let cgroups = "\
9:name=systemd:/a.scope
5:devices:/m1/a.scope
4:freezer:/m1/f.web
2:cpu,cpuacct:/a.scope/f.web
1:memory:/a.scope/f.web
0::/a.scope
";
        let now = process_groups(mountinfo, cgroups);
        let mut state = serde_json::json!({"cgroup_paths": {
            "memory": "/cg/memory/a.scope/f.web", "cpuacct": "/cg/cpu/unit/f.web",
            "devices": "/cg/devices/unit/f.web", "freezer": "/cg/freezer/f.web",
            "name=systemd": "/cg/systemd/unit/f.web", "": "/cg/unified/unit/f.web", "rdma": "/cg/rdma/f.web",
        }});
        let holding = ["/cg/memory/a.scope/f.web", "/cg/freezer/f.web"].map(Path::new);
        correct_group_paths(&mut state, &now, |group| holding.contains(&group));
        let expected = serde_json::json!({"cgroup_paths": {
            "memory": "/cg/memory/a.scope/f.web", "cpuacct": "/cg/cpu/a.scope/f.web",
            "devices": "/cg/devices/a.scope", "freezer": "/cg/freezer/f.web",
            "name=systemd": "/cg/systemd/a.scope", "": "/cg/unified/a.scope", "rdma": "/cg/rdma/f.web",
        }});
        assert_eq!(state, expected);
        // The first process has ended.
        correct_group_paths(&mut state, &BTreeMap::new(), |_| false);
        assert_eq!(state, expected);
    }
}
