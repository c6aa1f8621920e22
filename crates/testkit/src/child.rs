//! Child processes of a test, which end with the test process, however that ends.
//!
//! A test process that is killed runs no destructor, and its children would go on: a shepherd without its database, a
//! simulator on its ports. So each child has a watcher, a small shell that holds the other end of a pipe from the test
//! process. When the pipe ends, it kills its child, even a stopped one. `private_postgres` of `bmdb` explains why this
//! is a pipe and not the kernel's parent-death signal: that signal is sent when the *thread* that forked ends, and each
//! test is a thread.
//!
//! A program that our programs detach on purpose, as the role server does, has no parent. It is found by a directory
//! that belongs to one test: see [`Detached`].
//!
//! The child has the process id that [`Child::id`] returns, because the shell in front of it becomes the program. Its
//! standard input is empty: the pipe to it belongs to the watcher.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, setrlimit};

use crate::etcd_program;

/// Longest time that a program may take to stop on request.
const PATIENCE: Duration = Duration::from_mins(5);
const GUARDED: &str = include_str!("guarded.sh");
const WATCHER: &str = include_str!("watcher.sh");
const DETACHED: &str = include_str!("detached.sh");
/// The name under which a watcher runs.
const WATCHER_NAME: &str = "test-watcher";
/// The name of the shell that becomes the program as soon as its watcher runs.
const GUARDED_NAME: &str = "test-guarded";

/// A program to start with a watcher. The caller keeps its standard input open for as long as the program must live:
/// [`Command::output`] and [`Child::wait`] do not, and [`Program`] does.
///
/// Its search path leads to the etcd that the tests use.
pub fn guarded(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(shell_arguments(program)).stdin(Stdio::piped());
    // Each shepherd serves operators at the same address by default, which only one of them can use.
    command.env("SHEPHERD_API_LISTEN_ADDRESS", "127.0.0.1:0");
    if let Some(path) = etcd_program::search_path() {
        command.env("PATH", path);
    }
    command
}

/// Lets a command's program open this many files at most. It cannot raise that, and what it starts cannot either.
pub fn limit_files(command: &mut Command, files: u64) -> &mut Command {
    let limit = Rlimit { current: Some(files), maximum: Some(files) };
    // SAFETY: between `fork` and `exec`, the closure only makes one system call, and allocates nothing.
    unsafe { command.pre_exec(move || Ok(setrlimit(Resource::Nofile, limit)?)) }
}

/// The same as arguments of `/bin/sh`, for a command that is prepared in another way. The program's own arguments
/// follow.
#[must_use]
pub fn shell_arguments(program: impl AsRef<OsStr>) -> Vec<OsString> {
    let program = program.as_ref().to_owned();
    vec!["-c".into(), code(GUARDED), GUARDED_NAME.into(), code(WATCHER), program]
}

/// A script in the form that a process list shows.
fn code(script: &str) -> OsString {
    let code = script.lines().filter(|line| !line.trim_start().starts_with('#'));
    code.collect::<Vec<_>>().join("\n").into()
}

/// Whether a process is the watcher of another.
#[must_use]
pub fn is_watcher(pid: u32) -> bool {
    command_line(pid).contains(&format!("\0{WATCHER_NAME}\0"))
}

/// Whether a guarded process has become its program. While a process becomes another program, it has no command line at
/// all.
fn has_become_the_program(pid: u32) -> bool {
    let line = command_line(pid);
    !line.is_empty() && !line.contains(&format!("\0{GUARDED_NAME}\0"))
}

fn command_line(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default()
}

/// Ends processes without a parent that name a directory of this test, if the test process dies. A test that ends in
/// order ends them itself.
pub struct Detached {
    watcher: Child,
}

impl Detached {
    /// Watches every process that has this path as an argument.
    pub fn naming(directory: &Path) -> Result<Self> {
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(code(DETACHED)).arg("test-detached").env("DIRECTORY", directory);
        let watcher = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        Ok(Self { watcher })
    }
}

impl Drop for Detached {
    fn drop(&mut self) {
        // It is killed before its input ends, because nothing is left for it to do.
        let _ = self.watcher.kill();
        let _ = self.watcher.wait();
    }
}

/// A child of this test, killed when dropped.
pub struct Program {
    child: Child,
    _hold: ChildStdin,
}

impl Program {
    /// Starts what [`guarded`] made.
    pub fn spawn(command: &mut Command) -> Result<Self> {
        let mut child = command.spawn()?;
        // Taken out, because waiting for a child closes the end that it still owns.
        let hold = child.stdin.take().context("no hold on it: was it made by `guarded`?")?;
        let mut program = Self { child, _hold: hold };
        // A signal that stops the shell before it has started the watcher would leave the program without one.
        while program.ended()?.is_none() && !has_become_the_program(program.pid()) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(program)
    }

    /// Starts it with a log of its errors.
    pub fn spawn_logged(command: &mut Command, log: &Path) -> Result<Self> {
        Self::spawn(command.stderr(File::create(log)?))
    }

    /// The process id of the child.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The child, with the pipes that its command has.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }

    /// Kills it as a power cut does, and waits until it is gone.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// The exit status of the child; `None` while it runs.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Sends SIGTERM, and waits for its exit.
    pub async fn terminate(&mut self) -> Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            ensure!(Instant::now() < deadline, "it does not stop");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Both calls fail only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
