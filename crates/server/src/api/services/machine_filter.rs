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

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use proto::fleet::v1;

    /// The key of a field with the number 1 and a length.
    const FORMER_FILTER: u8 = (1 << 3) | 2;

    #[test]
    fn selector_is_no_filter_to_an_earlier_server() {
        let selector = "phase=Ready".to_owned();
        let list =
            v1::ListMachinesRequest { selector: selector.clone(), ..v1::ListMachinesRequest::default() };
        let watch =
            v1::WatchMachinesRequest { selector: selector.clone(), ..v1::WatchMachinesRequest::default() };
        let order = v1::SubmitBulkOrderRequest { selector, ..v1::SubmitBulkOrderRequest::default() };
        for encoded in [list.encode_to_vec(), watch.encode_to_vec(), order.encode_to_vec()] {
            assert_ne!(encoded[0], FORMER_FILTER, "{encoded:?}");
        }
    }
}
