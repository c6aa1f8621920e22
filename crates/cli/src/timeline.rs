//! `timeline`: history of one machine. The newest entry comes first, because an operator reads from the top and wants
//! to know about the latest event.

use std::fmt::Write as _;

use serde::Serialize;

use crate::api_decode;
use crate::error::CliError;
use crate::fleet_client::{FleetClient, status_to_error};
use crate::get::{format_json, page_size};
use crate::output::{Format, format_table, terminal_width};
use bmdb::inspect::HistoryEntry;
use model::machine_view::MachineName;
use proto::fleet::v1::TimelineRequest;
use proto::fleet::v1::machines_client::MachinesClient;

#[derive(Serialize)]
struct TimelineOutput {
    #[serde(flatten)]
    name: MachineName,
    /// History entries, newest first.
    events: Vec<HistoryEntry>,
    more: bool,
}

/// Runs `timeline M`: prints the history of a machine.
pub async fn show_timeline(
    client: &FleetClient,
    machine: &str,
    limit: u32,
    format: Format,
) -> Result<String, CliError> {
    let (name, events, more) = fetch_timeline(client, machine, limit).await?;
    if format == Format::Json {
        return format_json(&TimelineOutput { name, events, more });
    }
    if events.is_empty() {
        return Ok(format!(
            "nothing has happened to {} yet, or longer ago than history is kept\n",
            name.short_name()
        ));
    }
    let mut text = format_table(&EVENT_HEADERS, &event_rows(&events), terminal_width());
    if more {
        let _ = write!(text, "\nthe newest {}, and there are older ones: raise --limit\n", events.len());
    }
    Ok(text)
}

async fn fetch_timeline(
    client: &FleetClient,
    machine: &str,
    limit: u32,
) -> Result<(MachineName, Vec<HistoryEntry>, bool), CliError> {
    let mut service = MachinesClient::new(client.channel());
    let (mut events, mut page_token) = (Vec::new(), String::new());
    loop {
        let machine = machine.to_owned();
        let request = TimelineRequest { machine, limit: page_size(limit, events.len()), page_token };
        let page = service.timeline(request).await.map_err(status_to_error)?.into_inner();
        for event in page.events {
            events.push(api_decode::decode_event(event)?);
        }
        page_token = page.next_page_token;
        if page_size(limit, events.len()) == 0 || page_token.is_empty() {
            return Ok((api_decode::decode_machine_name(page.name)?, events, !page_token.is_empty()));
        }
    }
}

/// Headers of a table of history entries.
pub const EVENT_HEADERS: [&str; 5] = ["AT (UTC)", "EVENT", "WORK", "BY", "DETAIL"];

/// History entries as rows under [`EVENT_HEADERS`].
#[must_use]
pub fn event_rows(events: &[HistoryEntry]) -> Vec<Vec<String>> {
    events
        .iter()
        .map(|line| {
            let work = match (&line.process, line.fence) {
                (Some(process), Some(fence)) => format!("{process} #{fence}"),
                _ => "-".to_owned(),
            };
            let by = match (&line.component, &line.host) {
                (Some(component), Some(host)) => format!("{component}@{host}"),
                (Some(component), None) => component.clone(),
                _ => "-".to_owned(),
            };
            let at = line.at.format("%Y-%m-%d %H:%M:%S%.3f").to_string();
            vec![at, line.event.clone(), work, by, line.detail.clone().unwrap_or_default()]
        })
        .collect()
}
