//! Node health from heartbeats, as the leader sees it.
//!
//! | the node | last heartbeat | this leader listens for | verdict |
//! | --- | --- | --- | --- |
//! | is not up | whenever | however long | unknown |
//! | is up | none | less than the timeout | unknown |
//! | is up | none | at least the timeout | timeout |
//! | is up | longer ago than the timeout | however long | timeout |
//! | is up | not longer ago than that | however long | healthy |
//!
//! Heartbeats are in the leader's memory alone: writing each of them would cost etcd more than they are worth, and a
//! new leader receives one from every living node within one timeout. Until then the leader has no evidence, and
//! reports that the health is unknown.
//!
//! The tracker also has the source of each node's last heartbeat, which proves an address of the node.
//!
//! Times are those of a monotonic clock with any origin. The clocks of the nodes are never used.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use curator_client::node::{Node, NodeState};
use curator_client::node_id::NodeId;
use proto::curator::v1 as wire;

/// How often a node sends a heartbeat.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
/// How long a node may be silent: one heartbeat may be lost.
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(10);

/// The health of a node, as the leader sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeHealth {
    /// The leader has no evidence yet, or the node is not up.
    Unknown,
    /// No heartbeat arrived within [`HEARTBEAT_TIMEOUT`].
    HeartbeatTimeout {
        /// Time since the last heartbeat; `None` if this leader received none.
        since_heartbeat: Option<Duration>,
    },
    /// A heartbeat arrived in time.
    Healthy {
        /// Time since the last heartbeat.
        since_heartbeat: Duration,
    },
}

impl NodeHealth {
    /// The health as the API shows it.
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

/// The health of a node in this state.
///
/// `listening` is how long this leader has been receiving heartbeats, `since_heartbeat` the time since the node's last
/// one.
fn evaluate_health(state: NodeState, since_heartbeat: Option<Duration>, listening: Duration) -> NodeHealth {
    match since_heartbeat {
        _ if state != NodeState::Up => NodeHealth::Unknown,
        None if listening < HEARTBEAT_TIMEOUT => NodeHealth::Unknown,
        Some(since_heartbeat) if since_heartbeat <= HEARTBEAT_TIMEOUT => {
            NodeHealth::Healthy { since_heartbeat }
        }
        since_heartbeat => NodeHealth::HeartbeatTimeout { since_heartbeat },
    }
}

/// The heartbeats that one leader received.
#[derive(Clone, Debug)]
pub struct HeartbeatTracker {
    listening_since: Duration,
    last_heartbeat: BTreeMap<NodeId, Duration>,
    /// Where the last heartbeat of each node came from.
    sources: BTreeMap<NodeId, IpAddr>,
}

impl HeartbeatTracker {
    /// A tracker that receives heartbeats from `now` on.
    #[must_use]
    pub const fn start_at(now: Duration) -> Self {
        Self { listening_since: now, last_heartbeat: BTreeMap::new(), sources: BTreeMap::new() }
    }

    /// Records a heartbeat that arrived at `now`.
    pub fn record_heartbeat(&mut self, node: NodeId, now: Duration) {
        let last = self.last_heartbeat.entry(node).or_insert(now);
        *last = now.max(*last);
    }

    /// Records the source of the connection on which a heartbeat arrived.
    pub fn record_source(&mut self, node: NodeId, source: IpAddr) {
        self.sources.insert(node, source.to_canonical());
    }

    /// The source of the node's last heartbeat, which the node cannot choose; `None` if this leader received none.
    #[must_use]
    pub fn source(&self, node: &NodeId) -> Option<IpAddr> {
        self.sources.get(node).copied()
    }

    /// The health of the node at `now`.
    #[must_use]
    pub fn node_health(&self, node: &Node, now: Duration) -> NodeHealth {
        let since = self.last_heartbeat.get(&node.id).map(|last| now.saturating_sub(*last));
        evaluate_health(node.state, since, now.saturating_sub(self.listening_since))
    }

    /// How long the node has been silent at `now`: since its last heartbeat, or since heartbeats are received at all.
    #[must_use]
    pub fn silence(&self, node: &NodeId, now: Duration) -> Duration {
        now.saturating_sub(*self.last_heartbeat.get(node).unwrap_or(&self.listening_since))
    }

    /// Forgets nodes that no longer exist, so that memory does not grow.
    pub fn retain_nodes(&mut self, exists: impl Fn(&NodeId) -> bool) {
        self.last_heartbeat.retain(|node, _| exists(node));
        self.sources.retain(|node, _| exists(node));
    }
}

#[cfg(test)]
mod tests {
    use curator_client::testing::{node_id, up};

    use super::*;

    const fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    #[test]
    fn health_follows_the_table() {
        let timeout = |since| NodeHealth::HeartbeatTimeout { since_heartbeat: since };
        let healthy = |since| NodeHealth::Healthy { since_heartbeat: since };
        for (state, since, listening, expected) in [
            (NodeState::New, Some(ms(1)), ms(60_000), NodeHealth::Unknown),
            (NodeState::Standby, None, ms(60_000), NodeHealth::Unknown),
            (NodeState::Decommissioned, Some(ms(1)), ms(60_000), NodeHealth::Unknown),
            (NodeState::Up, None, ms(0), NodeHealth::Unknown),
            (NodeState::Up, None, ms(9_999), NodeHealth::Unknown),
            (NodeState::Up, None, ms(10_000), timeout(None)),
            (NodeState::Up, Some(ms(0)), ms(0), healthy(ms(0))),
            (NodeState::Up, Some(ms(10_000)), ms(60_000), healthy(ms(10_000))),
            (NodeState::Up, Some(ms(10_001)), ms(60_000), timeout(Some(ms(10_001)))),
        ] {
            assert_eq!(
                evaluate_health(state, since, listening),
                expected,
                "{state:?} {since:?} {listening:?}"
            );
        }
    }

    #[test]
    fn one_lost_heartbeat_does_not_time_out() {
        assert!(HEARTBEAT_INTERVAL * 2 <= HEARTBEAT_TIMEOUT);
    }

    #[test]
    fn health_is_unknown_until_a_new_leader_receives_heartbeats() {
        let node = up(1);
        let mut tracker = HeartbeatTracker::start_at(ms(100_000));
        assert_eq!(tracker.node_health(&node, ms(101_000)), NodeHealth::Unknown);
        assert_eq!(
            tracker.node_health(&node, ms(110_000)),
            NodeHealth::HeartbeatTimeout { since_heartbeat: None }
        );
        tracker.record_heartbeat(node.id, ms(111_000));
        assert_eq!(
            tracker.node_health(&node, ms(112_000)),
            NodeHealth::Healthy { since_heartbeat: ms(1_000) }
        );
        tracker.record_heartbeat(node.id, ms(110_500));
        assert_eq!(
            tracker.node_health(&node, ms(121_000)),
            NodeHealth::Healthy { since_heartbeat: ms(10_000) }
        );
        let silent = NodeHealth::HeartbeatTimeout { since_heartbeat: Some(ms(10_001)) };
        assert_eq!(tracker.node_health(&node, ms(121_001)), silent);
        tracker.retain_nodes(|id| *id == node_id(2));
        assert_eq!(
            tracker.node_health(&node, ms(121_001)),
            NodeHealth::HeartbeatTimeout { since_heartbeat: None }
        );
    }

    #[test]
    fn source_is_that_of_the_last_heartbeat() {
        let mut tracker = HeartbeatTracker::start_at(ms(0));
        assert_eq!(tracker.source(&node_id(1)), None);
        for (source, expected) in [("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.2", "10.0.0.2")] {
            tracker.record_source(node_id(1), source.parse().unwrap());
            assert_eq!(tracker.source(&node_id(1)), Some(expected.parse().unwrap()), "{source}");
        }
        assert_eq!(tracker.source(&node_id(2)), None);
        tracker.retain_nodes(|id| *id == node_id(2));
        assert_eq!(tracker.source(&node_id(1)), None);
    }

    #[test]
    fn elapsed_time_is_sent_only_with_a_heartbeat() {
        assert_eq!(NodeHealth::Unknown.to_wire().since_heartbeat_ms, None);
        assert_eq!(NodeHealth::Healthy { since_heartbeat: ms(7) }.to_wire().since_heartbeat_ms, Some(7));
        assert_eq!(NodeHealth::HeartbeatTimeout { since_heartbeat: None }.to_wire().since_heartbeat_ms, None);
    }
}
