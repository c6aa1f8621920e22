//! `cluster kubernetes set|remove|rotate`: Kubernetes of a cluster, its status and upgrades.

use std::fmt::Write as _;

use clap::builder::{NonEmptyStringValueParser, PossibleValuesParser};
use clap::{Args, Subcommand};

use crate::api_decode::{decode_timestamp, require_timestamp};
use crate::cluster::{format_response, require_reason};
use crate::error::CliError;
use crate::examples;
use crate::fleet_client::FleetClient;
use crate::order_retry;
use crate::output::{Format, format_table, terminal_width};
use bmdb::cluster_kubernetes::KubernetesPatch;
use model::cluster::kubernetes::{
    ComponentStatus, KubernetesKeyRotation, NodeKubernetes, ObjectConflict, RotatableKeys, VolumeDriver,
};
use model::cluster::kubernetes_view::{BundleView, KubernetesStatusView, KubernetesView, UpgradeView};
use model::cluster::view::ClusterView;
use model::humanize::{absolute_time, humanize_duration, relative_time};
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::cluster_kubernetes_client::ClusterKubernetesClient;

/// What can be done with Kubernetes of a cluster.
#[derive(Debug, Subcommand)]
pub enum KubernetesCommand {
    /// Give a cluster Kubernetes, or change its add-ons and its storage
    #[command(after_help = examples::CLUSTER_KUBERNETES_SET)]
    Set(SetKubernetes),
    /// Take Kubernetes from a cluster
    #[command(after_help = examples::CLUSTER_KUBERNETES_REMOVE)]
    Remove(RemoveKubernetes),
    /// Have an authority or keys of Kubernetes replaced, in steps
    #[command(after_help = examples::CLUSTER_KUBERNETES_ROTATE)]
    Rotate(RotateKubernetes),
}

/// What Kubernetes is to be, beside its bundle.
#[derive(Debug, Default, Args)]
pub struct KubernetesFlags {
    /// From which services get their addresses [default: 10.96.0.0/16]
    #[arg(
        long = "service_range",
        alias = "service-range",
        value_name = "RANGE",
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub service_range: Option<String>,
    /// From which nodes get theirs for pods [default: 10.128.0.0/12]
    #[arg(
        long = "pod_range",
        alias = "pod-range",
        value_name = "RANGE",
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub pod_range: Option<String>,
    /// How long the prefix of one node's range is [default: 24]
    #[arg(long = "node_prefix", alias = "node-prefix", value_name = "BITS")]
    pub node_prefix: Option<u32>,
    /// In which services have names [default: cluster.local]
    #[arg(long = "cluster_domain", value_name = "DOMAIN", value_parser = NonEmptyStringValueParser::new())]
    pub cluster_domain: Option<String>,
    /// Objects of yours that are kept as an artefact says; may be given several times
    #[arg(long = "add_on", alias = "add-on", value_name = "NAME=ARTEFACT")]
    pub add_on: Vec<String>,
    /// Who makes volumes, and the class of storage that asks it
    #[arg(long = "storage_driver", value_name = "DRIVER=CLASS")]
    pub storage_driver: Option<String>,
}

/// Kubernetes to give or to change.
#[derive(Debug, Args)]
pub struct SetKubernetes {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The bundle, of a cluster that has none: an artefact's digest, the beginning of it, or its name
    #[arg(long, value_name = "BUNDLE", value_parser = NonEmptyStringValueParser::new())]
    pub bundle: Option<String>,
    /// What it is to be
    #[command(flatten)]
    pub flags: KubernetesFlags,
    /// An add-on that is not kept any more; may be given several times
    #[arg(long = "remove_add_on", alias = "remove-add-on", value_name = "NAME")]
    pub remove_add_on: Vec<String>,
    /// Nobody makes volumes any more
    #[arg(long = "remove_storage", conflicts_with = "storage_driver")]
    pub remove_storage: bool,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Cluster whose Kubernetes is removed, and why.
#[derive(Debug, Args)]
pub struct RemoveKubernetes {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Cluster whose keys are replaced, which keys, and why.
#[derive(Debug, Args)]
pub struct RotateKubernetes {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Set of keys to replace; the new ones are trusted everywhere before they sign
    #[arg(long, value_name = "WHAT", value_parser = PossibleValuesParser::new(RotatableKeys::ALL.map(RotatableKeys::as_str)))]
    pub keys: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// Parses the flags into a change of the Kubernetes settings.
pub(super) fn parse_patch(
    bundle: Option<&str>,
    flags: &KubernetesFlags,
) -> Result<KubernetesPatch, CliError> {
    let pair = |flag: &str, text: &str| {
        let pair = text.split_once('=').filter(|(one, other)| !one.is_empty() && !other.is_empty());
        pair.map(|(one, other)| (one.to_owned(), other.to_owned()))
            .ok_or_else(|| CliError::Invalid(format!("--{flag}: {text:?} has not the form NAME=…")))
    };
    // In a request, 0 leaves the prefix as it is.
    if flags.node_prefix == Some(0) {
        return Err(CliError::Invalid("--node_prefix: 0 is no prefix of one node's range".to_owned()));
    }
    let storage = flags.storage_driver.as_deref().map(|text| pair("storage_driver", text)).transpose()?;
    Ok(KubernetesPatch {
        bundle: bundle.map(str::to_owned),
        service_range: flags.service_range.clone(),
        pod_range: flags.pod_range.clone(),
        node_prefix: flags.node_prefix,
        domain: flags.cluster_domain.clone(),
        add_ons: flags.add_on.iter().map(|text| pair("add_on", text)).collect::<Result<_, _>>()?,
        storage: storage.map(|(driver, class)| VolumeDriver { driver, class }),
        ..KubernetesPatch::default()
    })
}

/// Encodes a change as a message of the API; unset fields are empty.
pub(super) fn encode_patch(wish: &KubernetesPatch) -> v1::KubernetesPatch {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    v1::KubernetesPatch {
        bundle: text(&wish.bundle),
        service_range: text(&wish.service_range),
        pod_range: text(&wish.pod_range),
        node_prefix: wish.node_prefix.unwrap_or_default(),
        domain: text(&wish.domain),
        add_ons: wish.add_ons.clone().into_iter().collect(),
        remove_add_ons: wish.remove_add_ons.iter().cloned().collect(),
        storage: (wish.storage.clone())
            .map(|storage| v1::ClusterStorage { driver: storage.driver, class: storage.class }),
    }
}

/// Runs a `cluster kubernetes` command and returns its output.
pub(super) async fn run_kubernetes_command(
    client: &FleetClient,
    command: &KubernetesCommand,
    format: Format,
) -> Result<String, CliError> {
    match command {
        KubernetesCommand::Set(args) => set_kubernetes(client, args, format).await,
        KubernetesCommand::Remove(args) => remove_kubernetes(client, args, format).await,
        KubernetesCommand::Rotate(args) => rotate_keys(client, args, format).await,
    }
}

async fn set_kubernetes(
    client: &FleetClient,
    args: &SetKubernetes,
    format: Format,
) -> Result<String, CliError> {
    require_reason(&args.reason)?;
    let mut wish = parse_patch(args.bundle.as_deref(), &args.flags)?;
    wish.remove_add_ons = args.remove_add_on.iter().cloned().collect();
    if args.remove_storage {
        wish.storage = Some(VolumeDriver { driver: String::new(), class: String::new() });
    }
    let give = async |service, order| {
        let request = v1::SetClusterKubernetesRequest {
            name: args.name.clone(),
            order: Some(order),
            patch: Some(encode_patch(&wish)),
        };
        ClusterKubernetesClient::new(service).set(request).await
    };
    let response = order_retry::send_order(&mut client.clone(), &args.reason, give).await?;
    format_response(&args.name, response, format)
}

async fn remove_kubernetes(
    client: &FleetClient,
    args: &RemoveKubernetes,
    format: Format,
) -> Result<String, CliError> {
    require_reason(&args.reason)?;
    let give = async |service, order| {
        let request = v1::RemoveClusterKubernetesRequest { name: args.name.clone(), order: Some(order) };
        ClusterKubernetesClient::new(service).remove(request).await
    };
    let response = order_retry::send_order(&mut client.clone(), &args.reason, give).await?;
    format_response(&args.name, response, format)
}

async fn rotate_keys(
    client: &FleetClient,
    args: &RotateKubernetes,
    format: Format,
) -> Result<String, CliError> {
    require_reason(&args.reason)?;
    let give = async |service, order| {
        let request = v1::RotateClusterKubernetesRequest {
            name: args.name.clone(),
            order: Some(order),
            keys: args.keys.clone(),
        };
        ClusterKubernetesClient::new(service).rotate(request).await
    };
    let response = order_retry::send_order(&mut client.clone(), &args.reason, give).await?;
    format_response(&args.name, response, format)
}

/// Decodes the Kubernetes state of a cluster.
pub(super) fn decode_kubernetes(
    kubernetes_state: v1::ClusterKubernetesState,
) -> Result<KubernetesView, CliError> {
    let rotation = |cluster_rotation: v1::ClusterKeyRotation| KubernetesKeyRotation {
        keys: cluster_rotation.keys,
        stage: cluster_rotation.stage,
        since: cluster_rotation.since.and_then(decode_timestamp),
        waits_for: cluster_rotation.waits_for,
        until: cluster_rotation.until.and_then(decode_timestamp),
        blocked_by: cluster_rotation.blocked_by,
        notified_at: cluster_rotation.notified_at.and_then(decode_timestamp),
    };
    Ok(KubernetesView {
        bundle: kubernetes_state.bundle,
        version: kubernetes_state.version,
        service_range: kubernetes_state.service_range,
        pod_range: kubernetes_state.pod_range,
        node_prefix: kubernetes_state.node_prefix,
        domain: kubernetes_state.domain,
        add_ons: kubernetes_state.add_ons.into_iter().collect(),
        storage: kubernetes_state
            .storage
            .map(|storage| VolumeDriver { driver: storage.driver, class: storage.class }),
        requested_at: require_timestamp(
            kubernetes_state.requested_at,
            "the time when Kubernetes was requested",
        )?,
        requested_by: kubernetes_state.requested_by,
        removal_requested_by: kubernetes_state.removal_requested_by,
        pending_rotations: kubernetes_state.pending_rotations,
        status: KubernetesStatusView {
            in_sync: kubernetes_state.in_sync,
            assigned_bundles: kubernetes_state.assigned_bundles.into_iter().collect(),
            rotations: kubernetes_state.rotations.into_iter().map(rotation).collect(),
            api_servers: kubernetes_state.api_servers,
        },
    })
}

/// Decodes an upgrade of a cluster.
pub(super) fn decode_upgrade(upgrade: v1::ClusterUpgrade) -> Result<UpgradeView, CliError> {
    let bundle = |sha256: String, version: String| {
        Some(BundleView { sha256, version }).filter(|bundle| !bundle.sha256.is_empty())
    };
    Ok(UpgradeView {
        id: upgrade.id,
        from: bundle(upgrade.from_sha256, upgrade.from_version),
        to: bundle(upgrade.to_sha256, upgrade.to_version),
        release: upgrade.release,
        roll_out: upgrade.roll_out,
        release_done: upgrade.release_done,
        rolling_back: upgrade.rolling_back,
        parallelism: upgrade.parallelism,
        deadline_seconds: upgrade.deadline_seconds,
        created_at: require_timestamp(upgrade.created_at, "the time when an upgrade was ordered")?,
        created_by: upgrade.created_by,
        reason: upgrade.reason,
        pause_reason: upgrade.pause_reason,
        ended_at: upgrade.ended_at.and_then(decode_timestamp),
        outcome: upgrade.outcome,
        requested_count: upgrade.requested_count,
        completed_count: upgrade.completed_count,
    })
}

/// Decodes the Kubernetes components of a node.
pub(super) fn decode_node_kubernetes(kubernetes: v1::ClusterNodeKubernetes) -> NodeKubernetes {
    let component = |cluster_component: v1::ClusterComponentStatus| ComponentStatus {
        name: cluster_component.name,
        state: cluster_component.state,
        since: cluster_component.since.and_then(decode_timestamp),
        restarts: cluster_component.restarts,
        message: cluster_component.message,
    };
    let clash = |cluster_clash: v1::ClusterObjectConflict| ObjectConflict {
        kind: cluster_clash.kind,
        name: cluster_clash.name,
        message: cluster_clash.message,
    };
    NodeKubernetes {
        bundle: kubernetes.bundle,
        version: kubernetes.version,
        components: kubernetes.components.into_iter().map(component).collect(),
        wait_reason: kubernetes.wait_reason,
        is_reconciler: kubernetes.is_reconciler,
        conflicts: kubernetes.conflicts.into_iter().map(clash).collect(),
    }
}

fn short_digest(digest: &str) -> &str {
    digest.get(..16).unwrap_or(digest)
}

/// Lines about Kubernetes and the upgrade of a cluster: the title and the text of each.
pub(super) fn summary_lines(cluster: &ClusterView, now: Timestamp) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if let Some(kubernetes) = &cluster.kubernetes {
        let how = match &kubernetes.removal_requested_by {
            Some(by) => format!("; goes, as {by} ordered"),
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
            (_, _, Some(why)) => format!("; stands still: {why}"),
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

fn format_rotation(rotation: &KubernetesKeyRotation, now: Timestamp) -> String {
    let stage = match rotation.stage.as_str() {
        "trusted" => "the new one is trusted, the old one signs",
        "signing" => "the new one signs, the old one is trusted still",
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
pub(super) fn format_components(cluster: &ClusterView, now: Timestamp) -> String {
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
