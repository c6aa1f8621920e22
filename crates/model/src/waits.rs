//! Backoffs and postponements of a machine, as shown.

use crate::facts::MachineFacts;
use crate::time::Timestamp;

/// A process that waits, after a failure or postponed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessWait {
    /// Name of the process.
    pub process: &'static str,
    /// `false` once its time has come and the process has not succeeded since.
    pub active: bool,
    /// When the wait ends.
    pub until: Timestamp,
    /// Consecutive failures; `None` for a postponement without failure.
    pub failures: Option<u32>,
    /// Length of the present wait before jitter, in seconds; `None` for a postponement.
    pub last_interval_seconds: Option<u64>,
    /// The cause of the failure, or the reason of the postponement.
    pub reason: String,
}

/// Processes that failed and have not succeeded since.
#[must_use]
pub fn backoff_waits(facts: &MachineFacts, now: Timestamp) -> Vec<ProcessWait> {
    let waits = facts.backoffs.iter().map(|(process, fact)| ProcessWait {
        process: process.as_str(),
        active: fact.until > now,
        until: fact.until,
        failures: Some(fact.failures),
        last_interval_seconds: Some(fact.last_interval.as_secs()),
        reason: fact.cause.clone(),
    });
    waits.collect()
}

/// Processes that were postponed.
#[must_use]
pub fn postponement_waits(facts: &MachineFacts, now: Timestamp) -> Vec<ProcessWait> {
    let waits = facts.postponements.iter().map(|(process, fact)| ProcessWait {
        process: process.as_str(),
        active: fact.until > now,
        until: fact.until,
        failures: None,
        last_interval_seconds: None,
        reason: format!("{} ({})", fact.reason, fact.decided_at),
    });
    waits.collect()
}
