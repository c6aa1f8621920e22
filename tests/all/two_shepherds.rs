//! Two shepherds on one BMDB and one simulator; one of them dies in the middle, as by a power cut.
//!
//! The other one notices, waits for the end of the calls that the dead one may have begun, and finishes. `checker.rs`
//! checks that they never worked on one machine at once, created one twice, or lost a lease without a record.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::process::Signal;

use crate::checker::{Records, Violation, check, planted};
use crate::fire::frozen::is_stopped;
use crate::harness::aloud::TestResult;
use crate::harness::fleet::{Fleet, PATIENCE, endpoint};

const ALL_READY: &str = "SELECT count(*) = 200 AND count(*) FILTER (WHERE phase_index = 'Ready') = 200
     FROM machine_due WHERE lane = 'access'";

/// Whether enough machines are done, one of them by this process, more are waiting, and work of it is live.
async fn in_the_middle(fleet: &Fleet, pid: u32) -> Result<bool> {
    Ok(sqlx::query_scalar(
        "SELECT (SELECT count(*) BETWEEN 20 AND 170 FROM machine_due
                 WHERE lane = 'access' AND phase_index IN ('AgentStarting', 'Ready'))
            AND EXISTS (SELECT 1 FROM history h JOIN session s USING (session_id)
                        WHERE h.event = 'Finished' AND s.runtime_info->>'pid' = $1)
            AND (SELECT count(*) >= 2 FROM work w JOIN session s USING (session_id)
                 WHERE w.process = 'AgentStart' AND s.runtime_info->>'pid' = $1)",
    )
    .bind(pid.to_string())
    .fetch_one(&fleet.pool)
    .await?)
}

/// Waits until the server has completed the statements of a stopped shepherd: an end of work that is on its way still
/// takes effect. A statement that waits for a lock is not one: an end of work has all of its locks before it is
/// committed.
async fn all_arrived(fleet: &Fleet) -> Result<()> {
    let none_under_way = "SELECT NOT EXISTS (
        SELECT 1 FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'shepherd' AND state = 'active'
          AND wait_event_type IS DISTINCT FROM 'Lock')";
    let deadline = Instant::now() + PATIENCE;
    while !fleet.holds(none_under_way).await? {
        ensure!(Instant::now() < deadline, "the server never rests\n{}", fleet.explain().await?);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_two_shepherds_is_killed_among_200_machines_and_all_become_ready() -> TestResult {
    let flags = ["--machine_count", "200", "--boot_seconds", "0.5", "--seed", "7"];
    let fleet = Fleet::start("two_shepherds", &flags).await?;
    let (first, second) = (endpoint()?, endpoint()?);
    let flags = ["--session_interval", "3s"];
    let mut victim = fleet.shepherd("victim", &[first.clone(), second.clone()], &flags)?;
    // It loses nothing itself, however busy the host is.
    let mut survivor = fleet.shepherd("survivor", &[second, first], &["--session_interval", "15s"])?;

    // Stopped for a moment, so that the observed state is still true when it dies. The other one is stopped too: on a
    // busy host it would complete everything before there is a moment at which no statement of either is under way.
    let deadline = Instant::now() + PATIENCE;
    loop {
        if in_the_middle(&fleet, victim.pid()).await? {
            for shepherd in [&mut victim, &mut survivor] {
                shepherd.signal(Signal::STOP)?;
                while !is_stopped(shepherd.pid())? {
                    assert!(shepherd.ended()?.is_none(), "a shepherd ended\n{}", fleet.explain().await?);
                    tokio::task::yield_now().await;
                }
            }
            all_arrived(&fleet).await?;
            let is_in_the_middle = in_the_middle(&fleet, victim.pid()).await?;
            survivor.signal(Signal::CONT)?;
            if is_in_the_middle {
                break;
            }
            victim.signal(Signal::CONT)?;
        }
        let ended = (victim.ended()?, survivor.ended()?);
        assert!(ended == (None, None), "a shepherd ended: {ended:?}\n{}", fleet.explain().await?);
        assert!(Instant::now() < deadline, "never in the middle\n{}", fleet.explain().await?);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let dead = victim.pid();
    victim.kill()?;

    fleet.until("all 200 machines are Ready", ALL_READY).await?;
    let status = survivor.terminate().await?;
    assert!(status.code() == Some(0), "the survivor ended with {status}\n{}", fleet.explain().await?);

    let records = Records::read(&fleet.pool, &fleet.journal()?).await?;
    assert_eq!(check(&records), []);

    // The test proves something only if the dead one had leases to lose, and both had work.
    let of = |pid: u32| {
        let sessions = records.sessions.iter().filter(move |row| row.pid == i64::from(pid));
        sessions.map(|row| row.session_id).collect::<Vec<_>>()
    };
    let (lost, kept) = (of(dead), of(survivor.pid()));
    let events = |sessions: &[uuid::Uuid], event: &str| {
        let edges = records.edges.iter().filter(|edge| edge.event == event);
        edges.filter(|edge| sessions.contains(&edge.session_id)).count()
    };
    assert!(events(&lost, "Expired") >= 2, "the dead one lost {}", events(&lost, "Expired"));
    assert!(events(&lost, "Finished") > 0 && events(&kept, "Finished") > 0);

    // The checker proves something only if it finds the faults that are planted in these very records.
    let found = |planted: Option<Records>| planted.map(|records| check(&records)).unwrap_or_default();
    let overlaps = found(planted::overlapping_work(&records));
    assert!(overlaps.iter().any(|one| matches!(one, Violation::Overlap(_))), "{overlaps:?}");
    let twice = found(planted::machine_twice(&records));
    assert!(twice.iter().any(|one| matches!(one, Violation::Twice(_))), "{twice:?}");
    let untold = found(planted::missing_expired(&records));
    assert!(matches!(untold.as_slice(), [Violation::LostUntold(_)]), "{untold:?}");
    assert_eq!(planted::nothing(&records).map(|records| check(&records)), Some(Vec::new()));
    Ok(())
}
