//! Pagination of lists, and timeouts of answers that the API sends in chunks.
//!
//! A list is whole, unless the command has a limit. A response has at most `API_PAGE_SIZE` lines, so a command fetches
//! pages until it has as many lines as the limit, or there are no more. Plans and issues are streams: the API sends them
//! in chunks.

use std::time::Duration;

use tonic::Streaming;

use crate::client::fleet_client::{FleetClient, status_to_error};
use crate::error::CliError;

/// Most lines in one response.
const API_PAGE_SIZE: i32 = 500;

/// Longest wait for a chunk. Before it sends the first one, the service waits for a free slot and reads the whole
/// fleet.
const CHUNK_TIMEOUT: Duration = Duration::from_mins(3);

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
            ", or use --direct and --bmdb_url to query the database itself"
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
}
