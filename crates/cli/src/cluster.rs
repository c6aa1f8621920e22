//! `cluster ...`: create, list, describe, scale and delete clusters. The module also dispatches to the commands of its
//! sibling files (`credentials`, `kubernetes`, `plan`, `snapshots`, `upgrade` and others).

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::builder::{NonEmptyStringValueParser, PossibleValuesParser};
use clap::{Args, Subcommand};
use serde_json::json;

use crate::api_decode::{decode_timestamp, require_timestamp};
use crate::cluster_credentials::{CredentialsCommand, run_credentials_command};
use crate::cluster_kubeconfig::{KubeconfigArgs, create_kubeconfig};
use crate::cluster_kubernetes::{self, KubernetesCommand, KubernetesFlags, run_kubernetes_command};
use crate::cluster_plan::{PlanCluster, plan_cluster};
use crate::cluster_rotate_key;
use crate::cluster_snapshots;
use crate::cluster_upgrade::{UpgradeCluster, run_upgrade_command};
use crate::dry_run;
use crate::error::CliError;
use crate::examples;
use crate::fleet_client::{FleetClient, status_to_error};
use crate::get;
use crate::order_retry;
use crate::output::{Format, format_table, terminal_width};
use bmdb::action::OrderOutcome;
use bmdb::cluster::order_target;
use bmdb::cluster_kubernetes::KubernetesPatch;
use model::cluster::declaration::{DeclarationView, ServiceView};
use model::cluster::spec::{ClusterSpec, ClusterSpecChange, JoinApproval};
use model::cluster::view::{ClusterMachineView, ClusterView};
use model::humanize::{absolute_time, humanize_duration};
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

/// What can be done with clusters.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Ask for a cluster of machines of the fleet
    #[command(after_help = examples::CLUSTER_CREATE)]
    Create(CreateCluster),
    /// List clusters with their stage, size, health and votes
    #[command(after_help = examples::CLUSTER_GET)]
    Get,
    /// Show a cluster, its machines, and what each waits for
    #[command(after_help = examples::CLUSTER_DESCRIBE)]
    Describe(ClusterArg),
    /// Show, step by step, what will be done to a cluster, or would be if it was created, changed or ended
    #[command(after_help = examples::CLUSTER_PLAN)]
    Plan(PlanCluster),
    /// Change how many machines a cluster is to have
    #[command(after_help = examples::CLUSTER_SCALE)]
    Scale(ScaleCluster),
    /// Declare a role to a cluster, as a file says: services that every node with the role runs
    #[command(after_help = examples::CLUSTER_DECLARE)]
    Declare(DeclareInCluster),
    /// Withdraw a role that was declared to a cluster
    #[command(after_help = examples::CLUSTER_UNDECLARE)]
    Undeclare(UndeclareInCluster),
    /// Change what the workers of a cluster do
    #[command(after_help = examples::CLUSTER_ROLES)]
    Roles(ChangeClusterRoles),
    /// Let a machine into a cluster whose approval is manual
    #[command(after_help = examples::CLUSTER_APPROVE)]
    Approve(ApproveInCluster),
    /// Have a snapshot of a cluster's records taken now
    #[command(after_help = examples::CLUSTER_SNAPSHOT)]
    Snapshot(SnapshotCluster),
    /// List the snapshots that are kept of a cluster
    #[command(after_help = examples::CLUSTER_SNAPSHOTS)]
    Snapshots(ClusterArg),
    /// Bring a cluster back from a snapshot, when most of its control plane is lost for good
    #[command(after_help = examples::CLUSTER_RESTORE)]
    Restore(RestoreCluster),
    /// Certificates with which people speak to the curators of a cluster
    #[command(subcommand)]
    Credentials(CredentialsCommand),
    /// Have the shepherd's own key for a cluster replaced now
    #[command(after_help = examples::CLUSTER_ROTATE_KEY)]
    RotateKey(RotateClusterKey),
    /// What a cluster runs of Kubernetes
    #[command(subcommand)]
    Kubernetes(KubernetesCommand),
    /// Make a key here, and what kubectl needs to reach the API servers of a cluster with it
    #[command(after_help = examples::CLUSTER_KUBECONFIG)]
    Kubeconfig(KubeconfigArgs),
    /// Upgrade a cluster: its role servers, then its controllers one by one, then its workers; or go back
    #[command(after_help = examples::CLUSTER_UPGRADE)]
    Upgrade(UpgradeCluster),
    /// End a cluster: its machines leave it, and what they keep of it is removed
    #[command(after_help = examples::CLUSTER_DELETE)]
    Delete(DeleteCluster),
}

/// A cluster to show.
#[derive(Debug, Args)]
pub struct ClusterArg {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
}

/// A cluster to ask for.
#[derive(Debug, Args)]
pub struct CreateCluster {
    /// Its name: lower-case letters, digits and dashes
    #[arg(value_name = "NAME")]
    pub name: String,
    /// How many machines run its control plane: 1, 3, 5 or 7
    #[arg(long = "control_plane", alias = "control-plane", value_name = "N", default_value_t = 3)]
    pub control_plane: u32,
    /// How many more machines it has
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub workers: u32,
    /// Which machines may be chosen, as location=ams,memory>=64GiB,label.rack=7 [default: any]
    #[arg(long, value_name = "TERMS", default_value = "", hide_default_value = true)]
    pub selector: String,
    /// A role that every worker is to have, as it is declared to the cluster; may be given several times
    #[arg(long, value_name = "ROLE")]
    pub role: Vec<String>,
    /// Who lets machines in: the shepherd, by the key that each reported over its agent channel, or a person
    #[arg(
        long,
        value_name = "WHO",
        default_value = "automatic",
        value_parser = PossibleValuesParser::new(JoinApproval::ALL.map(JoinApproval::as_str))
    )]
    pub approval: String,
    /// The bundle of Kubernetes that it runs: an artefact's digest, the beginning of it, or its name [default: none]
    #[arg(long = "kubernetes_bundle", value_name = "BUNDLE")]
    pub kubernetes_bundle: Option<String>,
    /// What Kubernetes is to be
    #[command(flatten)]
    pub flags: KubernetesFlags,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// A cluster to change in size.
#[derive(Debug, Args)]
pub struct ScaleCluster {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// How many machines are to run its control plane: 1, 3, 5 or 7
    #[arg(
        long = "control_plane",
        alias = "control-plane",
        value_name = "N",
        required_unless_present = "workers"
    )]
    pub control_plane: Option<u32>,
    /// How many more machines it is to have
    #[arg(long, value_name = "N")]
    pub workers: Option<u32>,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// A role to declare.
#[derive(Debug, Args)]
pub struct DeclareInCluster {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The file that says what the role is, TOML
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// A role to withdraw.
#[derive(Debug, Args)]
pub struct UndeclareInCluster {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Name of the role to withdraw, for example web
    #[arg(value_name = "ROLE")]
    pub role: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// A cluster whose workers are to do something else.
#[derive(Debug, Args)]
pub struct ChangeClusterRoles {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// A role that every worker is to have; may be given several times
    #[arg(long = "add_role", value_name = "ROLE", required_unless_present = "remove_roles")]
    pub add_roles: Vec<String>,
    /// A role that no worker is to have; may be given several times
    #[arg(long = "remove_role", value_name = "ROLE")]
    pub remove_roles: Vec<String>,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// A machine to let in.
#[derive(Debug, Args)]
pub struct ApproveInCluster {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The machine: its id, or its provider's name for it
    #[arg(value_name = "MACHINE")]
    pub machine: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// A cluster to take a snapshot of.
#[derive(Debug, Args)]
pub struct SnapshotCluster {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// A cluster for which the shepherd is to have another key.
#[derive(Debug, Args)]
pub struct RotateClusterKey {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// A cluster to bring back.
#[derive(Debug, Args)]
pub struct RestoreCluster {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The snapshot [default: the newest one]
    #[arg(long, value_name = "ID", value_parser = NonEmptyStringValueParser::new())]
    pub snapshot: Option<String>,
    /// The machine that it is brought back onto first: its id, or its provider's name for it [default: any that is free]
    #[arg(long = "target_machine", value_name = "MACHINE", value_parser = NonEmptyStringValueParser::new())]
    pub target_machine: Option<String>,
    /// Do it though most of its control plane answers, and lose what was changed since the snapshot
    #[arg(long = "bypass_quorum", alias = "bypass-quorum")]
    pub bypass_quorum: bool,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// A cluster to end.
#[derive(Debug, Args)]
pub struct DeleteCluster {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// The cluster of that name, or every cluster, and the time of the answer.
async fn fetch_clusters(
    client: &FleetClient,
    name: Option<&str>,
) -> Result<(Vec<ClusterView>, Timestamp), CliError> {
    let request = v1::ListClustersRequest { name: name.unwrap_or_default().to_owned() };
    let result = ClustersClient::new(client.channel()).list(request).await;
    let response = result.map_err(status_to_error)?.into_inner();
    let clusters = response.clusters.into_iter().map(decode_cluster).collect::<Result<_, _>>()?;
    Ok((clusters, require_timestamp(response.read_at, "its read time")?))
}

fn decode_cluster(cluster: v1::Cluster) -> Result<ClusterView, CliError> {
    Ok(ClusterView {
        name: cluster.name,
        id: cluster.id,
        stage: cluster.stage,
        control_plane: cluster.control_plane,
        workers: cluster.workers,
        selector: cluster.selector,
        roles: cluster.roles,
        approval: cluster.approval,
        created_at: require_timestamp(cluster.created_at, "the time when a cluster was requested")?,
        created_by: cluster.created_by,
        deletion_requested_by: cluster.deletion_requested_by,
        curators: cluster.curators,
        observed_at: cluster.observed_at.and_then(decode_timestamp),
        snapshot_at: cluster.snapshot_at.and_then(decode_timestamp),
        epoch: cluster.epoch,
        restored_at: cluster.restored_at.and_then(decode_timestamp),
        restoring_from: cluster.restoring_from,
        restore_requested_by: cluster.restore_requested_by,
        key_since: cluster.key_since.and_then(decode_timestamp),
        key_rotation_requested_by: cluster.key_rotation_requested_by,
        keys_rejected_since: cluster.keys_rejected_since.and_then(decode_timestamp),
        voters: cluster.voters,
        voters_reached: cluster.voters_reached,
        wait_reasons: cluster.wait_reasons,
        machines: cluster.machines.into_iter().map(decode_machine).collect(),
        declarations: cluster.declarations.into_iter().map(decode_declaration).collect::<Result<_, _>>()?,
        kubernetes: cluster.kubernetes.map(cluster_kubernetes::decode_kubernetes).transpose()?,
        upgrade: cluster.upgrade.map(cluster_kubernetes::decode_upgrade).transpose()?,
    })
}

fn decode_declaration(declaration: v1::ClusterDeclaration) -> Result<DeclarationView, CliError> {
    Ok(DeclarationView {
        role: declaration.role,
        services: declaration.services,
        digest: declaration.digest,
        declared_at: require_timestamp(declaration.declared_at, "the time when a role was declared")?,
        declared_by: declaration.declared_by,
        withdrawn: declaration.withdrawn,
    })
}

fn decode_service(service: v1::ClusterServiceStatus) -> ServiceView {
    ServiceView {
        role: service.role,
        service: service.service,
        state: service.state,
        since: service.since.and_then(decode_timestamp),
        restarts: service.restarts,
        message: service.message,
    }
}

fn decode_machine(machine: v1::ClusterMachine) -> ClusterMachineView {
    ClusterMachineView {
        machine: machine.machine,
        name: machine.name,
        part: machine.part,
        location: machine.location,
        phase: machine.phase,
        node: machine.node,
        state: machine.state,
        health: machine.health,
        roles: machine.roles,
        leave_reason: machine.leave_reason,
        wait_reason: machine.wait_reason,
        services: machine.services.into_iter().map(decode_service).collect(),
        kubernetes: machine.kubernetes.map(cluster_kubernetes::decode_node_kubernetes),
    }
}

/// Runs a `cluster` command and returns its output.
pub async fn run_cluster_command(
    client: &FleetClient,
    command: &ClusterCommand,
    format: Format,
) -> Result<String, CliError> {
    match command {
        ClusterCommand::Create(args) => create_cluster(client, args, format).await,
        ClusterCommand::Get => show_clusters(client, format).await,
        ClusterCommand::Describe(of) => describe_cluster(client, &of.name, format).await,
        ClusterCommand::Plan(args) => plan_cluster(client, args, format).await,
        ClusterCommand::Scale(args) => {
            let change = ClusterSpecChange {
                control_plane: args.control_plane,
                workers: args.workers,
                ..ClusterSpecChange::default()
            };
            change_cluster(client, &args.name, &change, &args.reason, format).await
        }
        ClusterCommand::Declare(args) => declare_role(client, args, format).await,
        ClusterCommand::Undeclare(args) => undeclare_role(client, args, format).await,
        ClusterCommand::Roles(args) => {
            let change = ClusterSpecChange {
                add_roles: args.add_roles.iter().cloned().collect(),
                remove_roles: args.remove_roles.iter().cloned().collect(),
                ..ClusterSpecChange::default()
            };
            change_cluster(client, &args.name, &change, &args.reason, format).await
        }
        ClusterCommand::Approve(args) => approve_machine(client, args, format).await,
        ClusterCommand::Snapshot(args) => cluster_snapshots::request_snapshot(client, args, format).await,
        ClusterCommand::Snapshots(of) => cluster_snapshots::show_snapshots(client, &of.name, format).await,
        ClusterCommand::Restore(args) => cluster_snapshots::restore_cluster(client, args, format).await,
        ClusterCommand::RotateKey(args) => cluster_rotate_key::rotate_cluster_key(client, args, format).await,
        ClusterCommand::Credentials(command) => run_credentials_command(client, command, format).await,
        ClusterCommand::Kubernetes(command) => run_kubernetes_command(client, command, format).await,
        ClusterCommand::Kubeconfig(args) => create_kubeconfig(client, args, format).await,
        ClusterCommand::Upgrade(args) => run_upgrade_command(client, args, format).await,
        ClusterCommand::Delete(args) => delete_cluster(client, args, format).await,
    }
}

async fn show_clusters(client: &FleetClient, format: Format) -> Result<String, CliError> {
    let (clusters, now) = fetch_clusters(client, None).await?;
    if format == Format::Json {
        return get::format_json(&json!({ "clusters": clusters }));
    }
    if clusters.is_empty() {
        return Ok("no clusters; create one with: shepherdctl cluster create NAME\n".to_owned());
    }
    let rows: Vec<Vec<String>> = clusters
        .iter()
        .map(|cluster| {
            vec![
                cluster.name.clone(),
                cluster.stage.clone(),
                cluster.control_plane.to_string(),
                cluster.workers.to_string(),
                format!("{}/{}", cluster.healthy_nodes(), cluster.machines.len()),
                format_votes(cluster),
                humanize_duration(between(cluster.created_at, now)),
            ]
        })
        .collect();
    let head = ["CLUSTER", "STAGE", "CONTROL PLANE", "WORKERS", "HEALTHY", "VOTES", "AGE"];
    Ok(format_table(&head, &rows, terminal_width()))
}

fn format_votes(cluster: &ClusterView) -> String {
    match (cluster.voters_reached, cluster.voters) {
        (Some(reached), Some(voters)) => format!("{reached}/{voters}"),
        _ => "-".to_owned(),
    }
}

async fn describe_cluster(client: &FleetClient, name: &str, format: Format) -> Result<String, CliError> {
    let (clusters, now) = fetch_clusters(client, Some(name)).await?;
    // The API lists every cluster if the name is empty.
    let cluster = clusters.into_iter().find(|cluster| cluster.name == name).ok_or_else(|| {
        CliError::Invalid(format!("there is no cluster {name:?}; run: shepherdctl cluster get"))
    })?;
    if format == Format::Json {
        return get::format_json(&json!({ "cluster": cluster }));
    }
    Ok(format_cluster(&cluster, now))
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
    line("requested", &format!("{} by {}", absolute_time(cluster.created_at), cluster.created_by));
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
    if let Some(key) = cluster_rotate_key::format_key_status(cluster, now) {
        line("shepherd's key", &key);
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
    for (name, value) in cluster_kubernetes::summary_lines(cluster, now) {
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
    text.push_str(&cluster_kubernetes::format_components(cluster, now));
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

pub(super) fn require_reason(reason: &str) -> Result<(), CliError> {
    if reason.trim().is_empty() {
        return Err(CliError::Invalid("--reason is empty; give one for operators who read the audit".into()));
    }
    Ok(())
}

pub(super) fn format_outcome(name: &str, done: &OrderOutcome, format: Format) -> Result<String, CliError> {
    match format {
        Format::Json => {
            let mut answer = json!({ "cluster": name, "changed": done.changed, "message": done.message });
            dry_run::annotate_json(&mut answer);
            get::format_json(&answer)
        }
        Format::Table => {
            Ok(format!("{}\n", dry_run::annotate_text(&format!("{} {}", order_target(name), done.message))))
        }
    }
}

/// Formats the response to an order about a cluster.
pub(super) fn format_response(
    name: &str,
    response: v1::OrderResponse,
    format: Format,
) -> Result<String, CliError> {
    format_outcome(name, &OrderOutcome { changed: response.changed, message: response.message }, format)
}

async fn create_cluster(
    client: &FleetClient,
    args: &CreateCluster,
    format: Format,
) -> Result<String, CliError> {
    require_reason(&args.reason)?;
    let spec = ClusterSpec {
        name: args.name.clone(),
        control_plane: args.control_plane,
        workers: args.workers,
        selector: args
            .selector
            .parse()
            .map_err(|reason| CliError::Invalid(format!("--selector: {reason}")))?,
        roles: args.role.iter().cloned().collect(),
        approval: args.approval.parse().unwrap_or_default(),
    };
    spec.validate().map_err(CliError::Invalid)?;
    let kubernetes = match &args.kubernetes_bundle {
        Some(bundle) => Some(cluster_kubernetes::parse_patch(Some(bundle), &args.flags)?),
        None if cluster_kubernetes::parse_patch(None, &args.flags)? == KubernetesPatch::default() => None,
        None => {
            return Err(CliError::Invalid(
                "settings of Kubernetes were given without a bundle; name it with --kubernetes_bundle BUNDLE"
                    .into(),
            ));
        }
    };
    let give = async |service, order| {
        let request = v1::CreateClusterRequest {
            name: spec.name.clone(),
            order: Some(order),
            control_plane: spec.control_plane,
            workers: spec.workers,
            selector: spec.selector.to_string(),
            roles: spec.roles.iter().cloned().collect(),
            approval: spec.approval.as_str().to_owned(),
            kubernetes: kubernetes.as_ref().map(cluster_kubernetes::encode_patch),
        };
        ClustersClient::new(service).create(request).await
    };
    let response = order_retry::send_order(&mut client.clone(), &args.reason, give).await?;
    format_response(&args.name, response, format)
}

async fn change_cluster(
    client: &FleetClient,
    name: &str,
    change: &ClusterSpecChange,
    reason: &str,
    format: Format,
) -> Result<String, CliError> {
    require_reason(reason)?;
    let give = async |service, order| {
        let request = v1::ChangeClusterRequest {
            name: name.to_owned(),
            order: Some(order),
            control_plane: change.control_plane,
            workers: change.workers,
            add_roles: change.add_roles.iter().cloned().collect(),
            remove_roles: change.remove_roles.iter().cloned().collect(),
        };
        ClustersClient::new(service).change(request).await
    };
    let response = order_retry::send_order(&mut client.clone(), reason, give).await?;
    format_response(name, response, format)
}

async fn declare_role(
    client: &FleetClient,
    args: &DeclareInCluster,
    format: Format,
) -> Result<String, CliError> {
    require_reason(&args.reason)?;
    let declaration = crate::role_file::read_role_file(&args.file)?;
    let give = async |service, order| {
        let request = v1::DeclareRoleRequest {
            name: args.name.clone(),
            order: Some(order),
            declaration: Some(declaration.to_wire().clone()),
        };
        ClustersClient::new(service).declare_role(request).await
    };
    let response = order_retry::send_order(&mut client.clone(), &args.reason, give).await?;
    format_response(&args.name, response, format)
}

async fn undeclare_role(
    client: &FleetClient,
    args: &UndeclareInCluster,
    format: Format,
) -> Result<String, CliError> {
    require_reason(&args.reason)?;
    let give = async |service, order| {
        let request =
            v1::UndeclareRoleRequest { name: args.name.clone(), order: Some(order), role: args.role.clone() };
        ClustersClient::new(service).undeclare_role(request).await
    };
    let response = order_retry::send_order(&mut client.clone(), &args.reason, give).await?;
    format_response(&args.name, response, format)
}

async fn approve_machine(
    client: &FleetClient,
    args: &ApproveInCluster,
    format: Format,
) -> Result<String, CliError> {
    require_reason(&args.reason)?;
    let give = async |service, order| {
        let request = v1::ApproveMachineRequest {
            name: args.name.clone(),
            order: Some(order),
            machine: args.machine.clone(),
        };
        ClustersClient::new(service).approve_machine(request).await
    };
    let response = order_retry::send_order(&mut client.clone(), &args.reason, give).await?;
    format_response(&args.name, response, format)
}

async fn delete_cluster(
    client: &FleetClient,
    args: &DeleteCluster,
    format: Format,
) -> Result<String, CliError> {
    require_reason(&args.reason)?;
    let give = async |service, order| {
        let request = v1::DeleteClusterRequest { name: args.name.clone(), order: Some(order) };
        ClustersClient::new(service).delete(request).await
    };
    let response = order_retry::send_order(&mut client.clone(), &args.reason, give).await?;
    format_response(&args.name, response, format)
}
