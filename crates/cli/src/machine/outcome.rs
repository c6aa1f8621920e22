//! Outcome of an order for one machine, as text or JSON.

use serde::Serialize;

use crate::client::decode::decode_machine_name;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::confirmation::format_confirmed_outcome;
use crate::order::outcome::{OutcomeFields, decode_outcome};
use bmdb::orders::order::OrderOutcome;
use model::machine_view::MachineName;
use proto::fleet::v1;

#[derive(Serialize)]
struct OrderOutput {
    #[serde(flatten)]
    name: MachineName,
    #[serde(flatten)]
    outcome: OutcomeFields,
}

/// Formats the response of the API to an order.
pub(crate) fn format_response(
    context: &CommandContext,
    response: v1::OrderResponse,
) -> Result<String, CliError> {
    let name = decode_machine_name(response.name.clone())?;
    let confirmation = response.confirmation.clone();
    let done = decode_outcome(response);
    let text = format!("{} {}", name.short_name(), done.message);
    let output = serde_json::to_value(OrderOutput { name, outcome: done.into() })?;
    format_confirmed_outcome(context, output, &text, confirmation.as_ref())
}

/// What an order about one machine does, as a sentence.
pub(crate) fn describe_effect(response: &v1::OrderResponse) -> String {
    let name = decode_machine_name(response.name.clone());
    let name = name.map_or_else(|_| "the machine".to_owned(), |name| name.short_name());
    format!("{name} {}", response.message)
}

pub(crate) fn format_outcome(
    context: &CommandContext,
    name: MachineName,
    done: OrderOutcome,
) -> Result<String, CliError> {
    let text = format!("{} {}", name.short_name(), done.message);
    context.format_outcome(serde_json::to_value(OrderOutput { name, outcome: done.into() })?, &text)
}
