//! The races that queues like ours lose, each made to happen, and what stops it.
//!
//! One test a row of the table that the statements were designed by. Where a race belongs to one way
//! of using the database, the other ways are held to what takes its place there.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use model::ids::MachineId;
use model::process::Process;
use model::schedule::RULES_VERSION;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::engine::change_machine::Decision;
use shepherd_bmdb::engine::claim::{Claimed, Claimer};
use shepherd_bmdb::engine::fact_change::{FactChange, NewHeartbeat};
use shepherd_bmdb::engine::session::Session;
use shepherd_bmdb::machine::heartbeat::{HeartbeatOutcome, ReceivedHeartbeat};
use shepherd_bmdb::metrics::database::ByOperation;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _, Executor as _};

use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LONG, PATIENCE, SOON, Shepherd, ended, hold, needs_human, surely, until};

const LOCK_DUE: &str = "SELECT fence FROM machine_due WHERE machine_id = $1 FOR UPDATE";

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
    sqlx::query(include_str!("../../../../sql/session/renew_one.sql"))
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
async fn finish_does_not_overwrite_a_hold_that_it_waited_for() -> TestResult {
    let kit = Kit::new("hold_kept").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;

    let mut by_hand = kit.by_hand().await?;
    let mut operator = by_hand.begin().await?;
    sqlx::query(LOCK_DUE).bind(machine.0).execute(&mut *operator).await?;
    let finish = tokio::spawn(work.finish(Vec::new(), "done"));
    kit.until_blocked("worker", 1).await?;
    sqlx::query(
        "INSERT INTO machine_hold (machine_id, scope, reason, held_by, held_at)
         VALUES ($1, 'everything', 'disk swap', 'kim', clock_timestamp())",
    )
    .bind(machine.0)
    .execute(&mut *operator)
    .await?;
    sqlx::query(
        "UPDATE machine_due SET process = NULL, ready_at = NULL, reason = 'held by kim: disk swap',
                version = version + 1 WHERE machine_id = $1 AND lane = 'access'",
    )
    .bind(machine.0)
    .execute(&mut *operator)
    .await?;
    operator.commit().await?;
    ended("the finish", finish).await??;

    let (process, reason): (Option<String>, String) =
        sqlx::query_as("SELECT process, reason FROM machine_due WHERE machine_id = $1 AND lane = 'access'")
            .bind(machine.0)
            .fetch_one(&kit.pool)
            .await?;
    assert_eq!((process, reason.as_str()), (None, "held by kim: disk swap"));
    assert_eq!(kit.sweep().await?, 0, "the schedule drifted");
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_and_facts_in_one_statement_would_see_the_row_new_and_the_fact_old() -> TestResult {
    let kit = Kit::new("one_statement").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let engine = Shepherd::start(&kit, "engine", LONG).await?.patient().await?;
    let mut by_hand = kit.connection().await?;
    let mut operator = by_hand.begin().await?;
    sqlx::query(LOCK_DUE).bind(machine.0).execute(&mut *operator).await?;
    let combined = {
        let mut connection = kit.connection().await?;
        tokio::spawn(async move {
            connection.execute("SET application_name = 'combined'").await?;
            sqlx::query_as::<_, (i64, Option<String>)>(
                "SELECT d.version, h.reason FROM machine_due d LEFT JOIN machine_hold h USING (machine_id)
                 WHERE d.machine_id = $1 AND d.lane = 'access' FOR UPDATE OF d",
            )
            .bind(machine.0)
            .fetch_one(&mut connection)
            .await
        })
    };
    kit.until_blocked("combined", 1).await?;
    let bmdb = engine.bmdb.clone();
    let repair = tokio::spawn(async move { bmdb.repair_schedule(machine).await });
    kit.until_blocked("engine", 1).await?;
    sqlx::query(
        "INSERT INTO machine_hold (machine_id, scope, reason, held_by, held_at)
         VALUES ($1, 'everything', 'disk swap', 'kim', clock_timestamp())",
    )
    .bind(machine.0)
    .execute(&mut *operator)
    .await?;
    sqlx::query("UPDATE machine_due SET version = 1000 WHERE machine_id = $1")
        .bind(machine.0)
        .execute(&mut *operator)
        .await?;
    operator.commit().await?;

    let combined = ended("the combined statement", combined).await?;
    if kit.is_serializable() {
        let error = combined.expect_err("a serialisable statement saw two moments");
        assert_eq!(
            error.as_database_error().and_then(sqlx::error::DatabaseError::code).as_deref(),
            Some("40001")
        );
    } else {
        // Whichever of the two goes first, the row is the new one and the fact is the old one.
        let (version, fact) = combined?;
        assert!(version >= 1000 && fact.is_none(), "needs no separate statements: {version}, {fact:?}");
    }
    ended("the repair", repair).await??;
    let process: Option<String> =
        sqlx::query_scalar("SELECT process FROM machine_due WHERE machine_id = $1 AND lane = 'access'")
            .bind(machine.0)
            .fetch_one(&kit.pool)
            .await?;
    assert_eq!(process, None, "the engine computed from a fact older than the row");
    Ok(engine.stop().await?)
}

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

/// One row that somebody holds keeps no other machine waiting, whatever goes through many of them.
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
        // READ COMMITTED whatever the mode: a person's lock is no part of what is tried.
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

/// The rows of a group are locked without waiting for any of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_heartbeat_is_passed_over_by_a_group() -> TestResult {
    let kit = Kit::new("heartbeat_order").await?;
    let mut machines = kit.provided(20, "rack").await?;
    machines.sort();
    sqlx::raw_sql(
        "INSERT INTO machine_agent_started (machine_id, started_at, public_key, fence)
         SELECT machine_id, now(), decode(repeat('00', 32), 'hex'), 1 FROM machine;
         INSERT INTO machine_agent_heartbeat (machine_id, at, boot_id, incarnation, sequence)
         SELECT machine_id, now(), 'b', 'i', 1 FROM machine;
         UPDATE machine_due SET phase_index = 'Ready'",
    )
    .execute(&kit.pool)
    .await?;
    let listener = Shepherd::start(&kit, "listener", LONG).await?.patient().await?;
    let mut by_hand = kit.connection().await?;
    let mut writer = by_hand.begin().await?;
    sqlx::query("SET TRANSACTION ISOLATION LEVEL READ COMMITTED").execute(&mut *writer).await?;
    let lock = "SELECT at FROM machine_agent_heartbeat WHERE machine_id = $1 FOR UPDATE NOWAIT";
    sqlx::query(lock).bind(machines[0].0).execute(&mut *writer).await?;

    let statement = include_str!("../../../../sql/heartbeat/lock_batch.sql");
    let arrived: Vec<uuid::Uuid> = machines.iter().rev().map(|machine| machine.0).collect();
    let bmdb = listener.bmdb.clone();
    let batch =
        tokio::spawn(async move { sqlx::query(statement).bind(arrived).fetch_all(bmdb.pool()).await });
    assert_eq!(ended("the batch", batch).await??.len(), 19);
    Ok(listener.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_that_nobody_knows_of_is_cancelled_by_the_keeper() -> TestResult {
    let kit = Kit::new("unknown_work").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "worker", SOON).await?;
    let session = shepherd.session().await?;
    // A claim that committed, but whose answer was lost.
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
    sqlx::query(include_str!("../../../../sql/session/guard.sql"))
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

fn second_heartbeat(machine: MachineId) -> Arc<[Arc<ReceivedHeartbeat>]> {
    let beat =
        NewHeartbeat { boot_id: "b".into(), incarnation: "i".into(), sequence: 2, version: "1".into() };
    let (hardware, installation) = (None, None);
    let heartbeat = ReceivedHeartbeat {
        machine,
        public_key: [0; 32],
        beat,
        hardware,
        installation,
        cluster: None,
        release: None,
        access_fence: 0,
    };
    Arc::from([Arc::new(heartbeat)])
}

async fn phase_and_timer(kit: &Kit) -> anyhow::Result<(String, bool)> {
    let text = "SELECT phase_index, timer FROM machine_due WHERE lane = 'access'";
    Ok(sqlx::query_as(text).fetch_one(&kit.pool).await?)
}

/// A heartbeat that is stored but not committed is not yet visible in any facts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn machine_is_not_found_silent_past_a_heartbeat_that_is_being_stored() -> TestResult {
    for who in ["timer", "sweeper"] {
        let kit = Kit::new("heartbeat_first").await?;
        let machine = kit.provided(1, "rack").await?[0];
        kit.fall_silent().await?;
        let listener = Shepherd::start(&kit, "listener", LONG).await?.patient().await?;
        let finder = Shepherd::start(&kit, "finder", LONG).await?.patient().await?;
        let mut by_hand = kit.connection().await?;
        let mut slow = by_hand.begin().await?;
        sqlx::query("SET TRANSACTION ISOLATION LEVEL READ COMMITTED").execute(&mut *slow).await?;
        // The last thing that a group touches.
        sqlx::query("SELECT 1 FROM fleet_listening FOR UPDATE").execute(&mut *slow).await?;
        let bmdb = listener.bmdb.clone();
        let group =
            tokio::spawn(async move { bmdb.store_heartbeat_group(3, second_heartbeat(machine)).await });
        kit.until_blocked("listener", 1).await?;

        let (claimer, bmdb) = (finder.claimer(Process::Recovery, "rack"), finder.bmdb.clone());
        let find = tokio::spawn(async move {
            match who {
                "timer" => claimer.rearm_timers().await.map(|(_, fired)| fired),
                _ => bmdb.sweep_page(MachineId(uuid::Uuid::nil()), 10).await.map(|_| 0),
            }
        });
        let find = if who == "timer" {
            assert_eq!(ended("the timer", find).await??, 0);
            None
        } else {
            kit.until_blocked("finder", 1).await?;
            Some(find)
        };
        slow.commit().await?;
        assert_eq!(ended("the group", group).await??.len(), 1, "{who}: no plain heartbeat");
        if let Some(find) = find {
            assert_eq!(ended("the finder", find).await??, 0, "{who}");
        }
        assert_eq!(phase_and_timer(&kit).await?, ("Ready".to_owned(), true), "{who}");
        assert_eq!(kit.sweep().await?, 0, "{who}: drift");
        finder.stop().await?;
        listener.stop().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeat_that_comes_as_its_machine_is_found_silent_is_no_plain_one() -> TestResult {
    let kit = Kit::new("silence_first").await?;
    let machine = kit.provided(1, "rack").await?[0];
    kit.fall_silent().await?;
    let rearm = include_str!("../../../../sql/claim/rearm_timers.sql");
    let listener = Shepherd::start(&kit, "listener", LONG).await?.patient().await?;
    let mut by_hand = kit.connection().await?;
    let mut timer = by_hand.begin().await?;
    let (_, fired): (i64, i64) =
        sqlx::query_as(rearm).bind(i64::from(RULES_VERSION)).fetch_one(&mut *timer).await?;
    assert_eq!(fired, 1);
    let bmdb = listener.bmdb.clone();
    let group = tokio::spawn(async move { bmdb.store_heartbeat_group(3, second_heartbeat(machine)).await });
    let stored = ended("the group", group).await??;
    timer.commit().await?;
    assert!(stored.is_empty(), "stored as if nothing had happened, and its machine stays silent");
    let judged = kit.bmdb.store_heartbeat(second_heartbeat(machine)[0].clone()).await?;
    assert!(matches!(judged, HeartbeatOutcome::Stored(_)), "{judged:?}");
    assert_eq!(phase_and_timer(&kit).await?, ("Ready".to_owned(), true));
    Ok(listener.stop().await?)
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

/// The commit has ended the transaction: there is nothing to roll back, and the server says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_that_loses_at_its_commit_is_run_again() -> TestResult {
    let kit = Kit::new("lost_commit").await?;
    let machine = kit.provided(1, "rack").await?[0];
    sqlx::raw_sql(
        "CREATE SEQUENCE public.commits;
         CREATE TABLE public.losses AS SELECT 2 AS n;
         CREATE FUNCTION public.lose() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN
             IF nextval(''public.commits'') <= (SELECT n FROM public.losses) THEN
                 RAISE EXCEPTION USING ERRCODE = ''serialization_failure'';
             END IF;
             RETURN NULL;
         END';
         CREATE CONSTRAINT TRIGGER lose AFTER INSERT OR UPDATE ON machine_hold DEFERRABLE INITIALLY DEFERRED
         FOR EACH ROW EXECUTE FUNCTION public.lose()",
    )
    .execute(&kit.pool)
    .await?;
    let sent = async |text: &'static str| -> anyhow::Result<i64> {
        Ok(sqlx::query_scalar(
            "SELECT coalesce(sum(calls), 0)::INT8 FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid
             WHERE d.datname = $1 AND rtrim(query, E' \\n') = $2",
        )
        .bind(kit.database.url().parse::<PgConnectOptions>()?.get_database())
        .bind(text)
        .fetch_one(&mut kit.database.server_url().parse::<PgConnectOptions>()?.connect().await?)
        .await?)
    };
    let (begun, undone) = (sent("BEGIN").await?, sent("ROLLBACK").await?);
    kit.change(machine, vec![hold("disk swap")]).await?;
    assert_eq!(kit.count("SELECT count(*) FROM machine_hold").await?, 1);
    assert!(sent("BEGIN").await? >= begun + 3);
    if !kit.is_serializable() {
        assert_eq!(sent("ROLLBACK").await?, undone, "rolled back what was over");
    }
    let retried = ByOperation { operation: "changing facts", result: "retried" };
    assert!(kit.bmdb.metrics().transactions.get_or_create(&retried).get() >= 2);

    // As one among many does that all want the same: it has to lose long before that is an error.
    let lose = async |times: i32| {
        let times = format!("UPDATE public.losses SET n = {times}; ALTER SEQUENCE public.commits RESTART");
        sqlx::raw_sql(sqlx::AssertSqlSafe(times)).execute(&kit.pool).await
    };
    lose(20).await?;
    kit.change(machine, vec![hold("fan swap")]).await?;
    lose(i32::MAX).await?;
    let refused = kit.change(machine, vec![hold("never")]).await.expect_err("nobody loses for ever");
    let message = "the database could not serialise changing facts in 24 tries";
    assert!(refused.to_string().contains(message), "{refused:#}");
    assert_eq!(kit.count("SELECT count(*) FROM machine_hold WHERE reason = 'fan swap'").await?, 1);
    Ok(())
}

/// Not the connection with its transaction open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transaction_that_panics_leaves_nothing_behind() -> TestResult {
    let kit = Kit::new("panics").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "panicking", LONG).await?;
    for _ in 0..8 {
        let ended = shepherd.bmdb.change_machine(machine, |_| -> Decision<()> { panic!("as planned") }).await;
        assert!(matches!(ended, Err(BmdbError::TaskFailed { .. })), "{ended:?}");
    }
    kit.change(machine, vec![hold("nobody has it locked")]).await?;
    Ok(shepherd.stop().await?)
}
