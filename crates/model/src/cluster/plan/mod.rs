//! Cluster plan: the next steps of one cluster, a pure function of its state.
//!
//! A pass executes the planned steps and observes the cluster again. Steps that were interrupted are planned again from
//! the new state. So no step relies on another step of the same pass, and each can be repeated.
//!
//! # Safety
//!
//! * Members of etcd are added and removed one at a time, never while one is still learning, and never so that a
//!   majority would be missing. The curator rejects such a change as well; here it is not even requested.
//! * A healthy member that leaves keeps its vote until another one has taken its place. A lost member gives up its vote
//!   first, because a vote that nobody casts only makes further losses harder to bear.
//! * A node that its curator calls healthy is never replaced because its machine is silent to us: we may be the ones
//!   who are cut off.
//! * The order to found a cluster goes to one machine, and to another only after the first was ordered to leave.
//! * While etcd is full, nothing is planned that its curators would have to write: no change of members, roles, settings or
//!   versions. A step would fail half-way, and a machine that has left could not be replaced.
//! * A cluster is restored onto a machine that stores nothing of it. First the reachable machines of its old control
//!   plane have to leave, or a grace period of two minutes has to pass. Nothing here keeps the restored cluster apart
//!   from unreachable old members: the epoch of their etcd and their curators does (`curator/restore.rs`).
//!
//! # Trust
//!
//! A machine is approved by the key that it reported over its agent channel, which is pinned to the machine. A ticket
//! alone only lets it register.
//!
//! # Files
//!
//! [`plan_cluster`][] is the entry. It chooses by the state of the cluster which of the other files plan:
//!
//! * `members`: machines are chosen, marked as leaving and let go; scale-down. `placement`: which of them.
//! * `founding` and `restore`: the first machine of a cluster. [`peer_renewal`][]: members of etcd after all their
//!   certificates have ended. [`authority_theft`][]: another authority after a theft.
//! * `joining`: a machine becomes a node. `addresses`: addresses of nodes. `roles`: roles of a node. `removal`: a node is
//!   removed.
//! * `declarations` and `kubernetes`: what the curators have to know. [`upgrade`][]: another bundle, node by node.
//!   [`secret_keys`][]: keys of Kubernetes Secrets on controllers.
//! * [`step`][]: what all of them plan.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::cluster::etcd_space::FULL_ETCD;
use crate::cluster::plan::declarations::plan_declarations;
use crate::cluster::plan::kubernetes::plan_kubernetes;
use crate::cluster::plan::step::ClusterPlanStep;
use crate::cluster::plan::upgrade::plan_upgrade;
use crate::cluster::spec::ClusterPart;
use crate::cluster::state::{
    CandidateMachine, Cluster, ClusterMember, CuratorAnswer, MembershipOrder, ObservedCluster,
};
use crate::ids::MachineId;
use crate::time::Timestamp;

mod addresses;
pub mod authority_theft;
mod declarations;
mod founding;
mod joining;
mod kubernetes;
mod members;
pub mod peer_renewal;
mod placement;
mod removal;
mod restore;
mod roles;
pub mod secret_keys;
pub mod step;
pub mod upgrade;

/// How long a join ticket is valid.
pub const TICKET_LIFETIME: Duration = Duration::from_hours(1);

/// Locations of a cluster's machines; `None` if unknown.
pub type MachineLocations = BTreeMap<MachineId, Option<String>>;

/// The next steps of a cluster, and what it waits for.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ClusterPlan {
    /// The steps, in this order.
    pub steps: Vec<ClusterPlanStep>,
    /// What the cluster as a whole waits for, one sentence each.
    pub wait_reasons: Vec<String>,
    /// What each machine waits for.
    pub machine_waits: BTreeMap<MachineId, String>,
}

impl ClusterPlan {
    /// Whether no step and no wait is left.
    #[must_use]
    pub fn is_converged(&self) -> bool {
        self.steps.is_empty() && self.wait_reasons.is_empty() && self.machine_waits.is_empty()
    }
}

/// Plans the next steps. `candidates` are machines that may be chosen; it may be empty while no member is missing.
#[must_use]
pub fn plan_cluster(
    cluster: &Cluster,
    candidates: &[CandidateMachine],
    places: &MachineLocations,
    now: Timestamp,
) -> ClusterPlan {
    let mut planning = ClusterPlanner { cluster, now, plan: ClusterPlan::default() };
    if cluster.deleting {
        planning.plan_deletion();
        return planning.plan;
    }
    if let Some(restoring) = &cluster.restoring {
        // Until one machine restores the cluster, a missing worker must not take what may be the only free machine.
        let parts = if planning.restoring_member(restoring).is_none() {
            &[ClusterPart::ControlPlane]
        } else {
            &ClusterPart::ALL[..]
        };
        planning.add_members(parts, &planning.restore_candidates(restoring, candidates), places);
        planning.plan_restore(restoring, candidates);
        planning.bring_back_secret_keys(restoring);
        return planning.plan;
    }
    let is_full = cluster.is_etcd_full();
    if is_full {
        planning.wait_for_space();
    } else {
        planning.add_members(&ClusterPart::ALL, candidates, places);
    }
    if cluster.identity.is_some() {
        planning.plan_authority_theft();
        if planning.are_curators_stopped() {
            return planning.plan;
        }
    }
    match (&cluster.identity, &cluster.observed) {
        (None, _) => planning.plan_founding(),
        (Some(_), CuratorAnswer::Observed(seen)) => {
            planning.plan_peer_renewal();
            if !is_full {
                planning.plan_running(seen);
            }
        }
        (Some(_), CuratorAnswer::Unreachable(why)) => {
            let reports = planning.control_plane_problems();
            planning.plan.wait_reasons.push(format!("none of its curators answers: {why}{reports}"));
            planning.plan_peer_renewal();
        }
        (Some(_), CuratorAnswer::NotQueried) => {
            planning.plan.wait_reasons.push("its curators were not queried yet".to_owned());
        }
    }
    planning.plan
}

/// How many machines a sentence about silent curators quotes.
const MAX_NAMED_PROBLEMS: usize = 3;

/// The plan of one pass, while it is made.
struct ClusterPlanner<'c> {
    cluster: &'c Cluster,
    now: Timestamp,
    plan: ClusterPlan,
}

impl ClusterPlanner<'_> {
    fn push_step(&mut self, step: ClusterPlanStep) {
        self.plan.steps.push(step);
    }

    fn push_wait(&mut self, member: &ClusterMember, reason: impl Into<String>) {
        self.plan.machine_waits.insert(member.machine, reason.into());
    }

    fn push_order(&mut self, member: &ClusterMember, what: MembershipOrder) {
        self.push_step(ClusterPlanStep::SendOrder { machine: member.machine, order: what });
    }

    /// What the machines of the control plane report of their nodes, as the end of a sentence: it often is the reason why no
    /// curator answers. Empty if none reports a problem.
    fn control_plane_problems(&self) -> String {
        let members = self.cluster.members.iter().filter(|member| member.part == ClusterPart::ControlPlane);
        let problem = |member: &ClusterMember| {
            let error = member.report.as_ref()?.error.as_ref()?;
            Some(format!("; {} reports: {error}", member.name))
        };
        members.filter_map(problem).take(MAX_NAMED_PROBLEMS).collect()
    }

    /// Reports what waits while etcd is full: the cluster, and its machines that leave.
    fn wait_for_space(&mut self) {
        self.plan.wait_reasons.push(format!("its etcd {FULL_ETCD}"));
        let leaves = |member: &&ClusterMember| member.leave_reason.is_some() || member.retiring;
        for member in self.cluster.members.iter().filter(leaves) {
            self.push_wait(member, format!("it cannot leave yet: the etcd of its cluster {FULL_ETCD}"));
        }
    }

    /// The plan of a cluster whose curators answer.
    fn plan_running(&mut self, seen: &ObservedCluster) {
        // Declarations come before the nodes that act on them.
        let (steps, waits) = plan_declarations(&self.cluster.declared_roles, seen);
        self.plan.steps.extend(steps);
        self.plan.wait_reasons.extend(waits);
        let (steps, waits) =
            plan_kubernetes(self.cluster.kubernetes.as_ref(), self.cluster.upgrade.as_ref(), seen);
        self.plan.steps.extend(steps);
        self.plan.wait_reasons.extend(waits);
        // A machine that waits for keys becomes no controller.
        self.plan_secret_keys(seen);
        self.mark_leaving(Some(seen));
        self.scale_down(seen);
        let mut consensus = None;
        for member in &self.cluster.members {
            match &member.leave_reason {
                Some(why) => self.drain_member(member, why, seen, &mut consensus),
                None => self.plan_member(member, seen, &mut consensus),
            }
        }
        self.delete_stale_nodes(seen, &mut consensus);
        if let Some(step) = consensus {
            self.push_step(step);
        }
        // Nodes that join or leave come first: an upgrade concerns those that stay.
        if let Some(upgrade) = &self.cluster.upgrade {
            let next = plan_upgrade(upgrade, &self.cluster.members, seen, self.now);
            self.plan.steps.extend(next.steps);
            self.plan.wait_reasons.extend(next.wait_reasons);
            for (machine, wait) in next.machine_waits {
                self.plan.machine_waits.entry(machine).or_insert(wait);
            }
        }
    }
}

#[cfg(test)]
mod tests;
