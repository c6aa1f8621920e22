//! From this program to the other one.
//!
//! `roleserver launch` is started by a role server and by nobody else. It reads an [`Order`] from its standard input,
//! leaves the session of whoever started it, joins the control group, writes down which process it is, and becomes the
//! program. A process keeps its pid and its start time when it becomes another program, so the record stays
//! true. On its standard output it says why it could not; a program that runs closes that without a word.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::roleserver::child::cgroup::Group;
use crate::roleserver::child::log;
use crate::roleserver::child::spec::{Spec, User};
use crate::roleserver::durable::{self, Durability};
use crate::roleserver::running::Instance;
use crate::roleserver::supervise::no_input;

/// The verb of this program.
pub const VERB: &str = "launch";
/// An order is some kilobytes; what is longer is none.
const LONGEST_ORDER: u64 = 4 << 20;

/// What is to be started, and where it is written down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// The program.
    pub spec: Spec,
    /// Its control group.
    pub group: Group,
    /// Where its [`Record`] goes; none for what ends by itself in a moment, as a look at a service does.
    pub record: Option<PathBuf>,
    /// Where what it writes goes.
    pub log: PathBuf,
}

/// What is written down of a program that runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Which process.
    pub instance: Instance,
    /// What was asked for when it was started: [`Spec::digest`].
    pub spec_sha256: String,
}

/// Why a program was not started.
#[derive(Debug, thiserror::Error)]
#[error("starting {name} failed: {why}")]
pub struct LaunchError {
    /// What was to be started.
    pub name: String,
    why: String,
}

/// Has `order` carried out by a new process of `program`, which is this one. Blocks until that has become the other one.
/// What it gives can be waited for also if that has ended already.
pub fn launch(program: &Path, order: &Order) -> Result<OwnedFd, LaunchError> {
    let failed = |why: String| LaunchError { name: order.spec.name.clone(), why };
    let begin = || -> std::io::Result<(OwnedFd, String)> {
        let mut child = Command::new(program)
            .arg(VERB)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log::open(&order.log)?)
            .spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        if let Some(mut input) = input {
            // One that has ended says why on its output.
            let _ = input.write_all(&serde_json::to_vec(order)?);
        }
        let mut said = String::new();
        if let Some(output) = output {
            output.take(LONGEST_ORDER).read_to_string(&mut said)?;
        }
        // It is a child that nobody has waited for: the pid is still its own.
        let handle = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
        if !said.is_empty() {
            child.wait()?;
        }
        Ok((handle, said))
    };
    let (handle, said) = begin().map_err(|error| failed(error.to_string()))?;
    if !said.is_empty() {
        return Err(failed(said));
    }
    tracing::info!(name = order.spec.name, program = %order.spec.program.display(), "a program was started");
    Ok(handle)
}

/// What `roleserver launch` does. It returns only if it could not.
#[must_use]
pub fn execute() -> String {
    let order = match read_order() {
        Ok(order) => order,
        Err(why) => return tell(&format!("the order cannot be read: {why}")),
    };
    // Kept open until the other program runs, on a number that it does not get.
    let output = match rustix::io::fcntl_dupfd_cloexec(std::io::stdout(), 3) {
        Ok(output) => output,
        Err(error) => return tell(&error.to_string()),
    };
    let why = become_it(&order).to_string();
    let _ = File::from(output).write_all(why.as_bytes());
    why
}

fn tell(why: &str) -> String {
    let _ = std::io::stdout().write_all(why.as_bytes());
    why.to_owned()
}

fn read_order() -> std::io::Result<Order> {
    let mut bytes = Vec::new();
    std::io::stdin().take(LONGEST_ORDER).read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}

fn become_it(order: &Order) -> std::io::Error {
    let spec = &order.spec;
    let prepare = || -> std::io::Result<Command> {
        // Neither the end of a terminal nor a signal to its group is meant for it. It may lead a session already.
        let _ = rustix::process::setsid();
        keep_ours();
        order.group.join().map_err(std::io::Error::other)?;
        if let Some(path) = &order.record {
            let record = Record { instance: Instance::this()?, spec_sha256: spec.digest() };
            durable::replace(path, &serde_json::to_vec(&record)?, Durability::UntilPowerLoss)?;
        }
        let log = log::open(&order.log)?;
        let mut command = Command::new(&spec.program);
        command
            .args(&spec.arguments)
            .env_clear()
            .envs(&spec.environment)
            .stdin(no_input()?)
            .stdout(log.try_clone()?)
            .stderr(log);
        Ok(command)
    };
    let (program, directory) = (spec.program.display(), spec.directory.display());
    let refused = |error: std::io::Error| {
        std::io::Error::new(error.kind(), format!("{program} cannot be run in {directory}: {error}"))
    };
    match prepare() {
        // As whom we are now: the way to it may be closed to whom this is to become.
        Ok(mut command) => match std::env::set_current_dir(&spec.directory) {
            Ok(()) => match spec.user.map_or(Ok(()), |user| become_user(user, &spec.groups)) {
                Ok(()) => refused(command.exec()),
                Err(error) => error,
            },
            Err(error) => refused(error),
        },
        Err(error) => error,
    }
}

/// Lays down what the role server may do. There is one thread here, so what holds for it holds for all.
fn become_user(user: User, groups: &[u32]) -> std::io::Result<()> {
    use rustix::process::{Gid, Uid, getegid, geteuid};
    use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_uid};
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    // Who is no root cannot become anybody, and is whom he is.
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

/// Whatever is open besides the three that it gets is closed when this becomes the other program: also what whoever
/// started the role server had open, and what that held would be held for as long as the other program runs.
fn keep_ours() {
    // SAFETY: it closes nothing now; it marks what is open to be closed by `execve`, as all that we open is already.
    let done =
        unsafe { libc::syscall(libc::SYS_close_range, 3_u32, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if done != 0 {
        // Before Linux 5.11.
        tracing::debug!("what was inherited stays open in the program that is started");
    }
}

/// The record at this path, if there is one that can be read. One that cannot says nothing that could be relied on: what
/// runs is then found by its control group.
#[must_use]
pub fn recorded(path: &Path) -> Option<Record> {
    let bytes = std::fs::read(path).ok()?;
    serde_json::from_slice(&bytes)
        .inspect_err(|error| tracing::warn!(%error, path = %path.display(), "a damaged record"))
        .ok()
}

/// Ends a recorded process as it wants to be ended, then everything in its group but for what is spared
/// ([`Spec::spared`]). Nothing else stays of it, also where it was a child of ours and nobody waits for it any more. Blocks.
pub fn stop(
    record: Option<&Record>,
    group: &Group,
    patience: Duration,
    spared: Option<&str>,
) -> std::io::Result<()> {
    use rustix::process::Signal;
    if let Some(Record { instance, .. }) = record
        && instance.signal(Signal::TERM)?
    {
        let end = Instant::now() + patience;
        // A child of ours that has ended, and nobody has been told of, is as good as gone: `is_alive` says so.
        while instance.is_alive() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let rest = group.kill_but(spared).map_err(std::io::Error::other)?;
    if rest > 0 {
        tracing::warn!(rest, "processes did not end when they were asked to, and were killed");
    }
    // Where there are no groups.
    if let Some(Record { instance, .. }) = record {
        instance.stop(Duration::ZERO)?;
        instance.reap()?;
    }
    Ok(())
}
