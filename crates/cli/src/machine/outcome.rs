//! Outcome of an order for one machine, as text or JSON.

use crate::client::decode::decode_machine_name;
use crate::context::CommandContext;
use crate::error::CliError;
use crate::order::confirmation::format_confirmed_outcome;
use proto::fleet::v1;

/// Formats the response of the API to an order.
pub(crate) fn format_response(
    context: &CommandContext,
    response: &v1::OrderResponse,
) -> Result<String, CliError> {
    let name = decode_machine_name(response.name.clone())?;
    let text = format!("{} {}", name.short_name(), response.message);
    format_confirmed_outcome(context, response, &text, response.confirmation.as_ref())
}

/// What an order about one machine does, as a sentence.
pub(crate) fn describe_effect(response: &v1::OrderResponse) -> String {
    let name = decode_machine_name(response.name.clone());
    let name = name.map_or_else(|_| "the machine".to_owned(), |name| name.short_name());
    format!("{name} {}", response.message)
}
