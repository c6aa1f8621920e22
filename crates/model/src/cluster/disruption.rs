//! Cluster's objection to disrupting one of its machines (quorum, one at a time).
//!
//! A machine that is silent to us may still report to its curator. Then only the path between it and us is broken, and
//! a reboot would take a working node from the cluster. Of the machines of one cluster, only one is disrupted at a
//! time. A voting member of etcd is not disrupted if the remaining members would have no majority.
//!
//! The curators' last answer is valid for [`OBSERVATION_TTL`]. When no curator answers after that, either the cluster
//! is down and its machines need help, or we are cut off from it. Nothing is done until [`UNREACHABLE_GRACE`] has
//! passed.
//!
//! The single member of a control plane is the exception, for the step that does not reboot it. Its curators are silent
//! because this very machine is, so their silence shows nothing that its own does not, and no other member could show
//! more by waiting. The step restarts the agent over SSH: it ends no workload, etcd and the pods go on, and it cannot be
//! taken at all if we are cut off from the machine. A reboot would end a control plane that may work for others, so it
//! waits for the grace as everywhere else.

use std::time::Duration;

use crate::cluster::quorum::tolerates_one_failure;
use crate::policy::DisruptionKind;
use crate::time::{Timestamp, after, between};

/// How long an answer of the curators is valid. They are queried every few seconds.
pub const OBSERVATION_TTL: Duration = Duration::from_mins(1);
/// How long a cluster is left alone after the last answer of its curators.
pub const UNREACHABLE_GRACE: Duration = Duration::from_mins(10);
/// Delay until the next check after an objection.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// What the disruption check needs to know of a machine's cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterContext {
    /// Name of the cluster, for people.
    pub name: String,
    /// Whether its curators have ever answered.
    pub founded: bool,
    /// Whether the cluster is being deleted, or the machine leaves it.
    pub leaving: bool,
    /// Health of the machine's node by the leading curator: `healthy`, `silent`, `unknown`; `None` if it is not a node.
    pub health: Option<String>,
    /// Whether the machine's node votes in etcd.
    pub voter: bool,
    /// Number of voting members of etcd, and how many of them the leader reaches.
    pub votes: Option<(usize, usize)>,
    /// When the curators last answered.
    pub observed_at: Option<Timestamp>,
    /// Another machine of the cluster that is being disrupted now.
    pub other_disrupted: Option<String>,
}

impl ClusterContext {
    /// Whether the machine is the only voting member of etcd, by the last answer of its curators.
    fn is_only_member(&self) -> bool {
        self.voter && matches!(self.votes, Some((1, _)))
    }
}

/// Why `step` may not be taken on the machine now, and when to check again; `None` if the cluster does not object.
#[must_use]
pub fn disruption_objection(
    cluster: &ClusterContext,
    step: DisruptionKind,
    now: Timestamp,
) -> Option<(String, Timestamp)> {
    let refuse = |reason: String, again: Timestamp| Some((reason, again));
    let name = &cluster.name;
    if let Some(other) = &cluster.other_disrupted {
        let reason = format!("{other}, of the same cluster {name}, is being recovered: one at a time");
        return refuse(reason, after(now, RETRY_AFTER));
    }
    if cluster.leaving || !cluster.founded {
        return None;
    }
    let Some(seen) = cluster.observed_at.filter(|seen| between(*seen, now) <= OBSERVATION_TTL) else {
        if cluster.is_only_member() && !step.reboots() {
            return None;
        }
        let until = after(cluster.observed_at.unwrap_or(now), UNREACHABLE_GRACE);
        return (until > now).then(|| {
            let reason = format!(
                "none of the curators of cluster {name} answers: either it is down, or we are cut off from it"
            );
            (reason, until.min(after(now, RETRY_AFTER)))
        });
    };
    let again =
        after(seen, OBSERVATION_TTL).min(after(now, RETRY_AFTER)).max(after(now, Duration::from_secs(1)));
    if cluster.health.as_deref() == Some("healthy") {
        return refuse(format!("unreachable by us, healthy to its curator (cluster {name})"), again);
    }
    let (voters, reached) = cluster.votes?;
    // The machine's own node is not healthy, so the reached members are others.
    if cluster.voter && !tolerates_one_failure(voters, reached) {
        let reason = format!(
            "it votes in cluster {name}, of whose {voters} members {reached} are reached; without it no majority \
             would be left"
        );
        return refuse(reason, again);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn silent_member() -> ClusterContext {
        ClusterContext {
            name: "ams".to_owned(),
            founded: true,
            leaving: false,
            health: Some("silent".to_owned()),
            voter: true,
            votes: Some((3, 2)),
            observed_at: Some(at(98)),
            other_disrupted: None,
        }
    }

    #[test]
    fn cluster_objects_to_harmful_disruption() {
        let healthy = ClusterContext { health: Some("healthy".to_owned()), ..silent_member() };
        let alone = ClusterContext { other_disrupted: Some("m2".to_owned()), ..silent_member() };
        let needed = ClusterContext { votes: Some((3, 1)), ..silent_member() };
        for (name, cluster, expected) in [
            ("one of three is silent", silent_member(), ""),
            ("a worker", ClusterContext { voter: false, votes: Some((3, 1)), ..silent_member() }, ""),
            (
                "healthy to its curator",
                healthy.clone(),
                "unreachable by us, healthy to its curator (cluster ams)",
            ),
            ("another is at it", alone.clone(), "m2, of the same cluster ams, is being recovered"),
            (
                "its vote is needed",
                needed.clone(),
                "it votes in cluster ams, of whose 3 members 1 are reached",
            ),
            ("one of five, two silent", ClusterContext { votes: Some((5, 3)), ..silent_member() }, ""),
            (
                "one of five, three silent",
                ClusterContext { votes: Some((5, 2)), ..silent_member() },
                "it votes",
            ),
            ("the only one", ClusterContext { votes: Some((1, 0)), ..silent_member() }, "it votes"),
            ("it is no node yet", ClusterContext { health: None, voter: false, ..silent_member() }, ""),
            ("healthy, and leaves", ClusterContext { leaving: true, ..healthy.clone() }, ""),
            ("another is at it, and it leaves", ClusterContext { leaving: true, ..alone }, "m2"),
            ("not founded", ClusterContext { founded: false, ..healthy.clone() }, ""),
            (
                "old news",
                ClusterContext { observed_at: Some(at(39)), ..healthy.clone() },
                "none of the curators",
            ),
            ("very old news", ClusterContext { observed_at: Some(at(-501)), ..healthy.clone() }, ""),
            ("just not old", ClusterContext { observed_at: Some(at(40)), ..healthy }, "unreachable by us"),
            ("needed, as was long ago", ClusterContext { observed_at: Some(at(-501)), ..needed }, ""),
        ] {
            let reported = disruption_objection(&cluster, DisruptionKind::Reboot, at(100));
            let (reason, again) = reported.unwrap_or_else(|| (String::new(), at(101)));
            assert!(
                reason.starts_with(expected) && reason.is_empty() == expected.is_empty(),
                "{name}: {reason}"
            );
            assert!(again > at(100), "{name}: checked again at once");
        }
    }

    /// The curators answered so many seconds ago. Which steps of the ladder the cluster permits.
    #[test]
    fn only_member_gets_its_agent_back_before_the_cluster_counts_as_down() {
        use DisruptionKind::{PowerCycle, Reboot, RestartAgent};
        let only = || ClusterContext { votes: Some((1, 1)), ..silent_member() };
        let all = [RestartAgent, Reboot, PowerCycle];
        let cases: [(&str, ClusterContext, i64, &[DisruptionKind]); 9] = [
            ("the only member", only(), 120, &[RestartAgent]),
            ("the only member, at the end of the grace", only(), 599, &[RestartAgent]),
            ("the only member, and the cluster counts as down", only(), 601, &all),
            // Its curator answers, so we are not cut off, and something else is wrong.
            (
                "the only member, and its curator answers",
                ClusterContext { votes: Some((1, 0)), ..silent_member() },
                10,
                &[],
            ),
            ("one of three", silent_member(), 120, &[]),
            ("one of two", ClusterContext { votes: Some((2, 1)), ..silent_member() }, 120, &[]),
            ("a worker beside an only member", ClusterContext { voter: false, ..only() }, 120, &[]),
            ("nobody knows the members", ClusterContext { votes: None, ..silent_member() }, 120, &[]),
            (
                "the only member, and a worker is recovered",
                ClusterContext { other_disrupted: Some("m2".to_owned()), ..only() },
                120,
                &[],
            ),
        ];
        for (name, cluster, age, permitted) in cases {
            let cluster = ClusterContext { observed_at: Some(at(100 - age)), ..cluster };
            let found: Vec<DisruptionKind> = all
                .into_iter()
                .filter(|step| disruption_objection(&cluster, *step, at(100)).is_none())
                .collect();
            assert_eq!(found, permitted, "{name}");
        }
    }
}
