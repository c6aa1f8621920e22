//! Outcome of an order for a cluster, as text or JSON.

use serde_json::json;

use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::outcome::decode_outcome;
use bmdb::cluster::lock::order_target;
use bmdb::orders::order::OrderOutcome;
use proto::fleet::v1;

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
