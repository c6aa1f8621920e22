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

use axum::Router;
use axum::routing::{get, post};

use self::machines::{
    create_machine, get_machine, get_power, list_machines, reboot_machine, release_machine, set_power,
};
use self::operator::{get_fleet, strike_machine, strike_provider};
use crate::fleet::SimulatedFleet;

mod call;
mod machines;
mod operator;

/// The routes of the API.
pub(crate) fn routes(fleet: Arc<SimulatedFleet>) -> Router {
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
