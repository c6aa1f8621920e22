//! The fleet in figures: how many machines are in which phase, how fast the loops get on, and what the newest count
//! of the whole fleet says besides.
//!
//! Counts are made where they are asked for, in an index and up to a bound, so that they are of this moment in a small
//! fleet and cheap in a large one. What would have to be counted over all machines is taken from the newest sample
//! ([`crate::bmdb::sample`]), which is a minute old at the most while a shepherd runs.

use std::collections::BTreeMap;

use serde::Serialize;
use sqlx::PgConnection;

use crate::bmdb::connection::Doing as _;
use crate::bmdb::error::BmdbError;
use crate::bmdb::sample::understood;
use crate::bmdb::{inspect, listing};
use crate::model::access::Scope;
use crate::model::fleet_sample::FleetSample;
use crate::model::time::Timestamp;

const WHAT: &str = "counting machines and what was done with them";

/// Most machines counted of one phase and provider, and most such classes counted at once.
const COUNTED: i64 = 20_000;
const CLASSES: usize = 200;
/// The while that paces are of, in milliseconds, and most lines of history that are read for them.
const LATELY_MS: f64 = 60_000.0;
const LINES: i64 = 2_000;

/// Machines of one phase and provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ClassCount {
    /// The phase, as it is indexed.
    pub phase: String,
    /// The provider; empty for none.
    pub provider: String,
    /// How many.
    pub machines: i64,
    /// Whether there are more than were counted.
    pub at_least: bool,
}

/// How a process got on within the last minute.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Pace {
    /// Which.
    pub process: String,
    /// Work items that were finished, in a minute.
    pub finished: f64,
    /// Those that failed.
    pub failed: f64,
    /// Those that found that their time had not come, or were cancelled.
    pub put_off: f64,
    /// Those whose session was lost.
    pub lost: f64,
    /// How long those took that were finished or failed, on average, in seconds.
    pub mean_seconds: Option<f64>,
}

/// How machines of a phase get on.
#[derive(Clone, Debug, PartialEq)]
pub struct PhaseAge {
    /// Which phase.
    pub phase: String,
    /// For how long the one is in it that has been for longest, in seconds.
    pub oldest_seconds: f64,
    /// Those that are past the deadline of what they wait for.
    pub over_deadline: i64,
}

/// Work of a process that waits for a worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Backlog {
    /// Which process.
    pub process: String,
    /// On how many machines.
    pub machines: i64,
    /// How long the one has waited that has for longest, in seconds.
    pub oldest_seconds: f64,
}

/// What the newest count of the whole fleet says.
#[derive(Clone, Debug, PartialEq)]
pub struct Counted {
    /// When it was made.
    pub at: Timestamp,
    /// Every phase.
    pub phases: Vec<PhaseAge>,
    /// Every process.
    pub waiting: Vec<Backlog>,
}

impl Counted {
    fn of(at: Timestamp, sample: FleetSample) -> Self {
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
        Self { at, phases: phases.collect(), waiting: waiting.collect() }
    }
}

/// The fleet in figures.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// Machines by phase and provider, phases in the order of a machine's life.
    pub counts: Vec<ClassCount>,
    /// Processes that something was done for lately.
    pub paces: Vec<Pace>,
    /// The newest count, for those whose scope is everything.
    pub counted: Option<Counted>,
    /// When this was.
    pub at: Timestamp,
}

/// Counts for whoever may ask about the machines of this scope.
pub async fn statistics(tx: &mut PgConnection, scope: &Scope) -> Result<Statistics, BmdbError> {
    let mut counts = Vec::new();
    let classes = listing::classes(tx).await?;
    let reached = |(_, provider): &(String, String)| {
        scope.holds(Some(provider.as_str()).filter(|provider| !provider.is_empty()))
    };
    for (phase, provider) in classes.into_iter().filter(reached).take(CLASSES) {
        let machines = listing::count(tx, (&phase, &provider), COUNTED).await?;
        counts.push(ClassCount { phase, provider, machines, at_least: machines >= COUNTED });
    }
    let counted = if *scope == Scope::Everything { counted(tx).await? } else { None };
    Ok(Statistics { counts, paces: paces(tx, scope).await?, counted, at: inspect::now(tx).await? })
}

async fn counted(tx: &mut PgConnection) -> Result<Option<Counted>, BmdbError> {
    let row = sqlx::query_file!("sql/fleet_sample/read_latest.sql", None::<Timestamp>)
        .fetch_one(tx)
        .await
        .doing(WHAT)?;
    let Some((at, counts)) = row.taken_at.zip(row.counts) else { return Ok(None) };
    Ok(Some(Counted::of(at, understood(counts)?)))
}

/// How some work items of a process ended alike.
struct Ends {
    process: String,
    event: String,
    count: i64,
    took_seconds: Option<f64>,
    covered_seconds: f64,
}

async fn paces(tx: &mut PgConnection, scope: &Scope) -> Result<Vec<Pace>, BmdbError> {
    let rows = sqlx::query_file_as!(
        Ends,
        "sql/inspect/measure_throughput.sql",
        LATELY_MS,
        LINES,
        &scope.providers()
    );
    Ok(paces_of(rows.fetch_all(tx).await.doing(WHAT)?))
}

/// Paces from how work ended, as so many in a minute.
fn paces_of(ends: Vec<Ends>) -> Vec<Pace> {
    let mut paces: BTreeMap<String, (Pace, f64, f64)> = BTreeMap::new();
    for end in ends {
        let count = f64::from(u32::try_from(end.count).unwrap_or(u32::MAX));
        let in_a_minute = count * 60.0 / end.covered_seconds.max(0.001);
        let (pace, done, took) = paces.entry(end.process).or_default();
        match end.event.as_str() {
            "Finished" => pace.finished += in_a_minute,
            "Failed" => pace.failed += in_a_minute,
            "Expired" => pace.lost += in_a_minute,
            _ => pace.put_off += in_a_minute,
        }
        if let ("Finished" | "Failed", Some(seconds)) = (end.event.as_str(), end.took_seconds) {
            *done += count;
            *took += seconds;
        }
    }
    let pace = |(process, (pace, done, took)): (String, (Pace, f64, f64))| {
        let mean_seconds = (done > 0.0).then(|| took / done);
        Pace { process, mean_seconds, ..pace }
    };
    paces.into_iter().map(pace).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paces_are_of_a_minute_and_means_of_what_was_done() {
        let end = |process: &str, event: &str, count, took_seconds, covered_seconds| Ends {
            process: process.to_owned(),
            event: event.to_owned(),
            count,
            took_seconds,
            covered_seconds,
        };
        let paces = paces_of(vec![
            end("AgentStart", "Failed", 1, Some(9.0), 60.0),
            end("AgentStart", "Finished", 2, Some(3.0), 60.0),
            end("AgentStart", "Expired", 1, Some(900.0), 60.0),
            end("Update", "PutOff", 100, Some(1.0), 6.0),
            end("Update", "Cancelled", 100, None, 6.0),
        ]);
        let start = Pace {
            process: "AgentStart".to_owned(),
            finished: 2.0,
            failed: 1.0,
            lost: 1.0,
            put_off: 0.0,
            mean_seconds: Some(4.0),
        };
        let update = Pace { process: "Update".to_owned(), put_off: 2000.0, ..Pace::default() };
        assert_eq!(paces, [start, update]);
    }
}
