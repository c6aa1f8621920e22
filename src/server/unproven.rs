//! Connections that nobody has proven anything by yet.
//!
//! A handshake proves a key, and anyone can make keys. What proves a connection
//! to be an agent's is a heartbeat whose machine id and key belong together. Until
//! then it is borne for a while only, and only so many of one source: beyond that
//! the oldest gives way (`half_open.rs`), because an agent says its heartbeat at
//! once and what has waited longest is what says nothing.
//!
//! While the database is away nobody can prove anything. An agent that was told
//! so keeps its connection for some minutes, so that a fleet whose database comes
//! back does not begin with shaking hands; it counts on against its source.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// What is known of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    Nothing,
    /// A heartbeat could not be judged, by no fault of whoever sent it.
    Excused,
    Proven,
}

/// How long a connection may prove nothing.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// From the handshake to a heartbeat that is an agent's.
    pub first_heartbeat: Duration,
    /// After each heartbeat that could not be judged: longer than an agent's longest pause.
    pub excused: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self { first_heartbeat: Duration::from_secs(30), excused: Duration::from_mins(5) }
    }
}

/// Notes what a connection proves; goes with the connection.
#[derive(Debug)]
pub struct Proof(watch::Sender<Standing>);

/// The other end of a [`Proof`].
#[derive(Debug)]
pub struct Awaited(watch::Receiver<Standing>);

/// How the wait for a proof ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It is an agent's.
    Proven,
    /// It was closed.
    Gone,
    /// It has to be closed: too many of its source are newer.
    GaveWay,
    /// It has to be closed: its time is over.
    Silent,
}

impl Proof {
    /// Nothing is proven yet.
    #[must_use]
    pub fn new() -> (Self, Awaited) {
        let (sender, receiver) = watch::channel(Standing::Nothing);
        (Self(sender), Awaited(receiver))
    }

    /// A heartbeat's machine id and key belong together.
    pub fn proven(&self) {
        self.0.send_if_modified(|standing| std::mem::replace(standing, Standing::Proven) != Standing::Proven);
    }

    /// A heartbeat could not be judged.
    pub fn excused(&self) {
        self.0.send_if_modified(|standing| {
            let counts = *standing != Standing::Proven;
            if counts {
                *standing = Standing::Excused;
            }
            counts
        });
    }
}

impl Awaited {
    /// Waits for the proof, no longer than `patience` says and only until `gives_way`.
    pub async fn ended(mut self, patience: Patience, gives_way: &CancellationToken) -> Ended {
        let mut limit = patience.first_heartbeat;
        loop {
            let changed = tokio::select! {
                changed = timeout(limit, self.0.changed()) => changed,
                () = gives_way.cancelled() => return Ended::GaveWay,
            };
            match changed {
                Err(_) => return Ended::Silent,
                Ok(Err(_)) => return Ended::Gone,
                Ok(Ok(())) => match *self.0.borrow_and_update() {
                    Standing::Proven => return Ended::Proven,
                    Standing::Excused | Standing::Nothing => limit = patience.excused,
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

    async fn ended(awaited: Awaited, first_heartbeat: Duration, excused: Duration) -> Ended {
        let patience = Patience { first_heartbeat, excused };
        let ended = timeout(FAR_TOO_LONG, awaited.ended(patience, &CancellationToken::new())).await;
        ended.expect("it waits by the wrong limit")
    }

    #[tokio::test]
    async fn who_says_nothing_runs_out_of_time_and_who_proves_itself_does_not() {
        let (_silent, awaited) = Proof::new();
        assert_eq!(ended(awaited, SHORT, LONG).await, Ended::Silent);
        let (agent, awaited) = Proof::new();
        agent.proven();
        assert_eq!(ended(awaited, LONG, LONG).await, Ended::Proven);
        let (closed, awaited) = Proof::new();
        drop(closed);
        assert_eq!(ended(awaited, LONG, LONG).await, Ended::Gone);
    }

    #[tokio::test]
    async fn who_cannot_be_judged_has_another_limit_and_an_outage_unproves_nobody() {
        let (agent, awaited) = Proof::new();
        agent.excused();
        assert_eq!(ended(awaited, LONG, SHORT).await, Ended::Silent);
        let (agent, awaited) = Proof::new();
        agent.excused();
        agent.proven();
        agent.excused();
        assert_eq!(ended(awaited, LONG, LONG).await, Ended::Proven);
    }

    #[tokio::test]
    async fn who_has_to_give_way_does_so_at_once() {
        let (_silent, awaited) = Proof::new();
        let gives_way = CancellationToken::new();
        gives_way.cancel();
        let patience = Patience { first_heartbeat: LONG, excused: LONG };
        assert_eq!(awaited.ended(patience, &gives_way).await, Ended::GaveWay);
    }
}
