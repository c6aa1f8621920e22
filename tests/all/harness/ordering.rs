//! Orders that operators give with `shepherdctl`, and the states of machines that follow.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::harness::fleet::{Fleet, PATIENCE, Program};

/// Runs `shepherdctl`; returns its exit code and its output, with each run of white space as one space.
pub(crate) async fn ctl(fleet: &Fleet, line: &[&str]) -> Result<(Option<i32>, String)> {
    let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_shepherdctl"))
        .args(line)
        .env_clear()
        .env("USER", "kim")
        .env("SHEPHERD_BMDB_URL", &fleet.bmdb_url)
        .env("SHEPHERD_BMDB_DIALECT", fleet.database.dialect().as_str())
        .stdin(Stdio::null())
        .output()
        .await?;
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    Ok((output.status.code(), text.split_whitespace().collect::<Vec<_>>().join(" ")))
}

/// Runs a command that must succeed and print this part.
pub(crate) async fn says(fleet: &Fleet, line: &[&str], part: &str) -> Result<()> {
    let (code, text) = ctl(fleet, line).await?;
    ensure!(code == Some(0) && text.contains(part), "{line:?}: {code:?}, {text}");
    Ok(())
}

/// Runs a command that must be refused with this text: a person has to decide.
pub(crate) async fn refuses(fleet: &Fleet, line: &[&str], part: &str) -> Result<()> {
    let (code, text) = ctl(fleet, line).await?;
    ensure!(code == Some(4) && text.contains(part), "{line:?}: {code:?}, {text}");
    Ok(())
}

/// Runs a command with a wrong value, which must exit so and say `part`.
pub(crate) async fn is_wrong(fleet: &Fleet, line: &[&str], part: &str) -> Result<()> {
    let (code, text) = ctl(fleet, line).await?;
    ensure!(code == Some(2) && text.contains(part), "{line:?}: {code:?}, {text}");
    Ok(())
}

/// The phase of a machine.
pub(crate) async fn phase(fleet: &Fleet, id: &str) -> Result<String> {
    let phase = "SELECT phase_index FROM machine_due JOIN machine_provided USING (machine_id)
                 WHERE lane = 'access' AND provider_id = $1";
    Ok(sqlx::query_scalar(phase).bind(id).fetch_one(&fleet.pool).await?)
}

pub(crate) async fn until_phase(fleet: &Fleet, id: &str, wanted: &str) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while phase(fleet, id).await? != wanted {
        ensure!(Instant::now() < deadline, "{id} is never {wanted}\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}

/// Ends a shepherd, which must exit with success.
pub(crate) async fn stop(fleet: &Fleet, mut shepherd: Program) -> Result<()> {
    let status = shepherd.terminate().await?;
    ensure!(status.code() == Some(0), "it ended with {status}\n{}", fleet.explain().await?);
    Ok(())
}

/// Waits until a shepherd has died at its fail point.
#[cfg(debug_assertions)]
pub(crate) async fn until_dead(fleet: &Fleet, place: &str, shepherd: &mut Program) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while shepherd.ended()?.is_none() {
        ensure!(Instant::now() < deadline, "{place} is never passed\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}
