//! `cluster approve`: approve the join request of a machine.

use clap::Args;

use crate::cluster::outcome::format_response;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::reason::require_audit_reason;
use crate::order::retry::send_order;
use proto::fleet::v1;
use proto::fleet::v1::clusters_client::ClustersClient;

pub(crate) const APPROVE_EXAMPLES: &str = "\
Example:
  shepherdctl cluster approve ams rack-7-03 --reason 'I compared the key on its console'

This admits exactly the key that the machine reports now over its agent channel.";

/// Arguments of `cluster approve`: the machine of the join request to approve.
#[derive(Debug, Args)]
pub struct ApproveInCluster {
    /// Name of the cluster, for example ams1
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID
    #[arg(value_name = "M")]
    pub machine: String,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
}

pub(super) async fn approve_machine(
    context: &CommandContext,
    args: &ApproveInCluster,
) -> Result<String, CliError> {
    require_audit_reason(&args.reason)?;
    let give = async |service, order| {
        let request = v1::ApproveMachineRequest {
            name: args.name.clone(),
            order: Some(order),
            machine: args.machine.clone(),
        };
        ClustersClient::new(service).approve_machine(request).await
    };
    let response = send_order(context, &args.reason, give).await?;
    format_response(context, &args.name, &response)
}
