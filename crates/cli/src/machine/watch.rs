//! `watch`: print machines as they change; reconnect and resume.
//!
//! The stream `Machines.Watch` starts with all machines, and its messages contain a resume token. If the shepherd
//! stops or its host dies, the watch resumes at the next server of the context, for as long as `decide_reconnect`
//! decides. A watch over a connection to the database resumes there. A resumed stream repeats each machine once within
//! some minutes. A machine that has not changed is not printed again.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use backoff::ExponentialBackoff;
use clap::Args;
use serde::Serialize;
use tokio::time::{Instant, sleep, timeout};
use tonic::{Code, Status};
use uuid::Uuid;

use crate::client::decode::parse_uuid;
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::error::CliError;
use crate::machine::selection::MachineFilters;
use crate::machine::summary::decode_machine;
use crate::output::table::pad_right;
use crate::output::{Format, Output, print_chunk, print_stderr, yaml};
use bmdb::fleet::listing::MachineSummary;
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;
use proto::fleet::v1::watch_machines_response::Event;

pub(crate) const WATCH_EXAMPLES: &str = "\
Examples:
  shepherdctl watch -l 'phase in (NeedsHuman,Quarantined)'
  shepherdctl watch --provider rack-a -o json | jq -c '[.event, .provider_id, .phase]'";

/// Longest silence of a stream: the shepherd sends a bookmark every few seconds.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to retry while no server answers.
const OUTAGE_LIMIT: Duration = Duration::from_mins(5);
/// The waits before a reconnection. The shortest is 200 ms.
const RECONNECT_BACKOFF: ExponentialBackoff =
    ExponentialBackoff { initial: Duration::from_millis(400), factor: 2.0, max: Duration::from_secs(5) };

/// Arguments of `watch`: filters that select the machines.
#[derive(Debug, Args)]
pub struct WatchArgs {
    /// Filters that select the machines.
    #[command(flatten)]
    pub filters: MachineFilters,
}

/// What to do after the end of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReconnectDecision {
    /// The watch was rejected: return the error.
    Fail,
    /// Start again, without a resume token.
    Restart,
    /// Resume at the next server after this wait.
    ResumeAfter(Duration),
    /// No server has answered for too long.
    GiveUp,
}

/// Decides what to do after the end of a stream with this code. `broken` is whether the client created the status
/// because the connection ended. `failures` counts the streams in a row without a message, and `unheard` is the time
/// since the last message. `roll` is uniform in 0..1.
fn decide_reconnect(
    code: Code,
    broken: bool,
    failures: u32,
    unheard: Duration,
    roll: f64,
) -> ReconnectDecision {
    let passes = matches!(
        code,
        Code::Ok
            | Code::Unavailable
            | Code::Cancelled
            | Code::Unknown
            | Code::DeadlineExceeded
            // The server has too many watches, or this client reads too slowly.
            | Code::ResourceExhausted
    );
    match code {
        Code::OutOfRange => ReconnectDecision::Restart,
        _ if !passes && !broken => ReconnectDecision::Fail,
        _ if unheard >= OUTAGE_LIMIT => ReconnectDecision::GiveUp,
        _ => ReconnectDecision::ResumeAfter(RECONNECT_BACKOFF.delay(failures.saturating_add(1), roll)),
    }
}

/// The printed state of each machine, and the machines of the current stream.
#[derive(Default)]
struct PrintedMachines {
    machines: HashMap<Uuid, MachineSummary>,
    in_this_stream: HashSet<Uuid>,
}

impl PrintedMachines {
    /// Starts another stream: clears the set of its machines.
    fn start_stream(&mut self) {
        self.in_this_stream.clear();
    }

    /// Whether to print this machine. A new stream repeats each machine, and an unchanged one is not printed again.
    fn is_new(&mut self, line: &MachineSummary) -> bool {
        let machine = line.name.machine;
        let steady = MachineSummary { heartbeat_at: None, ready_at: None, ..line.clone() };
        let again = self.in_this_stream.insert(machine);
        let same = self.machines.get(&machine) == Some(&steady);
        self.machines.insert(machine, steady);
        !(again && same)
    }

    /// Removes a machine, and returns whether it was printed before.
    fn remove(&mut self, machine: Uuid) -> bool {
        self.in_this_stream.remove(&machine);
        self.machines.remove(&machine).is_some()
    }

    /// Printed machines that are not in the current stream, once it has sent all machines.
    fn missing_machines(&self) -> Vec<Uuid> {
        self.machines.keys().filter(|machine| !self.in_this_stream.contains(machine)).copied().collect()
    }
}

/// One line of output for programs.
#[derive(Serialize)]
struct WatchLine<'a> {
    /// `machine` for a state, `removed` for a removal.
    event: &'static str,
    #[serde(flatten)]
    summary: Option<&'a MachineSummary>,
    #[serde(skip_serializing_if = "Option::is_none", rename = "machine")]
    removed: Option<Uuid>,
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

/// Runs `watch`: prints changes until standard output is closed.
pub async fn watch_machines(
    client: &FleetClient,
    filters: &WatchArgs,
    output: &Output,
) -> Result<(), CliError> {
    if matches!(output, Output::CustomColumns(_)) {
        return Err(CliError::Invalid(
            "a watch cannot align columns, because it has no end; use -o jsonpath=TEMPLATE".to_owned(),
        ));
    }
    let mut watching = WatchSession {
        client: client.clone(),
        selector: filters.filters.selector_text(),
        output: output.clone(),
        printed: PrintedMachines::default(),
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

struct WatchSession {
    client: FleetClient,
    selector: String,
    output: Output,
    printed: PrintedMachines,
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
            match response.event {
                Some(Event::Machine(machine)) => {
                    let line = decode_machine(machine)?;
                    if self.printed.is_new(&line) {
                        self.print_machine(&line)?;
                    }
                }
                Some(Event::RemovedMachine(machine)) => {
                    let machine = parse_uuid(&machine, "a machine's id")?;
                    self.print_removed(machine)?;
                }
                Some(Event::Bookmark(_)) if !complete => {
                    complete = true;
                    for machine in self.printed.missing_machines() {
                        self.print_removed(machine)?;
                    }
                }
                Some(Event::Bookmark(_)) | None => {}
            }
            if !response.resume_token.is_empty() {
                self.resume_token = response.resume_token;
            }
        }
    }

    fn print_machine(&self, line: &MachineSummary) -> Result<(), WatchEnd> {
        let text = match (&self.output, self.output.format()) {
            (_, Format::Table) => machine_row(line),
            (Output::Name, _) => format!("{}\n", line.name.short_name()),
            _ => self.format_line(&WatchLine { event: "machine", summary: Some(line), removed: None })?,
        };
        print_or_end(&text)
    }

    fn print_removed(&mut self, machine: Uuid) -> Result<(), WatchEnd> {
        if !self.printed.remove(machine) {
            return Ok(());
        }
        let text = match (&self.output, self.output.format()) {
            (_, Format::Table) => {
                format!("{:.8}  {:<24}  removed, or no longer matched\n", machine.to_string(), "-")
            }
            (Output::Name, _) => format!("{machine}\n"),
            _ => self.format_line(&WatchLine { event: "removed", summary: None, removed: Some(machine) })?,
        };
        print_or_end(&text)
    }

    fn format_line(&self, line: &WatchLine<'_>) -> Result<String, CliError> {
        Ok(match &self.output {
            Output::Yaml => format!("---\n{}", yaml::format_document(&serde_json::to_value(line)?)?),
            Output::JsonPath(template) => template.render(&serde_json::to_value(line)?),
            _ => format!("{}\n", serde_json::to_string(line)?),
        })
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

/// A machine as a line of a log.
fn machine_row(line: &MachineSummary) -> String {
    let why = match &line.working {
        Some(process) => format!("{process} is under way"),
        None => line.reason.clone(),
    };
    let name = if line.name.provider_id.is_some() { line.name.short_name() } else { "-".to_owned() };
    let since = line.phase_since.format("%Y-%m-%d %H:%M:%S");
    let why = why.replace(['\n', '\r', '\t'], " ");
    let (id, name) = (line.name.machine.to_string(), pad_right(&name, 24));
    format!("{id:.8}  {name}  {:<16}  since {since}  {why}\n", line.phase)
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
    use model::machine_view::MachineName;
    use model::time::Timestamp;

    #[test]
    fn transient_errors_are_retried_for_a_bounded_time() {
        let (millis, long) = (Duration::from_millis, OUTAGE_LIMIT);
        for (code, broken, failures, unheard, expected) in [
            (Code::Unavailable, false, 0, millis(0), ReconnectDecision::ResumeAfter(millis(400))),
            (Code::Ok, false, 0, millis(0), ReconnectDecision::ResumeAfter(millis(400))),
            (Code::Unknown, true, 2, millis(0), ReconnectDecision::ResumeAfter(millis(1600))),
            (Code::DeadlineExceeded, false, 99, millis(0), ReconnectDecision::ResumeAfter(millis(5000))),
            (Code::ResourceExhausted, false, 1, millis(0), ReconnectDecision::ResumeAfter(millis(800))),
            (Code::Internal, true, 0, millis(0), ReconnectDecision::ResumeAfter(millis(400))),
            (Code::Internal, false, 0, millis(0), ReconnectDecision::Fail),
            (Code::Unauthenticated, false, 0, millis(0), ReconnectDecision::Fail),
            (Code::InvalidArgument, false, 0, long, ReconnectDecision::Fail),
            (Code::OutOfRange, false, 0, long, ReconnectDecision::Restart),
            (Code::Unavailable, false, 3, long, ReconnectDecision::GiveUp),
        ] {
            assert_eq!(
                decide_reconnect(code, broken, failures, unheard, 1.0),
                expected,
                "{code:?} {broken} {failures}"
            );
        }
        let soonest = decide_reconnect(Code::Unavailable, false, 0, millis(0), 0.0);
        assert_eq!(soonest, ReconnectDecision::ResumeAfter(millis(200)));
    }

    fn line(number: u128, phase: &str) -> MachineSummary {
        let name = MachineName { machine: Uuid::from_u128(number), provider: None, provider_id: None };
        MachineSummary {
            name,
            phase: phase.to_owned(),
            phase_since: Timestamp::UNIX_EPOCH,
            address: None,
            location: None,
            heartbeat_at: None,
            working: None,
            process: None,
            ready_at: None,
            reason: "because\nof that".to_owned(),
            labels: model::label::Labels::new(),
            priority: None,
            cluster: None,
            hold: None,
        }
    }

    #[test]
    fn new_stream_prints_only_changed_machines() {
        let mut seen = PrintedMachines::default();
        assert!(seen.is_new(&line(1, "Ready")) && seen.is_new(&line(2, "Ready")));
        assert!(seen.is_new(&line(1, "Silent")));
        seen.start_stream();
        let summary = MachineSummary { heartbeat_at: Some(Timestamp::UNIX_EPOCH), ..line(1, "Silent") };
        assert!(!seen.is_new(&summary), "nothing but a heartbeat is other");
        assert!(seen.is_new(&summary), "the same stream tells what it knows to be other");
        assert_eq!(seen.missing_machines(), [Uuid::from_u128(2)]);
        assert!(seen.remove(Uuid::from_u128(2)) && !seen.remove(Uuid::from_u128(2)));
        assert!(seen.is_new(&line(2, "New")), "it is back");
    }

    #[test]
    fn line_is_one_line() {
        let text = machine_row(&line(1, "Ready"));
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.ends_with("because of that\n"), "{text}");
    }
}
