//! Plan a cluster upgrade: role servers, then controllers, then workers; pause on failure.
//!
//! Role servers come first: a roll-out of their release over the cluster's machines
//! ([`roll_out`][crate::roll_out]), because a bundle may need a newer one. Then the controllers get the bundle
//! one by one. When all of them have finished, the workers get it, a few at a time. A rollback goes the other way: no
//! kubelet is ever newer than an API server.
//!
//! A node has finished when it reports the bundle and all its components are healthy. The next controller is started
//! only while every member of etcd is reached and all other controllers are healthy. A node that is itself unhealthy
//! has nothing to lose: for it the health of other controllers is not required. The first failure pauses the upgrade,
//! and a person decides how it continues.
//!
//! Between two passes only this is stored: which nodes were requested, when, and which of them have finished. If a
//! shepherd dies after it recorded a request and before it sent the bundle to the curators, the next pass sends it.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::kubernetes::{CONTROLLER_ROLE, CuratorKubernetes, ObservedKubernetes, WORKER_ROLE};
use crate::cluster::plan::step::ClusterPlanStep;
use crate::cluster::spec::ClusterPart;
use crate::cluster::state::{ClusterMember, ClusterNode, NodeHealth, NodeState, ObservedCluster};
use crate::cluster::upgrade::{BundleRef, ClusterUpgrade, UpgradeEvent};
use crate::ids::MachineId;
use crate::time::{Timestamp, after};

/// The next steps of an upgrade, and what it waits for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UpgradePlan {
    /// The steps, in this order.
    pub steps: Vec<ClusterPlanStep>,
    /// What the upgrade waits for.
    pub wait_reasons: Vec<String>,
    /// What machines wait for.
    pub machine_waits: BTreeMap<MachineId, String>,
}

/// A node that the upgrade concerns, with its machine.
struct UpgradeNode<'c> {
    member: &'c ClusterMember,
    node: &'c ClusterNode,
}

impl UpgradeNode<'_> {
    /// Why it is not healthy; `None` if it is.
    fn unhealthy_reason(&self) -> Option<String> {
        match self.node.health {
            NodeHealth::Healthy => {}
            NodeHealth::Silent(silence) => {
                return Some(format!("its curator has had no report from it for {} s", silence.as_secs()));
            }
            NodeHealth::Unknown => {
                return Some(
                    "its curator has had no report from it since the curator began to listen".to_owned(),
                );
            }
        }
        match &self.node.kubernetes {
            Some(kubernetes) => kubernetes.unhealthy_reason(),
            None => Some("it says nothing of Kubernetes".to_owned()),
        }
    }
}

/// Plans the next steps of an upgrade.
#[must_use]
pub fn plan_upgrade(
    upgrade: &ClusterUpgrade,
    members: &[ClusterMember],
    seen: &ObservedCluster,
    now: Timestamp,
) -> UpgradePlan {
    let mut planning = UpgradePlanner { upgrade, observed: seen, now, plan: UpgradePlan::default() };
    if let Some(why) = &upgrade.pause_reason {
        planning.plan.wait_reasons.push(format!("its upgrade is paused: {why}"));
    } else if !planning.plan_release() {
        planning.plan_bundle(members);
    }
    planning.plan
}

struct UpgradePlanner<'u> {
    upgrade: &'u ClusterUpgrade,
    observed: &'u ObservedCluster,
    now: Timestamp,
    plan: UpgradePlan,
}

impl UpgradePlanner<'_> {
    fn push_event(&mut self, turn: UpgradeEvent) {
        self.plan.steps.push(ClusterPlanStep::RecordUpgrade(turn));
    }

    fn push_wait(&mut self, machine: MachineId, why: impl Into<String>) {
        self.plan.machine_waits.insert(machine, why.into());
    }

    /// Plans for the role servers; returns whether their roll-out still has to be dealt with.
    fn plan_release(&mut self) -> bool {
        let Some(release) = self.upgrade.release.as_ref().filter(|_| !self.upgrade.rolling_back) else {
            return false;
        };
        let id = &release.roll_out;
        match (&release.outcome, &release.pause_reason) {
            (Some((how, 0)), _) if how == "finished" => self.push_event(UpgradeEvent::ReleaseDone),
            (Some((how, failed)), _) if how == "finished" => {
                // A person decides whether the upgrade continues with these machines as they are.
                self.push_event(UpgradeEvent::ReleaseDone);
                let why = format!(
                    "{failed} of its machines do not run the release; see: shepherdctl describe update {id}"
                );
                self.push_event(UpgradeEvent::Pause { reason: why });
            }
            (Some((how, _)), _) => {
                self.push_event(UpgradeEvent::ReleaseDone);
                self.push_event(UpgradeEvent::Pause {
                    reason: format!("the update {id} of its role servers was {how}"),
                });
            }
            (None, Some(why)) => self.plan.wait_reasons.push(format!(
                "the update {id} of its role servers is paused: {why}; see: shepherdctl describe update {id}"
            )),
            (None, None) => self.plan.wait_reasons.push(format!(
                "its role servers become another release first; see: shepherdctl describe update {id}"
            )),
        }
        true
    }

    fn plan_bundle(&mut self, members: &[ClusterMember]) {
        let Some((from, to)) = &self.upgrade.bundles else { return self.push_event(UpgradeEvent::Finish) };
        let target = if self.upgrade.rolling_back { from } else { to };
        let ObservedKubernetes::Present(has) = &self.observed.kubernetes else {
            return self
                .plan
                .wait_reasons
                .push("its curators do not report their Kubernetes settings".to_owned());
        };
        let mut order = [ClusterPart::ControlPlane, ClusterPart::Worker];
        if self.upgrade.rolling_back {
            order.reverse();
        }
        let groups = order.map(|part| (part, upgrade_nodes(self.observed, members, part)));
        let controllers = upgrade_nodes(self.observed, members, ClusterPart::ControlPlane);
        let mut before = None;
        for (part, group) in groups {
            if let Some(first) = before {
                for one in &group {
                    if !self.is_node_done(one, has, target) {
                        self.push_wait(
                            one.member.machine,
                            format!("the {first}s of the cluster are upgraded first"),
                        );
                    }
                }
                continue;
            }
            if self.plan_group(part, &group, &controllers, has, target) {
                before = Some(if part == ClusterPart::Worker { "worker" } else { "controller" });
            }
        }
        if before.is_none() && self.plan.steps.is_empty() {
            self.push_event(UpgradeEvent::Finish);
        }
    }

    fn is_node_done(&self, one: &UpgradeNode<'_>, has: &CuratorKubernetes, target: &BundleRef) -> bool {
        match self.upgrade.requested_nodes.get(&one.node.id) {
            Some(upgrade) => upgrade.is_done,
            None => has.bundle_of(&one.node.id) == target.digest && runs_bundle(one.node, target),
        }
    }

    /// Plans for the nodes of one part; returns whether some of them have not finished.
    fn plan_group(
        &mut self,
        part: ClusterPart,
        group: &[UpgradeNode<'_>],
        controllers: &[UpgradeNode<'_>],
        has: &CuratorKubernetes,
        target: &BundleRef,
    ) -> bool {
        let (mut in_flight, mut waiting, mut open) = (0, Vec::new(), false);
        for one in group {
            let upgrade = self.upgrade.requested_nodes.get(&one.node.id);
            if self.is_node_done(one, has, target) {
                // A finished node that has become unhealthy counts as one in flight.
                if let Some(why) = upgrade.and_then(|_| one.unhealthy_reason()) {
                    in_flight += 1;
                    self.push_wait(
                        one.member.machine,
                        format!("it runs the bundle, and is no longer healthy: {why}"),
                    );
                }
                continue;
            }
            open = true;
            let Some(upgrade) = upgrade else {
                waiting.push(one);
                continue;
            };
            in_flight += 1;
            if has.bundle_of(&one.node.id) != target.digest {
                // The request is recorded, but the shepherd died before it reached the curators.
                self.assign_bundle(one, target);
                continue;
            }
            let why = if runs_bundle(one.node, target) {
                one.unhealthy_reason()
            } else {
                Some(describe_progress(one))
            };
            match why {
                None => self.push_event(UpgradeEvent::NodeDone { node: one.node.id.clone() }),
                Some(why) if after(upgrade.requested_at, self.upgrade.node_deadline) < self.now => {
                    let why = format!(
                        "{}: it was not healthy with the bundle within {} s: {why}",
                        one.member.name,
                        self.upgrade.node_deadline.as_secs()
                    );
                    // No further node is started. Nodes in flight may finish.
                    self.plan.steps.clear();
                    self.push_event(UpgradeEvent::Pause { reason: why });
                    return true;
                }
                Some(why) => {
                    self.push_wait(
                        one.member.machine,
                        format!("it was ordered to run the bundle, and is not done: {why}"),
                    );
                }
            }
        }
        let at_once = match part {
            ClusterPart::ControlPlane => 1,
            ClusterPart::Worker => self.upgrade.parallelism.max(1),
        };
        // Unhealthy nodes come first: they have nothing to lose.
        waiting.sort_by_key(|one| one.unhealthy_reason().is_none());
        for one in waiting {
            if in_flight >= at_once {
                self.push_wait(one.member.machine, format!("{in_flight} before it are not done yet"));
            } else if let Some(why) = self.start_objection(one, controllers) {
                self.push_wait(one.member.machine, why);
            } else {
                in_flight += 1;
                self.assign_bundle(one, target);
            }
        }
        open
    }

    fn assign_bundle(&mut self, one: &UpgradeNode<'_>, target: &BundleRef) {
        self.plan.steps.push(ClusterPlanStep::AssignBundle {
            node: one.node.id.clone(),
            machine: one.member.machine,
            bundle: target.digest.clone(),
        });
    }

    /// Why a node may not start now; `None` if it may.
    fn start_objection(&self, one: &UpgradeNode<'_>, controllers: &[UpgradeNode<'_>]) -> Option<String> {
        if let Some(elsewhere) = &self.upgrade.conflicting_roll_out {
            return Some(format!(
                "the update {elsewhere} has an open order for a machine of its cluster, and a cluster changes \
                 one thing at a time"
            ));
        }
        if let Some(etcd) = etcd_unhealthy_reason(self.observed) {
            return Some(etcd);
        }
        if one.node.health != NodeHealth::Healthy {
            return one.unhealthy_reason();
        }
        if one.unhealthy_reason().is_some() {
            return None;
        }
        let mut others = controllers.iter().filter(|other| other.node.id != one.node.id);
        others.find_map(|other| Some((&other.member.name, other.unhealthy_reason()?))).map(|(name, why)| {
            format!(
                "the controller {name} of its cluster is not healthy, and has to be upgraded first: {why}"
            )
        })
    }
}

/// Nodes of a part that run Kubernetes and stay, ordered by the names of their machines.
fn upgrade_nodes<'c>(
    seen: &'c ObservedCluster,
    members: &'c [ClusterMember],
    part: ClusterPart,
) -> Vec<UpgradeNode<'c>> {
    let role = match part {
        ClusterPart::ControlPlane => CONTROLLER_ROLE,
        ClusterPart::Worker => WORKER_ROLE,
    };
    let mut found: Vec<UpgradeNode<'c>> = members
        .iter()
        .filter(|member| member.part == part && member.leave_reason.is_none())
        .filter_map(|member| Some(UpgradeNode { member, node: seen.node_by_key(&member.key()?)? }))
        .filter(|one| one.node.state == NodeState::Up && one.node.roles.contains(role))
        .collect();
    found.sort_by(|one, other| (&one.member.name, &one.node.id).cmp(&(&other.member.name, &other.node.id)));
    found
}

fn runs_bundle(node: &ClusterNode, target: &BundleRef) -> bool {
    node.kubernetes.as_ref().is_some_and(|kubernetes| kubernetes.bundle == target.digest)
}

fn describe_progress(one: &UpgradeNode<'_>) -> String {
    let waits =
        one.node.kubernetes.as_ref().map(|kubernetes| kubernetes.wait_reason.as_str()).unwrap_or_default();
    match (one.node.health, waits) {
        (NodeHealth::Healthy, "") => "it does not say that it runs it yet".to_owned(),
        (NodeHealth::Healthy, waits) => waits.to_owned(),
        _ => one.unhealthy_reason().unwrap_or_default(),
    }
}

/// Why etcd is not healthy; `None` if it is. An API server may be absent only while every member of etcd is reached.
fn etcd_unhealthy_reason(seen: &ObservedCluster) -> Option<String> {
    let (voters, reached) = seen.vote_counts();
    if seen.etcd_members.iter().any(|member| member.learner || member.node.is_none()) {
        return Some("a member of etcd is still learning, and has to get its vote first".to_owned());
    }
    let nodes: BTreeSet<&String> =
        seen.etcd_members.iter().filter_map(|member| member.node.as_ref()).collect();
    (reached < voters || nodes.is_empty())
        .then(|| format!("{reached} of {voters} members of etcd are reachable, and all of them must be"))
}

#[cfg(test)]
mod tests;
