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
//! * A cluster is restored onto a machine that stores nothing of it. First the reachable machines of its old control
//!   plane have to leave, or [`OLD_CONTROL_PLANE_GRACE`] has to pass. Nothing here keeps the restored cluster apart
//!   from unreachable old members: the epoch of their etcd and their curators does (`curator/restore.rs`).
//!
//! # Trust
//!
//! A machine is approved by the key that it reported over its agent channel, which is pinned to the machine. A ticket
//! alone only lets it register.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use crate::cluster::declaration_sync::{self, Digest};
use crate::cluster::kubernetes::{self, CONTROLLER_ROLE, RotatableKeys, WORKER_ROLE};
use crate::cluster::placement::{removal_order, spread_over_locations};
use crate::cluster::quorum::majority;
use crate::cluster::spec::{ClusterPart, JoinApproval};
use crate::cluster::state::{
    CONSENSUS_MEMBER_ROLE, CandidateMachine, Cluster, ClusterMember, ClusterNode, CuratorAnswer, LastOrder,
    MemberReport, MembershipOrder, NodeHealth, NodeState, ObservedCluster, PendingRestore,
};
use crate::cluster::upgrade::{self, UpgradeEvent};
use crate::ids::MachineId;
use crate::phase::Phase;
use crate::time::{Timestamp, between};

/// How long a join ticket is valid.
pub const TICKET_LIFETIME: Duration = Duration::from_hours(1);
/// How long reachable machines of the old control plane have to leave it. After that the cluster is restored without
/// waiting for them.
pub const OLD_CONTROL_PLANE_GRACE: Duration = Duration::from_mins(2);
/// How long an error of a machine may pass by itself before the order is repeated.
const ORDER_RETRY_AFTER: Duration = Duration::from_mins(2);

/// One step of a cluster plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterPlanStep {
    /// Make a machine a member of the cluster.
    AddMember {
        /// The machine that is chosen.
        machine: MachineId,
        /// Its part in the cluster.
        part: ClusterPart,
    },
    /// Send an order to a machine over its agent channel.
    SendOrder {
        /// The machine that gets the order.
        machine: MachineId,
        /// What the machine has to do.
        order: MembershipOrder,
    },
    /// Record the identity of the founded cluster, as this machine reported it.
    RecordFounding {
        /// The machine that founded the cluster.
        machine: MachineId,
    },
    /// Approve a node by its key.
    ApproveNode {
        /// The machine that reported the key.
        machine: MachineId,
        /// The node's public key, Ed25519.
        key: [u8; 32],
    },
    /// Change the roles of a node.
    ChangeRoles {
        /// ID of the node.
        node: String,
        /// Roles that the node gets.
        add: Vec<String>,
        /// Roles that the node loses.
        remove: Vec<String>,
    },
    /// Remove a node from the cluster for ever.
    DecommissionNode {
        /// ID of the node.
        node: String,
    },
    /// Delete the record of a node.
    DeleteNode {
        /// ID of the node.
        node: String,
    },
    /// Record that a machine has to leave from now on.
    MarkLeaving {
        /// The machine that has to leave.
        machine: MachineId,
        /// Why it has to leave.
        reason: String,
    },
    /// End a machine's membership of the cluster.
    RemoveMember {
        /// The machine that left.
        machine: MachineId,
        /// How its membership ended.
        reason: String,
    },
    /// Declare a role to the curators, or replace its declaration.
    DeclareRole {
        /// Name of the role.
        role: String,
    },
    /// Have the curators delete the declaration of a role that no node has.
    UndeclareRole {
        /// Name of the role.
        role: String,
    },
    /// Delete the record of a withdrawn role that the curators do not have.
    DeleteDeclaration {
        /// Name of the role.
        role: String,
    },
    /// Send the desired Kubernetes to the curators.
    PutKubernetes,
    /// Have the curators delete Kubernetes, which no node runs any more.
    DeleteKubernetes,
    /// Delete the record of Kubernetes, which the curators do not have.
    DeleteKubernetesRecord,
    /// Have the curators rotate keys of Kubernetes.
    RotateKeys {
        /// The set of keys to rotate.
        keys: RotatableKeys,
    },
    /// Have a node run a bundle, as the next node of an upgrade.
    AssignBundle {
        /// ID of the node.
        node: String,
        /// The machine that the node runs on.
        machine: MachineId,
        /// SHA-256 of the bundle, in hexadecimal digits.
        bundle: String,
    },
    /// Have a node run the bundle of its cluster again.
    ClearBundle {
        /// ID of the node.
        node: String,
    },
    /// Record an event of the upgrade.
    RecordUpgrade(UpgradeEvent),
    /// Delete the record of the cluster.
    DeleteCluster,
}

impl fmt::Display for ClusterPlanStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddMember { machine, part } => write!(f, "machine {machine} is chosen as {part}"),
            Self::SendOrder { machine, order: what } => write!(f, "machine {machine} is ordered to {what}"),
            Self::RecordFounding { machine } => write!(f, "machine {machine} has founded it"),
            Self::ApproveNode { machine, key } => {
                write!(f, "machine {machine} is let in by the key {}", hex::encode(key))
            }
            Self::ChangeRoles { node, add: give, remove: take } => {
                let (give, take) = (give.join(", "), take.join(", "));
                match (give.as_str(), take.as_str()) {
                    (give, "") => write!(f, "{node} is given {give}"),
                    ("", take) => write!(f, "{node} gives up {take}"),
                    (give, take) => write!(f, "{node} is given {give}, and gives up {take}"),
                }
            }
            Self::DecommissionNode { node } => write!(f, "{node} is decommissioned"),
            Self::DeleteNode { node } => write!(f, "{node} is deleted"),
            Self::MarkLeaving { machine, reason: why } => write!(f, "machine {machine} is to leave: {why}"),
            Self::RemoveMember { machine, reason: how } => write!(f, "machine {machine} is out of it: {how}"),
            Self::DeclareRole { role } => write!(f, "role {role} is declared"),
            Self::UndeclareRole { role } => write!(f, "role {role} is declared no more"),
            Self::DeleteDeclaration { role } => write!(f, "the declaration of role {role} is forgotten"),
            Self::PutKubernetes => f.write_str("its curators receive the Kubernetes spec"),
            Self::DeleteKubernetes => f.write_str("its curators forget Kubernetes"),
            Self::DeleteKubernetesRecord => f.write_str("Kubernetes is forgotten"),
            Self::RotateKeys { keys } => write!(f, "{} of Kubernetes are replaced", keys.as_str()),
            Self::AssignBundle { node, bundle, .. } => {
                write!(f, "{node} is ordered to run the bundle {}", bundle.get(..16).unwrap_or(bundle))
            }
            Self::ClearBundle { node } => write!(f, "{node} runs the bundle of its cluster"),
            Self::RecordUpgrade(UpgradeEvent::NodeDone { node }) => {
                write!(f, "{node} is through with its upgrade")
            }
            Self::RecordUpgrade(UpgradeEvent::Pause { reason: why }) => {
                write!(f, "its upgrade stands still: {why}")
            }
            Self::RecordUpgrade(UpgradeEvent::ReleaseDone) => f.write_str("its role servers are through"),
            Self::RecordUpgrade(UpgradeEvent::Finish) => f.write_str("its upgrade is done"),
            Self::DeleteCluster => f.write_str("nothing of it is left"),
        }
    }
}

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
        return planning.plan;
    }
    planning.add_members(&ClusterPart::ALL, candidates, places);
    match (&cluster.identity, &cluster.observed) {
        (None, _) => planning.plan_founding(),
        (Some(_), CuratorAnswer::Observed(seen)) => planning.plan_running(seen),
        (Some(_), CuratorAnswer::Unreachable(why)) => {
            let waits = format!("none of its curators answers: {why}");
            planning.plan.wait_reasons.push(waits);
        }
        (Some(_), CuratorAnswer::NotQueried) => {
            planning.plan.wait_reasons.push("its curators were not queried yet".to_owned());
        }
    }
    planning.plan
}

/// Locations of a cluster's machines; `None` if unknown.
pub type MachineLocations = BTreeMap<MachineId, Option<String>>;

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

    /// Deletes the cluster: every machine gets the order to leave. Its membership ends when it has left or was given
    /// up.
    fn plan_deletion(&mut self) {
        if self.cluster.members.is_empty() {
            return self.push_step(ClusterPlanStep::DeleteCluster);
        }
        for member in &self.cluster.members {
            self.remove_member(member, "its cluster ended");
        }
    }

    /// Ends a machine's membership: it leaves first, and nothing else has to be done for it.
    fn remove_member(&mut self, member: &ClusterMember, how: &str) {
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

    fn add_members(
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
                self.plan.wait_reasons.push(format!(
                    "{} more of the {part} {} wanted, and no machine {fits}",
                    lacking - found,
                    if lacking - found == 1 { "is" } else { "are" }
                ));
            }
        }
    }

    fn plan_founding(&mut self) {
        for member in self.cluster.members.iter().filter(|member| member.leave_reason.is_some()) {
            self.remove_member(member, "it left before the cluster was founded");
        }
        self.mark_leaving(None);
        let mut staying = self.cluster.members.iter().filter(|member| member.leave_reason.is_none());
        let founder = staying.find(|member| member.part == ClusterPart::ControlPlane);
        self.plan_founder(founder, "founds the cluster first");
    }

    /// Has the founder found the cluster, while the others wait for it.
    fn plan_founder(&mut self, founder: Option<&ClusterMember>, first: &str) {
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

    /// Machines that may be chosen during a restore. Until one machine restores the cluster, only the target machine
    /// may be chosen, if an operator named one.
    fn restore_candidates(
        &self,
        restoring: &PendingRestore,
        candidates: &[CandidateMachine],
    ) -> Vec<CandidateMachine> {
        let onto = restoring.target_machine.filter(|_| self.restoring_member(restoring).is_none());
        let may = |candidate: &&CandidateMachine| onto.is_none_or(|onto| candidate.machine == onto);
        candidates.iter().filter(may).cloned().collect()
    }

    /// The machine that restores the cluster: the first of the new control plane.
    fn restoring_member(&self, restoring: &PendingRestore) -> Option<&ClusterMember> {
        self.cluster.members.iter().find(|member| {
            member.part == ClusterPart::ControlPlane
                && member.leave_reason.is_none()
                && member.chosen_at > restoring.requested_at
        })
    }

    /// Restores the cluster: the reachable machines of its old control plane leave first.
    fn plan_restore(&mut self, restoring: &PendingRestore, candidates: &[CandidateMachine]) {
        let restorer = self.restoring_member(restoring).cloned();
        // A machine that has left may be needed again for the restore.
        let needed = |member: &ClusterMember| match restoring.target_machine {
            _ if restorer.is_some() => false,
            Some(onto) => member.machine == onto,
            None => candidates.is_empty(),
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
                    self.push_step(ClusterPlanStep::MarkLeaving { machine: member.machine, reason: why });
                }
                // A restorer that is lost during the restore has an epoch of its own, which counts no more.
                None if member.is_given_up() || member.retiring => {
                    let why = "it was lost while the cluster was restored".to_owned();
                    self.push_step(ClusterPlanStep::MarkLeaving { machine: member.machine, reason: why });
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
                Some(_) => "the machine that it is to be restored onto is not free yet",
                None => "no machine is free that it could be restored onto",
            };
            self.plan.wait_reasons.push(waits.to_owned());
        }
        self.plan_founder(restorer.as_ref(), "restores the cluster first");
    }

    /// Marks machines that have to leave from now on: retired and lost ones.
    fn mark_leaving(&mut self, seen: Option<&ObservedCluster>) {
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
            self.push_step(ClusterPlanStep::MarkLeaving { machine: member.machine, reason: why.to_owned() });
        }
    }

    fn plan_running(&mut self, seen: &ObservedCluster) {
        // Declarations come before the nodes that act on them.
        let (steps, waits) = declaration_sync::plan_declarations(&self.cluster.declared_roles, seen);
        self.plan.steps.extend(steps);
        self.plan.wait_reasons.extend(waits);
        let (steps, waits) = kubernetes::plan_kubernetes(
            self.cluster.kubernetes.as_ref(),
            self.cluster.upgrade.as_ref(),
            seen,
        );
        self.plan.steps.extend(steps);
        self.plan.wait_reasons.extend(waits);
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
            let next = upgrade::plan_upgrade(upgrade, &self.cluster.members, seen, self.now);
            self.plan.steps.extend(next.steps);
            self.plan.wait_reasons.extend(next.wait_reasons);
            for (machine, wait) in next.machine_waits {
                self.plan.machine_waits.entry(machine).or_insert(wait);
            }
        }
    }

    /// Marks surplus machines as leaving, one of the control plane at a time.
    fn scale_down(&mut self, seen: &ObservedCluster) {
        for part in ClusterPart::ALL {
            let order = removal_order(&self.cluster.members, part, Some(seen));
            let wanted = usize::try_from(self.cluster.spec.desired_count(part)).unwrap_or(usize::MAX);
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
            let why = format!("the cluster is to have {wanted} of the {part}");
            for member in order.into_iter().take(at_once) {
                self.push_step(ClusterPlanStep::MarkLeaving { machine: member.machine, reason: why.clone() });
            }
        }
    }

    /// Plans for a machine that stays: it has to become a node with its roles.
    fn plan_member(
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
                JoinApproval::Manual if member.approved_key == Some(key) => {
                    self.push_step(ClusterPlanStep::ApproveNode { machine: member.machine, key });
                }
                JoinApproval::Automatic => {
                    self.push_step(ClusterPlanStep::ApproveNode { machine: member.machine, key });
                }
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
            NodeState::Up => self.plan_roles(member, node, seen, consensus),
        }
    }

    /// Whether a machine needs a new order to join because its cluster was restored. A machine whose node is up keeps
    /// its key: the order carries the epoch and the addresses of the curators, and its ticket is not used. A machine
    /// that registered or waited for approval during the restore gets the order again. A machine that was ordered to
    /// leave gets no other order.
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
            MembershipOrder::Join if age > TICKET_LIFETIME => self.push_order(member, MembershipOrder::Join),
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

    /// Gives a node the roles that it lacks and takes those that it must not have.
    fn plan_roles(
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
                if let Some(why) = member_addition_objection(seen) {
                    return self.push_wait(member, why);
                }
                if consensus.is_some() {
                    return self.push_wait(member, "members of etcd come and go one at a time");
                }
                let give = vec![CONSENSUS_MEMBER_ROLE.to_owned()];
                *consensus = Some(ClusterPlanStep::ChangeRoles {
                    node: node.id.clone(),
                    add: give,
                    remove: Vec::new(),
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
                    });
                }
            }
        }
    }

    /// Whether Kubernetes is desired and the curators have it.
    fn is_kubernetes_active(&self, seen: &ObservedCluster) -> bool {
        let wanted = self.cluster.kubernetes.as_ref().filter(|wanted| !wanted.removing);
        wanted.is_some() && matches!(seen.kubernetes, kubernetes::ObservedKubernetes::Present(_))
    }

    /// Plans the controller role of Kubernetes. A member of the control plane gets it once its member of etcd is
    /// reachable, and keeps it until no node runs pods any more.
    fn plan_controller_role(&mut self, member: &ClusterMember, node: &ClusterNode, seen: &ObservedCluster) {
        let runs = node.roles.contains(CONTROLLER_ROLE);
        let step = |give: &[&str], take: &[&str]| {
            let roles = |roles: &[&str]| roles.iter().map(|&role| role.to_owned()).collect();
            ClusterPlanStep::ChangeRoles { node: node.id.clone(), add: roles(give), remove: roles(take) }
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

    /// Plans for a machine that leaves: first its node is removed, then the machine.
    fn drain_member(
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
    fn delete_stale_nodes(&mut self, seen: &ObservedCluster, consensus: &mut Option<ClusterPlanStep>) {
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
        })
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
        },
        NodeState::Up => ClusterPlanStep::DecommissionNode { node: id() },
        NodeState::New | NodeState::Standby | NodeState::Decommissioned => {
            ClusterPlanStep::DeleteNode { node: id() }
        }
    })
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
mod tests;
