//! One call of the provider API: journalled, subject to the faults of the API, and durable before it is answered.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::faults::ApiFault;
use crate::fleet::SimulatedFleet;
use crate::journal::{JournalCall, JournalOutcome};
use crate::machine::StepRejected;

/// The header with the name of the caller.
const CALLER_HEADER: &str = "shepherd-caller";
/// The delay of a slow API.
const SLOW_DELAY: Duration = Duration::from_secs(5);

/// A response that is not 200.
#[derive(Debug)]
pub(super) struct ApiError(pub(super) StatusCode, pub(super) String);

impl From<StepRejected> for ApiError {
    fn from(refusal: StepRejected) -> Self {
        Self(StatusCode::CONFLICT, refusal.to_string())
    }
}

impl ApiError {
    pub(super) fn unknown_machine(id: &str) -> Self {
        Self(StatusCode::NOT_FOUND, format!("there is no machine {id}"))
    }
}

/// Whether the faults of the API apply to a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Exposure {
    /// A request of a shepherd: the faults of the profile apply.
    Provider,
    /// A request of a person or a test: no faults apply.
    Operator,
}

/// Journals a request, applies the faults of the API, carries it out, and answers when its effect is on disk.
pub(super) async fn handle_call(
    fleet: &Arc<SimulatedFleet>,
    headers: &HeaderMap,
    exposure: Exposure,
    call: JournalCall<'_>,
    operation: impl FnOnce() -> Result<Value, ApiError>,
) -> Response {
    let caller = caller_of(headers);
    let mut call = fleet.journal.begin(JournalCall { caller, ..call });
    let fault = match exposure {
        Exposure::Provider => {
            fleet.profile.fault_profile.draw_api_fault(fleet.profile.seed, fleet.count_api_call())
        }
        Exposure::Operator => None,
    };
    let condition = fleet.api_condition();
    if exposure == Exposure::Provider && condition.slow {
        tokio::time::sleep(SLOW_DELAY).await;
    }
    if exposure == Exposure::Provider && condition.fails {
        call.end(JournalOutcome::Failed, &json!({ "status": 503, "done": false }));
        return error_response(StatusCode::SERVICE_UNAVAILABLE, "the provider is gone");
    }
    if fault == Some(ApiFault::Before) {
        call.end(JournalOutcome::Failed, &json!({ "status": 503, "done": false }));
        return error_response(StatusCode::SERVICE_UNAVAILABLE, "the provider is busy; try again");
    }
    let done = operation();
    if let Ok(answer) = &done
        && answer.get("machines").is_none()
    {
        call.note_result(answer);
    }
    if let Err(error) = fleet.wait_durable().await {
        call.end(JournalOutcome::Failed, &json!({ "status": 500, "error": error.to_string() }));
        return error_response(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string());
    }
    match done {
        Ok(answer) if fault == Some(ApiFault::After) => {
            call.end(JournalOutcome::Failed, &json!({ "status": 503, "done": true, "answer": answer }));
            error_response(StatusCode::SERVICE_UNAVAILABLE, "the provider lost the answer; try again")
        }
        Ok(answer) => {
            let result = match answer.get("machines").and_then(Value::as_array) {
                // A list of thousands of machines would flood the journal.
                Some(machines) => json!({ "status": 200, "machines": machines.len() }),
                None => json!({ "status": 200, "answer": answer }),
            };
            call.end(JournalOutcome::Ok, &result);
            Json(answer).into_response()
        }
        Err(ApiError(status, text)) => {
            call.end(JournalOutcome::Refused, &json!({ "status": status.as_u16(), "error": text }));
            error_response(status, &text)
        }
    }
}

/// Journals a malformed request and answers it.
pub(super) fn reject_malformed(
    fleet: &SimulatedFleet,
    headers: &HeaderMap,
    call: JournalCall<'_>,
    given: &[u8],
    error: ApiError,
) -> Response {
    /// More than any well-formed request has, in bytes.
    const MAX_SHOWN_BYTES: usize = 1000;
    let ApiError(status, text) = error;
    let given = String::from_utf8_lossy(&given[..given.len().min(MAX_SHOWN_BYTES)]);
    let arguments = json!({ "unreadable": given });
    let call = fleet.journal.begin(JournalCall { caller: caller_of(headers), arguments, ..call });
    call.end(JournalOutcome::Refused, &json!({ "status": status.as_u16(), "error": text }));
    error_response(status, &text)
}

fn caller_of(headers: &HeaderMap) -> Option<&str> {
    headers.get(CALLER_HEADER).and_then(|value| value.to_str().ok())
}

pub(super) fn error_response(status: StatusCode, text: &str) -> Response {
    (status, Json(json!({ "error": text }))).into_response()
}

pub(super) fn parse_body<T: for<'de> Deserialize<'de>>(body: &Bytes) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| {
        ApiError(StatusCode::BAD_REQUEST, format!("the request's body cannot be read: {error}"))
    })
}
