//! When each lane of a machine is next due, for what, and why not earlier.
//!
//! [`next_due`] is the one place that decides. Whatever changes a fact calls it
//! for both lanes in the same transaction and writes the answer to
//! `machine_due`; control loops only ever claim rows. So a healthy fleet of a
//! million machines costs an index probe to poll, and "why is nothing
//! happening to this machine" is a column.
//!
//! # Timers
//!
//! The due time of a healthy machine is "when it will have been silent for too
//! long", and every heartbeat moves it. Writing that on each heartbeat would
//! cost two indexes a heartbeat, so heartbeats leave the due row alone: a row
//! marked `timer` may be due *earlier* than the truth, never later, and is
//! re-armed from the facts before anybody may claim it.

use std::panic::Location;

use crate::model::facts::{HoldScope, Installation, MachineFacts, Retirement, wait_of};
use crate::model::phase::{Phase, phase_of, silent_from};
use crate::model::policy::Policy;
use crate::model::power_order::lapses;
use crate::model::priority::Level;
use crate::model::process::{Lane, Process};
use crate::model::provider_status::ProviderStatus;
use crate::model::recovery::proof_of_life;
use crate::model::retirement::{Step, next, waits_for};
use crate::model::time::{Timestamp, after};

/// Version of the rules in this file. A binary neither claims nor rewrites a row written under a
/// newer one. Raise it with every change that makes [`next_due`] answer differently.
pub const RULES_VERSION: i32 = 3;

/// Buckets that the due rows of one (process, provider, priority) spread over.
pub const BUCKETS: i16 = 8;

/// What a lane of a machine is due for next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Due {
    /// The work, or `None` when nothing will become due by time alone.
    pub process: Option<Process>,
    /// Priority class: 0 before 1 before 2, shared by weight.
    pub priority: i16,
    /// When; never set without a process. May lie in the past.
    pub ready_at: Option<Timestamp>,
    /// Whether a heartbeat moves `ready_at` without writing it.
    pub timer: bool,
    /// Why this and not earlier: a sentence for people.
    pub reason: String,
    /// Where in the code that was decided.
    pub decided_at: &'static Location<'static>,
    /// When something else happens if this does not.
    pub deadline: Option<Timestamp>,
    /// The machine's phase, for lists.
    pub phase: Phase,
    /// The priority class that a person gave it, and that counts no more: what is stored may still be that.
    pub lapsed: Option<i16>,
}

/// Builds answers that share a machine's phase; cannot be built without a reason.
struct Answer {
    phase: Phase,
}

impl Answer {
    /// Nothing will become due by time alone.
    #[track_caller]
    fn wait(&self, reason: impl Into<String>) -> Due {
        Due {
            process: None,
            priority: 1,
            ready_at: None,
            timer: false,
            reason: reason.into(),
            decided_at: Location::caller(),
            deadline: None,
            phase: self.phase,
            lapsed: None,
        }
    }

    /// Due for `process` at `at`.
    #[track_caller]
    fn due(&self, process: Process, at: Timestamp, reason: impl Into<String>) -> Due {
        Due {
            process: Some(process),
            priority: 1,
            ready_at: Some(at),
            timer: false,
            reason: reason.into(),
            decided_at: Location::caller(),
            deadline: None,
            phase: self.phase,
            lapsed: None,
        }
    }
}

/// What `lane` of a machine is due for next. Pure: `now` is the database's.
#[must_use]
pub fn next_due(facts: &MachineFacts, lane: Lane, policy: &Policy, now: Timestamp) -> Due {
    let answer = Answer { phase: phase_of(facts, policy, now) };
    let due = match lane {
        Lane::Access => next_access(&answer, facts, policy, now),
        Lane::Observe => next_observe(&answer, facts, policy),
    };
    with_priority(no_later_than_it_lapses(put_off(due, facts, now), facts, policy), facts, policy, now)
}

/// An order about power is given up when its time is over, whatever it was put off for.
fn no_later_than_it_lapses(mut due: Due, facts: &MachineFacts, policy: &Policy) -> Due {
    if let (Some(Process::Power), Some(order)) = (due.process, &facts.power_order) {
        due.ready_at = due.ready_at.min(Some(lapses(order, policy)));
    }
    due
}

fn next_access(answer: &Answer, facts: &MachineFacts, policy: &Policy, now: Timestamp) -> Due {
    if let Some(retirement) = &facts.retirement {
        return leave(answer, retirement, policy);
    }
    if let Some(quarantine) = &facts.quarantine {
        return answer.wait(format!("quarantined until a person explains: {}", quarantine.reason));
    }
    if let Some(order) = &facts.power_order {
        let reason = format!("{} ordered to {}: {}", order.by, order.switch.phrase(), order.reason);
        let mut due = answer.due(Process::Power, order.at, reason);
        due.deadline = Some(lapses(order, policy));
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
        // A report that ends the ladder is acted on at once, not when the ladder looks next.
        let at = match (&facts.heartbeat, proof_of_life(facts, recovery, now)) {
            (Some(heartbeat), Some(_)) => recovery.next_at.min(heartbeat.at),
            _ => recovery.next_at,
        };
        let mut due = answer.due(Process::Recovery, at, recovery.note.clone());
        due.deadline = recovery.acted.as_ref().map(|acted| acted.deadline);
        return due;
    }
    if facts.installation() == Installation::Succeeded {
        return answer.wait("runs the operating system that was installed");
    }
    let Some(provided) = &facts.provided else {
        return answer.wait("no provider has handed it over yet");
    };
    if facts.agent_started.is_some() {
        return watch(answer, facts, policy, now);
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
    answer.due(Process::AgentStart, provided.at, "has no role server yet")
}

/// A machine on its way out: due for what its stage asks for, and for nothing else any more.
fn leave(answer: &Answer, retirement: &Retirement, policy: &Policy) -> Due {
    let present = next(retirement, policy);
    let reason = waits_for(retirement, &present);
    let mut due = match present.step {
        Step::Over | Step::Stuck { .. } => answer.wait(reason),
        Step::Release => answer.due(Process::Retirement, present.since, reason),
        Step::ReleaseAgain(order) => answer.due(Process::Retirement, order.at, reason),
    };
    due.deadline = present.deadline;
    due
}

/// A machine with an agent: due for recovery when the agent will have been silent for too long.
fn watch(answer: &Answer, facts: &MachineFacts, policy: &Policy, now: Timestamp) -> Due {
    let limit = match facts.heartbeat {
        Some(_) => policy.recovery_silence_timeout,
        None => policy.recovery_first_heartbeat_timeout,
    };
    let Some(silent) = silent_from(facts, policy) else {
        // Nobody listens, so silence proves nothing. Looked at again a full limit from now; by
        // then somebody listens, or this is said again.
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
            Some(_) => format!("healthy; recovery begins when its agent is silent for {limit}"),
            None => format!("its agent was started; recovery begins when it does not report within {limit}"),
        },
    );
    due.timer = true;
    due.deadline = facts.heartbeat.is_none().then_some(silent);
    due
}

fn next_observe(answer: &Answer, facts: &MachineFacts, policy: &Policy) -> Due {
    if facts.retirement.is_some() {
        return answer.wait("is being retired, or was");
    }
    let Some(provided) = &facts.provided else {
        return answer.wait("no provider has handed it over yet");
    };
    let Some(looked_at) = provided.looked_at else {
        return answer.due(Process::Update, provided.at, "the provider was never asked about it");
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
        format!("the provider is asked about it every {interval}: {why}"),
    )
}

/// Moves a due time behind what puts it off: an operator's hold, a backoff, a postponement. A
/// timer stays one: when the wait is over it is re-armed from the facts like any other.
fn put_off(mut due: Due, facts: &MachineFacts, now: Timestamp) -> Due {
    let (Some(process), Some(ready_at)) = (due.process, due.ready_at) else { return due };
    if let Some((until, reason)) = wait_of(facts, process)
        && until > ready_at
    {
        due.ready_at = Some(until);
        due.reason = reason;
    }
    let Some(hold) = facts.hold.as_ref().filter(|hold| hold.holds_at(now)) else { return due };
    let covered = match hold.scope {
        // What is given back is not there any more, for whatever it was held.
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
            let held = Answer { phase: due.phase }.wait(format!("held by {}: {}", hold.by, hold.reason));
            // That a machine does not leave is told at its deadline, whoever holds it; nothing else comes then.
            let deadline = due.deadline.filter(|_| process == Process::Retirement);
            Due { deadline, ..held }
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

/// What a person says of a machine counts before what the engine says; see [`crate::model::priority`].
///
/// A machine on which the work failed again and again yields to the others; and so does one that was
/// rebooted and is waited for. A look at it may take until a time limit passes: a few of those that stay
/// down would else keep every worker from the machines that a new agent is enough for.
fn with_priority(mut due: Due, facts: &MachineFacts, policy: &Policy, now: Timestamp) -> Due {
    let Some(process) = due.process else { return due };
    let failed_often = facts
        .backoffs
        .get(&process)
        .is_some_and(|backoff| backoff.failures >= policy.low_priority_after_failures);
    let acted = facts.recovery.as_ref().and_then(|recovery| recovery.acted.as_ref());
    let coming_up = process == Process::Recovery && acted.is_some_and(|acted| acted.step.reboots());
    if failed_often || coming_up {
        due.priority = Level::Low.class();
    }
    match &facts.priority {
        Some(said) if said.holds_at(now) => due.priority = said.level.class(),
        said => due.lapsed = said.as_ref().map(|said| said.level.class()),
    }
    due
}

/// What is stored of a due row and matters for arming it again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Armed {
    /// The work it is armed for.
    pub process: Option<Process>,
    /// When it is claimable.
    pub ready_at: Option<Timestamp>,
    /// Whether heartbeats move it.
    pub timer: bool,
}

/// The `ready_at` to store for `due` at `now`, given what is stored.
///
/// Never before `now`, so that a row written by a transaction that commits late cannot appear
/// behind a claimer that has already scanned past that moment. But a row that is due already and
/// stays due for the same work keeps its place: pushing it to `now` on every unrelated write
/// would let busy machines starve.
#[must_use]
pub fn arm(stored: &Armed, due: &Due, now: Timestamp) -> Option<Timestamp> {
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
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::backoff::BackoffFact;
    use crate::model::facts::{
        Acted, AgentStarted, Heartbeat, Hold, NeedsHuman, Provided, Quarantine, Recovery,
    };
    use crate::model::ids::MachineId;
    use crate::model::needs_human::Obstacle;
    use crate::model::policy::Disturbance;
    use crate::model::priority::Priority;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    fn provided() -> MachineFacts {
        let mut facts = MachineFacts::unknown(MachineId::generate(), at(0));
        facts.listening_since = Some(at(-100_000));
        facts.provided = Some(Provided {
            provider: "rack-a".into(),
            provider_id: "1".into(),
            reservation: None,
            address: Some("192.0.2.1".into()),
            ssh_port: None,
            ssh_user: None,
            location: None,
            status: ProviderStatus::Running,
            at: at(0),
            looked_at: None,
            unchanged: false,
        });
        facts
    }

    fn with_agent() -> MachineFacts {
        let mut facts = provided();
        facts.agent_started =
            Some(AgentStarted { at: at(10), public_key: vec![1; 32], boot_id: None, fence: 1 });
        facts
    }

    fn healthy() -> MachineFacts {
        let mut facts = with_agent();
        facts.heartbeat =
            Some(Heartbeat { at: at(100), boot_id: "b".into(), incarnation: "i".into(), sequence: 1 });
        facts
    }

    fn access(facts: &MachineFacts, now: i64) -> (Option<Process>, Option<i64>, bool, Phase) {
        let due = next_due(facts, Lane::Access, &Policy::default(), at(now));
        (due.process, due.ready_at.map(|ready| (ready - at(0)).num_seconds()), due.timer, due.phase)
    }

    #[test]
    fn machine_is_due_for_what_its_facts_say() {
        use Phase as P;
        use Process::{AgentStart, Recovery};
        let unknown = MachineFacts::unknown(MachineId::generate(), at(0));
        let mut no_address = provided();
        no_address.provided.as_mut().unwrap().address = None;
        let mut provisioning = provided();
        provisioning.provided.as_mut().unwrap().status = ProviderStatus::Provisioning;
        let mut restarted = healthy();
        restarted.agent_started.as_mut().unwrap().at = at(500);
        let mut deaf = healthy();
        deaf.listening_since = None;
        let mut returned = healthy();
        returned.listening_since = Some(at(5_000));
        for (name, facts, now, expected) in [
            ("unknown", unknown, 5, (None, None, false, P::New)),
            ("no address", no_address, 5, (None, None, false, P::Provisioning)),
            ("provisioning", provisioning, 5, (None, None, false, P::Provisioning)),
            ("provided", provided(), 5, (Some(AgentStart), Some(0), false, P::Provided)),
            ("started", with_agent(), 20, (Some(Recovery), Some(10 + 1800), true, P::AgentStarting)),
            ("never heard", with_agent(), 1810, (Some(Recovery), Some(1810), false, P::Silent)),
            ("healthy", healthy(), 200, (Some(Recovery), Some(100 + 600), true, P::Ready)),
            ("silent", healthy(), 700, (Some(Recovery), Some(700), false, P::Silent)),
            ("started anew", restarted, 700, (Some(Recovery), Some(500 + 600), true, P::Ready)),
            ("nobody listens", deaf, 9_000, (Some(Recovery), Some(9_600), true, P::Ready)),
            ("we were away", returned, 5_100, (Some(Recovery), Some(5_600), true, P::Ready)),
        ] {
            assert_eq!(access(&facts, now), expected, "{name}");
        }
    }

    #[test]
    fn stops_and_waits_put_work_off() {
        let hold = |scope, until: Option<i64>| Hold {
            scope,
            reason: "disk swap".into(),
            by: "kim".into(),
            until: until.map(at),
        };
        let mut stopped = provided();
        stopped.hold = Some(hold(HoldScope::Everything, None));
        let mut held_a_while = provided();
        held_a_while.hold = Some(hold(HoldScope::Everything, Some(300)));
        let mut hold_over = provided();
        hold_over.hold = Some(hold(HoldScope::Everything, Some(3)));
        let mut held_power = healthy();
        held_power.hold = Some(hold(HoldScope::Power, None));
        let mut held_recovery = healthy();
        held_recovery.hold = Some(hold(HoldScope::Recovery, None));
        let mut failed = provided();
        failed.backoffs.insert(
            Process::AgentStart,
            BackoffFact {
                failures: 3,
                last_interval: Duration::from_mins(1),
                until: at(70),
                cause: "no route".into(),
            },
        );
        let mut quarantined = healthy();
        quarantined.quarantine = Some(Quarantine { since: at(0), reason: "twice".into() });
        let mut needs_human = healthy();
        needs_human.needs_human = Some(NeedsHuman {
            since: at(0),
            reason: "dead".into(),
            obstacle: Obstacle::LadderExhausted,
            heard_since: None,
        });
        let start = Some(Process::AgentStart);
        let recovery = Some(Process::Recovery);
        for (name, facts, expected) in [
            ("held", stopped, (None, None, false, Phase::Provided)),
            ("held for a while", held_a_while, (start, Some(300), false, Phase::Provided)),
            ("hold over", hold_over, (start, Some(0), false, Phase::Provided)),
            ("power held", held_power, (recovery, Some(700), true, Phase::Ready)),
            ("recovery held", held_recovery, (None, None, false, Phase::Ready)),
            ("backoff", failed.clone(), (start, Some(70), false, Phase::Provided)),
            ("quarantined", quarantined, (None, None, false, Phase::Quarantined)),
            ("needs human", needs_human, (None, None, false, Phase::NeedsHuman)),
        ] {
            assert_eq!(access(&facts, 200), expected, "{name}");
        }
        assert_eq!(next_due(&failed, Lane::Access, &Policy::default(), at(20)).priority, 2);
    }

    #[test]
    fn who_comes_up_from_a_reboot_yields_to_who_has_just_fallen_silent() {
        let ladder = |step| {
            let mut facts = healthy();
            facts.recovery = Some(Recovery {
                started_at: at(700),
                rung: 1,
                acted: Some(Acted { step, at: at(700), deadline: at(1600), boot_id_before: None }),
                tries: 1,
                next_at: at(760),
                note: "waits for it to come up".into(),
                obstacle: None,
            });
            next_due(&facts, Lane::Access, &Policy::default(), at(800)).priority
        };
        assert_eq!(next_due(&healthy(), Lane::Access, &Policy::default(), at(800)).priority, 1);
        assert_eq!(ladder(Disturbance::RestartAgent), 1);
        assert_eq!((ladder(Disturbance::Reboot), ladder(Disturbance::PowerCycle)), (2, 2));
    }

    #[test]
    fn word_of_a_person_stands_above_our_own_yielding_for_as_long_as_it_holds() {
        let said = |level, until: Option<i64>| Priority {
            level,
            reason: "a customer waits".into(),
            by: "kim".into(),
            since: at(0),
            until: until.map(at),
        };
        let backoff = |failures| BackoffFact {
            failures,
            last_interval: Duration::from_mins(1),
            until: at(70),
            cause: "no route to host".into(),
        };
        for (name, priority, failures, expected, lapsed) in [
            ("nothing said", None, 0, 1, None),
            ("failed often", None, 3, 2, None),
            ("urgent", Some(said(Level::Urgent, None)), 0, 0, None),
            ("urgent, though it failed often", Some(said(Level::Urgent, Some(300))), 3, 0, None),
            ("low", Some(said(Level::Low, None)), 0, 2, None),
            ("over", Some(said(Level::Urgent, Some(200))), 0, 1, Some(0)),
            ("over, and failed often", Some(said(Level::Urgent, Some(200))), 3, 2, Some(0)),
        ] {
            let mut facts = provided();
            facts.priority = priority;
            if failures > 0 {
                facts.backoffs.insert(Process::AgentStart, backoff(failures));
            }
            for lane in [Lane::Access, Lane::Observe] {
                let due = next_due(&facts, lane, &Policy::default(), at(200));
                let expected =
                    if lane == Lane::Observe && expected == 2 && failures > 0 { 1 } else { expected };
                assert_eq!((due.priority, due.lapsed), (expected, lapsed), "{name}, {lane}");
            }
        }
    }

    #[test]
    fn who_waits_for_a_person_says_how_else_that_may_end() {
        let mut facts = provided();
        facts.needs_human = Some(NeedsHuman {
            since: at(0),
            reason: "tried in vain".into(),
            obstacle: Obstacle::LadderExhausted,
            heard_since: None,
        });
        let reason = |facts: &MachineFacts| next_due(facts, Lane::Access, &Policy::default(), at(9)).reason;
        assert_eq!(reason(&facts), "waits for a person: tried in vain");
        facts.agent_started = with_agent().agent_started;
        assert_eq!(
            reason(&facts),
            "waits for a person, or for its agent to report for 10m without a gap: tried in vain"
        );
    }

    #[test]
    fn reason_and_place_of_a_decision_are_its_own() {
        let due = next_due(&provided(), Lane::Access, &Policy::default(), at(1));
        assert_eq!(due.reason, "has no role server yet");
        assert!(due.decided_at.file().ends_with("schedule.rs") && due.decided_at.line() > 1);
        let other = next_due(&healthy(), Lane::Access, &Policy::default(), at(1));
        assert_ne!(other.decided_at.line(), due.decided_at.line());
    }

    #[test]
    fn provider_is_asked_often_until_it_answers_the_same_twice() {
        let policy = Policy::default();
        let mut facts = provided();
        let ready = |facts: &MachineFacts| {
            (next_due(facts, Lane::Observe, &policy, at(50)).ready_at.unwrap() - at(0)).num_seconds()
        };
        assert_eq!(ready(&facts), 0);
        facts.provided.as_mut().unwrap().looked_at = Some(at(50));
        assert_eq!(ready(&facts), 50 + 60);
        facts.provided.as_mut().unwrap().unchanged = true;
        assert_eq!(ready(&facts), 50 + 1800);
        facts.provided.as_mut().unwrap().status = ProviderStatus::Missing;
        assert_eq!(ready(&facts), 50 + 60);
    }

    #[test]
    fn row_that_is_due_keeps_its_place_and_a_late_one_is_never_armed_in_the_past() {
        let due = next_due(&provided(), Lane::Access, &Policy::default(), at(50));
        let stored = |process, ready: Option<i64>| Armed { process, ready_at: ready.map(at), timer: false };
        let start = Some(Process::AgentStart);
        assert_eq!(arm(&stored(None, None), &due, at(50)), Some(at(50)));
        assert_eq!(arm(&stored(start, Some(20)), &due, at(50)), Some(at(20)));
        assert_eq!(arm(&stored(start, Some(90)), &due, at(50)), Some(at(50)));
        assert_eq!(arm(&stored(Some(Process::Recovery), Some(20)), &due, at(50)), Some(at(50)));
        let later = Due { ready_at: Some(at(70)), ..due };
        assert_eq!(arm(&stored(start, Some(20)), &later, at(50)), Some(at(70)));
    }
}
