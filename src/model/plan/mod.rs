//! What the loops would do next, and when: the future of a fleet as far as it follows from its present.
//!
//! [`plan`] takes a snapshot of the fleet and lets time pass in it, from one due moment to the next.
//! When a lane is due, whom for, what may be disturbed and what a step leaves behind is asked of the
//! very functions that the loops and the schedule ask ([`crate::model::schedule::next_due`],
//! [`crate::model::recovery::plan_recovery`], [`crate::model::recovery::hold_back`],
//! [`crate::model::disturb::may_disturb`], [`crate::model::brake::verdicts`]); nothing of that is decided
//! here. A test drives the real runner over random fleets and compares what history then says
//! (`tests/all/fire/plan.rs`).
//!
//! What no snapshot holds has to be assumed, and [`ASSUMPTIONS`] says so with every answer: that what is
//! tried succeeds. A plan is therefore the *least* that happens to a machine that is in trouble. So are the
//! breakers of providers that hang: each shepherd has its own in its memory, and the database knows only
//! until when it has put off a work item for one.
//!
//! * [`step`]: what one work item that succeeds does to the facts of its machine.
//! * [`fleet`]: the fleet that the loops share: budgets and brakes.
//! * [`diff`]: two plans beside each other, as before and after a change of the policy.
//! * [`foreseen`]: a plan as somebody asked for it.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::Serialize;

use crate::model::cluster::disturb::{FRESH, InCluster};
use crate::model::facts::MachineFacts;
use crate::model::ids::MachineId;
use crate::model::machine_view::MachineName;
use crate::model::newer_fence::NewerFence;
use crate::model::pause::{Loop, Pause, Paused, paused};
use crate::model::phase::phase_of;
use crate::model::plan::fleet::Fleet;
use crate::model::policy::{Disturbance, Policy};
use crate::model::process::{Lane, Process};
use crate::model::schedule::{Armed, arm, next_due};
use crate::model::time::{Span, Timestamp, after, between};

pub mod diff;
pub mod fleet;
pub mod foreseen;
pub mod step;
#[cfg(test)]
mod tests;

/// What every plan takes for granted.
pub const ASSUMPTIONS: [&str; 7] = [
    "what is tried succeeds: a machine that is rebooted is up by the next look, an agent that is started reports a \
     second later, and a provider answers and says nothing new, once what was put off while it hung is due again",
    "agents that report go on reporting, and those that do not stay silent until a step wakes them",
    "every provider can reboot its machines and switch their power",
    "curators that answer go on to say what they said last, and those that do not stay away",
    "a worker is free at once, and work takes no time",
    "nobody changes anything: no operator, no provider's list, no fault",
    "somebody listens for heartbeats as now, or nobody does",
];

/// How long after its start an agent reports.
pub const FIRST_REPORT: Span = Span::seconds(1);
/// An agent that was not heard for more heartbeat intervals than this is taken to be silent.
const MISSED: u32 = 3;
/// Most rows of a plan: what is later than the last of them is left out, and the plan says so.
pub const MOST_ROWS: usize = 100_000;

/// A fleet at one moment, as far as its future follows from it.
#[derive(Clone, Debug)]
pub struct FleetView {
    /// The database's clock.
    pub at: Timestamp,
    /// The policy that holds.
    pub policy: Arc<Policy>,
    /// Every machine.
    pub machines: Vec<MachineState>,
    /// Disturbances begun within the longest window that a budget or a brake looks back over.
    pub disturbed: Vec<Disturbed>,
    /// When providers were told to take machines back, within the window of that budget.
    pub released: Vec<Timestamp>,
    /// Pauses of loops that hold at that moment.
    pub pauses: Vec<Pause>,
}

/// One machine of it.
#[derive(Clone, Debug)]
pub struct MachineState {
    /// What is known of it.
    pub facts: MachineFacts,
    /// Phase as it is indexed.
    pub phase_index: String,
    /// Since when.
    pub phase_since: Timestamp,
    /// Its lanes as they are stored.
    pub lanes: Vec<StoredLane>,
    /// Proof that it has seen more than this BMDB has given, while nothing may be ordered of it.
    pub newer_fence: Option<NewerFence>,
    /// What its cluster says of it, if it is of one; of others that are disturbed it says nothing.
    pub cluster: Option<InCluster>,
}

/// One lane, as it is stored.
#[derive(Clone, Debug)]
pub struct StoredLane {
    /// Which.
    pub lane: Lane,
    /// What it is armed for.
    pub armed: Armed,
    /// Not claimed before, because sessions were lost while they worked on it.
    pub not_before: Option<Timestamp>,
    /// Whether somebody works on it now.
    pub working: bool,
}

/// A disturbance that was begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disturbed {
    /// What.
    pub step: Disturbance,
    /// Which machine.
    pub machine: MachineId,
    /// Whose it is.
    pub provider: String,
    /// When.
    pub at: Timestamp,
}

/// What happens, and when.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// The moment that it begins at.
    pub at: Timestamp,
    /// The moment up to which it tells everything.
    pub until: Timestamp,
    /// Whether it ends earlier than was asked for, because there is so much of it.
    pub cut: bool,
    /// What is begun, in the order of time.
    pub rows: Vec<Row>,
    /// Loops that are paused at its beginning: what they would do is left out up to the end of the pause.
    pub paused: Vec<Pause>,
}

/// A work item that is begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    /// When.
    pub at: Timestamp,
    /// On which machine.
    #[serde(flatten)]
    pub name: MachineName,
    /// By which process.
    pub process: &'static str,
    /// What it does.
    pub what: String,
    /// Whether it was begun already, and is under way at the moment of the plan.
    pub under_way: bool,
}

/// What happens in `fleet` up to `horizon` from its moment.
#[must_use]
pub fn plan(fleet: &FleetView, horizon: Span) -> Plan {
    Future::of(fleet).until(after(fleet.at, horizon.0))
}

/// Something that is to happen. Ordered as the loops would take it: by time; what agents say before what
/// follows from their silence; every timer that comes due, whosever it is, before anything is claimed, so that a
/// brake counts all those that fall silent at one moment; then as a claim chooses, by priority and since when it is
/// due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    at: Timestamp,
    kind: Kind,
    priority: i16,
    due: Timestamp,
    machine: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Report,
    Timer(Lane),
    Work(Lane),
}

/// A machine whose time passes.
#[derive(Clone, Debug)]
pub(crate) struct Passing {
    pub(crate) facts: MachineFacts,
    pub(crate) phase: String,
    pub(crate) phase_since: Timestamp,
    pub(crate) newer_fence: Option<NewerFence>,
    pub(crate) cluster: Option<InCluster>,
    /// Whether the curators of its cluster answer.
    pub(crate) curators_answer: bool,
    lanes: Vec<StoredLane>,
    /// Whether its agent reports.
    speaks: bool,
    /// What is awaited of it: at most one event a kind.
    awaited: Vec<Event>,
}

struct Future<'a> {
    now: Timestamp,
    policy: &'a Policy,
    pauses: &'a [Pause],
    fleet: Fleet,
    events: BTreeSet<Event>,
}

impl<'a> Future<'a> {
    fn of(view: &'a FleetView) -> Self {
        let mut machines: Vec<&MachineState> = view.machines.iter().collect();
        machines.sort_by_key(|machine| machine.facts.machine);
        let machines = machines
            .into_iter()
            .map(|machine| Passing {
                facts: machine.facts.clone(),
                phase: machine.phase_index.clone(),
                phase_since: machine.phase_since,
                newer_fence: machine.newer_fence,
                cluster: machine.cluster.clone(),
                curators_answer: (machine.cluster.as_ref())
                    .and_then(|cluster| cluster.seen_at)
                    .is_some_and(|seen| between(seen, view.at) <= FRESH),
                lanes: machine.lanes.clone(),
                speaks: speaks(&machine.facts, &view.policy, view.at),
                awaited: Vec::new(),
            })
            .collect();
        let (disturbed, released) = (view.disturbed.clone(), view.released.clone());
        let fleet = Fleet { machines, disturbed, released };
        let (policy, pauses) = (&*view.policy, view.pauses.as_slice());
        let mut future = Self { now: view.at, policy, pauses, fleet, events: BTreeSet::new() };
        for machine in 0..future.fleet.machines.len() {
            if future.fleet.machines[machine].first_report_is_awaited() {
                future.await_report(machine);
            }
            future.schedule(machine);
        }
        future
    }

    fn until(mut self, until: Timestamp) -> Plan {
        let paused = self.pauses.to_vec();
        let mut plan = Plan { at: self.now, until, cut: false, rows: Vec::new(), paused };
        while let Some(event) = self.events.pop_first() {
            if event.at > until {
                break;
            }
            if plan.rows.len() == MOST_ROWS {
                (plan.until, plan.cut) = (event.at, true);
                break;
            }
            self.now = event.at;
            match event.kind {
                Kind::Report => self.report(event.machine),
                // It fires: whatever the moment makes of the facts is written down below.
                Kind::Timer(_) => {}
                Kind::Work(lane) => plan.rows.extend(self.work(event.machine, lane)),
            }
            self.schedule(event.machine);
        }
        plan
    }

    /// An agent reports, and goes on reporting.
    fn report(&mut self, machine: usize) {
        let passing = &mut self.fleet.machines[machine];
        passing.awaited.retain(|event| event.kind != Kind::Report);
        passing.speaks = true;
        step::heard(&mut passing.facts, self.now);
    }

    /// What a claim of this lane leads to, if it is due.
    fn work(&mut self, machine: usize, lane: Lane) -> Option<Row> {
        let passing = &mut self.fleet.machines[machine];
        passing.hear(self.now);
        let due = next_due(&passing.facts, lane, self.policy, self.now);
        let (process, ready_at) = due.process.zip(due.ready_at)?;
        if ready_at > self.now {
            return None;
        }
        // As a timer that fires does, before anybody claims the machine.
        passing.enter(due.phase.as_str(), self.now);
        let under_way = std::mem::take(&mut passing.stored_mut(lane)?.working);
        let name = name_of(&passing.facts);
        let mut done = step::obeyed(&mut self.fleet, machine, process, self.policy, self.now);
        let passing = &mut self.fleet.machines[machine];
        if let Some(said) = passing.facts.priority.as_ref().filter(|said| said.holds_at(self.now)) {
            done.what = format!("{} ({}, by {})", done.what, said.level, said.by);
        }
        if done.falls_silent {
            passing.speaks = false;
        }
        let stored = passing.stored_mut(lane)?;
        // A claim that is ended takes the pause after losses with it.
        stored.not_before = None;
        if done.reports {
            self.await_report(machine);
        }
        Some(Row { at: self.now, name, process: process.as_str(), what: done.what, under_way })
    }

    fn await_report(&mut self, machine: usize) {
        let at = after(self.now, FIRST_REPORT.0);
        self.expect(Event { at, kind: Kind::Report, priority: 0, due: at, machine });
    }

    /// Arms both lanes of a machine by its facts, as whatever changes a fact does.
    fn schedule(&mut self, machine: usize) {
        let (now, policy) = (self.now, self.policy);
        let passing = &mut self.fleet.machines[machine];
        passing.hear(now);
        let phase = phase_of(&passing.facts, policy, now);
        passing.enter(phase.as_str(), now);
        let mut due_events = Vec::new();
        for number in 0..passing.lanes.len() {
            let lane = passing.lanes[number].lane;
            let due = next_due(&passing.facts, lane, policy, now);
            let stored = &mut passing.lanes[number];
            let ready_at = arm(&stored.armed, &due, now);
            stored.armed = Armed { process: due.process, ready_at, timer: due.timer };
            let Some(ready_at) = ready_at else { continue };
            let silent = !due.timer || (!passing.speaks && passing.facts.listening_since.is_some());
            if silent && due.timer && !stored.working && ready_at > now {
                let kind = Kind::Timer(lane);
                due_events.push(Event { at: ready_at, kind, priority: 0, due: ready_at, machine });
            }
            // Whoever works on it is done at once, and no pause keeps them from it.
            let at = if stored.working {
                now
            } else {
                let provider = passing.facts.provided.as_ref().map_or("", |of| of.provider.as_str());
                let of = due.process.map(Loop::of);
                let begins = match of.and_then(|of| paused(self.pauses, of, provider, now)) {
                    None => ready_at,
                    Some(Paused::Until(at)) => at.max(ready_at),
                    Some(Paused::Resumed) => continue,
                };
                stored.not_before.map_or(begins, |at| at.max(begins))
            };
            if silent {
                let kind = Kind::Work(lane);
                due_events.push(Event {
                    at: at.max(now),
                    kind,
                    priority: due.priority,
                    due: ready_at,
                    machine,
                });
            }
        }
        let passing = &mut self.fleet.machines[machine];
        let old: Vec<Event> = passing.awaited.extract_if(.., |event| event.kind != Kind::Report).collect();
        for event in old {
            self.events.remove(&event);
        }
        for event in due_events {
            self.expect(event);
        }
    }

    fn expect(&mut self, event: Event) {
        let awaited = &mut self.fleet.machines[event.machine].awaited;
        for same in awaited.extract_if(.., |known| known.kind == event.kind) {
            self.events.remove(&same);
        }
        awaited.push(event);
        self.events.insert(event);
    }
}

impl Passing {
    /// An agent that goes on reporting was heard just now.
    fn hear(&mut self, now: Timestamp) {
        if self.speaks
            && self.facts.recovery.is_none()
            && let Some(heartbeat) = &mut self.facts.heartbeat
        {
            heartbeat.at = heartbeat.at.max(now);
        }
    }

    fn enter(&mut self, phase: &str, now: Timestamp) {
        if self.phase != phase {
            phase.clone_into(&mut self.phase);
            self.phase_since = now;
        }
    }

    fn stored_mut(&mut self, lane: Lane) -> Option<&mut StoredLane> {
        self.lanes.iter_mut().find(|stored| stored.lane == lane)
    }

    /// Whether an agent was put on it a moment ago that has not reported yet.
    fn first_report_is_awaited(&self) -> bool {
        let started = self.facts.agent_started.as_ref().map(|agent| agent.at);
        let heard = self.facts.heartbeat.as_ref().map(|heartbeat| heartbeat.at);
        self.speaks && started > heard
    }
}

/// Whether a machine's agent is one that goes on reporting, or is about to begin.
fn speaks(facts: &MachineFacts, policy: &Policy, now: Timestamp) -> bool {
    let Some(started) = &facts.agent_started else { return false };
    let sign = facts.heartbeat.as_ref().map_or(started.at, |heartbeat| heartbeat.at.max(started.at));
    after(sign, policy.heartbeat_interval.0 * MISSED) > now
}

/// The names of the machine that these facts are of.
fn name_of(facts: &MachineFacts) -> MachineName {
    let provided = facts.provided.as_ref();
    MachineName {
        machine: facts.machine.0,
        provider: provided.map(|provided| provided.provider.clone()),
        provider_id: provided.map(|provided| provided.provider_id.clone()),
    }
}

impl Plan {
    /// The same with only the rows that are asked for.
    #[must_use]
    pub fn only(mut self, machine: Option<MachineId>, process: Option<Process>) -> Self {
        self.rows.retain(|row| {
            machine.is_none_or(|machine| machine.0 == row.name.machine)
                && process.is_none_or(|process| process.as_str() == row.process)
        });
        self.paused.retain(|pause| process.is_none_or(|process| Loop::of(process) == pause.of));
        self
    }
}
