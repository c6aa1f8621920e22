//! Explanation of a machine's state (`shepherdctl why`).
//!
//! [`explain_machine`] is a pure function of one moment of the database. It computes the phase and the schedule from
//! the facts, with the same functions that wrote them. It uses the stored schedule for what only that contains: who
//! works, what was lost, where in the code it was decided. Where the two disagree it reports so instead of choosing.
//!
//! An explanation contains only what applies: the phase and since when, what the machine waits for, until when and what
//! happens then, what failed and how often, who works on it, and the commands that would help *this* machine.
//!
//! * [`render`]: the explanation as text.
//! * `notes`: holds, pauses, brakes, schedule mismatches and other notes.
//! * `advice`: the commands.
//! * [`recent`]: a recovery that has just ended, and an order that was just carried out.
//!
//! `shepherdctl why` prints it for the requested machine. A demo whose deadline passes prints it for the machines that
//! are not Ready.

use std::fmt::Write as _;

use crate::facts::{MachineFacts, Recovery};
use crate::healing::healed_at;
use crate::humanize::{relative_and_absolute_time, relative_time};
use crate::machine_view::{LaneView, MachineName, MachineView};
use crate::needs_human::Obstacle;
use crate::phase::{Phase, phase_of, silence_deadline};
use crate::policy::Policy;
use crate::process::Lane;
use crate::retirement;
use crate::schedule::{DueWork, next_due};
use crate::shell_words;
use crate::time::Timestamp;
use crate::why::recent::{PowerSwitch, RecentRecovery};

mod advice;
mod notes;
pub mod recent;
pub mod render;

/// Explanation of a machine's state.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// Names of the machine.
    pub name: MachineName,
    /// Its phase, by [`Phase::as_str`].
    pub phase: &'static str,
    /// When it entered that phase, where that is known.
    pub since: Option<Timestamp>,
    /// The database's time when the machine was read.
    pub at: Timestamp,
    /// What the access lane waits for.
    pub waits_for: String,
    /// Name of the obstacle, as in the database, if there is one.
    pub obstacle: Option<String>,
    /// `file:line` of that decision.
    pub decided_at: String,
    /// The next work of the access lane; `None` when nothing is due by time alone.
    pub next: Option<NextWork>,
    /// When something else happens unless that comes.
    pub deadline: Option<Deadline>,
    /// Processes that failed and have not succeeded since.
    pub failures: Vec<ProcessFailure>,
    /// Work under way, a sentence for each lane.
    pub work: Vec<String>,
    /// Holds, pauses, brakes and other notes, a sentence each.
    pub notes: Vec<String>,
    /// Commands that would help.
    pub advice: Vec<Advice>,
    /// The recovery from which it has just come back.
    pub recovery: Option<RecentRecovery>,
    /// The order to reboot or switch it that was carried out last, if that was lately.
    pub power: Option<PowerSwitch>,
}

/// The next work of the access lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NextWork {
    /// Name of the process.
    pub process: &'static str,
    /// When it may start. It is in the past when the work waits for a free worker.
    pub at: Timestamp,
    /// Whether every heartbeat postpones that moment, so that it never comes for a healthy machine.
    pub timer: bool,
}

/// A moment after which something else happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deadline {
    /// When the deadline passes.
    pub at: Timestamp,
    /// What happens then, as a sentence.
    pub consequence: String,
}

/// A process that failed and waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessFailure {
    /// Name of the process.
    pub process: &'static str,
    /// Number of consecutive failures.
    pub count: u32,
    /// The last error, as a sentence.
    pub cause: String,
    /// End of the present wait.
    pub until: Timestamp,
    /// Length of the wait after another failure, before jitter, in seconds.
    pub next_wait_seconds: u64,
}

/// A command, and when to use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// The command, ready to be pasted.
    pub command: String,
    /// When to use it, or what for.
    pub when: String,
}

/// Explains the state of one machine.
#[must_use]
pub fn explain_machine(view: &MachineView) -> Explanation {
    let (facts, policy, now) = (&view.facts, &*view.policy, view.at);
    let phase = phase_of(facts, policy, now);
    let due = next_due(facts, Lane::Access, policy, now);
    let stored = find_lane(view, Lane::Access);
    let name = view.name();
    let word = shell_words::quote_if_needed(&name.short_name());
    Explanation {
        phase: phase.as_str(),
        since: phase_since(view, phase),
        at: now,
        waits_for: due.reason.clone(),
        decided_at: decided_at(&due, stored, facts),
        next: next_work(&due, stored),
        deadline: due
            .deadline
            .map(|at| Deadline { at, consequence: deadline_consequence(facts, policy) })
            .or_else(|| healing_deadline(facts, policy, now)),
        obstacle: current_obstacle(facts).map(ToString::to_string),
        failures: process_failures(facts, policy),
        work: view.lanes.iter().filter_map(|lane| describe_work(lane, now)).collect(),
        notes: notes::collect_notes(view, &due, now),
        advice: advice::collect_advice(view, &due, &word, now),
        recovery: recent::find_recent_recovery(view, phase),
        power: recent::find_power_switch(view),
        name,
    }
}

/// The obstacle of a machine, if there is one. A retiring machine has none: obstacles do not hinder its retirement.
fn current_obstacle(facts: &MachineFacts) -> Option<&Obstacle> {
    if facts.retirement.is_some() {
        return None;
    }
    let waiting = facts.needs_human.as_ref().map(|fact| &fact.obstacle);
    waiting.or_else(|| facts.recovery.as_ref()?.obstacle.as_ref())
}

/// A machine that waits for a person and reports is taken back without one at the end of this time.
fn healing_deadline(facts: &MachineFacts, policy: &Policy, now: Timestamp) -> Option<Deadline> {
    if facts.retirement.is_some() {
        return None;
    }
    let then = "it returns without a person if its agent continues to report".to_owned();
    Some(Deadline { at: healed_at(facts, policy, now)?, consequence: then })
}

fn find_lane(view: &MachineView, lane: Lane) -> Option<&LaneView> {
    view.lanes.iter().find(|stored| stored.lane == lane.as_str())
}

/// When the machine entered its phase: by the facts, which know best, or else by the index unless it lags.
fn phase_since(view: &MachineView, phase: Phase) -> Option<Timestamp> {
    let facts = &view.facts;
    let time = match phase {
        Phase::NeedsHuman => facts.needs_human.as_ref().map(|fact| fact.since),
        Phase::Quarantined => facts.quarantine.as_ref().map(|fact| fact.since),
        Phase::Recovering => facts.recovery.as_ref().map(|fact| fact.started_at),
        Phase::Silent => silence_deadline(facts, &view.policy),
        Phase::AgentStarting => facts.agent_started.as_ref().map(|fact| fact.started_at),
        Phase::Retiring => facts.retirement.as_ref().map(|fact| fact.requested_at),
        Phase::Retired => facts.retirement.as_ref().and_then(|fact| fact.finished_at),
        _ => None,
    };
    let indexed = find_lane(view, Lane::Access).filter(|lane| lane.phase_index == phase.as_str());
    time.or_else(|| indexed.map(|lane| lane.phase_since))
}

/// A postponement was decided where it was made, everything else where the schedule is computed.
fn decided_at(due: &DueWork, stored: Option<&LaneView>, facts: &MachineFacts) -> String {
    let postponed = due.process.and_then(|process| facts.postponements.get(&process));
    if let Some(wait) = postponed.filter(|wait| wait.reason == due.reason) {
        return wait.decided_at.clone();
    }
    match stored.filter(|lane| lane.reason == due.reason && !lane.decided_at.is_empty()) {
        Some(lane) => lane.decided_at.clone(),
        None => format!("{}:{}", due.decided_at.file(), due.decided_at.line()),
    }
}

/// A stored moment is when the row can be claimed. A timer's moment is a lower bound, so the facts decide there.
fn next_work(due: &DueWork, stored: Option<&LaneView>) -> Option<NextWork> {
    let (process, wanted) = due.process.zip(due.ready_at)?;
    let stored = stored.filter(|lane| !due.timer && lane.process.as_deref() == Some(process.as_str()));
    let at = stored.and_then(|lane| lane.ready_at).map_or(wanted, |ready| ready.max(wanted));
    let at = stored.and_then(|lane| lane.not_before).map_or(at, |not_before| at.max(not_before));
    Some(NextWork { process: process.as_str(), at, timer: due.timer })
}

/// What happens when the deadline passes.
fn deadline_consequence(facts: &MachineFacts, policy: &Policy) -> String {
    if let Some(retirement) = &facts.retirement {
        return retirement::deadline_consequence(&retirement::retirement_state(retirement, policy));
    }
    match &facts.recovery {
        None => "recovery begins".to_owned(),
        Some(recovery) => match policy.rung(recovery.rung) {
            Some(rung) if recovery.attempts < rung.tries => format!(
                "it is tried once more to {} (try {} of {})",
                rung.step.phrase(),
                recovery.attempts + 1,
                rung.tries
            ),
            _ => next_rung(recovery, policy),
        },
    }
}

fn next_rung(recovery: &Recovery, policy: &Policy) -> String {
    let next = policy.ladder.iter().skip(recovery.rung + 1).find(|rung| rung.tries > 0);
    next.map_or_else(
        || "nothing is left to try, and it waits for a person".to_owned(),
        |rung| format!("the next step is to {}, if its provider can", rung.step.phrase()),
    )
}

fn process_failures(facts: &MachineFacts, policy: &Policy) -> Vec<ProcessFailure> {
    facts
        .backoffs
        .iter()
        .map(|(process, fact)| ProcessFailure {
            process: process.as_str(),
            count: fact.failures,
            cause: fact.cause.clone(),
            until: fact.until,
            next_wait_seconds: policy.backoff_of(*process).next_interval(Some(fact.last_interval)).as_secs(),
        })
        .collect()
}

fn describe_work(lane: &LaneView, now: Timestamp) -> Option<String> {
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
        (Some(at), _) => format!("ended {}, so that this is about to be freed", relative_time(at, now)),
        (None, Some(at)) if at <= now => {
            format!("expired {}, so that this is about to be freed", relative_time(at, now))
        }
        (None, Some(at)) => format!("ends {} unless it is renewed", relative_time(at, now)),
        (None, None) => "not known".to_owned(),
    };
    Some(format!(
        "{} since {} by {who} (session {}, {session}; fence {})",
        holder.process,
        relative_and_absolute_time(holder.since, now),
        holder.session,
        holder.fence
    ))
}
