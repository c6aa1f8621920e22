//! Watch cache: whether changes by others need another pass.
//!
//! A change needs another pass if the pass would act on it: see [`Expectation::needs_action`]. Our own writes do not,
//! because their result is as desired. But the event of a write may arrive before the write's response, or long after
//! it, when the object may have changed again. So nothing is evaluated during a pass, and an event is dropped if its
//! version is not newer than one that a pass has seen or written. Versions are etcd's revisions and grow; an event
//! whose version is no number is always evaluated.
//!
//! # Memory
//!
//! The cache has what the last pass desired, and of each object at most one event that is not evaluated yet. An event
//! that needs no pass is dropped when it is evaluated. The `reflector` of `kube` would have a copy of every object with
//! our label as long as its kind is watched, including all objects of add-ons. Nothing would read these copies: a pass
//! lists what it compares ([`object_watches`](crate::objects::object_watches)).

use std::collections::BTreeMap;

use serde_json::Value;

use crate::objects::object_kind::{ObjectKey, ResourceType, resource_version};
use crate::objects::object_plan::Expectation;

/// The state of all watched kinds.
#[derive(Debug, Default)]
pub(super) struct WatchCache {
    kinds: BTreeMap<ResourceType, KindCache>,
    is_reconciling: bool,
}

#[derive(Debug, Default)]
struct KindCache {
    expectation: Expectation,
    /// The resource version of the last pass's list.
    listed_version: u64,
    /// The versions that the last pass wrote.
    written_versions: BTreeMap<ObjectKey, u64>,
    /// Events that arrived since and are not evaluated yet; the last one of each object.
    pending: BTreeMap<ObjectKey, (u64, Option<Value>)>,
    /// Events may have been missed.
    is_incomplete: bool,
}

impl WatchCache {
    /// Starts a pass. It sees every change up to now.
    pub(super) fn begin_pass(&mut self) {
        self.is_reconciling = true;
        for seen in self.kinds.values_mut() {
            seen.pending.clear();
            seen.is_incomplete = false;
        }
    }

    /// Ends a pass, whether it succeeded or not.
    pub(super) fn end_pass(&mut self) {
        self.is_reconciling = false;
    }

    /// Records the list and the writes of a pass for one kind.
    pub(super) fn record_pass(
        &mut self,
        resource: &ResourceType,
        listed: &str,
        expectation: Expectation,
        wrote: BTreeMap<ObjectKey, u64>,
    ) {
        let seen = self.kinds.entry(resource.clone()).or_default();
        (seen.expectation, seen.listed_version, seen.written_versions) =
            (expectation, parse_version(listed).unwrap_or_default(), wrote);
    }

    /// The expectation of the last pass for a kind.
    #[must_use]
    pub(super) fn expectation(&self, resource: &ResourceType) -> Option<&Expectation> {
        self.kinds.get(resource).map(|seen| &seen.expectation)
    }

    /// Drops all other kinds, which are not watched any more.
    pub(super) fn retain_kinds(&mut self, followed: impl Fn(&ResourceType) -> bool) {
        self.kinds.retain(|resource, _| followed(resource));
    }

    /// Records an event: the object is in this state, or is gone; then it is the last state.
    pub(super) fn observe_object(&mut self, resource: &ResourceType, object: Value, is_there: bool) {
        let version = parse_version(resource_version(&object)).unwrap_or(u64::MAX);
        let seen = self.kinds.entry(resource.clone()).or_default();
        seen.pending.insert(ObjectKey::from_object(&object), (version, is_there.then_some(object)));
    }

    /// Records that events of a kind may have been missed.
    pub(super) fn mark_incomplete(&mut self, resource: &ResourceType) {
        self.kinds.entry(resource.clone()).or_default().is_incomplete = true;
    }

    /// Whether there is something for a pass to do. Events that need none are dropped.
    pub(super) fn has_changes(&mut self) -> bool {
        if self.is_reconciling {
            return false;
        }
        let mut news = false;
        for KindCache {
            expectation,
            listed_version: listed,
            written_versions: wrote,
            pending: reports,
            is_incomplete: missed,
        } in self.kinds.values_mut()
        {
            reports.retain(|key, (version, object)| {
                let known = wrote.get(key).map_or(*listed, |wrote| (*wrote).max(*listed));
                *version > known && expectation.needs_action(key, object.as_ref())
            });
            news |= *missed || !reports.is_empty();
        }
        news
    }
}

/// Parses a resource version as a number.
#[must_use]
pub(super) fn parse_version(version: &str) -> Option<u64> {
    version.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;
    use crate::objects::object_kind::{MANAGED_BUILT_IN, MANAGED_LABEL};
    use crate::objects::object_plan::DesiredObject;

    fn object(name: &str, value: i64, version: u64) -> Value {
        json!({"metadata": {"name": name, "labels": {MANAGED_LABEL: MANAGED_BUILT_IN}, "uid": "u", "resourceVersion": version.to_string()},
            "value": value})
    }

    fn resource() -> ResourceType {
        ResourceType { group: String::new(), plural: "things".to_owned() }
    }

    fn key(name: &str) -> ObjectKey {
        ObjectKey { namespace: None, name: name.to_owned() }
    }

    /// A pass that listed at 10, wrote `a` at 12, and wants `a` and `b`.
    fn after_a_pass(sight: &mut WatchCache) {
        let wanted = ["a", "b"].map(|name| {
            let mut object = object(name, 1, 0);
            object["metadata"]
                .as_object_mut()
                .unwrap()
                .retain(|field, _| field == "name" || field == "labels");
            (key(name), DesiredObject::BuiltIn(object))
        });
        let expectation = Expectation::new(wanted.into(), BTreeSet::new(), None);
        sight.record_pass(&resource(), "10", expectation, BTreeMap::from([(key("a"), 12)]));
        sight.end_pass();
    }

    #[test]
    fn own_writes_are_never_changes() {
        for before in [true, false] {
            let mut sight = WatchCache::default();
            sight.begin_pass();
            if before {
                sight.observe_object(&resource(), object("a", 1, 12), true);
                assert!(!sight.has_changes(), "nothing is judged before it is known what was written");
            }
            after_a_pass(&mut sight);
            if !before {
                sight.observe_object(&resource(), object("a", 1, 12), true);
            }
            assert!(!sight.has_changes());
        }
    }

    #[test]
    fn events_older_than_the_last_pass_are_ignored() {
        let mut sight = WatchCache::default();
        sight.begin_pass();
        after_a_pass(&mut sight);
        // Its value differed, it was deleted and created again, and is as desired since then.
        sight.observe_object(&resource(), object("a", 7, 9), true);
        assert!(!sight.has_changes());
        sight.observe_object(&resource(), object("a", 7, 11), false);
        assert!(!sight.has_changes());
        sight.observe_object(&resource(), object("b", 7, 10), true);
        assert!(!sight.has_changes());
    }

    #[test]
    fn changes_by_others_count_until_a_pass_begins() {
        for (value, is_there, expected) in [
            (object("a", 7, 13), true, true),
            (object("b", 7, 11), true, true),
            (object("a", 1, 13), false, true),
            (object("stray", 1, 13), true, true),
            (object("stray", 1, 13), false, false),
            (object("a", 1, 13), true, false),
        ] {
            let mut sight = WatchCache::default();
            sight.begin_pass();
            after_a_pass(&mut sight);
            sight.observe_object(&resource(), value.clone(), is_there);
            assert_eq!(sight.has_changes(), expected, "{value} {is_there}");
            assert_eq!(sight.has_changes(), expected, "asking changes nothing");
            sight.begin_pass();
            sight.end_pass();
            assert!(!sight.has_changes(), "the pass has seen it");
        }
    }

    #[test]
    fn reverted_change_no_longer_counts() {
        let mut sight = WatchCache::default();
        sight.begin_pass();
        after_a_pass(&mut sight);
        sight.observe_object(&resource(), object("a", 7, 13), true);
        sight.observe_object(&resource(), object("a", 1, 14), true);
        assert!(!sight.has_changes());
    }

    #[test]
    fn missed_events_count_and_unwatched_kinds_do_not() {
        let mut sight = WatchCache::default();
        sight.begin_pass();
        after_a_pass(&mut sight);
        sight.mark_incomplete(&resource());
        assert!(sight.has_changes());
        sight.retain_kinds(|_| false);
        assert!(!sight.has_changes());
    }

    #[test]
    fn non_numeric_version_is_evaluated() {
        let mut sight = WatchCache::default();
        sight.begin_pass();
        after_a_pass(&mut sight);
        let mut odd = object("a", 7, 0);
        odd["metadata"]["resourceVersion"] = json!("odd");
        sight.observe_object(&resource(), odd, true);
        assert!(sight.has_changes());
    }
}
