//! Takeovers against real OpenSSH servers.
//!
//! The agent in most of these tests is a copy of `/bin/sh` with bytes appended. It is a real ELF program: run as `agent
//! enroll`, it executes the file `enroll` of its working directory, where a test puts the response.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener as StdListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use prost::Message;
use shepherd::model::host_key::HostKey;
use shepherd::model::remote_step::DEFAULT_AGENT_PATH;
use shepherd::proto::agent::v1::{
    EnrollError, EnrollRequest, EnrollResponse, EnrollSuccess, Supervision, enroll_error, enroll_response,
};
use shepherd::roleserver::state_directory::StateDirectory;
use shepherd::takeover::agent_binary::AgentBinary;
use shepherd::takeover::client_key::ClientKey;
use shepherd::takeover::exec::{CommandExit, RunOutcome, STDERR_CAP, STDOUT_CAP};
use shepherd::takeover::host_keys::HostKeyExpectation;
use shepherd::takeover::machine_takeover::{TakeoverError, TakeoverResult, TakeoverStep, take_over_machine};
use shepherd::takeover::session::{LoginMethod, SshSession, SshSettings, SshTarget};
use shepherd::takeover::ssh_error::{Blame, SshError};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::harness::child::Detached;
use crate::sshd::{Setup, Sshd, target_at, wait_until};

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
async fn a_changed_host_key_is_refused_and_nothing_is_sent_to_the_host() {
    let before = machine(Setup::default()).unwrap();
    let pinned = connect(&before, &HostKeyExpectation::PinOnFirstUse).await.unwrap().host_key().clone();
    drop(before);

    let after = machine(Setup::default()).unwrap();
    let error = take(&after, &HostKeyExpectation::Pinned(vec![pinned.clone()]), &fake_agent(0).unwrap())
        .await
        .unwrap_err();
    let TakeoverError::HostKeyChanged(changed) = &error else { panic!("{error}") };
    assert_eq!(changed.expected, std::slice::from_ref(&pinned));
    let offered = openssh_fingerprint(&after, "host_ed25519").unwrap();
    assert_eq!(changed.offered.fingerprint(), offered);
    assert_eq!(error.blame(), Blame::Configuration);
    let text = error.to_string();
    for part in [&pinned.fingerprint(), &offered, &format!("127.0.0.1:{}", after.port())] {
        assert!(text.contains(part), "{text}");
    }
    // The server's log shows whether it received a user name, and whether a key was tried.
    wait_until("the server to see the end", || after.log().contains("Connection closed by")).unwrap();
    let log = after.log();
    assert!(!log.contains("ublickey") && !log.contains("user") && !log.contains("Accepted"), "{log}");
    assert_eq!(uploaded_names(&after), [""; 0]);

    let both = HostKeyExpectation::Pinned(vec![pinned, changed.offered.clone()]);
    connect(&after, &both).await.expect("a key that a person allowed is accepted");
}

#[tokio::test]
async fn a_host_that_shows_another_kind_of_key_than_the_pinned_one_is_refused_with_that_key() {
    let sshd = machine(Setup { host_keys: &["ecdsa"], ..Setup::default() }).unwrap();
    let pinned = HostKey { algorithm: "ssh-ed25519".to_owned(), key: vec![1; 51] };
    let error = refused(&sshd, &HostKeyExpectation::Pinned(vec![pinned])).await.unwrap();
    let SshError::HostKeyChanged(changed) = error else { panic!("{error}") };
    assert_eq!(changed.offered.algorithm, "ecdsa-sha2-nistp256");
    assert_eq!(changed.offered.fingerprint(), openssh_fingerprint(&sshd, "host_ecdsa").unwrap());
    assert!(!sshd.log().contains("user"), "{}", sshd.log());
}

#[tokio::test]
async fn a_host_with_several_keys_shows_the_pinned_one() {
    let only = machine(Setup { host_keys: &["ecdsa", "ed25519", "rsa"], ..Setup::default() }).unwrap();
    let best = connect(&only, &HostKeyExpectation::PinOnFirstUse).await.unwrap();
    assert_eq!(best.host_key().algorithm, "ssh-ed25519");
    let line = fs::read_to_string(only.directory().join("host_ecdsa.pub")).unwrap();
    let blob =
        base64::Engine::decode(&base64::engine::general_purpose::STANDARD, line.split(' ').nth(1).unwrap())
            .unwrap();
    let ecdsa = HostKey { algorithm: "ecdsa-sha2-nistp256".to_owned(), key: blob };
    let session = connect(&only, &HostKeyExpectation::Pinned(vec![ecdsa.clone()])).await.unwrap();
    assert_eq!(*session.host_key(), ecdsa);
}

#[tokio::test]
async fn a_host_with_only_an_rsa_key_is_refused_with_what_to_do() {
    let sshd = machine(Setup { host_keys: &["rsa"], ..Setup::default() }).unwrap();
    let error = refused(&sshd, &HostKeyExpectation::PinOnFirstUse).await.unwrap();
    let text = error.to_string().replace(&sshd.port().to_string(), "PORT");
    insta::assert_snapshot!(text, @"127.0.0.1:PORT offers only RSA host keys, which Shepherd does not accept; give it an Ed25519 host key (run `ssh-keygen -A` on it and restart its SSH server)");
    assert_eq!(error.blame(), Blame::Configuration);
}

#[tokio::test]
async fn a_refused_key_says_what_the_host_accepts_and_which_line_would_help() {
    let sshd = machine(Setup::default()).unwrap();
    let mut settings = sshd.settings();
    settings.key = ClientKey::generate().unwrap();
    let line = settings.key.authorized_keys_line();
    let connected =
        SshSession::connect(&settings, &sshd.target().unwrap(), &HostKeyExpectation::PinOnFirstUse, far())
            .await;
    let Err(error) = connected else { panic!("let in") };
    let SshError::AuthenticationRejected { tried, accepted, .. } = &error else { panic!("{error}") };
    assert_eq!(
        (tried.as_slice(), accepted.as_slice()),
        (["publickey"].as_slice(), ["publickey".to_owned()].as_slice())
    );
    assert!(error.to_string().contains(&line), "{error}");
}

/// SHA-512 crypt of `correct horse` for the user root, made for this test.
const SHADOW: &str = "root:$6$shepherdtest$sBSIT0SbrXeOxDubFD2dweIBREoZE2Csk4/Jz8AjZwhd2TDRnJUfvUaYyU5lpxRrYjDgumyjUacy8Q80wXzXo1:19000:0:99999:7:::\n";

/// The host key that the server proves, and a login by this password with that key known or not.
async fn log_in_by_password(
    config: &str,
    password: &str,
    is_known: bool,
) -> Result<(Sshd, Result<SshSession, SshError>)> {
    let shadow = Some(SHADOW.to_owned());
    let sshd = Sshd::start(&Setup { config: config.to_owned(), shadow, ..Setup::default() })?;
    let session = connect(&sshd, &HostKeyExpectation::PinOnFirstUse).await?;
    let known = HostKeyExpectation::Pinned(vec![session.host_key().clone()]);
    session.close().await;
    let mut settings = sshd.settings();
    settings.login = LoginMethod::Password(password.into());
    let expectation = if is_known { known } else { HostKeyExpectation::PinOnFirstUse };
    let session = SshSession::connect(&settings, &sshd.target()?, &expectation, far()).await;
    Ok((sshd, session))
}

#[tokio::test]
async fn a_password_is_a_method_of_its_own_and_shown_nowhere() {
    let config = "PasswordAuthentication yes";
    let (sshd, session) = log_in_by_password(config, "correct horse", true).await.unwrap();
    let output = session.unwrap().exec("testing", "echo in", Bytes::new()).await.unwrap();
    assert_eq!(output.stdout, b"in\n");
    assert!(sshd.log().contains("Accepted password for root"), "{}", sshd.log());

    let (sshd, refused) = log_in_by_password(config, "wrong horse", true).await.unwrap();
    let Err(error) = refused else { panic!("let in") };
    let SshError::AuthenticationRejected { tried, .. } = &error else { panic!("{error}") };
    assert_eq!(*tried, ["password"]);
    for shown in [error.to_string(), format!("{error:?}"), sshd.log()] {
        assert!(!shown.contains("wrong horse"), "{shown}");
    }
}

#[tokio::test]
async fn a_password_is_not_sent_to_a_host_whose_key_is_not_known() {
    let (sshd, refused) =
        log_in_by_password("PasswordAuthentication yes", "correct horse", false).await.unwrap();
    let Err(error) = refused else { panic!("the password was sent to a host that nobody knows") };
    let SshError::UnknownHostKey { offered, .. } = &error else { panic!("{error}") };
    assert!(error.to_string().contains(&offered.fingerprint()), "{error}");
    assert_eq!(error.blame(), Blame::Configuration);
    assert!(!sshd.log().contains(" password for "), "{}", sshd.log());
}

#[tokio::test]
async fn a_host_that_refuses_the_key_gets_no_password() {
    let shadow = Some(SHADOW.to_owned());
    let config = "PasswordAuthentication yes".to_owned();
    let sshd = Sshd::start(&Setup { config, shadow, ..Setup::default() }).unwrap();
    let mut settings = sshd.settings();
    settings.key = ClientKey::generate().unwrap();
    let connected =
        SshSession::connect(&settings, &sshd.target().unwrap(), &HostKeyExpectation::PinOnFirstUse, far())
            .await;
    let Err(SshError::AuthenticationRejected { tried, .. }) = connected else { panic!("let in") };
    assert_eq!(tried, ["publickey"]);
}

#[tokio::test]
async fn a_host_that_asks_questions_is_answered_with_the_password() {
    let config = "UsePAM yes\nKbdInteractiveAuthentication yes";
    let (_sshd, session) = log_in_by_password(config, "correct horse", true).await.unwrap();
    session.unwrap();
    let (_sshd, refused) = log_in_by_password(config, "wrong horse", true).await.unwrap();
    let Err(error) = refused else { panic!("let in") };
    let SshError::AuthenticationRejected { tried, .. } = &error else { panic!("{error}") };
    assert_eq!(*tried, ["keyboard-interactive"]);
}

#[tokio::test]
async fn a_command_is_fed_and_its_output_capped_and_its_end_reported() {
    let sshd = Sshd::start(&Setup::default()).unwrap();
    let session = connect(&sshd, &HostKeyExpectation::PinOnFirstUse).await.unwrap();
    let exec = |command: &'static str, stdin: Bytes| session.exec("testing", command, stdin);

    let fed = exec("wc -c; echo oops >&2; exit 3", Bytes::from(vec![1; 5_000_000])).await.unwrap();
    assert_eq!(
        (fed.exit, fed.stdout.as_slice(), fed.stderr.as_slice()),
        (CommandExit::Status(3), b"5000000\n".as_slice(), b"oops\n".as_slice())
    );

    let flood = exec("head -c 3000000 /dev/zero; head -c 200000 /dev/zero >&2", Bytes::new()).await.unwrap();
    assert_eq!((flood.stdout.len(), flood.stderr.len()), (STDOUT_CAP, STDERR_CAP));
    assert_eq!(flood.dropped_bytes, 3_200_000 - (STDOUT_CAP + STDERR_CAP) as u64);

    let killed = exec("kill -9 $$", Bytes::new()).await.unwrap();
    assert_eq!(killed.exit, CommandExit::Signal("KILL".to_owned()));

    // A command that does not read its large input still ends with its own status.
    let unread = exec("exit 4", Bytes::from(vec![1; 20_000_000])).await.unwrap();
    assert_eq!(unread.exit, CommandExit::Status(4));

    // A daemon that keeps the pipes open does not delay the response.
    let started = Instant::now();
    let daemon = exec("sleep 300 & echo $!", Bytes::new()).await.unwrap();
    assert!(daemon.success() && started.elapsed() < Duration::from_secs(250));
    let pid = String::from_utf8(daemon.stdout).unwrap();
    exec_ok(&session, &format!("kill {}", pid.trim())).await.unwrap();
    session.close().await;
    wait_until("an orderly end", || sshd.log().contains("Received disconnect from")).unwrap();
}

async fn exec_ok(session: &SshSession, command: &str) -> Result<Vec<u8>> {
    let output = session.exec("testing", command, Bytes::new()).await?;
    ensure!(output.success(), "{command}: {}", output.summary());
    Ok(output.stdout)
}

#[tokio::test]
async fn a_command_that_exceeds_its_limit_is_reported_and_loses_its_pipes() {
    let sshd = Sshd::start(&Setup::default()).unwrap();
    let mut settings = sshd.settings();
    // So long that even a busy host has started the command.
    settings.exec_timeout = Duration::from_millis(10_500);
    let session =
        SshSession::connect(&settings, &sshd.target().unwrap(), &HostKeyExpectation::PinOnFirstUse, far())
            .await
            .unwrap();
    // OpenSSH sends no signal to root's commands. They notice that their output is not read any more.
    let command = "trap '' PIPE; touch ~/started; while echo x; do sleep 0.1; done; touch ~/ended";
    let error = session.exec("waiting for ever", command, Bytes::new()).await.unwrap_err();
    assert_eq!(
        error.to_string().replace(&sshd.port().to_string(), "PORT"),
        "127.0.0.1:PORT did not answer within 10.5s (--agent_ssh_exec_timeout) while waiting for ever"
    );
    assert!(sshd.home().join("started").exists());
    drop(session);
    wait_until("the command to notice", || sshd.home().join("ended").exists()).unwrap();
}

#[tokio::test]
async fn an_argument_vector_reaches_the_machine_unchanged_and_a_dropped_connection_is_an_outcome() {
    let sshd = Sshd::start(&Setup::default()).unwrap();
    let session = connect(&sshd, &HostKeyExpectation::PinOnFirstUse).await.unwrap();
    let run = |argv: &[&str]| {
        let argv: Vec<String> = argv.iter().map(|word| (*word).to_owned()).collect();
        let session = &session;
        async move { session.run_argv("rebooting", &argv).await }
    };
    let RunOutcome::Finished(output) =
        run(&["printf", "<%s>", "$(id)", "it's", "a b\n", "", "*"]).await.unwrap()
    else {
        panic!("no outcome")
    };
    assert_eq!(String::from_utf8(output.stdout).unwrap(), "<$(id)><it's><a b\n><><*>");
    assert!(run(&["a\0b"]).await.unwrap_err().to_string().contains("NUL"));

    // The effect of a reboot on the connection.
    let outcome = run(&["sh", "-c", "kill -9 $PPID; exit 0"]).await.unwrap();
    let RunOutcome::Unknown(error) = outcome else { panic!("{outcome:?}") };
    assert!(matches!(error, SshError::ConnectionLost { .. }), "{error}");
    assert!(run(&["true"]).await.is_err(), "what could not be started is an error");
}

#[tokio::test]
async fn a_step_that_may_not_begin_does_not() {
    let agent = fake_agent(0).unwrap();
    for (stopped_at, logged_in) in [("login", false), ("probe", true), ("upload", true), ("enrolment", true)]
    {
        let sshd = machine(Setup::default()).unwrap();
        let begun = Mutex::new(vec![]);
        let outcome = take_over_machine(
            &sshd.settings(),
            &sshd.target().unwrap(),
            &HostKeyExpectation::PinOnFirstUse,
            &agent,
            DEFAULT_AGENT_PATH,
            &request(),
            far(),
            |step| {
                let name = match step {
                    TakeoverStep::Connect => "login",
                    TakeoverStep::Probe => "probe",
                    TakeoverStep::Upload { .. } => "upload",
                    TakeoverStep::Enroll => "enrolment",
                };
                if name == stopped_at {
                    return Err("the lease is lost".to_owned());
                }
                begun.lock().unwrap().push(name);
                Ok(())
            },
        )
        .await;
        let error = outcome.unwrap_err();
        let expected = format!(
            "the takeover of {} was stopped before the {stopped_at}: the lease is lost",
            sshd.target().unwrap().address()
        );
        assert_eq!((error.to_string(), error.blame()), (expected, Blame::Deadline));
        let begun = begun.into_inner().unwrap();
        assert!(!begun.contains(&stopped_at) && begun.len() < 4, "{begun:?}");
        if logged_in {
            // The server logs it separately from its response.
            wait_until("the server to tell of the login", || sshd.log().contains("Accepted publickey"))
                .unwrap();
        } else {
            assert!(!sshd.log().contains("Accepted publickey"), "{}", sshd.log());
        }
        assert_eq!(uploaded_names(&sshd).is_empty(), stopped_at != "enrolment", "{stopped_at}");
        assert!(!sshd.home().join("request").exists(), "{stopped_at}: it was enrolled");
    }
}

#[tokio::test]
async fn nothing_is_attempted_after_the_deadline_and_nothing_outlives_it() {
    let sshd = machine(Setup::default()).unwrap();
    let target = sshd.target().unwrap();
    let agent = fake_agent(0).unwrap();
    let past = Instant::now();
    let first_use = HostKeyExpectation::PinOnFirstUse;
    let outcome = take_over_machine(
        &sshd.settings(),
        &target,
        &first_use,
        &agent,
        DEFAULT_AGENT_PATH,
        &request(),
        past,
        |_| Ok(()),
    )
    .await;
    assert!(matches!(outcome, Err(TakeoverError::Ssh(SshError::Deadline { .. }))), "{outcome:?}");
    assert!(!sshd.log().contains("Connection from"), "{}", sshd.log());

    fs::write(sshd.home().join("enroll"), "while echo; do sleep 0.1; done\n").unwrap();
    let deadline = Instant::now() + Duration::from_secs(5);
    let (settings, request) = (sshd.settings(), request());
    let taking = take_over_machine(
        &settings,
        &target,
        &first_use,
        &agent,
        DEFAULT_AGENT_PATH,
        &request,
        deadline,
        |_| Ok(()),
    );
    // How late events are on this host at that moment.
    let late = async {
        tokio::time::sleep_until(deadline).await;
        deadline.elapsed()
    };
    let (outcome, late) = tokio::join!(taking, late);
    let Err(error @ TakeoverError::Ssh(SshError::Deadline { .. })) = outcome else { panic!("{outcome:?}") };
    assert_eq!(error.blame(), Blame::Deadline);
    assert!(deadline.elapsed() < late + Duration::from_secs(2), "{:?}", deadline.elapsed());
    wait_until("the sessions to end", || sshd.log().contains("disconnect") || sshd.log().contains("closed"))
        .unwrap();
}

#[tokio::test]
async fn a_silent_a_closed_and_a_foreign_port_are_distinguished() {
    let mut settings = SshSettings::new(ClientKey::generate().unwrap());
    settings.greeting_timeout = Duration::from_millis(300);
    let target = |port| SshTarget { host: "127.0.0.1".to_owned(), port, user: "root".to_owned() };
    let failure = async |settings: &SshSettings, target: &SshTarget| {
        SshSession::connect(settings, target, &HostKeyExpectation::PinOnFirstUse, far()).await.err().unwrap()
    };

    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = silent.local_addr().unwrap().port();
    let error = failure(&settings, &target(port)).await;
    assert_eq!(
        error.to_string().replace(&port.to_string(), "PORT"),
        "127.0.0.1:PORT did not answer within 300ms (--agent_ssh_greeting_timeout) while waiting for its greeting"
    );
    assert_eq!(error.blame(), Blame::Network);
    // The socket is shut down although the library still waited for the host's first line.
    let (mut accepted, _) = silent.accept().await.unwrap();
    let mut bytes = vec![];
    tokio::time::timeout(Duration::from_secs(30), accepted.read_to_end(&mut bytes)).await.unwrap().unwrap();
    assert!(bytes.starts_with(b"SSH-2.0-"));
    drop(silent);

    // Bound and not listening: no other program gets the port meanwhile.
    let closed = tokio::net::TcpSocket::new_v4().unwrap();
    closed.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let error = failure(&settings, &target(closed.local_addr().unwrap().port())).await;
    assert!(matches!(error, SshError::ConnectionRefused { .. }), "{error}");
    assert_eq!(error.blame(), Blame::Machine);

    let foreign = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = foreign.local_addr().unwrap().port();
    let answering = tokio::spawn(async move {
        let (mut stream, _) = foreign.accept().await?;
        tokio::io::AsyncWriteExt::write_all(&mut stream, b"HTTP/1.1 400 Bad Request\r\n\r\n").await
    });
    settings.greeting_timeout = Duration::from_secs(20);
    let error = failure(&settings, &target(port)).await;
    assert!(matches!(error, SshError::Handshake { .. }), "{error}");
    answering.await.unwrap().unwrap();

    settings.connect_timeout = Duration::from_secs(20);
    let nameless = SshTarget { host: "not a host".to_owned(), ..target(22) };
    let error = failure(&settings, &nameless).await;
    assert!(matches!(error, SshError::Unresolvable { .. }), "{error}");
}

#[tokio::test]
async fn a_host_that_greets_and_then_falls_silent_has_the_time_of_a_login() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let greeting = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await?;
        tokio::io::AsyncWriteExt::write_all(&mut stream, b"SSH-2.0-slow\r\n").await?;
        stream.read_to_end(&mut vec![]).await
    });
    let mut settings = SshSettings::new(ClientKey::generate().unwrap());
    settings.greeting_timeout = Duration::from_secs(20);
    settings.login_timeout = Duration::from_secs(1);
    let target = SshTarget { host: "127.0.0.1".to_owned(), port, user: "root".to_owned() };
    let started = Instant::now();
    let connected = SshSession::connect(&settings, &target, &HostKeyExpectation::PinOnFirstUse, far()).await;
    let Err(error) = connected else { panic!("connected") };
    assert_eq!(
        error.to_string().replace(&port.to_string(), "PORT"),
        "127.0.0.1:PORT did not answer within 1 s (--agent_ssh_login_timeout) while agreeing on keys"
    );
    assert!(started.elapsed() >= Duration::from_secs(1));
    greeting.await.unwrap().unwrap();
}

#[tokio::test]
async fn dropping_a_takeover_closes_its_connection_at_once() {
    let sshd = machine(Setup::default()).unwrap();
    fs::write(sshd.home().join("enroll"), "touch started; while echo; do sleep 0.1; done\n").unwrap();
    let agent = fake_agent(0).unwrap();
    {
        let first_use = HostKeyExpectation::PinOnFirstUse;
        let taking = take(&sshd, &first_use, &agent);
        tokio::pin!(taking);
        let home = sshd.home();
        let enrolling = tokio::task::spawn_blocking(move || {
            wait_until("the enrolment", || home.join("started").exists())
        });
        tokio::select! {
            outcome = &mut taking => panic!("{outcome:?}"),
            waited = enrolling => waited.unwrap().unwrap(),
        }
        assert!(!sshd.sessions().is_empty());
    }
    let before = std::time::Instant::now();
    wait_until("the server to see the end", || {
        sshd.log().contains("Connection closed by")
            || sshd.log().contains("Read error from")
            || sshd.log().contains("Disconnected from")
    })
    .unwrap();
    assert!(before.elapsed() < Duration::from_secs(20), "{:?}", before.elapsed());
}

#[tokio::test]
async fn an_agent_for_another_processor_is_refused_before_anything_is_uploaded() {
    let uname = "#!/bin/sh\n[ \"$1\" = -m ] && echo mips64 || echo Linux\n".to_owned();
    let sshd = machine(Setup { programs: vec![("uname", uname)], ..Setup::default() }).unwrap();
    let error = take(&sshd, &HostKeyExpectation::PinOnFirstUse, &fake_agent(0).unwrap()).await.unwrap_err();
    let TakeoverError::WrongArchitecture { machine, .. } = &error else { panic!("{error}") };
    assert_eq!(machine, "mips64");
    assert_eq!(uploaded_names(&sshd), [""; 0]);
}

#[tokio::test]
async fn an_upload_that_arrives_damaged_keeps_the_old_agent() {
    // The probe finds the right file, and the upload computes a wrong digest of its bytes.
    let lie = "#!/bin/sh\ncat >/dev/null; echo 0000000000000000000000000000000000000000000000000000000000000000  -\n";
    let sshd = machine(Setup { programs: vec![("sha256sum", lie.to_owned())], ..Setup::default() }).unwrap();
    let path = sshd.home().join(DEFAULT_AGENT_PATH);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, b"the old agent").unwrap();
    let error = take(&sshd, &HostKeyExpectation::PinOnFirstUse, &fake_agent(0).unwrap()).await.unwrap_err();
    let TakeoverError::StepFailed { step: "upload", reason, .. } = &error else { panic!("{error}") };
    assert!(reason.starts_with("it arrived damaged"), "{reason}");
    assert_eq!(error.blame(), Blame::Machine);
    assert_eq!(fs::read(&path).unwrap(), b"the old agent");
    assert_eq!(uploaded_names(&sshd), ["roleserver"]);
}

/// Root would run whatever another user of the machine puts there.
#[tokio::test]
async fn a_place_that_others_can_change_is_refused() {
    let sshd = machine(Setup::default()).unwrap();
    let agent = fake_agent(0).unwrap();
    let directory = sshd.home().join(DEFAULT_AGENT_PATH).parent().unwrap().to_owned();
    fs::create_dir_all(&directory).unwrap();
    let set_mode = |mode| fs::set_permissions(&directory, fs::Permissions::from_mode(mode)).unwrap();
    for mode in [0o757, 0o777, 0o1777] {
        set_mode(mode);
        // The right program, as another user may put it there.
        fs::write(directory.join("roleserver"), agent.content()).unwrap();
        fs::set_permissions(directory.join("roleserver"), fs::Permissions::from_mode(0o755)).unwrap();
        let outcome = take(&sshd, &HostKeyExpectation::PinOnFirstUse, &agent).await;
        let error = outcome.err().unwrap_or_else(|| panic!("{mode:o}: it was taken over"));
        let TakeoverError::UnsafeAgentPath { reason, .. } = &error else { panic!("{error}") };
        let expected = format!("{} can be changed by other users (", directory.display());
        assert!(reason.starts_with(&expected), "{reason}");
        assert_eq!(error.blame(), Blame::Configuration);
    }
    set_mode(0o755);
    take(&sshd, &HostKeyExpectation::PinOnFirstUse, &agent).await.unwrap();
    fs::rename(directory.join("roleserver"), directory.join("elsewhere")).unwrap();
    std::os::unix::fs::symlink("elsewhere", directory.join("roleserver")).unwrap();
    let error = take(&sshd, &HostKeyExpectation::PinOnFirstUse, &agent).await.unwrap_err().to_string();
    assert!(error.contains("/roleserver is a symbolic link. Let only "), "{error}");
}

#[tokio::test]
async fn a_filesystem_that_cannot_hold_or_run_the_agent_is_reported_as_such() {
    for (options, text) in [
        ("noexec", "its filesystem there does not allow programs (mounted noexec)"),
        ("size=256k", "there is no space left on the machine's filesystem"),
        ("ro", "the machine's filesystem is read-only"),
    ] {
        let sshd = machine(Setup { local: Some(options), ..Setup::default() }).unwrap();
        let agent = fake_agent(4_000_000).unwrap();
        let error = take(&sshd, &HostKeyExpectation::PinOnFirstUse, &agent).await.unwrap_err();
        let TakeoverError::StepFailed { step: "upload", reason, .. } = &error else {
            panic!("{options}: {error}")
        };
        assert!(reason.starts_with(text), "{options}: {reason}");
    }
}

/// Forwards bytes until the client has sent `budget`, then cuts both sides.
async fn cutting_proxy(to: u16, budget: Arc<AtomicU64>) -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let budget = Arc::clone(&budget);
            tokio::spawn(async move {
                let server = TcpStream::connect(("127.0.0.1", to)).await?;
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = server.into_split();
                let down = async { tokio::io::copy(&mut from_server, &mut to_client).await.map(|_| ()) };
                let up = async {
                    let mut limited = (&mut from_client).take(budget.load(Ordering::Relaxed));
                    tokio::io::copy(&mut limited, &mut to_server).await.map(|_| ())
                };
                tokio::select! { ended = down => ended, ended = up => ended }
            });
        }
    });
    Ok(port)
}

#[tokio::test]
async fn a_connection_cut_in_the_middle_of_the_upload_leaves_nothing_half_done() {
    let sshd = machine(Setup::default()).unwrap();
    let agent = fake_agent(8_000_000).unwrap();
    let budget = Arc::new(AtomicU64::new(4_000_000));
    let target = target_at(cutting_proxy(sshd.port(), Arc::clone(&budget)).await.unwrap()).unwrap();
    let settings = sshd.settings();
    let first_use = HostKeyExpectation::PinOnFirstUse;
    let request = request();
    let attempt = || {
        take_over_machine(&settings, &target, &first_use, &agent, DEFAULT_AGENT_PATH, &request, far(), |_| {
            Ok(())
        })
    };

    let error = attempt().await.unwrap_err();
    let TakeoverError::Ssh(SshError::ConnectionLost { operation: "uploading the agent", .. }) = &error else {
        panic!("{error}")
    };
    assert_eq!(error.blame(), Blame::Network);
    wait_until("the machine to clean up", || uploaded_names(&sshd).is_empty()).unwrap();

    budget.store(u64::MAX, Ordering::Relaxed);
    assert!(attempt().await.unwrap().uploaded);
    assert_eq!(uploaded_names(&sshd), ["roleserver"]);
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

#[tokio::test]
async fn a_host_that_does_not_answer_the_connection_is_given_up_after_its_limit() {
    // A listener whose queue is full drops further connections, as a firewall or a dead machine does.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    let _full = socket.listen(1).unwrap();
    let mut filling = vec![];
    while let Ok(stream) = tokio::time::timeout(Duration::from_millis(500), TcpStream::connect(address)).await
    {
        filling.push(stream.unwrap());
        assert!(filling.len() < 100, "the queue never fills");
    }
    let mut settings = SshSettings::new(ClientKey::generate().unwrap());
    settings.connect_timeout = Duration::from_millis(700);
    let target = SshTarget { host: "127.0.0.1".to_owned(), port: address.port(), user: "root".to_owned() };
    let started = Instant::now();
    let connected = SshSession::connect(&settings, &target, &HostKeyExpectation::PinOnFirstUse, far()).await;
    let Err(error) = connected else { panic!("connected") };
    assert!(matches!(error, SshError::Timeout { operation: "connecting", .. }), "{error}");
    assert_eq!(error.blame(), Blame::Network);
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

/// Forwards bytes until `mute`, then keeps both connections open and sends nothing more.
async fn muting_proxy(to: u16, mute: CancellationToken) -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    tokio::spawn(async move {
        let (mut client, _) = listener.accept().await?;
        let mut server = TcpStream::connect(("127.0.0.1", to)).await?;
        tokio::select! {
            copied = tokio::io::copy_bidirectional(&mut client, &mut server) => copied.map(|_| ()),
            () = mute.cancelled() => std::future::pending().await,
        }
    });
    Ok(port)
}

#[tokio::test]
async fn a_host_that_falls_silent_in_the_middle_of_a_command_is_noticed_before_the_limit() {
    let sshd = Sshd::start(&Setup::default()).unwrap();
    let cut = CancellationToken::new();
    let port = muting_proxy(sshd.port(), cut.clone()).await.unwrap();
    let mut settings = sshd.settings();
    settings.keepalive_interval = Duration::from_secs(1);
    let target = target_at(port).unwrap();
    let session =
        SshSession::connect(&settings, &target, &HostKeyExpectation::PinOnFirstUse, far()).await.unwrap();
    let command = session.exec("waiting", "sleep 45", Bytes::new());
    let started = Instant::now();
    // Long enough for several keepalives: a host that is merely quiet is not given up.
    let muting = async {
        tokio::time::sleep(Duration::from_secs(6)).await;
        cut.cancel();
    };
    let (outcome, ()) = tokio::join!(command, muting);
    let error = outcome.unwrap_err();
    assert!(error.to_string().ends_with("was lost while waiting: the host stopped answering"), "{error}");
    assert!(started.elapsed() > Duration::from_secs(6) && started.elapsed() < Duration::from_secs(40));
}
