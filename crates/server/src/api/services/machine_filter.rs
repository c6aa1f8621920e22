//! Machine filter of a request, for lists, watches and bulk orders.

use tonic::Status;

use crate::api::api_error::invalid_argument;
use bmdb::fleet::listing::Filter;
use model::label::LabelFilter;
use model::phase::Phase;
use proto::fleet::v1;

/// Most values of one filter.
const MAX_FILTER_VALUES: usize = 50;

/// Validates the filter of a request.
pub(super) fn parse_filter(machine_filter: Option<v1::MachineFilter>) -> Result<Filter, Status> {
    let machine_filter = machine_filter.unwrap_or_default();
    for phase in &machine_filter.phases {
        if !Phase::ALL.iter().any(|known| known.as_str().eq_ignore_ascii_case(phase)) {
            let known = Phase::ALL.map(Phase::as_str).join(", ");
            return Err(invalid_argument(
                "filter.phases",
                format!("{phase:?} is not a phase; the phases are {known}"),
            ));
        }
    }
    if machine_filter.labels.len() > MAX_FILTER_VALUES {
        return Err(invalid_argument(
            "filter",
            format!("one of the filters has more than {MAX_FILTER_VALUES} values"),
        ));
    }
    let labels = machine_filter.labels.iter().map(|text| LabelFilter::parse(text)).collect::<Result<_, _>>();
    let filter = Filter {
        labels: labels.map_err(|reason| invalid_argument("filter.labels", reason))?,
        phases: machine_filter.phases,
        providers: machine_filter.providers,
        locations: machine_filter.locations,
        tags: machine_filter.tags,
        manufacturers: machine_filter.manufacturers,
        products: machine_filter.products,
        omit_retired: false,
    };
    let all = [
        &filter.phases,
        &filter.providers,
        &filter.locations,
        &filter.tags,
        &filter.manufacturers,
        &filter.products,
    ];
    if all.iter().any(|values| values.len() > MAX_FILTER_VALUES) {
        return Err(invalid_argument(
            "filter",
            format!("one of the filters has more than {MAX_FILTER_VALUES} values"),
        ));
    }
    if let Some(tag) = filter.tags.iter().find(|tag| !is_fact_name(tag)) {
        return Err(invalid_argument(
            "filter.tags",
            format!(
                "{tag:?} is not the name of a fact; names of facts are, for example, hold or agent_started"
            ),
        ));
    }
    Ok(filter)
}

fn is_fact_name(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 60
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}
