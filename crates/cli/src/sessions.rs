//! `get sessions`: sessions of the shepherds that work on the BMDB.

use serde::Serialize;

use crate::client::decode::{parse_uuid, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::{more_note, page_size};
use crate::error::CliError;
use crate::output::table::{format_table, or_dash, terminal_width};
use crate::output::{Format, format_json};
use bmdb::fleet::sessions::SessionSummary;
use model::humanize::{humanize_duration, relative_time};
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::sessions_client::SessionsClient;

pub(crate) const GET_SESSIONS_EXAMPLES: &str = "\
Example:
  shepherdctl get sessions --context prod";

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
            sessions.push(decode_session(session)?);
        }
        page_token = page.next_page_token;
        if page_size(limit, sessions.len()) == 0 || page_token.is_empty() {
            return Ok((sessions, !page_token.is_empty(), require_timestamp(page.read_at, "its read time")?));
        }
    }
}

/// Decodes an open session of a process.
fn decode_session(session: v1::Session) -> Result<SessionSummary, CliError> {
    Ok(SessionSummary {
        session: parse_uuid(&session.session, "a session's id")?,
        process: parse_uuid(&session.process, "a process's id")?,
        component: session.component,
        host: session.host,
        pid: session.pid,
        version: session.version,
        started_at: require_timestamp(session.started_at, "the start time of a session")?,
        deadline: require_timestamp(session.deadline, "a session's deadline")?,
        work: session.work_items,
    })
}
