//! Roll-out: rolling update of the role servers to a release.
//!
//! A few machines at a time get the order to run the release. The next machine gets it when those before it have
//! reported the release and are healthy: their agents report, and if they are nodes of a cluster their curators report
//! them as healthy. Of a cluster's control plane one machine at a time gets the order, and only while every member is
//! reachable. One failure pauses the roll-out: what is bad on one machine is likely to be bad on all of them, and a
//! person decides how to go on. While etcd of a cluster is full, none of its machines gets the order.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::cluster::etcd_space::FULL_ETCD;
use crate::host_finding::HostFinding;
use crate::ids::MachineId;
use crate::phase::Phase;
use crate::process::UnknownName;
use crate::time::{Timestamp, after, between};

/// Most machines of one roll-out.
pub const MAX_MACHINES: usize = 10_000;
/// Most machines that may have the order at a time.
pub const MAX_PARALLELISM: u32 = 50;
/// Range of the time limit for a release to be fetched and reported, in seconds.
pub const DEADLINE_RANGE_SECONDS: std::ops::RangeInclusive<u32> = 5..=3_600;
/// How long a machine that runs the release may take to become healthy.
const HEALTHY_WITHIN: Duration = Duration::from_mins(5);
/// How long after the machine's own time limits a report may come.
const REPORT_GRACE: Duration = Duration::from_mins(2);
/// Age at which an observation by a curator no longer counts.
const OBSERVATION_TTL: Duration = Duration::from_mins(1);
/// How long a node is observed before it counts as healthy: longer than its curator tolerates silence.
const HEALTH_STABLE_FOR: Duration = Duration::from_secs(15);

/// An agent's report of its release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReleaseReport {
    /// Generation of the newest order that has ended on the machine; 0 for none.
    pub generation: i64,
    /// Digest of the running program.
    pub sha256: [u8; 32],
    /// Why the ordered release does not run, as a sentence.
    pub error: Option<String>,
    /// What it finds wrong with how it runs.
    pub findings: Vec<HostFinding>,
}

/// State of a machine in a roll-out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RollOutMachineState {
    /// It has no order yet.
    Waiting,
    /// The order was given to it.
    Ordered,
    /// It runs the release and is healthy.
    Done,
    /// It does not run the release, or is not healthy.
    Failed,
    /// It gets no order any more.
    Skipped,
}

impl RollOutMachineState {
    /// All states, in the order of a roll-out.
    pub const ALL: [Self; 5] = [Self::Waiting, Self::Ordered, Self::Done, Self::Failed, Self::Skipped];

    /// Its name in the database and for people.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Ordered => "ordered",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
        }
    }
}

impl fmt::Display for RollOutMachineState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for RollOutMachineState {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|state| state.as_str() == name).ok_or_else(|| UnknownName {
            what: "state of a machine in a roll-out",
            name: name.to_owned(),
            known: "waiting, ordered, done, failed, skipped",
        })
    }
}

/// A roll-out, as far as its plan depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RollOut {
    /// Digest of the release.
    pub sha256: [u8; 32],
    /// Most machines that may have the order at a time.
    pub parallelism: usize,
    /// How long each machine may take to fetch the release, and then to report it.
    pub deadline: Duration,
    /// Why it is paused; `None` when it is not.
    pub pause_reason: Option<String>,
}

/// The node that a machine is in a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RollOutNode {
    /// Name of the cluster.
    pub cluster: String,
    /// Whether it belongs to the control plane.
    pub control_plane: bool,
    /// Whether its curator reported it as healthy.
    pub healthy: bool,
    /// When the curators last answered.
    pub observed_at: Option<Timestamp>,
    /// Whether every voting member of etcd was reachable.
    pub all_members_reachable: bool,
    /// Since when a member of etcd has had the alarm `NOSPACE`, by that answer.
    pub etcd_full_since: Option<Timestamp>,
}

/// A machine of a roll-out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RollOutMachine {
    /// Identifier of the machine.
    pub machine: MachineId,
    /// Its name for people.
    pub name: String,
    /// Its state in the roll-out.
    pub state: RollOutMachineState,
    /// Generation of its order, once it has one.
    pub generation: Option<i64>,
    /// When it entered that state.
    pub state_since: Timestamp,
    /// The last report of its agent, and since when the agent reports the same.
    pub report: Option<(ReleaseReport, Timestamp)>,
    /// Its phase at that moment.
    pub phase: Phase,
    /// Why it must not be disrupted, as a sentence.
    pub block_reason: Option<String>,
    /// Whether it is retiring or retired.
    pub is_retiring: bool,
    /// Its node, if it belongs to a cluster.
    pub node: Option<RollOutNode>,
}

/// A step of a roll-out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RollOutStep {
    /// Order a machine to run the release.
    Order(MachineId),
    /// Record the final state of a machine, with a sentence on how it ended.
    Conclude(MachineId, RollOutMachineState, String),
    /// Pause the roll-out, with the reason.
    Pause(String),
    /// End the roll-out: all machines have a final state.
    Finish,
}

/// The next steps of a roll-out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RollOutPlan {
    /// Steps, to be taken in this order.
    pub steps: Vec<RollOutStep>,
    /// What machines wait for, as sentences.
    pub wait_reasons: BTreeMap<MachineId, String>,
}

/// Clusters that have one of these machines in their control plane, while that machine has the order.
pub fn disrupted_clusters(members: &[RollOutMachine]) -> impl Iterator<Item = &str> {
    members
        .iter()
        .filter(|member| member.state == RollOutMachineState::Ordered)
        .filter_map(control_plane_cluster)
}

/// Plans the next steps of a roll-out. `elsewhere` are the clusters whose control planes other roll-outs disrupt, and
/// `may_begin` is how many more machines the fleet's budget allows now.
///
/// The pause comes before the recorded failure. If the process dies between the two, its successor finds the machine as
/// it was, evaluates it again, and no other machine got the order.
#[must_use]
pub fn plan_roll_out(
    roll_out: &RollOut,
    members: &[RollOutMachine],
    elsewhere: &BTreeSet<String>,
    may_begin: usize,
    now: Timestamp,
) -> RollOutPlan {
    let mut plan = RollOutPlan::default();
    let mut failed = Vec::new();
    let (mut in_flight, mut open) = (0_usize, 0_usize);
    let mut disrupted: BTreeSet<&str> = elsewhere.iter().map(String::as_str).collect();
    for member in members.iter().filter(|member| member.state == RollOutMachineState::Ordered) {
        if member.is_retiring {
            plan.steps.push(skip_retiring(member));
            continue;
        }
        match evaluate_machine(roll_out, member, now) {
            Ok(Some(wait)) => {
                in_flight += 1;
                open += 1;
                disrupted.extend(control_plane_cluster(member));
                plan.wait_reasons.insert(member.machine, wait);
            }
            Ok(None) => {
                plan.steps.push(RollOutStep::Conclude(
                    member.machine,
                    RollOutMachineState::Done,
                    "it runs the release".to_owned(),
                ));
            }
            Err(why) => {
                failed.push(format!("{}: {why}", member.name));
                plan.steps.push(RollOutStep::Conclude(member.machine, RollOutMachineState::Failed, why));
            }
        }
    }
    let stands = roll_out.pause_reason.is_some() || !failed.is_empty();
    let mut left = may_begin;
    for member in members.iter().filter(|member| member.state == RollOutMachineState::Waiting) {
        if member.is_retiring {
            plan.steps.push(skip_retiring(member));
            continue;
        }
        if member.report.as_ref().is_some_and(|(report, _)| report.sha256 == roll_out.sha256) {
            let text = "it ran the release already".to_owned();
            plan.steps.push(RollOutStep::Conclude(member.machine, RollOutMachineState::Done, text));
            continue;
        }
        open += 1;
        if stands {
            continue;
        }
        if in_flight >= roll_out.parallelism {
            plan.wait_reasons.insert(member.machine, format!("{in_flight} before it are not done yet"));
            continue;
        }
        match start_objection(member, &disrupted, now) {
            Some(wait) => drop(plan.wait_reasons.insert(member.machine, wait)),
            None if left == 0 => {
                let wait = "the budget of agent restarts is used up (shepherdctl get budgets: restart-agent)";
                plan.wait_reasons.insert(member.machine, wait.to_owned());
            }
            None => {
                (in_flight, left) = (in_flight + 1, left - 1);
                disrupted.extend(control_plane_cluster(member));
                plan.steps.push(RollOutStep::Order(member.machine));
            }
        }
    }
    if open == 0 {
        plan.steps.push(RollOutStep::Finish);
    } else if !failed.is_empty() {
        plan.steps.insert(0, RollOutStep::Pause(failed.join("; ")));
    }
    plan
}

fn skip_retiring(member: &RollOutMachine) -> RollOutStep {
    RollOutStep::Conclude(member.machine, RollOutMachineState::Skipped, "it leaves the fleet".to_owned())
}

/// The cluster to whose control plane a machine belongs, if any.
#[must_use]
pub fn control_plane_cluster(member: &RollOutMachine) -> Option<&str> {
    member.node.as_ref().filter(|node| node.control_plane).map(|node| node.cluster.as_str())
}

/// What a machine with an order waits for; `None` when it is done. The error is why it has failed.
fn evaluate_machine(
    roll_out: &RollOut,
    member: &RollOutMachine,
    now: Timestamp,
) -> Result<Option<String>, String> {
    let requested = member.generation.unwrap_or_default();
    let Some((report, since)) = member.report.as_ref().filter(|(report, _)| report.generation >= requested)
    else {
        let patience = roll_out.deadline.saturating_mul(2).saturating_add(REPORT_GRACE);
        if after(member.state_since, patience) < now {
            return Err("it has not reported the result of the release".to_owned());
        }
        return Ok(Some("it fetches the release and tries it".to_owned()));
    };
    if let Some(error) = &report.error {
        return Err(error.clone());
    }
    if report.sha256 != roll_out.sha256 {
        return Err(format!("it runs another release: {}", hex::encode(&report.sha256[..8])));
    }
    match unhealthy_reason(member, Some(*since), now) {
        None => Ok(None),
        Some(why) if after(*since, HEALTHY_WITHIN) < now => {
            Err(format!("it runs the release and is not healthy: {why}"))
        }
        Some(why) => Ok(Some(format!("it runs the release; {why}"))),
    }
}

/// Why a machine is not healthy. For a node, its curator must have reported it as healthy for a while after `since`.
fn unhealthy_reason(member: &RollOutMachine, since: Option<Timestamp>, now: Timestamp) -> Option<String> {
    if !matches!(member.phase, Phase::Ready | Phase::Installed) {
        return Some(format!("it is {}", member.phase));
    }
    let node = member.node.as_ref()?;
    let settled = since.map(|since| after(since, HEALTH_STABLE_FOR));
    let Some(seen) = node.observed_at.filter(|seen| between(*seen, now) <= OBSERVATION_TTL) else {
        return Some(format!("none of the curators of cluster {} answers", node.cluster));
    };
    if !node.healthy {
        return Some(format!("its curator (cluster {}) does not call it healthy", node.cluster));
    }
    if node.control_plane && !node.all_members_reachable {
        return Some(format!("not all members of cluster {} are reached", node.cluster));
    }
    settled
        .filter(|settled| seen < *settled)
        .map(|_| format!("its curator (cluster {}) has not reported yet that it is healthy", node.cluster))
}

/// Why a machine cannot get the order now.
fn start_objection(member: &RollOutMachine, disrupted: &BTreeSet<&str>, now: Timestamp) -> Option<String> {
    if let Some(stop) = &member.block_reason {
        return Some(stop.clone());
    }
    // It comes before the curators that do not answer: it can be their reason.
    if let Some(node) = member.node.as_ref().filter(|node| node.etcd_full_since.is_some()) {
        return Some(format!("the etcd of cluster {} {FULL_ETCD}", node.cluster));
    }
    if let Some(why) = unhealthy_reason(member, None, now) {
        return Some(why);
    }
    if member.report.is_none() {
        let text =
            "its role server is of a release that does not replace itself; a takeover brings it another one";
        return Some(text.to_owned());
    }
    control_plane_cluster(member)
        .filter(|cluster| disrupted.contains(cluster))
        .map(|cluster| format!("another machine of the control plane of cluster {cluster} is not done yet"))
}

#[cfg(test)]
mod tests;
