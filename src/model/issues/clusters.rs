//! What is wrong with a cluster: that nobody could bring it back as it is now, or that it lets us in no more.

use crate::model::issues::evidence::{ClusterEvidence, Evidence};
use crate::model::issues::{Issue, Kind};
use crate::model::telling::rough;
use crate::model::time::{after, between};

/// Everything of this kind.
pub(super) fn found(evidence: &Evidence) -> Vec<Issue> {
    let of = |cluster: &ClusterEvidence| [snapshot_old(cluster, evidence), key_refused(cluster, evidence)];
    evidence.clusters.iter().flat_map(of).flatten().collect()
}

/// Its curators take none of the keys that we have for it.
fn key_refused(cluster: &ClusterEvidence, evidence: &Evidence) -> Option<Issue> {
    let since = cluster.keys_refused_since?;
    let (name, lasts) = (&cluster.name, rough(between(since, evidence.at)));
    Some(Issue::new(
        Kind::ClusterKeyRefused,
        format!("cluster {name}"),
        format!("its curators have refused every key that the shepherd has for it for {lasts}"),
        Some(since),
        format!(
            "bring back a later backup of the database if one was restored; otherwise `shepherdctl cluster restore {name} \
             --bypass_quorum` from a snapshot that knows one of the keys"
        ),
    ))
}

/// Its last snapshot is older than several of the policy's intervals, or there never was one.
fn snapshot_old(cluster: &ClusterEvidence, evidence: &Evidence) -> Option<Issue> {
    let policy = &evidence.policy.cluster_snapshots;
    let since = cluster.snapshot_at.unwrap_or(cluster.founded_at);
    if between(since, evidence.at) < policy.overdue_after() {
        return None;
    }
    let age = rough(between(since, evidence.at));
    let said = match cluster.snapshot_at {
        Some(_) => {
            format!("its last snapshot is {age} old, and one is to be taken every {}", policy.interval)
        }
        None => format!("no snapshot of it was ever taken, and it was founded {age} ago"),
    };
    let name = &cluster.name;
    Some(Issue::new(
        Kind::ClusterSnapshotOld,
        format!("cluster {name}"),
        said,
        Some(after(since, policy.overdue_after())),
        format!(
            "`shepherdctl cluster describe {name}` says what its curators answer; a shepherd has to reach them"
        ),
    ))
}
