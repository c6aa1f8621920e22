//! Commands on a machine: their input, output, end and limits.

use std::time::Duration;

use anyhow::{Result, ensure};
use bytes::Bytes;
use shepherd::takeover::exec::{CommandExit, RunOutcome, STDERR_CAP, STDOUT_CAP};
use shepherd::takeover::host_keys::HostKeyExpectation;
use shepherd::takeover::session::SshSession;
use shepherd::takeover::ssh_error::SshError;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{connect, far};
use crate::sshd::{Setup, Sshd, target_at, wait_until};

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
