//! Process records by pid and start time, signals through a pidfd, and the digest of a program.
//!
//! A pid alone names the process that has it now. Enrolment stops agents by a record that may be days old, as root, on
//! a machine that people depend on. So a record carries the boot and the start time too (`/proc/PID/stat`, field 22),
//! and a signal goes through a pidfd that was opened before these were compared, so that the pid cannot be reused in
//! between.
//!
//! A `/proc` that is mounted with `hidepid` does not show processes that are closed to their own user: a role server
//! that is not root does not find the files of another one, nor those of a program that it may execute and not read. A
//! process that cannot be found is therefore gone only if no signal reaches it. Otherwise it counts as alive, and what
//! would have to be sure which process it is fails with a sentence: a child that is only hidden is not started twice.

use std::io::{ErrorKind, Read as _};
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use ring::digest;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, waitid};
use serde::{Deserialize, Serialize};

use crate::boot_clock::{BootClock as _, HostClock};

/// One process, from its start to its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessInstance {
    /// Its pid in this pid namespace.
    pub pid: i32,
    /// Clock ticks from boot to its start.
    pub start_time: u64,
    /// The id of the boot it belongs to.
    pub boot_id: String,
}

/// The record of a process of this program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessRecord {
    /// The process, by pid and start time.
    #[serde(flatten)]
    pub instance: ProcessInstance,
    /// Digest of the program it runs, lower-case hexadecimal.
    pub program_sha256: String,
    /// The revision of the enrolment that it was started for.
    pub revision: u64,
}

impl ProcessRecord {
    /// The record of the calling process.
    pub fn current(revision: u64, program_sha256: String) -> std::io::Result<Self> {
        Ok(Self { instance: ProcessInstance::current()?, program_sha256, revision })
    }
}

impl Deref for ProcessRecord {
    type Target = ProcessInstance;

    fn deref(&self) -> &ProcessInstance {
        &self.instance
    }
}

impl ProcessInstance {
    /// The calling process. The value stays true over `execve`.
    pub fn current() -> std::io::Result<Self> {
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        let start_time = read_start_time(Path::new("/proc"), pid)
            .ok_or_else(|| std::io::Error::other("/proc/self/stat cannot be read"))?;
        Ok(Self { pid, start_time, boot_id: HostClock::read()?.boot_id() })
    }

    /// The process that has this pid now; `None` if there is none.
    #[must_use]
    pub fn of_pid(pid: i32) -> Option<Self> {
        let start_time = read_start_time(Path::new("/proc"), pid)?;
        Some(Self { pid, start_time, boot_id: HostClock::read().ok()?.boot_id() })
    }

    /// A pidfd of the process, which never refers to a later process with the same pid and becomes readable when the
    /// process has ended. `None` if it has ended already. An error if a process has the pid and `/proc` hides which.
    ///
    /// Requires Linux 5.3.
    pub fn open_pidfd(&self) -> std::io::Result<Option<OwnedFd>> {
        // No process has a pid below 1; the kernel takes such a number for a group, or for all processes.
        let Some(pid) = Some(self.pid).filter(|pid| *pid > 0).and_then(Pid::from_raw) else {
            return Ok(None);
        };
        match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            // Compared after it was opened: from then on the pid cannot be reused unnoticed.
            Ok(handle) => match self.find_presence(Path::new("/proc")) {
                Presence::Recorded => Ok(Some(handle)),
                Presence::Gone => Ok(None),
                Presence::Unknown(why) => Err(std::io::Error::new(ErrorKind::PermissionDenied, why)),
            },
            Err(rustix::io::Errno::SRCH) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the recorded process still runs; a zombie does not. True also if a process with its pid exists that
    /// `/proc` hides.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.find_presence(Path::new("/proc")) != Presence::Gone
    }

    fn find_presence(&self, proc: &Path) -> Presence {
        if !HostClock::read().is_ok_and(|clock| clock.boot_id() == self.boot_id) {
            return Presence::Gone;
        }
        let stat = read_stat_file(proc, self.pid);
        // In this order: a process that ends in between is not reached any more.
        let is_reached = is_reached_by_signals(self.pid);
        judge_presence(self, stat, is_reached)
    }

    /// Sends SIGTERM, then SIGKILL after `grace`, and waits until the process is gone.
    ///
    /// A process that is gone already is not an error.
    pub fn stop(&self, grace: Duration) -> std::io::Result<()> {
        for (signal, patience) in [(Signal::TERM, grace), (Signal::KILL, Duration::from_secs(5))] {
            if !self.send_signal(signal)? || self.wait_for_exit(patience) {
                return Ok(());
            }
        }
        Err(std::io::Error::new(
            ErrorKind::TimedOut,
            format!("process {} does not end, not even when killed; its kernel call hangs", self.pid),
        ))
    }

    /// Reaps the process if it was a child of the calling process and has ended, so that no zombie stays. A task that
    /// waits on a pidfd is still woken, but cannot learn how the process ended.
    pub fn reap(&self) -> std::io::Result<()> {
        let Some(pid) = Some(self.pid).filter(|pid| *pid > 0).and_then(Pid::from_raw) else { return Ok(()) };
        // A reused pid is not our zombie: it has another start time.
        if read_stat(Path::new("/proc"), self.pid) != Some((self.start_time, true)) {
            return Ok(());
        }
        match waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
            Ok(_) | Err(rustix::io::Errno::CHILD) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends a signal if the process still runs; returns whether it did.
    pub fn send_signal(&self, signal: Signal) -> std::io::Result<bool> {
        let sent = match self.open_pidfd() {
            Ok(Some(handle)) => rustix::process::pidfd_send_signal(&handle, signal),
            Ok(None) => return Ok(false),
            // Before Linux 5.3 there are no pidfds; comparing first is the closest substitute.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOSYS.raw_os_error()) => {
                let is_recorded = self.find_presence(Path::new("/proc")) == Presence::Recorded;
                match Pid::from_raw(self.pid).filter(|_| is_recorded) {
                    Some(pid) => rustix::process::kill_process(pid, signal),
                    None => return Ok(false),
                }
            }
            Err(error) => return Err(error),
        };
        match sent {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::SRCH) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn wait_for_exit(&self, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        while self.is_alive() {
            if Instant::now() >= end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        true
    }
}

/// What is known of a recorded process.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Presence {
    /// It runs.
    Recorded,
    /// It has ended. Its pid may be that of a later process.
    Gone,
    /// A process has its pid, and it is not known whether it is the recorded one. The sentence says why.
    Unknown(String),
}

/// What `/proc/PID/stat` says.
#[derive(Clone, Debug, PartialEq, Eq)]
enum StatFile {
    Content {
        start_time: u64,
        has_ended: bool,
    },
    /// There is no such process, or it is hidden.
    Absent,
    /// It cannot be read for this reason.
    Unreadable(String),
}

/// Judges whether the recorded process runs (pure). A process of another user, which no signal of ours reaches, is not
/// one that we recorded.
fn judge_presence(recorded: &ProcessInstance, stat: StatFile, is_reached: bool) -> Presence {
    let pid = recorded.pid;
    match stat {
        StatFile::Content { start_time, has_ended: false } if start_time == recorded.start_time => {
            Presence::Recorded
        }
        StatFile::Content { .. } => Presence::Gone,
        StatFile::Absent | StatFile::Unreadable(_) if !is_reached => Presence::Gone,
        StatFile::Absent => Presence::Unknown(format!(
            "process {pid} exists, and /proc does not show whether it is the recorded one: /proc is mounted with \
             hidepid, and the process is closed to its user; mount /proc without hidepid, or with gid= of a group of \
             this user"
        )),
        StatFile::Unreadable(why) => Presence::Unknown(format!(
            "process {pid} exists, and whether it is the recorded one is not known, because reading /proc/{pid}/stat \
             failed: {why}"
        )),
    }
}

/// Whether a process with this pid exists that this process may send signals to.
fn is_reached_by_signals(pid: i32) -> bool {
    let pid = Some(pid).filter(|pid| *pid > 0).and_then(Pid::from_raw);
    pid.is_some_and(|pid| rustix::process::test_kill_process(pid).is_ok())
}

/// Digest of a program file, lower-case hexadecimal.
pub fn program_digest(path: &Path) -> std::io::Result<String> {
    file_digest(&std::fs::File::open(path)?)
}

/// Digest of what an open file has after its position, lower-case hexadecimal.
pub fn file_digest(mut file: &std::fs::File) -> std::io::Result<String> {
    let mut context = digest::Context::new(&digest::SHA256);
    let mut buffer = vec![0; 1 << 16];
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(hex::encode(context.finish()));
        }
        context.update(&buffer[..read]);
    }
}

/// A standard input at its end. `/dev/null`, which could stand in for it, may not exist.
pub fn empty_stdin() -> std::io::Result<Stdio> {
    let (read, _ended_when_dropped) = std::io::pipe()?;
    Ok(read.into())
}

/// Field 22 of `/proc/PID/stat`; `None` if the process does not exist or has ended.
fn read_start_time(proc: &Path, pid: i32) -> Option<u64> {
    read_stat(proc, pid).filter(|(_, has_ended)| !has_ended).map(|(start_time, _)| start_time)
}

/// The start time, also of a process that has ended but was not reaped, and whether it has ended.
fn read_stat(proc: &Path, pid: i32) -> Option<(u64, bool)> {
    match read_stat_file(proc, pid) {
        StatFile::Content { start_time, has_ended } => Some((start_time, has_ended)),
        StatFile::Absent | StatFile::Unreadable(_) => None,
    }
}

fn read_stat_file(proc: &Path, pid: i32) -> StatFile {
    match std::fs::read_to_string(proc.join(pid.to_string()).join("stat")) {
        Ok(text) => match parse_stat(&text) {
            Some((start_time, has_ended)) => StatFile::Content { start_time, has_ended },
            None => StatFile::Unreadable("it is malformed".to_owned()),
        },
        // The process has ended while the file was open; `hidepid=1` permits no access; `hidepid=2` hides the file.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {
            StatFile::Absent
        }
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => {
            StatFile::Absent
        }
        Err(error) => StatFile::Unreadable(error.to_string()),
    }
}

fn parse_stat(text: &str) -> Option<(u64, bool)> {
    // The second field is the program's name in parentheses, which may contain spaces and parentheses; nothing after it
    // does.
    let (_, after_name) = text.rsplit_once(')')?;
    let mut fields = after_name.split_ascii_whitespace();
    let has_ended = matches!(fields.next()?, "Z" | "X" | "x");
    Some((fields.nth(18)?.parse().ok()?, has_ended))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_time_is_found_behind_any_name() {
        let tail = "S 1 2 3 0 -1 4194304 101 0 0 0 0 0 0 0 20 0 1 0 110076 3133440 383";
        assert_eq!(parse_stat(&format!("9 (cat) {tail}")), Some((110_076, false)));
        assert_eq!(parse_stat(&format!("9 (a) Z 1 (b c) {tail}")), Some((110_076, false)));
        assert_eq!(parse_stat(&format!("9 (cat) {}", tail.replacen('S', "Z", 1))), Some((110_076, true)));
        assert_eq!(parse_stat("9 (cat) S 1"), None);
        assert_eq!(parse_stat(""), None);
    }

    #[test]
    fn record_of_another_process_is_neither_alive_nor_stopped() {
        let this = ProcessInstance::current().unwrap();
        assert!(this.is_alive());
        assert!(this.open_pidfd().unwrap().is_some());
        let earlier = ProcessInstance { start_time: this.start_time - 1, ..this.clone() };
        let other_boot = ProcessInstance { boot_id: uuid::Uuid::new_v4().to_string(), ..this.clone() };
        let nobody = [0, -1, i32::MIN].map(|pid| ProcessInstance { pid, ..this.clone() });
        for gone in [earlier, other_boot].into_iter().chain(nobody) {
            assert!(!gone.is_alive());
            assert!(gone.open_pidfd().unwrap().is_none());
            gone.stop(Duration::from_secs(1)).unwrap();
        }
    }

    #[test]
    fn process_is_gone_only_if_no_signal_reaches_it() {
        let recorded = ProcessInstance { pid: 7, start_time: 8, boot_id: "b".to_owned() };
        let content = |start_time, has_ended| StatFile::Content { start_time, has_ended };
        let unreadable = || StatFile::Unreadable("too many open files".to_owned());
        for (stat, is_reached, expected) in [
            (content(8, false), true, Some(Presence::Recorded)),
            // Of another user, as a child of a role server that is root.
            (content(8, false), false, Some(Presence::Recorded)),
            (content(8, true), true, Some(Presence::Gone)),
            (content(9, false), true, Some(Presence::Gone)),
            (StatFile::Absent, false, Some(Presence::Gone)),
            (unreadable(), false, Some(Presence::Gone)),
            (StatFile::Absent, true, None),
            (unreadable(), true, None),
        ] {
            let case = format!("{stat:?} {is_reached}");
            let hint = if stat == StatFile::Absent { "hidepid" } else { "too many open files" };
            match (judge_presence(&recorded, stat, is_reached), expected) {
                (Presence::Unknown(why), None) => assert!(why.contains(hint), "{case}: {why}"),
                (found, expected) => assert_eq!(Some(found), expected, "{case}"),
            }
        }
    }

    /// An empty directory stands in for a `/proc` that hides this process.
    #[test]
    fn hidden_process_does_not_count_as_ended() {
        let (this, hidden) = (ProcessInstance::current().unwrap(), tempfile::tempdir().unwrap());
        assert_eq!(this.find_presence(Path::new("/proc")), Presence::Recorded);
        let Presence::Unknown(why) = this.find_presence(hidden.path()) else { panic!("it was judged") };
        assert!(why.starts_with(&format!("process {} exists, and /proc does not show", this.pid)), "{why}");
        // Larger than any pid.
        let nobody = ProcessInstance { pid: i32::MAX, ..this.clone() };
        assert_eq!(nobody.find_presence(hidden.path()), Presence::Gone);
        let other_boot = ProcessInstance { boot_id: uuid::Uuid::new_v4().to_string(), ..this };
        assert_eq!(other_boot.find_presence(hidden.path()), Presence::Gone);
    }

    #[test]
    fn process_record_keeps_its_stored_format() {
        let instance = ProcessInstance { pid: 7, start_time: 8, boot_id: "b".to_owned() };
        let process = ProcessRecord { instance, program_sha256: "5a".to_owned(), revision: 9 };
        let text = r#"{"pid":7,"start_time":8,"boot_id":"b","program_sha256":"5a","revision":9}"#;
        assert_eq!(serde_json::to_string(&process).unwrap(), text);
        assert_eq!(serde_json::from_str::<ProcessRecord>(text).unwrap(), process);
    }

    #[test]
    #[expect(clippy::zombie_processes, reason = "what is tested is who waits for it")]
    fn process_that_ignores_sigterm_is_killed_and_reaped() {
        let mut child = std::process::Command::new("sh")
            .args(["-c", "trap '' TERM; echo ready; while :; do sleep 1; done"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = [0; 6];
        child.stdout.take().unwrap().read_exact(&mut ready).unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let start_time = read_start_time(Path::new("/proc"), pid).unwrap();
        let record = ProcessInstance { pid, start_time, ..ProcessInstance::current().unwrap() };
        record.reap().unwrap();
        assert!(record.is_alive(), "a running process is left alone");
        record.stop(Duration::from_millis(200)).unwrap();
        assert!(!record.is_alive());
        let earlier = ProcessInstance { start_time: start_time - 1, ..record.clone() };
        earlier.reap().unwrap();
        assert_eq!(read_stat(Path::new("/proc"), pid), Some((start_time, true)), "it was another one");
        record.reap().unwrap();
        assert_eq!(read_stat(Path::new("/proc"), pid), None, "nothing of it stays");
        // A second call is not an error, nor is a process that is not a child.
        record.reap().unwrap();
    }

    #[test]
    fn digest_is_sha256() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "abc").unwrap();
        assert_eq!(
            program_digest(file.path()).unwrap(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
