//! Why the leading curator signs no statement, as its role server reports it.
//!
//! Nobody misses a statement for a day. By then nodes follow no curator, and none of them gets an order. So the role
//! server of the leader reports at once what a person has to repair.

use std::sync::{Arc, Mutex, PoisonError};

/// The problem of a leader with the cluster's statement; cheap to clone, and clones share it.
#[derive(Clone, Debug, Default)]
pub struct StatementMonitor(Arc<Mutex<Option<String>>>);

impl StatementMonitor {
    /// The problem, as a sentence. `None` while this curator does not lead, or signs statements.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the problem, or that there is none.
    pub fn set(&self, problem: Option<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = problem;
    }
}

/// Withdraws the problem when the leader ends: another curator may lead, and has the same one.
pub(super) struct WithdrawnAtEnd<'a>(pub(super) &'a StatementMonitor);

impl Drop for WithdrawnAtEnd<'_> {
    fn drop(&mut self) {
        self.0.set(None);
    }
}
