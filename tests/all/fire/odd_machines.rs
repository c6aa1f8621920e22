//! Machines in odd conditions, with everything real but their hardware: `shepherdctl why` states what
//! `docs/machines.md` promises for each of them, and the machine ends as described there.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::fire::{DISTURBED, count, counted, end};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::endpoint;
use crate::harness::line::{Line, Quality};
use crate::harness::rack::Rack;
use crate::sshd::Setup;

/// A login shell that prints much text before it does anything.
const BANNER: &str = "#!/bin/sh\necho Welcome to $(hostname); echo os=Plan9; echo digest=none; printf '\\001\\002 no line'; echo\n\
                      exec sh -c \"$SSH_ORIGINAL_COMMAND\"\n";
/// A login shell that finds only the programs in `~/bin`.
const BARE: &str = "#!/bin/sh\nPATH=$HOME/bin\nexport PATH\nexec /bin/sh -c \"$SSH_ORIGINAL_COMMAND\"\n";

/// Files that were made under a machine's home.
fn left_at(home: &Path) -> Result<Vec<String>> {
    let found = Command::new("find").arg(home).args(["-type", "f"]).output()?;
    ensure!(found.status.success(), "find failed");
    Ok(String::from_utf8(found.stdout)?.lines().map(str::to_owned).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rack_of_odd_machines_ends_as_documented_and_why_is_true_of_each() -> TestResult {
    let mut rack = Rack::new("fire_odd").await?;
    let plain = Setup::default;
    rack.add("banner", Setup { forced_command: Some(BANNER), ..plain() })?;
    rack.add("ipv6", Setup { listen: "::1", ..plain() })?;
    rack.add("noexec", Setup { local: Some("noexec"), ..plain() })?;
    rack.add("full", Setup { local: Some("size=256k"), ..plain() })?;
    rack.add("readonly", Setup { local: Some("ro"), ..plain() })?;
    rack.add("bare", Setup { forced_command: Some(BARE), ..plain() })?;
    let bin = rack.sshd("bare")?.home().join("bin");
    std::fs::create_dir(&bin)?;
    for program in ["id", "ls", "sh", "uname"] {
        symlink(Path::new("/usr/bin").join(program), bin.join(program))?;
    }
    rack.add("reset", plain())?;
    let half = std::fs::metadata(rack.agent()?)?.len() / 2;
    let line = Line::to(rack.sshd("reset")?.port(), Quality { cut_after: half, ..Quality::PERFECT }).await?;
    rack.behind("reset", line.port());

    let shepherd = rack.shepherd("shepherd", &endpoint()?, &[])?;
    for id in ["banner", "ipv6"] {
        rack.until_why(id, "Ready", &[]).await?;
    }
    for (id, text) in [
        ("noexec", "its filesystem there does not allow programs (mounted noexec)"),
        ("full", "there is no space left on the machine's filesystem"),
        ("readonly", "the machine's filesystem is read-only"),
    ] {
        let sentence = format!("the upload on {} failed: {text}", rack.address(id)?);
        rack.until_why(id, "Provided", &[&sentence]).await?;
    }
    let sentence = format!(
        "{} has none of sha256sum, openssl and shasum, so an upload to it cannot be checked; install coreutils on it",
        rack.address("bare")?
    );
    rack.until_why("bare", "Provided", &[&sentence]).await?;
    let sentence = format!("{} was lost while uploading the agent", rack.address("reset")?);
    rack.until_why("reset", "Provided", &[&sentence]).await?;
    assert_eq!(count(&rack.fleet, DISTURBED).await?, 0);
    let mut sentences = 0;
    for id in ["noexec", "full", "readonly", "bare", "reset"] {
        let why = rack.why(id)?;
        // Each is retried, and states when.
        assert!(why["next"]["at"].is_string() || why["work"][0].is_string(), "{why:#}");
        sentences += 1;
    }
    end(&rack.fleet, shepherd).await?;
    crate::sshd::wait_until("the machine to clean up", || {
        rack.sshd("reset").is_ok_and(|sshd| left_at(&sshd.home()).is_ok_and(|left| left.is_empty()))
    })?;
    assert_eq!(left_at(&rack.sshd("bare")?.home())?, [""; 0]);
    Ok(counted(
        "odd machines",
        format!("2 of 2 Ready all the same, {sentences} of 5 distinguished by why, none rebooted"),
    )?)
}

fn fingerprint(sshd: &crate::sshd::Sshd) -> Result<String> {
    let key = sshd.directory().join("host_ed25519.pub");
    let output = Command::new("ssh-keygen").arg("-lf").arg(key).output()?;
    let text = String::from_utf8(output.stdout)?;
    Ok(text.split_whitespace().nth(1).context("a fingerprint")?.to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_that_another_machine_got_is_recognized_by_its_key_and_that_machine_is_left_alone()
-> TestResult {
    let mut rack = Rack::new("fire_address").await?;
    rack.add("ours", Setup::default())?;
    let stranger = rack.sshd("ours")?.beside(&Setup::default())?;
    let address = Line::to(rack.sshd("ours")?.port(), Quality::PERFECT).await?;
    rack.behind("ours", address.port());
    let flags = [
        "--heartbeat_interval=1s",
        "--recovery_silence_timeout=6s",
        "--recovery_ladder=restart-agent:8s:2,reboot:8s:1",
        "--agent_start_backoff_initial=1s",
    ];
    let shepherd = rack.shepherd("shepherd", &endpoint()?, &flags)?;
    rack.until_why("ours", "Ready", &[]).await?;

    // Our machine disconnects, and the network assigns its address to another machine.
    address.lead_to(stranger.port());
    rack.silence("ours")?;
    let (pinned, offered) = (fingerprint(rack.sshd("ours")?)?, fingerprint(&stranger)?);
    let allow = format!("shepherdctl allow host-key sim/ours --fingerprint {offered}");
    rack.until_why("ours", "NeedsHuman", &["host-key-changed", &pinned, &offered, &allow]).await?;
    let log = stranger.log();
    assert!(log.contains("Connection from"), "nobody looked: {log}");
    assert!(!log.contains("Accepted") && !log.contains("user"), "somebody logged in there: {log}");
    let stronger = "SELECT count(*) FROM intent WHERE kind NOT IN ('create', 'restart-agent')";
    assert_eq!(count(&rack.fleet, stronger).await?, 0);

    address.lead_to(rack.sshd("ours")?.port());
    rack.shepherdctl(&["retry", "sim/ours", "--reason", "it has its address again"])?;
    rack.until_why("ours", "Ready", &[]).await?;
    assert_eq!(count(&rack.fleet, stronger).await?, 0);
    end(&rack.fleet, shepherd).await?;
    Ok(counted(
        "another machine's address",
        "both fingerprints reported, nobody logged in there, Ready when it was back",
    )?)
}
