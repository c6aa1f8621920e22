//! Takeovers against real OpenSSH servers.
//!
//! The agent in most of these tests is a copy of `/bin/sh` with bytes appended. It is a real ELF program: run as `agent
//! enroll`, it executes the file `enroll` of its working directory, where a test puts the response.

mod commands;
mod deadlines;
mod host_keys;
mod host_words;
mod passwords;
mod uploads;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener as StdListener;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use prost::Message;
use shepherd::model::program_versions::version::parse_openssh_banner;
use shepherd::model::remote_step::DEFAULT_AGENT_PATH;
use shepherd::proto::agent::v1::{
    EnrollError, EnrollRequest, EnrollResponse, EnrollSuccess, Supervision, enroll_error, enroll_response,
};
use shepherd::roleserver::state_directory::StateDirectory;
use shepherd::takeover::agent_binary::AgentBinary;
use shepherd::takeover::client_key::ClientKey;
use shepherd::takeover::host_keys::HostKeyExpectation;
use shepherd::takeover::machine_takeover::{TakeoverResult, TakeoverStep, take_over_machine};
use shepherd::takeover::session::{SshSession, SshSettings, SshTarget};
use shepherd::takeover::ssh_error::{Blame, SshError};
use shepherd::takeover::takeover_error::TakeoverError;
use tokio::time::Instant;

use crate::harness::child::Detached;
use crate::sshd::{Setup, Sshd};

/// Runs each command as `sh` would in the test's home.
const IN_HOME: &str = "#!/bin/sh\ncd \"$HOME\" && exec sh -c \"$SSH_ORIGINAL_COMMAND\"\n";

fn far() -> Instant {
    Instant::now() + Duration::from_mins(5)
}

fn request() -> EnrollRequest {
    EnrollRequest {
        machine_id: "5a0c2c4e-0000-4000-8000-000000000001".to_owned(),
        endpoints: vec!["127.0.0.1:1".to_owned()],
        lane: "access".to_owned(),
        fence: 7,
        bmdb_id: "5a0c2c4e-0000-4000-8000-00000000000b".to_owned(),
        ..EnrollRequest::default()
    }
}

fn success() -> EnrollSuccess {
    EnrollSuccess { request: Some(request()), public_key: vec![7; 32], ..EnrollSuccess::default() }
}

/// A program with `extra` bytes appended. Run as an agent, it executes the file `enroll`.
fn fake_agent(extra: usize) -> Result<AgentBinary> {
    let mut content = fs::read("/bin/sh")?;
    // Bytes that do not compress well, and that differ from each other.
    content.extend((0..extra).map(|index| u8::try_from(index * 7 % 251).unwrap_or_default()));
    AgentBinary::from_content(content.into()).map_err(anyhow::Error::msg)
}

fn put_answer(home: &Path, result: enroll_response::Result) -> Result<()> {
    fs::write(home.join("answer"), EnrollResponse { result: Some(result) }.encode_to_vec())?;
    fs::write(home.join("enroll"), "cat > request && cat answer\n")?;
    Ok(())
}

fn machine(setup: Setup) -> Result<Sshd> {
    let sshd = Sshd::start(&Setup { forced_command: setup.forced_command.or(Some(IN_HOME)), ..setup })?;
    put_answer(&sshd.home(), enroll_response::Result::Success(success()))?;
    Ok(sshd)
}

async fn take(
    sshd: &Sshd,
    expectation: &HostKeyExpectation,
    agent: &AgentBinary,
) -> Result<TakeoverResult, TakeoverError> {
    let target = sshd
        .target()
        .map_err(|error| TakeoverError::NotLinux { address: String::new(), os: error.to_string() })?;
    take_over_machine(
        &sshd.settings(),
        &target,
        expectation,
        agent,
        DEFAULT_AGENT_PATH,
        &request(),
        far(),
        |_| Ok(()),
    )
    .await
}

async fn connect(sshd: &Sshd, expectation: &HostKeyExpectation) -> Result<SshSession> {
    Ok(SshSession::connect(&sshd.settings(), &sshd.target()?, expectation, far()).await?)
}

async fn refused(sshd: &Sshd, expectation: &HostKeyExpectation) -> Result<SshError> {
    match SshSession::connect(&sshd.settings(), &sshd.target()?, expectation, far()).await {
        Ok(_) => bail!("the connection was accepted"),
        Err(error) => Ok(error),
    }
}

/// The files in the agent's directory.
fn uploaded_names(sshd: &Sshd) -> Vec<String> {
    let directory = sshd.home().join(DEFAULT_AGENT_PATH);
    let entries = directory.parent().and_then(|directory| fs::read_dir(directory).ok());
    entries.into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

#[tokio::test]
async fn a_machine_is_taken_over_pinned_on_first_use_and_the_upload_skipped_the_second_time() {
    let sshd = machine(Setup::default()).unwrap();
    let agent = fake_agent(3_000_000).unwrap();
    let steps = Mutex::new(vec![]);
    let first = take_over_machine(
        &sshd.settings(),
        &sshd.target().unwrap(),
        &HostKeyExpectation::PinOnFirstUse,
        &agent,
        DEFAULT_AGENT_PATH,
        &request(),
        far(),
        |step| {
            steps.lock().unwrap().push(step);
            Ok(())
        },
    )
    .await
    .unwrap();
    assert!(first.uploaded);
    assert_eq!(first.success, success());
    let size = agent.size();
    assert_eq!(
        *steps.lock().unwrap(),
        [TakeoverStep::Connect, TakeoverStep::Probe, TakeoverStep::Upload { size }, TakeoverStep::Enroll]
    );
    let sent = fs::read(sshd.home().join("request")).unwrap();
    assert_eq!(EnrollRequest::decode(sent.as_slice()).unwrap(), request());
    assert_eq!(fs::read(sshd.home().join(DEFAULT_AGENT_PATH)).unwrap(), agent.content());
    assert_eq!(uploaded_names(&sshd), ["roleserver"]);
    let client = std::process::Command::new("ssh").arg("-V").output().unwrap();
    let client = String::from_utf8_lossy(&client.stderr).into_owned();
    let line = format!("SSH-2.0-{}", client.split(',').next().unwrap_or_default());
    assert!(
        first.openssh.is_some() && first.openssh == parse_openssh_banner(&line),
        "{client}: {:?}",
        first.openssh
    );
    assert_eq!(first.host_key.fingerprint(), openssh_fingerprint(&sshd, "host_ed25519").unwrap());

    let pinned = HostKeyExpectation::Pinned(vec![first.host_key.clone()]);
    let second = take(&sshd, &pinned, &agent).await.unwrap();
    assert_eq!((second.uploaded, &second.host_key), (false, &first.host_key));

    let newer = fake_agent(10).unwrap();
    assert!(take(&sshd, &pinned, &newer).await.unwrap().uploaded, "another program is another digest");
    assert_eq!(fs::read(sshd.home().join(DEFAULT_AGENT_PATH)).unwrap(), newer.content());
}

fn openssh_fingerprint(sshd: &Sshd, key: &str) -> Result<String> {
    let path = sshd.directory().join(key);
    let output = std::process::Command::new("ssh-keygen").arg("-lf").arg(path).output()?;
    let text = String::from_utf8(output.stdout)?;
    Ok(text.split_whitespace().nth(1).context("a fingerprint")?.to_owned())
}

#[tokio::test]
async fn a_login_shell_that_prints_a_banner_is_no_obstacle() {
    const NOISY: &str = "#!/bin/sh\necho Welcome to $(hostname); echo os=Plan9; echo digest=none; printf '\\001\\002 no line'; echo\n\
                         cd \"$HOME\" && exec sh -c \"$SSH_ORIGINAL_COMMAND\"\n";
    let sshd = machine(Setup { forced_command: Some(NOISY), ..Setup::default() }).unwrap();
    let agent = fake_agent(0).unwrap();
    assert!(take(&sshd, &HostKeyExpectation::PinOnFirstUse, &agent).await.unwrap().uploaded);
    assert!(!take(&sshd, &HostKeyExpectation::PinOnFirstUse, &agent).await.unwrap().uploaded);
}

#[tokio::test]
async fn a_rejection_by_the_agent_is_reported_by_its_kind() {
    let sshd = machine(Setup::default()).unwrap();
    let agent = fake_agent(0).unwrap();
    let error = EnrollError {
        kind: enroll_error::Kind::StaleFence.into(),
        message: "stale".to_owned(),
        current_fence: 9,
    };
    put_answer(&sshd.home(), enroll_response::Result::Error(error)).unwrap();
    let first_use = HostKeyExpectation::PinOnFirstUse;
    let refused = take(&sshd, &first_use, &agent).await.unwrap_err();
    assert!(matches!(refused, TakeoverError::StaleFence { machine_fence: 9, sent: 7, .. }), "{refused}");

    fs::write(sshd.home().join("enroll"), "echo the state directory is locked >&2; exit 2\n").unwrap();
    let TakeoverError::StepFailed { step, reason, .. } = take(&sshd, &first_use, &agent).await.unwrap_err()
    else {
        panic!()
    };
    assert_eq!(
        (step, reason.as_str()),
        (
            "enrolment",
            "it gave no answer that can be read; it ended with status 2: the state directory is locked"
        )
    );

    fs::write(sshd.home().join("enroll"), "head -c 3000000 /dev/zero\n").unwrap();
    let TakeoverError::StepFailed { reason, .. } = take(&sshd, &first_use, &agent).await.unwrap_err() else {
        panic!()
    };
    assert_eq!(reason, "it answered more than an enrolment can be");
}

#[test]
fn a_host_that_closes_during_the_handshake_is_the_machines_fault() {
    let listener = StdListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let closing = std::thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        stream.write_all(b"SSH-2.0-test\r\n")?;
        let mut some = [0; 16];
        stream.read_exact(&mut some)
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let settings = SshSettings::new(ClientKey::generate().unwrap());
    let target = SshTarget { host: "127.0.0.1".to_owned(), port, user: "root".to_owned() };
    let connected =
        runtime.block_on(SshSession::connect(&settings, &target, &HostKeyExpectation::PinOnFirstUse, far()));
    let Err(error) = connected else { panic!("connected") };
    assert!(matches!(&error, SshError::Handshake { .. }) && error.blame() == Blame::Machine, "{error}");
    closing.join().unwrap().unwrap();
}

/// Ends the processes that the real agent left, however the test ended.
struct RunningAgent(StateDirectory);

impl Drop for RunningAgent {
    fn drop(&mut self) {
        // The supervisor first: it would start the agent again.
        for process in
            [self.0.read_supervisor_process(), self.0.read_agent_process()].into_iter().flatten().flatten()
        {
            let _stopped = process.stop(Duration::from_secs(10));
        }
    }
}

#[tokio::test]
async fn the_real_role_server_is_taken_over_keeps_its_key_and_refuses_who_should_not_ask() {
    let state = tempfile::tempdir().unwrap();
    let state_path = state.path().join("state");
    let environment =
        format!("ROLESERVER_STATE_DIR={} ROLESERVER_SUPERVISION=detached", state_path.display());
    let sshd = Sshd::start(&Setup { environment, ..Setup::default() }).unwrap();
    let _detached = Detached::naming(&state_path).unwrap();
    let _running = RunningAgent(StateDirectory::from_path(state_path));
    let agent = AgentBinary::load(Path::new(env!("CARGO_BIN_EXE_roleserver"))).await.unwrap();
    let (settings, target, first_use) =
        (sshd.settings(), sshd.target().unwrap(), HostKeyExpectation::PinOnFirstUse);
    let ask = async |request: EnrollRequest| {
        take_over_machine(&settings, &target, &first_use, &agent, DEFAULT_AGENT_PATH, &request, far(), |_| {
            Ok(())
        })
        .await
    };

    let first = ask(request()).await.unwrap();
    assert!(first.uploaded);
    assert_eq!(first.success.supervision(), Supervision::Detached);
    assert_eq!(first.success.boot_id, fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim());
    let again = ask(EnrollRequest { fence: 9, ..request() }).await.unwrap();
    assert_eq!((again.uploaded, &again.success.public_key), (false, &first.success.public_key));

    let older = ask(EnrollRequest { fence: 8, ..request() }).await.unwrap_err();
    assert!(matches!(older, TakeoverError::StaleFence { machine_fence: 9, sent: 8, .. }), "{older}");
    let other = "5a0c2c4e-0000-4000-8000-0000000000ff".to_owned();
    let machine = ask(EnrollRequest { fence: 10, machine_id: other.clone(), ..request() }).await.unwrap_err();
    assert!(matches!(machine, TakeoverError::OtherMachine { .. }), "{machine}");
    let bmdb = ask(EnrollRequest { fence: 10, bmdb_id: other, ..request() }).await.unwrap_err();
    assert!(matches!(bmdb, TakeoverError::OtherBmdb { .. }), "{bmdb}");
    let invalid = ask(EnrollRequest { fence: 10, endpoints: vec![], ..request() }).await.unwrap_err();
    assert!(matches!(invalid, TakeoverError::MalformedRequest { .. }), "{invalid}");
}
