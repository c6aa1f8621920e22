//! Issues of Kubernetes: object conflicts, unhealthy components, stalled rotations.

use std::time::Duration;

use crate::humanize::humanize_duration;
use crate::issues::inputs::{IssueInputs, KubernetesIssueInputs};
use crate::issues::{Issue, IssueKind, join_first};
use crate::time::{Timestamp, after, between};

/// How long a component may be unhealthy. Fetching a bundle and restarting take less.
const UNHEALTHY_AFTER: Duration = Duration::from_mins(10);
/// How long a node may take to act on a step of a key rotation.
const ROTATION_STALLED_AFTER: Duration = Duration::from_mins(15);

/// All issues of this file.
pub(super) fn find_issues(evidence: &IssueInputs) -> Vec<Issue> {
    let all = evidence.kubernetes.iter();
    all.flat_map(|cluster| {
        let found = [object_conflict(cluster), unhealthy_components(cluster, evidence.at)];
        found.into_iter().flatten().chain(stalled_rotations(cluster, evidence.at))
    })
    .collect()
}

/// Issue: objects of somebody else have the names of objects that a node should create.
fn object_conflict(cluster: &KubernetesIssueInputs) -> Option<Issue> {
    let clashes = cluster.nodes.iter().flat_map(|node| &node.kubernetes.conflicts);
    let messages: Vec<String> =
        clashes.map(|clash| format!("{} {}: {}", clash.kind, clash.name, clash.message)).collect();
    let name = &cluster.name;
    (!messages.is_empty()).then(|| {
        Issue::new(
            IssueKind::KubernetesObjectClash,
            format!("cluster {name}"),
            format!(
                "objects that somebody else created have the names of built-in ones: {}",
                join_first(&messages)
            ),
            None,
            "copy what you need of those objects to other names and delete them, or label them as the page \
             describes; the next pass creates the built-in ones"
                .to_owned(),
        )
    })
}

/// Issue: components have been unhealthy for too long.
fn unhealthy_components(cluster: &KubernetesIssueInputs, now: Timestamp) -> Option<Issue> {
    let mut first: Option<Timestamp> = None;
    let mut messages = Vec::new();
    for node in &cluster.nodes {
        for component in node.kubernetes.components.iter().filter(|component| component.state != "healthy") {
            let Some(since) = component.since.filter(|since| between(*since, now) >= UNHEALTHY_AFTER) else {
                continue;
            };
            first = Some(first.map_or(since, |first| first.min(since)));
            messages.push(format!(
                "{} on {} for {}",
                component.summary(),
                node.machine,
                humanize_duration(between(since, now))
            ));
        }
    }
    let name = &cluster.name;
    (!messages.is_empty()).then(|| {
        Issue::new(
            IssueKind::KubernetesComponentUnwell,
            format!("cluster {name}"),
            join_first(&messages),
            first.map(|first| after(first, UNHEALTHY_AFTER)),
            format!(
                "`shepherdctl cluster describe {name}` shows why; the component's own log on the machine has \
                     more details"
            ),
        )
    })
}

/// Issues: key rotations that nodes hold up.
fn stalled_rotations(cluster: &KubernetesIssueInputs, now: Timestamp) -> Vec<Issue> {
    let held = cluster.rotations.iter().filter_map(|rotation| {
        if rotation.waits_for.is_empty() {
            return None;
        }
        // Nodes are notified one after the other. While a node is still being notified, the rotation makes progress.
        let since = rotation.since?;
        let since = rotation.notified_at.map_or(since, |time| time.max(since));
        if between(since, now) < ROTATION_STALLED_AFTER {
            return None;
        }
        let holding = if rotation.blocked_by.is_empty() { &rotation.waits_for } else { &rotation.blocked_by };
        let machine = |id: &String| {
            let node = cluster.nodes.iter().find(|node| node.node.as_ref() == Some(id));
            node.map_or_else(|| id.clone(), |node| format!("{} ({id})", node.machine))
        };
        let waits: Vec<String> = holding.iter().map(machine).collect();
        let name = &cluster.name;
        Some(Issue::new(
            IssueKind::KubernetesRotationHeld,
            format!("cluster {name}"),
            format!(
                "the replacement of {} has waited for {} for nodes that have not applied its current step: {}",
                rotation.keys,
                humanize_duration(between(since, now)),
                join_first(&waits)
            ),
            Some(after(since, ROTATION_STALLED_AFTER)),
            format!("bring those nodes back, or take them out of the cluster; see: `shepherdctl cluster describe {name}`"),
        ))
    });
    held.collect()
}
