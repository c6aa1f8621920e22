//! Crashes, partitions and answers that never arrive.

mod lost_answers;
mod renewal;

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

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

use crate::proxy::Proxy;
use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LONG, PATIENCE, SOON, Shepherd, needs_human, until};

async fn behind(proxy: &Proxy, kit: &Kit, interval: Duration) -> anyhow::Result<Shepherd> {
    let mut settings = ConnectionSettings::from_url(proxy.url(), "behind")?;
    settings.dialect = kit.database.dialect();
    settings.max_connections = 6;
    Shepherd::with(settings, interval).await
}

async fn lost(session: &Session) -> anyhow::Result<()> {
    tokio::time::timeout(PATIENCE, session.lost().cancelled()).await.context("the session was never lost")
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
    // A frozen process wakes with an answer that has come, and with its limit passed.
    let (brief, sent) = (Duration::from_millis(50), AtomicBool::new(false));
    let mut call = pin!(work[0].run_outward_call(brief, async {
        tokio::task::yield_now().await;
        sent.store(true, Ordering::Relaxed);
    }));
    let waits = poll_fn(|context| Poll::Ready(call.as_mut().poll(context).is_pending())).await;
    assert!(waits, "it waits for its answer");
    let frozen_until = Instant::now() + brief;
    while Instant::now() < frozen_until {
        std::thread::yield_now();
    }
    let ended = call.await;
    assert!(!sent.load(Ordering::Relaxed), "it went on after its limit");
    assert!(matches!(ended, Err(BmdbError::OutwardCallTimedOut { .. })), "{ended:?}");
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

/// A frozen process wakes when its session is over, before the thread that renews sessions has seen it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handler_does_nothing_once_its_session_is_over() -> TestResult {
    let kit = Kit::new("woken_handler").await?;
    kit.provided(1, "rack").await?;
    let (sessions, renewer) = Sessions::new(kit.bmdb.clone(), ProcessId::generate(), Duration::from_secs(30));
    drop(renewer);
    let session = sessions.start("doomed", serde_json::json!({})).await?;
    let mut claimer = Claimer::new(sessions.clone(), Process::AgentStart, vec!["rack".into()]);
    let Claimed::Work(work) = claimer.claim(std::slice::from_ref(&session)).await? else { panic!("no work") };
    assert_eq!(work[0].run_while_held(async { 7 }).await, Some(7));
    let (wake, sent) = (tokio::sync::Notify::new(), AtomicBool::new(false));
    let mut handler = pin!(work[0].run_while_held(async {
        wake.notified().await;
        sent.store(true, Ordering::Relaxed);
    }));
    let waits = poll_fn(|context| Poll::Ready(handler.as_mut().poll(context).is_pending())).await;
    assert!(waits, "it waits for an answer");
    tokio::time::sleep(session.remaining()).await;
    until("the session is over here", async || Ok(session.remaining().is_zero())).await?;
    wake.notify_one();
    assert_eq!(handler.await, None);
    assert!(!sent.load(Ordering::Relaxed), "it went on after its session");
    assert!(work[0].stop().is_cancelled());
    assert_eq!(work[0].stop_reason(), Some("it could not be renewed in time"));
    Ok(())
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
