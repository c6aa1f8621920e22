//! JSON transcoding of the gRPC API, with server-sent events: `POST /api/PACKAGE.SERVICE/METHOD`.
//!
//! A request in JSON (ProtoJSON, see protobuf.dev) is converted by the descriptors into the gRPC call, and passes
//! through the same authentication to the same service. The response is converted to JSON, and a stream to server-sent
//! events. No code is written per call, so the two APIs cannot differ. A call is authenticated by its headers before
//! its body is read, so a client without a credential cannot make us buffer anything.
//!
//! A request must have `content-type: application/json`. A foreign web page cannot make a browser send that without a
//! CORS preflight, and a browser may have a client certificate.

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

use crate::api::api_error::{error_status, internal_status, invalid_argument};
use crate::api::error_json::{error_json, http_code};
use crate::api::listener::auth::{AuthLayer, peer_of};
use crate::api::services::request_limit;

/// Longest wait for the start of a response. It is below the server's own limit for every call, whose error a JSON
/// client could not read.
const CALL_TIMEOUT: Duration = Duration::from_secs(25);
/// Largest message of a response.
const RESPONSE_LIMIT: usize = 16 << 20;
/// The length of a message, and the byte before it that marks compression.
const FRAME_HEADER_BYTES: usize = 5;

/// Converts JSON calls into gRPC calls; cheap to clone.
#[derive(Clone)]
pub struct Transcoder {
    auth: Arc<AuthLayer>,
    /// The services without the authentication layer before them.
    grpc: Router,
    methods: Arc<HashMap<String, MethodDescriptor>>,
}

impl Transcoder {
    /// Creates the transcoder of `descriptors` for the services of `grpc`, with the authentication of `auth`.
    #[must_use]
    pub fn new(descriptors: &DescriptorPool, auth: Arc<AuthLayer>, grpc: Router) -> Self {
        let methods = descriptors.services().flat_map(|service| {
            let name = service.full_name().to_owned();
            service
                .methods()
                .filter(|method| !method.is_client_streaming())
                .map(|method| (format!("{name}/{}", method.name()), method))
                .collect::<Vec<_>>()
        });
        Self { auth, grpc, methods: Arc::new(methods.collect()) }
    }
}

/// Handles a call in JSON.
pub async fn handle_json_call(
    State(transcoder): State<Transcoder>,
    Path(rpc): Path<String>,
    request: Request,
) -> Response {
    let response = tokio::time::timeout(CALL_TIMEOUT, transcoder.transcode_call(&rpc, request)).await;
    let late = |_| {
        let text = "this took too long; an order may have been carried out, and the same one with the same idempotency \
                    key says so";
        Err(error_status(Code::DeadlineExceeded, "CALL_TIMEOUT", text))
    };
    response.unwrap_or_else(late).unwrap_or_else(|status| error_response(&status))
}

impl Transcoder {
    async fn transcode_call(mut self, rpc: &str, request: Request) -> Result<Response, Status> {
        let (parts, body) = request.into_parts();
        let peer = peer_of(&parts.extensions)?;
        self.auth.check_source_rate(&peer)?;
        let method = self.methods.get(rpc).cloned().ok_or_else(|| {
            error_status(
                Code::NotFound,
                "UNKNOWN_RPC",
                format!("there is no call {rpc}; /openapi.json lists them"),
            )
        })?;
        let caller = self.auth.admit_call(rpc, &parts.headers, &peer).await?;
        if !is_json(&parts.headers) {
            return Err(invalid_argument(
                "content-type",
                "the request must be JSON: send `content-type: application/json`",
            ));
        }
        let limit = request_limit(rpc);
        let body = axum::body::to_bytes(body, limit).await.map_err(|_| {
            invalid_argument("body", format!("the request is longer than {limit} bytes, or was cut off"))
        })?;
        let message = parse_request(method.input(), &body)?;
        let mut call = Request::new(Body::from(encode_frame(&message.encode_to_vec())));
        *call.method_mut() = axum::http::Method::POST;
        *call.uri_mut() =
            format!("/{rpc}").parse().map_err(|_| invalid_argument("path", "the path is none"))?;
        let headers = call.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        call.extensions_mut().insert(peer);
        if let Some(caller) = caller {
            call.extensions_mut().insert(caller);
        }
        let Ok(response): Result<Response, Infallible> = self.grpc.call(call).await;
        if let Some(status) =
            Status::from_header_map(response.headers()).filter(|status| status.code() != Code::Ok)
        {
            return Err(status);
        }
        let answers = ResponseMessages {
            body: response.into_body(),
            buffer: BytesMut::new(),
            descriptor: method.output(),
        };
        if method.is_server_streaming() { Ok(event_stream(answers)) } else { unary_response(answers).await }
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let text = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    text.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}

/// Parses a request; an empty body is an empty message.
fn parse_request(of: MessageDescriptor, body: &[u8]) -> Result<DynamicMessage, Status> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(DynamicMessage::new(of));
    }
    let mut json = serde_json::Deserializer::from_slice(body);
    let options = DeserializeOptions::new();
    let message = DynamicMessage::deserialize_with_options(of, &mut json, &options)
        .and_then(|message| json.end().map(|()| message));
    message.map_err(|error| {
        invalid_argument("body", format!("the request is not as the call wants it: {error}"))
    })
}

fn encode_frame(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::with_capacity(FRAME_HEADER_BYTES + message.len());
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    framed.put_slice(message);
    framed.freeze()
}

/// The messages of a response.
struct ResponseMessages {
    body: Body,
    buffer: BytesMut,
    descriptor: MessageDescriptor,
}

impl ResponseMessages {
    /// The next message as JSON; `None` at the end.
    async fn next_message(&mut self) -> Result<Option<Value>, Status> {
        let broken = |text: &str| internal_status("an answer could not be made JSON", &text);
        loop {
            if let Some(mut head) = self.buffer.get(..FRAME_HEADER_BYTES) {
                let compressed = head.get_u8() != 0;
                let length = usize::try_from(head.get_u32()).unwrap_or(usize::MAX);
                if compressed || length > RESPONSE_LIMIT {
                    return Err(broken("compressed, or too long"));
                }
                if self.buffer.len() >= FRAME_HEADER_BYTES + length {
                    self.buffer.advance(FRAME_HEADER_BYTES);
                    let message =
                        DynamicMessage::decode(self.descriptor.clone(), self.buffer.split_to(length))
                            .map_err(|error| broken(&error.to_string()))?;
                    return message_to_json(&message).map(Some).map_err(|error| broken(&error.to_string()));
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

fn message_to_json(message: &DynamicMessage) -> Result<Value, serde_json::Error> {
    // Fields with default values are included, so that a program finds each field where the document describes it.
    let options = SerializeOptions::new().skip_default_fields(false);
    message.serialize_with_options(serde_json::value::Serializer, &options)
}

async fn unary_response(mut answers: ResponseMessages) -> Result<Response, Status> {
    let answer = answers.next_message().await?.unwrap_or_else(|| json!({}));
    // An error after the message arrives in the trailers.
    answers.next_message().await?;
    Ok(axum::Json(answer).into_response())
}

/// A stream as server-sent events: one event for each message. An early end is an event with the name `error`.
fn event_stream(answers: ResponseMessages) -> Response {
    let stream = futures::stream::unfold(Some(answers), |answers| async {
        let mut answers = answers?;
        match answers.next_message().await {
            Ok(Some(answer)) => Some((Ok::<_, Infallible>(format!("data: {answer}\n\n")), Some(answers))),
            Ok(None) => None,
            Err(status) => Some((Ok(format!("event: error\ndata: {}\n\n", error_json(&status))), None)),
        }
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
    ];
    (headers, Body::from_stream(stream)).into_response()
}

/// An error response as JSON.
pub(super) fn error_response(status: &Status) -> Response {
    let mut response = (http_status(status.code()), axum::Json(error_json(status))).into_response();
    if status.code() == Code::Unauthenticated {
        // RFC 9110, 15.5.2: a 401 response must name the authentication scheme.
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if let Some(delay) = status.get_details_retry_info().and_then(|retry| retry.retry_delay) {
        response.headers_mut().insert(header::RETRY_AFTER, delay.as_secs().max(1).into());
    }
    response
}

/// The HTTP status for a gRPC code.
fn http_status(code: Code) -> StatusCode {
    StatusCode::from_u16(http_code(code)).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}
