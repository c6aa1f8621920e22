//! Exit reasons: done, cancelled or dead, classified from what a task returned.
//!
//! The difficult case is cancellation. A cancelled runnable mostly ends with an error. So does one whose server, in
//! another part of the tree, was cancelled. Only the first may be restarted without a back-off and without its group.
//! Their error texts could not distinguish them, so cancellation is a value that only the scope of that very run
//! returns.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use crate::state::RunId;

/// The result of a runnable that has completed its work.
#[derive(Debug)]
pub struct Done {
    pub(super) run: RunId,
}

/// This run was cancelled. Only the scope of the run creates this value, and only after the cancellation.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{path} was cancelled")]
pub struct Cancelled {
    pub(super) run: RunId,
    pub(super) path: Arc<str>,
}

/// Why a runnable ends without being done: any error, or a sentence.
///
/// It is not an error itself, so that `?` can convert any error to it.
pub struct RunnableError(Box<dyn Error + Send + Sync>);

impl RunnableError {
    /// A failure with only a sentence.
    pub fn msg(sentence: impl Into<String>) -> Self {
        Self(sentence.into().into())
    }

    /// The cancellation in the chain of errors, however deep it is.
    fn cancellation(&self) -> Option<&Cancelled> {
        let mut error: Option<&(dyn Error + 'static)> = Some(self.0.as_ref());
        while let Some(this) = error {
            if let Some(cancelled) = this.downcast_ref() {
                return Some(cancelled);
            }
            error = this.source();
        }
        None
    }
}

impl<E: Error + Send + Sync + 'static> From<E> for RunnableError {
    fn from(error: E) -> Self {
        Self(Box::new(error))
    }
}

impl fmt::Debug for RunnableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The error and its sources, on one line.
impl fmt::Display for RunnableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut message = self.0.to_string();
        f.write_str(&message)?;
        let mut source = self.0.source();
        while let Some(error) = source {
            let text = error.to_string();
            // Many errors include their source's text already.
            if !message.contains(&text) {
                write!(f, ": {text}")?;
            }
            message = text;
            source = error.source();
        }
        Ok(())
    }
}

/// How the task of a run ended: it returned or panicked.
pub(super) enum TaskOutcome {
    Returned(Result<Done, RunnableError>),
    Panicked(String),
}

/// The meaning of the end of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExitReason {
    /// It completed its work.
    Done,
    /// It was cancelled, and returned its own cancellation.
    Cancelled,
    /// It failed; the sentence is the error.
    Dead(String),
}

/// Classifies the end of `run`; `cancelled` is whether it was cancelled.
pub(super) fn classify_exit(outcome: TaskOutcome, run: RunId, cancelled: bool) -> ExitReason {
    match outcome {
        TaskOutcome::Returned(Ok(done)) if done.run == run => ExitReason::Done,
        TaskOutcome::Returned(Ok(_)) => {
            ExitReason::Dead("it returned what says that another runnable is done".to_owned())
        }
        TaskOutcome::Returned(Err(stop)) => match stop.cancellation() {
            Some(of) if of.run == run && cancelled => ExitReason::Cancelled,
            _ => ExitReason::Dead(stop.to_string()),
        },
        TaskOutcome::Panicked(text) => ExitReason::Dead(format!("it panicked: {text}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("calling the server failed")]
    struct Around<E: Error + 'static>(#[source] E);

    fn cancelled(run: RunId) -> Cancelled {
        Cancelled { run, path: "root.a".into() }
    }

    #[test]
    fn exit_reason_follows_from_outcome_and_cancellation() {
        let (own, other) = (RunId { slot: 3, number: 1 }, RunId { slot: 4, number: 1 });
        let earlier = RunId { slot: 3, number: 0 };
        let io = || std::io::Error::other("broken pipe");
        let dead = |text: &str| ExitReason::Dead(text.to_owned());
        for (number, (outcome, requested, expected)) in [
            (TaskOutcome::Returned(Ok(Done { run: own })), false, ExitReason::Done),
            (TaskOutcome::Returned(Ok(Done { run: own })), true, ExitReason::Done),
            (
                TaskOutcome::Returned(Ok(Done { run: other })),
                false,
                dead("it returned what says that another runnable is done"),
            ),
            (TaskOutcome::Returned(Err(cancelled(own).into())), true, ExitReason::Cancelled),
            (TaskOutcome::Returned(Err(Around(cancelled(own)).into())), true, ExitReason::Cancelled),
            (TaskOutcome::Returned(Err(Around(Around(cancelled(own))).into())), true, ExitReason::Cancelled),
            // The run was not cancelled.
            (TaskOutcome::Returned(Err(cancelled(own).into())), false, dead("root.a was cancelled")),
            // Another run was cancelled.
            (TaskOutcome::Returned(Err(cancelled(other).into())), true, dead("root.a was cancelled")),
            (TaskOutcome::Returned(Err(cancelled(earlier).into())), true, dead("root.a was cancelled")),
            // Another error after the cancellation is still an error.
            (TaskOutcome::Returned(Err(io().into())), true, dead("broken pipe")),
            (
                TaskOutcome::Returned(Err(Around(io()).into())),
                false,
                dead("calling the server failed: broken pipe"),
            ),
            (TaskOutcome::Returned(Err(RunnableError::msg("no address"))), false, dead("no address")),
            (TaskOutcome::Panicked("index 3".to_owned()), true, dead("it panicked: index 3")),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(classify_exit(outcome, own, requested), expected, "row {number}");
        }
    }
}
