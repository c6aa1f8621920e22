//! The update watchdog: kills a candidate that gets no heartbeat answered in time.
//!
//! It is a process of the former release, because a candidate that hangs, or is not a role server at all, does not end
//! by itself. The watchdog leads a session of its own and is not a child of the candidate, so that neither the
//! candidate nor its end reaches it. It kills exactly the recorded process, by pid and start time, and only while that
//! trial is still recorded. The init system or the supervisor then starts the program at the stable path.
//!
//! A candidate with an acknowledged heartbeat claims its trial before it stores anything ([`claim_trial`]). Then the watchdog
//! does not kill it, however long the disk takes to store the end of the trial.

use hardening::file_limit::UsualFileLimit as _;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::boot_clock::{BootClock as _, HostClock};
use crate::process::empty_stdin;
use crate::update::decision::Trial;
use crate::update::files::{UpdateFiles, claim_trial};

/// The subcommand of this program.
const SUBCOMMAND: &str = "watch-update";
/// Flag of the intermediate process that starts the watchdog and ends.
const DETACH_FLAG: &str = "--detach";
/// Milliseconds after the end of the trial: the candidate may roll back by itself.
const GRACE_MS: u64 = 3_000;
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// How long a candidate may take to end after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// Starts the watchdog for the recorded trial in this state directory.
pub fn start_watchdog(program: &Path, state_directory: &Path) -> std::io::Result<()> {
    let status = watchdog_command(program, state_directory)?.arg(DETACH_FLAG).status()?;
    if status.success() {
        return Ok(());
    }
    Err(std::io::Error::other(format!("the watchdog did not start ({status})")))
}

fn watchdog_command(program: &Path, state_directory: &Path) -> std::io::Result<Command> {
    let mut command = Command::new(program);
    command.arg(SUBCOMMAND).arg("--state_dir").arg(state_directory).current_dir("/").stdin(empty_stdin()?);
    // A reader of this program's output must not wait for the watchdog's end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    hardening::restore_core_limit(command.usual_file_limit());
    Ok(command)
}

/// Carries out `roleserver watch-update`: starts the watchdog and ends, or is the watchdog.
pub fn execute(state_directory: &Path, detach: bool) -> std::io::Result<()> {
    let _ = rustix::process::setsid();
    if detach {
        // Its parent ends at once, so that it is not a child of the process that becomes the candidate.
        return watchdog_command(Path::new("/proc/self/exe"), state_directory)?.spawn().map(drop);
    }
    let files = UpdateFiles::in_state_directory(state_directory);
    let Some(trial) = files.read_trial() else { return Ok(()) };
    let clock = HostClock::read()?;
    let over = || files.read_trial().as_ref() != Some(&trial) || !trial.instance.is_alive();
    // Held until the candidate has ended: an acknowledgement that comes now is too late.
    let _claim = loop {
        if over() {
            return Ok(());
        }
        if let Some(claim) = claim_late_trial(&files, &trial, clock.milliseconds()) {
            break claim;
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    if over() { Ok(()) } else { trial.instance.stop(STOP_TIMEOUT) }
}

/// The right to end a trial. No other process gets it until this is dropped.
struct TrialClaim {
    _record: Option<File>,
}

/// Claims a trial that is late, so that its candidate can be killed. `None` while it is in time, and once a heartbeat of the
/// candidate is acknowledged. A record that cannot be opened needs no claim.
fn claim_late_trial(files: &UpdateFiles, trial: &Trial, now_ms: u64) -> Option<TrialClaim> {
    if now_ms < kill_time_ms(trial) {
        return None;
    }
    let record = files.open_trial();
    record.as_ref().is_none_or(claim_trial).then_some(TrialClaim { _record: record })
}

const fn kill_time_ms(trial: &Trial) -> u64 {
    trial.until_ms.saturating_add(GRACE_MS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::ProcessInstance;

    #[test]
    fn candidate_with_an_acknowledged_heartbeat_is_not_killed() {
        let directory = tempfile::tempdir().unwrap();
        let files = UpdateFiles::in_state_directory(directory.path());
        let trial = Trial {
            generation: 1,
            sha256: "new".to_owned(),
            former: "old".to_owned(),
            stable: "/opt/roleserver".into(),
            candidate: "/opt/roleserver.candidate".into(),
            boot_id: "b".to_owned(),
            until_ms: 70_000,
            patience_ms: 60_000,
            instance: ProcessInstance { pid: 1, start_time: 1, boot_id: "b".to_owned() },
            minimum_version: None,
            failure: None,
        };
        files.write_trial(&trial).unwrap();
        let may_kill = |now_ms| claim_late_trial(&files, &trial, now_ms).is_some();
        let record = files.open_trial().unwrap();
        assert!(!may_kill(72_999), "it is in time");
        assert!(may_kill(73_000), "it is late");
        let claim = claim_late_trial(&files, &trial, 73_000);
        assert!(!claim_trial(&record), "an acknowledgement after the watchdog has begun counts");
        drop(claim);
        assert!(claim_trial(&record));
        assert!(!may_kill(u64::MAX), "its heartbeat is acknowledged");
        drop(record);
        assert!(may_kill(73_000), "a process that has ended keeps its claim");
        files.remove_trial().unwrap();
        assert!(may_kill(73_000), "a record that cannot be opened keeps a candidate alive");
    }
}
