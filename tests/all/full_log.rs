//! A shepherd with its log on a full disk.

use std::fs::File;

use crate::harness::aloud::TestResult;
use crate::harness::fleet::{ALL_READY, Fleet, Program, endpoint};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shepherd_that_can_log_nothing_works_all_the_same() -> TestResult {
    let fleet = Fleet::start("full_log", &["--machine_count", "3"]).await?;
    let mut command = fleet.unheard_shepherd("unheard", &[endpoint()?], &[])?;
    // Every write of a line fails, as on a full disk.
    command.env("RUST_LOG", "debug").stderr(File::create("/dev/full")?);
    let mut shepherd = Program::spawn(&mut command)?;
    fleet.until("every machine is Ready", ALL_READY).await?;
    assert!(shepherd.ended()?.is_none(), "it ended");
    let status = shepherd.terminate().await?;
    assert!(status.success(), "{status}");
    assert!(
        fleet.holds("SELECT count(*) = 0 FROM session WHERE closed_at IS NULL").await?,
        "a session is left open"
    );
    Ok(())
}
