//! Roles of nodes: membership of etcd, Kubernetes, and the roles of workers.

use std::collections::BTreeSet;

use crate::cluster::kubernetes::{CONTROLLER_ROLE, ObservedKubernetes, WORKER_ROLE};
use crate::cluster::plan::ClusterPlanner;
use crate::cluster::plan::step::ClusterPlanStep;
use crate::cluster::quorum::majority;
use crate::cluster::spec::ClusterPart;
use crate::cluster::state::{CONSENSUS_MEMBER_ROLE, ClusterMember, ClusterNode, NodeHealth, ObservedCluster};
use crate::phase::Phase;

impl ClusterPlanner<'_> {
    /// Gives a node the roles that it lacks and takes those that it must not have.
    pub(super) fn plan_roles(
        &mut self,
        member: &ClusterMember,
        node: &ClusterNode,
        seen: &ObservedCluster,
        consensus: &mut Option<ClusterPlanStep>,
    ) {
        if node.health != NodeHealth::Healthy {
            return self.push_wait(member, describe_silence(node, member));
        }
        match member.part {
            ClusterPart::ControlPlane if node.is_etcd_member() => {
                match seen.etcd_members.iter().find(|one| one.node.as_ref() == Some(&node.id)) {
                    Some(etcd) if etcd.learner => self.push_wait(member, "its member of etcd learns"),
                    Some(etcd) if !etcd.reachable => {
                        self.push_wait(member, "its member of etcd is not reached");
                    }
                    Some(_) => {}
                    None => self.push_wait(member, "its member of etcd has not started"),
                }
                self.plan_controller_role(member, node, seen);
            }
            ClusterPart::ControlPlane => {
                if self.holds_new_members() {
                    return self.push_wait(
                        member,
                        "it becomes a member of etcd once the stolen authority of the cluster is replaced there",
                    );
                }
                if let Some(why) = member_addition_objection(seen) {
                    return self.push_wait(member, why);
                }
                if consensus.is_some() {
                    return self.push_wait(member, "members of etcd are added and removed one at a time");
                }
                let give = vec![CONSENSUS_MEMBER_ROLE.to_owned()];
                *consensus = Some(ClusterPlanStep::ChangeRoles {
                    node: node.id.clone(),
                    add: give,
                    remove: Vec::new(),
                    keep_authority: false,
                });
            }
            ClusterPart::Worker => {
                let wanted = &self.desired_worker_roles(node, seen);
                let give: Vec<String> = wanted.difference(&node.roles).cloned().collect();
                let take: Vec<String> = node
                    .roles
                    .difference(wanted)
                    .filter(|role| *role != CONSENSUS_MEMBER_ROLE)
                    .cloned()
                    .collect();
                if !give.is_empty() || !take.is_empty() {
                    self.push_step(ClusterPlanStep::ChangeRoles {
                        node: node.id.clone(),
                        add: give,
                        remove: take,
                        keep_authority: false,
                    });
                }
            }
        }
    }

    /// Whether Kubernetes is desired and the curators have it.
    fn is_kubernetes_active(&self, seen: &ObservedCluster) -> bool {
        let wanted = self.cluster.kubernetes.as_ref().filter(|wanted| !wanted.removing);
        wanted.is_some() && matches!(seen.kubernetes, ObservedKubernetes::Present(_))
    }

    /// Plans the controller role of Kubernetes. A member of the control plane gets it once its member of etcd is
    /// reachable, and keeps it until no node runs pods any more.
    fn plan_controller_role(&mut self, member: &ClusterMember, node: &ClusterNode, seen: &ObservedCluster) {
        let runs = node.roles.contains(CONTROLLER_ROLE);
        let step = |give: &[&str], take: &[&str]| {
            let roles = |roles: &[&str]| roles.iter().map(|&role| role.to_owned()).collect();
            ClusterPlanStep::ChangeRoles {
                node: node.id.clone(),
                add: roles(give),
                remove: roles(take),
                keep_authority: false,
            }
        };
        let removing = self.cluster.kubernetes.as_ref().is_some_and(|wanted| wanted.removing);
        let waits = self.plan.machine_waits.contains_key(&member.machine);
        if self.is_kubernetes_active(seen) && !runs && !waits {
            self.push_step(step(&[CONTROLLER_ROLE], &[]));
        } else if removing && runs {
            if seen.nodes.iter().any(|node| node.roles.contains(WORKER_ROLE)) {
                return self.push_wait(
                    member,
                    "it runs the control plane of Kubernetes until no node runs pods any more",
                );
            }
            self.push_step(step(&[], &[CONTROLLER_ROLE]));
        }
    }

    /// Desired roles of a worker. It runs pods from when a controller exists, until Kubernetes has to be removed.
    fn desired_worker_roles(&self, node: &ClusterNode, seen: &ObservedCluster) -> BTreeSet<String> {
        let mut wanted = self.cluster.spec.roles.clone();
        let stays = self.cluster.kubernetes.as_ref().is_some_and(|kubernetes| !kubernetes.removing);
        let begins = self.is_kubernetes_active(seen)
            && seen.nodes.iter().any(|node| node.roles.contains(CONTROLLER_ROLE));
        if begins || stays && node.roles.contains(WORKER_ROLE) {
            wanted.insert(WORKER_ROLE.to_owned());
        }
        wanted
    }
}

/// Why no member of etcd may be added now; `None` if one may.
fn member_addition_objection(seen: &ObservedCluster) -> Option<String> {
    if seen.etcd_members.iter().any(|member| member.learner || member.node.is_none()) {
        return Some("another member of etcd is still learning".to_owned());
    }
    let (voters, reached) = seen.vote_counts();
    // A new member gets its vote only when it is reached.
    let few = reached < majority(voters) || reached + 1 < majority(voters + 1);
    few.then(|| {
        format!("{reached} of {voters} members of etcd are reached, and one more would leave no majority")
    })
}

fn describe_silence(node: &ClusterNode, member: &ClusterMember) -> String {
    let machine = match member.phase {
        Phase::Ready | Phase::Installed => "its machine reports".to_owned(),
        phase => format!("its machine is {phase}"),
    };
    match node.health {
        NodeHealth::Silent(silence) => {
            format!("its curator has had no report from it for {} s; {machine}", silence.as_secs())
        }
        _ => format!("its curator has had no report from it since the curator began to listen; {machine}"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cluster::kubernetes::tests::kubernetes;
    use crate::cluster::kubernetes::{CuratorKubernetes, DesiredKubernetes, spec_from_settings};
    use crate::cluster::plan::tests::{etcd, healthy_cluster, joined, node, observed, plan_text};
    use crate::cluster::state::EtcdMember;

    #[test]
    fn members_of_etcd_come_one_at_a_time() {
        let mut cluster = healthy_cluster(3);
        for number in [1, 2] {
            observed(&mut cluster).nodes[number].roles.clear();
        }
        observed(&mut cluster).etcd_members.truncate(1);
        assert_eq!(
            plan_text(&cluster, &[]),
            "node-2 +consensus-member -; 3 waits: members of etcd are added and removed one at a time"
        );
        observed(&mut cluster).nodes[1] = node(2, &[CONSENSUS_MEMBER_ROLE]);
        observed(&mut cluster).etcd_members.push(EtcdMember { node: None, learner: true, reachable: false });
        assert_eq!(
            plan_text(&cluster, &[]),
            "2 waits: its member of etcd has not started; 3 waits: another member of etcd is still learning"
        );
        observed(&mut cluster).etcd_members[1] = EtcdMember { learner: true, ..etcd(2) };
        assert_eq!(
            plan_text(&cluster, &[]),
            "2 waits: its member of etcd learns; 3 waits: another member of etcd is still learning"
        );
        observed(&mut cluster).etcd_members[1] = EtcdMember { reachable: false, ..etcd(2) };
        assert_eq!(
            plan_text(&cluster, &[]),
            "2 waits: its member of etcd is not reached; \
             3 waits: 1 of 2 members of etcd are reached, and one more would leave no majority"
        );
    }

    #[test]
    fn workers_get_the_requested_roles() {
        let mut cluster = healthy_cluster(3);
        cluster.spec.roles = BTreeSet::from(["web".to_owned(), "dns".to_owned()]);
        observed(&mut cluster).nodes[3] = node(9, &["old", "web"]);
        assert_eq!(plan_text(&cluster, &[]), "node-9 +dns -old");
        observed(&mut cluster).nodes[3].health = NodeHealth::Silent(Duration::from_secs(70));
        assert_eq!(
            plan_text(&cluster, &[]),
            "9 waits: its curator has had no report from it for 70 s; its machine reports"
        );
    }

    #[test]
    fn kubernetes_starts_on_controllers_first_and_stops_on_workers_first() {
        let wanted = |removing| {
            Some(DesiredKubernetes { spec: kubernetes(), removing, pending_rotations: Vec::new() })
        };
        let mut cluster = healthy_cluster(3);
        cluster.kubernetes = wanted(false);
        observed(&mut cluster).kubernetes = ObservedKubernetes::Absent;
        assert_eq!(plan_text(&cluster, &[]), "its curators receive the Kubernetes spec");
        let settings = spec_from_settings(kubernetes().to_settings());
        observed(&mut cluster).kubernetes =
            ObservedKubernetes::Present(CuratorKubernetes { spec: settings, ..CuratorKubernetes::default() });
        // A member that is not reachable gets no role yet. Without a controller there are no workers.
        observed(&mut cluster).etcd_members[1].reachable = false;
        let first = plan_text(&cluster, &[]);
        assert!(
            first.starts_with("node-1 +kubernetes-controller -; node-3 +kubernetes-controller -; 2 waits:"),
            "{first}"
        );
        observed(&mut cluster).etcd_members[1].reachable = true;
        for node in 0..3 {
            observed(&mut cluster).nodes[node].roles.insert(CONTROLLER_ROLE.to_owned());
        }
        assert_eq!(plan_text(&cluster, &[]), "node-9 +kubernetes-worker -");
        observed(&mut cluster).nodes[3].roles.insert(WORKER_ROLE.to_owned());
        assert_eq!(plan_text(&cluster, &[]), "");
        // No role is taken while the curators do not answer for Kubernetes.
        let has = std::mem::replace(
            &mut observed(&mut cluster).kubernetes,
            ObservedKubernetes::Unavailable("busy".to_owned()),
        );
        assert!(!plan_text(&cluster, &[]).contains("kubernetes-worker"), "{}", plan_text(&cluster, &[]));
        observed(&mut cluster).kubernetes = has;
        // A controller that leaves gives up that role before its vote.
        cluster.members[2].leave_reason = Some("it is old".to_owned());
        cluster.members.push(joined(4, ClusterPart::ControlPlane));
        observed(&mut cluster).nodes.push(node(4, &[CONSENSUS_MEMBER_ROLE, CONTROLLER_ROLE]));
        observed(&mut cluster).etcd_members.push(etcd(4));
        assert_eq!(plan_text(&cluster, &[]), "node-3 + -kubernetes-controller");
        observed(&mut cluster).nodes[2].roles.remove(CONTROLLER_ROLE);
        assert_eq!(plan_text(&cluster, &[]), "node-3 + -consensus-member");
        // Kubernetes is removed: pods first.
        let mut cluster = healthy_cluster(1);
        cluster.kubernetes = wanted(true);
        observed(&mut cluster).kubernetes = ObservedKubernetes::Present(CuratorKubernetes::default());
        observed(&mut cluster).nodes[0].roles.insert(CONTROLLER_ROLE.to_owned());
        observed(&mut cluster).nodes[1].roles.insert(WORKER_ROLE.to_owned());
        let both = plan_text(&cluster, &[]);
        assert!(both.starts_with("node-9 + -kubernetes-worker; waits:"), "{both}");
        observed(&mut cluster).nodes[1].roles.clear();
        assert!(
            plan_text(&cluster, &[]).starts_with("node-1 + -kubernetes-controller"),
            "{}",
            plan_text(&cluster, &[])
        );
        observed(&mut cluster).nodes[0].roles.remove(CONTROLLER_ROLE);
        assert_eq!(plan_text(&cluster, &[]), "its curators delete their Kubernetes settings and keys");
        observed(&mut cluster).kubernetes = ObservedKubernetes::Absent;
        assert_eq!(plan_text(&cluster, &[]), "the record of Kubernetes is deleted");
    }
}
