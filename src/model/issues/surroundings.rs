//! What is wrong around the machines: providers, brakes and budgets, the database, shepherds, agents as
//! a whole.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::model::issues::evidence::{Evidence, MachineEvidence, SessionEvidence};
use crate::model::issues::{Issue, Kind};
use crate::model::process::Process;
use crate::model::telling::rough;
use crate::model::time::{Timestamp, after, before, between};

/// How far a host's clock may be from the database's.
const SKEW: Duration = Duration::from_secs(30);
/// How long before its end a certificate is spoken of. Those that we issue are renewed a week before.
const CERTIFICATE_NOTICE: Duration = Duration::from_hours(6 * 24);
/// Sessions of one host and component that expire within an hour by accident at the most.
const EXPIRED: i64 = 5;
/// A snapshot that is held for longer keeps a fleet's dead rows.
const LONG_SNAPSHOT: Duration = Duration::from_mins(10);
/// A loop that is paused for longer may be forgotten.
const LONG_PAUSE: Duration = Duration::from_hours(1);
/// Dead rows of a table that vacuum would have removed by now.
const DEAD_ROWS: i64 = 100_000;

/// Everything of this kind.
pub(super) fn found(evidence: &Evidence) -> Vec<Issue> {
    let mut found = Vec::new();
    found.extend(no_shepherd(evidence));
    found.extend(nobody_listens(evidence));
    found.extend(providers(evidence));
    found.extend(brakes(evidence));
    found.extend(pauses(evidence));
    found.extend(budgets(evidence));
    found.extend(clocks(evidence));
    found.extend(certificates(evidence));
    found.extend(flapping(evidence));
    found.extend(outdated(evidence));
    found.extend(storage(evidence));
    found
}

fn no_shepherd(evidence: &Evidence) -> Option<Issue> {
    evidence.sessions.is_empty().then(|| {
        Issue::new(
            Kind::NoShepherd,
            "all machines".to_owned(),
            "no shepherd works on this BMDB: no session is alive".to_owned(),
            None,
            "start `shepherd` on at least one host; its log says why it stopped".to_owned(),
        )
    })
}

/// Agents are there to be heard, and nobody listens.
fn nobody_listens(evidence: &Evidence) -> Option<Issue> {
    let expected = evidence.machines.iter().filter(|machine| is_heard(machine)).count();
    if expected == 0 || evidence.listening_since.is_some() {
        return None;
    }
    let last =
        evidence.machines.iter().filter_map(|machine| Some(machine.facts.heartbeat.as_ref()?.at)).max();
    Some(Issue::new(
        Kind::NobodyListens,
        "all machines".to_owned(),
        format!(
            "no heartbeat was stored lately, of {expected} agents that should report: nobody is recovered"
        ),
        last,
        "start a shepherd that runs the callback server, and see that machines reach its --agent_endpoint"
            .to_owned(),
    ))
}

/// Whether its agent should report.
fn is_heard(machine: &MachineEvidence) -> bool {
    machine.facts.agent_started.is_some() && !machine.is_leaving()
}

fn providers(evidence: &Evidence) -> Vec<Issue> {
    let mut found = Vec::new();
    for provider in &evidence.providers {
        let about = || format!("provider {}", provider.provider);
        if let Some(error) = &provider.error {
            let listed = provider.listed_at.map_or_else(
                || "it never gave a list".to_owned(),
                |at| format!("its last list is {} old", rough(between(at, evidence.at))),
            );
            found.push(Issue::new(
                Kind::ProviderFails,
                about(),
                format!("{error}; {listed}"),
                provider.error_at,
                "see that the provider answers, with the address and the login that this shepherd has"
                    .to_owned(),
            ));
        }
        if let Some(brake) = &provider.brake {
            found.push(Issue::new(
                Kind::Brake,
                about(),
                format!("no machine is taken from it: {brake}"),
                provider.brake_since,
                "compare the provider's list with `shepherdctl get machines`; it is released when they agree"
                    .to_owned(),
            ));
        }
    }
    found
}

fn brakes(evidence: &Evidence) -> Vec<Issue> {
    evidence
        .brakes
        .iter()
        .map(|brake| {
            let about =
                if brake.scope == "*" { "all machines".to_owned() } else { format!("provider {}", brake.scope) };
            Issue::new(
                Kind::Brake,
                about,
                format!("{} is held: {}", brake.kind, brake.reason.trim_start_matches("brake: ")),
                Some(brake.engaged_at),
                "look at what they have in common: network, callback servers, clocks, power; it releases itself"
                    .to_owned(),
            )
        })
        .collect()
}

/// Loops that somebody paused, and perhaps forgot.
fn pauses(evidence: &Evidence) -> Vec<Issue> {
    let long = evidence.pauses.iter().filter(|pause| between(pause.since, evidence.at) >= LONG_PAUSE);
    long.map(|pause| {
        let about = match &pause.provider {
            None => "all machines".to_owned(),
            Some(provider) => format!("provider {provider}"),
        };
        let remedy = format!("when it has served its purpose: {}", pause.resume());
        Issue::new(Kind::LoopPaused, about, pause.sentence(evidence.at), Some(pause.since), remedy)
    })
    .collect()
}

/// Budgets of which nothing is left at this moment.
fn budgets(evidence: &Evidence) -> Vec<Issue> {
    let mut found = Vec::new();
    for (step, budget) in &evidence.policy.budgets {
        let since = before(evidence.at, budget.window.0);
        let used: Vec<Timestamp> = evidence
            .disturbed
            .iter()
            .filter(|done| done.step == *step && done.at > since)
            .map(|done| done.at)
            .collect();
        if used.len() < usize::try_from(budget.count).unwrap_or(usize::MAX) {
            continue;
        }
        let waiting = evidence.machines.iter().filter(|machine| {
            let put_off = machine.facts.postponements.get(&Process::Recovery);
            put_off.is_some_and(|wait| wait.until > evidence.at && wait.reason.contains(step.phrase()))
        });
        let free = used.iter().min().map_or_else(
            || "when the policy allows any".to_owned(),
            |oldest| format!("in {}", rough(between(evidence.at, after(*oldest, budget.window.0)))),
        );
        found.push(Issue::new(
            Kind::BudgetExhausted,
            step.to_string(),
            format!(
                "the budget to {} is used up ({} in {}); machines that wait for it: {}; the next is free {free}",
                step.phrase(),
                used.len(),
                budget.window,
                waiting.count()
            ),
            used.iter().max().copied(),
            "see why so many need it; it frees itself as time passes".to_owned(),
        ));
    }
    found
}

/// Hosts whose clock is not the database's: certificates and logs go by it.
fn clocks(evidence: &Evidence) -> Vec<Issue> {
    let mut worst: BTreeMap<&str, (&SessionEvidence, Duration)> = BTreeMap::new();
    for session in &evidence.sessions {
        let Some(host_clock) = session.host_clock else { continue };
        let skew = between(host_clock, session.started_at).max(between(session.started_at, host_clock));
        let known = worst.entry(session.host.as_str()).or_insert((session, skew));
        if skew > known.1 {
            *known = (session, skew);
        }
    }
    worst
        .into_values()
        .filter(|(_, skew)| *skew > SKEW)
        .map(|(session, skew)| {
            let ahead = session.host_clock.is_some_and(|clock| clock > session.started_at);
            Issue::new(
                Kind::ClockSkew,
                format!("host {}", session.host),
                format!(
                    "its clock was {} {} the database's when its {} began a session",
                    rough(skew),
                    if ahead { "ahead of" } else { "behind" },
                    session.component
                ),
                Some(session.started_at),
                "set both by NTP; leases and deadlines go by the database's clock alone, but certificates and logs do \
                 not"
                    .to_owned(),
            )
        })
        .collect()
}

fn certificates(evidence: &Evidence) -> Vec<Issue> {
    let mut found = Vec::new();
    for session in &evidence.sessions {
        let Some(ends) = session.certificate_ends else { continue };
        if ends > after(evidence.at, CERTIFICATE_NOTICE) {
            continue;
        }
        let when = if ends > evidence.at {
            format!("ends in {}", rough(between(evidence.at, ends)))
        } else {
            format!("ended {} ago: nobody believes it any more", rough(between(ends, evidence.at)))
        };
        let shown = match session.component.as_str() {
            "api" => "its API shows to operators",
            _ => "its callback server shows to agents",
        };
        found.push(Issue::new(
            Kind::CertificateEnds,
            format!("host {}", session.host),
            format!("the certificate that {shown} {when}"),
            Some(before(ends, CERTIFICATE_NOTICE)),
            "renew the files of --agent_tls_certificate_path and --agent_tls_key_path; they are read again within an \
             hour"
                .to_owned(),
        ));
    }
    found
}

fn flapping(evidence: &Evidence) -> Vec<Issue> {
    let often = evidence.expired.iter().filter(|expired| expired.count >= EXPIRED);
    often
        .map(|expired| {
            Issue::new(
                Kind::SessionFlapping,
                format!("{} on {}", expired.component, expired.host),
                format!(
                    "{} of its sessions expired within an hour: crashed, starved or cut off",
                    expired.count
                ),
                Some(expired.first_at),
                "read its log; see whether the host has time to run it and reaches the database".to_owned(),
            )
        })
        .collect()
}

/// Agents of another release than every shepherd, one issue a release.
fn outdated(evidence: &Evidence) -> Vec<Issue> {
    let current: Vec<&str> =
        evidence.sessions.iter().filter_map(|session| session.version.as_deref()).map(release).collect();
    let mut others: BTreeMap<&str, Vec<&MachineEvidence>> = BTreeMap::new();
    for machine in evidence.machines.iter().filter(|machine| is_heard(machine)) {
        let Some(version) = machine.agent_version.as_deref().map(release) else { continue };
        if !current.is_empty() && !current.contains(&version) {
            others.entry(version).or_default().push(machine);
        }
    }
    others
        .into_iter()
        .map(|(version, mut machines)| {
            machines.sort_by_key(|machine| machine.facts.machine);
            let count = machines.len();
            Issue::of_several(
                Kind::OutdatedAgent,
                machines.into_iter().map(MachineEvidence::name).collect(),
                format!("{count} agents are of release {version}, which no shepherd here is of"),
                None,
                "an agent is replaced when its machine is taken over again; docs/deploying.md (Upgrading) lists which \
                 releases work together"
                    .to_owned(),
            )
        })
        .collect()
}

/// A version without what says how it was built, which makes it no other release.
fn release(version: &str) -> &str {
    version.split_once('+').map_or(version, |(release, _)| release)
}

fn storage(evidence: &Evidence) -> Vec<Issue> {
    let Some(storage) = &evidence.storage else { return Vec::new() };
    let mut found = Vec::new();
    if storage.oldest_snapshot > LONG_SNAPSHOT {
        found.push(Issue::new(
            Kind::LongSnapshot,
            "the database".to_owned(),
            format!(
                "somebody has held a snapshot for {}: until its end no dead row is removed, and every claim costs more",
                rough(storage.oldest_snapshot)
            ),
            Some(before(evidence.at, storage.oldest_snapshot)),
            "end that transaction: docs/database-care.md says how to find whose it is".to_owned(),
        ));
    }
    for (table, dead, live) in &storage.rows {
        if *dead >= DEAD_ROWS && dead > live {
            found.push(Issue::new(
                Kind::DeadRows,
                format!("table {table}"),
                format!("{dead} dead rows beside {live} live ones: autovacuum does not keep up"),
                None,
                format!("`VACUUM {table}`, and see docs/database-care.md for why it was not done"),
            ));
        }
    }
    found
}
