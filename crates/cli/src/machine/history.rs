//! History of a machine as rows of a table.

use crate::client::decode::{parse_uuid, require_timestamp};
use crate::error::CliError;
use bmdb::machine::history::HistoryEntry;
use proto::fleet::v1;

/// Headers of a table of history entries.
pub const EVENT_HEADERS: [&str; 5] = ["AT", "EVENT", "WORK", "BY", "DETAIL"];

/// History entries as rows under [`EVENT_HEADERS`].
#[must_use]
pub fn event_rows(events: &[HistoryEntry]) -> Vec<Vec<String>> {
    events
        .iter()
        .map(|line| {
            let work = match (&line.process, line.fence) {
                (Some(process), Some(fence)) => format!("{process} #{fence}"),
                _ => "-".to_owned(),
            };
            let by = match (&line.component, &line.host) {
                (Some(component), Some(host)) => format!("{component}@{host}"),
                (Some(component), None) => component.clone(),
                _ => "-".to_owned(),
            };
            let at = line.at.format("%Y-%m-%dT%H:%M:%S%.3f%:z").to_string();
            vec![at, line.event.clone(), work, by, line.detail.clone().unwrap_or_default()]
        })
        .collect()
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
