//! What the runner guarantees to every control loop, tested with scripted loops.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use async_trait::async_trait;
use shepherd::bmdb::engine::fact_change::FactChange;
use shepherd::bmdb::engine::wakeup::WakeUps;
use shepherd::bmdb::engine::work::Work;
use shepherd::bmdb::metrics::Metrics;
use shepherd::manager::control_loop::runner::{LoopContext, LoopSettings, run_loop};
use shepherd::manager::control_loop::{ControlLoop, HandlerError, HandlerOutcome};
use shepherd::manager::limiter::Limiter;
use shepherd::manager::metrics::ManagerMetrics;
use shepherd::model::backoff::BackoffPolicy;
use shepherd::model::ids::MachineId;
use shepherd::model::needs_human::Obstacle;
use shepherd::model::process::Process;
use shepherd::model::time::Span;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::bmdb_kit::{Kit, LONG, Shepherd, ended, hold, until};
use crate::harness::aloud::TestResult;

/// The action on a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Act {
    /// Finished at once.
    #[default]
    Finish,
    /// Finished when the gate admits it.
    Wait,
    /// Never ended.
    Hang,
    Fail,
    FailWithOwnBackoff,
    Panic,
}

/// A loop that follows a script and records what it did.
struct Script {
    acts: BTreeMap<MachineId, Act>,
    gate: Semaphore,
    record: Mutex<ScriptRecord>,
}

#[derive(Default)]
struct ScriptRecord {
    /// Machine, fence and time of each start.
    begun: Vec<(MachineId, i64, Instant)>,
    now: BTreeSet<MachineId>,
    most: usize,
    twice_at_once: bool,
    stopped: Vec<MachineId>,
}

impl Script {
    fn new(acts: impl IntoIterator<Item = (MachineId, Act)>) -> Arc<Self> {
        let acts = acts.into_iter().collect();
        Arc::new(Self { acts, gate: Semaphore::new(0), record: Mutex::default() })
    }

    fn lock_record(&self) -> MutexGuard<'_, ScriptRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records that a handler ended, and whether it was dropped before its end.
struct Presence<'a> {
    script: &'a Script,
    machine: MachineId,
    dropped: bool,
}

impl Drop for Presence<'_> {
    fn drop(&mut self) {
        let mut seen = self.script.lock_record();
        seen.now.remove(&self.machine);
        if self.dropped {
            seen.stopped.push(self.machine);
        }
    }
}

#[async_trait]
impl ControlLoop for Script {
    fn name(&self) -> &'static str {
        "script"
    }

    fn process(&self) -> Process {
        Process::AgentStart
    }

    fn providers(&self) -> Vec<String> {
        vec!["rack".to_owned()]
    }

    async fn handle(&self, work: &Work) -> Result<HandlerOutcome, HandlerError> {
        let machine = work.machine();
        {
            let mut seen = self.lock_record();
            seen.begun.push((machine, work.fence(), Instant::now()));
            let fresh = seen.now.insert(machine);
            seen.twice_at_once |= !fresh;
            seen.most = seen.most.max(seen.now.len());
        }
        let mut presence = Presence { script: self, machine, dropped: true };
        let act = self.acts.get(&machine).copied().unwrap_or_default();
        match act {
            Act::Wait => self.gate.acquire().await.map_err(|e| HandlerError::new(e.to_string()))?.forget(),
            Act::Hang => std::future::pending().await,
            _ => {}
        }
        presence.dropped = false;
        match act {
            Act::Fail => Err(HandlerError::new("no route to host")),
            Act::FailWithOwnBackoff => {
                let backoff = Some(BackoffPolicy {
                    initial: Span::seconds(7),
                    maximum: Span::seconds(7),
                    exponent: 1.0,
                });
                Err(HandlerError { backoff, ..HandlerError::new("a known way to fail") })
            }
            Act::Panic => blow_up(),
            // A machine that needs no further work.
            _ => Ok(HandlerOutcome::finished(
                vec![FactChange::NeedsHuman { obstacle: Obstacle::Unknown, reason: "done".to_owned() }],
                "done",
            )),
        }
    }
}

#[expect(clippy::panic, reason = "a handler that panics is what is tested")]
fn blow_up() -> Result<HandlerOutcome, HandlerError> {
    panic!("the handler's own words")
}

/// A running script.
struct Running {
    shepherd: Shepherd,
    drain: CancellationToken,
    abort: CancellationToken,
    task: JoinHandle<()>,
}

/// An interval of sessions for tests in which the runner checks a session, which happens four times in it. A host that
/// stops for some seconds loses none.
const LOOKED_AT: Duration = Duration::from_secs(20);

impl Running {
    /// Starts a script under sessions that do not expire during a test.
    async fn start(kit: &Kit, script: &Arc<Script>, parallelism: usize, rate: &str) -> Result<Self> {
        Self::under(LONG, kit, script, parallelism, rate).await
    }

    async fn under(
        interval: Duration,
        kit: &Kit,
        script: &Arc<Script>,
        parallelism: usize,
        rate: &str,
    ) -> Result<Self> {
        let shepherd = Shepherd::start(kit, "script", interval).await?;
        let (drain, abort) = (CancellationToken::new(), CancellationToken::new());
        let wake_ups = WakeUps::default();
        tokio::spawn(wake_ups.clone().listen(shepherd.bmdb.clone(), drain.clone()));
        let context = LoopContext {
            sessions: shepherd.sessions.clone(),
            wake_ups,
            metrics: ManagerMetrics::register(&Metrics::new()).for_loop("script", Process::AgentStart),
            drain: drain.clone(),
            abort: abort.clone(),
        };
        let settings = LoopSettings { parallelism, limiter: Limiter::new(rate.parse()?) };
        let task = tokio::spawn(run_loop(script.clone(), settings, context));
        Ok(Self { shepherd, drain, abort, task })
    }

    async fn stop(self) -> Result<()> {
        self.drain.cancel();
        ended("the runner", self.task).await?;
        self.shepherd.sessions.wait_until_drained().await;
        self.shepherd.stop().await
    }
}

const BRISK: &str = "5ms,50";
const OPEN_SESSIONS: &str = "SELECT count(*) FROM session WHERE closed_at IS NULL";
const LIVE: &str = "SELECT count(*) FROM work";

async fn end_of(kit: &Kit, machine: MachineId) -> Result<(String, String)> {
    Ok(sqlx::query_as("SELECT event, detail FROM history WHERE machine_id = $1 AND edge = 'end'")
        .bind(machine.0)
        .fetch_one(&kit.pool)
        .await?)
}

async fn until_ended(kit: &Kit, count: i64) -> Result<()> {
    until(&format!("{count} work items have ended"), async || {
        Ok(kit.count("SELECT count(*) FROM history WHERE edge = 'end'").await? >= count)
    })
    .await
}

#[tokio::test]
async fn a_panic_or_an_error_fails_one_work_item_and_the_worker_goes_on() -> TestResult {
    let kit = Kit::new("loop_failures").await?;
    let machines = kit.provided(4, "rack").await?;
    let acts = [Act::Panic, Act::Fail, Act::FailWithOwnBackoff, Act::Finish];
    let script = Script::new(machines.iter().copied().zip(acts));
    let running = Running::start(&kit, &script, 0, BRISK).await?;
    until_ended(&kit, 4).await?;
    running.stop().await?;

    let words = |event: &str, detail: &str| (event.to_owned(), detail.to_owned());
    assert_eq!(
        end_of(&kit, machines[0]).await?,
        words("Failed", "the handler panicked: the handler's own words")
    );
    assert_eq!(end_of(&kit, machines[1]).await?, words("Failed", "failed to process: no route to host"));
    assert_eq!(end_of(&kit, machines[3]).await?, words("Finished", "done"));
    let mut intervals = Vec::new();
    for machine in &machines[..3] {
        let found: i64 =
            sqlx::query_scalar("SELECT last_interval_ms FROM work_backoff WHERE machine_id = $1")
                .bind(machine.0)
                .fetch_one(&kit.pool)
                .await?;
        intervals.push(found);
    }
    assert_eq!(intervals, [300_000, 300_000, 7_000], "the policy's backoff, and the handler's own");
    assert_eq!(
        kit.count("SELECT count(*) FROM session").await?,
        1,
        "one worker, one session, whatever failed"
    );
    assert_eq!(script.lock_record().most, 1, "a parallelism of zero means one");
    Ok(())
}

#[tokio::test]
async fn nothing_due_is_no_error_and_others_machines_are_left_alone() -> TestResult {
    let kit = Kit::new("loop_idle").await?;
    let elsewhere = kit.provided(1, "elsewhere").await?;
    let script = Script::new([]);
    let running = Running::start(&kit, &script, 1, BRISK).await?;
    until("the worker has its session", async || Ok(kit.count(OPEN_SESSIONS).await? == 1)).await?;
    for round in 1..=2 {
        kit.provided(1, "rack").await?;
        until_ended(&kit, round).await?;
    }
    running.stop().await?;
    assert!(script.lock_record().begun.iter().all(|(machine, ..)| *machine != elsewhere[0]));
    assert_eq!(kit.count("SELECT sum(fence)::INT8 FROM machine_due WHERE provider = 'elsewhere'").await?, 0);
    assert_eq!(kit.count("SELECT count(*) FROM session").await?, 1);
    Ok(())
}

#[tokio::test]
async fn as_many_as_there_are_workers_are_handled_at_once_and_none_twice() -> TestResult {
    let kit = Kit::new("loop_parallel").await?;
    let machines = kit.provided(12, "rack").await?;
    let script = Script::new(machines.iter().map(|machine| (*machine, Act::Wait)));
    let running = Running::start(&kit, &script, 4, BRISK).await?;
    until("four are handled at once", async || Ok(script.lock_record().now.len() == 4)).await?;
    assert_eq!(kit.count(LIVE).await?, 4);
    assert_eq!(kit.count("SELECT count(DISTINCT session_id) FROM work").await?, 4);
    script.gate.add_permits(machines.len());
    until_ended(&kit, 12).await?;
    running.stop().await?;
    let counted = {
        let seen = script.lock_record();
        (seen.most, seen.begun.len(), seen.twice_at_once)
    };
    assert_eq!(counted, (4, 12, false));
    assert_eq!(kit.count("SELECT count(*) FROM history WHERE event = 'Finished'").await?, 12);
    Ok(())
}

#[tokio::test]
async fn a_shutdown_lets_work_finish_cancels_the_rest_and_leaves_nothing() -> TestResult {
    let kit = Kit::new("loop_shutdown").await?;
    let machines = kit.provided(2, "rack").await?;
    let script = Script::new([(machines[0], Act::Wait), (machines[1], Act::Hang)]);
    let running = Running::start(&kit, &script, 2, BRISK).await?;
    until("both are handled", async || Ok(script.lock_record().now.len() == 2)).await?;
    running.drain.cancel();
    let late = kit.provided(1, "rack").await?;
    script.gate.add_permits(1);
    until("one finished within the grace", async || {
        Ok(kit.count("SELECT count(*) FROM history WHERE event = 'Finished'").await? == 1)
    })
    .await?;
    assert_eq!(kit.count(LIVE).await?, 1, "the other one has its grace still");
    running.abort.cancel();
    running.stop().await?;
    let (event, detail) = end_of(&kit, machines[1]).await?;
    assert_eq!((event.as_str(), detail.as_str()), ("Cancelled", "the shepherd is shutting down"));
    assert_eq!((kit.count(LIVE).await?, kit.count(OPEN_SESSIONS).await?), (0, 0));
    assert!(
        kit.ends(late[0]).await?.is_empty() && script.lock_record().begun.len() == 2,
        "nothing new was begun"
    );
    Ok(())
}

#[tokio::test]
async fn a_lost_session_stops_its_handler_and_is_replaced_after_a_second() -> TestResult {
    let kit = Kit::new("loop_lost").await?;
    kit.bmdb.change_policy("test", |policy| policy.outward_limit = Span::seconds(1)).await?;
    let machines = kit.provided(1, "rack").await?;
    let script = Script::new([(machines[0], Act::Wait)]);
    let running = Running::under(LOOKED_AT, &kit, &script, 1, BRISK).await?;
    until("it is handled", async || Ok(script.lock_record().now.len() == 1)).await?;
    let close = "UPDATE session SET closed_at = clock_timestamp(), close_reason = 'by hand'";
    sqlx::query(close).execute(&kit.pool).await?;
    until("the handler is stopped", async || Ok(script.lock_record().stopped.len() == 1)).await?;
    until("the lease is freed and the machine handled again", async || {
        kit.bmdb.reap().await?;
        Ok(script.lock_record().begun.len() == 2)
    })
    .await?;
    script.gate.add_permits(1);
    until_ended(&kit, 2).await?;
    running.stop().await?;
    assert_eq!(kit.ends(machines[0]).await?, ["Expired", "Finished"]);
    let fences: Vec<i64> = script.lock_record().begun.iter().map(|(_, fence, _)| *fence).collect();
    assert_eq!(fences, [1, 2]);
    let pause = "SELECT (EXTRACT(EPOCH FROM max(started_at) - min(closed_at)) * 1000)::INT8 FROM session";
    let pause = kit.count(pause).await?;
    assert!(pause >= 1000, "replaced after {pause} ms");
    Ok(())
}

#[tokio::test]
async fn an_operators_hold_stops_the_handler_and_says_why() -> TestResult {
    let kit = Kit::new("loop_hold").await?;
    let machines = kit.provided(1, "rack").await?;
    let script = Script::new([(machines[0], Act::Hang)]);
    let running = Running::under(LOOKED_AT, &kit, &script, 1, BRISK).await?;
    until("it is handled", async || Ok(script.lock_record().now.len() == 1)).await?;
    kit.change(machines[0], vec![hold("new disks")]).await?;
    until_ended(&kit, 1).await?;
    assert_eq!(script.lock_record().stopped, machines);
    let (event, detail) = end_of(&kit, machines[0]).await?;
    assert_eq!(event, "Cancelled");
    assert_eq!(detail, "the machine is not due for AgentStart any more: held by kim: new disks");
    running.stop().await?;
    assert_eq!((kit.count(LIVE).await?, kit.count(OPEN_SESSIONS).await?), (0, 0));
    Ok(())
}

#[tokio::test]
async fn a_loop_sends_no_more_statements_than_its_limiter_lets_through() -> TestResult {
    let kit = Kit::new("loop_limiter").await?;
    kit.provided(14, "rack").await?;
    let script = Script::new([]);
    let began = Instant::now();
    let running = Running::start(&kit, &script, 1, "150ms,2").await?;
    until_ended(&kit, 14).await?;
    let took = began.elapsed();
    // Nothing is sent any more, so everything has been counted.
    running.stop().await?;
    let lasted = began.elapsed();
    let sent: i64 = sqlx::query_scalar(
        "SELECT COALESCE(sum(calls), 0)::INT8 FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid
         WHERE d.datname = $1 AND (query LIKE '%locked_candidate AS%' OR query LIKE '%wait_ms%')",
    )
    .bind(sqlx::query_scalar::<_, String>("SELECT current_database()::TEXT").fetch_one(&kit.pool).await?)
    .fetch_one(&sqlx::PgPool::connect(kit.database.server_url()).await?)
    .await?;
    // One worker claims one machine at a time. Twelve of these claims waited for a token each.
    assert!(took >= Duration::from_millis(12 * 150), "14 machines in {took:?}");
    let allowed = 2 + lasted.as_millis().div_ceil(150) + 1;
    assert!((14..=i64::try_from(allowed)?).contains(&sent), "{sent} statements in {lasted:?}");
    Ok(())
}
