//! Selection of machines: one by its name, or many by filters, for lists, watches and bulk orders.

use clap::Args;
use clap::builder::PossibleValuesParser;

use model::phase::Phase;
use proto::fleet::v1;

/// The machine that a command names.
#[derive(Debug, Args)]
pub struct MachineArg {
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID
    #[arg(value_name = "M")]
    pub machine: String,
}

/// Filters that select machines. A machine matches if one of the values of each flag matches. Facts and labels are the
/// exception: all of their values must match.
#[derive(Debug, Default, Args)]
pub struct MachineFilters {
    /// Only machines in this phase; may be given several times
    #[arg(
        long,
        value_name = "PHASE",
        value_parser = PossibleValuesParser::new(Phase::ALL.map(Phase::as_str)),
        ignore_case = true
    )]
    phase: Vec<String>,
    /// Only machines of this provider; may be given several times
    #[arg(long, value_name = "NAME")]
    provider: Vec<String>,
    /// Only machines whose location begins with TEXT; may be given several times
    #[arg(long, value_name = "TEXT")]
    location: Vec<String>,
    /// Only machines of this manufacturer, by their hardware report; may be given several times
    #[arg(long, value_name = "NAME")]
    manufacturer: Vec<String>,
    /// Only machines of this product, by their hardware report; may be given several times
    #[arg(long, value_name = "NAME")]
    product: Vec<String>,
    /// Only machines that have this fact, for example hold or quarantine; with several, a machine must have all
    #[arg(long, value_name = "FACT")]
    fact: Vec<String>,
    /// Only machines with this label, KEY=VALUE or KEY; with several, a machine must have all
    #[arg(long, value_name = "LABEL")]
    label: Vec<String>,
}

impl MachineFilters {
    /// Whether the filters name phases.
    #[must_use]
    pub fn selects_phases(&self) -> bool {
        !self.phase.is_empty()
    }

    /// The providers that are selected, if nothing else is; all for an empty list.
    #[must_use]
    pub fn providers_alone(&self) -> Option<&[String]> {
        let others =
            [&self.phase, &self.location, &self.manufacturer, &self.product, &self.fact, &self.label];
        others.iter().all(|values| values.is_empty()).then_some(self.provider.as_slice())
    }

    /// The filter for a call of the API.
    #[must_use]
    pub fn to_proto(&self) -> v1::MachineFilter {
        v1::MachineFilter {
            phases: self.phase.clone(),
            providers: self.provider.clone(),
            locations: self.location.clone(),
            tags: self.fact.clone(),
            manufacturers: self.manufacturer.clone(),
            products: self.product.clone(),
            labels: self.label.clone(),
        }
    }
}
