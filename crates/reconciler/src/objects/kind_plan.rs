//! Plans which kinds a reconcile pass processes, and in which order. No I/O.
//!
//! A pass processes the kinds of the release first, in the order of their creation. Then come the other kinds of
//! add-ons, those that others depend on first. The last ones are kinds that are only searched for leftover objects:
//! objects of ours that are not declared any more. These are the kinds in which an earlier pass found some and, in a
//! full scan, all kinds that the server serves.

use std::collections::{BTreeMap, BTreeSet};

use crate::objects::add_ons::{AddOnManifests, AddOnObjects, kind_order};
use crate::objects::built_in::{BuiltInObject, built_in_kinds};
use crate::objects::cluster_config::ClusterConfig;
use crate::objects::discovery::ApiDiscovery;
use crate::objects::object_kind::{ObjectKey, ObjectKind, ResourceType};
use crate::objects::object_plan::DesiredObject;
use crate::objects::problem::Problem;

/// What a pass remembers for the next one.
#[derive(Clone, Debug, Default)]
pub(super) struct DiscoveryCache {
    /// The configuration of the last pass; `None` before the first.
    pub(super) config: Option<ClusterConfig>,
    pub(super) manifests: AddOnManifests,
    pub(super) discovery: ApiDiscovery,
    /// Kinds with objects of ours that are not declared any more.
    pub(super) leftover_kinds: BTreeMap<ResourceType, ObjectKind>,
    pub(super) passes_until_full_scan: u32,
}

/// The plan for one kind in one pass.
pub(super) struct KindPlan {
    pub(super) kind: ObjectKind,
    pub(super) desired: BTreeMap<ObjectKey, DesiredObject>,
    /// Add-ons whose desired state is unknown.
    pub(super) unreadable: BTreeSet<String>,
    /// Whether the release may have objects of this kind: then a failure makes the pass fail.
    pub(super) is_built_in: bool,
    /// Whether the kind is only searched for leftover objects.
    pub(super) is_scan_only: bool,
}

/// Plans the kinds of a pass. Also returns the problems of add-ons that need a person.
pub(super) fn plan_kinds(
    built_in: Vec<BuiltInObject>,
    cache: &DiscoveryCache,
    is_full_scan: bool,
) -> (Vec<KindPlan>, Vec<Problem>) {
    let mut release_objects: BTreeMap<ResourceType, BTreeMap<ObjectKey, DesiredObject>> = BTreeMap::new();
    for BuiltInObject { kind, object } in built_in {
        release_objects
            .entry(kind.resource())
            .or_default()
            .insert(ObjectKey::from_object(&object), DesiredObject::BuiltIn(object));
    }
    let is_taken = |resource: &ResourceType, key: &ObjectKey| {
        release_objects.get(resource).is_some_and(|objects| objects.contains_key(key))
    };
    let AddOnObjects { kinds: mut add_on_kinds, unreadable, problems } =
        cache.manifests.resolve_kinds(&cache.discovery, is_taken);
    let mut plans = Vec::new();
    for kind in built_in_kinds() {
        let resource = kind.resource();
        let mut desired = release_objects.remove(&resource).unwrap_or_default();
        desired.extend(add_on_kinds.remove(&resource).map(|(_, objects)| objects).unwrap_or_default());
        plans.push(KindPlan {
            kind,
            desired,
            unreadable: unreadable.clone(),
            is_built_in: true,
            is_scan_only: false,
        });
    }
    let plan = |kind: ObjectKind, desired, is_scan_only| KindPlan {
        kind,
        desired,
        unreadable: unreadable.clone(),
        is_built_in: false,
        is_scan_only,
    };
    let mut others: Vec<_> = add_on_kinds.into_values().collect();
    others.sort_by_key(|(kind, _)| kind_order(kind));
    plans.extend(others.into_iter().map(|(kind, desired)| plan(kind, desired, false)));
    let is_planned = |plans: &[KindPlan], kind: &ObjectKind| {
        plans.iter().any(|plan| plan.kind.resource() == kind.resource())
    };
    let scanned = if is_full_scan { cache.discovery.preferred_kinds() } else { &[] };
    for kind in cache.leftover_kinds.values().chain(scanned) {
        if !is_planned(&plans, kind) {
            plans.push(plan(kind.clone(), BTreeMap::new(), true));
        }
    }
    (plans, problems)
}
