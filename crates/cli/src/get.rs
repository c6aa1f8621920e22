//! `get machines|sessions|work|providers`: lists.

use std::fmt::Write as _;

use serde::Serialize;

use crate::api_decode;
use crate::command::ListMachinesArgs;
use crate::error::CliError;
use crate::fleet_client::{FleetClient, status_to_error};
use crate::output::{Format, format_table, terminal_width};
use bmdb::inspect::{MachineSummary, ProviderSummary, SessionSummary, WorkSummary};
use model::humanize::{humanize_duration, relative_time};
use model::label;
use model::machine_view::{EngagedBrake, MachineName};
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;
use proto::fleet::v1::providers_client::ProvidersClient;
use proto::fleet::v1::sessions_client::SessionsClient;
use proto::fleet::v1::work_client::WorkClient;

/// Most lines in one response.
const API_PAGE_SIZE: i32 = 500;

#[derive(Serialize)]
struct MachinesOutput {
    machines: Vec<MachineSummary>,
    /// Value of `--cursor` for the next page; `null` on the last page.
    next: Option<String>,
}

/// Runs `get machines`: sorted by phase in the order of a machine's life, then provider, then id.
pub async fn show_machines(
    client: &FleetClient,
    filters: &ListMachinesArgs,
    format: Format,
) -> Result<String, CliError> {
    let (machines, next, now) = fetch_machines(client, filters).await?;
    if format == Format::Json {
        return format_json(&MachinesOutput { machines, next });
    }
    if machines.is_empty() {
        return Ok("no machines\n".to_owned());
    }
    // The columns for labels and priorities are shown only if some machine has one.
    let columns = OptionalColumns {
        labels: machines.iter().any(|line| !line.labels.is_empty()),
        priority: machines.iter().any(|line| line.priority.is_some()),
    };
    let mut headers =
        vec!["MACHINE", "NAME", "PHASE", "SINCE", "HEARTBEAT", "ADDRESS", "PRIORITY", "LABELS", "WHY"];
    headers.retain(|header| {
        (columns.labels || *header != "LABELS") && (columns.priority || *header != "PRIORITY")
    });
    let rows: Vec<Vec<String>> = machines.iter().map(|line| machine_row(line, columns, now)).collect();
    let mut text = format_table(&headers, &rows, terminal_width());
    if let Some(next) = next {
        let limit = filters.limit;
        let _ = write!(
            text,
            "\nfirst {limit}, and there are more: raise --limit, narrow with --phase or --provider, or go on with\n  \
             --cursor '{next}'\n"
        );
    }
    Ok(text)
}

/// Machines, cursor of the next page, and when they were read.
type MachineList = (Vec<MachineSummary>, Option<String>, Timestamp);

async fn fetch_machines(client: &FleetClient, filters: &ListMachinesArgs) -> Result<MachineList, CliError> {
    let limit = usize::try_from(filters.limit).unwrap_or(usize::MAX);
    let mut service = MachinesClient::new(client.channel());
    let (mut machines, mut token) = (Vec::new(), filters.cursor.clone().unwrap_or_default());
    loop {
        let missing = i32::try_from(limit.saturating_sub(machines.len())).unwrap_or(i32::MAX);
        let request = v1::ListMachinesRequest {
            filter: Some(filters.filters.to_proto()),
            page_size: missing.min(API_PAGE_SIZE),
            page_token: token,
        };
        let page = service.list(request).await.map_err(status_to_error)?.into_inner();
        for line in page.machines {
            machines.push(api_decode::decode_machine(line)?);
        }
        token = page.next_page_token;
        if token.is_empty() || machines.len() >= limit {
            let next = Some(token).filter(|token| !token.is_empty());
            return Ok((machines, next, api_decode::require_timestamp(page.read_at, "its read time")?));
        }
    }
}

/// Columns that only some lists have.
#[derive(Clone, Copy)]
struct OptionalColumns {
    labels: bool,
    priority: bool,
}

fn machine_row(line: &MachineSummary, columns: OptionalColumns, now: Timestamp) -> Vec<String> {
    let mut row = vec![
        line.name.machine.to_string()[..8].to_owned(),
        match &line.name.provider_id {
            Some(_) => line.name.short_name(),
            None => "-".to_owned(),
        },
        line.phase.clone(),
        humanize_duration(between(line.phase_since, now)),
        line.heartbeat_at.map_or_else(|| "-".to_owned(), |at| relative_time(at, now)),
        line.address.clone().unwrap_or_else(|| "-".to_owned()),
    ];
    if columns.priority {
        row.push(or_dash(line.priority.as_deref()));
    }
    if columns.labels {
        row.push(match label::format_labels(&line.labels) {
            none if none.is_empty() => "-".to_owned(),
            text => text,
        });
    }
    row.push(match &line.working {
        Some(process) => format!("{process} is under way"),
        None => line.reason.clone(),
    });
    row
}

#[derive(Serialize)]
struct SessionsOutput {
    sessions: Vec<SessionSummary>,
    more: bool,
}

/// Runs `get sessions`: lists the open sessions.
pub async fn show_sessions(client: &FleetClient, limit: u32, format: Format) -> Result<String, CliError> {
    let (sessions, more, now) = fetch_sessions(client, limit).await?;
    if format == Format::Json {
        return format_json(&SessionsOutput { sessions, more });
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
                humanize_duration(between(line.started_at, now)),
                relative_time(line.deadline, now),
                line.work.to_string(),
            ]
        })
        .collect();
    let headers = ["SESSION", "COMPONENT", "HOST", "PID", "VERSION", "AGE", "ENDS", "WORK"];
    Ok(format_table(&headers, &rows, terminal_width()) + &more_note(more, limit))
}

async fn fetch_sessions(
    client: &FleetClient,
    limit: u32,
) -> Result<(Vec<SessionSummary>, bool, Timestamp), CliError> {
    let mut service = SessionsClient::new(client.channel());
    let (mut sessions, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = v1::ListSessionsRequest { page_size: page_size(limit, sessions.len()), page_token };
        let page = service.list(request).await.map_err(status_to_error)?.into_inner();
        for session in page.sessions {
            sessions.push(api_decode::decode_session(session)?);
        }
        page_token = page.next_page_token;
        if page_size(limit, sessions.len()) == 0 || page_token.is_empty() {
            return Ok((
                sessions,
                !page_token.is_empty(),
                api_decode::require_timestamp(page.read_at, "its read time")?,
            ));
        }
    }
}

#[derive(Serialize)]
struct WorkOutput {
    work: Vec<WorkSummary>,
    more: bool,
}

/// Runs `get work`: lists the live work items.
pub async fn show_work(client: &FleetClient, limit: u32, format: Format) -> Result<String, CliError> {
    let (work, more, now) = fetch_work(client, limit).await?;
    if format == Format::Json {
        return format_json(&WorkOutput { work, more });
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
                humanize_duration(between(who.since, now)),
                who.fence.to_string(),
                or_dash(who.component.as_deref()),
                or_dash(who.host.as_deref()),
                or_dash(who.pid.map(|pid| pid.to_string()).as_deref()),
                match (who.session_closed_at, who.session_deadline) {
                    (Some(at), _) => format!("lost {}", relative_time(at, now)),
                    (None, Some(at)) => relative_time(at, now),
                    (None, None) => "-".to_owned(),
                },
            ]
        })
        .collect();
    let headers = ["MACHINE", "NAME", "PROCESS", "FOR", "FENCE", "COMPONENT", "HOST", "PID", "SESSION ENDS"];
    Ok(format_table(&headers, &rows, terminal_width()) + &more_note(more, limit))
}

async fn fetch_work(
    client: &FleetClient,
    limit: u32,
) -> Result<(Vec<WorkSummary>, bool, Timestamp), CliError> {
    let mut service = WorkClient::new(client.channel());
    let (mut work, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = v1::ListWorkRequest { page_size: page_size(limit, work.len()), page_token };
        let page = service.list(request).await.map_err(status_to_error)?.into_inner();
        for item in page.work {
            work.push(api_decode::decode_work(item)?);
        }
        page_token = page.next_page_token;
        if page_size(limit, work.len()) == 0 || page_token.is_empty() {
            return Ok((
                work,
                !page_token.is_empty(),
                api_decode::require_timestamp(page.read_at, "its read time")?,
            ));
        }
    }
}

#[derive(Serialize)]
struct ProvidersOutput {
    providers: Vec<ProviderSummary>,
    brakes: Vec<EngagedBrake>,
}

/// Runs `get providers`: lists providers and their brakes.
pub async fn show_providers(client: &FleetClient, format: Format) -> Result<String, CliError> {
    let request = v1::ListProvidersRequest {};
    let response =
        ProvidersClient::new(client.channel()).list(request).await.map_err(status_to_error)?.into_inner();
    let brakes: Vec<EngagedBrake> =
        response.brakes.into_iter().map(api_decode::decode_brake).collect::<Result<_, _>>()?;
    let providers: Vec<ProviderSummary> =
        response.providers.into_iter().map(api_decode::decode_provider).collect();
    let now = api_decode::require_timestamp(response.read_at, "its read time")?;
    if format == Format::Json {
        return format_json(&ProvidersOutput { providers, brakes });
    }
    let mut text = if providers.is_empty() {
        "no provider was queried yet\n".to_owned()
    } else {
        let rows: Vec<Vec<String>> = providers.iter().map(|line| provider_row(line, now)).collect();
        format_table(&["PROVIDER", "KIND", "MACHINES", "LISTED", "STATE"], &rows, terminal_width())
    };
    if !brakes.is_empty() {
        let rows: Vec<Vec<String>> = brakes
            .iter()
            .map(|line| {
                vec![
                    line.kind.clone(),
                    line.scope.clone(),
                    humanize_duration(between(line.engaged_at, now)),
                    line.reason.clone(),
                ]
            })
            .collect();
        text.push('\n');
        text.push_str(&format_table(&["BRAKE", "OF", "FOR", "REASON"], &rows, terminal_width()));
    }
    Ok(text)
}

fn provider_row(line: &ProviderSummary, now: Timestamp) -> Vec<String> {
    let failed = line.error.as_ref().map(|error| match line.error_at {
        Some(at) => format!("failed {}: {error}", relative_time(at, now)),
        None => format!("failed: {error}"),
    });
    let braked = line.brake.as_ref().map(|brake| match line.brake_since {
        Some(since) => format!("takes no machines for {}: {brake}", humanize_duration(between(since, now))),
        None => format!("takes no machines: {brake}"),
    });
    let states: Vec<String> = failed.into_iter().chain(braked).collect();
    vec![
        line.provider.clone(),
        line.kind.clone(),
        or_dash(line.machines.map(|count| count.to_string()).as_deref()),
        line.listed_at.map_or_else(|| "never".to_owned(), |at| relative_time(at, now)),
        if states.is_empty() { "ok".to_owned() } else { states.join("; ") },
    ]
}

fn or_dash(text: Option<&str>) -> String {
    text.unwrap_or("-").to_owned()
}

fn name_or_dash(name: &MachineName) -> String {
    if name.provider_id.is_some() { name.short_name() } else { "-".to_owned() }
}

/// Size of the next page of a list with this limit, after `listed` lines: at most what one response contains, and 0 at
/// the end.
#[must_use]
pub fn page_size(limit: u32, listed: usize) -> i32 {
    let missing = usize::try_from(limit).unwrap_or(usize::MAX).saturating_sub(listed);
    i32::try_from(missing).unwrap_or(i32::MAX).min(API_PAGE_SIZE)
}

fn more_note(more: bool, limit: u32) -> String {
    if more { format!("\nfirst {limit}, and there are more: raise --limit\n") } else { String::new() }
}

/// Output of a command as indented JSON.
pub fn format_json(answer: &impl Serialize) -> Result<String, CliError> {
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
            assert_eq!(page_size(limit, listed), expected, "{listed} of {limit}");
        }
    }
}
