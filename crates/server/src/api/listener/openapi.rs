//! OpenAPI document, generated from the proto descriptors and their comments.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse as _, Response};
use prost_reflect::{Cardinality, DescriptorPool, FieldDescriptor, FileDescriptor, Kind, MessageDescriptor};
use serde_json::{Map, Value, json};

use crate::api::listener::auth::{AuthLayer, peer_of};
use crate::api::listener::transcode::error_response;

/// The generated document; cheap to clone.
#[derive(Clone)]
pub struct OpenApiState {
    auth: Arc<AuthLayer>,
    document: Bytes,
}

impl OpenApiState {
    /// Generates the document of `descriptors`. `auth` limits how often a source may fetch it.
    #[must_use]
    pub fn new(descriptors: &DescriptorPool, auth: Arc<AuthLayer>) -> Self {
        Self { auth, document: build_document(descriptors).to_string().into() }
    }
}

/// Serves the document as JSON, within the rate of the source.
pub async fn serve_document(State(api_state): State<OpenApiState>, request: Request) -> Response {
    match peer_of(request.extensions()).and_then(|peer| api_state.auth.check_source_rate(&peer)) {
        Ok(()) => {
            let json = HeaderValue::from_static("application/json");
            ([(header::CONTENT_TYPE, json)], api_state.document).into_response()
        }
        Err(status) => error_response(&status),
    }
}

/// Generates the document from the descriptors.
#[must_use]
pub fn build_document(descriptors: &DescriptorPool) -> Value {
    let (mut paths, mut tags) = (Map::new(), Vec::new());
    for service in descriptors.services() {
        let comment = leading_comment(&service.parent_file(), service.path());
        tags.push(json!({ "name": service.name(), "description": comment }));
        for method in service.methods().filter(|method| !method.is_client_streaming()) {
            let text = self::leading_comment(&service.parent_file(), method.path());
            let answer = schema_reference(&method.output());
            let answer = if method.is_server_streaming() {
                json!({ "text/event-stream": { "schema": {
                    "type": "string",
                    "description": format!(
                        "Server-sent events. Each `data` is a {}; an event named `error` ends the stream early.",
                        method.output().name()
                    ),
                }}})
            } else {
                json!({ "application/json": { "schema": answer } })
            };
            let operation = json!({
                "operationId": format!("{}_{}", service.name(), method.name()),
                "tags": [service.name()],
                "summary": text,
                "requestBody": {
                    "required": true,
                    "content": { "application/json": { "schema": schema_reference(&method.input()) } },
                },
                "responses": {
                    "200": { "description": "Done.", "content": answer },
                    "default": {
                        "description": "Refused, or failed: `error.message` is a sentence for people.",
                        "content": { "application/json": { "schema": { "$ref": "#/components/schemas/Error" } } },
                    },
                },
            });
            paths.insert(
                format!("/api/{}/{}", service.full_name(), method.name()),
                json!({ "post": operation }),
            );
        }
    }
    let mut schemas = Map::new();
    for message in descriptors.all_messages().filter(is_ours) {
        schemas.insert(message.name().to_owned(), message_schema(&message));
    }
    schemas.insert("Error".to_owned(), error_schema());
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Shepherd fleet API",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "The calls of the gRPC services of the same names, as JSON.",
        },
        "security": [{ "token": [] }],
        "tags": tags,
        "paths": paths,
        "components": {
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
            "schemas": schemas,
        },
    })
}

fn is_ours(message: &MessageDescriptor) -> bool {
    message.package_name().starts_with("shepherd.") && !message.is_map_entry()
}

fn schema_reference(message: &MessageDescriptor) -> Value {
    json!({ "$ref": format!("#/components/schemas/{}", message.name()) })
}

fn message_schema(message: &MessageDescriptor) -> Value {
    let file = message.parent_file();
    let mut properties = Map::new();
    for field in message.fields() {
        let mut of_field = field_schema(&field);
        let text = leading_comment(&file, field.path());
        if let Some(object) = of_field.as_object_mut()
            && !text.is_empty()
        {
            object.insert("description".to_owned(), text.into());
        }
        properties.insert(field.json_name().to_owned(), of_field);
    }
    let mut schema = json!({ "type": "object", "properties": properties, "additionalProperties": false });
    let text = leading_comment(&file, message.path());
    if let Some(object) = schema.as_object_mut()
        && !text.is_empty()
    {
        object.insert("description".to_owned(), text.into());
    }
    schema
}

fn field_schema(field: &FieldDescriptor) -> Value {
    if let Kind::Message(message) = field.kind()
        && message.is_map_entry()
    {
        return json!({
            "type": "object",
            "additionalProperties": kind_schema(&message.map_entry_value_field().kind()),
        });
    }
    let one = kind_schema(&field.kind());
    if field.cardinality() == Cardinality::Repeated { json!({ "type": "array", "items": one }) } else { one }
}

/// Schema of a field in ProtoJSON: 64-bit integers are strings, and are accepted as numbers.
fn kind_schema(kind: &Kind) -> Value {
    match kind {
        Kind::Double | Kind::Float => json!({ "type": "number" }),
        Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => json!({ "type": "integer", "format": "int32" }),
        Kind::Uint32 | Kind::Fixed32 => json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX }),
        Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => {
            json!({ "type": "string", "format": "int64", "pattern": "^-?[0-9]{1,18}$" })
        }
        Kind::Uint64 | Kind::Fixed64 => {
            json!({ "type": "string", "format": "uint64", "pattern": "^[0-9]{1,19}$" })
        }
        Kind::Bool => json!({ "type": "boolean" }),
        Kind::String => json!({ "type": "string" }),
        Kind::Bytes => json!({ "type": "string", "contentEncoding": "base64" }),
        Kind::Enum(kind) => {
            let names: Vec<String> = kind.values().map(|value| value.name().to_owned()).collect();
            json!({ "type": "string", "enum": names })
        }
        Kind::Message(message) => match message.full_name() {
            "google.protobuf.Timestamp" => json!({ "type": ["string", "null"], "format": "date-time" }),
            "google.protobuf.Struct" => json!({ "type": ["object", "null"] }),
            _ if is_ours(message) => schema_reference(message),
            _ => json!({}),
        },
    }
}

fn error_schema() -> Value {
    json!({
        "type": "object",
        "required": ["error"],
        "properties": { "error": {
            "type": "object",
            "required": ["code", "status", "message", "details"],
            "properties": {
                "code": { "type": "integer", "description": "The code of HTTP." },
                "status": { "type": "string", "description": "The code of gRPC, as NOT_FOUND." },
                "message": { "type": "string", "description": "A sentence." },
                "details": {
                    "type": "array",
                    "items": { "type": "object" },
                    "description": "google.rpc.ErrorInfo and its like, each with its @type.",
                },
            },
        }},
    })
}

/// The comment before an element of a proto file.
fn leading_comment(file: &FileDescriptor, path: &[i32]) -> String {
    let source = file.file_descriptor_proto().source_code_info.as_ref();
    let found = source.and_then(|source| source.location.iter().find(|location| location.path == path));
    let text = found.map(prost_types::source_code_info::Location::leading_comments).unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn document_lists_every_rpc_with_its_comment() {
        let descriptors = DescriptorPool::decode(proto::fleet::DESCRIPTORS).unwrap();
        let document = build_document(&descriptors);
        let calls: usize = descriptors.services().map(|service| service.methods().len()).sum();
        assert_eq!(document["paths"].as_object().unwrap().len(), calls);
        let why = &document["paths"]["/api/shepherd.fleet.v1.Machines/Why"]["post"];
        assert_eq!(why["summary"], "Says why a machine is as it is, what it waits for, and what would help.");
        assert_eq!(
            document["components"]["schemas"]["Machine"]["properties"]["phaseSince"]["format"],
            "date-time"
        );
    }

    #[test]
    fn every_reference_resolves() {
        let descriptors = DescriptorPool::decode(proto::fleet::DESCRIPTORS).unwrap();
        let document = build_document(&descriptors);
        let text = document.to_string();
        for reference in text.split("#/components/schemas/").skip(1) {
            let name = reference.split('"').next().unwrap();
            assert!(document["components"]["schemas"].get(name).is_some(), "{name}");
        }
    }
}
