//! Pages of lists: how long one is, and where a list goes on.
//!
//! Where it goes on is text that means nothing to a caller: the list it belongs to and what the next
//! statement begins after, so that it is good at any shepherd and at any time.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use tonic::Status;

use crate::server::api::refusal::wrong;

/// Most lines of a page: what a client decodes has a bound on its fields.
const MOST: i32 = 500;

/// The length of a page that was asked for, or the usual one.
pub fn size(asked: i32, usual: i64, field: &str) -> Result<i64, Status> {
    match asked {
        0 => Ok(usual),
        1..=MOST => Ok(i64::from(asked)),
        _ => Err(wrong(field, format!("{field} is {asked}; it goes from 1 to {MOST}, and 0 is {usual}"))),
    }
}

/// Where the list of that name goes on.
#[must_use]
pub fn write(list: &str, place: &str) -> String {
    URL_SAFE_NO_PAD.encode(format!("{list} {place}"))
}

/// Reads what [`write()`] wrote; `None` for the beginning.
pub fn read(list: &str, token: &str) -> Result<Option<String>, Status> {
    if token.is_empty() {
        return Ok(None);
    }
    let place = URL_SAFE_NO_PAD.decode(token).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    let place = place.and_then(|text| text.strip_prefix(list)?.strip_prefix(' ').map(str::to_owned));
    place.map(Some).ok_or_else(|| no_place(list))
}

/// A token that says no place in this list.
#[must_use]
pub fn no_place(list: &str) -> Status {
    wrong(
        "page_token",
        format!("this is no page token of the list of {list}; give what an earlier page ended with"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_reads_back_in_its_own_list_only() {
        let token = write("machines", "Ready/a b/7");
        assert_eq!(read("machines", &token).unwrap(), Some("Ready/a b/7".to_owned()));
        assert_eq!(read("machines", "").unwrap(), None);
        assert!(read("audit", &token).is_err());
        for odd in ["!", "AAAA", "bWFjaGluZXM"] {
            assert!(read("machines", odd).is_err(), "{odd}");
        }
    }

    #[test]
    fn page_has_a_bound() {
        assert_eq!(size(0, 100, "page_size").unwrap(), 100);
        assert_eq!(size(500, 100, "page_size").unwrap(), 500);
        for odd in [-1, 501, i32::MAX] {
            assert!(size(odd, 100, "page_size").is_err());
        }
    }
}
