//! Outcome of an order for a cluster, as text or JSON, the order that needs nothing but its name, and the order that
//! nothing undoes.

use tonic::{Response, Status};

use crate::client::fleet_client::ApiChannel;
use crate::cluster::ClusterOrderArgs;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::confirmation::{format_confirmed_outcome, send_confirmed_order};
use crate::order::reason::require_audit_reason;
use crate::order::retry::send_order;
use bmdb::cluster::lock::order_target;
use model::shell_words::quote_if_needed;
use proto::fleet::v1;

/// Sends an order that needs nothing but the cluster and a reason, and formats the response.
pub(super) async fn send_cluster_order(
    context: &CommandContext,
    args: &ClusterOrderArgs,
    give: impl AsyncFn(ApiChannel, v1::Order) -> Result<Response<v1::OrderResponse>, Status>,
) -> Result<String, CliError> {
    require_audit_reason(&args.reason)?;
    let response = send_order(context, &args.reason, give).await?;
    format_response(context, &args.name, &response)
}

/// Sends an order that nothing undoes, after it was confirmed, and formats the response. `is_confirmed` is whether a
/// flag confirms it.
pub(super) async fn send_final_order(
    context: &CommandContext,
    name: &str,
    reason: &str,
    is_confirmed: bool,
    give: impl AsyncFn(ApiChannel, v1::Order) -> Result<Response<v1::OrderResponse>, Status>,
) -> Result<String, CliError> {
    let reason = require_audit_reason(reason)?;
    let describe = |dry_run: &v1::OrderResponse| format!("{} {}", order_target(name), dry_run.message);
    let response = send_confirmed_order(context, reason, is_confirmed, describe, give).await?;
    format_response(context, name, &response)
}

/// Formats the response to an order about a cluster.
pub(super) fn format_response(
    context: &CommandContext,
    name: &str,
    response: &v1::OrderResponse,
) -> Result<String, CliError> {
    let text = format!("{} {}", order_target(name), response.message);
    format_confirmed_outcome(context, response, &text, response.confirmation.as_ref())
}

/// The command that shows what a cluster is doing, for messages. The name is quoted for a shell.
pub(super) fn describe_command(name: &str) -> String {
    format!("shepherdctl cluster describe {}", quote_if_needed(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_name_of_a_cluster_is_one_word_of_a_shell() {
        for (name, expected) in [("ams", "ams"), ("a b", "'a b'"), ("$(reboot)", "'$(reboot)'"), ("", "''")] {
            assert_eq!(describe_command(name), format!("shepherdctl cluster describe {expected}"));
        }
    }
}
