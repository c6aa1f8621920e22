//! Fleet statistics: machines by phase, throughput by process, newest sample.
//!
//! Counts are made when they are requested, in an index and up to a bound, so that they are current in a small fleet
//! and cheap in a large one. What would have to be counted over all machines is taken from the newest sample
//! ([`crate::fleet::sample`]), which is a minute old at most while a shepherd runs.

use std::collections::BTreeMap;

use sqlx::PgConnection;

use crate::connection::error::BmdbError;
use crate::connection::{DbContext as _, database_now};
use crate::fleet::machine_walk::{count_class, list_classes};
use crate::fleet::sample::parse_sample;
use model::access::AccessScope;
use model::event_name::{FAILED, FINISHED};
use model::fleet_sample::FleetSample;
use model::time::Timestamp;

const OPERATION: &str = "counting machines and what was done with them";

/// Most machines counted of one phase and provider, and most such classes counted at once.
const MAX_COUNTED: i64 = 20_000;
const MAX_CLASSES: usize = 200;
/// The window of the throughput, in milliseconds, and most lines of history that are read for it.
const WINDOW_MS: f64 = 60_000.0;
const MAX_HISTORY_ROWS: i64 = 2_000;

/// Machines of one phase and provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassCount {
    /// The phase, as it is indexed.
    pub phase: String,
    /// The provider; empty for none.
    pub provider: String,
    /// How many there are, up to a bound.
    pub machines: i64,
    /// Whether there are more than were counted.
    pub at_least: bool,
}

/// Throughput of a process within the last minute.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProcessThroughput {
    /// Name of the process.
    pub process: String,
    /// Work items that finished, per minute.
    pub finished: f64,
    /// Work items that failed, per minute.
    pub failed: f64,
    /// Work items that were postponed or cancelled, per minute.
    pub postponed: f64,
    /// Work items whose session was lost, per minute.
    pub lost: f64,
    /// Mean duration of work items that finished or failed, in seconds; `None` without one.
    pub mean_seconds: Option<f64>,
}

/// How long machines have been in a phase.
#[derive(Clone, Debug, PartialEq)]
pub struct PhaseAge {
    /// Name of the phase.
    pub phase: String,
    /// Longest time that a machine has been in it, in seconds.
    pub oldest_seconds: f64,
    /// Machines that are past the deadline of what they wait for.
    pub over_deadline: i64,
}

/// Work of a process that waits for a worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Backlog {
    /// Name of the process.
    pub process: String,
    /// On how many machines it waits.
    pub machines: i64,
    /// Longest time that a machine has waited, in seconds.
    pub oldest_seconds: f64,
}

/// Values from the newest sample of the whole fleet.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledStatistics {
    /// When the sample was taken.
    pub at: Timestamp,
    /// One entry for each phase.
    pub phases: Vec<PhaseAge>,
    /// One entry for each process.
    pub backlogs: Vec<Backlog>,
}

impl SampledStatistics {
    fn from_sample(at: Timestamp, sample: FleetSample) -> Self {
        let whole = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        let phases = sample.phases.into_iter().map(|(phase, of)| PhaseAge {
            phase,
            oldest_seconds: of.oldest_seconds,
            over_deadline: whole(of.over_deadline),
        });
        let waiting = sample.due.into_iter().map(|(process, of)| Backlog {
            process,
            machines: whole(of.machines),
            oldest_seconds: of.oldest_seconds,
        });
        Self { at, phases: phases.collect(), backlogs: waiting.collect() }
    }
}

/// Statistics of the fleet, within a scope.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// Machines by phase and provider, phases in the order of a machine's life.
    pub counts: Vec<ClassCount>,
    /// Processes that had work recently.
    pub throughput: Vec<ProcessThroughput>,
    /// The newest sample; `None` unless the scope is the whole fleet.
    pub sampled: Option<SampledStatistics>,
    /// The database's clock when they were read.
    pub at: Timestamp,
}

/// Reads the statistics of the machines of this scope.
pub async fn read_statistics(tx: &mut PgConnection, scope: &AccessScope) -> Result<Statistics, BmdbError> {
    let mut counts = Vec::new();
    let classes = list_classes(tx).await?;
    let reached = |(_, provider): &(String, String)| {
        scope.includes_provider(Some(provider.as_str()).filter(|provider| !provider.is_empty()))
    };
    for (phase, provider) in classes.into_iter().filter(reached).take(MAX_CLASSES) {
        let machines = count_class(tx, (&phase, &provider), MAX_COUNTED).await?;
        counts.push(ClassCount { phase, provider, machines, at_least: machines >= MAX_COUNTED });
    }
    let counted = if *scope == AccessScope::Fleet { read_sampled_statistics(tx).await? } else { None };
    Ok(Statistics {
        counts,
        throughput: read_throughput(tx, scope).await?,
        sampled: counted,
        at: database_now(tx).await?,
    })
}

async fn read_sampled_statistics(tx: &mut PgConnection) -> Result<Option<SampledStatistics>, BmdbError> {
    let row = sqlx::query_file!("../../sql/fleet_sample/read_latest.sql", None::<Timestamp>)
        .fetch_one(tx)
        .await
        .context(OPERATION)?;
    let Some((at, counts)) = row.taken_at.zip(row.counts) else { return Ok(None) };
    Ok(Some(SampledStatistics::from_sample(at, parse_sample(counts)?)))
}

/// How many work items of a process ended in the same way.
struct WorkEndRow {
    process: String,
    event: String,
    count: i64,
    took_seconds: Option<f64>,
    covered_seconds: f64,
}

async fn read_throughput(
    tx: &mut PgConnection,
    scope: &AccessScope,
) -> Result<Vec<ProcessThroughput>, BmdbError> {
    let rows = sqlx::query_file_as!(
        WorkEndRow,
        "../../sql/inspect/measure_throughput.sql",
        WINDOW_MS,
        MAX_HISTORY_ROWS,
        &scope.providers()
    );
    Ok(throughput_of(rows.fetch_all(tx).await.context(OPERATION)?))
}

/// Throughput per minute from how work ended.
fn throughput_of(ends: Vec<WorkEndRow>) -> Vec<ProcessThroughput> {
    let mut paces: BTreeMap<String, (ProcessThroughput, f64, f64)> = BTreeMap::new();
    for end in ends {
        let count = f64::from(u32::try_from(end.count).unwrap_or(u32::MAX));
        let in_a_minute = count * 60.0 / end.covered_seconds.max(0.001);
        let (pace, done, took) = paces.entry(end.process).or_default();
        match end.event.as_str() {
            FINISHED => pace.finished += in_a_minute,
            FAILED => pace.failed += in_a_minute,
            "Expired" => pace.lost += in_a_minute,
            _ => pace.postponed += in_a_minute,
        }
        if let (FINISHED | FAILED, Some(seconds)) = (end.event.as_str(), end.took_seconds) {
            *done += count;
            *took += seconds;
        }
    }
    let pace = |(process, (pace, done, took)): (String, (ProcessThroughput, f64, f64))| {
        let mean_seconds = (done > 0.0).then(|| took / done);
        ProcessThroughput { process, mean_seconds, ..pace }
    };
    paces.into_iter().map(pace).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throughput_is_per_minute_and_means_cover_completed_work() {
        let end = |process: &str, event: &str, count, took_seconds, covered_seconds| WorkEndRow {
            process: process.to_owned(),
            event: event.to_owned(),
            count,
            took_seconds,
            covered_seconds,
        };
        let paces = throughput_of(vec![
            end("AgentStart", "Failed", 1, Some(9.0), 60.0),
            end("AgentStart", "Finished", 2, Some(3.0), 60.0),
            end("AgentStart", "Expired", 1, Some(900.0), 60.0),
            end("Update", "PutOff", 100, Some(1.0), 6.0),
            end("Update", "Cancelled", 100, None, 6.0),
        ]);
        let start = ProcessThroughput {
            process: "AgentStart".to_owned(),
            finished: 2.0,
            failed: 1.0,
            lost: 1.0,
            postponed: 0.0,
            mean_seconds: Some(4.0),
        };
        let update = ProcessThroughput {
            process: "Update".to_owned(),
            postponed: 2000.0,
            ..ProcessThroughput::default()
        };
        assert_eq!(paces, [start, update]);
    }
}
