//! `get work`: live work items, and who holds them.

use serde::Serialize;

use crate::client::decode::{
    decode_machine_name, decode_timestamp, missing_field, parse_uuid, require_timestamp,
};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::{more_note, page_size};
use crate::error::CliError;
use crate::machine::summary::name_or_dash;
use crate::output::table::{format_table, or_dash, terminal_width};
use crate::output::{Format, format_json};
use bmdb::fleet::sessions::WorkSummary;
use model::humanize::{humanize_duration, relative_time};
use model::machine_view::WorkHolder;
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::work_client::WorkClient;

pub(crate) const GET_WORK_EXAMPLES: &str = "\
Example:
  shepherdctl get work --limit 20";

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
            work.push(decode_work(item)?);
        }
        page_token = page.next_page_token;
        if page_size(limit, work.len()) == 0 || page_token.is_empty() {
            return Ok((work, !page_token.is_empty(), require_timestamp(page.read_at, "its read time")?));
        }
    }
}

/// Decodes a live work item.
pub fn decode_work(item: v1::WorkItem) -> Result<WorkSummary, CliError> {
    Ok(WorkSummary {
        name: decode_machine_name(item.name)?,
        lane: item.lane,
        work: decode_holder(item.holder.ok_or_else(|| missing_field("the holder of a work item"))?)?,
    })
}

/// Decodes the process that holds a work item or a lease.
pub fn decode_holder(holder: v1::WorkHolder) -> Result<WorkHolder, CliError> {
    Ok(WorkHolder {
        process: holder.process,
        fence: holder.fence,
        since: require_timestamp(holder.since, "the start time of a work item")?,
        session: parse_uuid(&holder.session, "a session's id")?,
        component: holder.component,
        host: holder.host,
        pid: holder.pid,
        session_deadline: holder.session_deadline.and_then(decode_timestamp),
        session_closed_at: holder.session_closed_at.and_then(decode_timestamp),
    })
}
