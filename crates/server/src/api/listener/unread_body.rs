//! Announces over HTTP/1.1 that a connection ends because a request body was not read.
//!
//! A call that is rejected by its headers leaves its body unread. The server then closes the connection, as the rest of
//! the body would be read as the next request. Without `connection: close`, the client would send its next call over
//! that connection and lose it. HTTP/2 ends only the stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderValue, Version, header};
use axum::middleware::Next;
use axum::response::Response;
use futures::{StreamExt as _, stream};
use tonic::codegen::Body as _;

/// Adds `connection: close` to a response that is sent before the body of its request was read to the end.
pub(super) async fn announce_close(request: Request, next: Next) -> Response {
    if request.version() >= Version::HTTP_2 || request.body().is_end_stream() {
        return next.run(request).await;
    }
    let ended = Arc::new(AtomicBool::new(false));
    let mark = ended.clone();
    let request = request.map(|body| {
        // Polled only after all data, so it marks the end and yields nothing.
        let end =
            stream::once(async move { mark.store(true, Ordering::Release) }).filter_map(async |()| None);
        Body::from_stream(body.into_data_stream().chain(end))
    });
    let mut response = next.run(request).await;
    if !ended.load(Ordering::Acquire) {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}
