//! From a log to a shepherd, in parts.
//!
//! A part is brought until a shepherd has it, whichever: they all write into the same place, and a part that comes twice is
//! kept once. Who gives up after a while has nothing more to say: whoever waits is told by the shepherds, who see that
//! nothing comes.

use std::time::{Duration, SystemTime};

use chrono::{DateTime, Utc};
use tokio::time::{Instant, sleep};
use tonic::Code;
use tonic::transport::Channel;
use uuid::Uuid;

use crate::model::ids::MachineId;
use crate::model::log_request::{LONGEST_FOLLOW, MOST_LINES, PART_LIMIT};
use crate::proto::agent::v1::agent_callback_client::AgentCallbackClient;
use crate::proto::agent::v1::{BringLogRequest, BringLogResponse, LogLines, LogRequest, LogThere};
use crate::roleserver::logs::tail::{Added, narrowed, tail};
use crate::roleserver::logs::there::{Log, Place, Source};
use crate::roleserver::shepherds::Shepherds;

/// How long a part is brought that no shepherd takes. By then nobody waits for it any more.
const PATIENCE: Duration = Duration::from_mins(2);
/// The pause before it is brought again, and between two looks at what was added.
const PAUSE: Duration = Duration::from_secs(1);
/// How long one call may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a shepherd is asked whether a log is wanted to which nothing is added.
const STILL_WANTED: Duration = Duration::from_secs(10);

/// Where parts are brought.
pub struct Bringer {
    shepherds: Shepherds,
    incarnation: Uuid,
    request: String,
    number: u64,
    client: Option<(AgentCallbackClient<Channel>, MachineId)>,
}

/// Nobody wants more of it.
#[derive(Debug)]
struct Unwanted;

impl Bringer {
    /// To these shepherds, from that start of the role server.
    #[must_use]
    pub const fn new(shepherds: Shepherds, incarnation: Uuid) -> Self {
        Self { shepherds, incarnation, request: String::new(), number: 0, client: None }
    }

    /// Brings one part, until a shepherd has it.
    async fn part(&mut self, part: BringLogRequest) -> Result<(), Unwanted> {
        let (end, mut failed) = (Instant::now() + PATIENCE, 0);
        loop {
            match self.call(&part, failed).await {
                Ok(answer) if !answer.wanted => return Err(Unwanted),
                Ok(answer) if answer.later => {}
                Ok(_) => {
                    self.number += u64::from(part.lines.is_some());
                    return Ok(());
                }
                Err(said) => {
                    failed += 1;
                    if Instant::now() > end {
                        tracing::warn!(
                            request = self.request,
                            said,
                            "a log could not be brought to a shepherd"
                        );
                        return Err(Unwanted);
                    }
                }
            }
            sleep(PAUSE).await;
        }
    }

    /// The error is a sentence.
    async fn call(&mut self, part: &BringLogRequest, failed: usize) -> Result<BringLogResponse, String> {
        let late = |_| format!("no answer within {} s", CALL_TIMEOUT.as_secs());
        if self.client.is_none() {
            let connecting = self.shepherds.connect(failed);
            self.client = Some(tokio::time::timeout(CALL_TIMEOUT, connecting).await.map_err(late)??);
        }
        let Some((client, machine)) = &mut self.client else { return Err(String::new()) };
        let request = BringLogRequest {
            machine_id: machine.to_string(),
            request: self.request.clone(),
            incarnation: self.incarnation.to_string(),
            number: self.number,
            ..part.clone()
        };
        let answer = tokio::time::timeout(CALL_TIMEOUT, client.bring_log(request)).await;
        let answer = answer.map_err(late).and_then(|answer| match answer {
            Ok(answer) => Ok(answer.into_inner()),
            // What it says of this part it says of it for ever.
            Err(status) if status.code() == Code::InvalidArgument => {
                tracing::error!(
                    request = self.request,
                    said = status.message(),
                    "a shepherd refused a part of a log"
                );
                Ok(BringLogResponse { wanted: false, later: false })
            }
            Err(status) => Err(format!("{:?}: {}", status.code(), status.message())),
        });
        if answer.is_err() {
            self.client = None;
        }
        answer
    }
}

/// Brings what is asked for to its end.
pub async fn bring(request: &LogRequest, source: &Source, mut to: Bringer) {
    to.request.clone_from(&request.request);
    tracing::info!(request = request.request, log = request.log, "a log is brought to a shepherd");
    // What nobody wants needs no end.
    let _ = answer(request, source, &mut to).await;
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| format!("reading it ended in the middle: {error}"))
}

fn failure(error: String) -> BringLogRequest {
    BringLogRequest { error, last: true, ..BringLogRequest::default() }
}

async fn answer(request: &LogRequest, source: &Source, to: &mut Bringer) -> Result<(), Unwanted> {
    let (asked, logs) = (request.log.clone(), source.clone());
    if asked.is_empty() {
        let there = match blocking(move || logs.there()).await {
            Ok(there) => there,
            Err(said) => return to.part(failure(said)).await,
        };
        let there = there.into_iter().map(|log| LogThere { log: log.name, bytes: log.bytes }).collect();
        return to.part(BringLogRequest { there, last: true, ..BringLogRequest::default() }).await;
    }
    let wanted = request.clone();
    let found = blocking(move || {
        let log = logs.find(&asked)?;
        read(&log, &wanted).map_err(|error| format!("the log {} cannot be read: {error}", log.name))
    });
    let (first, note, mut rest) = match found.await.and_then(|found| found) {
        Ok(found) => found,
        Err(said) => return to.part(failure(said)).await,
    };
    let mut parts = parts(&first);
    if parts.is_empty() {
        // That there is nothing is an answer, too.
        parts.push(String::new());
    }
    let count = parts.len();
    for (number, text) in parts.into_iter().enumerate() {
        let note = if number == 0 { note.clone().unwrap_or_default() } else { String::new() };
        to.part(BringLogRequest {
            lines: Some(text).filter(|text| !text.is_empty()).map(|text| LogLines { text }),
            note,
            last: number + 1 == count && !request.follow,
            ..BringLogRequest::default()
        })
        .await?;
    }
    if request.follow { follow(&request.log, &mut rest, to).await } else { Ok(()) }
}

/// Brings what is added, for as long as somebody wants it.
async fn follow(name: &str, rest: &mut Rest, to: &mut Bringer) -> Result<(), Unwanted> {
    let (begun, mut said) = (Instant::now(), Instant::now());
    // Whoever forgets to say that it is wanted no more does not have it for ever.
    while begun.elapsed() < LONGEST_FOLLOW * 2 {
        sleep(PAUSE).await;
        let mut reading = rest.clone();
        let (after, more) = match blocking(move || {
            let more = reading.more();
            (reading, more)
        })
        .await
        {
            Ok((after, Ok(more))) => (after, more),
            Ok((_, Err(error))) => {
                return to.part(failure(format!("the log {name} cannot be read any more: {error}"))).await;
            }
            Err(said) => return to.part(failure(said)).await,
        };
        *rest = after;
        if more.is_empty() && said.elapsed() < STILL_WANTED {
            continue;
        }
        said = Instant::now();
        if more.is_empty() {
            to.part(BringLogRequest::default()).await?;
        }
        for text in parts(&more) {
            to.part(BringLogRequest { lines: Some(LogLines { text }), ..BringLogRequest::default() }).await?;
        }
    }
    Ok(())
}

/// What comes after the lines that were read.
#[derive(Clone, Debug)]
enum Rest {
    File(Added),
    Ring(crate::roleserver::logs::ring::Ring, u64),
    Nothing,
}

impl Rest {
    fn more(&mut self) -> std::io::Result<Vec<String>> {
        match self {
            Self::File(added) => added.more(),
            Self::Ring(ring, place) => {
                let (lines, end) = ring.from(*place);
                *place = end;
                Ok(lines)
            }
            Self::Nothing => Ok(Vec::new()),
        }
    }
}

type Lines = (Vec<String>, Option<String>, Rest);

/// The last lines of a log, what there is to know of them, and what comes after. Blocks.
fn read(log: &Log, wanted: &LogRequest) -> std::io::Result<Lines> {
    let most = usize::try_from(wanted.lines.min(MOST_LINES)).unwrap_or_default();
    let since = Some(Duration::from_secs(wanted.since_seconds)).filter(|since| !since.is_zero());
    // The clock of this machine, by which the lines were written, too.
    let now = DateTime::<Utc>::from(SystemTime::now());
    match &log.place {
        Place::File(path) => {
            // First from where on to follow: what is added in between is told twice rather than never.
            let rest = if wanted.follow { Rest::File(Added::behind(path)?) } else { Rest::Nothing };
            let last = tail(path, most, since, wanted.follow, now)?;
            Ok((last.lines, last.note, rest))
        }
        Place::Ring(ring) => {
            let (lines, end) = ring.from(0);
            let last = narrowed(lines, most, since, false, now);
            Ok((last.lines, last.note, Rest::Ring(ring.clone(), end)))
        }
    }
}

/// Lines in parts that a shepherd takes.
fn parts(lines: &[String]) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    for line in lines {
        match parts.last_mut().filter(|part| part.len() + line.len() < PART_LIMIT) {
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
        assert!(parts(&[]).is_empty());
        assert_eq!(parts(&[String::new()]), ["\n"], "an empty line is a line");
        let lines: Vec<_> = (0..20_000).map(|number| format!("line {number}")).collect();
        let made = parts(&lines);
        assert!(made.len() > 2);
        assert!(made.iter().all(|part| part.len() <= PART_LIMIT && part.ends_with('\n')));
        assert_eq!(made.concat().lines().collect::<Vec<_>>(), lines);
        let edge = vec!["x".repeat(PART_LIMIT / 2 - 1); 2];
        assert_eq!(parts(&edge).iter().map(String::len).collect::<Vec<_>>(), [PART_LIMIT]);
    }
}
