//! Selector of a request, for lists, watches and bulk orders.

use tonic::Status;

use crate::api::api_error::invalid_argument;
use bmdb::fleet::listing::Filter;
use model::selector::Selector;
use model::selector::error::SelectorError;

/// Validates the selector of a request.
pub(super) fn parse_filter(selector: &str) -> Result<Filter, Status> {
    let selector: Selector =
        selector.parse().map_err(|error: SelectorError| invalid_argument("selector", error.to_string()))?;
    Ok(Filter { selector, omit_retired: false })
}
