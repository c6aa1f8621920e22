//! Time limit of one operation, which the deadline of the caller may shorten.
//!
//! A process that was frozen wakes with answers that have come meanwhile, and with its limit passed. A timeout of tokio
//! lets the operation go on with such an answer before it looks at the clock: that would start a command on a machine
//! that belongs to another shepherd by then. [`TimeLimit::run`] looks at the clock first, each time.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout_at};

use crate::ssh_error::SshError;

/// A limit, and whether it is the one of a flag or the deadline of the caller.
#[derive(Clone, Copy)]
pub(super) struct TimeLimit {
    pub(super) expires_at: Instant,
    duration: Duration,
    flag: &'static str,
    is_deadline: bool,
}

impl TimeLimit {
    /// `flag` is the command-line flag that sets `duration`.
    pub(super) fn new(duration: Duration, flag: &'static str, deadline: Instant) -> Self {
        let until = Instant::now() + duration;
        Self { expires_at: until.min(deadline), duration, flag, is_deadline: deadline <= until }
    }

    /// Runs an operation until the limit. It takes no step after that, also if it could.
    pub(super) async fn run<F: Future>(self, operation: F) -> Result<F::Output, Elapsed> {
        let mut operation = pin!(operation);
        let before_limit = poll_fn(|context| {
            if Instant::now() >= self.expires_at {
                return Poll::Pending;
            }
            operation.as_mut().poll(context)
        });
        timeout_at(self.expires_at, before_limit).await
    }

    /// The error for a limit that has passed during `operation`.
    pub(super) fn exceeded_error(&self, address: &str, operation: &'static str) -> SshError {
        let address = address.to_owned();
        if self.is_deadline {
            SshError::Deadline { address, operation }
        } else {
            SshError::Timeout { address, operation, limit: self.duration, flag: self.flag }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::cell::Cell;

    #[tokio::test]
    async fn operation_takes_no_step_after_its_limit_although_its_answer_has_come() {
        let limit =
            TimeLimit::new(Duration::from_millis(50), "--limit", Instant::now() + Duration::from_hours(1));
        let (requested, sent) = (Cell::new(false), Cell::new(false));
        let mut operation = pin!(limit.run(async {
            requested.set(true);
            tokio::task::yield_now().await;
            sent.set(true);
        }));
        let first = poll_fn(|context| Poll::Ready(operation.as_mut().poll(context).is_pending())).await;
        assert!(first && requested.get(), "it waits for its answer");
        // As in a frozen process, nothing runs, not even a timer.
        while Instant::now() < limit.expires_at {
            std::thread::yield_now();
        }
        assert!(operation.await.is_err() && !sent.get());
    }

    #[tokio::test]
    async fn operation_that_ends_in_time_has_its_result() {
        let limit =
            TimeLimit::new(Duration::from_hours(1), "--limit", Instant::now() + Duration::from_hours(2));
        assert_eq!(limit.run(async { 7 }).await.ok(), Some(7));
    }
}
