//! API discovery: which kinds the API server serves.
//!
//! It runs in the first pass, when the configuration has changed, and in every 120th pass (once an hour if nothing
//! changes), because others may add and remove kinds. In other passes only the kinds of add-ons that were not found
//! before are looked up.
//!
//! # What `kube` does
//!
//! `kube::discovery` reads one API version at a time (`pinned_group`). Which versions are read, and what becomes of a
//! version that cannot be read, is decided here. The two functions of `kube` (5.0) that discover a whole server are not
//! used:
//!
//! * `Discovery::run` ends with the first error. An aggregated API without an answer of its server would hide the kinds of
//!   all others, and the objects of add-ons with them. It also reads every version of a group, and only the preferred
//!   one is listed here.
//! * `Discovery::run_aggregated` needs two requests however many groups there are, but Kubernetes before 1.26 does not
//!   answer them. A server marks a group that does not answer as stale, and `run_aggregated` drops that mark.
//!
//! So discovery costs two requests, and one for each group.

use std::collections::{BTreeMap, BTreeSet};

use kube::core::GroupVersion;
use kube::discovery::{ApiCapabilities, ApiResource, Scope, pinned_group, verbs};

use crate::objects::api_client::{ApiClient, ApiError, request_error, with_timeout};
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
    /// Discovers the preferred version of each API group of a server.
    pub async fn fetch(api: &ApiClient) -> Result<Self, ApiError> {
        let mut served = Self::default();
        served.fetch_version(api, "v1").await?;
        let groups = with_timeout(api.0.list_api_groups()).await?.groups;
        for preferred in groups.into_iter().filter_map(|group| group.preferred_version) {
            let version = preferred.group_version;
            match served.fetch_version(api, &version).await {
                Ok(()) => {}
                // The server of an aggregated API does not answer, or answers something else. The rest is still
                // discovered.
                Err(error @ (ApiError::Rejected(_) | ApiError::Unreadable(_))) => {
                    served.failed_versions.push((version, error.to_string()));
                }
                Err(error) => return Err(error),
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
                Ok(()) | Err(ApiError::Rejected(_) | ApiError::Unreadable(_) | ApiError::NotSent(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn fetch_version(&mut self, api: &ApiClient, api_version: &str) -> Result<(), ApiError> {
        let version = api_version.parse::<GroupVersion>().map_err(|error| request_error(&error))?;
        let resources = with_timeout(pinned_group(&api.0, &version)).await?.recommended_resources();
        self.add_resources(&version, resources);
        Ok(())
    }

    /// Adds the resources of one API version.
    fn add_resources(&mut self, of: &GroupVersion, resources: Vec<(ApiResource, ApiCapabilities)>) {
        for (ApiResource { kind, plural, .. }, capabilities) in resources {
            let can = |verb: &str| capabilities.supports_operation(verb);
            if plural.is_empty() || kind.is_empty() || !(can(verbs::LIST) && can(verbs::DELETE)) {
                continue;
            }
            let key = (of.api_version(), kind.clone());
            let GroupVersion { group, version } = of.clone();
            let namespaced = capabilities.scope == Scope::Namespaced;
            self.kinds.insert(key, ObjectKind { group, version, kind, plural, namespaced });
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
    use super::*;

    fn resource(plural: &str, kind: &str, operations: &[&str]) -> (ApiResource, ApiCapabilities) {
        let gvk = GroupVersion::gv("apps", "v1").with_kind(kind);
        let operations = operations.iter().map(|verb| (*verb).to_owned()).collect();
        let capabilities = ApiCapabilities { scope: Scope::Namespaced, subresources: Vec::new(), operations };
        (ApiResource::from_gvk_with_plural(&gvk, plural), capabilities)
    }

    /// `kube` leaves out subresources: `tests/all/objects/discovery.rs` has a server that serves some.
    #[test]
    fn kinds_are_those_with_list_and_delete() {
        let mut served = ApiDiscovery::default();
        served.add_resources(
            &GroupVersion::gv("apps", "v1"),
            vec![
                resource("deployments", "Deployment", &["list", "delete", "get"]),
                resource("reviews", "Review", &["create"]),
                resource("", "Nameless", &["list", "delete"]),
                resource("", "", &[]),
            ],
        );
        let found = served.find("apps/v1", "Deployment").unwrap();
        assert_eq!((found.plural.as_str(), found.namespaced), ("deployments", true));
        assert_eq!(found.api_version(), "apps/v1");
        assert_eq!(served.kinds.len(), 1);
        assert_eq!(served.find("apps/v2", "Deployment"), None);
    }
}
