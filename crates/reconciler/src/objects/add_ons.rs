//! Resolves the objects of add-ons to the kinds that the API server serves.
//!
//! A manifest names the kind of an object, and only the server knows how objects of that kind are addressed: its plural
//! name, and whether it is namespaced. An object whose kind the server does not serve becomes a problem, and so does an
//! object that the release or another add-on has as well.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::objects::add_on_manifest::{self, ManifestObject};
use crate::objects::cluster_config::AddOn;
use crate::objects::discovery::ApiDiscovery;
use crate::objects::object_kind::{ObjectKey, ObjectKind, ResourceType};
use crate::objects::object_plan::DesiredObject;
use crate::objects::problem::{Problem, ProblemSubject};

/// The namespace of namespaced objects that name none, as kubectl would choose it.
const DEFAULT_NAMESPACE: &str = "default";
/// Kinds that others depend on, in the order of creation. All other kinds come after them.
const PREREQUISITE_KINDS: [&str; 2] = ["Namespace", "CustomResourceDefinition"];

/// The parsed manifests of a cluster's add-ons.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct AddOnManifests {
    parsed: Vec<(String, Vec<ManifestObject>)>,
    unreadable: BTreeSet<String>,
    problems: Vec<Problem>,
}

/// The desired objects of add-ons, by the kinds that a server serves.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct AddOnObjects {
    /// By listable type, each with the version that its first object uses.
    pub(super) kinds: BTreeMap<ResourceType, (ObjectKind, BTreeMap<ObjectKey, DesiredObject>)>,
    /// Add-ons with an unknown part: nothing that they created is deleted.
    pub(super) unreadable: BTreeSet<String>,
    pub(super) problems: Vec<Problem>,
}

impl AddOnManifests {
    #[must_use]
    pub(super) fn parse(add_ons: &[AddOn]) -> Self {
        let mut manifests = Self::default();
        let mut names = BTreeSet::new();
        for add_on in add_ons {
            let name = add_on.name.clone();
            let read = if names.insert(name.clone()) {
                add_on_manifest::parse_manifest(add_on)
            } else {
                Err("it is declared twice".to_owned())
            };
            match read {
                Ok(declared) => manifests.parsed.push((name, declared)),
                Err(why) => {
                    let remedy = "correct it; until then what it has made stays as it is".to_owned();
                    manifests.problems.push(Problem {
                        subject: ProblemSubject::AddOn(name.clone()),
                        reason: why,
                        remedy,
                    });
                    manifests.unreadable.insert(name);
                }
            }
        }
        manifests
    }

    /// The kinds of all their objects, as API version and kind.
    #[must_use]
    pub(super) fn kinds(&self) -> BTreeSet<(String, String)> {
        let declared = self.parsed.iter().flat_map(|(_, declared)| declared);
        declared.map(|object| (object.api_version.clone(), object.kind.clone())).collect()
    }

    /// Resolves their objects to served kinds. `taken` returns whether an object belongs to the release.
    #[must_use]
    pub(super) fn resolve_kinds(
        &self,
        served: &ApiDiscovery,
        taken: impl Fn(&ResourceType, &ObjectKey) -> bool,
    ) -> AddOnObjects {
        let mut objects = AddOnObjects {
            unreadable: self.unreadable.clone(),
            problems: self.problems.clone(),
            ..AddOnObjects::default()
        };
        for (add_on, declared) in &self.parsed {
            for object in declared {
                if let Err(problem) = resolve_object(&mut objects, add_on, object, served, &taken) {
                    objects.problems.push(*problem);
                }
            }
        }
        objects
    }
}

fn resolve_object(
    objects: &mut AddOnObjects,
    add_on: &str,
    declared: &ManifestObject,
    served: &ApiDiscovery,
    taken: impl Fn(&ResourceType, &ObjectKey) -> bool,
) -> Result<(), Box<Problem>> {
    let ManifestObject { api_version, kind, name, .. } = declared;
    let Some(kind) = served.find(api_version, kind) else {
        return Err(Box::new(Problem {
            subject: ProblemSubject::AddOn(add_on.to_owned()),
            reason: format!("this cluster has no kind {kind} of {api_version}, of which it declares {name}"),
            remedy: "declare what brings the kind, or wait until it has".to_owned(),
        }));
    };
    let namespace =
        kind.namespaced.then(|| declared.namespace.clone().unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned()));
    let key = ObjectKey { namespace, name: name.clone() };
    let (resource, object) = (kind.resource(), with_namespace(&declared.object, key.namespace.as_deref()));
    let (_, wanted) =
        objects.kinds.entry(resource.clone()).or_insert_with(|| (kind.clone(), BTreeMap::new()));
    if taken(&resource, &key) || wanted.contains_key(&key) {
        return Err(Box::new(Problem {
            subject: ProblemSubject::for_object(Some(add_on), &resource, &key),
            reason: "it belongs to the release, or to another add-on".to_owned(),
            remedy: "take it out of the manifest, or give it another name".to_owned(),
        }));
    }
    let (add_on, kind, digest) = (add_on.to_owned(), kind.clone(), declared.digest.clone());
    wanted.insert(key, DesiredObject::Applied { add_on, kind, object, digest });
    Ok(())
}

/// A copy of the object in its namespace; without one for a kind that is not namespaced.
fn with_namespace(object: &Value, namespace: Option<&str>) -> Value {
    let mut object = object.clone();
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        match namespace {
            Some(namespace) => drop(metadata.insert("namespace".to_owned(), json!(namespace))),
            None => drop(metadata.remove("namespace")),
        }
    }
    object
}

/// The position of a kind in the order of processing.
#[must_use]
pub(super) fn kind_order(kind: &ObjectKind) -> usize {
    PREREQUISITE_KINDS.iter().position(|first| *first == kind.kind).unwrap_or(PREREQUISITE_KINDS.len())
}
