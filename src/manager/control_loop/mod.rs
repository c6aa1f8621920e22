//! Control loop: the trait of a handler, and how its work ends.
//!
//! A control loop claims the due machines of one process, and handles each of them in a worker. The handler knows about
//! machines and nothing about leases: it reads facts, acts, and returns what was learnt. [`runner`] knows about sessions,
//! claims and panics and nothing about machines. `work_source` finds the work.
//!
//! # For the next loop
//!
//! Implement [`ControlLoop`]. Read the facts first ([`Work::snapshot`]) and act on the present facts: the claim only
//! means that the machine was due when it was claimed. Make every outward call through [`Work::run_outward_call`] or
//! check [`Work::outward_call_limit`] before it. Return what was learnt as changes.

use async_trait::async_trait;

use crate::bmdb::connection::error::BmdbError;
use crate::bmdb::engine::fact_change::FactChange;
use crate::bmdb::engine::facts::MachineSnapshot;
use crate::bmdb::engine::work::Work;
use crate::model::backoff::BackoffPolicy;
use crate::model::circuit_breaker::BreakerOpen;
use crate::model::process::Process;
use crate::model::schedule::next_due;
use crate::model::time::{Timestamp, after};

pub mod runner;
mod work_source;

/// The handler of one kind of work.
#[async_trait]
pub trait ControlLoop: Send + Sync + 'static {
    /// Name of the loop: prefix of its flags, label of its metrics, component of its sessions.
    fn name(&self) -> &'static str;

    /// The process it claims.
    fn process(&self) -> Process;

    /// The providers whose machines it can handle.
    fn providers(&self) -> Vec<String>;

    /// Handles one machine. Dropped when the work must stop.
    async fn handle(&self, work: &Work) -> Result<HandlerOutcome, HandlerError>;
}

/// How a handler wants its work to end.
#[derive(Debug)]
pub enum HandlerOutcome {
    /// The work is done and its backoff is cleared.
    Finished {
        /// Facts that the work established.
        changes: Vec<FactChange>,
        /// Detail for the machine's history.
        detail: String,
    },
    /// The work is postponed without having failed.
    Requeue {
        /// Facts that the work established.
        changes: Vec<FactChange>,
        /// When the machine is due again.
        until: Timestamp,
        /// Reason, shown to people.
        reason: String,
    },
}

impl HandlerOutcome {
    /// Work that is done, with the facts that it established.
    pub fn finished(changes: Vec<FactChange>, detail: impl Into<String>) -> Self {
        Self::Finished { changes, detail: detail.into() }
    }

    /// Work that is postponed because the breaker of its provider is open.
    #[must_use]
    pub fn provider_unavailable(open: BreakerOpen, now: Timestamp) -> Self {
        Self::Requeue { changes: Vec::new(), until: after(now, open.retry_after), reason: open.reason }
    }
}

/// Why a handler failed.
#[derive(Debug)]
pub struct HandlerError {
    /// Stored as the cause, as a sentence.
    pub cause: String,
    /// Backoff in place of the policy's, for a known way to fail.
    pub backoff: Option<BackoffPolicy>,
    /// Facts that the work established before it failed.
    pub changes: Vec<FactChange>,
}

impl HandlerError {
    /// A failure with the policy's backoff.
    pub fn new(cause: impl Into<String>) -> Self {
        Self { cause: cause.into(), backoff: None, changes: Vec::new() }
    }

    /// Adds facts that the work established before it failed.
    #[must_use]
    pub fn with_changes(mut self, changes: Vec<FactChange>) -> Self {
        self.changes = changes;
        self
    }
}

impl From<BmdbError> for HandlerError {
    fn from(error: BmdbError) -> Self {
        Self::new(error.to_string())
    }
}

/// Ends work whose machine is not due for it any more by the present facts: a hold or a quarantine came between the
/// claim and the first read. The renewal of the lease would stop the work too, but only the next time it runs.
pub(crate) fn no_longer_due(work: &Work, snapshot: &MachineSnapshot) -> Option<HandlerOutcome> {
    let (_, policy) = work.bmdb().policy();
    let due = next_due(&snapshot.facts, work.process().lane(), &policy, snapshot.now);
    let later = !due.timer && due.ready_at.is_some_and(|at| at > snapshot.now);
    (due.process != Some(work.process()) || later)
        .then(|| HandlerOutcome::finished(Vec::new(), format!("it is not due any more: {}", due.reason)))
}
