//! `timeline`: history of one machine. The newest entry comes first, because an operator reads from the top and wants
//! to know about the latest event.

use std::fmt::Write as _;

use clap::Args;
use serde::Serialize;

use crate::client::decode::decode_machine_name;
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::{Page, fetch_pages};
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
    let pages = fetch_pages(Some(limit), String::new(), async |page| {
        let request =
            TimelineRequest { machine: machine.to_owned(), limit: page.size, page_token: page.token };
        let response = service.timeline(request).await.map_err(status_to_error)?.into_inner();
        let lines: Vec<HistoryEntry> =
            response.events.into_iter().map(decode_event).collect::<Result<_, _>>()?;
        Ok(Page {
            lines,
            response: decode_machine_name(response.name)?,
            next_token: response.next_page_token,
        })
    })
    .await?;
    let more = pages.has_more();
    Ok((pages.response, pages.lines, more))
}
