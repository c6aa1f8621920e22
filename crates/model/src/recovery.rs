//! Recovery ladder: the next step for a machine with a silent agent.
//!
//! Each rung is a step with a number of attempts, and each attempt has a deadline by which the machine must have
//! reported. Recovery escalates from one rung to the next when the attempts of a rung are used up. Rungs that this
//! machine's provider cannot do are skipped. After the last rung the machine is left to a person.
//!
//! A heartbeat is the only proof of success, but not every heartbeat is one. After a step that reboots, it must come
//! from another boot than the last known one, because a machine may well report once more while it shuts down. A report
//! from the old boot counts only after the deadline has passed, as proof that the machine needs no further step.
//!
//! If a machine answers and then rejects us, the ladder goes no further. The fault is our key, our program or our
//! records, and no reboot mends those. Steps that disrupt no user are still tried as often as the ladder has attempts;
//! then the machine is left to a person.

use crate::facts::{MachineFacts, Recovery, RecoveryAction};
use crate::needs_human::Obstacle;
use crate::phase::silence_deadline;
use crate::policy::{DisruptionKind, Policy, Rung};
use crate::time::{Span, Timestamp, after, between};
use crate::unknown_fence::UnknownFence;

/// The steps that are possible for one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct AvailableSteps {
    /// Whether it has an address for SSH.
    pub restart_agent: bool,
    /// Whether its provider, or its operating system, can reboot it.
    pub reboot: bool,
    /// Whether its provider can switch its power.
    pub power_cycle: bool,
}

impl AvailableSteps {
    /// Whether `step` is possible.
    #[must_use]
    pub const fn allows(self, step: DisruptionKind) -> bool {
        match step {
            DisruptionKind::RestartAgent => self.restart_agent,
            DisruptionKind::Reboot => self.reboot,
            DisruptionKind::PowerCycle => self.power_cycle,
        }
    }
}

/// The next step of a recovery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecoveryPlan {
    /// The machine reports: the ladder has ended.
    Recovered {
        /// How it came back, for people.
        how: String,
    },
    /// Take a step of the ladder.
    TakeStep {
        /// Index into the policy's ladder.
        rung: usize,
        /// The step and its limits.
        step: Rung,
        /// Number of the attempt on this rung, from 1.
        attempt: u32,
    },
    /// The machine was rebooted and may be up without an agent: enrol one again.
    Reenroll {
        /// When the attempt under way fails.
        deadline: Timestamp,
    },
    /// Check again at a later time.
    Wait {
        /// When to check again.
        until: Timestamp,
        /// What it waits for, as a sentence.
        reason: String,
    },
    /// No step is left, or none that is allowed: leave the machine to a person.
    CallPerson {
        /// The obstacle to record.
        obstacle: Obstacle,
        /// What was tried, and what a person can do.
        reason: String,
    },
}

/// The next step for a machine with a silent agent or a ladder under way.
#[must_use]
pub fn plan_recovery(
    facts: &MachineFacts,
    policy: &Policy,
    steps: AvailableSteps,
    now: Timestamp,
) -> RecoveryPlan {
    let Some(recovery) = &facts.recovery else {
        return match silence_deadline(facts, policy) {
            Some(silent) if silent <= now => first_rung(policy, steps),
            _ => RecoveryPlan::Recovered { how: "it reported before anything was done".to_owned() },
        };
    };
    if let Some(how) = proof_of_life(facts, recovery, now) {
        return RecoveryPlan::Recovered { how };
    }
    let Some(acted) = &recovery.last_action else { return plan_next_attempt(recovery, policy, steps) };
    if now >= acted.deadline {
        return plan_next_attempt(recovery, policy, steps);
    }
    if recovery.next_check_at > now {
        return RecoveryPlan::Wait { until: recovery.next_check_at, reason: recovery.note.clone() };
    }
    if acted.step.reboots() && steps.restart_agent && !was_enrolled_since(facts, acted) {
        return RecoveryPlan::Reenroll { deadline: acted.deadline };
    }
    RecoveryPlan::Wait { until: acted.deadline, reason: recovery.note.clone() }
}

/// Changes the plan for a machine that has seen a fence which we never issued: no order is given to it, and it is left
/// to a person. Not even its agent is restarted, because after enough attempts the machine would accept what it rejects
/// today, and a provider that switches power knows no fences.
#[must_use]
pub fn block_on_unknown_fence(plan: RecoveryPlan, newer: Option<&UnknownFence>) -> RecoveryPlan {
    match (plan, newer) {
        (RecoveryPlan::TakeStep { .. } | RecoveryPlan::Reenroll { .. }, Some(newer)) => {
            RecoveryPlan::CallPerson { obstacle: Obstacle::StaleFence, reason: newer.describe() }
        }
        (plan, _) => plan,
    }
}

/// Whether an agent was enrolled in the boot that followed a step. Then that agent must report: another enrolment would
/// stop it, and with a short deadline, where checks come every two seconds, it would be stopped each time before it
/// could report.
fn was_enrolled_since(facts: &MachineFacts, acted: &RecoveryAction) -> bool {
    facts.agent_started.as_ref().is_some_and(|agent| {
        // An enrolment may also reach the machine while it shuts down.
        let other_boot = agent.boot_id.is_some() && agent.boot_id != acted.boot_id_before;
        agent.started_at > acted.acted_at && other_boot
    })
}

/// When to check a machine again after a step with the deadline `limit`: after a tenth of that, so that a machine that
/// is back early does not wait for long, but not before two seconds and not after a minute.
#[must_use]
pub fn next_check_time(now: Timestamp, deadline: Timestamp, limit: Span) -> Timestamp {
    let pause = (limit.0 / 10).clamp(std::time::Duration::from_secs(2), std::time::Duration::from_mins(1));
    after(now, pause).min(deadline)
}

/// The ladder with a step that is about to be taken at `now`. It is recorded before the step is taken.
#[must_use]
pub fn start_step(
    facts: &MachineFacts,
    rung: usize,
    step: DisruptionKind,
    limit: Span,
    attempt: u32,
    now: Timestamp,
) -> Recovery {
    Recovery {
        started_at: facts.recovery.as_ref().map_or(now, |recovery| recovery.started_at),
        rung,
        last_action: Some(RecoveryAction {
            step,
            acted_at: now,
            deadline: after(now, limit.0),
            boot_id_before: facts.last_boot_id().map(ToOwned::to_owned),
        }),
        attempts: attempt,
        next_check_at: now,
        note: format!("about to {} (try {attempt})", step.phrase()),
        obstacle: None,
    }
}

/// The attempt, for people: the beginning of a note.
#[must_use]
pub fn format_attempt(what: Rung, attempt: u32) -> String {
    format!("tried to {} (try {attempt} of {})", what.step.phrase(), what.tries)
}

/// The ladder after a step was taken, by `now`: its machine has the step's whole deadline to report.
#[must_use]
pub fn start_report_wait(begun: Recovery, what: Rung, note: String, now: Timestamp) -> Recovery {
    let deadline = begun.last_action.as_ref().map_or(now, |acted| acted.deadline);
    Recovery { next_check_at: next_check_time(now, deadline, what.deadline), note, ..begun }
}

/// The ladder after enrolling an agent on a machine that a step rebooted succeeded or failed.
#[must_use]
pub fn after_reenroll(
    recovery: Recovery,
    acted: &RecoveryAction,
    note: String,
    obstacle: Option<Obstacle>,
    now: Timestamp,
) -> Recovery {
    let next_at = next_check_time(now, acted.deadline, Span(between(acted.acted_at, acted.deadline)));
    Recovery { next_check_at: next_at, note, obstacle, ..recovery }
}

/// How the machine came back; `None` unless a heartbeat proves that it did.
#[must_use]
pub fn proof_of_life(facts: &MachineFacts, recovery: &Recovery, now: Timestamp) -> Option<String> {
    let heartbeat = facts.heartbeat.as_ref()?;
    match &recovery.last_action {
        None => (heartbeat.received_at > recovery.started_at)
            .then(|| "it reported before anything was done".to_owned()),
        Some(acted) if heartbeat.received_at <= acted.acted_at => None,
        Some(RecoveryAction { step, boot_id_before, deadline, .. }) => {
            let new_boot = boot_id_before.as_ref() != Some(&heartbeat.boot_id);
            if step.reboots() && !new_boot {
                return (now >= *deadline).then(|| {
                    format!("it reports from the boot it was in before we tried to {}", step.phrase())
                });
            }
            Some(format!("it reported after we tried to {}", step.phrase()))
        }
    }
}

fn first_rung(policy: &Policy, steps: AvailableSteps) -> RecoveryPlan {
    plan_from_rung(policy, steps, 0, "nothing could be tried")
}

fn plan_next_attempt(recovery: &Recovery, policy: &Policy, steps: AvailableSteps) -> RecoveryPlan {
    let plan = match policy.rung(recovery.rung) {
        Some(what) if steps.allows(what.step) && recovery.attempts < what.tries => {
            RecoveryPlan::TakeStep { rung: recovery.rung, step: what, attempt: recovery.attempts + 1 }
        }
        _ => plan_from_rung(policy, steps, recovery.rung + 1, &recovery.note),
    };
    let Some(obstacle) = &recovery.obstacle else { return plan };
    match plan {
        RecoveryPlan::TakeStep { step: what, .. } if !what.step.reboots() => plan,
        _ => RecoveryPlan::CallPerson {
            obstacle: obstacle.clone(),
            reason: format!("it answers, so that nothing stronger is tried: {}", recovery.note),
        },
    }
}

fn plan_from_rung(policy: &Policy, steps: AvailableSteps, start: usize, note: &str) -> RecoveryPlan {
    let next = policy
        .ladder
        .iter()
        .enumerate()
        .skip(start)
        .find(|(_, what)| what.tries > 0 && steps.allows(what.step));
    if let Some((rung, what)) = next {
        return RecoveryPlan::TakeStep { rung, step: *what, attempt: 1 };
    }
    let tried: Vec<&str> = policy
        .ladder
        .iter()
        .take(start)
        .filter(|what| steps.allows(what.step))
        .map(|what| what.step.as_str())
        .collect();
    let tried = if tried.is_empty() {
        "no step of the ladder can be taken on this machine".to_owned()
    } else {
        format!("tried in vain: {}", tried.join(", "))
    };
    RecoveryPlan::CallPerson { obstacle: Obstacle::LadderExhausted, reason: format!("{tried}; last: {note}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{AgentStarted, HeartbeatFact};
    use crate::ids::MachineId;

    const ALL: AvailableSteps = AvailableSteps { restart_agent: true, reboot: true, power_cycle: true };

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    /// Heartbeat at 100 from boot `old`, silence limit ten minutes.
    fn machine(recovery: Option<Recovery>) -> MachineFacts {
        let mut facts = MachineFacts::empty(MachineId::generate(), at(0));
        facts.listening_since = Some(at(0));
        facts.agent_started =
            Some(AgentStarted { started_at: at(0), public_key: vec![], boot_id: None, fence: 1 });
        facts.heartbeat = Some(heartbeat(100, "old"));
        facts.recovery = recovery;
        facts
    }

    fn heartbeat(seconds: i64, boot: &str) -> HeartbeatFact {
        HeartbeatFact {
            received_at: at(seconds),
            boot_id: boot.into(),
            incarnation: "i".into(),
            sequence: seconds,
        }
    }

    /// An attempt of `rung` taken at 1000 with its deadline at 1100, checked again at 1010.
    fn attempted_recovery(rung: usize, step: DisruptionKind, tries: u32) -> Recovery {
        Recovery {
            started_at: at(900),
            rung,
            last_action: Some(RecoveryAction {
                step,
                acted_at: at(1000),
                deadline: at(1100),
                boot_id_before: Some("old".into()),
            }),
            attempts: tries,
            next_check_at: at(1010),
            note: "no answer".into(),
            obstacle: None,
        }
    }

    fn act(rung: usize, attempt: u32) -> RecoveryPlan {
        RecoveryPlan::TakeStep { rung, step: Policy::default().ladder[rung], attempt }
    }

    #[test]
    fn ladder_is_climbed_attempt_by_attempt_and_rung_by_rung() {
        use DisruptionKind::{PowerCycle, Reboot, RestartAgent};
        let reenroll = RecoveryPlan::Reenroll { deadline: at(1100) };
        let wait = |until| RecoveryPlan::Wait { until: at(until), reason: "no answer".into() };
        let only_power = AvailableSteps { power_cycle: true, ..AvailableSteps::default() };
        for (name, recovery, steps, now, expected) in [
            ("silent", None, ALL, 800, act(0, 1)),
            ("silent, only power", None, only_power, 800, act(2, 1)),
            ("just restarted", Some(attempted_recovery(0, RestartAgent, 1)), ALL, 1005, wait(1010)),
            ("restarted, later", Some(attempted_recovery(0, RestartAgent, 1)), ALL, 1020, wait(1100)),
            ("restarted in vain", Some(attempted_recovery(0, RestartAgent, 1)), ALL, 1100, act(0, 2)),
            ("restarted twice", Some(attempted_recovery(0, RestartAgent, 2)), ALL, 1100, act(1, 1)),
            ("rebooting", Some(attempted_recovery(1, Reboot, 1)), ALL, 1005, wait(1010)),
            ("rebooted", Some(attempted_recovery(1, Reboot, 1)), ALL, 1020, reenroll.clone()),
            ("rebooted twice", Some(attempted_recovery(1, Reboot, 2)), ALL, 1200, act(2, 1)),
            ("power cycled", Some(attempted_recovery(2, PowerCycle, 1)), ALL, 1020, reenroll),
            ("no ssh", Some(attempted_recovery(2, PowerCycle, 1)), only_power, 1020, wait(1100)),
        ] {
            assert_eq!(
                plan_recovery(&machine(recovery), &Policy::default(), steps, at(now)),
                expected,
                "{name}"
            );
        }
    }

    #[test]
    fn agent_started_in_the_new_boot_gets_time_to_report() {
        for (name, started, boot, expected) in [
            ("not yet", 0, None, true),
            ("on its way down", 1005, Some("old"), true),
            ("before the reboot", 999, Some("older"), true),
            ("in a boot that is not known", 1015, None, true),
            ("in the new boot", 1015, Some("new"), false),
        ] {
            let mut facts = machine(Some(attempted_recovery(1, DisruptionKind::Reboot, 1)));
            let boot_id = boot.map(str::to_owned);
            facts.agent_started =
                Some(AgentStarted { started_at: at(started), public_key: vec![], boot_id, fence: 1 });
            let plan = plan_recovery(&facts, &Policy::default(), ALL, at(1020));
            assert_eq!(matches!(plan, RecoveryPlan::Reenroll { .. }), expected, "{name}: {plan:?}");
            assert_eq!(matches!(plan, RecoveryPlan::Wait { .. }), !expected, "{name}: {plan:?}");
        }
    }

    #[test]
    fn boot_before_a_step_is_the_newest_one_known() {
        for (name, started, observed, expected) in [
            ("nothing", None, None, None),
            ("never reported", Some((0, Some("a"))), None, Some("a")),
            ("reported since", Some((0, Some("a"))), Some((100, "b")), Some("b")),
            // The agent was restarted after a boot that it never reported from. A last report from that boot must not
            // count as one from the next.
            ("started again", Some((200, Some("c"))), Some((100, "b")), Some("c")),
            ("started again, boot unknown", Some((200, None)), Some((100, "b")), Some("b")),
        ] {
            let mut facts = machine(None);
            facts.agent_started = started.map(|(seconds, boot)| AgentStarted {
                started_at: at(seconds),
                public_key: vec![],
                boot_id: boot.map(str::to_owned),
                fence: 1,
            });
            facts.heartbeat = observed.map(|(seconds, boot)| heartbeat(seconds, boot));
            assert_eq!(facts.last_boot_id(), expected, "{name}");
        }
    }

    #[test]
    fn after_the_last_rung_a_person_is_called() {
        let last = machine(Some(attempted_recovery(2, DisruptionKind::PowerCycle, 2)));
        let RecoveryPlan::CallPerson { obstacle, reason } =
            plan_recovery(&last, &Policy::default(), ALL, at(1200))
        else {
            panic!("the ladder goes on");
        };
        assert_eq!(obstacle, Obstacle::LadderExhausted);
        assert_eq!(reason, "tried in vain: restart-agent, reboot, power-cycle; last: no answer");
        let nothing = plan_recovery(&machine(None), &Policy::default(), AvailableSteps::default(), at(1200));
        assert!(matches!(nothing, RecoveryPlan::CallPerson { obstacle: Obstacle::LadderExhausted, .. }));
    }

    #[test]
    fn machine_that_rejects_our_login_is_never_rebooted() {
        use DisruptionKind::{PowerCycle, Reboot, RestartAgent};
        let call = RecoveryPlan::CallPerson {
            obstacle: Obstacle::LoginRefused,
            reason: "it answers, so that nothing stronger is tried: no answer".into(),
        };
        for (name, recovery, expected) in [
            ("a try is left that disturbs nobody", attempted_recovery(0, RestartAgent, 1), act(0, 2)),
            ("none is left", attempted_recovery(0, RestartAgent, 2), call.clone()),
            ("it came back from a reboot", attempted_recovery(1, Reboot, 1), call.clone()),
            ("it came back from the last power cycle", attempted_recovery(2, PowerCycle, 2), call),
        ] {
            let refused = Recovery { obstacle: Some(Obstacle::LoginRefused), ..recovery };
            let plan = plan_recovery(&machine(Some(refused)), &Policy::default(), ALL, at(1100));
            assert_eq!(plan, expected, "{name}");
        }
        let silent = Recovery { obstacle: None, ..attempted_recovery(0, RestartAgent, 2) };
        assert_eq!(plan_recovery(&machine(Some(silent)), &Policy::default(), ALL, at(1100)), act(1, 1));
    }

    #[test]
    fn only_a_proving_report_ends_the_ladder() {
        let plan = |recovery, beat: HeartbeatFact, now| {
            let mut facts = machine(Some(recovery));
            facts.heartbeat = Some(beat);
            plan_recovery(&facts, &Policy::default(), ALL, at(now))
        };
        let reboot = || attempted_recovery(1, DisruptionKind::Reboot, 1);
        let recovered = |plan: &RecoveryPlan| matches!(plan, RecoveryPlan::Recovered { .. });
        assert!(recovered(&plan(
            attempted_recovery(0, DisruptionKind::RestartAgent, 1),
            heartbeat(1003, "old"),
            1005
        )));
        assert!(recovered(&plan(reboot(), heartbeat(1050, "new"), 1055)));
        // A last report on the way down, and one that was under way when the step was taken.
        assert!(!recovered(&plan(reboot(), heartbeat(1003, "old"), 1055)));
        assert!(!recovered(&plan(reboot(), heartbeat(999, "new"), 1055)));
        // The reboot never happened, and the machine is well.
        assert!(recovered(&plan(reboot(), heartbeat(1090, "old"), 1100)));
    }

    #[test]
    fn machine_that_reports_again_needs_no_ladder() {
        let plan = plan_recovery(&machine(None), &Policy::default(), ALL, at(300));
        assert!(matches!(plan, RecoveryPlan::Recovered { .. }));
    }

    #[test]
    fn machine_with_an_unknown_fence_gets_no_order_but_may_recover() {
        let newer = UnknownFence { reported_at: at(0), fence: 20 };
        let call = RecoveryPlan::CallPerson { obstacle: Obstacle::StaleFence, reason: newer.describe() };
        let wait = RecoveryPlan::Wait { until: at(9), reason: "no answer".into() };
        let recovered = RecoveryPlan::Recovered { how: "it reported".into() };
        let exhausted =
            RecoveryPlan::CallPerson { obstacle: Obstacle::LadderExhausted, reason: "in vain".into() };
        let reenroll = RecoveryPlan::Reenroll { deadline: at(9) };
        for (plan, held) in [
            (act(0, 1), &call),
            (act(1, 1), &call),
            (act(2, 2), &call),
            (reenroll, &call),
            (wait.clone(), &wait),
            (recovered.clone(), &recovered),
            (exhausted.clone(), &exhausted),
        ] {
            assert_eq!(block_on_unknown_fence(plan.clone(), Some(&newer)), *held);
            assert_eq!(block_on_unknown_fence(plan.clone(), None), plan);
        }
    }

    #[test]
    fn checks_come_at_a_tenth_of_the_limit() {
        let look = |limit| (next_check_time(at(0), at(1000), limit) - at(0)).num_seconds();
        assert_eq!(look(Span::seconds(5)), 2);
        assert_eq!(look(Span::seconds(100)), 10);
        assert_eq!(look(Span::hours(1)), 60);
    }
}
