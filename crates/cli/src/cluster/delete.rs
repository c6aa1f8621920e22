//! `cluster delete`: end a cluster.

use clap::Args;

use crate::cluster::outcome::format_response;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::reason::require_audit_reason;
use crate::order::retry::send_order;
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

pub(crate) const DELETE_EXAMPLES: &str = "\
Example:
  shepherdctl cluster delete ams --reason 'the trial is over'

Its machines stay in the fleet. They stop what they run for the cluster, and remove their data of the
cluster, including its etcd.";

/// Arguments of `cluster delete`: the cluster to delete.
#[derive(Debug, Args)]
pub struct DeleteCluster {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

pub(super) async fn delete_cluster(
    context: &CommandContext,
    args: &DeleteCluster,
) -> Result<String, CliError> {
    require_audit_reason(&args.reason)?;
    let give = async |service, order| {
        let request = v1::DeleteClusterRequest { name: args.name.clone(), order: Some(order) };
        ClustersClient::new(service).delete(request).await
    };
    let response = send_order(context, &args.reason, give).await?;
    format_response(context, &args.name, response)
}
