//! The shepherd's key as an owner of a cluster: when another one takes its place, and step by step how.
//!
//! Curators know an owner by a key, and give its holder certificates for an hour. The shepherd's is made when the cluster is
//! founded, and replaced when an operator says so or when it is as old as the policy lets it be.
//!
//! # The steps
//!
//! 1. *Make* the next key, and seal it. Nobody knows it yet.
//! 2. *Introduce* it: the curators let it claim certificates beside the one in force, and it claims one.
//! 3. *Switch*: only now the next key is the one in force, and the one before is a former one.
//! 4. *Remove* the former one: its curators refuse it, and every certificate for it.
//! 5. *Forget* it, once no snapshot is kept that may know nothing later.
//!
//! Each can be made twice, and what is not written down after a step is asked for again: a crash between any two leaves a key
//! in force that works. What is to be done follows from what is written down and from which key the curators took, and
//! from nothing that a shepherd remembers.
//!
//! # When a key is refused
//!
//! The one in force, the next one and the former ones are tried, in this order. That the next one works and the one in force does
//! not is what a restored backup of the database finds: the switch is made up for. A former one works in a cluster that was
//! brought back from a snapshot of before: it introduces the one in force again, and every former one is
//! removed anew. Where none is taken, a person has to help, and an issue says so.

use std::fmt;

use crate::model::telling::rough;
use crate::model::time::{Span, Timestamp, between};

/// How old a key becomes where nobody says how old.
pub const DEFAULT_ROTATION: Span = Span::hours(30 * 24);
/// The shortest time between two that are made by schedule: each costs its curators two writes, and stays until snapshots of
/// before are gone.
pub const SHORTEST_ROTATION: Span = Span::hours(1);

/// An Ed25519 key, its public half.
pub type Public = [u8; 32];

/// Somebody's order for another key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// When.
    pub at: Timestamp,
    /// By whom.
    pub by: String,
}

/// A key that was in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Former {
    /// Which.
    pub key: Public,
    /// When another one took its place.
    pub replaced_at: Timestamp,
    /// When the curators began to refuse it, as far as is known.
    pub removed_at: Option<Timestamp>,
}

/// What is known of the shepherd's keys for a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    /// Since when the one in force is.
    pub since: Timestamp,
    /// Whether somebody wants another one.
    pub asked: Option<Asked>,
    /// The one that is to take its place.
    pub next: Option<Public>,
    /// Those that were in force, newest first.
    pub former: Vec<Former>,
    /// When the oldest snapshot was taken that is kept.
    pub oldest_snapshot: Option<Timestamp>,
    /// Since when the curators take none of them.
    pub refused_since: Option<Timestamp>,
}

/// One of the shepherd's keys for a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The one in force.
    Current,
    /// The one that is to take its place.
    Next(Public),
    /// One that was in force.
    Former(Public),
}

/// What is to be done next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Make the next key.
    Make,
    /// Have the curators take this key, the one in force or the next one, and go by it from then on.
    Introduce(Which),
    /// Let the next one be in force.
    Switch(Public),
    /// Have the curators refuse a former one.
    Remove(Public),
    /// Forget a former one.
    Forget(Public),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Make => "making another key",
            Self::Introduce(Which::Next(_)) => "having its curators take the next key",
            Self::Introduce(_) => "having its curators take the key in force again",
            Self::Switch(_) => "letting the next key be in force",
            Self::Remove(_) => "having its curators refuse a former key",
            Self::Forget(_) => "forgetting a former key",
        })
    }
}

/// In which order keys are tried.
#[must_use]
pub fn to_try(keys: &Keys) -> Vec<Which> {
    let former = keys.former.iter().map(|former| Which::Former(former.key));
    [Which::Current].into_iter().chain(keys.next.map(Which::Next)).chain(former).collect()
}

/// What is to be done next, where the curators took `by`. `every`: how old a key becomes; zero: as old as nobody orders
/// otherwise.
#[must_use]
pub fn next_step(keys: &Keys, by: Which, every: Span, now: Timestamp) -> Option<Step> {
    match by {
        Which::Next(key) => return Some(Step::Switch(key)),
        // From a snapshot of before.
        Which::Former(_) => return Some(Step::Introduce(Which::Current)),
        Which::Current => {}
    }
    // First of all, and whatever is wanted besides: until then two keys open the cluster.
    if let Some(former) = keys.former.iter().find(|former| former.removed_at.is_none()) {
        return Some(Step::Remove(former.key));
    }
    if let Some(next) = keys.next {
        return Some(Step::Introduce(Which::Next(next)));
    }
    if keys.asked.is_some() || is_old(keys, every, now) {
        return Some(Step::Make);
    }
    let over = keys.former.iter().find(|former| is_needed_by_no_snapshot(former, keys));
    over.map(|former| Step::Forget(former.key))
}

/// Whether the one in force is as old as a key becomes.
fn is_old(keys: &Keys, every: Span, now: Timestamp) -> bool {
    !every.0.is_zero() && between(keys.since, now) >= every.0
}

/// Whether no snapshot is kept from which the cluster would come back with this key and without a later one. One that was
/// taken after the curators removed the key has a later one for certain.
fn is_needed_by_no_snapshot(former: &Former, keys: &Keys) -> bool {
    match (former.removed_at, keys.oldest_snapshot) {
        (Some(removed), Some(oldest)) => removed < oldest,
        // There is none that anything could come back from.
        (Some(_), None) => true,
        (None, _) => false,
    }
}

/// What is under way or wanted of keys and has not come to its end, for people; nothing when all is as it is to be.
#[must_use]
pub fn waits(keys: &Keys, every: Span, now: Timestamp) -> Option<String> {
    if let Some(since) = keys.refused_since {
        return Some(format!(
            "its curators have refused every key that the shepherd has for it for {}; see docs/issues/cluster-key-refused.md",
            rough(between(since, now))
        ));
    }
    if let Some(Asked { at, by }) = &keys.asked {
        let ago = rough(between(*at, now));
        return Some(format!("the shepherd's key for it is to be replaced, as {by} ordered {ago} ago"));
    }
    if keys.next.is_some() || is_old(keys, every, now) {
        let age = rough(between(keys.since, now));
        return Some(format!("the shepherd's key for it, which is {age} old, is to be replaced"));
    }
    let left = keys.former.iter().filter(|former| former.removed_at.is_none()).count();
    match left {
        0 => None,
        1 => Some("a former key of the shepherd is to be refused by its curators".to_owned()),
        _ => Some(format!("{left} former keys of the shepherd are to be refused by its curators")),
    }
}

/// Whether a key may be made to become so old; the error is a part of a sentence.
pub fn check_rotation(every: Span) -> Result<(), String> {
    if !every.0.is_zero() && every < SHORTEST_ROTATION {
        return Err(format!(
            "{every} is too short for a key: give at least {SHORTEST_ROTATION}, or 0s for never"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::time::after;

    const DAY: Duration = Duration::from_hours(24);
    const CURRENT: Public = [1; 32];
    const NEXT: Public = [2; 32];
    const OLD: Public = [3; 32];
    const OLDER: Public = [4; 32];

    fn at(day: u32) -> Timestamp {
        after(Timestamp::UNIX_EPOCH, DAY * (day + 1_000))
    }

    fn keys() -> Keys {
        Keys {
            since: at(0),
            asked: None,
            next: None,
            former: Vec::new(),
            oldest_snapshot: Some(at(3)),
            refused_since: None,
        }
    }

    fn asked() -> Asked {
        Asked { at: at(5), by: "kim".to_owned() }
    }

    fn former(key: Public, removed: Option<u32>) -> Former {
        Former { key, replaced_at: at(0), removed_at: removed.map(at) }
    }

    #[test]
    fn each_step_follows_from_what_is_written_down_and_which_key_was_taken() {
        use Which::Current;
        let introduce = Step::Introduce(Which::Next(NEXT));
        for (what, keys, by, day, expected) in [
            ("nothing is wanted", keys(), Current, 29, None),
            ("it is old", keys(), Current, 30, Some(Step::Make)),
            (
                "somebody wants another one",
                Keys { asked: Some(asked()), ..keys() },
                Current,
                6,
                Some(Step::Make),
            ),
            ("one is made", Keys { next: Some(NEXT), ..keys() }, Current, 6, Some(introduce)),
            (
                "one is made, and wanted",
                Keys { next: Some(NEXT), asked: Some(asked()), ..keys() },
                Current,
                99,
                Some(introduce),
            ),
            (
                "the next one is taken",
                Keys { next: Some(NEXT), ..keys() },
                Which::Next(NEXT),
                6,
                Some(Step::Switch(NEXT)),
            ),
            (
                "it is in force, and the one before is not refused yet",
                Keys { former: vec![former(OLD, None)], ..keys() },
                Current,
                6,
                Some(Step::Remove(OLD)),
            ),
            (
                "another one is wanted meanwhile",
                Keys { former: vec![former(OLD, None)], asked: Some(asked()), ..keys() },
                Current,
                99,
                Some(Step::Remove(OLD)),
            ),
            (
                "another one is made meanwhile",
                Keys { former: vec![former(OLD, Some(2)), former(OLDER, None)], next: Some(NEXT), ..keys() },
                Current,
                6,
                Some(Step::Remove(OLDER)),
            ),
            (
                "a snapshot may know nothing later",
                Keys { former: vec![former(OLD, Some(3))], ..keys() },
                Current,
                6,
                None,
            ),
            (
                "no snapshot does",
                Keys { former: vec![former(OLD, Some(3)), former(OLDER, Some(2))], ..keys() },
                Current,
                6,
                Some(Step::Forget(OLDER)),
            ),
            (
                "there is no snapshot",
                Keys { former: vec![former(OLD, Some(3))], oldest_snapshot: None, ..keys() },
                Current,
                6,
                Some(Step::Forget(OLD)),
            ),
            (
                "it came back from a snapshot of before",
                Keys { former: vec![former(OLD, None)], asked: Some(asked()), next: Some(NEXT), ..keys() },
                Which::Former(OLD),
                99,
                Some(Step::Introduce(Current)),
            ),
        ] {
            assert_eq!(next_step(&keys, by, DEFAULT_ROTATION, at(day)), expected, "{what}");
        }
        assert_eq!(next_step(&keys(), Current, Span::seconds(0), at(9_999)), None, "never by schedule");
    }

    #[test]
    fn keys_are_tried_from_the_one_in_force_back() {
        let all =
            Keys { next: Some(NEXT), former: vec![former(OLD, Some(1)), former(OLDER, None)], ..keys() };
        let expected = [Which::Current, Which::Next(NEXT), Which::Former(OLD), Which::Former(OLDER)];
        assert_eq!(to_try(&all), expected);
        assert_eq!(to_try(&keys()), [Which::Current]);
    }

    #[test]
    fn what_is_waited_for_is_told_by_what_it_is_for() {
        for (keys, day, expected) in [
            (keys(), 29, None),
            (keys(), 30, Some("which is 30d0h old")),
            (Keys { next: Some(NEXT), ..keys() }, 2, Some("which is 2d0h old")),
            (Keys { asked: Some(asked()), next: Some(NEXT), ..keys() }, 6, Some("as kim ordered 1d0h ago")),
            (Keys { former: vec![former(OLD, None)], ..keys() }, 2, Some("a former key")),
            (
                Keys { former: vec![former(OLD, None), former(OLDER, None)], ..keys() },
                2,
                Some("2 former keys"),
            ),
            (Keys { former: vec![former(OLD, Some(1))], ..keys() }, 2, None),
            (
                Keys { refused_since: Some(at(1)), asked: Some(asked()), ..keys() },
                3,
                Some("refused every key"),
            ),
        ] {
            let said = waits(&keys, DEFAULT_ROTATION, at(day));
            match (said, expected) {
                (None, None) => {}
                (Some(said), Some(part)) => assert!(said.contains(part), "{said}"),
                (said, expected) => panic!("{said:?}, and not {expected:?}"),
            }
        }
    }

    /// What the curators, the database and a shepherd know, as far as keys go.
    #[derive(Clone, Debug)]
    struct World {
        keys: Keys,
        current: Public,
        made: u8,
        owners: Vec<Public>,
        removed: Vec<Public>,
        way: Option<Which>,
    }

    impl World {
        fn of(&self, which: Which) -> Public {
            match which {
                Which::Current => self.current,
                Which::Next(key) | Which::Former(key) => key,
            }
        }

        fn take(&mut self) -> Which {
            let taken = to_try(&self.keys).into_iter().find(|which| self.owners.contains(&self.of(*which)));
            *self.way.get_or_insert(taken.expect("a key that works"))
        }

        /// Does the first half of a step, or all of it.
        fn step(&mut self, step: Step, all: bool, day: u32) {
            match step {
                Step::Make => {
                    if all {
                        self.made += 1;
                        self.keys.next = Some([self.made; 32]);
                    }
                }
                Step::Introduce(which) => {
                    let key = self.of(which);
                    assert!(!self.removed.contains(&key), "a key that was removed is introduced");
                    if !self.owners.contains(&key) {
                        self.owners.push(key);
                    }
                    if all {
                        self.way = Some(which);
                    }
                }
                Step::Switch(key) => {
                    if all {
                        let before = std::mem::replace(&mut self.current, key);
                        self.keys
                            .former
                            .insert(0, Former { key: before, replaced_at: at(day), removed_at: None });
                        self.keys = Keys { next: None, asked: None, since: at(day), ..self.keys.clone() };
                        self.way = Some(Which::Current);
                    }
                }
                Step::Remove(key) => {
                    assert_ne!(self.of(self.way.unwrap()), key, "a key removes itself");
                    self.owners.retain(|known| *known != key);
                    self.removed.push(key);
                    if all {
                        let former = self.keys.former.iter_mut().find(|former| former.key == key);
                        former.unwrap().removed_at = Some(at(day));
                    }
                }
                Step::Forget(key) => {
                    if all {
                        self.keys.former.retain(|former| former.key != key);
                    }
                }
            }
        }

        fn settle(&mut self, day: u32) {
            for _ in 0..20 {
                let by = self.take();
                match next_step(&self.keys, by, DEFAULT_ROTATION, at(day)) {
                    Some(step) => self.step(step, true, day),
                    None => return,
                }
            }
            panic!("it comes to no end: {self:?}");
        }
    }

    fn founded() -> World {
        let keys = Keys { oldest_snapshot: Some(at(0)), asked: Some(asked()), ..keys() };
        World { keys, current: CURRENT, made: 100, owners: vec![CURRENT], removed: Vec::new(), way: None }
    }

    /// A crash before, in the middle of and after every step, then a shepherd that knows what is written down.
    #[test]
    fn rotation_comes_to_its_end_whatever_is_cut_off() {
        for crash in 0..4 {
            for half in [false, true] {
                let mut world = founded();
                for number in 0.. {
                    let by = world.take();
                    let step = next_step(&world.keys, by, DEFAULT_ROTATION, at(6)).expect("a step");
                    if number == crash {
                        if half {
                            world.step(step, false, 6);
                        }
                        break;
                    }
                    world.step(step, true, 6);
                }
                world.way = None;
                world.settle(7);
                assert_eq!(world.owners, [world.current], "{crash} {half}");
                assert_ne!(world.current, CURRENT, "{crash} {half}");
                assert!(world.removed.contains(&CURRENT), "{crash} {half}");
                assert_eq!(world.keys.former.len(), 1, "while a snapshot of before is kept");
            }
        }
    }

    /// From every snapshot that may have been taken meanwhile.
    #[test]
    fn cluster_that_comes_back_from_before_knows_the_key_in_force_and_no_other() {
        let mut world = founded();
        let mut snapshots = vec![(world.owners.clone(), world.removed.clone())];
        while let Some(step) = {
            let by = world.take();
            next_step(&world.keys, by, DEFAULT_ROTATION, at(6))
        } {
            world.step(step, true, 6);
            snapshots.push((world.owners.clone(), world.removed.clone()));
        }
        for (owners, removed) in snapshots {
            let mut back = World { owners, removed, way: None, ..world.clone() };
            // As is written down when it is back.
            for former in &mut back.keys.former {
                former.removed_at = None;
            }
            back.settle(8);
            assert_eq!(back.owners, [world.current]);
            assert!(back.removed.contains(&CURRENT));
        }
        world.keys.oldest_snapshot = Some(at(9));
        world.settle(10);
        assert!(world.keys.former.is_empty(), "no snapshot needs it");
    }

    #[test]
    fn schedule_is_never_or_not_all_the_time() {
        for (every, good) in [("0s", true), ("1h", true), ("30d", true), ("59m", false), ("1s", false)] {
            assert_eq!(check_rotation(every.parse().unwrap()).is_ok(), good, "{every}");
        }
    }
}
