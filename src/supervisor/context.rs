//! What a runnable is given.
//!
//! The steps of a life are types, so that what may be done in which of them is known when the program is built: a
//! [`Starting`] starts children and becomes a [`Healthy`], once; that becomes [`Done`], once, which is the only thing to
//! return for one that has not failed.

use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;
use tokio_util::sync::CancellationToken;

use crate::supervisor::name::{Name, NameError};
use crate::supervisor::outcome::{Cancelled, Stop};
use crate::supervisor::report::Report;
use crate::supervisor::supervise::Shared;
use crate::supervisor::tree::{Life, NotStarted};

/// Something that can be started, and started again: a function that makes a future.
#[derive(Clone)]
pub struct Runnable(Arc<dyn Fn(Starting) -> BoxFuture<'static, Result<Done, Stop>> + Send + Sync>);

impl Runnable {
    /// A runnable of a function, which is called for each life.
    pub fn new<F, Fut>(body: F) -> Self
    where
        F: Fn(Starting) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Done, Stop>> + Send + 'static,
    {
        Self(Arc::new(move |starting| Box::pin(body(starting))))
    }

    pub(super) fn call(&self, starting: Starting) -> BoxFuture<'static, Result<Done, Stop>> {
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
    /// A name is none.
    #[error("no child was started: {0}")]
    Name(#[from] NameError),
    /// A name is taken.
    #[error("no child was started: {0}")]
    Twice(String),
    /// The runnable was asked to end.
    #[error("no child was started")]
    Cancelled(#[from] Cancelled),
}

/// One life of a runnable, as all that belongs to it may know it.
#[derive(Clone)]
pub struct Scope {
    pub(super) shared: Arc<Shared>,
    pub(super) life: Life,
    pub(super) path: Arc<str>,
    pub(super) token: CancellationToken,
}

impl Scope {
    /// Names from the root down, with dots between them.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Waits until this life is asked to end. What it gives is what to end with.
    pub async fn cancelled(&self) -> Cancelled {
        self.token.cancelled().await;
        self.cancellation()
    }

    /// Waits for a future, or until this life is asked to end. Then the future is dropped.
    pub async fn until_cancelled<F: Future>(&self, future: F) -> Result<F::Output, Cancelled> {
        tokio::select! {
            biased;
            () = self.token.cancelled() => Err(self.cancellation()),
            output = future => Ok(output),
        }
    }

    /// The whole tree as it is now.
    #[must_use]
    pub fn report(&self) -> Report {
        self.shared.report()
    }

    /// What is cancelled when this life is asked to end, for what takes a token.
    #[must_use]
    pub fn token(&self) -> CancellationToken {
        self.token.clone()
    }

    fn cancellation(&self) -> Cancelled {
        Cancelled { life: self.life, path: self.path.clone() }
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Scope").field(&self.path).finish()
    }
}

/// A life that has not said yet that it is healthy. Only such a one starts children.
#[derive(Debug)]
pub struct Starting(pub(super) Scope);

impl Starting {
    /// Starts a child that shares its fate with nobody.
    pub fn start(&self, name: &str, runnable: Runnable) -> Result<(), StartError> {
        self.start_group([(name, runnable)])
    }

    /// Starts children of which none lives on where another one dies.
    pub fn start_group<'n>(
        &self,
        members: impl IntoIterator<Item = (&'n str, Runnable)>,
    ) -> Result<(), StartError> {
        let members = members
            .into_iter()
            .map(|(name, runnable)| Ok((Name::new(name)?, runnable)))
            .collect::<Result<_, NameError>>()?;
        self.0.shared.start(self.0.life, members).map_err(|error| match error {
            NotStarted::Twice { .. } => StartError::Twice(error.to_string()),
            NotStarted::Over => StartError::Cancelled(self.0.cancellation()),
        })
    }

    /// Says that all is well: the next failure is its first.
    #[must_use]
    pub fn healthy(self) -> Healthy {
        self.0.shared.healthy(self.0.life);
        Healthy(self.0)
    }

    /// This life, for what outlives being new.
    #[must_use]
    pub const fn scope(&self) -> &Scope {
        &self.0
    }
}

/// A life that said that it is healthy.
#[derive(Debug)]
pub struct Healthy(Scope);

impl Healthy {
    /// Says that all is done. It is so once that is returned; its children go on.
    #[must_use]
    pub fn done(self) -> Done {
        self.0.shared.done(self.0.life);
        Done { life: self.0.life }
    }

    /// This life.
    #[must_use]
    pub const fn scope(&self) -> &Scope {
        &self.0
    }
}

/// What one returns that has done all that it was for.
#[derive(Debug)]
pub struct Done {
    pub(super) life: Life,
}
