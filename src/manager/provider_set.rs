//! The providers of one shepherd, by name.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::providers::provider::Provider;

/// Configured providers; cheap to clone.
#[derive(Clone, Default)]
pub struct ProviderSet {
    by_name: Arc<BTreeMap<String, Arc<dyn Provider>>>,
}

impl ProviderSet {
    /// A set of these. Of two with one name the later counts; configuration refuses that before.
    #[must_use]
    pub fn new(providers: Vec<Arc<dyn Provider>>) -> Self {
        let by_name =
            providers.into_iter().map(|provider| (provider.name().as_str().to_owned(), provider)).collect();
        Self { by_name: Arc::new(by_name) }
    }

    /// The provider of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Arc<dyn Provider>> {
        self.by_name.get(name)
    }

    /// Every name, sorted.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.by_name.keys().cloned().collect()
    }

    /// Every provider.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn Provider>> {
        self.by_name.values()
    }
}
