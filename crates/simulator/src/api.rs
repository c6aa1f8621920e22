//! Provider API of the simulator (HTTP and JSON): list, create, power, reboot and release machines, inject faults.
//!
//! HTTP/1.1 with JSON, on a loopback address, without authentication.
//!
//! | request | answer |
//! | --- | --- |
//! | `GET /v1/machines` | `{"machines": […]}`: every machine in use, and a piece of capacity for each that is not |
//! | `GET /v1/machines?intent=UUID` | `{"machines": […]}`: the one made under that intent, or none |
//! | `POST /v1/machines` `{"intent", "reservation"?}` | the machine; the same one whenever the intent is the same |
//! | `GET /v1/machines/{id}` | the machine |
//! | `GET /v1/machines/{id}/power` | `{"power": "on"}` or `"off"` |
//! | `POST /v1/machines/{id}/power` `{"action": "on"\|"off"\|"cycle", "intent"}` | `{}` |
//! | `POST /v1/machines/{id}/reboot` `{"intent"}` | `{}` |
//! | `POST /v1/machines/{id}/release` `{"intent"}` | `{}`; the machine is capacity again, its id is never used again |
//! | `POST /v1/machines/{id}/faults` `{"fault"}` | `{}`; `id` is a machine's id, in use or not |
//! | `POST /v1/faults` `{"fault"}` | `{}`; the fault applies to the provider itself |
//! | `GET /v1/fleet` | the true state of every machine: for people and tests, not for a shepherd |
//!
//! A repeated intent has no effect on power, reboot and release.
//!
//! A machine is `{"id", "usage": "unused"|"used", "reservation", "address", "port", "user", "location", "status",
//! "host_keys": [{"algorithm", "blob"}], "intent"}`, blobs in base64. The id of unused capacity is the name of its
//! reservation.
//!
//! Errors are `{"error": "<sentence>"}` with 400 (malformed), 404 (no such machine or reservation), 409 (the machine
//! cannot do that now, or all capacity is taken) or 503 (a fault; a retry may help). A 503 may come *after* the request
//! was carried out: that is what intents are for. The header `shepherd-caller` of a request is written into the
//! journal. All requests of this table are journalled, except the last one.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, Query, State as Shared};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use model::ids::IntentId;
use roleserver::enrolment::Enrolment;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::faults::{ApiFault, Fault, ProviderFault};
use crate::fleet::SimulatedFleet;
use crate::host_key;
use crate::journal::{JournalCall, JournalOutcome};
use crate::machine::{MachineEvent, SimulatedState, StepRejected};
use crate::state::{FleetState, MachineRecord};

/// The header with the name of the caller.
pub const CALLER_HEADER: &str = "shepherd-caller";
/// The delay of a slow API.
const SLOW_DELAY: Duration = Duration::from_secs(5);

/// The routes of the API.
pub fn routes(fleet: Arc<SimulatedFleet>) -> Router {
    Router::new()
        .route("/v1/machines", get(list_machines).post(create_machine))
        .route("/v1/machines/{id}", get(get_machine))
        .route("/v1/machines/{id}/power", get(get_power).post(set_power))
        .route("/v1/machines/{id}/reboot", post(reboot_machine))
        .route("/v1/machines/{id}/release", post(release_machine))
        .route("/v1/machines/{id}/faults", post(strike_machine))
        .route("/v1/faults", post(strike_provider))
        .route("/v1/fleet", get(get_fleet))
        .with_state(fleet)
}

/// A response that is not 200.
#[derive(Debug)]
struct ApiError(StatusCode, String);

impl From<StepRejected> for ApiError {
    fn from(refusal: StepRejected) -> Self {
        Self(StatusCode::CONFLICT, refusal.to_string())
    }
}

impl ApiError {
    fn unknown_machine(id: &str) -> Self {
        Self(StatusCode::NOT_FOUND, format!("there is no machine {id}"))
    }
}

/// Whether the faults of the API apply to a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Exposure {
    /// A request of a shepherd: the faults of the profile apply.
    Provider,
    /// A request of a person or a test: no faults apply.
    Operator,
}

#[derive(Deserialize)]
struct ListQuery {
    intent: Option<IntentId>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct CreateBody {
    intent: IntentId,
    reservation: Option<String>,
}

#[derive(Clone, Copy, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum PowerActionBody {
    On,
    Off,
    Cycle,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct PowerBody {
    action: PowerActionBody,
    intent: IntentId,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RebootBody {
    intent: IntentId,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct FaultBody<F> {
    fault: F,
}

/// Journals a request, applies the faults of the API, carries it out, and answers when its effect is on disk.
async fn handle_call(
    fleet: &Arc<SimulatedFleet>,
    headers: &HeaderMap,
    exposure: Exposure,
    call: JournalCall<'_>,
    deed: impl FnOnce() -> Result<Value, ApiError>,
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
    let done = deed();
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
fn reject_malformed(
    fleet: &SimulatedFleet,
    headers: &HeaderMap,
    call: JournalCall<'_>,
    given: &[u8],
    error: ApiError,
) -> Response {
    /// More than any well-formed request has, in bytes.
    const SHOWN: usize = 1000;
    let ApiError(status, text) = error;
    let given = String::from_utf8_lossy(&given[..given.len().min(SHOWN)]);
    let arguments = json!({ "unreadable": given });
    let call = fleet.journal.begin(JournalCall { caller: caller_of(headers), arguments, ..call });
    call.end(JournalOutcome::Refused, &json!({ "status": status.as_u16(), "error": text }));
    error_response(status, &text)
}

fn caller_of(headers: &HeaderMap) -> Option<&str> {
    headers.get(CALLER_HEADER).and_then(|value| value.to_str().ok())
}

fn error_response(status: StatusCode, text: &str) -> Response {
    (status, Json(json!({ "error": text }))).into_response()
}

fn parse_body<T: for<'de> Deserialize<'de>>(body: &Bytes) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| {
        ApiError(StatusCode::BAD_REQUEST, format!("the request's body cannot be read: {error}"))
    })
}

async fn list_machines(
    Shared(fleet): Shared<Arc<SimulatedFleet>>,
    query: Result<Query<ListQuery>, axum::extract::rejection::QueryRejection>,
    headers: HeaderMap,
) -> Response {
    let Query(query) = match query {
        Ok(query) => query,
        Err(error) => {
            let error = ApiError(StatusCode::BAD_REQUEST, error.body_text());
            return reject_malformed(&fleet, &headers, api_call("find", None, json!({})), b"", error);
        }
    };
    if let Some(intent) = query.intent {
        let call = JournalCall { intent: Some(intent.to_string()), ..api_call("find", None, json!({})) };
        return handle_call(&fleet, &headers, Exposure::Provider, call, || {
            let found = fleet.read(|state| {
                let held = state.machines.iter().find(|record| record.intent == Some(intent));
                held.map(|record| machine_json(state, record))
            });
            Ok(json!({ "machines": Vec::from_iter(found) }))
        })
        .await;
    }
    let condition = fleet.api_condition();
    let response =
        handle_call(&fleet, &headers, Exposure::Provider, api_call("list", None, json!({})), || {
            match condition.list {
                Some(ProviderFault::ListError) => {
                    Err(ApiError(StatusCode::SERVICE_UNAVAILABLE, "the list cannot be made".to_owned()))
                }
                Some(ProviderFault::ListEmpty) => Ok(json!({ "machines": [] })),
                short => Ok(fleet.read(|state| {
                    let listed = state.machines.iter().enumerate();
                    let listed = listed
                        .filter(|(index, _)| short != Some(ProviderFault::ListShort) || index % 3 != 0)
                        .map(|(_, record)| machine_json(state, record));
                    json!({ "machines": listed.collect::<Vec<_>>() })
                })),
            }
        })
        .await;
    if condition.list == Some(ProviderFault::ListTorn) { truncate_body(response).await } else { response }
}

/// Cuts the body of a response in half, with a matching length: valid HTTP, but invalid JSON.
async fn truncate_body(response: Response) -> Response {
    let Ok(body) = axum::body::to_bytes(response.into_body(), usize::MAX).await else {
        return error_response(StatusCode::SERVICE_UNAVAILABLE, "the list cannot be made");
    };
    let half = body.slice(..body.len() / 2);
    ([(header::CONTENT_TYPE, "application/json")], half).into_response()
}

async fn create_machine(
    Shared(fleet): Shared<Arc<SimulatedFleet>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let body: CreateBody = match parse_body(&body) {
        Ok(read) => read,
        Err(error) => {
            return reject_malformed(&fleet, &headers, api_call("create", None, json!({})), &body, error);
        }
    };
    let arguments = json!({ "reservation": body.reservation });
    let call = JournalCall { intent: Some(body.intent.to_string()), ..api_call("create", None, arguments) };
    handle_call(&fleet, &headers, Exposure::Provider, call, || {
        let change = |record: &mut MachineRecord| match record.intent {
            Some(intent) if intent == body.intent => Ok((record.machine.index, None)),
            Some(_) => Err(ApiError(StatusCode::CONFLICT, format!("{} is taken", record.reservation))),
            None => {
                record.intent = Some(body.intent);
                Ok((record.machine.index, Some(MachineEvent::PowerOn)))
            }
        };
        let place = fleet.change_chosen(|state| choose_capacity(state, &body), change)? as usize;
        Ok(fleet.read(|state| machine_json(state, &state.machines[place])))
    })
    .await
}

fn choose_capacity(state: &FleetState, body: &CreateBody) -> Result<usize, ApiError> {
    let find = |wanted: &dyn Fn(&MachineRecord) -> bool| state.machines.iter().position(wanted);
    if let Some(made) = find(&|record| record.intent == Some(body.intent)) {
        return Ok(made);
    }
    match &body.reservation {
        Some(reservation) => find(&|record| record.reservation == *reservation)
            .ok_or_else(|| ApiError(StatusCode::NOT_FOUND, format!("there is no reservation {reservation}"))),
        None => {
            find(&|record| record.intent.is_none() && record.machine.state != SimulatedState::PowerFailing)
                .ok_or_else(|| ApiError(StatusCode::CONFLICT, "all capacity is taken".to_owned()))
        }
    }
}

async fn get_machine(
    Shared(fleet): Shared<Arc<SimulatedFleet>>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Response {
    handle_call(&fleet, &headers, Exposure::Provider, api_call("look-at", Some(&id), json!({})), || {
        let index = position_in_use(&fleet, &id)?;
        Ok(fleet.read(|state| machine_json(state, &state.machines[index])))
    })
    .await
}

async fn get_power(
    Shared(fleet): Shared<Arc<SimulatedFleet>>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Response {
    handle_call(&fleet, &headers, Exposure::Provider, api_call("power-state", Some(&id), json!({})), || {
        let index = position_in_use(&fleet, &id)?;
        match fleet.read(|state| state.machines[index].machine.state) {
            SimulatedState::PowerFailing => {
                Err(StepRejected("the machine's power control does not answer").into())
            }
            state => Ok(json!({ "power": if state.is_powered() { "on" } else { "off" } })),
        }
    })
    .await
}

async fn set_power(
    Shared(fleet): Shared<Arc<SimulatedFleet>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let body: PowerBody = match parse_body(&body) {
        Ok(read) => read,
        Err(error) => {
            return reject_malformed(&fleet, &headers, api_call("power", Some(&id), json!({})), &body, error);
        }
    };
    let event = match body.action {
        PowerActionBody::On => MachineEvent::PowerOn,
        PowerActionBody::Off => MachineEvent::PowerOff,
        PowerActionBody::Cycle => MachineEvent::PowerCycle,
    };
    let arguments = json!({ "action": body.action });
    let call =
        JournalCall { intent: Some(body.intent.to_string()), ..api_call("power", Some(&id), arguments) };
    handle_call(&fleet, &headers, Exposure::Provider, call, || apply_once(&fleet, &id, body.intent, event))
        .await
}

async fn reboot_machine(
    Shared(fleet): Shared<Arc<SimulatedFleet>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let body: RebootBody = match parse_body(&body) {
        Ok(read) => read,
        Err(error) => {
            return reject_malformed(
                &fleet,
                &headers,
                api_call("reboot", Some(&id), json!({})),
                &body,
                error,
            );
        }
    };
    let call =
        JournalCall { intent: Some(body.intent.to_string()), ..api_call("reboot", Some(&id), json!({})) };
    handle_call(&fleet, &headers, Exposure::Provider, call, || {
        apply_once(&fleet, &id, body.intent, MachineEvent::Reboot)
    })
    .await
}

async fn release_machine(
    Shared(fleet): Shared<Arc<SimulatedFleet>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let body: RebootBody = match parse_body(&body) {
        Ok(read) => read,
        Err(error) => {
            return reject_malformed(
                &fleet,
                &headers,
                api_call("release", Some(&id), json!({})),
                &body,
                error,
            );
        }
    };
    let call =
        JournalCall { intent: Some(body.intent.to_string()), ..api_call("release", Some(&id), json!({})) };
    handle_call(&fleet, &headers, Exposure::Provider, call, || {
        let index = position_in_use(&fleet, &id)?;
        fleet.change(index, |record| {
            record.release(body.intent);
            Ok::<_, ApiError>(((), Some(MachineEvent::Released)))
        })?;
        Ok(json!({}))
    })
    .await
}

/// Applies an event unless its intent was carried out before.
fn apply_once(
    fleet: &Arc<SimulatedFleet>,
    id: &str,
    intent: IntentId,
    event: MachineEvent,
) -> Result<Value, ApiError> {
    let index = position_in_use(fleet, id)?;
    let repeated = fleet.change(index, |record| {
        let new = record.record_intent(intent);
        Ok::<_, ApiError>((!new, new.then_some(event)))
    })?;
    Ok(json!({ "repeated": repeated }))
}

async fn strike_machine(
    Shared(fleet): Shared<Arc<SimulatedFleet>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let body: FaultBody<Fault> = match parse_body(&body) {
        Ok(read) => read,
        Err(error) => {
            return reject_malformed(
                &fleet,
                &headers,
                fault_call("machine", Some(&id), json!({})),
                &body,
                error,
            );
        }
    };
    let call = fault_call("machine", Some(&id), json!(body));
    handle_call(&fleet, &headers, Exposure::Operator, call, || {
        let index = fleet.read(|state| state.position(&id)).ok_or_else(|| ApiError::unknown_machine(&id))?;
        fleet.step(index, MachineEvent::Fault(body.fault))?;
        Ok(json!({}))
    })
    .await
}

async fn strike_provider(
    Shared(fleet): Shared<Arc<SimulatedFleet>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let body: FaultBody<ProviderFault> = match parse_body(&body) {
        Ok(read) => read,
        Err(error) => {
            return reject_malformed(&fleet, &headers, fault_call("provider", None, json!({})), &body, error);
        }
    };
    let call = fault_call("provider", None, json!(body));
    handle_call(&fleet, &headers, Exposure::Operator, call, || {
        fleet.apply_provider_fault(body.fault);
        Ok(json!({}))
    })
    .await
}

async fn get_fleet(Shared(fleet): Shared<Arc<SimulatedFleet>>) -> Response {
    let counts: Vec<_> =
        (0..fleet.read(|state| state.machines.len())).map(|index| fleet.heartbeat_counts(index)).collect();
    let machines = fleet.read(|state| {
        let records = state.machines.iter().zip(&counts);
        records
            .map(|(record, counts)| {
                json!({
                    "id": record.id,
                    "state": record.machine.state.as_str(),
                    "handed_out": record.intent.is_some(),
                    "boots": record.machine.boots,
                    "boot_id": record.machine.boot_id(state.seed),
                    "enrolments": record.machine.enrolments,
                    "machine_id": record.enrolment.as_ref().map(|enrolment| enrolment.machine_id),
                    "access_fence": record.enrolment.as_ref().map(Enrolment::access_fence),
                    "port": record.ssh_port,
                    "heartbeats": {
                        "delivered": counts.delivered,
                        "failed": counts.failed,
                        "pause_ms": counts.pause.map(|pause| u64::try_from(pause.as_millis()).unwrap_or(u64::MAX)),
                    },
                })
            })
            .collect::<Vec<_>>()
    });
    Json(json!({ "machines": machines })).into_response()
}

fn api_call<'a>(what: &'a str, machine: Option<&'a str>, arguments: Value) -> JournalCall<'a> {
    JournalCall { channel: "api", action: what, machine, arguments, ..JournalCall::default() }
}

fn fault_call<'a>(what: &'a str, machine: Option<&'a str>, arguments: Value) -> JournalCall<'a> {
    JournalCall { channel: "fault", action: what, machine, arguments, ..JournalCall::default() }
}

/// The index of a machine that is in use. The provider denies knowing any other.
fn position_in_use(fleet: &SimulatedFleet, id: &str) -> Result<usize, ApiError> {
    fleet
        .read(|state| state.position(id).filter(|index| state.machines[*index].intent.is_some()))
        .ok_or_else(|| ApiError::unknown_machine(id))
}

fn machine_json(state: &FleetState, record: &MachineRecord) -> Value {
    let place = record.machine.index;
    let location = format!("row-{}/rack-{:02}", place / 40 + 1, place % 40 / 4 + 1);
    if record.intent.is_none() {
        return json!({
            "id": record.reservation, "usage": "unused", "reservation": record.reservation,
            "location": location, "status": "Stopped", "host_keys": [],
        });
    }
    let status = match record.machine.state {
        SimulatedState::Booting { .. } if record.machine.boots == 1 => "Provisioning",
        state if state.is_powered() => "Running",
        _ => "Stopped",
    };
    // The provider vouches for the key that the machine was delivered with, whatever it presents now.
    let host_keys: Vec<_> = host_key::public_key(state.seed, place, 0)
        .into_iter()
        .map(|key| json!({ "algorithm": key.algorithm, "blob": STANDARD.encode(key.key) }))
        .collect();
    json!({
        "id": record.id,
        "usage": "used",
        "reservation": record.reservation,
        "address": "127.0.0.1",
        "port": record.ssh_port,
        "user": "root",
        "location": location,
        "status": status,
        "host_keys": host_keys,
        "intent": record.intent,
    })
}
