//! When a cluster's snapshot is taken, and which of them are kept.
//!
//! One is taken when a person asks for it, when the cluster has none, when other members vote in etcd than did when the
//! last one was taken, and when the last one is as old as the policy says. While a member learns, or is not reached,
//! nothing has changed for good, and a change is not yet a reason; the interval is.
//!
//! Kept are the newest ones, and of each day the newest of that day, so that a mistake that is found late can be undone.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::model::cluster::state::Seen;
use crate::model::time::{Span, Timestamp, between};

/// The most snapshots of one kind that may be kept of a cluster.
pub const MOST_KEPT: u32 = 1_000;
/// After so many intervals without a snapshot somebody should look.
pub const MISSED: u32 = 3;

/// How often snapshots are taken, and how many are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotPolicy {
    /// The next one is taken when the last one is this old.
    pub interval: Span,
    /// So many of the newest are kept.
    pub newest: u32,
    /// Of each of so many days the newest one is kept.
    pub days: u32,
}

impl Default for SnapshotPolicy {
    fn default() -> Self {
        Self { interval: Span::hours(1), newest: 24, days: 7 }
    }
}

impl SnapshotPolicy {
    /// How old the last snapshot may be before somebody should look.
    #[must_use]
    pub fn overdue_after(&self) -> Duration {
        self.interval.0.saturating_mul(MISSED)
    }
}

/// The last snapshot of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastSnapshot {
    /// Which.
    pub id: Uuid,
    /// When it was taken.
    pub at: Timestamp,
    /// Nodes whose members voted in etcd then.
    pub voters: BTreeSet<String>,
}

/// What is known of a cluster's snapshots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshots {
    /// The last one.
    pub last: Option<LastSnapshot>,
    /// When a person last asked for one.
    pub asked: Option<Timestamp>,
}

/// Why one is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// A person asked for it.
    Ordered,
    /// There is none.
    First,
    /// Other members vote than did.
    Members,
    /// The last one is old.
    Interval,
}

impl Why {
    /// The name used in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ordered => "ordered",
            Self::First => "first",
            Self::Members => "members",
            Self::Interval => "interval",
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Nodes whose members vote in etcd.
#[must_use]
pub fn voters(seen: &Seen) -> BTreeSet<String> {
    seen.etcd.iter().filter(|member| !member.learner).filter_map(|member| member.node.clone()).collect()
}

/// Whether a snapshot is to be taken now, and why.
#[must_use]
pub fn due(known: &Snapshots, seen: &Seen, policy: &SnapshotPolicy, now: Timestamp) -> Option<Why> {
    let Some(last) = &known.last else {
        return Some(if known.asked.is_some() { Why::Ordered } else { Why::First });
    };
    let at_rest = seen.etcd.iter().all(|member| !member.learner && member.reachable && member.node.is_some());
    if known.asked.is_some_and(|asked| asked > last.at) {
        Some(Why::Ordered)
    } else if at_rest && voters(seen) != last.voters {
        Some(Why::Members)
    } else {
        (between(last.at, now) >= policy.interval.0).then_some(Why::Interval)
    }
}

/// Which of these snapshots are not kept any more.
#[must_use]
pub fn to_forget(taken: &[(Uuid, Timestamp)], policy: &SnapshotPolicy, now: Timestamp) -> Vec<Uuid> {
    let mut newest_first = taken.to_vec();
    newest_first.sort_by_key(|(id, at)| (std::cmp::Reverse(*at), *id));
    let newest = usize::try_from(policy.newest.max(1)).unwrap_or(usize::MAX);
    let mut days = BTreeSet::new();
    let mut forgotten = Vec::new();
    for (place, (id, at)) in newest_first.into_iter().enumerate() {
        let age = (now.date_naive() - at.date_naive()).num_days();
        // Whether or not it is among the newest: a day has one, and not one more besides those.
        let of_its_day = age < i64::from(policy.days) && days.insert(at.date_naive());
        if place >= newest && !of_its_day {
            forgotten.push(id);
        }
    }
    forgotten
}

/// A snapshot as people see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotView {
    /// UUID.
    pub id: String,
    /// When it was taken.
    pub taken_at: Timestamp,
    /// `ordered`, `first`, `members` or `interval`.
    pub why: String,
    /// etcd's revision.
    pub revision: i64,
    /// How often the cluster had been restored by then.
    pub epoch: u64,
    /// Its size, encoded, in bytes.
    pub bytes: u64,
    /// Nodes in it.
    pub nodes: u32,
    /// Nodes in it that were members of etcd.
    pub members: u32,
    /// SHA-256, hexadecimal digits.
    pub digest: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::cluster::state::EtcdMember;

    const HOUR: i64 = 3600;

    fn at(second: i64) -> Timestamp {
        // Midnight.
        Timestamp::from_timestamp(1_799_971_200 + second, 0).unwrap()
    }

    fn member(node: &str) -> EtcdMember {
        EtcdMember { node: Some(node.to_owned()), learner: false, reachable: true }
    }

    fn seen(etcd: Vec<EtcdMember>) -> Seen {
        Seen { etcd, ..Seen::default() }
    }

    #[test]
    fn snapshot_is_taken_when_there_is_a_reason_and_not_otherwise() {
        let last = |second: i64| {
            Some(LastSnapshot {
                id: Uuid::nil(),
                at: at(second),
                voters: ["a", "b"].map(str::to_owned).into(),
            })
        };
        let known = |last, asked: Option<i64>| Snapshots { last, asked: asked.map(at) };
        let same = seen(vec![member("a"), member("b")]);
        let grown = seen(vec![member("a"), member("b"), member("c")]);
        let learning = seen(vec![member("a"), member("b"), EtcdMember { learner: true, ..member("c") }]);
        let shrunk = seen(vec![member("a")]);
        let cut_off = seen(vec![member("a"), member("b"), EtcdMember { reachable: false, ..member("c") }]);
        let policy = SnapshotPolicy::default();
        for (name, known, seen, now, expected) in [
            ("none yet", known(None, None), &same, 0, Some(Why::First)),
            ("none yet, and asked for", known(None, Some(0)), &same, 0, Some(Why::Ordered)),
            ("fresh", known(last(0), None), &same, HOUR - 1, None),
            ("as old as the interval", known(last(0), None), &same, HOUR, Some(Why::Interval)),
            ("asked for since", known(last(0), Some(1)), &same, 2, Some(Why::Ordered)),
            ("asked for before", known(last(2), Some(1)), &same, 3, None),
            ("one more votes", known(last(0), None), &grown, 1, Some(Why::Members)),
            ("one votes no more", known(last(0), None), &shrunk, 1, Some(Why::Members)),
            ("one learns", known(last(0), None), &learning, 1, None),
            ("one learns for long", known(last(0), None), &learning, HOUR, Some(Why::Interval)),
            ("one more, not reached", known(last(0), None), &cut_off, 1, None),
            ("taken by a clock ahead", known(last(100), None), &same, 1, None),
        ] {
            assert_eq!(due(&known, seen, &policy, at(now)), expected, "{name}");
        }
    }

    #[test]
    fn newest_are_kept_and_one_of_each_day() {
        let policy = SnapshotPolicy { interval: Span::hours(1), newest: 2, days: 3 };
        let day = 24 * HOUR;
        let id = |number: usize| Uuid::from_u128(u128::try_from(number).unwrap());
        for (name, seconds, now, forgotten) in [
            ("nothing", vec![], 0, vec![]),
            ("no more than the newest", vec![0, 1], 10, vec![]),
            ("one of today more", vec![0, 1, 2], 10, vec![0]),
            ("in any order", vec![2, 0, 1], 10, vec![1]),
            // The day's newest is kept, and of the day before as well; of that before none.
            ("days", vec![-3 * day, -2 * day, -2 * day + 5, -day, 1, 2], 10, vec![0, 1]),
            ("a day without one", vec![-2 * day, 1, 2, 3], 10, vec![1]),
            ("all of them old", vec![-9 * day, -8 * day, -7 * day], 10, vec![0]),
            ("from the future", vec![0, 1, 2 * day], 10, vec![0]),
        ] {
            let taken: Vec<(Uuid, Timestamp)> =
                seconds.iter().enumerate().map(|(number, second)| (id(number), at(*second))).collect();
            let mut found = to_forget(&taken, &policy, at(now));
            found.sort_unstable();
            let expected: Vec<Uuid> = forgotten.into_iter().map(id).collect();
            assert_eq!(found, expected, "{name}");
        }
        let none = SnapshotPolicy { newest: 0, days: 0, ..policy };
        assert_eq!(to_forget(&[(id(0), at(0)), (id(1), at(1))], &none, at(2)), [id(0)], "never the last one");
    }
}
