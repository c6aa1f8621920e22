//! Pagination of lists, and timeouts of answers that the API sends in chunks.
//!
//! A list is whole, unless the command has a limit. A response has at most `API_PAGE_SIZE` lines, so `fetch_pages` asks
//! for pages until it has as many lines as the limit, or there are no more. It is the only loop over pages: each list gives
//! it the call for one. Plans and issues are streams: the API sends them in chunks.

use std::time::Duration;

use tonic::Streaming;

use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::error::CliError;

/// Most lines in one response.
const API_PAGE_SIZE: i32 = 500;

/// Longest wait for a chunk. Before it sends the first one, the service waits for a free slot and reads the whole
/// fleet.
const CHUNK_TIMEOUT: Duration = Duration::from_mins(3);

/// Which page of a list is requested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PageRequest {
    /// Most lines of the page.
    pub(crate) size: i32,
    /// Token of the page; empty for the first one.
    pub(crate) token: String,
}

/// A page of a list, or all pages that were fetched.
#[derive(Debug)]
pub(crate) struct Page<T, R> {
    /// What the page lists.
    pub(crate) lines: Vec<T>,
    /// The last response, without its lines.
    pub(crate) response: R,
    /// Token of the next page; empty after the last one.
    pub(crate) next_token: String,
}

impl<T, R> Page<T, R> {
    /// Whether there are more lines than were fetched.
    pub(crate) fn has_more(&self) -> bool {
        !self.next_token.is_empty()
    }
}

/// Fetches the pages of a list from the one of `token`, which is empty for the first: all of them, or as many as have
/// `limit` lines. `fetch` makes the call for a page. A page may have fewer lines than were requested, or none.
pub(crate) async fn fetch_pages<T, R>(
    limit: Option<u32>,
    token: String,
    fetch: impl AsyncFnMut(PageRequest) -> Result<Page<T, R>, CliError>,
) -> Result<Page<T, R>, CliError> {
    fetch_pages_within(usize::MAX, limit, token, fetch).await
}

/// As [`fetch_pages`], in at most `max_calls` calls. So there may be fewer lines than `limit`, or none, and a next page.
pub(crate) async fn fetch_pages_within<T, R>(
    max_calls: usize,
    limit: Option<u32>,
    token: String,
    mut fetch: impl AsyncFnMut(PageRequest) -> Result<Page<T, R>, CliError>,
) -> Result<Page<T, R>, CliError> {
    let (mut lines, mut token, mut calls) = (Vec::new(), token, 0);
    loop {
        let page = fetch(PageRequest { size: page_size(limit, lines.len()), token }).await?;
        calls += 1;
        lines.extend(page.lines);
        token = page.next_token;
        if token.is_empty() || page_size(limit, lines.len()) == 0 || calls >= max_calls {
            return Ok(Page { lines, response: page.response, next_token: token });
        }
    }
}

/// Size of the next page of a list after `listed` lines: at most what one response contains, and 0 at the limit. Without
/// a limit the list is whole.
#[must_use]
pub fn page_size(limit: Option<u32>, listed: usize) -> i32 {
    let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    i32::try_from(limit.saturating_sub(listed)).unwrap_or(i32::MAX).min(API_PAGE_SIZE)
}

/// The next chunk of a stream, or `None` at its end. A server that sends nothing for too long is an error.
pub(crate) async fn next_chunk<T>(
    pieces: &mut Streaming<T>,
    client: &FleetClient,
) -> Result<Option<T>, CliError> {
    let waited = tokio::time::timeout(CHUNK_TIMEOUT, pieces.message()).await;
    let late = |_| {
        let alternative = if client.is_in_process() {
            ""
        } else {
            ", or use --direct and --bmdb-url to query the database itself"
        };
        CliError::Failed(format!(
            "{} began to answer and then sent nothing for {} seconds; try again{alternative}",
            client.current_server(),
            CHUNK_TIMEOUT.as_secs()
        ))
    };
    waited.map_err(late)?.map_err(status_to_error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_end_at_the_limit() {
        for (limit, listed, expected) in [
            (Some(100), 0, 100),
            (Some(1000), 0, 500),
            (Some(1000), 500, 500),
            (Some(501), 500, 1),
            (Some(500), 500, 0),
            (Some(u32::MAX), 0, 500),
            (None, 1_000_000, 500),
        ] {
            assert_eq!(page_size(limit, listed), expected, "{listed} of {limit:?}");
        }
    }

    /// Fetches a list of 1,200 numbers, in pages that have half of what was requested at times. Returns the lines, the
    /// token of the next page, and the sizes that were requested.
    async fn fetch_numbers(limit: Option<u32>, token: &str) -> (Vec<usize>, String, Vec<i32>) {
        let mut sizes = Vec::new();
        let fetched = fetch_pages(limit, token.to_owned(), async |request: PageRequest| {
            let begin: usize = request.token.parse().unwrap_or_default();
            let size = usize::try_from(request.size).unwrap();
            let size = if sizes.len() == 1 { size / 2 } else { size };
            sizes.push(request.size);
            let end = (begin + size).min(1200);
            let next_token = if end < 1200 { end.to_string() } else { String::new() };
            Ok(Page { lines: (begin..end).collect(), response: (), next_token })
        });
        let page = fetched.await.unwrap();
        (page.lines, page.next_token, sizes)
    }

    #[tokio::test]
    async fn all_pages_are_one_list() {
        let (lines, next, sizes) = fetch_numbers(None, "").await;
        assert_eq!((lines, next), ((0..1200).collect(), String::new()));
        assert_eq!(sizes, [500, 500, 500]);
        let (lines, next, sizes) = fetch_numbers(None, "900").await;
        assert_eq!((lines, next, sizes), ((900..1200).collect(), String::new(), vec![500]));
    }

    #[tokio::test]
    async fn page_of_a_screen_costs_a_bounded_number_of_calls() {
        // Each call finds nothing, as with a selector that few of many machines match.
        let mut calls = 0;
        let page = fetch_pages_within(3, Some(100), String::new(), async |request: PageRequest| {
            calls += 1;
            assert_eq!(request.size, 100);
            Ok(Page { lines: Vec::<usize>::new(), response: (), next_token: calls.to_string() })
        });
        let page = page.await.unwrap();
        assert_eq!((page.lines.len(), page.next_token.as_str(), calls), (0, "3", 3));
    }

    #[tokio::test]
    async fn limit_ends_the_list_and_shows_that_there_is_more() {
        for (limit, next, expected) in [
            (100, "100", vec![100]),
            (500, "500", vec![500]),
            (800, "800", vec![500, 300, 150]),
            (1200, "", vec![500, 500, 450]),
        ] {
            let (lines, token, sizes) = fetch_numbers(Some(limit), "").await;
            let length = u32::try_from(lines.len()).unwrap();
            assert_eq!((length, token.as_str(), sizes), (limit, next, expected));
        }
    }
}
