//! What the add-ons of a cluster want, kind by kind.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::reconciler::objects::kind::{Key, Kind, Resource};
use crate::reconciler::objects::manifest::{self, Declared};
use crate::reconciler::objects::plan::Wanted;
use crate::reconciler::objects::served::Served;
use crate::reconciler::objects::trouble::{Subject, Trouble};
use crate::reconciler::objects::wishes::AddOn;

/// Where an object goes that is to be in a namespace and does not say in which: where kubectl would put it.
const DEFAULT_NAMESPACE: &str = "default";
/// What others need before they can be made, in this order; all else comes after it.
const FIRST: [&str; 2] = ["Namespace", "CustomResourceDefinition"];

/// The manifests of a cluster, read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Manifests {
    read: Vec<(String, Vec<Declared>)>,
    unread: BTreeSet<String>,
    troubles: Vec<Trouble>,
}

/// What add-ons want of the kinds that a server serves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Asked {
    /// By what is listed once; each with the version of the first object of it.
    pub kinds: BTreeMap<Resource, (Kind, BTreeMap<Key, Wanted>)>,
    /// Add-ons of which something is not known: nothing that they made is deleted.
    pub unread: BTreeSet<String>,
    /// What cannot be done.
    pub troubles: Vec<Trouble>,
}

impl Manifests {
    /// Reads them all.
    #[must_use]
    pub fn read(add_ons: &[AddOn]) -> Self {
        let mut manifests = Self::default();
        let mut names = BTreeSet::new();
        for add_on in add_ons {
            let name = add_on.name.clone();
            let read = if names.insert(name.clone()) {
                manifest::read(add_on)
            } else {
                Err("it is declared twice".to_owned())
            };
            match read {
                Ok(declared) => manifests.read.push((name, declared)),
                Err(why) => {
                    let remedy = "correct it; until then what it has made stays as it is".to_owned();
                    manifests.troubles.push(Trouble { subject: Subject::AddOn(name.clone()), why, remedy });
                    manifests.unread.insert(name);
                }
            }
        }
        manifests
    }

    /// The kinds that they speak of, as their objects call them.
    #[must_use]
    pub fn kinds(&self) -> BTreeSet<(String, String)> {
        let declared = self.read.iter().flat_map(|(_, declared)| declared);
        declared.map(|object| (object.api_version.clone(), object.kind.clone())).collect()
    }

    /// Finds out where their objects are. `taken` says what belongs to the release.
    #[must_use]
    pub fn ask(&self, served: &Served, taken: impl Fn(&Resource, &Key) -> bool) -> Asked {
        let mut asked =
            Asked { unread: self.unread.clone(), troubles: self.troubles.clone(), ..Asked::default() };
        for (add_on, declared) in &self.read {
            for object in declared {
                if let Err(trouble) = ask_for(&mut asked, add_on, object, served, &taken) {
                    asked.troubles.push(*trouble);
                }
            }
        }
        asked
    }
}

fn ask_for(
    asked: &mut Asked,
    add_on: &str,
    declared: &Declared,
    served: &Served,
    taken: impl Fn(&Resource, &Key) -> bool,
) -> Result<(), Box<Trouble>> {
    let Declared { api_version, kind, name, .. } = declared;
    let Some(kind) = served.find(api_version, kind) else {
        return Err(Box::new(Trouble {
            subject: Subject::AddOn(add_on.to_owned()),
            why: format!("this cluster has no kind {kind} of {api_version}, of which it declares {name}"),
            remedy: "declare what brings the kind, or wait until it has".to_owned(),
        }));
    };
    let namespace =
        kind.namespaced.then(|| declared.namespace.clone().unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned()));
    let key = Key { namespace, name: name.clone() };
    let (resource, object) = (kind.resource(), placed(&declared.object, key.namespace.as_deref()));
    let (_, wanted) = asked.kinds.entry(resource.clone()).or_insert_with(|| (kind.clone(), BTreeMap::new()));
    if taken(&resource, &key) || wanted.contains_key(&key) {
        return Err(Box::new(Trouble {
            subject: Subject::object(Some(add_on), &resource, &key),
            why: "it belongs to the release, or to another add-on".to_owned(),
            remedy: "take it out of the manifest, or give it another name".to_owned(),
        }));
    }
    let (add_on, kind, digest) = (add_on.to_owned(), kind.clone(), declared.digest.clone());
    wanted.insert(key, Wanted::Applied { add_on, kind, object, digest });
    Ok(())
}

/// An object in the namespace that it belongs into.
fn placed(object: &Value, namespace: Option<&str>) -> Value {
    let mut object = object.clone();
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        match namespace {
            Some(namespace) => drop(metadata.insert("namespace".to_owned(), json!(namespace))),
            None => drop(metadata.remove("namespace")),
        }
    }
    object
}

/// The order in which kinds are looked at.
#[must_use]
pub fn rank(kind: &Kind) -> usize {
    FIRST.iter().position(|first| *first == kind.kind).unwrap_or(FIRST.len())
}
