//! An error of the API as JSON, for its listener and for `shepherdctl -o json`.

use serde_json::{Value, json};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::api::api_error::code_name;

/// An error as JSON, in the form of Google's APIs.
#[must_use]
pub fn error_json(status: &Status) -> Value {
    let found = status.get_error_details();
    let mut details = Vec::new();
    if let Some(info) = found.error_info() {
        details.push(json!({
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": info.reason, "domain": info.domain, "metadata": info.metadata,
        }));
    }
    if let Some(wrong) = found.bad_request() {
        let fields: Vec<Value> = wrong
            .field_violations
            .iter()
            .map(|one| json!({ "field": one.field, "description": one.description }))
            .collect();
        details
            .push(json!({ "@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": fields }));
    }
    if let Some(retry) = found.retry_info() {
        let delay = retry.retry_delay.unwrap_or_default().as_secs_f64();
        details.push(
            json!({ "@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": format!("{delay}s") }),
        );
    }
    if let Some(resource) = found.resource_info() {
        details.push(json!({
            "@type": "type.googleapis.com/google.rpc.ResourceInfo",
            "resourceType": resource.resource_type, "resourceName": resource.resource_name,
            "description": resource.description,
        }));
    }
    json!({ "error": {
        "code": http_code(status.code()),
        "status": code_name(status.code()),
        "message": status.message(),
        "details": details,
    }})
}

/// The status of HTTP for a gRPC code, as in googleapis' google/rpc/code.proto.
#[must_use]
pub const fn http_code(code: Code) -> u16 {
    match code {
        Code::Ok => 200,
        Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => 400,
        Code::Unauthenticated => 401,
        Code::PermissionDenied => 403,
        Code::NotFound => 404,
        Code::Aborted | Code::AlreadyExists => 409,
        Code::ResourceExhausted => 429,
        Code::Cancelled => 499,
        Code::Unimplemented => 501,
        Code::Unavailable => 503,
        Code::DeadlineExceeded => 504,
        Code::Unknown | Code::Internal | Code::DataLoss => 500,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::api_error::not_found;

    #[test]
    fn error_has_its_code_its_status_and_its_details() {
        let error = &error_json(&not_found("machine", "m", "no m"))["error"];
        assert_eq!((&error["code"], &error["status"]), (&json!(404), &json!("NOT_FOUND")));
        assert_eq!(error["message"], "no m");
        assert_eq!(error["details"][0]["reason"], "NO_SUCH_RESOURCE");
        assert_eq!(error["details"][1]["resourceName"], "m");
        let bare = error_json(&Status::new(Code::Aborted, "later"));
        assert_eq!((&bare["error"]["code"], &bare["error"]["details"]), (&json!(409), &json!([])));
    }
}
