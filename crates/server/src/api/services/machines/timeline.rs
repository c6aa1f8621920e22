//! Machines.Timeline: the history of one machine in pages, newest first.
//!
//! On request the routine is folded ([`model::timeline`][]). A call reads a limited number of events, and a fold may have
//! more. Then the page ends without it, and its page token has what was folded so far, beside the position. The page that
//! reads the end of the fold returns it whole. So a client appends pages, as with any other list, and joins nothing.
//!
//! A token is not signed. One that was edited only shows other numbers to the client that edited it.

use chrono::DateTime;
use tonic::{Request, Status};

use crate::api::api_error::bmdb_status;
use crate::api::caller::caller_of;
use crate::api::context::ApiContext;
use crate::api::convert;
use crate::api::pagination;
use bmdb::connection::database_now;
use bmdb::machine::history::{self, HistoryCursor};
use bmdb::machine::lookup::machine_id;
use bmdb::machine::timeline::{TimelinePage, TimelinePosition, read_timeline_page};
use model::ids::MachineId;
use model::machine_view::MachineName;
use model::routine::RoutineFold;
use model::time::Timestamp;
use model::timeline::{FoldState, HistoryEntry};
use proto::fleet::v1;

/// Name of the list of all events in page tokens.
const EVENTS: &str = "events";
/// Name of the list with folded routine in page tokens.
const FOLDED_EVENTS: &str = "folded-events";
/// Most lines of history with the same time.
const MAX_ENTRIES_PER_INSTANT: i64 = 100_000;
/// What a token has in place of the fence of an awaited start, if none is awaited.
const NONE: &str = "-";

/// Handles `Machines.Timeline`, with and without folded routine.
pub(super) async fn list_timeline(
    context: &ApiContext,
    request: &Request<v1::TimelineRequest>,
) -> Result<v1::TimelineResponse, Status> {
    let (caller, body) = (caller_of(request)?, request.get_ref());
    let limit = pagination::parse_page_size(body.limit, 50, "limit")?;
    if body.without_routine {
        let after = parse_token(FOLDED_EVENTS, &body.page_token, parse_position)?;
        let name = context.find_machine(&caller, &body.machine).await?;
        let (page, now) = read_folded_page(context, machine_id(&name), after, limit).await?;
        let next = page.next.map(|next| pagination::encode_page_token(FOLDED_EVENTS, &encode_position(next)));
        let events = page.lines.into_iter().map(convert::encode_timeline_line).collect();
        return Ok(encode_page(&name, events, next, now));
    }
    let after = parse_token(EVENTS, &body.page_token, parse_cursor)?;
    let name = context.find_machine(&caller, &body.machine).await?;
    let (events, next, now) = read_page(context, machine_id(&name), after, limit).await?;
    let next = next.map(|next| pagination::encode_page_token(EVENTS, &encode_cursor(next)));
    Ok(encode_page(&name, events.into_iter().map(convert::encode_event).collect(), next, now))
}

/// A page of all events, where the next one begins, and when it was read.
async fn read_page(
    context: &ApiContext,
    machine: MachineId,
    after: Option<HistoryCursor>,
    limit: i64,
) -> Result<(Vec<HistoryEntry>, Option<HistoryCursor>, Timestamp), Status> {
    let read = context.read_pool.read(move |tx| {
        Box::pin(async move {
            let events = history::list_history(tx, machine, after, limit + 1).await?;
            Ok((events, database_now(tx).await?))
        })
    });
    let (mut events, now) = read.await.map_err(bmdb_status)?;
    let more = pagination::drop_surplus(&mut events, limit);
    let next = HistoryCursor::after(after, &events).filter(|_| more);
    Ok((events, next, now))
}

/// A page with folded routine, and when it was read.
async fn read_folded_page(
    context: &ApiContext,
    machine: MachineId,
    after: Option<TimelinePosition>,
    limit: i64,
) -> Result<(TimelinePage, Timestamp), Status> {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let read = context.read_pool.read(move |tx| {
        Box::pin(async move {
            let page = read_timeline_page(tx, machine, after, limit).await?;
            Ok((page, database_now(tx).await?))
        })
    });
    read.await.map_err(bmdb_status)
}

fn encode_page(
    name: &MachineName,
    events: Vec<v1::Event>,
    next: Option<String>,
    now: Timestamp,
) -> v1::TimelineResponse {
    v1::TimelineResponse {
        name: Some(convert::encode_machine_name(name)),
        events,
        more: next.is_some(),
        next_page_token: next.unwrap_or_default(),
        read_at: Some(convert::encode_timestamp(now)),
    }
}

/// Decodes the token of a page of this list; `None` for the first page.
fn parse_token<T>(list: &str, token: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Option<T>, Status> {
    let Some(place) = pagination::decode_page_token(list, token)? else { return Ok(None) };
    parse(&place).map(Some).ok_or_else(|| pagination::invalid_page_token(list))
}

/// Encodes the cursor of a history: a time, and the number of lines with this time that were sent.
fn encode_cursor(place: HistoryCursor) -> String {
    format!("{} {}", place.at.timestamp_micros(), place.offset)
}

/// Parses a cursor of [`encode_cursor`].
fn parse_cursor(text: &str) -> Option<HistoryCursor> {
    let (at, number) = text.split_once(' ')?;
    // A statement skips at most the lines that one instant can have.
    let offset = number.parse().ok().filter(|number| (1..=MAX_ENTRIES_PER_INSTANT).contains(number))?;
    Some(HistoryCursor { at: parse_time(at)?, offset })
}

/// Encodes a position between folded lines: the cursor, the fence of the awaited start, and the open fold if there is
/// one.
fn encode_position(position: TimelinePosition) -> String {
    let awaited_start =
        position.fold.awaited_start.map_or_else(|| NONE.to_owned(), |fence| fence.to_string());
    let place = format!("{} {awaited_start}", encode_cursor(position.cursor));
    match position.fold.open_fold {
        None => place,
        Some(RoutineFold { first_at, last_at, work_items, lines }) => {
            let (first, last) = (first_at.timestamp_micros(), last_at.timestamp_micros());
            format!("{place} {lines} {work_items} {first} {last}")
        }
    }
}

/// Parses a position of [`encode_position`].
fn parse_position(text: &str) -> Option<TimelinePosition> {
    let words: Vec<&str> = text.split(' ').collect();
    let (place, fold) = words.split_at_checked(3)?;
    let [at, number, awaited_start] = place else { return None };
    let open_fold = match fold {
        [] => None,
        [lines, work_items, first, last] => Some(parse_fold(lines, work_items, first, last)?),
        _ => return None,
    };
    let awaited_start = if *awaited_start == NONE { None } else { Some(awaited_start.parse().ok()?) };
    let cursor = parse_cursor(&format!("{at} {number}"))?;
    Some(TimelinePosition { cursor, fold: FoldState { open_fold, awaited_start } })
}

/// Parses an open fold. It has at least two lines, and a work item.
fn parse_fold(lines: &str, work_items: &str, first: &str, last: &str) -> Option<RoutineFold> {
    let (first_at, last_at) = (parse_time(first)?, parse_time(last)?);
    let fold =
        RoutineFold { first_at, last_at, work_items: work_items.parse().ok()?, lines: lines.parse().ok()? };
    let is_possible = first_at <= last_at && fold.lines >= 2 && (1..=fold.lines).contains(&fold.work_items);
    Some(fold).filter(|_| is_possible)
}

/// Parses a time in microseconds. No stored line is older than 1970.
fn parse_time(text: &str) -> Option<Timestamp> {
    DateTime::from_timestamp_micros(text.parse().ok().filter(|at| *at >= 0)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    #[test]
    fn history_cursor_round_trips() {
        let place = HistoryCursor { at: at("2026-11-20T18:00:00.123456Z"), offset: 3 };
        assert_eq!(parse_cursor(&encode_cursor(place)), Some(place));
        for odd in ["", "1", "1 x", "1 0", "1 -1", "-1 1", "1 100001", "9223372036854775807 1"] {
            assert_eq!(parse_cursor(odd), None, "{odd}");
        }
    }

    #[test]
    fn position_in_a_fold_round_trips() {
        let cursor = HistoryCursor { at: at("2026-11-20T18:00:00.123456Z"), offset: 3 };
        let (first_at, last_at) = (at("2026-11-20T18:00:00.123456Z"), at("2026-11-20T19:00:00Z"));
        let fold = RoutineFold { first_at, last_at, work_items: 24, lines: 47 };
        for open_fold in [None, Some(fold)] {
            for awaited_start in [None, Some(7)] {
                let position = TimelinePosition { cursor, fold: FoldState { open_fold, awaited_start } };
                assert_eq!(parse_position(&encode_position(position)), Some(position));
            }
        }
        for odd in [
            "",
            "1 1",
            "1 1 x",
            "1 0 -",
            "1 1 - 4",
            "1 1 - 4 2 0",
            "1 1 - 4 2 0 9 9",
            "1 1 - 1 1 0 9",
            "1 1 - 4 0 0 9",
            "1 1 - 4 5 0 9",
            "1 1 - 4 2 9 0",
            "1 1 - 4 2 -1 9",
            "1 1 - 4 2 0 9223372036854775807",
            "1 1 - 99999999999999999999 2 0 9",
        ] {
            assert_eq!(parse_position(odd), None, "{odd}");
        }
    }

    #[test]
    fn token_is_valid_with_the_same_request_only() {
        let position = "1 1 -";
        let (folded, all) = (
            pagination::encode_page_token(FOLDED_EVENTS, position),
            pagination::encode_page_token(EVENTS, "1 1"),
        );
        assert!(parse_token(FOLDED_EVENTS, &folded, parse_position).unwrap().is_some());
        assert!(parse_token(EVENTS, &all, parse_cursor).unwrap().is_some());
        assert!(parse_token(FOLDED_EVENTS, &all, parse_position).is_err());
        assert!(parse_token(EVENTS, &folded, parse_cursor).is_err());
        assert!(parse_token(EVENTS, "", parse_cursor).unwrap().is_none());
    }
}
