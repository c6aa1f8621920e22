//! What a pass does with the objects of one kind. Nothing here does anything.
//!
//! What is there is looked up by label, in one list. What is wanted and not there is created; what differs is brought to
//! what is wanted; what nobody wants any more is deleted. Whether something cannot be changed, or a name is taken, only the
//! server can tell: see [`answers`](crate::reconciler::objects::answers).
//!
//! The same judgement says what of others' changes is news: what a pass would do something about.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::reconciler::objects::compare::{applied_fields, holds};
use crate::reconciler::objects::kind::{
    ADD_ON, APPLIED, BUILT_IN, KEPT, Key, Kind, OF_AN_ADD_ON, annotation, is_ending, label, resource_version,
    uid,
};

/// What one object is to be.
#[derive(Clone, Debug, PartialEq)]
pub enum Wanted {
    /// It belongs to the release, and is written.
    BuiltIn(Value),
    /// It belongs to an add-on, and is applied: what others say of it stays theirs.
    Applied {
        /// Whose it is.
        add_on: String,
        /// In which version of its API it is spoken of.
        kind: Kind,
        /// What is applied.
        object: Value,
        /// The digest of that.
        digest: String,
    },
}

/// What became of what was asked, where a server does not simply keep it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Made {
    uid: String,
    /// What was asked.
    asked: String,
    /// What the object is from then on, as far as it is ours: the state of one that was written, and the fields of one
    /// that was applied.
    became: Option<String>,
}

/// What an object is found to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// What it should be.
    Right,
    /// Something else than it should be.
    Differs,
    /// Nobody wants it any more.
    Stray,
    /// It is not known whether anybody wants it.
    Left,
    /// It is being deleted, and somebody asked to be waited for.
    Ending,
}

/// What is to be done with one object.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Make it.
    Create(Key),
    /// Make what is there what is wanted.
    Update(Key, Value),
    /// Delete it, if it is still the one and the state that was judged.
    Delete(Key, Precondition),
    /// Nothing, until it is gone.
    Await(Key),
}

/// Which object, and which state of it: another one is not deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Precondition {
    /// Which.
    pub uid: String,
    /// Which state.
    pub resource_version: String,
}

/// What the objects of one kind are to be.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Expectation {
    wanted: BTreeMap<Key, Wanted>,
    /// The add-ons of which it is not known what they want.
    unread: BTreeSet<String>,
    made: BTreeMap<Key, Made>,
}

impl Wanted {
    /// What is sent, and compared.
    #[must_use]
    pub const fn object(&self) -> &Value {
        match self {
            Self::BuiltIn(object) | Self::Applied { object, .. } => object,
        }
    }

    /// Whose it is; `None` of what belongs to the release.
    #[must_use]
    pub fn add_on(&self) -> Option<&str> {
        match self {
            Self::BuiltIn(_) => None,
            Self::Applied { add_on, .. } => Some(add_on),
        }
    }

    fn asked(&self) -> String {
        match self {
            Self::BuiltIn(object) => object.to_string(),
            Self::Applied { digest, .. } => digest.clone(),
        }
    }

    fn became(&self, present: &Value) -> Option<String> {
        match self {
            Self::BuiltIn(_) => Some(resource_version(present).to_owned()),
            Self::Applied { .. } => applied_fields(present),
        }
    }

    /// Whether what is there is what is wanted, by what it says.
    fn is_there(&self, present: &Value) -> bool {
        match self {
            Self::BuiltIn(object) => holds(object, Some(present)),
            Self::Applied { object, .. } => was_applied(self, present) && holds(object, Some(present)),
        }
    }
}

/// Whether what was last applied is what is wanted. It says nothing about what became of it since.
fn was_applied(wanted: &Wanted, present: &Value) -> bool {
    let Wanted::Applied { digest, .. } = wanted else { return false };
    annotation(present, APPLIED) == Some(digest) && applied_fields(present).is_some()
}

impl Precondition {
    /// That an object is still as it was seen.
    #[must_use]
    pub fn of(object: &Value) -> Self {
        Self { uid: uid(object).to_owned(), resource_version: resource_version(object).to_owned() }
    }
}

impl Expectation {
    /// Of what is wanted, of add-ons that could not be read, and of what is remembered of earlier passes.
    #[must_use]
    pub fn new(wanted: BTreeMap<Key, Wanted>, unread: BTreeSet<String>, earlier: Option<&Self>) -> Self {
        let mut made = earlier.map_or_else(BTreeMap::new, |earlier| earlier.made.clone());
        made.retain(|key, _| wanted.contains_key(key));
        Self { wanted, unread, made }
    }

    /// What an object is to be.
    #[must_use]
    pub fn wanted(&self, key: &Key) -> Option<&Wanted> {
        self.wanted.get(key)
    }

    /// Whether nothing of the kind is wanted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.wanted.is_empty()
    }

    /// Keeps in mind what the server made of what was asked.
    pub fn remember(&mut self, key: &Key, answer: &Value) {
        if let Some(wanted) = self.wanted.get(key) {
            let (asked, became) = (wanted.asked(), wanted.became(answer));
            self.made.insert(key.clone(), Made { uid: uid(answer).to_owned(), asked, became });
        }
    }

    /// Judges an object that carries the label.
    #[must_use]
    pub fn judge(&self, key: &Key, present: &Value) -> Verdict {
        let Some(wanted) = self.wanted.get(key) else { return self.judge_unwanted(present) };
        if is_ending(present) {
            return Verdict::Ending;
        }
        let made = self.made.get(key).filter(|made| made.uid == uid(present) && made.asked == wanted.asked());
        let right = match (wanted, made) {
            // Nobody has touched it since it became what the server makes of it.
            (Wanted::BuiltIn(_), Some(made)) if made.became == wanted.became(present) => true,
            // Values may read otherwise than they were written. That a field is still ours says that it has ours.
            (Wanted::Applied { .. }, Some(made)) => {
                was_applied(wanted, present) && made.became == wanted.became(present)
            }
            _ => wanted.is_there(present),
        };
        if right { Verdict::Right } else { Verdict::Differs }
    }

    fn judge_unwanted(&self, present: &Value) -> Verdict {
        let of_unread = label(present, ADD_ON).is_some_and(|add_on| self.unread.contains(add_on));
        match label(present, KEPT) {
            _ if is_ending(present) => Verdict::Left,
            Some(BUILT_IN) => Verdict::Stray,
            Some(OF_AN_ADD_ON) if !of_unread => Verdict::Stray,
            _ => Verdict::Left,
        }
    }

    /// What is to be done, given all that carries the label.
    #[must_use]
    pub fn plan(&self, present: &[Value]) -> Vec<Action> {
        let present: BTreeMap<Key, &Value> = present.iter().map(|object| (Key::of(object), object)).collect();
        let mut actions = Vec::new();
        for key in self.wanted.keys() {
            match present.get(key).map(|object| (self.judge(key, object), *object)) {
                None => actions.push(Action::Create(key.clone())),
                Some((Verdict::Ending, _)) => actions.push(Action::Await(key.clone())),
                Some((Verdict::Differs, object)) => actions.push(Action::Update(key.clone(), object.clone())),
                Some((Verdict::Right | Verdict::Stray | Verdict::Left, _)) => {}
            }
        }
        for (key, object) in present {
            if self.judge(&key, object) == Verdict::Stray {
                actions.push(Action::Delete(key, Precondition::of(object)));
            }
        }
        actions
    }

    /// Whether the next pass would do anything about an object that is now this, or, for `None`, is gone.
    #[must_use]
    pub fn is_news(&self, key: &Key, now: Option<&Value>) -> bool {
        match now {
            None => self.wanted.contains_key(key),
            Some(object) => matches!(self.judge(key, object), Verdict::Differs | Verdict::Stray),
        }
    }
}

#[cfg(test)]
mod tests;
