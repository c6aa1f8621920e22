//! Outcome of an order for a cluster, as text or JSON.

use serde_json::json;

use crate::error::CliError;
use crate::order::dry_run;
use crate::output::{Format, format_json};
use bmdb::cluster::lock::order_target;
use bmdb::orders::order::OrderOutcome;
use proto::fleet::v1;

/// Formats the response to an order about a cluster.
pub(super) fn format_response(
    name: &str,
    response: v1::OrderResponse,
    format: Format,
) -> Result<String, CliError> {
    format_outcome(name, &OrderOutcome { changed: response.changed, message: response.message }, format)
}

pub(super) fn format_outcome(name: &str, done: &OrderOutcome, format: Format) -> Result<String, CliError> {
    match format {
        Format::Json => {
            let mut answer = json!({ "cluster": name, "changed": done.changed, "message": done.message });
            dry_run::annotate_json(&mut answer);
            format_json(&answer)
        }
        Format::Table => {
            Ok(format!("{}\n", dry_run::annotate_text(&format!("{} {}", order_target(name), done.message))))
        }
    }
}
