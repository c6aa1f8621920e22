//! Checks the addresses of calling nodes against their connections ([`node_address`]).
//!
//! A claim of another address is rare, so all nodes are read from etcd for it: the cache is a moment late, and two
//! nodes may claim one address at the same time. Such a claim is made under the membership lock.
//!
//! An assigned address is kept for its node, also while that is silent. Two machines may exchange their addresses, so a
//! node that was assigned another one does not keep the address that it has from the node that it is assigned to.
//!
//! A record may have an address that its node reported to a release that believed it. Such an address stays in the record
//! and keeps nobody out: a node keeps only an address that is proved for it. What proves it is the assignment, or the source
//! of the node's heartbeats to this leader. A node that has sent this leader none may still prove it, so its record counts
//! until it would have sent one.

use std::net::IpAddr;

use curator_client::node::{Node, NodeState};
use curator_client::node_id::NodeId;

use crate::node_address::{self, AddressEvidence};
use crate::node_health::NodeHealth;
use crate::service::error::ServiceError;
use crate::service::leader_context::{Caller, LeaderContext};
use crate::service::store::StoredNodes;

impl LeaderContext {
    /// Checks the address that the calling node reports. `known` is its record.
    pub(super) async fn check_reported_address(
        &self,
        caller: &Caller,
        known: &Node,
        reported: IpAddr,
    ) -> Result<(), ServiceError> {
        // Nothing changes: the other nodes need not be read.
        if recorded_address(known) == Some(reported) {
            return Ok(());
        }
        let evidence = self.address_evidence(caller, known, reported);
        let nodes = self.store.nodes().await?;
        let holder = |address| self.address_holder(&nodes, address, known);
        Ok(node_address::check_reported(self.address_rule, &evidence, holder)?)
    }

    /// Checks that a certificate for the calling node may name this address.
    pub(super) async fn check_certified_address(
        &self,
        caller: &Caller,
        known: &Node,
        address: IpAddr,
    ) -> Result<(), ServiceError> {
        let evidence = self.address_evidence(caller, known, address);
        let nodes = self.store.nodes().await?;
        let holder = |address| self.address_holder(&nodes, address, known);
        Ok(node_address::check_proved(self.address_rule, &evidence, holder)?)
    }

    fn address_evidence(&self, caller: &Caller, known: &Node, reported: IpAddr) -> AddressEvidence {
        AddressEvidence {
            node: known.id,
            assigned: known.assigned_address,
            connection: Some(caller.remote.ip()),
            reported,
            is_own_node: known.id == self.node_id,
            recorded: recorded_address(known),
        }
    }

    /// Another node that keeps the address from `claimer`, as far as this leader can know.
    fn address_holder(&self, nodes: &StoredNodes, address: IpAddr, claimer: &Node) -> Option<NodeId> {
        let now = self.clock.monotonic();
        let heartbeats = self.lock_heartbeats();
        let is_own = claimer.id == self.node_id;
        let holds = |node: &&Node| {
            let is_proved = node.id == self.node_id
                || assigned_to(node) == Some(address)
                || heartbeats.source(&node.id) == Some(address);
            let keeps = keeps_address(heartbeats.node_health(node, now), is_own, is_proved);
            node.id != claimer.id && holds_address(node, address, claimer, keeps, is_own)
        };
        nodes.nodes.values().find(holds).map(|node| node.id)
    }
}

/// Whether `node` keeps the address from `claimer`, another node. `keeps`: the node would keep it if its record has it, by
/// [`keeps_address`]. `is_own`: the claimer is the node of this leader.
fn holds_address(node: &Node, address: IpAddr, claimer: &Node, keeps: bool, is_own: bool) -> bool {
    let assigned = assigned_to(node);
    let has_it = node.state == NodeState::Up
        && keeps
        && recorded_address(node).is_some_and(|recorded| recorded.to_canonical() == address);
    if assigned_to(claimer) == Some(address) {
        // Of two nodes with one assigned address, the one that has it keeps it. A node with another one has to move.
        return has_it && assigned.is_none_or(|assigned| assigned == address);
    }
    // The node of the leader may be the only one of a restored cluster, on the machine of a node that is gone.
    let is_reserved = assigned == Some(address) && node.state != NodeState::Decommissioned && !is_own;
    has_it || is_reserved
}

/// The address that an owner assigned to a node.
fn assigned_to(node: &Node) -> Option<IpAddr> {
    node.assigned_address.map(|address| address.to_canonical())
}

/// Whether a node of this health keeps its address when another node claims it. `is_own`: the node of this leader does.
/// `is_proved`: the address is proved for the node that has it.
///
/// One that lives and has not proved it gives way: it reported the address to a release that believed it.
/// A new leader has received no heartbeat yet, and a node that lives must not lose its address to that. But the node of
/// the leader itself, such as that of a restored cluster, is the one through which the others are found.
const fn keeps_address(health: NodeHealth, is_own: bool, is_proved: bool) -> bool {
    match health {
        NodeHealth::Healthy { .. } => is_proved,
        NodeHealth::Unknown => !is_own,
        NodeHealth::HeartbeatTimeout { .. } => false,
    }
}

/// The address in the record of a node.
pub(super) fn recorded_address(node: &Node) -> Option<IpAddr> {
    node.status.as_ref().map(|status| status.address)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use curator_client::node_status::NodeStatus;
    use curator_client::testing::{at, key};
    use proto::curator::v1 as wire;

    use super::*;

    /// A node that is up, with its recorded and its assigned address.
    fn node(number: u8, recorded: Option<&str>, assigned: Option<&str>) -> Node {
        let status = recorded.map(|address| {
            let report = wire::NodeStatus { external_address: address.to_owned(), ..Default::default() };
            NodeStatus::from_report(&report, at(1)).unwrap()
        });
        let assigned_address = assigned.map(|address| address.parse().unwrap());
        Node { status, assigned_address, ..Node::new(key(number), NodeState::Up, at(1)) }
    }

    #[test]
    fn assigned_address_is_kept_for_its_node() {
        const X: &str = "10.0.0.7";
        const Y: &str = "10.0.0.8";
        let silent = |assigned| node(3, Some(X), assigned);
        for (case, holder, keeps, claimer, expected) in [
            ("a living node has it", node(3, Some(X), None), true, node(1, None, None), true),
            ("a silent node has it", silent(None), false, node(1, None, None), false),
            ("a silent node was assigned it", silent(Some(X)), false, node(1, None, None), true),
            (
                "it was assigned, and nothing is recorded",
                node(3, None, Some(X)),
                true,
                node(1, None, None),
                true,
            ),
            ("both were assigned it, and one has it", silent(Some(X)), true, node(1, None, Some(X)), true),
            (
                "both were assigned it, and that one is silent",
                silent(Some(X)),
                false,
                node(1, None, Some(X)),
                false,
            ),
            (
                "the one that has it was assigned another one",
                silent(Some(Y)),
                true,
                node(1, None, Some(X)),
                false,
            ),
            ("nobody was assigned it, and it is to move", silent(Some(Y)), true, node(1, None, None), true),
            ("another one", node(3, Some(Y), Some(Y)), true, node(1, None, None), false),
        ] {
            let holds = holds_address(&holder, X.parse().unwrap(), &claimer, keeps, false);
            assert_eq!(holds, expected, "{case}");
        }
        let restored = holds_address(&silent(Some(X)), X.parse().unwrap(), &node(1, None, None), false, true);
        assert!(!restored, "the first node of a restored cluster, on the machine of a node that is gone");
        let gone = Node { state: NodeState::Decommissioned, ..silent(Some(X)) };
        assert!(
            !holds_address(&gone, X.parse().unwrap(), &node(1, None, None), false, false),
            "decommissioned"
        );
    }

    #[test]
    fn node_keeps_its_address_until_it_is_known_to_be_silent() {
        let healthy = NodeHealth::Healthy { since_heartbeat: Duration::ZERO };
        let silent = NodeHealth::HeartbeatTimeout { since_heartbeat: None };
        for (health, is_own, expected) in [
            (healthy, false, true),
            (healthy, true, true),
            (NodeHealth::Unknown, false, true),
            (NodeHealth::Unknown, true, false),
            (silent, false, false),
            (silent, true, false),
        ] {
            assert_eq!(keeps_address(health, is_own, true), expected, "{health:?} {is_own}");
            // Its next heartbeat proves the address, or shows that nothing does.
            let expected = expected && health == NodeHealth::Unknown;
            assert_eq!(keeps_address(health, is_own, false), expected, "not proved: {health:?} {is_own}");
        }
    }
}
