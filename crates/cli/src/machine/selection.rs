//! Selection of machines: one by its name, or many by a selector, for lists, watches, `wait` and bulk orders.
//!
//! The flags for one key each (`--phase`, `--location` and others) are shorthand: they become terms of the selector. None
//! takes an empty value: a shell makes one of a variable that is not set, and no order may reach more machines by it.

use clap::Args;
use clap::builder::NonEmptyStringValueParser;

use crate::one_of::one_of;
use model::label::LabelFilter;
use model::phase::Phase;
use model::selector::Selector;
use model::selector::compose::{any_of, quote_prefix, quote_value};
use model::selector::error::SelectorError;

/// The machine that a command names.
#[derive(Debug, Args)]
pub struct MachineArg {
    /// Machine: its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID
    #[arg(value_name = "M")]
    pub machine: String,
}

/// Filters that select machines. A machine matches if it meets the selector and each flag. Of a flag with several values
/// one must match, except of facts and labels, which must all match.
#[derive(Debug, Default, Args)]
pub struct MachineFilters {
    /// Only machines that meet these terms, for example 'location=ams*,label.row=7,memory>=64GiB'
    #[arg(short = 'l', long, value_name = "SELECTOR", value_parser = parse_selector)]
    selector: Option<Selector>,
    /// Only machines in this phase; may be given several times
    #[arg(
        long,
        value_name = "PHASE",
        value_parser = one_of(Phase::ALL.map(Phase::as_str))
    )]
    phase: Vec<String>,
    /// Only machines of this provider; may be given several times
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    provider: Vec<String>,
    /// Only machines at this location; TEXT* is a prefix; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    location: Vec<String>,
    /// Only machines of this manufacturer, by their hardware report; may be given several times
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    manufacturer: Vec<String>,
    /// Only machines of this product, by their hardware report; may be given several times
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    product: Vec<String>,
    /// Only machines that have this fact, for example hold or quarantine; with several, a machine must have all
    #[arg(long, value_name = "FACT", value_parser = NonEmptyStringValueParser::new())]
    fact: Vec<String>,
    /// Only machines with this label, KEY=VALUE or KEY; with several, a machine must have all
    #[arg(long, value_name = "LABEL", value_parser = LabelFilter::parse)]
    label: Vec<LabelFilter>,
}

/// Parses the value of a flag with a selector.
pub(crate) fn parse_selector(text: &str) -> Result<Selector, SelectorError> {
    text.parse()
}

impl MachineFilters {
    /// Whether retired machines are selected: by their phase, not only because nothing excludes it.
    #[must_use]
    pub fn selects_retired(&self) -> bool {
        self.phase.iter().any(|phase| phase == Phase::Retired.as_str())
            || self.selector.as_ref().is_some_and(|selector| selector.names_phase(Phase::Retired))
    }

    /// The providers that are selected, if nothing else is; all for an empty list.
    #[must_use]
    pub fn providers_alone(&self) -> Option<&[String]> {
        let others = [&self.phase, &self.location, &self.manufacturer, &self.product, &self.fact];
        let is_alone = others.iter().all(|values| values.is_empty())
            && self.label.is_empty()
            && self.selector.as_ref().is_none_or(Selector::is_empty);
        is_alone.then_some(self.provider.as_slice())
    }

    /// Whether a flag selects machines. An empty selector is one: it selects all.
    #[must_use]
    pub fn is_given(&self) -> bool {
        self.selector.is_some() || !self.selector_text().is_empty()
    }

    /// The selector for a call of the API: that of the flag, and a term for each of the others.
    #[must_use]
    pub fn selector_text(&self) -> String {
        let quoted = |values: &[String], quote: fn(&str) -> String| -> Vec<String> {
            values.iter().map(|value| quote(value)).collect()
        };
        let location: fn(&str) -> String =
            |text| text.strip_suffix('*').map_or_else(|| quote_value(text), quote_prefix);
        let terms = [
            any_of("phase", &quoted(&self.phase, quote_value)),
            any_of("provider", &quoted(&self.provider, quote_value)),
            any_of("location", &quoted(&self.location, location)),
            any_of("manufacturer", &quoted(&self.manufacturer, quote_value)),
            any_of("product", &quoted(&self.product, quote_value)),
        ];
        let facts = self.fact.iter().map(|fact| format!("fact={}", quote_value(fact)));
        let labels = self.label.iter().map(|label| format!("label.{label}"));
        // Last, so that a backslash at its end escapes nothing of another term.
        let selector = self.selector.iter().filter(|selector| !selector.is_empty()).map(ToString::to_string);
        let terms = terms.into_iter().flatten().chain(facts).chain(labels).chain(selector);
        terms.collect::<Vec<_>>().join(",")
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Command {
        #[command(flatten)]
        filters: MachineFilters,
    }

    fn filters(line: &[&str]) -> Result<MachineFilters, clap::Error> {
        let line = ["p"].iter().chain(line);
        Command::try_parse_from(line).map(|command| command.filters)
    }

    #[test]
    fn flags_are_terms_of_the_selector() {
        for (line, expected) in [
            (&[][..], ""),
            (&["-l", ""], ""),
            (&["-l", "label.row=7"], "label.row=7"),
            (&["--selector", "label.row=7", "--phase", "ready"], "phase=Ready,label.row=7"),
            (&["-l", " , ", "--phase", "READY"], "phase=Ready"),
            (&["--phase", "Ready", "--phase", "New"], "phase in (Ready,New)"),
            (&["--provider", "rack a"], "provider=\"rack a\""),
            (&["--location", "rack 1"], "location=\"rack 1\""),
            (&["--location", "rack 1*"], "location=\"rack 1*\""),
            (&["--location", "ams*", "--location", "Hall A, row"], "location in (ams*,\"Hall A, row\")"),
            (&["--location", "a*b"], "location=\"a\\*b\""),
            (&["--location", "*"], "location=*"),
            (&["--manufacturer", "Acme, Inc."], "manufacturer=\"Acme, Inc.\""),
            (&["--product", "24\" \\ *,phase=New"], "product=\"24\\\" \\\\ \\*,phase=New\""),
            (&["--fact", "hold", "--fact", "quarantine"], "fact=hold,fact=quarantine"),
            (
                &["--label", "row=7", "--label", "owner", "--label", "empty="],
                "label.row=7,label.owner,label.empty=",
            ),
            (&["-l", "location=a\\", "--phase", "New"], "phase=New,location=a\\"),
        ] {
            let text = filters(line).unwrap().selector_text();
            assert_eq!(text, expected, "{line:?}");
            let selector: Selector = text.parse().unwrap_or_else(|error| panic!("{line:?}: {error}"));
            let flags = line.iter().filter(|word| word.starts_with('-')).count();
            assert!(selector.keys().count() <= flags, "{line:?} has a term that no flag has: {text}");
        }
        // What no value of a key can be is refused here or by the server.
        for line in [&["--label", "row,phase=New"][..], &["--label", "row=7,phase=New"], &["-l", "row=7"]] {
            assert!(filters(line).is_err(), "{line:?}");
        }
    }

    #[test]
    fn empty_value_of_a_field_is_refused() {
        for flag in
            ["--phase", "--provider", "--location", "--manufacturer", "--product", "--fact", "--label"]
        {
            for line in [&[flag, ""][..], &["-l", "phase=Ready", flag, ""]] {
                assert_eq!(filters(line).map_err(|error| error.exit_code()).err(), Some(2), "{line:?}");
            }
        }
    }

    #[test]
    fn retired_machines_are_selected_by_their_phase() {
        for (line, expected) in [
            (&[][..], false),
            (&["--phase", "retired"], true),
            (&["--phase", "Ready"], false),
            (&["-l", "phase in (Ready,Retired)"], true),
            (&["-l", "phase!=Ready"], false),
        ] {
            assert_eq!(filters(line).unwrap().selects_retired(), expected, "{line:?}");
        }
    }

    #[test]
    fn providers_are_alone_without_any_other_term() {
        for (line, expected) in [
            (&[][..], true),
            (&["--provider", "rack", "-l", ""], true),
            (&["--provider", "rack", "-l", "label.row"], false),
            (&["--provider", "rack", "--label", "row"], false),
        ] {
            assert_eq!(filters(line).unwrap().providers_alone().is_some(), expected, "{line:?}");
        }
    }
}
