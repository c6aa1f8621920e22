//! `cluster upgrade`: rolling upgrade of role servers and Kubernetes, pause, resume, roll back.

use clap::Args;

use crate::bmdb::action::OrderOutcome;
use crate::bmdb::cluster::order_target;
use crate::bmdb::cluster_upgrade::{NewUpgrade, UpgradeChange};
use crate::cli::backend::Backend;
use crate::cli::cluster::{format_outcome, require_reason};
use crate::cli::error::CliError;
use crate::cli::machine_orders::direct_order;
use crate::cli::order_retry;
use crate::cli::output::Format;
use crate::model::time::Span;
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::cluster_kubernetes_client::ClusterKubernetesClient;

/// A cluster to upgrade, or an upgrade to change.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "of these flags one may be given")]
pub struct UpgradeCluster {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// The bundle that its nodes are to run: an artefact's digest, the beginning of it, or its name
    #[arg(
        long = "kubernetes_bundle",
        value_name = "BUNDLE",
        conflicts_with_all = ["rollback", "pause", "resume", "abort"]
    )]
    pub kubernetes_bundle: Option<String>,
    /// The release that its role servers become first: an artefact's digest, the beginning of it, or its name
    #[arg(
        long = "roleserver_release",
        value_name = "RELEASE",
        conflicts_with_all = ["rollback", "pause", "resume", "abort"]
    )]
    pub roleserver_release: Option<String>,
    /// How many workers at a time; controllers go one by one
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub parallelism: u32,
    /// How long a node may take until all of it is well
    #[arg(long = "node_deadline", value_name = "SPAN", default_value = "15m")]
    pub node_deadline: Span,
    /// Go back to the bundle of before: workers first, then controllers
    #[arg(long, conflicts_with_all = ["pause", "resume", "abort"])]
    pub rollback: bool,
    /// Ask no more nodes until it is resumed
    #[arg(long, conflicts_with_all = ["resume", "abort"])]
    pub pause: bool,
    /// Go on, and ask those again that were not through
    #[arg(long, conflicts_with = "abort")]
    pub resume: bool,
    /// End the upgrade where it is
    #[arg(long)]
    pub abort: bool,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

pub(super) async fn run_upgrade_command(
    source: &Backend,
    args: &UpgradeCluster,
    format: Format,
) -> Result<String, CliError> {
    require_reason(&args.reason)?;
    let change = match (args.rollback, args.pause, args.resume, args.abort) {
        (true, ..) => UpgradeChange::RollBack,
        (_, true, ..) => UpgradeChange::Pause,
        (_, _, true, _) => UpgradeChange::Resume,
        (.., true) => UpgradeChange::Abort,
        _ => return create_upgrade(source, args, format).await,
    };
    let rpc = match change {
        UpgradeChange::RollBack => "shepherd.fleet.v1.ClusterKubernetes/RollBack",
        UpgradeChange::Pause => "shepherd.fleet.v1.ClusterKubernetes/PauseUpgrade",
        UpgradeChange::Resume => "shepherd.fleet.v1.ClusterKubernetes/ResumeUpgrade",
        UpgradeChange::Abort => "shepherd.fleet.v1.ClusterKubernetes/AbortUpgrade",
    };
    let done = match source {
        Backend::Direct(bmdb) => {
            let order = direct_order(rpc, order_target(&args.name), Some(&args.reason));
            bmdb.change_upgrade(order, args.name.clone(), change).await?.outcome
        }
        Backend::Api(remote) => {
            let give = async |service, order| {
                let request = v1::ChangeClusterUpgradeRequest { name: args.name.clone(), order: Some(order) };
                let mut client = ClusterKubernetesClient::new(service);
                match change {
                    UpgradeChange::RollBack => client.roll_back(request).await,
                    UpgradeChange::Pause => client.pause_upgrade(request).await,
                    UpgradeChange::Resume => client.resume_upgrade(request).await,
                    UpgradeChange::Abort => client.abort_upgrade(request).await,
                }
            };
            let done = order_retry::send_order(&mut remote.clone(), &args.reason, give).await?;
            OrderOutcome { changed: done.changed, message: done.message }
        }
    };
    format_outcome(&args.name, &done, format)
}

async fn create_upgrade(source: &Backend, args: &UpgradeCluster, format: Format) -> Result<String, CliError> {
    let new = NewUpgrade {
        kubernetes: args.kubernetes_bundle.clone(),
        roleserver: args.roleserver_release.clone(),
        parallelism: args.parallelism,
        deadline_seconds: u32::try_from(args.node_deadline.0.as_secs()).unwrap_or(u32::MAX),
    };
    new.check().map_err(CliError::Invalid)?;
    let done = match source {
        Backend::Direct(bmdb) => {
            let rpc = "shepherd.fleet.v1.ClusterKubernetes/Upgrade";
            let order = direct_order(rpc, order_target(&args.name), Some(&args.reason));
            bmdb.upgrade_cluster(order, args.name.clone(), new).await?.outcome
        }
        Backend::Api(remote) => {
            let give = async |service, order| {
                let request = v1::UpgradeClusterRequest {
                    name: args.name.clone(),
                    order: Some(order),
                    kubernetes: new.kubernetes.clone().unwrap_or_default(),
                    roleserver: new.roleserver.clone().unwrap_or_default(),
                    parallelism: new.parallelism,
                    deadline_seconds: new.deadline_seconds,
                };
                ClusterKubernetesClient::new(service).upgrade(request).await
            };
            let done = order_retry::send_order(&mut remote.clone(), &args.reason, give).await?;
            OrderOutcome { changed: done.changed, message: done.message }
        }
    };
    format_outcome(&args.name, &done, format)
}
