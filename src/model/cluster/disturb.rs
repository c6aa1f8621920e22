//! May a machine of a cluster be disturbed? What its cluster says to that.
//!
//! A machine that we do not hear may be heard by its curator: then the way between it and us is broken, and rebooting it
//! would only take from the cluster what works. Of the machines of one cluster, one at a time is disturbed; and none that
//! votes in etcd when fewer than most of the members would be left.
//!
//! What the curators said is believed for as long as [`FRESH`]. When none of them answers any more, the cluster may be
//! down, and its machines are what has to be helped; or we may be cut off from it. For [`PATIENCE`] nothing is done.

use std::time::Duration;

use crate::model::cluster::quorum::bears_the_loss_of_one;
use crate::model::time::{Timestamp, after, between};

/// How long an answer of the curators counts. They are asked every few seconds.
pub const FRESH: Duration = Duration::from_mins(1);
/// How long a cluster is left alone after its curators answered last.
pub const PATIENCE: Duration = Duration::from_mins(10);
/// When asking again makes sense.
const AGAIN: Duration = Duration::from_secs(30);

/// What a machine's cluster goes through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InCluster {
    /// The cluster's name.
    pub name: String,
    /// Whether its curators ever answered us.
    pub founded: bool,
    /// Whether the cluster ends, or the machine leaves it.
    pub leaving: bool,
    /// What the curator that leads said of the machine's node: `healthy`, `silent`, `unknown`; none where it is no node.
    pub health: Option<String>,
    /// Whether its node votes in etcd.
    pub voter: bool,
    /// Members of etcd that vote, and how many of them were reached.
    pub votes: Option<(usize, usize)>,
    /// When the curators answered last.
    pub seen_at: Option<Timestamp>,
    /// Another machine of the cluster that is being disturbed.
    pub disturbed: Option<String>,
}

/// Why it may not be disturbed now, and when to ask again; none when the cluster has nothing against it.
#[must_use]
pub fn objection(cluster: &InCluster, now: Timestamp) -> Option<(String, Timestamp)> {
    let refuse = |reason: String, again: Timestamp| Some((reason, again));
    let name = &cluster.name;
    if let Some(other) = &cluster.disturbed {
        let reason = format!("{other}, of the same cluster {name}, is being recovered: one at a time");
        return refuse(reason, after(now, AGAIN));
    }
    if cluster.leaving || !cluster.founded {
        return None;
    }
    let Some(seen) = cluster.seen_at.filter(|seen| between(*seen, now) <= FRESH) else {
        let until = after(cluster.seen_at.unwrap_or(now), PATIENCE);
        return (until > now).then(|| {
            let reason = format!(
                "none of the curators of cluster {name} answers: either it is down, or we are cut off from it"
            );
            (reason, until.min(after(now, AGAIN)))
        });
    };
    let again = after(seen, FRESH).min(after(now, AGAIN)).max(after(now, Duration::from_secs(1)));
    if cluster.health.as_deref() == Some("healthy") {
        return refuse(format!("unreachable by us, healthy to its curator (cluster {name})"), again);
    }
    let (voters, reached) = cluster.votes?;
    // It is not heard, so those that are reached are others.
    if cluster.voter && !bears_the_loss_of_one(voters, reached) {
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

    fn silent() -> InCluster {
        InCluster {
            name: "ams".to_owned(),
            founded: true,
            leaving: false,
            health: Some("silent".to_owned()),
            voter: true,
            votes: Some((3, 2)),
            seen_at: Some(at(98)),
            disturbed: None,
        }
    }

    #[test]
    fn cluster_objects_to_what_would_harm_it() {
        let healthy = InCluster { health: Some("healthy".to_owned()), ..silent() };
        let alone = InCluster { disturbed: Some("m2".to_owned()), ..silent() };
        let needed = InCluster { votes: Some((3, 1)), ..silent() };
        for (name, cluster, expected) in [
            ("one of three is silent", silent(), ""),
            ("a worker", InCluster { voter: false, votes: Some((3, 1)), ..silent() }, ""),
            (
                "heard by its curator",
                healthy.clone(),
                "unreachable by us, healthy to its curator (cluster ams)",
            ),
            ("another is at it", alone.clone(), "m2, of the same cluster ams, is being recovered"),
            (
                "its vote is needed",
                needed.clone(),
                "it votes in cluster ams, of whose 3 members 1 are reached",
            ),
            ("one of five, two silent", InCluster { votes: Some((5, 3)), ..silent() }, ""),
            ("one of five, three silent", InCluster { votes: Some((5, 2)), ..silent() }, "it votes"),
            ("the only one", InCluster { votes: Some((1, 0)), ..silent() }, "it votes"),
            ("it is no node yet", InCluster { health: None, voter: false, ..silent() }, ""),
            ("healthy, and leaves", InCluster { leaving: true, ..healthy.clone() }, ""),
            ("another is at it, and it leaves", InCluster { leaving: true, ..alone }, "m2"),
            ("not founded", InCluster { founded: false, ..healthy.clone() }, ""),
            ("old news", InCluster { seen_at: Some(at(39)), ..healthy.clone() }, "none of the curators"),
            ("very old news", InCluster { seen_at: Some(at(-501)), ..healthy.clone() }, ""),
            ("just not old", InCluster { seen_at: Some(at(40)), ..healthy }, "unreachable by us"),
            ("needed, as was long ago", InCluster { seen_at: Some(at(-501)), ..needed }, ""),
        ] {
            let said = objection(&cluster, at(100));
            let (reason, again) = said.unwrap_or_else(|| (String::new(), at(101)));
            assert!(
                reason.starts_with(expected) && reason.is_empty() == expected.is_empty(),
                "{name}: {reason}"
            );
            assert!(again > at(100), "{name}: asked again at once");
        }
    }
}
