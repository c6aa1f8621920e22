//! `label`: set and remove labels of machines.
//!
//! A word of the command is a machine or a label: `KEY=VALUE` sets a label, and `KEY-` removes one, as in kubectl. So a word with
//! `=`, or with a dash at its end, is never a machine. Such a machine is named by its UUID.

use clap::Args;

use crate::context::CommandContext;
use crate::error::CliError;
use crate::exit_code::ExitCode;
use crate::machine::bulk_order::BulkSelection;
use crate::machine::machine_order::{MachineOrderRequest, give_machine_order};
use crate::machine::order_targets::{check_machines, read_names};
use bmdb::orders::machine_order::MachineOrder;
use model::label::{Labels, check_label_key, parse_label};
use proto::fleet::v1;
use proto::fleet::v1::machines_client::MachinesClient;

pub(crate) const LABEL_EXAMPLES: &str = "\
Examples:
  shepherdctl label sim-0007 row=7 owner=kim
  shepherdctl label sim-0007 sim-0008 row=8 owner-
  shepherdctl label --provider rack-a site=north --yes-count 40

KEY=VALUE sets a label, and KEY- removes one. A word with = or with a dash at its end is never a machine:
name such a machine by its UUID.";

/// How a label is written, for errors.
const LABEL_FORM: &str = "KEY=VALUE sets a label, and KEY- removes one";

/// Arguments of `label`: the machines and the labels.
#[derive(Debug, Args)]
pub struct LabelArgs {
    /// Machines, as for other orders, and labels: KEY=VALUE to set one, KEY- to remove one; - for names of machines on
    /// standard input; omit machines to select them by filters
    #[arg(value_name = "M|LABEL", required = true)]
    pub words: Vec<String>,
    /// Why, for the history
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    /// Filters that select many machines, and what confirms their number.
    #[command(flatten)]
    pub selection: BulkSelection,
}

/// The words of a `label` command, by what they are.
#[derive(Debug, Default, PartialEq, Eq)]
struct LabelWords {
    machines: Vec<String>,
    set: Labels,
    remove: Vec<String>,
}

/// Runs `label`: sets and removes labels of machines in one order.
pub async fn label_machines(context: &CommandContext, args: &LabelArgs) -> Result<String, CliError> {
    let LabelWords { machines, set, remove } = parse_words(&args.words)?;
    check_machines(&machines, &args.selection)?;
    let request = MachineOrderRequest {
        names: read_names(&machines)?,
        selection: &args.selection,
        each: MachineOrder::Label { set: set.clone(), remove: remove.clone() },
        reason: args.reason.as_deref(),
        is_confirmed: false,
    };
    let give = async |service, machine, order| {
        let (set, remove) = (set.clone(), remove.clone());
        let request = v1::LabelRequest { machine, order: Some(order), set, remove };
        MachinesClient::new(service).label(request).await
    };
    give_machine_order(context, request, give).await.map_err(explain_unknown_machine)
}

/// Adds how a label is written to the error for a machine that does not exist: the word may be meant as a label.
fn explain_unknown_machine(error: CliError) -> CliError {
    match error {
        CliError::Ended { exit: ExitCode::NotFound, message } => {
            CliError::Ended { exit: ExitCode::NotFound, message: format!("{message}. {LABEL_FORM}") }
        }
        CliError::Api { exit: ExitCode::NotFound, message, status } => {
            CliError::Api { exit: ExitCode::NotFound, message: format!("{message}. {LABEL_FORM}"), status }
        }
        other => other,
    }
}

/// Separates machines, labels to set and labels to remove.
fn parse_words(words: &[String]) -> Result<LabelWords, CliError> {
    let mut found = LabelWords::default();
    for word in words {
        if word.contains('=') {
            let (key, value) = parse_label(word).map_err(CliError::Invalid)?;
            let former = found.set.insert(key.clone(), value.clone());
            if let Some(former) = former.filter(|former| *former != value) {
                return Err(CliError::Invalid(format!(
                    "the label {key} is given twice, as {former:?} and as {value:?}; give one of them"
                )));
            }
        } else if let Some(key) = word.strip_suffix('-').filter(|key| !key.is_empty()) {
            check_label_key(key).map_err(|reason| CliError::Invalid(format!("{reason}. {LABEL_FORM}")))?;
            if !found.remove.iter().any(|known| known == key) {
                found.remove.push(key.to_owned());
            }
        } else {
            found.machines.push(word.clone());
        }
    }
    if let Some(key) = found.remove.iter().find(|key| found.set.contains_key(*key)) {
        return Err(CliError::Invalid(format!(
            "the label {key} cannot be set and removed by one order; give one of {key}=… and {key}-"
        )));
    }
    if found.set.is_empty() && found.remove.is_empty() {
        let words = words.join(" ");
        return Err(CliError::Invalid(format!("{words:?} has no label: {LABEL_FORM}")));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use tonic::Status;

    use super::*;

    fn parsed(line: &str) -> Result<LabelWords, String> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        parse_words(&words).map_err(|error| error.to_string())
    }

    #[test]
    fn words_are_machines_labels_to_set_or_labels_to_remove() {
        let words = |machines: &[&str], set: &[(&str, &str)], remove: &[&str]| LabelWords {
            machines: machines.iter().map(|&machine| machine.to_owned()).collect(),
            set: set.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect(),
            remove: remove.iter().map(|&key| key.to_owned()).collect(),
        };
        for (line, expected) in [
            ("sim-0007 row=7", words(&["sim-0007"], &[("row", "7")], &[])),
            ("sim-0007 row-", words(&["sim-0007"], &[], &["row"])),
            ("row=7 a old- b", words(&["a", "b"], &[("row", "7")], &["old"])),
            ("- row=", words(&["-"], &[("row", "")], &[])),
            ("row=7 row=7 old- old-", words(&[], &[("row", "7")], &["old"])),
            ("m example.com/row=a-b", words(&["m"], &[("example.com/row", "a-b")], &[])),
            // A value may end with a dash: the sign decides first.
            ("m row=7-", words(&["m"], &[("row", "7-")], &[])),
            // Ambiguous, and always a label.
            ("m rack/m-", words(&["m"], &[], &["rack/m"])),
        ] {
            assert_eq!(parsed(line), Ok(expected), "{line}");
        }
    }

    #[test]
    fn words_that_say_nothing_clear_are_refused() {
        for (line, part) in [
            ("sim-0007", "has no label: KEY=VALUE sets a label, and KEY- removes one"),
            ("sim-0007 row", "has no label"),
            ("m =7", "\"\" is not a valid key"),
            ("m ro w=7\u{7}", "is not a valid value"),
            ("m .row-", "\".row\" is not a valid key"),
            ("m row=7 row=8", "given twice, as \"7\" and as \"8\""),
            ("m row=7 row-", "give one of row=… and row-"),
        ] {
            let error = parsed(line).unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        }
    }

    #[test]
    fn unknown_machine_may_be_meant_as_a_label() {
        let status = || Box::new(Status::not_found("no machine \"row\""));
        let unknown =
            |exit| CliError::Api { exit, message: "no machine \"row\"".to_owned(), status: status() };
        let explained = explain_unknown_machine(unknown(ExitCode::NotFound));
        assert_eq!(explained.exit_code(), ExitCode::NotFound);
        assert!(explained.to_string().ends_with("KEY- removes one"), "{explained}");
        assert_eq!(explain_unknown_machine(unknown(ExitCode::Refused)).to_string(), "no machine \"row\"");
    }
}
