//! Metrics of control loops and housekeeping.
//!
//! Labels are bounded: loop and result, never the machine.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::bmdb::connection::error::BmdbError;
use crate::bmdb::engine::claim::Claimed;
use crate::bmdb::fleet::retention::{RetainedKind, TABLES};
use crate::bmdb::metrics::Metrics;
use crate::bmdb::metrics::database::STATEMENT_BOUNDS;
use crate::bmdb::metrics::labels::{ByComponent, ByProcess, ByProcessAndResult, ByTable, process_label};
use crate::bmdb::metrics::registry::{Label, MetricRegistry};
use crate::manager::database_metrics::DatabaseLimitMetrics;
use crate::manager::fleet_metrics::FleetMetrics;
use crate::manager::process_resources::ProcessResourceMetrics;
use crate::model::process::Process;

/// How a work item ended, as a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WorkResult {
    /// The handler finished its work.
    Finished,
    /// Postponed without having failed.
    Requeued,
    /// The handler returned an error.
    Failed,
    /// The work was cancelled.
    Cancelled,
    /// The handler panicked, which fails the work.
    Panicked,
    /// The lease was lost, or the end could not be written.
    Lost,
}

impl WorkResult {
    const ALL: [Self; 6] =
        [Self::Finished, Self::Requeued, Self::Failed, Self::Cancelled, Self::Panicked, Self::Lost];

    /// Its name in metrics and traces.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Requeued => "requeued",
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

impl EncodeLabelValue for WorkResult {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
        self.as_str().encode(encoder)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndLabel {
    r#loop: &'static str,
    result: WorkResult,
}

/// The result of one claim, as a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ClaimResult {
    /// The claim returned work.
    Work,
    /// Other shepherds claimed the due work first.
    Contended,
    /// No work was due.
    Empty,
    /// The database did not answer the claim.
    Failed,
}

impl ClaimResult {
    const ALL: [Self; 4] = [Self::Work, Self::Contended, Self::Empty, Self::Failed];

    /// The label of a claim's result.
    pub(crate) const fn from_claim(claimed: &Result<Claimed, BmdbError>) -> Self {
        match claimed {
            Ok(Claimed::Work(_)) => Self::Work,
            Ok(Claimed::Contended) => Self::Contended,
            Ok(Claimed::Empty | Claimed::FullScanDeferred(_)) => Self::Empty,
            Err(_) => Self::Failed,
        }
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::Work => "work",
            Self::Contended => "contended",
            Self::Empty => "empty",
            Self::Failed => "failed",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClaimLabel {
    r#loop: &'static str,
    result: &'static str,
}

/// Metrics of the housekeeping tasks.
#[derive(Clone, Debug)]
pub struct HousekeepingMetrics {
    /// Lanes whose schedule contradicted their facts. Must read 0.
    pub schedule_mismatches: Counter,
    /// Machines whose schedule the sweeper repaired.
    pub schedules_repaired: Counter,
    /// Sessions that the reaper closed.
    pub sessions_expired: Counter,
    /// Work items that the reaper freed.
    pub work_freed: Counter,
    /// Old rows that were deleted.
    pub rows_deleted: Family<ByTable, Counter>,
    /// Dead rows that the database has not removed yet.
    pub dead_rows: Family<ByTable, Gauge>,
    /// Seconds since the start of the database's oldest open transaction.
    pub oldest_transaction: Gauge<f64, AtomicU64>,
    /// The same for the oldest transaction that prevents the removal of dead rows.
    pub oldest_snapshot: Gauge<f64, AtomicU64>,
    /// How close the database server is to its limits.
    pub database_limits: DatabaseLimitMetrics,
}

/// The metrics of all loops of a process.
#[derive(Clone, Debug)]
pub struct ManagerMetrics {
    common: Metrics,
    active: Family<LoopLabel, Gauge>,
    duration: Family<EndLabel, Histogram, fn() -> Histogram>,
    contended: Family<LoopLabel, Counter>,
    source_failed: Family<LoopLabel, Counter>,
    claim: Family<ClaimLabel, Histogram, fn() -> Histogram>,
    wait: Family<ByProcess, Histogram, fn() -> Histogram>,
    end: Family<LoopLabel, Histogram, fn() -> Histogram>,
    /// Metrics of the housekeeping tasks.
    pub housekeeping: HousekeepingMetrics,
    /// What this process uses of its host.
    pub process: ProcessResourceMetrics,
    /// Metrics of the newest fleet sample.
    pub fleet: FleetMetrics,
}

/// Values of the label `loop`.
const LOOPS: [&str; 5] = ["initializer", "recoverer", "retirer", "switcher", "updater"];

fn loop_label() -> Label {
    Label::one_of("loop", LOOPS)
}

/// Upper bounds in seconds: from a database round trip to an upload over a slow line.
const DURATION_BOUNDS: [f64; 10] = [0.01, 0.05, 0.2, 0.5, 1.0, 2.5, 10.0, 30.0, 60.0, 300.0];
/// Upper bounds in seconds: from a free worker that was woken to the backlog of a whole fleet.
const WAIT_BOUNDS: [f64; 12] =
    [0.005, 0.02, 0.05, 0.2, 1.0, 5.0, 15.0, 60.0, 300.0, 1_800.0, 7_200.0, 86_400.0];

impl ManagerMetrics {
    /// Registers the metrics of the loops with those of the process.
    #[must_use]
    pub fn register(common: &Metrics) -> Self {
        let housekeeping = HousekeepingMetrics {
            schedule_mismatches: common.schedule_drift.clone(),
            schedules_repaired: Counter::default(),
            sessions_expired: Counter::default(),
            work_freed: Counter::default(),
            rows_deleted: Family::default(),
            dead_rows: Family::default(),
            oldest_transaction: Gauge::default(),
            oldest_snapshot: Gauge::default(),
            database_limits: DatabaseLimitMetrics::default(),
        };
        let metrics = Self {
            common: common.clone(),
            active: Family::default(),
            duration: Family::new_with_constructor(|| Histogram::new(DURATION_BOUNDS)),
            contended: Family::default(),
            source_failed: Family::default(),
            claim: Family::new_with_constructor(|| Histogram::new(STATEMENT_BOUNDS)),
            wait: Family::new_with_constructor(|| Histogram::new(WAIT_BOUNDS)),
            end: Family::new_with_constructor(|| Histogram::new(STATEMENT_BOUNDS)),
            housekeeping,
            process: ProcessResourceMetrics::default(),
            fleet: FleetMetrics::default(),
        };
        for process in Process::ALL.map(Process::as_str) {
            drop(metrics.wait.get_or_create(&ByProcess { process }));
        }
        for what in RetainedKind::ALL {
            drop(metrics.housekeeping.rows_deleted.get_or_create(&ByTable { table: what.table() }));
        }
        common.register(|book| {
            metrics.register_loops(book);
            metrics.register_housekeeping(book);
            metrics.process.register(book);
            metrics.fleet.register(book);
        });
        metrics
    }

    fn register_loops(&self, book: &mut MetricRegistry) {
        let results = || Label::one_of("result", WorkResult::ALL.map(WorkResult::as_str));
        book.add_process_metric(
            "work_active",
            "Work items in progress in this process",
            &[loop_label()],
            self.active.clone(),
        );
        book.add_process_metric(
            "work_wait_seconds",
            "Time from when a machine became due until it was claimed",
            &[process_label()],
            self.wait.clone(),
        );
        book.add_process_metric(
            "work_duration_seconds",
            "Time from claim to completion",
            &[loop_label(), results()],
            self.duration.clone(),
        );
        book.add_process_metric(
            "work_completion_seconds",
            "Duration of the transaction that completes a work item, with retries after lost responses",
            &[loop_label()],
            self.end.clone(),
        );
        book.add_process_metric(
            "claim_seconds",
            "Duration of claims, by result",
            &[loop_label(), Label::one_of("result", ClaimResult::ALL.map(ClaimResult::as_str))],
            self.claim.clone(),
        );
        book.add_process_metric(
            "claims_contended",
            "Claims that lost all candidates to other claimers",
            &[loop_label()],
            self.contended.clone(),
        );
        book.add_process_metric(
            "work_source_failures",
            "Failed queries for work",
            &[loop_label()],
            self.source_failed.clone(),
        );
    }

    fn register_housekeeping(&self, book: &mut MetricRegistry) {
        let house = &self.housekeeping;
        book.add_process_metric(
            "schedule_repairs",
            "Machines whose schedule the sweeper rewrote",
            &[],
            house.schedules_repaired.clone(),
        );
        book.add_process_metric(
            "sessions_expired",
            "Sessions closed at their deadline",
            &[],
            house.sessions_expired.clone(),
        );
        book.add_process_metric(
            "work_reclaimed",
            "Work items reclaimed from lost sessions",
            &[],
            house.work_freed.clone(),
        );
        book.add_process_metric(
            "rows_deleted",
            "Old rows that were deleted",
            &[Label::one_of("table", RetainedKind::ALL.map(RetainedKind::table))],
            house.rows_deleted.clone(),
        );
        book.add_database_metric(
            "bmdb_dead_rows",
            "Dead rows that the database has not removed yet",
            &[Label::one_of("table", TABLES)],
            house.dead_rows.clone(),
        );
        book.add_database_metric(
            "bmdb_oldest_transaction_seconds",
            "Age of the oldest open transaction of the database",
            &[],
            house.oldest_transaction.clone(),
        );
        book.add_database_metric(
            "bmdb_oldest_snapshot_seconds",
            "Age of the oldest transaction that keeps dead rows from being removed",
            &[],
            house.oldest_snapshot.clone(),
        );
        house.database_limits.register(book);
    }

    /// The metrics of one loop.
    #[must_use]
    pub fn for_loop(&self, name: &'static str, process: Process) -> LoopMetrics {
        let metrics = LoopMetrics { name, process: process.as_str(), families: self.clone() };
        metrics.init_series();
        metrics
    }

    /// Counts a session that was started for a component that is no loop.
    pub(crate) fn record_session_start(&self, component: &'static str) {
        self.common.sessions_started.get_or_create(&ByComponent { component }).inc();
    }
}

/// The metrics of one loop.
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

    fn init_series(&self) {
        let families = &self.families;
        drop(families.active.get_or_create(&self.label()));
        drop(families.contended.get_or_create(&self.label()));
        drop(families.source_failed.get_or_create(&self.label()));
        drop(families.end.get_or_create(&self.label()));
        for result in WorkResult::ALL {
            drop(families.duration.get_or_create(&EndLabel { r#loop: self.name, result }));
        }
        for result in ClaimResult::ALL {
            drop(families.claim.get_or_create(&ClaimLabel { r#loop: self.name, result: result.as_str() }));
        }
    }

    pub(crate) fn record_session_start(&self) {
        self.families.record_session_start(self.name);
    }

    pub(crate) fn record_claim(&self, result: ClaimResult, took: Duration) {
        let label = ClaimLabel { r#loop: self.name, result: result.as_str() };
        self.families.claim.get_or_create(&label).observe(took.as_secs_f64());
    }

    pub(crate) fn record_wait(&self, waited: Duration) {
        let process = ByProcess { process: self.process };
        self.families.wait.get_or_create(&process).observe(waited.as_secs_f64());
    }

    pub(crate) fn record_end_write(&self, took: Duration) {
        self.families.end.get_or_create(&self.label()).observe(took.as_secs_f64());
    }

    pub(crate) fn record_claimed(&self, count: usize) {
        let process = ByProcess { process: self.process };
        self.families.common.work_started.get_or_create(&process).inc_by(count as u64);
        self.families.active.get_or_create(&self.label()).inc_by(i64::try_from(count).unwrap_or(i64::MAX));
    }

    pub(crate) fn record_contended(&self) {
        self.families.contended.get_or_create(&self.label()).inc();
    }

    pub(crate) fn record_source_failure(&self) {
        self.families.source_failed.get_or_create(&self.label()).inc();
    }

    pub(crate) fn record_end(&self, result: WorkResult, took: Duration) {
        self.families.active.get_or_create(&self.label()).dec();
        let ended = ByProcessAndResult { process: self.process, result: result.as_str() };
        self.families.common.work_finished.get_or_create(&ended).inc();
        let label = EndLabel { r#loop: self.name, result };
        self.families.duration.get_or_create(&label).observe(took.as_secs_f64());
    }
}
