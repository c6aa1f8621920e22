//! Issues of machines being retired: stuck, or still listed.

use crate::facts::{Retirement, current_wait};
use crate::humanize::humanize_duration;
use crate::issues::inputs::{IssueInputs, MachineIssueInputs};
use crate::issues::{Issue, IssueKind};
use crate::pause::{LoopKind, active_pauses};
use crate::process::Process;
use crate::retirement::{RetirementStep, retirement_state, wait_reason};
use crate::shell_words;
use crate::time::between;

/// All issues of this file.
pub(super) fn find_issues(evidence: &IssueInputs) -> Vec<Issue> {
    let leaving = evidence.machines.iter().filter_map(|machine| {
        let retirement = machine.facts.retirement.as_ref()?;
        retirement_stuck(machine, retirement, evidence).or_else(|| retired_but_listed(machine, retirement))
    });
    leaving.collect()
}

/// Issue: the retirement is at a stage that is blocked or overdue.
fn retirement_stuck(
    machine: &MachineIssueInputs,
    retirement: &Retirement,
    evidence: &IssueInputs,
) -> Option<Issue> {
    let present = retirement_state(retirement, &evidence.policy);
    let overdue = present.deadline.filter(|deadline| *deadline <= evidence.at);
    let stage = present.stage;
    let why = match &present.step {
        RetirementStep::Finished => return None,
        RetirementStep::Blocked { why } => (*why).to_owned(),
        RetirementStep::Release | RetirementStep::RetryRelease(_) => {
            release_obstacle(machine, retirement, evidence)
        }
    };
    let late = match (overdue, &present.step) {
        (Some(deadline), _) => format!(", overdue for {}", humanize_duration(between(deadline, evidence.at))),
        (None, RetirementStep::Blocked { .. }) => String::new(),
        (None, _) => return None,
    };
    let word = shell_words::quote_if_needed(&machine.name().short_name());
    let cancel = match retirement.release {
        None => format!(", or keep the machine: `shepherdctl retire cancel {word}`"),
        Some(_) => String::new(),
    };
    let remedy = format!(
        "remove the cause; if that is impossible, waive the stage: `shepherdctl retire waive {word} {stage} \
         --confirm … --reason …`{cancel}"
    );
    let text = format!("its retirement is at the stage {stage}{late}: {why}");
    Some(Issue::for_machine(IssueKind::RetirementStuck, &machine.name(), text, Some(present.since), remedy))
}

/// Why its provider does not take it back yet; the first reason found.
fn release_obstacle(machine: &MachineIssueInputs, retirement: &Retirement, evidence: &IssueInputs) -> String {
    let (facts, now) = (&machine.facts, evidence.at);
    if let Some(hold) = facts.hold.as_ref().filter(|hold| hold.is_active_at(now)) {
        return format!("{} holds it: {}", hold.by, hold.reason);
    }
    let provider = facts.provider_record.as_ref().map_or("", |provided| provided.provider.as_str());
    if let Some(pause) = active_pauses(&evidence.pauses, LoopKind::Retirer, provider, now).next() {
        return format!("{} (`{}`)", pause.describe(now), pause.resume_command());
    }
    if let Some((_, reason)) = current_wait(facts, Process::Retirement) {
        return reason;
    }
    if !evidence.sessions.iter().any(|session| session.component == LoopKind::Retirer.as_str()) {
        return "no shepherd runs a retirer".to_owned();
    }
    wait_reason(retirement, &retirement_state(retirement, &evidence.policy))
}

/// Issue: the machine is retired, but its provider still lists it.
fn retired_but_listed(machine: &MachineIssueInputs, retirement: &Retirement) -> Option<Issue> {
    let since = retirement.listed_since?;
    let text = format!(
        "it is retired ({}), but its provider still lists it; no shepherd adopts it again, and its \
         heartbeats are rejected",
        retirement.outcome.as_deref().unwrap_or("done")
    );
    let remedy =
        "return it at the provider, or remove it from the device list; to use it again, have the provider give \
         it another id"
            .to_owned();
    Some(Issue::for_machine(IssueKind::RetiredListed, &machine.name(), text, Some(since), remedy))
}
