//! Pagination: page sizes, page tokens and cursors.
//!
//! A page token is opaque to the caller. It contains the name of its list and where the next statement starts, so it
//! is valid at any shepherd and at any time.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::DateTime;
use tonic::Status;
use uuid::Uuid;

use crate::api::api_error::invalid_argument;
use model::time::Timestamp;

/// Most lines of a page: the client's decoder limits the number of fields.
const MAX_PAGE_SIZE: i32 = 500;

/// The requested page size, or `usual` for 0.
pub fn parse_page_size(requested: i32, usual: i64, field: &str) -> Result<i64, Status> {
    match requested {
        0 => Ok(usual),
        1..=MAX_PAGE_SIZE => Ok(i64::from(requested)),
        _ => Err(invalid_argument(
            field,
            format!("{field} is {requested}; it goes from 1 to {MAX_PAGE_SIZE}, and 0 is {usual}"),
        )),
    }
}

/// Encodes the page token of the list with that name.
#[must_use]
pub fn encode_page_token(list: &str, place: &str) -> String {
    URL_SAFE_NO_PAD.encode(format!("{list} {place}"))
}

/// Decodes a token of [`encode_page_token()`]; `None` for the first page.
pub fn decode_page_token(list: &str, token: &str) -> Result<Option<String>, Status> {
    if token.is_empty() {
        return Ok(None);
    }
    let place = URL_SAFE_NO_PAD.decode(token).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    let place = place.and_then(|text| text.strip_prefix(list)?.strip_prefix(' ').map(str::to_owned));
    place.map(Some).ok_or_else(|| invalid_page_token(list))
}

/// The error for a token that is not valid for this list.
#[must_use]
pub fn invalid_page_token(list: &str) -> Status {
    invalid_argument(
        "page_token",
        format!("this is not a page token of the list of {list}; give what an earlier page ended with"),
    )
}

/// Removes the surplus line that was read beyond the limit, and returns whether there was one.
pub(super) fn drop_surplus<T>(lines: &mut Vec<T>, size: i64) -> bool {
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    let more = lines.len() > size;
    lines.truncate(size);
    more
}

/// Encodes the cursor of a list that is sorted by time and then by id.
pub(super) fn encode_time_cursor(at: Timestamp, id: Uuid) -> String {
    format!("{} {id}", at.timestamp_micros())
}

/// Parses a cursor of [`encode_time_cursor`].
pub(super) fn parse_time_cursor(place: &str) -> Option<(Timestamp, Uuid)> {
    let (at, id) = place.split_once(' ')?;
    // No listed row is older than 1970, and the database supports no much earlier time.
    let at: i64 = at.parse().ok().filter(|at| *at >= 0)?;
    Some((DateTime::from_timestamp_micros(at)?, Uuid::try_parse(id).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_valid_for_its_own_list_only() {
        let token = encode_page_token("machines", "Ready/a b/7");
        assert_eq!(decode_page_token("machines", &token).unwrap(), Some("Ready/a b/7".to_owned()));
        assert_eq!(decode_page_token("machines", "").unwrap(), None);
        assert!(decode_page_token("audit", &token).is_err());
        for odd in ["!", "AAAA", "bWFjaGluZXM"] {
            assert!(decode_page_token("machines", odd).is_err(), "{odd}");
        }
    }

    #[test]
    fn page_size_is_bounded() {
        assert_eq!(parse_page_size(0, 100, "page_size").unwrap(), 100);
        assert_eq!(parse_page_size(500, 100, "page_size").unwrap(), 500);
        for odd in [-1, 501, i32::MAX] {
            assert!(parse_page_size(odd, 100, "page_size").is_err());
        }
    }

    #[test]
    fn time_cursor_round_trips() {
        let place = ("2026-11-20T18:00:00.123456Z".parse().unwrap(), Uuid::from_u128(7));
        assert_eq!(parse_time_cursor(&encode_time_cursor(place.0, place.1)), Some(place));
        for odd in [
            "",
            "1",
            "x y",
            "-1 00000000-0000-0000-0000-000000000007",
            "9223372036854775807 00000000-0000-0000-0000-000000000007",
        ] {
            assert_eq!(parse_time_cursor(odd), None, "{odd}");
        }
    }
}
