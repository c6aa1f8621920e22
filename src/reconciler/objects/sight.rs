//! What is told of objects while nobody makes a pass, and whether any of it is news.
//!
//! News is what the next pass would do something about: see [`Expectation::is_news`]. What we wrote ourselves is none, for
//! it is what it should be; but it is told before the answer of the write has arrived, or long after, and then it may not
//! be what the object is any more. So nothing is judged while a pass is made, and what is told of a state that a pass has
//! seen or made, or of an older one, is dropped. Versions are numbers of etcd's, and grow; one that is no number is judged.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::reconciler::objects::kind::{Key, Resource, resource_version};
use crate::reconciler::objects::plan::Expectation;

/// What is known of all kinds that are watched.
#[derive(Debug, Default)]
pub struct Sight {
    kinds: BTreeMap<Resource, Seen>,
    passing: bool,
}

#[derive(Debug, Default)]
struct Seen {
    expectation: Expectation,
    /// What the list of the last pass has seen.
    listed: u64,
    /// What it wrote then.
    wrote: BTreeMap<Key, u64>,
    /// What was told since and not judged; the last of each.
    told: BTreeMap<Key, (u64, Option<Value>)>,
    /// Something may have changed that was not told.
    missed: bool,
}

impl Sight {
    /// A pass begins. It sees whatever was told until now.
    pub fn begin(&mut self) {
        self.passing = true;
        for seen in self.kinds.values_mut() {
            seen.told.clear();
            seen.missed = false;
        }
    }

    /// It is over, whatever came of it.
    pub fn end(&mut self) {
        self.passing = false;
    }

    /// What a pass has found and done with one kind.
    pub fn passed(
        &mut self,
        resource: &Resource,
        listed: &str,
        expectation: Expectation,
        wrote: BTreeMap<Key, u64>,
    ) {
        let seen = self.kinds.entry(resource.clone()).or_default();
        (seen.expectation, seen.listed, seen.wrote) =
            (expectation, number(listed).unwrap_or_default(), wrote);
    }

    /// What the last pass made of a kind.
    #[must_use]
    pub fn expectation(&self, resource: &Resource) -> Option<&Expectation> {
        self.kinds.get(resource).map(|seen| &seen.expectation)
    }

    /// Only these are watched from now on.
    pub fn keep(&mut self, followed: impl Fn(&Resource) -> bool) {
        self.kinds.retain(|resource, _| followed(resource));
    }

    /// An object is now this, or is gone; then it is its last state.
    pub fn told(&mut self, resource: &Resource, object: Value, is_there: bool) {
        let version = number(resource_version(&object)).unwrap_or(u64::MAX);
        let seen = self.kinds.entry(resource.clone()).or_default();
        seen.told.insert(Key::of(&object), (version, is_there.then_some(object)));
    }

    /// What has changed was not told.
    pub fn missed(&mut self, resource: &Resource) {
        self.kinds.entry(resource.clone()).or_default().missed = true;
    }

    /// Whether there is something for a pass to do. What is none is forgotten.
    pub fn news(&mut self) -> bool {
        if self.passing {
            return false;
        }
        let mut news = false;
        for Seen { expectation, listed, wrote, told, missed } in self.kinds.values_mut() {
            told.retain(|key, (version, object)| {
                let known = wrote.get(key).map_or(*listed, |wrote| (*wrote).max(*listed));
                *version > known && expectation.is_news(key, object.as_ref())
            });
            news |= *missed || !told.is_empty();
        }
        news
    }
}

/// A version as the number that it is.
#[must_use]
pub fn number(version: &str) -> Option<u64> {
    version.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;
    use crate::reconciler::objects::kind::{BUILT_IN, KEPT};
    use crate::reconciler::objects::plan::Wanted;

    fn object(name: &str, value: i64, version: u64) -> Value {
        json!({"metadata": {"name": name, "labels": {KEPT: BUILT_IN}, "uid": "u", "resourceVersion": version.to_string()},
            "value": value})
    }

    fn resource() -> Resource {
        Resource { group: String::new(), plural: "things".to_owned() }
    }

    fn key(name: &str) -> Key {
        Key { namespace: None, name: name.to_owned() }
    }

    /// A pass that listed at 10, wrote `a` at 12, and wants `a` and `b`.
    fn after_a_pass(sight: &mut Sight) {
        let wanted = ["a", "b"].map(|name| {
            let mut object = object(name, 1, 0);
            object["metadata"]
                .as_object_mut()
                .unwrap()
                .retain(|field, _| field == "name" || field == "labels");
            (key(name), Wanted::BuiltIn(object))
        });
        let expectation = Expectation::new(wanted.into(), BTreeSet::new(), None);
        sight.passed(&resource(), "10", expectation, BTreeMap::from([(key("a"), 12)]));
        sight.end();
    }

    #[test]
    fn what_we_wrote_is_no_news_whenever_it_is_told() {
        for before in [true, false] {
            let mut sight = Sight::default();
            sight.begin();
            if before {
                sight.told(&resource(), object("a", 1, 12), true);
                assert!(!sight.news(), "nothing is judged before it is known what was written");
            }
            after_a_pass(&mut sight);
            if !before {
                sight.told(&resource(), object("a", 1, 12), true);
            }
            assert!(!sight.news());
        }
    }

    #[test]
    fn what_is_older_than_what_a_pass_has_seen_is_no_news() {
        let mut sight = Sight::default();
        sight.begin();
        after_a_pass(&mut sight);
        // It had another value, was deleted to be made anew, and is what it should be since then.
        sight.told(&resource(), object("a", 7, 9), true);
        assert!(!sight.news());
        sight.told(&resource(), object("a", 7, 11), false);
        assert!(!sight.news());
        sight.told(&resource(), object("b", 7, 10), true);
        assert!(!sight.news());
    }

    #[test]
    fn what_others_change_is_news_until_a_pass_begins() {
        for (told, is_there, expected) in [
            (object("a", 7, 13), true, true),
            (object("b", 7, 11), true, true),
            (object("a", 1, 13), false, true),
            (object("stray", 1, 13), true, true),
            (object("stray", 1, 13), false, false),
            (object("a", 1, 13), true, false),
        ] {
            let mut sight = Sight::default();
            sight.begin();
            after_a_pass(&mut sight);
            sight.told(&resource(), told.clone(), is_there);
            assert_eq!(sight.news(), expected, "{told} {is_there}");
            assert_eq!(sight.news(), expected, "asking changes nothing");
            sight.begin();
            sight.end();
            assert!(!sight.news(), "the pass has seen it");
        }
    }

    #[test]
    fn what_was_put_right_again_is_no_news_any_more() {
        let mut sight = Sight::default();
        sight.begin();
        after_a_pass(&mut sight);
        sight.told(&resource(), object("a", 7, 13), true);
        sight.told(&resource(), object("a", 1, 14), true);
        assert!(!sight.news());
    }

    #[test]
    fn what_was_missed_is_news_and_what_is_not_watched_is_none() {
        let mut sight = Sight::default();
        sight.begin();
        after_a_pass(&mut sight);
        sight.missed(&resource());
        assert!(sight.news());
        sight.keep(|_| false);
        assert!(!sight.news());
    }

    #[test]
    fn a_version_that_is_no_number_is_judged() {
        let mut sight = Sight::default();
        sight.begin();
        after_a_pass(&mut sight);
        let mut odd = object("a", 7, 0);
        odd["metadata"]["resourceVersion"] = json!("odd");
        sight.told(&resource(), odd, true);
        assert!(sight.news());
    }
}
