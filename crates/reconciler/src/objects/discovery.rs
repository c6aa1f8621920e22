//! API discovery: which kinds the API server serves.
//!
//! It runs in the first pass, when the configuration has changed, and in every 120th pass (once an hour if nothing
//! changes), because others may add and remove kinds. In other passes only the kinds of add-ons that were not found
//! before are looked up.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::objects::api_client::{ApiClient, ApiError};
use crate::objects::object_kind::ObjectKind;

/// The kinds that one server serves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApiDiscovery {
    /// By API version and kind.
    kinds: BTreeMap<(String, String), ObjectKind>,
    /// Each kind once, in the version that the server prefers. Only kinds whose objects can be listed and deleted.
    preferred: Vec<ObjectKind>,
    /// API versions that could not be discovered, with the error.
    pub failed_versions: Vec<(String, String)>,
}

impl ApiDiscovery {
    /// Discovers all API versions of a server.
    pub async fn fetch(api: &ApiClient) -> Result<Self, ApiError> {
        let mut served = Self::default();
        served.fetch_version(api, "v1").await?;
        let groups = api.get_path("/apis").await?;
        let groups = groups.get("groups").and_then(Value::as_array).cloned().unwrap_or_default();
        for group in groups {
            if let Some(version) = group.pointer("/preferredVersion/groupVersion").and_then(Value::as_str) {
                match served.fetch_version(api, version).await {
                    Ok(()) => {}
                    // An aggregated API whose server does not answer. The rest is still discovered.
                    Err(ApiError::Rejected(status)) => {
                        served.failed_versions.push((version.to_owned(), status.message));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        served.preferred = served.kinds.values().cloned().collect();
        Ok(served)
    }

    /// Discovers API versions that were not discovered yet, and repeats those that lack a desired kind.
    pub async fn fetch_missing(
        &mut self,
        api: &ApiClient,
        wanted: &BTreeSet<(String, String)>,
    ) -> Result<(), ApiError> {
        let lacking = wanted.iter().filter(|kind| !self.kinds.contains_key(*kind));
        let versions: BTreeSet<String> = lacking.map(|(version, _)| version.clone()).collect();
        for version in versions {
            match self.fetch_version(api, &version).await {
                // The version is not served. Objects that need it become problems.
                Ok(()) | Err(ApiError::Rejected(_) | ApiError::NotSent(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn fetch_version(&mut self, api: &ApiClient, api_version: &str) -> Result<(), ApiError> {
        let root = if api_version.contains('/') { "/apis" } else { "/api" };
        self.add_resources(api_version, &api.get_path(&format!("{root}/{api_version}")).await?);
        Ok(())
    }

    /// Adds the resources of one API version.
    fn add_resources(&mut self, api_version: &str, list: &Value) {
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        for resource in list.get("resources").and_then(Value::as_array).into_iter().flatten() {
            let text = |field: &str| resource.get(field).and_then(Value::as_str).unwrap_or_default();
            let (plural, name) = (text("name"), text("kind"));
            let verbs: Vec<&str> = resource
                .get("verbs")
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .collect();
            let can = |verb: &str| verbs.contains(&verb);
            // A name with a slash is a subresource.
            if plural.is_empty() || name.is_empty() || plural.contains('/') || !(can("list") && can("delete"))
            {
                continue;
            }
            let kind = ObjectKind {
                group: group.to_owned(),
                version: version.to_owned(),
                kind: name.to_owned(),
                plural: plural.to_owned(),
                namespaced: resource.get("namespaced").and_then(Value::as_bool).unwrap_or_default(),
            };
            self.kinds.insert((api_version.to_owned(), name.to_owned()), kind);
        }
    }

    /// Finds a kind by the API version and kind of an object.
    #[must_use]
    pub fn find(&self, api_version: &str, kind: &str) -> Option<&ObjectKind> {
        self.kinds.get(&(api_version.to_owned(), kind.to_owned()))
    }

    /// Every kind that may have objects of ours, each in one version.
    #[must_use]
    pub fn preferred_kinds(&self) -> &[ObjectKind] {
        &self.preferred
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn kinds_are_those_with_list_and_delete() {
        let mut served = ApiDiscovery::default();
        served.add_resources(
            "apps/v1",
            &json!({"resources": [
                {"name": "deployments", "kind": "Deployment", "namespaced": true, "verbs": ["list", "delete", "get"]},
                {"name": "deployments/status", "kind": "Deployment", "namespaced": true, "verbs": ["list", "delete"]},
                {"name": "reviews", "kind": "Review", "verbs": ["create"]},
                {"kind": "Nameless", "verbs": ["list", "delete"]},
                {},
            ]}),
        );
        let found = served.find("apps/v1", "Deployment").unwrap();
        assert_eq!((found.plural.as_str(), found.namespaced), ("deployments", true));
        assert_eq!(found.api_version(), "apps/v1");
        assert_eq!(served.kinds.len(), 1);
        assert_eq!(served.find("apps/v2", "Deployment"), None);
    }
}
