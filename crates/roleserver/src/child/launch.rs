//! Launch a child: wait for its place, join its control group, record the process, execute the program.
//!
//! `roleserver launch` is only ever started by a role server. It reads a [`LaunchOrder`] from its standard input,
//! leaves the session of the process that started it, joins the control group, records its own process (unless it is a
//! health probe), and executes the program. A child that gets a scope waits for a second line first, its
//! [`Placement`]: systemd moves the waiting process, so the program never runs in the group of the role server's unit,
//! and starts nothing there. If the role server ends meanwhile, the launcher ends too.
//! A process keeps its pid and its start time over `execve`, so the record
//! stays true. If it fails, it writes the reason to its standard output. If the program runs, that output is closed
//! with nothing written to it.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use hardening::file_limit::UsualFileLimit as _;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::atomic_file::{self, Durability};
use crate::child::cgroup::Cgroup;
use crate::child::confinement;
use crate::child::log;
use crate::child::scope::ScopeRecord;
use crate::child::spec::{ChildSpec, ResourceLimits, User};
use crate::process::ProcessInstance;
use crate::process::empty_stdin;

/// The subcommand of this program.
pub const SUBCOMMAND: &str = "launch";
/// An order is some kilobytes; longer input is not an order.
const MAX_ORDER_BYTES: u64 = 4 << 20;

/// What to start, and where to record it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchOrder {
    /// The program and all that it is started with.
    pub spec: ChildSpec,
    /// The control group to join before the start; without meaning if it waits for its placement.
    pub group: Cgroup,
    /// Whether it waits for a [`Placement`] before the start.
    #[serde(default)]
    pub waits: bool,
    /// The path of its [`ChildRecord`]; `None` for a program that ends by itself soon, such as a health probe.
    pub record: Option<PathBuf>,
    /// The file for its output.
    pub log: PathBuf,
}

/// Where a child that waits belongs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The control group to join.
    pub group: Cgroup,
    /// The scope with this group, which has the process already; `None` in today's layout.
    pub scope: Option<ScopeRecord>,
    /// As in its [`ChildRecord`].
    #[serde(default)]
    pub missed_limits: Option<ResourceLimits>,
}

/// The record of a running child.
///
/// An earlier release reads it too, when a release is rolled back: it finds the process, and ignores later fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChildRecord {
    /// The process, by pid and start time.
    pub instance: ProcessInstance,
    /// The digest of the specification it was started with: [`ChildSpec::digest`].
    pub spec_sha256: String,
    /// What it was declared as: [`ChildSpec::declared`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub declared_sha256: Option<String>,
    /// Its scope; `None` if it is below the group of the role server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<ScopeRecord>,
    /// Limits that its group cannot hold. Its scope is made with them. If it has a scope, these do not hold there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missed_limits: Option<ResourceLimits>,
    /// The group that it is moved out of, until each step of the move into its scope has succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unfinished_move: Option<Cgroup>,
    /// The groups inside that group, by which the move is completed after an interruption.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unfinished_groups: Vec<InnerGroup>,
}

/// A group inside the group of a child that is moved into a scope.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InnerGroup {
    /// The controller of the hierarchy in version 1; empty for version 2.
    pub hierarchy: String,
    /// Its path below the group of the child; empty for that group itself.
    pub path: PathBuf,
    /// Its processes before the move.
    pub pids: BTreeSet<i32>,
}

impl ChildRecord {
    /// Whether the running child is what this specification declares, and is adopted as it runs.
    ///
    /// What a release changes in a specification counts from the next start of the child. What an operator changes
    /// requires a restart.
    #[must_use]
    pub fn satisfies(&self, spec: &ChildSpec) -> bool {
        let same_declaration = spec.declared.is_some() && self.declared_sha256 == spec.declared;
        same_declaration || self.spec_sha256 == spec.digest()
    }

    /// Replaces the record at this path.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        atomic_file::replace_hint(path, &serde_json::to_vec(self)?, Durability::UntilPowerLoss)
    }
}

/// Why a program was not started.
#[derive(Debug, thiserror::Error)]
#[error("starting {name} failed: {why}")]
pub struct LaunchError {
    /// The name of the child.
    pub name: String,
    why: String,
}

/// Starts a new process of `program`, which is this one, to carry out `order`. Blocks until that process has become the
/// child's program. The returned pidfd can be waited for also if the child has ended already.
pub fn launch_child(program: &Path, order: &LaunchOrder) -> Result<OwnedFd, LaunchError> {
    launch_process(program, order).map(|(handle, _)| handle)
}

/// As [`launch_child`], with the pid, which is the child's own until it has been waited for. It leads a process group.
pub fn launch_process(program: &Path, order: &LaunchOrder) -> Result<(OwnedFd, Pid), LaunchError> {
    launch(program, order, None::<fn(u32) -> Result<Placement, String>>)
}

/// As [`launch_child`], for an order that waits: `place` gets the pid of the waiting process and returns where it
/// belongs.
pub fn launch_placed_child(
    program: &Path,
    order: &LaunchOrder,
    place: impl FnOnce(u32) -> Result<Placement, String>,
) -> Result<OwnedFd, LaunchError> {
    launch(program, order, Some(place)).map(|(handle, _)| handle)
}

fn launch(
    program: &Path,
    order: &LaunchOrder,
    place: Option<impl FnOnce(u32) -> Result<Placement, String>>,
) -> Result<(OwnedFd, Pid), LaunchError> {
    let failed = |why: String| LaunchError { name: order.spec.name.clone(), why };
    let begin = || -> std::io::Result<(OwnedFd, Pid, String)> {
        let mut command = Command::new(program);
        command
            .arg(SUBCOMMAND)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log::open_log(&order.log)?);
        let mut child = hardening::restore_core_limit(command.usual_file_limit()).spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        if let Some(mut input) = input {
            // If the process has ended already, its output has the reason.
            let _ = writeln!(input, "{}", serde_json::to_string(order)?);
            if let Some(place) = place {
                match place(child.id()) {
                    Ok(placement) => {
                        let _ = writeln!(input, "{}", serde_json::to_string(&placement)?);
                    }
                    // It ends when its input does, and must not be left as a zombie.
                    Err(why) => {
                        drop(input);
                        child.wait()?;
                        return Err(std::io::Error::other(why));
                    }
                }
            }
        }
        let mut text = String::new();
        if let Some(output) = output {
            output.take(MAX_ORDER_BYTES).read_to_string(&mut text)?;
        }
        // The child was not waited for yet, so the pid is still its own.
        let pid = Pid::from_child(&child);
        let handle = pidfd_open(pid, PidfdFlags::empty())?;
        if !text.is_empty() {
            child.wait()?;
        }
        Ok((handle, pid, text))
    };
    let (handle, pid, text) = begin().map_err(|error| failed(error.to_string()))?;
    if !text.is_empty() {
        return Err(failed(text));
    }
    tracing::info!(name = order.spec.name, program = %order.spec.program.display(), "a program was started");
    Ok((handle, pid))
}

/// Carries out `roleserver launch`. Returns only on a failure.
#[must_use]
pub fn execute() -> String {
    let mut input = BufReader::new(std::io::stdin());
    let order: LaunchOrder = match read_line(&mut input) {
        Ok(order) => order,
        Err(why) => return print_error(&format!("the order cannot be read: {why}")),
    };
    // Kept open until the other program runs, on a number that the program does not inherit.
    let output = match rustix::io::fcntl_dupfd_cloexec(std::io::stdout(), 3) {
        Ok(output) => output,
        Err(error) => return print_error(&error.to_string()),
    };
    let why = exec_program(&order, &mut input).to_string();
    let _ = File::from(output).write_all(why.as_bytes());
    why
}

fn print_error(why: &str) -> String {
    let _ = std::io::stdout().write_all(why.as_bytes());
    why.to_owned()
}

/// Reads one line; a JSON text of this program has no line end inside.
fn read_line<T: serde::de::DeserializeOwned>(input: &mut impl BufRead) -> std::io::Result<T> {
    let mut bytes = Vec::new();
    input.take(MAX_ORDER_BYTES).read_until(b'\n', &mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}

/// Waits for the place of this process, and checks that it is there.
fn wait_for_placement(order: &LaunchOrder, input: &mut impl BufRead) -> std::io::Result<Placement> {
    if !order.waits {
        return Ok(Placement { group: order.group.clone(), scope: None, missed_limits: None });
    }
    let placement: Placement = read_line(input).map_err(|error| {
        let why = format!("the role server ended before it placed the program: {error}");
        std::io::Error::new(error.kind(), why)
    })?;
    if let Some(scope) = &placement.scope
        && placement.group.clone().with_process(std::process::id()).is_empty()
    {
        return Err(std::io::Error::other(format!("its process is not in its scope {}", scope.unit)));
    }
    Ok(placement)
}

fn exec_program(order: &LaunchOrder, input: &mut impl BufRead) -> std::io::Error {
    let spec = &order.spec;
    let mut prepare = || -> std::io::Result<Command> {
        // In a session of its own, so that neither the end of a terminal nor a signal to a process group reaches the
        // child. The call fails if this process leads a session already, which is as good.
        let _ = rustix::process::setsid();
        mark_inherited_cloexec();
        let placement = wait_for_placement(order, input)?;
        placement.group.join().map_err(std::io::Error::other)?;
        if let Some(path) = &order.record {
            let record = ChildRecord {
                instance: ProcessInstance::current()?,
                spec_sha256: spec.digest(),
                declared_sha256: spec.declared.clone(),
                scope: placement.scope,
                missed_limits: placement.missed_limits,
                unfinished_move: None,
                unfinished_groups: Vec::new(),
            };
            record.write(path)?;
        }
        let log = log::open_log(&order.log)?;
        let mut command = Command::new(&spec.program);
        command
            .args(&spec.arguments)
            .env_clear()
            .envs(&spec.environment)
            .stdin(empty_stdin()?)
            .stdout(log.try_clone()?)
            .stderr(log)
            .usual_file_limit();
        Ok(command)
    };
    let (program, directory) = (spec.program.display(), spec.directory.display());
    let refused = |error: std::io::Error| {
        std::io::Error::new(error.kind(), format!("{program} cannot be run in {directory}: {error}"))
    };
    match prepare() {
        // Before the user is switched: the path to the directory may be closed to the new user.
        Ok(mut command) => match std::env::set_current_dir(&spec.directory) {
            Ok(()) => match enter_user(spec) {
                Ok(()) => refused(command.exec()),
                Err(error) => error,
            },
            Err(error) => refused(error),
        },
        Err(error) => error,
    }
}

/// Becomes the user of the child, confined as its specification states, with the core limit of the role server's start.
fn enter_user(spec: &ChildSpec) -> std::io::Result<()> {
    hardening::restore_own_core_limit()?;
    let switch = || spec.user.map_or(Ok(()), |user| switch_user(user, &spec.groups));
    let Some(wanted) = &spec.confinement else { return switch() };
    let uid = spec.user.map_or_else(|| rustix::process::geteuid().as_raw(), |user| user.uid);
    let own = confinement::own_capabilities()?;
    let plan = confinement::plan_confinement(wanted, uid, own).map_err(std::io::Error::other)?;
    let failed = |error: std::io::Error| {
        std::io::Error::new(error.kind(), format!("confining {} failed: {error}", spec.program.display()))
    };
    confinement::begin(&plan).map_err(failed)?;
    switch()?;
    confinement::finish(&plan).map_err(failed)
}

/// Drops the role server's privileges. This process has one thread, so this covers the whole process.
fn switch_user(user: User, groups: &[u32]) -> std::io::Result<()> {
    use rustix::process::{Gid, Uid, getegid, geteuid};
    use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_uid};
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    // Without root no other user is possible. If the user is the current one, there is nothing to change.
    if !geteuid().is_root() && (geteuid(), getegid()) == (uid, gid) {
        return Ok(());
    }
    let groups: Vec<Gid> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
    let done =
        set_thread_groups(&groups).and_then(|()| set_thread_gid(gid)).and_then(|()| set_thread_uid(uid));
    done.map_err(|error| {
        let why = format!("becoming user {} of group {} failed: {error}", user.uid, user.gid);
        std::io::Error::new(std::io::Error::from(error).kind(), why)
    })
}

/// Marks all open descriptors except the three standard ones to be closed by `execve`. Otherwise descriptors that the
/// role server inherited, and locks on them, would stay open for as long as the child runs.
fn mark_inherited_cloexec() {
    // SAFETY: it closes nothing now; it marks descriptors to be closed by `execve`, as all that we open are already.
    let done =
        unsafe { libc::syscall(libc::SYS_close_range, 3_u32, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if done != 0 {
        // The kernel is older than Linux 5.11.
        tracing::debug!("inherited descriptors stay open in the started program");
    }
}

/// The record at this path, if a readable one exists. An unreadable record is ignored: what runs is then found in its
/// control group, and adopted only if it is in a scope and it is certain which process is the child.
#[must_use]
pub fn read_record(path: &Path) -> Option<ChildRecord> {
    let bytes = std::fs::read(path).ok()?;
    serde_json::from_slice(&bytes)
        .inspect_err(
            |error| tracing::warn!(%error, path = %path.display(), "a damaged process record is ignored"),
        )
        .ok()
}

/// Sends SIGTERM to a recorded process, then kills everything in its group except for programs with the spared prefix
/// ([`ChildSpec::survivor_prefix`]). Without a record nobody knows which process is the child itself, so all others in
/// the group get SIGTERM and have `patience` to end. No zombie stays, not even of a child of this
/// process that no task waits for. Blocks.
pub fn stop_process_group(
    record: Option<&ChildRecord>,
    group: &Cgroup,
    patience: Duration,
    spared: Option<&str>,
) -> std::io::Result<()> {
    use rustix::process::Signal;
    if record.is_none() {
        group.request_end(patience, spared).map_err(std::io::Error::other)?;
    }
    if let Some(ChildRecord { instance, .. }) = record
        && instance.send_signal(Signal::TERM)?
    {
        let end = Instant::now() + patience;
        // A child that has ended but was not reaped counts as gone: `is_alive` is false for it.
        while instance.is_alive() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let rest = group.kill_except(spared).map_err(std::io::Error::other)?;
    if rest > 0 {
        tracing::warn!(remaining = rest, "processes did not exit after SIGTERM and were killed");
    }
    // For hosts without groups.
    if let Some(ChildRecord { instance, .. }) = record {
        instance.stop(Duration::ZERO)?;
        instance.reap()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::child::spec::sample;

    fn record() -> ChildRecord {
        let instance = ProcessInstance { pid: 7, start_time: 8, boot_id: "b".to_owned() };
        let (spec_sha256, scope, missed_limits) = ("5a".to_owned(), None, None);
        ChildRecord {
            instance,
            spec_sha256,
            declared_sha256: None,
            scope,
            missed_limits,
            unfinished_move: None,
            unfinished_groups: Vec::new(),
        }
    }

    /// Earlier releases wrote the first form, and read both.
    /// What the release before reads of a record.
    #[derive(Deserialize)]
    struct Earlier {
        instance: ProcessInstance,
        spec_sha256: String,
    }

    #[test]
    fn record_is_readable_for_the_release_before() {
        let old = r#"{"instance":{"pid":7,"start_time":8,"boot_id":"b"},"spec_sha256":"5a"}"#;
        assert_eq!(serde_json::to_string(&record()).unwrap(), old);
        assert_eq!(serde_json::from_str::<ChildRecord>(old).unwrap(), record());
        let scope = ScopeRecord { unit: "a.scope".to_owned(), control_group: "/s/a.scope".to_owned() };
        let new = ChildRecord {
            declared_sha256: Some("d".to_owned()),
            scope: Some(scope),
            missed_limits: Some(ResourceLimits { cpu_millis: Some(500), ..ResourceLimits::default() }),
            unfinished_move: Some(Cgroup::from_directories(&["/old/web".into()])),
            unfinished_groups: vec![InnerGroup {
                hierarchy: String::new(),
                path: "f.web".into(),
                pids: [7, 9].into(),
            }],
            ..record()
        };
        let text = serde_json::to_string(&new).unwrap();
        assert_eq!(serde_json::from_str::<ChildRecord>(&text).unwrap(), new);
        let earlier: Earlier = serde_json::from_str(&text).unwrap();
        assert_eq!((earlier.instance, earlier.spec_sha256), (new.instance, new.spec_sha256));
    }

    #[test]
    fn running_child_is_adopted_unless_its_declaration_changed() {
        let spec = |arguments: &[&str], declared: Option<&str>| ChildSpec {
            declared: declared.map(str::to_owned),
            ..sample("web", "/bin/web", arguments)
        };
        let of = |spec: &ChildSpec| ChildRecord {
            spec_sha256: spec.digest(),
            declared_sha256: spec.declared.clone(),
            ..record()
        };
        for (running, wanted, adopted) in [
            (spec(&["a"], None), spec(&["a"], None), true),
            (spec(&["a"], None), spec(&["b"], None), false),
            // Another release adds a flag.
            (spec(&["a"], Some("d")), spec(&["a", "new"], Some("d")), true),
            // An operator changes something, with the same release or another one.
            (spec(&["a"], Some("d")), spec(&["b"], Some("e")), false),
            // A declaration that has another form with the same result.
            (spec(&["a"], Some("d")), spec(&["a"], Some("e")), true),
            // The release before recorded no declaration.
            (spec(&["a"], None), spec(&["a"], Some("d")), true),
            (spec(&["a"], None), spec(&["b"], Some("d")), false),
        ] {
            assert_eq!(of(&running).satisfies(&wanted), adopted, "{running:?} {wanted:?}");
        }
    }

    #[test]
    fn launcher_without_a_place_runs_nothing() {
        let order = LaunchOrder {
            spec: sample("web", "/bin/web", &[]),
            group: Cgroup::default(),
            waits: true,
            record: None,
            log: "/dev/null".into(),
        };
        let why = wait_for_placement(&order, &mut &b""[..]).unwrap_err().to_string();
        assert!(why.starts_with("the role server ended before it placed the program"), "{why}");
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("cgroup.procs"), "1\n").unwrap();
        let scope = ScopeRecord { unit: "a.scope".to_owned(), control_group: "/a.scope".to_owned() };
        let group = Cgroup::from_directories(&[directory.path().to_owned()]);
        let line = serde_json::to_vec(&Placement { group, scope: Some(scope), missed_limits: None }).unwrap();
        let why = wait_for_placement(&order, &mut &line[..]).unwrap_err().to_string();
        assert_eq!(why, "its process is not in its scope a.scope");
        std::fs::write(directory.path().join("cgroup.procs"), std::process::id().to_string()).unwrap();
        wait_for_placement(&order, &mut &line[..]).unwrap();
    }
}
