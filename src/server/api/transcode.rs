//! The same calls as JSON: `POST /api/PACKAGE.SERVICE/METHOD`.
//!
//! A request in JSON (ProtoJSON, as protobuf.dev says) becomes the gRPC call that it means, by the
//! contracts' descriptors, and goes through the same door to the same service; the answer comes back as
//! JSON, a stream as server-sent events. Nothing is written per call, so the two cannot differ. It passes
//! the door by its headers, before its body is read: whoever has no credential makes us keep nothing.
//!
//! A request must say `content-type: application/json`: a page of somebody else's cannot make a browser
//! send that without asking first, and a browser may have a client certificate.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use bytes::{Buf as _, BufMut as _, BytesMut};
use prost::Message as _;
use prost_reflect::{
    DescriptorPool, DeserializeOptions, DynamicMessage, MessageDescriptor, MethodDescriptor, SerializeOptions,
};
use serde_json::{Value, json};
use tonic::codegen::{Body as _, Service as _};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::server::api::artefacts::{PUT, PUT_LIMIT};
use crate::server::api::door::{Door, peer};
use crate::server::api::refusal::{code_name, refused, wrong};

/// Largest request of most calls.
pub const REQUEST_LIMIT: usize = 64 << 10;
/// Longest time that an answer may take to begin; below what the server gives every call, whose end of it
/// is not one that a caller in JSON can read.
const CALL_LIMIT: Duration = Duration::from_secs(25);
/// Largest message of an answer.
const ANSWER_LIMIT: usize = 16 << 20;
/// A message's length with the byte before it that says whether it is compressed.
const FRAME_HEAD: usize = 5;

/// Turns JSON into calls; cheap to clone.
#[derive(Clone)]
pub struct Transcoder {
    door: Arc<Door>,
    /// The services behind that door.
    grpc: Router,
    methods: Arc<HashMap<String, MethodDescriptor>>,
}

impl Transcoder {
    /// For the services of `contracts`, which `grpc` answers behind `door`.
    #[must_use]
    pub fn new(contracts: &DescriptorPool, door: Arc<Door>, grpc: Router) -> Self {
        let methods = contracts.services().flat_map(|service| {
            let name = service.full_name().to_owned();
            service
                .methods()
                .filter(|method| !method.is_client_streaming())
                .map(|method| (format!("{name}/{}", method.name()), method))
                .collect::<Vec<_>>()
        });
        Self { door, grpc, methods: Arc::new(methods.collect()) }
    }
}

/// Answers a call in JSON.
pub async fn call(
    State(transcoder): State<Transcoder>,
    Path(rpc): Path<String>,
    request: Request,
) -> Response {
    let answered = tokio::time::timeout(CALL_LIMIT, transcoder.call(&rpc, request)).await;
    let late = |_| {
        let said = "this took too long; an order may have been carried out, and the same one with the same idempotency \
                    key says so";
        Err(refused(Code::DeadlineExceeded, "CALL_TIMEOUT", said))
    };
    answered.unwrap_or_else(late).unwrap_or_else(|status| refusal(&status))
}

impl Transcoder {
    async fn call(mut self, rpc: &str, request: Request) -> Result<Response, Status> {
        let (parts, body) = request.into_parts();
        let peer = peer(&parts.extensions)?;
        self.door.hears(&peer)?;
        let method = self.methods.get(rpc).cloned().ok_or_else(|| {
            refused(
                Code::NotFound,
                "UNKNOWN_RPC",
                format!("there is no call {rpc}; /openapi.json lists them"),
            )
        })?;
        let caller = self.door.admit(rpc, &parts.headers, &peer).await?;
        if !says_json(&parts.headers) {
            return Err(wrong(
                "content-type",
                "the request must be JSON: send `content-type: application/json`",
            ));
        }
        let limit = if rpc == PUT { PUT_LIMIT } else { REQUEST_LIMIT };
        let body = axum::body::to_bytes(body, limit).await.map_err(|_| {
            wrong("body", format!("the request is longer than {limit} bytes, or was cut off"))
        })?;
        let message = read(method.input(), &body)?;
        let mut call = Request::new(Body::from(frame(&message.encode_to_vec())));
        *call.method_mut() = axum::http::Method::POST;
        *call.uri_mut() = format!("/{rpc}").parse().map_err(|_| wrong("path", "the path is none"))?;
        let headers = call.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        call.extensions_mut().insert(peer);
        if let Some(caller) = caller {
            call.extensions_mut().insert(caller);
        }
        let Ok(answered): Result<Response, Infallible> = self.grpc.call(call).await;
        if let Some(status) =
            Status::from_header_map(answered.headers()).filter(|status| status.code() != Code::Ok)
        {
            return Err(status);
        }
        let answers = Answers { body: answered.into_body(), buffer: BytesMut::new(), of: method.output() };
        if method.is_server_streaming() { Ok(events(answers)) } else { one(answers).await }
    }
}

fn says_json(headers: &HeaderMap) -> bool {
    let said = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    said.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}

/// Reads a request; nothing at all is an empty one.
fn read(of: MessageDescriptor, body: &[u8]) -> Result<DynamicMessage, Status> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(DynamicMessage::new(of));
    }
    let mut json = serde_json::Deserializer::from_slice(body);
    let options = DeserializeOptions::new();
    let message = DynamicMessage::deserialize_with_options(of, &mut json, &options)
        .and_then(|message| json.end().map(|()| message));
    message.map_err(|error| wrong("body", format!("the request is not as the call wants it: {error}")))
}

fn frame(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::with_capacity(FRAME_HEAD + message.len());
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    framed.put_slice(message);
    framed.freeze()
}

/// The messages of an answer.
struct Answers {
    body: Body,
    buffer: BytesMut,
    of: MessageDescriptor,
}

impl Answers {
    /// The next message as JSON; `None` at the end.
    async fn next(&mut self) -> Result<Option<Value>, Status> {
        let broken = |said: &str| {
            tracing::error!(said, "an answer could not be made JSON");
            refused(Code::Internal, "INTERNAL", "this shepherd failed to answer; its log says why")
        };
        loop {
            if let Some(mut head) = self.buffer.get(..FRAME_HEAD) {
                let compressed = head.get_u8() != 0;
                let length = usize::try_from(head.get_u32()).unwrap_or(usize::MAX);
                if compressed || length > ANSWER_LIMIT {
                    return Err(broken("compressed, or too long"));
                }
                if self.buffer.len() >= FRAME_HEAD + length {
                    self.buffer.advance(FRAME_HEAD);
                    let message = DynamicMessage::decode(self.of.clone(), self.buffer.split_to(length))
                        .map_err(|error| broken(&error.to_string()))?;
                    return write(&message).map(Some).map_err(|error| broken(&error.to_string()));
                }
            }
            let frame = poll_fn(|context| Pin::new(&mut self.body).poll_frame(context)).await;
            match frame {
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(broken("it ends in a message")),
                Some(Err(error)) => return Err(broken(&error.to_string())),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.buffer.put(data),
                    Err(frame) => {
                        let status = frame.trailers_ref().and_then(Status::from_header_map);
                        if let Some(status) = status.filter(|status| status.code() != Code::Ok) {
                            return Err(status);
                        }
                    }
                },
            }
        }
    }
}

fn write(message: &DynamicMessage) -> Result<Value, serde_json::Error> {
    // What is empty is said, so that a program finds each field where the document says that it is.
    let options = SerializeOptions::new().skip_default_fields(false);
    message.serialize_with_options(serde_json::value::Serializer, &options)
}

async fn one(mut answers: Answers) -> Result<Response, Status> {
    let answer = answers.next().await?.unwrap_or_else(|| json!({}));
    // What failed after the message says so at the end.
    answers.next().await?;
    Ok(axum::Json(answer).into_response())
}

/// A stream as server-sent events: each message is one, and what ends it early is one of the name `error`.
fn events(answers: Answers) -> Response {
    let stream = futures::stream::unfold(Some(answers), |answers| async {
        let mut answers = answers?;
        match answers.next().await {
            Ok(Some(answer)) => Some((Ok::<_, Infallible>(format!("data: {answer}\n\n")), Some(answers))),
            Ok(None) => None,
            Err(status) => Some((Ok(format!("event: error\ndata: {}\n\n", described(&status))), None)),
        }
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ];
    (headers, Body::from_stream(stream)).into_response()
}

/// A refusal as JSON.
pub(super) fn refusal(status: &Status) -> Response {
    let mut response = (http_code(status.code()), axum::Json(described(status))).into_response();
    if status.code() == Code::Unauthenticated {
        // RFC 9110, 15.5.2: whoever is not let in is told how to be.
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if let Some(delay) = status.get_details_retry_info().and_then(|retry| retry.retry_delay) {
        response.headers_mut().insert(header::RETRY_AFTER, delay.as_secs().max(1).into());
    }
    response
}

/// An error as JSON, in the form of Google's APIs.
fn described(status: &Status) -> Value {
    let found = status.get_error_details();
    let mut details = Vec::new();
    if let Some(info) = found.error_info() {
        details.push(json!({
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": info.reason, "domain": info.domain, "metadata": info.metadata,
        }));
    }
    if let Some(wrong) = found.bad_request() {
        let fields: Vec<Value> = wrong
            .field_violations
            .iter()
            .map(|one| json!({ "field": one.field, "description": one.description }))
            .collect();
        details
            .push(json!({ "@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": fields }));
    }
    if let Some(retry) = found.retry_info() {
        let delay = retry.retry_delay.unwrap_or_default().as_secs_f64();
        details.push(
            json!({ "@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": format!("{delay}s") }),
        );
    }
    if let Some(resource) = found.resource_info() {
        details.push(json!({
            "@type": "type.googleapis.com/google.rpc.ResourceInfo",
            "resourceType": resource.resource_type, "resourceName": resource.resource_name,
            "description": resource.description,
        }));
    }
    json!({ "error": {
        "code": http_code(status.code()).as_u16(),
        "status": code_name(status.code()),
        "message": status.message(),
        "details": details,
    }})
}

/// The code of HTTP for one of gRPC, as googleapis' google/rpc/code.proto has them.
fn http_code(code: Code) -> StatusCode {
    match code {
        Code::Ok => StatusCode::OK,
        Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => StatusCode::BAD_REQUEST,
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::Aborted | Code::AlreadyExists => StatusCode::CONFLICT,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::Cancelled => StatusCode::from_u16(499).unwrap_or(StatusCode::REQUEST_TIMEOUT),
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
        Code::Unknown | Code::Internal | Code::DataLoss => StatusCode::INTERNAL_SERVER_ERROR,
    }
}
