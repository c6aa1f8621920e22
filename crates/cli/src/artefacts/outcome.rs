//! Outcome of an order for an artefact, as text or JSON.

use serde_json::json;

use crate::context::CommandContext;
use crate::error::CliError;
use crate::output::Format;
use bmdb::fleet::artefact::order_target;
use bmdb::orders::order::OrderOutcome;

pub(super) fn format_outcome(
    context: &CommandContext,
    name: &str,
    sha256: &str,
    done: &OrderOutcome,
) -> Result<String, CliError> {
    let outcome = context.format_outcome(
        json!({ "artefact": name, "sha256": sha256, "changed": done.changed, "message": done.message }),
        &format!("{} {}", order_target(name), done.message),
    )?;
    if context.format == Format::Json || sha256.is_empty() {
        return Ok(outcome);
    }
    Ok(format!("{outcome}{sha256}\n"))
}
