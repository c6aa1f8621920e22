//! The limits of a child's group, when an earlier release has made it and the child moves into a scope.

use std::fs;

use anyhow::{Context as _, Result};
use shepherd_roleserver::child::cgroup::{Cgroup, CgroupMounts};
use shepherd_roleserver::child::launch::ChildRecord;
use shepherd_roleserver::child::migration::{MigrationReport, migrate_children};
use shepherd_roleserver::child::spec::ResourceLimits;
use shepherd_roleserver::systemd_manager::value::Value;

use super::{OldProcess, record};
use crate::fake_systemd::PROCESSES;
use crate::host::{Host, UNIT_GROUP};

#[test]
fn limits_of_the_old_group_are_properties_of_the_scope() -> Result<()> {
    let host = Host::new()?;
    let group = host.old_group("web");
    let web = OldProcess::start(&host, &group)?;
    web.record(&host, "web")?;
    for (file, text) in [("memory.max", "1048576\n"), ("cpu.max", "150000 100000\n"), ("pids.max", "max\n")] {
        fs::write(host.group(&group).join(file), text)?;
    }
    assert_eq!(migrate_children(&host.children).moved, ["web"]);
    let unit = host.systemd.unit(&host.scope_name("web", 1)).context("no scope")?;
    let number = |name: &str| unit.properties.get(name).cloned();
    assert_eq!(number("MemoryMax"), Some(Value::U64(1 << 20)));
    assert_eq!(number("CPUQuotaPerSecUSec"), Some(Value::U64(1_500_000)));
    assert_eq!(number("TasksMax"), Some(Value::U64(u64::MAX)));
    Ok(())
}

/// Puts a process with limits into hierarchies of version 1 beside that of version 2, as an enrolment finds it: systemd has
/// given the unit no group for processors, which nobody has requested, so the group of the child there is below the root.
/// All are in the tree of the fake systemd, so that the process leaves them when it moves.
fn join_version_one(host: &mut Host, web: &OldProcess) -> Result<()> {
    let group = host.old_group("web");
    let below_root = format!("/{}/web", host.children.instance_name());
    let limits = [
        ("memory", &group, "memory.limit_in_bytes", "1048576\n"),
        ("pids", &group, "pids.max", "20\n"),
        ("cpu", &below_root, "cpu.cfs_period_us", "100000\n"),
        ("cpu", &below_root, "cpu.cfs_quota_us", "150000\n"),
    ];
    for (controller, group, file, text) in limits {
        let directory = host.group(controller).join(group.trim_start_matches('/'));
        fs::create_dir_all(&directory)?;
        fs::write(directory.join(file), text)?;
        fs::write(directory.join(PROCESSES), format!("{}\n", web.pid()))?;
    }
    let proc = host.path("proc");
    fs::create_dir_all(proc.join(web.pid().to_string()))?;
    let shown = format!("5:memory:{group}\n4:pids:{group}\n3:cpu,cpuacct:{below_root}\n0::{group}\n");
    fs::write(proc.join(web.pid().to_string()).join("cgroup"), shown)?;
    let mounts = ["memory", "pids", "cpu"].map(|controller| {
        format!("31 28 0:27 / {} rw - cgroup cgroup rw,{controller}\n", host.group(controller).display())
    });
    let scopes = host.children.scopes.as_mut().context("no scopes")?;
    (scopes.proc, scopes.mountinfo) = (proc, format!("{}{}", scopes.mountinfo, mounts.concat()));
    host.children.mounts = CgroupMounts::at_path(&scopes.mountinfo, UNIT_GROUP);
    Ok(())
}

#[test]
fn limits_in_hierarchies_where_the_unit_has_no_group_are_properties_of_the_scope() -> Result<()> {
    for child in [
        "recorded",
        "half moved by an earlier release",
        "without a record",
        "in a unit with a new group",
        "moved out by systemd",
    ] {
        let mut host = Host::new()?;
        let group = host.old_group("web");
        let web = OldProcess::start(&host, &group)?;
        join_version_one(&mut host, &web)?;
        if child != "without a record" {
            web.record(&host, "web")?;
        }
        if child == "half moved by an earlier release" {
            let mountinfo = &host.children.scopes.as_ref().context("no scopes")?.mountinfo;
            let unfinished_move = Some(Cgroup::at_path(mountinfo, &group));
            let interrupted = ChildRecord { unfinished_move, ..record(&host, "web")? };
            interrupted.write(&host.children.record_path("web"))?;
        }
        if child == "in a unit with a new group" {
            // The role server has made it when it adopted the child, which stays where it is.
            fs::create_dir_all(host.group("cpu").join(group.trim_start_matches('/')))?;
        }
        if child == "moved out by systemd" {
            // The scope of another child needs the controller, so systemd has made groups for it beside that one.
            let below_root = format!("{}/web", host.children.instance_name());
            fs::write(host.group("cpu").join(&below_root).join(PROCESSES), "")?;
            let cgroups = host.path("proc").join(web.pid().to_string()).join("cgroup");
            let shown = fs::read_to_string(&cgroups)?;
            fs::write(cgroups, shown.replace(&format!("cpuacct:/{below_root}"), "cpuacct:/system.slice"))?;
        }
        assert_eq!(migrate_children(&host.children).moved, ["web"], "{child}");
        let unit = host.systemd.unit(&host.scope_name("web", 1)).context("no scope")?;
        let limits =
            ["MemoryMax", "CPUQuotaPerSecUSec", "TasksMax"].map(|name| unit.properties.get(name).cloned());
        let expected = [1 << 20, 1_500_000, 20].map(|limit| Some(Value::U64(limit)));
        assert_eq!(limits, expected, "{child}");
    }
    Ok(())
}

/// An earlier release was killed after it had requested a scope without a limit of a group that it did not find.
#[test]
fn scope_of_an_interrupted_move_gets_the_limits_that_it_lacks() -> Result<()> {
    let host = Host::new()?;
    let (old, unit) = (host.old_group("web"), host.scope_name("web", 1));
    let scope = format!("/shepherd.slice/{unit}");
    let web = OldProcess::start(&host, &scope)?;
    web.record(&host, "web")?;
    host.systemd.add_unit(&unit, &scope);
    fs::write(host.group(&scope).join("memory.max"), "1048576\n")?;
    fs::create_dir_all(host.group(&old))?;
    fs::write(host.group(&old).join("cpu.max"), "150000 100000\n")?;
    assert_eq!(migrate_children(&host.children).moved, ["web"]);
    assert_eq!(record(&host, "web")?.missed_limits, None);
    let properties = host.systemd.unit(&unit).context("no scope")?.properties;
    assert_eq!(properties.get("CPUQuotaPerSecUSec"), Some(&Value::U64(1_500_000)), "its scope lacks a limit");
    assert_eq!(properties.get("MemoryMax"), Some(&Value::U64(1 << 20)), "its scope has lost a limit");
    Ok(())
}

#[test]
fn limit_of_the_old_group_that_the_scope_does_not_have_is_recorded() -> Result<()> {
    let host = Host::new()?;
    host.systemd.set_controllers(&["memory", "pids"]);
    let group = host.old_group("web");
    let web = OldProcess::start(&host, &group)?;
    web.record(&host, "web")?;
    fs::write(host.group(&group).join("cpu.max"), "150000 100000\n")?;
    fs::write(host.group(&group).join("memory.max"), "1048576\n")?;
    let missed = ResourceLimits { cpu_millis: Some(1500), ..ResourceLimits::default() };
    assert_eq!(migrate_children(&host.children).moved, ["web"]);
    assert_eq!(record(&host, "web")?.missed_limits, Some(missed), "it counts as held");
    let missed_in_scopes = [("web".to_owned(), missed)].into();
    let expected = MigrationReport { missed_in_scopes, ..MigrationReport::default() };
    assert_eq!(migrate_children(&host.children), expected);
    Ok(())
}
