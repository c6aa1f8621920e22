//! Found a cluster: one machine founds it, and the others wait.
//!
//! A restore takes the same way: the founder starts from the snapshot.

use crate::cluster::plan::ClusterPlanner;
use crate::cluster::plan::step::ClusterPlanStep;
use crate::cluster::spec::ClusterPart;
use crate::cluster::state::{ClusterMember, MembershipOrder};

impl ClusterPlanner<'_> {
    pub(super) fn plan_founding(&mut self) {
        for member in self.cluster.members.iter().filter(|member| member.leave_reason.is_some()) {
            self.remove_member(member, "it left before the cluster was founded");
        }
        self.mark_leaving(None);
        let mut staying = self.cluster.members.iter().filter(|member| member.leave_reason.is_none());
        let founder = staying.find(|member| member.part == ClusterPart::ControlPlane);
        self.plan_founder(founder, "founds the cluster first");
    }

    /// Has the founder found the cluster, while the others wait for it.
    pub(super) fn plan_founder(&mut self, founder: Option<&ClusterMember>, first: &str) {
        let mut staying = self.cluster.members.iter().filter(|member| member.leave_reason.is_none());
        let elsewhere = self.cluster.members.iter().find(|member| {
            member.last_order.is_some_and(|order| order.order == MembershipOrder::Found)
                && Some(member.machine) != founder.map(|founder| founder.machine)
        });
        let Some(founder) = founder else { return };
        for member in staying.by_ref().filter(|member| member.machine != founder.machine) {
            self.push_wait(member, format!("{} {first}", founder.name));
        }
        if let Some(other) = elsewhere {
            return self.push_wait(
                founder,
                format!("{}, which was to found the cluster, has to leave first", other.name),
            );
        }
        let Some(order) = founder.last_order.filter(|order| order.order == MembershipOrder::Found) else {
            return match founder.last_order {
                Some(order) if order.order == MembershipOrder::Leave && !founder.has_left() => {
                    self.push_wait(founder, "it has to leave what it was a node of before");
                }
                _ => self.push_order(founder, MembershipOrder::Found),
            };
        };
        let report = founder.report.as_ref().filter(|report| report.generation == order.generation);
        match report {
            None => {
                self.push_wait(
                    founder,
                    "it was ordered to found the cluster, and has not accepted the order",
                );
            }
            Some(report) if report.ca_certificate.is_some() && report.address.is_some() => {
                self.push_step(ClusterPlanStep::RecordFounding { machine: founder.machine });
            }
            Some(report) => {
                let waits = match &report.error {
                    Some(error) => format!("it cannot found the cluster: {error}"),
                    None => "it is founding the cluster".to_owned(),
                };
                self.push_wait(founder, waits);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::plan::tests::{healthy_cluster, key, member, order, plan_text};
    use crate::cluster::spec::tests::spec;
    use crate::cluster::state::{Cluster, CuratorAnswer, MemberReport};
    use crate::phase::Phase;

    #[test]
    fn one_machine_founds_and_the_others_wait() {
        let mut cluster = Cluster {
            identity: None,
            observed: CuratorAnswer::NotQueried,
            members: Vec::new(),
            ..healthy_cluster(3)
        };
        assert_eq!(
            plan_text(&cluster, &[1, 2, 3, 4, 5]),
            "choose 1 control-plane; choose 2 control-plane; choose 3 control-plane; choose 4 worker"
        );
        assert_eq!(
            plan_text(&cluster, &[1, 2]),
            "choose 1 control-plane; choose 2 control-plane; \
             waits: 1 more member of the control plane is wanted, and no machine is free; \
             waits: 1 more worker is wanted, and no machine is free"
        );
        cluster.members = vec![
            member(1, ClusterPart::ControlPlane),
            member(2, ClusterPart::ControlPlane),
            member(9, ClusterPart::Worker),
        ];
        cluster.spec = spec(1, 1);
        cluster.members.remove(1);
        let second = "9 waits: m1 founds the cluster first";
        assert_eq!(plan_text(&cluster, &[]), format!("ask 1 found; {second}"));
        cluster.members[0].last_order = Some(order(MembershipOrder::Found, 5));
        assert_eq!(
            plan_text(&cluster, &[]),
            format!("1 waits: it was ordered to found the cluster, and has not accepted the order; {second}")
        );
        cluster.members[0].report =
            Some(MemberReport { generation: 3, key: Some(key(1)), ..MemberReport::default() });
        assert_eq!(plan_text(&cluster, &[]), format!("1 waits: it is founding the cluster; {second}"));
        let report = cluster.members[0].report.as_mut().unwrap();
        report.error = Some("no etcd".to_owned());
        assert_eq!(
            plan_text(&cluster, &[]),
            format!("1 waits: it cannot found the cluster: no etcd; {second}")
        );
        let report = cluster.members[0].report.as_mut().unwrap();
        (report.error, report.ca_certificate, report.address) =
            (None, Some(vec![1]), Some("10.0.0.1".to_owned()));
        assert_eq!(plan_text(&cluster, &[]), format!("founded 1; {second}"));
    }

    #[test]
    fn founder_that_is_lost_leaves_before_another_one_founds() {
        let founder = ClusterMember {
            last_order: Some(order(MembershipOrder::Found, 5)),
            phase: Phase::NeedsHuman,
            ..member(1, ClusterPart::ControlPlane)
        };
        let mut cluster = Cluster {
            identity: None,
            observed: CuratorAnswer::NotQueried,
            spec: spec(1, 0),
            members: vec![founder],
            ..healthy_cluster(3)
        };
        assert!(
            plan_text(&cluster, &[2]).starts_with("leaving 1: its machine is lost"),
            "{}",
            plan_text(&cluster, &[2])
        );
        cluster.members[0].leave_reason = Some("its machine is lost".to_owned());
        assert_eq!(plan_text(&cluster, &[2]), "choose 2 control-plane; ask 1 leave");
        cluster.members.push(member(2, ClusterPart::ControlPlane));
        assert_eq!(
            plan_text(&cluster, &[]),
            "ask 1 leave; 2 waits: m1, which was to found the cluster, has to leave first"
        );
        cluster.members[0].last_order = Some(order(MembershipOrder::Leave, 5));
        assert_eq!(plan_text(&cluster, &[]), "forget 1; ask 2 found");
    }
}
