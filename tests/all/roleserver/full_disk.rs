//! A disk that fills up under a running role server: it is reported before it is full, everything continues on it, and the
//! report ends when there is space.

use std::path::Path;

use anyhow::{Context as _, Result};
use shepherd::proto::agent::v1 as wire;
use shepherd::roleserver::child::log::MAX_LOG_BYTES;
use shepherd::roleserver::state_directory::StateDirectory;

use super::callback::{Callback, CapturedHeartbeat, curious};
use super::odd_disk::OddDisk;
use super::{enrolled_and_ended, wait_for, wait_for_next_incarnation};
use crate::harness::aloud::TestResult;

/// What a heartbeat reports about the file systems of its machine; `None` without a release report.
fn storage_findings(heartbeat: &CapturedHeartbeat) -> Option<Vec<String>> {
    let report: &wire::ReleaseReport = heartbeat.request.release_report.as_ref()?;
    let findings = report.findings.iter().filter(|finding| finding.kind == "storage-low");
    Some(findings.map(|finding| finding.message.clone()).collect())
}

/// Waits until the newest release report has exactly one finding with this text, or none for an empty text. A report that
/// a server has acknowledged is not sent again.
fn wait_for_finding(callback: &Callback, text: &str) -> Result<()> {
    let what = format!("a heartbeat with the finding {text:?}");
    wait_for(&what, || {
        let newest = callback.heartbeats().iter().rev().find_map(storage_findings).unwrap_or_default();
        let is_reported = match text {
            "" => newest.is_empty(),
            text => newest.len() == 1 && newest[0].contains(text),
        };
        Ok(is_reported.then_some(()))
    })
}

/// The files in a directory that begin with a full stop, as temporary files do.
fn hidden_files(directory: &Path) -> Result<Vec<String>> {
    let mut hidden = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.starts_with('.') {
            hidden.push(name);
        }
    }
    Ok(hidden)
}

#[test]
fn disk_that_fills_up_is_reported_before_it_is_full_until_there_is_space() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = enrolled_and_ended(&callback)?;
    let before = callback.heartbeats();
    // A crash in the middle of a write left this.
    let half_written = machine.path().join(".time.json.5000000.0");
    std::fs::write(&half_written, "{")?;
    let mut disk = OddDisk::small(&machine.path(), &machine.command("run"))?;
    wait_for_next_incarnation(&callback, &before)?;
    wait_for_finding(&callback, "")?;
    assert!(!disk.path().join(".time.json.5000000.0").exists(), "a half-written file stays");

    disk.leave_free(5)?;
    wait_for_finding(&callback, "is nearly full")?;
    disk.leave_free(0)?;
    wait_for_finding(&callback, "is full")?;

    // Heartbeats continue, and no file is half written.
    let delivered = callback.heartbeats().len();
    wait_for(
        "heartbeats on a full disk",
        || Ok((callback.heartbeats().len() > delivered + 3).then_some(())),
    )?;
    assert!(!disk.has_ended()?, "the role server ended");
    wait_for("no half-written file", || Ok(hidden_files(&disk.path())?.is_empty().then_some(())))?;
    let state = StateDirectory::from_path(disk.path());
    state.read_enrolment()?.context("the enrolment is lost")?;
    let stored = state.read_last_heartbeat()?.context("no heartbeat was stored")?;

    disk.make_room()?;
    wait_for_finding(&callback, "")?;
    wait_for("the result of a heartbeat", || {
        let newest = state.read_last_heartbeat()?.context("no heartbeat is stored")?;
        Ok((newest.at_milliseconds > stored.at_milliseconds).then_some(()))
    })?;
    assert!(!disk.has_ended()?, "the role server ended");
    Ok(())
}

#[test]
fn log_that_is_too_long_is_shortened_on_a_full_disk() -> TestResult {
    let callback = Callback::start(curious())?;
    let machine = enrolled_and_ended(&callback)?;
    let before = callback.heartbeats();
    let disk = OddDisk::small_and_full(&machine.path(), &machine.command("run"))?;
    wait_for_next_incarnation(&callback, &before)?;
    let log = disk.path().join("agent.log");
    wait_for("a shorter log", || Ok((std::fs::metadata(&log)?.len() <= MAX_LOG_BYTES).then_some(())))?;
    assert!(!disk.path().join("agent.log.1").exists(), "half a copy stays");
    disk.make_room()?;
    wait_for_finding(&callback, "")?;
    Ok(())
}
