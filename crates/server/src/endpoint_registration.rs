//! Endpoint registration: publish this listener's addresses in a BMDB session.
//!
//! A listener has a session for as long as it runs, so the endpoints of a process that died disappear with its
//! session. A session that was lost because the database was away is replaced once the database answers again. The
//! published details may change, for example with a renewed certificate, and are then updated.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use bmdb::error::BmdbError;
use bmdb::metrics::{ByComponent, Metrics};
use bmdb::session::{Session, Sessions};

/// The component and its published details.
#[derive(Clone)]
pub struct EndpointRegistration {
    sessions: Sessions,
    component: &'static str,
    details: Arc<dyn Fn() -> serde_json::Value + Send + Sync>,
    metrics: Metrics,
}

impl EndpointRegistration {
    /// Creates a registration that publishes the current value of `details` for `component` once it is started.
    #[must_use]
    pub fn new(
        sessions: Sessions,
        component: &'static str,
        details: impl Fn() -> serde_json::Value + Send + Sync + 'static,
        metrics: Metrics,
    ) -> Self {
        Self { sessions, component, details: Arc::new(details), metrics }
    }

    /// Starts a session with the current details.
    pub async fn start_session(&self) -> Result<Session, BmdbError> {
        let session = self.sessions.start(self.component, (self.details)()).await?;
        self.metrics.sessions_started.get_or_create(&ByComponent { component: self.component }).inc();
        Ok(session)
    }

    /// Keeps a session alive and updates its details after each `look_again`. Replaces a lost session, and returns the
    /// session to close at `stop`.
    pub async fn keep_registered(
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
                    if let Err(error) = self.sessions.update_runtime_info(&session, (self.details)()).await {
                        tracing::debug!(%error, component = self.component, "cannot tell what is known of it now");
                    }
                    continue;
                }
            }
            session = loop {
                stop.run_until_cancelled(tokio::time::sleep(Duration::from_secs(1))).await?;
                match self.start_session().await {
                    Ok(session) => break session,
                    Err(error) => {
                        tracing::warn!(%error, component = self.component, "there is no session to be found by; trying again");
                    }
                }
            };
        }
    }
}
