//! Metrics of one handle on the BMDB: transactions, renewals, lost sessions, pool waits, time in a phase.
//!
//! Every handle counts its own statements, because it exists before anything that could expose them.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

use crate::metrics::Metrics;
use crate::metrics::labels::{ByResult, phase_label};
use crate::metrics::registry::Label;
use model::phase::Phase;

/// Results of transactions: see [`ByOperation`].
const TRANSACTION_RESULTS: [&str; 6] = ["done", "retried", "refused", "locked", "unknown", "failed"];
/// Upper bounds of buckets in seconds for a statement, from an index probe to its time limit.
pub const STATEMENT_BOUNDS: [f64; 12] =
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];
/// Upper bounds of buckets in seconds for the time in a phase: from a reboot to a year in use.
const PHASE_BOUNDS: [f64; 13] = [
    1.0,
    5.0,
    15.0,
    60.0,
    180.0,
    600.0,
    1_800.0,
    7_200.0,
    28_800.0,
    86_400.0,
    604_800.0,
    2_592_000.0,
    31_536_000.0,
];

/// Labels `operation` and `result`: how a transaction ended.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ByOperation {
    /// Its purpose, in the words of its errors.
    pub operation: &'static str,
    /// `done`; `retried`: lost against another one, and run again; `refused`: rolled back by ourselves, as after a lost
    /// lease; `locked`: another client held a row for too long; `unknown`: the answer was lost; `failed`.
    pub result: &'static str,
}

/// Label `phase`: a phase that machines leave.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByPhase {
    phase: &'static str,
}

/// Metrics of one handle on the BMDB and its clones.
#[derive(Clone, Debug)]
pub struct BmdbMetrics {
    /// Transactions, and statements that are their own transaction.
    pub transactions: Family<ByOperation, Counter>,
    /// Rounds of renewing sessions: `renewed`, or `failed` and tried again until the deadline.
    pub renewals: Family<ByResult, Counter>,
    /// Sessions that ended before they were closed.
    pub sessions_lost: Counter,
    /// Machines whose agents reported a fence that this BMDB never issued.
    pub unknown_fences: Counter,
    /// How long a connection of the pool was waited for, in seconds.
    pub pool_wait: Histogram,
    /// How long machines were in a phase that they left.
    phases: Family<ByPhase, Histogram, fn() -> Histogram>,
}

impl Default for BmdbMetrics {
    fn default() -> Self {
        Self {
            transactions: Family::default(),
            renewals: Family::default(),
            sessions_lost: Counter::default(),
            unknown_fences: Counter::default(),
            pool_wait: Histogram::new(STATEMENT_BOUNDS),
            phases: Family::new_with_constructor(|| Histogram::new(PHASE_BOUNDS)),
        }
    }
}

impl BmdbMetrics {
    /// Registers these metrics beside the rest.
    pub fn register(&self, metrics: &Metrics) {
        for result in ["renewed", "failed"] {
            drop(self.renewals.get_or_create(&ByResult { result }));
        }
        for phase in Phase::ALL {
            drop(self.phases.get_or_create(&ByPhase { phase: phase.as_str() }));
        }
        metrics.register(|book| {
            book.add_process_metric(
                "bmdb_transactions",
                "BMDB transactions by operation and result",
                &[
                    Label::names("operation", "name of the operation, as in error messages", 200),
                    Label::one_of("result", TRANSACTION_RESULTS),
                ],
                self.transactions.clone(),
            );
            book.add_process_metric(
                "session_renewals",
                "Renewals of this process's sessions",
                &[Label::one_of("result", ["renewed", "failed"])],
                self.renewals.clone(),
            );
            book.add_process_metric(
                "sessions_lost",
                "Sessions of this process that expired before they were closed",
                &[],
                self.sessions_lost.clone(),
            );
            book.add_process_metric(
                "unknown_fences",
                "Machines that know a fence that this BMDB never assigned, for example after a backup was restored",
                &[],
                self.unknown_fences.clone(),
            );
            book.add_process_metric(
                "bmdb_pool_wait_seconds",
                "Wait for a connection of the pool",
                &[],
                self.pool_wait.clone(),
            );
            book.add_process_metric(
                "phase_duration_seconds",
                "Time that machines spent in the phase that they left in a transaction of this process",
                &[phase_label()],
                self.phases.clone(),
            );
        });
    }

    pub(crate) fn observe_phase_exit(&self, phase: Phase, after: Duration) {
        let label = ByPhase { phase: phase.as_str() };
        self.phases.get_or_create(&label).observe(after.as_secs_f64());
    }

    pub(crate) fn count_transaction(&self, operation: &'static str, result: &'static str) {
        self.transactions.get_or_create(&ByOperation { operation, result }).inc();
    }

    pub(crate) fn count_renewal(&self) {
        self.renewals.get_or_create(&ByResult { result: "renewed" }).inc();
    }

    pub(crate) fn count_renewal_failure(&self) {
        self.renewals.get_or_create(&ByResult { result: "failed" }).inc();
    }
}
