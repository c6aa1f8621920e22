//! `cluster upgrade`: rolling upgrade of role servers and Kubernetes, pause, resume, roll back.

use clap::Args;
use clap::builder::NonEmptyStringValueParser;

use crate::cluster::outcome::format_response;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::reason::{reason_or_placeholder, require_audit_reason};
use crate::order::retry::send_order;
use crate::order::wait_flags::WaitFlags;
use bmdb::cluster::upgrade::NewUpgrade;
use bmdb::cluster::upgrade::orders::UpgradeChange;
use model::signed_artefact::signing_trust::SigningTrust;
use model::time::Span;
use proto::fleet::v1;
use proto::fleet::v1::cluster_kubernetes_client::ClusterKubernetesClient;

pub(crate) const UPGRADE_EXAMPLES: &str = "\
Examples:
  shepherdctl cluster upgrade ams --kubernetes-bundle 'kubernetes 1.20.2-b' --reason next --dry-run
  shepherdctl cluster upgrade ams --roleserver-release roleserver-1.5 --parallelism 3 --reason fix
  shepherdctl cluster upgrade ams --rollback --reason 'pods do not start'

The first node that is not healthy in time pauses the upgrade: --resume repeats the order to that node,
--rollback returns to the previous bundle, --abort ends the upgrade where it is.";

/// Arguments of `cluster upgrade`: an upgrade to start, or a change of one that is under way.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "of these flags one may be given")]
pub struct UpgradeCluster {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Bundle for its nodes: an artefact's digest, the beginning of it, or its name
    #[arg(
        long = "kubernetes-bundle",
        value_name = "BUNDLE",
        value_parser = NonEmptyStringValueParser::new(),
        conflicts_with_all = ["rollback", "pause", "resume", "abort"]
    )]
    pub kubernetes_bundle: Option<String>,
    /// Release of the role server to roll out first: an artefact's digest, the beginning of it, or its name
    #[arg(
        long = "roleserver-release",
        value_name = "RELEASE",
        value_parser = NonEmptyStringValueParser::new(),
        conflicts_with_all = ["rollback", "pause", "resume", "abort"]
    )]
    pub roleserver_release: Option<String>,
    /// How many workers at a time; controllers go one by one
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub parallelism: u32,
    /// Time limit for a node to become healthy
    #[arg(long = "node-deadline", value_name = "SPAN", default_value = "15m")]
    pub node_deadline: Span,
    /// Roll back to the previous bundle: workers first, then controllers
    #[arg(long, conflicts_with_all = ["pause", "resume", "abort"])]
    pub rollback: bool,
    /// Pause: upgrade no more nodes until it is resumed
    #[arg(long, conflicts_with_all = ["resume", "abort"])]
    pub pause: bool,
    /// Resume, and send the order again to nodes that are not done
    #[arg(long, conflicts_with = "abort")]
    pub resume: bool,
    /// End the upgrade where it is
    #[arg(long)]
    pub abort: bool,
    /// Why, for the audit; --resume needs no reason
    #[arg(long, value_name = "TEXT", required_unless_present = "resume")]
    pub reason: Option<String>,
    /// Whether to wait for the end of the work.
    #[command(flatten)]
    pub waiting: WaitFlags,
}

pub(super) async fn run_upgrade_command(
    context: &CommandContext,
    args: &UpgradeCluster,
) -> Result<String, CliError> {
    let reason = match args.reason.as_deref() {
        reason if args.resume => reason_or_placeholder(reason),
        reason => require_audit_reason(reason.unwrap_or_default())?,
    };
    if args.waiting.wait && (args.pause || args.abort) {
        let text = "nothing happens after --pause or --abort that --wait could wait for; omit it";
        return Err(CliError::Invalid(text.to_owned()));
    }
    let change = match (args.rollback, args.pause, args.resume, args.abort) {
        (true, ..) => UpgradeChange::RollBack,
        (_, true, ..) => UpgradeChange::Pause,
        (_, _, true, _) => UpgradeChange::Resume,
        (.., true) => UpgradeChange::Abort,
        _ => return create_upgrade(context, args, reason).await,
    };
    let give = async |service, order| {
        let request = v1::ChangeClusterUpgradeRequest { name: args.name.clone(), order: Some(order) };
        let mut upgrades = ClusterKubernetesClient::new(service);
        match change {
            UpgradeChange::RollBack => upgrades.roll_back(request).await,
            UpgradeChange::Pause => upgrades.pause_upgrade(request).await,
            UpgradeChange::Resume => upgrades.resume_upgrade(request).await,
            UpgradeChange::Abort => upgrades.abort_upgrade(request).await,
        }
    };
    let response = send_order(context, reason, give).await?;
    format_response(context, &args.name, &response)
}

async fn create_upgrade(
    context: &CommandContext,
    args: &UpgradeCluster,
    reason: &str,
) -> Result<String, CliError> {
    let new = NewUpgrade {
        kubernetes: args.kubernetes_bundle.clone(),
        roleserver: args.roleserver_release.clone(),
        parallelism: args.parallelism,
        deadline_seconds: u32::try_from(args.node_deadline.0.as_secs()).unwrap_or(u32::MAX),
        trust: SigningTrust::default(),
    };
    new.check().map_err(CliError::Invalid)?;
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
    let response = send_order(context, reason, give).await?;
    format_response(context, &args.name, &response)
}
