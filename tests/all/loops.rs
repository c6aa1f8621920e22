//! Paused loops: which work begins, which does not, and what is reported about it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Context as _, Result};
use async_trait::async_trait;
use shepherd::bmdb::connection::error::BmdbError;
use shepherd::bmdb::engine::fact_change::FactChange;
use shepherd::bmdb::engine::wakeup::WakeUps;
use shepherd::bmdb::engine::work::Work;
use shepherd::bmdb::metrics::Metrics;
use shepherd::bmdb::orders::loop_pause::{CACHE_TTL, NewPause, PauseCache};
use shepherd::bmdb::orders::order::{Actor, Expiry, Order, request_digest};
use shepherd::manager::control_loop::runner::{LoopContext, LoopSettings, run_loop};
use shepherd::manager::control_loop::{ControlLoop, HandlerError, HandlerOutcome};
use shepherd::manager::limiter::Limiter;
use shepherd::manager::metrics::ManagerMetrics;
use shepherd::model::ids::MachineId;
use shepherd::model::needs_human::Obstacle;
use shepherd::model::pause::LoopKind;
use shepherd::model::plan::plan_fleet;
use shepherd::model::process::Process;
use shepherd::model::time::Span;
use shepherd::model::why::explain_machine;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::bmdb_kit::{Kit, LONG, Shepherd, ended, until};
use crate::harness::aloud::TestResult;

/// Begins work on machines of two providers, and ends it when the gate admits that machine.
struct Gated {
    slow: MachineId,
    gate: Semaphore,
    begun: Mutex<BTreeSet<MachineId>>,
}

impl Gated {
    fn begun(&self) -> MutexGuard<'_, BTreeSet<MachineId>> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl ControlLoop for Gated {
    fn name(&self) -> &'static str {
        "initializer"
    }

    fn process(&self) -> Process {
        Process::AgentStart
    }

    fn providers(&self) -> Vec<String> {
        vec!["rack".to_owned(), "other".to_owned()]
    }

    async fn handle(&self, work: &Work) -> Result<HandlerOutcome, HandlerError> {
        self.begun().insert(work.machine());
        if work.machine() == self.slow {
            self.gate.acquire().await.map_err(|error| HandlerError::new(error.to_string()))?.forget();
        }
        // A machine that needs no further work.
        let changes = vec![FactChange::NeedsHuman { obstacle: Obstacle::Unknown, reason: "done".to_owned() }];
        Ok(HandlerOutcome::finished(changes, "done"))
    }
}

fn order(rpc: &str, key: Option<&str>, dry_run: bool) -> Order {
    Order {
        actor: Actor { name: "kim".to_owned(), credential: None },
        rpc: rpc.to_owned(),
        target: "the initializer".to_owned(),
        reason: "the switch is changed".to_owned(),
        idempotency_key: key.map(str::to_owned),
        dry_run,
        expected_version: None,
        request_digest: request_digest(rpc.as_bytes()),
    }
}

fn new(of: LoopKind, provider: Option<&str>, until: Option<Expiry>) -> NewPause {
    NewPause { paused_loop: of, provider: provider.map(str::to_owned), until, actor: "kim".to_owned() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn paused_loop_begins_nothing_ends_what_it_began_and_goes_on_when_resumed() -> TestResult {
    let kit = Kit::new("loops_paused").await?;
    let slow = kit.provided(1, "rack").await?[0];
    let gated = Arc::new(Gated { slow, gate: Semaphore::new(0), begun: Mutex::default() });
    let shepherd = Shepherd::start(&kit, "gated", LONG).await?;
    let (drain, abort) = (CancellationToken::new(), CancellationToken::new());
    let wake_ups = WakeUps::default();
    tokio::spawn(wake_ups.clone().listen(shepherd.bmdb.clone(), drain.clone()));
    let context = LoopContext {
        sessions: shepherd.sessions.clone(),
        wake_ups,
        metrics: ManagerMetrics::register(&Metrics::new()).for_loop("initializer", Process::AgentStart),
        drain: drain.clone(),
        abort,
    };
    let settings = LoopSettings { parallelism: 4, limiter: Limiter::new("5ms,50".parse()?) };
    let running = tokio::spawn(run_loop(gated.clone(), settings, context));
    until("the slow one is begun", async || Ok(gated.begun().contains(&slow))).await?;

    kit.bmdb.pause_loop(order("pause", None, false), new(LoopKind::Initializer, Some("rack"), None)).await?;
    let ordered = Instant::now();
    // The loop's last read is valid for some seconds, and a claim may have begun with it.
    until("what was read before counts no more", async || Ok(ordered.elapsed() > CACHE_TTL)).await?;
    for _ in 0..2 {
        let other = kit.provided(1, "other").await?[0];
        until("the other provider's is begun", async || Ok(gated.begun().contains(&other))).await?;
    }
    let left_alone = kit.provided(1, "rack").await?[0];
    let other = kit.provided(2, "other").await?;
    let all = async || Ok(other.iter().all(|machine| gated.begun().contains(machine)));
    until("the other provider's are begun", all).await?;
    assert!(!gated.begun().contains(&left_alone), "a paused loop began something");

    let explanation = explain_machine(&kit.bmdb.machine_view(left_alone).await?);
    let note = explanation.notes.first().context("a note")?;
    for part in ["the initializer of rack was paused by kim", "until it is resumed", "the switch is changed"]
    {
        assert!(note.contains(part), "{part:?} is not in {explanation:#?}");
    }
    let command = "shepherdctl loops resume initializer --provider rack";
    assert!(explanation.advice.iter().any(|advice| advice.command == command), "{explanation:#?}");
    let forecast = plan_fleet(&kit.bmdb.read_fleet_view().await?, Span::minutes(5));
    assert!(forecast.pauses.len() == 1, "{:?}", forecast.pauses);
    assert!(!forecast.rows.iter().any(|row| row.name.machine == left_alone.0 && row.process == "AgentStart"));

    gated.gate.add_permits(1);
    until("what was under way is ended", async || Ok(!kit.ends(slow).await?.is_empty())).await?;
    assert_eq!(kit.ends(slow).await?, ["Finished"]);

    kit.bmdb
        .resume_loop(order("resume", None, false), LoopKind::Initializer, Some("rack".to_owned()))
        .await?;
    until("it goes on", async || Ok(gated.begun().contains(&left_alone))).await?;
    drain.cancel();
    ended("the loop", running).await?;
    shepherd.sessions.wait_until_drained().await;
    Ok(shepherd.stop().await?)
}

/// The providers that are not paused for a loop, by a new query.
async fn list_unpaused_providers(kit: &Kit, of: LoopKind) -> Result<Vec<String>> {
    let providers = ["rack".to_owned(), "other".to_owned()];
    Ok(PauseCache::default().unpaused_providers(&kit.bmdb, of, &providers).await?)
}

#[tokio::test]
async fn pause_is_ordered_once_tried_in_vain_replaced_and_over_when_its_time_is() -> TestResult {
    let kit = Kit::new("loops_orders").await?;
    let hour = Some(Expiry::After(Span::hours(1)));
    let dry = kit.bmdb.pause_loop(order("p", None, true), new(LoopKind::Updater, None, hour)).await?;
    assert!(
        dry.outcome.is_changed() && list_unpaused_providers(&kit, LoopKind::Updater).await?.len() == 2,
        "{dry:?}"
    );

    let given = || order("p", Some("k1"), false);
    let first = kit.bmdb.pause_loop(given(), new(LoopKind::Updater, None, hour)).await?;
    let again = kit.bmdb.pause_loop(given(), new(LoopKind::Updater, None, hour)).await?;
    assert!(first.outcome.is_changed() && first.before.is_none() && !first.replayed, "{first:?}");
    assert!(
        again.replayed && again.audit_id == first.audit_id && again.outcome.message == first.outcome.message,
        "{again:?}"
    );
    assert!(
        list_unpaused_providers(&kit, LoopKind::Updater).await?.is_empty()
            && list_unpaused_providers(&kit, LoopKind::Recoverer).await?.len() == 2
    );
    kit.database.advance(std::time::Duration::from_mins(61)).await?;
    assert!(
        list_unpaused_providers(&kit, LoopKind::Updater).await?.len() == 2,
        "a pause lasts for longer than it was to"
    );
    let late = kit.bmdb.resume_loop(order("r", None, false), LoopKind::Updater, None).await?;
    assert!(
        !late.outcome.is_changed() && late.outcome.message == "has no such pause; nothing was changed",
        "{late:?}"
    );

    for until in [None, hour] {
        let stranger =
            kit.bmdb.pause_loop(order("p", None, false), new(LoopKind::Updater, Some("rakc"), until));
        let text = stranger.await?.outcome.message;
        assert!(text.contains("no provider of that name is known here yet"), "{text}");
    }
    let text = kit.bmdb.resume_loop(order("r", None, false), LoopKind::Updater, None).await?.outcome.message;
    assert!(text.contains("`shepherdctl loops resume updater --provider rakc` ends that"), "{text}");
    let replaced: i64 = kit.count("SELECT count(*) FROM audit WHERE before->>'provider' = 'rakc'").await?;
    assert!(replaced == 1, "the second says what it replaced");
    assert!(kit.count("SELECT count(*) FROM audit WHERE dry_run").await? == 1);

    let over = Some(Expiry::At("2020-01-01T00:00:00Z".parse()?));
    let refused = kit.bmdb.pause_loop(order("p", None, false), new(LoopKind::Provisioner, None, over)).await;
    let Err(BmdbError::OrderRejected { reason: "EXPIRY_PASSED", message }) = &refused else {
        panic!("{refused:?}");
    };
    assert!(message.contains("is over"), "{message}");
    Ok(())
}
