//! Log requests: validate, deliver to a machine, collect its parts, time out.
//!
//! A request waits for the machine's next heartbeat and is delivered with the response. It ends when the machine has
//! sent everything, when that cannot be expected any more, or when no client reads it. A waiting client always sees
//! what it waits for, and every wait has a limit: for a machine that does not call, for one that calls and sends
//! nothing, for one whose role server restarted in the middle, and for one whose role server cannot send logs. All of
//! that is decided here, by timestamps of the database's clock.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::humanize::{humanize_duration, relative_and_absolute_time};
use crate::time::{Span, Timestamp, between};

/// The log of the role server itself.
pub const ROLESERVER_LOG: &str = "roleserver";
/// Number of lines when the request does not give one.
pub const DEFAULT_LINES: u32 = 100;
/// Most lines of one request.
pub const MAX_LINES: u32 = 10_000;
/// Most bytes of lines in one part.
pub const MAX_PART_BYTES: usize = 64 << 10;
/// Most bytes that a request without `follow` may receive, and most unread bytes of a request that follows.
pub const MAX_ANSWER_BYTES: usize = 1 << 20;
/// Most requests that one machine works on at a time.
pub const MAX_REQUESTS_PER_MACHINE: i64 = 4;
/// Most requests of all machines together.
pub const MAX_REQUESTS: i64 = 64;
/// Most logs that a machine may list.
pub const MAX_LOG_NAMES: usize = 500;
/// Longest name of a log, in characters.
pub const MAX_NAME_CHARS: usize = 150;
/// Longest message of a machine, in characters.
pub const MAX_MESSAGE_CHARS: usize = 4000;
/// How long a request is kept when no client reads it.
pub const UNREAD_TIMEOUT: Duration = Duration::from_mins(1);
/// Longest time that a log is followed.
pub const MAX_FOLLOW: Duration = Duration::from_hours(1);

/// How long a machine may send nothing after the request was delivered to it.
const STALL_TIMEOUT: Duration = Duration::from_mins(1);
/// Shortest time that a machine has for its next heartbeat after a request.
const MIN_SILENCE_LIMIT: Duration = Duration::from_secs(15);
/// Heartbeats that may be late or lost before a machine counts as silent.
const MISSED_HEARTBEATS: u32 = 3;
/// Farthest back that a request may go.
const MAX_SINCE: Span = Span::hours(10 * 365 * 24);

/// A query for logs of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogQuery {
    /// Name of the log; empty to list the logs that exist.
    pub log: String,
    /// Most lines to return.
    pub lines: u32,
    /// Return no line older than this; `None` for no limit.
    pub since: Option<Span>,
    /// Whether to also return what is added from then on.
    pub follow: bool,
}

impl LogQuery {
    /// Checks the query. The error names the field that is wrong, and says how.
    pub fn validate(&self) -> Result<(), (&'static str, String)> {
        let named = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
        if self.log.chars().count() > MAX_NAME_CHARS || !self.log.chars().all(named) {
            let text = format!(
                "{:?} is not the name of a log; names of logs are {ROLESERVER_LOG}, etcd or ROLE/SERVICE",
                self.log
            );
            return Err(("log", text));
        }
        if !(1..=MAX_LINES).contains(&self.lines) {
            return Err(("lines", format!("{} lines cannot be requested; 1 to {MAX_LINES} can", self.lines)));
        }
        if self.since.is_some_and(|since| since > MAX_SINCE || since.0 < Duration::from_secs(1)) {
            return Err(("since", "it must be at least a second and at most ten years".to_owned()));
        }
        if self.follow && self.log.is_empty() {
            return Err(("follow", "a list of logs cannot be followed; say which log".to_owned()));
        }
        Ok(())
    }

    /// What is requested, as a part of a sentence.
    #[must_use]
    pub fn describe(&self) -> String {
        if self.log.is_empty() { "which logs it has".to_owned() } else { format!("the log {}", self.log) }
    }
}

/// A log that exists on a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AvailableLog {
    /// Its name, as a query gives it.
    pub log: String,
    /// Its size in bytes.
    pub bytes: u64,
}

/// A request and its progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRequestRecord {
    /// What the client requested.
    pub query: LogQuery,
    /// When it was requested.
    pub requested_at: Timestamp,
    /// The operator who requested it.
    pub requested_by: String,
    /// When the client last read from it.
    pub read_at: Timestamp,
    /// When it was delivered to the machine, and to which incarnation of its role server.
    pub delivered: Option<(Timestamp, String)>,
    /// When the machine last sent a part.
    pub last_part_at: Option<Timestamp>,
    /// How many parts the machine has sent.
    pub parts: i64,
    /// Size of these parts, in bytes.
    pub bytes: i64,
    /// `None` until it ends. Inside: why not everything was sent, or `None` if everything was.
    pub outcome: Option<Option<String>>,
}

/// State of a request, for the client that reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogRequestState {
    /// It is not delivered to the machine yet; a sentence says what it waits for.
    Waiting(String),
    /// It is delivered, and the machine sends its parts.
    Receiving,
    /// It has ended. `None` if everything was sent, otherwise a sentence that says why not.
    Ended(Option<String>),
}

/// How long a machine may be silent before waiting for it is pointless.
fn silence_limit(interval: Duration) -> Duration {
    (interval * MISSED_HEARTBEATS).max(MIN_SILENCE_LIMIT)
}

fn describe_last_heartbeat(last_contact: Option<Timestamp>, now: Timestamp) -> String {
    last_contact.map_or_else(
        || "it has never reported".to_owned(),
        |at| format!("it last reported {}", relative_and_absolute_time(at, now)),
    )
}

/// Why no request can be sent to a machine, as a sentence that follows its name. `retired` is whether it was released.
#[must_use]
pub fn unreachable_reason(
    last_contact: Option<Timestamp>,
    retired: bool,
    interval: Duration,
    now: Timestamp,
) -> Option<String> {
    if retired {
        return Some("is retired: no shepherd accepts its heartbeats, so it cannot send logs".to_owned());
    }
    match last_contact {
        None => Some(
            "has never reported: no role server on it speaks to a shepherd, and nothing else sends its logs; \
             see what it waits for with shepherdctl why"
                .to_owned(),
        ),
        Some(at) if between(at, now) > silence_limit(interval) => Some(format!(
            "is silent: it last reported {}, and sends logs only with its heartbeats; see what is done about \
             it with shepherdctl why, or read them on the machine: agent.log and children/*/output.log in \
             the state directory of its role server (/var/lib/roleserver)",
            relative_and_absolute_time(at, now)
        )),
        Some(_) => None,
    }
}

/// The state of a request at `now`. `interval` is that of heartbeats.
#[must_use]
pub fn request_state(
    request: &LogRequestRecord,
    last_contact: Option<Timestamp>,
    interval: Duration,
    now: Timestamp,
) -> LogRequestState {
    if let Some(failed) = &request.outcome {
        return LogRequestState::Ended(failed.clone());
    }
    let Some((handed, _)) = request.delivered else {
        let waited = between(request.requested_at, now);
        if waited <= silence_limit(interval) {
            return LogRequestState::Waiting(format!(
                "it receives the request with the answer to its next heartbeat; a heartbeat comes every {}",
                humanize_duration(interval)
            ));
        }
        let text = if last_contact.is_some_and(|at| at > request.requested_at) {
            "it has reported since, but did not get the request: the shepherd that receives its heartbeats \
             may be an older release; update that shepherd"
                .to_owned()
        } else {
            format!(
                "the machine has not reported since the request was made; {}. Request the log again when the \
                 machine reports",
                describe_last_heartbeat(last_contact, now)
            )
        };
        return LogRequestState::Ended(Some(text));
    };
    if between(request.last_part_at.unwrap_or(handed).max(handed), now) > STALL_TIMEOUT {
        return LogRequestState::Ended(Some(format!(
            "the request was sent to it, and it has sent nothing for {}; {}. Request the log again when \
             the machine reports",
            humanize_duration(STALL_TIMEOUT),
            describe_last_heartbeat(last_contact, now)
        )));
    }
    if request.query.follow && between(request.requested_at, now) > MAX_FOLLOW {
        return LogRequestState::Ended(Some(format!(
            "a log is followed for {} at the most; request it again to follow it further",
            humanize_duration(MAX_FOLLOW)
        )));
    }
    LogRequestState::Receiving
}

/// What a heartbeat of the machine does to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Deliver it, for the first time or to a restarted role server.
    First,
    /// Deliver it once more: the response may not have arrived.
    Repeat,
    /// End it, with a sentence.
    End(String),
}

/// Decides what a heartbeat from this incarnation of the role server does to a request. `version` is the version it
/// reports, and `brings` whether it reports that it can send logs.
#[must_use]
pub fn decide_delivery(
    request: &LogRequestRecord,
    incarnation: &str,
    brings: bool,
    version: &str,
    now: Timestamp,
) -> Delivery {
    if between(request.read_at, now) > UNREAD_TIMEOUT {
        return Delivery::End("nobody read it".to_owned());
    }
    if !brings {
        return Delivery::End(format!(
            "its role server ({version}) cannot send logs; update it (shepherdctl update, or install a newer \
             one on the machine), or read them on the machine"
        ));
    }
    match &request.delivered {
        None => Delivery::First,
        Some((_, to)) if to == incarnation => Delivery::Repeat,
        // Its predecessor sent nothing, so no line can be sent twice.
        Some(_) if request.parts == 0 => Delivery::First,
        Some(_) => {
            Delivery::End("its role server restarted in the middle of the log; request it again".to_owned())
        }
    }
}

/// A part that a machine sends, with its form checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogPart {
    /// The incarnation of the role server that sends it.
    pub incarnation: String,
    /// Number of the part, from 0 within the request.
    pub number: i64,
    /// Lines, each with its line end.
    pub lines: String,
    /// The logs that exist on the machine.
    pub available: Vec<AvailableLog>,
    /// A remark on the lines, for people.
    pub note: Option<String>,
    /// Why nothing more can be sent.
    pub error: Option<String>,
    /// Whether this is the last part.
    pub last: bool,
}

/// What to do with a part that a machine sends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PartDecision {
    /// Store the part for the client.
    Store,
    /// It was stored before; ignore it.
    Duplicate,
    /// Too many bytes are unread; the machine must send it again later.
    Defer,
    /// The request has ended or belongs to another incarnation; drop the part.
    Discard,
    /// End the request, with a sentence for the client.
    End(String),
}

/// Decides what to do with a part. `unread` is how many stored bytes no client has read.
#[must_use]
pub fn decide_part(
    request: &LogRequestRecord,
    brought: &LogPart,
    unread: i64,
    now: Timestamp,
) -> PartDecision {
    if request.outcome.is_some()
        || request.delivered.as_ref().is_none_or(|(_, to)| *to != brought.incarnation)
    {
        return PartDecision::Discard;
    }
    if between(request.read_at, now) > UNREAD_TIMEOUT {
        return PartDecision::End("nobody read it".to_owned());
    }
    let limit = i64::try_from(MAX_ANSWER_BYTES).unwrap_or(i64::MAX);
    let bytes = i64::try_from(brought.lines.len()).unwrap_or(i64::MAX);
    if brought.number < request.parts {
        return PartDecision::Duplicate;
    }
    if brought.number > request.parts {
        return PartDecision::End(format!(
            "it sent part {} where part {} comes next; request the log again",
            brought.number, request.parts
        ));
    }
    if request.query.follow {
        if unread.saturating_add(bytes) > limit {
            return PartDecision::Defer;
        }
    } else if request.bytes.saturating_add(bytes) > limit {
        return PartDecision::End(format!(
            "it sent more than {} KiB; request fewer lines",
            MAX_ANSWER_BYTES >> 10
        ));
    }
    PartDecision::Store
}

#[cfg(test)]
mod tests;
