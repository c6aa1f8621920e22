//! `get machines`: list of machines.

use std::collections::HashSet;

use clap::Args;

use crate::client::decode::require_timestamp;
use crate::client::fleet_client::FleetClient;
use crate::error::CliError;
use crate::machine::fetch::{fetch_machine_pages, fetch_named_pages};
use crate::machine::selection::MachineFilters;
use crate::machine::summary::decode_machine;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::{Column, ListedObject, ObjectList, ObjectNames};
use crate::output::table::or_dash;
use bmdb::fleet::listing::{HoldSummary, MachineSummary};
use model::humanize::{humanize_duration, relative_time};
use model::label;
use model::machine_view::MachineName;
use model::schedule::is_healthy_reason;
use model::time::{Timestamp, between};
use proto::fleet::v1;

/// Most calls for a page of a screen: each inspects a bounded number of machines, and may find none.
const MAX_CALLS_PER_SCREEN: usize = 4;

/// Place of the phase in a row.
pub(super) const PHASE_COLUMN: usize = 1;

/// Columns of a table of machines.
pub(super) const COLUMNS: [Column; 12] = [
    Column::always("NAME"),
    Column::always("PHASE"),
    Column::always("SINCE"),
    Column::always("HEARTBEAT"),
    Column::always("ADDRESS"),
    Column::if_any("LOCATION"),
    Column::if_any("CLUSTER"),
    Column::if_any("HOLD"),
    Column::if_any("PRIORITY"),
    Column::if_any("LABELS"),
    Column::wide("UUID"),
    Column::always("WHY"),
];

/// Which machines `get machines` lists, unless it names them.
#[derive(Debug, Default, Args)]
pub struct MachineListArgs {
    /// Filters that select the machines to list.
    #[command(flatten)]
    pub filters: MachineFilters,
    /// List retired machines, too
    #[arg(long)]
    pub all: bool,
    /// Continue after an earlier list; the message after it shows the cursor
    #[arg(long, value_name = "CURSOR")]
    pub cursor: Option<String>,
}

impl MachineListArgs {
    /// Whether retired machines are left out: they are only records.
    #[must_use]
    pub fn omits_retired(&self) -> bool {
        !self.all && !self.filters.selects_retired()
    }
}

/// Lists machines by provider, then by the provider's id.
pub(crate) async fn list_machines(
    client: &FleetClient,
    args: &MachineListArgs,
    limit: Option<u32>,
) -> Result<ObjectList, CliError> {
    let request = v1::ListMachinesRequest {
        selector: args.filters.selector_text(),
        page_token: args.cursor.clone().unwrap_or_default(),
        omit_retired: args.omits_retired(),
        ..v1::ListMachinesRequest::default()
    };
    list_pages(client, request, limit, usize::MAX).await
}

/// Lists a part of the machines that a selector chooses, for a screen: at most `size` of them in a bounded number of
/// calls, from the page of `token`, which is empty for the first one. [`ObjectList::cursor`] is the token of the next
/// page. Retired machines are left out, unless the selector names their phase.
pub(crate) async fn list_machine_page(
    client: &FleetClient,
    selector: &str,
    token: &str,
    size: u32,
) -> Result<ObjectList, CliError> {
    let request = v1::ListMachinesRequest {
        selector: selector.to_owned(),
        page_token: token.to_owned(),
        omit_retired: true,
        ..v1::ListMachinesRequest::default()
    };
    list_pages(client, request, Some(size), MAX_CALLS_PER_SCREEN).await
}

/// Lists what a request selects, from its page on, in at most `max_calls` calls.
async fn list_pages(
    client: &FleetClient,
    request: v1::ListMachinesRequest,
    limit: Option<u32>,
    max_calls: usize,
) -> Result<ObjectList, CliError> {
    let pages = fetch_machine_pages(client, request, limit, max_calls, take_machines).await?;
    let cursor = Some(pages.next_token).filter(|token| !token.is_empty());
    let objects = machine_objects(pages.lines);
    let list = ObjectList::of_response(ObjectKind::Machine, &pages.response, &COLUMNS, objects);
    Ok(ObjectList { has_more: cursor.is_some(), cursor, ..list })
}

/// Lists these machines, in the order of their names. The API finds them.
pub(crate) async fn list_named_machines(
    client: &FleetClient,
    names: &[String],
) -> Result<ObjectList, CliError> {
    let (mut machines, mut all) = (Vec::new(), v1::ListMachinesResponse::default());
    for mut page in fetch_named_pages(client, names).await? {
        machines.extend(take_machines(&mut page)?);
        all.unresolved.append(&mut page.unresolved);
        all.read_at = page.read_at;
    }
    let messages = all.unresolved.iter().map(|name| name.message.clone()).collect();
    let list = ObjectList::of_response(ObjectKind::Machine, &all, &COLUMNS, machine_objects(machines));
    Ok(ObjectList { unresolved: Some(messages), ..list })
}

/// A machine of a response, and when it was read.
struct FetchedMachine {
    summary: MachineSummary,
    document: ObjectDocument,
    read_at: Timestamp,
}

/// Moves the machines out of a response.
fn take_machines(page: &mut v1::ListMachinesResponse) -> Result<Vec<FetchedMachine>, CliError> {
    let read_at = require_timestamp(page.read_at, "its read time")?;
    let machines = std::mem::take(&mut page.machines).into_iter();
    let fetched = machines.map(|machine| {
        let document = ObjectDocument::of_message(&machine);
        Ok(FetchedMachine { summary: decode_machine(machine)?, document, read_at })
    });
    fetched.collect()
}

/// The machines as objects. Their rows have the provider in the name if there are several providers.
fn machine_objects(machines: Vec<FetchedMachine>) -> Vec<ListedObject> {
    let providers: HashSet<&Option<String>> =
        machines.iter().map(|machine| &machine.summary.name.provider).collect();
    let with_provider = providers.len() > 1;
    let object = |machine: FetchedMachine| {
        let name = machine.summary.name.short_name();
        let row = machine_row(machine.summary, with_provider, machine.read_at);
        ListedObject { names: ObjectNames::of_name(name), rows: vec![row], document: machine.document }
    };
    machines.into_iter().map(object).collect()
}

/// The name of a machine in a table.
pub(super) fn shown_name(name: &MachineName, with_provider: bool) -> String {
    match &name.provider_id {
        Some(id) if !with_provider => id.clone(),
        _ => name.short_name(),
    }
}

/// A machine as a row. Its name has the provider in a table of several providers.
pub(super) fn machine_row(line: MachineSummary, with_provider: bool, now: Timestamp) -> Vec<String> {
    let name = shown_name(&line.name, with_provider);
    let labels = label::format_labels(&line.labels);
    let uuid = line.name.machine.to_string();
    vec![
        name,
        line.phase,
        humanize_duration(between(line.phase_since, now)),
        line.heartbeat_at.map_or_else(|| "-".to_owned(), |at| relative_time(at, now)),
        or_dash(line.address.as_deref()),
        or_dash(line.location.as_deref()),
        or_dash(line.cluster.as_deref()),
        line.hold.as_ref().map_or_else(|| "-".to_owned(), |hold| format_hold(hold, now)),
        or_dash(line.priority.as_deref()),
        if labels.is_empty() { "-".to_owned() } else { labels },
        uuid,
        match line.working {
            Some(process) => format!("{process} is under way"),
            None if is_healthy_reason(&line.reason) => String::new(),
            None => line.reason,
        },
    ]
}

/// What a hold stops, and when it ends by itself.
fn format_hold(hold: &HoldSummary, now: Timestamp) -> String {
    match hold.until {
        Some(until) => format!("{}, ends {}", hold.scope, relative_time(until, now)),
        None => hold.scope.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::time::after;
    use std::time::Duration;
    use uuid::Uuid;

    fn machine(number: u128, provider: Option<&str>, reason: &str) -> FetchedMachine {
        let provider_id = provider.map(|_| format!("sim-{number}"));
        let name = MachineName {
            machine: Uuid::from_u128(number),
            provider: provider.map(str::to_owned),
            provider_id,
        };
        let summary = MachineSummary {
            name,
            phase: "Ready".to_owned(),
            phase_since: Timestamp::UNIX_EPOCH,
            address: None,
            location: None,
            heartbeat_at: None,
            working: None,
            process: None,
            ready_at: None,
            reason: reason.to_owned(),
            labels: label::Labels::new(),
            priority: None,
            cluster: None,
            hold: None,
        };
        let document = ObjectDocument::Local(serde_json::Value::Null);
        FetchedMachine { summary, document, read_at: Timestamp::UNIX_EPOCH }
    }

    fn column(machines: Vec<FetchedMachine>, index: usize) -> Vec<String> {
        machine_objects(machines).into_iter().map(|object| object.rows[0][index].clone()).collect()
    }

    #[test]
    fn name_has_the_provider_if_there_are_several() {
        let uuid = Uuid::from_u128(3).to_string();
        for (providers, expected) in [
            (vec![Some("a"), Some("a")], vec!["sim-1".to_owned(), "sim-2".to_owned()]),
            (vec![Some("a"), Some("b")], vec!["a/sim-1".to_owned(), "b/sim-2".to_owned()]),
            (vec![Some("a"), Some("a"), None], vec!["a/sim-1".to_owned(), "a/sim-2".to_owned(), uuid]),
        ] {
            let numbered = providers.into_iter().zip(1..);
            let machines = numbered.map(|(provider, number)| machine(number, provider, "r")).collect();
            assert_eq!(column(machines, 0), expected);
        }
    }

    #[test]
    fn healthy_machine_has_no_why() {
        let healthy = "healthy; recovery begins when its agent is silent for 10m";
        let machines = vec![machine(1, Some("a"), healthy), machine(2, Some("a"), "held by kim: a disk")];
        assert_eq!(column(machines, COLUMNS.len() - 1), ["", "held by kim: a disk"]);
    }

    /// The cell of this column, in the row of a machine that `change` has changed.
    fn cell(header: &str, change: impl FnOnce(&mut MachineSummary)) -> String {
        let mut one = machine(1, Some("a"), "newly provided");
        change(&mut one.summary);
        let index = COLUMNS.iter().position(|column| column.header == header).unwrap();
        column(vec![one], index).remove(0)
    }

    #[test]
    fn cells_are_below_their_headers() {
        let hold = |until| {
            let text = str::to_owned;
            Some(HoldSummary { scope: text("power"), reason: text("a disk"), held_by: text("kim"), until })
        };
        let until = after(Timestamp::UNIX_EPOCH, Duration::from_hours(2));
        assert_eq!(cell("LOCATION", |_| ()), "-");
        assert_eq!(cell("LOCATION", |line| line.location = Some("ams-1".to_owned())), "ams-1");
        assert_eq!(cell("CLUSTER", |_| ()), "-");
        assert_eq!(cell("CLUSTER", |line| line.cluster = Some("prod".to_owned())), "prod");
        assert_eq!(cell("HOLD", |_| ()), "-");
        assert_eq!(cell("HOLD", |line| line.hold = hold(None)), "power");
        assert_eq!(cell("HOLD", |line| line.hold = hold(Some(until))), "power, ends in 2h00m");
        assert_eq!(cell("PRIORITY", |line| line.priority = Some("low".to_owned())), "low");
        assert_eq!(cell("UUID", |_| ()), Uuid::from_u128(1).to_string());
        assert_eq!(cell("WHY", |_| ()), "newly provided");
    }

    #[test]
    fn phase_is_where_the_footer_looks_for_it() {
        assert_eq!(COLUMNS[PHASE_COLUMN].header, "PHASE");
        assert_eq!(column(vec![machine(1, Some("a"), "r")], PHASE_COLUMN), ["Ready"]);
    }
}
