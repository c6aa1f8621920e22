//! Upload a log to a shepherd in parts, with retries.
//!
//! A part is retried until any shepherd has it: all of them write to the same place, and a part that arrives twice is
//! stored once. An uploader that gives up after a while reports nothing: the shepherds see that no part arrives, and
//! report that to the client that waits.

use std::time::{Duration, SystemTime};

use chrono::{DateTime, Utc};
use curator_client::status_text::describe_status;
use model::ids::MachineId;
use model::log_request::{MAX_FOLLOW, MAX_LINES, MAX_PART_BYTES};
use proto::agent::v1::agent_callback_client::AgentCallbackClient;
use proto::agent::v1::{AvailableLog, LogLines, LogRequest, UploadLogRequest, UploadLogResponse};
use tokio::time::{Instant, sleep};
use tonic::Code;
use tonic::transport::Channel;
use uuid::Uuid;

use crate::logs::sources::{LogLocation, LogSource, LogSources};
use crate::logs::tail::{AppendedLines, read_tail, select_lines};
use crate::server_pool::ServerPool;

/// How long a part is retried if no shepherd takes it. After that no client waits for it any more.
const PART_TIMEOUT: Duration = Duration::from_mins(2);
/// The pause before a retry, and between two reads of appended lines.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How long one call may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a part is sent for a followed log without new lines, to learn whether it is still wanted.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// Sends the parts of a log to shepherds.
pub struct LogUploader {
    server_pool: ServerPool,
    incarnation: Uuid,
    request: String,
    number: u64,
    client: Option<(AgentCallbackClient<Channel>, MachineId)>,
}

/// No client wants more of the log.
#[derive(Debug)]
struct NoLongerWanted;

impl LogUploader {
    /// An uploader to these shepherds, from this start of the role server.
    #[must_use]
    pub const fn new(server_pool: ServerPool, incarnation: Uuid) -> Self {
        Self { server_pool, incarnation, request: String::new(), number: 0, client: None }
    }

    /// Sends one part, with retries until a shepherd has it.
    async fn upload_part(&mut self, part: UploadLogRequest) -> Result<(), NoLongerWanted> {
        let (end, mut failed) = (Instant::now() + PART_TIMEOUT, 0);
        loop {
            match self.call_server(&part, failed).await {
                Ok(answer) if !answer.continue_upload => return Err(NoLongerWanted),
                Ok(answer) if answer.retry_later => {}
                Ok(_) => {
                    self.number += u64::from(part.lines.is_some());
                    return Ok(());
                }
                Err(reason) => {
                    failed += 1;
                    if Instant::now() > end {
                        tracing::warn!(
                            request = self.request,
                            reason,
                            "a log could not be uploaded to a shepherd"
                        );
                        return Err(NoLongerWanted);
                    }
                }
            }
            sleep(RETRY_INTERVAL).await;
        }
    }

    /// Makes one call; the error is a sentence.
    async fn call_server(
        &mut self,
        part: &UploadLogRequest,
        failed: usize,
    ) -> Result<UploadLogResponse, String> {
        let late = |_| format!("no answer within {} s", CALL_TIMEOUT.as_secs());
        if self.client.is_none() {
            let connecting = self.server_pool.connect(failed);
            self.client = Some(tokio::time::timeout(CALL_TIMEOUT, connecting).await.map_err(late)??);
        }
        let Some((client, machine)) = &mut self.client else { return Err(String::new()) };
        let request = UploadLogRequest {
            machine_id: machine.to_string(),
            request_id: self.request.clone(),
            incarnation: self.incarnation.to_string(),
            part_number: self.number,
            ..part.clone()
        };
        let answer = tokio::time::timeout(CALL_TIMEOUT, client.bring_log(request)).await;
        let answer = answer.map_err(late).and_then(|answer| match answer {
            Ok(answer) => Ok(answer.into_inner()),
            // The verdict on this part will not change with a retry.
            Err(status) if status.code() == Code::InvalidArgument => {
                tracing::error!(
                    request = self.request,
                    error = describe_status(&status),
                    "a shepherd refused a part of a log"
                );
                Ok(UploadLogResponse { continue_upload: false, retry_later: false })
            }
            Err(status) => Err(format!("{:?}: {}", status.code(), describe_status(&status))),
        });
        if answer.is_err() {
            self.client = None;
        }
        answer
    }
}

/// Uploads the requested log to its end.
pub async fn upload_log(request: &LogRequest, source: &LogSources, mut to: LogUploader) {
    to.request.clone_from(&request.request_id);
    tracing::info!(request = request.request_id, log = request.log, "a log is uploaded to a shepherd");
    // If no client wants the log any more, no last part has to be sent.
    let _ = upload_requested(request, source, &mut to).await;
}

async fn run_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| format!("reading it ended in the middle: {error}"))
}

fn error_part(error: String) -> UploadLogRequest {
    UploadLogRequest { error, is_last: true, ..UploadLogRequest::default() }
}

fn available_logs(logs: Vec<LogSource>) -> Vec<AvailableLog> {
    logs.into_iter().map(|log| AvailableLog { log: log.name, bytes: log.bytes }).collect()
}

async fn upload_requested(
    request: &LogRequest,
    source: &LogSources,
    to: &mut LogUploader,
) -> Result<(), NoLongerWanted> {
    let (query, logs) = (request.log.clone(), source.clone());
    if query.is_empty() {
        let there = match run_blocking(move || logs.list_logs()).await {
            Ok(there) => there,
            Err(reason) => return to.upload_part(error_part(reason)).await,
        };
        return to
            .upload_part(UploadLogRequest {
                available_logs: available_logs(there),
                is_last: true,
                ..UploadLogRequest::default()
            })
            .await;
    }
    let wanted = request.clone();
    let found = run_blocking(move || match logs.find_log(&query) {
        Ok(log) => read_log(&log, &wanted)
            .map_err(|error| (format!("the log {} cannot be read: {error}", log.name), Vec::new())),
        // The list shows a client, without a look at the sentence, that the log does not exist.
        Err(unknown) => Err((unknown.message, unknown.logs)),
    });
    let (first, note, mut rest) = match found.await.unwrap_or_else(|reason| Err((reason, Vec::new()))) {
        Ok(found) => found,
        Err((reason, logs)) => {
            let part = UploadLogRequest { available_logs: available_logs(logs), ..error_part(reason) };
            return to.upload_part(part).await;
        }
    };
    let mut parts = split_parts(&first);
    if parts.is_empty() {
        // An empty log is a valid response, too.
        parts.push(String::new());
    }
    let count = parts.len();
    for (number, text) in parts.into_iter().enumerate() {
        let note = if number == 0 { note.clone().unwrap_or_default() } else { String::new() };
        to.upload_part(UploadLogRequest {
            lines: Some(text).filter(|text| !text.is_empty()).map(|text| LogLines { text }),
            note,
            is_last: number + 1 == count && !request.follow,
            ..UploadLogRequest::default()
        })
        .await?;
    }
    if request.follow { follow_log(&request.log, &mut rest, to).await } else { Ok(()) }
}

/// Uploads appended lines for as long as they are wanted.
async fn follow_log(name: &str, rest: &mut LogCursor, to: &mut LogUploader) -> Result<(), NoLongerWanted> {
    let (begun, mut time) = (Instant::now(), Instant::now());
    // Bounded, in case no shepherd ever reports that it is no longer wanted.
    while begun.elapsed() < MAX_FOLLOW * 2 {
        sleep(RETRY_INTERVAL).await;
        let mut reading = rest.clone();
        let (after, more) = match run_blocking(move || {
            let more = reading.read_more();
            (reading, more)
        })
        .await
        {
            Ok((after, Ok(more))) => (after, more),
            Ok((_, Err(error))) => {
                return to
                    .upload_part(error_part(format!("the log {name} cannot be read any more: {error}")))
                    .await;
            }
            Err(reason) => return to.upload_part(error_part(reason)).await,
        };
        *rest = after;
        if more.is_empty() && time.elapsed() < KEEPALIVE_INTERVAL {
            continue;
        }
        time = Instant::now();
        if more.is_empty() {
            to.upload_part(UploadLogRequest::default()).await?;
        }
        for text in split_parts(&more) {
            to.upload_part(UploadLogRequest {
                lines: Some(LogLines { text }),
                ..UploadLogRequest::default()
            })
            .await?;
        }
    }
    Ok(())
}

/// A cursor behind the lines that were read.
#[derive(Clone, Debug)]
enum LogCursor {
    File(AppendedLines),
    Ring(crate::logs::ring::LogRing, u64),
    Nothing,
}

impl LogCursor {
    fn read_more(&mut self) -> std::io::Result<Vec<String>> {
        match self {
            Self::File(added) => added.read_more(),
            Self::Ring(ring, place) => {
                let (lines, end) = ring.lines_from(*place);
                *place = end;
                Ok(lines)
            }
            Self::Nothing => Ok(Vec::new()),
        }
    }
}

type LogRead = (Vec<String>, Option<String>, LogCursor);

/// The last lines of a log, a remark about them, and the cursor behind them. Blocks.
fn read_log(log: &LogSource, wanted: &LogRequest) -> std::io::Result<LogRead> {
    let most = usize::try_from(wanted.lines.min(MAX_LINES)).unwrap_or_default();
    let since = Some(Duration::from_secs(wanted.since_seconds)).filter(|since| !since.is_zero());
    // The clock of this machine, which the lines were written with, too.
    let now = DateTime::<Utc>::from(SystemTime::now());
    match &log.location {
        LogLocation::File(path) => {
            // The cursor comes first: a line that is appended in between is sent twice rather than never.
            let rest = if wanted.follow {
                LogCursor::File(AppendedLines::after_last_line(path)?)
            } else {
                LogCursor::Nothing
            };
            let last = read_tail(path, most, since, wanted.follow, now)?;
            Ok((last.lines, last.note, rest))
        }
        LogLocation::Ring(ring) => {
            let (lines, end) = ring.lines_from(0);
            let last = select_lines(lines, most, since, false, now);
            Ok((last.lines, last.note, LogCursor::Ring(ring.clone(), end)))
        }
    }
}

/// Joins lines into parts small enough for a shepherd.
fn split_parts(lines: &[String]) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    for line in lines {
        match parts.last_mut().filter(|part| part.len() + line.len() < MAX_PART_BYTES) {
            Some(part) => part.push_str(line),
            None => parts.push(line.clone()),
        }
        if let Some(part) = parts.last_mut() {
            part.push('\n');
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_have_all_lines_and_are_no_longer_than_they_may_be() {
        assert!(split_parts(&[]).is_empty());
        assert_eq!(split_parts(&[String::new()]), ["\n"], "an empty line is a line");
        let lines: Vec<_> = (0..20_000).map(|number| format!("line {number}")).collect();
        let made = split_parts(&lines);
        assert!(made.len() > 2);
        assert!(made.iter().all(|part| part.len() <= MAX_PART_BYTES && part.ends_with('\n')));
        assert_eq!(made.concat().lines().collect::<Vec<_>>(), lines);
        let edge = vec!["x".repeat(MAX_PART_BYTES / 2 - 1); 2];
        assert_eq!(split_parts(&edge).iter().map(String::len).collect::<Vec<_>>(), [MAX_PART_BYTES]);
    }
}
