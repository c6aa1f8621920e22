//! `get machines`: list of machines.

use std::fmt::Write as _;

use clap::Args;
use serde::Serialize;

use crate::client::decode::require_timestamp;
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::page_size;
use crate::error::CliError;
use crate::machine::selection::MachineFilters;
use crate::machine::summary::decode_machine;
use crate::output::table::{format_table, or_dash, terminal_width};
use crate::output::{Format, format_json};
use bmdb::fleet::listing::MachineSummary;
use model::humanize::{humanize_duration, relative_time};
use model::label;
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

pub(crate) const GET_MACHINES_EXAMPLES: &str = "\
Examples:
  shepherdctl get machines --phase NeedsHuman --phase Quarantined
  shepherdctl get machines --label row=7
  shepherdctl get machines --provider rack-a --limit 1000 -o json";

/// Arguments of `get machines`: filters, limit and cursor.
#[derive(Debug, Args)]
pub struct ListMachinesArgs {
    /// Filters that select the machines to list.
    #[command(flatten)]
    pub filters: MachineFilters,
    /// Maximum number of machines to list
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub limit: u32,
    /// Continue after an earlier list; its last lines show the cursor
    #[arg(long, value_name = "CURSOR")]
    pub cursor: Option<String>,
}

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
            "\nfirst {limit}, and there are more: raise --limit, narrow with --phase or --provider, or continue \
             with\n  --cursor '{next}'\n"
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
        let request = v1::ListMachinesRequest {
            filter: Some(filters.filters.to_proto()),
            page_size: page_size(filters.limit, machines.len()),
            page_token: token,
            names: Vec::new(),
        };
        let page = service.list(request).await.map_err(status_to_error)?.into_inner();
        for line in page.machines {
            machines.push(decode_machine(line)?);
        }
        token = page.next_page_token;
        if token.is_empty() || machines.len() >= limit {
            let next = Some(token).filter(|token| !token.is_empty());
            return Ok((machines, next, require_timestamp(page.read_at, "its read time")?));
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
