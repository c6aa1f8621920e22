//! Reason of an order (`--reason`), for history and audit.

use crate::error::CliError;

/// The reason, or a placeholder for the audit: the API requires a reason.
pub(crate) fn reason_or_placeholder(reason: Option<&str>) -> &str {
    reason.filter(|reason| !reason.trim().is_empty()).unwrap_or("(no reason was given)")
}

/// Checks that an order has a reason for operators who read the audit.
pub(crate) fn require_audit_reason(reason: &str) -> Result<&str, CliError> {
    if reason.trim().is_empty() {
        return Err(CliError::Invalid("--reason is empty; give one for operators who read the audit".into()));
    }
    Ok(reason)
}

/// Checks that an order has a reason for operators who run `why`.
pub(crate) fn require_why_reason(reason: &str) -> Result<&str, CliError> {
    if reason.trim().is_empty() {
        return Err(CliError::Invalid(
            "--reason is empty; give one for operators who run `why` later".into(),
        ));
    }
    Ok(reason)
}
