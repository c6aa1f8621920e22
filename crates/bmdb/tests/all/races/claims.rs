//! Races about due work: rows that others have locked, and rows that become visible late.

use std::time::Duration;

use anyhow::Context as _;
use model::ids::MachineId;
use model::process::Process;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::engine::change_machine::Decision;
use shepherd_bmdb::engine::claim::{Claimed, Claimer};
use shepherd_bmdb::engine::fact_change::FactChange;
use shepherd_bmdb::engine::session::Session;
use sqlx::Connection as _;

use super::LOCK_DUE;
use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LONG, SOON, Shepherd, ended, hold, needs_human, surely, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claim_passes_over_a_locked_machine_and_takes_none_that_was_failed_meanwhile() -> TestResult {
    let kit = Kit::new("claim_locked").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?.patient().await?;
    let session = shepherd.session().await?;
    let mut claimer = shepherd.claimer(Process::AgentStart, "rack");

    let mut by_hand = kit.by_hand().await?;
    let mut quicker = by_hand.begin().await?;
    sqlx::query(LOCK_DUE).bind(machine.0).execute(&mut *quicker).await?;
    let claim = tokio::spawn(async move {
        let claimed = claimer.claim(&[session]).await;
        (claimer, claimed)
    });
    let (mut claimer, claimed) = ended("the claim", claim).await?;
    let claimed = claimed?;
    assert!(matches!(claimed, Claimed::Contended), "{claimed:?}");
    sqlx::query(
        "UPDATE machine_due SET fence = fence + 1, ready_at = now() + INTERVAL '300 seconds'
         WHERE machine_id = $1 AND lane = 'access'",
    )
    .bind(machine.0)
    .execute(&mut *quicker)
    .await?;
    quicker.commit().await?;
    let session = shepherd.session().await?;
    assert!(matches!(surely(&mut claimer, &session).await?, Claimed::Empty));
    assert_eq!(kit.count("SELECT count(*) FROM work").await?, 0);
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loser_of_a_race_learns_that_there_was_work() -> TestResult {
    let kit = Kit::new("contended").await?;
    kit.provided(200, "rack").await?;
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?.patient().await?;
    let session = shepherd.session().await?;
    let mut claimer = shepherd.claimer(Process::AgentStart, "rack");
    let mut by_hand = kit.by_hand().await?;
    let mut quicker = by_hand.begin().await?;
    sqlx::query("SELECT 1 FROM machine_due FOR UPDATE").execute(&mut *quicker).await?;
    let claim = tokio::spawn(async move {
        let claimed = claimer.claim(std::slice::from_ref(&session)).await;
        (claimer, session, claimed)
    });
    let (mut claimer, session, claimed) = ended("the claim", claim).await?;
    assert!(matches!(claimed?, Claimed::Contended));
    quicker.rollback().await?;
    assert!(matches!(surely(&mut claimer, &session).await?, Claimed::Work(_)));
    Ok(shepherd.stop().await?)
}

/// One row that somebody holds keeps no other machine waiting when a statement goes through many of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_machine_is_passed_over_by_claim_reaper_and_timers() -> TestResult {
    for what in ["claim", "reap", "rearm"] {
        let kit = Kit::new("lock_order").await?;
        let mut machines = kit.provided(40, "rack").await?;
        machines.sort();
        // Due in the opposite order of their ids, so that neither order is the other by chance.
        sqlx::query(
            "UPDATE machine_due d SET ready_at = now() - n * INTERVAL '1 second', bucket = 0
             FROM (SELECT machine_id, row_number() OVER (ORDER BY machine_id) n FROM machine) m
             WHERE d.machine_id = m.machine_id AND lane = 'access'",
        )
        .execute(&kit.pool)
        .await?;
        let owner = Shepherd::start(&kit, "owner", LONG).await?.patient().await?;
        let mut sessions = Vec::new();
        for _ in 0..40 {
            sessions.push(owner.session().await?);
        }
        let mut held = Vec::new();
        match what {
            "reap" => {
                let mut claimer = owner.claimer(Process::AgentStart, "rack");
                let Claimed::Work(work) = claimer.claim(&sessions).await? else { panic!("no work") };
                assert_eq!(work.len(), 40);
                held = work;
                sqlx::query("UPDATE session SET closed_at = clock_timestamp()").execute(&kit.pool).await?;
            }
            "rearm" => {
                sqlx::query(
                    "INSERT INTO machine_agent_started (machine_id, started_at, public_key, fence)
                     SELECT machine_id, now(), decode(repeat('00', 32), 'hex'), 1 FROM machine",
                )
                .execute(&kit.pool)
                .await?;
                sqlx::query(
                    "UPDATE machine_due SET timer = TRUE, process = 'Recovery' WHERE lane = 'access'",
                )
                .execute(&kit.pool)
                .await?;
            }
            _ => {}
        }
        let mut by_hand = kit.connection().await?;
        let mut writer = by_hand.begin().await?;
        // READ COMMITTED in each mode: a person's lock is no part of what is tried.
        sqlx::query("SET TRANSACTION ISOLATION LEVEL READ COMMITTED").execute(&mut *writer).await?;
        sqlx::query(LOCK_DUE).bind(machines[0].0).execute(&mut *writer).await?;

        let batch = Shepherd::start(&kit, "batch", LONG).await?.patient().await?;
        let (bmdb, mut claimer) = (batch.bmdb.clone(), owner.claimer(Process::AgentStart, "rack"));
        let rearmer = batch.claimer(Process::Recovery, "rack");
        let bmdb_of_claim = batch.sessions.clone();
        let run = tokio::spawn(async move {
            Ok::<usize, BmdbError>(match what {
                "claim" => {
                    drop(bmdb_of_claim);
                    match claimer.claim(&sessions).await? {
                        Claimed::Work(work) => work.len(),
                        _ => 0,
                    }
                }
                "reap" => bmdb.free_lost_work().await?,
                _ => usize::try_from(rearmer.rearm_timers().await?.0).unwrap_or(0),
            })
        });
        assert_eq!(ended(what, run).await??, 39, "{what}: the locked one is passed over");
        drop(held);
        owner.stop().await?;
        batch.stop().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_that_nobody_knows_of_is_cancelled_by_the_keeper() -> TestResult {
    let kit = Kit::new("unknown_work").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "worker", SOON).await?;
    let session = shepherd.session().await?;
    // A claim that committed, and its answer was lost.
    sqlx::query(
        "WITH d AS (UPDATE machine_due SET lease_session = $2, fence = fence + 1
                    WHERE machine_id = $1 AND lane = 'access' RETURNING fence),
         w AS (INSERT INTO work SELECT $1, 'access', $2, 'AgentStart', fence, clock_timestamp() FROM d)
         INSERT INTO history (machine_id, at, event, edge, lane, fence, process, session_id)
         SELECT $1, clock_timestamp(), 'Started', 'start', 'access', fence, 'AgentStart', $2 FROM d",
    )
    .bind(machine.0)
    .bind(session.id().0)
    .execute(&kit.pool)
    .await?;
    until("the work is cancelled", async || Ok(kit.ends(machine).await? == ["Cancelled"])).await?;
    assert_eq!(kit.count("SELECT count(*) FROM work").await?, 0);
    assert!(!session.lost().is_cancelled());
    Ok(shepherd.stop().await?)
}

/// Claims until the machine is among what was claimed, and fails if a claim that began after ten seconds did not find it.
async fn claim_until_found(
    claimer: &mut Claimer,
    sessions: &[Session],
    shepherd: &Shepherd,
    machine: MachineId,
) -> anyhow::Result<()> {
    let began = std::time::Instant::now();
    loop {
        // When the claim begins, because that decides how far it looks back.
        let passed = began.elapsed();
        match claimer.claim(sessions).await? {
            Claimed::Work(work) => {
                let found = work.iter().any(|work| work.machine() == machine);
                // Back into the queue: there is always something younger to claim. Cancelling is tried until it succeeds,
                // which at SERIALIZABLE beside the long transactions of other tests may take more than one call.
                drop(work);
                shepherd.sessions.wait_until_drained().await;
                if found {
                    return Ok(());
                }
            }
            other => anyhow::bail!("{other:?}"),
        }
        anyhow::ensure!(passed < Duration::from_secs(10), "passed over for more than 10 s");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_with_an_old_due_time_is_found_behind_the_watermark() -> TestResult {
    let kit = Kit::new("watermark").await?;
    let machines = kit.provided(400, "rack").await?;
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    let session = shepherd.session().await?;
    let mut claimer = shepherd.claimer(Process::AgentStart, "rack");
    let Claimed::Work(first) = claimer.claim(std::slice::from_ref(&session)).await? else { panic!("none") };
    drop(first);
    shepherd.sessions.wait_until_drained().await;
    // Appears an hour behind every mark, as a work item that was cancelled or lost does.
    sqlx::query(
        "UPDATE machine_due SET ready_at = now() - INTERVAL '1 hour' WHERE machine_id = $1 AND lane = 'access'",
    )
    .bind(machines[0].0)
    .execute(&kit.pool)
    .await?;
    claim_until_found(&mut claimer, std::slice::from_ref(&session), &shepherd, machines[0]).await?;
    Ok(shepherd.stop().await?)
}

/// Where hundreds of machines are claimed within what the claimer looks back over, it does so once a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_that_appears_some_seconds_late_is_found_at_full_rate() -> TestResult {
    let kit = Kit::new("late_at_rate").await?;
    let machines = kit.provided(420, "rack").await?;
    sqlx::query("UPDATE machine_due SET bucket = 0").execute(&kit.pool).await?;
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    let mut sessions = Vec::new();
    for _ in 0..20 {
        sessions.push(shepherd.session().await?);
    }
    let mut claimer = shepherd.claimer(Process::AgentStart, "rack");
    let mut claimed = std::collections::BTreeSet::new();
    while claimed.len() < 400 {
        if let Claimed::Work(work) = claimer.claim(&sessions).await? {
            for item in work {
                claimed.insert(item.machine());
                item.finish(vec![needs_human("done")], "done").await?;
            }
        }
    }
    let late = *machines.iter().find(|machine| !claimed.contains(machine)).context("some are left")?;
    sqlx::query(
        "UPDATE machine_due d SET ready_at = (SELECT min(ready_at) FROM machine_due WHERE process = d.process)
                - INTERVAL '10 seconds'
         WHERE machine_id = $1 AND lane = 'access'",
    )
    .bind(late.0)
    .execute(&kit.pool)
    .await?;
    claim_until_found(&mut claimer, &sessions[..1], &shepherd, late).await?;
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_armed_in_the_past_of_its_transaction() -> TestResult {
    let kit = Kit::new("armed_late").await?;
    let machine = kit.provided(1, "rack").await?[0];
    kit.change(machine, vec![hold("disk swap")]).await?;
    kit.database.advance(Duration::from_hours(1)).await?;
    let before: chrono::DateTime<chrono::Utc> =
        sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&kit.pool).await?;
    // What became due an hour ago by its facts is armed at the time of the writing.
    kit.change(machine, vec![shepherd_bmdb::engine::fact_change::FactChange::HoldCleared]).await?;
    let ready_at: chrono::DateTime<chrono::Utc> =
        sqlx::query_scalar("SELECT ready_at FROM machine_due WHERE lane = 'access'")
            .fetch_one(&kit.pool)
            .await?;
    assert!(ready_at >= before, "{ready_at} is before {before}: a claimer that is further never sees it");
    Ok(())
}

/// The row's due time is older than the position that a claimer has reached meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_armed_by_a_transaction_that_commits_late_is_seen() -> TestResult {
    let kit = Kit::new("late_commit").await?;
    let late = kit.provided(1, "rack").await?[0];
    kit.change(late, vec![hold("disk swap")]).await?;
    // A transaction that clears a hold waits before its commit until the advisory lock is free.
    sqlx::raw_sql(
        "CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql SET lock_timeout = 0
         AS 'BEGIN PERFORM pg_advisory_xact_lock(42); RETURN NULL; END';
         CREATE CONSTRAINT TRIGGER wait AFTER DELETE ON machine_hold DEFERRABLE INITIALLY DEFERRED
         FOR EACH ROW EXECUTE FUNCTION public.wait()",
    )
    .execute(&kit.pool)
    .await?;
    let mut by_hand = kit.connection().await?;
    let mut gate = by_hand.begin().await?;
    sqlx::query("SELECT pg_advisory_xact_lock(42)").execute(&mut *gate).await?;
    let writer = Shepherd::start(&kit, "writer", LONG).await?.patient().await?;
    let bmdb = writer.bmdb.clone();
    let clear = tokio::spawn(async move {
        bmdb.change_machine(late, |_| Decision {
            changes: vec![FactChange::HoldCleared],
            ..Decision::<()>::default()
        })
        .await
    });
    kit.until_blocked("writer", 1).await?;
    // Less than a transaction may last, and a claimer goes by the machines that became due since.
    kit.database.advance(Duration::from_secs(20)).await?;
    kit.provided(4, "rack").await?;
    // How far it has got, it knows of each bucket apart.
    sqlx::query(
        "UPDATE machine_due d SET bucket = l.bucket FROM machine_due l
         WHERE d.machine_id <> $1 AND l.machine_id = $1 AND l.lane = d.lane",
    )
    .bind(late.0)
    .execute(&kit.pool)
    .await?;
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    let session = shepherd.session().await?;
    let mut claimer = shepherd.claimer(Process::AgentStart, "rack");
    let mut claim = async || -> anyhow::Result<MachineId> {
        loop {
            match claimer.claim(std::slice::from_ref(&session)).await? {
                Claimed::Work(mut work) => {
                    let item = work.pop().context("no work")?;
                    let machine = item.machine();
                    item.finish(vec![needs_human("done")], "done").await?;
                    return Ok(machine);
                }
                Claimed::Contended => {}
                Claimed::FullScanDeferred(rests) => tokio::time::sleep(rests).await,
                Claimed::Empty => anyhow::bail!("nothing is due"),
            }
        }
    };
    assert_ne!(claim().await?, late);
    gate.rollback().await?;
    ended("the change", clear).await??;
    let mut claimed = vec![claim().await?];
    if kit.is_serializable() {
        // It may have been run again, and be armed for a later moment.
        for _ in 0..3 {
            claimed.push(claim().await?);
        }
    }
    assert!(claimed.contains(&late), "passed over for younger ones");
    shepherd.stop().await?;
    Ok(writer.stop().await?)
}
