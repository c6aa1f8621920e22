//! Heartbeats of a hundred thousand machines through one group commit.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use shepherd::bmdb::engine::fact_change::NewHeartbeat;
use shepherd::bmdb::machine::heartbeat::group_commit::HeartbeatQueue;
use shepherd::bmdb::machine::heartbeat::{HeartbeatOutcome, ReceivedHeartbeat};
use shepherd::bmdb::metrics::Metrics;
use shepherd::model::ids::{MachineId, ProcessId};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::Plan;
use crate::fleet::Fleet;
use crate::report::{Report, Target, quantile};
use crate::server::{Server, own_processor_seconds};

/// A hundred thousand machines that report every thirty seconds.
const RATE: f64 = 3_334.0;
/// Interval at which heartbeats are submitted.
const BEAT: Duration = Duration::from_millis(5);

pub(crate) async fn measure(plan: &Plan, server: &Server, fleet: &Fleet, report: &mut Report) -> Result<()> {
    report.section(
        "Heartbeats by group commit",
        "In process, without TLS: 3,334 heartbeats a second, each of another machine, for the time in \
         the first line (promised are five minutes, which `make bench ARGS=--full` takes). The time of each runs from \
         when it was to be sent to when its commit is acknowledged, so falling behind shows.",
    )?;
    let machines: Vec<Uuid> = sqlx::query_scalar(
        "SELECT machine_id FROM bench_machine JOIN machine_agent_started USING (machine_id) ORDER BY n",
    )
    .fetch_all(fleet.bmdb.pool())
    .await?;
    let (heartbeats, commit) = HeartbeatQueue::new(fleet.bmdb.clone(), ProcessId::generate(), Metrics::new());
    let stop = CancellationToken::new();
    let committing = tokio::spawn(commit.run(stop.clone()));
    let (ours, theirs) = (own_processor_seconds()?, server.processor_seconds()?);
    let began = Instant::now();
    let mut sent: usize = 0;
    let mut stored = JoinSet::new();
    let mut took = Vec::new();
    let mut ticks = tokio::time::interval(BEAT);
    while began.elapsed() < plan.heartbeats {
        ticks.tick().await;
        while sending_time(sent) <= began.elapsed() {
            let due = began + sending_time(sent);
            let machine = MachineId(machines[sent % machines.len()]);
            let round = i64::try_from(sent / machines.len())?;
            let heartbeats = heartbeats.clone();
            stored.spawn(async move {
                let outcome = heartbeats.store(heartbeat(machine, round)).await;
                (outcome, due.elapsed())
            });
            sent += 1;
        }
        while let Some(ended) = stored.try_join_next() {
            take(ended?, &mut took)?;
        }
    }
    while let Some(ended) = stored.join_next().await {
        take(ended?, &mut took)?;
    }
    let lasted = began.elapsed().as_secs_f64();
    let (ours, theirs) = (own_processor_seconds()? - ours, server.processor_seconds()? - theirs);
    stop.cancel();
    committing.await?;
    report.add("time", "s", &[lasted], Target::None)?;
    #[expect(clippy::cast_precision_loss, reason = "some millions at most")]
    let rate = took.len() as f64 / lasted;
    report.add("heartbeats committed", "/s", &[rate], Target::AtLeast(RATE * 0.99))?;
    report.add("heartbeat, from due to committed, median", "ms", &[quantile(&took, 0.5)], Target::None)?;
    report.add(
        "heartbeat, from due to committed, 99 of 100 within",
        "ms",
        &[quantile(&took, 0.99)],
        Target::AtMost(100.0),
    )?;
    report.add("processor time of the shepherd, in all", "s", &[ours], Target::None)?;
    report.add("processor time of PostgreSQL, in all", "s", &[theirs], Target::None)?;
    report.add("processor time of the shepherd", "s each s", &[ours / lasted], Target::None)?;
    report.add("processor time of PostgreSQL", "s each s", &[theirs / lasted], Target::None)
}

/// When a heartbeat is to be sent, since the beginning of the run.
fn sending_time(number: usize) -> Duration {
    #[expect(clippy::cast_precision_loss, reason = "some millions at most")]
    Duration::from_secs_f64(number as f64 / RATE)
}

fn heartbeat(machine: MachineId, round: i64) -> ReceivedHeartbeat {
    ReceivedHeartbeat {
        machine,
        public_key: [0; 32],
        beat: NewHeartbeat {
            boot_id: "b".to_owned(),
            incarnation: "i".to_owned(),
            sequence: round + 2,
            version: "1".to_owned(),
        },
        hardware: None,
        installation: None,
        cluster: None,
        release: None,
        access_fence: 0,
    }
}

type Stored =
    (Result<HeartbeatOutcome, shepherd::bmdb::machine::heartbeat::group_commit::HeartbeatError>, Duration);

fn take((outcome, after): Stored, took: &mut Vec<f64>) -> Result<()> {
    let outcome = outcome?;
    ensure!(matches!(outcome, HeartbeatOutcome::Stored(_)), "a heartbeat was not stored: {outcome:?}");
    took.push(after.as_secs_f64() * 1000.0);
    Ok(())
}
