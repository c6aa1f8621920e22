//! `cluster create|get|describe|plan|scale|declare|undeclare|roles|approve|snapshot|snapshots|restore|
//! credentials|rotate-key|kubernetes|kubeconfig|upgrade|delete`: clusters of machines.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};
use serde_json::json;

use crate::bmdb::action::Done;
use crate::bmdb::cluster::{target, view, with_machines};
use crate::bmdb::cluster_kubernetes::Wish;
use crate::cli::again;
use crate::cli::cluster_credentials::{CredentialsCommand, credentials_command};
use crate::cli::cluster_keys;
use crate::cli::cluster_kubeconfig::{Kubeconfig, kubeconfig};
use crate::cli::cluster_kubernetes::{self, KubernetesCommand, KubernetesFlags, kubernetes_command};
use crate::cli::cluster_plan::{PlanCluster, plan};
use crate::cli::cluster_upgrade::{UpgradeCluster, upgrade_command};
use crate::cli::dry_run;
use crate::cli::error::CliError;
use crate::cli::examples;
use crate::cli::get;
use crate::cli::operate::direct;
use crate::cli::output::{Format, table, width};
use crate::cli::remote::refused;
use crate::cli::remote_read::{at, moment};
use crate::cli::snapshots;
use crate::cli::source::Source;
use crate::model::cluster::declared::{DeclarationView, ServiceView};
use crate::model::cluster::spec::{Approval, Change, Spec};
use crate::model::cluster::view::{ClusterMachineView, ClusterView};
use crate::model::telling::{absolute, rough};
use crate::model::time::{Timestamp, between};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::clusters_client::ClustersClient;

/// What can be done with clusters.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Ask for a cluster of machines of the fleet
    #[command(after_help = examples::CLUSTER_CREATE)]
    Create(CreateCluster),
    /// List clusters
    #[command(after_help = examples::CLUSTER_GET)]
    Get,
    /// Show a cluster, its machines, and what each waits for
    #[command(after_help = examples::CLUSTER_DESCRIBE)]
    Describe(OfCluster),
    /// Say what will be done to a cluster, step by step, or would be if it was asked for, changed or ended
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
    Roles(RolesOfCluster),
    /// Let a machine into a cluster whose approval is manual
    #[command(after_help = examples::CLUSTER_APPROVE)]
    Approve(ApproveInCluster),
    /// Have a snapshot of a cluster's records taken now
    #[command(after_help = examples::CLUSTER_SNAPSHOT)]
    Snapshot(SnapshotCluster),
    /// List the snapshots that are kept of a cluster
    #[command(after_help = examples::CLUSTER_SNAPSHOTS)]
    Snapshots(OfCluster),
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
    Kubeconfig(Kubeconfig),
    /// Upgrade a cluster: its role servers, then its controllers one by one, then its workers; or go back
    #[command(after_help = examples::CLUSTER_UPGRADE)]
    Upgrade(UpgradeCluster),
    /// End a cluster: its machines leave it, and what they keep of it is removed
    #[command(after_help = examples::CLUSTER_DELETE)]
    Delete(DeleteCluster),
}

/// A cluster to show.
#[derive(Debug, Args)]
pub struct OfCluster {
    /// Its name
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
    pub select: String,
    /// A role that every worker is to have, as it is declared to the cluster; may be given several times
    #[arg(long, value_name = "ROLE")]
    pub role: Vec<String>,
    /// Who lets machines in: the shepherd, by the key that each reported over its agent channel, or a person
    #[arg(
        long,
        value_name = "WHO",
        default_value = "automatic",
        value_parser = PossibleValuesParser::new(Approval::ALL.map(Approval::as_str))
    )]
    pub approval: String,
    /// The bundle of Kubernetes that it runs: an artefact's digest, the beginning of it, or its name [default: none]
    #[arg(long, value_name = "BUNDLE")]
    pub kubernetes: Option<String>,
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
    /// Its name
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
    /// The cluster
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
    /// The cluster
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The role
    #[arg(value_name = "ROLE")]
    pub role: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// A cluster whose workers are to do something else.
#[derive(Debug, Args)]
pub struct RolesOfCluster {
    /// Its name
    #[arg(value_name = "NAME")]
    pub name: String,
    /// A role that every worker is to have; may be given several times
    #[arg(long, value_name = "ROLE", required_unless_present = "take")]
    pub give: Vec<String>,
    /// A role that no worker is to have; may be given several times
    #[arg(long, value_name = "ROLE")]
    pub take: Vec<String>,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// A machine to let in.
#[derive(Debug, Args)]
pub struct ApproveInCluster {
    /// The cluster
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
    /// Its name
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// A cluster for which the shepherd is to have another key.
#[derive(Debug, Args)]
pub struct RotateClusterKey {
    /// Its name
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

/// A cluster to bring back.
#[derive(Debug, Args)]
pub struct RestoreCluster {
    /// Its name
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The snapshot [default: the newest one]
    #[arg(long, value_name = "ID")]
    pub snapshot: Option<String>,
    /// The machine that it is brought back onto first: its id, or its provider's name for it [default: any that is free]
    #[arg(long, value_name = "MACHINE")]
    pub onto: Option<String>,
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
    /// Its name
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

async fn read(source: &Source, name: Option<&str>) -> Result<(Vec<ClusterView>, Timestamp), CliError> {
    match source {
        Source::Direct(bmdb) => {
            let name = name.map(str::to_owned);
            let look = bmdb.inspect(move |tx| {
                let name = name.clone();
                Box::pin(async move { with_machines(tx, name.as_deref()).await })
            });
            let (found, now) = look.await?;
            Ok((found.iter().map(view).collect(), now))
        }
        Source::Api(remote) => {
            let request = v1::ListClustersRequest { name: name.unwrap_or_default().to_owned() };
            let said = ClustersClient::new(remote.service()).list(request).await;
            let said = said.map_err(refused)?.into_inner();
            let clusters = said.clusters.into_iter().map(cluster).collect::<Result<_, _>>()?;
            Ok((clusters, at(said.at, "its moment")?))
        }
    }
}

fn cluster(said: v1::Cluster) -> Result<ClusterView, CliError> {
    Ok(ClusterView {
        name: said.name,
        id: said.id,
        stage: said.stage,
        control_plane: said.control_plane,
        workers: said.workers,
        select: said.select,
        roles: said.roles,
        approval: said.approval,
        created_at: at(said.created_at, "when a cluster was asked for")?,
        created_by: said.created_by,
        deleting_by: said.deleting_by,
        curators: said.curators,
        seen_at: said.seen_at.and_then(moment),
        snapshot_at: said.snapshot_at.and_then(moment),
        epoch: said.epoch,
        restored_at: said.restored_at.and_then(moment),
        restoring_from: said.restoring_from,
        restoring_by: said.restoring_by,
        key_since: said.key_since.and_then(moment),
        key_asked_by: said.key_asked_by,
        keys_refused_since: said.keys_refused_since.and_then(moment),
        voters: said.voters,
        voters_reached: said.voters_reached,
        waits: said.waits,
        machines: said.machines.into_iter().map(machine).collect(),
        declarations: said.declarations.into_iter().map(declaration).collect::<Result<_, _>>()?,
        kubernetes: said.kubernetes.map(cluster_kubernetes::kubernetes).transpose()?,
        upgrade: said.upgrade.map(cluster_kubernetes::upgrade).transpose()?,
    })
}

fn declaration(said: v1::ClusterDeclaration) -> Result<DeclarationView, CliError> {
    Ok(DeclarationView {
        role: said.role,
        services: said.services,
        digest: said.digest,
        declared_at: at(said.declared_at, "when a role was declared")?,
        declared_by: said.declared_by,
        withdrawn: said.withdrawn,
    })
}

fn service(said: v1::ClusterService) -> ServiceView {
    ServiceView {
        role: said.role,
        service: said.service,
        state: said.state,
        since: said.since.and_then(moment),
        restarts: said.restarts,
        message: said.message,
    }
}

fn machine(said: v1::ClusterMachine) -> ClusterMachineView {
    ClusterMachineView {
        machine: said.machine,
        name: said.name,
        part: said.part,
        location: said.location,
        phase: said.phase,
        node: said.node,
        state: said.state,
        health: said.health,
        roles: said.roles,
        leaving: said.leaving,
        waits: said.waits,
        services: said.services.into_iter().map(service).collect(),
        kubernetes: said.kubernetes.map(cluster_kubernetes::on_node),
    }
}

/// What a cluster command answers.
pub async fn cluster_command(
    source: &Source,
    command: &ClusterCommand,
    format: Format,
) -> Result<String, CliError> {
    match command {
        ClusterCommand::Create(asked) => create(source, asked, format).await,
        ClusterCommand::Get => list(source, format).await,
        ClusterCommand::Describe(of) => describe(source, &of.name, format).await,
        ClusterCommand::Plan(asked) => plan(source, asked, format).await,
        ClusterCommand::Scale(asked) => {
            let change =
                Change { control_plane: asked.control_plane, workers: asked.workers, ..Change::default() };
            alter(source, &asked.name, change, &asked.reason, format).await
        }
        ClusterCommand::Declare(asked) => declare(source, asked, format).await,
        ClusterCommand::Undeclare(asked) => undeclare(source, asked, format).await,
        ClusterCommand::Roles(asked) => {
            let change = Change {
                give: asked.give.iter().cloned().collect(),
                take: asked.take.iter().cloned().collect(),
                ..Change::default()
            };
            alter(source, &asked.name, change, &asked.reason, format).await
        }
        ClusterCommand::Approve(asked) => approve(source, asked, format).await,
        ClusterCommand::Snapshot(asked) => snapshots::ask(source, asked, format).await,
        ClusterCommand::Snapshots(of) => snapshots::list(source, &of.name, format).await,
        ClusterCommand::Restore(asked) => snapshots::restore(source, asked, format).await,
        ClusterCommand::RotateKey(asked) => cluster_keys::rotate(source, asked, format).await,
        ClusterCommand::Credentials(command) => credentials_command(source, command, format).await,
        ClusterCommand::Kubernetes(command) => kubernetes_command(source, command, format).await,
        ClusterCommand::Kubeconfig(asked) => kubeconfig(source, asked, format).await,
        ClusterCommand::Upgrade(asked) => upgrade_command(source, asked, format).await,
        ClusterCommand::Delete(asked) => delete(source, asked, format).await,
    }
}

async fn list(source: &Source, format: Format) -> Result<String, CliError> {
    let (clusters, now) = read(source, None).await?;
    if format == Format::Json {
        return get::json(&json!({ "clusters": clusters }));
    }
    if clusters.is_empty() {
        return Ok("no clusters; shepherdctl cluster create NAME asks for one\n".to_owned());
    }
    let rows: Vec<Vec<String>> = clusters
        .iter()
        .map(|cluster| {
            vec![
                cluster.name.clone(),
                cluster.stage.clone(),
                cluster.control_plane.to_string(),
                cluster.workers.to_string(),
                format!("{}/{}", cluster.healthy(), cluster.machines.len()),
                votes(cluster),
                rough(between(cluster.created_at, now)),
            ]
        })
        .collect();
    let head = ["CLUSTER", "STAGE", "CONTROL PLANE", "WORKERS", "HEALTHY", "VOTES", "AGE"];
    Ok(table(&head, &rows, width()))
}

fn votes(cluster: &ClusterView) -> String {
    match (cluster.voters_reached, cluster.voters) {
        (Some(reached), Some(voters)) => format!("{reached}/{voters}"),
        _ => "-".to_owned(),
    }
}

async fn describe(source: &Source, name: &str, format: Format) -> Result<String, CliError> {
    let (mut clusters, now) = read(source, Some(name)).await?;
    let cluster = clusters.pop().ok_or_else(|| {
        CliError::Wrong(format!("there is no cluster {name:?}; run: shepherdctl cluster get"))
    })?;
    if format == Format::Json {
        return get::json(&json!({ "cluster": cluster }));
    }
    Ok(described(&cluster, now))
}

fn described(cluster: &ClusterView, now: Timestamp) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(text, "{name:<14} {value}");
    };
    line("cluster", &cluster.name);
    line("id", &cluster.id);
    let stage = match &cluster.deleting_by {
        Some(by) => format!("{}, as {by} ordered", cluster.stage),
        None => cluster.stage.clone(),
    };
    line("stage", &stage);
    line("wanted", &format!("{} control-plane, {} worker", cluster.control_plane, cluster.workers));
    if !cluster.select.is_empty() {
        line("select", &cluster.select);
    }
    if !cluster.roles.is_empty() {
        line("worker roles", &cluster.roles.join(", "));
    }
    line("approval", &cluster.approval);
    line("asked for", &format!("{} by {}", absolute(cluster.created_at), cluster.created_by));
    if !cluster.curators.is_empty() {
        line("curators", &cluster.curators.join(", "));
    }
    if let Some(seen) = cluster.seen_at {
        line("last answer", &format!("{} ago; {} votes reached", rough(between(seen, now)), votes(cluster)));
    }
    match cluster.snapshot_at {
        Some(taken) => line("snapshot", &format!("{} ago", rough(between(taken, now)))),
        None if !cluster.curators.is_empty() => line("snapshot", "none yet"),
        None => {}
    }
    if let Some(restored) = cluster.restored_at {
        line("restored", &format!("{} ago; epoch {}", rough(between(restored, now)), cluster.epoch));
    }
    if let (Some(from), Some(by)) = (&cluster.restoring_from, &cluster.restoring_by) {
        line("restoring", &format!("from snapshot {from}, as {by} ordered"));
    }
    if let Some(key) = cluster_keys::told(cluster, now) {
        line("shepherd's key", &key);
    }
    for declared in &cluster.declarations {
        let withdrawn = if declared.withdrawn { ", withdrawn" } else { "" };
        let said = format!(
            "{} runs {}; by {}, {} ago{withdrawn}",
            declared.role,
            declared.services.join(", "),
            declared.declared_by,
            rough(between(declared.declared_at, now))
        );
        line("declared", &said);
    }
    for (name, value) in cluster_kubernetes::lines(cluster, now) {
        line(name, &value);
    }
    for wait in &cluster.waits {
        line("waits", wait);
    }
    if cluster.machines.is_empty() {
        return text;
    }
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
    text.push('\n');
    text.push_str(&table(&["MACHINE", "PART", "LOCATION", "PHASE", "HEALTH", "ROLES"], &rows, width()));
    text.push_str(&services(cluster, now));
    text.push_str(&cluster_kubernetes::components(cluster, now));
    let mut waits = String::new();
    for machine in &cluster.machines {
        if let Some(why) = &machine.leaving {
            let _ = writeln!(waits, "{} leaves: {why}", machine.name);
        }
        if let Some(wait) = &machine.waits {
            let _ = writeln!(waits, "{} waits: {wait}", machine.name);
        }
    }
    if !waits.is_empty() {
        text.push('\n');
        text.push_str(&waits);
    }
    text
}

/// What the machines run of operators' roles; nothing when they run nothing.
fn services(cluster: &ClusterView, now: Timestamp) -> String {
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
                service.since.map_or_else(|| "-".to_owned(), |since| rough(between(since, now))),
                service.restarts.to_string(),
                service.message,
            ]
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    format!("\n{}", table(&["MACHINE", "SERVICE", "STATE", "FOR", "RESTARTS", "BECAUSE"], &rows, width()))
}

pub(super) fn given(reason: &str) -> Result<(), CliError> {
    if reason.trim().is_empty() {
        return Err(CliError::Wrong("--reason is empty; whoever reads the audit will want to know".into()));
    }
    Ok(())
}

pub(super) fn told(name: &str, done: &Done, format: Format) -> Result<String, CliError> {
    match format {
        Format::Json => {
            let mut answer = json!({ "cluster": name, "changed": done.changed, "said": done.said });
            dry_run::mark(&mut answer);
            get::json(&answer)
        }
        Format::Table => Ok(format!("{}\n", dry_run::line(&format!("{} {}", target(name), done.said)))),
    }
}

async fn create(source: &Source, asked: &CreateCluster, format: Format) -> Result<String, CliError> {
    given(&asked.reason)?;
    let spec = Spec {
        name: asked.name.clone(),
        control_plane: asked.control_plane,
        workers: asked.workers,
        selector: asked.select.parse().map_err(|said| CliError::Wrong(format!("--select: {said}")))?,
        roles: asked.role.iter().cloned().collect(),
        approval: asked.approval.parse().unwrap_or_default(),
    };
    spec.check().map_err(CliError::Wrong)?;
    let kubernetes = match &asked.kubernetes {
        Some(bundle) => Some(cluster_kubernetes::wish(Some(bundle), &asked.flags)?),
        None if cluster_kubernetes::wish(None, &asked.flags)? == Wish::default() => None,
        None => {
            return Err(CliError::Wrong(
                "the cluster is to have no Kubernetes; say by which bundle with --kubernetes BUNDLE".into(),
            ));
        }
    };
    let done = match source {
        Source::Direct(bmdb) => {
            let order = direct("shepherd.fleet.v1.Clusters/Create", target(&asked.name), Some(&asked.reason));
            bmdb.create_cluster(order, spec, kubernetes).await?.done
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::CreateClusterRequest {
                    name: spec.name.clone(),
                    order: Some(order),
                    control_plane: spec.control_plane,
                    workers: spec.workers,
                    select: spec.selector.to_string(),
                    roles: spec.roles.iter().cloned().collect(),
                    approval: spec.approval.as_str().to_owned(),
                    kubernetes: kubernetes.as_ref().map(cluster_kubernetes::wire),
                };
                ClustersClient::new(service).create(request).await
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            Done { changed: done.changed, said: done.said }
        }
    };
    told(&asked.name, &done, format)
}

async fn alter(
    source: &Source,
    name: &str,
    change: Change,
    reason: &str,
    format: Format,
) -> Result<String, CliError> {
    given(reason)?;
    let done = match source {
        Source::Direct(bmdb) => {
            let order = direct("shepherd.fleet.v1.Clusters/Change", target(name), Some(reason));
            bmdb.change_cluster(order, name.to_owned(), change).await?.done
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::ChangeClusterRequest {
                    name: name.to_owned(),
                    order: Some(order),
                    control_plane: change.control_plane,
                    workers: change.workers,
                    give: change.give.iter().cloned().collect(),
                    take: change.take.iter().cloned().collect(),
                };
                ClustersClient::new(service).change(request).await
            };
            let done = again::order(&mut remote.clone(), reason, give).await?;
            Done { changed: done.changed, said: done.said }
        }
    };
    told(name, &done, format)
}

async fn declare(source: &Source, asked: &DeclareInCluster, format: Format) -> Result<String, CliError> {
    given(&asked.reason)?;
    let declaration = crate::cli::declaration::read(&asked.file)?;
    let done = match source {
        Source::Direct(bmdb) => {
            let order =
                direct("shepherd.fleet.v1.Clusters/Declare", target(&asked.name), Some(&asked.reason));
            bmdb.declare_in_cluster(order, asked.name.clone(), declaration).await?.done
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::DeclareInClusterRequest {
                    name: asked.name.clone(),
                    order: Some(order),
                    declaration: Some(declaration.to_wire().clone()),
                };
                ClustersClient::new(service).declare(request).await
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            Done { changed: done.changed, said: done.said }
        }
    };
    told(&asked.name, &done, format)
}

async fn undeclare(source: &Source, asked: &UndeclareInCluster, format: Format) -> Result<String, CliError> {
    given(&asked.reason)?;
    let done = match source {
        Source::Direct(bmdb) => {
            let order =
                direct("shepherd.fleet.v1.Clusters/Undeclare", target(&asked.name), Some(&asked.reason));
            bmdb.undeclare_in_cluster(order, asked.name.clone(), asked.role.clone()).await?.done
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::UndeclareInClusterRequest {
                    name: asked.name.clone(),
                    order: Some(order),
                    role: asked.role.clone(),
                };
                ClustersClient::new(service).undeclare(request).await
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            Done { changed: done.changed, said: done.said }
        }
    };
    told(&asked.name, &done, format)
}

async fn approve(source: &Source, asked: &ApproveInCluster, format: Format) -> Result<String, CliError> {
    given(&asked.reason)?;
    let done = match source {
        Source::Direct(bmdb) => {
            let order =
                direct("shepherd.fleet.v1.Clusters/Approve", target(&asked.name), Some(&asked.reason));
            bmdb.approve_in_cluster(order, asked.name.clone(), asked.machine.clone()).await?.done
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::ApproveInClusterRequest {
                    name: asked.name.clone(),
                    order: Some(order),
                    machine: asked.machine.clone(),
                };
                ClustersClient::new(service).approve(request).await
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            Done { changed: done.changed, said: done.said }
        }
    };
    told(&asked.name, &done, format)
}

async fn delete(source: &Source, asked: &DeleteCluster, format: Format) -> Result<String, CliError> {
    given(&asked.reason)?;
    let done = match source {
        Source::Direct(bmdb) => {
            let order = direct("shepherd.fleet.v1.Clusters/Delete", target(&asked.name), Some(&asked.reason));
            bmdb.delete_cluster(order, asked.name.clone()).await?.done
        }
        Source::Api(remote) => {
            let give = async |service, order| {
                let request = v1::DeleteClusterRequest { name: asked.name.clone(), order: Some(order) };
                ClustersClient::new(service).delete(request).await
            };
            let done = again::order(&mut remote.clone(), &asked.reason, give).await?;
            Done { changed: done.changed, said: done.said }
        }
    };
    told(&asked.name, &done, format)
}
