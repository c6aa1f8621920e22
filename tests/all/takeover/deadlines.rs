//! Takeovers that may not begin, or that exceed a time limit.

use std::fs;
use std::sync::Mutex;
use std::time::Duration;

use shepherd::model::remote_step::DEFAULT_AGENT_PATH;
use shepherd::roleserver::init_system::ENROLMENT_TIMEOUT;
use shepherd::takeover::client_key::ClientKey;
use shepherd::takeover::host_keys::HostKeyExpectation;
use shepherd::takeover::machine_takeover::{TakeoverStep, take_over_machine};
use shepherd::takeover::session::{SshSession, SshSettings, SshTarget};
use shepherd::takeover::ssh_error::{Blame, SshError};
use shepherd::takeover::takeover_error::TakeoverError;
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::Instant;

use super::{fake_agent, far, machine, request, take, uploaded_names};
use crate::sshd::{Setup, wait_until};

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
            wait_until("the server to log the login", || sshd.log().contains("Accepted publickey")).unwrap();
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
    assert!(error.to_string().contains("HTTP/1.1 400 Bad Request"), "{error}");
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
async fn a_host_that_does_not_answer_the_connection_is_given_up_after_its_limit() {
    // A listener with a full queue drops further connections, as a firewall or a dead machine does.
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

#[test]
fn enrolment_ends_before_its_ssh_command_does() {
    let settings = SshSettings::new(ClientKey::generate().unwrap());
    assert!(
        ENROLMENT_TIMEOUT + Duration::from_secs(5) <= settings.exec_timeout,
        "the response of an enrolment that takes {ENROLMENT_TIMEOUT:?} comes too late for {:?}",
        settings.exec_timeout
    );
}
