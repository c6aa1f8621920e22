//! `get machines`: list of machines.

use std::collections::HashSet;

use clap::Args;

use crate::client::decode::require_timestamp;
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::pagination::page_size;
use crate::error::CliError;
use crate::machine::selection::MachineFilters;
use crate::machine::summary::{decode_machine, name_or_dash};
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use crate::output::table::or_dash;
use bmdb::fleet::listing::MachineSummary;
use model::humanize::{humanize_duration, relative_time};
use model::label;
use model::time::{Timestamp, between};
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

/// Most names that one call of the API takes.
const MAX_NAMES: usize = 100;

const COLUMNS: [Column; 9] = [
    Column::always("MACHINE"),
    Column::always("NAME"),
    Column::always("PHASE"),
    Column::always("SINCE"),
    Column::always("HEARTBEAT"),
    Column::always("ADDRESS"),
    Column::if_any("PRIORITY"),
    Column::if_any("LABELS"),
    Column::always("WHY"),
];

/// Which machines `get machines` lists, unless it names them.
#[derive(Debug, Default, Args)]
pub struct MachineListArgs {
    /// Filters that select the machines to list.
    #[command(flatten)]
    pub filters: MachineFilters,
    /// Continue after an earlier list; the message after it shows the cursor
    #[arg(long, value_name = "CURSOR")]
    pub cursor: Option<String>,
}

/// Lists machines by phase in the order of a machine's life, then provider, then id.
pub(crate) async fn list_machines(
    client: &FleetClient,
    args: &MachineListArgs,
    limit: Option<u32>,
) -> Result<ObjectList, CliError> {
    let mut service = MachinesClient::new(client.channel());
    let (mut objects, mut page_token) = (Vec::new(), args.cursor.clone().unwrap_or_default());
    loop {
        let request = v1::ListMachinesRequest {
            filter: Some(args.filters.to_proto()),
            page_size: page_size(limit, objects.len()),
            page_token,
            ..v1::ListMachinesRequest::default()
        };
        let mut page = service.list(request).await.map_err(status_to_error)?.into_inner();
        objects.extend(take_machines(&mut page)?);
        page_token = page.next_page_token.clone();
        if page_size(limit, objects.len()) == 0 || page_token.is_empty() {
            let list = ObjectList::of_response(ObjectKind::Machine, &page, &COLUMNS, objects);
            let cursor = Some(page_token).filter(|token| !token.is_empty());
            return Ok(ObjectList { has_more: cursor.is_some(), cursor, ..list });
        }
    }
}

/// Lists these machines, in the order of their names. The API finds them.
pub(crate) async fn list_named_machines(
    client: &FleetClient,
    names: &[String],
) -> Result<ObjectList, CliError> {
    let mut service = MachinesClient::new(client.channel());
    let (mut objects, mut all) = (Vec::new(), v1::ListMachinesResponse::default());
    for names in names.chunks(MAX_NAMES) {
        let request = v1::ListMachinesRequest { names: names.to_vec(), ..v1::ListMachinesRequest::default() };
        let mut page = service.list(request).await.map_err(status_to_error)?.into_inner();
        objects.extend(take_machines(&mut page)?);
        all.unresolved.append(&mut page.unresolved);
        all.read_at = page.read_at;
    }
    // Another chunk may name a machine again.
    let mut listed = HashSet::new();
    objects.retain(|object: &ListedObject| listed.insert(object.names.name.clone()));
    let messages = all.unresolved.iter().map(|name| name.message.clone()).collect();
    let list = ObjectList::of_response(ObjectKind::Machine, &all, &COLUMNS, objects);
    Ok(ObjectList { unresolved: Some(messages), ..list })
}

/// Moves the machines out of a response.
fn take_machines(page: &mut v1::ListMachinesResponse) -> Result<Vec<ListedObject>, CliError> {
    let now = require_timestamp(page.read_at, "its read time")?;
    let machines = std::mem::take(&mut page.machines).into_iter();
    machines.map(|machine| machine_object(machine, now)).collect()
}

fn machine_object(machine: v1::Machine, now: Timestamp) -> Result<ListedObject, CliError> {
    let document = ObjectDocument::of_message(&machine);
    let line = decode_machine(machine)?;
    let names = ObjectNames::of_name(line.name.short_name());
    Ok(ListedObject { names, rows: vec![machine_row(line, now)], document })
}

fn machine_row(line: MachineSummary, now: Timestamp) -> Vec<String> {
    let labels = label::format_labels(&line.labels);
    vec![
        line.name.machine.to_string()[..8].to_owned(),
        name_or_dash(&line.name),
        line.phase,
        humanize_duration(between(line.phase_since, now)),
        line.heartbeat_at.map_or_else(|| "-".to_owned(), |at| relative_time(at, now)),
        or_dash(line.address.as_deref()),
        or_dash(line.priority.as_deref()),
        if labels.is_empty() { "-".to_owned() } else { labels },
        match line.working {
            Some(process) => format!("{process} is under way"),
            None => line.reason,
        },
    ]
}
