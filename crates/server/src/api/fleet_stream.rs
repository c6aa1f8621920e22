//! Streamed queries over the whole fleet, with concurrency limits.
//!
//! A plan and a list of issues are computed from all machines. That takes seconds, too long for a page of a list, and
//! two pages would be of two different times. So the response is a stream: it opens at once, the fleet is read in
//! pages on the API's connections for queries, the result is computed on a thread outside the async runtime's workers,
//! and is then sent in chunks.
//!
//! The cost is bounded: a limited number of queries runs at once on this server, a limited number waits, and one
//! credential may have a quarter of all. A stream ends as a watch does (`stream_end.rs`): with the server, with
//! its credential, or when the client is gone or reads too slowly.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tonic::{Code, Status};

use crate::api::api_error::{error_status, internal_status};
use crate::api::caller::Caller;
use crate::api::closing_stream::{Close, ClosingStream, closing_stream};
use crate::api::context::ApiContext;
use crate::api::stream_end::{StreamEnd, send_within, wait_for_credential_end};
use crate::api::stream_limits::{StreamLimits, StreamPermit};

/// Most lines of a chunk: the client's decoder limits the number of fields.
pub const CHUNK_SIZE: usize = 500;
/// Most queries that run at once.
const MAX_RUNNING: usize = 2;
/// Most queries in total, running and waiting.
const MAX_PENDING: usize = 16;
/// Number of buffered chunks, and the longest wait for space in the buffer.
const BUFFER_SIZE: usize = 4;
const SEND_TIMEOUT: Duration = Duration::from_secs(20);

/// Runs queries over the whole fleet; cheap to clone.
#[derive(Clone)]
pub struct FleetQueries {
    context: ApiContext,
    limits: StreamLimits,
    slots: Arc<Semaphore>,
}

impl FleetQueries {
    /// Creates the queries with the context of the services.
    #[must_use]
    pub fn new(context: ApiContext) -> Self {
        Self { context, limits: StreamLimits::new(MAX_PENDING), slots: Arc::new(Semaphore::new(MAX_RUNNING)) }
    }

    /// Context shared by all services.
    #[must_use]
    pub fn context(&self) -> &ApiContext {
        &self.context
    }

    /// Opens a stream of the chunks that `find` returns. `find` runs when a slot is free.
    pub fn stream<T, F>(&self, caller: &Caller, find: F) -> Result<ClosingStream<T>, Status>
    where
        T: Send + 'static,
        F: Future<Output = Result<Vec<T>, Status>> + Send + 'static,
    {
        let credential = caller.credential_id();
        let permit = self.limits.acquire(credential).map_err(|_| too_many_queries())?;
        let (sender, close, stream) = closing_stream(BUFFER_SIZE);
        let (context, slots, probe) = (self.context.clone(), self.slots.clone(), sender.clone());
        let caller = caller.clone();
        tokio::spawn(async move {
            let ended = context.stop.run_until_cancelled(async {
                tokio::select! {
                    end = send_chunks(slots, permit, sender, find) => end,
                    // Checked concurrently, because sending may wait for the client.
                    end = wait_for_credential_end(&context, credential) => Err(end),
                    () = probe.closed() => Err(StreamEnd::ClientGone),
                }
            });
            let end = match ended.await {
                None => {
                    let output = "this shepherd is stopping; call another one";
                    Close::Now(error_status(Code::Unavailable, "UNAVAILABLE", output))
                }
                Some(Ok(())) => Close::Complete,
                Some(Err(StreamEnd::ClientGone)) => return,
                Some(Err(StreamEnd::Failed(status))) => Close::Now(caller.reveal_cause(status)),
            };
            // The send fails only if the client is gone.
            drop(close.send(end));
        });
        Ok(stream)
    }
}

async fn send_chunks<T: Send + 'static>(
    slots: Arc<Semaphore>,
    _permit: StreamPermit,
    sender: tokio::sync::mpsc::Sender<T>,
    find: impl Future<Output = Result<Vec<T>, Status>> + Send,
) -> Result<(), StreamEnd> {
    // Nobody closes the semaphore, so this cannot fail.
    let _slot = slots.acquire_owned().await;
    for chunk in find.await.map_err(StreamEnd::Failed)? {
        send_within(&sender, chunk, SEND_TIMEOUT).await?;
    }
    Ok(())
}

/// Runs a long computation on a blocking thread, outside the async runtime's workers.
pub async fn compute_blocking<T: Send + 'static>(
    compute: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Status> {
    tokio::task::spawn_blocking(compute)
        .await
        .map_err(|error| internal_status("an answer about the whole fleet could not be computed", &error))
}

fn too_many_queries() -> Status {
    error_status(
        Code::ResourceExhausted,
        "TOO_MANY_QUERIES",
        "this shepherd already computes as many plans and lists of issues as it can, or as many as it \
         accepts from one credential; try again in a moment, or use another shepherd",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn panic_of_a_computation_is_a_status_whose_cause_a_database_login_learns() {
        let status = compute_blocking::<u8>(|| panic!("index 3")).await.unwrap_err();
        assert_eq!(status.code(), Code::Internal);
        assert!(!status.message().contains("panicked"), "{status}");
        let revealed = Caller::DatabaseLogin("kim@workstation".into()).reveal_cause(status);
        assert!(
            revealed.message().starts_with("an answer about the whole fleet could not be computed: "),
            "{revealed}"
        );
        assert!(revealed.message().contains("panicked") && !revealed.message().contains("log"), "{revealed}");
    }
}
