//! Configured providers with their circuit breakers.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::bmdb::metrics::Metrics;
use crate::manager::provider_breakers::{Admission, BreakerMetrics, ProviderBreaker};
use crate::model::circuit_breaker::BreakerOpen;
use crate::providers::provider::Provider;

/// A provider, and the breaker that guards it.
type GuardedProvider = (Arc<dyn Provider>, ProviderBreaker);
/// A provider, and permission to call it.
pub type AdmittedProvider = (Arc<dyn Provider>, Admission);

/// The configured providers by name. Cheap to clone.
#[derive(Clone, Default)]
pub struct ProviderSet {
    by_name: Arc<BTreeMap<String, GuardedProvider>>,
    metrics: BreakerMetrics,
}

impl ProviderSet {
    /// A set of these providers. Of two with one name, the later one is used; the configuration rejects duplicates
    /// before.
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

    /// Registers the metrics of their breakers.
    pub fn register(&self, common: &Metrics) {
        self.metrics.register(common);
    }

    /// The provider of that name and permission to call it. `None` if it is not configured here.
    pub fn admit(&self, name: &str) -> Result<Option<AdmittedProvider>, BreakerOpen> {
        let Some((provider, breaker)) = self.by_name.get(name) else { return Ok(None) };
        Ok(Some((provider.clone(), breaker.admit_call()?)))
    }

    /// The names of all providers, sorted.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.by_name.keys().cloned().collect()
    }

    /// Every provider with its breaker.
    pub fn iter(&self) -> impl Iterator<Item = &GuardedProvider> {
        self.by_name.values()
    }
}
