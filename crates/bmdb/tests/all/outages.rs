//! Crashes, partitions and answers that never arrive.

use std::sync::{Arc, Barrier, mpsc};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use model::ids::ProcessId;
use model::policy::DisruptionKind;
use model::process::Process;
use model::time::Span;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::connection::settings::ConnectionSettings;
use shepherd_bmdb::engine::claim::{Claimed, Claimer};
use shepherd_bmdb::engine::intent::{DisruptionRequest, Permission};
use shepherd_bmdb::engine::session::{Session, Sessions};
use shepherd_bmdb::engine::work::Work;
use shepherd_bmdb::metrics::labels::ByResult;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::proxy::Proxy;
use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LONG, PATIENCE, SOON, Shepherd, ended, needs_human, until};

async fn behind(proxy: &Proxy, kit: &Kit, interval: Duration) -> anyhow::Result<Shepherd> {
    let mut settings = ConnectionSettings::from_url(proxy.url(), "behind")?;
    settings.dialect = kit.database.dialect();
    settings.max_connections = 6;
    Shepherd::with(settings, interval).await
}

async fn lost(session: &Session) -> anyhow::Result<()> {
    tokio::time::timeout(PATIENCE, session.lost().cancelled()).await.context("the session was never lost")
}

fn failed_renewals(shepherd: &Shepherd) -> u64 {
    shepherd.bmdb.metrics().renewals.get_or_create(&ByResult { result: "failed" }).get()
}

async fn renewed_for(kit: &Kit, session: &Session, by: &str) -> anyhow::Result<()> {
    until("the session is renewed", async || {
        anyhow::ensure!(!session.lost().is_cancelled(), "lost: {:?}", session.loss_reason());
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
async fn work_of_a_claim_whose_answer_was_lost_is_adopted() -> TestResult {
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
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finish_whose_answer_was_lost_is_found_in_history() -> TestResult {
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
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fail_whose_answer_was_lost_grows_the_backoff_once() -> TestResult {
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
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finish_cut_off_while_it_waits_is_done_once() -> TestResult {
    let kit = Kit::new("cut_finish").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let proxy = Proxy::start(&kit.database).await?;
    let shepherd = behind(&proxy, &kit, LONG).await?.patient().await?;
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
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_whose_acquisition_had_an_unknown_outcome_is_acquired_again() -> TestResult {
    let kit = Kit::new("lost_lease").await?;
    let proxy = Proxy::start(&kit.database).await?;
    let shepherd = behind(&proxy, &kit, LONG).await?;
    let (session, other) = (shepherd.session().await?, shepherd.session().await?);
    proxy.lose_the_answer_to("provisioner");
    let first = shepherd.bmdb.acquire_named_lease(&session, "provisioner", "rack").await;
    assert!(matches!(first, Err(BmdbError::UnknownOutcome(_))), "{first:?}");
    let mut taken = None;
    until("the lease is taken", async || {
        taken = shepherd.bmdb.acquire_named_lease(&session, "provisioner", "rack").await?;
        Ok(taken.as_ref().is_some_and(|lease| lease.fence == 2))
    })
    .await?;
    let lease = taken.context("no lease")?;
    assert_eq!(shepherd.bmdb.acquire_named_lease(&other, "provisioner", "rack").await?, None);
    assert!(shepherd.bmdb.release_named_lease(&lease).await?);
    assert!(shepherd.bmdb.acquire_named_lease(&other, "provisioner", "rack").await?.is_some());
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outage_shorter_than_the_interval_costs_no_session() -> TestResult {
    let kit = Kit::new("short_outage").await?;
    for refused in [true, false] {
        let proxy = Proxy::start(&kit.database).await?;
        // One renewal that is not answered takes nearly two thirds of that; a busy host has the rest for the next.
        let shepherd = behind(&proxy, &kit, Duration::from_secs(30)).await?;
        let session = shepherd.session().await?;
        renewed_for(&kit, &session, "1 millisecond").await?;
        let failed_before = failed_renewals(&shepherd);
        if refused {
            proxy.refuse();
        } else {
            proxy.swallow();
        }
        until("a renewal has failed", async || Ok(failed_renewals(&shepherd) > failed_before)).await?;
        proxy.heal();
        renewed_for(&kit, &session, "8 seconds").await?;
        shepherd.stop().await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outage_longer_than_the_interval_stops_the_work_before_the_database_does() -> TestResult {
    let kit = Kit::new("long_outage").await?;
    kit.provided(1, "rack").await?;
    let proxy = Proxy::start(&kit.database).await?;
    // The work stops about a tenth of that before its session is over: time for a busy host to look.
    let shepherd = behind(&proxy, &kit, Duration::from_secs(40)).await?;
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
    assert!(matches!(work.outward_call_limit(Duration::ZERO), Err(BmdbError::LeaseLost)));
    drop(work);

    // The network is back, the old connections stay silent: a new session must live anyway.
    proxy.heal();
    let mut fresh = None;
    until("a session can be started", async || {
        fresh = shepherd.session().await.ok();
        Ok(fresh.is_some())
    })
    .await?;
    renewed_for(&kit, &fresh.context("no session")?, "6 seconds").await?;
    assert!(session.lost().is_cancelled(), "a lost session revived");
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keeper_stops_although_the_database_is_away() -> TestResult {
    let kit = Kit::new("stop_without_database").await?;
    kit.provided(1, "rack").await?;
    let proxy = Proxy::start(&kit.database).await?;
    let shepherd = behind(&proxy, &kit, SOON).await?;
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
async fn exhausted_pool_costs_no_session() -> TestResult {
    let kit = Kit::new("exhausted_pool").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "worker", SOON).await?;
    let session = shepherd.session().await?;
    let mut by_hand = kit.connection().await?;
    let mut lock = by_hand.begin().await?;
    sqlx::query("SELECT 1 FROM machine_due FOR UPDATE").execute(&mut *lock).await?;
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..12 {
        let bmdb = shepherd.bmdb.clone();
        waiting.spawn(async move {
            // Each gives up when it has waited for the lock for too long, and stands in line again.
            while bmdb.repair_schedule(machine).await.is_err() {}
        });
    }
    kit.until_blocked("worker", 6).await?;
    renewed_for(&kit, &session, "24 seconds").await?;
    lock.rollback().await?;
    while let Some(done) = tokio::time::timeout(PATIENCE, waiting.join_next()).await? {
        done?;
    }
    Ok(shepherd.stop().await?)
}

/// Handlers compute or block on every thread of the runtime.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocked_runtime_costs_no_session() -> TestResult {
    let kit = Kit::new("blocked_runtime").await?;
    let shepherd = Shepherd::start(&kit, "worker", Duration::from_secs(16)).await?;
    let mut sessions = Vec::new();
    for _ in 0..3 {
        sessions.push(shepherd.session().await?);
    }
    let started = Arc::new(Barrier::new(3));
    let (gates, held): (Vec<_>, Vec<_>) = (0..2).map(|_| mpsc::channel::<()>()).unzip();
    for gate in held {
        let started = started.clone();
        tokio::spawn(async move {
            started.wait();
            // Ends when the other end is dropped.
            let _ = gate.recv();
        });
    }
    started.wait();
    // This runtime has no free thread, so the observer needs a thread and a runtime of its own.
    let url = kit.database.url().to_owned();
    let outlived = thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let options: PgConnectOptions = url.parse()?;
            let mut connection = options.connect().await?;
            until("all sessions have outlived two intervals", async || {
                let renewed: i64 = sqlx::query_scalar(
                    "SELECT count(*) FROM session WHERE deadline > started_at + interval_ms * INTERVAL '3 milliseconds'",
                )
                .fetch_one(&mut connection)
                .await?;
                Ok(renewed == 3)
            })
            .await
        })
    })
    .join();
    drop(gates);
    outlived.map_err(|_| anyhow::anyhow!("panicked"))??;
    for session in &sessions {
        assert!(!session.lost().is_cancelled(), "lost: {:?}", session.loss_reason());
    }
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keeper_that_is_dropped_renews_no_more_and_says_so() -> TestResult {
    let kit = Kit::new("dropped_keeper").await?;
    let (sessions, keeper) = Sessions::new(kit.bmdb.clone(), ProcessId::generate(), Duration::from_mins(1));
    let session = sessions.start("test", serde_json::json!({})).await?;
    let kept = keeper.run(&CancellationToken::new())?;
    assert!(!session.lost().is_cancelled());
    drop(kept);
    lost(&session).await?;
    assert_eq!(session.loss_reason(), Some("nobody renews it any more"));
    Ok(())
}

/// The worst case: the session is no longer renewed and does not know it, so nothing else stops its work.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outward_call_is_cut_off_before_its_machine_can_be_somebody_elses() -> TestResult {
    let kit = Kit::new("outward").await?;
    kit.bmdb.change_policy("test", |policy| policy.outward_limit = Span::seconds(1)).await?;
    kit.provided(1, "rack").await?;
    // The call is cut off a tenth of that before the machine could be claimed, so that a busy host has time to look.
    let (sessions, keeper) = Sessions::new(kit.bmdb.clone(), ProcessId::generate(), Duration::from_secs(30));
    drop(keeper);
    let session = sessions.start("doomed", serde_json::json!({})).await?;
    let mut claimer = Claimer::new(sessions.clone(), Process::AgentStart, vec!["rack".into()]);
    let Claimed::Work(work) = claimer.claim(&[session]).await? else { panic!("no work") };
    let short = Duration::from_millis(10);
    assert_eq!(work[0].outward_call_limit(short)?, short, "a call is given no more than its own limit");
    assert_eq!(work[0].run_outward_call(short, async { 7 }).await?, 7);
    let call = work[0].run_outward_call(Duration::from_hours(1), std::future::pending::<()>());
    let cut = tokio::time::timeout(PATIENCE, call).await?;
    assert!(matches!(cut, Err(BmdbError::OutwardCallTimedOut { .. })), "{cut:?}");
    let in_time: bool =
        sqlx::query_scalar("SELECT clock_timestamp() < deadline + INTERVAL '1 second' FROM session")
            .fetch_one(&kit.pool)
            .await?;
    assert!(in_time, "the machine could have been claimed during the call");
    assert!(matches!(work[0].outward_call_limit(Duration::ZERO), Err(BmdbError::SessionEnded)));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancel_whose_answer_was_lost_is_sent_again() -> TestResult {
    let kit = Kit::new("lost_cancel").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let proxy = Proxy::start(&kit.database).await?;
    let shepherd = behind(&proxy, &kit, LONG).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;
    proxy.lose_the_answer_to("for a reason of its own");
    work.cancel("for a reason of its own").await?;
    assert!(proxy.answer_was_lost());
    assert_eq!(kit.ends(machine).await?, ["Cancelled"]);
    assert_eq!(kit.count("SELECT count(*) FROM work").await?, 0);
    Ok(shepherd.stop().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn step_that_nobody_settled_is_of_unknown_outcome_when_its_work_ends() -> TestResult {
    let kit = Kit::new("unsettled").await?;
    kit.provided(4, "rack").await?;
    kit.silent().await?;
    let shepherd = Shepherd::start(&kit, "worker", LONG).await?;
    for how in ["settled", "finished", "cancelled", "lost"] {
        let session = shepherd.session().await?;
        let work = shepherd.claim_one(&session, Process::Recovery).await?;
        let step = DisruptionRequest {
            rung: 0,
            disruption: DisruptionKind::RestartAgent,
            attempt: 1,
            deadline: Span::minutes(2),
            facts_read_at: work.snapshot().await?.now,
            brake: None,
            provider: "rack".into(),
        };
        let permission = work.begin_disruption(step).await?;
        let Permission::Granted { intent, .. } = permission else { panic!("{permission:?}") };
        match how {
            "settled" => {
                assert!(work.resolve_intent(intent, "done: it was").await?);
                assert!(!work.resolve_intent(intent, "late").await?, "a late answer was obeyed");
                work.finish(vec![needs_human("done")], "done").await?;
            }
            "finished" => work.finish(vec![needs_human("done")], "done").await?,
            "cancelled" => {
                let machine = work.machine();
                work.cancel("in the middle").await?;
                // Not ready again, so that the next round claims another machine.
                kit.change(machine, vec![needs_human("done")]).await?;
            }
            _ => {
                kit.overdue(&session).await?;
                // The reaper has not closed the session yet, but its writes are already refused.
                let late = work.resolve_intent(intent, "late").await;
                assert!(matches!(late, Err(BmdbError::SessionEnded)), "{late:?}");
                kit.database.advance(Duration::from_secs(1)).await?;
                assert_eq!(kit.bmdb.reap().await?.work, 1);
                assert!(work.resolve_intent(intent, "late").await.is_err(), "a late answer was obeyed");
            }
        }
        let outcome: Option<String> = sqlx::query_scalar("SELECT outcome FROM intent WHERE intent_id = $1")
            .bind(intent.0)
            .fetch_one(&kit.pool)
            .await?;
        let expected = match how {
            "settled" => "done: it was",
            "finished" => "unknown: it was not written down",
            "cancelled" => "unknown: the work was cancelled in the middle",
            _ => "unknown: the session that took the step was lost",
        };
        assert_eq!(outcome.as_deref(), Some(expected), "{how}");
    }
    assert_eq!(kit.count("SELECT count(*) FROM intent WHERE settled_at IS NULL").await?, 0);
    Ok(shepherd.stop().await?)
}

/// The pool tests a connection that is given back, with no limit of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_that_falls_silent_on_its_way_back_holds_up_nobody() -> TestResult {
    let kit = Kit::new("silent_on_return").await?;
    let proxy = Proxy::start(&kit.database).await?;
    let mut settings = ConnectionSettings::from_url(proxy.url(), "behind")?;
    settings.dialect = kit.database.dialect();
    settings.max_connections = 1;
    let bmdb = shepherd_bmdb::connection::Bmdb::connect(settings).await?;
    // Its only connection is out when the network begins to swallow the next test of one: that is the
    // pool's, of the connection on its way back, and not ours of one that was idle for long.
    let (out, back) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let transaction = {
        let (bmdb, out, back) = (bmdb.clone(), out.clone(), back.clone());
        tokio::spawn(async move {
            let held = bmdb.transact_with("holding a connection", (out, back), move |_, (out, back)| {
                Box::pin(async move {
                    out.notify_one();
                    back.notified().await;
                    Ok(())
                })
            });
            held.await
        })
    };
    out.notified().await;
    proxy.swallow_from_ping(1);
    back.notify_one();
    transaction.await??;
    until("the connection is silent", async || Ok(proxy.is_swallowing())).await?;
    proxy.heal();
    let began = std::time::Instant::now();
    bmdb.read_policy().await?;
    bmdb.close().await;
    assert!(began.elapsed() < Duration::from_secs(9), "waited {:?} for it", began.elapsed());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_frees_machines_in_time_and_each_loss_doubles_the_pause_until_somebody_gets_through()
-> TestResult {
    let kit = Kit::new("crash").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let interval = SOON;
    let claim = async || -> anyhow::Result<(Session, Option<Work>)> {
        // A process that never renews: as if it had been killed at once.
        let (sessions, keeper) = Sessions::new(kit.bmdb.clone(), ProcessId::generate(), interval);
        drop(keeper);
        let session = sessions.start("doomed", serde_json::json!({})).await?;
        let mut claimer = Claimer::new(sessions.clone(), Process::AgentStart, vec!["rack".into()]);
        let work = match claimer.claim(std::slice::from_ref(&session)).await? {
            Claimed::Work(mut work) => work.pop(),
            _ => None,
        };
        Ok((session, work))
    };
    let mut pauses = Vec::new();
    let mut pause = 0_i64;
    for _ in 0..8 {
        let mut claimed = None;
        if pause > 0 {
            kit.database.advance(Duration::from_secs(u64::try_from(pause)? - 2)).await?;
            claimed = claim().await?.1;
            if claimed.is_some() {
                // A host may be away for these two seconds, and the database's clock goes on.
                let over: bool = sqlx::query_scalar(
                    "SELECT w.started_at >= d.not_before FROM work w JOIN machine_due d USING (machine_id, lane)",
                )
                .fetch_one(&kit.pool)
                .await?;
                assert!(over, "claimed before its pause of {pause} s was over");
            } else {
                kit.database.advance(Duration::from_secs(3)).await?;
            }
        }
        if claimed.is_none() {
            claimed = claim().await?.1;
        }
        let work = claimed.context("not claimable in time")?;
        std::mem::drop(work);
        // Interval and reaper's grace, well inside the five seconds that a reaper's period adds.
        kit.database.advance(interval + Duration::from_secs(1)).await?;
        assert_eq!(kit.bmdb.reap().await?.work, 1);
        pause = kit
            .count(
                "SELECT extract(epoch FROM d.not_before - s.closed_at)::INT8
                 FROM machine_due d JOIN history h USING (machine_id, lane) JOIN session s USING (session_id)
                 WHERE h.event = 'Expired' AND h.fence = d.fence",
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
async fn expired_session_never_revives_and_writes_nothing() -> TestResult {
    let kit = Kit::new("expired").await?;
    let machine = kit.provided(1, "rack").await?[0];
    let shepherd = Shepherd::start(&kit, "worker", SOON).await?;
    let session = shepherd.session().await?;
    let work = shepherd.claim_one(&session, Process::AgentStart).await?;
    kit.overdue(&session).await?;
    // Past its deadline, a session counts as ended even before the reaper closes it.
    let record = work.record_changes(|_| shepherd_bmdb::engine::change_machine::Decision {
        changes: vec![testkit::bmdb_kit::hold("late")],
        ..Default::default()
    });
    let record: Result<(), _> = record.await;
    assert!(matches!(record, Err(BmdbError::SessionEnded)), "{record:?}");
    lost(&session).await?;
    kit.database.advance(Duration::from_secs(1)).await?;
    kit.bmdb.reap().await?;
    sqlx::query("UPDATE session SET deadline = clock_timestamp() + INTERVAL '1 hour'")
        .execute(&kit.pool)
        .await?;
    let finish = work.finish(Vec::new(), "done").await;
    assert!(matches!(finish, Err(BmdbError::LeaseLost | BmdbError::SessionEnded)), "{finish:?}");
    for statement in [
        include_str!("../../../../sql/session/renew_one.sql"),
        include_str!("../../../../sql/session/guard.sql"),
    ] {
        let answer = sqlx::query(statement).bind(session.id().0).fetch_optional(&kit.pool).await?;
        assert!(answer.is_none(), "a closed session answered");
    }
    let locked = sqlx::query(include_str!("../../../../sql/schedule/lock_due_rows_for_session.sql"))
        .bind(session.id().0)
        .bind(machine.0)
        .fetch_optional(&kit.pool)
        .await?;
    assert!(locked.is_none(), "a closed session locked a machine");
    let taken = shepherd.bmdb.acquire_named_lease(&session, "provisioner", "rack").await?;
    assert_eq!(taken, None);
    kit.database.advance(Duration::from_mins(2)).await?;
    let claimed = shepherd.claimer(Process::AgentStart, "rack").claim(&[session]).await?;
    assert!(!matches!(claimed, Claimed::Work(_)), "{claimed:?}");
    assert_eq!(kit.ends(machine).await?, ["Expired"]);
    assert_eq!(kit.count("SELECT count(*) FROM machine_hold").await?, 0);
    Ok(shepherd.stop().await?)
}
