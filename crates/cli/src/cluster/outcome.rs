//! Outcome of an order for a cluster, as text or JSON, and the order that needs nothing but its name.

use serde_json::json;
use tonic::{Response, Status};

use crate::client::fleet_client::ApiChannel;
use crate::cluster::ClusterOrderArgs;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::outcome::decode_outcome;
use crate::order::reason::require_audit_reason;
use crate::order::retry::send_order;
use bmdb::cluster::lock::order_target;
use bmdb::orders::order::OrderOutcome;
use proto::fleet::v1;

/// Sends an order that needs nothing but the cluster and a reason, and formats the response.
pub(super) async fn send_cluster_order(
    context: &CommandContext,
    args: &ClusterOrderArgs,
    give: impl AsyncFn(ApiChannel, v1::Order) -> Result<Response<v1::OrderResponse>, Status>,
) -> Result<String, CliError> {
    require_audit_reason(&args.reason)?;
    let response = send_order(context, &args.reason, give).await?;
    format_response(context, &args.name, response)
}

/// Formats the response to an order about a cluster.
pub(super) fn format_response(
    context: &CommandContext,
    name: &str,
    response: v1::OrderResponse,
) -> Result<String, CliError> {
    format_outcome(context, name, &decode_outcome(response))
}

pub(super) fn format_outcome(
    context: &CommandContext,
    name: &str,
    done: &OrderOutcome,
) -> Result<String, CliError> {
    context.format_outcome(
        json!({
            "cluster": name, "changed": done.is_changed(), "outcome": done.kind.as_str(), "message": done.message,
        }),
        &format!("{} {}", order_target(name), done.message),
    )
}
