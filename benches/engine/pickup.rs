//! How soon an idle shepherd picks up what becomes due.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use async_trait::async_trait;
use shepherd::bmdb::engine::change_machine::Decision;
use shepherd::bmdb::engine::fact_change::FactChange;
use shepherd::bmdb::engine::wakeup::WakeUps;
use shepherd::bmdb::engine::work::Work;
use shepherd::bmdb::metrics::Metrics;
use shepherd::manager::control_loop::runner::{LoopContext, LoopSettings, run_loop};
use shepherd::manager::control_loop::{ControlLoop, HandlerError, HandlerOutcome};
use shepherd::manager::limiter::Limiter;
use shepherd::manager::metrics::ManagerMetrics;
use shepherd::model::facts::{Hold, HoldScope};
use shepherd::model::ids::MachineId;
use shepherd::model::process::Process;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::Plan;
use crate::fleet::Fleet;
use crate::report::{Report, Target, quantile};

/// Says when it was given a machine.
struct Picked(mpsc::UnboundedSender<(MachineId, Instant)>);

#[async_trait]
impl ControlLoop for Picked {
    fn name(&self) -> &'static str {
        "bench"
    }

    fn process(&self) -> Process {
        Process::AgentStart
    }

    fn providers(&self) -> Vec<String> {
        Fleet::providers(1)
    }

    async fn handle(&self, work: &Work) -> Result<HandlerOutcome, HandlerError> {
        let picked = (work.machine(), Instant::now());
        self.0.send(picked).map_err(|error| HandlerError::new(error.to_string()))?;
        // Held again, so that nothing is due but what is released next.
        Ok(HandlerOutcome::finished(vec![global_hold()], "measured"))
    }
}

fn global_hold() -> FactChange {
    let hold = Hold {
        scope: HoldScope::Everything,
        reason: "measured".to_owned(),
        by: "bench".to_owned(),
        until: None,
    };
    FactChange::HoldSet(hold)
}

/// A loop that is idle, and machines of which it gets one at a time.
pub(crate) struct PickupLoop<'f> {
    /// The machines. An operator holds each of them until it is released.
    pub(crate) machines: Vec<Uuid>,
    fleet: &'f Fleet,
    picked: mpsc::UnboundedReceiver<(MachineId, Instant)>,
    drain: CancellationToken,
    running: JoinHandle<()>,
    listening: JoinHandle<()>,
}

/// How long it took until the loop got a machine, in milliseconds.
pub(crate) struct PickupTime {
    /// From the commit of the release.
    pub(crate) from_release: f64,
    /// From before the transaction of the release began.
    pub(crate) with_release: f64,
}

impl<'f> PickupLoop<'f> {
    /// Starts a loop, and holds this many machines of the first provider.
    pub(crate) async fn start(fleet: &'f Fleet, count: u32) -> Result<Self> {
        let machines: Vec<Uuid> = sqlx::query_scalar(
            "SELECT machine_id FROM bench_machine JOIN machine_provided USING (machine_id)
             WHERE provider = 'rack-0' ORDER BY n LIMIT $1",
        )
        .bind(i64::from(count))
        .fetch_all(fleet.bmdb.pool())
        .await?;
        let (sender, picked) = mpsc::unbounded_channel();
        let (drain, abort) = (CancellationToken::new(), CancellationToken::new());
        let wake_ups = WakeUps::default();
        let listening = tokio::spawn(wake_ups.clone().listen(fleet.bmdb.clone(), drain.clone()));
        for machine in &machines {
            change(fleet, *machine, vec![global_hold(), FactChange::AgentCleared]).await?;
        }
        let context = LoopContext {
            sessions: fleet.sessions.clone(),
            wake_ups,
            metrics: ManagerMetrics::register(&Metrics::new()).for_loop("bench", Process::AgentStart),
            drain: drain.clone(),
            abort,
        };
        let limiter = Limiter::new("1ms,1000".parse().context("a rate")?);
        let settings = LoopSettings { parallelism: 4, limiter };
        let running = tokio::spawn(run_loop(Arc::new(Picked(sender)), settings, context));
        Ok(Self { machines, fleet, picked, drain, running, listening })
    }

    /// Releases a machine, and waits until the loop got it and holds it again.
    pub(crate) async fn pick_up(&mut self, machine: Uuid) -> Result<PickupTime> {
        let requested_at = Instant::now();
        change(self.fleet, machine, vec![FactChange::HoldCleared]).await?;
        let released = Instant::now();
        let waiting = tokio::time::timeout(Duration::from_secs(30), self.picked.recv());
        let (_, at) = waiting.await.context("nobody picked a machine up")?.context("the loop ended")?;
        until_held(self.fleet, machine).await?;
        // It may be picked up before the operator gets the answer to the release.
        let since = |begin| at.saturating_duration_since(begin).as_secs_f64() * 1000.0;
        Ok(PickupTime { from_release: since(released), with_release: since(requested_at) })
    }

    /// Ends the loop.
    pub(crate) async fn end(self) -> Result<()> {
        self.drain.cancel();
        self.running.await?;
        Ok(self.listening.await?)
    }
}

pub(crate) async fn measure(plan: &Plan, fleet: &Fleet, report: &mut Report) -> Result<()> {
    report.section(
        "From due to picked up",
        "An idle shepherd with free workers and tokens. Machines are released one after the other from an \
         operator's hold. The time runs to the handler's first line: from the release's commit, as who \
         released it hears of it, and from before the release's transaction began.",
    )?;
    let mut pickup = PickupLoop::start(fleet, plan.releases).await?;
    let (mut medians, mut tails, mut with_release) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..plan.repetitions {
        let (mut took, mut whole) = (Vec::new(), Vec::new());
        for machine in pickup.machines.clone() {
            let time = pickup.pick_up(machine).await?;
            took.push(time.from_release);
            whole.push(time.with_release);
        }
        with_release.push(quantile(&whole, 0.5));
        medians.push(quantile(&took, 0.5));
        tails.push(quantile(&took, 0.99));
    }
    pickup.end().await?;
    report.add("from due to picked up, median", "ms", &medians, Target::AtMost(5.0))?;
    report.add("from due to picked up, 99 of 100 within", "ms", &tails, Target::AtMost(20.0))?;
    report.add("the same with the release itself, median", "ms", &with_release, Target::None)
}

/// Waits until the worker is idle again.
async fn until_held(fleet: &Fleet, machine: Uuid) -> Result<()> {
    let text = "SELECT EXISTS (SELECT 1 FROM machine_hold WHERE machine_id = $1)
                   AND NOT EXISTS (SELECT 1 FROM work)";
    while !sqlx::query_scalar::<_, bool>(text).bind(machine).fetch_one(fleet.bmdb.pool()).await? {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // And a moment, in which the loop finds that nothing more is due.
    tokio::time::sleep(Duration::from_millis(20)).await;
    Ok(())
}

async fn change(fleet: &Fleet, machine: Uuid, changes: Vec<FactChange>) -> Result<()> {
    let decide = move |_: &_| Decision { changes: changes.clone(), events: Vec::new(), output: () };
    Ok(fleet.bmdb.change_machine(MachineId(machine), decide).await?)
}
