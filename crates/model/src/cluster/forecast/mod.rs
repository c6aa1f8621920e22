//! Forecast of a cluster: [`plan_cluster`] applied step by step to assumed successes.
//!
//! The steps and their order come from the function that the cluster loop itself uses. Nothing of that is decided here.
//! This module only knows what a step changes when it succeeds (`effects`), and what happens by itself while no step is
//! due (`progress`): machines take their orders, a learner gets its vote, a node is healthy with what it has to run. So
//! a forecast is the least that happens, as [`crate::plan`] is for machines. [`ASSUMPTIONS`] lists what it takes for
//! granted.
//!
//! A forecast sends no request. What it knows of nodes is the last answer of the curators, as far as the BMDB stores
//! it.

use std::collections::{BTreeMap, BTreeSet};

use crate::cluster::kubernetes::{CuratorKubernetes, ObservedKubernetes};
use crate::cluster::node_address::NodeAddresses;
use crate::cluster::plan::step::ClusterPlanStep;
use crate::cluster::plan::{MachineLocations, plan_cluster};
use crate::cluster::state::{
    CandidateMachine, Cluster, ClusterMember, ClusterNode, CuratorAnswer, NodeHealth, NodeState,
    ObservedCluster,
};
use crate::cluster::upgrade::UpgradeEvent;
use crate::ids::MachineId;
use crate::time::{Span, Timestamp, after};

mod effects;
mod progress;

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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForecastStep {
    /// UUID of the machine that the step is about; `None` if it is about the cluster.
    pub machine: Option<String>,
    /// The provider's name for the machine.
    pub name: Option<String>,
    /// What is done: the rest of a sentence that begins with the machine, or a sentence about the cluster.
    pub action: String,
}

/// The forecast of one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
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
            | ClusterPlanStep::RenewPeer { machine }
            | ClusterPlanStep::SendAuthority { machine, .. }
            | ClusterPlanStep::SendSecretKeys { machine }
            | ClusterPlanStep::RecordFounding { machine }
            | ClusterPlanStep::ApproveNode { machine, .. }
            | ClusterPlanStep::AssignAddress { machine, .. }
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
            ClusterPlanStep::ApproveNode { .. } => "is admitted with its key".to_owned(),
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
}

/// A node that has just registered.
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
        addresses: NodeAddresses::default(),
    }
}

#[cfg(test)]
mod tests;
