//! The way back of an etcd that accepts no writes because a member's database file has reached its quota.
//!
//! etcd raises the alarm itself, and never ends it. While it lasts, no lease can be granted. So there is no leading
//! curator after the next election, and no lock by which members could take turns. Each member therefore decides for
//! itself, from what its own etcd reports to every member alike: the alarms and the members. [`decide_space_step`] has
//! the rules.
//!
//! # In turn
//!
//! Members with an alarm go one after the other, by their ids, the lowest first. An alarm lasts until its member has made
//! room, so it holds the turn. The order does not depend on who leads: a change of the leader in the middle of a
//! defragmentation would let two members go at once. A member without a connection loses its turn, because nothing would
//! end the wait for a dead member: it cannot even be replaced, as that is a write. Two members that raise the alarm do so
//! within moments, since etcd raises none while there is one. So nothing is done until the alarms are the same for
//! [`SETTLE_TIME`]. If two go at once nevertheless, their reads stall for as long as that takes, and no data is lost.
//!
//! Other members may be over their quota, too. They raise the alarm with the next write, and then it is their turn.
//!
//! # Before the alarm
//!
//! A file that is nearly as large as its quota, and most of it unused, is defragmented before there is an alarm. Leases can
//! be granted then, so the member takes a lock first, and another one waits ([`SpaceStep::DefragmentInTurn`]).
//!
//! # What is done
//!
//! The member compacts the history, defragments its own file, and ends its own alarm. It ends the alarm only if the file
//! has become smaller than [`RESUME_PERCENT`] of the quota: otherwise the alarm would return with the next writes, and the
//! member would be defragmented again and again. If the data alone needs more than that, only a person can decide what
//! to delete. Deletions are accepted all the time, and the member continues by itself after them. Only the size after a
//! defragmentation shows what the data needs: etcd 3.4 counts the room that a compaction has made only with later writes,
//! and there are none.
//!
//! A defragmentation needs disk space for a second file, and etcd can crash without it. Versions that can damage the data
//! during a defragmentation are not defragmented.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::byte_size::ByteSize;
use crate::humanize::humanize_duration;
use crate::program_versions::version::ProgramVersion;
use crate::program_versions::{DEFRAGMENTATION_FAULT, Program, find_faults};

/// How long the alarms must have been the same before anything is done.
pub const SETTLE_TIME: Duration = Duration::from_secs(10);
/// How long the alarms must have been the same before one of a member without a connection is ended.
pub const ABSENCE_TIME: Duration = Duration::from_mins(1);
/// Time between two defragmentations of a member whose data alone is too large.
pub const DEFRAGMENTATION_INTERVAL: Duration = Duration::from_mins(10);
/// The same while its file has unused room again.
pub const SHORT_DEFRAGMENTATION_INTERVAL: Duration = Duration::from_mins(1);
/// Part of its quota that a file may have for its alarm to end.
pub const RESUME_PERCENT: u64 = 90;
/// Disk space that must be left beside the second file.
const SPARE_BYTES: u64 = 64 << 20;

/// What a member of etcd knows about its space and that of the others. Numbers are member ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdSpaceFacts {
    /// The member that decides.
    pub own: u64,
    /// All members of the cluster.
    pub members: BTreeSet<u64>,
    /// The other members that this one exchanges messages with.
    pub connected: BTreeSet<u64>,
    /// Members with the alarm that they have no space.
    pub full: BTreeSet<u64>,
    /// How long `full` has been the same.
    pub unchanged_for: Duration,
    /// Size of this member's database file.
    pub file_bytes: u64,
    /// The part of the file that has data, at most.
    pub bytes_in_use: u64,
    /// Size of the file from which etcd accepts no writes.
    pub quota_bytes: u64,
    /// Free space on the disk of the file; `None` if it cannot be read.
    pub free_disk_bytes: Option<u64>,
    /// Version of this member's etcd; `None` if it cannot be parsed.
    pub version: Option<ProgramVersion>,
    /// Whether this member has compacted the history since it looked at the alarms.
    pub compacted: bool,
    /// Time since this member was last defragmented; `None` if it was not since the role server started.
    pub since_defragmentation: Option<Duration>,
}

/// What a member does next about its space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpaceStep {
    /// No member has the alarm, and nothing is due.
    Rest,
    /// Defragments the file of this member under a lock, if the other members are a quorum without it.
    DefragmentInTurn,
    /// Nothing now. The reason is a part of a sentence.
    Wait(String),
    /// Compacts the history of the cluster.
    Compact,
    /// Defragments the file of this member.
    Defragment,
    /// Ends the alarm of a member.
    EndAlarm(u64),
}

/// Decides the next step of a member. It is called again after each step.
#[must_use]
pub fn decide_space_step(facts: &EtcdSpaceFacts) -> SpaceStep {
    let Some(lowest) = facts.full.first() else { return prevent_alarm(facts) };
    if facts.unchanged_for < SETTLE_TIME {
        return SpaceStep::Wait("room is made in a moment".to_owned());
    }
    let present = |member: &&u64| **member == facts.own || facts.connected.contains(*member);
    match facts.full.iter().find(present) {
        Some(turn) if *turn == facts.own => make_room(facts),
        Some(turn) => SpaceStep::Wait(format!("member {turn:x} makes room first")),
        None => end_alarm_of_absent(facts, *lowest),
    }
}

/// The next step while no member has the alarm.
fn prevent_alarm(facts: &EtcdSpaceFacts) -> SpaceStep {
    let limit = resume_limit(facts);
    let gains = facts.file_bytes >= limit && facts.bytes_in_use < facts.file_bytes / 2;
    let recent = facts.since_defragmentation.is_some_and(|since| since < DEFRAGMENTATION_INTERVAL);
    if gains && !recent && find_objection(facts, limit).is_none() {
        SpaceStep::DefragmentInTurn
    } else {
        SpaceStep::Rest
    }
}

/// Size of the file below which the alarm may end.
const fn resume_limit(facts: &EtcdSpaceFacts) -> u64 {
    facts.quota_bytes / 100 * RESUME_PERCENT
}

/// The next step while it is this member's turn.
fn make_room(facts: &EtcdSpaceFacts) -> SpaceStep {
    if !facts.compacted {
        return SpaceStep::Compact;
    }
    let limit = resume_limit(facts);
    if facts.file_bytes < limit {
        return SpaceStep::EndAlarm(facts.own);
    }
    match find_objection(facts, limit) {
        Some(objection) => SpaceStep::Wait(objection),
        None => SpaceStep::Defragment,
    }
}

/// Why this member is not defragmented now.
fn find_objection(facts: &EtcdSpaceFacts, limit: u64) -> Option<String> {
    let humanize = |bytes| ByteSize(bytes).humanize();
    let Some(version) = facts.version else {
        return Some(
            "its version cannot be parsed, so it is not defragmented: install another etcd".to_owned(),
        );
    };
    let faults = find_faults(Program::Etcd, version);
    if let Some(fault) = faults.iter().find(|found| found.fault.name == DEFRAGMENTATION_FAULT) {
        return Some(format!("it is not defragmented, because {fault}"));
    }
    let needed = facts.bytes_in_use.saturating_add(SPARE_BYTES);
    match facts.free_disk_bytes {
        None => return Some("the free space of its disk cannot be read".to_owned()),
        Some(free) if free < needed => {
            return Some(format!(
                "defragmenting it needs {} on its disk, which has {} free: delete files there",
                humanize(needed),
                humanize(free)
            ));
        }
        Some(_) => {}
    }
    let since = facts.since_defragmentation?;
    if facts.bytes_in_use < limit {
        return (since < SHORT_DEFRAGMENTATION_INTERVAL)
            .then(|| "it was defragmented a moment ago, and is defragmented again in a minute".to_owned());
    }
    (since < DEFRAGMENTATION_INTERVAL).then(|| {
        format!(
            "its data alone has {} of {}: delete Kubernetes objects that nothing needs, which etcd accepts; it makes the \
             rest of the way back by itself within {}",
            humanize(facts.bytes_in_use),
            humanize(facts.quota_bytes),
            humanize_duration(DEFRAGMENTATION_INTERVAL)
        )
    })
}

/// The next step while every member with the alarm is without a connection, or was removed. Such an alarm is worthless: a
/// member that returns raises it again if its file is still too large.
fn end_alarm_of_absent(facts: &EtcdSpaceFacts, absent: u64) -> SpaceStep {
    if facts.connected.iter().any(|other| *other < facts.own) {
        return SpaceStep::Wait(format!(
            "another member ends the alarm of member {absent:x}, which is absent"
        ));
    }
    if facts.members.contains(&absent) && facts.unchanged_for < ABSENCE_TIME {
        return SpaceStep::Wait(format!("member {absent:x} has the alarm and no connection"));
    }
    SpaceStep::EndAlarm(absent)
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::kubernetes::version::ReleaseVersion;

    const QUOTA: u64 = 2 << 30;

    /// Member 5 of 3, 5 and 9, the only one with the alarm, ready to be defragmented.
    fn facts() -> EtcdSpaceFacts {
        EtcdSpaceFacts {
            own: 5,
            members: [3, 5, 9].into(),
            connected: [3, 9].into(),
            full: [5].into(),
            unchanged_for: SETTLE_TIME,
            file_bytes: QUOTA,
            bytes_in_use: 100 << 20,
            quota_bytes: QUOTA,
            free_disk_bytes: Some(10 << 30),
            version: Some(ReleaseVersion::new(3, 4, 23).into()),
            compacted: true,
            since_defragmentation: None,
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
            ("the history first", EtcdSpaceFacts { compacted: false, ..facts() }, SpaceStep::Compact),
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
                EtcdSpaceFacts {
                    bytes_in_use: QUOTA,
                    since_defragmentation: Some(DEFRAGMENTATION_INTERVAL),
                    ..facts()
                },
                SpaceStep::Defragment,
            ),
            (
                "a small file needs none",
                EtcdSpaceFacts { file_bytes: small, version: None, free_disk_bytes: None, ..facts() },
                SpaceStep::EndAlarm(5),
            ),
        ] {
            assert_eq!(decide_space_step(&state), expected, "{what}");
        }
    }

    #[test]
    fn file_that_is_large_and_mostly_unused_is_defragmented_before_the_alarm() {
        let quiet = EtcdSpaceFacts { full: [].into(), compacted: false, ..facts() };
        for (what, state, expected) in [
            ("large and unused", quiet.clone(), SpaceStep::DefragmentInTurn),
            ("small", EtcdSpaceFacts { file_bytes: QUOTA / 100 * 89, ..quiet.clone() }, SpaceStep::Rest),
            ("used", EtcdSpaceFacts { bytes_in_use: QUOTA / 2, ..quiet.clone() }, SpaceStep::Rest),
            (
                "no room on the disk",
                EtcdSpaceFacts { free_disk_bytes: Some(0), ..quiet.clone() },
                SpaceStep::Rest,
            ),
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
            let full: BTreeSet<u64> = all
                .iter()
                .enumerate()
                .filter(|(bit, _)| (number >> bit) & 1 == 1)
                .map(|(_, id)| *id)
                .collect();
            let acts = |own: &&u64| {
                let connected = all.iter().copied().filter(|id| id != *own).collect();
                let file_bytes = if full.is_empty() { 0 } else { QUOTA };
                let state =
                    EtcdSpaceFacts { own: **own, connected, full: full.clone(), file_bytes, ..facts() };
                !matches!(decide_space_step(&state), SpaceStep::Wait(_) | SpaceStep::Rest)
            };
            let acting: Vec<u64> = all.iter().filter(acts).copied().collect();
            assert_eq!(acting, full.first().copied().into_iter().collect::<Vec<u64>>(), "{full:?}");
        }
        assert_eq!(
            waits_for(&EtcdSpaceFacts { full: [3, 5].into(), ..facts() }),
            "member 3 makes room first"
        );
        let new = EtcdSpaceFacts { unchanged_for: Duration::from_secs(9), ..facts() };
        assert_eq!(waits_for(&new), "room is made in a moment", "another one may be about to raise it");
    }

    #[test]
    fn absent_member_holds_nobody_up() {
        let absent = EtcdSpaceFacts { full: [3, 5].into(), connected: [9].into(), ..facts() };
        assert_eq!(decide_space_step(&absent), SpaceStep::Defragment, "it loses its turn");
        let alone = EtcdSpaceFacts { full: [3].into(), ..absent.clone() };
        assert_eq!(waits_for(&alone), "member 3 has the alarm and no connection");
        let long = EtcdSpaceFacts { unchanged_for: ABSENCE_TIME, ..alone.clone() };
        assert_eq!(decide_space_step(&long), SpaceStep::EndAlarm(3));
        let removed = EtcdSpaceFacts { members: [5, 9].into(), ..alone };
        assert_eq!(decide_space_step(&removed), SpaceStep::EndAlarm(3), "it never returns");
        let higher = EtcdSpaceFacts { own: 9, connected: [5].into(), ..long };
        assert_eq!(waits_for(&higher), "another member ends the alarm of member 3, which is absent");
    }

    #[test]
    fn member_is_not_defragmented_where_that_would_harm_or_gain_nothing() {
        let old = |patch| Some(ReleaseVersion::new(3, 5, patch).into());
        for (state, expected) in [
            (
                EtcdSpaceFacts {
                    bytes_in_use: QUOTA / 100 * 95,
                    since_defragmentation: Some(SHORT_DEFRAGMENTATION_INTERVAL),
                    ..facts()
                },
                "its data alone has 1.8 GiB of 2 GiB: delete Kubernetes objects",
            ),
            (EtcdSpaceFacts { version: None, ..facts() }, "its version cannot be parsed"),
            (
                EtcdSpaceFacts { version: old(0), ..facts() },
                "it is not defragmented, because etcd 3.5.0 can differ",
            ),
            (EtcdSpaceFacts { version: old(5), ..facts() }, "install 3.5.6 or later"),
            (EtcdSpaceFacts { free_disk_bytes: None, ..facts() }, "the free space of its disk"),
            (
                EtcdSpaceFacts { free_disk_bytes: Some(163 << 20), ..facts() },
                "defragmenting it needs 164 MiB on its disk, which has 163 MiB free",
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
            EtcdSpaceFacts { version: old(6), ..facts() },
            EtcdSpaceFacts { free_disk_bytes: Some(164 << 20), ..facts() },
        ] {
            assert_eq!(decide_space_step(&state), SpaceStep::Defragment, "{state:?}");
        }
    }
}
