//! Being known to others: a session in the BMDB that says where this process is reached.
//!
//! Whoever listens holds one for as long as it does, so that what died is forgotten with its session. One
//! that was lost, because the database was away, is replaced when that can be asked again.

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
    details: serde_json::Value,
    metrics: Metrics,
}

impl Presence {
    /// Makes `details` known as those of a `component`, once it is started.
    #[must_use]
    pub fn new(
        sessions: Sessions,
        component: &'static str,
        details: serde_json::Value,
        metrics: Metrics,
    ) -> Self {
        Self { sessions, component, details, metrics }
    }

    /// Starts the session.
    pub async fn start(&self) -> Result<Session, BmdbError> {
        let session = self.sessions.start(self.component, self.details.clone()).await?;
        self.metrics.sessions_started.get_or_create(&ByComponent { component: self.component }).inc();
        Ok(session)
    }

    /// Keeps a session alive for others to find us by; returns the one to close.
    pub async fn stay(self, mut session: Session, stop: CancellationToken) -> Option<Session> {
        loop {
            let lost = session.lost().clone();
            if stop.run_until_cancelled(lost.cancelled()).await.is_none() {
                return Some(session);
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
