//! Schedule: when each lane of a machine is due next, for what, and why.
//!
//! [`next_due`] is the only function that decides this. Everything that changes a fact calls it for both lanes in the
//! same transaction and writes the result to `machine_due`. Control loops only ever claim rows. So a healthy fleet of a
//! million machines costs an index probe to poll, and "why is nothing happening to this machine" is a column.
//!
//! # Timers
//!
//! A healthy machine is due when its agent will have been silent for too long, and every heartbeat moves that moment.
//! Writing it on each heartbeat would update two indexes per heartbeat, so heartbeats leave the due row alone. A row
//! marked `timer` may be due *earlier* than the truth, never later, and is re-armed from the facts before it can be
//! claimed.

use std::panic::Location;

use crate::facts::{HoldScope, MachineFacts, Retirement, current_wait};
use crate::phase::{Phase, phase_of, silence_deadline};
use crate::policy::Policy;
use crate::power_control::lapses_at;
use crate::priority::PriorityLevel;
use crate::process::{Lane, Process};
use crate::provider_status::ProviderStatus;
use crate::recovery::proof_of_life;
use crate::retirement::{RetirementStep, retirement_state, wait_reason};
use crate::signed_artefact::key_replacement::KeyReplacement;
use crate::time::{Timestamp, after};

/// Version of the rules in this file. A binary neither claims nor rewrites a row written under a newer version. Raise
/// it with every change of the results of [`next_due`].
pub const RULES_VERSION: i32 = 4;

/// Number of buckets that the due rows of one (process, provider, priority) spread over.
pub const BUCKETS: i16 = 8;

/// How the reason of a machine begins that needs nothing.
const HEALTHY_REASON: &str = "healthy; recovery begins when its agent is silent for ";

/// What a lane of a machine is due for next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DueWork {
    /// The work, or `None` when nothing will become due by time alone.
    pub process: Option<Process>,
    /// Priority class: 0 before 1 before 2, shared by weight.
    pub priority: i16,
    /// When; never set without a process. May lie in the past.
    pub ready_at: Option<Timestamp>,
    /// Whether a heartbeat moves `ready_at` without writing it.
    pub timer: bool,
    /// Why this and not earlier, as a sentence for people.
    pub reason: String,
    /// Where in the code this was decided.
    pub decided_at: &'static Location<'static>,
    /// When something else happens unless the awaited event comes.
    pub deadline: Option<Timestamp>,
    /// The machine's phase, for lists.
    pub phase: Phase,
    /// Priority class of an operator's priority that is no longer in force. The stored row may still have it.
    pub expired_priority: Option<i16>,
}

/// Builds results that share a machine's phase. A result cannot be built without a reason.
struct DueBuilder {
    phase: Phase,
}

impl DueBuilder {
    /// Nothing will become due by time alone.
    #[track_caller]
    fn wait(&self, reason: impl Into<String>) -> DueWork {
        DueWork {
            process: None,
            priority: 1,
            ready_at: None,
            timer: false,
            reason: reason.into(),
            decided_at: Location::caller(),
            deadline: None,
            phase: self.phase,
            expired_priority: None,
        }
    }

    /// Due for `process` at `at`, for this reason.
    #[track_caller]
    fn due(&self, process: Process, at: Timestamp, reason: impl Into<String>) -> DueWork {
        DueWork {
            process: Some(process),
            priority: 1,
            ready_at: Some(at),
            timer: false,
            reason: reason.into(),
            decided_at: Location::caller(),
            deadline: None,
            phase: self.phase,
            expired_priority: None,
        }
    }
}

/// What `lane` of a machine is due for next. It is a pure function: `now` is the database's time.
#[must_use]
pub fn next_due(facts: &MachineFacts, lane: Lane, policy: &Policy, now: Timestamp) -> DueWork {
    let answer = DueBuilder { phase: phase_of(facts, policy, now) };
    let due = match lane {
        Lane::Access => due_access(&answer, facts, policy, now),
        Lane::Observe => due_observe(&answer, facts, policy),
    };
    apply_priority(cap_at_order_lapse(apply_waits(due, facts, now), facts, policy), facts, policy, now)
}

/// A power order is given up when its time is over, whatever it was postponed for.
fn cap_at_order_lapse(mut due: DueWork, facts: &MachineFacts, policy: &Policy) -> DueWork {
    if let (Some(Process::Power), Some(order)) = (due.process, &facts.power_order) {
        due.ready_at = due.ready_at.min(Some(lapses_at(order, policy)));
    }
    due
}

fn due_access(answer: &DueBuilder, facts: &MachineFacts, policy: &Policy, now: Timestamp) -> DueWork {
    if let Some(retirement) = &facts.retirement {
        return due_retirement(answer, retirement, policy);
    }
    if let Some(quarantine) = &facts.quarantine {
        return answer.wait(format!("quarantined until an operator releases it: {}", quarantine.reason));
    }
    if let Some(order) = &facts.power_order {
        let reason = format!("{} ordered to {}: {}", order.by, order.kind.phrase(), order.reason);
        let mut due = answer.due(Process::Power, order.ordered_at, reason);
        due.deadline = Some(lapses_at(order, policy));
        return due;
    }
    if let Some(needs_human) = &facts.needs_human {
        let reason = &needs_human.reason;
        return answer.wait(match facts.agent_started {
            None => format!("waits for a person: {reason}"),
            Some(_) => format!(
                "waits for a person, or for its agent to report for {} without a gap: {reason}",
                policy.recovery_silence_timeout
            ),
        });
    }
    if let Some(recovery) = &facts.recovery {
        // A report that ends the ladder takes effect at once, not at the next check of the ladder.
        let at = match (&facts.heartbeat, proof_of_life(facts, recovery, now)) {
            (Some(heartbeat), Some(_)) => recovery.next_check_at.min(heartbeat.received_at),
            _ => recovery.next_check_at,
        };
        let mut due = answer.due(Process::Recovery, at, recovery.note.clone());
        due.deadline = recovery.last_action.as_ref().map(|acted| acted.deadline);
        return due;
    }
    let Some(provided) = &facts.provider_record else {
        return answer.wait("no provider has handed it over yet");
    };
    if facts.agent_started.is_some() {
        let has_address = provided.address.is_some();
        let ordered = facts.key_replacement.as_ref().filter(|order| has_address && order.is_active_at(now));
        return ordered
            .and_then(|order| due_key_replacement(answer, order, facts, policy, now))
            .unwrap_or_else(|| due_recovery(answer, facts, policy, now));
    }
    if provided.status == ProviderStatus::Provisioning {
        return answer.wait("the provider is still making it ready");
    }
    if provided.status.is_failed() {
        return answer.wait("the provider says it can never be made ready");
    }
    if provided.status == ProviderStatus::Missing {
        return answer.wait("the provider cannot find it");
    }
    if provided.address.is_none() {
        return answer.wait("the provider has given no address for it");
    }
    answer.due(Process::AgentStart, provided.acquired_at, "has no role server yet")
}

/// A retiring machine: due for what its stage requires, and for nothing else.
fn due_retirement(answer: &DueBuilder, retirement: &Retirement, policy: &Policy) -> DueWork {
    let present = retirement_state(retirement, policy);
    let reason = wait_reason(retirement, &present);
    let mut due = match present.step {
        RetirementStep::Finished | RetirementStep::Blocked { .. } => answer.wait(reason),
        RetirementStep::Release => answer.due(Process::Retirement, present.since, reason),
        RetirementStep::RetryRelease(order) => answer.due(Process::Retirement, order.recorded_at, reason),
    };
    due.deadline = present.deadline;
    due
}

/// A machine with an agent and pinned signing keys to replace: due for a takeover, unless it waits for one longer
/// than for recovery. `None` also if it is silent: recovery takes it over anyway.
fn due_key_replacement(
    answer: &DueBuilder,
    order: &KeyReplacement,
    facts: &MachineFacts,
    policy: &Policy,
    now: Timestamp,
) -> Option<DueWork> {
    let silent = silence_deadline(facts, policy)?;
    let waits_until = current_wait(facts, Process::AgentStart).map_or(now, |(until, _)| until.max(now));
    (waits_until < silent).then(|| {
        let mut due = answer.due(Process::AgentStart, order.ordered_at, order.describe());
        due.deadline = Some(order.expires_at);
        due
    })
}

/// Whether the reason of an access lane is that of a machine which needs nothing.
#[must_use]
pub fn is_healthy_reason(reason: &str) -> bool {
    reason.starts_with(HEALTHY_REASON)
}

/// A machine with an agent: due for recovery when the agent will have been silent for too long.
fn due_recovery(answer: &DueBuilder, facts: &MachineFacts, policy: &Policy, now: Timestamp) -> DueWork {
    let limit = match facts.heartbeat {
        Some(_) => policy.recovery_silence_timeout,
        None => policy.recovery_first_heartbeat_timeout,
    };
    let Some(silent) = silence_deadline(facts, policy) else {
        // No callback server receives heartbeats, so silence proves nothing. The machine is checked again after a full
        // limit: by then one does, or the result is the same again.
        let mut due = answer.due(
            Process::Recovery,
            after(now, limit.0),
            "no callback server has listened lately, so that its silence proves nothing",
        );
        due.timer = true;
        return due;
    };
    if silent <= now {
        return answer.due(
            Process::Recovery,
            silent,
            match facts.heartbeat {
                Some(_) => format!("its agent has not reported for {limit}"),
                None => format!("its agent did not report within {limit} of being started"),
            },
        );
    }
    let mut due = answer.due(
        Process::Recovery,
        silent,
        match facts.heartbeat {
            Some(_) => format!("{HEALTHY_REASON}{limit}"),
            None => format!("its agent was started; recovery begins when it does not report within {limit}"),
        },
    );
    due.timer = true;
    due.deadline = facts.heartbeat.is_none().then_some(silent);
    due
}

fn due_observe(answer: &DueBuilder, facts: &MachineFacts, policy: &Policy) -> DueWork {
    if facts.retirement.is_some() {
        return answer.wait("is being retired, or was");
    }
    let Some(provided) = &facts.provider_record else {
        return answer.wait("no provider has handed it over yet");
    };
    let Some(looked_at) = provided.polled_at else {
        return answer.due(Process::Update, provided.acquired_at, "the provider was never queried about it");
    };
    let stable = provided.unchanged
        && provided.address.is_some()
        && matches!(
            provided.status,
            ProviderStatus::Running | ProviderStatus::Stopped | ProviderStatus::Unknown
        );
    let (interval, why) = if stable {
        (policy.update_interval_stable, "nothing changed at the last look")
    } else {
        (policy.update_interval_unstable, "its status is incomplete, unstable or just changed")
    };
    answer.due(
        Process::Update,
        after(looked_at, interval.0),
        format!("the provider is queried about it every {interval}: {why}"),
    )
}

/// Moves a due time behind its waits: an operator's hold, a backoff, a postponement. A timer stays a timer: when the
/// wait is over it is re-armed from the facts like any other.
fn apply_waits(mut due: DueWork, facts: &MachineFacts, now: Timestamp) -> DueWork {
    let (Some(process), Some(ready_at)) = (due.process, due.ready_at) else { return due };
    if let Some((until, reason)) = current_wait(facts, process)
        && until > ready_at
    {
        due.ready_at = Some(until);
        due.reason = reason;
    }
    let Some(hold) = facts.hold.as_ref().filter(|hold| hold.is_active_at(now)) else { return due };
    let covered = match hold.scope {
        // A released machine is not there any more, whatever the hold was for.
        _ if process == Process::Retirement => true,
        HoldScope::Everything => process.lane() == Lane::Access,
        HoldScope::Recovery => process == Process::Recovery,
        HoldScope::Power => process == Process::Power,
    };
    if !covered {
        return due;
    }
    match hold.until {
        None => {
            let held = DueBuilder { phase: due.phase }.wait(format!("held by {}: {}", hold.by, hold.reason));
            // An overdue retirement is reported at its deadline even under a hold. Nothing else happens at that moment.
            let deadline = due.deadline.filter(|_| process == Process::Retirement);
            DueWork { deadline, ..held }
        }
        Some(until) => {
            if due.ready_at < Some(until) {
                due.ready_at = Some(until);
                due.reason = format!("held by {} for a time: {}", hold.by, hold.reason);
            }
            due
        }
    }
}

/// Sets the priority class. An operator's priority counts before the engine's own; see [`crate::priority`].
///
/// A machine on which work failed repeatedly yields to the others. So does one that was rebooted and is expected back.
/// A check of it may take until a time limit passes. Otherwise a few machines that stay down would keep every worker
/// from the machines that only need a new agent.
fn apply_priority(mut due: DueWork, facts: &MachineFacts, policy: &Policy, now: Timestamp) -> DueWork {
    let Some(process) = due.process else { return due };
    let failed_often = facts
        .backoffs
        .get(&process)
        .is_some_and(|backoff| backoff.failures >= policy.low_priority_after_failures);
    let acted = facts.recovery.as_ref().and_then(|recovery| recovery.last_action.as_ref());
    let coming_up = process == Process::Recovery && acted.is_some_and(|acted| acted.step.reboots());
    if failed_often || coming_up {
        due.priority = PriorityLevel::Low.class();
    }
    match &facts.priority {
        Some(priority) if priority.is_active_at(now) => due.priority = priority.level.class(),
        priority => due.expired_priority = priority.as_ref().map(|priority| priority.level.class()),
    }
    due
}

/// The part of a stored due row that matters for arming it again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredDue {
    /// The work it is armed for.
    pub process: Option<Process>,
    /// When it is claimable.
    pub ready_at: Option<Timestamp>,
    /// Whether heartbeats move it.
    pub timer: bool,
}

/// The `ready_at` to store for `due` at `now`, given the stored row.
///
/// It is never before `now`, so that a row written by a transaction that commits late cannot appear behind a claimer
/// that has already scanned past that moment. The exception is a row that is due already and stays due for the same
/// work: it keeps its place, because moving it to `now` on every unrelated write would let busy machines starve.
#[must_use]
pub fn armed_ready_at(stored: &StoredDue, due: &DueWork, now: Timestamp) -> Option<Timestamp> {
    let wanted = due.ready_at?;
    if stored.process == due.process
        && stored.timer == due.timer
        && let Some(present) = stored.ready_at
        && wanted <= present
        && present <= now
    {
        return Some(present);
    }
    Some(wanted.max(now))
}

#[cfg(test)]
mod tests;
