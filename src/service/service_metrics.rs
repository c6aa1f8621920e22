//! Registers all metrics of the service in one registry.

use crate::bmdb::connection::Bmdb;
use crate::bmdb::metrics::Metrics;
use crate::manager::metrics::ManagerMetrics;
use crate::manager::provider_set::ProviderSet;
use crate::service::traces::SpanCounts;

/// Registers everything that a service counts. `docs/metrics.md` is generated from this.
#[must_use]
pub fn register_service_metrics(
    counted: &Metrics,
    bmdb: &Bmdb,
    providers: &ProviderSet,
    spans: &SpanCounts,
) -> ManagerMetrics {
    bmdb.register_metrics(counted);
    let metrics = ManagerMetrics::register(counted);
    providers.register(counted);
    spans.register(counted);
    metrics
}
