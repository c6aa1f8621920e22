//! Authentication state of a connection before its first accepted heartbeat.
//!
//! A handshake proves a key, and anyone can generate keys. A connection is proven to be an agent's by a call whose
//! machine id and key belong together: nearly always its first heartbeat. Until then it is tolerated only for a while,
//! and only a limited number per network. Beyond that the oldest is evicted (`half_open.rs`): an agent sends its
//! heartbeat at once, so the oldest connection is a silent one.
//!
//! While the database is away, no connection can be authenticated. An agent whose heartbeat was answered with that
//! error keeps its connection for some minutes, so that the fleet does not start with handshakes when the database
//! comes back. The connection still counts towards its network's limit.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// The authentication state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AuthState {
    Unauthenticated,
    /// A heartbeat could not be checked, through no fault of the peer.
    Deferred,
    Authenticated,
}

/// How long a connection may stay unauthenticated.
#[derive(Clone, Copy, Debug)]
pub struct PreAuthTimeouts {
    /// From the handshake to an agent's heartbeat.
    pub first_heartbeat: Duration,
    /// After each heartbeat that could not be checked: longer than an agent's longest pause.
    pub after_deferral: Duration,
}

impl Default for PreAuthTimeouts {
    fn default() -> Self {
        Self { first_heartbeat: Duration::from_secs(30), after_deferral: Duration::from_mins(5) }
    }
}

/// Records the authentication state; dropped with the connection.
#[derive(Debug)]
pub struct PreAuthGuard(watch::Sender<AuthState>);

/// The receiving side of a [`PreAuthGuard`].
#[derive(Debug)]
pub struct PreAuthWatcher(watch::Receiver<AuthState>);

/// How the wait for authentication ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreAuthOutcome {
    /// The connection is an agent's.
    Authenticated,
    /// The peer closed the connection.
    Closed,
    /// The connection must be closed: its network has too many newer ones.
    Evicted,
    /// The connection must be closed: its time is over.
    TimedOut,
}

impl PreAuthGuard {
    /// Creates an unauthenticated state with both sides.
    #[must_use]
    pub fn new() -> (Self, PreAuthWatcher) {
        let (sender, receiver) = watch::channel(AuthState::Unauthenticated);
        (Self(sender), PreAuthWatcher(receiver))
    }

    /// Records that a heartbeat's machine id and key belong together.
    pub fn mark_authenticated(&self) {
        self.0.send_if_modified(|state| {
            std::mem::replace(state, AuthState::Authenticated) != AuthState::Authenticated
        });
    }

    /// Records that a heartbeat could not be checked.
    pub fn defer(&self) {
        self.0.send_if_modified(|state| {
            let changes = *state != AuthState::Authenticated;
            if changes {
                *state = AuthState::Deferred;
            }
            changes
        });
    }
}

impl PreAuthWatcher {
    /// Waits for authentication, at most as long as `timeouts` allow and only until `evicted` is cancelled.
    pub async fn wait_for_auth(
        mut self,
        timeouts: PreAuthTimeouts,
        evicted: &CancellationToken,
    ) -> PreAuthOutcome {
        let mut limit = timeouts.first_heartbeat;
        loop {
            let changed = tokio::select! {
                changed = timeout(limit, self.0.changed()) => changed,
                () = evicted.cancelled() => return PreAuthOutcome::Evicted,
            };
            match changed {
                Err(_) => return PreAuthOutcome::TimedOut,
                Ok(Err(_)) => return PreAuthOutcome::Closed,
                Ok(Ok(())) => match *self.0.borrow_and_update() {
                    AuthState::Authenticated => return PreAuthOutcome::Authenticated,
                    AuthState::Deferred | AuthState::Unauthenticated => limit = timeouts.after_deferral,
                },
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_hours(1);
    const FAR_TOO_LONG: Duration = Duration::from_mins(5);

    async fn wait_for_outcome(
        awaited: PreAuthWatcher,
        first_heartbeat: Duration,
        excused: Duration,
    ) -> PreAuthOutcome {
        let timeouts = PreAuthTimeouts { first_heartbeat, after_deferral: excused };
        let ended = timeout(FAR_TOO_LONG, awaited.wait_for_auth(timeouts, &CancellationToken::new())).await;
        ended.expect("it waits by the wrong limit")
    }

    #[tokio::test]
    async fn silent_connection_times_out_and_authenticated_one_stays() {
        let (_silent, awaited) = PreAuthGuard::new();
        assert_eq!(wait_for_outcome(awaited, SHORT, LONG).await, PreAuthOutcome::TimedOut);
        let (agent, awaited) = PreAuthGuard::new();
        agent.mark_authenticated();
        assert_eq!(wait_for_outcome(awaited, LONG, LONG).await, PreAuthOutcome::Authenticated);
        let (closed, awaited) = PreAuthGuard::new();
        drop(closed);
        assert_eq!(wait_for_outcome(awaited, LONG, LONG).await, PreAuthOutcome::Closed);
    }

    #[tokio::test]
    async fn deferred_connection_gets_more_time_and_outage_keeps_auth() {
        let (agent, awaited) = PreAuthGuard::new();
        agent.defer();
        assert_eq!(wait_for_outcome(awaited, LONG, SHORT).await, PreAuthOutcome::TimedOut);
        let (agent, awaited) = PreAuthGuard::new();
        agent.defer();
        agent.mark_authenticated();
        agent.defer();
        assert_eq!(wait_for_outcome(awaited, LONG, LONG).await, PreAuthOutcome::Authenticated);
    }

    #[tokio::test]
    async fn evicted_connection_ends_at_once() {
        let (_silent, awaited) = PreAuthGuard::new();
        let evicted = CancellationToken::new();
        evicted.cancel();
        let timeouts = PreAuthTimeouts { first_heartbeat: LONG, after_deferral: LONG };
        assert_eq!(awaited.wait_for_auth(timeouts, &evicted).await, PreAuthOutcome::Evicted);
    }
}
