//! The providers of one shepherd, by name, each with its breaker.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::bmdb::metrics::Metrics;
use crate::manager::breakers::{Admission, BreakerMetrics, ProviderBreaker};
use crate::model::breaker::Open;
use crate::providers::provider::Provider;

/// A provider, and the breaker that stands before it.
type Guarded = (Arc<dyn Provider>, ProviderBreaker);
/// A provider, and leave to ask it.
pub type Admitted = (Arc<dyn Provider>, Admission);

/// Configured providers; cheap to clone.
#[derive(Clone, Default)]
pub struct ProviderSet {
    by_name: Arc<BTreeMap<String, Guarded>>,
    metrics: BreakerMetrics,
}

impl ProviderSet {
    /// A set of these. Of two with one name the later counts; configuration refuses that before.
    #[must_use]
    pub fn new(providers: Vec<Arc<dyn Provider>>) -> Self {
        let metrics = BreakerMetrics::default();
        let with_breaker = |provider: Arc<dyn Provider>| {
            let name = provider.name().as_str().to_owned();
            let breaker = ProviderBreaker::new(&name, metrics.clone());
            (name, (provider, breaker))
        };
        Self { by_name: Arc::new(providers.into_iter().map(with_breaker).collect()), metrics }
    }

    /// Shows what is counted of their breakers.
    pub fn register(&self, common: &Metrics) {
        self.metrics.register(common);
    }

    /// The provider of that name and leave to ask it; `None` when it is not configured here.
    pub fn admit(&self, name: &str) -> Result<Option<Admitted>, Open> {
        let Some((provider, breaker)) = self.by_name.get(name) else { return Ok(None) };
        Ok(Some((provider.clone(), breaker.admit()?)))
    }

    /// Every name, sorted.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.by_name.keys().cloned().collect()
    }

    /// Every provider, and its breaker.
    pub fn iter(&self) -> impl Iterator<Item = &Guarded> {
        self.by_name.values()
    }
}
