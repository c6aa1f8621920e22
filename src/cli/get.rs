//! `get`: lists.

use std::fmt::Write as _;

use serde::Serialize;
use uuid::Uuid;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect::{self, MachineLine, ProviderLine, SessionLine, WorkLine};
use crate::bmdb::listing::{Cursor, machines as machines_of};
use crate::cli::command::Machines;
use crate::cli::error::CliError;
use crate::cli::output::{Format, table, width};
use crate::cli::remote::{Remote, refused};
use crate::cli::remote_read;
use crate::cli::source::Source;
use crate::model::access::Scope;
use crate::model::label;
use crate::model::machine_view::{BrakeLine, MachineName};
use crate::model::telling::{relative, rough};
use crate::model::time::{Timestamp, between};
use crate::proto::fleet::v1;
use crate::proto::fleet::v1::machines_client::MachinesClient;
use crate::proto::fleet::v1::providers_client::ProvidersClient;
use crate::proto::fleet::v1::sessions_client::SessionsClient;
use crate::proto::fleet::v1::work_client::WorkClient;

/// Most lines that the API answers at once.
const API_PAGE: i32 = 500;

#[derive(Serialize)]
struct MachinesAnswer {
    machines: Vec<MachineLine>,
    /// Value for `--after` that goes on with the list; `null` at its end.
    next: Option<String>,
}

/// `get machines`: by phase in the order of a machine's life, then provider, then id.
pub async fn machines(source: &Source, filters: &Machines, format: Format) -> Result<String, CliError> {
    let (machines, next, now) = match source {
        Source::Direct(bmdb) => read_machines(bmdb, filters).await?,
        Source::Api(remote) => ask_machines(remote, filters).await?,
    };
    if format == Format::Json {
        return json(&MachinesAnswer { machines, next });
    }
    if machines.is_empty() {
        return Ok("no machines\n".to_owned());
    }
    // A column for those who label, and one for those who prioritize.
    let told = Told {
        labels: machines.iter().any(|line| !line.labels.is_empty()),
        priority: machines.iter().any(|line| line.priority.is_some()),
    };
    let mut headers =
        vec!["MACHINE", "NAME", "PHASE", "SINCE", "HEARTBEAT", "ADDRESS", "PRIORITY", "LABELS", "WHY"];
    headers.retain(|header| (told.labels || *header != "LABELS") && (told.priority || *header != "PRIORITY"));
    let rows: Vec<Vec<String>> = machines.iter().map(|line| machine_row(line, told, now)).collect();
    let mut text = table(&headers, &rows, width());
    if let Some(next) = next {
        let limit = filters.limit;
        let _ = write!(
            text,
            "\nfirst {limit}, and there are more: raise --limit, narrow with --phase or --provider, or go on with\n  \
             --after '{next}'\n"
        );
    }
    Ok(text)
}

/// Machines, where the list goes on, and when that was.
type MachinesRead = (Vec<MachineLine>, Option<String>, Timestamp);

async fn ask_machines(remote: &Remote, filters: &Machines) -> Result<MachinesRead, CliError> {
    let limit = usize::try_from(filters.limit).unwrap_or(usize::MAX);
    let mut client = MachinesClient::new(remote.service());
    let (mut machines, mut token) = (Vec::new(), filters.after.clone().unwrap_or_default());
    loop {
        let missing = i32::try_from(limit.saturating_sub(machines.len())).unwrap_or(i32::MAX);
        let request = v1::ListMachinesRequest {
            filter: Some(filters.filters.message()),
            page_size: missing.min(API_PAGE),
            page_token: token,
        };
        let page = client.list(request).await.map_err(refused)?.into_inner();
        for line in page.machines {
            machines.push(remote_read::machine(line)?);
        }
        token = page.next_page_token;
        if token.is_empty() || machines.len() >= limit {
            let next = Some(token).filter(|token| !token.is_empty());
            return Ok((machines, next, remote_read::at(page.at, "its moment")?));
        }
    }
}

async fn read_machines(bmdb: &Bmdb, filters: &Machines) -> Result<MachinesRead, CliError> {
    let limit = usize::try_from(filters.limit).unwrap_or(usize::MAX);
    let after = filters.after.as_deref().map(read_cursor).transpose()?;
    let filter = filters.filters.filter()?;
    let (page, now) = bmdb
        .inspect(move |tx| {
            let (after, filter) = (after.clone(), filter.clone());
            Box::pin(async move {
                let now = inspect::now(tx).await?;
                let everything = Scope::Everything;
                let page = machines_of(tx, &filter, &everything, after.as_ref(), limit, usize::MAX).await?;
                Ok::<_, BmdbError>((page, now))
            })
        })
        .await?;
    let machines: Vec<MachineLine> = page.machines.into_iter().map(|listed| listed.line).collect();
    Ok((machines, page.next.as_ref().map(Cursor::write), now))
}

/// Columns that only some lists have.
#[derive(Clone, Copy)]
struct Told {
    labels: bool,
    priority: bool,
}

fn machine_row(line: &MachineLine, told: Told, now: Timestamp) -> Vec<String> {
    let mut row = vec![
        line.name.machine.to_string()[..8].to_owned(),
        match &line.name.provider_id {
            Some(_) => line.name.short(),
            None => "-".to_owned(),
        },
        line.phase.clone(),
        rough(between(line.phase_since, now)),
        line.heartbeat_at.map_or_else(|| "-".to_owned(), |at| relative(at, now)),
        line.address.clone().unwrap_or_else(|| "-".to_owned()),
    ];
    if told.priority {
        row.push(or_dash(line.priority.as_deref()));
    }
    if told.labels {
        row.push(match label::told(&line.labels) {
            none if none.is_empty() => "-".to_owned(),
            told => told,
        });
    }
    row.push(match &line.working {
        Some(process) => format!("{process} is under way"),
        None => line.reason.clone(),
    });
    row
}

fn read_cursor(text: &str) -> Result<Cursor, CliError> {
    Cursor::read(text).ok_or_else(|| {
        CliError::Wrong(format!(
            "{text:?} is no place in a list; --after takes what an earlier `get machines` ended with"
        ))
    })
}

#[derive(Serialize)]
struct SessionsAnswer {
    sessions: Vec<SessionLine>,
    more: bool,
}

/// `get sessions`.
pub async fn sessions(source: &Source, limit: u32, format: Format) -> Result<String, CliError> {
    let (sessions, more, now) = match source {
        Source::Direct(bmdb) => {
            let (mut sessions, now) = bmdb
                .inspect(move |tx| {
                    Box::pin(async move {
                        Ok::<_, BmdbError>((
                            inspect::sessions(tx, Uuid::nil(), i64::from(limit) + 1).await?,
                            inspect::now(tx).await?,
                        ))
                    })
                })
                .await?;
            let more = drop_surplus(&mut sessions, limit);
            (sessions, more, now)
        }
        Source::Api(remote) => ask_sessions(remote, limit).await?,
    };
    if format == Format::Json {
        return json(&SessionsAnswer { sessions, more });
    }
    if sessions.is_empty() {
        return Ok("no open sessions: no shepherd works on this BMDB\n".to_owned());
    }
    let rows: Vec<Vec<String>> = sessions
        .iter()
        .map(|line| {
            vec![
                line.session.to_string(),
                line.component.clone(),
                or_dash(line.host.as_deref()),
                or_dash(line.pid.map(|pid| pid.to_string()).as_deref()),
                or_dash(line.version.as_deref()),
                rough(between(line.started_at, now)),
                relative(line.deadline, now),
                line.work.to_string(),
            ]
        })
        .collect();
    let headers = ["SESSION", "COMPONENT", "HOST", "PID", "VERSION", "AGE", "ENDS", "WORK"];
    Ok(table(&headers, &rows, width()) + &more_note(more, limit))
}

async fn ask_sessions(remote: &Remote, limit: u32) -> Result<(Vec<SessionLine>, bool, Timestamp), CliError> {
    let mut client = SessionsClient::new(remote.service());
    let (mut sessions, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = v1::ListSessionsRequest { page_size: page_of(limit, sessions.len()), page_token };
        let page = client.list(request).await.map_err(refused)?.into_inner();
        for said in page.sessions {
            sessions.push(remote_read::session(said)?);
        }
        page_token = page.next_page_token;
        if page_of(limit, sessions.len()) == 0 || page_token.is_empty() {
            return Ok((sessions, !page_token.is_empty(), remote_read::at(page.at, "its moment")?));
        }
    }
}

#[derive(Serialize)]
struct WorkAnswer {
    work: Vec<WorkLine>,
    more: bool,
}

/// `get work`.
pub async fn work(source: &Source, limit: u32, format: Format) -> Result<String, CliError> {
    let (work, more, now) = match source {
        Source::Direct(bmdb) => {
            let (mut work, now) = bmdb
                .inspect(move |tx| {
                    Box::pin(async move {
                        let work = inspect::work(tx, None, i64::from(limit) + 1).await?;
                        Ok::<_, BmdbError>((work, inspect::now(tx).await?))
                    })
                })
                .await?;
            let more = drop_surplus(&mut work, limit);
            (work, more, now)
        }
        Source::Api(remote) => ask_work(remote, limit).await?,
    };
    if format == Format::Json {
        return json(&WorkAnswer { work, more });
    }
    if work.is_empty() {
        return Ok("no live work\n".to_owned());
    }
    let rows: Vec<Vec<String>> = work
        .iter()
        .map(|line| {
            let who = &line.work;
            vec![
                line.name.machine.to_string()[..8].to_owned(),
                name_or_dash(&line.name),
                who.process.clone(),
                rough(between(who.since, now)),
                who.fence.to_string(),
                or_dash(who.component.as_deref()),
                or_dash(who.host.as_deref()),
                or_dash(who.pid.map(|pid| pid.to_string()).as_deref()),
                match (who.session_closed_at, who.session_deadline) {
                    (Some(at), _) => format!("lost {}", relative(at, now)),
                    (None, Some(at)) => relative(at, now),
                    (None, None) => "-".to_owned(),
                },
            ]
        })
        .collect();
    let headers = ["MACHINE", "NAME", "PROCESS", "FOR", "FENCE", "COMPONENT", "HOST", "PID", "SESSION ENDS"];
    Ok(table(&headers, &rows, width()) + &more_note(more, limit))
}

async fn ask_work(remote: &Remote, limit: u32) -> Result<(Vec<WorkLine>, bool, Timestamp), CliError> {
    let mut client = WorkClient::new(remote.service());
    let (mut work, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = v1::ListWorkRequest { page_size: page_of(limit, work.len()), page_token };
        let page = client.list(request).await.map_err(refused)?.into_inner();
        for said in page.work {
            work.push(remote_read::work(said)?);
        }
        page_token = page.next_page_token;
        if page_of(limit, work.len()) == 0 || page_token.is_empty() {
            return Ok((work, !page_token.is_empty(), remote_read::at(page.at, "its moment")?));
        }
    }
}

#[derive(Serialize)]
struct ProvidersAnswer {
    providers: Vec<ProviderLine>,
    brakes: Vec<BrakeLine>,
}

/// `get providers`.
pub async fn providers(source: &Source, format: Format) -> Result<String, CliError> {
    let (providers, brakes, now): (Vec<ProviderLine>, Vec<BrakeLine>, Timestamp) = match source {
        Source::Direct(bmdb) => {
            bmdb.inspect(|tx| {
                Box::pin(async move {
                    Ok::<_, BmdbError>((
                        inspect::providers(tx).await?,
                        inspect::brakes(tx).await?,
                        inspect::now(tx).await?,
                    ))
                })
            })
            .await?
        }
        Source::Api(remote) => {
            let request = v1::ListProvidersRequest {};
            let said =
                ProvidersClient::new(remote.service()).list(request).await.map_err(refused)?.into_inner();
            let brakes = said.brakes.into_iter().map(remote_read::brake).collect::<Result<_, _>>()?;
            let providers = said.providers.into_iter().map(remote_read::provider).collect();
            (providers, brakes, remote_read::at(said.at, "its moment")?)
        }
    };
    if format == Format::Json {
        return json(&ProvidersAnswer { providers, brakes });
    }
    let mut text = if providers.is_empty() {
        "no provider was asked yet\n".to_owned()
    } else {
        let rows: Vec<Vec<String>> = providers.iter().map(|line| provider_row(line, now)).collect();
        table(&["PROVIDER", "KIND", "MACHINES", "LISTED", "STATE"], &rows, width())
    };
    if !brakes.is_empty() {
        let rows: Vec<Vec<String>> = brakes
            .iter()
            .map(|line| {
                vec![
                    line.kind.clone(),
                    line.scope.clone(),
                    rough(between(line.engaged_at, now)),
                    line.reason.clone(),
                ]
            })
            .collect();
        text.push('\n');
        text.push_str(&table(&["BRAKE", "OF", "FOR", "REASON"], &rows, width()));
    }
    Ok(text)
}

fn provider_row(line: &ProviderLine, now: Timestamp) -> Vec<String> {
    let failed = line.error.as_ref().map(|error| match line.error_at {
        Some(at) => format!("failed {}: {error}", relative(at, now)),
        None => format!("failed: {error}"),
    });
    let braked = line.brake.as_ref().map(|brake| match line.brake_since {
        Some(since) => format!("takes no machines for {}: {brake}", rough(between(since, now))),
        None => format!("takes no machines: {brake}"),
    });
    let states: Vec<String> = failed.into_iter().chain(braked).collect();
    vec![
        line.provider.clone(),
        line.kind.clone(),
        or_dash(line.machines.map(|count| count.to_string()).as_deref()),
        line.listed_at.map_or_else(|| "never".to_owned(), |at| relative(at, now)),
        if states.is_empty() { "ok".to_owned() } else { states.join("; ") },
    ]
}

fn or_dash(text: Option<&str>) -> String {
    text.unwrap_or("-").to_owned()
}

fn name_or_dash(name: &MachineName) -> String {
    if name.provider_id.is_some() { name.short() } else { "-".to_owned() }
}

/// As many lines as the next page is to have, of a list that has so many of its limit: no more than the API
/// answers at once, and none at the end.
#[must_use]
pub fn page_of(limit: u32, listed: usize) -> i32 {
    let missing = usize::try_from(limit).unwrap_or(usize::MAX).saturating_sub(listed);
    i32::try_from(missing).unwrap_or(i32::MAX).min(API_PAGE)
}

/// Cuts the line that was read too many, and says whether there was one.
pub fn drop_surplus<T>(lines: &mut Vec<T>, limit: u32) -> bool {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let more = lines.len() > limit;
    lines.truncate(limit);
    more
}

fn more_note(more: bool, limit: u32) -> String {
    if more { format!("\nfirst {limit}, and there are more: raise --limit\n") } else { String::new() }
}

/// An answer for programs.
pub fn json(answer: &impl Serialize) -> Result<String, CliError> {
    let mut text = serde_json::to_string_pretty(answer)?;
    text.push('\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_end_at_the_limit() {
        for (limit, listed, expected) in [
            (100, 0, 100),
            (1000, 0, 500),
            (1000, 500, 500),
            (501, 500, 1),
            (500, 500, 0),
            (u32::MAX, 0, 500),
        ] {
            assert_eq!(page_of(limit, listed), expected, "{listed} of {limit}");
        }
    }
}
