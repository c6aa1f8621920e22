//! Calls of a shepherd about machines: list, create, power, reboot, release.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Path, Query, State as Shared};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use model::ids::IntentId;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::api::call::{ApiError, Exposure, error_response, handle_call, parse_body, reject_malformed};
use crate::faults::ProviderFault;
use crate::fleet::SimulatedFleet;
use crate::host_key;
use crate::journal::JournalCall;
use crate::machine::{MachineEvent, SimulatedState, StepRejected};
use crate::state::{FleetState, MachineRecord};

#[derive(Deserialize)]
pub(super) struct ListQuery {
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
struct OrderBody {
    intent: IntentId,
}

pub(super) async fn list_machines(
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

pub(super) async fn create_machine(
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

pub(super) async fn get_machine(
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

pub(super) async fn get_power(
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

pub(super) async fn set_power(
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

pub(super) async fn reboot_machine(
    Shared(fleet): Shared<Arc<SimulatedFleet>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    handle_order(&fleet, &headers, "reboot", &id, &body, |intent| {
        apply_once(&fleet, &id, intent, MachineEvent::Reboot)
    })
    .await
}

pub(super) async fn release_machine(
    Shared(fleet): Shared<Arc<SimulatedFleet>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    handle_order(&fleet, &headers, "release", &id, &body, |intent| {
        let index = position_in_use(&fleet, &id)?;
        fleet.change(index, |record| {
            record.release(intent);
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

/// Handles an order about a machine that has an intent and nothing else.
async fn handle_order(
    fleet: &Arc<SimulatedFleet>,
    headers: &HeaderMap,
    what: &str,
    id: &str,
    body: &Bytes,
    operation: impl FnOnce(IntentId) -> Result<Value, ApiError>,
) -> Response {
    let call = api_call(what, Some(id), json!({}));
    match parse_body(body) {
        Ok(OrderBody { intent }) => {
            let call = JournalCall { intent: Some(intent.to_string()), ..call };
            handle_call(fleet, headers, Exposure::Provider, call, || operation(intent)).await
        }
        Err(error) => reject_malformed(fleet, headers, call, body, error),
    }
}

fn api_call<'a>(what: &'a str, machine: Option<&'a str>, arguments: Value) -> JournalCall<'a> {
    JournalCall { channel: "api", action: what, machine, arguments, ..JournalCall::default() }
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
