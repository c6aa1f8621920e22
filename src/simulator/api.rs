//! The provider API: how a shepherd lists, creates, powers and reboots machines.
//!
//! HTTP/1.1 with JSON, on a loopback address, without authentication.
//!
//! | request | answer |
//! | --- | --- |
//! | `GET /v1/machines` | `{"machines": […]}`: every machine handed out, and a piece of capacity for each that is not |
//! | `GET /v1/machines?intent=UUID` | `{"machines": […]}`: the one made under that intent, or none |
//! | `POST /v1/machines` `{"intent", "reservation"?}` | the machine; the same one whenever the intent is the same |
//! | `GET /v1/machines/{id}` | the machine |
//! | `GET /v1/machines/{id}/power` | `{"power": "on"}` or `"off"` |
//! | `POST /v1/machines/{id}/power` `{"action": "on"\|"off"\|"cycle", "intent"}` | `{}`; an intent seen before does nothing |
//! | `POST /v1/machines/{id}/reboot` `{"intent"}` | `{}`; an intent seen before does nothing |
//! | `POST /v1/machines/{id}/release` `{"intent"}` | `{}`; the machine is capacity again, and its id nobody's; an intent seen before does nothing |
//! | `POST /v1/machines/{id}/faults` `{"fault"}` | `{}`; `id` is a machine's id whether handed out or not |
//! | `POST /v1/faults` `{"fault"}` | `{}`; strikes the provider itself |
//! | `GET /v1/fleet` | what every machine really does: for people and tests, not for a shepherd |
//!
//! A machine is `{"id", "usage": "unused"|"used", "reservation", "address",
//! "port", "user", "location", "status", "host_keys": [{"algorithm", "blob"}],
//! "intent"}`, blobs in base64. Capacity nobody has bears the reservation's name as id.
//!
//! Errors are `{"error": "<sentence>"}` with 400 (malformed), 404 (no such
//! machine or reservation), 409 (the machine cannot do that now, or all capacity
//! is taken) or 503 (a fault; trying again may help). A 503 may come *after* the
//! deed: that is what intents are for. `shepherd-caller` in a request's header
//! is written into the journal, as every request of this table is but the last.

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
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::model::ids::IntentId;
use crate::roleserver::enrolment::Enrolment;
use crate::simulator::faults::{ApiFault, Fault, ProviderFault};
use crate::simulator::fleet::Fleet;
use crate::simulator::host_key;
use crate::simulator::journal::{Call, Outcome};
use crate::simulator::machine::{Event, Refusal, State};
use crate::simulator::state::{FleetState, Record};

/// The header in which a caller says who it is.
pub const CALLER_HEADER: &str = "shepherd-caller";
/// How late a slow API answers.
const SLOW: Duration = Duration::from_secs(5);

/// The routes of the API.
pub fn routes(fleet: Arc<Fleet>) -> Router {
    Router::new()
        .route("/v1/machines", get(list).post(create))
        .route("/v1/machines/{id}", get(look_at))
        .route("/v1/machines/{id}/power", get(power_state).post(power))
        .route("/v1/machines/{id}/reboot", post(reboot))
        .route("/v1/machines/{id}/release", post(release))
        .route("/v1/machines/{id}/faults", post(strike_machine))
        .route("/v1/faults", post(strike_provider))
        .route("/v1/fleet", get(truth))
        .with_state(fleet)
}

/// An answer that is not 200.
#[derive(Debug)]
struct ApiError(StatusCode, String);

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        Self(StatusCode::CONFLICT, refusal.to_string())
    }
}

impl ApiError {
    fn unknown(id: &str) -> Self {
        Self(StatusCode::NOT_FOUND, format!("there is no machine {id}"))
    }
}

/// How a request counts for the faults of the API.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Exposure {
    /// A shepherd's request: faults of the profile befall it.
    Provider,
    /// A person's or a test's.
    Backstage,
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
enum Action {
    On,
    Off,
    Cycle,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct PowerBody {
    action: Action,
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

/// Journals a request, lets the faults of the API befall it, does the deed, and answers when what it
/// did is on disk.
async fn handle(
    fleet: &Arc<Fleet>,
    headers: &HeaderMap,
    exposure: Exposure,
    call: Call<'_>,
    deed: impl FnOnce() -> Result<Value, ApiError>,
) -> Response {
    let caller = caller_of(headers);
    let mut call = fleet.journal.begin(Call { caller, ..call });
    let fault = match exposure {
        Exposure::Provider => fleet.nature.profile.api_fault(fleet.nature.seed, fleet.count_api_call()),
        Exposure::Backstage => None,
    };
    let condition = fleet.api_condition();
    if exposure == Exposure::Provider && condition.slow {
        tokio::time::sleep(SLOW).await;
    }
    if exposure == Exposure::Provider && condition.fails {
        call.end(Outcome::Failed, &json!({ "status": 503, "done": false }));
        return sentence(StatusCode::SERVICE_UNAVAILABLE, "the provider is gone");
    }
    if fault == Some(ApiFault::Before) {
        call.end(Outcome::Failed, &json!({ "status": 503, "done": false }));
        return sentence(StatusCode::SERVICE_UNAVAILABLE, "the provider is busy; try again");
    }
    let done = deed();
    if let Ok(answer) = &done
        && answer.get("machines").is_none()
    {
        call.done(answer);
    }
    if let Err(error) = fleet.durable().await {
        call.end(Outcome::Failed, &json!({ "status": 500, "error": error.to_string() }));
        return sentence(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string());
    }
    match done {
        Ok(answer) if fault == Some(ApiFault::After) => {
            call.end(Outcome::Failed, &json!({ "status": 503, "done": true, "answer": answer }));
            sentence(StatusCode::SERVICE_UNAVAILABLE, "the provider lost the answer; try again")
        }
        Ok(answer) => {
            let result = match answer.get("machines").and_then(Value::as_array) {
                // A list of thousands would drown the journal.
                Some(machines) => json!({ "status": 200, "machines": machines.len() }),
                None => json!({ "status": 200, "answer": answer }),
            };
            call.end(Outcome::Ok, &result);
            Json(answer).into_response()
        }
        Err(ApiError(status, text)) => {
            call.end(Outcome::Refused, &json!({ "status": status.as_u16(), "error": text }));
            sentence(status, &text)
        }
    }
}

/// Journals a request that cannot be read, and answers it.
fn malformed(fleet: &Fleet, headers: &HeaderMap, call: Call<'_>, given: &[u8], error: ApiError) -> Response {
    /// More than any well-formed request has.
    const SHOWN: usize = 1000;
    let ApiError(status, text) = error;
    let given = String::from_utf8_lossy(&given[..given.len().min(SHOWN)]);
    let arguments = json!({ "unreadable": given });
    let call = fleet.journal.begin(Call { caller: caller_of(headers), arguments, ..call });
    call.end(Outcome::Refused, &json!({ "status": status.as_u16(), "error": text }));
    sentence(status, &text)
}

fn caller_of(headers: &HeaderMap) -> Option<&str> {
    headers.get(CALLER_HEADER).and_then(|value| value.to_str().ok())
}

fn sentence(status: StatusCode, text: &str) -> Response {
    (status, Json(json!({ "error": text }))).into_response()
}

fn body_of<T: for<'de> Deserialize<'de>>(body: &Bytes) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| {
        ApiError(StatusCode::BAD_REQUEST, format!("the request's body cannot be read: {error}"))
    })
}

async fn list(
    Shared(fleet): Shared<Arc<Fleet>>,
    query: Result<Query<ListQuery>, axum::extract::rejection::QueryRejection>,
    headers: HeaderMap,
) -> Response {
    let Query(query) = match query {
        Ok(query) => query,
        Err(error) => {
            let error = ApiError(StatusCode::BAD_REQUEST, error.body_text());
            return malformed(&fleet, &headers, api("find", None, json!({})), b"", error);
        }
    };
    if let Some(intent) = query.intent {
        let call = Call { intent: Some(intent.to_string()), ..api("find", None, json!({})) };
        return handle(&fleet, &headers, Exposure::Provider, call, || {
            let found = fleet.read(|state| {
                let held = state.machines.iter().find(|record| record.intent == Some(intent));
                held.map(|record| machine(state, record))
            });
            Ok(json!({ "machines": Vec::from_iter(found) }))
        })
        .await;
    }
    let condition = fleet.api_condition();
    let response =
        handle(&fleet, &headers, Exposure::Provider, api("list", None, json!({})), || match condition.list {
            Some(ProviderFault::ListError) => {
                Err(ApiError(StatusCode::SERVICE_UNAVAILABLE, "the list cannot be made".to_owned()))
            }
            Some(ProviderFault::ListEmpty) => Ok(json!({ "machines": [] })),
            short => Ok(fleet.read(|state| {
                let listed = state.machines.iter().enumerate();
                let listed = listed
                    .filter(|(index, _)| short != Some(ProviderFault::ListShort) || index % 3 != 0)
                    .map(|(_, record)| machine(state, record));
                json!({ "machines": listed.collect::<Vec<_>>() })
            })),
        })
        .await;
    if condition.list == Some(ProviderFault::ListTorn) { torn(response).await } else { response }
}

/// Cuts an answer's text in half, with a length that fits what is left: well-formed to HTTP, not to
/// a reader of JSON.
async fn torn(response: Response) -> Response {
    let Ok(body) = axum::body::to_bytes(response.into_body(), usize::MAX).await else {
        return sentence(StatusCode::SERVICE_UNAVAILABLE, "the list cannot be made");
    };
    let half = body.slice(..body.len() / 2);
    ([(header::CONTENT_TYPE, "application/json")], half).into_response()
}

async fn create(Shared(fleet): Shared<Arc<Fleet>>, headers: HeaderMap, body: Bytes) -> Response {
    let body: CreateBody = match body_of(&body) {
        Ok(read) => read,
        Err(error) => return malformed(&fleet, &headers, api("create", None, json!({})), &body, error),
    };
    let arguments = json!({ "reservation": body.reservation });
    let call = Call { intent: Some(body.intent.to_string()), ..api("create", None, arguments) };
    handle(&fleet, &headers, Exposure::Provider, call, || {
        let change = |record: &mut Record| match record.intent {
            Some(intent) if intent == body.intent => Ok((record.machine.index, None)),
            Some(_) => Err(ApiError(StatusCode::CONFLICT, format!("{} is taken", record.reservation))),
            None => {
                record.intent = Some(body.intent);
                Ok((record.machine.index, Some(Event::PowerOn)))
            }
        };
        let place = fleet.change_chosen(|state| choose(state, &body), change)? as usize;
        Ok(fleet.read(|state| machine(state, &state.machines[place])))
    })
    .await
}

fn choose(state: &FleetState, body: &CreateBody) -> Result<usize, ApiError> {
    let find = |wanted: &dyn Fn(&Record) -> bool| state.machines.iter().position(wanted);
    if let Some(made) = find(&|record| record.intent == Some(body.intent)) {
        return Ok(made);
    }
    match &body.reservation {
        Some(reservation) => find(&|record| record.reservation == *reservation)
            .ok_or_else(|| ApiError(StatusCode::NOT_FOUND, format!("there is no reservation {reservation}"))),
        None => find(&|record| record.intent.is_none() && record.machine.state != State::PowerFailing)
            .ok_or_else(|| ApiError(StatusCode::CONFLICT, "all capacity is taken".to_owned())),
    }
}

async fn look_at(Shared(fleet): Shared<Arc<Fleet>>, Path(id): Path<String>, headers: HeaderMap) -> Response {
    handle(&fleet, &headers, Exposure::Provider, api("look-at", Some(&id), json!({})), || {
        let index = handed_out(&fleet, &id)?;
        Ok(fleet.read(|state| machine(state, &state.machines[index])))
    })
    .await
}

async fn power_state(
    Shared(fleet): Shared<Arc<Fleet>>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Response {
    handle(&fleet, &headers, Exposure::Provider, api("power-state", Some(&id), json!({})), || {
        let index = handed_out(&fleet, &id)?;
        match fleet.read(|state| state.machines[index].machine.state) {
            State::PowerFailing => Err(Refusal("the machine's power control does not answer").into()),
            state => Ok(json!({ "power": if state.powered() { "on" } else { "off" } })),
        }
    })
    .await
}

async fn power(
    Shared(fleet): Shared<Arc<Fleet>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let body: PowerBody = match body_of(&body) {
        Ok(read) => read,
        Err(error) => return malformed(&fleet, &headers, api("power", Some(&id), json!({})), &body, error),
    };
    let event = match body.action {
        Action::On => Event::PowerOn,
        Action::Off => Event::PowerOff,
        Action::Cycle => Event::PowerCycle,
    };
    let arguments = json!({ "action": body.action });
    let call = Call { intent: Some(body.intent.to_string()), ..api("power", Some(&id), arguments) };
    handle(&fleet, &headers, Exposure::Provider, call, || once(&fleet, &id, body.intent, event)).await
}

async fn reboot(
    Shared(fleet): Shared<Arc<Fleet>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let body: RebootBody = match body_of(&body) {
        Ok(read) => read,
        Err(error) => return malformed(&fleet, &headers, api("reboot", Some(&id), json!({})), &body, error),
    };
    let call = Call { intent: Some(body.intent.to_string()), ..api("reboot", Some(&id), json!({})) };
    handle(&fleet, &headers, Exposure::Provider, call, || once(&fleet, &id, body.intent, Event::Reboot)).await
}

async fn release(
    Shared(fleet): Shared<Arc<Fleet>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let body: RebootBody = match body_of(&body) {
        Ok(read) => read,
        Err(error) => return malformed(&fleet, &headers, api("release", Some(&id), json!({})), &body, error),
    };
    let call = Call { intent: Some(body.intent.to_string()), ..api("release", Some(&id), json!({})) };
    handle(&fleet, &headers, Exposure::Provider, call, || {
        let index = handed_out(&fleet, &id)?;
        fleet.change(index, |record| {
            record.take_back(body.intent);
            Ok::<_, ApiError>(((), Some(Event::TakenBack)))
        })?;
        Ok(json!({}))
    })
    .await
}

/// Lets an event happen unless its intent was carried out before.
fn once(fleet: &Arc<Fleet>, id: &str, intent: IntentId, event: Event) -> Result<Value, ApiError> {
    let index = handed_out(fleet, id)?;
    let repeated = fleet.change(index, |record| {
        let new = record.note_intent(intent);
        Ok::<_, ApiError>((!new, new.then_some(event)))
    })?;
    Ok(json!({ "repeated": repeated }))
}

async fn strike_machine(
    Shared(fleet): Shared<Arc<Fleet>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let body: FaultBody<Fault> = match body_of(&body) {
        Ok(read) => read,
        Err(error) => {
            return malformed(&fleet, &headers, fault("machine", Some(&id), json!({})), &body, error);
        }
    };
    let call = fault("machine", Some(&id), json!(body));
    handle(&fleet, &headers, Exposure::Backstage, call, || {
        let index = fleet.read(|state| state.position(&id)).ok_or_else(|| ApiError::unknown(&id))?;
        fleet.step(index, Event::Struck(body.fault))?;
        Ok(json!({}))
    })
    .await
}

async fn strike_provider(Shared(fleet): Shared<Arc<Fleet>>, headers: HeaderMap, body: Bytes) -> Response {
    let body: FaultBody<ProviderFault> = match body_of(&body) {
        Ok(read) => read,
        Err(error) => return malformed(&fleet, &headers, fault("provider", None, json!({})), &body, error),
    };
    let call = fault("provider", None, json!(body));
    handle(&fleet, &headers, Exposure::Backstage, call, || {
        fleet.strike_provider(body.fault);
        Ok(json!({}))
    })
    .await
}

async fn truth(Shared(fleet): Shared<Arc<Fleet>>) -> Response {
    let heard: Vec<_> =
        (0..fleet.read(|state| state.machines.len())).map(|index| fleet.heard(index)).collect();
    let machines = fleet.read(|state| {
        let records = state.machines.iter().zip(&heard);
        records
            .map(|(record, heard)| {
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
                        "delivered": heard.delivered,
                        "failed": heard.failed,
                        "pause_ms": heard.pause.map(|pause| u64::try_from(pause.as_millis()).unwrap_or(u64::MAX)),
                    },
                })
            })
            .collect::<Vec<_>>()
    });
    Json(json!({ "machines": machines })).into_response()
}

fn api<'a>(what: &'a str, machine: Option<&'a str>, arguments: Value) -> Call<'a> {
    Call { channel: "api", what, machine, arguments, ..Call::default() }
}

fn fault<'a>(what: &'a str, machine: Option<&'a str>, arguments: Value) -> Call<'a> {
    Call { channel: "fault", what, machine, arguments, ..Call::default() }
}

/// The place of a machine that somebody has. The provider denies knowing any other.
fn handed_out(fleet: &Fleet, id: &str) -> Result<usize, ApiError> {
    fleet
        .read(|state| state.position(id).filter(|index| state.machines[*index].intent.is_some()))
        .ok_or_else(|| ApiError::unknown(id))
}

fn machine(state: &FleetState, record: &Record) -> Value {
    let place = record.machine.index;
    let location = format!("row-{}/rack-{:02}", place / 40 + 1, place % 40 / 4 + 1);
    if record.intent.is_none() {
        return json!({
            "id": record.reservation, "usage": "unused", "reservation": record.reservation,
            "location": location, "status": "Stopped", "host_keys": [],
        });
    }
    let status = match record.machine.state {
        State::Booting { .. } if record.machine.boots == 1 => "Provisioning",
        state if state.powered() => "Running",
        _ => "Stopped",
    };
    // The provider vouches for the key it delivered the machine with, whatever it presents now.
    let host_keys: Vec<_> = host_key::public(state.seed, place, 0)
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
