//! Join requests: a machine becomes a node, and its key is approved.
//!
//! A machine gets the order to join with a ticket, registers its key with the curators, is approved, and takes its
//! certificate. With [`JoinApproval::Automatic`] the shepherd auto-approves exactly the key that the machine reported
//! over its agent channel. With [`JoinApproval::Manual`] a person approves each key. The approval assigns the node the
//! address of its machine in the provider's list.

use std::time::Duration;

use crate::cluster::plan::step::ClusterPlanStep;
use crate::cluster::plan::{ClusterPlanner, TICKET_LIFETIME};
use crate::cluster::spec::JoinApproval;
use crate::cluster::state::{
    ClusterMember, ClusterNode, LastOrder, MemberReport, MembershipOrder, NodeState, ObservedCluster,
};
use crate::time::between;

/// How long an error of a machine may pass by itself before the order is repeated.
const ORDER_RETRY_AFTER: Duration = Duration::from_mins(2);

impl ClusterPlanner<'_> {
    /// Plans for a machine that stays: it has to become a node with its roles.
    pub(super) fn plan_member(
        &mut self,
        member: &ClusterMember,
        seen: &ObservedCluster,
        consensus: &mut Option<ClusterPlanStep>,
    ) {
        let report = member.report.clone().unwrap_or_default();
        let Some(key) = report.key else { return self.plan_join(member) };
        let node = seen.node_by_key(&key);
        if self.must_rejoin(member, &report, node) {
            return self.push_order(member, MembershipOrder::Join);
        }
        let Some(node) = node else {
            if report.ca_certificate.is_some() {
                if member.last_order.is_none_or(|order| order.order != MembershipOrder::Leave) {
                    return self.push_order(member, MembershipOrder::Leave);
                }
                return self
                    .push_wait(member, "its node was deleted, and it has to leave before it can join again");
            }
            return self.plan_join(member);
        };
        match node.state {
            NodeState::New => match self.cluster.spec.approval {
                JoinApproval::Manual if member.approved_key == Some(key) => self.push_approval(member, key),
                JoinApproval::Automatic => self.push_approval(member, key),
                JoinApproval::Manual => self.push_wait(
                    member,
                    format!(
                        "a person has to approve its key; run: shepherdctl cluster approve {} {}",
                        self.cluster.spec.name, member.name
                    ),
                ),
            },
            NodeState::Standby => self.push_wait(member, "it was let in, and takes its certificate"),
            NodeState::Decommissioned => {
                if member.last_order.is_none_or(|order| order.order != MembershipOrder::Leave) {
                    return self.push_order(member, MembershipOrder::Leave);
                }
                self.push_wait(
                    member,
                    "its node was decommissioned, and it has to leave before it can join again",
                );
            }
            NodeState::Up => {
                self.plan_address(member, node);
                self.plan_roles(member, node, seen, consensus);
            }
        }
    }

    fn push_approval(&mut self, member: &ClusterMember, key: [u8; 32]) {
        let (machine, address) = (member.machine, member.listed_address);
        self.push_step(ClusterPlanStep::ApproveNode { machine, key, address });
    }

    /// Whether a machine needs a new order to join because its cluster was restored. A machine whose node is up keeps
    /// its key: the order carries the epoch and the addresses of the curators, and its ticket is not used. A machine
    /// that registered or waited for approval during the restore gets the order again. So does one that has registered
    /// by an order which names a stolen authority. A machine that was ordered to leave gets no other order.
    fn must_rejoin(&self, member: &ClusterMember, report: &MemberReport, node: Option<&ClusterNode>) -> bool {
        let restored = self.cluster.restored_at;
        let reported = |order: &LastOrder| {
            order.order == MembershipOrder::Leave
                || order.order == MembershipOrder::Join
                    && restored.is_none_or(|restored| order.sent_at > restored)
        };
        let lives_on =
            node.is_some_and(|node| node.state == NodeState::Up) && report.ca_certificate.is_some();
        let registers = report.ca_certificate.is_none()
            && node.is_none_or(|node| node.state != NodeState::Decommissioned)
            && member.last_order.is_some_and(|order| order.order == MembershipOrder::Join);
        if registers && self.names_stolen_authority(member) {
            return true;
        }
        report.epoch < self.cluster.epoch
            && (lives_on || registers)
            && !member.last_order.as_ref().is_some_and(reported)
    }

    /// Sends the order to join to a machine that has no node yet.
    fn plan_join(&mut self, member: &ClusterMember) {
        let Some(order) = member.last_order else { return self.push_order(member, MembershipOrder::Join) };
        let age = between(order.sent_at, self.now);
        let report = member.report.clone().unwrap_or_default();
        match order.order {
            MembershipOrder::Leave if !member.has_left() => {
                self.push_wait(member, "it has to leave before it can join again");
            }
            MembershipOrder::Leave | MembershipOrder::Found => self.push_order(member, MembershipOrder::Join),
            MembershipOrder::Join if age > TICKET_LIFETIME || self.names_stolen_authority(member) => {
                self.push_order(member, MembershipOrder::Join);
            }
            MembershipOrder::Join if report.generation != order.generation => {
                self.push_wait(member, "it was ordered to join, and has not accepted the order");
            }
            MembershipOrder::Join => match report.error {
                Some(_) if age > ORDER_RETRY_AFTER => self.push_order(member, MembershipOrder::Join),
                Some(error) => self.push_wait(member, format!("it cannot join: {error}")),
                None => self.push_wait(member, "it was ordered to join, and registers"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::plan::tests::{at, healthy_cluster, key, member, node, observed, order, plan_text};
    use crate::cluster::spec::ClusterPart;
    use crate::cluster::state::Cluster;

    #[test]
    fn machine_becomes_a_node_step_by_step() {
        let report = |generation, number: Option<u8>, error: Option<&str>| {
            Some(MemberReport {
                generation,
                key: number.map(key),
                error: error.map(str::to_owned),
                ..MemberReport::default()
            })
        };
        let (join, leave) = (Some(MembershipOrder::Join), Some(MembershipOrder::Leave));
        let new = |state| Some(ClusterNode { state, ..node(9, &[]) });
        for (name, what, ago, member_report, record, expected) in [
            ("no order yet", None, 0, None, None, "ask 9 join"),
            (
                "just ordered",
                join,
                5,
                None,
                None,
                "9 waits: it was ordered to join, and has not accepted the order",
            ),
            (
                "an older order",
                join,
                5,
                report(2, None, None),
                None,
                "9 waits: it was ordered to join, and has not",
            ),
            ("its ticket is over", join, 3700, None, None, "ask 9 join"),
            (
                "it begins",
                join,
                5,
                report(3, None, None),
                None,
                "9 waits: it was ordered to join, and registers",
            ),
            (
                "it registers",
                join,
                5,
                report(3, Some(9), None),
                None,
                "9 waits: it was ordered to join, and registers",
            ),
            ("refused", join, 5, report(3, Some(9), Some("no")), None, "9 waits: it cannot join: no"),
            ("refused for long", join, 200, report(3, Some(9), Some("no")), None, "ask 9 join"),
            ("registered", join, 5, report(3, Some(9), None), new(NodeState::New), "approve 9"),
            (
                "another key registered",
                join,
                5,
                report(3, Some(8), None),
                new(NodeState::New),
                "9 waits: it was ordered to join, and registers",
            ),
            ("let in", join, 5, report(3, Some(9), None), new(NodeState::Standby), "9 waits: it was let in"),
            ("up", join, 5, report(3, Some(9), None), new(NodeState::Up), ""),
            (
                "was founder and lost its disk",
                Some(MembershipOrder::Found),
                5,
                report(0, None, None),
                None,
                "ask 9 join",
            ),
            (
                "is leaving",
                leave,
                5,
                report(2, Some(9), None),
                None,
                "9 waits: it has to leave before it can join again",
            ),
            ("has left", leave, 5, report(3, None, None), None, "ask 9 join"),
            (
                "gone for ever",
                join,
                5,
                report(3, Some(9), None),
                new(NodeState::Decommissioned),
                "ask 9 leave",
            ),
        ] {
            let mut cluster = healthy_cluster(3);
            let worker = cluster.members.last_mut().unwrap();
            worker.last_order = what.map(|what| order(what, ago));
            worker.report = member_report;
            let nodes = &mut observed(&mut cluster).nodes;
            nodes.pop();
            nodes.extend(record);
            let text = plan_text(&cluster, &[]);
            assert!(text.starts_with(expected) && text.is_empty() == expected.is_empty(), "{name}: {text}");
        }
    }

    #[test]
    fn manual_approval_is_never_automatic() {
        let mut cluster = healthy_cluster(3);
        cluster.spec.approval = JoinApproval::Manual;
        observed(&mut cluster).nodes.last_mut().unwrap().state = NodeState::New;
        assert_eq!(
            plan_text(&cluster, &[]),
            "9 waits: a person has to approve its key; run: shepherdctl cluster approve ams m9"
        );
        cluster.members[3].approved_key = Some(key(8));
        assert!(
            plan_text(&cluster, &[]).starts_with("9 waits: a person"),
            "another key than it has was approved"
        );
        cluster.members[3].approved_key = Some(key(9));
        assert_eq!(plan_text(&cluster, &[]), "approve 9");
    }

    #[test]
    fn surviving_member_rejoins_the_restored_cluster_once() {
        let mut cluster = Cluster { epoch: 2, restored_at: Some(at(900)), ..healthy_cluster(1) };
        assert_eq!(plan_text(&cluster, &[]), "ask 1 join; ask 9 join");
        cluster.members[0].report.as_mut().unwrap().epoch = 2;
        assert_eq!(plan_text(&cluster, &[]), "ask 9 join", "it reports the new epoch");
        cluster.members[1].last_order = Some(order(MembershipOrder::Join, 50));
        assert_eq!(plan_text(&cluster, &[]), "", "it was ordered to join");
    }

    #[test]
    fn member_registering_during_restore_is_ordered_again() {
        let mut cluster = Cluster { epoch: 2, restored_at: Some(at(900)), ..healthy_cluster(1) };
        for number in [0, 1] {
            cluster.members[number].report.as_mut().unwrap().epoch = 2;
        }
        let waiting = MemberReport { generation: 3, key: Some(key(20)), ..MemberReport::default() };
        cluster.members.push(ClusterMember {
            last_order: Some(order(MembershipOrder::Join, 50)),
            report: Some(waiting),
            ..member(20, ClusterPart::Worker)
        });
        cluster.spec.workers = 2;
        let last = cluster.members.len() - 1;
        let registers = "20 waits: it was ordered to join, and registers";
        assert_eq!(
            plan_text(&cluster, &[]),
            registers,
            "it was ordered to join since then, and gets the new addresses"
        );
        cluster.members[last].last_order =
            Some(LastOrder { sent_at: at(899), ..order(MembershipOrder::Join, 50) });
        assert_eq!(plan_text(&cluster, &[]), "ask 20 join", "the snapshot has no node of it");
        observed(&mut cluster).nodes.push(ClusterNode { state: NodeState::Standby, ..node(20, &[]) });
        assert_eq!(plan_text(&cluster, &[]), "ask 20 join", "the snapshot has it as let in");
    }

    #[test]
    fn leaving_member_of_a_restored_cluster_gets_no_other_order() {
        let mut cluster = Cluster { epoch: 2, restored_at: Some(at(900)), ..healthy_cluster(1) };
        cluster.members[0].report.as_mut().unwrap().epoch = 2;
        // Its node joined after the snapshot.
        observed(&mut cluster).nodes.retain(|node| node.key != key(9));
        assert_eq!(plan_text(&cluster, &[]), "ask 9 leave");
        cluster.members[1].last_order = Some(order(MembershipOrder::Leave, 50));
        let waits = "9 waits: its node was deleted, and it has to leave before it can join again";
        assert_eq!(plan_text(&cluster, &[]), waits);
    }
}
