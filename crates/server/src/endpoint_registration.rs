//! Endpoint registration: publish the addresses of a listener in a BMDB session.
//!
//! A listener has a session for as long as it runs, so the endpoints of a process that died disappear with its
//! session. A session that was lost because the database was away is replaced once the database answers again. The
//! published details may change, for example with a renewed certificate, and are then updated.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::error::ServerError;
use bmdb::connection::error::BmdbError;
use bmdb::engine::session::{Session, Sessions};
use bmdb::metrics::Metrics;
use bmdb::metrics::labels::ByComponent;

/// Longest time until changed details are published.
const MAX_REFRESH_INTERVAL: Duration = Duration::from_mins(1);

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

    /// Keeps a session alive, and looks after each `look_again` whether its details have changed. Replaces a lost session, and returns the
    /// session to close at `stop`.
    pub async fn keep_registered(
        self,
        mut session: Session,
        look_again: Duration,
        stop: CancellationToken,
    ) -> Option<Session> {
        let look_again = look_again.min(MAX_REFRESH_INTERVAL);
        let mut published = None;
        loop {
            let lost = session.lost().clone();
            tokio::select! {
                () = stop.cancelled() => return Some(session),
                () = lost.cancelled() => {}
                () = tokio::time::sleep(look_again) => {
                    let details = (self.details)();
                    if published.as_ref() == Some(&details) {
                        continue;
                    }
                    match self.sessions.update_runtime_info(&session, details.clone()).await {
                        Ok(()) => published = Some(details),
                        Err(error) => {
                            tracing::debug!(%error, component = self.component, "cannot publish its changed details");
                        }
                    }
                    continue;
                }
            }
            session = loop {
                stop.run_until_cancelled(tokio::time::sleep(Duration::from_secs(1))).await?;
                match self.start_session().await {
                    Ok(session) => {
                        published = None;
                        break session;
                    }
                    Err(error) => {
                        tracing::warn!(%error, component = self.component, "there is no session to be found by; trying again");
                    }
                }
            };
        }
    }
}

/// Host name or address of an endpoint, without brackets.
pub(crate) fn parse_endpoint_host(endpoint: &str) -> Result<String, ServerError> {
    let odd = || ServerError::Endpoint(endpoint.to_owned());
    let (host, port) = endpoint.rsplit_once(':').ok_or_else(odd)?;
    let port: u16 = port.parse().map_err(|_| odd())?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let name = bare.unwrap_or(host);
    // An agent could not use an endpoint that TLS cannot verify.
    let usable = port != 0 && bare.is_some() == name.contains(':');
    match rustls::pki_types::ServerName::try_from(name) {
        Ok(_) if usable => Ok(name.to_owned()),
        _ => Err(odd()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_host_is_parsed() {
        for (endpoint, host) in [
            ("shepherd.example:8443", "shepherd.example"),
            ("192.0.2.1:1", "192.0.2.1"),
            ("[2001:db8::1]:8443", "2001:db8::1"),
        ] {
            assert_eq!(parse_endpoint_host(endpoint).unwrap(), host);
        }
        for odd in
            ["", "host", "host:", "host:0", "host:65536", "::1:80", "[::1:80", ":80", "a b:80", "[host]:80"]
        {
            let text = parse_endpoint_host(odd).unwrap_err().to_string();
            assert!(text.contains("is no endpoint that agents could reach"), "{odd}");
        }
    }
}
