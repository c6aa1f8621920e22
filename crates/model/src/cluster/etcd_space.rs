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
//! defragmentation would let two members go at once. A member without a connection for [`ABSENCE_TIME`] loses its turn,
//! because nothing would end the wait for a dead member: it cannot even be replaced, as that is a write. Two members that
//! raise the alarm do so within moments, since etcd raises none while there is one. So nothing is done until the alarms
//! are the same for [`SETTLE_TIME`]. If two go at once nevertheless, their reads stall for as long as that takes, and no
//! data is lost.
//!
//! The alarm of an absent or removed member is ended by every other member. To end an alarm that is not raised any more
//! changes nothing, so they need no order, and none of them waits for one that may never act.
//!
//! A learner has no turn. etcd serves its clients only the status and reads of its own data, so it can make no room. It
//! has to be promoted or removed, and every voter reports that.
//!
//! Other members may be over their quota, too. They raise the alarm with the next write, and then it is their turn.
//!
//! # Before the alarm
//!
//! A file that has [`PREVENTION_PERCENT`] of its quota, and most of it unused, is defragmented before there is an alarm.
//! From that size on it is an issue (`cluster-etcd-large`), which would otherwise last for a file that never grows again,
//! because new data takes the unused room. Leases can be granted then, so the member takes a lock first, and another one
//! waits ([`SpaceStep::DefragmentInTurn`]).
//!
//! # What is done
//!
//! The member compacts the history, defragments its own file, and ends its own alarm. It ends the alarm only if the file
//! has become smaller than [`RESUME_PERCENT`] of the quota: otherwise the alarm would return with the next writes, and the
//! member would be defragmented again and again. If the data alone needs more than that, only a person can decide what
//! to delete. Deletions are accepted all the time, and the member continues by itself after them.
//!
//! Only the size after a defragmentation shows what the data needs. From 3.5 on, etcd then reports correctly how much of
//! the file is used, so it is enough to compact again after deletions. etcd 3.4 counts the room that a compaction has made
//! only with later writes, and there are none: the member is defragmented again, after a time that doubles with each run
//! without gain.
//!
//! A compaction is due once for the alarms, and again only after [`DEFRAGMENTATION_INTERVAL`] and new revisions: some
//! versions lose the event of a deletion that they compact at its very revision (`etcd-lost-delete-event`).
//!
//! # Faults of etcd
//!
//! A defragmentation needs disk space for a second file, and etcd can crash without it. Versions that a crash during a
//! defragmentation damages are never defragmented (`etcd-killed-defragmentation`). Other versions are damaged by a snapshot
//! of the leader that arrives during it (`etcd-defragmentation`). Those are defragmented only once they are full. No member
//! is defragmented before it has applied all that is committed, which it has not while it receives a snapshot.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::byte_size::ByteSize;
use crate::humanize::humanize_duration;
use crate::kubernetes::version::ReleaseVersion;
use crate::program_versions::version::ProgramVersion;
use crate::program_versions::{
    KILLED_DEFRAGMENTATION_FAULT, Program, SNAPSHOT_DEFRAGMENTATION_FAULT, VersionFinding, find_faults,
};

/// What is the matter with an etcd that has the alarm for lack of space, as a part of a sentence about it.
pub const FULL_ETCD: &str = "is full (alarm NOSPACE) and accepts no writes until its members have made room";

/// How long the alarms must have been the same before anything is done.
pub const SETTLE_TIME: Duration = Duration::from_secs(10);
/// How long a member with the alarm must have been without a connection before it is passed over.
pub const ABSENCE_TIME: Duration = Duration::from_mins(1);
/// Time between two compactions, and between the first two defragmentations of a member with data that alone is too large.
pub const DEFRAGMENTATION_INTERVAL: Duration = Duration::from_mins(10);
/// Time between the first two defragmentations of a member while its file has unused room.
pub const SHORT_DEFRAGMENTATION_INTERVAL: Duration = Duration::from_mins(1);
/// The longest time between two defragmentations of a member with data that alone is too large.
pub const LONGEST_DEFRAGMENTATION_INTERVAL: Duration = Duration::from_hours(1);
/// Part of its quota that a file may have for its alarm to end.
pub const RESUME_PERCENT: u64 = 90;
/// Part of its quota from which a file that is mostly unused is made smaller before the alarm.
pub const PREVENTION_PERCENT: u64 = 80;
/// Disk space that must be left beside the second file.
const SPARE_BYTES: u64 = 64 << 20;
/// The first version that counts the room of a compaction without later writes.
const COUNTS_ROOM: ReleaseVersion = ReleaseVersion::new(3, 5, 0);

/// What a member of etcd knows about its space and that of the others. Numbers are member ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdSpaceFacts {
    /// The member that decides.
    pub own: u64,
    /// Whether it is a learner. Then it knows no alarms and no members.
    pub is_learner: bool,
    /// Whether its etcd reports that any member has no space.
    pub is_space_exhausted: bool,
    /// All members of the cluster.
    pub members: BTreeSet<u64>,
    /// Those of them that have no vote.
    pub learners: BTreeSet<u64>,
    /// How long members with the alarm have been without a connection to this one. The others are connected.
    pub absent_for: BTreeMap<u64, Duration>,
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
    /// Free space on the disk of the file; `None` if it cannot be read. It has no meaning while the file is small.
    pub free_disk_bytes: Option<u64>,
    /// Version of this member's etcd; `None` if it cannot be parsed.
    pub version: Option<ProgramVersion>,
    /// Whether it has not applied all that is committed.
    pub is_behind: bool,
    /// Time since this member last compacted the history; `None` if it did not since the alarms changed.
    pub since_compaction: Option<Duration>,
    /// Revisions since that compaction.
    pub new_revisions: u64,
    /// Time since the end of this member's last defragmentation; `None` if it was not defragmented since the role server
    /// started.
    pub since_defragmentation: Option<Duration>,
    /// How many of its last defragmentations failed or gained nothing.
    pub fruitless_defragmentations: u32,
}

/// What a member does next about its space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpaceStep {
    /// No member has the alarm, and nothing is due.
    Rest,
    /// Defragments the file of this member under the lock and the conditions of a restart in turn.
    DefragmentInTurn,
    /// Nothing now. The reason is a part of a sentence. It has no measured number, so it is reported once.
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
    if facts.is_learner {
        return if facts.is_space_exhausted { wait_for_promotion(facts.own) } else { SpaceStep::Rest };
    }
    let Some(lowest) = facts.full.first() else { return prevent_alarm(facts) };
    if facts.unchanged_for < SETTLE_TIME {
        return SpaceStep::Wait("room is made in a moment".to_owned());
    }
    let is_voter = |member: &&u64| !facts.learners.contains(*member);
    match facts.full.iter().filter(is_voter).find(|member| !is_absent(facts, **member)) {
        Some(turn) if *turn == facts.own => make_room(facts),
        Some(turn) if facts.absent_for.contains_key(turn) => {
            SpaceStep::Wait(format!("member {turn:x} has the alarm and no connection"))
        }
        Some(turn) => SpaceStep::Wait(format!("member {turn:x} makes room first")),
        // An alarm of an absent member is worthless: one that returns raises it again if its file is still too large.
        None => match facts.full.iter().find(|member| is_absent(facts, **member)) {
            Some(absent) => SpaceStep::EndAlarm(*absent),
            None => wait_for_promotion(*lowest),
        },
    }
}

/// Size of the file below which the alarm may end.
#[must_use]
pub const fn resume_limit(quota_bytes: u64) -> u64 {
    quota_bytes / 100 * RESUME_PERCENT
}

/// Size of the file from which it is made smaller before the alarm, in bytes. Nothing is due for a file that is smaller.
#[must_use]
pub const fn prevention_limit(quota_bytes: u64) -> u64 {
    quota_bytes / 100 * PREVENTION_PERCENT
}

/// How many of the last defragmentations were fruitless after one more of them. `after` is the size of the file then, `None`
/// if it failed.
#[must_use]
pub fn count_fruitless(former: u32, before: u64, after: Option<u64>) -> u32 {
    if after.is_some_and(|after| after < resume_limit(before)) { 0 } else { former.saturating_add(1) }
}

/// Whether a member was removed, or has had no connection for so long that nothing waits for it.
fn is_absent(facts: &EtcdSpaceFacts, member: u64) -> bool {
    let absent_for = facts.absent_for.get(&member);
    member != facts.own
        && (!facts.members.contains(&member) || absent_for.is_some_and(|since| *since >= ABSENCE_TIME))
}

fn wait_for_promotion(learner: u64) -> SpaceStep {
    SpaceStep::Wait(format!(
        "member {learner:x} is a learner, which can make no room: promote it or remove it"
    ))
}

/// The next step while no member has the alarm.
fn prevent_alarm(facts: &EtcdSpaceFacts) -> SpaceStep {
    let limit = prevention_limit(facts.quota_bytes);
    let gains = facts.file_bytes >= limit && facts.bytes_in_use < facts.file_bytes / 2;
    let recent = facts.since_defragmentation.is_some_and(|since| since < DEFRAGMENTATION_INTERVAL);
    let risky =
        facts.version.and_then(|version| find_fault(version, SNAPSHOT_DEFRAGMENTATION_FAULT)).is_some();
    let objects = find_harm(facts).or_else(|| find_lack_of_disk(facts)).is_some();
    if gains && !recent && !risky && !objects { SpaceStep::DefragmentInTurn } else { SpaceStep::Rest }
}

/// The next step while it is this member's turn.
fn make_room(facts: &EtcdSpaceFacts) -> SpaceStep {
    if facts.file_bytes < resume_limit(facts.quota_bytes) {
        return SpaceStep::EndAlarm(facts.own);
    }
    if let Some(harm) = find_harm(facts) {
        return SpaceStep::Wait(harm);
    }
    let due = |since| since >= DEFRAGMENTATION_INTERVAL && facts.new_revisions > 0;
    if facts.since_compaction.is_none_or(due) {
        return SpaceStep::Compact;
    }
    match find_lack_of_disk(facts).or_else(|| find_pause(facts)) {
        Some(objection) => SpaceStep::Wait(objection),
        None => SpaceStep::Defragment,
    }
}

fn find_fault(version: ProgramVersion, name: &str) -> Option<VersionFinding> {
    find_faults(Program::Etcd, version).into_iter().find(|found| found.fault.name == name)
}

/// Why a defragmentation could damage this member now.
fn find_harm(facts: &EtcdSpaceFacts) -> Option<String> {
    let Some(version) = facts.version else {
        return Some(
            "its version cannot be parsed, so it is not defragmented: install another etcd".to_owned(),
        );
    };
    if let Some(fault) = find_fault(version, KILLED_DEFRAGMENTATION_FAULT) {
        return Some(format!("it is not defragmented, because {fault}"));
    }
    facts.is_behind.then(|| "it first applies what the other members have committed".to_owned())
}

/// Why the disk of this member has no room for a defragmentation.
fn find_lack_of_disk(facts: &EtcdSpaceFacts) -> Option<String> {
    let needed = facts.bytes_in_use.saturating_add(SPARE_BYTES);
    match facts.free_disk_bytes {
        None => Some("the free space of its disk cannot be read".to_owned()),
        Some(free) if free < needed => Some(format!(
            "its disk has no room for a second database file with the data of the first and {}: delete files there",
            ByteSize(SPARE_BYTES).humanize()
        )),
        Some(_) => None,
    }
}

/// Why a defragmentation would gain nothing yet.
fn find_pause(facts: &EtcdSpaceFacts) -> Option<String> {
    let since = facts.since_defragmentation?;
    let factor = 1 << facts.fruitless_defragmentations.saturating_sub(1).min(6);
    if facts.bytes_in_use < resume_limit(facts.quota_bytes) {
        let pause = (SHORT_DEFRAGMENTATION_INTERVAL * factor).min(DEFRAGMENTATION_INTERVAL);
        return (since < pause).then(|| {
            "it was defragmented a moment ago, and is defragmented again in some minutes".to_owned()
        });
    }
    let counts_room = facts.version.is_some_and(|version| version.upstream.numbers >= COUNTS_ROOM);
    let (pause, resumes_within) = if counts_room {
        (LONGEST_DEFRAGMENTATION_INTERVAL, DEFRAGMENTATION_INTERVAL)
    } else {
        let pause = (DEFRAGMENTATION_INTERVAL * factor).min(LONGEST_DEFRAGMENTATION_INTERVAL);
        (pause, pause)
    };
    (since < pause).then(|| {
        format!(
            "its data alone needs more than {RESUME_PERCENT} % of {}: delete Kubernetes objects that nothing needs, which \
             etcd accepts; it makes the rest of the way back by itself within {}",
            ByteSize(facts.quota_bytes).humanize(),
            humanize_duration(resumes_within)
        )
    })
}

#[cfg(test)]
mod tests;
