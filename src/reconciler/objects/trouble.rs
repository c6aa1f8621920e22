//! What stands in the way of an object, and what a person does about it.
//!
//! None of this ends a pass, and none makes it fail: a name that is taken, or a manifest that nobody can read, would
//! otherwise hold up every controller of the cluster behind the gate, for something that only a person can change. It is
//! told instead, for as long as it is so.

use std::fmt;

use crate::reconciler::objects::kind::{Key, Resource};

/// What it is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// An object that belongs to the release.
    BuiltIn(Resource, Key),
    /// An object of an add-on.
    OfAddOn(String, Resource, Key),
    /// An add-on as a whole.
    AddOn(String),
    /// All objects of a kind.
    Kind(Resource),
}

/// What cannot be done before somebody did something else.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Trouble {
    /// What it is about.
    pub subject: Subject,
    /// What is wrong, as the end of a sentence.
    pub why: String,
    /// What to do.
    pub remedy: String,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BuiltIn(resource, key) => write!(f, "{resource} {key}"),
            Self::OfAddOn(add_on, resource, key) => write!(f, "{resource} {key} of the add-on {add_on}"),
            Self::AddOn(add_on) => write!(f, "the add-on {add_on}"),
            Self::Kind(resource) => write!(f, "all {resource}"),
        }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { subject, why, remedy } = self;
        write!(f, "{subject}: {why}; {remedy}")
    }
}

impl Trouble {
    /// What may do the next time, as it is.
    #[must_use]
    pub fn passing(subject: Subject, why: String) -> Self {
        Self { subject, why, remedy: "it is tried again in the next pass".to_owned() }
    }

    /// An object of this name is somebody else's.
    #[must_use]
    pub fn clash(add_on: Option<&str>, resource: &Resource, key: &Key) -> Self {
        let namespace = key.namespace.as_ref().map_or_else(String::new, |name| format!(" -n {name}"));
        let remedy = format!(
            "look at it with kubectl get {resource}{namespace} {name} -o yaml, keep what you need of it under another \
             name, and delete it: it is made within half a minute",
            name = key.name
        );
        Self {
            subject: Subject::object(add_on, resource, key),
            why: "an object of this name was made by somebody else, and is left as it is".to_owned(),
            remedy,
        }
    }
}

impl Subject {
    /// An object, and whose.
    #[must_use]
    pub fn object(add_on: Option<&str>, resource: &Resource, key: &Key) -> Self {
        match add_on {
            None => Self::BuiltIn(resource.clone(), key.clone()),
            Some(add_on) => Self::OfAddOn(add_on.to_owned(), resource.clone(), key.clone()),
        }
    }
}
