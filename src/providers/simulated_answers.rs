//! What a simulator's API answers, and how much of it is believed.
//!
//! An answer comes from outside: it is stored in the BMDB, shown on terminals,
//! and followed by a shepherd to whatever address it names. So each text in it
//! is one that can be stored and shown, each address one that can be called, and
//! each id one machine's. A list with one entry that is not so is no list: half
//! of one reads as machines that vanished.
//!
//! Nothing here calls anybody: an answer is a status and a body.

use std::collections::HashSet;
use std::fmt::Display;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::StatusCode;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::model::host_key::HostKey;
use crate::model::ids::IntentId;
use crate::model::provider_status::{PowerState, ProviderStatus, Usage};
use crate::model::readable::readable;
use crate::providers::provider::{ErrorClass, ProviderMachine};
use crate::providers::static_list::check_address;

/// The longest text accepted in a field, in bytes.
const LONGEST_FIELD: usize = 1024;

/// An answer that is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What it means for the next try.
    pub class: ErrorClass,
    /// The end of a sentence that names the provider: what was said, or what is wrong with it.
    pub said: String,
}

/// Machines, all of them.
pub fn list(status: StatusCode, body: &[u8]) -> Result<Vec<ProviderMachine>, Refusal> {
    match read::<ListAnswer>(status, body)? {
        Some(answer) => answer.believed().map_err(unbelievable),
        None => Err(no_api()),
    }
}

/// The machine that was asked for by its id; `None` when there is no such machine.
pub fn looked_at(status: StatusCode, body: &[u8], id: &str) -> Result<Option<ProviderMachine>, Refusal> {
    let Some(answer) = read::<MachineAnswer>(status, body)? else { return Ok(None) };
    let found = answer.believed().map_err(unbelievable)?;
    if found.id == id { Ok(Some(found)) } else { Err(unbelievable("it tells of another machine")) }
}

/// The machine that was made under an intent; `None` when there is nothing that it could be made from.
pub fn made(status: StatusCode, body: &[u8], intent: IntentId) -> Result<Option<ProviderMachine>, Refusal> {
    let Some(answer) = read::<MachineAnswer>(status, body)? else { return Ok(None) };
    let made = answer.believed().map_err(unbelievable)?;
    if made.intent == Some(intent) {
        Ok(Some(made))
    } else {
        Err(unbelievable("the machine made has another intent"))
    }
}

/// The machine that was once made under an intent; `None` says that none was.
pub fn found(status: StatusCode, body: &[u8], intent: IntentId) -> Result<Option<ProviderMachine>, Refusal> {
    let mut found = list(status, body)?;
    let first = found.pop();
    match &first {
        // An API that ignores the question answers with everything it has.
        _ if !found.is_empty() => Err(unbelievable("more than one machine has one intent")),
        Some(machine) if machine.intent != Some(intent) => {
            Err(unbelievable("the machine found has another intent"))
        }
        _ => Ok(first),
    }
}

/// A machine's power; `None` when there is no such machine.
pub fn power_state(status: StatusCode, body: &[u8]) -> Result<Option<PowerState>, Refusal> {
    let Some(answer) = read::<PowerAnswer>(status, body)? else { return Ok(None) };
    text("power", &answer.power).map_err(unbelievable)?;
    Ok(Some(PowerState::from(answer.power.as_str())))
}

/// An order that was taken; `None` when there is no such machine.
pub fn taken(status: StatusCode, body: &[u8]) -> Result<Option<()>, Refusal> {
    Ok(read::<Nothing>(status, body)?.map(|Nothing {}| ()))
}

/// What was answered. `None` is a 404.
fn read<T: DeserializeOwned>(status: StatusCode, body: &[u8]) -> Result<Option<T>, Refusal> {
    if status.is_success() {
        return serde_json::from_slice(body).map(Some).map_err(|error| Refusal {
            class: ErrorClass::Unreadable,
            // It repeats what it stumbled over.
            said: format!("the answer cannot be read: {}", readable(&error.to_string())),
        });
    }
    let said = serde_json::from_slice::<ErrorAnswer>(body);
    if status == StatusCode::NOT_FOUND {
        // Any web server says 404. Believing a wrong one would make every machine vanish.
        return said.map(|_| None).map_err(|_| no_api());
    }
    let class = if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
        ErrorClass::Transient
    } else {
        ErrorClass::Permanent
    };
    let said = match said {
        Ok(answer) => format!("{} ({})", readable(&answer.error), status.as_u16()),
        Err(_) => format!("it answered {status}"),
    };
    Err(Refusal { class, said })
}

fn no_api() -> Refusal {
    Refusal { class: ErrorClass::Configuration, said: "there is no simulator's API (404)".to_owned() }
}

fn unbelievable(problem: impl Display) -> Refusal {
    Refusal { class: ErrorClass::Unreadable, said: format!("the answer cannot be believed: {problem}") }
}

#[derive(Deserialize)]
struct ListAnswer {
    machines: Vec<MachineAnswer>,
}

#[derive(Deserialize)]
struct MachineAnswer {
    id: String,
    usage: UsageAnswer,
    reservation: String,
    address: Option<String>,
    port: Option<u16>,
    user: Option<String>,
    location: Option<String>,
    status: String,
    host_keys: Vec<HostKeyAnswer>,
    intent: Option<IntentId>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum UsageAnswer {
    Unused,
    Used,
}

#[derive(Deserialize)]
struct HostKeyAnswer {
    algorithm: String,
    blob: String,
}

#[derive(Deserialize)]
struct PowerAnswer {
    power: String,
}

#[derive(Deserialize)]
struct ErrorAnswer {
    error: String,
}

#[derive(Deserialize)]
struct Nothing {}

impl ListAnswer {
    /// The machines, all of them; the error says which one cannot be believed.
    fn believed(self) -> Result<Vec<ProviderMachine>, String> {
        let machines =
            self.machines.into_iter().map(MachineAnswer::believed).collect::<Result<Vec<_>, _>>()?;
        let mut seen = HashSet::with_capacity(machines.len());
        let twice = machines.iter().map(|machine| machine.id.as_str()).find(|id| !seen.insert(*id));
        if let Some(id) = twice {
            return Err(format!("it lists {id:?} twice"));
        }
        Ok(machines)
    }
}

impl MachineAnswer {
    /// The machine; the error says what of it cannot be believed.
    fn believed(self) -> Result<ProviderMachine, String> {
        let name = readable(&self.id);
        let wrong = |problem: String| format!("of machine {name:?}, {problem}");
        text("id", &self.id).map_err(wrong)?;
        let usage = match self.usage {
            UsageAnswer::Unused => {
                text("reservation", &self.reservation).map_err(wrong)?;
                Usage::KnownUnused { reservation: self.reservation }
            }
            UsageAnswer::Used => Usage::KnownUsed,
        };
        if let Some(address) = &self.address {
            check_address(address).map_err(|problem| wrong(format!("the address: {problem}")))?;
        }
        if self.port == Some(0) {
            return Err(wrong("the port is 0".to_owned()));
        }
        for (field, value) in [("user", &self.user), ("location", &self.location)] {
            value.as_deref().map_or(Ok(()), |value| text(field, value)).map_err(wrong)?;
        }
        text("status", &self.status).map_err(wrong)?;
        let host_keys = self.host_keys.into_iter().map(HostKeyAnswer::believed).collect::<Result<_, _>>();
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

impl HostKeyAnswer {
    fn believed(self) -> Result<HostKey, String> {
        text("kind of a host key", &self.algorithm)?;
        let key =
            STANDARD.decode(&self.blob).map_err(|error| format!("a host key is not base64: {error}"))?;
        Ok(HostKey { algorithm: self.algorithm, key })
    }
}

/// Whether a text can be stored and shown as it is.
fn text(field: &str, value: &str) -> Result<(), String> {
    if value.is_empty() {
        Err(format!("the {field} is empty"))
    } else if value.len() > LONGEST_FIELD {
        Err(format!("the {field} has {} bytes, and at most {LONGEST_FIELD} are taken", value.len()))
    } else if value.chars().any(char::is_control) {
        Err(format!("the {field} holds control characters: {:?}", readable(value)))
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

    fn listed(machines: &[Value]) -> Result<Vec<ProviderMachine>, Refusal> {
        list(StatusCode::OK, json!({ "machines": machines }).to_string().as_bytes())
    }

    #[test]
    fn a_machine_as_the_contract_says_is_believed() {
        let found = listed(&[machine("a"), machine("b")]).unwrap();
        assert_eq!(found.iter().map(|machine| machine.id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(found[0].host_keys[0].key, [0; 3]);
        let bare = json!({
            "id": "r-2", "usage": "unused", "reservation": "r-2", "status": "Stopped", "host_keys": [],
        });
        assert_eq!(listed(&[bare]).unwrap()[0].usage, Usage::KnownUnused { reservation: "r-2".to_owned() });
    }

    #[test]
    fn one_entry_that_cannot_be_believed_spoils_the_list() {
        for (field, value, said) in [
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
            assert!(refusal.said.contains(said), "{field}: {refusal:?}");
        }
        let refusal = listed(&[machine("a"), machine("b"), machine("a")]).unwrap_err();
        assert_eq!(refusal.said, "the answer cannot be believed: it lists \"a\" twice");
    }

    #[test]
    fn a_machine_that_was_not_asked_for_is_not_believed() {
        let (asked, other) = (IntentId::generate(), IntentId::generate());
        let mut answer = machine("a");
        answer["intent"] = json!(asked);
        let body = answer.to_string();
        let body = body.as_bytes();
        assert_eq!(looked_at(StatusCode::OK, body, "a").unwrap().unwrap().id, "a");
        assert_eq!(made(StatusCode::OK, body, asked).unwrap().unwrap().id, "a");
        for refusal in [
            looked_at(StatusCode::OK, body, "b").unwrap_err(),
            made(StatusCode::OK, body, other).unwrap_err(),
            found(StatusCode::OK, json!({ "machines": [answer] }).to_string().as_bytes(), other).unwrap_err(),
        ] {
            assert_eq!(refusal.class, ErrorClass::Unreadable);
            assert!(refusal.said.contains("another"), "{refusal:?}");
        }
    }

    #[test]
    fn an_answer_that_is_not_200_is_told_by_its_class_and_its_words() {
        let answered = |status: u16, body: &str| {
            power_state(StatusCode::from_u16(status).unwrap(), body.as_bytes())
                .map_err(|refusal| (refusal.class, refusal.said))
        };
        let refused = |class, said: &str| Err((class, said.to_owned()));
        assert_eq!(answered(200, r#"{"power": "on"}"#), Ok(Some(PowerState::On)));
        assert_eq!(answered(404, r#"{"error": "there is no machine a"}"#), Ok(None));
        for (status, body, expected) in [
            (404, "<html>", refused(ErrorClass::Configuration, "there is no simulator's API (404)")),
            (503, r#"{"error": "busy"}"#, refused(ErrorClass::Transient, "busy (503)")),
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
