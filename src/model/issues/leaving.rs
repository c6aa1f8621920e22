//! What is wrong with a machine on its way out, or out: that it does not leave.

use crate::model::facts::{Retirement, wait_of};
use crate::model::issues::evidence::{Evidence, MachineEvidence};
use crate::model::issues::{Issue, Kind};
use crate::model::pause::{Loop, holding};
use crate::model::process::Process;
use crate::model::retirement::{Step, next, waits_for};
use crate::model::shell_words;
use crate::model::telling::rough;
use crate::model::time::between;

/// Everything of this kind.
pub(super) fn found(evidence: &Evidence) -> Vec<Issue> {
    let leaving = evidence.machines.iter().filter_map(|machine| {
        let retirement = machine.facts.retirement.as_ref()?;
        stuck(machine, retirement, evidence).or_else(|| listed(machine, retirement))
    });
    leaving.collect()
}

/// It stands at a stage that nobody can do, or that is overdue.
fn stuck(machine: &MachineEvidence, retirement: &Retirement, evidence: &Evidence) -> Option<Issue> {
    let present = next(retirement, &evidence.policy);
    let overdue = present.deadline.filter(|deadline| *deadline <= evidence.at);
    let stage = present.stage;
    let why = match &present.step {
        Step::Over => return None,
        Step::Stuck { why } => (*why).to_owned(),
        Step::Release | Step::ReleaseAgain(_) => waits(machine, retirement, evidence),
    };
    let late = match (overdue, &present.step) {
        (Some(deadline), _) => format!(", overdue for {}", rough(between(deadline, evidence.at))),
        (None, Step::Stuck { .. }) => String::new(),
        (None, _) => return None,
    };
    let word = shell_words::word(&machine.name().short());
    let cancel = match retirement.release {
        None => format!(", or let it stay: `shepherdctl retire cancel {word}`"),
        Some(_) => String::new(),
    };
    let remedy = format!(
        "remove the cause; where that cannot be, waive the stage: `shepherdctl retire waive {word} {stage} --i_know … \
         --reason …`{cancel}"
    );
    let said = format!("its retirement stands at the stage {stage}{late}: {why}");
    Some(Issue::of(Kind::RetirementStuck, &machine.name(), said, Some(present.since), remedy))
}

/// What keeps its provider from taking it back, the nearest first.
fn waits(machine: &MachineEvidence, retirement: &Retirement, evidence: &Evidence) -> String {
    let (facts, now) = (&machine.facts, evidence.at);
    if let Some(hold) = facts.hold.as_ref().filter(|hold| hold.holds_at(now)) {
        return format!("{} holds it: {}", hold.by, hold.reason);
    }
    let provider = facts.provided.as_ref().map_or("", |provided| provided.provider.as_str());
    if let Some(pause) = holding(&evidence.pauses, Loop::Retirer, provider, now).next() {
        return format!("{} (`{}`)", pause.sentence(now), pause.resume());
    }
    if let Some((_, reason)) = wait_of(facts, Process::Retirement) {
        return reason;
    }
    if !evidence.sessions.iter().any(|session| session.component == Loop::Retirer.as_str()) {
        return "no shepherd runs a retirer".to_owned();
    }
    waits_for(retirement, &next(retirement, &evidence.policy))
}

/// It is retired, and its provider has it in its list all the same.
fn listed(machine: &MachineEvidence, retirement: &Retirement) -> Option<Issue> {
    let since = retirement.listed_since?;
    let said = format!(
        "it is retired ({}), and its provider lists it; it is not taken again, and its agent is not heard",
        retirement.outcome.as_deref().unwrap_or("done")
    );
    let remedy =
        "give it back at the provider, or take it off the device list; to use it again, let the provider \
                  name it anew"
            .to_owned();
    Some(Issue::of(Kind::RetiredListed, &machine.name(), said, Some(since), remedy))
}
