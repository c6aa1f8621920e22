//! Plans create, update and delete for the objects of one kind. No I/O.
//!
//! The live objects are found by label, in one list. A desired object that is missing is created, one that differs is
//! updated, and an object that is not desired any more is deleted. Only the server can tell whether a field is
//! immutable or a name is taken: see [`api_error`](crate::objects::api_error).
//!
//! The same evaluation decides which changes by others need another pass.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::objects::diff::{applied_fields, is_satisfied};
use crate::objects::object_kind::{
    ADD_ON_LABEL, APPLIED_ANNOTATION, MANAGED_ADD_ON, MANAGED_BUILT_IN, MANAGED_LABEL, ObjectKey, ObjectKind,
    annotation, is_terminating, label, resource_version, uid,
};

/// The desired state of one object.
#[derive(Clone, Debug, PartialEq)]
pub enum DesiredObject {
    /// It belongs to the release, and is written.
    BuiltIn(Value),
    /// It belongs to an add-on, and is applied: fields of other managers stay theirs.
    Applied {
        /// The name of the add-on.
        add_on: String,
        /// The kind, in the API version that the manifest uses.
        kind: ObjectKind,
        /// The object to apply.
        object: Value,
        /// The SHA-256 of `object`.
        digest: String,
    },
}

/// The result of a request, for servers that do not store exactly what was sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppliedState {
    uid: String,
    /// The digest of the request.
    requested: String,
    /// Our part of the object after the request: the whole state of an object that was written, and the fields of one
    /// that was applied.
    result: Option<String>,
}

/// The result of comparing an object with the desired one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is as desired.
    InSync,
    /// It differs from the desired object.
    Differs,
    /// It is not desired any more.
    Orphaned,
    /// It is unknown whether it is desired.
    Undecided,
    /// It is being deleted, and waits for its finalizers.
    Terminating,
}

/// The action on one object.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Create an object that does not exist.
    Create(ObjectKey),
    /// Change the live object to the desired one.
    Update(ObjectKey, Value),
    /// Delete it, if it is still the evaluated object in the evaluated state.
    Delete(ObjectKey, Precondition),
    /// Do nothing until the object is gone.
    AwaitDeletion(ObjectKey),
}

/// An object in one state. An object in another state is not deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Precondition {
    /// The uid of the object.
    pub uid: String,
    /// The resource version of the state.
    pub resource_version: String,
}

/// The desired state of the objects of one kind.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Expectation {
    desired: BTreeMap<ObjectKey, DesiredObject>,
    /// The add-ons whose desired state is unknown.
    unreadable: BTreeSet<String>,
    applied: BTreeMap<ObjectKey, AppliedState>,
}

impl DesiredObject {
    /// The object that is sent and compared.
    #[must_use]
    pub const fn object(&self) -> &Value {
        match self {
            Self::BuiltIn(object) | Self::Applied { object, .. } => object,
        }
    }

    /// The name of its add-on; `None` for an object of the release.
    #[must_use]
    pub fn add_on(&self) -> Option<&str> {
        match self {
            Self::BuiltIn(_) => None,
            Self::Applied { add_on, .. } => Some(add_on),
        }
    }

    fn request_digest(&self) -> String {
        match self {
            Self::BuiltIn(object) => object.to_string(),
            Self::Applied { digest, .. } => digest.clone(),
        }
    }

    fn result_state(&self, present: &Value) -> Option<String> {
        match self {
            Self::BuiltIn(_) => Some(resource_version(present).to_owned()),
            Self::Applied { .. } => applied_fields(present),
        }
    }

    /// Whether the live object is as desired, judging by its fields only.
    fn is_satisfied_by(&self, present: &Value) -> bool {
        match self {
            Self::BuiltIn(object) => is_satisfied(object, Some(present)),
            Self::Applied { object, .. } => was_applied(self, present) && is_satisfied(object, Some(present)),
        }
    }
}

/// Whether the object that was last applied is the desired one. Later changes of it do not count.
fn was_applied(wanted: &DesiredObject, present: &Value) -> bool {
    let DesiredObject::Applied { digest, .. } = wanted else { return false };
    annotation(present, APPLIED_ANNOTATION) == Some(digest) && applied_fields(present).is_some()
}

impl Precondition {
    /// The precondition that an object is still in this state.
    #[must_use]
    pub fn from_object(object: &Value) -> Self {
        Self { uid: uid(object).to_owned(), resource_version: resource_version(object).to_owned() }
    }
}

impl Expectation {
    /// From the desired objects, the add-ons that could not be read, and the results of earlier passes.
    #[must_use]
    pub fn new(
        wanted: BTreeMap<ObjectKey, DesiredObject>,
        unread: BTreeSet<String>,
        earlier: Option<&Self>,
    ) -> Self {
        let mut made = earlier.map_or_else(BTreeMap::new, |earlier| earlier.applied.clone());
        made.retain(|key, _| wanted.contains_key(key));
        Self { desired: wanted, unreadable: unread, applied: made }
    }

    /// The desired state of an object; `None` if it is not desired.
    #[must_use]
    pub fn desired(&self, key: &ObjectKey) -> Option<&DesiredObject> {
        self.desired.get(key)
    }

    /// Whether no object of the kind is desired.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.desired.is_empty()
    }

    /// Records the result of a request: the object as the server returned it.
    pub fn record_result(&mut self, key: &ObjectKey, answer: &Value) {
        if let Some(wanted) = self.desired.get(key) {
            let (query, became) = (wanted.request_digest(), wanted.result_state(answer));
            self.applied.insert(
                key.clone(),
                AppliedState { uid: uid(answer).to_owned(), requested: query, result: became },
            );
        }
    }

    /// Evaluates an object that has the label.
    #[must_use]
    pub fn evaluate(&self, key: &ObjectKey, present: &Value) -> Verdict {
        let Some(wanted) = self.desired.get(key) else { return self.evaluate_undesired(present) };
        if is_terminating(present) {
            return Verdict::Terminating;
        }
        let made = self
            .applied
            .get(key)
            .filter(|made| made.uid == uid(present) && made.requested == wanted.request_digest());
        let right = match (wanted, made) {
            // Nothing has changed since the server returned this result.
            (DesiredObject::BuiltIn(_), Some(made)) if made.result == wanted.result_state(present) => true,
            // A server may rewrite values. A field that we still own has our value.
            (DesiredObject::Applied { .. }, Some(made)) => {
                was_applied(wanted, present) && made.result == wanted.result_state(present)
            }
            _ => wanted.is_satisfied_by(present),
        };
        if right { Verdict::InSync } else { Verdict::Differs }
    }

    fn evaluate_undesired(&self, present: &Value) -> Verdict {
        let of_unread = label(present, ADD_ON_LABEL).is_some_and(|add_on| self.unreadable.contains(add_on));
        match label(present, MANAGED_LABEL) {
            _ if is_terminating(present) => Verdict::Undecided,
            Some(MANAGED_BUILT_IN) => Verdict::Orphaned,
            Some(MANAGED_ADD_ON) if !of_unread => Verdict::Orphaned,
            _ => Verdict::Undecided,
        }
    }

    /// Plans the actions, given all objects with the label.
    #[must_use]
    pub fn plan_actions(&self, present: &[Value]) -> Vec<Action> {
        let present: BTreeMap<ObjectKey, &Value> =
            present.iter().map(|object| (ObjectKey::from_object(object), object)).collect();
        let mut actions = Vec::new();
        for key in self.desired.keys() {
            match present.get(key).map(|object| (self.evaluate(key, object), *object)) {
                None => actions.push(Action::Create(key.clone())),
                Some((Verdict::Terminating, _)) => actions.push(Action::AwaitDeletion(key.clone())),
                Some((Verdict::Differs, object)) => actions.push(Action::Update(key.clone(), object.clone())),
                Some((Verdict::InSync | Verdict::Orphaned | Verdict::Undecided, _)) => {}
            }
        }
        for (key, object) in present {
            if self.evaluate(&key, object) == Verdict::Orphaned {
                actions.push(Action::Delete(key, Precondition::from_object(object)));
            }
        }
        actions
    }

    /// Whether the next pass would act on an object that is now in this state, or, for `None`, is gone.
    #[must_use]
    pub fn needs_action(&self, key: &ObjectKey, now: Option<&Value>) -> bool {
        match now {
            None => self.desired.contains_key(key),
            Some(object) => matches!(self.evaluate(key, object), Verdict::Differs | Verdict::Orphaned),
        }
    }
}

#[cfg(test)]
mod tests;
