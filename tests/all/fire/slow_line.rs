//! Machines behind a slow or narrow line, with the default limits.
//!
//! A takeover takes some ten round trips, and the first heartbeat two more. The limits are the program's own: a line
//! with three seconds per round trip must be within them. Only the limit of the upload grows with the role server, which
//! is larger here than the one that operators upload.

use std::time::{Duration, Instant};

use crate::fire::{BRAKES, DISTURBED, Form, count, counted, end};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::endpoint;
use crate::harness::line::{Line, Quality};
use crate::harness::rack::Rack;
use crate::sshd::{Setup, wait_until};

/// The round trips of SSH that a takeover needs at least: keys, login, and three commands that are each opened,
/// started, and answered; then TLS and a heartbeat.
const ROUND_TRIPS: u32 = 10;

/// The largest role server that `make roleserver` lets pass, in bytes.
const RELEASED_BYTES: u64 = 20_000_000;

/// The default of `--agent_ssh_exec_timeout`.
const DEFAULT_LIMIT: Duration = Duration::from_mins(1);

/// The limit of the upload: the default for as many bytes as the largest released role server has, and for each part of it.
///
/// A server of SSH accepts 2 MiB in one round trip, also if the line could transport more. Over this line, a role server that was
/// built without optimization needs longer than the default: it has some 54 MB.
fn limit_of_upload(bytes: u64) -> Duration {
    let share = u32::try_from(bytes.div_ceil(RELEASED_BYTES)).unwrap_or(u32::MAX);
    DEFAULT_LIMIT.saturating_mul(share)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_machine_at_the_end_of_a_long_line_is_taken_over_within_the_limits() -> TestResult {
    let round_trip = Form::of_this_run().pick(Duration::from_millis(200), Duration::from_secs(3));
    let quality = Quality { lag: round_trip / 2, ..Quality::PERFECT };
    let mut rack = Rack::new("fire_long_line").await?;
    rack.add("far", Setup::default())?;
    let to_machine = Line::to(rack.sshd("far")?.port(), quality).await?;
    rack.behind("far", to_machine.port());
    // Its agent calls back over a line that is as slow.
    let here = endpoint()?;
    let port = here.rsplit(':').next().unwrap_or_default().parse()?;
    let to_shepherd = Line::to(port, quality).await?;
    let text = format!("127.0.0.1:{}", to_shepherd.port());
    let listen = format!("--agent_listen_address={here}");
    let size = std::fs::metadata(rack.agent()?)?.len();
    let limit = format!("--agent_ssh_exec_timeout={}s", limit_of_upload(size).as_secs());

    let began = Instant::now();
    let shepherd = rack.shepherd("shepherd", &text, &[&listen, &limit])?;
    rack.until_why("far", "Ready", &[]).await?;
    let took = began.elapsed();
    assert!(took >= round_trip * ROUND_TRIPS, "the line is not long: it took {took:?}");
    assert!(to_machine.forwarded_bytes() > size, "it came another way");
    assert!(to_shepherd.forwarded_bytes() > 0, "its agent called another way");
    let tries =
        count(&rack.fleet, "SELECT count(*) FROM history WHERE process = 'AgentStart' AND edge = 'start'")
            .await?;
    assert_eq!(count(&rack.fleet, DISTURBED).await? + count(&rack.fleet, BRAKES).await?, 0);
    end(&rack.fleet, shepherd).await?;
    Ok(counted(
        "long line",
        format!(
            "Ready over {} s to a round trip, at try {tries}, {} s after the shepherd's start",
            round_trip.as_secs_f32(),
            took.as_secs()
        ),
    )?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_line_too_thin_for_the_upload_is_named_by_its_limit_and_is_enough_with_a_longer_one() -> TestResult
{
    let mut rack = Rack::new("fire_thin_line").await?;
    rack.add("thin", Setup::default())?;
    let size = std::fs::metadata(rack.agent()?)?.len();
    // The upload takes ten seconds over this line, and the first limit is two seconds.
    let line = Line::to(rack.sshd("thin")?.port(), Quality { upward: size / 10, ..Quality::PERFECT }).await?;
    rack.behind("thin", line.port());
    let address = rack.address("thin")?;

    let shepherd = rack.shepherd("hasty", &endpoint()?, &["--agent_ssh_exec_timeout=2s"])?;
    let limit =
        format!("{address} did not answer within 2 s (--agent_ssh_exec_timeout) while uploading the agent");
    rack.until_why("thin", "Provided", &[&limit]).await?;
    end(&rack.fleet, shepherd).await?;
    let home = rack.sshd("thin")?.home();
    wait_until("the machine to clean up", || {
        std::fs::read_dir(home.join(".local/lib/shepherd")).is_ok_and(|mut left| left.next().is_none())
    })?;

    let shepherd = rack.shepherd("patient", &endpoint()?, &["--agent_ssh_exec_timeout=5m"])?;
    rack.until_why("thin", "Ready", &[]).await?;
    assert_eq!(count(&rack.fleet, DISTURBED).await?, 0);
    end(&rack.fleet, shepherd).await?;
    Ok(counted(
        "thin line",
        format!(
            "{} kB/s: the limit was named, nothing half-done stayed, Ready with a longer one",
            size / 10_000
        ),
    )?)
}
