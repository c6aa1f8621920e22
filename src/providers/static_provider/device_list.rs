//! Parses a static device list (JSON) strictly.
//!
//! A JSON array of objects:
//!
//! ```json
//! [
//!   {"ID": "rack1-07", "Addr": "192.0.2.7", "Port": 22, "User": "admin", "Location": "rack 1",
//!    "HostKey": "ssh-ed25519 AAAA…",
//!    "PowerCommand": ["/usr/local/bin/pdu", "outlet-7"],
//!    "RebootCommand": ["sudo", "-n", "/sbin/reboot"]}
//! ]
//! ```
//!
//! `ID` and `Addr` are required. Errors name the line and the field, because such lists are edited by hand: "invalid
//! type" somewhere in a thousand lines is no help. Unknown fields are errors too: a misspelt `PowerComand` would
//! otherwise be noticed on the night it is needed.
//!
//! A command runs on the shepherd's host, or as root on a machine, and a password may be sent to the host with the host
//! key. So the caller states whether it trusts a list ([`ListTrust`]), and a list that has one of these without being
//! trusted is rejected as a whole.

use std::collections::HashMap;
use std::fmt;

use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, de};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::model::host_key::HostKey;
use crate::providers::field_checks::{MAX_FIELD_BYTES, check_address, shorten};

/// One machine of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// The operator's id of the machine, unique in the list.
    pub id: String,
    /// DNS name or IP literal.
    pub address: String,
    /// SSH port, when not 22.
    pub port: Option<u16>,
    /// SSH user, when not the configured one.
    pub user: Option<String>,
    /// Location in the operator's words; `None` if the list has none.
    pub location: Option<String>,
    /// SSH host key of the machine, if the operator knows it.
    pub host_key: Option<HostKey>,
    /// Run on the shepherd's host with `on`, `off`, `cycle` or `status` appended.
    pub power_command: Option<Vec<String>>,
    /// Run on the machine over SSH.
    pub reboot_command: Option<Vec<String>>,
}

/// Whether the commands and host keys of a list are believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListTrust {
    /// Only who may decide about this host can have written them.
    Trusted,
    /// Somebody else may have written them.
    Untrusted {
        /// Why, and what to do, as the end of a sentence.
        reason: String,
    },
}

/// Why a list cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceListError {
    /// The line of the mistake, from 1.
    pub line: usize,
    /// The field, if the mistake is in one field.
    pub field: Option<String>,
    /// What was expected, and what was found.
    pub problem: String,
}

impl fmt::Display for DeviceListError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}", self.line)?;
        if let Some(field) = &self.field {
            write!(f, ", field {field:?}")?;
        }
        write!(f, ": {}", self.problem)
    }
}

/// Parses a whole list. The error is the first mistake.
pub fn parse_device_list(text: &str, trust: &ListTrust) -> Result<Vec<Device>, DeviceListError> {
    let elements: Vec<&RawValue> = serde_json::from_str(text).map_err(|error| {
        let message = error.to_string();
        let message = message.split(" at line ").next().unwrap_or_default();
        DeviceListError {
            line: error.line().max(1),
            field: None,
            problem: if error.is_data() {
                format!("expected a JSON array of devices, found {}", describe_json(text))
            } else {
                format!("this is not JSON: {message} (column {})", error.column())
            },
        }
    })?;
    let mut devices = Vec::with_capacity(elements.len());
    let mut seen: HashMap<String, &str> = HashMap::with_capacity(elements.len());
    for element in elements {
        let (device, id_text) = parse_device(text, element, trust)?;
        if let Some(first) = seen.insert(device.id.clone(), id_text) {
            let first = line_of(text, first);
            return Err(error_at(
                text,
                id_text,
                "ID",
                format!("{:?} is already the id of line {first}", device.id),
            ));
        }
        devices.push(device);
    }
    Ok(devices)
}

/// The members of an object in order, repeated ones included, with the JSON text of each value.
struct Members<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MembersVisitor;

        impl<'de> Visitor<'de> for MembersVisitor {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }

            fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
                Err(E::invalid_type(de::Unexpected::Unit, &self))
            }
        }

        deserializer.deserialize_map(MembersVisitor)
    }
}

fn parse_device<'a>(
    text: &str,
    element: &'a RawValue,
    trust: &ListTrust,
) -> Result<(Device, &'a str), DeviceListError> {
    let Ok(Members(members)) = serde_json::from_str(element.get()) else {
        return Err(DeviceListError {
            line: line_of(text, element.get()),
            field: None,
            problem: format!("expected an object for each device, found {}", describe_json(element.get())),
        });
    };
    let mut fields: HashMap<&str, &'a str> = HashMap::new();
    for (name, value) in &members {
        let value = value.get();
        if !FIELDS.contains(&name.as_str()) {
            let problem = match FIELDS.iter().find(|field| field.eq_ignore_ascii_case(name)) {
                Some(meant) => format!("unknown field; it is written {meant:?}"),
                None => format!("unknown field; known are {}", FIELDS.join(", ")),
            };
            return Err(error_at(text, value, name, problem));
        }
        if fields.insert(name, value).is_some() {
            return Err(error_at(text, value, name, "given twice in one device".to_owned()));
        }
    }
    let missing = |field: &str| DeviceListError {
        line: line_of(text, element.get()),
        field: Some(field.to_owned()),
        problem: "missing in the device that begins here".to_owned(),
    };
    let read = |field: &'static str,
                reader: fn(&Value) -> Result<(), String>|
     -> Result<Option<Value>, DeviceListError> {
        let Some(value_text) = fields.get(field) else { return Ok(None) };
        let wrong = |problem| error_at(text, value_text, field, problem);
        let value: Value = serde_json::from_str(value_text).map_err(|error| wrong(error.to_string()))?;
        reader(&value).map_err(wrong)?;
        match trust {
            ListTrust::Untrusted { reason } if TRUSTED_FIELDS.contains(&field) => Err(wrong(reason.clone())),
            _ => Ok(Some(value)),
        }
    };
    let string = |value: Option<Value>| match value {
        Some(Value::String(text)) => Some(text),
        _ => None,
    };
    let id_text = fields.get("ID").copied().ok_or_else(|| missing("ID"))?;
    let device = Device {
        id: string(read("ID", check_label)?).ok_or_else(|| missing("ID"))?,
        address: string(read("Addr", check_address_field)?).ok_or_else(|| missing("Addr"))?,
        port: read("Port", check_port)?
            .as_ref()
            .and_then(Value::as_u64)
            .and_then(|port| u16::try_from(port).ok()),
        user: string(read("User", check_user)?),
        location: string(read("Location", check_label)?),
        host_key: string(read("HostKey", check_host_key)?).and_then(|line| HostKey::parse_line(&line).ok()),
        power_command: read("PowerCommand", check_command)?.map(into_words),
        reboot_command: read("RebootCommand", check_command)?.map(into_words),
    };
    Ok((device, id_text))
}

const FIELDS: [&str; 8] =
    ["ID", "Addr", "Port", "User", "Location", "HostKey", "PowerCommand", "RebootCommand"];
/// The fields that only a list that is trusted may have.
const TRUSTED_FIELDS: [&str; 3] = ["HostKey", "PowerCommand", "RebootCommand"];

fn check_label(value: &Value) -> Result<(), String> {
    match value.as_str() {
        Some("") => Err("expected a text, found \"\"".to_owned()),
        Some(text) if text.len() > MAX_FIELD_BYTES => {
            Err(format!("expected at most {MAX_FIELD_BYTES} bytes, found {}", text.len()))
        }
        Some(text) if text.chars().any(char::is_control) => {
            Err("expected a text without control characters".to_owned())
        }
        Some(_) => Ok(()),
        None => Err(format!("expected a text, found {}", describe_json(&value.to_string()))),
    }
}

fn check_address_field(value: &Value) -> Result<(), String> {
    match value.as_str() {
        Some(text) => check_address(text),
        None => {
            Err(format!("expected a DNS name or an IP address, found {}", describe_json(&value.to_string())))
        }
    }
}

fn check_port(value: &Value) -> Result<(), String> {
    match value.as_u64() {
        Some(1..=65535) => Ok(()),
        _ => Err(format!("expected a number from 1 to 65535, found {}", describe_json(&value.to_string()))),
    }
}

fn check_user(value: &Value) -> Result<(), String> {
    check_label(value)?;
    match value.as_str() {
        Some(name) if name.starts_with('-') || name.contains([' ', '@', ':', '/']) => {
            Err(format!("expected a user's name, found {:?}", shorten(name)))
        }
        _ => Ok(()),
    }
}

fn check_host_key(value: &Value) -> Result<(), String> {
    check_label(value)?;
    HostKey::parse_line(value.as_str().unwrap_or_default()).map(drop)
}

fn check_command(value: &Value) -> Result<(), String> {
    let expected = "expected an argument vector like [\"program\", \"argument\"]";
    let Some(words) = value.as_array() else {
        let hint = if value.is_string() { " (it is never run by a shell)" } else { "" };
        return Err(format!("{expected}, found {}{hint}", describe_json(&value.to_string())));
    };
    if let Some(word) = words.iter().find(|word| !word.is_string()) {
        return Err(format!("{expected}, found {} in it", describe_json(&word.to_string())));
    }
    if words.iter().any(|word| word.as_str().is_some_and(|word| word.contains('\0'))) {
        return Err(format!("{expected}, found a NUL character in it"));
    }
    match words.first().and_then(Value::as_str) {
        None | Some("") => Err(format!("{expected}, found no program in it")),
        Some(_) => Ok(()),
    }
}

fn into_words(value: Value) -> Vec<String> {
    match value {
        Value::Array(words) => words
            .into_iter()
            .filter_map(|word| match word {
                Value::String(word) => Some(word),
                _ => None,
            })
            .collect(),
        _ => Vec::new(),
    }
}

fn error_at(text: &str, place: &str, field: &str, problem: String) -> DeviceListError {
    DeviceListError { line: line_of(text, place), field: Some(shorten(field)), problem }
}

/// The line on which a part of `text` starts. `part` must be borrowed from `text`.
fn line_of(text: &str, part: &str) -> usize {
    let offset = (part.as_ptr() as usize).saturating_sub(text.as_ptr() as usize).min(text.len());
    1 + text.get(..offset).map_or(0, |before| before.matches('\n').count())
}

/// Describes a JSON value for an error message.
fn describe_json(json: &str) -> String {
    let json = json.trim();
    match json.as_bytes().first() {
        Some(b'{') => "an object".to_owned(),
        Some(b'[') => "an array".to_owned(),
        Some(b'"') => format!("the text {}", shorten(json)),
        None => "nothing".to_owned(),
        Some(_) => shorten(json),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HOST_KEY: &str =
        "\"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGBD9nrIZGWHqbGTXAPdBXYXkXr8ErpFTpDdatgRp/pA\"";

    fn parse(text: &str) -> Result<Vec<Device>, DeviceListError> {
        parse_device_list(text, &ListTrust::Trusted)
    }

    const DEVICE_LIST: &str = r#"[
  {"ID": "a", "Addr": "192.0.2.1"},
  {
    "ID": "b", "Addr": "b.example", "Port": 2222, "User": "admin", "Location": "rack 1",
    "PowerCommand": ["/bin/pdu", "7"],
    "RebootCommand": ["sudo", "-n", "reboot"]
  }
]"#;

    #[test]
    fn a_whole_list_is_read() {
        let devices = parse(DEVICE_LIST).unwrap();
        assert_eq!(devices.len(), 2);
        assert_eq!((devices[0].id.as_str(), devices[0].port), ("a", None));
        assert_eq!(devices[1].port, Some(2222));
        assert_eq!(devices[1].power_command.as_deref().unwrap(), ["/bin/pdu", "7"]);
        assert_eq!(devices[1].reboot_command.as_deref().unwrap(), ["sudo", "-n", "reboot"]);
        assert_eq!(devices[1].host_key, None);
        assert_eq!(parse("[]").unwrap(), []);
        let keyed = parse(&format!("[{{\"ID\": \"a\", \"Addr\": \"h\", \"HostKey\": {HOST_KEY}}}]")).unwrap();
        assert_eq!(keyed[0].host_key.as_ref().unwrap().algorithm, "ssh-ed25519");
    }

    #[test]
    fn command_or_host_key_that_is_not_trusted_rejects_the_list() {
        let untrusted = ListTrust::Untrusted { reason: "it came by pigeon".to_owned() };
        let plain = r#"[{"ID": "a", "Addr": "h"}]"#;
        assert_eq!(parse_device_list(plain, &untrusted).unwrap().len(), 1);
        for (field, value) in TRUSTED_FIELDS.into_iter().zip([HOST_KEY, r#"["id"]"#, r#"["id"]"#]) {
            let list = format!("[{{\"ID\": \"a\", \"Addr\": \"h\",\n\"{field}\": {value}}}]");
            assert_eq!(parse(&list).unwrap().len(), 1);
            let error = parse_device_list(&list, &untrusted).unwrap_err().to_string();
            assert_eq!(error, format!("line 2, field \"{field}\": it came by pigeon"));
        }
    }

    #[test]
    fn a_mistake_is_named_by_line_and_field() {
        let cases = [
            (
                "[\n{\"ID\":\"a\",\"Addr\":\"h\",\n\"Colour\":1}]",
                r#"line 3, field "Colour": unknown field; known are ID, Addr, Port, User, Location, HostKey, PowerCommand, RebootCommand"#,
            ),
            ("[\n{\"id\":\"a\",\"Addr\":\"h\"}]", r#"line 2, field "id": unknown field; it is written "ID""#),
            (
                "[{\"ID\":\"a\",\"Addr\":\"h\"},\n\n{\"ID\":\"a\",\"Addr\":\"g\"}]",
                r#"line 3, field "ID": "a" is already the id of line 1"#,
            ),
            (
                "[{\"ID\":\"a\",\n\"Addr\":\"h\",\n\"Port\":\"ssh\"}]",
                r#"line 3, field "Port": expected a number from 1 to 65535, found the text "ssh""#,
            ),
            (
                "[{\"ID\":\"a\",\"Addr\":\"h\",\"Port\":0}]",
                r#"line 1, field "Port": expected a number from 1 to 65535, found 0"#,
            ),
            (
                "[{\"ID\":\"a\",\"Addr\":\"h\",\"Port\":22.0}]",
                r#"line 1, field "Port": expected a number from 1 to 65535, found 22.0"#,
            ),
            (
                "[{\"ID\":\"a\",\"Addr\":\"h\",\"Port\":null}]",
                r#"line 1, field "Port": expected a number from 1 to 65535, found null"#,
            ),
            ("[{\"ID\":\"\",\"Addr\":\"h\"}]", r#"line 1, field "ID": expected a text, found """#),
            ("[{\"ID\":7,\"Addr\":\"h\"}]", r#"line 1, field "ID": expected a text, found 7"#),
            ("[\n\n{\"Addr\":\"h\"}]", r#"line 3, field "ID": missing in the device that begins here"#),
            ("[{\"ID\":\"a\"}]", r#"line 1, field "Addr": missing in the device that begins here"#),
            (
                "[{\"ID\":\"a\",\"Addr\":\"h\",\n\"Addr\":\"g\"}]",
                r#"line 2, field "Addr": given twice in one device"#,
            ),
            (
                "[{\"ID\":\"a\",\"Addr\":\"root@h\"}]",
                r#"line 1, field "Addr": expected a DNS name or an IP address without a user (that is "User"), found "root@h""#,
            ),
            (
                "[{\"ID\":\"a\",\"Addr\":\"h:22\"}]",
                r#"line 1, field "Addr": expected a DNS name or an IP address without a port (that is "Port"), found "h:22""#,
            ),
            (
                "[{\"ID\":\"a\",\"Addr\":\"256.1.1.1\"}]",
                r#"line 1, field "Addr": expected a DNS name or an IP address, found "256.1.1.1""#,
            ),
            (
                "[{\"ID\":\"a\",\"Addr\":\"h\",\n\"PowerCommand\":\"pdu 7\"}]",
                r#"line 2, field "PowerCommand": expected an argument vector like ["program", "argument"], found the text "pdu 7" (it is never run by a shell)"#,
            ),
            (
                "[{\"ID\":\"a\",\"Addr\":\"h\",\"RebootCommand\":[]}]",
                r#"line 1, field "RebootCommand": expected an argument vector like ["program", "argument"], found no program in it"#,
            ),
            (
                "[{\"ID\":\"a\",\"Addr\":\"h\",\"RebootCommand\":[\"a\",1]}]",
                r#"line 1, field "RebootCommand": expected an argument vector like ["program", "argument"], found 1 in it"#,
            ),
            (
                "[{\"ID\":\"a\",\"Addr\":\"h\",\"HostKey\":\"ssh-ed25519\"}]",
                "line 1, field \"HostKey\": expected a line of ssh-keyscan without its host, like \"ssh-ed25519 AAAA…\", found 1 words",
            ),
            (
                "[{\"ID\":\"a\",\"Addr\":\"h\",\"User\":\"a b\"}]",
                r#"line 1, field "User": expected a user's name, found "a b""#,
            ),
            ("[\n7]", "line 2: expected an object for each device, found 7"),
            ("[null]", "line 1: expected an object for each device, found null"),
            ("{}", "line 1: expected a JSON array of devices, found an object"),
            ("[\n{\"ID\":\"a\",]", "line 2: this is not JSON: key must be a string (column 11)"),
            ("", "line 1: this is not JSON: EOF while parsing a value (column 0)"),
        ];
        for (text, sentence) in cases {
            assert_eq!(parse(text).unwrap_err().to_string(), sentence, "{text}");
        }
    }

    proptest! {
        #[test]
        fn parser_never_panics(text in any::<String>()) {
            let _ = parse(&text);
        }

        #[test]
        fn truncated_list_is_an_error(cut in 0..DEVICE_LIST.len()) {
            prop_assert!(parse(&DEVICE_LIST[..cut]).is_err());
        }
    }
}
