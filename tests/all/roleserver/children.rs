//! Programs that a role server runs beside itself: real processes in real control groups.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use shepherd::backoff::ExponentialBackoff;
use shepherd::roleserver::child::cgroup::{Cgroup, CgroupMounts};
use shepherd::roleserver::child::launch::{ChildRecord, LaunchOrder, SUBCOMMAND};
use shepherd::roleserver::child::lifecycle::{ChildContext, run_child};
use shepherd::roleserver::child::spec::{ChildSpec, ResourceLimits, User};
use shepherd::roleserver::process::ProcessInstance;
use shepherd::supervisor::context::{Runnable, Starting};
use shepherd::supervisor::supervise::{Supervisor, SupervisorSettings};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio_util::sync::CancellationToken;

use super::PATIENCE;
use crate::harness::aloud::TestResult;
use crate::harness::skip::report_skip;

const LAUNCHER: &str = env!("CARGO_BIN_EXE_roleserver");
const SOON: ExponentialBackoff =
    ExponentialBackoff { initial: Duration::from_millis(20), factor: 1.5, max: Duration::from_millis(200) };

/// A directory for programs. All processes that were started in it end with the test.
struct Host {
    directory: tempfile::TempDir,
    mounts: CgroupMounts,
}

impl Host {
    fn new() -> Result<Self> {
        Ok(Self { directory: tempfile::tempdir()?, mounts: CgroupMounts::detect_host() })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn places(&self) -> ChildContext {
        ChildContext {
            directory: self.path("children"),
            mounts: self.mounts.clone(),
            launcher: LAUNCHER.into(),
            shutdown: CancellationToken::new(),
            scopes: None,
        }
    }

    fn spec(&self, script: &str) -> ChildSpec {
        ChildSpec {
            name: "web".to_owned(),
            program: "/bin/sh".into(),
            arguments: vec!["-c".to_owned(), script.to_owned()],
            environment: [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into(),
            directory: self.directory.path().to_owned(),
            user: None,
            groups: Vec::new(),
            confinement: None,
            limits: ResourceLimits::default(),
            stale_files: Vec::new(),
            survivor_prefix: None,
            stop_time: Duration::from_secs(30),
            declared: None,
        }
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.places().log_path("web")).unwrap_or_default()
    }

    /// The control group of the program, in the first hierarchy that has it; `None` on a host without groups.
    fn group(&self) -> Option<PathBuf> {
        if self.mounts.is_none() {
            return None;
        }
        find(Path::new("/sys/fs/cgroup"), &self.places().instance_name()).map(|found| found.join("web"))
    }
}

/// A directory of this name somewhere below.
fn find(below: &Path, name: &str) -> Option<PathBuf> {
    for entry in fs::read_dir(below).ok()?.flatten().filter(|entry| entry.path().is_dir()) {
        let path = entry.path();
        if path.ends_with(name) {
            return Some(path);
        }
        if !entry.file_type().is_ok_and(|kind| kind.is_symlink())
            && let Some(found) = find(&path, name)
        {
            return Some(found);
        }
    }
    None
}

impl Drop for Host {
    fn drop(&mut self) {
        // The processes that a failed test left: by their record, and by their control group.
        if let Some(record) =
            shepherd::roleserver::child::launch::read_record(&self.places().record_path("web"))
        {
            let _ = record.instance.stop(Duration::ZERO);
        }
        if let Some(group) = self.group() {
            for pid in fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default().lines() {
                if let Some(pid) = pid.parse().ok().and_then(rustix::process::Pid::from_raw) {
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                }
            }
        }
    }
}

/// Reports that this test is skipped: the role server can make no control groups here.
fn report_missing_groups() {
    report_skip("control groups", "run the tests as root, on a host where root can change /sys/fs/cgroup");
}

/// A role server that runs one program.
struct ChildRunner {
    tree: Supervisor,
    leaving: CancellationToken,
    child_records: UnboundedReceiver<ChildRecord>,
}

impl ChildRunner {
    fn start(places: ChildContext, spec: ChildSpec) -> Self {
        let (sender, receiver) = unbounded_channel();
        let leaving = places.shutdown.clone();
        let places = Arc::new(places);
        let root = Runnable::new(move |starting: Starting| {
            let (sender, spec) = (sender.clone(), spec.clone());
            let decide_spec = move || std::future::ready(Ok(spec.clone()));
            let web = run_child(decide_spec, places.clone(), move |record| drop(sender.send(record.clone())));
            async move {
                starting.start("web", web)?;
                Err(starting.mark_healthy().scope().cancelled().await.into())
            }
        });
        Self {
            tree: Supervisor::start(root, SupervisorSettings { backoff: SOON, observer: None }),
            leaving,
            child_records: receiver,
        }
    }

    async fn next_instance(&mut self) -> Result<ProcessInstance> {
        let result = tokio::time::timeout(PATIENCE, self.child_records.recv()).await;
        let child_record = result.with_context(|| format!("nothing runs:\n{}", self.tree.report()))?;
        Ok(child_record.context("the keeper has ended")?.instance)
    }

    async fn failure(&self) -> Result<String> {
        let failed = |report: &shepherd::supervisor::report::TreeReport| {
            report.get("root.web").is_some_and(|entry| entry.last_failure.is_some())
        };
        let report = tokio::time::timeout(PATIENCE, self.tree.wait_until(failed)).await?;
        let failure = report.get("root.web").and_then(|entry| entry.last_failure.as_deref());
        Ok(failure.unwrap_or_default().to_owned())
    }

    /// Ends as a role server does that another one follows.
    async fn leave(self) {
        self.leaving.cancel();
        self.tree.stop().await;
    }
}

async fn wait_for(what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
    let waiting = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.with_context(|| format!("waiting for {what}"))
}

fn instance(pid: &str) -> Result<ProcessInstance> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim()))?;
    let start_time = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(19));
    let start_time = start_time.context("no start time")?.parse()?;
    Ok(ProcessInstance { pid: pid.trim().parse()?, start_time, ..ProcessInstance::current()? })
}

#[tokio::test]
async fn program_runs_apart_from_us_and_ends_when_it_is_not_wanted_any_more() -> TestResult {
    let host = Host::new()?;
    let mut spec = host.spec("echo \"$A in $(pwd)\"; exec sleep 600");
    spec.environment.insert("A".to_owned(), "says a".to_owned());
    let mut keeper = ChildRunner::start(host.places(), spec);
    let web = keeper.next_instance().await?;
    assert!(web.is_alive());
    let of = |file: &str| fs::read(format!("/proc/{}/{file}", web.pid)).unwrap_or_default();
    // It sleeps once its loader has closed the files that it read.
    let sleeps = || {
        String::from_utf8_lossy(&of("stat")).rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'))
    };
    wait_for("the program itself", || of("cmdline").starts_with(b"sleep") && sleeps()).await?;
    assert_eq!(host.log(), format!("says a in {}\n", host.directory.path().display()));
    let environment = String::from_utf8(of("environ"))?;
    let mut names: Vec<_> = environment.split('\0').filter_map(|line| line.split('=').next()).collect();
    names.retain(|name| !name.is_empty() && !["PWD", "OLDPWD", "_", "SHLVL"].contains(name));
    names.sort_unstable();
    assert_eq!(names, ["A", "PATH"], "nothing of ours");
    let stat = String::from_utf8(of("stat"))?;
    let session = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(3));
    assert_eq!(session, Some(web.pid.to_string().as_str()), "a session of its own");
    let mut open = Vec::new();
    for entry in fs::read_dir(format!("/proc/{}/fd", web.pid))?.flatten() {
        open.push((entry.file_name(), fs::read_link(entry.path()).unwrap_or_default()));
    }
    assert_eq!(open.len(), 3, "and nothing open but its input, output and errors: {open:?}");
    let group = host.group();
    assert_eq!(group.is_some(), !host.mounts.is_none());
    if let Some(group) = &group {
        assert_eq!(fs::read_to_string(group.join("cgroup.procs"))?, format!("{}\n", web.pid));
    }
    keeper.tree.stop().await;
    assert!(!web.is_alive());
    assert!(!Path::new(&format!("/proc/{}", web.pid)).exists(), "no zombie of it is left");
    assert!(!host.places().record_path("web").exists());
    assert_eq!(
        group.filter(|group| group.parent().is_some_and(Path::exists)),
        None,
        "the parent of its cgroup is removed as well"
    );
    Ok(())
}

#[tokio::test]
async fn program_that_ends_is_started_again_and_its_last_output_is_reported() -> TestResult {
    let host = Host::new()?;
    let mut keeper = ChildRunner::start(host.places(), host.spec("echo one; echo two >&2; exit 3"));
    let first = keeper.next_instance().await?;
    assert_eq!(keeper.failure().await?, "web: it ended by itself with status 3; it last wrote: one / two");
    assert_ne!(keeper.next_instance().await?, first);
    keeper.tree.stop().await;
    Ok(())
}

#[tokio::test]
async fn program_goes_on_while_one_role_server_follows_another() -> TestResult {
    let host = Host::new()?;
    let spec = host.spec("echo started; exec sleep 600");
    let mut keeper = ChildRunner::start(host.places(), spec.clone());
    let web = keeper.next_instance().await?;
    // The test stops it below. On a slow host that would happen before its first output.
    wait_for("its first words", || host.log() == "started\n").await?;
    keeper.leave().await;
    for _ in 0..3 {
        // Other resource limits do not make it another program.
        let spec = ChildSpec {
            limits: ResourceLimits { tasks: Some(50), ..ResourceLimits::default() },
            ..spec.clone()
        };
        let mut keeper = ChildRunner::start(host.places(), spec);
        assert_eq!(keeper.next_instance().await?, web);
        keeper.leave().await;
    }
    assert!(web.is_alive());
    let other = host.spec("echo started again; exec sleep 600");
    let mut keeper = ChildRunner::start(host.places(), other);
    let again = keeper.next_instance().await?;
    assert_ne!(again, web);
    assert!(!web.is_alive(), "two of one name never run at once");
    wait_for("its words", || host.log() == "started\nstarted again\n").await?;
    keeper.tree.stop().await;
    Ok(())
}

/// A killed role server is no longer the parent of its processes: they belong to another process.
#[tokio::test]
async fn program_of_a_role_server_that_was_killed_is_adopted_and_watched() -> TestResult {
    let host = Host::new()?;
    let (spec, places) = (host.spec("exec sleep 600"), host.places());
    fs::create_dir_all(places.directory.join("web"))?;
    // Started by a process that then ends and is no ancestor of this one.
    let mut first = ChildRunner::start(places.clone(), spec.clone());
    let child = first.next_instance().await?;
    let order = LaunchOrder {
        spec: spec.clone(),
        group: Cgroup::default(),
        waits: false,
        record: Some(places.record_path("web")),
        log: places.log_path("web"),
    };
    first.tree.stop().await;
    assert!(!child.is_alive());
    fs::write(host.path("order.json"), serde_json::to_vec(&order)?)?;
    let script = format!("{LAUNCHER} {SUBCOMMAND} <order.json >refusal & wait");
    let mut parent = Command::new("sh")
        .args(["-c", &script])
        .current_dir(host.directory.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let running = || {
        shepherd::roleserver::child::launch::read_record(&places.record_path("web"))
            .is_some_and(|r| r.instance.is_alive())
    };
    wait_for("the program of another parent", running).await?;
    parent.kill()?;
    parent.wait()?;
    assert_eq!(host.text("refusal"), "");

    let mut keeper = ChildRunner::start(places, spec);
    let adopted = keeper.next_instance().await?;
    let fields = fs::read_to_string(format!("/proc/{}/stat", adopted.pid))?;
    let parent_pid = fields.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1));
    assert_ne!(parent_pid, Some(std::process::id().to_string().as_str()), "it is no child of ours");
    assert!(adopted.send_signal(rustix::process::Signal::TERM)?);
    let why = keeper.failure().await?;
    assert!(
        why.starts_with(
            "web: it ended; its exit status is unknown, because it was not a child of this role server"
        ),
        "{why}"
    );
    let next = keeper.next_instance().await?;
    assert!(next != adopted && next.is_alive() && !adopted.is_alive());
    keeper.tree.stop().await;
    Ok(())
}

#[tokio::test]
async fn whatever_is_left_of_a_program_is_ended_before_it_starts_again() -> TestResult {
    let host = Host::new()?;
    if host.mounts.is_none() {
        // Without groups nothing shows which processes belong together; the documentation states that.
        report_missing_groups();
        return Ok(());
    }
    // Its main process ends and leaves one behind that has created a session of its own.
    let script = "setsid sleep 600 & echo $! >>left; exit 1";
    let mut keeper = ChildRunner::start(host.places(), host.spec(script));
    keeper.next_instance().await?;
    wait_for("two that were left", || host.text("left").lines().count() >= 2).await?;
    let left = host.text("left");
    let first = left.lines().next().context("one")?;
    wait_for("the end of the first", || {
        instance(first).is_ok_and(|one| !one.is_alive()) || instance(first).is_err()
    })
    .await?;
    keeper.tree.stop().await;

    // A process without a record, because the record was lost.
    let host = Host::new()?;
    let spec = host.spec("exec sleep 600");
    let mut keeper = ChildRunner::start(host.places(), spec.clone());
    let unrecorded = keeper.next_instance().await?;
    keeper.leave().await;
    for damage in [None, Some("{")] {
        match damage {
            None => fs::remove_file(host.places().record_path("web"))?,
            Some(text) => fs::write(host.places().record_path("web"), text)?,
        }
        let mut keeper = ChildRunner::start(host.places(), spec.clone());
        let found = keeper.next_instance().await?;
        assert_ne!(found, unrecorded);
        assert!(found.is_alive() && !unrecorded.is_alive(), "{damage:?}");
        keeper.leave().await;
    }
    ChildRunner::start(host.places(), spec).tree.stop().await;
    Ok(())
}

#[tokio::test]
async fn program_that_does_not_listen_is_killed_with_all_that_it_started() -> TestResult {
    let host = Host::new()?;
    let script = "trap '' TERM; sleep 600 & echo $! >child; wait; while :; do sleep 600; done";
    let spec = ChildSpec { stop_time: Duration::from_millis(300), ..host.spec(script) };
    let mut keeper = ChildRunner::start(host.places(), spec);
    let web = keeper.next_instance().await?;
    wait_for("its child", || host.text("child").ends_with('\n')).await?;
    let child = instance(&host.text("child"))?;
    keeper.tree.stop().await;
    assert!(!web.is_alive());
    if host.mounts.is_none() {
        child.stop(Duration::ZERO)?;
    }
    assert!(!child.is_alive());
    Ok(())
}

#[tokio::test]
async fn program_that_cannot_be_run_is_reported_and_nothing_of_it_runs() -> TestResult {
    let host = Host::new()?;
    fs::write(host.path("no-program"), "text")?;
    fs::set_permissions(host.path("no-program"), fs::Permissions::from_mode(0o644))?;
    let here = host.directory.path().to_owned();
    for (program, directory, part) in [
        ("/nowhere/web".into(), here.clone(), "/nowhere/web cannot be run in"),
        (host.path("no-program"), here, "Permission denied"),
        ("/bin/sh".into(), "/nowhere".into(), "/bin/sh cannot be run in /nowhere: No such file"),
    ] {
        let spec = ChildSpec { program, directory, ..host.spec("exec sleep 600") };
        let keeper = ChildRunner::start(host.places(), spec);
        let why = keeper.failure().await?;
        assert!(why.starts_with("starting web failed: ") && why.contains(part), "{why}");
        keeper.tree.stop().await;
        if let Some(group) = host.group() {
            assert_eq!(fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default(), "");
        }
    }
    Ok(())
}

#[tokio::test]
async fn program_has_the_user_and_the_limits_that_it_is_given() -> TestResult {
    let host = Host::new()?;
    if host.mounts.is_none() {
        report_missing_groups();
        return Ok(());
    }
    fs::set_permissions(host.directory.path(), fs::Permissions::from_mode(0o755))?;
    let mut spec = host.spec("echo \"$(id -u) $(id -g)\"; (sleep 0.01); echo forked; exec sleep 600");
    spec.user = Some(User { uid: 65_533, gid: 65_534 });
    let mut keeper = ChildRunner::start(host.places(), spec.clone());
    let web = keeper.next_instance().await?;
    wait_for("its words", || host.log().ends_with("forked\n")).await?;
    assert_eq!(host.log(), "65533 65534\nforked\n");
    let groups = fs::read_to_string(format!("/proc/{}/status", web.pid))?;
    let groups = groups.lines().find_map(|line| line.strip_prefix("Groups:")).map(str::trim);
    assert_eq!(groups, Some(""), "none of the groups of the role server");
    keeper.tree.stop().await;

    spec.limits.tasks = Some(1);
    let keeper = ChildRunner::start(host.places(), spec);
    let why = keeper.failure().await?;
    assert!(why.contains("ork"), "it cannot fork: {why}");
    keeper.tree.stop().await;
    Ok(())
}
