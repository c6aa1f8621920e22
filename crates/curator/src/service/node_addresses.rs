//! Checks the addresses of calling nodes against their connections ([`node_address`]).
//!
//! A claim of another address is rare, so all nodes are read from etcd for it: the cache is a moment late, and two
//! nodes may claim one address at the same time. Such a claim is made under the membership lock.

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
        let holder = |address| self.living_holder(&nodes, address, known.id);
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
        let holder = |address| self.living_holder(&nodes, address, known.id);
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

    /// Another node that has the address, is up, and sends heartbeats, as far as this leader can know.
    fn living_holder(&self, nodes: &StoredNodes, address: IpAddr, except: NodeId) -> Option<NodeId> {
        let now = self.clock.monotonic();
        let heartbeats = self.lock_heartbeats();
        let lives = |node: &&Node| {
            node.id != except
                && node.state == NodeState::Up
                && recorded_address(node).is_some_and(|recorded| recorded.to_canonical() == address)
                && keeps_address(heartbeats.node_health(node, now), except == self.node_id)
        };
        nodes.nodes.values().find(lives).map(|node| node.id)
    }
}

/// Whether a node of this health keeps its address when another node claims it. `is_own`: the node of this leader does.
///
/// A new leader has received no heartbeat yet, and a node that lives must not lose its address to that. But the node of
/// the leader itself, such as that of a restored cluster, is the one through which the others are found.
const fn keeps_address(health: NodeHealth, is_own: bool) -> bool {
    match health {
        NodeHealth::Healthy { .. } => true,
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

    use super::*;

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
            assert_eq!(keeps_address(health, is_own), expected, "{health:?} {is_own}");
        }
    }
}
