//! What is counted, for all rooms.
//!
//! The counters live in the lowest room that counts anything, because `server`
//! and `manager` are siblings that may not know each other and both count, and
//! because the group commit of heartbeats counts too. `server` shows them.
//!
//! What the database itself is asked is counted by every handle on it
//! ([`BmdbMetrics`]), which is there before anything that could show it.
//!
//! Labels are bounded: names from our own lists, never a machine or an address.
//! A room with numbers of its own adds them with [`Metrics::register`].

use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// Label `component`: who started a session.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByComponent {
    /// Name of a loop, or `callback`.
    pub component: &'static str,
}

/// Label `process`: a kind of work.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByProcess {
    /// Its name in the database.
    pub process: &'static str,
}

/// Labels `process` and `result`: how work ended.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByProcessAndResult {
    /// The kind of work.
    pub process: &'static str,
    /// `finished`, `failed`, `put-off`, `cancelled` or `lost`.
    pub result: &'static str,
}

/// Label `result`.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByResult {
    /// From a fixed list.
    pub result: &'static str,
}

/// Label `table`.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByTable {
    /// Of the BMDB.
    pub table: &'static str,
}

/// Label `reason`.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByReason {
    /// From a fixed list.
    pub reason: &'static str,
}

/// Labels `statement` and `result`: what became of a transaction.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByStatement {
    /// What it was for, in the words of its errors.
    pub statement: &'static str,
    /// `done`; `retried`: lost against another one, and run again; `refused`: undone by ourselves, as
    /// after a lost lease; `locked`: somebody held a row for too long; `unknown`: the answer was lost;
    /// `failed`.
    pub result: &'static str,
}

/// What one handle on the BMDB and its clones count.
#[derive(Clone, Debug, Default)]
pub struct BmdbMetrics {
    /// Transactions, and statements that are one by themselves.
    pub transactions: Family<ByStatement, Counter>,
    /// Rounds of renewing sessions: `renewed`, or `failed` and tried again until the deadline.
    pub renewals: Family<ByResult, Counter>,
    /// Sessions that were over before they were closed.
    pub sessions_lost: Counter,
    /// Machines whose agents were heard to know a fence that this BMDB never gave.
    pub newer_fences: Counter,
}

impl BmdbMetrics {
    /// Shows what is counted beside the rest. Their names get the prefix `shepherd_`.
    pub fn register(&self, metrics: &Metrics) {
        metrics.register(|registry| {
            registry.register(
                "bmdb_transactions",
                "Transactions of the BMDB by what they were for and what became of them",
                self.transactions.clone(),
            );
            registry.register(
                "session_renewals",
                "Rounds of renewing this process's sessions",
                self.renewals.clone(),
            );
            registry.register(
                "sessions_lost",
                "Sessions of this process that were over before they were closed",
                self.sessions_lost.clone(),
            );
            registry.register(
                "newer_fences",
                "Machines that know a fence which this BMDB never gave, as after restoring a backup",
                self.newer_fences.clone(),
            );
        });
    }

    pub(crate) fn transaction(&self, statement: &'static str, result: &'static str) {
        self.transactions.get_or_create(&ByStatement { statement, result }).inc();
    }

    pub(crate) fn renewed(&self) {
        self.renewals.get_or_create(&ByResult { result: "renewed" }).inc();
    }

    pub(crate) fn renewal_failed(&self) {
        self.renewals.get_or_create(&ByResult { result: "failed" }).inc();
    }
}

/// Everything that this process counts; cheap to clone, all clones count together.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
    /// Sessions started.
    pub sessions_started: Family<ByComponent, Counter>,
    /// Work items claimed.
    pub work_started: Family<ByProcess, Counter>,
    /// Work items ended.
    pub work_finished: Family<ByProcessAndResult, Counter>,
    /// Due rows that were not what the facts demand; must stay 0.
    pub schedule_drift: Counter,
    /// Heartbeats answered.
    pub heartbeats: Family<ByResult, Counter>,
    /// Groups of heartbeats committed, empty ones included.
    pub heartbeat_batches: Counter,
    /// Groups that were refused and sent in halves.
    pub heartbeat_batches_halved: Counter,
    /// Heartbeats in a group.
    pub heartbeat_batch_size: Histogram,
    /// How long a group took to commit, in seconds.
    pub heartbeat_commit_seconds: Histogram,
    /// TLS handshakes that did not end in a connection.
    pub handshake_failures: Family<ByReason, Counter>,
    /// TLS handshakes under way.
    pub handshakes_open: Gauge,
    /// Agents connected.
    pub agent_connections: Gauge,
    /// Of these, connections without a heartbeat of an agent so far.
    pub agent_connections_unproven: Gauge,
    /// Connections that were closed because they proved no agent.
    pub agent_connections_closed: Family<ByReason, Counter>,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// A registry with everything in it at zero.
    #[must_use]
    pub fn new() -> Self {
        let metrics = Self {
            registry: Arc::new(Mutex::new(Registry::with_prefix("shepherd"))),
            sessions_started: Family::default(),
            work_started: Family::default(),
            work_finished: Family::default(),
            schedule_drift: Counter::default(),
            heartbeats: Family::default(),
            heartbeat_batches: Counter::default(),
            heartbeat_batches_halved: Counter::default(),
            heartbeat_batch_size: Histogram::new(exponential_buckets(1.0, 2.0, 11)),
            heartbeat_commit_seconds: Histogram::new(exponential_buckets(0.001, 2.0, 14)),
            handshake_failures: Family::default(),
            handshakes_open: Gauge::default(),
            agent_connections: Gauge::default(),
            agent_connections_unproven: Gauge::default(),
            agent_connections_closed: Family::default(),
        };
        metrics.register(|registry| metrics.register_own(registry));
        metrics
    }

    fn register_own(&self, registry: &mut Registry) {
        registry.register("sessions_started", "Sessions started", self.sessions_started.clone());
        registry.register("work_started", "Work items claimed", self.work_started.clone());
        registry.register("work_finished", "Work items ended", self.work_finished.clone());
        registry.register(
            "schedule_drift",
            "Due rows that were not what the facts demand; must stay 0",
            self.schedule_drift.clone(),
        );
        registry.register("heartbeats", "Heartbeats answered", self.heartbeats.clone());
        registry.register(
            "heartbeat_batches",
            "Groups of heartbeats committed",
            self.heartbeat_batches.clone(),
        );
        registry.register(
            "heartbeat_batches_halved",
            "Groups of heartbeats that were refused and sent in halves",
            self.heartbeat_batches_halved.clone(),
        );
        registry.register("heartbeat_batch_size", "Heartbeats in a group", self.heartbeat_batch_size.clone());
        registry.register(
            "heartbeat_commit_seconds",
            "How long a group of heartbeats took to commit",
            self.heartbeat_commit_seconds.clone(),
        );
        registry.register(
            "handshake_failures",
            "TLS handshakes of agents that failed",
            self.handshake_failures.clone(),
        );
        registry.register("handshakes_open", "TLS handshakes under way", self.handshakes_open.clone());
        registry.register("agent_connections", "Agents connected", self.agent_connections.clone());
        registry.register(
            "agent_connections_unproven",
            "Connections without a heartbeat of an agent so far",
            self.agent_connections_unproven.clone(),
        );
        registry.register(
            "agent_connections_closed",
            "Connections closed because they proved no agent",
            self.agent_connections_closed.clone(),
        );
    }

    /// Adds metrics of another room. Their names get the prefix `shepherd_`.
    pub fn register(&self, add: impl FnOnce(&mut Registry)) {
        add(&mut self.registry.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// All of it in the text format.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry.lock().unwrap_or_else(PoisonError::into_inner))?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_is_shown_with_what_others_added() {
        let metrics = Metrics::new();
        let more: Counter = Counter::default();
        metrics.register(|registry| registry.register("loops", "Loops running", more.clone()));
        metrics.heartbeats.get_or_create(&ByResult { result: "stored" }).inc_by(3);
        more.inc();
        let text = metrics.clone().encode().unwrap();
        for line in [
            "shepherd_heartbeats_total{result=\"stored\"} 3",
            "shepherd_loops_total 1",
            "shepherd_schedule_drift_total 0",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line} is missing in\n{text}");
        }
    }
}
