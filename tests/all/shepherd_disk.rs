//! A shepherd with a disk that fills up: it is an issue before it is full, the shepherd continues, and the issue ends when there
//! is space.

use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use shepherd::model::issues::find_issues;

use crate::bmdb_kit::until;
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{ALL_READY, Fleet, Program, endpoint};

/// A disk of 4 MiB for temporary files, which only the shepherd sees.
const SMALL_DISK: &str = "mount -t tmpfs -o size=4m tmpfs \"$TMPDIR\"; exec \"$@\"";

/// The same command in a mount namespace of its own, where `temporary` is a small disk.
fn with_small_disk(command: &Command, temporary: &Path) -> Command {
    let mut wrapped = Command::new("unshare");
    wrapped.args(["--mount", "--propagation", "private"]);
    if !rustix::process::geteuid().is_root() {
        wrapped.arg("--map-root-user");
    }
    wrapped.args(["sh", "-euc", SMALL_DISK, "sh"]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => wrapped.env(name, value),
            None => wrapped.env_remove(name),
        };
    }
    wrapped.env("TMPDIR", temporary).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    wrapped
}

/// Takes space until so many per cent of the disk are free.
fn leave_free(filler: &Path, percent: u64) -> Result<()> {
    let mut file = File::options().create(true).append(true).open(filler)?;
    loop {
        let usage = rustix::fs::fstatvfs(&file)?;
        ensure!(usage.f_blocks * usage.f_frsize <= 4 << 20, "it is not the small disk");
        if usage.f_bavail <= usage.f_blocks * percent / 100 {
            return Ok(());
        }
        match file.write_all(&[b'x'; 4096]) {
            Err(error) if error.kind() == ErrorKind::StorageFull => return Ok(()),
            written => written?,
        }
    }
}

/// Messages of the issue about a file system of a shepherd's host.
async fn storage_issues(fleet: &Fleet) -> Result<Vec<String>> {
    let inputs = fleet.database.bmdb().await?.read_issue_inputs().await?;
    let issues = find_issues(&inputs).into_iter().filter(|issue| issue.id == "storage-low");
    let of_hosts = issues.filter(|issue| issue.subject.starts_with("host "));
    Ok(of_hosts.map(|issue| issue.message).collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_disk_of_a_shepherd_is_an_issue_until_there_is_space() -> TestResult {
    let fleet = Fleet::start("shepherd_disk", &["--machine_count", "2"]).await?;
    let temporary = fleet.directory().join("temporary");
    std::fs::create_dir(&temporary)?;
    let command = fleet.unheard_shepherd("small", &[endpoint()?], &[])?;
    let mut shepherd = Program::spawn(&mut with_small_disk(&command, &temporary))?;
    fleet.until("every machine is Ready", ALL_READY).await?;
    let inside = temporary.strip_prefix("/").unwrap_or(&temporary);
    let process = PathBuf::from("/proc").join(shepherd.pid().to_string());
    let filler = process.join("root").join(inside).join("filler");
    let is_reported = async |text: &str| {
        let found = storage_issues(&fleet).await?;
        Ok(found.iter().any(|message| message.contains("temporary files") && message.contains(text)))
    };
    assert!(!is_reported("").await?, "an empty disk is reported");

    leave_free(&filler, 5)?;
    until("the disk is nearly full", async || is_reported("is nearly full").await).await?;
    leave_free(&filler, 0)?;
    until("the disk is full", async || is_reported("is full").await).await?;
    assert!(shepherd.ended()?.is_none(), "it ended");
    std::fs::remove_file(&filler)?;
    until("the issue has ended", async || Ok(!is_reported("").await?)).await?;
    let status = shepherd.terminate().await?;
    assert!(status.success(), "{status}");
    Ok(())
}
