//! The role server with a shepherd: the real program, enrolled over its standard streams, calling a real server over
//! mutual TLS.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use prost::Message as _;
use shepherd::proto::agent::v1 as wire;
use shepherd::proto::agent::v1::enroll_error::Kind;
use shepherd::proto::agent::v1::enroll_response::Result as Answer;
use shepherd::roleserver::process::ProcessRecord;
use shepherd::roleserver::state_directory::StateDirectory;
use tonic::Status;

use self::callback::{Callback, CapturedHeartbeat, curious};
use self::odd_disk::OddDisk;
use crate::harness::aloud::TestResult;
use crate::harness::child::Detached;
use crate::harness::port::reserved;
use crate::harness::program::own_role_server;
use crate::harness::promtool::promtool;

pub(crate) mod callback;
mod children;
mod odd_disk;
mod own_unit;
#[cfg(debug_assertions)]
mod slow_disk;
mod updating;

const PATIENCE: Duration = Duration::from_mins(5);

/// One machine: a state directory whose processes end with this value.
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
        let (_, response) = self.enroll_bytes(&request.encode_to_vec())?;
        match response.result {
            Some(Answer::Error(error)) => Ok(error),
            other => bail!("not refused: {other:?}"),
        }
    }

    pub(crate) fn agent(&self) -> Result<ProcessRecord> {
        self.state().read_agent_process()?.context("no agent was recorded")
    }

    pub(crate) fn supervisor(&self) -> Result<ProcessRecord> {
        self.state().read_supervisor_process()?.context("no supervisor was recorded")
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
fn agent_is_left_alone_by_a_repetition_and_replaced_by_a_higher_fence() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    let first = machine.enroll(&request(&callback, 1))?;
    let agent = machine.agent()?;
    let again = machine.enroll(&request(&callback, 1))?;
    assert_eq!(again.public_key, first.public_key);
    assert_eq!(machine.agent()?, agent);
    assert_eq!(machine.processes()?.len(), 2, "one supervisor, one agent");

    // A hung agent neither ends on request nor sends heartbeats.
    signal(agent.pid, rustix::process::Signal::STOP);
    let taken_over = machine.enroll(&request(&callback, 2))?;
    assert_eq!(taken_over.public_key, first.public_key);
    assert!(!agent.is_alive());
    assert!(machine.agent()?.is_alive());
    assert_eq!(machine.processes()?.len(), 2, "one supervisor, one agent");
    Ok(wait_for("a heartbeat of the new fence", || {
        Ok(callback
            .heartbeats()
            .iter()
            .any(|observations| observations.request.access_fence == 2)
            .then_some(()))
    })?)
}

#[test]
fn enrolment_brings_back_what_was_killed_with_its_supervisor() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    machine.enroll(&request(&callback, 1))?;
    let (supervisor, agent) = (machine.supervisor()?, machine.agent()?);
    for process in [&supervisor, &agent] {
        signal(process.pid, rustix::process::Signal::KILL);
    }
    wait_for("the end of both", || Ok((!supervisor.is_alive() && !agent.is_alive()).then_some(())))?;
    // The same fence: a repetition still has to leave a running agent behind.
    machine.enroll(&request(&callback, 1))?;
    assert!(machine.agent()?.is_alive());
    assert_eq!(machine.processes()?.len(), 2);
    Ok(())
}

#[test]
fn enrolments_at_once_leave_one_agent_of_the_highest_fence() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    let fences = [3, 1, 4, 2];
    let answers: Vec<Result<_>> = std::thread::scope(|scope| {
        let handles = fences.map(|fence| {
            let bytes = request(&callback, fence).encode_to_vec();
            let machine = &machine;
            scope.spawn(move || machine.enroll_bytes(&bytes))
        });
        handles.into_iter().map(|thread| thread.join().map_err(|_| anyhow::anyhow!("panicked"))?).collect()
    });
    for (fence, answer) in fences.into_iter().zip(answers) {
        match answer?.1.result {
            Some(Answer::Success(_)) => {}
            Some(Answer::Error(error)) => {
                assert_eq!(error.kind(), Kind::StaleFence, "{error:?}");
                assert!(error.current_fence > fence, "{error:?}");
            }
            None => panic!("no answer"),
        }
    }
    assert_eq!(machine.state().read_enrolment()?.context("not enrolled")?.access_fence(), 4);
    assert_eq!(machine.processes()?.len(), 2, "one supervisor, one agent");
    Ok(wait_for("a heartbeat of the highest fence", || {
        Ok(callback
            .heartbeats()
            .last()
            .is_some_and(|observations| observations.request.access_fence == 4)
            .then_some(()))
    })?)
}

#[test]
fn refused_enrolment_changes_nothing() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    machine.enroll(&request(&callback, 5))?;
    let before = files(&machine.path())?;
    assert_eq!(before.len(), 4);

    let stale = machine.refusal(&request(&callback, 4))?;
    assert_eq!((stale.kind(), stale.current_fence), (Kind::StaleFence, 5));
    let other = "0b1a4a52-4a5c-4b66-8a5e-00000000ffff".to_owned();
    let machine_id = wire::EnrollRequest { machine_id: other.clone(), ..request(&callback, 6) };
    assert_eq!(machine.refusal(&machine_id)?.kind(), Kind::OtherMachine);
    let bmdb_id = wire::EnrollRequest { bmdb_id: other, ..request(&callback, 6) };
    assert_eq!(machine.refusal(&bmdb_id)?.kind(), Kind::OtherBmdb);
    let invalid = wire::EnrollRequest { ca_certificates: vec![vec![0; 9]], ..request(&callback, 6) };
    assert_eq!(machine.refusal(&invalid)?.kind(), Kind::Invalid);
    let (_, garbage) = machine.enroll_bytes(b"GET / HTTP/1.1\r\n\r\n")?;
    assert!(matches!(garbage.result, Some(Answer::Error(error)) if error.kind() == Kind::Invalid));

    assert_eq!(files(&machine.path())?, before);
    assert!(machine.agent()?.is_alive());
    Ok(())
}

#[test]
fn agent_keeps_calling_when_refused_and_finds_the_endpoint_that_works() -> TestResult {
    let refuses = Callback::start(|_| Err(Status::unauthenticated("")))?;
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    let closed = reserved()?.to_string();
    let endpoints = vec![closed, refuses.endpoint.clone(), callback.endpoint.clone()];
    let ca_certificates = vec![refuses.ca.clone(), callback.ca.clone()];
    // The period in which a heartbeat is repeated unchanged.
    let heartbeat_interval_seconds = 10;
    machine.enroll(&wire::EnrollRequest {
        endpoints,
        ca_certificates,
        heartbeat_interval_seconds,
        ..request(&callback, 1)
    })?;
    wait_for("three heartbeats in a row", || Ok((callback.heartbeats().len() >= 3).then_some(())))?;
    assert_eq!(refuses.heartbeats().len(), 1, "what works is kept to");
    assert_eq!(
        refuses.heartbeats()[0].request.seq,
        callback.heartbeats()[0].request.seq,
        "a retry is the same heartbeat"
    );

    let status = machine.command("status").output()?;
    let text = String::from_utf8(status.stdout)?;
    assert!(text.contains("0b1a4a52-4a5c-4b66-8a5e-000000000001"), "{text}");
    assert!(text.contains("access 1"), "{text}");
    assert!(text.contains(&format!("to {}", callback.endpoint)), "{text}");
    let tree: Vec<_> = text.lines().skip_while(|line| !line.starts_with("root ")).collect();
    let states = tree.iter().map(|line| {
        let words = line.trim_start_matches(|c: char| !c.is_ascii_alphabetic()).split_whitespace();
        words.take(2).collect::<Vec<_>>().join(" ")
    });
    let expected = [
        "root healthy",
        "callback healthy",
        "cluster healthy",
        "logs healthy",
        "metrics healthy",
        "status healthy",
        "update healthy",
    ];
    assert_eq!(states.collect::<Vec<_>>(), expected, "{text}");

    let metrics = String::from_utf8(machine.command("metrics").output()?.stdout)?;
    for line in [
        "roleserver_runnable_state{path=\"root.callback\",state=\"healthy\"} 1",
        "roleserver_runnable_state{path=\"root.callback\",state=\"dead\"} 0",
        "roleserver_control_plane_running 0",
    ] {
        assert!(metrics.lines().any(|message| message == line), "{line} is not in\n{metrics}");
    }
    assert_eq!(promtool(&["check", "metrics"], &metrics)?, "", "{metrics}");
    Ok(())
}

#[test]
fn endpoint_that_accepts_and_says_nothing_is_left_after_the_time_limit() -> TestResult {
    let silent = std::net::TcpListener::bind("127.0.0.1:0")?;
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    let endpoints = vec![silent.local_addr()?.to_string(), callback.endpoint.clone()];
    machine.enroll(&wire::EnrollRequest { endpoints, ..request(&callback, 1) })?;
    Ok(wait_for("heartbeats at the other endpoint", || Ok((callback.heartbeats().len() >= 2).then_some(())))?)
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

#[test]
fn agent_moves_where_an_answer_sends_it_and_remembers() -> TestResult {
    let new = Callback::start(curious())?;
    let (endpoint, ca) = (new.endpoint.clone(), new.ca.clone());
    let old = Callback::start(move |_| {
        Ok(wire::HeartbeatResponse {
            endpoints: vec![endpoint.clone()],
            ca_certificates: vec![ca.clone()],
            ..Default::default()
        })
    })?;
    let machine = Machine::new()?;
    machine.enroll(&request(&old, 1))?;
    wait_for("a heartbeat at the new place", || Ok((!new.heartbeats().is_empty()).then_some(())))?;
    let incarnation = new.heartbeats()[0].request.incarnation.clone();
    let at_old = old.heartbeats().len();
    signal(machine.agent()?.pid, rustix::process::Signal::KILL);
    wait_for("a heartbeat of the next incarnation", || {
        Ok(new
            .heartbeats()
            .iter()
            .any(|observations| observations.request.incarnation != incarnation)
            .then_some(()))
    })?;
    assert_eq!(old.heartbeats().len(), at_old, "the old place receives no more heartbeats");
    Ok(())
}

#[test]
fn agent_survives_settings_that_lead_nowhere() -> TestResult {
    let nowhere = reserved()?.to_string();
    let callback = Callback::start(move |_| {
        Ok(wire::HeartbeatResponse { endpoints: vec![nowhere.clone()], ..Default::default() })
    })?;
    let machine = Machine::new()?;
    machine.enroll(&request(&callback, 1))?;
    Ok(wait_for("heartbeats after the bad advice", || Ok((callback.heartbeats().len() >= 3).then_some(())))?)
}

#[test]
fn answer_that_says_no_costs_no_connection() -> TestResult {
    let count = AtomicUsize::new(0);
    let callback = Callback::start(move |_| match count.fetch_add(1, Ordering::SeqCst) {
        0 => Err(Status::unavailable("the database is not available; try again")),
        1 => Err(Status::unauthenticated("")),
        _ => Ok(wire::HeartbeatResponse::default()),
    })?;
    let machine = Machine::new()?;
    machine.enroll(&request(&callback, 1))?;
    wait_for("heartbeats after the refusals", || Ok((callback.heartbeats().len() >= 5).then_some(())))?;
    assert_eq!(callback.connections(), 1);
    Ok(())
}

#[test]
fn connection_stays_while_other_endpoints_come_and_go() -> TestResult {
    let nowhere = reserved()?.to_string();
    let own = Arc::new(OnceLock::<String>::new());
    let (known, count) = (own.clone(), AtomicUsize::new(0));
    let callback = Callback::start(move |_| {
        let mut endpoints: Vec<_> = known.get().cloned().into_iter().collect();
        if count.fetch_add(1, Ordering::SeqCst).is_multiple_of(2) {
            endpoints.insert(0, nowhere.clone());
        }
        Ok(wire::HeartbeatResponse { endpoints, ..Default::default() })
    })?;
    own.set(callback.endpoint.clone()).map_err(|_| anyhow::anyhow!("set twice"))?;
    let machine = Machine::new()?;
    machine.enroll(&request(&callback, 1))?;
    wait_for("six heartbeats", || Ok((callback.heartbeats().len() >= 6).then_some(())))?;
    assert_eq!(callback.connections(), 1);
    let learned = machine.state().read_learned_settings(1)?.context("nothing was learnt")?;
    assert_eq!(
        learned.settings.endpoints.first(),
        Some(&callback.endpoint),
        "what works comes first after a restart"
    );
    assert_eq!(learned.fallback, None);
    Ok(())
}

/// A machine that was enrolled, whose processes ended, and whose disk then failed.
fn enrolled_and_ended(callback: &Callback) -> Result<Machine> {
    let machine = Machine::new()?;
    machine.enroll(&request(callback, 1))?;
    wait_for("a heartbeat", || Ok((!callback.heartbeats().is_empty()).then_some(())))?;
    signal(machine.supervisor()?.pid, rustix::process::Signal::TERM);
    wait_for("the end of both", || Ok(machine.processes()?.is_empty().then_some(())))?;
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

/// As a loss of power, a disk error, or a release that writes other records leaves them.
#[test]
fn damaged_hint_never_refuses_an_enrolment() -> TestResult {
    let hints = ["agent.json", "supervisor.json", "learned.json", "last_heartbeat.json", "time.json"];
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    machine.enroll(&request(&callback, 1))?;
    let contents = ["", "{\"pid\": 47", "{\"process\": {\"pid\": 7}, \"format\": 9}"];
    for (fence, content) in (2..).zip(contents) {
        let before = (machine.supervisor()?, machine.agent()?);
        for name in hints {
            std::fs::write(machine.path().join(name), content)?;
        }
        machine.enroll(&request(&callback, fence))?;
        let after = (machine.supervisor()?, machine.agent()?);
        assert!(after.0.is_alive() && after.1.is_alive(), "{content:?}");
        // Those of before had no record any more, and were found by their locks.
        assert!(!before.0.is_alive() && !before.1.is_alive(), "{content:?}: two agents run");
    }
    Ok(())
}

#[test]
fn damaged_state_and_a_second_agent_are_answered_in_words() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = Machine::new()?;
    let output = machine.command("run").output()?;
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr)?.contains("this machine is not enrolled"));

    machine.enroll(&request(&callback, 1))?;
    let second = machine.command("run").output()?;
    assert_eq!(second.status.code(), Some(1));
    let text = String::from_utf8(second.stderr)?;
    assert!(text.contains("another role server already runs in"), "{text}");

    std::fs::write(machine.path().join("enrolment.json"), b"{\"machine_id\":")?;
    let error = machine.refusal(&request(&callback, 2))?;
    assert_eq!(error.kind(), Kind::Failed);
    assert!(error.message.contains("enrolment.json is damaged"), "{}", error.message);
    Ok(())
}
