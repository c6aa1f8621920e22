//! Snapshot schedule and retention of a cluster.
//!
//! A snapshot is taken when an operator orders it, when the cluster has none, when the voting members of etcd differ
//! from those of the last snapshot, and when the last one is as old as the policy says. While a member learns or is not
//! reached, a change of members is not final, and only an order or the interval counts.
//!
//! One is taken soon after another authority of the cluster has begun to sign, too. Nodes refuse what the former one signs,
//! so the cluster cannot be restored from a snapshot of before.
//!
//! The newest snapshots are kept, and the newest one of each day, so that a mistake can be undone even if it is found
//! late.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use uuid::Uuid;

use crate::cluster::state::ObservedCluster;
use crate::policy::SnapshotPolicy;
use crate::time::{Timestamp, between};

/// Shortest time between a snapshot and one because of another authority. Until the latter is taken, a cluster that is lost
/// cannot be restored.
const AUTHORITY_PAUSE: Duration = Duration::from_secs(10);

/// The last snapshot of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastSnapshot {
    /// Identifier of the snapshot.
    pub id: Uuid,
    /// When the snapshot was taken.
    pub at: Timestamp,
    /// Nodes whose members of etcd voted at that time.
    pub voters: BTreeSet<String>,
    /// SHA-256 of the certificate of the authority that signed at that time; `None` if an earlier release took it.
    pub authority: Option<Vec<u8>>,
    /// Whether it has a completed image of the whole etcd.
    pub has_image: bool,
}

/// The record of a cluster's snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterSnapshots {
    /// The last snapshot; `None` if there is none.
    pub last: Option<LastSnapshot>,
    /// When an operator last ordered one.
    pub requested_at: Option<Timestamp>,
}

/// Why a snapshot is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotReason {
    /// An operator ordered it.
    Ordered,
    /// The cluster has no snapshot.
    First,
    /// The voting members have changed since the last one.
    Members,
    /// Another authority of the cluster signs since the last one.
    Authority,
    /// The last snapshot is as old as the policy's interval.
    Interval,
}

impl SnapshotReason {
    /// The name used in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ordered => "ordered",
            Self::First => "first",
            Self::Members => "members",
            Self::Authority => "authority",
            Self::Interval => "interval",
        }
    }
}

impl fmt::Display for SnapshotReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Nodes whose members of etcd vote.
#[must_use]
pub fn voting_nodes(seen: &ObservedCluster) -> BTreeSet<String> {
    seen.etcd_members
        .iter()
        .filter(|member| !member.learner)
        .filter_map(|member| member.node.clone())
        .collect()
}

/// Why a snapshot is due now; `None` if none is. `signer` is the SHA-256 of the certificate of the authority that signs, as
/// far as the shepherd knows. The curators may know a later one, so the last snapshot may differ from it for a moment.
#[must_use]
pub fn snapshot_due(
    known: &ClusterSnapshots,
    seen: &ObservedCluster,
    signer: Option<&[u8]>,
    policy: &SnapshotPolicy,
    now: Timestamp,
) -> Option<SnapshotReason> {
    let Some(last) = &known.last else {
        return Some(if known.requested_at.is_some() {
            SnapshotReason::Ordered
        } else {
            SnapshotReason::First
        });
    };
    let at_rest =
        seen.etcd_members.iter().all(|member| !member.learner && member.reachable && member.node.is_some());
    if known.requested_at.is_some_and(|requested_at| requested_at > last.at) {
        Some(SnapshotReason::Ordered)
    } else if at_rest && voting_nodes(seen) != last.voters {
        Some(SnapshotReason::Members)
    } else if signer.is_some_and(|signer| last.authority.as_deref() != Some(signer))
        && between(last.at, now) >= AUTHORITY_PAUSE
    {
        Some(SnapshotReason::Authority)
    } else {
        (between(last.at, now) >= policy.interval.0).then_some(SnapshotReason::Interval)
    }
}

/// Snapshots that the policy does not keep any more.
#[must_use]
pub fn snapshots_to_delete(
    taken: &[(Uuid, Timestamp)],
    policy: &SnapshotPolicy,
    now: Timestamp,
) -> Vec<Uuid> {
    let mut newest_first = taken.to_vec();
    newest_first.sort_by_key(|(id, at)| (std::cmp::Reverse(*at), *id));
    let newest = usize::try_from(policy.newest.max(1)).unwrap_or(usize::MAX);
    let mut days = BTreeSet::new();
    let mut forgotten = Vec::new();
    for (place, (id, at)) in newest_first.into_iter().enumerate() {
        let age = (now.date_naive() - at.date_naive()).num_days();
        // This counts also if it is among the newest: a day keeps one snapshot, not one more besides those.
        let of_its_day = age < i64::from(policy.days) && days.insert(at.date_naive());
        if place >= newest && !of_its_day {
            forgotten.push(id);
        }
    }
    forgotten
}

/// A snapshot as the API and `shepherdctl` show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotView {
    /// UUID of the snapshot.
    pub id: String,
    /// When it was taken.
    pub taken_at: Timestamp,
    /// Why it was taken: `ordered`, `first`, `members`, `authority` or `interval`.
    pub reason: String,
    /// Revision of etcd in it.
    pub revision: i64,
    /// How often the cluster had been restored by then.
    pub epoch: u64,
    /// Encoded size in bytes.
    pub bytes: u64,
    /// Number of nodes in it.
    pub nodes: u32,
    /// Number of nodes in it that were members of etcd.
    pub members: u32,
    /// SHA-256 of the snapshot, in hexadecimal digits.
    pub digest: String,
    /// Size in bytes of the image of the whole etcd; `None` if it has none, and therefore no Kubernetes objects.
    pub image_bytes: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::state::EtcdMember;
    use crate::time::Span;

    const HOUR: i64 = 3600;

    fn at(second: i64) -> Timestamp {
        // Midnight.
        Timestamp::from_timestamp(1_799_971_200 + second, 0).unwrap()
    }

    fn member(node: &str) -> EtcdMember {
        EtcdMember { node: Some(node.to_owned()), learner: false, reachable: true }
    }

    fn observed(etcd: Vec<EtcdMember>) -> ObservedCluster {
        ObservedCluster { etcd_members: etcd, ..ObservedCluster::default() }
    }

    #[test]
    fn snapshot_is_taken_only_for_a_reason() {
        let last = |second: i64| {
            Some(LastSnapshot {
                id: Uuid::nil(),
                at: at(second),
                voters: ["a", "b"].map(str::to_owned).into(),
                authority: Some(vec![1]),
                has_image: false,
            })
        };
        let known = |last, requested: Option<i64>| ClusterSnapshots { last, requested_at: requested.map(at) };
        let same = observed(vec![member("a"), member("b")]);
        let grown = observed(vec![member("a"), member("b"), member("c")]);
        let learning = observed(vec![member("a"), member("b"), EtcdMember { learner: true, ..member("c") }]);
        let shrunk = observed(vec![member("a")]);
        let cut_off =
            observed(vec![member("a"), member("b"), EtcdMember { reachable: false, ..member("c") }]);
        let policy = SnapshotPolicy::default();
        for (name, known, seen, now, expected) in [
            ("none yet", known(None, None), &same, 0, Some(SnapshotReason::First)),
            ("none yet, and requested", known(None, Some(0)), &same, 0, Some(SnapshotReason::Ordered)),
            ("fresh", known(last(0), None), &same, HOUR - 1, None),
            ("as old as the interval", known(last(0), None), &same, HOUR, Some(SnapshotReason::Interval)),
            ("requested after the last", known(last(0), Some(1)), &same, 2, Some(SnapshotReason::Ordered)),
            ("requested before the last", known(last(2), Some(1)), &same, 3, None),
            ("one more votes", known(last(0), None), &grown, 1, Some(SnapshotReason::Members)),
            ("one votes no more", known(last(0), None), &shrunk, 1, Some(SnapshotReason::Members)),
            ("one learns", known(last(0), None), &learning, 1, None),
            ("one learns for long", known(last(0), None), &learning, HOUR, Some(SnapshotReason::Interval)),
            ("one more, not reached", known(last(0), None), &cut_off, 1, None),
            ("taken by a clock ahead", known(last(100), None), &same, 1, None),
        ] {
            for signer in [None, Some(&[1][..])] {
                assert_eq!(snapshot_due(&known, seen, signer, &policy, at(now)), expected, "{name}");
            }
        }
    }

    #[test]
    fn snapshot_is_taken_soon_after_another_authority_signs() {
        let seen = observed(vec![member("a")]);
        let last = |authority: Option<u8>| LastSnapshot {
            id: Uuid::nil(),
            at: at(0),
            voters: BTreeSet::from(["a".to_owned()]),
            authority: authority.map(|number| vec![number]),
            has_image: false,
        };
        let (due, policy) = (Some(SnapshotReason::Authority), SnapshotPolicy::default());
        for (name, authority, signer, now, expected) in [
            ("the same one", Some(1), Some(1), 11, None),
            ("nobody knows it", Some(1), None, 11, None),
            ("another one", Some(1), Some(2), 10, due),
            ("another one, at once", Some(1), Some(2), 9, None),
            ("by an earlier release", None, Some(1), 10, due),
        ] {
            let known = ClusterSnapshots { last: Some(last(authority)), requested_at: None };
            let signer: Option<[u8; 1]> = signer.map(|number| [number]);
            let signer = signer.as_ref().map(<[u8; 1]>::as_slice);
            assert_eq!(snapshot_due(&known, &seen, signer, &policy, at(now)), expected, "{name}");
        }
    }

    #[test]
    fn newest_and_daily_snapshots_are_retained() {
        let policy = SnapshotPolicy { interval: Span::hours(1), newest: 2, days: 3 };
        let day = 24 * HOUR;
        let id = |number: usize| Uuid::from_u128(u128::try_from(number).unwrap());
        for (name, seconds, now, forgotten) in [
            ("nothing", vec![], 0, vec![]),
            ("no more than the newest", vec![0, 1], 10, vec![]),
            ("one of today more", vec![0, 1, 2], 10, vec![0]),
            ("in any order", vec![2, 0, 1], 10, vec![1]),
            // The newest of that day and of the day before are kept; of earlier days none.
            ("days", vec![-3 * day, -2 * day, -2 * day + 5, -day, 1, 2], 10, vec![0, 1]),
            ("a day without one", vec![-2 * day, 1, 2, 3], 10, vec![1]),
            ("all of them old", vec![-9 * day, -8 * day, -7 * day], 10, vec![0]),
            ("from the future", vec![0, 1, 2 * day], 10, vec![0]),
        ] {
            let taken: Vec<(Uuid, Timestamp)> =
                seconds.iter().enumerate().map(|(number, second)| (id(number), at(*second))).collect();
            let mut found = snapshots_to_delete(&taken, &policy, at(now));
            found.sort_unstable();
            let expected: Vec<Uuid> = forgotten.into_iter().map(id).collect();
            assert_eq!(found, expected, "{name}");
        }
        let none = SnapshotPolicy { newest: 0, days: 0, ..policy };
        assert_eq!(
            snapshots_to_delete(&[(id(0), at(0)), (id(1), at(1))], &none, at(2)),
            [id(0)],
            "never the last one"
        );
    }
}
