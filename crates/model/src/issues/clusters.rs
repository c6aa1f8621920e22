//! Issues of clusters: an etcd that is full or nearly so, old snapshots, old images of etcd, rejected owner keys, replacements
//! of the authority that do not go on or are nearly used up, keys of Secrets that controllers wait for, clusters that are not
//! founded.

use std::time::Duration;

use crate::artefact::is_storage_nearly_full;
use crate::byte_size::ByteSize;
use crate::cluster::authority_rotation::{
    ANNOUNCED_REPLACEMENTS, MAX_REPLACEMENTS, stopped_replacement, stopped_replacement_remedy,
};
use crate::cluster::etcd_space::FULL_ETCD;
use crate::cluster::plan::secret_keys::ADOPTION_DELAY;
use crate::cluster::secret_keys::SecretsStage;
use crate::cluster::state::MAX_ETCD_BYTES;
use crate::humanize::humanize_duration;
use crate::issues::inputs::{ClusterIssueInputs, IssueInputs, UnfoundedClusterInputs};
use crate::issues::{Issue, IssueKind, join_first};
use crate::time::{after, between};

/// All issues of this file.
pub(super) fn find_issues(evidence: &IssueInputs) -> Vec<Issue> {
    let of = |cluster: &ClusterIssueInputs| {
        [
            cluster_etcd_full(cluster),
            cluster_etcd_large(cluster),
            cluster_snapshot_old(cluster, evidence),
            cluster_image_old(cluster, evidence),
            cluster_key_refused(cluster, evidence),
            authority_rotation_held(cluster, evidence),
            authority_replacements(cluster),
            secrets_key_held(cluster, evidence),
        ]
    };
    let mut found: Vec<Issue> = evidence.clusters.iter().flat_map(of).flatten().collect();
    found.extend(evidence.unfounded_clusters.iter().filter_map(|cluster| not_founded(cluster, evidence)));
    found
}

/// How long a cluster may take to be founded. A takeover, a download of the release and the start of etcd take less.
const FOUNDING_LIMIT: Duration = Duration::from_hours(1);

/// Issue: the cluster was created and has no first node yet.
fn not_founded(cluster: &UnfoundedClusterInputs, evidence: &IssueInputs) -> Option<Issue> {
    let lasts = between(cluster.created_at, evidence.at);
    if lasts < FOUNDING_LIMIT {
        return None;
    }
    let (name, lasts) = (&cluster.name, humanize_duration(lasts));
    let waits = match cluster.wait_reasons.as_slice() {
        [] => String::new(),
        reasons => format!(": {}", join_first(reasons)),
    };
    Some(Issue::new(
        IssueKind::ClusterNotFounded,
        format!("cluster {name}"),
        format!("it was created {lasts} ago, and no machine has founded it{waits}"),
        Some(after(cluster.created_at, FOUNDING_LIMIT)),
        format!(
            "`shepherdctl cluster describe {name}` shows what it and each of its machines waits for; add machines that fit \
             its selector, or delete the cluster"
        ),
    ))
}

/// Issue: etcd accepts no writes, and what changes the cluster waits.
fn cluster_etcd_full(cluster: &ClusterIssueInputs) -> Option<Issue> {
    let (since, name) = (cluster.etcd_full_since?, &cluster.name);
    Some(Issue::new(
        IssueKind::ClusterEtcdFull,
        format!("cluster {name}"),
        format!(
            "its etcd {FULL_ETCD}; changes of its machines and roll-outs wait, and no restore is accepted"
        ),
        Some(since),
        format!(
            "`shepherdctl issues` shows under node-problem what its members wait for; if their data alone is too large, \
             delete Kubernetes objects that nothing needs; see: `shepherdctl cluster describe {name}`"
        ),
    ))
}

/// Issue: the authority can be replaced only a few times more.
fn authority_replacements(cluster: &ClusterIssueInputs) -> Option<Issue> {
    let (count, name) = (cluster.authority_replacements, &cluster.name);
    (count >= ANNOUNCED_REPLACEMENTS).then(|| {
        Issue::new(
            IssueKind::AuthorityReplacements,
            format!("cluster {name}"),
            format!(
                "its authority was replaced {count} times, and neither shepherds nor nodes follow more than \
                 {MAX_REPLACEMENTS} replacements"
            ),
            None,
            format!("begin again with: `shepherdctl cluster rotate-authority {name} --compromised`"),
        )
    })
}

/// Issue: etcd will soon accept no more writes.
fn cluster_etcd_large(cluster: &ClusterIssueInputs) -> Option<Issue> {
    let size = cluster.etcd_bytes?;
    let limit = cluster.etcd_quota_bytes.unwrap_or(ByteSize(MAX_ETCD_BYTES));
    let name = &cluster.name;
    is_storage_nearly_full(size, limit).then(|| {
        Issue::new(
            IssueKind::ClusterEtcdLarge,
            format!("cluster {name}"),
            format!(
                "the database file of its etcd has {}, and etcd accepts no writes from {} on",
                size.humanize(),
                limit.humanize()
            ),
            None,
            "delete Kubernetes objects that nothing needs, then defragment etcd on one member of the control plane after \
             the other"
                .to_owned(),
        )
    })
}

/// Issue: the authority is replaced, and no curator answers that could continue.
fn authority_rotation_held(cluster: &ClusterIssueInputs, evidence: &IssueInputs) -> Option<Issue> {
    let (order, progress) = (cluster.authority_rotation.as_ref(), cluster.authority_progress.as_ref());
    let since = cluster.unreachable_since;
    let text = stopped_replacement(order, progress, since, evidence.at)?;
    Some(Issue::new(
        IssueKind::AuthorityRotationHeld,
        format!("cluster {}", cluster.name),
        text,
        since,
        stopped_replacement_remedy(&cluster.name),
    ))
}

/// How long a stage of the keys of Secrets may take.
const SECRETS_STAGE_LIMIT: Duration = Duration::from_hours(1);

/// Issue: a controller holds up another key of Secrets, or the first one.
fn secrets_key_held(cluster: &ClusterIssueInputs, evidence: &IssueInputs) -> Option<Issue> {
    let state = cluster.secret_keys.as_ref()?;
    // Without Kubernetes, nobody writes a Secret.
    let kubernetes_since = cluster.kubernetes_since?;
    let (since, limit) = match state.stage {
        SecretsStage::Settled => return None,
        SecretsStage::New => (kubernetes_since.max(cluster.founded_at), SECRETS_STAGE_LIMIT),
        SecretsStage::Prepared => {
            (state.prepared_at.unwrap_or(state.since), ADOPTION_DELAY + SECRETS_STAGE_LIMIT)
        }
        SecretsStage::Reading | SecretsStage::Writing | SecretsStage::Rewriting => {
            (state.since, SECRETS_STAGE_LIMIT)
        }
    };
    let lasts = between(since, evidence.at);
    if lasts < limit {
        return None;
    }
    let (name, lasts) = (&cluster.name, humanize_duration(lasts));
    let (waits, advice) = match state.stage {
        SecretsStage::New | SecretsStage::Prepared => (
            "its controllers should get the first key for Kubernetes Secrets",
            "lists them; each needs a role server that knows the order: update those of an earlier release, and retire \
             machines that are lost",
        ),
        SecretsStage::Rewriting => (
            "an API server should write every Kubernetes Secret again with the new key",
            "shows which API servers are not well",
        ),
        _ => (
            "its controllers should work with a new key for Kubernetes Secrets",
            "names those that do not; bring them back, or retire them",
        ),
    };
    Some(Issue::new(
        IssueKind::SecretsKeyHeld,
        format!("cluster {name}"),
        format!("{waits}; that has not been done for {lasts} ({})", state.stage),
        Some(since),
        format!("`shepherdctl cluster describe {name}` {advice}"),
    ))
}

/// Issue: the curators reject every key that we have for the cluster.
fn cluster_key_refused(cluster: &ClusterIssueInputs, evidence: &IssueInputs) -> Option<Issue> {
    let since = cluster.keys_rejected_since?;
    let (name, lasts) = (&cluster.name, humanize_duration(between(since, evidence.at)));
    Some(Issue::new(
        IssueKind::ClusterKeyRefused,
        format!("cluster {name}"),
        format!("its curators have refused every key that the shepherd has for it for {lasts}"),
        Some(since),
        format!(
            "if the database was restored from a backup, restore a later backup; otherwise `shepherdctl cluster \
             restore {name} --bypass-quorum` from a snapshot that knows one of the keys"
        ),
    ))
}

/// Issue: the last snapshot is older than the policy allows, or none was ever taken.
fn cluster_snapshot_old(cluster: &ClusterIssueInputs, evidence: &IssueInputs) -> Option<Issue> {
    let policy = &evidence.policy.cluster_snapshots;
    let since = cluster.snapshot_at.unwrap_or(cluster.founded_at);
    if between(since, evidence.at) < policy.overdue_after() {
        return None;
    }
    let age = humanize_duration(between(since, evidence.at));
    let text = match cluster.snapshot_at {
        Some(_) => {
            format!("its last snapshot is {age} old, and one should be taken every {}", policy.interval)
        }
        None => format!("no snapshot of it was ever taken, and it was founded {age} ago"),
    };
    let name = &cluster.name;
    Some(Issue::new(
        IssueKind::ClusterSnapshotOld,
        format!("cluster {name}"),
        text,
        Some(after(since, policy.overdue_after())),
        format!(
            "`shepherdctl cluster describe {name}` shows what its curators answer; make sure that a shepherd \
             reaches them"
        ),
    ))
}

/// Issue: snapshots are taken, and none has the Kubernetes objects of the last hours.
fn cluster_image_old(cluster: &ClusterIssueInputs, evidence: &IssueInputs) -> Option<Issue> {
    let policy = &evidence.policy.cluster_snapshots;
    let overdue = |since| between(since, evidence.at) >= policy.overdue_after();
    let since = cluster.kubernetes_since?.max(cluster.founded_at);
    let since = cluster.image_at.map_or(since, |image_at| image_at.max(since));
    // Without a snapshot there is no image, and that is another issue.
    if !overdue(since) || cluster.snapshot_at.is_none_or(overdue) {
        return None;
    }
    let (name, age) = (&cluster.name, humanize_duration(between(since, evidence.at)));
    let text = match cluster.image_at {
        Some(image_at) => {
            let age = humanize_duration(between(image_at, evidence.at));
            format!("its last snapshot with Kubernetes objects is {age} old")
        }
        None => {
            format!("none of its snapshots has its Kubernetes objects, and it has had Kubernetes for {age}")
        }
    };
    Some(Issue::new(
        IssueKind::ClusterImageOld,
        format!("cluster {name}"),
        text,
        Some(after(since, policy.overdue_after())),
        format!("`shepherdctl cluster describe {name}` shows why no image of its etcd could be taken"),
    ))
}
