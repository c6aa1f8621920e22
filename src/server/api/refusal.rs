//! Errors of the API: sentences, with a code and the standard details of gRPC for programs.

use std::collections::HashMap;
use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::bmdb::error::BmdbError;

/// The domain of [`reason`](tonic_types::ErrorInfo) names.
pub const DOMAIN: &str = "shepherd";

/// Something in the request cannot be.
#[must_use]
pub fn wrong(field: &str, said: impl Into<String>) -> Status {
    let said = said.into();
    let mut details = ErrorDetails::with_bad_request_violation(field, said.clone());
    details.set_error_info("INVALID_FIELD", DOMAIN, HashMap::new());
    Status::with_error_details(Code::InvalidArgument, said, details)
}

/// What was named is not there.
#[must_use]
pub fn unknown(kind: &str, name: &str, said: impl Into<String>) -> Status {
    let said = said.into();
    let mut details = ErrorDetails::with_resource_info(kind, name, "", said.clone());
    details.set_error_info("NO_SUCH_RESOURCE", DOMAIN, HashMap::new());
    Status::with_error_details(Code::NotFound, said, details)
}

/// A refusal with a reason that programs can tell from others.
#[must_use]
pub fn refused(code: Code, reason: &str, said: impl Into<String>) -> Status {
    Status::with_error_details(code, said, ErrorDetails::with_error_info(reason, DOMAIN, HashMap::new()))
}

/// Too much at once.
#[must_use]
pub fn too_often(after: Duration) -> Status {
    let mut details = ErrorDetails::with_retry_info(Some(after));
    details.set_error_info("RATE_LIMITED", DOMAIN, HashMap::new());
    let said = format!("there are too many calls of yours; call again in {after:?}, and less often");
    Status::with_error_details(Code::ResourceExhausted, said, details)
}

/// What the database said, as an answer. What it said of itself goes to the log and not to the caller.
#[must_use]
#[expect(clippy::needless_pass_by_value, reason = "stands where `map_err` hands the error over")]
pub fn of_bmdb(error: BmdbError) -> Status {
    match &error {
        BmdbError::NoSuchMachine(name) => unknown("machine", name, error.to_string()),
        BmdbError::NoSuchCredential(name) => unknown("credential", name, error.to_string()),
        BmdbError::OtherVersion { .. } => refused(Code::Aborted, "VERSION_MISMATCH", error.to_string()),
        BmdbError::KeyOfAnotherOrder { .. } => {
            refused(Code::AlreadyExists, "IDEMPOTENCY_KEY_REUSED", error.to_string())
        }
        BmdbError::OrderRefused { reason, .. } => {
            refused(Code::FailedPrecondition, reason, error.to_string())
        }
        BmdbError::SecondPerson(wanted) => {
            let names = [("approval", wanted.approval.to_string()), ("idempotency_key", wanted.key.clone())];
            let names = names.map(|(name, value)| (name.to_owned(), value));
            let details = ErrorDetails::with_error_info("APPROVAL_REQUIRED", DOMAIN, HashMap::from(names));
            Status::with_error_details(Code::FailedPrecondition, error.to_string(), details)
        }
        BmdbError::NewerRules { .. } => refused(Code::FailedPrecondition, "NEWER_RULES", error.to_string()),
        BmdbError::UnknownOutcome(_) => {
            tracing::warn!(%error, "an order's outcome is unknown");
            again(
                "the outcome is unknown; give the same order again with the same idempotency key to hear it",
            )
        }
        _ if error.is_transient() => {
            tracing::debug!(%error, "the API could not ask the BMDB");
            away()
        }
        _ => {
            tracing::error!(%error, "the API failed");
            refused(Code::Internal, "INTERNAL", "this shepherd failed to answer; its log says why")
        }
    }
}

/// What the database could not be asked, where nothing was ordered.
#[must_use]
pub fn away() -> Status {
    again("the BMDB does not answer, or is too busy; try again in a moment")
}

fn again(said: &str) -> Status {
    let mut details = ErrorDetails::with_retry_info(Some(Duration::from_secs(1)));
    details.set_error_info("UNAVAILABLE", DOMAIN, HashMap::new());
    Status::with_error_details(Code::Unavailable, said, details)
}

/// The name of a code, as googleapis' google/rpc/code.proto has it.
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
    fn what_the_database_said_of_itself_is_kept_back() {
        let leak = BmdbError::Corrupt("column secret of kim".to_owned());
        let status = of_bmdb(leak);
        assert_eq!(status.code(), Code::Internal);
        assert!(!status.message().contains("kim"));
        let details = of_bmdb(BmdbError::OrderedAtOnce).get_error_details();
        assert!(details.retry_info().is_some());
    }
}
