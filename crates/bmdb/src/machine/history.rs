//! History of a machine, newest line first, in pages.

use sqlx::PgConnection;

use crate::connection::DbContext;
use crate::connection::error::BmdbError;
use crate::engine::session::RuntimeInfo;
use model::ids::MachineId;
use model::time::Timestamp;
use model::timeline::HistoryEntry;

const OPERATION: &str = "reading what to show";

/// A position in a machine's history. Several events may happen at one moment, and lines have no number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryCursor {
    /// The moment of the line there.
    pub at: Timestamp,
    /// How many lines of that moment are before the position.
    pub offset: i64,
}

impl HistoryCursor {
    /// The position after `lines`, which follow `before`; `None` for no lines.
    #[must_use]
    pub fn after(before: Option<Self>, lines: &[HistoryEntry]) -> Option<Self> {
        let at = lines.last()?.at;
        let here = lines.iter().rev().take_while(|line| line.at == at).count();
        let of_before = before.filter(|place| place.at == at && here == lines.len());
        let number = i64::try_from(here).unwrap_or(i64::MAX);
        Some(Self { at, offset: number.saturating_add(of_before.map_or(0, |place| place.offset)) })
    }
}

/// The newest lines of a machine's history, newest first, or those that follow a position.
pub async fn list_history(
    tx: &mut PgConnection,
    machine: MachineId,
    after: Option<HistoryCursor>,
    limit: i64,
) -> Result<Vec<HistoryEntry>, BmdbError> {
    let (at, number) = (after.map(|place| place.at), after.map_or(0, |place| place.offset));
    let rows = sqlx::query_file!("../../sql/inspect/list_history.sql", machine.0, at, limit, number)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows
        .into_iter()
        .map(|row| HistoryEntry {
            at: row.at,
            event: row.event,
            lane: row.lane,
            fence: row.fence,
            process: row.process,
            session: row.session_id,
            component: row.component,
            host: RuntimeInfo::of(row.runtime_info.as_ref()).host,
            detail: row.detail,
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::DateTime;

    #[test]
    fn history_cursor_counts_entries_of_one_moment() {
        let at = |seconds: i64| DateTime::from_timestamp(1_800_000_000 + seconds, 0).unwrap();
        let lines = |moments: &[i64]| -> Vec<HistoryEntry> {
            let line = |&seconds: &i64| HistoryEntry {
                at: at(seconds),
                event: "held".to_owned(),
                lane: None,
                fence: None,
                process: None,
                session: None,
                component: None,
                host: None,
                detail: None,
            };
            moments.iter().map(line).collect()
        };
        let place = |seconds, number| Some(HistoryCursor { at: at(seconds), offset: number });
        for (before, moments, expected) in [
            (None, &[][..], None),
            (None, &[5, 4, 3], place(3, 1)),
            (None, &[5, 3, 3], place(3, 2)),
            (place(3, 2), &[3, 3], place(3, 4)),
            (place(3, 2), &[3, 2], place(2, 1)),
            (place(9, 2), &[3, 3], place(3, 2)),
        ] {
            assert_eq!(HistoryCursor::after(before, &lines(moments)), expected, "{before:?} {moments:?}");
        }
    }
}
