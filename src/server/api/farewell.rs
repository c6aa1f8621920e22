//! A stream that always says how it ends.
//!
//! What is said waits in a buffer for whoever reads, and how it ends does not: that comes a way of its own,
//! so a full buffer cannot keep it back. An end may be one after which nothing more may be heard, as that of
//! a credential: then what is still in the buffer is not said.

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::{mpsc, oneshot};
use tokio_stream::Stream;
use tonic::{Code, Status};

use crate::server::api::refusal::refused;

/// How a stream ends.
#[derive(Debug)]
pub enum Farewell {
    /// This is said next, and nothing after it.
    AtOnce(Status),
    /// This is said after what waits to be read.
    AfterTheRest(Status),
    /// What waits to be read is the rest, and all is well.
    AllIsSaid,
}

/// What is said, and then how it ended.
#[derive(Debug)]
pub struct Telling<T> {
    said: mpsc::Receiver<T>,
    /// Until the end was heard of.
    end: Option<oneshot::Receiver<Farewell>>,
    /// Said when nothing waits any more.
    last: Option<Status>,
}

/// A stream of which `room` messages wait for whoever reads, with what says them and what ends it.
#[must_use]
pub fn telling<T>(room: usize) -> (mpsc::Sender<T>, oneshot::Sender<Farewell>, Telling<T>) {
    let (say, said) = mpsc::channel(room);
    let (bid, end) = oneshot::channel();
    (say, bid, Telling { said, end: Some(end), last: None })
}

impl<T> Telling<T> {
    /// Notes that this is said last, and takes nothing more.
    fn ends_with(&mut self, status: Status) {
        (self.end, self.last) = (None, Some(status));
        self.said.close();
    }
}

impl<T> Stream for Telling<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        // Before what waits to be read.
        if let Some(end) = &mut this.end
            && let Poll::Ready(farewell) = Pin::new(end).poll(context)
        {
            match farewell {
                Ok(Farewell::AtOnce(status)) => {
                    this.ends_with(status);
                    while this.said.try_recv().is_ok() {}
                }
                Ok(Farewell::AfterTheRest(status)) => this.ends_with(status),
                Ok(Farewell::AllIsSaid) => {
                    this.end = None;
                    this.said.close();
                }
                Err(_) => {
                    this.ends_with(refused(Code::Internal, "INTERNAL", "this shepherd failed to go on"));
                }
            }
        }
        match this.said.poll_recv(context) {
            Poll::Ready(Some(said)) => Poll::Ready(Some(Ok(said))),
            // Nobody says more, but how it ended is not known yet.
            Poll::Ready(None) if this.end.is_some() => Poll::Pending,
            Poll::Ready(None) => Poll::Ready(this.last.take().map(Err)),
            Poll::Pending => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt as _;

    use super::*;

    fn ended() -> Status {
        Status::unauthenticated("revoked")
    }

    /// What is heard of a stream whose buffer is full when it ends.
    async fn heard(farewell: Farewell) -> Vec<Result<u8, Code>> {
        let (say, bid, telling) = telling(2);
        for said in [1, 2] {
            say.try_send(said).unwrap();
        }
        assert!(say.try_send(3).is_err(), "the buffer is full");
        bid.send(farewell).unwrap();
        // `say` is still there: the end does not wait for it.
        let heard = telling.map(|said| said.map_err(|status| status.code())).collect().await;
        drop(say);
        heard
    }

    #[tokio::test]
    async fn end_at_once_is_all_that_is_heard_though_the_buffer_was_full() {
        assert_eq!(heard(Farewell::AtOnce(ended())).await, [Err(Code::Unauthenticated)]);
    }

    #[tokio::test]
    async fn other_end_is_heard_after_what_waited() {
        let all = heard(Farewell::AfterTheRest(ended())).await;
        assert_eq!(all, [Ok(1), Ok(2), Err(Code::Unauthenticated)]);
    }

    #[tokio::test]
    async fn good_end_is_the_end_of_what_waited() {
        assert_eq!(heard(Farewell::AllIsSaid).await, [Ok(1), Ok(2)]);
    }

    #[tokio::test]
    async fn end_is_waited_for_though_nobody_says_more() {
        let (say, bid, telling) = telling::<u8>(1);
        drop(say);
        let reading = tokio::spawn(telling.collect::<Vec<_>>());
        tokio::task::yield_now().await;
        bid.send(Farewell::AfterTheRest(ended())).unwrap();
        assert_eq!(reading.await.unwrap().len(), 1);
    }

    #[tokio::test]
    async fn stream_that_nobody_ends_says_that_it_failed() {
        let (say, bid, telling) = telling::<u8>(1);
        say.try_send(1).unwrap();
        drop((say, bid));
        let all: Vec<_> = telling.collect().await;
        assert!(matches!(&all[..], [Ok(1), Err(status)] if status.code() == Code::Internal), "{all:?}");
    }
}
