//! Limits on calls that need no credential (reflection, health).
//!
//! Reflection is a stream in both directions, so one call could send queries for ever. Therefore the request stream of
//! a public call takes one of a bounded number of slots, ends after a while and when the server stops, and its queries
//! count towards the rate of its source. When the request stream ends, so does the response.

use std::time::Duration;

use axum::body::Body;
use futures::StreamExt as _;
use tokio_util::sync::CancellationToken;

use crate::api::listener::source_limits::SourcePermit;

/// Longest duration of the request stream.
const MAX_CALL_DURATION: Duration = Duration::from_secs(30);
/// Bytes that count as one call, about the size of one query. Each received chunk is rounded up.
const BYTES_PER_CALL: usize = 32;

/// Bounds the request body of a public call. The body ends when `is_allowed` returns false.
pub(super) fn bounded_body(
    request: Body,
    permit: SourcePermit,
    stop: CancellationToken,
    is_allowed: impl Fn() -> bool + Send + 'static,
) -> Body {
    let over = async move { stop.run_until_cancelled(tokio::time::sleep(MAX_CALL_DURATION)).await };
    let stream = request.into_data_stream().take_until(Box::pin(over)).take_while(move |chunk| {
        // Released when the service has read or dropped the request.
        let _permit = &permit;
        let calls = chunk.as_ref().map_or(0, |chunk| chunk.len().div_ceil(BYTES_PER_CALL));
        std::future::ready((0..calls).all(|_| is_allowed()))
    });
    Body::from_stream(stream)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::body::Bytes;

    use super::*;
    use crate::api::listener::source_limits::SourceLimiter;

    fn endless() -> Body {
        let begun = futures::stream::iter(["12345"; 3].map(Ok::<_, std::io::Error>));
        Body::from_stream(begun.chain(futures::stream::pending()))
    }

    #[tokio::test]
    async fn request_ends_with_the_server_and_releases_its_slot() {
        let limiter = SourceLimiter::new(1);
        let permit = limiter.try_acquire([1; 32]).unwrap();
        let stop = CancellationToken::new();
        let mut request = bounded_body(endless(), permit, stop.clone(), || true).into_data_stream();
        for _ in 0..3 {
            assert_eq!(request.next().await.unwrap().unwrap(), Bytes::from("12345"));
        }
        assert!(limiter.try_acquire([2; 32]).is_none());
        stop.cancel();
        assert!(request.next().await.is_none());
        drop(request);
        assert!(limiter.try_acquire([2; 32]).is_some());
    }

    #[tokio::test]
    async fn request_bytes_count_as_calls() {
        let count = Arc::new(AtomicUsize::new(0));
        let permit = SourceLimiter::new(1).try_acquire([1; 32]).unwrap();
        let counted = count.clone();
        let is_allowed = move || counted.fetch_add(1, Ordering::Relaxed) < 2;
        let request =
            bounded_body(endless(), permit, CancellationToken::new(), is_allowed).into_data_stream();
        assert_eq!(request.count().await, 2, "the third is one too many");
        assert_eq!(count.load(Ordering::Relaxed), 3);
    }
}
