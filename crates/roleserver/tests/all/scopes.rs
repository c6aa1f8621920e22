//! Children in scopes of systemd: where they start, what they wait for, what happens when systemd does not help.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::process::Signal;
use shepherd_roleserver::child::launch::ChildRecord;
use shepherd_roleserver::child::lifecycle::adopt_or_start;
use shepherd_roleserver::child::migration::{MigrationReport, migrate_children};
use shepherd_roleserver::child::spec::{ChildSpec, ResourceLimits};
use shepherd_roleserver::systemd_manager::value::Value;

use crate::fake_systemd::{Conduct, PROCESSES};
use crate::host::{Host, wait_for};

fn pid_of(record: &ChildRecord) -> Result<u32> {
    Ok(record.instance.pid.try_into()?)
}

/// The process ends, and the tree of groups knows it.
fn end_process(host: &Host, record: &ChildRecord) -> Result<()> {
    record.instance.stop(Duration::ZERO)?;
    record.instance.reap()?;
    host.systemd.forget_process(pid_of(record)?)
}

#[test]
fn child_runs_in_a_scope_of_its_own() -> Result<()> {
    let host = Host::new()?;
    let limits = ResourceLimits { memory_bytes: Some(1 << 20), cpu_millis: Some(500), tasks: None };
    let (record, _handle) =
        adopt_or_start(&ChildSpec { limits, ..host.spec("echo runs; exec sleep 600") }, &host.children)?;
    wait_for("its first words", || host.log() == "runs\n")?;
    let name = host.scope_name("web", 1);
    assert_eq!(host.systemd.unit_names(), std::slice::from_ref(&name), "exactly one scope");
    let unit = host.systemd.unit(&name).context("no scope")?;
    let pid = pid_of(&record)?;
    let property = |name: &str| unit.properties.get(name).cloned();
    for (name, expected) in [
        ("Slice", Value::text("shepherd.slice")),
        ("PIDs", Value::numbers(&[pid])),
        ("Delegate", Value::Bool(true)),
        ("CollectMode", Value::text("inactive-or-failed")),
        ("TasksMax", Value::U64(u64::MAX)),
        ("MemoryMax", Value::U64(1 << 20)),
        ("CPUQuotaPerSecUSec", Value::U64(500_000)),
    ] {
        assert_eq!(property(name), Some(expected), "{name}");
    }
    let scope = record.scope.clone().context("the record has no scope")?;
    assert_eq!((scope.unit, &scope.control_group), (name, &unit.control_group));
    assert_eq!(host.systemd.pids(&scope.control_group), [pid]);
    assert!(
        host.group(&scope.control_group).join("main").join(PROCESSES).exists(),
        "it joined the group below"
    );
    assert!(!host.group(&host.old_group("web")).exists(), "nothing of it is in the unit");
    assert_eq!(host.record()?, record);
    Ok(())
}

/// systemd only queues a job. A program that ran before the end of the job would start its first processes in the unit.
#[test]
fn child_waits_for_its_scope_before_it_runs() -> Result<()> {
    let host = Host::new()?;
    host.systemd.set_conduct(Conduct::Slow);
    let (children, spec) = (host.children.clone(), host.spec("echo runs; exec sleep 600"));
    let starting = std::thread::spawn(move || adopt_or_start(&spec, &children).map(|(record, _)| record));
    host.systemd.wait_for_call("StartTransientUnit")?;
    // Nothing shows that a program will never run; one that does not wait runs long before this.
    std::thread::sleep(Duration::from_millis(700));
    assert_eq!(host.log(), "", "the program runs although its scope does not exist yet");
    assert!(host.record().is_err());
    host.systemd.set_conduct(Conduct::Well);
    let record = starting.join().map_err(|_| anyhow::anyhow!("it panicked"))??;
    wait_for("its first words", || host.log() == "runs\n")?;
    assert!(record.scope.is_some());
    Ok(())
}

#[test]
fn existing_name_and_dead_scope_are_skipped() -> Result<()> {
    let host = Host::new()?;
    host.systemd.add_unit(&host.scope_name("web", 1), "/elsewhere");
    host.systemd.set_conduct(Conduct::DeadScope);
    let (record, _handle) = adopt_or_start(&host.spec("exec sleep 600"), &host.children)?;
    let scope = record.scope.clone().context("no scope")?;
    assert_eq!(scope.unit, host.scope_name("web", 3), "the first exists, the second is dead");
    assert_eq!(host.systemd.pids(&scope.control_group), [pid_of(&record)?]);
    Ok(())
}

#[test]
fn each_start_has_the_next_number_and_adoption_starts_nothing() -> Result<()> {
    let host = Host::new()?;
    let spec = host.spec("exec sleep 600");
    let (first, _handle) = adopt_or_start(&spec, &host.children)?;
    let limits = ResourceLimits { tasks: Some(50), ..ResourceLimits::default() };
    let (adopted, _handle) = adopt_or_start(&ChildSpec { limits, ..spec.clone() }, &host.children)?;
    assert_eq!(adopted, first, "other limits do not make it another program");
    let name = host.scope_name("web", 1);
    let unit = host.systemd.unit(&name).context("no scope")?;
    assert_eq!(unit.properties.get("TasksMax"), Some(&Value::U64(50)));
    assert_eq!(unit.properties.get("MemoryMax"), Some(&Value::U64(u64::MAX)));
    // systemd removes a scope without processes.
    end_process(&host, &first)?;
    host.systemd.remove_unit(&name);
    let (second, _handle) = adopt_or_start(&spec, &host.children)?;
    assert_ne!(second.instance, first.instance);
    assert_eq!(second.scope.map(|scope| scope.unit), Some(host.scope_name("web", 2)));
    Ok(())
}

/// A process of a program with this name, as containerd starts a shim. It ends with the test.
struct Survivor(Child);

impl Survivor {
    fn start(host: &Host, name: &str, group: &str) -> Result<Self> {
        let program = host.path(name);
        // Another process copies it: a program that this one has open for writing could not be executed.
        let copied = Command::new("/bin/cp").arg("/bin/sh").arg(&program).status()?;
        anyhow::ensure!(copied.success(), "copying a program: {copied}");
        let child = Command::new(&program).args(["-c", "read line"]).stdin(Stdio::piped()).spawn()?;
        host.systemd.move_process(group, child.id())?;
        Ok(Self(child))
    }
}

impl Drop for Survivor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// As containerd, while pods run.
#[test]
fn restarted_child_gets_a_new_scope_and_its_survivors_stay_in_the_old_one() -> Result<()> {
    let host = Host::new()?;
    let spec = ChildSpec { survivor_prefix: Some("test-shim".to_owned()), ..host.spec("exec sleep 600") };
    let (first, _handle) = adopt_or_start(&spec, &host.children)?;
    let scope = first.scope.clone().context("no scope")?;
    let main = format!("{}/main", scope.control_group);
    let mut shim = Survivor::start(&host, "test-shim-v2", &main)?;
    for number in 2..4 {
        let running = host.record()?;
        end_process(&host, &running)?;
        let (restarted, _handle) = adopt_or_start(&spec, &host.children)?;
        assert_ne!(restarted.instance, running.instance);
        let new = restarted.scope.clone().context("no new scope")?;
        assert_eq!(new.unit, host.scope_name("web", number));
        assert_eq!(host.systemd.pids(&new.control_group), [pid_of(&restarted)?]);
        assert_eq!(shim.0.try_wait()?, None, "its survivor was killed");
        assert!(host.systemd.pids(&main).contains(&shim.0.id()), "its survivor left its scope");
    }
    assert!(host.systemd.unit(&scope.unit).is_some());
    // Its role ends: all its processes are found, in each scope.
    let found = host.children.find_group("web").pids()?;
    assert!(found.contains(&i32::try_from(shim.0.id())?), "{found:?}");
    Ok(())
}

#[test]
fn child_starts_without_systemd_and_moves_when_systemd_answers() -> Result<()> {
    for conduct in [Conduct::Silent, Conduct::FailedJob, Conduct::Garbage, Conduct::Suspicious] {
        let deadline =
            if conduct == Conduct::Silent { Duration::from_millis(200) } else { Duration::from_mins(1) };
        let host = Host::new()?.with_deadline(deadline);
        host.systemd.set_conduct(conduct);
        let (record, _handle) = adopt_or_start(&host.spec("echo runs; exec sleep 600"), &host.children)?;
        wait_for("its first words", || host.log() == "runs\n")?;
        assert_eq!(record.scope, None, "{conduct:?}");
        let pid = pid_of(&record)?;
        host.systemd.move_process(&host.old_group("web"), pid)?;
        let report = migrate_children(&host.children);
        let why = report.left.get("web").with_context(|| format!("{conduct:?}: it is protected"))?;
        let expected = match conduct {
            Conduct::Silent => "systemd did not answer within 0.2 s",
            Conduct::FailedJob => "ended with the result \"failed\"",
            Conduct::Garbage => "the answer of systemd is malformed",
            _ => "systemd refused: REJECTED EXTERNAL",
        };
        assert!(why.contains(expected), "{conduct:?}: {why}");
        host.systemd.set_conduct(Conduct::Well);
        let host = host.with_deadline(Duration::from_mins(1));
        let report = migrate_children(&host.children);
        assert_eq!(report, MigrationReport { moved: vec!["web".to_owned()], ..MigrationReport::default() });
        let moved = host.record()?;
        assert_eq!(moved.instance, record.instance, "its pid is the same");
        let scope = moved.scope.context("no scope")?;
        assert_eq!(host.systemd.pids(&scope.control_group), [pid]);
        assert!(moved.instance.is_alive());
    }
    Ok(())
}

/// systemd's default: the group of a unit has the controllers memory and pids, and no cpu.
#[test]
fn limit_without_a_controller_is_reported_and_holds_with_the_scope() -> Result<()> {
    let host = Host::new()?.with_deadline(Duration::from_millis(200));
    let old = host.group(&host.old_group("web"));
    std::fs::create_dir_all(&old)?;
    std::fs::write(old.join("cgroup.controllers"), "memory pids\n")?;
    host.systemd.set_conduct(Conduct::Silent);
    let limits = ResourceLimits { memory_bytes: Some(1 << 20), cpu_millis: Some(500), tasks: None };
    let spec = ChildSpec { limits, ..host.spec("echo runs; exec sleep 600") };
    let (record, _handle) = adopt_or_start(&spec, &host.children)?;
    wait_for("its first words", || host.log() == "runs\n")?;
    assert_eq!(std::fs::read_to_string(old.join("memory.max"))?, "1048576", "this one can hold");
    assert!(!old.join("cpu.max").exists(), "the kernel refuses to write a limit that does not exist");
    let missed = ResourceLimits { cpu_millis: Some(500), ..ResourceLimits::default() };
    assert_eq!(record.scope, None);
    assert_eq!(record.missed_limits, Some(missed), "a limit that does not hold is forgotten");
    host.systemd.move_process(&host.old_group("web"), pid_of(&record)?)?;

    // The next role server adopts it, and knows the limit by its record.
    let (adopted, _handle) = adopt_or_start(&spec, &host.children)?;
    assert_eq!((&adopted.instance, adopted.missed_limits), (&record.instance, Some(missed)));
    let report = migrate_children(&host.children);
    assert_eq!(report.missed_limits, [("web".to_owned(), missed)].into(), "{report:?}");

    host.systemd.set_conduct(Conduct::Well);
    let host = host.with_deadline(Duration::from_mins(1));
    let report = migrate_children(&host.children);
    assert_eq!(report, MigrationReport { moved: vec!["web".to_owned()], ..MigrationReport::default() });
    let unit = host.systemd.unit(&host.scope_name("web", 1)).context("no scope")?;
    assert_eq!(unit.properties.get("CPUQuotaPerSecUSec"), Some(&Value::U64(500_000)));
    assert_eq!(unit.properties.get("MemoryMax"), Some(&Value::U64(1 << 20)));
    assert_eq!(host.record()?.missed_limits, None);
    Ok(())
}

/// The manager of a user to which `cpu` is not delegated takes such a limit without an error.
#[test]
fn limit_that_its_scope_does_not_have_is_reported_until_it_holds() -> Result<()> {
    let host = Host::new()?;
    host.systemd.set_controllers(&["memory", "pids"]);
    let limits = ResourceLimits { memory_bytes: Some(1 << 20), cpu_millis: Some(500), tasks: None };
    let spec = ChildSpec { limits, ..host.spec("exec sleep 600") };
    let missed_cpu = |millis| ResourceLimits { cpu_millis: Some(millis), ..ResourceLimits::default() };
    let reported = |limits| MigrationReport {
        missed_in_scopes: [("web".to_owned(), limits)].into(),
        ..MigrationReport::default()
    };
    let (record, _handle) = adopt_or_start(&spec, &host.children)?;
    assert!(record.scope.is_some());
    assert_eq!(record.missed_limits, Some(missed_cpu(500)), "it counts as held");
    assert_eq!(host.children.restore_limits("web", &limits)?, None, "it was never there, so it is not lost");
    assert_eq!(migrate_children(&host.children), reported(missed_cpu(500)));

    // The next role server adopts it with another limit.
    let other = ChildSpec { limits: ResourceLimits { cpu_millis: Some(700), ..limits }, ..spec };
    let (adopted, _handle) = adopt_or_start(&other, &host.children)?;
    assert_eq!(adopted.instance, record.instance);
    assert_eq!(adopted.missed_limits, Some(missed_cpu(700)));
    assert_eq!(migrate_children(&host.children), reported(missed_cpu(700)));

    // systemd sets it once it has the controller.
    let scope = record.scope.context("no scope")?;
    std::fs::write(host.group(&scope.control_group).join("cpu.max"), "70000 100000\n")?;
    assert_eq!(migrate_children(&host.children), MigrationReport::default());
    assert_eq!(host.record()?.missed_limits, None);
    Ok(())
}

#[test]
fn child_of_a_role_server_that_ends_before_it_is_placed_does_not_run() -> Result<()> {
    use std::io::Write as _;
    let host = Host::new()?;
    let order = shepherd_roleserver::child::launch::LaunchOrder {
        spec: host.spec("echo runs"),
        group: shepherd_roleserver::child::cgroup::Cgroup::default(),
        waits: true,
        record: Some(host.path("record.json")),
        log: host.path("output.log"),
    };
    let mut launcher =
        Command::new(&host.children.launcher).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut input = launcher.stdin.take().context("no input")?;
    writeln!(input, "{}", serde_json::to_string(&order)?)?;
    drop(input);
    let output = launcher.wait_with_output()?;
    let why = String::from_utf8(output.stdout)?;
    assert!(why.starts_with("the role server ended before it placed the program"), "{why}");
    assert!(!host.path("record.json").exists());
    assert_eq!(std::fs::read_to_string(host.path("output.log")).unwrap_or_default(), "");
    Ok(())
}

/// The operator changes something, in the layout of scopes as before: the running program ends first.
#[test]
fn changed_declaration_restarts_a_child_and_another_release_does_not() -> Result<()> {
    let host = Host::new()?;
    let declared =
        |script: &str, declared: &str| ChildSpec { declared: Some(declared.to_owned()), ..host.spec(script) };
    let (first, _handle) = adopt_or_start(&declared("exec sleep 600", "a"), &host.children)?;
    let (adopted, _handle) = adopt_or_start(&declared("exec sleep 601", "a"), &host.children)?;
    assert_eq!(adopted.instance, first.instance, "another release would start it with other flags");
    assert_eq!(adopted.spec_sha256, first.spec_sha256, "it runs as it was started");
    // The tree does not notice by itself that a process ends.
    let (instance, systemd, pid) = (first.instance.clone(), host.systemd.clone(), pid_of(&first)?);
    let noticing = std::thread::spawn(move || -> Result<()> {
        wait_for("the end of the first", || !instance.is_alive())?;
        systemd.forget_process(pid)
    });
    let (second, _handle) = adopt_or_start(&declared("exec sleep 601", "b"), &host.children)?;
    noticing.join().map_err(|_| anyhow::anyhow!("it panicked"))??;
    assert_ne!(second.instance, first.instance);
    assert!(!first.instance.is_alive(), "two of one name never run at once");
    assert!(second.instance.send_signal(Signal::TERM)?);
    Ok(())
}
