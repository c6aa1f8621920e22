//! The one book of a service: everything that its rooms count, entered in one place.

use crate::bmdb::connection::Bmdb;
use crate::bmdb::metrics::Metrics;
use crate::manager::metrics::ManagerMetrics;
use crate::manager::provider_set::ProviderSet;
use crate::service::traces::SpanCounts;

/// Enters into one book all that a service counts: what `docs/metrics.md` is written from.
#[must_use]
pub fn register_everything(
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
