//! Metrics of the limits of the database server.
//!
//! A replication slot is no label: anybody who may create one names it. So the slots are counted, and the largest value is
//! shown.

use prometheus_client::metrics::gauge::Gauge;

use crate::bmdb::metrics::registry::MetricRegistry;
use crate::model::byte_size::ByteSize;
use crate::model::database_limits::{DatabaseLimits, SlotWal};

/// How close the database server is to its limits, as it was last read.
#[derive(Clone, Debug, Default)]
pub struct DatabaseLimitMetrics {
    transaction_age: Gauge,
    multixact_age: Gauge,
    wal_bytes: Gauge,
    slot_bytes: Gauge,
    slots_in_danger: Gauge,
    archiving_fails: Gauge,
}

impl DatabaseLimitMetrics {
    /// Shows these limits from now on.
    pub fn record(&self, limits: &DatabaseLimits) {
        let bytes = |size: Option<ByteSize>| as_gauge(size.unwrap_or_default().0);
        self.transaction_age.set(as_gauge(limits.transactions.age));
        self.multixact_age.set(as_gauge(limits.multixacts.age));
        self.wal_bytes.set(bytes(limits.wal));
        self.slot_bytes.set(bytes(limits.slots.iter().filter_map(|slot| slot.retained).max()));
        let in_danger = limits.slots.iter().filter(|slot| slot.wal != SlotWal::Reserved).count();
        self.slots_in_danger.set(as_gauge(in_danger as u64));
        self.archiving_fails.set(i64::from(limits.is_archiving_failing));
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
        ];
        for (name, help, gauge) in families {
            book.add_database_metric(name, help, &[], gauge.clone());
        }
    }
}

fn as_gauge(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
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
            ..DatabaseLimits::default()
        };
        metrics.record(&limits);
        let values = [
            &metrics.transaction_age,
            &metrics.wal_bytes,
            &metrics.slot_bytes,
            &metrics.slots_in_danger,
            &metrics.archiving_fails,
        ];
        assert_eq!(values.map(Gauge::get), [7, 0, 9, 2, 1]);
        metrics.record(&DatabaseLimits::default());
        assert_eq!(values.map(Gauge::get), [0; 5]);
    }
}
