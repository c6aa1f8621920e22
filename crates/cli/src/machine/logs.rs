//! `logs`: request and follow logs of a machine. `logs M` lists its logs, `logs M LOG` prints one.
//!
//! The request reaches the machine with the response to its next heartbeat, and the machine then uploads the log. So a
//! result takes a while, and a line on standard error reports what the command waits for. The request is an order like
//! any other: it is in the audit, and it can be repeated if its response is lost. The uploaded parts are read from
//! whichever server of the context answers (`LogReader`).

use std::time::{Duration, SystemTime};

use clap::Args;
use tokio::time::{Instant, sleep};
use tonic::Code;
use uuid::Uuid;

use crate::client::decode::decode_machine_name;
use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::context::CommandContext;
use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::machine::outcome::format_response;
use crate::object::document::{ObjectDocument, format_message};
use crate::order::expiry::parse_age;
use crate::order::reason::reason_or_placeholder;
use crate::order::retry::send_order_through;
use crate::output::table::{format_table, terminal_width};
use crate::output::{Format, Output, print_chunk, print_stderr};
use model::byte_size::ByteSize;
use model::log_request::{AvailableLog, DEFAULT_LINES, LogQuery, LogRequestState, MAX_LINES};
use model::machine_view::MachineName;
use model::time::Timestamp;
use proto::fleet::v1;
use proto::fleet::v1::logs_client::LogsClient;

pub(crate) const LOGS_EXAMPLES: &str = "\
Examples:
  shepherdctl logs sim-0007                     which logs there are
  shepherdctl logs sim-0007 roleserver --since 10m
  shepherdctl logs sim-0007 web/server --lines 1000 --follow
  shepherdctl logs sim-0007 etcd -o json | jq -r '.lines[]'

The machine gets the request with the answer to its next heartbeat, and sends the log itself; nobody
connects to it. A silent machine gets no request. The audit records who requested which log.";

/// Interval between two polls for new parts.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// How long to retry while no server answers.
const SERVER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait without a report on standard error.
const SILENT_WAIT: Duration = Duration::from_secs(2);

/// Arguments of `logs`: the machine, the log, and how much of it.
#[derive(Debug, Args)]
pub struct LogsArgs {
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID
    #[arg(value_name = "M")]
    pub machine: String,
    /// Log to show: roleserver, etcd, or ROLE/SERVICE [default: list the logs]
    #[arg(value_name = "LOG")]
    pub log: Option<String>,
    /// Maximum number of lines, from the end of the log
    #[arg(long, value_name = "N", default_value_t = DEFAULT_LINES, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_LINES)))]
    pub lines: u32,
    /// Only lines since then: a time, or a duration before now (10m), by the machine's clock
    #[arg(long, value_name = "WHEN")]
    pub since: Option<String>,
    /// Follow the log, for at most an hour
    #[arg(long, short, requires = "log")]
    pub follow: bool,
    /// Why, for the audit
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

impl LogsArgs {
    /// The request, at `now` by the clock of this host.
    fn query(&self, now: Timestamp) -> Result<LogQuery, CliError> {
        let since = self.since.as_deref().map(|since| parse_age("since", since, now)).transpose()?;
        let log = self.log.clone().unwrap_or_default();
        let query = LogQuery { log, lines: self.lines, since, follow: self.follow };
        query.validate().map_err(|(_, text)| CliError::Invalid(text))?;
        Ok(query)
    }
}

/// Outcome of a log request.
enum LogRequestOutcome {
    /// It was a dry run, so there is nothing to read.
    DryRun(Box<v1::OrderResponse>),
    /// The request was accepted; the reader returns the log.
    Accepted(Box<LogReader>),
}

/// Reads the uploaded parts of one log request.
struct LogReader {
    client: FleetClient,
    name: MachineName,
    request: Uuid,
    parts_read: u64,
    /// When a server last answered.
    responded_at: Instant,
    started_at: Instant,
    wait_reported: bool,
}

/// Lines and state of a request since the last read.
struct LogUpdate {
    state: LogRequestState,
    lines: Vec<String>,
    available_logs: Vec<AvailableLog>,
    note: Option<String>,
    /// The response of the API, as programs get it.
    response: v1::ReadLogResponse,
}

async fn request_log(context: &CommandContext, args: &LogsArgs) -> Result<LogRequestOutcome, CliError> {
    let query = args.query(Timestamp::from(SystemTime::now()))?;
    let mut client = context.client.clone();
    let give = async |service, order| {
        let request = v1::RequestLogRequest {
            machine: args.machine.clone(),
            order: Some(order),
            log: query.log.clone(),
            lines: query.lines,
            since: query.since.map(|since| since.to_string()).unwrap_or_default(),
            follow: query.follow,
        };
        LogsClient::new(service).request(request).await
    };
    let reason = reason_or_placeholder(args.reason.as_deref());
    let response = send_order_through(&mut client, context, reason, give).await?;
    let order = response.order.unwrap_or_default();
    let name = decode_machine_name(order.name.clone())?;
    let request: Option<Uuid> = response.request_id.parse().ok();
    let now = Instant::now();
    Ok(match request.filter(|_| !context.order_flags.dry_run) {
        None => LogRequestOutcome::DryRun(Box::new(order)),
        Some(request) => LogRequestOutcome::Accepted(Box::new(LogReader {
            client,
            name,
            request,
            parts_read: 0,
            responded_at: now,
            started_at: now,
            wait_reported: false,
        })),
    })
}

impl LogReader {
    /// Waits until new lines have arrived or the request has ended.
    async fn next_update(&mut self) -> Result<LogUpdate, CliError> {
        loop {
            let came = self.fetch_update().await?;
            match &came.state {
                LogRequestState::Waiting(text) => {
                    if !self.wait_reported && self.started_at.elapsed() > SILENT_WAIT {
                        self.wait_reported = true;
                        print_stderr(&format!("shepherdctl: waiting for {}: {text}", self.name.short_name()));
                    }
                }
                LogRequestState::Receiving if came.lines.is_empty() => {}
                LogRequestState::Receiving | LogRequestState::Ended(_) => return Ok(came),
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    async fn fetch_update(&mut self) -> Result<LogUpdate, CliError> {
        loop {
            let request = v1::ReadLogRequest {
                machine: self.name.machine.to_string(),
                request_id: self.request.to_string(),
                parts_read: self.parts_read,
            };
            let status = match LogsClient::new(self.client.channel()).read(request).await {
                Ok(response) => {
                    self.responded_at = Instant::now();
                    return self.decode_update(response.into_inner());
                }
                Err(status) => status,
            };
            let broken = std::error::Error::source(&status).is_some();
            let lost = matches!(
                status.code(),
                Code::Unavailable
                    | Code::DeadlineExceeded
                    | Code::Cancelled
                    | Code::Unknown
                    | Code::ResourceExhausted
            );
            if !(broken || lost) || self.responded_at.elapsed() > SERVER_TIMEOUT {
                return Err(status_to_error(status));
            }
            sleep(POLL_INTERVAL).await;
            // If this server does not answer either, the next call fails and reports it.
            let _ = self.client.connect_to_next().await;
        }
    }

    fn decode_update(&mut self, response: v1::ReadLogResponse) -> Result<LogUpdate, CliError> {
        self.parts_read = response.parts_read;
        let why = Some(response.message.clone()).filter(|text| !text.is_empty());
        let state = match response.state.as_str() {
            "waiting" => LogRequestState::Waiting(why.unwrap_or_default()),
            "receiving" => LogRequestState::Receiving,
            "ended" => LogRequestState::Ended(why),
            other => {
                return Err(CliError::Failed(format!(
                    "the API reports the unknown request state {other:?}; update shepherdctl"
                )));
            }
        };
        Ok(LogUpdate {
            state,
            lines: response.lines.clone(),
            available_logs: response
                .available_logs
                .iter()
                .map(|log| AvailableLog { log: log.log.clone(), bytes: log.bytes })
                .collect(),
            note: Some(response.note.clone()).filter(|note| !note.is_empty()),
            response,
        })
    }

    /// Acknowledges the last part, so that the server can delete it.
    async fn acknowledge(&mut self) {
        // Best effort: without an acknowledgement, retention deletes the log later.
        if self.parts_read > 0 {
            let _ = tokio::time::timeout(POLL_INTERVAL * 4, self.fetch_update()).await;
        }
    }

    /// The error of a request for `log` that ended with `text`. A machine without such a log sends a list of those that
    /// it has.
    fn failure(&self, log: Option<&str>, text: &str, available_logs: &[AvailableLog]) -> CliError {
        let message = format!("{}: {text}", self.name.short_name());
        if is_unknown(log, available_logs) {
            return CliError::Ended { exit: ExitCode::NotFound, message };
        }
        CliError::Failed(message)
    }
}

/// Whether a machine that has these logs lacks the requested one.
fn is_unknown(log: Option<&str>, available_logs: &[AvailableLog]) -> bool {
    log.is_some_and(|log| !available_logs.is_empty() && available_logs.iter().all(|there| there.log != log))
}

/// Runs `logs` without `--follow`: waits for the whole log and prints it. Programs get the last response of the API,
/// with the lines of all of them.
pub async fn show_log(context: &CommandContext, args: &LogsArgs) -> Result<String, CliError> {
    let mut reader = match request_log(context, args).await? {
        LogRequestOutcome::DryRun(order) => return format_response(context, &order),
        LogRequestOutcome::Accepted(reader) => reader,
    };
    let (mut lines, mut last) = (Vec::new(), None);
    while last.is_none() {
        let mut came = reader.next_update().await?;
        lines.append(&mut came.lines);
        if let LogRequestState::Ended(failed) = came.state.clone() {
            last = Some((failed, came));
        }
    }
    reader.acknowledge().await;
    let Some((failed, came)) = last else { return Ok(String::new()) };
    if let Some(text) = failed {
        if context.format == Format::Table {
            // Print the lines that arrived before the failure.
            print_chunk(&join_lines(&lines))?;
        }
        return Err(reader.failure(args.log.as_deref(), &text, &came.available_logs));
    }
    if context.format == Format::Json {
        return format_message(&v1::ReadLogResponse { lines, ..came.response });
    }
    match &args.log {
        None if came.available_logs.is_empty() => {
            Ok(format!("{} has no log yet\n", reader.name.short_name()))
        }
        None => {
            let rows: Vec<_> = came
                .available_logs
                .iter()
                .map(|there| vec![there.log.clone(), ByteSize(there.bytes).humanize()])
                .collect();
            Ok(format_table(&["LOG", "SIZE"], &rows, terminal_width()))
        }
        Some(_) => {
            print_note(came.note.as_deref());
            Ok(join_lines(&lines))
        }
    }
}

/// Runs `logs M LOG --follow`: prints lines as they arrive, or each response with lines as the API sends it.
pub async fn follow_log(context: &CommandContext, args: &LogsArgs, output: &Output) -> Result<(), CliError> {
    if matches!(output, Output::CustomColumns(_)) {
        return Err(CliError::Invalid(
            "--follow cannot print columns, because the output has no end; use -o json".to_owned(),
        ));
    }
    let mut reader = match request_log(context, args).await? {
        LogRequestOutcome::DryRun(order) => {
            print_chunk(&output.convert(format_response(context, &order)?)?)?;
            return Ok(());
        }
        LogRequestOutcome::Accepted(reader) => reader,
    };
    let mut noted = false;
    loop {
        let came = reader.next_update().await?;
        if !noted {
            noted = true;
            print_note(came.note.as_deref());
        }
        let shown = match output.format() {
            Format::Table => join_lines(&came.lines),
            Format::Json => output.format_line(&ObjectDocument::of_message(&came.response).to_json()?)?,
        };
        // Standard output is closed, so stop.
        if !print_chunk(&shown)? {
            return Ok(());
        }
        match came.state {
            LogRequestState::Ended(None) => return Ok(()),
            LogRequestState::Ended(Some(text)) => {
                return Err(reader.failure(args.log.as_deref(), &text, &came.available_logs));
            }
            LogRequestState::Waiting(_) | LogRequestState::Receiving => {}
        }
        sleep(POLL_INTERVAL).await;
    }
}

fn join_lines(lines: &[String]) -> String {
    lines.iter().flat_map(|line| [line.as_str(), "\n"]).collect()
}

fn print_note(note: Option<&str>) {
    if let Some(note) = note {
        print_stderr(&format!("shepherdctl: {note}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use clap::Parser as _;
    use model::time::Span;

    #[derive(Debug, clap::Parser)]
    struct Command {
        #[command(flatten)]
        logs: LogsArgs,
    }

    #[test]
    fn lines_are_requested_since_a_time_or_for_a_duration() {
        let now = "2026-11-20T18:00:00Z".parse().unwrap();
        for (since, expected) in [
            ("10m", Some(Span::minutes(10))),
            ("2026-11-20T17:00:00Z", Some(Span::seconds(3601))),
            ("2026-11-20T19:00:00+01:00", Some(Span::seconds(1))),
            ("2026-11-20T19:00:00Z", None),
            ("9999d", None),
            ("soon", None),
        ] {
            let command = Command::try_parse_from(["p", "sim-1", "etcd", "--since", since]).unwrap();
            let found = command.logs.query(now);
            assert_eq!(found.ok().and_then(|query| query.since), expected, "{since}");
        }
    }

    #[test]
    fn log_is_unknown_if_the_machine_lists_others_alone() {
        let logs = [AvailableLog { log: "roleserver".to_owned(), bytes: 7 }];
        for (log, available_logs, expected) in [
            (Some("etcd"), &logs[..], true),
            (Some("roleserver"), &logs, false),
            // A failure of another kind, or a role server of an earlier release.
            (Some("etcd"), &[], false),
            (None, &logs, false),
        ] {
            assert_eq!(is_unknown(log, available_logs), expected, "{log:?} {available_logs:?}");
        }
    }
}
