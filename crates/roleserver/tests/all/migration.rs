//! Children of an earlier release move into scopes while they run. What becomes of the limits of their groups is in
//! `limits`.

mod limits;

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use shepherd_roleserver::child::cgroup::Cgroup;
use shepherd_roleserver::child::launch::{ChildRecord, InnerGroup};
use shepherd_roleserver::child::migration::{
    MigrationReport, migrate_children, migrate_children_of_unit, protect_children,
};
use shepherd_roleserver::child::placement::Scopes;
use shepherd_roleserver::child::scope::ScopeRecord;
use shepherd_roleserver::process::ProcessInstance;
use shepherd_roleserver::systemd_manager::value::Value;

use crate::fake_systemd::Conduct;
use crate::host::{Host, PATIENCE, UNIT_GROUP};

/// A process that an earlier release has started, in a group of the tree; it ends with the test.
struct OldProcess(Child);

impl OldProcess {
    fn start(host: &Host, group: &str) -> Result<Self> {
        let child = Command::new("/bin/sleep").arg("600").stdin(Stdio::null()).spawn()?;
        host.systemd.move_process(group, child.id())?;
        Ok(Self(child))
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Writes the record as the release before did.
    fn record(&self, host: &Host, name: &str) -> Result<ProcessInstance> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid()))?;
        let start_time = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(19));
        let instance = ProcessInstance {
            pid: self.pid().try_into()?,
            start_time: start_time.context("no start time")?.parse()?,
            ..ProcessInstance::current()?
        };
        let path = host.children.record_path(name);
        fs::create_dir_all(path.parent().context("no directory")?)?;
        let record = serde_json::json!({"instance": &instance, "spec_sha256": "5a"});
        fs::write(path, record.to_string())?;
        Ok(instance)
    }
}

impl Drop for OldProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn record(host: &Host, name: &str) -> Result<ChildRecord> {
    Ok(serde_json::from_slice(&fs::read(host.children.record_path(name))?)?)
}

#[test]
fn children_move_with_their_pids_and_the_unit_gets_its_controllers_back() -> Result<()> {
    let host = Host::new()?;
    let controllers = host.group(UNIT_GROUP).join("cgroup.subtree_control");
    fs::write(&controllers, "cpu memory pids\n")?;
    let etcd = OldProcess::start(&host, &host.old_group("etcd"))?;
    let instance = etcd.record(&host, "etcd")?;
    // runc, and its container in a group inside the group of the service, which the state of runc names.
    let (web, inner) = (host.old_group("web"), format!("{}/f.web", host.old_group("web")));
    let (runc, container) = (OldProcess::start(&host, &web)?, OldProcess::start(&host, &inner)?);
    runc.record(&host, "web")?;
    let state = write_runc_state(&host, &inner)?;
    // Shims that go on without a containerd, and without a record.
    let shim = OldProcess::start(&host, &host.old_group("containerd"))?;

    let report = migrate_children(&host.children);
    let names = ["containerd", "etcd", "web"].map(str::to_owned);
    assert_eq!(report, MigrationReport { moved: names.to_vec(), ..MigrationReport::default() });
    let moved = record(&host, "etcd")?;
    let scope = moved.scope.clone().context("no scope")?;
    assert_eq!((&moved.instance, moved.spec_sha256.as_str()), (&instance, "5a"), "it is the same process");
    assert_eq!(scope.unit, host.scope_name("etcd", 1));
    assert!(host.systemd.pids(&scope.control_group).contains(&etcd.pid()));
    let scope = record(&host, "web")?.scope.context("no scope")?;
    assert_eq!(host.systemd.pids(&format!("{}/f.web", scope.control_group)), [container.pid()]);
    assert_eq!(host.systemd.pids(&format!("{}/main", scope.control_group)), [runc.pid()]);
    let text = fs::read_to_string(&state)?;
    assert!(text.contains(&format!("{}/f.web\"", scope.control_group)), "{text}");
    let policy = |scope: &str| host.systemd.unit(scope)?.properties.get("DevicePolicy").cloned();
    assert_eq!(policy(&scope.unit), Some(Value::text("closed")), "its container keeps its limits on devices");
    assert_eq!(policy(&host.scope_name("etcd", 1)), None);
    let unit = host.systemd.unit(&host.scope_name("containerd", 1)).context("no scope")?;
    assert_eq!(unit.properties.get("PIDs"), Some(&Value::numbers(&[shim.pid()])));
    assert!(!host.group(UNIT_GROUP).join(host.children.instance_name()).exists(), "the old groups are gone");
    assert_eq!(fs::read_to_string(&controllers)?, "-cpu -memory -pids");

    assert_eq!(migrate_children(&host.children), MigrationReport::default(), "nothing is left to do");
    assert_eq!(host.systemd.unit_names().len(), 3);
    Ok(())
}

/// The state of runc, which names the group of its container.
fn write_runc_state(host: &Host, container_group: &str) -> Result<PathBuf> {
    let state = host.children.directory.join("web/bundle/state/web/state.json");
    fs::create_dir_all(state.parent().context("no directory")?)?;
    let paths = serde_json::json!({"cgroup_paths": {"": host.group(container_group)}});
    fs::write(&state, paths.to_string())?;
    Ok(state)
}

/// Each step after the record of the scope, once with a systemd that refuses it.
#[test]
fn step_of_a_move_that_failed_is_repeated_until_it_succeeds() -> Result<()> {
    for (conduct, reason) in [
        (Conduct::RefusesToAttach, "1 processes stay in the group before, or in that of the scope itself"),
        (Conduct::RefusesProperties, "it can open devices that its archive contains: "),
    ] {
        let host = Host::new()?;
        let (old, scope) = (host.old_group("web"), format!("/shepherd.slice/{}", host.scope_name("web", 1)));
        let (main, inner) = (format!("{scope}/main"), format!("{scope}/f.web"));
        let web = OldProcess::start(&host, &old)?;
        let container = OldProcess::start(&host, &format!("{old}/f.web"))?;
        web.record(&host, "web")?;
        let state = write_runc_state(&host, &format!("{old}/f.web"))?;
        let late = OldProcess::start(&host, "/elsewhere")?;
        host.systemd.fork_meanwhile(&scope, late.pid());

        host.systemd.set_conduct(conduct);
        let report = migrate_children(&host.children);
        assert!(report.moved.is_empty() && report.left.is_empty(), "{conduct:?}: {report:?}");
        let why = report.unfinished.get("web").with_context(|| format!("{conduct:?}: {report:?}"))?;
        assert!(why.contains(reason), "{conduct:?}: {why}");
        assert!(record(&host, "web")?.scope.is_some());
        // The tree does not notice by itself what the role server moved.
        host.systemd.move_process(&main, web.pid())?;
        host.systemd.move_process(&inner, container.pid())?;

        host.systemd.set_conduct(Conduct::Well);
        assert_eq!(
            migrate_children(&host.children).moved,
            ["web"],
            "{conduct:?}: a failed step is forgotten"
        );
        let text = fs::read_to_string(&state)?;
        assert!(text.contains(&format!("{inner}\"")), "{conduct:?}: {text}");
        let unit = host.systemd.unit(&host.scope_name("web", 1)).context("no scope")?;
        assert_eq!(unit.properties.get("DevicePolicy"), Some(&Value::text("closed")), "{conduct:?}");
        assert_eq!(host.systemd.pids(&scope), [0; 0], "{conduct:?}: the scope itself holds a process");
        assert!(host.systemd.pids(&main).contains(&late.pid()), "{conduct:?}");
        assert_eq!(host.systemd.pids(&inner), [container.pid()], "{conduct:?}");
        assert!(!host.group(&old).exists(), "{conduct:?}: the old group is there");
        assert_eq!(record(&host, "web")?.unfinished_move, None);
        assert_eq!(migrate_children(&host.children), MigrationReport::default());
        assert_eq!(host.systemd.unit_names(), [host.scope_name("web", 1)]);
    }
    Ok(())
}

fn inner_group(path: &str, process: &OldProcess) -> Result<InnerGroup> {
    Ok(InnerGroup { hierarchy: String::new(), path: path.into(), pids: [process.pid().try_into()?].into() })
}

/// systemd was busy, and made the scope after the role server had given up.
#[test]
fn inner_groups_are_recorded_before_systemd_moves_their_processes() -> Result<()> {
    let host = Host::new()?;
    let (old, unit) = (host.old_group("web"), host.scope_name("web", 1));
    let scope = format!("/shepherd.slice/{unit}");
    let web = OldProcess::start(&host, &old)?;
    let container = OldProcess::start(&host, &format!("{old}/f.web"))?;
    web.record(&host, "web")?;
    host.systemd.set_conduct(Conduct::FailedJob);
    let report = migrate_children(&host.children);
    assert!(report.left.contains_key("web"), "{report:?}");
    let expected = [inner_group("", &web)?, inner_group("f.web", &container)?];
    assert_eq!(record(&host, "web")?.unfinished_groups, expected, "nothing is recorded");
    for process in [&web, &container] {
        host.systemd.move_process(&scope, process.pid())?;
    }
    host.systemd.add_unit(&unit, &scope);

    host.systemd.set_conduct(Conduct::Well);
    assert_eq!(migrate_children(&host.children).moved, ["web"]);
    assert_eq!(host.systemd.pids(&format!("{scope}/main")), [web.pid()]);
    assert_eq!(host.systemd.pids(&format!("{scope}/f.web")), [container.pid()]);
    assert!(record(&host, "web")?.unfinished_groups.is_empty());
    Ok(())
}

/// A role server that was killed after one of the steps, with a child in its unit or in the scope of a session.
#[test]
fn move_that_was_interrupted_after_any_step_is_completed() -> Result<()> {
    for above in ["/system.slice/roleserver.service", "/user.slice/session-3.scope"] {
        for step in ["old group is recorded", "scope exists", "scope is recorded", "groups are made"] {
            let context = format!("{above}, the {step}");
            let host = Host::new()?;
            let old = format!("{above}/{}/web", host.children.instance_name());
            let unit = host.scope_name("web", 1);
            let scope = format!("/shepherd.slice/{unit}");
            let (own, inner) = match step {
                "old group is recorded" => (old.clone(), format!("{old}/f.web")),
                "groups are made" => (format!("{scope}/main"), format!("{scope}/f.web")),
                _ => (scope.clone(), scope.clone()),
            };
            fs::create_dir_all(host.group(&old))?;
            let (web, container) = (OldProcess::start(&host, &own)?, OldProcess::start(&host, &inner)?);
            let instance = web.record(&host, "web")?;
            let state = write_runc_state(&host, &format!("{old}/f.web"))?;
            if step != "old group is recorded" {
                host.systemd.add_unit(&unit, &scope);
            }
            let is_recorded = matches!(step, "scope is recorded" | "groups are made");
            let mountinfo = &host.children.scopes.as_ref().context("no scopes")?.mountinfo;
            let interrupted = ChildRecord {
                scope: is_recorded.then(|| ScopeRecord { unit: unit.clone(), control_group: scope.clone() }),
                unfinished_move: Some(Cgroup::at_path(mountinfo, &old)),
                unfinished_groups: vec![inner_group("", &web)?, inner_group("f.web", &container)?],
                ..record(&host, "web")?
            };
            interrupted.write(&host.children.record_path("web"))?;

            assert_eq!(migrate_children(&host.children).moved, ["web"], "{context}");
            let moved = record(&host, "web")?;
            assert_eq!((&moved.instance, &moved.unfinished_move), (&instance, &None), "{context}");
            assert!(moved.unfinished_groups.is_empty(), "{context}");
            assert_eq!(moved.scope.map(|scope| scope.unit), Some(unit.clone()), "{context}");
            let pids = |group: &str| host.systemd.pids(&format!("{scope}/{group}"));
            assert_eq!(pids("main"), [web.pid()], "{context}: the group of runc");
            assert_eq!(pids("f.web"), [container.pid()], "{context}: the group of the container");
            let text = fs::read_to_string(&state)?;
            assert!(text.contains(&scope) && !text.contains(&old), "{context}: {text}");
            let properties = host.systemd.unit(&unit).context("no scope")?.properties;
            assert_eq!(properties.get("DevicePolicy"), Some(&Value::text("closed")), "{context}");
            assert!(!host.group(&old).exists(), "{context}: the old group is there");
            assert_eq!(migrate_children(&host.children), MigrationReport::default(), "{context}");
            assert_eq!(host.systemd.unit_names(), [unit], "{context}");
        }
    }
    Ok(())
}

/// A role server that was killed between the start of the scope and the record.
#[test]
fn interrupted_move_is_completed_without_a_second_scope() -> Result<()> {
    let host = Host::new()?;
    let group = format!("/shepherd.slice/{}", host.scope_name("web", 4));
    let web = OldProcess::start(&host, &group)?;
    let instance = web.record(&host, "web")?;
    host.systemd.add_unit(&host.scope_name("web", 4), &group);
    assert_eq!(migrate_children(&host.children).moved, ["web"]);
    let moved = record(&host, "web")?;
    assert_eq!(moved.scope.map(|scope| scope.unit), Some(host.scope_name("web", 4)));
    assert_eq!(moved.instance, instance);
    assert_eq!(host.systemd.unit_names().len(), 1);
    assert_eq!(host.systemd.pids(&format!("{group}/main")), [web.pid()], "the scope itself holds no process");
    assert_eq!(host.systemd.pids(&group), [0; 0]);
    assert_eq!(migrate_children(&host.children), MigrationReport::default());
    Ok(())
}

/// A child that starts processes while it is moved. The group of the scope hands controllers on, and must hold none.
#[test]
fn processes_that_are_started_meanwhile_follow_into_groups_inside_the_scope() -> Result<()> {
    let host = Host::new()?;
    let (old, scope) = (host.old_group("web"), format!("/shepherd.slice/{}", host.scope_name("web", 1)));
    let web = OldProcess::start(&host, &old)?;
    web.record(&host, "web")?;
    let fork = |group: &str| -> Result<OldProcess> {
        let process = OldProcess::start(&host, "/elsewhere")?;
        host.systemd.fork_meanwhile(group, process.pid());
        Ok(process)
    };
    // Its parent was moved just before, and just after.
    let (moved_too, left) = (fork(&scope)?, fork(&old)?);
    let inner = fork(&format!("{old}/f.web"))?;

    assert_eq!(migrate_children(&host.children).moved, ["web"]);
    let mut own = host.systemd.pids(&format!("{scope}/main"));
    own.sort_unstable();
    let mut expected = [web.pid(), moved_too.pid(), left.pid()];
    expected.sort_unstable();
    assert_eq!(own, expected, "late processes are not with the child's own");
    assert_eq!(host.systemd.pids(&format!("{scope}/f.web")), [inner.pid()]);
    for process in [&moved_too, &left, &inner] {
        assert!(!host.systemd.pids(&scope).contains(&process.pid()), "the scope itself has a late process");
    }
    assert!(!host.group(&old).exists(), "the old group is gone");
    assert_eq!(host.systemd.unit_names(), [host.scope_name("web", 1)]);
    Ok(())
}

#[test]
fn ended_child_and_host_without_systemd_are_left_alone() -> Result<()> {
    let host = Host::new()?;
    let ended = OldProcess::start(&host, "/elsewhere")?;
    ended.record(&host, "web")?;
    let pid = ended.pid();
    drop(ended);
    host.systemd.forget_process(pid)?;
    assert_eq!(migrate_children(&host.children), MigrationReport::default());
    assert_eq!(host.systemd.unit_names(), [""; 0]);
    let alive = OldProcess::start(&host, &host.old_group("web"))?;
    alive.record(&host, "web")?;
    let mut elsewhere = host.children.clone();
    elsewhere.scopes = None;
    assert_eq!(migrate_children(&elsewhere), MigrationReport::default());
    assert_eq!(record(&host, "web")?.scope, None);
    // An enrolment of a machine with a systemd that has no such unit.
    let Scopes { manager, mountinfo, .. } = host.children.scopes.clone().context("no scopes")?;
    let report = migrate_children_of_unit(&host.path("state"), &manager, "roleserver.service", &mountinfo)?;
    assert_eq!(report, MigrationReport::default());
    Ok(())
}

/// A takeover restarts the unit of a machine that ran an earlier release, which would end its children.
#[test]
fn enrolment_moves_the_children_of_the_unit_with_their_pids() -> Result<()> {
    let host = Host::new()?;
    host.systemd.add_unit("roleserver.service", UNIT_GROUP);
    let controllers = host.group(UNIT_GROUP).join("cgroup.subtree_control");
    fs::write(&controllers, "cpu memory pids\n")?;
    let (etcd, web) = (
        OldProcess::start(&host, &host.old_group("etcd"))?,
        OldProcess::start(&host, &host.old_group("web"))?,
    );
    let instances = [etcd.record(&host, "etcd")?, web.record(&host, "web")?];
    let container = OldProcess::start(&host, &format!("{}/f.web", host.old_group("web")))?;

    let Scopes { manager, mountinfo, .. } = host.children.scopes.clone().context("no scopes")?;
    let until = Instant::now() + PATIENCE;
    let warnings = protect_children(host.directory.path(), &manager, "roleserver.service", &mountinfo, until);
    assert_eq!(warnings, [""; 0]);
    for (name, instance) in ["etcd", "web"].into_iter().zip(instances) {
        let moved = record(&host, name)?;
        let scope = moved.scope.with_context(|| format!("{name} stays in the unit"))?;
        assert_eq!(scope.unit, host.scope_name(name, 1));
        assert_eq!((&moved.instance, instance.is_alive()), (&instance, true), "{name} is the same process");
        let main = host.systemd.pids(&format!("{}/main", scope.control_group));
        assert_eq!(main, [u32::try_from(instance.pid)?], "{name}");
    }
    let inner = format!("/shepherd.slice/{}/f.web", host.scope_name("web", 1));
    assert_eq!(host.systemd.pids(&inner), [container.pid()]);
    assert!(!host.group(UNIT_GROUP).join(host.children.instance_name()).exists(), "the old groups are gone");
    assert_eq!(fs::read_to_string(&controllers)?, "-cpu -memory -pids");
    Ok(())
}

/// The restart of the unit waits for this, and the shepherd for both.
#[test]
fn enrolment_does_not_wait_for_a_silent_systemd_longer_than_it_may() -> Result<()> {
    let host = Host::new()?;
    let web = OldProcess::start(&host, &host.old_group("web"))?;
    web.record(&host, "web")?;
    host.systemd.set_conduct(Conduct::Silent);
    let Scopes { manager, mountinfo, .. } = host.children.scopes.clone().context("no scopes")?;
    assert_eq!(manager.deadline, PATIENCE, "each operation alone may take longer");
    let begun = Instant::now();
    let until = begun + Duration::from_secs(1);
    let warnings = protect_children(host.directory.path(), &manager, "roleserver.service", &mountinfo, until);
    assert!(begun.elapsed() < PATIENCE / 2, "it took the time of an operation");
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let expected = "web will end when roleserver.service is restarted, because no scope has it: ";
    assert!(warnings[0].starts_with(expected), "{warnings:?}");
    Ok(())
}

/// What `/proc` would show of a process in this group of the tree.
fn show_group(host: &mut Host, process: &OldProcess, group: &str) -> Result<()> {
    let proc = host.path("proc");
    let directory = proc.join(process.pid().to_string());
    fs::create_dir_all(&directory)?;
    fs::write(directory.join("cgroup"), format!("0::{group}\n"))?;
    host.children.scopes.as_mut().context("no scopes")?.proc = proc;
    Ok(())
}

/// A detached supervisor in the scope of a session has started it, before the machine got a unit.
#[test]
fn child_of_a_detached_supervisor_moves_with_all_its_processes() -> Result<()> {
    let mut host = Host::new()?;
    let above = format!("/user.slice/session-3.scope/{}", host.children.instance_name());
    let (session, inner) = (format!("{above}/web"), format!("{above}/web/f.web"));
    let web = OldProcess::start(&host, &session)?;
    web.record(&host, "web")?;
    let (fork, shim) = (OldProcess::start(&host, &session)?, OldProcess::start(&host, &inner)?);
    show_group(&mut host, &web, &session)?;

    assert_eq!(migrate_children(&host.children).moved, ["web"]);
    let unit = host.systemd.unit(&host.scope_name("web", 1)).context("no scope")?;
    let mut others = [fork.pid(), shim.pid()];
    others.sort_unstable();
    let expected = Value::numbers(&[web.pid(), others[0], others[1]]);
    assert_eq!(unit.properties.get("PIDs"), Some(&expected), "its forks and shims stay behind");
    assert_eq!(host.systemd.pids(&format!("{}/f.web", unit.control_group)), [shim.pid()]);
    assert!(!host.group(&above).exists(), "the group in the session is gone");
    assert_eq!(record(&host, "web")?.scope.context("no scope")?.unit, host.scope_name("web", 1));
    assert_eq!(migrate_children(&host.children), MigrationReport::default());
    Ok(())
}

#[test]
fn child_outside_the_unit_is_joined_by_what_an_earlier_start_left_in_the_unit() -> Result<()> {
    let mut host = Host::new()?;
    let session = format!("/user.slice/session-3.scope/{}/web", host.children.instance_name());
    let (web, left) =
        (OldProcess::start(&host, &session)?, OldProcess::start(&host, &host.old_group("web"))?);
    web.record(&host, "web")?;
    show_group(&mut host, &web, &session)?;
    assert_eq!(migrate_children(&host.children).moved, ["web"]);
    let main = format!("/shepherd.slice/{}/main", host.scope_name("web", 1));
    let mut found = host.systemd.pids(&main);
    found.sort_unstable();
    let mut expected = [web.pid(), left.pid()];
    expected.sort_unstable();
    assert_eq!(found, expected);
    assert!(!host.group(&host.old_group("web")).exists(), "the group in the unit is gone");
    assert_eq!(host.systemd.unit_names(), [host.scope_name("web", 1)]);
    Ok(())
}
