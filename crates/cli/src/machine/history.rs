//! History of a machine as rows of a table.

use crate::client::decode::{parse_uuid, require_timestamp};
use crate::error::CliError;
use crate::output::zone::current_zone;
use crate::routine::decode_routine_fold;
use model::humanize::humanize_duration;
use model::routine::{ROUTINE_PROCESS, RoutineFold};
use model::time::{Timestamp, between};
use model::timeline::{HistoryEntry, TimelineLine};
use proto::fleet::v1;

/// Headers of a table of history entries: a time is relative first, then absolute.
pub const EVENT_HEADERS: [&str; 6] = ["AGE", "AT", "EVENT", "WORK", "BY", "DETAIL"];

/// A history entry as a row under [`EVENT_HEADERS`]. `now` is when the history was read.
#[must_use]
pub fn event_row(line: &HistoryEntry, now: Timestamp) -> Vec<String> {
    let work = match (&line.process, line.fence) {
        (Some(process), Some(fence)) => format!("{process} #{fence}"),
        _ => "-".to_owned(),
    };
    let by = match (&line.component, &line.host) {
        (Some(component), Some(host)) => format!("{component}@{host}"),
        (Some(component), None) => component.clone(),
        _ => "-".to_owned(),
    };
    vec![
        format_age(line.at, now),
        format_moment(line.at),
        line.event.clone(),
        work,
        by,
        line.detail.clone().unwrap_or_default(),
    ]
}

/// A line of a timeline as a row under [`EVENT_HEADERS`]. Folded routine has the time of its earliest entry. `now` is when
/// the timeline was read.
#[must_use]
pub fn timeline_row(line: &TimelineLine, now: Timestamp) -> Vec<String> {
    match line {
        TimelineLine::Event(entry) => event_row(entry, now),
        TimelineLine::Routine(fold) => routine_row(fold, now),
    }
}

fn routine_row(fold: &RoutineFold, now: Timestamp) -> Vec<String> {
    let what = fold.describe(ROUTINE_PROCESS.as_str(), |at| current_zone().format_time(at));
    let dash = || "-".to_owned();
    let (age, at) = (format_age(fold.first_at, now), format_moment(fold.first_at));
    vec![age, at, "Routine".to_owned(), dash(), dash(), what]
}

fn format_age(at: Timestamp, now: Timestamp) -> String {
    humanize_duration(between(at, now))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[test]
    fn time_of_a_line_is_relative_first_and_then_absolute() {
        let now = at("2026-03-02T06:40:00Z");
        let (first_at, last_at) = (at("2026-03-02T00:48:00.560Z"), at("2026-03-02T03:18:00Z"));
        let entry = HistoryEntry {
            at: at("2026-03-02T06:37:00.124Z"),
            event: "Failed".to_owned(),
            lane: None,
            fence: None,
            process: None,
            session: None,
            component: None,
            host: None,
            detail: None,
        };
        let fold = RoutineFold { first_at, last_at, work_items: 11, lines: 22 };
        for (line, age, moment) in [
            (TimelineLine::Event(entry), "2m59s", "2026-03-02T06:37:00.124+00:00"),
            (TimelineLine::Routine(fold), "5h51m", "2026-03-02T00:48:00.560+00:00"),
        ] {
            let row = timeline_row(&line, now);
            assert_eq!(row.len(), EVENT_HEADERS.len());
            assert_eq!(row[..2], [age, moment], "{row:?}");
        }
    }
}
