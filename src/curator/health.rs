//! What a leader thinks of a node from the heartbeats it heard itself.
//!
//! | the node | last heartbeat | this leader listens for | verdict |
//! | --- | --- | --- | --- |
//! | is not up | whenever | however long | unknown |
//! | is up | none | less than the timeout | unknown |
//! | is up | none | at least the timeout | timeout |
//! | is up | longer ago than the timeout | however long | timeout |
//! | is up | not longer ago than that | however long | healthy |
//!
//! Heartbeats are kept in the leader's memory alone: to write each of them would cost etcd more than they are
//! worth, and a new leader hears from every node that lives within one timeout. Until then it has only its
//! own deafness as evidence, and says that it does not know.
//!
//! Moments are those of a clock that never jumps, counted from any beginning. A node's own clock is never
//! asked.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::curator::node::{Node, State};
use crate::curator::node_id::NodeId;
use crate::proto::curator::v1 as wire;

/// How often a node says that it lives.
pub const INTERVAL: Duration = Duration::from_secs(5);
/// How long silence is no evidence: one heartbeat may be lost.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// What a leader thinks of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// It cannot know, or it does not matter.
    Unknown,
    /// A heartbeat is overdue.
    HeartbeatTimeout {
        /// How long ago the last one was heard; none when this leader heard none.
        since_heartbeat: Option<Duration>,
    },
    /// A heartbeat arrived in time.
    Healthy {
        /// How long ago.
        since_heartbeat: Duration,
    },
}

impl Health {
    /// As it is sent.
    #[must_use]
    pub fn to_wire(self) -> wire::NodeHealth {
        use wire::node_health::Kind;
        let (kind, since) = match self {
            Self::Unknown => (Kind::Unknown, None),
            Self::HeartbeatTimeout { since_heartbeat } => (Kind::HeartbeatTimeout, since_heartbeat),
            Self::Healthy { since_heartbeat } => (Kind::Healthy, Some(since_heartbeat)),
        };
        let since_heartbeat_ms = since.map(|since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX));
        wire::NodeHealth { kind: kind.into(), since_heartbeat_ms }
    }
}

/// What to think of a node in this state.
///
/// `listening` is how long this leader has been listening, `since_heartbeat` how long ago it heard the node
/// last.
#[must_use]
pub fn health(state: State, since_heartbeat: Option<Duration>, listening: Duration) -> Health {
    match since_heartbeat {
        _ if state != State::Up => Health::Unknown,
        None if listening < TIMEOUT => Health::Unknown,
        Some(since_heartbeat) if since_heartbeat <= TIMEOUT => Health::Healthy { since_heartbeat },
        since_heartbeat => Health::HeartbeatTimeout { since_heartbeat },
    }
}

/// The heartbeats that one leader heard.
#[derive(Clone, Debug)]
pub struct Heartbeats {
    listening_since: Duration,
    last: BTreeMap<NodeId, Duration>,
}

impl Heartbeats {
    /// Begins to listen at `now`.
    #[must_use]
    pub const fn listening_since(now: Duration) -> Self {
        Self { listening_since: now, last: BTreeMap::new() }
    }

    /// Notes a heartbeat at `now`.
    pub fn hear(&mut self, node: NodeId, now: Duration) {
        let last = self.last.entry(node).or_insert(now);
        *last = now.max(*last);
    }

    /// What to think of the node at `now`.
    #[must_use]
    pub fn health(&self, node: &Node, now: Duration) -> Health {
        let since = self.last.get(&node.id).map(|last| now.saturating_sub(*last));
        health(node.state, since, now.saturating_sub(self.listening_since))
    }

    /// Forgets all nodes but these, so that those who come and go do not stay in memory.
    pub fn keep_only(&mut self, exists: impl Fn(&NodeId) -> bool) {
        self.last.retain(|node, _| exists(node));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curator::node::tests::up;
    use crate::curator::node_id::tests::node_id;

    const fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn verdict_follows_the_table() {
        let timeout = |since| Health::HeartbeatTimeout { since_heartbeat: since };
        let healthy = |since| Health::Healthy { since_heartbeat: since };
        for (state, since, listening, expected) in [
            (State::New, Some(ms(1)), ms(60_000), Health::Unknown),
            (State::Standby, None, ms(60_000), Health::Unknown),
            (State::Decommissioned, Some(ms(1)), ms(60_000), Health::Unknown),
            (State::Up, None, ms(0), Health::Unknown),
            (State::Up, None, ms(9_999), Health::Unknown),
            (State::Up, None, ms(10_000), timeout(None)),
            (State::Up, Some(ms(0)), ms(0), healthy(ms(0))),
            (State::Up, Some(ms(10_000)), ms(60_000), healthy(ms(10_000))),
            (State::Up, Some(ms(10_001)), ms(60_000), timeout(Some(ms(10_001)))),
        ] {
            assert_eq!(health(state, since, listening), expected, "{state:?} {since:?} {listening:?}");
        }
    }

    #[test]
    fn one_lost_heartbeat_is_no_evidence() {
        assert!(INTERVAL * 2 <= TIMEOUT);
    }

    #[test]
    fn new_leader_does_not_know_and_then_hears() {
        let node = up(1);
        let mut heard = Heartbeats::listening_since(ms(100_000));
        assert_eq!(heard.health(&node, ms(101_000)), Health::Unknown);
        assert_eq!(heard.health(&node, ms(110_000)), Health::HeartbeatTimeout { since_heartbeat: None });
        heard.hear(node.id, ms(111_000));
        assert_eq!(heard.health(&node, ms(112_000)), Health::Healthy { since_heartbeat: ms(1_000) });
        heard.hear(node.id, ms(110_500));
        assert_eq!(heard.health(&node, ms(121_000)), Health::Healthy { since_heartbeat: ms(10_000) });
        let silent = Health::HeartbeatTimeout { since_heartbeat: Some(ms(10_001)) };
        assert_eq!(heard.health(&node, ms(121_001)), silent);
        heard.keep_only(|id| *id == node_id(2));
        assert_eq!(heard.health(&node, ms(121_001)), Health::HeartbeatTimeout { since_heartbeat: None });
    }

    #[test]
    fn time_since_a_heartbeat_is_sent_only_where_there_is_one() {
        assert_eq!(Health::Unknown.to_wire().since_heartbeat_ms, None);
        assert_eq!(Health::Healthy { since_heartbeat: ms(7) }.to_wire().since_heartbeat_ms, Some(7));
        assert_eq!(Health::HeartbeatTimeout { since_heartbeat: None }.to_wire().since_heartbeat_ms, None);
    }
}
