//! `cluster delete`: end a cluster.

use clap::Args;

use crate::cluster::ClusterOrderArgs;
use crate::cluster::outcome::send_final_order;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::confirmation::ConfirmFlag;
use crate::order::wait_flags::WaitFlags;
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

pub(crate) const DELETE_EXAMPLES: &str = "\
Example:
  shepherdctl cluster delete ams --reason 'the trial is over'

Its machines stay in the fleet. They stop what they run for the cluster, and remove their data of the
cluster, including its etcd. Nothing undoes that: type the name of the cluster, or give --yes.";

/// Arguments of `cluster delete`: the cluster, the reason and the confirmation.
#[derive(Debug, Args)]
pub struct DeleteCluster {
    /// The cluster and the reason.
    #[command(flatten)]
    pub order: ClusterOrderArgs,
    /// Confirmation without a terminal.
    #[command(flatten)]
    pub confirm: ConfirmFlag,
    /// Whether to wait for the end of the work.
    #[command(flatten)]
    pub waiting: WaitFlags,
}

pub(super) async fn delete_cluster(
    context: &CommandContext,
    args: &DeleteCluster,
) -> Result<String, CliError> {
    let give = async |service, order| {
        let request = v1::DeleteClusterRequest { name: args.order.name.clone(), order: Some(order) };
        ClustersClient::new(service).delete(request).await
    };
    send_final_order(context, &args.order.name, &args.order.reason, args.confirm.yes, give).await
}
