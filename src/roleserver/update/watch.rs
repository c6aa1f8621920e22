//! The watchdog: a process of the former release that ends a candidate which nobody hears.
//!
//! A candidate that hangs, or is no role server at all, ends by nobody's doing else. The watchdog leads a session of its
//! own and is nobody's child, so that neither the candidate nor its end reaches it. It ends exactly the process that was
//! written down, by pid and start time, and only while that trial is still written down; what is at the stable path is
//! started then by whoever keeps role servers alive.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::roleserver::clock::{BootClock as _, HostClock};
use crate::roleserver::supervise::no_input;
use crate::roleserver::update::decision::Trial;
use crate::roleserver::update::files::UpdateFiles;

/// The verb of this program.
pub const VERB: &str = "watch-update";
/// Said to the process that starts the one that watches.
pub const DETACH: &str = "--detach";
/// How long after a candidate's time is over: it may give way by itself.
const GRACE_MS: u64 = 3_000;
const LOOK: Duration = Duration::from_millis(200);
/// How long a candidate may take to end when asked.
const END: Duration = Duration::from_secs(2);

/// Starts the watchdog for what is written down in this state directory.
pub fn start(program: &Path, state_directory: &Path) -> std::io::Result<()> {
    let status = command(program, state_directory)?.arg(DETACH).status()?;
    if status.success() {
        return Ok(());
    }
    Err(std::io::Error::other(format!("the watchdog did not start ({status})")))
}

fn command(program: &Path, state_directory: &Path) -> std::io::Result<Command> {
    let mut command = Command::new(program);
    command.arg(VERB).arg("--state_dir").arg(state_directory).current_dir("/").stdin(no_input()?);
    // Whoever reads this one's output must not wait for the watchdog's end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    Ok(command)
}

/// What `roleserver watch-update` does: starts the watchdog and ends, or is it.
pub fn execute(state_directory: &Path, detach: bool) -> std::io::Result<()> {
    let _ = rustix::process::setsid();
    if detach {
        // Its parent ends at once, so that it is a child of nobody that could become another program.
        return command(Path::new("/proc/self/exe"), state_directory)?.spawn().map(drop);
    }
    let files = UpdateFiles::of(state_directory);
    let Some(trial) = files.trial() else { return Ok(()) };
    let clock = HostClock::read()?;
    let over = || files.trial().as_ref() != Some(&trial) || !trial.instance.is_alive();
    while clock.milliseconds() < ends(&trial) {
        if over() {
            return Ok(());
        }
        std::thread::sleep(LOOK);
    }
    if over() { Ok(()) } else { trial.instance.stop(END) }
}

const fn ends(trial: &Trial) -> u64 {
    trial.until_ms.saturating_add(GRACE_MS)
}
