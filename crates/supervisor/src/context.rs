//! The API of a runnable: the typestates `Starting` and `Healthy`, and the scope of a run.
//!
//! The steps of a run are types, so that the compiler checks what each of them may do. A [`Starting`] starts children
//! and becomes a [`Healthy`], once; that becomes [`Done`], once. A runnable that returns neither [`Done`] nor the
//! cancellation of its own run has failed.

use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use crate::exit_reason::{Cancelled, Done, RunnableError};
use crate::name::{RunnableName, RunnableNameError};
use crate::report::TreeReport;
use crate::state::RunId;
use crate::supervise::Shared;
use crate::tree::AddChildError;

/// A restartable task: a function that makes a future.
#[derive(Clone)]
pub struct Runnable(Arc<dyn Fn(Starting) -> BoxFuture<'static, Result<Done, RunnableError>> + Send + Sync>);

impl Runnable {
    /// A runnable with this function, which is called for each run.
    pub fn new<F, Fut>(body: F) -> Self
    where
        F: Fn(Starting) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Done, RunnableError>> + Send + 'static,
    {
        Self(Arc::new(move |starting| Box::pin(body(starting))))
    }

    pub(super) fn call(&self, starting: Starting) -> BoxFuture<'static, Result<Done, RunnableError>> {
        (self.0)(starting)
    }
}

impl fmt::Debug for Runnable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Runnable")
    }
}

/// Why children were not started. None of them was.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A name is invalid.
    #[error("no child was started: {0}")]
    Name(#[from] RunnableNameError),
    /// A child of this name exists already.
    #[error("no child was started: {0}")]
    DuplicateName(String),
    /// The run of the parent was cancelled.
    #[error("no child was started")]
    Cancelled(#[from] Cancelled),
}

/// One run of a runnable: its path, its cancellation and the report.
#[derive(Clone)]
pub struct Scope {
    pub(super) shared: Arc<Shared>,
    pub(super) run: RunId,
    pub(super) path: Arc<str>,
    pub(super) token: CancellationToken,
}

impl Scope {
    /// The names from the root down, separated by dots.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Waits for the cancellation of this run. The run should return the result as its error.
    pub async fn cancelled(&self) -> Cancelled {
        self.token.cancelled().await;
        self.cancellation()
    }

    /// Waits for a future, or for the cancellation of this run; then the future is dropped.
    pub async fn until_cancelled<F: Future>(&self, future: F) -> Result<F::Output, Cancelled> {
        tokio::select! {
            biased;
            () = self.token.cancelled() => Err(self.cancellation()),
            output = future => Ok(output),
        }
    }

    /// The state of the whole tree at this moment.
    #[must_use]
    pub fn report(&self) -> TreeReport {
        self.shared.report()
    }

    /// The token that is cancelled with this run, for functions that take a token.
    #[must_use]
    pub fn token(&self) -> CancellationToken {
        self.token.clone()
    }

    fn cancellation(&self) -> Cancelled {
        Cancelled { run: self.run, path: self.path.clone() }
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Scope").field(&self.path).finish()
    }
}

/// A run that has not reported yet that it is healthy. Only such a run starts children.
#[derive(Debug)]
pub struct Starting(pub(super) Scope);

impl Starting {
    /// Starts a child in a group of its own.
    pub fn start(&self, name: &str, runnable: Runnable) -> Result<(), StartError> {
        self.start_group([(name, runnable)])
    }

    /// Starts children as a group: when one of them dies, all are restarted.
    pub fn start_group<'n>(
        &self,
        members: impl IntoIterator<Item = (&'n str, Runnable)>,
    ) -> Result<(), StartError> {
        let members = members
            .into_iter()
            .map(|(name, runnable)| Ok((RunnableName::new(name)?, runnable)))
            .collect::<Result<_, RunnableNameError>>()?;
        self.0.shared.start(self.0.run, members).map_err(|error| match error {
            AddChildError::DuplicateName { .. } => StartError::DuplicateName(error.to_string()),
            AddChildError::ParentCancelled => StartError::Cancelled(self.0.cancellation()),
        })
    }

    /// Reports that the run is healthy: its next failure counts as its first.
    #[must_use]
    pub fn mark_healthy(self) -> Healthy {
        self.0.shared.mark_healthy(self.0.run);
        Healthy(self.0)
    }

    /// The scope of this run, which outlives the start.
    #[must_use]
    pub const fn scope(&self) -> &Scope {
        &self.0
    }
}

/// A run that has reported that it is healthy.
#[derive(Debug)]
pub struct Healthy(Scope);

impl Healthy {
    /// Reports that the run is done. The report takes effect when the result is returned. Its children go on.
    #[must_use]
    pub fn mark_done(self) -> Done {
        self.0.shared.mark_done(self.0.run);
        Done { run: self.0.run }
    }

    /// The scope of this run.
    #[must_use]
    pub const fn scope(&self) -> &Scope {
        &self.0
    }
}
