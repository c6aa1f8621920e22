//! Metrics: counters, gauges and histograms of this process, in one registry.
//!
//! The counters live in the lowest layer that counts anything. `server` and `manager` are siblings that must not depend
//! on each other and both count, and the group commit of heartbeats counts too. `server` exposes them.
//!
//! # How it works
//!
//! * [`Metrics`] has the registry ([`registry`]) and the metrics of this process. A layer with numbers of its own adds
//!   them with [`Metrics::register`].
//! * [`labels`] has the labels and their possible values.
//! * [`database`] has what a handle on the database counts. A handle exists before a registry does, and is registered
//!   later (`Bmdb::register_metrics`).
//! * Numbers of the whole fleet are not counted here: a sampler stores them once a minute ([`crate::fleet::sample`]).
//!
//! # Invariants
//!
//! * A label has a bounded set of values: names from our own lists or from the configuration, never a machine or an
//!   address.
//! * A series exists with the value 0 before it is first counted, wherever its labels are known beforehand: no alert
//!   rule notices the first increment of a series that appears with it.
//!
//! # Notes for the next implementor
//!
//! * A new component, result or reason is added to its list here, so that its series starts at 0.
//! * The registry renders the manual (`docs/metrics.md`) from the help texts, and a test compares the two.

use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};

use crate::metrics::labels::{
    ByCall, ByComponent, ByListener, ByListenerAndReason, ByProcess, ByProcessAndResult, ByReason, ByResult,
    ByRpc, process_label,
};
use crate::metrics::registry::{Label, MetricRegistry};
use model::process::Process;

pub mod database;
pub mod labels;
pub mod registry;

/// Components that start sessions: the loops, and others.
const COMPONENTS: [&str; 11] = [
    "api",
    "callback",
    "cluster",
    "initializer",
    "provisioner",
    "recoverer",
    "retirer",
    "roll-out",
    "sampler",
    "switcher",
    "updater",
];
/// Upper bounds of buckets in seconds: from an answer out of memory to a plan of a large fleet.
const CALL_BOUNDS: [f64; 8] = [0.002, 0.01, 0.05, 0.2, 1.0, 5.0, 15.0, 60.0];
/// Results of heartbeats as agents receive them.
const HEARTBEAT_RESULTS: [&str; 12] = [
    "stored",
    "duplicate",
    "stale",
    "unauthenticated",
    "retired",
    "busy",
    "full",
    "stopping",
    "unavailable",
    "malformed",
    "rate-limited",
    "internal",
];
/// Results of fetching a file.
const FETCH_RESULTS: [&str; 7] =
    ["sent", "aborted", "busy", "malformed", "not-found", "unauthenticated", "unavailable"];
/// Reasons why TLS handshakes fail.
const HANDSHAKE_REASONS: [&str; 11] = [
    "accept",
    "alert_bad_certificate",
    "alert_certificate_expired",
    "alert_certificate_unknown",
    "alert_other",
    "alert_unknown_ca",
    "certificate",
    "connection",
    "evicted",
    "protocol",
    "timeout",
];
/// Reasons for closing connections that proved no agent.
const CLOSE_REASONS: [&str; 3] = ["evicted", "full", "unauthenticated"];
/// Listeners, for the label `listener`.
const LISTENERS: [&str; 3] = ["api", "callback", "metrics"];
/// Reasons why a listener's gate closed a connection or got none.
const GATE_REASONS: [&str; 4] = ["accept", "evicted", "full", "timeout"];
/// Results of work items, for the label `result`.
const WORK_RESULTS: [&str; 6] = ["finished", "requeued", "failed", "cancelled", "panicked", "lost"];

/// All metrics of this process; cheap to clone, all clones count together.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Mutex<MetricRegistry>>,
    /// Sessions started, by component.
    pub sessions_started: Family<ByComponent, Counter>,
    /// Work items claimed, by process.
    pub work_started: Family<ByProcess, Counter>,
    /// Work items ended, by process and result.
    pub work_finished: Family<ByProcessAndResult, Counter>,
    /// Due rows that contradicted the facts; must stay 0.
    pub schedule_drift: Counter,
    /// Heartbeats answered, by result.
    pub heartbeats: Family<ByResult, Counter>,
    /// Groups of heartbeats committed, empty ones included.
    pub heartbeat_batches: Counter,
    /// Groups that the database rejected and that were sent in halves.
    pub heartbeat_batches_halved: Counter,
    /// Heartbeats in a group.
    pub heartbeat_batch_size: Histogram,
    /// How long a group took to commit, in seconds.
    pub heartbeat_commit_seconds: Histogram,
    /// TLS handshakes that did not end in a connection.
    pub handshake_failures: Family<ByReason, Counter>,
    /// TLS handshakes under way.
    pub handshakes_open: Gauge,
    /// Agents connected to this process now.
    pub agent_connections: Gauge,
    /// The connections among these that have not had an agent's heartbeat yet.
    pub agent_connections_unproven: Gauge,
    /// Connections that were closed because they proved no agent.
    pub agent_connections_closed: Family<ByReason, Counter>,
    /// Connections of each listener without an accepted credential.
    pub gate_unproven: Family<ByListener, Gauge>,
    /// Connections of each listener with one.
    pub gate_proven: Family<ByListener, Gauge>,
    /// Connections that a listener's gate closed, or could not get.
    pub gate_closed: Family<ByListenerAndReason, Counter>,
    /// Files that machines requested, by result.
    pub artefact_fetches: Family<ByResult, Counter>,
    /// Files that are being sent now.
    pub artefact_fetches_open: Gauge,
    /// Calls of the API that were answered, by call and code.
    pub api_calls: Family<ByCall, Counter>,
    /// How long the answer to such a call took, in seconds; for a watch, until its first message.
    pub api_call_seconds: Family<ByRpc, Histogram, fn() -> Histogram>,
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
    /// A registry with every metric at zero.
    #[must_use]
    pub fn new() -> Self {
        let metrics = Self {
            registry: Arc::default(),
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
            gate_unproven: Family::default(),
            gate_proven: Family::default(),
            gate_closed: Family::default(),
            artefact_fetches: Family::default(),
            artefact_fetches_open: Gauge::default(),
            api_calls: Family::default(),
            api_call_seconds: Family::new_with_constructor(|| Histogram::new(CALL_BOUNDS)),
        };
        metrics.create_series_at_zero();
        metrics.register(|book| metrics.register_own(book));
        metrics
    }

    fn create_series_at_zero(&self) {
        for component in COMPONENTS {
            drop(self.sessions_started.get_or_create(&ByComponent { component }));
        }
        for process in Process::ALL.map(Process::as_str) {
            drop(self.work_started.get_or_create(&ByProcess { process }));
            for result in WORK_RESULTS {
                drop(self.work_finished.get_or_create(&ByProcessAndResult { process, result }));
            }
        }
        for result in HEARTBEAT_RESULTS {
            drop(self.heartbeats.get_or_create(&ByResult { result }));
        }
        for result in FETCH_RESULTS {
            drop(self.artefact_fetches.get_or_create(&ByResult { result }));
        }
        for reason in HANDSHAKE_REASONS {
            drop(self.handshake_failures.get_or_create(&ByReason { reason }));
        }
        for reason in CLOSE_REASONS {
            drop(self.agent_connections_closed.get_or_create(&ByReason { reason }));
        }
        for listener in LISTENERS {
            drop(self.gate_unproven.get_or_create(&ByListener { listener }));
            drop(self.gate_proven.get_or_create(&ByListener { listener }));
            for reason in GATE_REASONS {
                drop(self.gate_closed.get_or_create(&ByListenerAndReason { listener, reason }));
            }
        }
    }

    fn register_own(&self, book: &mut MetricRegistry) {
        book.add_process_metric(
            "sessions_started",
            "Sessions started",
            &[Label::one_of("component", COMPONENTS)],
            self.sessions_started.clone(),
        );
        book.add_process_metric(
            "work_started",
            "Work items claimed",
            &[process_label()],
            self.work_started.clone(),
        );
        book.add_process_metric(
            "work_finished",
            "Work items completed",
            &[process_label(), Label::one_of("result", WORK_RESULTS)],
            self.work_finished.clone(),
        );
        book.add_process_metric(
            "schedule_drift",
            "Due rows that did not match the facts; must stay 0",
            &[],
            self.schedule_drift.clone(),
        );
        book.add_process_metric(
            "heartbeats",
            "Heartbeats by result",
            &[Label::one_of("result", HEARTBEAT_RESULTS)],
            self.heartbeats.clone(),
        );
        book.add_process_metric(
            "heartbeat_batches",
            "Heartbeat batches committed",
            &[],
            self.heartbeat_batches.clone(),
        );
        book.add_process_metric(
            "heartbeat_batches_split",
            "Heartbeat batches that the database rejected and that were split in halves",
            &[],
            self.heartbeat_batches_halved.clone(),
        );
        book.add_process_metric(
            "heartbeat_batch_size",
            "Heartbeats in a batch",
            &[],
            self.heartbeat_batch_size.clone(),
        );
        book.add_process_metric(
            "heartbeat_commit_seconds",
            "Duration of the commit of a heartbeat batch",
            &[],
            self.heartbeat_commit_seconds.clone(),
        );
        self.register_connections(book);
        self.register_calls(book);
    }

    fn register_calls(&self, book: &mut MetricRegistry) {
        let rpc = || Label::names("rpc", "a call of the API, as its OpenAPI document has it", 100);
        book.add_process_metric(
            "api_calls",
            "API calls by gRPC code; calls that are rejected by a rate limit are not counted",
            &[rpc(), Label::names("code", "the codes of gRPC", 17)],
            self.api_calls.clone(),
        );
        book.add_process_metric(
            "api_call_seconds",
            "Duration of API calls until the response, or of a watch until its first message",
            &[rpc()],
            self.api_call_seconds.clone(),
        );
    }

    fn register_connections(&self, book: &mut MetricRegistry) {
        book.add_process_metric(
            "artefact_downloads",
            "Artefacts that machines requested, by result",
            &[Label::one_of("result", FETCH_RESULTS)],
            self.artefact_fetches.clone(),
        );
        book.add_process_metric(
            "artefact_downloads_in_progress",
            "Downloads of artefacts by machines in progress",
            &[],
            self.artefact_fetches_open.clone(),
        );
        book.add_process_metric(
            "tls_handshake_failures",
            "TLS handshakes of agents that failed",
            &[Label::one_of("reason", HANDSHAKE_REASONS)],
            self.handshake_failures.clone(),
        );
        book.add_process_metric(
            "tls_handshakes_in_progress",
            "TLS handshakes in progress",
            &[],
            self.handshakes_open.clone(),
        );
        book.add_process_metric("agent_connections", "Agents connected", &[], self.agent_connections.clone());
        book.add_process_metric(
            "agent_connections_unauthenticated",
            "Connections that have not sent an agent's heartbeat yet",
            &[],
            self.agent_connections_unproven.clone(),
        );
        book.add_process_metric(
            "agent_connections_closed",
            "Connections closed because they did not authenticate as an agent",
            &[Label::one_of("reason", CLOSE_REASONS)],
            self.agent_connections_closed.clone(),
        );
        self.register_gates(book);
    }

    fn register_gates(&self, book: &mut MetricRegistry) {
        let listener = || Label::one_of("listener", LISTENERS);
        book.add_process_metric(
            "listener_connections_unauthenticated",
            "Connections of a listener without an accepted credential; they give way to newer ones",
            &[listener()],
            self.gate_unproven.clone(),
        );
        book.add_process_metric(
            "listener_connections_authenticated",
            "Connections of a listener with an accepted credential; they never give way",
            &[listener()],
            self.gate_proven.clone(),
        );
        book.add_process_metric(
            "listener_connections_closed",
            "Connections that a listener closed because they gave way, came too late or found no place, and those \
             that it could not accept",
            &[listener(), Label::one_of("reason", GATE_REASONS)],
            self.gate_closed.clone(),
        );
    }

    /// Registers metrics of another layer.
    pub fn register(&self, enter: impl FnOnce(&mut MetricRegistry)) {
        enter(&mut self.registry.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Calls `read` with the registry as it is now.
    pub fn with_registry<T>(&self, read: impl FnOnce(&MetricRegistry) -> T) -> T {
        read(&self.registry.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Encodes everything as OpenMetrics.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        self.with_registry(MetricRegistry::encode_openmetrics)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_and_registered_metrics_are_encoded() {
        let metrics = Metrics::new();
        let more: Counter = Counter::default();
        metrics.register(|book| book.add_process_metric("loops", "Loops running", &[], more.clone()));
        metrics.heartbeats.get_or_create(&ByResult { result: "stored" }).inc_by(3);
        more.inc();
        let text = metrics.clone().encode().unwrap();
        for line in [
            "shepherd_heartbeats_total{result=\"stored\"} 3",
            "shepherd_loops_total 1",
            "shepherd_schedule_drift_total 0",
            "shepherd_heartbeats_total{result=\"busy\"} 0",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line} is missing in\n{text}");
        }
    }
}
