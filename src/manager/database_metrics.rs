//! Metrics of the limits of the database server.
//!
//! A replication slot is no label: anybody who may create one names it. So the slots are counted, and the largest value is
//! shown.
//!
//! What cannot be read has no value: a former one would start an alert that nobody can end, or prevent one.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::{EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;

use crate::bmdb::metrics::registry::MetricRegistry;
use crate::model::byte_size::ByteSize;
use crate::model::database_limits::{DatabaseLimits, SlotWal};

/// A gauge that is absent while its value is not known.
#[derive(Clone, Debug, Default)]
struct OptionalGauge(Arc<Mutex<Option<i64>>>);

impl OptionalGauge {
    fn get(&self) -> Option<i64> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, value: Option<u64>) {
        let value = value.map(|value| i64::try_from(value).unwrap_or(i64::MAX));
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = value;
    }
}

impl EncodeMetric for OptionalGauge {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        self.get().map_or(Ok(()), |value| encoder.encode_gauge(&value))
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }

    fn is_empty(&self) -> bool {
        self.get().is_none()
    }
}

/// How close the database server is to its limits, as it was last read.
#[derive(Clone, Debug, Default)]
pub struct DatabaseLimitMetrics {
    transaction_age: OptionalGauge,
    multixact_age: OptionalGauge,
    wal_bytes: OptionalGauge,
    slot_bytes: OptionalGauge,
    slots_in_danger: OptionalGauge,
    archiving_fails: OptionalGauge,
    database_bytes: OptionalGauge,
}

impl DatabaseLimitMetrics {
    /// Shows these limits from now on; `None` if they could not be read.
    pub fn record(&self, limits: Option<&DatabaseLimits>) {
        let slot_bytes = |limits: &DatabaseLimits| {
            limits.slots.iter().filter_map(|slot| slot.retained).max().unwrap_or_default().0
        };
        let in_danger = |limits: &DatabaseLimits| {
            limits.slots.iter().filter(|slot| slot.wal != SlotWal::Reserved).count() as u64
        };
        self.transaction_age.set(limits.map(|limits| limits.transactions.age));
        self.multixact_age.set(limits.map(|limits| limits.multixacts.age));
        self.wal_bytes.set(limits.and_then(shown_wal).map(|size| size.0));
        self.slot_bytes.set(limits.map(slot_bytes));
        self.slots_in_danger.set(limits.map(in_danger));
        self.archiving_fails.set(limits.map(|limits| u64::from(limits.is_archiving_failing)));
        self.database_bytes.set(limits.map(|limits| limits.database.0));
    }

    /// Registers all of them.
    pub(crate) fn register(&self, book: &mut MetricRegistry) {
        let families = [
            (
                "bmdb_transaction_id_age",
                "Age of the oldest transaction id of the database server; it accepts no more writes before 2^31",
                &self.transaction_age,
            ),
            (
                "bmdb_multixact_id_age",
                "Age of the oldest multixact id, with the same limit",
                &self.multixact_age,
            ),
            (
                "bmdb_wal_bytes",
                "Size of all WAL files of the database server; 0 if the role of the shepherd may not list them",
                &self.wal_bytes,
            ),
            (
                "bmdb_replication_slot_max_retained_bytes",
                "WAL that is retained for the replication slot that holds most",
                &self.slot_bytes,
            ),
            (
                "bmdb_replication_slots_losing_wal",
                "Replication slots that have lost WAL or lose it with the next checkpoint",
                &self.slots_in_danger,
            ),
            (
                "bmdb_archiving_fails",
                "1 while the last attempt of the database server to archive WAL is one that failed",
                &self.archiving_fails,
            ),
            (
                "bmdb_database_bytes",
                "Size of the database of the fleet with its indexes, without WAL; the free space of its disk cannot be read",
                &self.database_bytes,
            ),
        ];
        for (name, help, gauge) in families {
            book.add_database_metric(name, help, &[], gauge.clone());
        }
    }
}

/// The size of WAL as it is shown: 0 if the role may not list the files, and `None` if listing them failed.
fn shown_wal(limits: &DatabaseLimits) -> Option<ByteSize> {
    limits.wal.or_else(|| limits.wal_failure.is_none().then(ByteSize::default))
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::model::database_limits::{IdAge, ReplicationSlot};

    #[test]
    fn slots_are_counted_and_the_largest_is_shown() {
        let slot = |wal, retained: u64| ReplicationSlot {
            name: "s".to_owned(),
            is_active: true,
            wal,
            retained: (retained > 0).then_some(ByteSize(retained)),
            margin: None,
        };
        let metrics = DatabaseLimitMetrics::default();
        let limits = DatabaseLimits {
            transactions: IdAge { age: 7, ..IdAge::default() },
            slots: vec![slot(SlotWal::Reserved, 5), slot(SlotWal::Lost, 0), slot(SlotWal::Unreserved, 9)],
            is_archiving_failing: true,
            database: ByteSize(11),
            ..DatabaseLimits::default()
        };
        metrics.record(Some(&limits));
        let values = [
            &metrics.transaction_age,
            &metrics.wal_bytes,
            &metrics.slot_bytes,
            &metrics.slots_in_danger,
            &metrics.archiving_fails,
            &metrics.database_bytes,
        ];
        assert_eq!(values.map(OptionalGauge::get), [7, 0, 9, 2, 1, 11].map(Some));
        metrics.record(Some(&DatabaseLimits::default()));
        assert_eq!(values.map(OptionalGauge::get), [Some(0); 6]);
        let failed =
            DatabaseLimits { wal_failure: Some("timed out".to_owned()), ..DatabaseLimits::default() };
        metrics.record(Some(&failed));
        assert_eq!(values.map(OptionalGauge::get), [Some(0), None, Some(0), Some(0), Some(0), Some(0)]);
    }

    #[test]
    fn limits_that_are_not_known_have_no_metric() {
        let shown = |metrics: &DatabaseLimitMetrics| {
            let mut book = MetricRegistry::default();
            metrics.register(&mut book);
            book.encode_prometheus_text().unwrap()
        };
        let metrics = DatabaseLimitMetrics::default();
        assert!(!shown(&metrics).contains("archiving_fails"));
        metrics.record(Some(&DatabaseLimits { is_archiving_failing: true, ..DatabaseLimits::default() }));
        assert!(shown(&metrics).contains("bmdb_archiving_fails 1\n"), "{}", shown(&metrics));
        metrics.record(None);
        assert!(!shown(&metrics).contains("archiving_fails"));
    }
}
