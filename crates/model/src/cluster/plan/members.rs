//! Membership of machines: which are chosen, which have to leave, and when a membership ends.
//!
//! This is how a cluster replaces a dead member. The machine is marked as leaving. It no longer counts, so another
//! machine is chosen. The new node gets its roles ([`roles`][super::roles]) and the old one is removed
//! ([`removal`][super::removal]). Scale-down takes the same way: surplus machines are marked as leaving.

use std::collections::BTreeMap;

use crate::cluster::plan::placement::{removal_order, spread_over_locations};
use crate::cluster::plan::step::ClusterPlanStep;
use crate::cluster::plan::{ClusterPlanner, MachineLocations};
use crate::cluster::spec::ClusterPart;
use crate::cluster::state::{CandidateMachine, ClusterMember, MembershipOrder, NodeHealth, ObservedCluster};

impl ClusterPlanner<'_> {
    /// Deletes the cluster: every machine gets the order to leave. Its membership ends when it has left or was given
    /// up.
    pub(super) fn plan_deletion(&mut self) {
        if self.cluster.members.is_empty() {
            return self.push_step(ClusterPlanStep::DeleteCluster);
        }
        for member in &self.cluster.members {
            self.remove_member(member, "its cluster ended");
        }
    }

    /// Ends a machine's membership: it leaves first, and nothing else has to be done for it.
    pub(super) fn remove_member(&mut self, member: &ClusterMember, how: &str) {
        if member.last_order.is_none() && member.key().is_none() {
            let how = format!("{how}, and it never received an order");
            self.push_step(ClusterPlanStep::RemoveMember { machine: member.machine, reason: how });
        } else if member.last_order.is_none_or(|order| order.order != MembershipOrder::Leave) {
            self.push_order(member, MembershipOrder::Leave);
        } else if member.has_left() {
            self.push_step(ClusterPlanStep::RemoveMember {
                machine: member.machine,
                reason: format!("{how}, and it has left"),
            });
        } else if member.is_given_up() {
            let how = format!(
                "{how}; its machine is {}, and is ordered to leave if it reports again",
                member.phase
            );
            self.push_step(ClusterPlanStep::RemoveMember { machine: member.machine, reason: how });
        } else {
            self.push_wait(member, "it was ordered to leave, and has not reported that it has left");
        }
    }

    pub(super) fn add_members(
        &mut self,
        parts: &[ClusterPart],
        candidates: &[CandidateMachine],
        places: &MachineLocations,
    ) {
        let mut left: Vec<CandidateMachine> = candidates.to_vec();
        for &part in parts {
            let lacking = self.cluster.missing_members(part);
            if lacking == 0 {
                continue;
            }
            let mut beside: BTreeMap<Option<String>, u32> = BTreeMap::new();
            let staying = self.cluster.members.iter().filter(|member| member.leave_reason.is_none());
            for member in staying.filter(|member| member.part == part) {
                *beside.entry(places.get(&member.machine).cloned().flatten()).or_default() += 1;
            }
            let chosen = spread_over_locations(&left, beside, lacking);
            left.retain(|candidate| !chosen.contains(candidate));
            let found = u32::try_from(chosen.len()).unwrap_or(u32::MAX);
            for candidate in chosen {
                self.push_step(ClusterPlanStep::AddMember { machine: candidate.machine, part });
            }
            if found < lacking {
                let fits = match self.cluster.spec.selector.to_string().as_str() {
                    "" => "is free".to_owned(),
                    text => format!("is free and fits {text}"),
                };
                let more = lacking - found;
                self.plan.wait_reasons.push(format!(
                    "{more} more {} {} wanted, and no machine {fits}",
                    member_noun(part, more),
                    if more == 1 { "is" } else { "are" }
                ));
            }
        }
    }

    /// Marks machines that have to leave from now on: retired and lost ones.
    pub(super) fn mark_leaving(&mut self, seen: Option<&ObservedCluster>) {
        for member in self.cluster.members.iter().filter(|member| member.leave_reason.is_none()) {
            let node = member.key().and_then(|key| seen?.node_by_key(&key));
            let received = node.is_some_and(|node| node.health == NodeHealth::Healthy);
            let why = if member.retiring {
                "it is being retired"
            } else if member.is_given_up() && !received {
                "its machine is lost"
            } else {
                continue;
            };
            self.push_step(ClusterPlanStep::MarkLeaving {
                machine: member.machine,
                reason: why.to_owned(),
                surplus: false,
            });
        }
    }

    /// Marks surplus machines as leaving, one of the control plane at a time.
    pub(super) fn scale_down(&mut self, seen: &ObservedCluster) {
        for part in ClusterPart::ALL {
            let order = removal_order(&self.cluster.members, part, Some(seen));
            let desired = self.cluster.spec.desired_count(part);
            let wanted = usize::try_from(desired).unwrap_or(usize::MAX);
            let surplus = order.len().saturating_sub(wanted);
            let leaving = self
                .cluster
                .members
                .iter()
                .any(|member| member.part == part && member.leave_reason.is_some());
            let at_once = match part {
                ClusterPart::ControlPlane => usize::from(!leaving).min(surplus),
                ClusterPart::Worker => surplus,
            };
            let why = format!("the cluster should have {desired} {}", member_noun(part, desired));
            for member in order.into_iter().take(at_once) {
                self.push_step(ClusterPlanStep::MarkLeaving {
                    machine: member.machine,
                    reason: why.clone(),
                    surplus: true,
                });
            }
        }
    }
}

/// What `count` machines of a part are called.
const fn member_noun(part: ClusterPart, count: u32) -> &'static str {
    match (part, count) {
        (ClusterPart::ControlPlane, 1) => "member of the control plane",
        (ClusterPart::ControlPlane, _) => "members of the control plane",
        (ClusterPart::Worker, 1) => "worker",
        (ClusterPart::Worker, _) => "workers",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::plan::plan_cluster;
    use crate::cluster::plan::tests::{at, healthy_cluster, member, order, plan_text};
    use crate::cluster::spec::tests::spec;
    use crate::cluster::state::{Cluster, CuratorAnswer, MemberReport};
    use crate::phase::Phase;

    #[test]
    fn cluster_is_deleted_when_its_machines_have_left() {
        let mut cluster =
            Cluster { deleting: true, observed: CuratorAnswer::NotQueried, ..healthy_cluster(1) };
        assert_eq!(plan_text(&cluster, &[]), "ask 1 leave; ask 9 leave");
        cluster.members[0].last_order = Some(order(MembershipOrder::Leave, 5));
        cluster.members[0].report = Some(MemberReport { generation: 3, ..MemberReport::default() });
        cluster.members[1].last_order = Some(order(MembershipOrder::Leave, 5));
        cluster.members[1].report = Some(MemberReport { generation: 2, ..MemberReport::default() });
        assert_eq!(
            plan_text(&cluster, &[]),
            "forget 1; 9 waits: it was ordered to leave, and has not reported that it has left"
        );
        cluster.members[1].phase = Phase::NeedsHuman;
        assert_eq!(plan_text(&cluster, &[]), "forget 1; forget 9");
        cluster.members = vec![member(9, ClusterPart::Worker)];
        assert_eq!(plan_text(&cluster, &[]), "forget 9", "it never received an order");
        cluster.members.clear();
        assert_eq!(plan_text(&cluster, &[]), "remove");
    }

    #[test]
    fn scale_down_removes_the_control_plane_one_by_one() {
        let mut cluster = healthy_cluster(5);
        cluster.spec = spec(3, 0);
        assert_eq!(
            plan_text(&cluster, &[]),
            "leaving 5: the cluster should have 3 members of the control plane; \
             leaving 9: the cluster should have 0 workers"
        );
        let plan = plan_cluster(&cluster, &[], &MachineLocations::new(), at(1000));
        let by_order =
            |step: &ClusterPlanStep| matches!(step, ClusterPlanStep::MarkLeaving { surplus: true, .. });
        assert!(plan.steps.iter().all(by_order), "its operator may keep the authority: {plan:?}");
        cluster.members[4].leave_reason = Some("too many".to_owned());
        cluster.members[5].leave_reason = Some("too many".to_owned());
        assert_eq!(plan_text(&cluster, &[]), "decommission node-9; node-5 + -consensus-member");
    }

    #[test]
    fn node_healthy_to_its_curator_is_not_replaced() {
        for phase in [Phase::Silent, Phase::Recovering, Phase::NeedsHuman, Phase::Quarantined] {
            let mut cluster = healthy_cluster(3);
            cluster.members[2].phase = phase;
            assert_eq!(plan_text(&cluster, &[4]), "", "{phase}");
        }
    }
}
