//! The host's own words in errors, in each way that they can come.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;

use shepherd::takeover::client_key::ClientKey;
use shepherd::takeover::host_keys::HostKeyExpectation;
use shepherd::takeover::session::{SshSession, SshSettings};
use shepherd::takeover::ssh_error::{Blame, SshError};

use super::{fake_agent, far, refused, take};
use crate::sshd::{Setup, Sshd, target_at};

#[tokio::test]
async fn key_that_is_accepted_as_the_first_factor_is_not_called_refused() {
    let config =
        "AuthenticationMethods publickey,keyboard-interactive\nUsePAM yes\nKbdInteractiveAuthentication yes";
    let sshd = Sshd::start(&Setup { config: config.to_owned(), ..Setup::default() }).unwrap();
    let error = refused(&sshd, &HostKeyExpectation::PinOnFirstUse).await.unwrap();
    let text = error.to_string();
    let SshError::SecondFactorRequired { accepted, required, .. } = &error else { panic!("{error}") };
    assert_eq!(*accepted, ["publickey"]);
    assert_eq!(*required, ["keyboard-interactive"]);
    assert!(text.contains("--ssh_password_path") && !text.contains("authorized_keys"), "{text}");
    assert_eq!(error.blame(), Blame::Configuration);
}

#[tokio::test]
async fn program_that_answers_instead_of_the_shell_is_quoted() {
    let forced = Setup {
        forced_command: Some("#!/bin/sh\necho 'Use the user \"keeper\" instead.'; echo; exit 142\n"),
        ..Setup::default()
    };
    let sftp = Setup { config: "ForceCommand internal-sftp".to_owned(), ..Setup::default() };
    for (setup, expected) in [
        (forced, "it ended with status 142: Use the user \"keeper\" instead. If a forced command"),
        (sftp, "it ended with status 1: This service allows sftp connections only. If a forced command"),
    ] {
        let sshd = Sshd::start(&setup).unwrap();
        let taken = take(&sshd, &HostKeyExpectation::PinOnFirstUse, &fake_agent(0).unwrap()).await;
        let text = taken.unwrap_err().to_string();
        assert!(text.contains(expected) && text.ends_with("in the device list (User)"), "{text}");
    }
}

#[tokio::test]
async fn banner_and_disconnect_are_quoted() {
    let banner = tempfile::NamedTempFile::new().unwrap();
    fs::write(banner.path(), "Maintenance\u{1b}[1m until noon\n").unwrap();
    let connect = async |config: String| {
        let sshd = Sshd::start(&Setup { config, ..Setup::default() }).unwrap();
        let mut settings = sshd.settings();
        settings.key = ClientKey::generate().unwrap();
        let expectation = HostKeyExpectation::PinOnFirstUse;
        let connected = SshSession::connect(&settings, &sshd.target().unwrap(), &expectation, far()).await;
        connected.err().unwrap().to_string()
    };
    let text = connect(format!("Banner {}", banner.path().display())).await;
    assert!(text.contains("(it sent the message \"Maintenance [1m until noon\")"), "{text}");
    let text = connect("MaxAuthTries 1".to_owned()).await;
    assert!(text.contains("the host disconnected with \"Too many authentication failures\""), "{text}");
}

#[tokio::test]
async fn words_instead_of_a_version_line_are_quoted() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let turning_away = std::thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        let mut version = [0; 64];
        let _read = stream.read(&mut version)?;
        stream.write_all(b"Not allowed at this time\r\n")
    });
    let settings = SshSettings::new(ClientKey::generate().unwrap());
    let target = target_at(port).unwrap();
    let connected = SshSession::connect(&settings, &target, &HostKeyExpectation::PinOnFirstUse, far()).await;
    let error = connected.err().unwrap();
    assert!(matches!(error, SshError::Handshake { .. }), "{error}");
    assert!(error.to_string().ends_with("it sent \"Not allowed at this time\""), "{error}");
    turning_away.join().unwrap().unwrap();
}
