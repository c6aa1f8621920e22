//! What a call costs at the most that needs no credential.
//!
//! Reflection is a stream in both directions: with one call, anybody could ask for ever. So the request of
//! such a call has a place among those there may be, ends after a while and when the server does, and what
//! it asks is counted as calls of its source are. Where a request ends, so does its answer.

use std::time::Duration;

use axum::body::Body;
use futures::StreamExt as _;
use tokio_util::sync::CancellationToken;

use crate::server::api::listener::Place;

/// How long such a call may ask.
const LIFETIME: Duration = Duration::from_secs(30);
/// So many bytes, or what of them comes at once, count as a call: about what one question has.
const QUESTION: usize = 32;

/// A request of such a call; it is cut short where `hears` says no more.
pub(super) fn bounded(
    request: Body,
    place: Place,
    stop: CancellationToken,
    hears: impl Fn() -> bool + Send + 'static,
) -> Body {
    let over = async move { stop.run_until_cancelled(tokio::time::sleep(LIFETIME)).await };
    let asked = request.into_data_stream().take_until(Box::pin(over)).take_while(move |chunk| {
        // Given back when the service has read the request, or has dropped it.
        let _held = &place;
        let questions = chunk.as_ref().map_or(0, |chunk| chunk.len().div_ceil(QUESTION));
        std::future::ready((0..questions).all(|_| hears()))
    });
    Body::from_stream(asked)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::body::Bytes;

    use super::*;
    use crate::server::api::listener::Places;

    fn endless() -> Body {
        let begun = futures::stream::iter(["12345"; 3].map(Ok::<_, std::io::Error>));
        Body::from_stream(begun.chain(futures::stream::pending()))
    }

    #[tokio::test]
    async fn request_ends_with_the_server_and_gives_its_place_back() {
        let places = Places::new(1);
        let place = places.take([1; 32]).unwrap();
        let stop = CancellationToken::new();
        let mut request = bounded(endless(), place, stop.clone(), || true).into_data_stream();
        for _ in 0..3 {
            assert_eq!(request.next().await.unwrap().unwrap(), Bytes::from("12345"));
        }
        assert!(places.take([2; 32]).is_none());
        stop.cancel();
        assert!(request.next().await.is_none());
        drop(request);
        assert!(places.take([2; 32]).is_some());
    }

    #[tokio::test]
    async fn questions_are_counted() {
        let heard = Arc::new(AtomicUsize::new(0));
        let place = Places::new(1).take([1; 32]).unwrap();
        let counted = heard.clone();
        let hears = move || counted.fetch_add(1, Ordering::Relaxed) < 2;
        let request = bounded(endless(), place, CancellationToken::new(), hears).into_data_stream();
        assert_eq!(request.count().await, 2, "the third is one too many");
        assert_eq!(heard.load(Ordering::Relaxed), 3);
    }
}
