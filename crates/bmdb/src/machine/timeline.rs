//! Timeline of a machine in pages, with its routine folded.
//!
//! [`model::timeline`][] decides what is folded. This module reads the history for it, statement by statement, until the
//! page is full or the call has read [`MAX_EVENTS_READ`] events. A quiet machine has tens of thousands of routine events
//! in a row. So a page may end while a fold is open, and [`TimelinePosition`] has the fold for the next call.

use sqlx::PgConnection;

use crate::connection::error::BmdbError;
use crate::machine::history::{HistoryCursor, list_history};
use model::ids::MachineId;
use model::timeline::{FoldState, TimelineLine, fold_events};

/// Most events that a call reads.
pub const MAX_EVENTS_READ: usize = 5_000;
/// Events that a statement reads. The last of them only proves that there is another one.
const EVENTS_PER_STATEMENT: usize = 500;

/// A position in a timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimelinePosition {
    /// The position in the history.
    pub cursor: HistoryCursor,
    /// What was folded before it, and belongs to a line after it.
    pub fold: FoldState,
}

/// A page of a timeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimelinePage {
    /// Complete lines, newest first. There may be none, although more follow.
    pub lines: Vec<TimelineLine>,
    /// Where the next page begins; `None` after the oldest line.
    pub next: Option<TimelinePosition>,
    /// Number of events that were read from the database.
    pub events_read: usize,
}

/// Up to `limit` lines of a machine's timeline, newest first, or those that follow a position. Reads at most
/// [`MAX_EVENTS_READ`] events.
pub async fn read_timeline_page(
    tx: &mut PgConnection,
    machine: MachineId,
    after: Option<TimelinePosition>,
    limit: usize,
) -> Result<TimelinePage, BmdbError> {
    let mut cursor = after.map(|position| position.cursor);
    let mut fold = after.map(|position| position.fold).unwrap_or_default();
    let mut page = TimelinePage { lines: Vec::new(), next: None, events_read: 0 };
    loop {
        let most = i64::try_from(EVENTS_PER_STATEMENT).unwrap_or(i64::MAX);
        let mut events = list_history(tx, machine, cursor, most).await?;
        page.events_read += events.len();
        let is_last = events.len() < EVENTS_PER_STATEMENT;
        if !is_last {
            events.pop();
        }
        let folded = fold_events(fold, &events, limit - page.lines.len(), is_last);
        page.lines.extend(folded.lines);
        if is_last && folded.consumed == events.len() {
            return Ok(page);
        }
        cursor = HistoryCursor::after(cursor, &events[..folded.consumed]).or(cursor);
        fold = folded.state;
        if page.lines.len() == limit || page.events_read + EVENTS_PER_STATEMENT > MAX_EVENTS_READ {
            page.next = cursor.map(|cursor| TimelinePosition { cursor, fold });
            return Ok(page);
        }
    }
}
