//! What is wrong with Kubernetes of a cluster: what somebody else's objects, a component or a node holds up.

use std::time::Duration;

use crate::model::issues::evidence::{Evidence, KubernetesEvidence};
use crate::model::issues::{Issue, Kind, NAMED};
use crate::model::telling::rough;
use crate::model::time::{Timestamp, after, between};

/// How long a component may be unwell: longer than fetching a bundle and starting anew take.
const UNWELL: Duration = Duration::from_mins(10);
/// How long a node may take to act on a step of a replacement of keys.
const HELD: Duration = Duration::from_mins(15);

/// Everything of this kind.
pub(super) fn found(evidence: &Evidence) -> Vec<Issue> {
    let all = evidence.kubernetes.iter();
    all.flat_map(|cluster| {
        let found = [clash(cluster), unwell(cluster, evidence.at)];
        found.into_iter().flatten().chain(held(cluster, evidence.at))
    })
    .collect()
}

/// A few of what there are, and how many more.
fn few(all: &[String]) -> String {
    let shown = all.iter().take(NAMED).cloned().collect::<Vec<_>>().join("; ");
    match all.len().saturating_sub(NAMED) {
        0 => shown,
        more => format!("{shown}; and {more} more"),
    }
}

/// Objects of somebody else have the names of those that a node is to make.
fn clash(cluster: &KubernetesEvidence) -> Option<Issue> {
    let clashes = cluster.nodes.iter().flat_map(|node| &node.runs.clashes);
    let said: Vec<String> =
        clashes.map(|clash| format!("{} {}: {}", clash.kind, clash.name, clash.message)).collect();
    let name = &cluster.name;
    (!said.is_empty()).then(|| {
        Issue::new(
            Kind::KubernetesObjectClash,
            format!("cluster {name}"),
            format!("somebody else's objects are in the way of built-in ones: {}", few(&said)),
            None,
            "rename or delete those objects, or label them as the page says; the next pass makes ours"
                .to_owned(),
        )
    })
}

/// Components that have been unwell for too long.
fn unwell(cluster: &KubernetesEvidence, now: Timestamp) -> Option<Issue> {
    let mut first: Option<Timestamp> = None;
    let mut said = Vec::new();
    for node in &cluster.nodes {
        for component in node.runs.components.iter().filter(|component| component.state != "healthy") {
            let Some(since) = component.since.filter(|since| between(*since, now) >= UNWELL) else {
                continue;
            };
            first = Some(first.map_or(since, |first| first.min(since)));
            said.push(format!("{} on {} for {}", component.said(), node.machine, rough(between(since, now))));
        }
    }
    let name = &cluster.name;
    (!said.is_empty()).then(|| {
        Issue::new(
            Kind::KubernetesComponentUnwell,
            format!("cluster {name}"),
            few(&said),
            first.map(|first| after(first, UNWELL)),
            format!("`shepherdctl cluster describe {name}` says why; the component's own log on the machine says more"),
        )
    })
}

/// Replacements of keys that nodes hold up.
fn held(cluster: &KubernetesEvidence, now: Timestamp) -> Vec<Issue> {
    let held = cluster.rotations.iter().filter_map(|rotation| {
        if rotation.waits_for.is_empty() {
            return None;
        }
        // Nodes are told one after the other; as long as another one is told, all goes on.
        let since = rotation.since?;
        let since = rotation.told_at.map_or(since, |told| told.max(since));
        if between(since, now) < HELD {
            return None;
        }
        let holding = if rotation.held_by.is_empty() { &rotation.waits_for } else { &rotation.held_by };
        let machine = |id: &String| {
            let node = cluster.nodes.iter().find(|node| node.node.as_ref() == Some(id));
            node.map_or_else(|| id.clone(), |node| format!("{} ({id})", node.machine))
        };
        let waits: Vec<String> = holding.iter().map(machine).collect();
        let name = &cluster.name;
        Some(Issue::new(
            Kind::KubernetesRotationHeld,
            format!("cluster {name}"),
            format!(
                "the replacement of {} has waited for {} for nodes that do not act on it: {}",
                rotation.what,
                rough(between(since, now)),
                few(&waits)
            ),
            Some(after(since, HELD)),
            format!("bring those nodes back, or take them out of the cluster; see: `shepherdctl cluster describe {name}`"),
        ))
    });
    held.collect()
}
