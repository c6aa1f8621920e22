use super::*;

const QUOTA: u64 = 2 << 30;

fn version(minor: u32, patch: u32) -> ProgramVersion {
    ReleaseVersion::new(3, minor, patch).into()
}

/// Member 5 of 3, 5 and 9, the only one with the alarm, ready to be defragmented.
fn facts() -> EtcdSpaceFacts {
    EtcdSpaceFacts {
        own: 5,
        is_learner: false,
        is_space_exhausted: true,
        members: [3, 5, 9].into(),
        learners: BTreeSet::new(),
        absent_for: BTreeMap::new(),
        full: [5].into(),
        unchanged_for: SETTLE_TIME,
        file_bytes: QUOTA,
        bytes_in_use: 100 << 20,
        quota_bytes: QUOTA,
        free_disk_bytes: Some(10 << 30),
        version: Some(version(4, 23)),
        is_behind: false,
        since_compaction: Some(Duration::ZERO),
        new_revisions: 0,
        since_defragmentation: None,
        fruitless_defragmentations: 0,
    }
}

/// The same after a defragmentation that gained nothing.
fn over() -> EtcdSpaceFacts {
    EtcdSpaceFacts {
        bytes_in_use: QUOTA,
        since_defragmentation: Some(Duration::ZERO),
        fruitless_defragmentations: 1,
        ..facts()
    }
}

fn waits_for(facts: &EtcdSpaceFacts) -> String {
    match decide_space_step(facts) {
        SpaceStep::Wait(reason) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn member_with_the_alarm_compacts_defragments_and_ends_it() {
    let small = QUOTA / 10;
    for (what, state, expected) in [
        ("the history first", EtcdSpaceFacts { since_compaction: None, ..facts() }, SpaceStep::Compact),
        ("then the file", facts(), SpaceStep::Defragment),
        ("then the alarm", EtcdSpaceFacts { file_bytes: small, ..facts() }, SpaceStep::EndAlarm(5)),
        (
            "there is room again since the last defragmentation",
            EtcdSpaceFacts { since_defragmentation: Some(SHORT_DEFRAGMENTATION_INTERVAL), ..facts() },
            SpaceStep::Defragment,
        ),
        (
            "nothing shows yet that the data alone is too large",
            EtcdSpaceFacts { bytes_in_use: QUOTA, ..facts() },
            SpaceStep::Defragment,
        ),
        (
            "data that was too large may be smaller now",
            EtcdSpaceFacts { since_defragmentation: Some(DEFRAGMENTATION_INTERVAL), ..over() },
            SpaceStep::Defragment,
        ),
        (
            "a small file needs none",
            EtcdSpaceFacts {
                file_bytes: small,
                version: None,
                free_disk_bytes: None,
                since_compaction: None,
                ..facts()
            },
            SpaceStep::EndAlarm(5),
        ),
    ] {
        assert_eq!(decide_space_step(&state), expected, "{what}");
    }
}

#[test]
fn history_is_compacted_once_and_again_only_with_new_revisions() {
    for (since, new_revisions, compacts) in [
        (Some(Duration::ZERO), 7, false),
        (Some(DEFRAGMENTATION_INTERVAL), 0, false),
        (Some(DEFRAGMENTATION_INTERVAL.saturating_sub(Duration::from_secs(1))), 7, false),
        (Some(DEFRAGMENTATION_INTERVAL), 1, true),
        (None, 0, true),
    ] {
        for objection in [over(), EtcdSpaceFacts { free_disk_bytes: Some(0), ..facts() }] {
            let state = EtcdSpaceFacts { since_compaction: since, new_revisions, ..objection };
            assert_eq!(decide_space_step(&state) == SpaceStep::Compact, compacts, "{state:?}");
        }
    }
}

#[test]
fn member_that_applies_a_snapshot_is_not_defragmented() {
    let quiet = EtcdSpaceFacts {
        full: [].into(),
        is_space_exhausted: false,
        version: Some(version(6, 5)),
        ..facts()
    };
    assert_eq!(decide_space_step(&quiet), SpaceStep::DefragmentInTurn);
    let behind = EtcdSpaceFacts { is_behind: true, ..quiet };
    assert_eq!(decide_space_step(&behind), SpaceStep::Rest);
    for version in [version(4, 23), version(5, 23)].map(Some) {
        let state = EtcdSpaceFacts { is_behind: true, since_compaction: None, version, ..facts() };
        assert_eq!(waits_for(&state), "it first applies what the other members have committed");
    }
}

#[test]
fn file_that_is_large_and_mostly_unused_is_defragmented_before_the_alarm() {
    let quiet = EtcdSpaceFacts {
        full: [].into(),
        is_space_exhausted: false,
        since_compaction: None,
        version: Some(version(6, 5)),
        ..facts()
    };
    for (what, state, expected) in [
        ("large and unused", quiet.clone(), SpaceStep::DefragmentInTurn),
        ("small", EtcdSpaceFacts { file_bytes: QUOTA / 100 * 80 - 1, ..quiet.clone() }, SpaceStep::Rest),
        (
            "as large as the issue names it",
            EtcdSpaceFacts { file_bytes: QUOTA / 100 * 80, bytes_in_use: QUOTA / 3, ..quiet.clone() },
            SpaceStep::DefragmentInTurn,
        ),
        ("used", EtcdSpaceFacts { bytes_in_use: QUOTA / 2, ..quiet.clone() }, SpaceStep::Rest),
        (
            "no room on the disk",
            EtcdSpaceFacts { free_disk_bytes: Some(0), ..quiet.clone() },
            SpaceStep::Rest,
        ),
        (
            "a snapshot may damage it",
            EtcdSpaceFacts { version: Some(version(6, 4)), ..quiet.clone() },
            SpaceStep::Rest,
        ),
        (
            "the same in 3.4",
            EtcdSpaceFacts { version: Some(version(4, 37)), ..quiet.clone() },
            SpaceStep::Rest,
        ),
        (
            "not in its last",
            EtcdSpaceFacts { version: Some(version(4, 38)), ..quiet.clone() },
            SpaceStep::DefragmentInTurn,
        ),
        ("unknown version", EtcdSpaceFacts { version: None, ..quiet.clone() }, SpaceStep::Rest),
        ("a learner", EtcdSpaceFacts { is_learner: true, ..quiet.clone() }, SpaceStep::Rest),
        (
            "a moment ago",
            EtcdSpaceFacts { since_defragmentation: Some(Duration::ZERO), ..quiet },
            SpaceStep::Rest,
        ),
    ] {
        assert_eq!(decide_space_step(&state), expected, "{what}");
    }
}

#[test]
fn members_with_the_alarm_go_one_after_the_other() {
    // The three members see the same. For each set of alarms, at most one of them acts.
    let all = [3, 5, 9];
    for number in 0..8_u8 {
        let full: BTreeSet<u64> =
            all.iter().enumerate().filter(|(bit, _)| (number >> bit) & 1 == 1).map(|(_, id)| *id).collect();
        let acts = |own: &&u64| {
            let file_bytes = if full.is_empty() { 0 } else { QUOTA };
            let state = EtcdSpaceFacts { own: **own, full: full.clone(), file_bytes, ..facts() };
            !matches!(decide_space_step(&state), SpaceStep::Wait(_) | SpaceStep::Rest)
        };
        let acting: Vec<u64> = all.iter().filter(acts).copied().collect();
        assert_eq!(acting, full.first().copied().into_iter().collect::<Vec<u64>>(), "{full:?}");
    }
    assert_eq!(waits_for(&EtcdSpaceFacts { full: [3, 5].into(), ..facts() }), "member 3 makes room first");
    let new = EtcdSpaceFacts { unchanged_for: Duration::from_secs(9), ..facts() };
    assert_eq!(waits_for(&new), "room is made in a moment", "another one may be about to raise it");
}

#[test]
fn absent_member_holds_nobody_up() {
    let away = |time| BTreeMap::from([(3, time)]);
    let moment = ABSENCE_TIME.saturating_sub(Duration::from_secs(1));
    let both = EtcdSpaceFacts { full: [3, 5].into(), absent_for: away(moment), ..facts() };
    assert_eq!(
        waits_for(&both),
        "member 3 has the alarm and no connection",
        "it may be in the middle of its turn"
    );
    let absent = EtcdSpaceFacts { absent_for: away(ABSENCE_TIME), ..both.clone() };
    assert_eq!(decide_space_step(&absent), SpaceStep::Defragment, "it loses its turn");
    let alone = EtcdSpaceFacts { full: [3].into(), ..both };
    assert_eq!(waits_for(&alone), "member 3 has the alarm and no connection");
    let removed = EtcdSpaceFacts { members: [5, 9].into(), ..alone };
    assert_eq!(decide_space_step(&removed), SpaceStep::EndAlarm(3), "it never returns");
    let learner = EtcdSpaceFacts { full: [3].into(), learners: [3].into(), ..absent.clone() };
    assert_eq!(decide_space_step(&learner), SpaceStep::EndAlarm(3));
    for own in [5, 9] {
        let long = EtcdSpaceFacts { own, full: [3].into(), ..absent.clone() };
        assert_eq!(decide_space_step(&long), SpaceStep::EndAlarm(3), "member {own} waits for no other");
    }
}

#[test]
fn learner_with_the_alarm_has_no_turn() {
    let expected = "member 3 is a learner, which can make no room: promote it or remove it";
    let both = EtcdSpaceFacts { full: [3, 5].into(), learners: [3].into(), ..facts() };
    assert_eq!(decide_space_step(&both), SpaceStep::Defragment, "a voter does not wait for it");
    for own in [5, 9] {
        let alone = EtcdSpaceFacts { own, full: [3].into(), ..both.clone() };
        assert_eq!(waits_for(&alone), expected);
    }
    let itself = EtcdSpaceFacts { own: 3, is_learner: true, full: [].into(), members: [].into(), ..facts() };
    assert_eq!(waits_for(&itself), expected);
}

#[test]
fn member_is_not_defragmented_where_that_would_harm_or_gain_nothing() {
    for (state, expected) in [
        (
            EtcdSpaceFacts { bytes_in_use: QUOTA / 100 * 95, ..over() },
            "its data alone needs more than 90 % of 2 GiB: delete Kubernetes objects",
        ),
        (EtcdSpaceFacts { version: None, ..facts() }, "its version cannot be parsed"),
        (
            EtcdSpaceFacts { version: Some(version(5, 0)), since_compaction: None, ..facts() },
            "it is not defragmented, because etcd 3.5.0 can differ",
        ),
        (EtcdSpaceFacts { version: Some(version(5, 5)), ..facts() }, "install 3.5.6 or later"),
        (EtcdSpaceFacts { free_disk_bytes: None, ..facts() }, "the free space of its disk"),
        (
            EtcdSpaceFacts { free_disk_bytes: Some(163 << 20), ..facts() },
            "its disk has no room for a second database file with the data of the first and 64 MiB",
        ),
        (
            EtcdSpaceFacts { since_defragmentation: Some(Duration::from_secs(5)), ..facts() },
            "it was defragmented a moment ago",
        ),
    ] {
        let reason = waits_for(&state);
        assert!(reason.contains(expected), "{reason}");
    }
    for state in [
        EtcdSpaceFacts { version: Some(version(5, 6)), ..facts() },
        EtcdSpaceFacts { free_disk_bytes: Some(164 << 20), ..facts() },
    ] {
        assert_eq!(decide_space_step(&state), SpaceStep::Defragment, "{state:?}");
    }
}

#[test]
fn pause_grows_with_each_defragmentation_without_gain() {
    let minutes = Duration::from_mins;
    for (patch, in_use, fruitless, pause) in [
        (version(4, 23), QUOTA, 0, minutes(10)),
        (version(4, 23), QUOTA, 1, minutes(10)),
        (version(4, 23), QUOTA, 2, minutes(20)),
        (version(4, 23), QUOTA, 3, minutes(40)),
        (version(4, 23), QUOTA, 4, minutes(60)),
        (version(4, 23), QUOTA, u32::MAX, minutes(60)),
        (version(4, 23), QUOTA / 2, 1, minutes(1)),
        (version(4, 23), QUOTA / 2, 3, minutes(4)),
        (version(4, 23), QUOTA / 2, u32::MAX, minutes(10)),
        (version(5, 6), QUOTA, 1, minutes(60)),
        (version(5, 6), QUOTA / 2, 1, minutes(1)),
    ] {
        let at = |since| EtcdSpaceFacts {
            version: Some(patch),
            bytes_in_use: in_use,
            fruitless_defragmentations: fruitless,
            since_defragmentation: Some(since),
            ..facts()
        };
        let reason = waits_for(&at(pause.saturating_sub(Duration::from_secs(1))));
        assert!(reason.contains("by itself within") || in_use < QUOTA, "{reason}");
        assert_eq!(decide_space_step(&at(pause)), SpaceStep::Defragment, "{patch:?} {in_use} {fruitless}");
    }
}

#[test]
fn defragmentation_is_fruitless_if_it_failed_or_gained_less_than_a_tenth() {
    for (former, after, expected) in
        [(2, Some(QUOTA / 10), 0), (2, Some(QUOTA / 100 * 95), 3), (0, None, 1), (u32::MAX, None, u32::MAX)]
    {
        assert_eq!(count_fruitless(former, QUOTA, after), expected, "{after:?}");
    }
}
