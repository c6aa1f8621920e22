//! Gauge of pool connections, idle and used.
//!
//! It is read from the pool whenever it is encoded.

use std::fmt;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::Gauge;

use crate::connection::Bmdb;
use crate::metric_registry::Label;
use crate::metrics::Metrics;

/// Connections of the common pool, by whether they are idle or in use.
#[derive(Debug)]
struct PoolConnectionsGauge(Bmdb);

impl EncodeMetric for PoolConnectionsGauge {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let (idle, used) = self.0.pool_usage();
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
    /// Registers the metrics of this handle and its clones, and the gauge of its pool.
    pub fn register_metrics(&self, metrics: &Metrics) {
        self.metrics().register(metrics);
        let most: Gauge = Gauge::default();
        most.set(i64::from(self.settings().max_connections));
        metrics.register(|book| {
            book.add_process_metric(
                "bmdb_pool_connections",
                "Connections to the BMDB in the common pool",
                &[Label::one_of("state", ["idle", "used"])],
                PoolConnectionsGauge(self.clone()),
            );
            book.add_process_metric(
                "bmdb_pool_connections_limit",
                "Maximum number of connections of the common pool",
                &[],
                most,
            );
        });
    }
}
