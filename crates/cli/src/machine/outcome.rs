//! Outcome of an order for one machine, as text or JSON.

use serde::Serialize;

use crate::client::decode::decode_machine_name;
use crate::error::CliError;
use crate::order::dry_run;
use crate::output::{Format, format_json};
use bmdb::orders::order::OrderOutcome;
use model::machine_view::MachineName;
use proto::fleet::v1;

#[derive(Serialize)]
struct OrderOutput {
    #[serde(flatten)]
    name: MachineName,
    #[serde(flatten)]
    outcome: OrderOutcome,
}

/// Formats the response of the API to an order.
pub(crate) fn format_response(response: v1::OrderResponse, format: Format) -> Result<String, CliError> {
    let done = OrderOutcome { changed: response.changed, message: response.message };
    format_outcome(decode_machine_name(response.name)?, done, format)
}

pub(crate) fn format_outcome(
    name: MachineName,
    done: OrderOutcome,
    format: Format,
) -> Result<String, CliError> {
    match format {
        Format::Json => {
            let mut answer = serde_json::to_value(OrderOutput { name, outcome: done })?;
            dry_run::annotate_json(&mut answer);
            format_json(&answer)
        }
        Format::Table => {
            Ok(format!("{}\n", dry_run::annotate_text(&format!("{} {}", name.short_name(), done.message))))
        }
    }
}
