//! Issues of single machines.

use std::time::Duration;

use crate::facts::HoldScope;
use crate::host_finding::HostFindingKind;
use crate::humanize::humanize_duration;
use crate::issues::inputs::{HISTORY_WINDOW, IssueInputs, MachineIssueInputs};
use crate::issues::{Issue, IssueKind};
use crate::needs_human::Obstacle;
use crate::phase::{Phase, phase_of, silence_deadline};
use crate::process::Process;
use crate::provider_status::ProviderStatus;
use crate::shell_words;
use crate::time::{Span, Timestamp, between};

/// Boots within [`HISTORY_WINDOW`] that nobody ordered, from which on they count as a crash loop.
const CRASH_LOOP_BOOTS: u32 = 3;
/// How long a machine may report a problem of its node. Some end by themselves within seconds.
const NODE_PROBLEM_AFTER: Duration = Duration::from_mins(2);
/// Consecutive sessions lost on one machine, from which on they count as no accident.
const MAX_LOST_SESSIONS: i64 = 3;

/// All issues of this file.
pub(super) fn find_issues(evidence: &IssueInputs) -> Vec<Issue> {
    evidence.machines.iter().flat_map(|machine| machine_issues(machine, evidence)).collect()
}

fn machine_issues(machine: &MachineIssueInputs, evidence: &IssueInputs) -> Vec<Issue> {
    if let Some(retirement) = &machine.facts.retirement {
        // An unknown fence stops the release to the provider, so it is reported for a retiring machine too.
        let issue = unknown_fence(machine).filter(|_| retirement.finished_at.is_none());
        return issue.filter(|_| machine.unknown_fence.is_some()).into_iter().collect();
    }
    let rules = [
        needs_human(machine),
        host_key_changed(machine),
        unknown_fence(machine),
        silent_agent(machine, evidence),
        crash_loop(machine),
        node_problem(machine, evidence.at),
        provider_discrepancy(machine),
        failing_work(machine, evidence),
        lost_workers(machine),
        drift(machine),
        workloads_end_with_agent(machine),
        agent_unit(machine),
        curator_connections(machine),
        storage_low(machine),
        unpinned_keys(machine),
        release_refused(machine),
        declaration_refused(machine),
    ];
    rules.into_iter().flatten().collect()
}

fn quoted_name(machine: &MachineIssueInputs) -> String {
    shell_words::quote_if_needed(&machine.name().short_name())
}

/// `shepherdctl why M`, which explains more of a machine than any issue.
fn why_remedy(machine: &MachineIssueInputs, then: &str) -> String {
    format!("`shepherdctl why {}` says what it waits for; {then}", quoted_name(machine))
}

fn needs_human(machine: &MachineIssueInputs) -> Option<Issue> {
    let waiting = machine.facts.needs_human.as_ref()?;
    // Both obstacles have an issue of their own, which explains more. A key that was allowed since then has none any
    // more.
    let notified_elsewhere = match waiting.obstacle {
        Obstacle::HostKeyChanged => machine.host_key_rejected_at.is_some(),
        Obstacle::StaleFence => true,
        _ => false,
    };
    if notified_elsewhere {
        return None;
    }
    let remedy = format!(
        "do what `shepherdctl why {0}` suggests, then run `shepherdctl retry {0}`; it returns automatically when \
         its agent reports again",
        quoted_name(machine)
    );
    let evidence = format!("it waits for a person ({}): {}", waiting.obstacle, waiting.reason);
    Some(Issue::for_machine(IssueKind::NeedsHuman, &machine.name(), evidence, Some(waiting.since), remedy))
}

fn host_key_changed(machine: &MachineIssueInputs) -> Option<Issue> {
    let refused_at = machine.host_key_rejected_at?;
    let evidence =
        "it showed another SSH host key than the pinned one: it was reinstalled or replaced, or something \
                    else answers at its address"
            .to_owned();
    let remedy = why_remedy(
        machine,
        "compare the key with the one on the machine's console, then allow it with the command that `why` shows",
    );
    Some(Issue::for_machine(IssueKind::HostKeyChanged, &machine.name(), evidence, Some(refused_at), remedy))
}

/// Issue: the machine reports a problem of its node, such as a program that would end with the role server.
fn node_problem(machine: &MachineIssueInputs, now: Timestamp) -> Option<Issue> {
    let (problem, since) = machine.node_problem.as_ref()?;
    if between(*since, now) < NODE_PROBLEM_AFTER {
        return None;
    }
    let evidence = format!("it reports about its node: {problem}");
    let remedy = why_remedy(machine, "`roleserver status` on the machine says which part is concerned");
    Some(Issue::for_machine(IssueKind::NodeProblem, &machine.name(), evidence, Some(*since), remedy))
}

fn unknown_fence(machine: &MachineIssueInputs) -> Option<Issue> {
    let waiting = machine.facts.needs_human.as_ref();
    let waiting = waiting.filter(|waiting| waiting.obstacle == Obstacle::StaleFence);
    let (since, evidence, remedy) = match (&machine.unknown_fence, waiting) {
        (Some(newer), _) => (
            newer.reported_at,
            format!(
                "its agent has seen fence {}, which this database never issued: it receives no orders",
                newer.fence
            ),
            "find out whether this database was restored from a backup; if so stop every shepherd and `shepherdctl \
             declare restored`; if not, another database works on the same machine"
                .to_owned(),
        ),
        // The fences were lifted since then, but the machine still waits for a person.
        (None, Some(waiting)) => (
            waiting.since,
            format!("it waits for a person ({}): {}", waiting.obstacle, waiting.reason),
            why_remedy(machine, &format!("once that is resolved, `shepherdctl retry {}`", quoted_name(machine))),
        ),
        (None, None) => return None,
    };
    Some(Issue::for_machine(IssueKind::NewerFence, &machine.name(), evidence, Some(since), remedy))
}

/// Silent, and not yet left to a person. While no heartbeats are received no machine counts as silent: that has an
/// issue of its own.
fn silent_agent(machine: &MachineIssueInputs, evidence: &IssueInputs) -> Option<Issue> {
    let (facts, policy, now) = (&machine.facts, &evidence.policy, evidence.at);
    let phase = phase_of(facts, policy, now);
    let since = match phase {
        Phase::Silent => silence_deadline(facts, policy)?,
        Phase::Recovering => facts.recovery.as_ref()?.started_at,
        _ => return None,
    };
    let message = facts.heartbeat.as_ref().map_or_else(
        || "its agent has never reported".to_owned(),
        |heartbeat| {
            format!("its agent last reported {} ago", humanize_duration(between(heartbeat.received_at, now)))
        },
    );
    let held = facts.hold.as_ref().filter(|hold| hold.is_active_at(now) && hold.scope != HoldScope::Power);
    let evidence = match (&facts.recovery, held) {
        (Some(recovery), _) => format!("{message}; {}", recovery.note),
        (None, Some(hold)) => format!("{message}; {} holds it, so it is not recovered", hold.by),
        (None, None) => message,
    };
    let remedy = why_remedy(machine, "recovery takes its steps, and if none helps it waits for a person");
    Some(Issue::for_machine(IssueKind::SilentAgent, &machine.name(), evidence, Some(since), remedy))
}

fn crash_loop(machine: &MachineIssueInputs) -> Option<Issue> {
    let boots = machine.recent.unordered_boots;
    if boots < CRASH_LOOP_BOOTS {
        return None;
    }
    let evidence = format!("it reported from {boots} new boots within {}", Span(HISTORY_WINDOW));
    let remedy = format!(
        "look at its console and power; `shepherdctl hold {0} --reason …` blocks recovery in the meantime, and \
         `shepherdctl timeline {0}` lists each boot",
        quoted_name(machine)
    );
    Some(Issue::for_machine(
        IssueKind::CrashLoop,
        &machine.name(),
        evidence,
        machine.recent.first_boot_at,
        remedy,
    ))
}

fn provider_discrepancy(machine: &MachineIssueInputs) -> Option<Issue> {
    let facts = &machine.facts;
    if let Some(quarantine) = &facts.quarantine {
        let remedy = format!(
            "correct the cause at the provider, then run `shepherdctl release {} --quarantine`",
            quoted_name(machine)
        );
        let evidence = format!("it is left alone: {}", quarantine.reason);
        let since = Some(quarantine.since);
        return Some(Issue::for_machine(
            IssueKind::ProviderDiscrepancy,
            &machine.name(),
            evidence,
            since,
            remedy,
        ));
    }
    let provided = facts.provider_record.as_ref()?;
    let evidence = match provided.status {
        ProviderStatus::Missing => format!("provider {} does not know it any more", provided.provider),
        ProviderStatus::ProvisioningFailedPermanent => {
            format!("provider {} gave up making it ready", provided.provider)
        }
        _ => return None,
    };
    let remedy =
        "check it at the provider's own console; if it is lost permanently, take it out of the fleet with \
         `shepherdctl retire`"
            .to_owned();
    Some(Issue::for_machine(
        IssueKind::ProviderDiscrepancy,
        &machine.name(),
        evidence,
        provided.polled_at,
        remedy,
    ))
}

fn failing_work(machine: &MachineIssueInputs, evidence: &IssueInputs) -> Option<Issue> {
    let often = evidence.policy.low_priority_after_failures.max(1);
    // A machine that never had an agent does nothing until its first takeover, so its first failure is reported.
    let is_new = machine.facts.agent_started.is_none();
    let limit = |process: Process| if is_new && process == Process::AgentStart { 1 } else { often };
    let worst = machine.facts.backoffs.iter().filter(|(process, fact)| fact.failures >= limit(**process));
    let (process, fact) = worst.max_by_key(|(_, fact)| fact.failures)?;
    let times =
        if fact.failures == 1 { "once".to_owned() } else { format!("{} times in a row", fact.failures) };
    let text = format!("{process} failed {times}: {}", fact.cause);
    let remedy = format!(
        "remove the cause, then run `shepherdctl retry {}`; otherwise it is retried {}",
        quoted_name(machine),
        if fact.until > evidence.at {
            format!("in {}", humanize_duration(between(evidence.at, fact.until)))
        } else {
            "as soon as a worker is free".to_owned()
        }
    );
    Some(Issue::for_machine(IssueKind::WorkFails, &machine.name(), text, None, remedy))
}

fn lost_workers(machine: &MachineIssueInputs) -> Option<Issue> {
    if machine.lost_sessions < MAX_LOST_SESSIONS {
        return None;
    }
    let evidence = format!(
        "a shepherd was lost {} times in a row while it worked on this machine: crashed, or cut off from the \
         database",
        machine.lost_sessions
    );
    let remedy = format!(
        "read the logs of the shepherds that `shepherdctl timeline {0}` names; `shepherdctl hold {0} --reason …` \
         keeps other shepherds from it",
        quoted_name(machine)
    );
    Some(Issue::for_machine(IssueKind::LostWorkers, &machine.name(), evidence, None, remedy))
}

fn drift(machine: &MachineIssueInputs) -> Option<Issue> {
    let evidence = machine.schedule_mismatch.clone()?;
    let remedy =
        "the next sweep repairs it, within a minute if a shepherd runs; if it recurs, it is a defect of \
         Shepherd: please report it with this line"
            .to_owned();
    Some(Issue::for_machine(IssueKind::Drift, &machine.name(), evidence, None::<Timestamp>, remedy))
}

fn workloads_end_with_agent(machine: &MachineIssueInputs) -> Option<Issue> {
    let remedy =
        why_remedy(machine, "until that is solved, avoid updates, takeovers and restarts of its role server");
    finding_issue(
        machine,
        IssueKind::WorkloadsEndWithAgent,
        |kind| kind == HostFindingKind::WorkloadsEndWithAgent,
        remedy,
    )
}

fn agent_unit(machine: &MachineIssueInputs) -> Option<Issue> {
    let remedy = why_remedy(machine, "its role server checks again every five minutes");
    finding_issue(
        machine,
        IssueKind::AgentUnit,
        // What the role server found about pods needs nobody: it decided, and the next drain ends it.
        |kind| {
            !matches!(
                kind,
                HostFindingKind::WorkloadsEndWithAgent
                    | HostFindingKind::PodCgroups
                    | HostFindingKind::ConnectionsTurnedAway
                    | HostFindingKind::StorageLow
                    | HostFindingKind::UnpinnedKeys
                    | HostFindingKind::ReleaseRefused
                    | HostFindingKind::DeclarationRefused
            )
        },
        remedy,
    )
}

fn curator_connections(machine: &MachineIssueInputs) -> Option<Issue> {
    let remedy = "see who connects to that port of it, and block a flood in a firewall; if these are nodes of its cluster, \
                  raise the limit of open files of its role server"
        .to_owned();
    finding_issue(
        machine,
        IssueKind::ConnectionsTurnedAway,
        |kind| kind == HostFindingKind::ConnectionsTurnedAway,
        remedy,
    )
}

fn storage_low(machine: &MachineIssueInputs) -> Option<Issue> {
    let remedy = "free space on that file system of the machine or enlarge it; its role server measures it every few seconds, \
                  and continues by itself as soon as there is space"
        .to_owned();
    finding_issue(machine, IssueKind::StorageLow, |kind| kind == HostFindingKind::StorageLow, remedy)
}

fn unpinned_keys(machine: &MachineIssueInputs) -> Option<Issue> {
    let remedy = "if its file is damaged, do what the message names, and do not remove it; if its keys are lost, let an \
                  admin give `shepherdctl allow signing-keys`; otherwise update its role server, or take the machine over \
                  again with the role server of this release; it then pins the keys with the next heartbeat"
        .to_owned();
    finding_issue(machine, IssueKind::UnpinnedKeys, |kind| kind == HostFindingKind::UnpinnedKeys, remedy)
}

fn release_refused(machine: &MachineIssueInputs) -> Option<Issue> {
    let remedy = "see who ordered it and who added the file (the audit has both); sign the right release with a pinned key, and \
                  order that one"
        .to_owned();
    finding_issue(machine, IssueKind::ReleaseRefused, |kind| kind == HostFindingKind::ReleaseRefused, remedy)
}

fn declaration_refused(machine: &MachineIssueInputs) -> Option<Issue> {
    let remedy = "see who declared the role (the audit has it); sign the right declaration with a pinned key, and declare it \
                  again with its signature"
        .to_owned();
    let belongs = |kind| kind == HostFindingKind::DeclarationRefused;
    finding_issue(machine, IssueKind::DeclarationRefused, belongs, remedy)
}

/// An issue with the messages of all findings of some kinds. Without an agent nobody reports findings any more.
fn finding_issue(
    machine: &MachineIssueInputs,
    issue: IssueKind,
    belongs: impl Fn(HostFindingKind) -> bool,
    remedy: String,
) -> Option<Issue> {
    machine.facts.agent_started.as_ref()?;
    let found = machine.findings.iter().filter(|finding| belongs(finding.kind));
    let messages: Vec<&str> = found.map(|finding| finding.message.as_str()).collect();
    if messages.is_empty() {
        return None;
    }
    Some(Issue::for_machine(issue, &machine.name(), messages.join("; "), None::<Timestamp>, remedy))
}
