//! Decode the Protobuf types that messages of the fleet API share: timestamps, identifiers, names, structs.

use prost_types::value::Kind;
use serde_json::Value;
use uuid::Uuid;

use crate::error::CliError;
use model::machine_view::MachineName;
use model::phase::Phase;
use model::process::Process;
use model::time::Timestamp;
use proto::fleet::v1;

/// Decodes a Protobuf timestamp; `None` if it is out of range.
#[must_use]
pub fn decode_timestamp(time: prost_types::Timestamp) -> Option<Timestamp> {
    Timestamp::from_timestamp(time.seconds, u32::try_from(time.nanos).ok()?)
}

/// The error for a field that is missing or malformed in an API response.
#[must_use]
pub fn missing_field(what: &str) -> CliError {
    CliError::Failed(format!("the response lacks {what}; is the server of another release?"))
}

/// Decodes a timestamp that the response must contain; `what` names it in the error.
pub fn require_timestamp(time: Option<prost_types::Timestamp>, what: &str) -> Result<Timestamp, CliError> {
    time.and_then(decode_timestamp).ok_or_else(|| missing_field(what))
}

/// Parses a UUID of a response; `what` names it in the error.
pub fn parse_uuid(text: &str, what: &str) -> Result<Uuid, CliError> {
    Uuid::try_parse(text).map_err(|_| missing_field(what))
}

/// Decodes the names of a machine.
pub fn decode_machine_name(name: Option<v1::MachineName>) -> Result<MachineName, CliError> {
    let name = name.ok_or_else(|| missing_field("a machine's name"))?;
    Ok(MachineName {
        machine: parse_uuid(&name.machine, "a machine's id")?,
        provider: name.provider,
        provider_id: name.provider_id,
    })
}

/// The static name of a phase, or a placeholder for a phase of another release.
#[must_use]
pub fn phase_name(text: &str) -> &'static str {
    Phase::ALL.into_iter().map(Phase::as_str).find(|known| *known == text).unwrap_or("(of another release)")
}

/// The static name of a process, or a placeholder for a process of another release.
#[must_use]
pub fn process_name(text: &str) -> &'static str {
    Process::ALL
        .into_iter()
        .map(Process::as_str)
        .find(|known| *known == text)
        .unwrap_or("(of another release)")
}

/// Decodes a Protobuf struct as a JSON object. Protobuf has only doubles, so a number without a fraction becomes an
/// integer.
#[must_use]
pub fn decode_struct(reported: prost_types::Struct) -> Value {
    Value::Object(reported.fields.into_iter().map(|(key, value)| (key, decode_value(value))).collect())
}

fn decode_value(value: prost_types::Value) -> Value {
    match value.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::BoolValue(truth)) => Value::Bool(truth),
        Some(Kind::StringValue(text)) => Value::String(text),
        Some(Kind::NumberValue(number)) => to_integer(number)
            .or_else(|| serde_json::Number::from_f64(number).map(Value::Number))
            .unwrap_or(Value::Null),
        Some(Kind::ListValue(list)) => Value::Array(list.values.into_iter().map(decode_value).collect()),
        Some(Kind::StructValue(object)) => decode_struct(object),
    }
}

/// A number without a fraction as an integer, within the range in which a double represents every integer exactly.
fn to_integer(number: f64) -> Option<Value> {
    const MAX_SAFE_INTEGER: f64 = 9_007_199_254_740_991.0;
    if number.fract() != 0.0 || number.abs() > MAX_SAFE_INTEGER {
        return None;
    }
    format!("{number:.0}").parse::<i64>().ok().map(Value::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The server's encoder, repeated here because `cli` does not import the server.
    fn encode_value(json: &Value) -> prost_types::Value {
        let kind = match json {
            Value::Null => Kind::NullValue(0),
            Value::Bool(truth) => Kind::BoolValue(*truth),
            Value::Number(number) => Kind::NumberValue(number.as_f64().unwrap()),
            Value::String(text) => Kind::StringValue(text.clone()),
            Value::Array(values) => {
                Kind::ListValue(prost_types::ListValue { values: values.iter().map(encode_value).collect() })
            }
            Value::Object(object) => Kind::StructValue(prost_types::Struct {
                fields: object.iter().map(|(key, json)| (key.clone(), encode_value(json))).collect(),
            }),
        };
        prost_types::Value { kind: Some(kind) }
    }

    #[test]
    fn policy_round_trips_through_the_api() {
        use model::policy::Policy;
        let written = serde_json::to_value(Policy::default()).unwrap();
        let read: Policy = serde_json::from_value(decode_value(encode_value(&written))).unwrap();
        assert_eq!(read, Policy::default());
        for (number, expected) in
            [(3.0, "3"), (0.2, "0.2"), (-1.0, "-1"), (1e300, "1e+300"), (f64::NAN, "null")]
        {
            let value = decode_value(prost_types::Value { kind: Some(Kind::NumberValue(number)) });
            assert_eq!(value.to_string(), expected);
        }
    }
}
