//! Being known to others: a session in the BMDB that says where this process is reached.
//!
//! Whoever listens holds one for as long as it does, so that what died is forgotten with its session. One
//! that was lost, because the database was away, is replaced when that can be asked again. What is told
//! under it may change, as a certificate does that is renewed, and is told anew.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::bmdb::error::BmdbError;
use crate::bmdb::metrics::{ByComponent, Metrics};
use crate::bmdb::session::{Session, Sessions};

/// What is made known, and by whom.
#[derive(Clone)]
pub struct Presence {
    sessions: Sessions,
    component: &'static str,
    details: Arc<dyn Fn() -> serde_json::Value + Send + Sync>,
    metrics: Metrics,
}

impl Presence {
    /// Makes known what `details` says at the time, as a `component`'s, once it is started.
    #[must_use]
    pub fn new(
        sessions: Sessions,
        component: &'static str,
        details: impl Fn() -> serde_json::Value + Send + Sync + 'static,
        metrics: Metrics,
    ) -> Self {
        Self { sessions, component, details: Arc::new(details), metrics }
    }

    /// Starts the session.
    pub async fn start(&self) -> Result<Session, BmdbError> {
        let session = self.sessions.start(self.component, (self.details)()).await?;
        self.metrics.sessions_started.get_or_create(&ByComponent { component: self.component }).inc();
        Ok(session)
    }

    /// Keeps a session alive for others to find us by, and tells anew what is known after each `look_again`;
    /// returns the one to close.
    pub async fn stay(
        self,
        mut session: Session,
        look_again: Duration,
        stop: CancellationToken,
    ) -> Option<Session> {
        loop {
            let lost = session.lost().clone();
            tokio::select! {
                () = stop.cancelled() => return Some(session),
                () = lost.cancelled() => {}
                () = tokio::time::sleep(look_again) => {
                    if let Err(error) = self.sessions.tell(&session, (self.details)()).await {
                        tracing::debug!(%error, component = self.component, "cannot tell what is known of it now");
                    }
                    continue;
                }
            }
            session = loop {
                stop.run_until_cancelled(tokio::time::sleep(Duration::from_secs(1))).await?;
                match self.start().await {
                    Ok(session) => break session,
                    Err(error) => {
                        tracing::warn!(%error, component = self.component, "there is no session to be found by; trying again");
                    }
                }
            };
        }
    }
}
