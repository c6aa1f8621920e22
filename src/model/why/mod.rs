//! Why a machine is as it is: the answer to "it is stuck and nothing tells me why".
//!
//! [`explain`] is a pure function of one moment of the database. It computes
//! the phase and the schedule from the facts, with the same functions that
//! wrote them, and uses the stored schedule for what only that knows: who works,
//! what was lost, where in the code it was decided. Where the two disagree it
//! says so instead of choosing.
//!
//! An answer holds what applies and nothing else: the phase and since when, what
//! is waited for, until when and what happens then, what failed and how often,
//! who works on it, and the commands that would help *this* machine.
//!
//! * [`render`]: the answer as text.
//! * `notes`: whatever else bears on the machine.
//! * `advice`: the commands.
//!
//! `shepherdctl why` prints it for the machine that was asked about, and a demo
//! whose deadline passes for those that are not Ready.

use std::fmt::Write as _;

use serde::Serialize;

use crate::model::facts::{MachineFacts, Recovery};
use crate::model::machine_view::{LaneView, MachineName, MachineView};
use crate::model::needs_human::{Obstacle, healed_at};
use crate::model::phase::{Phase, phase_of, silent_from};
use crate::model::policy::Policy;
use crate::model::process::Lane;
use crate::model::retirement;
use crate::model::schedule::{Due, next_due};
use crate::model::shell_words;
use crate::model::telling::{both, relative};
use crate::model::time::Timestamp;

mod advice;
mod notes;
pub mod render;

/// Why a machine is as it is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Why {
    /// Its names.
    #[serde(flatten)]
    pub name: MachineName,
    /// Where it is in its life.
    pub phase: &'static str,
    /// Since when, where that is known.
    pub since: Option<Timestamp>,
    /// The moment that all of this is about.
    pub at: Timestamp,
    /// What the access lane waits for.
    pub waits_for: String,
    /// What stands in our way, by its name in the database, where something does.
    pub obstacle: Option<String>,
    /// `file:line` of that decision.
    pub decided_at: String,
    /// What happens next, and when.
    pub next: Option<Next>,
    /// When something else happens if that does not.
    pub deadline: Option<Deadline>,
    /// Processes that failed and have not finished since.
    pub failures: Vec<Failure>,
    /// Who works on it now, a sentence for each lane.
    pub work: Vec<String>,
    /// Whatever else bears on it.
    pub notes: Vec<String>,
    /// What would help.
    pub advice: Vec<Advice>,
}

/// What happens next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Next {
    /// The process.
    pub process: &'static str,
    /// When it may begin; in the past when it waits for a free worker.
    pub at: Timestamp,
    /// Whether that moment is put off by every heartbeat, so that it never comes for a healthy machine.
    pub timer: bool,
}

/// A moment after which something else happens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Deadline {
    /// When.
    pub at: Timestamp,
    /// What.
    pub then: String,
}

/// A process that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// Which.
    pub process: &'static str,
    /// How often in a row.
    pub count: u32,
    /// The last error.
    pub cause: String,
    /// End of the present wait.
    pub until: Timestamp,
    /// Length of the wait after another failure, before jitter, in seconds.
    pub next_wait_seconds: u64,
}

/// A command, and when to give it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// The command, ready to be pasted.
    pub command: String,
    /// What it is good for.
    pub when: String,
}

/// Explains one machine.
#[must_use]
pub fn explain(view: &MachineView) -> Why {
    let (facts, policy, now) = (&view.facts, &*view.policy, view.at);
    let phase = phase_of(facts, policy, now);
    let due = next_due(facts, Lane::Access, policy, now);
    let stored = lane_of(view, Lane::Access);
    let name = view.name();
    let word = shell_words::word(&name.short());
    Why {
        phase: phase.as_str(),
        since: since(view, phase),
        at: now,
        waits_for: due.reason.clone(),
        decided_at: decided_at(&due, stored, facts),
        next: next(&due, stored),
        deadline: due
            .deadline
            .map(|at| Deadline { at, then: then(facts, policy) })
            .or_else(|| taken_back(facts, policy, now)),
        obstacle: obstacle(facts).map(ToString::to_string),
        failures: failures(facts, policy),
        work: view.lanes.iter().filter_map(|lane| working(lane, now)).collect(),
        notes: notes::notes(view, &due, now),
        advice: advice::advice(view, &due, &word, now),
        name,
    }
}

/// What stands in our way, where something does. In the way out of a machine stands nothing of all that.
fn obstacle(facts: &MachineFacts) -> Option<&Obstacle> {
    if facts.retirement.is_some() {
        return None;
    }
    let waiting = facts.needs_human.as_ref().map(|fact| &fact.obstacle);
    waiting.or_else(|| facts.recovery.as_ref()?.obstacle.as_ref())
}

/// A machine that waits for a person and reports needs none for much longer.
fn taken_back(facts: &MachineFacts, policy: &Policy, now: Timestamp) -> Option<Deadline> {
    if facts.retirement.is_some() {
        return None;
    }
    let then = "it is taken back without a person, if its agent goes on reporting".to_owned();
    Some(Deadline { at: healed_at(facts, policy, now)?, then })
}

fn lane_of(view: &MachineView, lane: Lane) -> Option<&LaneView> {
    view.lanes.iter().find(|stored| stored.lane == lane.as_str())
}

/// Facts know best since when; the index knows the rest, unless it lags.
fn since(view: &MachineView, phase: Phase) -> Option<Timestamp> {
    let facts = &view.facts;
    let told = match phase {
        Phase::NeedsHuman => facts.needs_human.as_ref().map(|fact| fact.since),
        Phase::Quarantined => facts.quarantine.as_ref().map(|fact| fact.since),
        Phase::Recovering => facts.recovery.as_ref().map(|fact| fact.started_at),
        Phase::Silent => silent_from(facts, &view.policy),
        Phase::AgentStarting => facts.agent_started.as_ref().map(|fact| fact.at),
        Phase::Retiring => facts.retirement.as_ref().map(|fact| fact.requested_at),
        Phase::Retired => facts.retirement.as_ref().and_then(|fact| fact.finished_at),
        _ => None,
    };
    let indexed = lane_of(view, Lane::Access).filter(|lane| lane.phase_index == phase.as_str());
    told.or_else(|| indexed.map(|lane| lane.phase_since))
}

/// A postponement was decided where it was made, the rest where the schedule is computed.
fn decided_at(due: &Due, stored: Option<&LaneView>, facts: &MachineFacts) -> String {
    let postponed = due.process.and_then(|process| facts.postponements.get(&process));
    if let Some(wait) = postponed.filter(|wait| wait.reason == due.reason) {
        return wait.decided_at.clone();
    }
    match stored.filter(|lane| lane.reason == due.reason && !lane.decided_at.is_empty()) {
        Some(lane) => lane.decided_at.clone(),
        None => format!("{}:{}", due.decided_at.file(), due.decided_at.line()),
    }
}

/// The stored moment is when it can be claimed; a timer's is a lower bound, so the facts decide.
fn next(due: &Due, stored: Option<&LaneView>) -> Option<Next> {
    let (process, wanted) = due.process.zip(due.ready_at)?;
    let stored = stored.filter(|lane| !due.timer && lane.process.as_deref() == Some(process.as_str()));
    let at = stored.and_then(|lane| lane.ready_at).map_or(wanted, |ready| ready.max(wanted));
    let at = stored.and_then(|lane| lane.not_before).map_or(at, |not_before| at.max(not_before));
    Some(Next { process: process.as_str(), at, timer: due.timer })
}

/// What follows when the deadline passes.
fn then(facts: &MachineFacts, policy: &Policy) -> String {
    if let Some(retirement) = &facts.retirement {
        return retirement::then(&retirement::next(retirement, policy));
    }
    match &facts.recovery {
        None => "recovery begins".to_owned(),
        Some(recovery) => match policy.rung(recovery.rung) {
            Some(rung) if recovery.tries < rung.tries => format!(
                "it is tried once more to {} (try {} of {})",
                rung.step.phrase(),
                recovery.tries + 1,
                rung.tries
            ),
            _ => next_rung(recovery, policy),
        },
    }
}

fn next_rung(recovery: &Recovery, policy: &Policy) -> String {
    let next = policy.ladder.iter().skip(recovery.rung + 1).find(|rung| rung.tries > 0);
    next.map_or_else(
        || "nothing is left to try, and a person is asked".to_owned(),
        |rung| format!("the next step is to {}, if its provider can", rung.step.phrase()),
    )
}

fn failures(facts: &MachineFacts, policy: &Policy) -> Vec<Failure> {
    facts
        .backoffs
        .iter()
        .map(|(process, fact)| Failure {
            process: process.as_str(),
            count: fact.failures,
            cause: fact.cause.clone(),
            until: fact.until,
            next_wait_seconds: policy.backoff_of(*process).next_interval(Some(fact.last_interval)).as_secs(),
        })
        .collect()
}

fn working(lane: &LaneView, now: Timestamp) -> Option<String> {
    let holder = lane.work.as_ref()?;
    let unknown = || "a component that is not known".to_owned();
    let mut who = holder.component.clone().unwrap_or_else(unknown);
    if let Some(host) = &holder.host {
        let _ = write!(who, " on {host}");
    }
    if let Some(pid) = holder.pid {
        let _ = write!(who, ", pid {pid}");
    }
    let session = match (holder.session_closed_at, holder.session_deadline) {
        (Some(at), _) => format!("ended {}, so that this is about to be freed", relative(at, now)),
        (None, Some(at)) if at <= now => {
            format!("expired {}, so that this is about to be freed", relative(at, now))
        }
        (None, Some(at)) => format!("ends {} unless it is renewed", relative(at, now)),
        (None, None) => "not known".to_owned(),
    };
    Some(format!(
        "{} since {} by {who} (session {}, {session}; fence {})",
        holder.process,
        both(holder.since, now),
        holder.session,
        holder.fence
    ))
}
