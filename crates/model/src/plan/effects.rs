//! Effects of a successful work item on a machine's facts, for the plan.
//!
//! The loops observe these effects and record them; here every action has the desired effect. Where a decision is part
//! of what is recorded, the same functions as in the loops build it.

use crate::disruption::{DisruptionDenied, may_disrupt, may_release, may_switch_power};
use crate::facts::{AgentStarted, HeartbeatFact, MachineFacts, NeedsHuman, Postponement};
use crate::needs_human::Obstacle;
use crate::plan::fleet::{PlanFleet, provider_name};
use crate::policy::{DisruptionKind, Policy, Rung};
use crate::power_control::{self, PowerOrderStep, PowerRoute};
use crate::power_order::PowerOrderKind;
use crate::process::Process;
use crate::recovery::{
    AvailableSteps, RecoveryPlan, after_reenroll, block_on_unknown_fence, format_attempt, plan_recovery,
    start_report_wait, start_step,
};
use crate::routine::ROUTINE_ACTION;
use crate::time::Timestamp;

/// The effect of a work item.
#[derive(Debug, Default)]
pub(crate) struct StepEffect {
    /// The action, as a phrase for people.
    pub(crate) action: String,
    /// Whether an agent was started, which will report soon.
    pub(crate) starts_reporting: bool,
    /// Whether an agent that reported stops doing so, until it is started again.
    pub(crate) goes_silent: bool,
}

impl StepEffect {
    fn new(what: impl Into<String>) -> Self {
        Self { action: what.into(), ..Self::default() }
    }
}

/// Applies the success of a process that was claimed at `now` on a machine.
pub(crate) fn apply_process(
    fleet: &mut PlanFleet,
    machine: usize,
    process: Process,
    policy: &Policy,
    now: Timestamp,
) -> StepEffect {
    match process {
        Process::AgentStart => {
            let newer = fleet.machines[machine].unknown_fence;
            let facts = &mut fleet.machines[machine].facts;
            if let Some(newer) = newer {
                return call_human(facts, Obstacle::StaleFence, newer.describe(), now);
            }
            start_agent(facts, now);
            facts.key_replacement = None;
            clear_waits(facts, process);
            StepEffect { starts_reporting: true, ..StepEffect::new("put the role server on it") }
        }
        Process::Update => {
            let facts = &mut fleet.machines[machine].facts;
            if let Some(provided) = &mut facts.provider_record {
                (provided.polled_at, provided.unchanged) = (Some(now), true);
            }
            clear_waits(facts, process);
            StepEffect::new(ROUTINE_ACTION)
        }
        Process::Recovery => apply_recovery(fleet, machine, policy, now),
        Process::Retirement => apply_release(fleet, machine, policy, now),
        Process::Power => apply_power_order(fleet, machine, policy, now),
    }
}

/// Applies the release of a machine to its provider.
fn apply_release(fleet: &mut PlanFleet, machine: usize, policy: &Policy, now: Timestamp) -> StepEffect {
    let circumstances = fleet.release_context(machine, policy, now);
    let facts = &mut fleet.machines[machine].facts;
    if let Err(refusal) = may_release(facts, &circumstances, policy, now) {
        let DisruptionDenied { reason, retry_at: until } = refusal;
        let wait = Postponement { until, reason: reason.clone(), decided_at: String::new() };
        facts.postponements.insert(Process::Retirement, wait);
        return StepEffect::new(format!("put it off: {reason}"));
    }
    clear_waits(facts, Process::Retirement);
    if let Some(retirement) = &mut facts.retirement {
        if retirement.release.is_none() {
            fleet.recent_releases.push(now);
        }
        retirement.finished_at = Some(now);
    }
    StepEffect { goes_silent: true, ..StepEffect::new("give it back to its provider") }
}

/// Applies an operator's power order.
fn apply_power_order(fleet: &mut PlanFleet, machine: usize, policy: &Policy, now: Timestamp) -> StepEffect {
    let Some(order) = fleet.machines[machine].facts.power_order.clone() else { return StepEffect::default() };
    let next = power_control::next_power_step(&order, PowerRoute::Provider, policy, now);
    let step = order.kind.disruption();
    // No budget counts a power-on, so any kind serves for the check.
    let circumstances =
        fleet.disruption_context(machine, step.unwrap_or(DisruptionKind::PowerCycle), policy, now);
    let facts = &mut fleet.machines[machine].facts;
    if let PowerOrderStep::GiveUp(why) = next {
        facts.power_order = None;
        clear_waits(facts, Process::Power);
        return StepEffect::new(format!("give up to {}: {why}", order.kind.phrase()));
    }
    if let Err(DisruptionDenied { reason, retry_at: until }) =
        may_switch_power(facts, order.kind, &circumstances, policy, now)
    {
        let wait = Postponement { until, reason: reason.clone(), decided_at: String::new() };
        facts.postponements.insert(Process::Power, wait);
        return StepEffect::new(format!("put it off: {reason}"));
    }
    let ladder = power_control::recovery_after(facts, &order, policy, now);
    let watched = ladder.is_some();
    match ladder {
        Some((recovery, rung)) => {
            facts.recovery =
                Some(start_report_wait(recovery, rung, power_control::recovery_note(&order), now));
            facts.needs_human = None;
        }
        None if order.kind == PowerOrderKind::Off => facts.recovery = None,
        None => {}
    }
    let has_address = facts.provider_record.as_ref().is_some_and(|provided| provided.address.is_some());
    facts.power_order = None;
    clear_waits(facts, Process::Power);
    let (id, provider) = (facts.machine, provider_name(facts));
    if let Some(step) = step.filter(|_| order.intent.is_none()) {
        fleet.record_disruption(id, &provider, step, now);
    }
    StepEffect {
        action: order.kind.phrase().to_owned(),
        // A machine under recovery gets its agent at the next check; otherwise the installed agent starts by itself.
        starts_reporting: order.kind.reboots() && !(watched && has_address),
        goes_silent: true,
    }
}

/// Applies a report of the machine's agent.
pub(crate) fn apply_heartbeat(facts: &mut MachineFacts, now: Timestamp) {
    let boot_id = current_boot_id(facts);
    let (incarnation, sequence) = ("planned".to_owned(), 1);
    facts.heartbeat = Some(HeartbeatFact { received_at: now, boot_id, incarnation, sequence });
}

fn apply_recovery(fleet: &mut PlanFleet, machine: usize, policy: &Policy, now: Timestamp) -> StepEffect {
    let newer = fleet.machines[machine].unknown_fence;
    let facts = &mut fleet.machines[machine].facts;
    let has_address = facts.provider_record.as_ref().is_some_and(|provided| provided.address.is_some());
    let steps = AvailableSteps { restart_agent: has_address, reboot: true, power_cycle: true };
    match block_on_unknown_fence(plan_recovery(facts, policy, steps, now), newer.as_ref()) {
        RecoveryPlan::Recovered { how } => {
            facts.recovery = None;
            clear_waits(facts, Process::Recovery);
            StepEffect::new(format!("end its recovery: {how}"))
        }
        RecoveryPlan::CallPerson { obstacle, reason } => {
            facts.recovery = None;
            clear_waits(facts, Process::Recovery);
            call_human(facts, obstacle, reason, now)
        }
        RecoveryPlan::Wait { until, reason } => {
            match &mut facts.recovery {
                Some(recovery) => {
                    recovery.next_check_at = until;
                    clear_waits(facts, Process::Recovery);
                }
                None => postpone_recovery(facts, until, reason.clone()),
            }
            StepEffect::new(format!("wait: {reason}"))
        }
        RecoveryPlan::Reenroll { .. } => {
            if let Some((recovery, acted)) =
                facts.recovery.clone().and_then(|recovery| Some((recovery.clone(), recovery.last_action?)))
            {
                start_agent(facts, now);
                let note = "the agent was put on it after the reboot; waits for its report".to_owned();
                facts.recovery = Some(after_reenroll(recovery, &acted, note, None, now));
            }
            clear_waits(facts, Process::Recovery);
            StepEffect {
                starts_reporting: true,
                ..StepEffect::new("put the role server on it again, after the reboot")
            }
        }
        RecoveryPlan::TakeStep { rung, step: what, attempt } => {
            apply_rung(fleet, machine, policy, (rung, what, attempt), now)
        }
    }
}

fn apply_rung(
    fleet: &mut PlanFleet,
    machine: usize,
    policy: &Policy,
    (rung, what, attempt): (usize, Rung, u32),
    now: Timestamp,
) -> StepEffect {
    let circumstances = fleet.disruption_context(machine, what.step, policy, now);
    let permission = may_disrupt(&fleet.machines[machine].facts, what.step, &circumstances, policy, now, now);
    let facts = &mut fleet.machines[machine].facts;
    if let Err(refusal) = permission {
        postpone_recovery(facts, refusal.retry_at, refusal.reason.clone());
        return StepEffect::new(format!("put it off: {}", refusal.reason));
    }
    let recovery = start_step(facts, rung, what.step, what.deadline, attempt, now);
    let note = format!("{}: done; waits for its report", format_attempt(what, attempt));
    facts.recovery = Some(start_report_wait(recovery, what, note, now));
    let has_address = facts.provider_record.as_ref().is_some_and(|provided| provided.address.is_some());
    let starts_agent = what.step == DisruptionKind::RestartAgent;
    if starts_agent {
        start_agent(facts, now);
    }
    clear_waits(facts, Process::Recovery);
    let (id, provider) = (facts.machine, provider_name(facts));
    fleet.record_disruption(id, &provider, what.step, now);
    StepEffect {
        action: format!("{} (try {attempt} of {})", what.step.phrase(), what.tries),
        // A rebooted machine gets its agent at the next check, if it can be reached at all.
        starts_reporting: starts_agent || !has_address,
        goes_silent: !starts_agent,
    }
}

/// An agent is enrolled, in a boot that may differ from the last known one.
fn start_agent(facts: &mut MachineFacts, now: Timestamp) {
    let boot_id = Some(current_boot_id(facts));
    let (public_key, fence) =
        facts.agent_started.take().map_or((Vec::new(), 0), |agent| (agent.public_key, agent.fence));
    facts.agent_started = Some(AgentStarted { started_at: now, public_key, boot_id, fence });
}

/// The present boot of a machine: a new one if a step rebooted it.
fn current_boot_id(facts: &MachineFacts) -> String {
    let acted = facts.recovery.as_ref().and_then(|recovery| recovery.last_action.as_ref());
    match acted.filter(|acted| acted.step.reboots()) {
        Some(acted) => format!("after {}", acted.boot_id_before.as_deref().unwrap_or("another")),
        None => facts.last_boot_id().unwrap_or("the first").to_owned(),
    }
}

fn postpone_recovery(facts: &mut MachineFacts, until: Timestamp, reason: String) {
    facts.postponements.insert(Process::Recovery, Postponement { until, reason, decided_at: String::new() });
}

/// Leaves a machine to a person. The outcome of the work item does not matter: nothing is due until the person has
/// come, and failures are forgotten then.
fn call_human(facts: &mut MachineFacts, obstacle: Obstacle, reason: String, now: Timestamp) -> StepEffect {
    let what = format!("call a person: {reason}");
    facts.needs_human = Some(NeedsHuman { since: now, reason, obstacle, reporting_since: None });
    StepEffect::new(what)
}

/// Forgets earlier failures and waits, as the end of a successful work item does.
fn clear_waits(facts: &mut MachineFacts, process: Process) {
    facts.backoffs.remove(&process);
    facts.postponements.remove(&process);
}
