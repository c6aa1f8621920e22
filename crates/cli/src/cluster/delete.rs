//! `cluster delete`: end a cluster.

use crate::cluster::ClusterOrderArgs;
use crate::cluster::outcome::send_cluster_order;
use crate::context::CommandContext;
use crate::error::CliError;
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

pub(crate) const DELETE_EXAMPLES: &str = "\
Example:
  shepherdctl cluster delete ams --reason 'the trial is over'

Its machines stay in the fleet. They stop what they run for the cluster, and remove their data of the
cluster, including its etcd.";

pub(super) async fn delete_cluster(
    context: &CommandContext,
    args: &ClusterOrderArgs,
) -> Result<String, CliError> {
    let give = async |service, order| {
        let request = v1::DeleteClusterRequest { name: args.name.clone(), order: Some(order) };
        ClustersClient::new(service).delete(request).await
    };
    send_cluster_order(context, args, give).await
}
