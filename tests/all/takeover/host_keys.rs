//! Which host keys are accepted, and what is shown of one that is refused.

use std::fs;

use shepherd::model::host_key::HostKey;
use shepherd::takeover::client_key::ClientKey;
use shepherd::takeover::host_keys::HostKeyExpectation;
use shepherd::takeover::session::SshSession;
use shepherd::takeover::ssh_error::{Blame, SshError};
use shepherd::takeover::takeover_error::TakeoverError;

use super::{connect, fake_agent, far, machine, openssh_fingerprint, refused, take, uploaded_names};
use crate::sshd::{Setup, wait_until};

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
