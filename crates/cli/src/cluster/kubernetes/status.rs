//! Kubernetes and the upgrade of a cluster, for `cluster describe`.

use std::fmt::Write as _;

use crate::cluster::view::{ClusterView, KeyRotationView};
use crate::output::table::{format_table, terminal_width};
use model::humanize::{absolute_time, humanize_duration, relative_time};
use model::time::{Timestamp, between};

/// Lines about Kubernetes and the upgrade of a cluster: the title and the text of each.
pub(crate) fn summary_lines(cluster: &ClusterView, now: Timestamp) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if let Some(kubernetes) = &cluster.kubernetes {
        let how = match &kubernetes.removal_requested_by {
            Some(by) => format!("; being removed, as {by} ordered"),
            None if kubernetes.status.in_sync => String::new(),
            None => "; its curators are not informed yet".to_owned(),
        };
        lines.push((
            "kubernetes",
            format!("{} (bundle {}){how}", kubernetes.version, short_digest(&kubernetes.bundle)),
        ));
        lines.push((
            "ranges",
            format!(
                "services {}, pods {} (/{} a node), domain {}",
                kubernetes.service_range, kubernetes.pod_range, kubernetes.node_prefix, kubernetes.domain
            ),
        ));
        for (name, digest) in &kubernetes.add_ons {
            lines.push(("add-on", format!("{name} ({})", short_digest(digest))));
        }
        if let Some(storage) = &kubernetes.storage {
            lines.push(("storage", format!("{} by {}", storage.class, storage.driver)));
        }
        if !kubernetes.status.api_servers.is_empty() {
            lines.push(("API servers", kubernetes.status.api_servers.join(", ")));
        }
        for what in &kubernetes.pending_rotations {
            lines.push(("replaced", format!("{what}: its curators are not informed yet")));
        }
        for rotation in &kubernetes.status.rotations {
            lines.push(("replaced", format_rotation(rotation, now)));
        }
    }
    if let Some(upgrade) = &cluster.upgrade {
        let how = match (&upgrade.outcome, upgrade.ended_at, &upgrade.pause_reason) {
            (Some(ended), Some(at), _) => format!("; {ended} {} ago", humanize_duration(between(at, now))),
            (_, _, Some(why)) => format!("; paused: {why}"),
            _ => format!(
                "; {} of {} nodes that got the order are done",
                upgrade.completed_count, upgrade.requested_count
            ),
        };
        lines.push((
            "upgrade",
            format!("{} ({}): {}{how}", upgrade.id, upgrade.created_by, upgrade.summary()),
        ));
    }
    lines
}

fn format_rotation(rotation: &KeyRotationView, now: Timestamp) -> String {
    let stage = match rotation.stage.as_str() {
        "trusted" => "the new one is trusted, the old one signs",
        "signing" => "the new one signs, the old one is still trusted",
        other => other,
    };
    let mut text = format!("{}: {stage}", rotation.keys);
    if let Some(since) = rotation.since {
        let _ = write!(text, ", for {}", humanize_duration(between(since, now)));
    }
    if !rotation.waits_for.is_empty() {
        let _ = write!(text, "; waits for {}", rotation.waits_for.join(", "));
        if !rotation.blocked_by.is_empty() && rotation.blocked_by != rotation.waits_for {
            let _ = write!(text, "; first for {}", rotation.blocked_by.join(", "));
        }
    } else if let Some(until) = rotation.until {
        let _ = write!(
            text,
            "; until {}, when what was signed before has ended ({})",
            absolute_time(until),
            relative_time(until, now)
        );
    }
    text
}

/// Table of the Kubernetes components on the cluster's machines; empty if no machine runs any.
pub(crate) fn format_components(cluster: &ClusterView, now: Timestamp) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut below = String::new();
    for machine in &cluster.machines {
        let Some(kubernetes) = &machine.kubernetes else { continue };
        for component in &kubernetes.components {
            rows.push(vec![
                machine.name.clone(),
                component.name.clone(),
                kubernetes.version.clone(),
                short_digest(&kubernetes.bundle).to_owned(),
                component.state.clone(),
                component
                    .since
                    .map_or_else(|| "-".to_owned(), |since| humanize_duration(between(since, now))),
                component.restarts.to_string(),
                component.message.clone(),
            ]);
        }
        if !kubernetes.wait_reason.is_empty() {
            let _ = writeln!(below, "{}: Kubernetes waits: {}", machine.name, kubernetes.wait_reason);
        }
        for clash in &kubernetes.conflicts {
            let _ = writeln!(below, "{} {} is in the way: {}", clash.kind, clash.name, clash.message);
        }
    }
    let mut text = String::new();
    if !rows.is_empty() {
        let head = ["MACHINE", "COMPONENT", "VERSION", "BUNDLE", "STATE", "FOR", "RESTARTS", "BECAUSE"];
        let _ = write!(text, "\n{}", format_table(&head, &rows, terminal_width()));
    }
    if !below.is_empty() {
        let _ = write!(text, "\n{below}");
    }
    text
}

fn short_digest(digest: &str) -> &str {
    digest.get(..16).unwrap_or(digest)
}
