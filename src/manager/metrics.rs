//! What the loops count, by loop and result. Never by machine: labels are bounded.

use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

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

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LoopLabel {
    r#loop: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndLabel {
    r#loop: String,
    result: WorkResult,
}

/// What housekeeping counts.
#[derive(Clone, Debug, Default)]
pub struct HousekeepingMetrics {
    /// Lanes whose schedule contradicted their facts. Must read 0.
    pub drift: Counter,
    /// Machines whose schedule was written anew by the sweeper.
    pub repaired: Counter,
    /// Sessions that the reaper closed.
    pub sessions_expired: Counter,
    /// Work items that the reaper freed.
    pub work_freed: Counter,
}

/// The families all loops share.
#[derive(Clone, Debug)]
pub struct ManagerMetrics {
    sessions: Family<LoopLabel, Counter>,
    started: Family<LoopLabel, Counter>,
    active: Family<LoopLabel, Gauge>,
    ended: Family<EndLabel, Counter>,
    duration: Family<EndLabel, Histogram>,
    contended: Family<LoopLabel, Counter>,
    source_failed: Family<LoopLabel, Counter>,
    /// What housekeeping counts.
    pub housekeeping: HousekeepingMetrics,
}

/// Upper bounds in seconds: a database round trip to an upload over a bad line.
const DURATION_BOUNDS: [f64; 10] = [0.01, 0.05, 0.2, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0, 300.0];

impl ManagerMetrics {
    /// Makes the families and registers them.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            sessions: Family::default(),
            started: Family::default(),
            active: Family::default(),
            ended: Family::default(),
            duration: Family::new_with_constructor(|| Histogram::new(DURATION_BOUNDS)),
            contended: Family::default(),
            source_failed: Family::default(),
            housekeeping: HousekeepingMetrics::default(),
        };
        let house = &metrics.housekeeping;
        for (name, help, metric) in [
            ("shepherd_sessions_started", "Sessions started by workers", metrics.sessions.clone()),
            ("shepherd_work_started", "Work items claimed", metrics.started.clone()),
            (
                "shepherd_claims_contended",
                "Claims that found work and lost it to others",
                metrics.contended.clone(),
            ),
            ("shepherd_source_failures", "Failures to ask the BMDB for work", metrics.source_failed.clone()),
        ] {
            registry.register(name, help, metric);
        }
        registry.register("shepherd_work_active", "Work items being handled", metrics.active.clone());
        registry.register("shepherd_work_ended", "Work items ended, by result", metrics.ended.clone());
        registry.register(
            "shepherd_work_duration_seconds",
            "Time from claim to end",
            metrics.duration.clone(),
        );
        for (name, help, metric) in [
            (
                "shepherd_schedule_drift",
                "Lanes whose schedule contradicted their facts; must be 0",
                house.drift.clone(),
            ),
            (
                "shepherd_schedule_repaired",
                "Machines whose schedule the sweeper wrote anew",
                house.repaired.clone(),
            ),
            (
                "shepherd_sessions_expired",
                "Sessions closed because their deadline passed",
                house.sessions_expired.clone(),
            ),
            ("shepherd_work_freed", "Work items freed from lost sessions", house.work_freed.clone()),
        ] {
            registry.register(name, help, metric);
        }
        metrics
    }

    /// The view of one loop.
    #[must_use]
    pub fn of(&self, name: &'static str) -> LoopMetrics {
        LoopMetrics { name, families: self.clone() }
    }
}

/// What one loop counts.
#[derive(Clone, Debug)]
pub struct LoopMetrics {
    name: &'static str,
    families: ManagerMetrics,
}

impl LoopMetrics {
    fn label(&self) -> LoopLabel {
        LoopLabel { r#loop: self.name.to_owned() }
    }

    pub(crate) fn session_started(&self) {
        self.families.sessions.get_or_create(&self.label()).inc();
    }

    pub(crate) fn claimed(&self, count: usize) {
        self.families.started.get_or_create(&self.label()).inc_by(count as u64);
        self.families.active.get_or_create(&self.label()).inc_by(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(crate) fn contended(&self) {
        self.families.contended.get_or_create(&self.label()).inc();
    }

    pub(crate) fn source_failed(&self) {
        self.families.source_failed.get_or_create(&self.label()).inc();
    }

    pub(crate) fn ended(&self, result: WorkResult, took: Duration) {
        let label = EndLabel { r#loop: self.name.to_owned(), result };
        self.families.active.get_or_create(&self.label()).dec();
        self.families.ended.get_or_create(&label).inc();
        self.families.duration.get_or_create(&label).observe(took.as_secs_f64());
    }
}
