//! Bringing logs to shepherds: the role server's own, and those of what it runs.
//!
//! Which logs are wanted comes with the answer to a heartbeat, and again with each answer until all of it was brought; what
//! is asked for is brought by calls of the machine, over the channel on which both sides know each other's keys. A machine
//! opens no port for it: whoever could connect to one would have to be known there, and a node that is asked by the
//! certificates of its cluster cannot tell an owner that was revoked from one that was not, while its curator is away. So
//! whoever wants to look at a log asks a shepherd, which knows who they are, whether they still may, and writes it down.
//!
//! # How the files fit
//!
//! * [`own`][]: the role server's own log, in a file that does not grow for ever.
//! * [`ring`][]: the same in memory, for machines that have no disk: simulated ones.
//! * [`there`][]: which logs there are, and where.
//! * [`tail`][]: the last lines of one, and what is added.
//! * [`mod@bring`][]: from there to a shepherd.
//!
//! # Bounds
//!
//! Four requests at a time, a MiB of lines each at the most, in parts of 64 KiB; what is followed is followed for as long
//! as a shepherd says that it is wanted. Nothing of this waits in the heartbeat loop.

pub mod bring;
pub mod own;
pub mod ring;
pub mod tail;
pub mod there;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::JoinSet;
use uuid::Uuid;

use crate::model::log_request::MOST_OF_A_MACHINE;
use crate::proto::agent::v1::LogRequest;
use crate::roleserver::logs::bring::{Bringer, bring};
use crate::roleserver::logs::there::Source;
use crate::roleserver::shepherds::Shepherds;
use crate::supervisor::context::{Runnable, Starting};
use crate::supervisor::value::Value;

/// Requests that are remembered, so that none is carried out twice.
const REMEMBERED: usize = 100;

#[derive(Debug, Default)]
struct Known {
    begun: VecDeque<String>,
    running: i64,
}

/// What is asked of one role server, and what it does about it; cheap to clone.
#[derive(Clone)]
pub struct Logs {
    source: Arc<Source>,
    shepherds: Shepherds,
    incarnation: Uuid,
    wanted: Value<Vec<LogRequest>>,
    known: Arc<Mutex<Known>>,
}

/// A place among the requests that are carried out at a time.
#[derive(Debug)]
struct Place(Arc<Mutex<Known>>);

fn locked(known: &Mutex<Known>) -> MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Place {
    fn drop(&mut self) {
        locked(&self.0).running -= 1;
    }
}

impl Logs {
    /// Of this start of a role server, whose logs are in `source`, brought to these shepherds.
    #[must_use]
    pub fn new(source: Source, shepherds: Shepherds, incarnation: Uuid) -> Self {
        let source = Arc::new(source);
        Self { source, shepherds, incarnation, wanted: Value::new(), known: Arc::default() }
    }

    /// Hears which logs are wanted: all that were not brought to their end.
    pub fn hear(&self, requests: &[LogRequest]) {
        self.wanted.set(requests.to_vec());
    }

    /// What is to be done for requests that are new, as far as there is room: each ends when its log was brought, or nobody
    /// wants it any more. The others come again with the next heartbeat.
    #[must_use]
    pub fn begin(&self, requests: &[LogRequest]) -> Vec<impl Future<Output = ()> + Send + 'static> {
        let mut begun = Vec::new();
        for request in requests {
            let mut known = locked(&self.known);
            if known.running >= MOST_OF_A_MACHINE || known.begun.contains(&request.request) {
                continue;
            }
            known.running += 1;
            known.begun.push_back(request.request.clone());
            if known.begun.len() > REMEMBERED {
                known.begun.pop_front();
            }
            let place = Place(self.known.clone());
            let bringer = Bringer::new(self.shepherds.clone(), self.incarnation);
            let (source, request) = (self.source.clone(), request.clone());
            begun.push(async move {
                let _place = place;
                bring(&request, &source, bringer).await;
            });
        }
        begun
    }

    /// The runnable that carries requests out.
    #[must_use]
    pub fn carry_out(&self) -> Runnable {
        let logs = self.clone();
        Runnable::new(move |starting: Starting| {
            let logs = logs.clone();
            let mut wanted = logs.wanted.watch();
            async move {
                let healthy = starting.healthy();
                let scope = healthy.scope();
                // What is under way ends with this.
                let mut running = JoinSet::new();
                loop {
                    tokio::select! {
                        cancelled = scope.cancelled() => return Err(cancelled.into()),
                        requests = wanted.next() => {
                            for work in logs.begin(&requests) {
                                running.spawn(work);
                            }
                        }
                        Some(ended) = running.join_next() => {
                            if let Err(error) = ended {
                                tracing::error!(%error, "bringing a log ended in the middle");
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

    use crate::roleserver::logs::ring::Ring;

    fn request(id: u32) -> LogRequest {
        LogRequest { request: id.to_string(), ..LogRequest::default() }
    }

    #[tokio::test]
    async fn request_is_carried_out_once_and_no_more_than_four_at_a_time() {
        let logs = Logs::new(Source::of_ring(Ring::default(), None), Shepherds::default(), Uuid::new_v4());
        let asked: Vec<_> = (0..6).map(request).collect();
        let mut begun = logs.begin(&asked);
        assert_eq!(begun.len(), 4);
        assert_eq!(logs.begin(&asked).len(), 0, "all places are taken");
        // Whatever ends one, its place is free then.
        begun.truncate(2);
        assert_eq!(logs.begin(&asked).len(), 2, "the two that had no place");
        drop(begun);
        assert_eq!(logs.begin(&asked).len(), 0, "all of them were begun before");
        for id in 10..200 {
            assert_eq!(logs.begin(&[request(id)]).len(), 1);
        }
        assert!(locked(&logs.known).begun.len() <= REMEMBERED);
    }
}
