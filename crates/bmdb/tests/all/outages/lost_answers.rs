//! A statement takes effect, and its answer never arrives.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use model::process::Process;
use shepherd_bmdb::connection::error::BmdbError;
use shepherd_bmdb::connection::settings::ConnectionSettings;
use shepherd_bmdb::engine::claim::Claimed;
use shepherd_bmdb::engine::work::Work;
use sqlx::Connection as _;
use tokio::sync::Notify;

use super::behind;
use crate::proxy::Proxy;
use testkit::aloud::TestResult;
use testkit::bmdb_kit::{Kit, LONG, ended, until};

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
async fn session_is_closed_if_the_answer_to_its_start_was_lost() -> TestResult {
    let kit = Kit::new("lost_start").await?;
    let proxy = Proxy::start(&kit.database).await?;
    let shepherd = behind(&proxy, &kit, LONG).await?;
    proxy.lose_the_answer_to("unanswered");
    let started = shepherd.sessions.start("unanswered", serde_json::json!({})).await;
    assert!(matches!(started, Err(BmdbError::UnknownOutcome(_))), "{started:?}");
    assert!(proxy.answer_was_lost());
    // The server answered, so the row was there by then.
    assert_eq!(kit.count("SELECT count(*) FROM session WHERE component = 'unanswered'").await?, 1);
    until("it is closed", async || {
        Ok(kit.count("SELECT count(*) FROM session WHERE closed_at IS NULL").await? == 0)
    })
    .await?;
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
