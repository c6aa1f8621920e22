//! History of a machine as rows of a table.

use crate::client::decode::{parse_uuid, require_timestamp};
use crate::error::CliError;
use crate::output::zone::current_zone;
use crate::routine::decode_routine_fold;
use model::routine::{ROUTINE_PROCESS, RoutineFold};
use model::time::Timestamp;
use model::timeline::{HistoryEntry, TimelineLine};
use proto::fleet::v1;

/// Headers of a table of history entries.
pub const EVENT_HEADERS: [&str; 5] = ["AT", "EVENT", "WORK", "BY", "DETAIL"];

/// A history entry as a row under [`EVENT_HEADERS`].
#[must_use]
pub fn event_row(line: &HistoryEntry) -> Vec<String> {
    let work = match (&line.process, line.fence) {
        (Some(process), Some(fence)) => format!("{process} #{fence}"),
        _ => "-".to_owned(),
    };
    let by = match (&line.component, &line.host) {
        (Some(component), Some(host)) => format!("{component}@{host}"),
        (Some(component), None) => component.clone(),
        _ => "-".to_owned(),
    };
    vec![format_moment(line.at), line.event.clone(), work, by, line.detail.clone().unwrap_or_default()]
}

/// A line of a timeline as a row under [`EVENT_HEADERS`]. Folded routine has the time of its earliest entry.
#[must_use]
pub fn timeline_row(line: &TimelineLine) -> Vec<String> {
    match line {
        TimelineLine::Event(entry) => event_row(entry),
        TimelineLine::Routine(fold) => routine_row(fold),
    }
}

fn routine_row(fold: &RoutineFold) -> Vec<String> {
    let what = fold.describe(ROUTINE_PROCESS.as_str(), |at| current_zone().format_time(at));
    vec![format_moment(fold.first_at), "Routine".to_owned(), "-".to_owned(), "-".to_owned(), what]
}

fn format_moment(at: Timestamp) -> String {
    at.format("%Y-%m-%dT%H:%M:%S%.3f%:z").to_string()
}

/// Decodes a line of a timeline.
pub fn decode_line(event: v1::Event) -> Result<TimelineLine, CliError> {
    let Some(fold) = &event.routine else { return decode_event(event).map(TimelineLine::Event) };
    let first_at = require_timestamp(event.occurred_at, "the time of an event")?;
    decode_routine_fold(fold, first_at).map(TimelineLine::Routine)
}

/// Decodes an entry of a machine's history.
pub fn decode_event(event: v1::Event) -> Result<HistoryEntry, CliError> {
    Ok(HistoryEntry {
        at: require_timestamp(event.occurred_at, "the time of an event")?,
        event: event.event,
        lane: event.lane,
        fence: event.fence,
        process: event.process,
        session: event.session.as_deref().map(|session| parse_uuid(session, "a session's id")).transpose()?,
        component: event.component,
        host: event.host,
        detail: event.detail,
    })
}
