//! Error statuses of the API with google.rpc details.
//!
//! The message is a sentence for people; code and details are for programs.

use std::collections::HashMap;
use std::error::Error as _;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use bmdb::connection::error::BmdbError;

/// The domain of [`reason`](tonic_types::ErrorInfo) names.
pub const ERROR_DOMAIN: &str = "shepherd";
/// The reason of the error for an order that may have been carried out.
pub const OUTCOME_UNKNOWN: &str = "OUTCOME_UNKNOWN";

/// A field of the request is invalid.
#[must_use]
pub fn invalid_argument(field: &str, text: impl Into<String>) -> Status {
    let text = text.into();
    let mut details = ErrorDetails::with_bad_request_violation(field, text.clone());
    details.set_error_info("INVALID_FIELD", ERROR_DOMAIN, HashMap::new());
    Status::with_error_details(Code::InvalidArgument, text, details)
}

/// The named object does not exist.
#[must_use]
pub fn not_found(kind: &str, name: &str, text: impl Into<String>) -> Status {
    let text = text.into();
    let mut details = ErrorDetails::with_resource_info(kind, name, "", text.clone());
    details.set_error_info("NO_SUCH_RESOURCE", ERROR_DOMAIN, HashMap::new());
    Status::with_error_details(Code::NotFound, text, details)
}

/// An error with a reason that programs can distinguish.
#[must_use]
pub fn error_status(code: Code, reason: &str, text: impl Into<String>) -> Status {
    Status::with_error_details(
        code,
        text,
        ErrorDetails::with_error_info(reason, ERROR_DOMAIN, HashMap::new()),
    )
}

/// The caller exceeds its rate; retry `after` this time.
#[must_use]
pub fn rate_limited(after: Duration) -> Status {
    let mut details = ErrorDetails::with_retry_info(Some(after));
    details.set_error_info("RATE_LIMITED", ERROR_DOMAIN, HashMap::new());
    let text = format!("this caller makes too many calls; call again in {after:?}, and less often");
    Status::with_error_details(Code::ResourceExhausted, text, details)
}

/// Converts an error of the BMDB into a status. Internal details go to the log and not to the caller; the error itself
/// is the source of the status, which is not sent.
#[must_use]
pub fn bmdb_status(error: BmdbError) -> Status {
    let mut status = public_status(&error);
    status.set_source(Arc::new(error));
    status
}

/// The status that a caller gets for an error of the BMDB, without its internal details.
#[must_use]
pub fn public_status(error: &BmdbError) -> Status {
    match error {
        BmdbError::NoSuchMachine(name) => not_found("machine", name, error.to_string()),
        BmdbError::NoSuchCredential(name) => not_found("credential", name, error.to_string()),
        BmdbError::VersionMismatch { .. } => {
            error_status(Code::Aborted, "VERSION_MISMATCH", error.to_string())
        }
        BmdbError::IdempotencyKeyReused { .. } => {
            error_status(Code::AlreadyExists, "IDEMPOTENCY_KEY_REUSED", error.to_string())
        }
        BmdbError::OrderRejected { reason, .. } => {
            error_status(Code::FailedPrecondition, reason, error.to_string())
        }
        BmdbError::ApprovalRequired(wanted) => {
            let names = [
                ("approval", wanted.approval_id.to_string()),
                ("idempotency_key", wanted.idempotency_key.clone()),
            ];
            let names = names.map(|(name, value)| (name.to_owned(), value));
            let details =
                ErrorDetails::with_error_info("APPROVAL_REQUIRED", ERROR_DOMAIN, HashMap::from(names));
            Status::with_error_details(Code::FailedPrecondition, error.to_string(), details)
        }
        BmdbError::NewerRules { .. } => {
            error_status(Code::FailedPrecondition, "NEWER_RULES", error.to_string())
        }
        BmdbError::UnknownOutcome(_) => {
            tracing::warn!(%error, "an order's outcome is unknown");
            error_status(
                Code::Unavailable,
                OUTCOME_UNKNOWN,
                "the outcome is unknown; give the same order again with the same idempotency key to get it",
            )
        }
        _ if error.is_transient() => {
            tracing::debug!(%error, "the API could not ask the BMDB");
            database_unavailable()
        }
        _ => {
            tracing::error!(%error, "the API failed");
            internal_error()
        }
    }
}

/// A failure of this program itself: what it could not do, and why.
#[derive(Debug, thiserror::Error)]
#[error("{action}: {cause}")]
struct InternalFailure {
    action: &'static str,
    cause: String,
}

/// Converts a failure of this program itself into a status. As with [`bmdb_status`], the cause goes to the log and not
/// to the caller; it is the source of the status, which is not sent. `action` is a sentence, for example "the policy is
/// no JSON".
#[must_use]
pub fn internal_status(action: &'static str, cause: &dyn fmt::Display) -> Status {
    let cause = cause.to_string();
    tracing::error!(error = cause, "{action}");
    let mut status = internal_error();
    status.set_source(Arc::new(InternalFailure { action, cause }));
    status
}

/// The error behind a status, which is not sent; `None` if the status itself describes the error.
#[must_use]
pub fn cause_of(status: &Status) -> Option<String> {
    let source = status.source()?;
    let failure = source.downcast_ref::<InternalFailure>().map(ToString::to_string);
    failure.or_else(|| source.downcast_ref::<BmdbError>().map(ToString::to_string))
}

fn internal_error() -> Status {
    error_status(Code::Internal, "INTERNAL", "this shepherd failed to answer; its log says why")
}

/// The status for a query that the BMDB did not answer, and that changed nothing.
#[must_use]
pub fn database_unavailable() -> Status {
    retry_later("the BMDB does not answer, or is too busy; try again in a moment")
}

fn retry_later(text: &str) -> Status {
    let mut details = ErrorDetails::with_retry_info(Some(Duration::from_secs(1)));
    details.set_error_info("UNAVAILABLE", ERROR_DOMAIN, HashMap::new());
    Status::with_error_details(Code::Unavailable, text, details)
}

/// The name of a code, as in googleapis' google/rpc/code.proto.
#[must_use]
pub const fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn database_errors_are_not_exposed() {
        let of_the_database = bmdb_status(BmdbError::Corrupt("column secret of kim".to_owned()));
        let our_own = internal_status("the policy is no JSON", &"column secret of kim");
        for status in [of_the_database, our_own] {
            assert_eq!(status.code(), Code::Internal);
            // This is all that is sent.
            let (message, details) = (status.message(), String::from_utf8_lossy(status.details()));
            assert!(!message.contains("kim") && !details.contains("kim"), "{message} {details}");
            assert!(cause_of(&status).is_some_and(|cause| cause.contains("kim")), "the log has it");
        }
        let details = bmdb_status(BmdbError::DuplicateOrderInProgress).get_error_details();
        assert!(details.retry_info().is_some());
    }
}
