//! The role server with a shepherd: the real program, enrolled over its standard streams, calling a real server over
//! mutual TLS.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use prost::Message as _;
use shepherd::proto::agent::v1 as wire;
use shepherd::proto::agent::v1::enroll_error::Kind;
use shepherd::proto::agent::v1::enroll_response::Result as Answer;
use shepherd::roleserver::process::ProcessRecord;
use shepherd::roleserver::state_directory::StateDirectory;

use self::callback::{Callback, CapturedHeartbeat, curious};
use self::odd_disk::OddDisk;
use crate::harness::aloud::TestResult;
use crate::harness::child::Detached;
use crate::harness::program::own_role_server;

pub(crate) mod callback;
mod children;
mod endpoints;
mod enrolment;
mod full_disk;
pub(crate) mod odd_disk;
mod own_unit;
mod signing;
#[cfg(debug_assertions)]
mod slow_disk;
mod updating;

const PATIENCE: Duration = Duration::from_mins(5);

/// One machine: a state directory with processes that end with this value.
pub(crate) struct Machine {
    directory: tempfile::TempDir,
    pub(crate) environment: Vec<(&'static str, String)>,
    /// The path of its role server.
    pub(crate) program: PathBuf,
    _detached: Detached,
}

impl Machine {
    pub(crate) fn new() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let detached = Detached::naming(&directory.path().join("state"))?;
        let program = env!("CARGO_BIN_EXE_roleserver").into();
        Ok(Self { directory, environment: Vec::new(), program, _detached: detached })
    }

    /// A machine with its own copy of the program, which may be replaced.
    pub(crate) fn with_own_program() -> Result<Self> {
        let mut machine = Self::new()?;
        machine.program = machine.directory.path().join("roleserver");
        own_role_server(&machine.program)?;
        Ok(machine)
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    pub(crate) fn state(&self) -> StateDirectory {
        StateDirectory::from_path(self.path())
    }

    pub(crate) fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(verb).arg("--state_dir").arg(self.path());
        command.env_remove("ROLESERVER_SUPERVISION").env_remove("ROLESERVER_LOG");
        command.envs(self.environment.iter().cloned());
        command
    }

    fn enroll_bytes(&self, bytes: &[u8]) -> Result<(Output, wire::EnrollResponse)> {
        let mut child = self
            .command("enroll")
            .args(["--supervision", "detached"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        child.stdin.take().context("no stdin")?.write_all(bytes)?;
        // Returns only when no process holds the pipes any more, as an SSH session would.
        let output = child.wait_with_output()?;
        let response = wire::EnrollResponse::decode(output.stdout.as_slice())?;
        Ok((output, response))
    }

    pub(crate) fn enroll(&self, request: &wire::EnrollRequest) -> Result<wire::EnrollSuccess> {
        let (output, response) = self.enroll_bytes(&request.encode_to_vec())?;
        match response.result {
            Some(Answer::Success(success)) => Ok(success),
            other => bail!("not enrolled: {other:?} {}", String::from_utf8_lossy(&output.stderr)),
        }
    }

    fn refusal(&self, request: &wire::EnrollRequest) -> Result<wire::EnrollError> {
        let (output, response) = self.enroll_bytes(&request.encode_to_vec())?;
        let Some(Answer::Error(error)) = response.result else { bail!("not refused: {response:?}") };
        let expected = match error.kind() {
            Kind::Invalid => 2,
            Kind::StaleFence | Kind::OtherMachine | Kind::OtherBmdb => 4,
            _ => 1,
        };
        ensure!(output.status.code() == Some(expected), "{error:?}: {}", output.status);
        Ok(error)
    }

    pub(crate) fn agent(&self) -> Result<ProcessRecord> {
        self.state().read_agent_process()?.context("no agent was recorded")
    }

    pub(crate) fn supervisor(&self) -> Result<ProcessRecord> {
        self.state().read_supervisor_process()?.context("no supervisor was recorded")
    }

    /// Ends its role server, in order.
    pub(crate) fn end_role_server(&self) -> Result<()> {
        signal(self.supervisor()?.pid, rustix::process::Signal::TERM);
        wait_for("the end of both", || Ok(self.processes()?.is_empty().then_some(())))
    }

    /// Pids of every process that has this state directory as an argument.
    fn processes(&self) -> Result<Vec<i32>> {
        let needle = self.path().into_os_string().into_encoded_bytes();
        let mut pids = Vec::new();
        for entry in std::fs::read_dir("/proc")? {
            let path = entry?.path();
            let Some(pid) = path.file_name().and_then(|name| name.to_str()?.parse().ok()) else { continue };
            let line = std::fs::read(path.join("cmdline")).unwrap_or_default();
            if line.split(|byte| *byte == 0).any(|argument| argument == needle) {
                pids.push(pid);
            }
        }
        pids.sort_unstable();
        Ok(pids)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let state = self.state();
        for process in
            [state.read_supervisor_process(), state.read_agent_process()].into_iter().flatten().flatten()
        {
            let _ = process.stop(Duration::from_secs(2));
        }
        // Processes that a failed test left unrecorded still name this directory, which belongs to this test alone.
        for pid in self.processes().unwrap_or_default() {
            signal(pid, rustix::process::Signal::KILL);
        }
    }
}

pub(crate) fn signal(pid: i32, signal: rustix::process::Signal) {
    if let Some(pid) = rustix::process::Pid::from_raw(pid) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// Field 6 of `/proc/PID/stat`.
fn session_of(pid: i32) -> Result<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(')').context("no name")?;
    Ok(fields.split_whitespace().nth(3).context("no session")?.parse()?)
}

pub(crate) fn request(callback: &Callback, fence: i64) -> wire::EnrollRequest {
    wire::EnrollRequest {
        machine_id: "0b1a4a52-4a5c-4b66-8a5e-000000000001".to_owned(),
        endpoints: vec![callback.endpoint.clone()],
        ca_certificates: vec![callback.ca.clone()],
        lane: "access".to_owned(),
        fence,
        bmdb_id: "0b1a4a52-4a5c-4b66-8a5e-0000000000bb".to_owned(),
        heartbeat_interval_seconds: 1,
        session_id: String::new(),
        shepherd_time_ms: 0,
        signing_keys: Vec::new(),
        key_rotations: Vec::new(),
        replace_signing_keys: false,
        require_signed_declarations: false,
    }
}

/// Waits for the result of the closure. Its last error states what was missing.
pub(crate) fn wait_for<T>(what: &str, mut find: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = find()? {
            return Ok(found);
        }
        ensure!(Instant::now() < end, "waited {} s for {what}", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn files(directory: &Path) -> Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if ["enrolment.json", "identity.pk8", "agent.json", "supervisor.json"].contains(&name.as_str()) {
            files.push((path.clone(), std::fs::read(&path)?));
        }
    }
    files.sort();
    Ok(files)
}

#[test]
fn enrolled_machine_heartbeats_reports_and_comes_back_after_a_kill() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    // The longest wait for the hardware, after which the agent reports without it.
    let request = wire::EnrollRequest { heartbeat_interval_seconds: 20, ..request(&callback, 7) };
    let success = machine.enroll(&request)?;
    assert_eq!(success.request.as_ref(), Some(&request));
    assert_eq!(success.public_key.len(), 32);
    assert_eq!(success.supervision(), wire::Supervision::Detached);
    assert_eq!(success.warnings, Vec::<String>::new());
    assert_eq!(success.boot_id, std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim());

    let with_report = |observations: &CapturedHeartbeat| observations.request.hardware_report.is_some();
    let before = wait_for("a hardware report", || {
        let observations = callback.heartbeats();
        Ok(observations.iter().any(with_report).then_some(observations))
    })?;
    assert!(before[0].request.hardware_report.is_none(), "the first heartbeat is empty");
    assert!(with_report(&before[1]), "the second carries the report");
    let supervisor = machine.supervisor()?.pid;
    assert_eq!(session_of(supervisor)?, supervisor, "it outlives the SSH session by leading one of its own");
    let report = before[1].request.hardware_report.as_ref().context("no report")?;
    assert!(!report.cpus.is_empty() && report.memory.is_some_and(|memory| memory.installed_bytes > 0));
    for observations in &before {
        assert_eq!(observations.public_key, success.public_key);
        assert_eq!(observations.request.machine_id, request.machine_id);
        assert_eq!(observations.request.boot_id, success.boot_id);
        assert_eq!(observations.request.access_fence, 7);
    }
    assert!(before.windows(2).all(|pair| pair[0].request.seq < pair[1].request.seq));

    let killed = machine.agent()?;
    signal(killed.pid, rustix::process::Signal::KILL);
    let incarnation = before[0].request.incarnation.clone();
    let after = wait_for("a heartbeat of the next incarnation", || {
        Ok(callback
            .heartbeats()
            .into_iter()
            .find(|observations| observations.request.incarnation != incarnation))
    })?;
    let newest = callback
        .heartbeats()
        .into_iter()
        .rev()
        .find(|observations| observations.request.incarnation == incarnation);
    assert!(after.request.seq > newest.context("no heartbeat before")?.request.seq);
    assert_eq!(after.public_key, success.public_key);
    assert_ne!(machine.agent()?.pid, killed.pid);

    signal(machine.supervisor()?.pid, rustix::process::Signal::TERM);
    Ok(wait_for("the end of both", || Ok(machine.processes()?.is_empty().then_some(())))?)
}

#[test]
fn lost_key_is_generated_again_and_the_agent_proves_the_new_one() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    let first = machine.enroll(&request(&callback, 1))?;
    std::fs::remove_file(machine.path().join("identity.pk8"))?;
    let second = machine.enroll(&request(&callback, 1))?;
    assert_ne!(first.public_key, second.public_key);
    Ok(wait_for("a heartbeat with the new key", || {
        Ok(callback
            .heartbeats()
            .iter()
            .any(|observations| observations.public_key == second.public_key)
            .then_some(()))
    })?)
}

/// A machine that was enrolled. Its processes ended, and then its disk failed.
fn enrolled_and_ended(callback: &Callback) -> Result<Machine> {
    let machine = Machine::new()?;
    machine.enroll(&request(callback, 1))?;
    wait_for("a heartbeat", || Ok((!callback.heartbeats().is_empty()).then_some(())))?;
    machine.end_role_server()?;
    Ok(machine)
}

/// Waits for heartbeats of an incarnation that is not among the earlier ones.
fn wait_for_next_incarnation(callback: &Callback, before: &[CapturedHeartbeat]) -> Result<()> {
    let is_new = |observations: &&CapturedHeartbeat| {
        before.iter().all(|old| old.request.incarnation != observations.request.incarnation)
    };
    wait_for("heartbeats of the next incarnation", || {
        let observations = callback.heartbeats();
        Ok((observations.iter().filter(is_new).count() >= 3).then_some(()))
    })
}

#[test]
fn full_disk_does_not_silence_the_machine() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = enrolled_and_ended(&callback)?;
    let before = callback.heartbeats();
    let disk = OddDisk::full(&machine.path(), &machine.command("run"))?;
    wait_for_next_incarnation(&callback, &before)?;
    let log = disk.path().join("agent.log");
    assert_eq!(std::fs::metadata(&log)?.len(), 0, "the disk was not full");
    let recorded =
        || anyhow::Ok(StateDirectory::from_path(disk.path()).read_agent_process()?.context("no record")?.pid);
    assert_ne!(recorded()?, disk.pid());
    // As soon as there is space, an enrolment finds the agent that runs.
    disk.make_room()?;
    wait_for("the agent's record", || Ok((recorded()? == disk.pid()).then_some(())))?;
    drop(disk);
    Ok(())
}

#[test]
fn read_only_disk_does_not_silence_the_machine() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = enrolled_and_ended(&callback)?;
    let before = callback.heartbeats();
    let disk = OddDisk::read_only(&machine.path(), &machine.command("run"))?;
    wait_for_next_incarnation(&callback, &before)?;
    let written = std::fs::write(disk.path().join("x"), "").err().map(|error| error.kind());
    assert_eq!(written, Some(std::io::ErrorKind::ReadOnlyFilesystem));
    // The lock works there, too: one agent for one identity.
    let second = machine.command("run").output()?;
    assert!(String::from_utf8(second.stderr)?.contains("another role server already runs in"));
    Ok(())
}

#[test]
fn server_of_another_authority_hears_nothing() -> TestResult {
    let callback = Callback::start(curious())?;
    let stranger = Callback::start(curious())?;
    let machine = Machine::new()?;
    let ca_certificates = vec![stranger.ca.clone()];
    machine.enroll(&wire::EnrollRequest { ca_certificates, ..request(&callback, 1) })?;
    let last = wait_for("a failed heartbeat", || Ok(machine.state().read_last_heartbeat()?))?;
    let error = last.error.context("it was delivered")?;
    assert!(error.contains("certificate"), "{error}");
    assert!(callback.heartbeats().is_empty());
    Ok(())
}
