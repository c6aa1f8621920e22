//! Time limit of one operation, which the deadline of the caller may shorten.

use std::time::Duration;

use tokio::time::Instant;

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
