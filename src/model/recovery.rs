//! The recovery ladder: what to do next for a machine that fell silent.
//!
//! Each rung is a step with a number of tries, and each try has a deadline by
//! which the machine must have reported. Rungs that this machine's provider
//! cannot do are passed over. Above the last rung stands a person.
//!
//! A heartbeat is the only proof of success, and not every one: after a step
//! that reboots, it must come from another boot than the one known before,
//! because a machine may well report once more while it shuts down. Only when
//! the deadline has passed does a report from the old boot count, as proof that
//! the machine needs no further step.
//!
//! A machine that answers, and then refuses us, is not climbed further on: its
//! fault is our key, our program or our records, and no reboot mends those. What
//! disturbs nobody is tried as often as the ladder says; then a person is called.

use crate::model::facts::{Acted, MachineFacts, Recovery};
use crate::model::needs_human::Obstacle;
use crate::model::newer_fence::NewerFence;
use crate::model::phase::silent_from;
use crate::model::policy::{Disturbance, Policy, Rung};
use crate::model::time::{Span, Timestamp, after, between};

/// Which steps can be taken for one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Steps {
    /// It has an address to reach by SSH.
    pub restart_agent: bool,
    /// Its provider, or its operating system, can be asked for a reboot.
    pub reboot: bool,
    /// Its provider switches its power.
    pub power_cycle: bool,
}

impl Steps {
    /// Whether `step` can be taken.
    #[must_use]
    pub const fn can(self, step: Disturbance) -> bool {
        match step {
            Disturbance::RestartAgent => self.restart_agent,
            Disturbance::Reboot => self.reboot,
            Disturbance::PowerCycle => self.power_cycle,
        }
    }
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecoveryPlan {
    /// The machine reports: the ladder is over.
    Recovered {
        /// How it came back, for people.
        how: String,
    },
    /// Take a step.
    Act {
        /// Index into the policy's ladder.
        rung: usize,
        /// The step and its limits.
        what: Rung,
        /// Which try of this rung, from 1.
        attempt: u32,
    },
    /// The machine was rebooted and may be up without an agent: put one on it again.
    Reenroll {
        /// The try under way fails at this time.
        deadline: Timestamp,
    },
    /// Look again later.
    Wait {
        /// When.
        until: Timestamp,
        /// What is waited for.
        reason: String,
    },
    /// Nothing is left to try, or nothing that we may: a person is called.
    CallPerson {
        /// What stands in the way.
        obstacle: Obstacle,
        /// What was tried, and what a person can do.
        reason: String,
    },
}

/// What comes next for a machine with a silent agent or a ladder under way.
#[must_use]
pub fn plan_recovery(facts: &MachineFacts, policy: &Policy, steps: Steps, now: Timestamp) -> RecoveryPlan {
    let Some(recovery) = &facts.recovery else {
        return match silent_from(facts, policy) {
            Some(silent) if silent <= now => first_rung(policy, steps),
            _ => RecoveryPlan::Recovered { how: "it reported before anything was done".to_owned() },
        };
    };
    if let Some(how) = proof_of_life(facts, recovery, now) {
        return RecoveryPlan::Recovered { how };
    }
    let Some(acted) = &recovery.acted else { return climb(recovery, policy, steps) };
    if now >= acted.deadline {
        return climb(recovery, policy, steps);
    }
    if recovery.next_at > now {
        return RecoveryPlan::Wait { until: recovery.next_at, reason: recovery.note.clone() };
    }
    if acted.step.reboots() && steps.restart_agent && !enrolled_since(facts, acted) {
        return RecoveryPlan::Reenroll { deadline: acted.deadline };
    }
    RecoveryPlan::Wait { until: acted.deadline, reason: recovery.note.clone() }
}

/// What becomes of a plan for a machine that has seen a fence which we never gave: nothing is ordered of it,
/// and a person is called. Not even its agent is started anew, because what it refuses today it would accept
/// after enough tries, and a provider that switches power knows no fences.
#[must_use]
pub fn hold_back(plan: RecoveryPlan, newer: Option<&NewerFence>) -> RecoveryPlan {
    match (plan, newer) {
        (RecoveryPlan::Act { .. } | RecoveryPlan::Reenroll { .. }, Some(newer)) => {
            RecoveryPlan::CallPerson { obstacle: Obstacle::StaleFence, reason: newer.sentence() }
        }
        (plan, _) => plan,
    }
}

/// Whether an agent was put on the machine in the boot that a step brought. Then it is that agent's
/// turn: putting it there again would stop it, and with a short deadline, where looks come every two
/// seconds, it would be stopped each time before it could report.
fn enrolled_since(facts: &MachineFacts, acted: &Acted) -> bool {
    facts.agent_started.as_ref().is_some_and(|agent| {
        // An enrolment may also catch the machine on its way down.
        let other_boot = agent.boot_id.is_some() && agent.boot_id != acted.boot_id_before;
        agent.at > acted.at && other_boot
    })
}

/// When to look at a machine again after a step that gave it `limit`: a tenth of that, so that one that is
/// back early is not left waiting, but no more often than every two seconds.
#[must_use]
pub fn look_again(now: Timestamp, deadline: Timestamp, limit: Span) -> Timestamp {
    let pause = (limit.0 / 10).clamp(std::time::Duration::from_secs(2), std::time::Duration::from_mins(1));
    after(now, pause).min(deadline)
}

/// The ladder with a step that is about to be taken at `now`: what is recorded before anything is done.
#[must_use]
pub fn begun(
    facts: &MachineFacts,
    rung: usize,
    step: Disturbance,
    limit: Span,
    attempt: u32,
    now: Timestamp,
) -> Recovery {
    Recovery {
        started_at: facts.recovery.as_ref().map_or(now, |recovery| recovery.started_at),
        rung,
        acted: Some(Acted {
            step,
            at: now,
            deadline: after(now, limit.0),
            boot_id_before: facts.known_boot().map(ToOwned::to_owned),
        }),
        tries: attempt,
        next_at: now,
        note: format!("about to {} (try {attempt})", step.phrase()),
        obstacle: None,
    }
}

/// What was tried, for people: the beginning of a note.
#[must_use]
pub fn tried(what: Rung, attempt: u32) -> String {
    format!("tried to {} (try {attempt} of {})", what.step.phrase(), what.tries)
}

/// The ladder after a step was taken, by `now`: its machine has the step's whole deadline to report.
#[must_use]
pub fn taken(begun: Recovery, what: Rung, note: String, now: Timestamp) -> Recovery {
    let deadline = begun.acted.as_ref().map_or(now, |acted| acted.deadline);
    Recovery { next_at: look_again(now, deadline, what.deadline), note, ..begun }
}

/// The ladder after an agent was put, or could not be put, on a machine that a step of it rebooted.
#[must_use]
pub fn reenrolled(
    recovery: Recovery,
    acted: &Acted,
    note: String,
    obstacle: Option<Obstacle>,
    now: Timestamp,
) -> Recovery {
    let next_at = look_again(now, acted.deadline, Span(between(acted.at, acted.deadline)));
    Recovery { next_at, note, obstacle, ..recovery }
}

/// How the machine came back, if a heartbeat proves that it did.
#[must_use]
pub fn proof_of_life(facts: &MachineFacts, recovery: &Recovery, now: Timestamp) -> Option<String> {
    let heartbeat = facts.heartbeat.as_ref()?;
    match &recovery.acted {
        None => {
            (heartbeat.at > recovery.started_at).then(|| "it reported before anything was done".to_owned())
        }
        Some(acted) if heartbeat.at <= acted.at => None,
        Some(Acted { step, boot_id_before, deadline, .. }) => {
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

fn first_rung(policy: &Policy, steps: Steps) -> RecoveryPlan {
    rung_from(policy, steps, 0, "nothing could be tried")
}

fn climb(recovery: &Recovery, policy: &Policy, steps: Steps) -> RecoveryPlan {
    let plan = match policy.rung(recovery.rung) {
        Some(what) if steps.can(what.step) && recovery.tries < what.tries => {
            RecoveryPlan::Act { rung: recovery.rung, what, attempt: recovery.tries + 1 }
        }
        _ => rung_from(policy, steps, recovery.rung + 1, &recovery.note),
    };
    let Some(obstacle) = &recovery.obstacle else { return plan };
    match plan {
        RecoveryPlan::Act { what, .. } if !what.step.reboots() => plan,
        _ => RecoveryPlan::CallPerson {
            obstacle: obstacle.clone(),
            reason: format!("it answers, so that nothing stronger is tried: {}", recovery.note),
        },
    }
}

fn rung_from(policy: &Policy, steps: Steps, start: usize, note: &str) -> RecoveryPlan {
    let next =
        policy.ladder.iter().enumerate().skip(start).find(|(_, what)| what.tries > 0 && steps.can(what.step));
    if let Some((rung, what)) = next {
        return RecoveryPlan::Act { rung, what: *what, attempt: 1 };
    }
    let tried: Vec<&str> = policy
        .ladder
        .iter()
        .take(start)
        .filter(|what| steps.can(what.step))
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
    use crate::model::facts::{AgentStarted, Heartbeat};
    use crate::model::ids::MachineId;

    const ALL: Steps = Steps { restart_agent: true, reboot: true, power_cycle: true };

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    /// Heartbeat at 100 from boot `old`, silent limit ten minutes.
    fn machine(recovery: Option<Recovery>) -> MachineFacts {
        let mut facts = MachineFacts::unknown(MachineId::generate(), at(0));
        facts.listening_since = Some(at(0));
        facts.agent_started = Some(AgentStarted { at: at(0), public_key: vec![], boot_id: None, fence: 1 });
        facts.heartbeat = Some(heartbeat(100, "old"));
        facts.recovery = recovery;
        facts
    }

    fn heartbeat(seconds: i64, boot: &str) -> Heartbeat {
        Heartbeat { at: at(seconds), boot_id: boot.into(), incarnation: "i".into(), sequence: seconds }
    }

    /// A try of `rung` taken at 1000 with its deadline at 1100, looked at again at 1010.
    fn tried(rung: usize, step: Disturbance, tries: u32) -> Recovery {
        Recovery {
            started_at: at(900),
            rung,
            acted: Some(Acted { step, at: at(1000), deadline: at(1100), boot_id_before: Some("old".into()) }),
            tries,
            next_at: at(1010),
            note: "no answer".into(),
            obstacle: None,
        }
    }

    fn act(rung: usize, attempt: u32) -> RecoveryPlan {
        RecoveryPlan::Act { rung, what: Policy::default().ladder[rung], attempt }
    }

    #[test]
    fn ladder_is_climbed_try_by_try_and_rung_by_rung() {
        use Disturbance::{PowerCycle, Reboot, RestartAgent};
        let reenroll = RecoveryPlan::Reenroll { deadline: at(1100) };
        let wait = |until| RecoveryPlan::Wait { until: at(until), reason: "no answer".into() };
        let only_power = Steps { power_cycle: true, ..Steps::default() };
        for (name, recovery, steps, now, expected) in [
            ("silent", None, ALL, 800, act(0, 1)),
            ("silent, only power", None, only_power, 800, act(2, 1)),
            ("just restarted", Some(tried(0, RestartAgent, 1)), ALL, 1005, wait(1010)),
            ("restarted, later", Some(tried(0, RestartAgent, 1)), ALL, 1020, wait(1100)),
            ("restarted in vain", Some(tried(0, RestartAgent, 1)), ALL, 1100, act(0, 2)),
            ("restarted twice", Some(tried(0, RestartAgent, 2)), ALL, 1100, act(1, 1)),
            ("rebooting", Some(tried(1, Reboot, 1)), ALL, 1005, wait(1010)),
            ("rebooted", Some(tried(1, Reboot, 1)), ALL, 1020, reenroll.clone()),
            ("rebooted twice", Some(tried(1, Reboot, 2)), ALL, 1200, act(2, 1)),
            ("power cycled", Some(tried(2, PowerCycle, 1)), ALL, 1020, reenroll),
            ("no ssh", Some(tried(2, PowerCycle, 1)), only_power, 1020, wait(1100)),
        ] {
            assert_eq!(
                plan_recovery(&machine(recovery), &Policy::default(), steps, at(now)),
                expected,
                "{name}"
            );
        }
    }

    #[test]
    fn agent_put_on_the_new_boot_is_left_alone_to_report() {
        for (name, started, boot, expected) in [
            ("not yet", 0, None, true),
            ("on its way down", 1005, Some("old"), true),
            ("before the reboot", 999, Some("older"), true),
            ("in a boot that is not known", 1015, None, true),
            ("in the new boot", 1015, Some("new"), false),
        ] {
            let mut facts = machine(Some(tried(1, Disturbance::Reboot, 1)));
            let boot_id = boot.map(str::to_owned);
            facts.agent_started =
                Some(AgentStarted { at: at(started), public_key: vec![], boot_id, fence: 1 });
            let plan = plan_recovery(&facts, &Policy::default(), ALL, at(1020));
            assert_eq!(matches!(plan, RecoveryPlan::Reenroll { .. }), expected, "{name}: {plan:?}");
            assert_eq!(matches!(plan, RecoveryPlan::Wait { .. }), !expected, "{name}: {plan:?}");
        }
    }

    #[test]
    fn boot_before_a_step_is_the_newest_one_known() {
        for (name, started, heard, expected) in [
            ("nothing", None, None, None),
            ("never reported", Some((0, Some("a"))), None, Some("a")),
            ("reported since", Some((0, Some("a"))), Some((100, "b")), Some("b")),
            // Its agent was started anew after a boot that it never reported from: a last report
            // from that boot must not pass for one from the next.
            ("started anew", Some((200, Some("c"))), Some((100, "b")), Some("c")),
            ("started anew, boot not told", Some((200, None)), Some((100, "b")), Some("b")),
        ] {
            let mut facts = machine(None);
            facts.agent_started = started.map(|(seconds, boot)| AgentStarted {
                at: at(seconds),
                public_key: vec![],
                boot_id: boot.map(str::to_owned),
                fence: 1,
            });
            facts.heartbeat = heard.map(|(seconds, boot)| heartbeat(seconds, boot));
            assert_eq!(facts.known_boot(), expected, "{name}");
        }
    }

    #[test]
    fn above_the_last_rung_stands_a_person() {
        let last = machine(Some(tried(2, Disturbance::PowerCycle, 2)));
        let RecoveryPlan::CallPerson { obstacle, reason } =
            plan_recovery(&last, &Policy::default(), ALL, at(1200))
        else {
            panic!("the ladder goes on");
        };
        assert_eq!(obstacle, Obstacle::LadderExhausted);
        assert_eq!(reason, "tried in vain: restart-agent, reboot, power-cycle; last: no answer");
        let nothing = plan_recovery(&machine(None), &Policy::default(), Steps::default(), at(1200));
        assert!(matches!(nothing, RecoveryPlan::CallPerson { obstacle: Obstacle::LadderExhausted, .. }));
    }

    #[test]
    fn machine_that_answers_and_refuses_us_is_never_rebooted_for_it() {
        use Disturbance::{PowerCycle, Reboot, RestartAgent};
        let call = RecoveryPlan::CallPerson {
            obstacle: Obstacle::LoginRefused,
            reason: "it answers, so that nothing stronger is tried: no answer".into(),
        };
        for (name, recovery, expected) in [
            ("a try is left that disturbs nobody", tried(0, RestartAgent, 1), act(0, 2)),
            ("none is left", tried(0, RestartAgent, 2), call.clone()),
            ("it came back from a reboot", tried(1, Reboot, 1), call.clone()),
            ("it came back from the last power cycle", tried(2, PowerCycle, 2), call),
        ] {
            let refused = Recovery { obstacle: Some(Obstacle::LoginRefused), ..recovery };
            let plan = plan_recovery(&machine(Some(refused)), &Policy::default(), ALL, at(1100));
            assert_eq!(plan, expected, "{name}");
        }
        let silent = Recovery { obstacle: None, ..tried(0, RestartAgent, 2) };
        assert_eq!(plan_recovery(&machine(Some(silent)), &Policy::default(), ALL, at(1100)), act(1, 1));
    }

    #[test]
    fn only_a_report_that_proves_it_ends_the_ladder() {
        let plan = |recovery, beat: Heartbeat, now| {
            let mut facts = machine(Some(recovery));
            facts.heartbeat = Some(beat);
            plan_recovery(&facts, &Policy::default(), ALL, at(now))
        };
        let reboot = || tried(1, Disturbance::Reboot, 1);
        let recovered = |plan: &RecoveryPlan| matches!(plan, RecoveryPlan::Recovered { .. });
        assert!(recovered(&plan(tried(0, Disturbance::RestartAgent, 1), heartbeat(1003, "old"), 1005)));
        assert!(recovered(&plan(reboot(), heartbeat(1050, "new"), 1055)));
        // A last report on the way down, and one that was under way when we acted.
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
    fn machine_that_has_seen_a_newer_fence_is_given_no_order_and_its_report_still_counts() {
        let newer = NewerFence { heard: at(0), fence: 20 };
        let call = RecoveryPlan::CallPerson { obstacle: Obstacle::StaleFence, reason: newer.sentence() };
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
            assert_eq!(hold_back(plan.clone(), Some(&newer)), *held);
            assert_eq!(hold_back(plan.clone(), None), plan);
        }
    }

    #[test]
    fn looks_come_at_a_tenth_of_the_limit() {
        let look = |limit| (look_again(at(0), at(1000), limit) - at(0)).num_seconds();
        assert_eq!(look(Span::seconds(5)), 2);
        assert_eq!(look(Span::seconds(100)), 10);
        assert_eq!(look(Span::hours(1)), 60);
    }
}
