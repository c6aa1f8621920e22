//! What a work item that succeeds does to the facts of its machine.
//!
//! The loops learn this from the world and write it down; here the world does as it is told. What is
//! written down is built by the functions that the loops use, where a decision is in it.

use crate::model::disturb::{Refusal, may_disturb, may_release, may_switch};
use crate::model::facts::{AgentStarted, Heartbeat, MachineFacts, NeedsHuman, Postponement};
use crate::model::needs_human::Obstacle;
use crate::model::plan::fleet::{Fleet, provider_of};
use crate::model::policy::{Disturbance, Policy, Rung};
use crate::model::power_order::{self, Next, Switch, Way};
use crate::model::process::Process;
use crate::model::recovery::{
    RecoveryPlan, Steps, begun, hold_back, plan_recovery, reenrolled, taken, tried,
};
use crate::model::time::Timestamp;

/// What a work item did.
#[derive(Debug, Default)]
pub(crate) struct Done {
    /// For people.
    pub(crate) what: String,
    /// Whether an agent was started, which is about to report.
    pub(crate) reports: bool,
    /// Whether an agent that reported does so no more, until it is started again.
    pub(crate) falls_silent: bool,
}

impl Done {
    fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), ..Self::default() }
    }
}

/// Lets a process that was claimed at `now` succeed on a machine.
pub(crate) fn obeyed(
    fleet: &mut Fleet,
    machine: usize,
    process: Process,
    policy: &Policy,
    now: Timestamp,
) -> Done {
    match process {
        Process::AgentStart => {
            let newer = fleet.machines[machine].newer_fence;
            let facts = &mut fleet.machines[machine].facts;
            if let Some(newer) = newer {
                return call(facts, Obstacle::StaleFence, newer.sentence(), now);
            }
            start_agent(facts, now);
            finish(facts, process);
            Done { reports: true, ..Done::new("put the role server on it") }
        }
        Process::Update => {
            let facts = &mut fleet.machines[machine].facts;
            if let Some(provided) = &mut facts.provided {
                (provided.looked_at, provided.unchanged) = (Some(now), true);
            }
            finish(facts, process);
            Done::new("ask its provider about it")
        }
        Process::Recovery => recover(fleet, machine, policy, now),
        Process::Retirement => give_back(fleet, machine, policy, now),
        Process::Power => switch(fleet, machine, policy, now),
    }
}

/// Its provider takes it back.
fn give_back(fleet: &mut Fleet, machine: usize, policy: &Policy, now: Timestamp) -> Done {
    let circumstances = fleet.releasing(machine, policy, now);
    let facts = &mut fleet.machines[machine].facts;
    if let Err(refusal) = may_release(facts, &circumstances, policy, now) {
        let Refusal { reason, ask_again: until } = refusal;
        let wait = Postponement { until, reason: reason.clone(), decided_at: String::new() };
        facts.postponements.insert(Process::Retirement, wait);
        return Done::new(format!("put it off: {reason}"));
    }
    finish(facts, Process::Retirement);
    if let Some(retirement) = &mut facts.retirement {
        if retirement.release.is_none() {
            fleet.released.push(now);
        }
        retirement.finished_at = Some(now);
    }
    Done { falls_silent: true, ..Done::new("give it back to its provider") }
}

/// Its power is switched as a person ordered.
fn switch(fleet: &mut Fleet, machine: usize, policy: &Policy, now: Timestamp) -> Done {
    let Some(order) = fleet.machines[machine].facts.power_order.clone() else { return Done::default() };
    let next = power_order::next(&order, Way::Provider, policy, now);
    let step = order.switch.disturbance();
    // What no budget counts is asked about with any.
    let circumstances = fleet.circumstances(machine, step.unwrap_or(Disturbance::PowerCycle), policy, now);
    let facts = &mut fleet.machines[machine].facts;
    if let Next::GiveUp(why) = next {
        facts.power_order = None;
        finish(facts, Process::Power);
        return Done::new(format!("give up to {}: {why}", order.switch.phrase()));
    }
    if let Err(Refusal { reason, ask_again: until }) =
        may_switch(facts, order.switch, &circumstances, policy, now)
    {
        let wait = Postponement { until, reason: reason.clone(), decided_at: String::new() };
        facts.postponements.insert(Process::Power, wait);
        return Done::new(format!("put it off: {reason}"));
    }
    let ladder = power_order::ladder_after(facts, &order, policy, now);
    let watched = ladder.is_some();
    match ladder {
        Some((recovery, rung)) => {
            facts.recovery = Some(taken(recovery, rung, power_order::note(&order), now));
            facts.needs_human = None;
        }
        None if order.switch == Switch::Off => facts.recovery = None,
        None => {}
    }
    let has_address = facts.provided.as_ref().is_some_and(|provided| provided.address.is_some());
    facts.power_order = None;
    finish(facts, Process::Power);
    let (id, provider) = (facts.machine, provider_of(facts));
    if let Some(step) = step.filter(|_| order.begun.is_none()) {
        fleet.disturb(id, &provider, step, now);
    }
    Done {
        what: order.switch.phrase().to_owned(),
        // What recovery watches gets its agent at the next look; elsewhere the one that it has starts by itself.
        reports: order.switch.reboots() && !(watched && has_address),
        falls_silent: true,
    }
}

/// A report of the machine's agent comes in.
pub(crate) fn heard(facts: &mut MachineFacts, now: Timestamp) {
    let boot_id = present_boot(facts);
    let (incarnation, sequence) = ("planned".to_owned(), 1);
    facts.heartbeat = Some(Heartbeat { at: now, boot_id, incarnation, sequence });
}

fn recover(fleet: &mut Fleet, machine: usize, policy: &Policy, now: Timestamp) -> Done {
    let newer = fleet.machines[machine].newer_fence;
    let facts = &mut fleet.machines[machine].facts;
    let has_address = facts.provided.as_ref().is_some_and(|provided| provided.address.is_some());
    let steps = Steps { restart_agent: has_address, reboot: true, power_cycle: true };
    match hold_back(plan_recovery(facts, policy, steps, now), newer.as_ref()) {
        RecoveryPlan::Recovered { how } => {
            facts.recovery = None;
            finish(facts, Process::Recovery);
            Done::new(format!("end its recovery: {how}"))
        }
        RecoveryPlan::CallPerson { obstacle, reason } => {
            facts.recovery = None;
            finish(facts, Process::Recovery);
            call(facts, obstacle, reason, now)
        }
        RecoveryPlan::Wait { until, reason } => {
            match &mut facts.recovery {
                Some(recovery) => {
                    recovery.next_at = until;
                    finish(facts, Process::Recovery);
                }
                None => postpone(facts, until, reason.clone()),
            }
            Done::new(format!("wait: {reason}"))
        }
        RecoveryPlan::Reenroll { .. } => {
            if let Some((recovery, acted)) =
                facts.recovery.clone().and_then(|recovery| Some((recovery.clone(), recovery.acted?)))
            {
                start_agent(facts, now);
                let note = "the agent was put on it after the reboot; waits for its report".to_owned();
                facts.recovery = Some(reenrolled(recovery, &acted, note, None, now));
            }
            finish(facts, Process::Recovery);
            Done { reports: true, ..Done::new("put the role server on it again, after the reboot") }
        }
        RecoveryPlan::Act { rung, what, attempt } => act(fleet, machine, policy, (rung, what, attempt), now),
    }
}

fn act(
    fleet: &mut Fleet,
    machine: usize,
    policy: &Policy,
    (rung, what, attempt): (usize, Rung, u32),
    now: Timestamp,
) -> Done {
    let circumstances = fleet.circumstances(machine, what.step, policy, now);
    let permission = may_disturb(&fleet.machines[machine].facts, what.step, &circumstances, policy, now, now);
    let facts = &mut fleet.machines[machine].facts;
    if let Err(refusal) = permission {
        postpone(facts, refusal.ask_again, refusal.reason.clone());
        return Done::new(format!("put it off: {}", refusal.reason));
    }
    let recovery = begun(facts, rung, what.step, what.deadline, attempt, now);
    let note = format!("{}: done; waits for its report", tried(what, attempt));
    facts.recovery = Some(taken(recovery, what, note, now));
    let has_address = facts.provided.as_ref().is_some_and(|provided| provided.address.is_some());
    let starts_agent = what.step == Disturbance::RestartAgent;
    if starts_agent {
        start_agent(facts, now);
    }
    finish(facts, Process::Recovery);
    let (id, provider) = (facts.machine, provider_of(facts));
    fleet.disturb(id, &provider, what.step, now);
    Done {
        what: format!("{} (try {attempt} of {})", what.step.phrase(), what.tries),
        // What was rebooted gets its agent at the next look, if it can be reached at all.
        reports: starts_agent || !has_address,
        falls_silent: !starts_agent,
    }
}

/// An agent is put on the machine, in a boot that may be another than the last one known.
fn start_agent(facts: &mut MachineFacts, now: Timestamp) {
    let boot_id = Some(present_boot(facts));
    let (public_key, fence) =
        facts.agent_started.take().map_or((Vec::new(), 0), |agent| (agent.public_key, agent.fence));
    facts.agent_started = Some(AgentStarted { at: now, public_key, boot_id, fence });
}

/// The boot that a machine is in: another than the one before, where a step rebooted it.
fn present_boot(facts: &MachineFacts) -> String {
    let acted = facts.recovery.as_ref().and_then(|recovery| recovery.acted.as_ref());
    match acted.filter(|acted| acted.step.reboots()) {
        Some(acted) => format!("after {}", acted.boot_id_before.as_deref().unwrap_or("another")),
        None => facts.known_boot().unwrap_or("the first").to_owned(),
    }
}

fn postpone(facts: &mut MachineFacts, until: Timestamp, reason: String) {
    facts.postponements.insert(Process::Recovery, Postponement { until, reason, decided_at: String::new() });
}

/// A machine is left to a person. That a work item may have failed for it matters to nobody: nothing is due
/// until the person has come, and what failed is forgotten then.
fn call(facts: &mut MachineFacts, obstacle: Obstacle, reason: String, now: Timestamp) -> Done {
    let what = format!("call a person: {reason}");
    facts.needs_human = Some(NeedsHuman { since: now, reason, obstacle, heard_since: None });
    Done::new(what)
}

/// As the end of a work item that is done forgets earlier failures and waits.
fn finish(facts: &mut MachineFacts, process: Process) {
    facts.backoffs.remove(&process);
    facts.postponements.remove(&process);
}
