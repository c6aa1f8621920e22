//! Move the processes of a child from one control group into another, with the groups that the child made inside.
//!
//! The child starts processes meanwhile. They are followed until each is where it belongs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use crate::child::cgroup::{Cgroup, nested_groups};
use crate::child::existing_cgroup::own_pids;
use crate::child::launch::InnerGroup;
use crate::child::placement::Scopes;

/// How long processes that a child starts while it is moved are followed.
const FOLLOW_TIMEOUT: Duration = Duration::from_secs(5);
const FOLLOW_INTERVAL: Duration = Duration::from_millis(10);

/// The groups inside a group that have processes, by hierarchy and relative path.
pub(super) type InnerGroups = BTreeMap<(String, PathBuf), BTreeSet<i32>>;

pub(super) fn inner_groups(group: &Cgroup) -> InnerGroups {
    let mut all = InnerGroups::new();
    for (hierarchy, top) in group.by_hierarchy() {
        // The innermost first: a group lists the processes of groups with threads alone that are inside it, too.
        let mut found = BTreeSet::new();
        for path in nested_groups(top).into_iter().rev() {
            let Ok(relative) = path.strip_prefix(top) else { continue };
            let pids = own_pids(&path).unwrap_or_default();
            let pids: BTreeSet<i32> = pids.into_iter().filter(|pid| found.insert(*pid)).collect();
            if !pids.is_empty() {
                all.insert((hierarchy.to_owned(), relative.to_owned()), pids);
            }
        }
    }
    all
}

/// All groups that passes of a move have found (pure). A process that this pass has found is in the group where it is
/// now. Recorded groups with a path that leads outside are left out.
pub(super) fn merge_groups(recorded: &[InnerGroup], found: &InnerGroups) -> InnerGroups {
    let mut all = found.clone();
    let is_inside = |path: &Path| path.components().all(|part| matches!(part, Component::Normal(_)));
    for InnerGroup { hierarchy, path, pids } in recorded.iter().filter(|group| is_inside(&group.path)) {
        let is_found =
            |pid: &i32| found.iter().any(|((other, _), pids)| other == hierarchy && pids.contains(pid));
        let lost: BTreeSet<i32> = pids.iter().copied().filter(|pid| !is_found(pid)).collect();
        if !lost.is_empty() {
            all.entry((hierarchy.clone(), path.clone())).or_default().extend(lost);
        }
    }
    all
}

/// The groups in the form of the record (pure).
pub(super) fn to_records(groups: &InnerGroups) -> Vec<InnerGroup> {
    let to_record = |((hierarchy, path), pids): (&(String, PathBuf), &BTreeSet<i32>)| InnerGroup {
        hierarchy: hierarchy.clone(),
        path: path.clone(),
        pids: pids.clone(),
    };
    groups.iter().map(to_record).collect()
}

/// The processes of all groups that have to be moved: those that this pass has found, and those that systemd has put
/// into the group of the scope itself. Others have ended, and their pids may be those of strangers, or are where they
/// belong.
pub(super) fn groups_to_move(
    all: &InnerGroups,
    found: &InnerGroups,
    new: &Cgroup,
) -> std::io::Result<InnerGroups> {
    let tops: BTreeMap<&str, &PathBuf> = new.by_hierarchy().collect();
    let mut left = InnerGroups::new();
    for (group, pids) in all {
        let in_top = tops.get(group.0.as_str()).map(|top| own_pids(top)).transpose()?.unwrap_or_default();
        let in_old = found.get(group);
        let has_to = |pid: &i32| in_top.contains(pid) || in_old.is_some_and(|pids| pids.contains(pid));
        let pids: BTreeSet<i32> = pids.iter().copied().filter(has_to).collect();
        if !pids.is_empty() {
            left.insert(group.clone(), pids);
        }
    }
    Ok(left)
}

/// Makes the inner groups inside the new group, and moves their processes there. Processes of the old group itself go
/// where those of a new child are.
pub(super) fn move_inner_groups(groups: &InnerGroups, new: &Cgroup) -> std::io::Result<()> {
    let tops: BTreeMap<&str, &PathBuf> = new.by_hierarchy().collect();
    for ((hierarchy, relative), pids) in groups {
        let Some(top) = tops.get(hierarchy.as_str()) else { continue };
        let of_child_itself = relative.as_os_str().is_empty();
        let path = match &new.leaf {
            Some(leaf) if of_child_itself => top.join(leaf),
            None if of_child_itself => continue,
            _ => top.join(relative),
        };
        fs::create_dir_all(&path)?;
        for pid in pids {
            match fs::write(path.join("cgroup.procs"), pid.to_string()) {
                // It has ended.
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {}
                other => other?,
            }
        }
    }
    Ok(())
}

/// Moves processes that were started meanwhile, until each is where it belongs. `listed` are those that were moved
/// before.
pub(super) fn follow(
    scopes: &Scopes,
    (old, new): (&Cgroup, &Cgroup),
    unit: &str,
    listed: &BTreeSet<i32>,
) -> std::io::Result<()> {
    let end = Instant::now() + FOLLOW_TIMEOUT;
    let end = scopes.manager.until.map_or(end, |until| end.min(until));
    loop {
        let late = find_late_processes(old, new, listed)?;
        if late.is_empty() {
            return Ok(());
        }
        if Instant::now() >= end {
            let count = late.values().map(BTreeSet::len).sum::<usize>();
            let why = format!("{count} processes stay in the group before, or in that of the scope itself");
            return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, why));
        }
        for (group, pids) in late {
            for top in new.directories() {
                fs::create_dir_all(top.join(&group))?;
            }
            let subgroup = if group.is_empty() { group } else { format!("/{group}") };
            let pids: Vec<u32> = pids.into_iter().filter_map(|pid| u32::try_from(pid).ok()).collect();
            if let Err(error) = scopes.manager.attach_processes(unit, &subgroup, &pids) {
                // One of them may have ended.
                tracing::debug!(%error, unit, "processes are attached once more");
            }
        }
        std::thread::sleep(FOLLOW_INTERVAL);
    }
}

/// The processes that are not where they belong, by the group inside the scope for them; an empty name is the scope
/// itself, where version 1 has them.
///
/// The child starts processes while it is moved. One that starts after the list was made and before systemd moves the
/// child is moved too, and is then in the group of the scope itself, which must hold none in version 2.
fn find_late_processes(
    old: &Cgroup,
    new: &Cgroup,
    listed: &BTreeSet<i32>,
) -> std::io::Result<BTreeMap<String, BTreeSet<i32>>> {
    let mut late: BTreeMap<String, BTreeSet<i32>> = BTreeMap::new();
    let mut in_old = old.pids().map_err(std::io::Error::other)?;
    let own_group = new.leaf.clone().unwrap_or_default();
    if let (Some(_), Some(top)) = (&new.leaf, &new.unified) {
        for ((_, relative), pids) in inner_groups(old) {
            in_old.retain(|pid| !pids.contains(pid));
            let relative = relative.to_string_lossy().into_owned();
            let group = if relative.is_empty() { own_group.clone() } else { relative };
            late.entry(group).or_default().extend(pids);
        }
        in_old.extend(own_pids(top)?.difference(listed));
    }
    if !in_old.is_empty() {
        late.entry(own_group).or_default().extend(in_old);
    }
    Ok(late)
}

impl Cgroup {
    pub(super) fn by_hierarchy(&self) -> impl Iterator<Item = (&str, &PathBuf)> {
        let legacy = self.legacy.iter().map(|(name, path)| (name.as_str(), path));
        self.unified.iter().map(|path| ("", path)).chain(legacy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files stand in for a hierarchy. A group with threads alone is listed in the group above it.
    #[test]
    fn process_belongs_to_the_innermost_group_that_lists_it() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("f.web");
        fs::create_dir(&inner).unwrap();
        fs::write(root.path().join("cgroup.procs"), "12\n13\n").unwrap();
        fs::write(inner.join("cgroup.procs"), "13\n").unwrap();
        let group = Cgroup { unified: Some(root.path().to_owned()), ..Cgroup::default() };
        let expected = InnerGroups::from([
            ((String::new(), PathBuf::new()), BTreeSet::from([12])),
            ((String::new(), PathBuf::from("f.web")), BTreeSet::from([13])),
        ]);
        assert_eq!(inner_groups(&group), expected);
    }

    /// The second pass of a move: systemd has made the scope, and the group before is empty but for one process.
    #[test]
    fn recorded_groups_are_completed_and_only_processes_of_the_scope_are_moved() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("cgroup.procs"), "12\n13\n").unwrap();
        let new = Cgroup { unified: Some(root.path().to_owned()), ..Cgroup::default() };
        let groups = |groups: &[(&str, &[i32])]| -> InnerGroups {
            let entry = |(path, pids): &(&str, &[i32])| {
                ((String::new(), PathBuf::from(path)), pids.iter().copied().collect())
            };
            groups.iter().map(entry).collect()
        };
        let mut recorded = to_records(&groups(&[("", &[12, 20]), ("f.web", &[13, 14, 15])]));
        recorded.extend(to_records(&groups(&[("../other", &[16]), ("/other", &[17])])));
        let found = groups(&[("g.web", &[14])]);
        let all = merge_groups(&recorded, &found);
        assert_eq!(all, groups(&[("", &[12, 20]), ("f.web", &[13, 15]), ("g.web", &[14])]));
        let expected = groups(&[("", &[12]), ("f.web", &[13]), ("g.web", &[14])]);
        assert_eq!(groups_to_move(&all, &found, &new).unwrap(), expected, "15 and 20 have ended");
    }
}
