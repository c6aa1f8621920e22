//! Remove nodes: those of machines that leave, stale ones, and ones that an old snapshot has brought back.
//!
//! A node gives up its vote in etcd first, if the quorum permits. Then it loses its roles, is decommissioned, and its
//! record is deleted: one step per pass.
//!
//! # The authority of the cluster
//!
//! The disk of a member of etcd has the key of the cluster's authority. So the curators replace the authority when a
//! membership ends, unless the order by which the machine leaves keeps it. A disk that is known to be wiped would
//! be another reason to keep it, and there is none: no agent and no provider of this release wipes a machine, and a machine
//! is retired only after its node is removed. That a machine reports to have left means that it deleted its files.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::declaration::Digest;
use crate::cluster::kubernetes::CONTROLLER_ROLE;
use crate::cluster::plan::ClusterPlanner;
use crate::cluster::plan::step::ClusterPlanStep;
use crate::cluster::quorum::majority;
use crate::cluster::spec::ClusterPart;
use crate::cluster::state::{
    CONSENSUS_MEMBER_ROLE, ClusterMember, ClusterNode, NodeHealth, NodeState, ObservedCluster,
};
use crate::ids::MachineId;

impl ClusterPlanner<'_> {
    /// Plans for a machine that leaves: first its node is removed, then the machine.
    pub(super) fn drain_member(
        &mut self,
        member: &ClusterMember,
        why: &str,
        seen: &ObservedCluster,
        consensus: &mut Option<ClusterPlanStep>,
    ) {
        let nodes: Vec<&ClusterNode> = seen
            .nodes
            .iter()
            .filter(|node| node.machine == Some(member.machine) || Some(node.key) == member.key())
            .collect();
        if nodes.is_empty() {
            return self.remove_member(member, why);
        }
        for node in nodes {
            let step = match next_removal_step(node) {
                NodeRemoval::RemoveVote => match self.check_vote_removal(node, seen) {
                    Ok(step) if consensus.is_none() => {
                        *consensus = Some(step);
                        continue;
                    }
                    Ok(_) => {
                        self.push_wait(
                            member,
                            format!("it leaves, because {why}; members of etcd go one at a time"),
                        );
                        continue;
                    }
                    Err(not_yet) => {
                        self.push_wait(member, format!("it leaves, because {why}; {not_yet}"));
                        continue;
                    }
                },
                NodeRemoval::Step(step) => step,
            };
            self.push_step(step);
        }
    }

    /// Removes nodes that their machine no longer is, and nodes that left before. Nodes that someone else approved
    /// stay.
    pub(super) fn delete_stale_nodes(
        &mut self,
        seen: &ObservedCluster,
        consensus: &mut Option<ClusterPlanStep>,
    ) {
        let current: BTreeMap<MachineId, &ClusterMember> =
            self.cluster.members.iter().map(|member| (member.machine, member)).collect();
        let keys: BTreeSet<Digest> = self.cluster.members.iter().filter_map(ClusterMember::key).collect();
        for node in &seen.nodes {
            let current = node.machine.and_then(|machine| current.get(&machine));
            // A machine that has not reported may be about to report this key.
            let stale = current.is_some_and(|member| {
                member.leave_reason.is_none()
                    && node.health != NodeHealth::Healthy
                    && member.report.as_ref().is_some_and(|report| report.key != Some(node.key))
            });
            // The node left before, and an older snapshot has brought it back.
            let is_back = current.is_none()
                && self.cluster.departed_keys.contains(&node.key)
                && !keys.contains(&node.key);
            if !stale && !is_back {
                continue;
            }
            match next_removal_step(node) {
                NodeRemoval::Step(step) => self.push_step(step),
                NodeRemoval::RemoveVote => match self.check_vote_removal(node, seen) {
                    Ok(step) if consensus.is_none() => *consensus = Some(step),
                    Ok(_) => {}
                    Err(not_yet) => {
                        let why = if stale {
                            "whose machine is another node by now"
                        } else {
                            "which had left before"
                        };
                        let waits = format!("{}, {why}, is to go; {not_yet}", node.id);
                        self.plan.wait_reasons.push(waits);
                    }
                },
            }
        }
    }

    /// Checks that a node may lose its vote now, and returns the step; the error is the reason why not.
    fn check_vote_removal(
        &self,
        node: &ClusterNode,
        seen: &ObservedCluster,
    ) -> Result<ClusterPlanStep, String> {
        let own = seen.etcd_members.iter().find(|member| member.node.as_ref() == Some(&node.id));
        let (voters, reached) = seen.vote_counts();
        let reached_itself = own.is_some_and(|own| own.reachable && !own.learner);
        let others = reached - usize::from(reached_itself);
        let after = voters - usize::from(own.is_some_and(|own| !own.learner));
        if after == 0 || others < majority(after) || reached < majority(voters) {
            return Err(format!("its vote is needed: {others} of the {after} other members are reached"));
        }
        let staying: BTreeSet<[u8; 32]> = self
            .cluster
            .members
            .iter()
            .filter(|member| member.leave_reason.is_none() && member.part == ClusterPart::ControlPlane)
            .filter_map(ClusterMember::key)
            .filter(|key| *key != node.key)
            .collect();
        let taken_over = seen.etcd_members.iter().filter(|member| !member.learner && member.reachable);
        let taken_over = taken_over.filter(|member| {
            let of = |id: &String| seen.nodes.iter().find(|node| node.id == *id);
            member.node.as_ref().and_then(of).is_some_and(|node| staying.contains(&node.key))
        });
        let wanted = usize::try_from(self.cluster.spec.control_plane).unwrap_or(usize::MAX);
        // A healthy member can wait for its successor.
        if reached_itself && taken_over.count() < wanted {
            return Err("another member has to take its place first".to_owned());
        }
        // An API server depends on the member of etcd of its node.
        let first =
            if node.roles.contains(CONTROLLER_ROLE) { CONTROLLER_ROLE } else { CONSENSUS_MEMBER_ROLE };
        Ok(ClusterPlanStep::ChangeRoles {
            node: node.id.clone(),
            add: Vec::new(),
            remove: vec![first.to_owned()],
            keep_authority: self.keeps_authority(node),
        })
    }

    /// Whether an operator keeps the authority of the cluster although this node's membership ends.
    fn keeps_authority(&self, node: &ClusterNode) -> bool {
        let leaving = self.cluster.members.iter().filter(|member| member.leave_reason.is_some());
        let mut own =
            leaving.filter(|member| member.key() == Some(node.key) || node.machine == Some(member.machine));
        own.any(|member| member.keep_authority)
    }
}

/// The next step of the removal of a node.
enum NodeRemoval {
    /// Its member of etcd has to be removed, subject to `check_vote_removal`.
    RemoveVote,
    Step(ClusterPlanStep),
}

fn next_removal_step(node: &ClusterNode) -> NodeRemoval {
    if node.is_etcd_member() {
        return NodeRemoval::RemoveVote;
    }
    let id = || node.id.clone();
    NodeRemoval::Step(match node.state {
        NodeState::Up if !node.roles.is_empty() => ClusterPlanStep::ChangeRoles {
            node: id(),
            add: Vec::new(),
            remove: node.roles.iter().cloned().collect(),
            keep_authority: false,
        },
        NodeState::Up => ClusterPlanStep::DecommissionNode { node: id() },
        NodeState::New | NodeState::Standby | NodeState::Decommissioned => {
            ClusterPlanStep::DeleteNode { node: id() }
        }
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cluster::plan::tests::{
        etcd, healthy_cluster, joined, key, machine, node, observed, order, plan_text,
    };
    use crate::cluster::state::{MemberReport, MembershipOrder};
    use crate::phase::Phase;

    #[test]
    fn lost_member_loses_its_vote_first_and_is_then_replaced() {
        let mut cluster = healthy_cluster(3);
        cluster.members[2].phase = Phase::NeedsHuman;
        observed(&mut cluster).nodes[2].health = NodeHealth::Silent(Duration::from_mins(15));
        observed(&mut cluster).etcd_members[2].reachable = false;
        let first = plan_text(&cluster, &[]);
        assert!(first.starts_with("leaving 3: its machine is lost"), "{first}");
        cluster.members[2].leave_reason = Some("its machine is lost".to_owned());
        assert_eq!(plan_text(&cluster, &[4]), "choose 4 control-plane; node-3 + -consensus-member");
        observed(&mut cluster).nodes[2].roles.clear();
        observed(&mut cluster).etcd_members.pop();
        assert_eq!(plan_text(&cluster, &[4]), "choose 4 control-plane; decommission node-3");
        observed(&mut cluster).nodes[2].state = NodeState::Decommissioned;
        assert_eq!(plan_text(&cluster, &[4]), "choose 4 control-plane; delete node-3");
        observed(&mut cluster).nodes.remove(2);
        assert_eq!(plan_text(&cluster, &[4]), "choose 4 control-plane; ask 3 leave");
        cluster.members[2].last_order = Some(order(MembershipOrder::Leave, 5));
        assert_eq!(plan_text(&cluster, &[4]), "choose 4 control-plane; forget 3");
    }

    #[test]
    fn healthy_leaving_member_votes_until_it_is_replaced() {
        let mut cluster = healthy_cluster(3);
        cluster.members[0].retiring = true;
        assert_eq!(plan_text(&cluster, &[]), "leaving 1: it is being retired");
        cluster.members[0].leave_reason = Some("it is being retired".to_owned());
        let wait = "it leaves, because it is being retired; another member has to take its place first";
        assert_eq!(plan_text(&cluster, &[4]), format!("choose 4 control-plane; 1 waits: {wait}"));
        cluster.members.push(joined(4, ClusterPart::ControlPlane));
        observed(&mut cluster).nodes.push(node(4, &[]));
        assert_eq!(plan_text(&cluster, &[]), format!("node-4 +consensus-member -; 1 waits: {wait}"));
        observed(&mut cluster).nodes[4] = node(4, &[CONSENSUS_MEMBER_ROLE]);
        observed(&mut cluster).etcd_members.push(etcd(4));
        assert_eq!(plan_text(&cluster, &[]), "node-1 + -consensus-member");
    }

    #[test]
    fn authority_is_kept_only_by_the_order_that_removes_the_member() {
        let mut cluster = healthy_cluster(3);
        cluster.members[2].phase = Phase::NeedsHuman;
        cluster.members[2].leave_reason = Some("its machine is lost".to_owned());
        cluster.members.push(joined(4, ClusterPart::ControlPlane));
        observed(&mut cluster).nodes.push(node(4, &[CONSENSUS_MEMBER_ROLE]));
        observed(&mut cluster).nodes[2].health = NodeHealth::Silent(Duration::from_mins(15));
        observed(&mut cluster).etcd_members[2].reachable = false;
        observed(&mut cluster).etcd_members.push(etcd(4));
        assert_eq!(plan_text(&cluster, &[]), "node-3 + -consensus-member", "nobody knows where its disk is");
        cluster.members[1].keep_authority = true;
        assert_eq!(plan_text(&cluster, &[]), "node-3 + -consensus-member", "it is kept for another one");
        cluster.members[2].keep_authority = true;
        let kept = "node-3 + -consensus-member keeping the authority";
        assert_eq!(plan_text(&cluster, &[]), kept);
        // The key is that of its node, wherever the node says that it runs.
        observed(&mut cluster).nodes[2].machine = None;
        assert_eq!(plan_text(&cluster, &[]), kept);
        observed(&mut cluster).nodes[2].roles.clear();
        assert_eq!(plan_text(&cluster, &[]), "decommission node-3");
        // The operator who retires a machine has not ordered what follows from its new disk.
        let mut cluster = healthy_cluster(3);
        cluster.members[1].keep_authority = true;
        cluster.members[1].report = joined(12, ClusterPart::ControlPlane).report;
        observed(&mut cluster).nodes[1].health = NodeHealth::Silent(Duration::from_mins(1));
        observed(&mut cluster).etcd_members[1].reachable = false;
        let replaced = plan_text(&cluster, &[]);
        assert!(
            replaced.contains("node-2 + -consensus-member") && !replaced.contains("keeping"),
            "{replaced}"
        );
    }

    #[test]
    fn needed_vote_is_not_removed() {
        let mut cluster = healthy_cluster(3);
        cluster.members[2].leave_reason = Some("its machine is lost".to_owned());
        observed(&mut cluster).nodes[2].health = NodeHealth::Silent(Duration::from_mins(15));
        for number in [1, 2] {
            observed(&mut cluster).etcd_members[number].reachable = false;
        }
        let text = plan_text(&cluster, &[]);
        assert!(text.contains("its vote is needed: 1 of the 2 other members are reached"), "{text}");
        assert!(!text.contains("-consensus-member"), "{text}");
    }

    #[test]
    fn last_member_is_never_removed() {
        let mut cluster = healthy_cluster(1);
        cluster.members[0].leave_reason = Some("it is being retired".to_owned());
        let text = plan_text(&cluster, &[]);
        assert!(text.contains("its vote is needed: 0 of the 0"), "{text}");
    }

    #[test]
    fn machine_with_a_new_disk_rejoins_and_its_old_node_is_deleted() {
        let mut cluster = healthy_cluster(3);
        cluster.members[1].report = Some(MemberReport::default());
        // The last order is dispatched again, but its ticket is used up.
        cluster.members[1].last_order = Some(order(MembershipOrder::Join, 3700));
        observed(&mut cluster).nodes[1].health = NodeHealth::Silent(Duration::from_mins(1));
        observed(&mut cluster).etcd_members[1].reachable = false;
        assert_eq!(plan_text(&cluster, &[]), "ask 2 join; node-2 + -consensus-member");
        cluster.members[1].report = joined(12, ClusterPart::ControlPlane).report;
        cluster.members[1].last_order = Some(order(MembershipOrder::Join, 5));
        observed(&mut cluster).nodes[1].roles.clear();
        observed(&mut cluster).etcd_members.remove(1);
        observed(&mut cluster).nodes.push(ClusterNode { machine: Some(machine(2)), ..node(12, &[]) });
        assert_eq!(plan_text(&cluster, &[]), "decommission node-2; node-12 +consensus-member -");
    }

    #[test]
    fn healthy_node_is_never_deleted_as_stale() {
        let mut cluster = healthy_cluster(3);
        cluster.members[1].report =
            Some(MemberReport { generation: 3, key: Some(key(12)), ..MemberReport::default() });
        let text = plan_text(&cluster, &[]);
        assert!(!text.contains("node-2"), "{text}");
    }

    #[test]
    fn nodes_approved_by_others_are_not_touched() {
        let mut cluster = healthy_cluster(3);
        let silent = NodeHealth::Silent(Duration::from_mins(15));
        observed(&mut cluster).nodes.push(ClusterNode {
            health: silent,
            machine: None,
            ..node(50, &["web"])
        });
        observed(&mut cluster).nodes.push(ClusterNode { health: silent, ..node(51, &["web"]) });
        assert_eq!(plan_text(&cluster, &[]), "");
    }

    #[test]
    fn departed_nodes_revived_by_a_snapshot_are_deleted() {
        let mut cluster = healthy_cluster(1);
        observed(&mut cluster).nodes.push(ClusterNode { machine: Some(machine(30)), ..node(30, &[]) });
        assert_eq!(plan_text(&cluster, &[]), "", "what somebody else let in is theirs");
        cluster.departed_keys = BTreeSet::from([key(30), key(9)]);
        assert_eq!(
            plan_text(&cluster, &[]),
            "decommission node-30",
            "and that of a machine that is here by now stays"
        );
        observed(&mut cluster).nodes[2].machine = None;
        assert_eq!(plan_text(&cluster, &[]), "decommission node-30", "it is known by its key");
        observed(&mut cluster).nodes[2].state = NodeState::Decommissioned;
        assert_eq!(plan_text(&cluster, &[]), "delete node-30");
    }
}
