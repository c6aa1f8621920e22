//! `timeline`: history of one machine. The newest entry comes first, because an operator reads from the top and wants
//! to know about the latest event.
//!
//! Routine is folded, so that the latest failure or change is near the top. The server folds, so `--limit` counts what is
//! printed. A page may be empty while a long fold is read; the pages are fetched until there are enough lines.

use std::fmt::Write as _;

use clap::Args;

use crate::client::decode::{decode_machine_name, require_timestamp};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::{Page, PageRequest, fetch_pages};
use crate::error::CliError;
use crate::machine::history::{EVENT_HEADERS, decode_line, timeline_row};
use crate::object::document::ObjectDocument;
use crate::output::table::{format_table, terminal_width};
use crate::output::{Format, format_json};
use crate::routine::folded_note;
use model::timeline::TimelineLine;
use proto::fleet::v1::machines_client::MachinesClient;
use proto::fleet::v1::{TimelineRequest, TimelineResponse};

pub(crate) const TIMELINE_EXAMPLES: &str = "\
Examples:
  shepherdctl timeline sim-0007 --limit 20
  shepherdctl timeline sim-0007 --all           each query of its provider, too";

/// Arguments of `timeline`: the machine and the number of events.
#[derive(Debug, Args)]
pub struct TimelineArgs {
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID
    #[arg(value_name = "M")]
    pub machine: String,
    /// Print every line, also of routine work that found nothing new
    #[arg(long)]
    pub all: bool,
    /// Maximum number of lines
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub limit: u32,
}

/// Runs `timeline M`: prints the history of a machine. As JSON it is the response of the API, with all pages in one.
pub async fn show_timeline(
    client: &FleetClient,
    args: &TimelineArgs,
    format: Format,
) -> Result<String, CliError> {
    let response = fetch_timeline(client, args).await?;
    match format {
        Format::Json => format_json(&ObjectDocument::of_message(&response).to_json()?),
        Format::Table => render_timeline(response),
    }
}

/// Fetches pages until there are enough lines. The result is the last page, with the lines of all of them.
async fn fetch_timeline(client: &FleetClient, args: &TimelineArgs) -> Result<TimelineResponse, CliError> {
    let mut service = MachinesClient::new(client.channel());
    let pages = fetch_pages(Some(args.limit), String::new(), async |page: PageRequest| {
        let request = TimelineRequest {
            machine: args.machine.clone(),
            limit: page.size,
            page_token: page.token,
            without_routine: !args.all,
        };
        let mut response = service.timeline(request).await.map_err(status_to_error)?.into_inner();
        let lines = std::mem::take(&mut response.events);
        Ok(Page { lines, next_token: response.next_page_token.clone(), response })
    })
    .await?;
    Ok(TimelineResponse { events: pages.lines, ..pages.response })
}

fn render_timeline(response: TimelineResponse) -> Result<String, CliError> {
    let name = decode_machine_name(response.name)?;
    let now = require_timestamp(response.read_at, "its read time")?;
    if response.events.is_empty() {
        return Ok(format!(
            "no history of {}: nothing has happened to it yet, or all of it is older than the policy's \
             history_retention\n",
            name.short_name()
        ));
    }
    let lines: Vec<TimelineLine> =
        response.events.into_iter().map(decode_line).collect::<Result<_, CliError>>()?;
    let rows: Vec<Vec<String>> = lines.iter().map(|line| timeline_row(line, now)).collect();
    let mut text = format_table(&EVENT_HEADERS, &rows, terminal_width());
    if response.more {
        let _ = write!(text, "\nthe newest {}, and there are older ones: raise --limit\n", rows.len());
    }
    text.push_str(&folded_note(lines.iter().filter_map(|line| match line {
        TimelineLine::Routine(fold) => Some(*fold),
        TimelineLine::Event(_) => None,
    })));
    Ok(text)
}
