//! Crashes, partitions and answers that never arrive.

use std::time::Duration;

use anyhow::Context as _;
use shepherd::bmdb::claim::Claimed;
use shepherd::bmdb::connection::ConnectionSettings;
use shepherd::bmdb::error::BmdbError;
use shepherd::bmdb::session::{Session, Sessions};
use shepherd::bmdb::work::Work;
use shepherd::model::ids::ProcessId;
use shepherd::model::process::Process;
use sqlx::Connection as _;

use crate::bmdb_kit::{Kit, LONG, PATIENCE, Shepherd, dialect, ended, until};
use crate::bmdb_proxy::Proxy;

async fn behind(proxy: &Proxy, kit: &Kit, interval: Duration) -> anyhow::Result<Shepherd> {
    let mut settings = ConnectionSettings::from_url(proxy.url(), "behind")?;
    settings.dialect = dialect(kit.database.mode());
    settings.max_connections = 6;
    Shepherd::with(settings, interval).await
}

async fn lost(session: &Session) -> anyhow::Result<()> {
    tokio::time::timeout(PATIENCE, session.lost().cancelled()).await.context("the session was never lost")
}

async fn renewed_for(kit: &Kit, session: &Session, by: &str) -> anyhow::Result<()> {
    until("the session is renewed", async || {
        anyhow::ensure!(!session.lost().is_cancelled(), "lost: {:?}", session.lost_because());
        let renewed = sqlx::query_scalar(
            "SELECT deadline - started_at > interval_ms * INTERVAL '1 millisecond' + $2::INTERVAL
             FROM session WHERE session_id = $1",
        )
        .bind(session.id().0)
        .bind(by)
        .fetch_one(&kit.pool)
        .await?;
        Ok(renewed)
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_of_a_claim_whose_answer_was_lost_is_adopted() -> anyhow::Result<()> {
    let kit = Kit::new("lost_claim").await?;
    kit.provided(5, "rack").await?;
    let proxy = Proxy::start(&kit.database).await?;
    let shepherd = behind(&proxy, &kit, LONG).await?;
    let mut sessions = Vec::new();
    for _ in 0..5 {
        sessions.push(shepherd.session().await?);
    }
    let mut claimer = shepherd.claimer(Process::AgentStart, "rack");
    proxy.lose_the_answer_to("AgentStart");
    // The server may still be at it when we look: then the next claim or the keeper sees it.
    let mut work: Vec<Work> = Vec::new();
    until("all five machines are ours", async || {
        match claimer.claim(&sessions).await {
            Ok(Claimed::Work(more)) => work.extend(more),
            Ok(_) | Err(BmdbError::UnknownOutcome(_)) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(work.len() == 5)
    })
    .await?;
    assert!(proxy.answer_was_lost());
    assert_eq!(kit.count("SELECT count(*) FROM history WHERE edge = 'start'").await?, 5);
    for item in work {
        item.finish(Vec::new(), "done").await?;
    }
    assert_eq!(kit.count("SELECT count(*) FROM history WHERE event = 'Finished'").await?, 5);
    shepherd.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finish_whose_answer_was_lost_is_found_in_history() -> anyhow::Result<()> {
    let kit = Kit::new("lost_finish").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let proxy = Proxy::start(&kit.database).await?;
    let shepherd = behind(&proxy, &kit, LONG).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;
    proxy.lose_the_answer_to("COMMIT");
    work.finish(Vec::new(), "done").await?;
    assert!(proxy.answer_was_lost());
    assert_eq!(kit.ends(machine).await?, ["Finished"]);
    assert_eq!(kit.count("SELECT count(*) FROM work").await?, 0);
    shepherd.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fail_whose_answer_was_lost_grows_the_backoff_once() -> anyhow::Result<()> {
    let kit = Kit::new("lost_fail").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let proxy = Proxy::start(&kit.database).await?;
    let shepherd = behind(&proxy, &kit, LONG).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;
    proxy.lose_the_answer_to("COMMIT");
    work.fail(Vec::new(), "no route", None).await?;
    assert!(proxy.answer_was_lost());
    assert_eq!(kit.ends(machine).await?, ["Failed"]);
    assert_eq!(kit.count("SELECT failures FROM work_backoff").await?, 1);
    shepherd.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finish_cut_off_while_it_waits_is_done_once() -> anyhow::Result<()> {
    let kit = Kit::new("cut_finish").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let proxy = Proxy::start(&kit.database).await?;
    let shepherd = behind(&proxy, &kit, LONG).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;
    let mut by_hand = kit.connection().await?;
    let mut lock = by_hand.begin().await?;
    sqlx::query("SELECT 1 FROM machine_due FOR UPDATE").execute(&mut *lock).await?;
    let finish = tokio::spawn(work.finish(Vec::new(), "done"));
    kit.until_blocked("behind", 1).await?;
    proxy.cut();
    // The first try still waits in the server when the second begins to.
    kit.until_blocked("behind", 2).await?;
    lock.commit().await?;
    ended("the finish", finish).await??;
    assert_eq!(kit.ends(machine).await?, ["Finished"]);
    shepherd.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_whose_taking_was_not_heard_of_is_taken_anew() -> anyhow::Result<()> {
    let kit = Kit::new("lost_lease").await?;
    let proxy = Proxy::start(&kit.database).await?;
    let shepherd = behind(&proxy, &kit, LONG).await?;
    let (session, other) = (shepherd.session().await?, shepherd.session().await?);
    proxy.lose_the_answer_to("provisioner");
    let first = shepherd.bmdb.take_lease(&session, "provisioner", "rack").await;
    assert!(matches!(first, Err(BmdbError::UnknownOutcome(_))), "{first:?}");
    let mut taken = None;
    until("the lease is taken", async || {
        taken = shepherd.bmdb.take_lease(&session, "provisioner", "rack").await?;
        Ok(taken.as_ref().is_some_and(|lease| lease.fence == 2))
    })
    .await?;
    let lease = taken.context("no lease")?;
    assert_eq!(shepherd.bmdb.take_lease(&other, "provisioner", "rack").await?, None);
    assert!(shepherd.bmdb.give_back_lease(&lease).await?);
    assert!(shepherd.bmdb.take_lease(&other, "provisioner", "rack").await?.is_some());
    shepherd.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outage_shorter_than_the_interval_costs_no_session() -> anyhow::Result<()> {
    let kit = Kit::new("short_outage").await?;
    for refused in [true, false] {
        let proxy = Proxy::start(&kit.database).await?;
        let shepherd = behind(&proxy, &kit, Duration::from_secs(6)).await?;
        let session = shepherd.session().await?;
        renewed_for(&kit, &session, "1 millisecond").await?;
        if refused {
            proxy.refuse();
        } else {
            proxy.swallow();
        }
        // The outage itself, long enough for at least one renewal to fail in it.
        tokio::time::sleep(Duration::from_secs(2)).await;
        proxy.heal();
        renewed_for(&kit, &session, "8 seconds").await?;
        shepherd.stop().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outage_longer_than_the_interval_stops_the_work_before_the_database_does() -> anyhow::Result<()> {
    let kit = Kit::new("long_outage").await?;
    kit.provided(1, "rack").await?;
    let proxy = Proxy::start(&kit.database).await?;
    let shepherd = behind(&proxy, &kit, Duration::from_secs(3)).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;
    renewed_for(&kit, &session, "1 millisecond").await?;
    proxy.swallow();
    lost(&session).await?;
    let still_live: bool =
        sqlx::query_scalar("SELECT deadline > clock_timestamp() FROM session").fetch_one(&kit.pool).await?;
    assert!(still_live, "the process acted on after its session was over in the database");
    assert!(work.stop().is_cancelled());
    assert_eq!(work.stop_reason(), Some("it could not be renewed in time"));
    assert!(matches!(work.may_call_out(), Err(BmdbError::LeaseLost)));
    drop(work);

    // The network is back, the old connections stay silent: a new session must live all the same.
    proxy.heal();
    let mut fresh = None;
    until("a session can be started", async || {
        fresh = shepherd.session().await.ok();
        Ok(fresh.is_some())
    })
    .await?;
    renewed_for(&kit, &fresh.context("no session")?, "6 seconds").await?;
    assert!(session.lost().is_cancelled(), "a lost session revived");
    shepherd.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keeper_stops_although_the_database_is_away() -> anyhow::Result<()> {
    let kit = Kit::new("stop_without_database").await?;
    kit.provided(1, "rack").await?;
    let proxy = Proxy::start(&kit.database).await?;
    let shepherd = behind(&proxy, &kit, Duration::from_secs(3)).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;
    proxy.refuse();
    drop(work);
    let stop = tokio::spawn(shepherd.stop());
    ended("the keeper", stop).await??;
    assert!(session.lost().is_cancelled());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exhausted_pool_costs_no_session() -> anyhow::Result<()> {
    let kit = Kit::new("exhausted_pool").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "worker", Duration::from_secs(2)).await?;
    let session = shepherd.session().await?;
    let mut by_hand = kit.connection().await?;
    let mut lock = by_hand.begin().await?;
    sqlx::query("SELECT 1 FROM machine_due FOR UPDATE").execute(&mut *lock).await?;
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..12 {
        let bmdb = shepherd.bmdb.clone();
        waiting.spawn(async move {
            // Each gives up when it has waited for the lock for too long, and stands in line again.
            while bmdb.repair(machine).await.is_err() {}
        });
    }
    kit.until_blocked("worker", 6).await?;
    renewed_for(&kit, &session, "6 seconds").await?;
    lock.rollback().await?;
    while let Some(done) = tokio::time::timeout(PATIENCE, waiting.join_next()).await? {
        done?;
    }
    shepherd.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_frees_machines_in_time_and_each_loss_doubles_the_pause_until_somebody_gets_through()
-> anyhow::Result<()> {
    let kit = Kit::new("crash").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let interval = Duration::from_secs(5);
    let claim = async || -> anyhow::Result<(Session, Option<Work>)> {
        // A process that never renews: as if it had been killed at once.
        let (sessions, keeper) = Sessions::new(kit.bmdb.clone(), ProcessId::generate(), interval);
        drop(keeper);
        let session = sessions.start("doomed", serde_json::json!({})).await?;
        let mut claimer =
            shepherd::bmdb::claim::Claimer::new(sessions.clone(), Process::AgentStart, vec!["rack".into()]);
        let work = match claimer.claim(std::slice::from_ref(&session)).await? {
            Claimed::Work(mut work) => work.pop(),
            _ => None,
        };
        Ok((session, work))
    };
    let mut pauses = Vec::new();
    let mut pause = 0_i64;
    for _ in 0..8 {
        if pause > 0 {
            kit.database.advance(Duration::from_secs(u64::try_from(pause)? - 2)).await?;
            assert!(claim().await?.1.is_none(), "claimed before its pause of {pause} s was over");
            kit.database.advance(Duration::from_secs(3)).await?;
        }
        let (_, work) = claim().await?;
        let work = work.context("not claimable in time")?;
        std::mem::drop(work);
        // Interval and reaper's grace, well inside the five seconds that a reaper's period adds.
        kit.database.advance(interval + Duration::from_secs(1)).await?;
        assert_eq!(kit.bmdb.reap().await?.work, 1);
        pause = kit
            .count(
                "SELECT extract(epoch FROM d.not_before - s.closed_at)::INT8 FROM machine_due d, session s
                 WHERE d.not_before IS NOT NULL ORDER BY s.closed_at DESC LIMIT 1",
            )
            .await?;
        pauses.push(pause);
    }
    assert_eq!(pauses, [60, 120, 240, 480, 960, 1920, 3600, 3600]);
    assert_eq!(kit.count("SELECT losses FROM machine_due WHERE lane = 'access'").await?, 8);
    assert_eq!(kit.count("SELECT count(*) FROM work_backoff").await?, 0, "a loss is no failure");

    for (ending, losses) in [("fail", 0), ("cancel", 1), ("finish", 0)] {
        sqlx::query(
            "UPDATE machine_due SET losses = 1, not_before = clock_timestamp() - INTERVAL '1 second',
                    ready_at = CASE WHEN lane = 'access' THEN clock_timestamp() END,
                    process = CASE WHEN lane = 'access' THEN 'AgentStart' END",
        )
        .execute(&kit.pool)
        .await?;
        let shepherd = Shepherd::start(&kit, "survivor", LONG).await?;
        let session = shepherd.session().await?;
        let work = shepherd.claim_one(&session, Process::AgentStart).await?;
        match ending {
            "fail" => work.fail(Vec::new(), "no route", None).await?,
            "cancel" => work.cancel("not now").await?,
            _ => work.finish(Vec::new(), "done").await?,
        }
        let (found, paused): (i64, bool) = sqlx::query_as(
            "SELECT losses, not_before IS NOT NULL FROM machine_due WHERE machine_id = $1 AND lane = 'access'",
        )
        .bind(machine.0)
        .fetch_one(&kit.pool)
        .await?;
        assert_eq!((found, paused), (losses, losses > 0), "{ending}");
        shepherd.stop().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_session_never_revives_and_writes_nothing() -> anyhow::Result<()> {
    let kit = Kit::new("expired").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "worker", Duration::from_secs(4)).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;
    kit.overdue(&session).await?;
    // Past its deadline and not closed yet: over all the same.
    let record = work.record(|_| shepherd::bmdb::work::Decision {
        changes: vec![crate::bmdb_kit::hold("late")],
        ..Default::default()
    });
    let record: Result<(), _> = record.await;
    assert!(matches!(record, Err(BmdbError::SessionOver)), "{record:?}");
    lost(&session).await?;
    kit.database.advance(Duration::from_secs(1)).await?;
    kit.bmdb.reap().await?;
    sqlx::query("UPDATE session SET deadline = clock_timestamp() + INTERVAL '1 hour'")
        .execute(&kit.pool)
        .await?;
    let finish = work.finish(Vec::new(), "done").await;
    assert!(matches!(finish, Err(BmdbError::LeaseLost | BmdbError::SessionOver)), "{finish:?}");
    for statement in
        [include_str!("../../sql/session/renew_one.sql"), include_str!("../../sql/session/guard.sql")]
    {
        let answer = sqlx::query(statement).bind(session.id().0).fetch_optional(&kit.pool).await?;
        assert!(answer.is_none(), "a closed session answered");
    }
    let taken = shepherd.bmdb.take_lease(&session, "provisioner", "rack").await?;
    assert_eq!(taken, None);
    kit.database.advance(Duration::from_mins(2)).await?;
    let claimed = shepherd.claimer(Process::AgentStart, "rack").claim(&[session]).await?;
    assert!(!matches!(claimed, Claimed::Work(_)), "{claimed:?}");
    assert_eq!(kit.ends(machine).await?, ["Expired"]);
    assert_eq!(kit.count("SELECT count(*) FROM machine_hold").await?, 0);
    shepherd.stop().await
}
