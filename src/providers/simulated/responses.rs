//! Parses and validates responses of the simulator's API.
//!
//! A response comes from outside. It is stored in the BMDB, shown on terminals, and a shepherd connects to the
//! addresses in it. So each text must be safe to store and show, each address must be a valid one, and each id must be
//! unique. A list with one invalid entry is invalid as a whole: a partial list reads as machines that vanished.
//!
//! This module does no I/O: a response is a status and a body.

use std::collections::HashSet;
use std::fmt::Display;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::StatusCode;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::model::excerpt::{Excerpt, with_excerpt};
use crate::model::host_key::HostKey;
use crate::model::ids::IntentId;
use crate::model::provider_status::{MachineUsage, PowerState, ProviderStatus};
use crate::model::sanitize::sanitize_text;
use crate::providers::field_checks::{MAX_FIELD_BYTES, check_address};
use crate::providers::provider::{ErrorClass, ProviderMachine};

/// Why a response was rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResponseError {
    /// What it means for a retry.
    pub class: ErrorClass,
    /// The end of a sentence that names the provider: the API's own message, or what is wrong with the response.
    pub message: String,
}

/// Parses the list of all machines.
pub fn parse_list(status: StatusCode, body: &[u8]) -> Result<Vec<ProviderMachine>, ResponseError> {
    match parse_response::<ListResponse>(status, body)? {
        Some(answer) => answer.validate().map_err(invalid_response),
        None => Err(missing_api_error()),
    }
}

/// Parses the response to a query for one machine by its id; `None` if there is no such machine.
pub fn parse_machine(
    status: StatusCode,
    body: &[u8],
    id: &str,
) -> Result<Option<ProviderMachine>, ResponseError> {
    let Some(answer) = parse_response::<MachineResponse>(status, body)? else { return Ok(None) };
    let found = answer.validate().map_err(invalid_response)?;
    if found.id == id { Ok(Some(found)) } else { Err(invalid_response("it tells of another machine")) }
}

/// Parses the machine that was created under an intent; `None` if the capacity for it does not exist.
pub fn parse_created(
    status: StatusCode,
    body: &[u8],
    intent: IntentId,
) -> Result<Option<ProviderMachine>, ResponseError> {
    let Some(answer) = parse_response::<MachineResponse>(status, body)? else { return Ok(None) };
    let made = answer.validate().map_err(invalid_response)?;
    if made.intent == Some(intent) {
        Ok(Some(made))
    } else {
        Err(invalid_response("the machine made has another intent"))
    }
}

/// Parses the search for an intent; `None` states that no machine was created under it.
pub fn parse_found(
    status: StatusCode,
    body: &[u8],
    intent: IntentId,
) -> Result<Option<ProviderMachine>, ResponseError> {
    let mut found = parse_list(status, body)?;
    let first = found.pop();
    match &first {
        // An API that ignores the query parameter returns all its machines.
        _ if !found.is_empty() => Err(invalid_response("more than one machine has one intent")),
        Some(machine) if machine.intent != Some(intent) => {
            Err(invalid_response("the machine found has another intent"))
        }
        _ => Ok(first),
    }
}

/// Parses a machine's power state; `None` if there is no such machine.
pub fn parse_power_state(status: StatusCode, body: &[u8]) -> Result<Option<PowerState>, ResponseError> {
    let Some(answer) = parse_response::<PowerResponse>(status, body)? else { return Ok(None) };
    check_text("power", &answer.power).map_err(invalid_response)?;
    Ok(Some(PowerState::from(answer.power.as_str())))
}

/// Parses the acceptance of an order; `None` if there is no such machine.
pub fn parse_accepted(status: StatusCode, body: &[u8]) -> Result<Option<()>, ResponseError> {
    Ok(parse_response::<EmptyResponse>(status, body)?.map(|EmptyResponse {}| ()))
}

/// Parses a response. `None` is a 404.
fn parse_response<T: DeserializeOwned>(status: StatusCode, body: &[u8]) -> Result<Option<T>, ResponseError> {
    if status.is_success() {
        return serde_json::from_slice(body).map(Some).map_err(|error| ResponseError {
            class: ErrorClass::Unreadable,
            // The error repeats parts of the input, so it is sanitized.
            message: format!("the answer cannot be read: {}", sanitize_text(&error.to_string())),
        });
    }
    let result = serde_json::from_slice::<ErrorResponse>(body);
    if status == StatusCode::NOT_FOUND {
        // Any web server answers 404. Believing one of another server would make every machine vanish.
        return result.map(|_| None).map_err(|_| missing_api_error());
    }
    let class = if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
        ErrorClass::Transient
    } else {
        ErrorClass::Permanent
    };
    let text = match result {
        Ok(answer) => format!("{} ({})", sanitize_text(&answer.error), status.as_u16()),
        Err(_) => with_excerpt(format_args!("it answered {status}"), Excerpt::from_body(body).as_ref()),
    };
    Err(ResponseError { class, message: text })
}

fn missing_api_error() -> ResponseError {
    ResponseError {
        class: ErrorClass::Configuration,
        message: "there is no simulator's API (404)".to_owned(),
    }
}

fn invalid_response(problem: impl Display) -> ResponseError {
    ResponseError {
        class: ErrorClass::Unreadable,
        message: format!("the answer cannot be believed: {problem}"),
    }
}

#[derive(Deserialize)]
struct ListResponse {
    machines: Vec<MachineResponse>,
}

#[derive(Deserialize)]
struct MachineResponse {
    id: String,
    usage: UsageResponse,
    reservation: String,
    address: Option<String>,
    port: Option<u16>,
    user: Option<String>,
    location: Option<String>,
    status: String,
    host_keys: Vec<HostKeyResponse>,
    intent: Option<IntentId>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum UsageResponse {
    Unused,
    Used,
}

#[derive(Deserialize)]
struct HostKeyResponse {
    algorithm: String,
    blob: String,
}

#[derive(Deserialize)]
struct PowerResponse {
    power: String,
}

#[derive(Deserialize)]
struct ErrorResponse {
    error: String,
}

#[derive(Deserialize)]
struct EmptyResponse {}

impl ListResponse {
    /// All machines of the list; the error names the first invalid one.
    fn validate(self) -> Result<Vec<ProviderMachine>, String> {
        let machines =
            self.machines.into_iter().map(MachineResponse::validate).collect::<Result<Vec<_>, _>>()?;
        let mut seen = HashSet::with_capacity(machines.len());
        let twice = machines.iter().map(|machine| machine.id.as_str()).find(|id| !seen.insert(*id));
        if let Some(id) = twice {
            return Err(format!("it lists {id:?} twice"));
        }
        Ok(machines)
    }
}

impl MachineResponse {
    /// The machine; the error names what is invalid.
    fn validate(self) -> Result<ProviderMachine, String> {
        let name = sanitize_text(&self.id);
        let wrong = |problem: String| format!("of machine {name:?}, {problem}");
        check_text("id", &self.id).map_err(wrong)?;
        let usage = match self.usage {
            UsageResponse::Unused => {
                check_text("reservation", &self.reservation).map_err(wrong)?;
                MachineUsage::KnownUnused { reservation: self.reservation }
            }
            UsageResponse::Used => MachineUsage::KnownUsed,
        };
        if let Some(address) = &self.address {
            check_address(address).map_err(|problem| wrong(format!("the address: {problem}")))?;
        }
        if self.port == Some(0) {
            return Err(wrong("the port is 0".to_owned()));
        }
        for (field, value) in [("user", &self.user), ("location", &self.location)] {
            value.as_deref().map_or(Ok(()), |value| check_text(field, value)).map_err(wrong)?;
        }
        check_text("status", &self.status).map_err(wrong)?;
        let host_keys = self.host_keys.into_iter().map(HostKeyResponse::validate).collect::<Result<_, _>>();
        Ok(ProviderMachine {
            usage,
            host_keys: host_keys.map_err(wrong)?,
            id: self.id,
            address: self.address,
            ssh_port: self.port,
            ssh_user: self.user,
            location: self.location,
            status: ProviderStatus::from(self.status.as_str()),
            intent: self.intent,
        })
    }
}

impl HostKeyResponse {
    fn validate(self) -> Result<HostKey, String> {
        check_text("kind of a host key", &self.algorithm)?;
        let key =
            STANDARD.decode(&self.blob).map_err(|error| format!("a host key is not base64: {error}"))?;
        Ok(HostKey { algorithm: self.algorithm, key })
    }
}

/// Checks that a text can be stored and shown as it is.
fn check_text(field: &str, value: &str) -> Result<(), String> {
    if value.is_empty() {
        Err(format!("the {field} is empty"))
    } else if value.len() > MAX_FIELD_BYTES {
        Err(format!("the {field} has {} bytes, and at most {MAX_FIELD_BYTES} are taken", value.len()))
    } else if value.chars().any(char::is_control) {
        Err(format!("the {field} holds control characters: {:?}", sanitize_text(value)))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn machine(id: &str) -> Value {
        json!({
            "id": id, "usage": "used", "reservation": "r-1", "address": "192.0.2.7", "port": 22,
            "user": "root", "location": "row 1", "status": "Running",
            "host_keys": [{"algorithm": "ssh-ed25519", "blob": "AAAA"}], "intent": null,
        })
    }

    fn listed(machines: &[Value]) -> Result<Vec<ProviderMachine>, ResponseError> {
        parse_list(StatusCode::OK, json!({ "machines": machines }).to_string().as_bytes())
    }

    #[test]
    fn valid_machine_is_accepted() {
        let found = listed(&[machine("a"), machine("b")]).unwrap();
        assert_eq!(found.iter().map(|machine| machine.id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(found[0].host_keys[0].key, [0; 3]);
        let bare = json!({
            "id": "r-2", "usage": "unused", "reservation": "r-2", "status": "Stopped", "host_keys": [],
        });
        assert_eq!(
            listed(&[bare]).unwrap()[0].usage,
            MachineUsage::KnownUnused { reservation: "r-2".to_owned() }
        );
    }

    #[test]
    fn one_invalid_entry_rejects_the_list() {
        for (field, value, text) in [
            ("id", json!(""), "of machine \"\", the id is empty"),
            ("id", json!("a\u{0}"), "of machine \"a\", the id holds control characters: \"a\""),
            ("id", json!("x".repeat(1025)), "the id has 1025 bytes, and at most 1024 are taken"),
            ("address", json!("192.0.2.7:22"), "the address: expected a DNS name or an IP address"),
            ("address", json!(""), "the address: expected a DNS name or an IP address"),
            ("port", json!(0), "the port is 0"),
            ("user", json!("ro\not"), "the user holds control characters: \"ro ot\""),
            ("location", json!("\u{1b}[2J"), "the location holds control characters"),
            ("status", json!("\u{7}"), "the status holds control characters"),
            ("host_keys", json!([{"algorithm": "ssh-ed25519", "blob": "?"}]), "a host key is not base64"),
            ("host_keys", json!([{"algorithm": "\t", "blob": ""}]), "the kind of a host key holds control"),
        ] {
            let mut odd = machine("odd");
            odd[field] = value;
            let refusal = listed(&[machine("a"), odd]).unwrap_err();
            assert_eq!(refusal.class, ErrorClass::Unreadable);
            assert!(refusal.message.contains(text), "{field}: {refusal:?}");
        }
        let refusal = listed(&[machine("a"), machine("b"), machine("a")]).unwrap_err();
        assert_eq!(refusal.message, "the answer cannot be believed: it lists \"a\" twice");
    }

    #[test]
    fn unrequested_machine_is_rejected() {
        let (id, other) = (IntentId::generate(), IntentId::generate());
        let mut answer = machine("a");
        answer["intent"] = json!(id);
        let body = answer.to_string();
        let body = body.as_bytes();
        assert_eq!(parse_machine(StatusCode::OK, body, "a").unwrap().unwrap().id, "a");
        assert_eq!(parse_created(StatusCode::OK, body, id).unwrap().unwrap().id, "a");
        for refusal in [
            parse_machine(StatusCode::OK, body, "b").unwrap_err(),
            parse_created(StatusCode::OK, body, other).unwrap_err(),
            parse_found(StatusCode::OK, json!({ "machines": [answer] }).to_string().as_bytes(), other)
                .unwrap_err(),
        ] {
            assert_eq!(refusal.class, ErrorClass::Unreadable);
            assert!(refusal.message.contains("another"), "{refusal:?}");
        }
    }

    #[test]
    fn error_status_maps_to_a_class_and_message() {
        let answered = |status: u16, body: &str| {
            parse_power_state(StatusCode::from_u16(status).unwrap(), body.as_bytes())
                .map_err(|refusal| (refusal.class, refusal.message))
        };
        let refused = |class, text: &str| Err((class, text.to_owned()));
        assert_eq!(answered(200, r#"{"power": "on"}"#), Ok(Some(PowerState::On)));
        assert_eq!(answered(404, r#"{"error": "there is no machine a"}"#), Ok(None));
        for (status, body, expected) in [
            (404, "<html>", refused(ErrorClass::Configuration, "there is no simulator's API (404)")),
            (503, r#"{"error": "busy"}"#, refused(ErrorClass::Transient, "busy (503)")),
            (
                502,
                "<html>\n<h1>no route\u{1b}</h1>",
                refused(ErrorClass::Transient, "it answered 502 Bad Gateway: <html> <h1>no route </h1>"),
            ),
            (429, "", refused(ErrorClass::Transient, "it answered 429 Too Many Requests")),
            (409, r#"{"error": "\u001b[2Jno"}"#, refused(ErrorClass::Permanent, "[2Jno (409)")),
            (
                200,
                r#"{"power": "\u0000"}"#,
                refused(
                    ErrorClass::Unreadable,
                    "the answer cannot be believed: the power holds control characters: \"\"",
                ),
            ),
        ] {
            assert_eq!(answered(status, body), expected, "{status}");
        }
    }
}
