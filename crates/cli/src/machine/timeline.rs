//! `timeline`: history of one machine. The newest entry comes first, because an operator reads from the top and wants
//! to know about the latest event.

use std::fmt::Write as _;

use clap::Args;
use serde::Serialize;

use crate::client::decode::decode_machine_name;
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::page_size;
use crate::error::CliError;
use crate::machine::history::{EVENT_HEADERS, decode_event, event_rows};
use crate::output::table::{format_table, terminal_width};
use crate::output::{Format, format_json};
use bmdb::machine::history::HistoryEntry;
use model::machine_view::MachineName;
use proto::fleet::v1::TimelineRequest;
use proto::fleet::v1::machines_client::MachinesClient;

pub(crate) const TIMELINE_EXAMPLES: &str = "\
Example:
  shepherdctl timeline sim-0007 --limit 20";

/// Arguments of `timeline`: the machine and the number of events.
#[derive(Debug, Args)]
pub struct TimelineArgs {
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID
    #[arg(value_name = "M")]
    pub machine: String,
    /// Maximum number of events to list
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub limit: u32,
}

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
            "no history of {}: nothing has happened to it yet, or all of it is older than the policy's \
             history_retention\n",
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
        let request = TimelineRequest { machine, limit: page_size(Some(limit), events.len()), page_token };
        let page = service.timeline(request).await.map_err(status_to_error)?.into_inner();
        for event in page.events {
            events.push(decode_event(event)?);
        }
        page_token = page.next_page_token;
        if page_size(Some(limit), events.len()) == 0 || page_token.is_empty() {
            return Ok((decode_machine_name(page.name)?, events, !page_token.is_empty()));
        }
    }
}
