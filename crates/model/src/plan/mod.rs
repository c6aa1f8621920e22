//! Plan: forecast of what the loops will do to the fleet.
//!
//! [`plan_fleet`] takes a snapshot of the fleet and lets time pass in it, from one due moment to the next. The
//! functions that the loops and the schedule use decide here too: when a lane is due and for what
//! ([`crate::schedule::next_due`]), which recovery step follows ([`crate::recovery::plan_recovery`],
//! [`crate::recovery::block_on_unknown_fence`]), what may be disrupted
//! ([`crate::disruption::may_disrupt`]) and which brakes are engaged ([`crate::brake::engaged_brakes`]).
//! This module decides nothing of that itself. A test drives the real runner over random fleets and compares the plan
//! with the recorded history (`tests/all/fire/plan.rs`).
//!
//! What no snapshot contains has to be assumed, and every plan lists its [`ASSUMPTIONS`]. The main one is that every
//! attempt succeeds. A plan is therefore the *least* that happens to a machine in trouble. Circuit breakers of
//! providers are not in the snapshot either: each shepherd has its own in memory, and the database knows only until
//! when a work item was postponed for one.
//!
//! * [`effects`]: effects of a successful work item on the facts of its machine.
//! * [`fleet`]: the state that all machines share: budgets and brakes.
//! * [`diff`]: the differences of two plans, as before and after a policy change.
//! * [`fold`]: all routine as one line.
//! * [`query`]: a plan restricted to a machine, a process or a scope.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::Serialize;

use crate::cluster::disruption::{ClusterContext, OBSERVATION_TTL};
use crate::facts::MachineFacts;
use crate::ids::MachineId;
use crate::machine_view::MachineName;
use crate::pause::{LoopKind, Pause, PauseEnd, pause_end};
use crate::phase::phase_of;
use crate::plan::fleet::PlanFleet;
use crate::policy::{DisruptionKind, Policy};
use crate::process::{Lane, Process};
use crate::schedule::{StoredDue, armed_ready_at, next_due};
use crate::time::{Span, Timestamp, after, between};
use crate::unknown_fence::UnknownFence;

pub mod diff;
pub mod effects;
pub mod fleet;
pub mod fold;
pub mod query;
#[cfg(test)]
mod tests;

/// Assumptions of every plan.
pub const ASSUMPTIONS: [&str; 7] = [
    "every attempt succeeds: a machine that is rebooted is up by the next look, an agent that is started \
     reports a second later, and a provider answers and says nothing new, once what was put off while it \
     hung is due again",
    "agents that report keep reporting, and silent agents stay silent until a step restarts them",
    "every provider can reboot its machines and switch their power",
    "curators that answer keep reporting what they reported last, and curators that do not answer stay \
     silent",
    "a worker is free at once, and work takes no time",
    "nobody changes anything: no operator, no provider's list, no fault",
    "somebody listens for heartbeats as now, or nobody does",
];

/// How long after its start an agent reports.
pub const FIRST_REPORT: Span = Span::seconds(1);
/// An agent that is silent for more heartbeat intervals than this counts as silent in the plan.
const MISSED_HEARTBEATS: u32 = 3;
/// Most rows of a plan. Later rows are left out, and the plan is marked as truncated.
pub const MAX_ROWS: usize = 100_000;

/// A snapshot of the fleet, as far as its future depends on it.
#[derive(Clone, Debug)]
pub struct FleetView {
    /// When it was taken, by the database's clock.
    pub at: Timestamp,
    /// The policy in force.
    pub policy: Arc<Policy>,
    /// Every machine in the BMDB.
    pub machines: Vec<MachineState>,
    /// Disruptions that started within the longest window of any budget or brake.
    pub recent_disruptions: Vec<RecordedDisruption>,
    /// When releases to providers were ordered, within the window of the release budget.
    pub recent_releases: Vec<Timestamp>,
    /// Pauses of loops in force at that moment.
    pub pauses: Vec<Pause>,
}

/// One machine of the snapshot.
#[derive(Clone, Debug)]
pub struct MachineState {
    /// Its facts at that moment.
    pub facts: MachineFacts,
    /// The phase as it is indexed.
    pub phase_index: String,
    /// When it entered that phase.
    pub phase_since: Timestamp,
    /// Its lanes, as they are stored.
    pub lanes: Vec<StoredLane>,
    /// Proof that it has seen a fence this BMDB never issued. While it is set, no order is given to the machine.
    pub unknown_fence: Option<UnknownFence>,
    /// The state of its cluster, if it belongs to one, without other disrupted members.
    pub cluster: Option<ClusterContext>,
}

/// One lane of a machine, as it is stored.
#[derive(Clone, Debug)]
pub struct StoredLane {
    /// Name of the lane.
    pub lane: Lane,
    /// What the stored row is armed for.
    pub stored_due: StoredDue,
    /// No claim before this moment, because sessions were lost while they worked on it.
    pub not_before: Option<Timestamp>,
    /// Whether a worker holds a claim on it now.
    pub is_working: bool,
}

/// A disruption that was started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedDisruption {
    /// Kind of the step.
    pub step: DisruptionKind,
    /// The machine that was disrupted.
    pub machine: MachineId,
    /// Name of its provider.
    pub provider: String,
    /// When the step was started.
    pub at: Timestamp,
}

/// Forecast of the work of the loops.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FleetPlan {
    /// Start of the plan.
    pub at: Timestamp,
    /// End of the plan: it is complete up to this moment.
    pub until: Timestamp,
    /// Whether it ends earlier than requested, because it has [`MAX_ROWS`] rows.
    pub truncated: bool,
    /// Work items that start, in the order of time.
    pub rows: Vec<PlanRow>,
    /// Pauses in force at the start. Work of a paused loop is left out until the end of the pause.
    pub pauses: Vec<Pause>,
}

/// A work item that starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PlanRow {
    /// When the work item starts.
    pub at: Timestamp,
    /// Names of the machine.
    #[serde(flatten)]
    pub name: MachineName,
    /// Name of the process.
    pub process: &'static str,
    /// The action, as a phrase for people.
    pub action: String,
    /// Whether it is already under way at the start of the plan.
    pub in_progress: bool,
}

/// Forecast for `fleet` over `horizon`, from the moment of the snapshot.
#[must_use]
pub fn plan_fleet(fleet: &FleetView, horizon: Span) -> FleetPlan {
    PlanRun::new(fleet).run_until(after(fleet.at, horizon.0))
}

/// An event of the plan, ordered as the loops would handle it. First by time. Then reports of agents come before the
/// consequences of silence, and the timers of all machines before any claim, so that a brake counts all machines that
/// fall silent at one moment. Then by priority and by due time, as a claim chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct PlanEvent {
    at: Timestamp,
    kind: PlanEventKind,
    priority: i16,
    due: Timestamp,
    machine: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum PlanEventKind {
    Report,
    Timer(Lane),
    Work(Lane),
}

/// A machine in the plan, as time passes.
#[derive(Clone, Debug)]
pub(crate) struct PlanMachine {
    pub(crate) facts: MachineFacts,
    pub(crate) phase: String,
    pub(crate) phase_since: Timestamp,
    pub(crate) unknown_fence: Option<UnknownFence>,
    pub(crate) cluster: Option<ClusterContext>,
    /// Whether the curators of its cluster answer.
    pub(crate) curators_answer: bool,
    lanes: Vec<StoredLane>,
    /// Whether its agent goes on reporting.
    is_reporting: bool,
    /// Its pending events: at most one of each kind.
    pending_events: Vec<PlanEvent>,
}

struct PlanRun<'a> {
    now: Timestamp,
    policy: &'a Policy,
    pauses: &'a [Pause],
    fleet: PlanFleet,
    events: BTreeSet<PlanEvent>,
}

impl<'a> PlanRun<'a> {
    fn new(view: &'a FleetView) -> Self {
        let mut machines: Vec<&MachineState> = view.machines.iter().collect();
        machines.sort_by_key(|machine| machine.facts.machine);
        let machines = machines
            .into_iter()
            .map(|machine| PlanMachine {
                facts: machine.facts.clone(),
                phase: machine.phase_index.clone(),
                phase_since: machine.phase_since,
                unknown_fence: machine.unknown_fence,
                cluster: machine.cluster.clone(),
                curators_answer: (machine.cluster.as_ref())
                    .and_then(|cluster| cluster.observed_at)
                    .is_some_and(|seen| between(seen, view.at) <= OBSERVATION_TTL),
                lanes: machine.lanes.clone(),
                is_reporting: is_agent_reporting(&machine.facts, &view.policy, view.at),
                pending_events: Vec::new(),
            })
            .collect();
        let (disruptions, released) = (view.recent_disruptions.clone(), view.recent_releases.clone());
        let fleet = PlanFleet { machines, recent_disruptions: disruptions, recent_releases: released };
        let (policy, pauses) = (&*view.policy, view.pauses.as_slice());
        let mut future = Self { now: view.at, policy, pauses, fleet, events: BTreeSet::new() };
        for machine in 0..future.fleet.machines.len() {
            if future.fleet.machines[machine].awaits_first_report() {
                future.expect_report(machine);
            }
            future.schedule_machine(machine);
        }
        future
    }

    fn run_until(mut self, until: Timestamp) -> FleetPlan {
        let paused = self.pauses.to_vec();
        let mut plan = FleetPlan { at: self.now, until, truncated: false, rows: Vec::new(), pauses: paused };
        while let Some(event) = self.events.pop_first() {
            if event.at > until {
                break;
            }
            if plan.rows.len() == MAX_ROWS {
                (plan.until, plan.truncated) = (event.at, true);
                break;
            }
            self.now = event.at;
            match event.kind {
                PlanEventKind::Report => self.apply_report(event.machine),
                // The timer only fires; `schedule_machine` below recomputes the schedule.
                PlanEventKind::Timer(_) => {}
                PlanEventKind::Work(lane) => plan.rows.extend(self.apply_work(event.machine, lane)),
            }
            self.schedule_machine(event.machine);
        }
        plan
    }

    /// Applies a report of an agent, which goes on reporting.
    fn apply_report(&mut self, machine: usize) {
        let passing = &mut self.fleet.machines[machine];
        passing.pending_events.retain(|event| event.kind != PlanEventKind::Report);
        passing.is_reporting = true;
        effects::apply_heartbeat(&mut passing.facts, self.now);
    }

    /// Applies a claim of this lane, if it is due.
    fn apply_work(&mut self, machine: usize, lane: Lane) -> Option<PlanRow> {
        let passing = &mut self.fleet.machines[machine];
        passing.refresh_heartbeat(self.now);
        let due = next_due(&passing.facts, lane, self.policy, self.now);
        let (process, ready_at) = due.process.zip(due.ready_at)?;
        if ready_at > self.now {
            return None;
        }
        // A timer that fires does the same before the machine is claimed.
        passing.enter_phase(due.phase.as_str(), self.now);
        let under_way = std::mem::take(&mut passing.stored_mut(lane)?.is_working);
        let name = MachineName::from_facts(&passing.facts);
        let mut done = effects::apply_process(&mut self.fleet, machine, process, self.policy, self.now);
        let passing = &mut self.fleet.machines[machine];
        if let Some(priority) =
            passing.facts.priority.as_ref().filter(|priority| priority.is_active_at(self.now))
        {
            done.action = format!("{} ({}, by {})", done.action, priority.level, priority.by);
        }
        if done.goes_silent {
            passing.is_reporting = false;
        }
        let stored = passing.stored_mut(lane)?;
        // The end of a claim clears the pause after losses.
        stored.not_before = None;
        if done.starts_reporting {
            self.expect_report(machine);
        }
        Some(PlanRow {
            at: self.now,
            name,
            process: process.as_str(),
            action: done.action,
            in_progress: under_way,
        })
    }

    fn expect_report(&mut self, machine: usize) {
        let at = after(self.now, FIRST_REPORT.0);
        self.push_event(PlanEvent { at, kind: PlanEventKind::Report, priority: 0, due: at, machine });
    }

    /// Arms both lanes of a machine by its facts, as every change of a fact does.
    fn schedule_machine(&mut self, machine: usize) {
        let (now, policy) = (self.now, self.policy);
        let passing = &mut self.fleet.machines[machine];
        passing.refresh_heartbeat(now);
        let phase = phase_of(&passing.facts, policy, now);
        passing.enter_phase(phase.as_str(), now);
        let mut due_events = Vec::new();
        for number in 0..passing.lanes.len() {
            let lane = passing.lanes[number].lane;
            let due = next_due(&passing.facts, lane, policy, now);
            let stored = &mut passing.lanes[number];
            let ready_at = armed_ready_at(&stored.stored_due, &due, now);
            stored.stored_due = StoredDue { process: due.process, ready_at, timer: due.timer };
            let Some(ready_at) = ready_at else { continue };
            let silent = !due.timer || (!passing.is_reporting && passing.facts.listening_since.is_some());
            if silent && due.timer && !stored.is_working && ready_at > now {
                let kind = PlanEventKind::Timer(lane);
                due_events.push(PlanEvent { at: ready_at, kind, priority: 0, due: ready_at, machine });
            }
            // Work that is under way ends at once, and no pause stops it.
            let at = if stored.is_working {
                now
            } else {
                let provider = passing.facts.provider_record.as_ref().map_or("", |of| of.provider.as_str());
                let of = due.process.map(LoopKind::for_process);
                let begins = match of.and_then(|of| pause_end(self.pauses, of, provider, now)) {
                    None => ready_at,
                    Some(PauseEnd::Until(at)) => at.max(ready_at),
                    Some(PauseEnd::WhenResumed) => continue,
                };
                stored.not_before.map_or(begins, |at| at.max(begins))
            };
            if silent {
                let kind = PlanEventKind::Work(lane);
                due_events.push(PlanEvent {
                    at: at.max(now),
                    kind,
                    priority: due.priority,
                    due: ready_at,
                    machine,
                });
            }
        }
        let passing = &mut self.fleet.machines[machine];
        let old: Vec<PlanEvent> =
            passing.pending_events.extract_if(.., |event| event.kind != PlanEventKind::Report).collect();
        for event in old {
            self.events.remove(&event);
        }
        for event in due_events {
            self.push_event(event);
        }
    }

    fn push_event(&mut self, event: PlanEvent) {
        let awaited = &mut self.fleet.machines[event.machine].pending_events;
        for same in awaited.extract_if(.., |known| known.kind == event.kind) {
            self.events.remove(&same);
        }
        awaited.push(event);
        self.events.insert(event);
    }
}

impl PlanMachine {
    /// Moves the last report of an agent that goes on reporting to `now`.
    fn refresh_heartbeat(&mut self, now: Timestamp) {
        if self.is_reporting
            && self.facts.recovery.is_none()
            && let Some(heartbeat) = &mut self.facts.heartbeat
        {
            heartbeat.received_at = heartbeat.received_at.max(now);
        }
    }

    fn enter_phase(&mut self, phase: &str, now: Timestamp) {
        if self.phase != phase {
            phase.clone_into(&mut self.phase);
            self.phase_since = now;
        }
    }

    fn stored_mut(&mut self, lane: Lane) -> Option<&mut StoredLane> {
        self.lanes.iter_mut().find(|stored| stored.lane == lane)
    }

    /// Whether an agent was enrolled a moment ago and has not reported yet.
    fn awaits_first_report(&self) -> bool {
        let started = self.facts.agent_started.as_ref().map(|agent| agent.started_at);
        let last_contact = self.facts.heartbeat.as_ref().map(|heartbeat| heartbeat.received_at);
        self.is_reporting && started > last_contact
    }
}

/// Whether a machine's agent goes on reporting, or will start to.
fn is_agent_reporting(facts: &MachineFacts, policy: &Policy, now: Timestamp) -> bool {
    let Some(started) = &facts.agent_started else { return false };
    let sign = facts
        .heartbeat
        .as_ref()
        .map_or(started.started_at, |heartbeat| heartbeat.received_at.max(started.started_at));
    after(sign, policy.heartbeat_interval.0 * MISSED_HEARTBEATS) > now
}

impl FleetPlan {
    /// The plan with only the rows of this machine and this process; `None` keeps all.
    #[must_use]
    pub fn restrict_to(mut self, machine: Option<MachineId>, process: Option<Process>) -> Self {
        self.rows.retain(|row| {
            machine.is_none_or(|machine| machine.0 == row.name.machine)
                && process.is_none_or(|process| process.as_str() == row.process)
        });
        self.pauses
            .retain(|pause| process.is_none_or(|process| LoopKind::for_process(process) == pause.loop_kind));
        self
    }
}
