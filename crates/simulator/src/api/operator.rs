//! Calls of a person or a test: inject a fault, and read the true state of the fleet.
//!
//! The faults of the API do not apply to them.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State as Shared};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use roleserver::enrolment::Enrolment;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::api::call::{ApiError, Exposure, handle_call, parse_body, reject_malformed};
use crate::faults::{Fault, ProviderFault};
use crate::fleet::SimulatedFleet;
use crate::journal::JournalCall;
use crate::machine::MachineEvent;

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct FaultBody<F> {
    fault: F,
}

pub(super) async fn strike_machine(
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

pub(super) async fn strike_provider(
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

pub(super) async fn get_fleet(Shared(fleet): Shared<Arc<SimulatedFleet>>) -> Response {
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

fn fault_call<'a>(what: &'a str, machine: Option<&'a str>, arguments: Value) -> JournalCall<'a> {
    JournalCall { channel: "fault", action: what, machine, arguments, ..JournalCall::default() }
}
