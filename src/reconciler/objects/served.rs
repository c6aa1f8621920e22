//! Which kinds a server serves.
//!
//! It is asked when there is something to find out, not in each pass: at first, when what is wished for changes, and now
//! and then, because others may bring kinds and take them away.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::reconciler::objects::kind::Kind;
use crate::reconciler::objects::kubernetes::{Api, AskError};

/// The kinds of one server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// By version of an API and name of a kind.
    kinds: BTreeMap<(String, String), Kind>,
    /// One version of each, that the server prefers; only kinds whose objects can be listed and deleted.
    preferred: Vec<Kind>,
    /// What could not be found out: which API, and why.
    pub unknown: Vec<(String, String)>,
}

impl Served {
    /// Asks for all of them.
    pub async fn ask(api: &Api) -> Result<Self, AskError> {
        let mut served = Self::default();
        served.add(api, "v1").await?;
        let groups = api.read("/apis").await?;
        let groups = groups.get("groups").and_then(Value::as_array).cloned().unwrap_or_default();
        for group in groups {
            if let Some(version) = group.pointer("/preferredVersion/groupVersion").and_then(Value::as_str) {
                match served.add(api, version).await {
                    Ok(()) => {}
                    // One that is served by somebody else who does not answer: the rest is known all the same.
                    Err(AskError::Refused(status)) => {
                        served.unknown.push((version.to_owned(), status.message));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        served.preferred = served.kinds.values().cloned().collect();
        Ok(served)
    }

    /// Asks for versions that were not asked for, and again for those that lack a kind.
    pub async fn ask_for(&mut self, api: &Api, wanted: &BTreeSet<(String, String)>) -> Result<(), AskError> {
        let lacking = wanted.iter().filter(|kind| !self.kinds.contains_key(*kind));
        let versions: BTreeSet<String> = lacking.map(|(version, _)| version.clone()).collect();
        for version in versions {
            match self.add(api, &version).await {
                // Nobody serves it; whoever needs it is told.
                Ok(()) | Err(AskError::Refused(_) | AskError::NotSent(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn add(&mut self, api: &Api, api_version: &str) -> Result<(), AskError> {
        let root = if api_version.contains('/') { "/apis" } else { "/api" };
        self.read(api_version, &api.read(&format!("{root}/{api_version}")).await?);
        Ok(())
    }

    /// Takes what a server says of one version.
    fn read(&mut self, api_version: &str, list: &Value) {
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
            // What has a slash is a part of another.
            if plural.is_empty() || name.is_empty() || plural.contains('/') || !(can("list") && can("delete"))
            {
                continue;
            }
            let kind = Kind {
                group: group.to_owned(),
                version: version.to_owned(),
                kind: name.to_owned(),
                plural: plural.to_owned(),
                namespaced: resource.get("namespaced").and_then(Value::as_bool).unwrap_or_default(),
            };
            self.kinds.insert((api_version.to_owned(), name.to_owned()), kind);
        }
    }

    /// A kind by what an object says of itself.
    #[must_use]
    pub fn find(&self, api_version: &str, kind: &str) -> Option<&Kind> {
        self.kinds.get(&(api_version.to_owned(), kind.to_owned()))
    }

    /// Every kind that may hold something of ours, each in one version.
    #[must_use]
    pub fn all(&self) -> &[Kind] {
        &self.preferred
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn kinds_are_those_whose_objects_can_be_found_and_deleted() {
        let mut served = Served::default();
        served.read(
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
