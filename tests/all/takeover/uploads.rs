//! Uploads of the agent: none that is wrong, damaged, cut or misplaced replaces the old one.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;
use shepherd::model::remote_step::DEFAULT_AGENT_PATH;
use shepherd::takeover::host_keys::HostKeyExpectation;
use shepherd::takeover::machine_takeover::take_over_machine;
use shepherd::takeover::ssh_error::{Blame, SshError};
use shepherd::takeover::takeover_error::TakeoverError;
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, TcpStream};

use super::{fake_agent, far, machine, request, take, uploaded_names};
use crate::sshd::{Setup, target_at, wait_until};

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

/// Root would run any program that another user of the machine puts there.
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
