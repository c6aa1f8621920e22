//! Issues of providers, brakes, budgets, database, shepherds and agents.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::adoption::LIMIT_REMEDY;
use crate::artefact::is_storage_nearly_full;
use crate::humanize::humanize_duration;
use crate::issues::inputs::{IssueInputs, MachineIssueInputs, SessionIssueInputs};
use crate::issues::{Issue, IssueKind};
use crate::process::Process;
use crate::time::{Timestamp, after, before, between};

/// How far a host's clock may differ from the database's.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(30);
/// How long before its end a certificate is reported. Those that we issue are renewed a week before.
const CERTIFICATE_NOTICE: Duration = Duration::from_hours(6 * 24);
/// Expired sessions of one host and component within an hour, from which on it counts as flapping.
const FLAPPING_SESSIONS: i64 = 5;
/// A database snapshot that is open for longer keeps the fleet's dead rows.
const LONG_SNAPSHOT: Duration = Duration::from_mins(10);
/// A pause that is older than this may be forgotten.
const LONG_PAUSE: Duration = Duration::from_hours(1);
/// How long a listener that turned a connection away is reported.
const TURNED_AWAY_NOTICE: Duration = Duration::from_mins(15);
/// How long a rejection of a certificate is reported.
const REJECTION_NOTICE: Duration = Duration::from_mins(15);
/// Number of dead rows of a table that vacuum should have removed.
const DEAD_ROWS: i64 = 100_000;

/// All issues of this file.
pub(super) fn find_issues(evidence: &IssueInputs) -> Vec<Issue> {
    let mut found = Vec::new();
    found.extend(no_shepherd(evidence));
    found.extend(nobody_listens(evidence));
    found.extend(provider_issues(evidence));
    found.extend(brake_issues(evidence));
    found.extend(pause_issues(evidence));
    found.extend(budget_issues(evidence));
    found.extend(clock_issues(evidence));
    found.extend(certificate_issues(evidence));
    found.extend(certificate_rejections(evidence));
    found.extend(connection_issues(evidence));
    found.extend(process_issues(evidence));
    found.extend(flapping_sessions(evidence));
    found.extend(outdated_agents(evidence));
    found.extend(storage_issues(evidence));
    found.extend(artefact_storage(evidence));
    found.extend(unsigned_releases(evidence));
    found
}

fn no_shepherd(evidence: &IssueInputs) -> Option<Issue> {
    evidence.sessions.is_empty().then(|| {
        Issue::new(
            IssueKind::NoShepherd,
            "all machines".to_owned(),
            "no shepherd works on this BMDB: no session is alive".to_owned(),
            None,
            "start `shepherd` on at least one host; its log says why it stopped".to_owned(),
        )
    })
}

/// Issue: agents should report, and no callback server receives heartbeats.
fn nobody_listens(evidence: &IssueInputs) -> Option<Issue> {
    let expected = evidence.machines.iter().filter(|machine| is_expected_to_report(machine)).count();
    if expected == 0 || evidence.listening_since.is_some() {
        return None;
    }
    let last = evidence
        .machines
        .iter()
        .filter_map(|machine| Some(machine.facts.heartbeat.as_ref()?.received_at))
        .max();
    Some(Issue::new(
        IssueKind::NobodyListens,
        "all machines".to_owned(),
        format!(
            "no heartbeat of the {expected} agents that should report was stored recently: no machine is recovered"
        ),
        last,
        "start a shepherd that runs the callback server, and see that machines reach its --agent_endpoint"
            .to_owned(),
    ))
}

/// Whether its agent should report.
fn is_expected_to_report(machine: &MachineIssueInputs) -> bool {
    machine.facts.agent_started.is_some() && !machine.is_retiring()
}

fn provider_issues(evidence: &IssueInputs) -> Vec<Issue> {
    let mut found = Vec::new();
    for provider in &evidence.providers {
        let about = || format!("provider {}", provider.provider);
        if let Some(error) = &provider.error {
            let listed = provider.listed_at.map_or_else(
                || "it never gave a list".to_owned(),
                |at| format!("its last list is {} old", humanize_duration(between(at, evidence.at))),
            );
            found.push(Issue::new(
                IssueKind::ProviderFails,
                about(),
                format!("{error}; {listed}"),
                provider.error_at,
                "see that the provider answers, with the address and the login that this shepherd has"
                    .to_owned(),
            ));
        }
        if let Some(brake) = &provider.brake {
            found.push(Issue::new(
                IssueKind::Brake,
                about(),
                format!("no machine is taken from it: {brake}"),
                provider.brake_since,
                "compare the provider's list with `shepherdctl get machines`; it is released when they agree"
                    .to_owned(),
            ));
        }
        if let Some(surplus) = provider.not_adopted {
            found.push(Issue::new(
                IssueKind::MachinesNotAdopted,
                about(),
                surplus.describe(),
                provider.not_adopted_since,
                LIMIT_REMEDY.to_owned(),
            ));
        }
    }
    found
}

fn brake_issues(evidence: &IssueInputs) -> Vec<Issue> {
    evidence
        .brakes
        .iter()
        .map(|brake| {
            let about =
                if brake.scope == "*" { "all machines".to_owned() } else { format!("provider {}", brake.scope) };
            Issue::new(
                IssueKind::Brake,
                about,
                format!("{} is held: {}", brake.kind, brake.reason.trim_start_matches("brake: ")),
                Some(brake.engaged_at),
                "look at what they have in common: network, callback servers, clocks, power; it releases itself"
                    .to_owned(),
            )
        })
        .collect()
}

/// Loops that an operator paused, and perhaps forgot.
fn pause_issues(evidence: &IssueInputs) -> Vec<Issue> {
    let long = evidence.pauses.iter().filter(|pause| between(pause.since, evidence.at) >= LONG_PAUSE);
    long.map(|pause| {
        let about = match &pause.provider {
            None => "all machines".to_owned(),
            Some(provider) => format!("provider {provider}"),
        };
        let remedy = format!("when it has served its purpose: {}", pause.resume_command());
        Issue::new(IssueKind::LoopPaused, about, pause.describe(evidence.at), Some(pause.since), remedy)
    })
    .collect()
}

/// Budgets that are used up at this moment.
fn budget_issues(evidence: &IssueInputs) -> Vec<Issue> {
    let mut found = Vec::new();
    for (step, budget) in &evidence.policy.budgets {
        let since = before(evidence.at, budget.window.0);
        let used: Vec<Timestamp> = evidence
            .recent_disruptions
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
            |oldest| {
                format!("in {}", humanize_duration(between(evidence.at, after(*oldest, budget.window.0))))
            },
        );
        found.push(Issue::new(
            IssueKind::BudgetExhausted,
            step.to_string(),
            format!(
                "the budget to {} is used up ({} in {}); machines that wait for it: {}; the next is free {free}",
                step.phrase(),
                used.len(),
                budget.window,
                waiting.count()
            ),
            used.iter().max().copied(),
            "find out why so many machines need it; it becomes available again as time passes".to_owned(),
        ));
    }
    found
}

/// Hosts whose clock differs from the database's. Certificates and logs depend on it.
fn clock_issues(evidence: &IssueInputs) -> Vec<Issue> {
    let mut worst: BTreeMap<&str, (&SessionIssueInputs, Duration)> = BTreeMap::new();
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
        .filter(|(_, skew)| *skew > MAX_CLOCK_SKEW)
        .map(|(session, skew)| {
            let ahead = session.host_clock.is_some_and(|clock| clock > session.started_at);
            Issue::new(
                IssueKind::ClockSkew,
                format!("host {}", session.host),
                format!(
                    "its clock was {} {} the database's when its {} began a session",
                    humanize_duration(skew),
                    if ahead { "ahead of" } else { "behind" },
                    session.component
                ),
                Some(session.started_at),
                "set both by NTP; leases and deadlines use only the database's clock, but certificates and logs \
                 use the host's"
                    .to_owned(),
            )
        })
        .collect()
}

fn certificate_issues(evidence: &IssueInputs) -> Vec<Issue> {
    let mut found = Vec::new();
    for session in &evidence.sessions {
        let Some(ends) = session.certificate_expires_at else { continue };
        if ends > after(evidence.at, CERTIFICATE_NOTICE) {
            continue;
        }
        let when = if ends > evidence.at {
            format!("expires in {}", humanize_duration(between(evidence.at, ends)))
        } else {
            format!(
                "expired {} ago: no client accepts it any more",
                humanize_duration(between(ends, evidence.at))
            )
        };
        let shown = match session.component.as_str() {
            "api" => "its API shows to operators",
            _ => "its callback server shows to agents",
        };
        found.push(Issue::new(
            IssueKind::CertificateEnds,
            format!("host {}", session.host),
            format!("the certificate that {shown} {when}"),
            Some(before(ends, CERTIFICATE_NOTICE)),
            "renew the files of --agent_tls_certificate_path and --agent_tls_key_path, with the intermediates, and that of \
             --agent_endpoint_ca_certificate_path; they are read again within an hour"
                .to_owned(),
        ));
    }
    found
}

/// Listeners with a certificate that a client lately rejected.
fn certificate_rejections(evidence: &IssueInputs) -> Vec<Issue> {
    let mut found = Vec::new();
    for session in &evidence.sessions {
        let Some(at) = session.certificate_rejected_at else { continue };
        if between(at, evidence.at) > REJECTION_NOTICE {
            continue;
        }
        let reason = match session.certificate_rejection.as_deref() {
            Some("alert_unknown_ca") => "no CA that it trusts issued it",
            Some("alert_certificate_expired") => "it has expired or is not valid yet",
            Some("alert_bad_certificate") => "it is for other names, or malformed",
            _ => "its purpose, its signature or something else of it is wrong",
        };
        let (listener, client) = match session.component.as_str() {
            "api" => ("API", "compare its CA with the ca_certificate_path of the client's context"),
            _ => ("callback server", "`roleserver status` on a machine that does not report"),
        };
        found.push(Issue::new(
            IssueKind::CertificateRejected,
            format!("host {}", session.host),
            format!(
                "a client rejected the certificate of its {listener} {} ago: {reason}",
                humanize_duration(between(at, evidence.at))
            ),
            Some(at),
            format!(
                "run `shepherd --check` there, and {client}; the log of the shepherd has the addresses of such \
                 clients"
            ),
        ));
    }
    found
}

/// Listeners that lately had more connections than places.
fn connection_issues(evidence: &IssueInputs) -> Vec<Issue> {
    let mut found = Vec::new();
    for session in &evidence.sessions {
        let Some(at) = session.turned_away_at else { continue };
        if between(at, evidence.at) > TURNED_AWAY_NOTICE {
            continue;
        }
        let (listener, flag, room) = match session.component.as_str() {
            "api" => ("API", "--api_listen_address", "start another shepherd"),
            // Every shepherd has this session, which also carries what no other session is about.
            "sampler" => {
                ("metrics listener", "--metrics_listen_address", "let fewer programs read the metrics")
            }
            _ => ("callback server", "--agent_listen_address", "start another shepherd"),
        };
        found.push(Issue::new(
            IssueKind::ConnectionsTurnedAway,
            format!("host {}", session.host),
            format!(
                "its {listener} had more connections than places, and closed some {} ago",
                humanize_duration(between(at, evidence.at))
            ),
            Some(at),
            format!(
                "see who connects to {flag}, and block a flood in a firewall; if these are your own clients, raise the \
                 limit of open files or {room}"
            ),
        ));
    }
    found
}

/// Shepherds that run out of space or of open files, or that refuse one of their files.
fn process_issues(evidence: &IssueInputs) -> Vec<Issue> {
    let mut found = Vec::new();
    for session in &evidence.sessions {
        let problems = [
            (
                IssueKind::StorageLow,
                &session.storage_low,
                "free space on that file system of the host or enlarge it; the shepherd continues by itself as soon as there \
                 is space",
            ),
            (
                IssueKind::OpenFiles,
                &session.open_files_low,
                "see what its connections are (`ss -tnp`), and raise LimitNOFILE= of its unit if they are your own",
            ),
            (
                IssueKind::FileRefused,
                &session.file_refused,
                "repair the file and run `shepherd --check` there; an agent and a file of the database's URL are read again within \
                 seconds, and another certificate within an hour",
            ),
        ];
        for (kind, message, remedy) in problems {
            let Some(message) = message else { continue };
            let subject = format!("host {}", session.host);
            let issue = Issue::new(kind, subject, message.clone(), None, remedy.to_owned());
            // Two shepherds on one host have the same disks.
            if !found.contains(&issue) {
                found.push(issue);
            }
        }
    }
    found
}

fn flapping_sessions(evidence: &IssueInputs) -> Vec<Issue> {
    let often = evidence.expired_sessions.iter().filter(|expired| expired.count >= FLAPPING_SESSIONS);
    often
        .map(|expired| {
            Issue::new(
                IssueKind::SessionFlapping,
                format!("{} on {}", expired.component, expired.host),
                format!(
                    "{} of its sessions expired within an hour: it crashed, got no CPU time, or was cut off from \
                     the database",
                    expired.count
                ),
                Some(expired.first_at),
                "read its log; see whether the host has time to run it and reaches the database".to_owned(),
            )
        })
        .collect()
}

/// Agents whose release no shepherd has, one issue per release.
fn outdated_agents(evidence: &IssueInputs) -> Vec<Issue> {
    let current: Vec<&str> = evidence
        .sessions
        .iter()
        .filter_map(|session| session.version.as_deref())
        .map(strip_build_metadata)
        .collect();
    let mut others: BTreeMap<&str, Vec<&MachineIssueInputs>> = BTreeMap::new();
    for machine in evidence.machines.iter().filter(|machine| is_expected_to_report(machine)) {
        let Some(version) = machine.agent_version.as_deref().map(strip_build_metadata) else { continue };
        if !current.is_empty() && !current.contains(&version) {
            others.entry(version).or_default().push(machine);
        }
    }
    others
        .into_iter()
        .map(|(version, mut machines)| {
            machines.sort_by_key(|machine| machine.facts.machine);
            let count = machines.len();
            Issue::for_machines(
                IssueKind::OutdatedAgent,
                machines.into_iter().map(MachineIssueInputs::name).collect(),
                format!("{count} agents run release {version}, which no shepherd here runs"),
                None,
                "an agent is replaced when its machine is taken over again; `shepherdctl explain deploying#upgrading` lists which \
                 releases work together"
                    .to_owned(),
            )
        })
        .collect()
}

/// A version without its build metadata, which does not make it another release.
fn strip_build_metadata(version: &str) -> &str {
    version.split_once('+').map_or(version, |(release, _)| release)
}

fn storage_issues(evidence: &IssueInputs) -> Vec<Issue> {
    let Some(storage) = &evidence.storage else { return Vec::new() };
    let mut found = Vec::new();
    if storage.oldest_snapshot > LONG_SNAPSHOT {
        found.push(Issue::new(
            IssueKind::LongSnapshot,
            "the database".to_owned(),
            format!(
                "a transaction has held a snapshot for {}: until it ends, no dead row is removed, and every \
                 claim costs more",
                humanize_duration(storage.oldest_snapshot)
            ),
            Some(before(evidence.at, storage.oldest_snapshot)),
            "end that transaction: `shepherdctl explain database-care#what-to-watch` shows the query that finds its owner".to_owned(),
        ));
    }
    for (table, dead, live) in &storage.rows {
        if *dead >= DEAD_ROWS && dead > live {
            found.push(Issue::new(
                IssueKind::DeadRows,
                format!("table {table}"),
                format!("{dead} dead rows beside {live} live ones: autovacuum does not keep up"),
                None,
                format!("`VACUUM {table}`, and see `shepherdctl explain database-care#vacuum` for why it was not done"),
            ));
        }
    }
    found
}

/// Issue: a stolen token of a deployer is enough to run a program as root on every machine that has pinned no keys.
fn unsigned_releases(evidence: &IssueInputs) -> Option<Issue> {
    evidence.policy.allow_unsigned_releases.then(|| {
        Issue::new(
            IssueKind::UnsignedReleases,
            "the fleet".to_owned(),
            "releases of the role server that nobody signed may be rolled out, so an order is enough to run any program as root"
                .to_owned(),
            None,
            "give the shepherds signing keys (--signing_keys_path), sign releases with minisign, and start one with \
             --allow_unsigned_releases false"
                .to_owned(),
        )
    })
}

/// Issue: uploads of artefacts will soon be rejected.
fn artefact_storage(evidence: &IssueInputs) -> Option<Issue> {
    let (stored, limit) = (evidence.artefacts, evidence.policy.artefact_storage_limit);
    is_storage_nearly_full(stored, limit).then(|| {
        Issue::new(
            IssueKind::ArtefactStorage,
            "the database".to_owned(),
            format!(
                "the artefacts take {} of at most {}: an upload beyond that is rejected",
                stored.humanize(),
                limit.humanize()
            ),
            None,
            "remove those that nothing uses with `shepherdctl artefacts delete`, or raise --artefact_storage_limit of \
             the shepherds"
                .to_owned(),
        )
    })
}
