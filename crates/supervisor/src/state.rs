//! Runs, states of runnables, and changes of state.

use std::sync::Arc;

/// One run of one runnable: from one start to its exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct RunId {
    /// The place of its node in the tree.
    pub(super) slot: usize,
    /// Unique among all runs of a tree.
    pub(super) number: u64,
}

/// The state of a runnable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RunnableState {
    /// Started, or waiting for its start; it has not reported that it is healthy.
    New,
    /// It has reported that it is healthy.
    Healthy,
    /// It has reported that it is done, and returned.
    Done,
    /// It failed or panicked.
    Dead,
    /// It was cancelled, and has returned.
    Cancelled,
}

impl RunnableState {
    /// The name of the state, in reports and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Healthy => "healthy",
            Self::Done => "done",
            Self::Dead => "dead",
            Self::Cancelled => "cancelled",
        }
    }

    pub(super) const fn has_returned(self) -> bool {
        matches!(self, Self::Done | Self::Dead | Self::Cancelled)
    }
}

/// A change of state, for metrics and logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transition {
    /// Path of the runnable that changed.
    pub path: Arc<str>,
    /// The state before; `None` for a new runnable.
    pub from: Option<RunnableState>,
    /// The state after the change.
    pub to: RunnableState,
}
