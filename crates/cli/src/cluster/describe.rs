//! `describe cluster`, `cluster describe`: one cluster, its machines, and what each waits for.

use std::fmt::Write as _;

use crate::client::fleet_client::FleetClient;
use crate::cluster::authority_progress::authority_lines;
use crate::cluster::fetch::{decode_cluster, fetch_cluster_messages};
use crate::cluster::get::format_votes;
use crate::cluster::kubernetes::status::{format_components, summary_lines};
use crate::cluster::rotate_key::format_key_status;
use crate::cluster::rotate_secrets_key::format_secrets_status;
use crate::cluster::view::{ClusterMachineView, ClusterView};
use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::object::document::format_message;
use crate::output::Format;
use crate::output::table::{format_table, terminal_width};
use model::humanize::{humanize_duration, relative_and_absolute_time};
use model::time::{Timestamp, between};

pub(crate) const DESCRIBE_EXAMPLES: &str = "\
Example:
  shepherdctl cluster describe ams              its machines, and what each waits for";

pub(crate) async fn describe_cluster(
    client: &FleetClient,
    name: &str,
    format: Format,
) -> Result<String, CliError> {
    let (clusters, now) = fetch_cluster_messages(client, Some(name)).await?;
    // The API lists every cluster if the name is empty.
    let cluster = clusters.into_iter().find(|cluster| cluster.name == name).ok_or_else(|| {
        let message = format!("there is no cluster {name:?}; run: shepherdctl get clusters");
        CliError::Ended { exit: ExitCode::NotFound, message }
    })?;
    if format == Format::Json {
        return format_message(&cluster);
    }
    Ok(format_cluster(&decode_cluster(cluster)?, now))
}

fn format_cluster(cluster: &ClusterView, now: Timestamp) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(text, "{name:<14} {value}");
    };
    line("cluster", &cluster.name);
    line("id", &cluster.id);
    let stage = match &cluster.deletion_requested_by {
        Some(by) => format!("{}, as {by} ordered", cluster.stage),
        None => cluster.stage.clone(),
    };
    line("stage", &stage);
    line("wanted", &format!("{} control-plane, {} worker", cluster.control_plane, cluster.workers));
    if !cluster.selector.is_empty() {
        line("select", &cluster.selector);
    }
    if !cluster.roles.is_empty() {
        line("worker roles", &cluster.roles.join(", "));
    }
    line("approval", &cluster.approval);
    let requested_at = relative_and_absolute_time(cluster.created_at, now);
    line("requested", &format!("{requested_at} by {}", cluster.created_by));
    if !cluster.curators.is_empty() {
        line("curators", &cluster.curators.join(", "));
    }
    if let Some(seen) = cluster.observed_at {
        line(
            "last answer",
            &format!(
                "{} ago; {} votes reached",
                humanize_duration(between(seen, now)),
                format_votes(cluster)
            ),
        );
    }
    match cluster.snapshot_at {
        Some(taken) => line("snapshot", &format!("{} ago", humanize_duration(between(taken, now)))),
        None if !cluster.curators.is_empty() => line("snapshot", "none yet"),
        None => {}
    }
    if let Some(restored) = cluster.restored_at {
        line(
            "restored",
            &format!("{} ago; epoch {}", humanize_duration(between(restored, now)), cluster.epoch),
        );
    }
    if let (Some(from), Some(by)) = (&cluster.restoring_from, &cluster.restore_requested_by) {
        line("restoring", &format!("from snapshot {from}, as {by} ordered"));
    }
    if let Some(key) = format_key_status(cluster, now) {
        line("shepherd's key", &key);
    }
    for (name, value) in authority_lines(cluster, now) {
        line(name, &value);
    }
    if let Some(secrets) = format_secrets_status(cluster, now) {
        line("secrets", &secrets);
    }
    for declared in &cluster.declarations {
        let withdrawn = if declared.withdrawn { ", withdrawn" } else { "" };
        let message = format!(
            "{} runs {}; by {}, {} ago{withdrawn}",
            declared.role,
            declared.services.join(", "),
            declared.declared_by,
            humanize_duration(between(declared.declared_at, now))
        );
        line("declared", &message);
    }
    for (name, value) in summary_lines(cluster, now) {
        line(name, &value);
    }
    for wait in &cluster.wait_reasons {
        line("waits", wait);
    }
    if !cluster.machines.is_empty() {
        text.push_str(&format_machines(cluster, now));
    }
    text
}

/// Table of the cluster's machines, with their services, Kubernetes components and wait reasons.
fn format_machines(cluster: &ClusterView, now: Timestamp) -> String {
    let dash = || "-".to_owned();
    let rows: Vec<Vec<String>> = cluster
        .machines
        .iter()
        .map(|machine| {
            vec![
                machine.name.clone(),
                machine.part.clone(),
                machine.location.clone().unwrap_or_else(dash),
                machine.phase.clone(),
                machine.health.clone().unwrap_or_else(dash),
                if machine.roles.is_empty() { dash() } else { machine.roles.join(", ") },
            ]
        })
        .collect();
    let mut text = "\n".to_owned();
    text.push_str(&format_table(
        &["MACHINE", "PART", "LOCATION", "PHASE", "HEALTH", "ROLES"],
        &rows,
        terminal_width(),
    ));
    text.push_str(&format_services(cluster, now));
    text.push_str(&format_components(cluster, now));
    let mut waits = String::new();
    for machine in &cluster.machines {
        if let Some(why) = &machine.leave_reason {
            let _ = writeln!(waits, "{} leaves: {why}", machine.name);
        }
        if let Some(wait) = &machine.wait_reason {
            let _ = writeln!(waits, "{} waits: {wait}", machine.name);
        }
    }
    if !waits.is_empty() {
        text.push('\n');
        text.push_str(&waits);
    }
    text
}

/// Table of the services of operators' roles on the cluster's machines; empty if no machine runs any.
fn format_services(cluster: &ClusterView, now: Timestamp) -> String {
    let of = |machine: &ClusterMachineView| {
        let name = machine.name.clone();
        let services = machine.services.clone().into_iter();
        services.map(move |service| (name.clone(), service))
    };
    let rows: Vec<Vec<String>> = cluster
        .machines
        .iter()
        .flat_map(of)
        .map(|(machine, service)| {
            vec![
                machine,
                format!("{}/{}", service.role, service.service),
                service.state,
                service.since.map_or_else(|| "-".to_owned(), |since| humanize_duration(between(since, now))),
                service.restarts.to_string(),
                service.message,
            ]
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    format!(
        "\n{}",
        format_table(&["MACHINE", "SERVICE", "STATE", "FOR", "RESTARTS", "BECAUSE"], &rows, terminal_width())
    )
}
