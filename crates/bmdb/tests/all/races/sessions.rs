//! Races about the end of a session: its deadline, its renewal, and what its work does meanwhile.

use std::time::Duration;

use anyhow::Context as _;
use model::process::Process;
use shepherd_bmdb::connection::error::BmdbError;
use sqlx::Connection as _;

use super::LOCK_DUE;
use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LONG, PATIENCE, SOON, Shepherd, ended, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finish_that_waited_past_the_deadline_commits_before_the_session_is_closed() -> TestResult {
    let kit = Kit::new("late_finish").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let reaper = Shepherd::start(&kit, "reaper", LONG).await?;
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?.patient().await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;

    let mut by_hand = kit.by_hand().await?;
    let mut lock = by_hand.begin().await?;
    sqlx::query(LOCK_DUE).bind(machine.0).execute(&mut *lock).await?;
    let finish = tokio::spawn(work.finish(Vec::new(), "done"));
    kit.until_blocked("worker", 1).await?;
    kit.overdue(&session).await?;

    // The reaper must not close the session while a transaction of that session is open.
    let bmdb = reaper.bmdb.clone();
    let reap = tokio::spawn(async move { bmdb.reap().await });
    assert_eq!(ended("the reaper", reap).await??.sessions, 0);
    assert_eq!(kit.count("SELECT count(*) FROM session WHERE closed_at IS NOT NULL").await?, 0);
    lock.commit().await?;
    until("the session is closed", async || {
        reaper.bmdb.reap().await?;
        Ok(kit.count("SELECT count(*) FROM session WHERE closed_at IS NOT NULL").await? == 1)
    })
    .await?;
    let finish = ended("the finish", finish).await?;

    let late = kit
        .count(
            "SELECT count(*) FROM history h JOIN session s USING (session_id)
             WHERE h.event = 'Finished' AND h.at >= s.closed_at",
        )
        .await?;
    assert_eq!(late, 0, "an effect landed after its session was closed");
    let ends = kit.ends(machine).await?;
    match finish {
        Ok(()) => assert_eq!(ends, ["Finished"]),
        // The reaper had read the session: no serial order of the three allows a finish after that.
        Err(BmdbError::LeaseLost) if kit.is_serializable() => assert_eq!(ends, ["Expired"]),
        Err(error) => panic!("{error:?}"),
    }
    reaper.stop().await?;
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_begun_before_the_deadline_does_not_act_after_it() -> TestResult {
    let kit = Kit::new("begun_before").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "worker", SOON).await?.patient().await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;

    // Its transaction begins, and waits for the session's row. Only then the deadline passes: later
    // than the transaction's now(), earlier than its clock_timestamp().
    let mut by_hand = kit.by_hand().await?;
    let mut lock = by_hand.begin().await?;
    sqlx::query("SELECT 1 FROM session FOR UPDATE").execute(&mut *lock).await?;
    let finish = tokio::spawn(work.finish(Vec::new(), "done"));
    kit.until_blocked_in("ORDER BY lane\nFOR UPDATE").await?;
    sqlx::query("UPDATE session SET deadline = clock_timestamp()").execute(&mut *lock).await?;
    lock.commit().await?;

    let ending = ended("the finish", finish).await?;
    assert!(matches!(ending, Err(BmdbError::LeaseLost)), "{ending:?}");
    assert_eq!(kit.ends(machine).await?, Vec::<String>::new());
    kit.database.advance(Duration::from_secs(1)).await?;
    assert_eq!(kit.bmdb.reap().await?.work, 1);
    assert_eq!(kit.ends(machine).await?, ["Expired"]);
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn named_lease_that_somebody_has_locked_keeps_no_other_from_being_freed() -> TestResult {
    let kit = Kit::new("locked_lease").await?;
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    let session = shepherd.session().await?;
    for name in ["a", "b", "c"] {
        kit.bmdb.acquire_named_lease(&session, "provisioner", name).await?.context("it is free")?;
    }
    kit.overdue(&session).await?;
    kit.database.advance(Duration::from_secs(1)).await?;
    let mut by_hand = kit.by_hand().await?;
    let mut lock = by_hand.begin().await?;
    sqlx::query("SELECT 1 FROM named_lease WHERE name = 'a' FOR UPDATE").execute(&mut *lock).await?;
    // The lock is released only after the reaper has returned.
    let reaped = kit.bmdb.reap().await?;
    assert_eq!((reaped.sessions, reaped.leases), (1, 2));
    lock.rollback().await?;
    assert_eq!(kit.bmdb.reap().await?.leases, 1);
    assert_eq!(kit.count("SELECT count(*) FROM named_lease WHERE lease_session IS NOT NULL").await?, 0);
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewal_that_stalls_before_its_commit_keeps_its_work() -> TestResult {
    let kit = Kit::new("stalled_renewal").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;

    // The renewal is sent in time, to last four hours, and stalls; meanwhile the old deadline passes.
    sqlx::query("UPDATE session SET interval_ms = 4 * 3600 * 1000").execute(&kit.pool).await?;
    let mut by_hand = kit.by_hand().await?;
    let mut renewal = by_hand.begin().await?;
    sqlx::query(include_str!("../../../../../sql/session/renew_one.sql"))
        .bind(session.id().0)
        .fetch_one(&mut *renewal)
        .await?;
    kit.database.advance(Duration::from_hours(1)).await?;

    let reaper = Shepherd::start(&kit, "reaper", LONG).await?;
    let bmdb = reaper.bmdb.clone();
    let reap = tokio::spawn(async move { bmdb.reap().await });
    let reaped = ended("the reaper", reap).await??;
    assert_eq!((reaped.sessions, reaped.work), (0, 0));
    renewal.commit().await?;
    let reaped = reaper.bmdb.reap().await?;
    assert_eq!((reaped.sessions, reaped.work), (0, 0), "a living session lost its work");
    work.finish(Vec::new(), "done").await?;
    assert_eq!(kit.ends(machine).await?, ["Finished"]);
    reaper.stop().await?;
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewal_that_waited_for_the_reaper_is_refused() -> TestResult {
    let kit = Kit::new("renewal_refused").await?;
    let shepherd = Shepherd::start(&kit, "worker", SOON).await?;
    let session = shepherd.session().await?;
    let mut by_hand = kit.by_hand().await?;
    let mut closing = by_hand.begin().await?;
    sqlx::query("SELECT 1 FROM session FOR UPDATE").execute(&mut *closing).await?;
    sqlx::query("UPDATE session SET closed_at = clock_timestamp()").execute(&mut *closing).await?;
    kit.until_blocked("worker", 1).await?;
    closing.commit().await?;
    tokio::time::timeout(PATIENCE, session.lost().cancelled()).await?;
    assert_eq!(session.loss_reason(), Some("the database says it is over"));
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_rows_locked_by_hand_do_not_let_the_others_expire() -> TestResult {
    // So long that a busy host gets through a round of them one by one, as it must where none can be skipped.
    let interval = Duration::from_secs(12);
    let kit = Kit::new("locked_sessions").await?;
    let shepherd = Shepherd::start(&kit, "worker", interval).await?;
    let mut sessions = Vec::new();
    for _ in 0..50 {
        sessions.push(shepherd.session().await?);
    }
    let (locked, free) = sessions.split_at(8);
    let locked: Vec<_> = locked.iter().map(|session| session.id().0).collect();
    let mut by_hand = kit.by_hand().await?;
    let mut lock = by_hand.begin().await?;
    sqlx::query("SELECT 1 FROM session WHERE session_id = ANY ($1) FOR UPDATE")
        .bind(&locked)
        .execute(&mut *lock)
        .await?;
    until("the others outlive three intervals", async || {
        for session in free {
            anyhow::ensure!(!session.lost().is_cancelled(), "lost: {:?}", session.loss_reason());
        }
        let renewed: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM session WHERE deadline - started_at > interval_ms * INTERVAL '3 milliseconds'",
        )
        .fetch_one(&kit.pool)
        .await?;
        Ok(renewed == 42)
    })
    .await?;
    lock.rollback().await?;
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_is_not_closed_under_a_claim_that_has_not_committed() -> TestResult {
    let kit = Kit::new("close_and_claim").await?;
    kit.provided(1, "rack").await?;
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?.patient().await?;
    let session = shepherd.session().await?;
    // In the mode's own isolation: this is the engine's claim, step by step.
    let mut by_hand = kit.connection().await?;
    let mut claim = by_hand.begin().await?;
    sqlx::query(include_str!("../../../../../sql/session/guard.sql"))
        .bind(session.id().0)
        .fetch_one(&mut *claim)
        .await?;
    let close = {
        let (sessions, session) = (shepherd.sessions.clone(), session.clone());
        tokio::spawn(async move { sessions.close(&session, "shutting down").await })
    };
    kit.until_blocked("worker", 1).await?;
    sqlx::query(
        "WITH d AS (UPDATE machine_due SET lease_session = $1, fence = fence + 1
                    WHERE lane = 'access' RETURNING machine_id, fence),
         h AS (INSERT INTO history (machine_id, at, event, edge, lane, fence, process, session_id)
               SELECT machine_id, clock_timestamp(), 'Started', 'start', 'access', fence, 'AgentStart', $1 FROM d)
         INSERT INTO work SELECT machine_id, 'access', $1, 'AgentStart', fence, clock_timestamp() FROM d",
    )
    .bind(session.id().0)
    .execute(&mut *claim)
    .await?;
    claim.commit().await?;
    ended("the close", close).await??;
    assert_eq!(
        kit.count("SELECT count(*) FROM session WHERE closed_at IS NOT NULL").await?,
        0,
        "closed although it holds work: an effect committed after closed_at"
    );
    Ok(shepherd.stop().await?)
}
