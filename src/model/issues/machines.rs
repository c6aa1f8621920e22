//! What is wrong with one machine, by its own facts.

use crate::model::facts::HoldScope;
use crate::model::issues::evidence::{Evidence, LATELY, MachineEvidence};
use crate::model::issues::{Issue, Kind};
use crate::model::needs_human::Obstacle;
use crate::model::phase::{Phase, phase_of, silent_from};
use crate::model::provider_status::ProviderStatus;
use crate::model::shell_words;
use crate::model::telling::rough;
use crate::model::time::{Span, Timestamp, between};

/// Boots within [`LATELY`] that nobody ordered and that are no accident any more.
const CRASHES: u32 = 3;
/// Sessions in a row lost on one machine that are no accident any more.
const LOSSES: i64 = 3;

/// Everything of this kind.
pub(super) fn found(evidence: &Evidence) -> Vec<Issue> {
    evidence.machines.iter().flat_map(|machine| of_machine(machine, evidence)).collect()
}

fn of_machine(machine: &MachineEvidence, evidence: &Evidence) -> Vec<Issue> {
    if let Some(retirement) = &machine.facts.retirement {
        // Its provider is not told to take it back before this is settled.
        let told = newer_fence(machine).filter(|_| retirement.finished_at.is_none());
        return told.filter(|_| machine.newer_fence.is_some()).into_iter().collect();
    }
    let rules = [
        needs_human(machine),
        host_key_changed(machine),
        newer_fence(machine),
        silent(machine, evidence),
        crash_loop(machine),
        discrepancy(machine),
        work_fails(machine, evidence),
        lost_workers(machine),
        drift(machine),
    ];
    rules.into_iter().flatten().collect()
}

fn word(machine: &MachineEvidence) -> String {
    shell_words::word(&machine.name().short())
}

/// `shepherdctl why M`, which says more of a machine than any issue.
fn ask_why(machine: &MachineEvidence, then: &str) -> String {
    format!("`shepherdctl why {}` says what it waits for; {then}", word(machine))
}

fn needs_human(machine: &MachineEvidence) -> Option<Issue> {
    let waiting = machine.facts.needs_human.as_ref()?;
    // Either has an issue of its own, which says more; but a key that was allowed since has none any more.
    let told_elsewhere = match waiting.obstacle {
        Obstacle::HostKeyChanged => machine.host_key_refused_at.is_some(),
        Obstacle::StaleFence => true,
        _ => false,
    };
    if told_elsewhere {
        return None;
    }
    let remedy = format!(
        "help it as `shepherdctl why {0}` says, then `shepherdctl retry {0}`; it is taken back by itself when its \
         agent reports again",
        word(machine)
    );
    let evidence = format!("it waits for a person ({}): {}", waiting.obstacle, waiting.reason);
    Some(Issue::of(Kind::NeedsHuman, &machine.name(), evidence, Some(waiting.since), remedy))
}

fn host_key_changed(machine: &MachineEvidence) -> Option<Issue> {
    let refused_at = machine.host_key_refused_at?;
    let evidence =
        "it showed another SSH host key than the pinned one: it was reinstalled or replaced, or something \
                    else answers at its address"
            .to_owned();
    let remedy = ask_why(
        machine,
        "compare the key with the one on the machine's console, then allow it with the command that `why` shows",
    );
    Some(Issue::of(Kind::HostKeyChanged, &machine.name(), evidence, Some(refused_at), remedy))
}

fn newer_fence(machine: &MachineEvidence) -> Option<Issue> {
    let waiting = machine.facts.needs_human.as_ref();
    let waiting = waiting.filter(|waiting| waiting.obstacle == Obstacle::StaleFence);
    let (since, evidence, remedy) = match (&machine.newer_fence, waiting) {
        (Some(newer), _) => (
            newer.heard,
            format!(
                "its agent has seen fence {}, which this database never gave: nothing is ordered of it",
                newer.fence
            ),
            "find out whether this database was restored from a backup; if so stop every shepherd and `shepherdctl \
             declare restored`; if not, another database works on the same machine"
                .to_owned(),
        ),
        // The fences were lifted since, and it was left where it was.
        (None, Some(waiting)) => (
            waiting.since,
            format!("it waits for a person ({}): {}", waiting.obstacle, waiting.reason),
            ask_why(machine, &format!("once that is settled, `shepherdctl retry {}`", word(machine))),
        ),
        (None, None) => return None,
    };
    Some(Issue::of(Kind::NewerFence, &machine.name(), evidence, Some(since), remedy))
}

/// Silent, and not yet left to a person. While nobody listens, nobody is silent: there is an issue for that.
fn silent(machine: &MachineEvidence, evidence: &Evidence) -> Option<Issue> {
    let (facts, policy, now) = (&machine.facts, &evidence.policy, evidence.at);
    let phase = phase_of(facts, policy, now);
    let since = match phase {
        Phase::Silent => silent_from(facts, policy)?,
        Phase::Recovering => facts.recovery.as_ref()?.started_at,
        _ => return None,
    };
    let heard = facts.heartbeat.as_ref().map_or_else(
        || "its agent has never reported".to_owned(),
        |heartbeat| format!("its agent last reported {} ago", rough(between(heartbeat.at, now))),
    );
    let held = facts.hold.as_ref().filter(|hold| hold.holds_at(now) && hold.scope != HoldScope::Power);
    let evidence = match (&facts.recovery, held) {
        (Some(recovery), _) => format!("{heard}; {}", recovery.note),
        (None, Some(hold)) => format!("{heard}; {} holds it, so that it is not brought back", hold.by),
        (None, None) => heard,
    };
    let remedy =
        ask_why(machine, "it is brought back step by step, and a person is called if that is in vain");
    Some(Issue::of(Kind::SilentAgent, &machine.name(), evidence, Some(since), remedy))
}

fn crash_loop(machine: &MachineEvidence) -> Option<Issue> {
    let boots = machine.lately.boots;
    if boots < CRASHES {
        return None;
    }
    let evidence = format!("it reported from {boots} new boots within {}", Span(LATELY));
    let remedy = format!(
        "look at its console and power; `shepherdctl hold {0} --reason …` keeps recovery from it meanwhile, and \
         `shepherdctl timeline {0}` tells each boot",
        word(machine)
    );
    Some(Issue::of(Kind::CrashLoop, &machine.name(), evidence, machine.lately.first_boot_at, remedy))
}

fn discrepancy(machine: &MachineEvidence) -> Option<Issue> {
    let facts = &machine.facts;
    if let Some(quarantine) = &facts.quarantine {
        let remedy = format!(
            "put right what is wrong at the provider, then `shepherdctl release {} --quarantine`",
            word(machine)
        );
        let evidence = format!("it is left alone: {}", quarantine.reason);
        let since = Some(quarantine.since);
        return Some(Issue::of(Kind::ProviderDiscrepancy, &machine.name(), evidence, since, remedy));
    }
    let provided = facts.provided.as_ref()?;
    let evidence = match provided.status {
        ProviderStatus::Missing => format!("provider {} does not know it any more", provided.provider),
        ProviderStatus::ProvisioningFailedPermanent => {
            format!("provider {} gave up making it ready", provided.provider)
        }
        _ => return None,
    };
    let remedy =
        "see what the provider says of it; what it has for good may be taken off its books".to_owned();
    Some(Issue::of(Kind::ProviderDiscrepancy, &machine.name(), evidence, provided.looked_at, remedy))
}

fn work_fails(machine: &MachineEvidence, evidence: &Evidence) -> Option<Issue> {
    let often = evidence.policy.low_priority_after_failures;
    let worst = machine.facts.backoffs.iter().filter(|(_, fact)| fact.failures >= often.max(1));
    let (process, fact) = worst.max_by_key(|(_, fact)| fact.failures)?;
    let text = format!("{process} failed {} times in a row: {}", fact.failures, fact.cause);
    let remedy = format!(
        "remove the cause, then `shepherdctl retry {}`; else it is tried again {}",
        word(machine),
        if fact.until > evidence.at {
            format!("in {}", rough(between(evidence.at, fact.until)))
        } else {
            "as soon as a worker is free".to_owned()
        }
    );
    Some(Issue::of(Kind::WorkFails, &machine.name(), text, None, remedy))
}

fn lost_workers(machine: &MachineEvidence) -> Option<Issue> {
    if machine.losses < LOSSES {
        return None;
    }
    let evidence = format!(
        "whoever worked on it was lost {} times in a row: crashed, or cut off from the database",
        machine.losses
    );
    let remedy = format!(
        "read the logs of the shepherds that `shepherdctl timeline {0}` names; `shepherdctl hold {0} --reason …` keeps \
         others from it",
        word(machine)
    );
    Some(Issue::of(Kind::LostWorkers, &machine.name(), evidence, None, remedy))
}

fn drift(machine: &MachineEvidence) -> Option<Issue> {
    let drift = machine.drift.clone()?;
    let remedy =
        "the next sweep repairs it, within a minute where a shepherd runs; if it comes back, it is a defect \
                  of ours: please report it with this line"
            .to_owned();
    Some(Issue::of(Kind::Drift, &machine.name(), drift, None::<Timestamp>, remedy))
}
