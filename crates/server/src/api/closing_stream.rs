//! Response stream that always ends with a status.
//!
//! Messages wait in a buffer until the client reads them. The end of the stream has a channel of its own, so a full
//! buffer cannot delay it. Some ends allow no further message, for example a revoked credential. Then the buffered
//! messages are dropped.

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::{mpsc, oneshot};
use tokio_stream::Stream;
use tonic::{Code, Status};

use crate::api::api_error::error_status;

/// How a stream ends.
#[derive(Debug)]
pub enum Close {
    /// Send this status next and drop the buffered messages.
    Now(Status),
    /// Send this status after the buffered messages.
    AfterDrain(Status),
    /// Send the buffered messages and end with success.
    Complete,
}

/// A stream of messages that ends with a status.
#[derive(Debug)]
pub struct ClosingStream<T> {
    messages: mpsc::Receiver<T>,
    /// Receiver of the end; `None` once the end has arrived.
    close: Option<oneshot::Receiver<Close>>,
    /// Sent once the buffer is empty.
    final_status: Option<Status>,
}

/// Creates a stream with a buffer for `capacity` messages, the sender of its messages and the sender of its end.
#[must_use]
pub fn closing_stream<T>(capacity: usize) -> (mpsc::Sender<T>, oneshot::Sender<Close>, ClosingStream<T>) {
    let (sender, receiver) = mpsc::channel(capacity);
    let (close, end) = oneshot::channel();
    (sender, close, ClosingStream { messages: receiver, close: Some(end), final_status: None })
}

impl<T> ClosingStream<T> {
    /// Records the status of the end, and accepts no more messages.
    fn finish_with(&mut self, status: Status) {
        (self.close, self.final_status) = (None, Some(status));
        self.messages.close();
    }
}

impl<T> Stream for ClosingStream<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        // The end is checked before the buffered messages.
        if let Some(end) = &mut this.close
            && let Poll::Ready(end) = Pin::new(end).poll(context)
        {
            match end {
                Ok(Close::Now(status)) => {
                    this.finish_with(status);
                    while this.messages.try_recv().is_ok() {}
                }
                Ok(Close::AfterDrain(status)) => this.finish_with(status),
                Ok(Close::Complete) => {
                    this.close = None;
                    this.messages.close();
                }
                Err(_) => {
                    this.finish_with(error_status(
                        Code::Internal,
                        "INTERNAL",
                        "this shepherd failed to go on",
                    ));
                }
            }
        }
        match this.messages.poll_recv(context) {
            Poll::Ready(Some(reported)) => Poll::Ready(Some(Ok(reported))),
            // All senders are dropped, but the end has not arrived yet.
            Poll::Ready(None) if this.close.is_some() => Poll::Pending,
            Poll::Ready(None) => Poll::Ready(this.final_status.take().map(Err)),
            Poll::Pending => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt as _;

    use super::*;

    fn close_status() -> Status {
        Status::unauthenticated("revoked")
    }

    /// Reads a stream whose buffer is full when it ends.
    async fn collect_stream(end: Close) -> Vec<Result<u8, Code>> {
        let (sender, close, stream) = closing_stream(2);
        for value in [1, 2] {
            sender.try_send(value).unwrap();
        }
        assert!(sender.try_send(3).is_err(), "the buffer is full");
        close.send(end).unwrap();
        // `sender` still exists: the end does not wait for it.
        let result = stream.map(|outcome| outcome.map_err(|status| status.code())).collect().await;
        drop(sender);
        result
    }

    #[tokio::test]
    async fn immediate_close_discards_a_full_buffer() {
        assert_eq!(collect_stream(Close::Now(close_status())).await, [Err(Code::Unauthenticated)]);
    }

    #[tokio::test]
    async fn close_after_drain_follows_the_buffered_messages() {
        let all = collect_stream(Close::AfterDrain(close_status())).await;
        assert_eq!(all, [Ok(1), Ok(2), Err(Code::Unauthenticated)]);
    }

    #[tokio::test]
    async fn complete_close_ends_after_the_buffered_messages() {
        assert_eq!(collect_stream(Close::Complete).await, [Ok(1), Ok(2)]);
    }

    #[tokio::test]
    async fn close_is_awaited_after_the_last_message() {
        let (sender, close, stream) = closing_stream::<u8>(1);
        drop(sender);
        let reading = tokio::spawn(stream.collect::<Vec<_>>());
        tokio::task::yield_now().await;
        close.send(Close::AfterDrain(close_status())).unwrap();
        assert_eq!(reading.await.unwrap().len(), 1);
    }

    #[tokio::test]
    async fn stream_without_a_close_ends_with_an_error() {
        let (sender, close, stream) = closing_stream::<u8>(1);
        sender.try_send(1).unwrap();
        drop((sender, close));
        let all: Vec<_> = stream.collect().await;
        assert!(matches!(&all[..], [Ok(1), Err(status)] if status.code() == Code::Internal), "{all:?}");
    }
}
