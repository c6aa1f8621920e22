//! How many connections the common pool has, read when it is asked.

use std::fmt;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::Gauge;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::metric_book::Label;
use crate::bmdb::metrics::Metrics;

/// Connections by what they do.
#[derive(Debug)]
struct PoolUse(Bmdb);

impl EncodeMetric for PoolUse {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let (idle, used) = self.0.pool_use();
        for (state, count) in [("idle", idle), ("used", used)] {
            encoder.encode_family(&[("state", state)])?.encode_gauge(&count)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Gauge
    }
}

impl Bmdb {
    /// Enters what is counted of this handle and its clones, and how its pool is used.
    pub fn register_metrics(&self, metrics: &Metrics) {
        self.metrics().register(metrics);
        let most: Gauge = Gauge::default();
        most.set(i64::from(self.settings().max_connections));
        metrics.register(|book| {
            book.add(
                "bmdb_pool_connections",
                "Connections to the BMDB in the common pool",
                &[Label::one_of("state", ["idle", "used"])],
                PoolUse(self.clone()),
            );
            book.add(
                "bmdb_pool_connections_limit",
                "Maximum number of connections of the common pool",
                &[],
                most,
            );
        });
    }
}
