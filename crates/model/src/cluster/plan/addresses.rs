//! Addresses of nodes that are up: assigned from the provider's list, and again when the list has another one.
//!
//! A node that joins is assigned its address with its approval (`joining`). Here follow nodes that joined before there was
//! one in the list, or before a release that assigns any, and nodes of machines that get another address.
//!
//! * A node without an assigned address gets the listed one only if it has that one already. A list may have addresses
//!   at which nodes do not reach each other, and a cluster that works must not end by an update. No order names
//!   the listed one to a node that has another one, either (`Cluster::ordered_address`).
//! * A node with an assigned address follows the list, also if another owner has assigned it an address since: of two that
//!   decide, one must win. Its machine first gets an order that names the other address. A node takes it once its host has
//!   it, and a consensus member when its etcd starts again.

use std::net::IpAddr;

use crate::cluster::node_address::AssignedAddress;
use crate::cluster::plan::step::ClusterPlanStep;
use crate::cluster::plan::{ClusterPlanner, TICKET_LIFETIME};
use crate::cluster::state::{ClusterMember, ClusterNode, MembershipOrder};
use crate::time::between;

impl ClusterPlanner<'_> {
    /// Plans the address of a node that is up.
    pub(super) fn plan_address(&mut self, member: &ClusterMember, node: &ClusterNode) {
        let Some(listed) = member.listed_address else { return };
        let is_moved = match node.addresses.assigned {
            AssignedAddress::Unknown => return,
            AssignedAddress::Nothing if node.addresses.recorded != Some(listed) => return,
            AssignedAddress::Nothing => false,
            AssignedAddress::Address(assigned) if assigned == listed => {
                if self.lacks_ordered_address(member, node, listed) {
                    self.push_order(member, MembershipOrder::Join);
                }
                return;
            }
            AssignedAddress::Address(_) => true,
        };
        let (machine, key) = (member.machine, node.key);
        self.push_step(ClusterPlanStep::AssignAddress { machine, key, address: listed, is_moved });
    }

    /// Whether the machine reports another address than the assigned one, which the curators refuse, because its order names
    /// none: a shepherd of an earlier release ordered it to join. A host with several addresses may choose another one at
    /// each start.
    fn lacks_ordered_address(&self, member: &ClusterMember, node: &ClusterNode, listed: IpAddr) -> bool {
        let reported = member.report.as_ref().and_then(|report| report.address.as_ref());
        let is_another = reported.is_some_and(|reported| reported.parse::<IpAddr>() != Ok(listed));
        let is_old = member.last_order.is_none_or(|order| between(order.sent_at, self.now) > TICKET_LIFETIME);
        let is_elsewhere = node.addresses.recorded.is_some_and(|recorded| recorded != listed);
        !is_elsewhere && is_another && is_old
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::node_address::NodeAddresses;
    use crate::cluster::plan::tests::{healthy_cluster, observed, order, plan_text};
    use crate::cluster::state::{CuratorAnswer, MemberReport, NodeState};

    const LISTED: &str = "10.0.0.9";
    const OTHER: &str = "10.0.0.8";

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn node_is_assigned_the_address_in_its_providers_list_and_follows_it() {
        let none = AssignedAddress::Nothing;
        let assigned = |text: &str| AssignedAddress::Address(ip(text));
        let join = "ask 9 join";
        for (case, listed, recorded, assigned, reported, ordered_ago, expected) in [
            ("no address in the list", None, Some(LISTED), none, LISTED, 300, ""),
            ("assigned, and no longer in the list", None, Some(LISTED), assigned(LISTED), LISTED, 300, ""),
            ("it has the listed one", Some(LISTED), Some(LISTED), none, LISTED, 300, "assign 9 10.0.0.9"),
            ("it has another one", Some(LISTED), Some(OTHER), none, OTHER, 300, ""),
            ("it has none yet", Some(LISTED), None, none, LISTED, 300, ""),
            ("an earlier release", Some(LISTED), Some(LISTED), AssignedAddress::Unknown, LISTED, 300, ""),
            ("as it should be", Some(LISTED), Some(LISTED), assigned(LISTED), LISTED, 300, ""),
            (
                "the list has another one",
                Some(LISTED),
                Some(OTHER),
                assigned(OTHER),
                OTHER,
                300,
                "assign 9 10.0.0.9 by an order",
            ),
            (
                "another owner has assigned another one",
                Some(LISTED),
                Some(LISTED),
                assigned(OTHER),
                LISTED,
                300,
                "assign 9 10.0.0.9 by an order",
            ),
            ("it has not moved yet", Some(LISTED), Some(OTHER), assigned(LISTED), OTHER, 9000, ""),
            ("its order names no address", Some(LISTED), None, assigned(LISTED), OTHER, 9000, join),
            (
                "its order names no address, and it has several",
                Some(LISTED),
                Some(LISTED),
                assigned(LISTED),
                OTHER,
                9000,
                join,
            ),
            ("just ordered", Some(LISTED), None, assigned(LISTED), OTHER, 300, ""),
            ("it has just begun", Some(LISTED), None, assigned(LISTED), LISTED, 9000, ""),
        ] {
            let mut cluster = healthy_cluster(3);
            let worker = cluster.members.last_mut().unwrap();
            worker.listed_address = listed.map(ip);
            worker.last_order = Some(order(MembershipOrder::Join, ordered_ago));
            let report = worker.report.take().unwrap();
            worker.report = Some(MemberReport { address: Some(reported.to_owned()), ..report });
            let node = observed(&mut cluster).nodes.last_mut().unwrap();
            node.addresses = NodeAddresses { recorded: recorded.map(ip), assigned };
            assert_eq!(plan_text(&cluster, &[]), expected, "{case}");
        }
    }

    #[test]
    fn order_names_the_listed_address_unless_a_node_that_is_up_was_not_assigned_it() {
        let none = AssignedAddress::Nothing;
        for (case, state, recorded, assigned, expected) in [
            ("it registers", NodeState::New, None, none, Some(LISTED)),
            ("it has the listed one", NodeState::Up, Some(LISTED), none, Some(LISTED)),
            ("it has another one of before", NodeState::Up, Some(OTHER), none, None),
            ("an earlier release leads", NodeState::Up, Some(OTHER), AssignedAddress::Unknown, None),
            ("it has none yet", NodeState::Up, None, none, None),
            ("it is to move", NodeState::Up, Some(OTHER), AssignedAddress::Address(ip(OTHER)), Some(LISTED)),
        ] {
            let mut cluster = healthy_cluster(3);
            let machine = cluster.members[3].machine;
            assert_eq!(cluster.ordered_address(machine), None, "nothing is in the list");
            cluster.members[3].listed_address = Some(ip(LISTED));
            let node = observed(&mut cluster).nodes.last_mut().unwrap();
            node.state = state;
            node.addresses = NodeAddresses { recorded: recorded.map(ip), assigned };
            assert_eq!(cluster.ordered_address(machine), expected.map(ip), "{case}");
            cluster.observed = CuratorAnswer::NotQueried;
            assert_eq!(
                cluster.ordered_address(machine),
                Some(ip(LISTED)),
                "{case}, and nothing is known of nodes"
            );
        }
    }

    #[test]
    fn approval_assigns_the_listed_address() {
        let mut cluster = healthy_cluster(3);
        observed(&mut cluster).nodes.last_mut().unwrap().state = NodeState::New;
        assert_eq!(plan_text(&cluster, &[]), "approve 9");
        cluster.members[3].listed_address = Some(ip(LISTED));
        assert_eq!(plan_text(&cluster, &[]), "approve 9 at 10.0.0.9");
    }
}
