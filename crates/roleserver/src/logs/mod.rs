//! Upload logs that a shepherd requests.
//!
//! Logs are the role server's own, and those of what it runs. The response to a heartbeat carries the open requests,
//! and repeats each until all of its log was uploaded. Uploads are calls of the machine, over the channel on which both
//! sides know each other's keys. A machine opens no port for them. A client of such a port would have to be
//! authenticated there, and a node that relies on its cluster's certificates cannot distinguish a revoked owner from a
//! valid one while its curator is away. So operators read logs through a shepherd, which knows who they are and whether
//! they still may, and records it.
//!
//! # How the files fit
//!
//! * [`own_log`][]: the role server's own log, in a file of bounded size. [`log_queue`][]: the thread that writes it.
//! * [`ring`][]: the same in memory, for machines that have no disk: simulated ones.
//! * [`sources`][]: the logs of the machine, and where they are.
//! * [`tail`][]: the last lines of a log, and the lines that are appended.
//! * [`upload`][]: from there to a shepherd.
//!
//! # Invariants
//!
//! * Four requests are carried out at a time, each of at most a MiB of lines, in parts of 64 KiB. A log is followed for
//!   as long as a shepherd reports that it is wanted, for two hours at the most.
//! * Nothing of this waits in the heartbeat loop.
//! * A name in a request is looked up among the logs of the machine, so it leads to no other file.
//! * A part has a number. It is sent again until a shepherd has it, and is stored once. After two minutes of failures
//!   the upload is given up.

pub mod log_queue;
pub mod own_log;
pub mod ring;
pub mod sources;
pub mod tail;
pub mod upload;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use model::log_request::MAX_REQUESTS_PER_MACHINE;
use proto::agent::v1::LogRequest;
use supervisor::context::{Runnable, Starting};
use supervisor::watch_cell::WatchCell;
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::logs::sources::LogSources;
use crate::logs::upload::{LogUploader, upload_log};
use crate::server_pool::ServerPool;

/// Requests that are remembered, so that none is carried out twice.
const MAX_REMEMBERED: usize = 100;

#[derive(Debug, Default)]
struct LogUploadState {
    begun: VecDeque<String>,
    running: i64,
}

/// The log requests of one role server, and their uploads; cheap to clone.
#[derive(Clone)]
pub struct LogUploads {
    source: Arc<LogSources>,
    server_pool: ServerPool,
    incarnation: Uuid,
    requests: WatchCell<Vec<LogRequest>>,
    state: Arc<Mutex<LogUploadState>>,
}

/// One of the slots for requests that run at a time; freed when it is dropped.
#[derive(Debug)]
struct UploadSlot(Arc<Mutex<LogUploadState>>);

fn lock_state(known: &Mutex<LogUploadState>) -> MutexGuard<'_, LogUploadState> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for UploadSlot {
    fn drop(&mut self) {
        lock_state(&self.0).running -= 1;
    }
}

impl LogUploads {
    /// The uploads of this start of a role server, from the logs in `source` to these shepherds.
    #[must_use]
    pub fn new(source: LogSources, server_pool: ServerPool, incarnation: Uuid) -> Self {
        let source = Arc::new(source);
        Self { source, server_pool, incarnation, requests: WatchCell::new(), state: Arc::default() }
    }

    /// Sets the open requests: all whose logs were not uploaded to their end.
    pub fn set_requests(&self, requests: &[LogRequest]) {
        self.requests.set(requests.to_vec());
    }

    /// Starts the new requests for which there is a free slot, and returns their futures. Each ends when its log was
    /// uploaded or is no longer wanted. The other requests come again with the next heartbeat.
    #[must_use]
    pub fn start_uploads(&self, requests: &[LogRequest]) -> Vec<impl Future<Output = ()> + Send + 'static> {
        let mut begun = Vec::new();
        for request in requests {
            let mut known = lock_state(&self.state);
            if known.running >= MAX_REQUESTS_PER_MACHINE || known.begun.contains(&request.request_id) {
                continue;
            }
            known.running += 1;
            known.begun.push_back(request.request_id.clone());
            if known.begun.len() > MAX_REMEMBERED {
                known.begun.pop_front();
            }
            let place = UploadSlot(self.state.clone());
            let bringer = LogUploader::new(self.server_pool.clone(), self.incarnation);
            let (source, request) = (self.source.clone(), request.clone());
            begun.push(async move {
                let _place = place;
                upload_log(&request, &source, bringer).await;
            });
        }
        begun
    }

    /// The runnable that carries requests out.
    #[must_use]
    pub fn run_uploads(&self) -> Runnable {
        let logs = self.clone();
        Runnable::new(move |starting: Starting| {
            let logs = logs.clone();
            let mut wanted = logs.requests.watch();
            async move {
                let healthy = starting.mark_healthy();
                let scope = healthy.scope();
                // Running uploads end with this run.
                let mut running = JoinSet::new();
                loop {
                    tokio::select! {
                        cancelled = scope.cancelled() => return Err(cancelled.into()),
                        requests = wanted.next() => {
                            for work in logs.start_uploads(&requests) {
                                running.spawn(work);
                            }
                        }
                        Some(ended) = running.join_next() => {
                            if let Err(error) = ended {
                                tracing::error!(%error, "the upload of a log ended abnormally");
                            }
                        }
                    }
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::logs::ring::LogRing;

    fn request(id: u32) -> LogRequest {
        LogRequest { request_id: id.to_string(), ..LogRequest::default() }
    }

    #[tokio::test]
    async fn request_is_carried_out_once_and_no_more_than_four_at_a_time() {
        let logs = LogUploads::new(
            LogSources::of_ring(LogRing::default(), None),
            ServerPool::default(),
            Uuid::new_v4(),
        );
        let requests: Vec<_> = (0..6).map(request).collect();
        let mut begun = logs.start_uploads(&requests);
        assert_eq!(begun.len(), 4);
        assert_eq!(logs.start_uploads(&requests).len(), 0, "all places are taken");
        // However an upload ends, its slot is free then.
        begun.truncate(2);
        assert_eq!(logs.start_uploads(&requests).len(), 2, "the two that had no place");
        drop(begun);
        assert_eq!(logs.start_uploads(&requests).len(), 0, "all of them were begun before");
        for id in 10..200 {
            assert_eq!(logs.start_uploads(&[request(id)]).len(), 1);
        }
        assert!(lock_state(&logs.state).begun.len() <= MAX_REMEMBERED);
    }
}
