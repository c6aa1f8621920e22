//! Login by a password.

use anyhow::Result;
use bytes::Bytes;
use shepherd::takeover::client_key::ClientKey;
use shepherd::takeover::host_keys::HostKeyExpectation;
use shepherd::takeover::session::{LoginMethod, SshSession};
use shepherd::takeover::ssh_error::{Blame, SshError};

use super::{connect, far};
use crate::sshd::{Setup, Sshd};

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
