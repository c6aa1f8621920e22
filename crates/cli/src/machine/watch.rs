//! `get machines --watch`, `watch`: print machines, then a line for each change; reconnect and resume.
//!
//! The stream `Machines.Watch` starts with all machines, and its messages contain a resume token. If the shepherd
//! stops or its host dies, the watch resumes at the next server of the context, for as long as `decide_reconnect`
//! decides. A watch over a connection to the database resumes there. A resumed stream repeats each machine once within
//! some minutes. A machine that has not changed is not printed again.
//!
//! A table begins when the stream has sent all machines, because the widths of its columns follow from them. The JSON
//! of a message is that of the API. Bookmarks are left out.

use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

use clap::Args;
use tokio::time::{Instant, sleep, timeout};
use tonic::Status;
use uuid::Uuid;

use crate::client::decode::{decode_machine_name, decode_timestamp, parse_uuid};
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::client::reconnect::{OUTAGE_LIMIT, ReconnectDecision, decide_reconnect};
use crate::context::CommandContext;
use crate::error::CliError;
use crate::machine::get::{COLUMNS, MachineListArgs, machine_row, shown_name};
use crate::machine::named::fetch_named_machines;
use crate::machine::printed_machines::PrintedMachines;
use crate::machine::selection::MachineFilters;
use crate::machine::summary::decode_machine;
use crate::object::command::GetArgs;
use crate::object::document::ObjectDocument;
use crate::object::kind::ObjectKind;
use crate::object::list::TableStyle;
use crate::object::watch_table::WatchTable;
use crate::output::color::SeverityColors;
use crate::output::table::terminal_width;
use crate::output::{Output, print_chunk, print_stderr, report_error, unresolved_error};
use crate::target_flags::TargetFlags;
use model::machine_view::MachineName;
use model::selector::compose::{any_of, quote_value};
use model::time::{Timestamp, after};
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;
use proto::fleet::v1::watch_machines_response::Event;

pub(crate) const WATCH_EXAMPLES: &str = "\
Examples:
  shepherdctl watch -l 'phase in (NeedsHuman,Quarantined)'
  shepherdctl watch --provider rack-a -o json | jq -c '.machine | [.name.providerId, .phase]'";

/// Longest silence of a stream: the shepherd sends a bookmark every few seconds.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);
/// Most providers in the selector of a watch of names.
const MAX_PROVIDERS: usize = 50;

/// Arguments of `watch`: filters that select the machines.
#[derive(Debug, Args)]
pub struct WatchArgs {
    /// Filters that select the machines.
    #[command(flatten)]
    pub filters: MachineFilters,
}

/// Which machines a watch is about, and how it prints them.
pub(crate) struct WatchRequest<'a> {
    /// Names of machines. Empty: those that the filters select.
    pub(crate) names: &'a [String],
    /// Filters that select machines.
    pub(crate) filters: &'a MachineFilters,
    /// Whether machines that were retired before are left out.
    pub(crate) omits_retired: bool,
    /// Whether a table has the names of its columns above it.
    pub(crate) headers: bool,
    /// The output that the command line requests.
    pub(crate) output: &'a Output,
    /// The colours of a table.
    pub(crate) colors: SeverityColors,
    /// The flags that name the fleet, for commands in messages.
    pub(crate) target_flags: &'a TargetFlags,
}

impl<'a> WatchRequest<'a> {
    /// The request of `watch`.
    pub(crate) fn of_watch(context: &'a CommandContext, args: &'a WatchArgs) -> Self {
        Self {
            names: &[],
            filters: &args.filters,
            omits_retired: !args.filters.selects_retired(),
            headers: true,
            output: &context.output,
            colors: context.colors,
            target_flags: &context.target_flags,
        }
    }

    /// The request of `get machines --watch`.
    pub(crate) fn of_list(context: &'a CommandContext, args: &'a GetArgs, list: &'a MachineListArgs) -> Self {
        Self {
            names: &args.names,
            filters: &list.filters,
            omits_retired: args.names.is_empty() && list.omits_retired(),
            headers: !args.no_headers,
            output: &context.output,
            colors: context.colors,
            target_flags: &context.target_flags,
        }
    }
}

/// The table of a watch, from the moment when its first machines are known.
#[derive(Default)]
enum TableState {
    /// The stream has not sent all machines yet.
    #[default]
    Collecting,
    /// These are the columns, and whether names have their providers.
    Printed(WatchTable, bool),
}

/// Why a stream ended.
enum WatchEnd {
    /// Standard output is closed.
    ReaderGone,
    Status(Status),
    Error(CliError),
}

impl From<Status> for WatchEnd {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

impl From<CliError> for WatchEnd {
    fn from(error: CliError) -> Self {
        Self::Error(error)
    }
}

/// Prints machines and their changes until standard output is closed.
pub(crate) async fn watch_machines(client: &FleetClient, request: &WatchRequest<'_>) -> Result<(), CliError> {
    request.output.require_endless()?;
    let (selector, selected) = select_machines(client, request).await?;
    let mut watching = WatchSession {
        client: client.clone(),
        selector,
        selected,
        output: request.output.clone(),
        colors: request.colors,
        empty: request.target_flags.qualify(ObjectKind::Machine.row().empty),
        headers: request.headers,
        printed: PrintedMachines::new(request.omits_retired),
        first: Vec::new(),
        table: TableState::default(),
        clock: None,
        resume_token: String::new(),
        last_message_at: Instant::now(),
        failures: 0,
    };
    loop {
        let status = match watching.follow_stream().await {
            Err(WatchEnd::ReaderGone) => return Ok(()),
            Err(WatchEnd::Error(error)) => return Err(error),
            Err(WatchEnd::Status(status)) => status,
            Ok(()) => Status::unavailable("the stream ended without a status"),
        };
        watching.handle_stream_end(status).await?;
    }
}

/// The selector of the stream, and the machines of it to print; `None` for all of them. A stream cannot be limited to
/// names, so it has all machines of their providers.
async fn select_machines(
    client: &FleetClient,
    request: &WatchRequest<'_>,
) -> Result<(String, Option<HashSet<Uuid>>), CliError> {
    if request.names.is_empty() {
        return Ok((request.filters.selector_text(), None));
    }
    let named = fetch_named_machines(client, request.names).await?;
    match unresolved_error(&named.unresolved, request.output, request.target_flags) {
        Some(error) if named.machines.is_empty() => return Err(error),
        Some(error) => report_error(&error, request.output, request.target_flags),
        None => {}
    }
    let names = named.machines.into_iter().map(|machine| decode_machine_name(machine.name));
    let names = names.collect::<Result<Vec<MachineName>, CliError>>()?;
    Ok((select_providers(&names), Some(names.iter().map(|name| name.machine).collect())))
}

/// The selector of the providers of these machines. It is empty if one has no provider, because no term about providers
/// is met there, and if there are many providers.
fn select_providers(names: &[MachineName]) -> String {
    let providers: Option<BTreeSet<&str>> = names.iter().map(|name| name.provider.as_deref()).collect();
    let providers = providers.filter(|providers| providers.len() <= MAX_PROVIDERS).unwrap_or_default();
    let quoted: Vec<String> = providers.into_iter().map(quote_value).collect();
    any_of("provider", &quoted).unwrap_or_default()
}

struct WatchSession {
    client: FleetClient,
    /// The selector of the stream.
    selector: String,
    /// The machines to print; `None` for all of the stream.
    selected: Option<HashSet<Uuid>>,
    output: Output,
    colors: SeverityColors,
    /// What is printed if no machine is selected.
    empty: String,
    headers: bool,
    printed: PrintedMachines,
    /// The machines of the table before it is printed, in the order in which they were sent.
    first: Vec<Uuid>,
    table: TableState,
    /// The database's time in the last bookmark, and when it was received.
    clock: Option<(Timestamp, Instant)>,
    /// Where to resume; empty at the start.
    resume_token: String,
    last_message_at: Instant,
    failures: u32,
}

impl WatchSession {
    /// Prints the messages of one stream.
    async fn follow_stream(&mut self) -> Result<(), WatchEnd> {
        let (selector, resume) = (self.selector.clone(), self.resume_token.clone());
        let mut complete = !resume.is_empty();
        self.printed.start_stream();
        let request = v1::WatchMachinesRequest { selector, resume_token: resume };
        let mut stream = MachinesClient::new(self.client.channel()).watch(request).await?.into_inner();
        loop {
            let result = timeout(SILENCE_TIMEOUT, stream.message()).await;
            let response = result.unwrap_or_else(|_| Err(Status::deadline_exceeded("no message in time")))?;
            let Some(response) = response else { return Ok(()) };
            (self.last_message_at, self.failures) = (Instant::now(), 0);
            let is_first = !complete;
            complete = complete || matches!(response.event, Some(Event::Bookmark(_)));
            self.handle_message(&response, is_first)?;
            if !response.resume_token.is_empty() {
                self.resume_token = response.resume_token;
            }
        }
    }

    /// Prints a message. `is_first` is whether the stream has not sent all machines before it.
    fn handle_message(
        &mut self,
        response: &v1::WatchMachinesResponse,
        is_first: bool,
    ) -> Result<(), WatchEnd> {
        match &response.event {
            Some(Event::Machine(machine)) => {
                let id = decode_machine_name(machine.name.clone())?.machine;
                if self.is_selected(id) && self.printed.is_new(id, machine) {
                    self.print_machine(id, machine, response)?;
                }
            }
            Some(Event::RemovedMachine(machine)) => {
                let id = parse_uuid(machine, "a machine's id")?;
                self.print_removed(id, &response.resume_token)?;
            }
            Some(Event::Bookmark(bookmark)) => {
                let read_at = bookmark.read_at.and_then(decode_timestamp);
                self.clock = read_at.map(|at| (at, Instant::now())).or(self.clock);
                if is_first {
                    for machine in self.printed.missing_machines() {
                        self.print_removed(machine, &response.resume_token)?;
                    }
                }
                self.print_table()?;
            }
            None => {}
        }
        Ok(())
    }

    fn is_selected(&self, machine: Uuid) -> bool {
        self.selected.as_ref().is_none_or(|selected| selected.contains(&machine))
    }

    /// The present time of the database, or `None` before the first bookmark.
    fn now(&self) -> Option<Timestamp> {
        self.clock.map(|(at, received)| after(at, received.elapsed()))
    }

    fn print_machine(
        &mut self,
        id: Uuid,
        machine: &v1::Machine,
        response: &v1::WatchMachinesResponse,
    ) -> Result<(), WatchEnd> {
        let text = match (&self.output, &self.table) {
            (Output::Table | Output::Wide, TableState::Collecting) => {
                self.first.push(id);
                return Ok(());
            }
            (Output::Table | Output::Wide, TableState::Printed(table, with_provider)) => {
                let line = decode_machine(machine.clone())?;
                let now = self.now().unwrap_or(line.phase_since);
                let row = machine_row(line, *with_provider, now);
                self.colors.apply(table.format_row(&row, terminal_width()))
            }
            (Output::Name, _) => format!("{}\n", decode_machine_name(machine.name.clone())?.short_name()),
            _ => self.format_message(response)?,
        };
        print_or_end(&text)
    }

    fn print_removed(&mut self, machine: Uuid, resume_token: &str) -> Result<(), WatchEnd> {
        let Some(former) = self.printed.remove(machine) else { return Ok(()) };
        let name = decode_machine_name(former.name)?;
        let text = match (&self.output, &self.table) {
            (Output::Table | Output::Wide, TableState::Collecting) => return Ok(()),
            (Output::Table | Output::Wide, TableState::Printed(table, with_provider)) => {
                table.format_removed(&shown_name(&name, *with_provider), terminal_width())
            }
            (Output::Name, _) => format!("{}\n", name.short_name()),
            _ => self.format_message(&v1::WatchMachinesResponse {
                event: Some(Event::RemovedMachine(machine.to_string())),
                resume_token: resume_token.to_owned(),
            })?,
        };
        print_or_end(&text)
    }

    /// Prints the table of the first machines, if it is not printed yet.
    fn print_table(&mut self) -> Result<(), WatchEnd> {
        let is_table = matches!(self.output, Output::Table | Output::Wide);
        if !is_table || !matches!(self.table, TableState::Collecting) {
            return Ok(());
        }
        if self.first.is_empty() {
            print_stderr(&self.empty);
        }
        let (first, mut known) = (std::mem::take(&mut self.first), HashSet::new());
        // One that changed before the end of the list was sent twice, and one that is gone again is not printed.
        let first = first.iter().filter(|machine| known.insert(**machine));
        let machines = first.filter_map(|machine| self.printed.find(*machine)).cloned();
        let machines = machines.map(decode_machine).collect::<Result<Vec<_>, CliError>>()?;
        let providers: HashSet<Option<&str>> =
            machines.iter().map(|machine| machine.name.provider.as_deref()).collect();
        let with_provider = providers.len() > 1;
        let now = self.now();
        let rows: Vec<Vec<String>> = machines
            .into_iter()
            .map(|machine| {
                let now = now.unwrap_or(machine.phase_since);
                machine_row(machine, with_provider, now)
            })
            .collect();
        let style = TableStyle { wide: self.output == Output::Wide, headers: self.headers };
        let (table, text) = WatchTable::new(&COLUMNS, &rows, style, terminal_width());
        self.table = TableState::Printed(table, with_provider);
        print_or_end(&self.colors.apply(text))
    }

    fn format_message(&self, response: &v1::WatchMachinesResponse) -> Result<String, CliError> {
        self.output.format_line(&ObjectDocument::of_message(response).to_json()?)
    }

    /// Prepares the next stream, or returns why there is none.
    async fn handle_stream_end(&mut self, status: Status) -> Result<(), CliError> {
        let broken = std::error::Error::source(&status).is_some();
        let silence = self.last_message_at.elapsed();
        match decide_reconnect(status.code(), broken, self.failures, silence, rand::random()) {
            ReconnectDecision::Fail => return Err(status_to_error(status)),
            ReconnectDecision::GiveUp => {
                let (minutes, last) = (OUTAGE_LIMIT.as_secs() / 60, status.message());
                return Err(CliError::Failed(if self.client.is_in_process() {
                    format!(
                        "the database has sent nothing for {minutes} minutes (the last error: {last}); start \
                         the watch again when it answers"
                    )
                } else {
                    format!(
                        "no server of this context has sent anything for {minutes} minutes (the last error: \
                         {last}); start the watch again when one answers"
                    )
                }));
            }
            ReconnectDecision::Restart => self.resume_token.clear(),
            ReconnectDecision::ResumeAfter(wait) => {
                self.failures += 1;
                let was = self.client.current_server().to_owned();
                sleep(wait).await;
                // Not fatal: if this fails, the next stream fails too and reports it.
                let went_on = self.client.connect_to_next().await;
                let why =
                    went_on.err().map_or_else(|| status.message().to_owned(), |error| error.to_string());
                print_stderr(&format!(
                    "shepherdctl: the watch at {was} ended ({why}); resuming at {}",
                    self.client.current_server()
                ));
            }
        }
        Ok(())
    }
}

fn print_or_end(text: &str) -> Result<(), WatchEnd> {
    match print_chunk(text) {
        Ok(true) => Ok(()),
        Ok(false) => Err(WatchEnd::ReaderGone),
        Err(error) => Err(WatchEnd::Error(error.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::fleet::v1::Bookmark;

    #[test]
    fn named_machines_are_selected_by_their_providers() {
        let name = |provider: Option<&str>| MachineName {
            machine: Uuid::from_u128(1),
            provider: provider.map(str::to_owned),
            provider_id: None,
        };
        for (providers, expected) in [
            (&[Some("rack b"), Some("rack-a"), Some("rack-a")][..], "provider in (\"rack b\",rack-a)"),
            (&[Some("sim")], "provider=sim"),
            (&[Some("sim"), None], ""),
        ] {
            let names: Vec<MachineName> = providers.iter().map(|provider| name(*provider)).collect();
            assert_eq!(select_providers(&names), expected, "{providers:?}");
        }
        let many: Vec<String> = (0..=MAX_PROVIDERS).map(|number| format!("rack-{number}")).collect();
        let many: Vec<MachineName> = many.iter().map(|provider| name(Some(provider))).collect();
        assert_eq!(select_providers(&many), "", "the list of them is longer than what it leaves out");
    }

    #[test]
    fn message_is_printed_as_the_api_sends_it() {
        let message = |event| v1::WatchMachinesResponse { event: Some(event), resume_token: "t".to_owned() };
        let removed = message(Event::RemovedMachine("m".to_owned()));
        let json = ObjectDocument::of_message(&removed).to_json().unwrap();
        for (output, expected) in [
            ("json", "{\"removedMachine\":\"m\",\"resumeToken\":\"t\"}\n"),
            ("yaml", "---\nremovedMachine: m\nresumeToken: t\n"),
            ("jsonpath={.removedMachine}", "m"),
        ] {
            assert_eq!(Output::parse(output).unwrap().format_line(&json).unwrap(), expected);
        }
        let name = v1::MachineName { provider_id: Some("sim-7".to_owned()), ..v1::MachineName::default() };
        let machine = v1::Machine { name: Some(name), ..v1::Machine::default() };
        let changed = ObjectDocument::of_message(&message(Event::Machine(machine)));
        let line = Output::Json.format_line(&changed.to_json().unwrap()).unwrap();
        assert!(line.contains("\"providerId\":\"sim-7\"") && line.lines().count() == 1, "{line}");
        let bookmark = ObjectDocument::of_message(&message(Event::Bookmark(Bookmark::default())));
        assert!(bookmark.to_json().unwrap().get("machine").is_none());
    }
}
