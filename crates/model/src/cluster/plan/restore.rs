//! Restore a cluster: the old control plane leaves, and one machine restores the snapshot.

use std::time::Duration;

use crate::cluster::plan::ClusterPlanner;
use crate::cluster::plan::step::ClusterPlanStep;
use crate::cluster::restore_programs::{EtcdPrograms, check_restore_programs};
use crate::cluster::spec::ClusterPart;
use crate::cluster::state::{CandidateMachine, ClusterMember, MembershipOrder, PendingRestore};
use crate::phase::Phase;
use crate::time::between;

/// How long reachable machines of the old control plane have to leave it. After that the cluster is restored without
/// waiting for them.
const OLD_CONTROL_PLANE_GRACE: Duration = Duration::from_mins(2);

/// Whether a machine with these programs can restore the cluster.
fn can_restore(restoring: &PendingRestore, programs: &EtcdPrograms) -> bool {
    let image = restoring.image.as_ref();
    image.is_none_or(|image| check_restore_programs(&image.etcd_version, programs).is_ok())
}

impl ClusterPlanner<'_> {
    /// Machines that may be chosen during a restore. Until one machine restores the cluster, only machines that can restore
    /// its image of etcd may be chosen, and only the target machine if an operator named one.
    pub(super) fn restore_candidates(
        &self,
        restoring: &PendingRestore,
        candidates: &[CandidateMachine],
    ) -> Vec<CandidateMachine> {
        let is_restored_by_one = self.restoring_member(restoring).is_some();
        let may = |candidate: &&CandidateMachine| {
            is_restored_by_one
                || (restoring.target_machine.is_none_or(|onto| candidate.machine == onto)
                    && can_restore(restoring, &candidate.programs))
        };
        candidates.iter().filter(may).cloned().collect()
    }

    /// The machine that restores the cluster: the first of the new control plane.
    pub(super) fn restoring_member(&self, restoring: &PendingRestore) -> Option<&ClusterMember> {
        self.cluster.members.iter().find(|member| {
            member.part == ClusterPart::ControlPlane
                && member.leave_reason.is_none()
                && member.chosen_at > restoring.requested_at
        })
    }

    /// Restores the cluster: the reachable machines of its old control plane leave first.
    pub(super) fn plan_restore(&mut self, restoring: &PendingRestore, candidates: &[CandidateMachine]) {
        let restorer = self.restoring_member(restoring).cloned();
        // A machine that has left may be needed again for the restore.
        let needed = |member: &ClusterMember| match restoring.target_machine {
            _ if restorer.is_some() => false,
            Some(onto) => member.machine == onto,
            None => {
                let free = |candidate: &CandidateMachine| can_restore(restoring, &candidate.programs);
                let programs = member.report.as_ref().map(|report| report.programs.clone());
                !candidates.iter().any(free) && can_restore(restoring, &programs.unwrap_or_default())
            }
        };
        let mut to_leave = 0;
        for member in &self.cluster.members {
            if member.part == ClusterPart::Worker {
                // Its node has to be removed first, and no curator can do that now.
                if member.leave_reason.is_some() {
                    self.push_wait(member, "it leaves once the cluster is back");
                }
                continue;
            }
            let old = member.chosen_at <= restoring.requested_at;
            let received = matches!(member.phase, Phase::Ready | Phase::Installed);
            match &member.leave_reason {
                None if old => {
                    to_leave += usize::from(received);
                    let why = "its cluster is restored from a snapshot".to_owned();
                    self.push_step(ClusterPlanStep::MarkLeaving {
                        machine: member.machine,
                        reason: why,
                        surplus: false,
                    });
                }
                // A restorer that is lost during the restore has an epoch of its own, which counts no more.
                None if member.is_given_up() || member.retiring => {
                    let why = "it was lost while the cluster was restored".to_owned();
                    self.push_step(ClusterPlanStep::MarkLeaving {
                        machine: member.machine,
                        reason: why,
                        surplus: false,
                    });
                }
                Some(_) if member.has_left() && needed(member) => {
                    let how = "it has left, and may be chosen again to restore the cluster".to_owned();
                    self.push_step(ClusterPlanStep::RemoveMember { machine: member.machine, reason: how });
                }
                Some(_) if member.has_left() => {
                    self.push_wait(member, "it has left; its node is deleted once the cluster is back");
                }
                Some(_) if member.last_order.is_none_or(|order| order.order != MembershipOrder::Leave) => {
                    to_leave += usize::from(old && received);
                    self.push_order(member, MembershipOrder::Leave);
                }
                Some(_) => {
                    to_leave += usize::from(old && received);
                    self.push_wait(member, "it was ordered to leave, and has not reported that it has left");
                }
                None => {}
            }
        }
        if to_leave > 0 && between(restoring.requested_at, self.now) < OLD_CONTROL_PLANE_GRACE {
            let waits =
                format!("{to_leave} machines of its old control plane still report and have to leave first");
            return self.plan.wait_reasons.push(waits);
        }
        if restorer.is_none() && self.plan.steps.is_empty() {
            let waits = match restoring.target_machine {
                Some(_) => "the machine onto which it will be restored is not free yet",
                None if restoring.image.is_some() => {
                    "no machine is free that it could be restored onto: that needs etcd and etcdutl of one minor version"
                }
                None => "no machine is free that it could be restored onto",
            };
            self.plan.wait_reasons.push(waits.to_owned());
        }
        self.plan_founder(restorer.as_ref(), "restores the cluster first");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::plan::tests::{
        at, healthy_cluster, key, machine, member, order, plan_text, programs,
    };
    use crate::cluster::spec::tests::spec;
    use crate::cluster::state::{Cluster, CuratorAnswer, MemberReport, StoredImage};

    /// A cluster of three that is being restored since 50 seconds, onto a control plane of one. One member of the old
    /// control plane is reachable.
    fn restoring(onto: Option<u8>) -> Cluster {
        let since = at(950);
        let restoring = PendingRestore {
            requested_at: since,
            target_machine: onto.map(machine),
            digest: Some([5; 32]),
            image: None,
        };
        let mut cluster = Cluster {
            restoring: Some(restoring),
            observed: CuratorAnswer::NotQueried,
            spec: spec(1, 1),
            ..healthy_cluster(3)
        };
        cluster.members[1].phase = Phase::NeedsHuman;
        cluster.members[2].phase = Phase::Silent;
        cluster
    }

    fn mark_old_members_left(cluster: &mut Cluster) {
        for member in &mut cluster.members[..3] {
            member.leave_reason = Some("its cluster is restored from a snapshot".to_owned());
            member.last_order = Some(order(MembershipOrder::Leave, 5));
            member.report =
                Some(MemberReport { generation: 2, key: Some([1; 32]), ..MemberReport::default() });
        }
    }

    #[test]
    fn restore_waits_for_reachable_old_members_to_leave() {
        let mut cluster = restoring(None);
        let why = "its cluster is restored from a snapshot";
        let fence = "waits: 1 machines of its old control plane still report and have to leave first";
        assert_eq!(
            plan_text(&cluster, &[20]),
            format!("leaving 1: {why}; leaving 2: {why}; leaving 3: {why}; {fence}")
        );
        for member in &mut cluster.members[..3] {
            member.leave_reason = Some(why.to_owned());
        }
        assert_eq!(
            plan_text(&cluster, &[20]),
            format!("choose 20 control-plane; ask 1 leave; ask 2 leave; ask 3 leave; {fence}")
        );
        mark_old_members_left(&mut cluster);
        cluster.members.push(ClusterMember { chosen_at: at(960), ..member(20, ClusterPart::ControlPlane) });
        let query = "it was ordered to leave, and has not reported that it has left";
        assert_eq!(
            plan_text(&cluster, &[]),
            format!("{fence}; 1 waits: {query}; 2 waits: {query}; 3 waits: {query}")
        );
        cluster.members[0].report = Some(MemberReport { generation: 3, ..MemberReport::default() });
        let waits = format!(
            "1 waits: it has left; its node is deleted once the cluster is back; 2 waits: {query}; 3 waits: {query}; \
             9 waits: m20 restores the cluster first"
        );
        assert_eq!(plan_text(&cluster, &[]), format!("ask 20 found; {waits}"));
        cluster.members[3].leave_reason = Some("it is being retired".to_owned());
        assert!(plan_text(&cluster, &[]).ends_with("9 waits: it leaves once the cluster is back"));
        cluster.members[3].leave_reason = None;
        // The wait for a reachable member that does not leave is limited: its epoch is over in any case.
        cluster.members[0].report =
            Some(MemberReport { generation: 2, key: Some([1; 32]), ..MemberReport::default() });
        cluster.restoring.as_mut().unwrap().requested_at = at(1000 - 121);
        assert!(plan_text(&cluster, &[]).starts_with("ask 20 found; "), "{}", plan_text(&cluster, &[]));
        cluster.members[4].last_order = Some(order(MembershipOrder::Found, 5));
        cluster.members[4].report = Some(MemberReport {
            generation: 3,
            key: Some(key(20)),
            ca_certificate: Some(vec![1]),
            address: Some("10.0.0.20".to_owned()),
            ..MemberReport::default()
        });
        assert!(plan_text(&cluster, &[]).starts_with("founded 20; "), "{}", plan_text(&cluster, &[]));
        cluster.members[4].phase = Phase::NeedsHuman;
        let lost = plan_text(&cluster, &[]);
        assert!(lost.starts_with("leaving 20: it was lost while the cluster was restored"), "{lost}");
    }

    #[test]
    fn restore_uses_the_target_machine_or_one_that_has_left() {
        let mut cluster = restoring(Some(21));
        mark_old_members_left(&mut cluster);
        cluster.members[0].report = Some(MemberReport { generation: 3, ..MemberReport::default() });
        let first = plan_text(&cluster, &[20, 21]);
        assert!(first.starts_with("choose 21 control-plane; "), "{first}");
        let nobody = plan_text(&cluster, &[20]);
        assert!(!nobody.contains("choose") && !nobody.contains("forget"), "{nobody}");
        assert!(
            nobody.contains("waits: the machine onto which it will be restored is not free yet"),
            "{nobody}"
        );
        // Of the old members, the one that the operator named.
        cluster.restoring.as_mut().unwrap().target_machine = Some(machine(1));
        assert!(plan_text(&cluster, &[20]).starts_with("forget 1; "), "{}", plan_text(&cluster, &[20]));
        cluster.restoring.as_mut().unwrap().target_machine = None;
        assert!(plan_text(&cluster, &[]).starts_with("forget 1; "), "{}", plan_text(&cluster, &[]));
        assert!(
            plan_text(&cluster, &[20]).starts_with("choose 20 control-plane; "),
            "{}",
            plan_text(&cluster, &[20])
        );
    }

    #[test]
    fn image_is_restored_by_a_machine_with_the_tool_for_it() {
        let mut cluster = restoring(None);
        cluster.restoring.as_mut().unwrap().image =
            Some(StoredImage { digest: Some([6; 32]), etcd_version: "3.6.7".to_owned() });
        mark_old_members_left(&mut cluster);
        cluster.members[0].report = Some(MemberReport { generation: 3, ..MemberReport::default() });
        let first = plan_text(&cluster, &[20, 40]);
        assert!(first.starts_with("choose 40 control-plane; "), "{first}");
        let nobody = plan_text(&cluster, &[20]);
        assert!(!nobody.contains("choose") && !nobody.contains("forget"), "{nobody}");
        assert!(nobody.contains("that needs etcd and etcdutl of one minor version"), "{nobody}");
        // One of its old members has the tool.
        cluster.members[0].report =
            Some(MemberReport { generation: 3, programs: programs(true), ..MemberReport::default() });
        assert!(plan_text(&cluster, &[20]).starts_with("forget 1; "), "{}", plan_text(&cluster, &[20]));
        // Once a machine restores it, any other one may join.
        cluster.spec.control_plane = 3;
        cluster.members.push(ClusterMember { chosen_at: at(960), ..member(40, ClusterPart::ControlPlane) });
        let joins = plan_text(&cluster, &[20]);
        assert!(joins.starts_with("choose 20 control-plane; "), "{joins}");
    }

    #[test]
    fn free_machine_restores_before_it_becomes_a_worker() {
        let mut cluster = restoring(None);
        cluster.spec.workers = 3;
        let first = plan_text(&cluster, &[20]);
        assert!(!first.contains("worker"), "{first}");
        mark_old_members_left(&mut cluster);
        let next = plan_text(&cluster, &[20]);
        assert!(next.starts_with("choose 20 control-plane; ") && !next.contains("worker"), "{next}");
    }
}
