//! What a machine's processes wait for, as it is shown: failures that are tried again, and what was put off.

use serde::Serialize;

use crate::model::facts::MachineFacts;
use crate::model::time::Timestamp;

/// A process that waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Wait {
    /// The process.
    pub process: &'static str,
    /// `false` once its time has come and the process has not finished since.
    pub active: bool,
    /// When it ends.
    pub until: Timestamp,
    /// Failures in a row; `null` for what was put off without having failed.
    pub failures: Option<u32>,
    /// The wait before jitter, after the last failure.
    pub last_interval_seconds: Option<u64>,
    /// Why.
    pub reason: String,
}

/// Processes that failed and have not finished since.
#[must_use]
pub fn backoffs(facts: &MachineFacts, now: Timestamp) -> Vec<Wait> {
    let waits = facts.backoffs.iter().map(|(process, fact)| Wait {
        process: process.as_str(),
        active: fact.until > now,
        until: fact.until,
        failures: Some(fact.failures),
        last_interval_seconds: Some(fact.last_interval.as_secs()),
        reason: fact.cause.clone(),
    });
    waits.collect()
}

/// Processes that were put off.
#[must_use]
pub fn postponements(facts: &MachineFacts, now: Timestamp) -> Vec<Wait> {
    let waits = facts.postponements.iter().map(|(process, fact)| Wait {
        process: process.as_str(),
        active: fact.until > now,
        until: fact.until,
        failures: None,
        last_interval_seconds: None,
        reason: format!("{} ({})", fact.reason, fact.decided_at),
    });
    waits.collect()
}
