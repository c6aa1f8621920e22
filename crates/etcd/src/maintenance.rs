//! Alarms of etcd, the size of its database file and its quota, and the way back from a full one.
//!
//! When the database file of a member reaches its quota, that member raises the alarm `NOSPACE`. From then on no member
//! accepts a write or grants a lease: no election and no lock of ours can be had. Reads, deletions, compactions and
//! changes of the membership still work. The alarm stays until somebody ends it. If the file still has its size then, the
//! next write raises it again.
//!
//! A compaction makes room inside the file. Only a defragmentation makes the file smaller, and etcd compares the size of
//! the file with the quota. A member applies no write while it is defragmented, and needs disk space for a second file of
//! the size that is in use.
//!
//! Alarms are read through a write of the Raft log, so [`Client::list_alarms`] needs a quorum and is not for each round
//! of a loop. [`DatabaseStatus::has_alarm`] is free.

use std::collections::BTreeSet;
use std::time::Duration;

use proto::etcdserverpb as wire;

use crate::client::{Client, EtcdError};
use crate::members::MemberId;

/// How long a compaction or a defragmentation of the largest file may take.
pub const MAINTENANCE_DEADLINE: Duration = Duration::from_mins(10);
/// How etcd writes an alarm among the errors of its status.
const ALARM_TEXT: &str = "alarm:";
/// The kind of alarm for lack of space in that text.
const NO_SPACE_TEXT: &str = "NOSPACE";

/// A kind of alarm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AlarmKind {
    /// The database file of the member has reached its quota. No member accepts writes.
    NoSpace,
    /// The data of the member differs from that of the others.
    Corrupt,
    /// A kind of a later etcd.
    Other(i32),
}

/// An alarm of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Alarm {
    /// The member that raised it. It may have been removed since.
    pub member: MemberId,
    /// What is wrong with that member.
    pub kind: AlarmKind,
}

/// The database file of the connected member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatabaseStatus {
    /// The member that responded.
    pub member: MemberId,
    /// The newest revision that it has applied.
    pub revision: i64,
    /// The version of etcd, such as `3.4.23`.
    pub version: String,
    /// Size of the file in bytes.
    pub file_bytes: u64,
    /// The part of the file that has data, at most. The rest is used again. etcd 3.4 counts the room that a compaction has
    /// made only with later writes.
    pub bytes_in_use: u64,
    /// Whether any member has an alarm.
    pub has_alarm: bool,
    /// Whether any member has the alarm for lack of space.
    pub has_space_alarm: bool,
    /// Whether the member is a learner. etcd serves its clients little more than this status.
    pub is_learner: bool,
    /// Index of the newest entry of the Raft log that is committed, as far as the member knows.
    pub committed_index: u64,
    /// Index of the newest entry that it has applied. It stays behind while the member applies a snapshot of the leader.
    pub applied_index: u64,
}

impl DatabaseStatus {
    /// Whether the member has not applied all that is committed.
    #[must_use]
    pub const fn is_behind(&self) -> bool {
        self.applied_index < self.committed_index
    }
}

impl Client {
    /// Reads the status of the connected member's database file. It responds without a quorum.
    pub async fn database_status(&self) -> Result<DatabaseStatus, EtcdError> {
        let mut maintenance = self.maintenance();
        let doing = "reading the size of etcd's database file".to_owned();
        let status = self
            .call_unary(doing, wire::StatusRequest {}, async |request| maintenance.status(request).await)
            .await?;
        Ok(decode_status(status))
    }

    /// All alarms of all members.
    pub async fn list_alarms(&self) -> Result<BTreeSet<Alarm>, EtcdError> {
        let alarms = self.call_alarm("listing the alarms of etcd".to_owned(), wire::AlarmRequest::default());
        Ok(alarms.await?.alarms.iter().filter_map(decode_alarm).collect())
    }

    /// Ends the alarm of a member for lack of space. If there is none, nothing happens.
    pub async fn end_space_alarm(&self, member: MemberId) -> Result<(), EtcdError> {
        let request = wire::AlarmRequest {
            action: wire::alarm_request::AlarmAction::Deactivate.into(),
            member_id: member.0,
            alarm: wire::AlarmType::Nospace.into(),
        };
        self.call_alarm(format!("ending the space alarm of member {member}"), request).await.map(drop)
    }

    async fn call_alarm(
        &self,
        doing: String,
        request: wire::AlarmRequest,
    ) -> Result<wire::AlarmResponse, EtcdError> {
        let mut maintenance = self.maintenance();
        self.call_unary(doing, request, async |request| maintenance.alarm(request).await).await
    }

    /// Compacts the history before this revision on all members, and waits until the room is free in the connected
    /// member's file. A revision that is compacted already is no error.
    pub async fn compact_physically(&self, revision: i64) -> Result<(), EtcdError> {
        let client = self.clone().with_deadline(MAINTENANCE_DEADLINE);
        match client.call_compact(wire::CompactionRequest { revision, physical: true }).await {
            Err(EtcdError::Compacted { .. }) => Ok(()),
            compacted => compacted,
        }
    }

    /// Defragments the database file of the connected member, which applies no write meanwhile. A client with several
    /// endpoints would defragment any of them.
    pub async fn defragment(&self) -> Result<(), EtcdError> {
        let client = self.clone().with_deadline(MAINTENANCE_DEADLINE);
        let mut maintenance = client.maintenance();
        let doing = "defragmenting the database file of etcd".to_owned();
        let request = wire::DefragmentRequest {};
        client
            .call_unary(doing, request, async |request| maintenance.defragment(request).await)
            .await
            .map(drop)
    }
}

fn decode_status(status: wire::StatusResponse) -> DatabaseStatus {
    let header = status.header.unwrap_or_default();
    let mut alarms = status.errors.iter().filter(|error| error.contains(ALARM_TEXT)).peekable();
    DatabaseStatus {
        member: MemberId(header.member_id),
        revision: header.revision,
        version: status.version,
        file_bytes: status.db_size.try_into().unwrap_or(0),
        bytes_in_use: status.db_size_in_use.try_into().unwrap_or(0),
        has_alarm: alarms.peek().is_some(),
        has_space_alarm: alarms.any(|alarm| alarm.contains(NO_SPACE_TEXT)),
        is_learner: status.is_learner,
        committed_index: status.raft_index,
        applied_index: status.raft_applied_index,
    }
}

fn decode_alarm(alarm: &wire::AlarmMember) -> Option<Alarm> {
    let kind = match wire::AlarmType::try_from(alarm.alarm) {
        Ok(wire::AlarmType::None) => return None,
        Ok(wire::AlarmType::Nospace) => AlarmKind::NoSpace,
        Ok(wire::AlarmType::Corrupt) => AlarmKind::Corrupt,
        Err(_) => AlarmKind::Other(alarm.alarm),
    };
    Some(Alarm { member: MemberId(alarm.member_id), kind })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_shows_alarms_and_whether_the_member_is_behind() {
        for (errors, alarm, space) in [
            (&[][..], false, false),
            (&["etcdserver: no leader"], false, false),
            (&["memberID:31 alarm:NOSPACE "], true, true),
            (&["memberID:31 alarm:CORRUPT "], true, false),
            (&["memberID:31 alarm:CORRUPT ", "memberID:32  alarm:NOSPACE"], true, true),
        ] {
            let errors = errors.iter().map(|error| (*error).to_owned()).collect();
            let status = decode_status(wire::StatusResponse { errors, ..wire::StatusResponse::default() });
            assert_eq!((status.has_alarm, status.has_space_alarm), (alarm, space), "{status:?}");
        }
        for (raft_index, raft_applied_index, behind) in [(8, 8, false), (9, 8, true), (8, 9, false)] {
            let status = wire::StatusResponse {
                raft_index,
                raft_applied_index,
                is_learner: true,
                ..wire::StatusResponse::default()
            };
            let status = decode_status(status);
            assert_eq!((status.is_behind(), status.is_learner), (behind, true), "{status:?}");
        }
    }

    #[test]
    fn alarm_of_an_unknown_kind_is_not_lost() {
        for (number, expected) in [
            (0, None),
            (1, Some(AlarmKind::NoSpace)),
            (2, Some(AlarmKind::Corrupt)),
            (7, Some(AlarmKind::Other(7))),
        ] {
            let decoded = decode_alarm(&wire::AlarmMember { member_id: 31, alarm: number });
            assert_eq!(decoded, expected.map(|kind| Alarm { member: MemberId(31), kind }), "{number}");
        }
    }
}
