//! The keeper renews sessions, or stops their work in time when it cannot.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Barrier, mpsc};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use model::ids::ProcessId;
use model::process::Process;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::engine::session::{Session, Sessions, boot_time};
use shepherd_bmdb::metrics::labels::ByResult;
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions as _, Connection as _};
use tokio_util::sync::CancellationToken;

use super::{behind, lost};
use crate::proxy::Proxy;
use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, PATIENCE, SOON, Shepherd, ended, until};

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
            // Each gives up when it has waited for the lock for too long, and queues again.
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

/// The start of a session may wait for a connection, as in a frozen process. The session would be over before it begins,
/// and its row would stay open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_has_its_whole_time_from_when_its_start_is_sent() -> TestResult {
    let kit = Kit::new("start_in_a_queue").await?;
    let (sessions, _keeper) = Sessions::new(kit.bmdb.clone(), ProcessId::generate(), SOON);
    let mut connections = Vec::new();
    for _ in 0..kit.bmdb.settings().max_connections {
        connections.push(kit.bmdb.pool().acquire().await?);
    }
    let mut start = pin!(sessions.start("test", serde_json::json!({})));
    let waits = poll_fn(|context| Poll::Ready(start.as_mut().poll(context).is_pending())).await;
    assert!(waits, "it waits for a connection");
    let queued_at = boot_time();
    while boot_time() < queued_at + Duration::from_millis(100) {
        tokio::task::yield_now().await;
    }
    let released_at = boot_time();
    drop(connections);
    let session = start.await?;
    // In this order, because time passes between the two.
    let (remaining, now) = (session.remaining(), boot_time());
    assert!(now + remaining >= released_at + SOON.mul_f64(0.9), "{remaining:?} of {SOON:?} are left");
    Ok(())
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
