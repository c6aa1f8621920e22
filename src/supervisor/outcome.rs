//! How a runnable ends, and what its end means.
//!
//! The difficult one is cancellation. A runnable that was asked to end mostly does so by an error, and so does one whose
//! server, of another part of the tree, was asked to end: only the first may start again without a back-off, and without
//! taking its group with it. Told apart by their texts the two would be confused; so it is a value that only the context
//! of that very life gives out.

use std::error::Error;
use std::fmt;

use crate::supervisor::context::Done;
use crate::supervisor::tree::Life;

/// This life was asked to end. Only the context of that life gives it out, once it is so.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{path} was asked to end")]
pub struct Cancelled {
    pub(super) life: Life,
    pub(super) path: std::sync::Arc<str>,
}

/// Why a runnable ends without being done: any error, or a sentence.
///
/// It is not an error itself, so that any error becomes one by `?`.
pub struct Stop(Box<dyn Error + Send + Sync>);

impl Stop {
    /// A failure for which there is no more than a sentence.
    pub fn because(sentence: impl Into<String>) -> Self {
        Self(sentence.into().into())
    }

    /// The cancellation in it, however many errors stand around it.
    fn cancelled(&self) -> Option<&Cancelled> {
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

impl<E: Error + Send + Sync + 'static> From<E> for Stop {
    fn from(error: E) -> Self {
        Self(Box::new(error))
    }
}

impl fmt::Debug for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The error and what it comes from, on one line.
impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = self.0.to_string();
        f.write_str(&said)?;
        let mut source = self.0.source();
        while let Some(error) = source {
            let text = error.to_string();
            // Many errors say their source's words already.
            if !said.contains(&text) {
                write!(f, ": {text}")?;
            }
            said = text;
            source = error.source();
        }
        Ok(())
    }
}

/// What a runnable returned, or did instead.
pub(super) enum Outcome {
    Returned(Result<Done, Stop>),
    Panicked(String),
}

/// What the end of one life means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// It did all that it was for.
    Done,
    /// It was asked to end and did.
    Cancelled,
    /// It failed; the sentence says how.
    Dead(String),
}

/// What the end of `life` means, which was asked to end or not.
pub(super) fn classify(outcome: Outcome, life: Life, cancelled: bool) -> End {
    match outcome {
        Outcome::Returned(Ok(done)) if done.life == life => End::Done,
        Outcome::Returned(Ok(_)) => {
            End::Dead("it returned what says that another runnable is done".to_owned())
        }
        Outcome::Returned(Err(stop)) => match stop.cancelled() {
            Some(of) if of.life == life && cancelled => End::Cancelled,
            _ => End::Dead(stop.to_string()),
        },
        Outcome::Panicked(text) => End::Dead(format!("it panicked: {text}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("calling the server failed")]
    struct Around<E: Error + 'static>(#[source] E);

    fn cancelled(life: Life) -> Cancelled {
        Cancelled { life, path: "root.a".into() }
    }

    #[test]
    fn end_means_what_the_table_says() {
        let (own, other) = (Life::for_tests(3, 1), Life::for_tests(4, 1));
        let earlier = Life::for_tests(3, 0);
        let io = || std::io::Error::other("broken pipe");
        let dead = |text: &str| End::Dead(text.to_owned());
        for (number, (outcome, asked, expected)) in [
            (Outcome::Returned(Ok(Done { life: own })), false, End::Done),
            (Outcome::Returned(Ok(Done { life: own })), true, End::Done),
            (
                Outcome::Returned(Ok(Done { life: other })),
                false,
                dead("it returned what says that another runnable is done"),
            ),
            (Outcome::Returned(Err(cancelled(own).into())), true, End::Cancelled),
            (Outcome::Returned(Err(Around(cancelled(own)).into())), true, End::Cancelled),
            (Outcome::Returned(Err(Around(Around(cancelled(own))).into())), true, End::Cancelled),
            // Nobody asked it.
            (Outcome::Returned(Err(cancelled(own).into())), false, dead("root.a was asked to end")),
            // Somebody else was asked.
            (Outcome::Returned(Err(cancelled(other).into())), true, dead("root.a was asked to end")),
            (Outcome::Returned(Err(cancelled(earlier).into())), true, dead("root.a was asked to end")),
            // An error after it was asked is still an error.
            (Outcome::Returned(Err(io().into())), true, dead("broken pipe")),
            (
                Outcome::Returned(Err(Around(io()).into())),
                false,
                dead("calling the server failed: broken pipe"),
            ),
            (Outcome::Returned(Err(Stop::because("no address"))), false, dead("no address")),
            (Outcome::Panicked("index 3".to_owned()), true, dead("it panicked: index 3")),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(classify(outcome, own, asked), expected, "row {number}");
        }
    }
}
