//! Crashes: a shepherd dies at each step that leaves something behind. Its successor leaves nothing doubled, nothing
//! orphaned, and every machine Ready once.
//!
//! One fleet serves all failpoints: each shepherd may make two machines more than its predecessor could, dies
//! at its failpoint, and leaves its unfinished work to the next.

use std::os::unix::process::ExitStatusExt as _;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::process::Signal;

use crate::checker::{Records, check};
use crate::fire::{ALL_KNOWN_READY, count, counted, end};
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{Fleet, PATIENCE, Program, endpoint};

pub(super) const BRIEF: [&str; 2] = ["--session_interval=3s", "--outward_call_timeout=1s"];
/// For the last shepherd, which has no successor: it loses no session and leaves none, however busy the host is.
const LASTING: &str = "--session_interval=15s";

/// Waits until the shepherd has aborted itself at its failpoint.
pub(super) async fn death(fleet: &Fleet, shepherd: &mut Program, place: &str) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = shepherd.ended()? {
            ensure!(
                status.signal() == Some(Signal::ABORT.as_raw()),
                "{place}: it ended with {status}\n{}",
                fleet.explain().await?
            );
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{place} is never passed\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The violations in the BMDB and the simulator's journal.
pub(super) async fn judge(fleet: &Fleet) -> Result<()> {
    judge_records(fleet, &Records::read(&fleet.pool, &fleet.journal()?).await?).await
}

/// The events for a person who investigates a violation: the journal's lines, then history's.
async fn story(fleet: &Fleet) -> Result<String> {
    let mut lines: Vec<String> = fleet.journal()?.iter().map(ToString::to_string).collect();
    let edges: Vec<String> = sqlx::query_scalar(
        "SELECT concat_ws(' ', h.at, p.provider_id, h.lane, h.event, h.fence, s.runtime_info->>'pid', h.detail)
         FROM history h LEFT JOIN session s USING (session_id) LEFT JOIN machine_provided p USING (machine_id)
         ORDER BY h.at",
    )
    .fetch_all(&fleet.pool)
    .await?;
    lines.extend(edges);
    Ok(lines.join("\n"))
}

/// The same of these records.
pub(super) async fn judge_records(fleet: &Fleet, records: &Records) -> Result<()> {
    let found = check(records);
    if !found.is_empty() {
        anyhow::bail!("{found:?}\n{}\n{}", story(fleet).await?, fleet.explain().await?);
    }
    assert!(
        fleet.holds("SELECT count(*) = 0 FROM intent WHERE settled_at IS NULL").await?,
        "an intent is open"
    );
    assert!(
        fleet.holds("SELECT count(*) = 0 FROM named_lease WHERE lease_session IS NOT NULL").await?,
        "a lease is held by nobody"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shepherd_that_dies_while_it_makes_and_enrols_machines_leaves_each_to_be_ready_once() -> TestResult
{
    const PLACES: [&str; 11] = [
        "provisioner.leased",
        "provisioner.listed",
        "provisioner.intended",
        "provisioner.created",
        "provisioner.recorded",
        "initializer.claimed",
        "takeover.probed",
        "takeover.uploaded",
        "initializer.enrolled",
        "initializer.ended",
        "provisioner.created@2",
    ];
    let most = |number: usize| 3 + 2 * number;
    let capacity = most(PLACES.len());
    let fleet =
        Fleet::start("crash_new", &["--machine_count", &capacity.to_string(), "--boot_seconds", "0.5"])
            .await?;
    let endpoints = [endpoint()?];
    for (number, place) in PLACES.iter().enumerate() {
        let most = format!("--provisioner_max_machines={}", most(number));
        let flags = [&BRIEF[..], &[&most]].concat();
        let mut shepherd = fleet.shepherd_dying_at(place, place, &endpoints, &flags)?;
        death(&fleet, &mut shepherd, place).await?;
    }
    let shepherd = fleet.shepherd("last", &endpoints, &[&BRIEF[..], &[LASTING]].concat())?;
    fleet.until("there are as many machines as there can be", "SELECT count(*) = 25 FROM machine").await?;
    let strangers = count(&fleet, "SELECT count(*) FROM machine_quarantine").await?;
    assert_eq!(strangers, 0, "a machine turned up that nobody waited for");
    fleet.until("all are Ready", ALL_KNOWN_READY).await?;
    end(&fleet, shepherd).await?;
    judge(&fleet).await?;
    ready_exactly_once(&fleet).await?;
    let lost = count(&fleet, "SELECT count(*) FROM history WHERE event = 'Expired'").await?;
    let adopted =
        "SELECT count(*) FROM history WHERE event = 'Recorded' AND detail LIKE 'adopted by its intent%'";
    let adopted = count(&fleet, adopted).await?;
    counted(
        "made and enrolled",
        format!(
            "{} deaths, {capacity} machines each Ready once; {lost} leases lost, {adopted} machines adopted",
            PLACES.len()
        ),
    )?;
    Ok(())
}

/// Each machine became Ready, and none of them a second time.
pub(super) async fn ready_exactly_once(fleet: &Fleet) -> Result<()> {
    let often: Vec<(String, i64)> = sqlx::query_as(
        "SELECT p.provider_id, count(h.machine_id) FROM machine_provided p
         LEFT JOIN history h ON h.machine_id = p.machine_id AND h.event = 'Ready'
         GROUP BY p.provider_id HAVING count(h.machine_id) <> 1",
    )
    .fetch_all(&fleet.pool)
    .await?;
    ensure!(often.is_empty(), "Ready not exactly once: {often:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shepherd_that_dies_while_it_recovers_a_machine_never_reboots_it_twice() -> TestResult {
    const FLAGS: [&str; 7] = [
        "--heartbeat_interval=1s",
        "--recovery_first_heartbeat_timeout=20s",
        "--recovery_silence_timeout=8s",
        "--recovery_ladder=restart-agent:15s:1,reboot:40s:1,power-cycle:40s:1",
        "--recovery_brake_fraction=1",
        BRIEF[0],
        BRIEF[1],
    ];
    // The second step for a hung machine is the reboot, which revives it.
    const PLACES: [&str; 6] = [
        "recoverer.claimed",
        "recoverer.intended",
        "recoverer.step-executed",
        "recoverer.resolved",
        "recoverer.step-executed@2",
        "recoverer.resolved@2",
    ];
    let machines = PLACES.len().to_string();
    let simulator =
        ["--machine_count", &machines, "--boot_seconds", "0.5", "--persistent_agent_percent", "100"];
    let fleet = Fleet::start("crash_recovery", &simulator).await?;
    let endpoints = [endpoint()?];
    let shepherd = fleet.shepherd("first", &endpoints, &FLAGS)?;
    fleet.until("all are known", "SELECT count(*) = 6 FROM machine").await?;
    fleet.until("all are Ready", ALL_KNOWN_READY).await?;
    end(&fleet, shepherd).await?;
    let ids: Vec<String> =
        sqlx::query_scalar("SELECT provider_id FROM machine_provided ORDER BY provider_id")
            .fetch_all(&fleet.pool)
            .await?;
    for (place, id) in PLACES.iter().zip(&ids) {
        fleet.strike(id, "hang").await?;
        let mut shepherd = fleet.shepherd_dying_at(place, place, &endpoints, &FLAGS)?;
        death(&fleet, &mut shepherd, place).await?;
    }
    let shepherd = fleet.shepherd("last", &endpoints, &[&FLAGS[..], &[LASTING]].concat())?;
    // A hung machine stays Ready until its silence timeout. So the test waits for the boot counts of the machines
    // themselves.
    let end_of_waiting = Instant::now() + PATIENCE;
    while !fleet.truth().await?.iter().all(|machine| machine["boots"].as_u64() >= Some(2)) {
        assert!(
            Instant::now() < end_of_waiting,
            "a hung machine is not rebooted: {}",
            fleet.explain().await?
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    fleet.until("all are Ready", ALL_KNOWN_READY).await?;
    fleet.until("every ladder is over", "SELECT count(*) = 0 FROM machine_recovery").await?;
    end(&fleet, shepherd).await?;
    judge(&fleet).await?;
    for machine in fleet.truth().await? {
        assert_eq!(machine["boots"].as_u64(), Some(2), "booted once, and rebooted once: {machine}");
    }
    let unknown = count(&fleet, "SELECT count(*) FROM intent WHERE outcome LIKE 'unknown: %'").await?;
    assert!(unknown >= 3, "nobody died between an intent and its end");
    counted(
        "recovered",
        format!(
            "{0} deaths, {0} machines rebooted once each; {unknown} steps of unknown outcome",
            PLACES.len()
        ),
    )?;
    Ok(())
}
