//! Tests: rotation of the owner key, step by step and after every crash.

use std::time::Duration;

use super::*;
use crate::time::after;

const DAY: Duration = Duration::from_hours(24);
const CURRENT: OwnerPublicKey = [1; 32];
const NEXT: OwnerPublicKey = [2; 32];
const OLD: OwnerPublicKey = [3; 32];
const OLDER: OwnerPublicKey = [4; 32];

fn at(day: u32) -> Timestamp {
    after(Timestamp::UNIX_EPOCH, DAY * (day + 1_000))
}

fn keys() -> OwnerKeys {
    OwnerKeys {
        current_since: at(0),
        rotation_request: None,
        next: None,
        former: Vec::new(),
        oldest_snapshot: Some(at(3)),
        rejected_since: None,
    }
}

fn rotation_request() -> OwnerKeyRotationRequest {
    OwnerKeyRotationRequest { requested_at: at(5), requested_by: "kim".to_owned() }
}

fn former(key: OwnerPublicKey, removed: Option<u32>) -> FormerKey {
    FormerKey { key, replaced_at: at(0), removed_at: removed.map(at) }
}

#[test]
fn each_step_follows_from_the_record_and_the_accepted_key() {
    use OwnerKeySlot::Current;
    let introduce = OwnerKeyStep::Register(OwnerKeySlot::Next(NEXT));
    for (what, keys, by, day, expected) in [
        ("nothing is wanted", keys(), Current, 29, None),
        ("it is old", keys(), Current, 30, Some(OwnerKeyStep::Generate)),
        (
            "somebody wants another one",
            OwnerKeys { rotation_request: Some(rotation_request()), ..keys() },
            Current,
            6,
            Some(OwnerKeyStep::Generate),
        ),
        ("one is made", OwnerKeys { next: Some(NEXT), ..keys() }, Current, 6, Some(introduce)),
        (
            "one is made, and wanted",
            OwnerKeys { next: Some(NEXT), rotation_request: Some(rotation_request()), ..keys() },
            Current,
            99,
            Some(introduce),
        ),
        (
            "the next one is taken",
            OwnerKeys { next: Some(NEXT), ..keys() },
            OwnerKeySlot::Next(NEXT),
            6,
            Some(OwnerKeyStep::Activate(NEXT)),
        ),
        (
            "it is in force, and the one before is not refused yet",
            OwnerKeys { former: vec![former(OLD, None)], ..keys() },
            Current,
            6,
            Some(OwnerKeyStep::Revoke(OLD)),
        ),
        (
            "another one is wanted meanwhile",
            OwnerKeys {
                former: vec![former(OLD, None)],
                rotation_request: Some(rotation_request()),
                ..keys()
            },
            Current,
            99,
            Some(OwnerKeyStep::Revoke(OLD)),
        ),
        (
            "another one is made meanwhile",
            OwnerKeys { former: vec![former(OLD, Some(2)), former(OLDER, None)], next: Some(NEXT), ..keys() },
            Current,
            6,
            Some(OwnerKeyStep::Revoke(OLDER)),
        ),
        (
            "a snapshot may know nothing later",
            OwnerKeys { former: vec![former(OLD, Some(3))], ..keys() },
            Current,
            6,
            None,
        ),
        (
            "no snapshot does",
            OwnerKeys { former: vec![former(OLD, Some(3)), former(OLDER, Some(2))], ..keys() },
            Current,
            6,
            Some(OwnerKeyStep::Delete(OLDER)),
        ),
        (
            "there is no snapshot",
            OwnerKeys { former: vec![former(OLD, Some(3))], oldest_snapshot: None, ..keys() },
            Current,
            6,
            Some(OwnerKeyStep::Delete(OLD)),
        ),
        (
            "it came back from a snapshot of before",
            OwnerKeys {
                former: vec![former(OLD, None)],
                rotation_request: Some(rotation_request()),
                next: Some(NEXT),
                ..keys()
            },
            OwnerKeySlot::Former(OLD),
            99,
            Some(OwnerKeyStep::Register(Current)),
        ),
    ] {
        assert_eq!(next_rotation_step(&keys, by, DEFAULT_ROTATION_INTERVAL, at(day)), expected, "{what}");
    }
    assert_eq!(next_rotation_step(&keys(), Current, Span::seconds(0), at(9_999)), None, "never by schedule");
}

#[test]
fn keys_are_tried_from_the_current_one_back() {
    let all =
        OwnerKeys { next: Some(NEXT), former: vec![former(OLD, Some(1)), former(OLDER, None)], ..keys() };
    let expected = [
        OwnerKeySlot::Current,
        OwnerKeySlot::Next(NEXT),
        OwnerKeySlot::Former(OLD),
        OwnerKeySlot::Former(OLDER),
    ];
    assert_eq!(keys_to_try(&all), expected);
    assert_eq!(keys_to_try(&keys()), [OwnerKeySlot::Current]);
}

#[test]
fn wait_reason_names_the_pending_rotation() {
    for (keys, day, expected) in [
        (keys(), 29, None),
        (keys(), 30, Some("which is 30d0h old")),
        (OwnerKeys { next: Some(NEXT), ..keys() }, 2, Some("which is 2d0h old")),
        (
            OwnerKeys { rotation_request: Some(rotation_request()), next: Some(NEXT), ..keys() },
            6,
            Some("as kim ordered 1d0h ago"),
        ),
        (OwnerKeys { former: vec![former(OLD, None)], ..keys() }, 2, Some("a former key")),
        (
            OwnerKeys { former: vec![former(OLD, None), former(OLDER, None)], ..keys() },
            2,
            Some("2 former keys"),
        ),
        (OwnerKeys { former: vec![former(OLD, Some(1))], ..keys() }, 2, None),
        (
            OwnerKeys { rejected_since: Some(at(1)), rotation_request: Some(rotation_request()), ..keys() },
            3,
            Some("refused every key"),
        ),
    ] {
        let text = rotation_wait_reason(&keys, DEFAULT_ROTATION_INTERVAL, at(day));
        match (text, expected) {
            (None, None) => {}
            (Some(text), Some(part)) => assert!(text.contains(part), "{text}"),
            (text, expected) => panic!("{text:?}, and not {expected:?}"),
        }
    }
}

/// Keys as the curators, the database and a shepherd have them.
#[derive(Clone, Debug)]
struct World {
    keys: OwnerKeys,
    current: OwnerPublicKey,
    made: u8,
    owners: Vec<OwnerPublicKey>,
    removed: Vec<OwnerPublicKey>,
    way: Option<OwnerKeySlot>,
}

impl World {
    fn key_of(&self, which: OwnerKeySlot) -> OwnerPublicKey {
        match which {
            OwnerKeySlot::Current => self.current,
            OwnerKeySlot::Next(key) | OwnerKeySlot::Former(key) => key,
        }
    }

    fn accepted_key(&mut self) -> OwnerKeySlot {
        let taken =
            keys_to_try(&self.keys).into_iter().find(|which| self.owners.contains(&self.key_of(*which)));
        *self.way.get_or_insert(taken.expect("a key that works"))
    }

    /// Applies a step, or only its effect on the curators.
    fn apply_step(&mut self, step: OwnerKeyStep, all: bool, day: u32) {
        match step {
            OwnerKeyStep::Generate => {
                if all {
                    self.made += 1;
                    self.keys.next = Some([self.made; 32]);
                }
            }
            OwnerKeyStep::Register(which) => {
                let key = self.key_of(which);
                assert!(!self.removed.contains(&key), "a key that was removed is introduced");
                if !self.owners.contains(&key) {
                    self.owners.push(key);
                }
                if all {
                    self.way = Some(which);
                }
            }
            OwnerKeyStep::Activate(key) => {
                if all {
                    let before = std::mem::replace(&mut self.current, key);
                    self.keys
                        .former
                        .insert(0, FormerKey { key: before, replaced_at: at(day), removed_at: None });
                    self.keys = OwnerKeys {
                        next: None,
                        rotation_request: None,
                        current_since: at(day),
                        ..self.keys.clone()
                    };
                    self.way = Some(OwnerKeySlot::Current);
                }
            }
            OwnerKeyStep::Revoke(key) => {
                assert_ne!(self.key_of(self.way.unwrap()), key, "a key removes itself");
                self.owners.retain(|known| *known != key);
                self.removed.push(key);
                if all {
                    let former = self.keys.former.iter_mut().find(|former| former.key == key);
                    former.unwrap().removed_at = Some(at(day));
                }
            }
            OwnerKeyStep::Delete(key) => {
                if all {
                    self.keys.former.retain(|former| former.key != key);
                }
            }
        }
    }

    fn run_to_end(&mut self, day: u32) {
        for _ in 0..20 {
            let by = self.accepted_key();
            match next_rotation_step(&self.keys, by, DEFAULT_ROTATION_INTERVAL, at(day)) {
                Some(step) => self.apply_step(step, true, day),
                None => return,
            }
        }
        panic!("it comes to no end: {self:?}");
    }
}

fn founded() -> World {
    let keys =
        OwnerKeys { oldest_snapshot: Some(at(0)), rotation_request: Some(rotation_request()), ..keys() };
    World { keys, current: CURRENT, made: 100, owners: vec![CURRENT], removed: Vec::new(), way: None }
}

/// A crash before, in the middle of and after every step; then another shepherd continues from the record.
#[test]
fn rotation_completes_after_a_crash_at_any_step() {
    for crash in 0..4 {
        for half in [false, true] {
            let mut world = founded();
            for number in 0.. {
                let by = world.accepted_key();
                let step =
                    next_rotation_step(&world.keys, by, DEFAULT_ROTATION_INTERVAL, at(6)).expect("a step");
                if number == crash {
                    if half {
                        world.apply_step(step, false, 6);
                    }
                    break;
                }
                world.apply_step(step, true, 6);
            }
            world.way = None;
            world.run_to_end(7);
            assert_eq!(world.owners, [world.current], "{crash} {half}");
            assert_ne!(world.current, CURRENT, "{crash} {half}");
            assert!(world.removed.contains(&CURRENT), "{crash} {half}");
            assert_eq!(world.keys.former.len(), 1, "while a snapshot of before is kept");
        }
    }
}

/// From every snapshot that may have been taken during the rotation.
#[test]
fn restored_cluster_ends_with_the_current_key_only() {
    let mut world = founded();
    let mut snapshots = vec![(world.owners.clone(), world.removed.clone())];
    while let Some(step) = {
        let by = world.accepted_key();
        next_rotation_step(&world.keys, by, DEFAULT_ROTATION_INTERVAL, at(6))
    } {
        world.apply_step(step, true, 6);
        snapshots.push((world.owners.clone(), world.removed.clone()));
    }
    for (owners, removed) in snapshots {
        let mut back = World { owners, removed, way: None, ..world.clone() };
        // A restore clears these records.
        for former in &mut back.keys.former {
            former.removed_at = None;
        }
        back.run_to_end(8);
        assert_eq!(back.owners, [world.current]);
        assert!(back.removed.contains(&CURRENT));
    }
    world.keys.oldest_snapshot = Some(at(9));
    world.run_to_end(10);
    assert!(world.keys.former.is_empty(), "no snapshot needs it");
}

#[test]
fn rotation_interval_is_zero_or_at_least_the_minimum() {
    for (every, good) in [("0s", true), ("1h", true), ("30d", true), ("59m", false), ("1s", false)] {
        assert_eq!(check_rotation_interval(every.parse().unwrap()).is_ok(), good, "{every}");
    }
}
