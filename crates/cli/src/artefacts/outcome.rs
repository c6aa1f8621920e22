//! Outcome of an order for an artefact, as text or JSON.

use serde_json::json;

use crate::error::CliError;
use crate::order::dry_run;
use crate::output::{Format, format_json};
use bmdb::fleet::artefact::order_target;
use bmdb::orders::order::OrderOutcome;

pub(super) fn format_outcome(
    name: &str,
    sha256: &str,
    done: &OrderOutcome,
    format: Format,
) -> Result<String, CliError> {
    match format {
        Format::Json => {
            let mut answer = json!({ "artefact": name, "sha256": sha256, "changed": done.changed, "message": done.message });
            dry_run::annotate_json(&mut answer);
            format_json(&answer)
        }
        Format::Table => {
            let line = dry_run::annotate_text(&format!("{} {}", order_target(name), done.message));
            Ok(if sha256.is_empty() { format!("{line}\n") } else { format!("{line}\n{sha256}\n") })
        }
    }
}
