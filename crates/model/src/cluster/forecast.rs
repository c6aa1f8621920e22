//! Forecast of a cluster: [`plan_cluster`] applied step by step to assumed successes.
//!
//! The steps and their order come from the function that the cluster loop itself uses. Nothing of that is decided here.
//! This module only knows what a step changes when it succeeds (`ForecastRun::apply_step`), and what happens by itself
//! while no step is due (`ForecastRun::advance`): machines take their orders, a learner gets its vote, a node is
//! healthy with what it has to run. So a forecast is the least that happens, as [`crate::plan`] is for machines;
//! [`ASSUMPTIONS`] lists what it takes for granted.
//!
//! A forecast sends no request. What it knows of nodes is the last answer of the curators, as far as the BMDB stores
//! it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::cluster::kubernetes::{
    CONTROLLER_ROLE, ComponentStatus, CuratorKubernetes, NodeKubernetes, ObservedKubernetes, WORKER_ROLE,
    spec_from_settings,
};
use crate::cluster::plan::{ClusterPlanStep, MachineLocations, plan_cluster};
use crate::cluster::spec::ClusterPart;
use crate::cluster::state::{
    CONSENSUS_MEMBER_ROLE, CandidateMachine, Cluster, ClusterIdentity, ClusterMember, ClusterNode,
    CuratorAnswer, EtcdMember, LastOrder, MemberReport, MembershipOrder, NodeHealth, NodeState,
    ObservedCluster,
};
use crate::cluster::upgrade::{self, UpgradeEvent};
use crate::ids::MachineId;
use crate::phase::Phase;
use crate::time::{Span, Timestamp, after};

/// What a forecast takes for granted, one clause each.
pub const ASSUMPTIONS: [&str; 5] = [
    "every step succeeds: a machine does what it was ordered to do, a node becomes healthy with what it \
     should run, and a new member of etcd catches up",
    "nodes that report continue to report, and silent nodes stay silent; so do curators that do not answer",
    "curators have the roles that were declared, and nodes that are of no machine of the cluster are left alone",
    "machines that are free stay so, and no other comes; nobody else changes anything",
    "budgets, holds and pauses of loops let everything pass",
];

/// Steps after which a forecast is truncated.
const MAX_STEPS: usize = 2_000;

/// How a forecast ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ForecastEnd {
    /// The cluster is as its spec demands.
    Converged,
    /// The cluster waits for something that does not happen by itself.
    Waiting,
    /// The cluster is deleted, with all its members.
    Deleted,
    /// The forecast has reached the maximum number of steps.
    Truncated,
}

impl ForecastEnd {
    /// All ways in which a forecast ends.
    pub const ALL: [Self; 4] = [Self::Converged, Self::Waiting, Self::Deleted, Self::Truncated];

    /// The name used everywhere.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Converged => "converged",
            Self::Waiting => "waiting",
            Self::Deleted => "deleted",
            Self::Truncated => "truncated",
        }
    }
}

/// One step of a forecast.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForecastStep {
    /// UUID of the machine that the step is about; `None` if it is about the cluster.
    pub machine: Option<String>,
    /// The provider's name for the machine.
    pub name: Option<String>,
    /// What is done: the rest of a sentence that begins with the machine, or a sentence about the cluster.
    pub action: String,
}

/// The forecast of one cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forecast {
    /// The moment at which the forecast begins.
    pub at: Timestamp,
    /// The steps in their order.
    pub steps: Vec<ForecastStep>,
    /// How the forecast ends.
    pub end: ForecastEnd,
    /// What the cluster as a whole waits for at the end.
    pub wait_reasons: Vec<String>,
    /// What machines wait for at the end: pairs of name and reason.
    pub machine_waits: Vec<(String, String)>,
}

/// The state from which a forecast begins, observed or assumed.
#[derive(Clone, Debug)]
pub struct ForecastInput {
    /// The cluster's spec, members and nodes.
    pub cluster: Cluster,
    /// The last answer of its curators, even if they do not answer now.
    pub last_observed: ObservedCluster,
    /// Machines that may be chosen.
    pub candidates: Vec<CandidateMachine>,
    /// Locations of the cluster's machines.
    pub locations: MachineLocations,
}

/// Forecasts a cluster from `now` on.
#[must_use]
pub fn forecast_cluster(beginning: ForecastInput, now: Timestamp) -> Forecast {
    let mut course = ForecastRun { input: beginning, now, steps: Vec::new() };
    let (mut waits, mut machines) = (Vec::new(), BTreeMap::new());
    let end = loop {
        let ForecastInput { cluster, candidates, locations: places, .. } = &course.input;
        let planned = plan_cluster(cluster, candidates, places, course.now);
        if planned.is_converged() {
            break ForecastEnd::Converged;
        }
        if course.steps.len() >= MAX_STEPS {
            break ForecastEnd::Truncated;
        }
        let idle = planned.steps.is_empty();
        let gone = planned.steps.contains(&ClusterPlanStep::DeleteCluster);
        for step in planned.steps {
            course.record_step(&step);
            course.apply_step(step);
        }
        if gone {
            break ForecastEnd::Deleted;
        }
        if idle && !course.advance() {
            (waits, machines) = (planned.wait_reasons, planned.machine_waits);
            break ForecastEnd::Waiting;
        }
        course.now = after(course.now, Span::seconds(1).0);
    };
    let machines =
        machines.into_iter().map(|(machine, waits)| (course.machine_name(machine), waits)).collect();
    Forecast { at: now, steps: course.steps, end, wait_reasons: waits, machine_waits: machines }
}

struct ForecastRun {
    input: ForecastInput,
    now: Timestamp,
    steps: Vec<ForecastStep>,
}

impl ForecastRun {
    fn cluster(&mut self) -> &mut Cluster {
        &mut self.input.cluster
    }

    fn member(&mut self, machine: MachineId) -> Option<&mut ClusterMember> {
        self.cluster().members.iter_mut().find(|member| member.machine == machine)
    }

    fn observed(&mut self) -> Option<&mut ObservedCluster> {
        match &mut self.input.cluster.observed {
            CuratorAnswer::Observed(seen) => Some(seen),
            CuratorAnswer::NotQueried | CuratorAnswer::Unreachable(_) => None,
        }
    }

    fn node(&mut self, id: &str) -> Option<&mut ClusterNode> {
        self.observed()?.nodes.iter_mut().find(|node| node.id == id)
    }

    fn kubernetes_status(&mut self) -> Option<&mut CuratorKubernetes> {
        match &mut self.observed()?.kubernetes {
            ObservedKubernetes::Present(has) => Some(has),
            _ => None,
        }
    }

    /// The provider's name for a machine: a member, a candidate, or a former member.
    fn machine_name(&self, machine: MachineId) -> String {
        let ForecastInput { cluster, candidates, .. } = &self.input;
        let member = cluster.members.iter().find(|member| member.machine == machine);
        let candidate = || candidates.iter().find(|candidate| candidate.machine == machine);
        let name = member.map(|member| member.name.clone());
        name.or_else(|| Some(candidate()?.name.clone())).unwrap_or_else(|| machine.to_string())
    }

    /// The machine that a node runs on.
    fn machine_of(&self, node: &str) -> Option<MachineId> {
        let CuratorAnswer::Observed(seen) = &self.input.cluster.observed else { return None };
        let node = seen.nodes.iter().find(|one| one.id == node)?;
        let mut members = self.input.cluster.members.iter();
        members.find(|member| member.key() == Some(node.key)).map(|member| member.machine).or(node.machine)
    }

    /// Records a step in the words of [`ClusterPlanStep`]'s `Display`, without its subject.
    fn record_step(&mut self, step: &ClusterPlanStep) {
        let (machine, subject) = match step {
            ClusterPlanStep::AddMember { machine, .. }
            | ClusterPlanStep::SendOrder { machine, .. }
            | ClusterPlanStep::RecordFounding { machine }
            | ClusterPlanStep::ApproveNode { machine, .. }
            | ClusterPlanStep::MarkLeaving { machine, .. }
            | ClusterPlanStep::RemoveMember { machine, .. } => {
                (Some(*machine), format!("machine {machine} "))
            }
            ClusterPlanStep::ChangeRoles { node, .. }
            | ClusterPlanStep::DecommissionNode { node }
            | ClusterPlanStep::DeleteNode { node }
            | ClusterPlanStep::AssignBundle { node, .. }
            | ClusterPlanStep::ClearBundle { node }
            | ClusterPlanStep::RecordUpgrade(UpgradeEvent::NodeDone { node }) => {
                (self.machine_of(node), format!("{node} "))
            }
            _ => (None, String::new()),
        };
        let what = match step {
            // The node's key is unknown in advance.
            ClusterPlanStep::ApproveNode { .. } => "is let in by its key".to_owned(),
            step => step.to_string(),
        };
        let what = match machine {
            Some(_) => what.strip_prefix(&subject).map(str::to_owned).unwrap_or(what),
            None => what,
        };
        let name = machine.map(|machine| self.machine_name(machine));
        self.steps.push(ForecastStep {
            machine: machine.map(|machine| machine.to_string()),
            name,
            action: what,
        });
    }

    /// Applies what a step changes when it succeeds.
    fn apply_step(&mut self, step: ClusterPlanStep) {
        match step {
            ClusterPlanStep::AddMember { machine, part } => self.apply_member_addition(machine, part),
            ClusterPlanStep::SendOrder { machine, order: what } => {
                let at = self.now;
                if let Some(member) = self.member(machine) {
                    let generation = member.last_order.map_or(0, |order| order.generation) + 1;
                    member.last_order = Some(LastOrder { order: what, generation, sent_at: at });
                }
            }
            ClusterPlanStep::RecordFounding { machine } => self.apply_founding(machine),
            ClusterPlanStep::ApproveNode { key, .. } => {
                let mut nodes = self.observed().into_iter().flat_map(|seen| &mut seen.nodes);
                if let Some(node) = nodes.find(|node| node.key == key) {
                    node.state = NodeState::Standby;
                }
            }
            ClusterPlanStep::ChangeRoles { node, add: give, remove: take } => {
                self.apply_role_change(&node, &give, &take);
            }
            ClusterPlanStep::DecommissionNode { node } => {
                if let Some(node) = self.node(&node) {
                    node.state = NodeState::Decommissioned;
                    node.roles.clear();
                }
            }
            ClusterPlanStep::DeleteNode { node } => {
                if let Some(seen) = self.observed() {
                    seen.nodes.retain(|one| one.id != node);
                }
            }
            ClusterPlanStep::MarkLeaving { machine, reason: why } => {
                if let Some(member) = self.member(machine) {
                    member.leave_reason = Some(why);
                }
            }
            ClusterPlanStep::RemoveMember { machine, .. } => self.apply_member_removal(machine),
            ClusterPlanStep::DeclareRole { role } => {
                let digest =
                    self.cluster().declared_roles.iter().find(|one| one.role == role).map(|one| one.digest);
                if let (Some(digest), Some(seen)) = (digest, self.observed()) {
                    seen.declared_digests.insert(role, digest);
                }
            }
            ClusterPlanStep::UndeclareRole { role } => {
                if let Some(seen) = self.observed() {
                    seen.declared_digests.remove(&role);
                }
            }
            ClusterPlanStep::DeleteDeclaration { role } => {
                self.cluster().declared_roles.retain(|one| one.role != role);
            }
            ClusterPlanStep::PutKubernetes => {
                let settings = self
                    .cluster()
                    .kubernetes
                    .as_ref()
                    .map(|wanted| spec_from_settings(wanted.spec.to_settings()));
                let before = self.kubernetes_status().cloned().unwrap_or_default();
                if let (Some(settings), Some(seen)) = (settings, self.observed()) {
                    seen.kubernetes =
                        ObservedKubernetes::Present(CuratorKubernetes { spec: settings, ..before });
                }
            }
            ClusterPlanStep::DeleteKubernetes => {
                if let Some(seen) = self.observed() {
                    seen.kubernetes = ObservedKubernetes::Absent;
                }
            }
            ClusterPlanStep::DeleteKubernetesRecord => self.cluster().kubernetes = None,
            ClusterPlanStep::RotateKeys { keys } => {
                if let Some(wanted) = &mut self.cluster().kubernetes {
                    wanted.pending_rotations.retain(|one| *one != keys);
                }
            }
            ClusterPlanStep::AssignBundle { node, bundle, .. } => {
                let at = self.now;
                if let Some(upgrade) = &mut self.cluster().upgrade {
                    upgrade
                        .requested_nodes
                        .insert(node.clone(), upgrade::NodeUpgrade { requested_at: at, is_done: false });
                }
                if let Some(has) = self.kubernetes_status() {
                    has.assigned_bundles.insert(node, bundle);
                }
            }
            ClusterPlanStep::ClearBundle { node } => {
                if let Some(has) = self.kubernetes_status() {
                    has.assigned_bundles.remove(&node);
                }
            }
            ClusterPlanStep::RecordUpgrade(turn) => self.apply_upgrade_event(turn),
            ClusterPlanStep::DeleteCluster => {}
        }
    }

    fn apply_member_addition(&mut self, machine: MachineId, part: ClusterPart) {
        let (name, chosen_at) = (self.machine_name(machine), self.now);
        let ForecastInput { cluster, candidates, locations: places, .. } = &mut self.input;
        if let Some(found) = candidates.iter().position(|candidate| candidate.machine == machine) {
            places.insert(machine, candidates.remove(found).location);
        }
        cluster.members.push(ClusterMember {
            machine,
            name,
            part,
            chosen_at,
            approved_key: None,
            leave_reason: None,
            last_order: None,
            report: None,
            phase: Phase::Ready,
            retiring: false,
        });
    }

    fn apply_member_removal(&mut self, machine: MachineId) {
        let ForecastInput { cluster, candidates, locations: places, .. } = &mut self.input;
        let Some(found) = cluster.members.iter().position(|member| member.machine == machine) else { return };
        let member = cluster.members.remove(found);
        // A restored cluster may need the machine again. Otherwise no member is missing where members are removed.
        if !member.retiring && matches!(member.phase, Phase::Ready | Phase::Installed) {
            let location = places.get(&machine).cloned().flatten();
            candidates.push(CandidateMachine { machine, name: member.name, location });
        }
    }

    /// The cluster has one node now; or it is restored, with the nodes that it had.
    fn apply_founding(&mut self, machine: MachineId) {
        let now = self.now;
        let Some(key) = self.member(machine).and_then(|member| member.key()) else { return };
        let mut seen = std::mem::take(&mut self.input.last_observed);
        for node in &mut seen.nodes {
            // The old control plane is of another epoch and gets no messages of this one.
            if node.roles.remove(CONSENSUS_MEMBER_ROLE) {
                node.health = NodeHealth::Silent(std::time::Duration::ZERO);
            }
        }
        seen.nodes.retain(|node| node.key != key);
        let mut founder = new_node(machine, key);
        founder.state = NodeState::Up;
        founder.roles.insert(CONSENSUS_MEMBER_ROLE.to_owned());
        seen.etcd_members =
            vec![EtcdMember { node: Some(founder.id.clone()), learner: false, reachable: true }];
        seen.nodes.push(founder);
        if self.input.cluster.kubernetes.is_some()
            && matches!(seen.kubernetes, ObservedKubernetes::NotQueried)
        {
            seen.kubernetes = ObservedKubernetes::Absent;
        }
        let cluster = self.cluster();
        cluster.identity =
            Some(ClusterIdentity { ca_certificate: vec![1], curators: Vec::new(), founded_at: now });
        if cluster.restoring.take().is_some() {
            cluster.restored_at = Some(now);
            let epoch = cluster.epoch;
            if let Some(report) = self.member(machine).and_then(|member| member.report.as_mut()) {
                report.epoch = epoch;
            }
        }
        self.cluster().observed = CuratorAnswer::Observed(seen);
    }

    fn apply_role_change(&mut self, id: &str, give: &[String], take: &[String]) {
        let Some(node) = self.node(id) else { return };
        node.roles.extend(give.iter().cloned());
        node.roles.retain(|role| !take.contains(role));
        let member = node.is_etcd_member();
        if let Some(seen) = self.observed() {
            let is = |one: &EtcdMember| one.node.as_deref() == Some(id);
            if !member {
                seen.etcd_members.retain(|one| !is(one));
            } else if !seen.etcd_members.iter().any(is) {
                seen.etcd_members.push(EtcdMember {
                    node: Some(id.to_owned()),
                    learner: true,
                    reachable: true,
                });
            }
        }
    }

    fn apply_upgrade_event(&mut self, turn: UpgradeEvent) {
        let cluster = self.cluster();
        let Some(upgrade) = &mut cluster.upgrade else { return };
        match turn {
            UpgradeEvent::NodeDone { node } => {
                if let Some(node_upgrade) = upgrade.requested_nodes.get_mut(&node) {
                    node_upgrade.is_done = true;
                }
            }
            UpgradeEvent::Pause { reason: why } => upgrade.pause_reason = Some(why),
            UpgradeEvent::ReleaseDone => upgrade.release = None,
            UpgradeEvent::Finish => {
                let target =
                    upgrade.bundles.clone().map(|(from, to)| if upgrade.rolling_back { from } else { to });
                cluster.upgrade = None;
                if let (Some(target), Some(wanted)) = (target, &mut cluster.kubernetes) {
                    wanted.spec.bundle.clone_from(&target.digest);
                    wanted.spec.version = target.version;
                    if let Some(has) = self.kubernetes_status() {
                        has.spec.bundle = target.digest;
                    }
                }
            }
        }
    }

    /// Applies what happens by itself; returns whether anything did.
    fn advance(&mut self) -> bool {
        let mut passed = self.advance_member_reports();
        let now_epoch = self.input.cluster.epoch;
        let standby: Vec<[u8; 32]> = match self.observed() {
            None => Vec::new(),
            Some(seen) => {
                let mut let_in = Vec::new();
                for node in seen.nodes.iter_mut().filter(|node| node.state == NodeState::Standby) {
                    node.state = NodeState::Up;
                    let_in.push(node.key);
                }
                let messages: BTreeSet<&String> = (seen.nodes.iter())
                    .filter(|node| node.health == NodeHealth::Healthy)
                    .map(|node| &node.id)
                    .collect();
                let is_observed =
                    |member: &EtcdMember| member.node.as_ref().is_some_and(|node| messages.contains(node));
                for member in seen.etcd_members.iter_mut().filter(|member| is_observed(member)) {
                    passed |= member.learner || !member.reachable;
                    (member.learner, member.reachable) = (false, true);
                }
                let_in
            }
        };
        passed |= !standby.is_empty();
        for member in &mut self.cluster().members {
            if let Some(report) =
                member.report.as_mut().filter(|report| report.key.is_some_and(|key| standby.contains(&key)))
            {
                report.ca_certificate = Some(vec![1]);
                report.epoch = now_epoch;
            }
        }
        passed |= self.advance_node_kubernetes();
        if let Some(upgrade) = &mut self.cluster().upgrade
            && upgrade.pause_reason.is_none()
        {
            if let Some(release) = &mut upgrade.release
                && (release.pause_reason.is_none() && release.outcome.is_none())
            {
                release.outcome = Some(("finished".to_owned(), 0));
                passed = true;
            }
            passed |= upgrade.conflicting_roll_out.take().is_some();
        }
        passed
    }

    /// Machines take their last order and report it; returns whether any did.
    fn advance_member_reports(&mut self) -> bool {
        let (mut answered, mut registered) = (false, Vec::new());
        let epoch = self.input.cluster.epoch;
        for member in &mut self.cluster().members {
            let received = matches!(member.phase, Phase::Ready | Phase::Installed);
            let Some(order) = member.last_order.filter(|_| received) else { continue };
            let before = member.report.clone().unwrap_or_default();
            if before.generation == order.generation && before.error.is_none() {
                continue;
            }
            answered = true;
            let key = before.key.unwrap_or_else(|| simulated_key(member.machine, order.generation));
            let founds = (order.order == MembershipOrder::Found).then(|| vec![1]);
            member.report = Some(MemberReport {
                generation: order.generation,
                key: (order.order != MembershipOrder::Leave).then_some(key),
                ca_certificate: (order.order != MembershipOrder::Leave)
                    .then_some(before.ca_certificate)
                    .flatten()
                    .or(founds),
                address: Some(before.address.unwrap_or_else(|| member.name.clone())),
                error: None,
                epoch: if order.order == MembershipOrder::Leave { before.epoch } else { epoch },
            });
            if order.order == MembershipOrder::Join {
                registered.push((member.machine, key));
            }
        }
        if let Some(seen) = self.observed() {
            for (machine, key) in registered {
                if seen.node_by_key(&key).is_none() {
                    seen.nodes.push(new_node(machine, key));
                }
            }
        }
        answered
    }

    /// Nodes run the Kubernetes that their roles and bundles demand; returns whether any changed.
    fn advance_node_kubernetes(&mut self) -> bool {
        let Some(wanted) = self.input.cluster.kubernetes.clone() else { return false };
        let bundles = self.input.cluster.upgrade.as_ref().and_then(|upgrade| upgrade.bundles.clone());
        let version = |digest: &str| match &bundles {
            Some((from, _)) if from.digest == digest => from.version.clone(),
            Some((_, to)) if to.digest == digest => to.version.clone(),
            _ => wanted.spec.version.clone(),
        };
        let Some(seen) = self.observed() else { return false };
        let ObservedKubernetes::Present(has) = &mut seen.kubernetes else { return false };
        let mut came = !has.rotations.is_empty();
        has.rotations.clear();
        for node in seen.nodes.iter_mut().filter(|node| node.health == NodeHealth::Healthy) {
            let role = [CONTROLLER_ROLE, WORKER_ROLE].into_iter().find(|role| node.roles.contains(*role));
            let bundle = has.bundle_of(&node.id);
            let runs = role.map(|role| NodeKubernetes {
                bundle: bundle.to_owned(),
                version: version(bundle),
                components: vec![healthy_component(role)],
                ..NodeKubernetes::default()
            });
            let already = match (&node.kubernetes, &runs) {
                (Some(is), Some(runs)) => is.bundle == runs.bundle && is.unhealthy_reason().is_none(),
                (None, None) => true,
                (Some(is), None) => is.bundle.is_empty(),
                (None, Some(_)) => false,
            };
            if !already {
                node.kubernetes = runs;
                came = true;
            }
        }
        came
    }
}

fn healthy_component(role: &str) -> ComponentStatus {
    ComponentStatus {
        name: role.to_owned(),
        state: "healthy".to_owned(),
        since: None,
        restarts: 0,
        message: String::new(),
    }
}

/// A key that no real node has, made from the machine and the generation of its order.
fn simulated_key(machine: MachineId, generation: i64) -> [u8; 32] {
    let mut key = [0; 32];
    key[..16].copy_from_slice(machine.0.as_bytes());
    key[16..24].copy_from_slice(&generation.to_be_bytes());
    key
}

fn new_node(machine: MachineId, key: [u8; 32]) -> ClusterNode {
    ClusterNode {
        id: format!("node-{}", hex::encode(key)),
        key,
        machine: Some(machine),
        state: NodeState::New,
        roles: BTreeSet::new(),
        health: NodeHealth::Healthy,
        services: Vec::new(),
        kubernetes: None,
    }
}

#[cfg(test)]
mod tests;
