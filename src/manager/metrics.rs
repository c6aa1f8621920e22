//! What the loops count, by loop and result. Never by machine: labels are bounded.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::bmdb::metrics::{ByComponent, ByProcess, ByProcessAndResult, ByTable, Metrics};
use crate::model::process::Process;

/// How a work item ended, as a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum WorkResult {
    /// Done.
    Finished,
    /// Put off without having failed.
    PutOff,
    /// Failed.
    Failed,
    /// Told to stop.
    Cancelled,
    /// The handler panicked.
    Panicked,
    /// Its lease was lost, or the end could not be written.
    Lost,
}

impl WorkResult {
    /// The label's value.
    const fn as_str(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::PutOff => "put-off",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::Panicked => "panicked",
            Self::Lost => "lost",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LoopLabel {
    r#loop: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndLabel {
    r#loop: &'static str,
    result: WorkResult,
}

/// What housekeeping counts.
#[derive(Clone, Debug)]
pub struct HousekeepingMetrics {
    /// Lanes whose schedule contradicted their facts. Must read 0.
    pub drift: Counter,
    /// Machines whose schedule was written anew by the sweeper.
    pub repaired: Counter,
    /// Sessions that the reaper closed.
    pub sessions_expired: Counter,
    /// Work items that the reaper freed.
    pub work_freed: Counter,
    /// Old rows that were deleted.
    pub forgotten: Family<ByTable, Counter>,
    /// Dead rows that the database has not removed yet.
    pub dead_rows: Family<ByTable, Gauge>,
    /// Seconds since the oldest open transaction of the database began.
    pub oldest_transaction: Gauge<f64, AtomicU64>,
    /// The same of the oldest that keeps rows from being removed.
    pub oldest_snapshot: Gauge<f64, AtomicU64>,
}

/// What all loops of a process count.
#[derive(Clone, Debug)]
pub struct ManagerMetrics {
    common: Metrics,
    active: Family<LoopLabel, Gauge>,
    duration: Family<EndLabel, Histogram, fn() -> Histogram>,
    contended: Family<LoopLabel, Counter>,
    source_failed: Family<LoopLabel, Counter>,
    /// What housekeeping counts.
    pub housekeeping: HousekeepingMetrics,
}

/// Upper bounds in seconds: a database round trip to an upload over a bad line.
const DURATION_BOUNDS: [f64; 10] = [0.01, 0.05, 0.2, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0, 300.0];

impl ManagerMetrics {
    /// Adds the loops' families to what the process counts.
    #[must_use]
    pub fn register(common: &Metrics) -> Self {
        let housekeeping = HousekeepingMetrics {
            drift: common.schedule_drift.clone(),
            repaired: Counter::default(),
            sessions_expired: Counter::default(),
            work_freed: Counter::default(),
            forgotten: Family::default(),
            dead_rows: Family::default(),
            oldest_transaction: Gauge::default(),
            oldest_snapshot: Gauge::default(),
        };
        let metrics = Self {
            common: common.clone(),
            active: Family::default(),
            duration: Family::new_with_constructor(|| Histogram::new(DURATION_BOUNDS)),
            contended: Family::default(),
            source_failed: Family::default(),
            housekeeping,
        };
        common.register(|registry| metrics.register_own(registry));
        metrics
    }

    fn register_own(&self, registry: &mut Registry) {
        let house = &self.housekeeping;
        registry.register("work_active", "Work items being handled", self.active.clone());
        registry.register("work_duration_seconds", "Time from claim to end", self.duration.clone());
        registry.register(
            "claims_contended",
            "Claims that lost all they found to others",
            self.contended.clone(),
        );
        registry.register("source_failures", "Failures to ask the BMDB for work", self.source_failed.clone());
        registry.register(
            "schedule_repaired",
            "Machines whose schedule was written anew",
            house.repaired.clone(),
        );
        registry.register(
            "sessions_expired",
            "Sessions closed at their deadline",
            house.sessions_expired.clone(),
        );
        registry.register("work_freed", "Work items freed from lost sessions", house.work_freed.clone());
        registry.register("rows_forgotten", "Old rows that were deleted", house.forgotten.clone());
        registry.register(
            "bmdb_dead_rows",
            "Dead rows that the database has not removed yet",
            house.dead_rows.clone(),
        );
        registry.register(
            "bmdb_oldest_transaction_seconds",
            "Age of the oldest open transaction of the database",
            house.oldest_transaction.clone(),
        );
        registry.register(
            "bmdb_oldest_snapshot_seconds",
            "Age of the oldest transaction that keeps dead rows from being removed",
            house.oldest_snapshot.clone(),
        );
    }

    /// The view of one loop.
    #[must_use]
    pub fn of(&self, name: &'static str, process: Process) -> LoopMetrics {
        LoopMetrics { name, process: process.as_str(), families: self.clone() }
    }
}

/// What one loop counts.
#[derive(Clone, Debug)]
pub struct LoopMetrics {
    name: &'static str,
    process: &'static str,
    families: ManagerMetrics,
}

impl LoopMetrics {
    const fn label(&self) -> LoopLabel {
        LoopLabel { r#loop: self.name }
    }

    pub(crate) fn session_started(&self) {
        self.families.common.sessions_started.get_or_create(&ByComponent { component: self.name }).inc();
    }

    pub(crate) fn claimed(&self, count: usize) {
        let process = ByProcess { process: self.process };
        self.families.common.work_started.get_or_create(&process).inc_by(count as u64);
        self.families.active.get_or_create(&self.label()).inc_by(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(crate) fn contended(&self) {
        self.families.contended.get_or_create(&self.label()).inc();
    }

    pub(crate) fn source_failed(&self) {
        self.families.source_failed.get_or_create(&self.label()).inc();
    }

    pub(crate) fn ended(&self, result: WorkResult, took: Duration) {
        self.families.active.get_or_create(&self.label()).dec();
        let ended = ByProcessAndResult { process: self.process, result: result.as_str() };
        self.families.common.work_finished.get_or_create(&ended).inc();
        let label = EndLabel { r#loop: self.name, result };
        self.families.duration.get_or_create(&label).observe(took.as_secs_f64());
    }
}
