//! Problems that need a person: name conflicts, unreadable manifests.
//!
//! None of them ends a pass or makes it fail. Otherwise a name that is taken, or a manifest that cannot be read, would
//! hold up every controller of the cluster behind the gate, for something that only a person can change. They are
//! reported as long as they last.

use std::fmt;

use crate::objects::object_kind::{ObjectKey, ResourceType};

/// The subject of a problem.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProblemSubject {
    /// An object that belongs to the release.
    BuiltIn(ResourceType, ObjectKey),
    /// An object of an add-on.
    AddOnObject(String, ResourceType, ObjectKey),
    /// An add-on as a whole.
    AddOn(String),
    /// All objects of a kind.
    Kind(ResourceType),
}

/// A problem that blocks an object until a person acts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The object, add-on or kind concerned.
    pub subject: ProblemSubject,
    /// What is wrong, as the end of a sentence.
    pub reason: String,
    /// The remedy, as text for people.
    pub remedy: String,
}

impl fmt::Display for ProblemSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BuiltIn(resource, key) => write!(f, "{resource} {key}"),
            Self::AddOnObject(add_on, resource, key) => write!(f, "{resource} {key} of the add-on {add_on}"),
            Self::AddOn(add_on) => write!(f, "the add-on {add_on}"),
            Self::Kind(resource) => write!(f, "all {resource}"),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { subject, reason: why, remedy } = self;
        write!(f, "{subject}: {why}; {remedy}")
    }
}

impl Problem {
    /// A failure that may pass with the next attempt.
    #[must_use]
    pub fn transient(subject: ProblemSubject, why: String) -> Self {
        Self { subject, reason: why, remedy: "it is tried again in the next pass".to_owned() }
    }

    /// The name of the object is taken by an object of another owner.
    #[must_use]
    pub fn name_conflict(add_on: Option<&str>, resource: &ResourceType, key: &ObjectKey) -> Self {
        let namespace = key.namespace.as_ref().map_or_else(String::new, |name| format!(" -n {name}"));
        let remedy = format!(
            "look at it with kubectl get {resource}{namespace} {name} -o yaml, keep what you need of it under another \
             name, and delete it: it is made within half a minute",
            name = key.name
        );
        Self {
            subject: ProblemSubject::for_object(add_on, resource, key),
            reason: "an object of this name was made by somebody else, and is left as it is".to_owned(),
            remedy,
        }
    }
}

impl ProblemSubject {
    /// The subject for an object of the release or of an add-on.
    #[must_use]
    pub fn for_object(add_on: Option<&str>, resource: &ResourceType, key: &ObjectKey) -> Self {
        match add_on {
            None => Self::BuiltIn(resource.clone(), key.clone()),
            Some(add_on) => Self::AddOnObject(add_on.to_owned(), resource.clone(), key.clone()),
        }
    }
}
