//! An object of the API as JSON.
//!
//! A program that reads `-o json` gets what the API sends as JSON: the same names, the same nesting, and 64-bit integers
//! as text. So the message is converted by its descriptor, as the server does it. A table needs no JSON, and a list may
//! be long, so a message stays in its short binary form until it is printed as JSON.

use std::sync::LazyLock;

use prost::{Message, Name};
use prost_reflect::{DescriptorPool, DynamicMessage, SerializeOptions};
use serde::Serialize;
use serde_json::Value;

use crate::error::CliError;
use crate::output::format_json;
use proto::fleet::DESCRIPTORS;

/// Package of the messages.
const PACKAGE: &str = "shepherd.fleet.v1";

static DESCRIPTOR_POOL: LazyLock<Result<DescriptorPool, String>> =
    LazyLock::new(|| DescriptorPool::decode(DESCRIPTORS).map_err(|error| error.to_string()));

/// An object, or a response, in a form that [`ObjectDocument::to_json`] converts.
#[derive(Clone, Debug)]
pub enum ObjectDocument {
    /// A message of the API.
    Message {
        /// Name of the message in its package.
        name: &'static str,
        /// The message as Protobuf encodes it.
        bytes: Vec<u8>,
    },
    /// A value that the API does not have, such as a context.
    Local(Value),
}

impl ObjectDocument {
    /// The document of a message of the fleet API.
    #[must_use]
    pub fn of_message<M: Message + Name>(message: &M) -> Self {
        Self::Message { name: M::NAME, bytes: message.encode_to_vec() }
    }

    /// The document of a value that the API does not have.
    pub fn of_value(value: &impl Serialize) -> Result<Self, CliError> {
        Ok(Self::Local(serde_json::to_value(value)?))
    }

    /// The document as JSON. Fields with default values are included, as in the responses of the API.
    pub fn to_json(&self) -> Result<Value, CliError> {
        let (name, bytes) = match self {
            Self::Local(value) => return Ok(value.clone()),
            Self::Message { name, bytes } => (name, bytes),
        };
        let failed = |reason: &str| CliError::Failed(format!("cannot write {name} as JSON: {reason}"));
        let pool = match &*DESCRIPTOR_POOL {
            Ok(pool) => pool,
            Err(reason) => return Err(failed(reason)),
        };
        let descriptor = pool
            .get_message_by_name(&format!("{PACKAGE}.{name}"))
            .ok_or_else(|| failed("this release does not know the message"))?;
        let message = DynamicMessage::decode(descriptor, bytes.as_slice())
            .map_err(|error| failed(&error.to_string()))?;
        let options = SerializeOptions::new().skip_default_fields(false);
        Ok(message.serialize_with_options(serde_json::value::Serializer, &options)?)
    }
}

/// A message of the fleet API as indented JSON, for commands that print one response.
pub(crate) fn format_message<M: Message + Name>(message: &M) -> Result<String, CliError> {
    format_json(&ObjectDocument::of_message(message).to_json()?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use proto::fleet::v1;

    #[test]
    fn message_is_the_json_of_the_api() {
        let session = v1::Session {
            session: "s".to_owned(),
            component: "updater".to_owned(),
            pid: Some(7),
            started_at: Some(prost_types::Timestamp { seconds: 1, nanos: 0 }),
            ..v1::Session::default()
        };
        let json = ObjectDocument::of_message(&session).to_json().unwrap();
        assert_eq!((&json["pid"], &json["workItems"]), (&json!("7"), &json!("0")), "{json}");
        assert_eq!(json["startedAt"], "1970-01-01T00:00:01Z");
        assert_eq!(json["host"], Value::Null, "it is absent");
    }

    #[test]
    fn value_stays_as_it_is() {
        let value = json!({ "name": "prod" });
        assert_eq!(ObjectDocument::of_value(&value).unwrap().to_json().unwrap(), value);
    }
}
