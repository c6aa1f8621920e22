//! The machines of an order: named in arguments or on standard input, or selected by filters.
//!
//! `-` reads names from standard input, one per line, as `get machines -o name` prints them. So a list can be looked at,
//! filtered by other programs, and ordered about. A line of a table is no name, and nothing is ordered then.

use std::collections::BTreeSet;
use std::io::Read as _;

use clap::Args;

use crate::error::CliError;
use crate::machine::bulk_order::BulkSelection;

/// Names or groups of flags that select machines without naming them.
pub const SELECTORS: [&str; 2] = ["MachineFilters", "beyond_limits"];

/// The argument for names on standard input.
const STDIN: &str = "-";
/// Most bytes of standard input.
const MAX_INPUT: usize = 1 << 20;
/// Most names of an order, same as in the API.
const MAX_NAMES: usize = 1000;
/// The header of a list of names.
const HEADER: &str = "NAME";

/// The machines of an order.
#[derive(Debug, Default, Args)]
pub struct MachineTargets {
    /// Machines: each by its UUID or the beginning of it, its provider's id (sim-0007), or PROVIDER/ID; - for names on
    /// standard input; omit them to select by filters
    #[arg(value_name = "M", required_unless_present_any = SELECTORS, conflicts_with = "MachineFilters")]
    pub machines: Vec<String>,
    /// Filters that select many machines, and what confirms their number.
    #[command(flatten)]
    pub selection: BulkSelection,
}

impl MachineTargets {
    /// The names of the machines, each once, in their order; empty if filters select them.
    pub(crate) fn read_names(&self) -> Result<Vec<String>, CliError> {
        read_names(&self.machines)
    }
}

/// Checks machines that a command has among other words: either they are named, or flags select them.
pub(crate) fn check_machines(machines: &[String], selection: &BulkSelection) -> Result<(), CliError> {
    let (has_filters, selects_all) = (selection.has_filters(), selection.beyond_limits);
    match machines.first() {
        Some(machine) if has_filters => Err(CliError::Invalid(format!(
            "the machine {machine:?} and filters cannot be given together; nothing was ordered"
        ))),
        None if !has_filters && !selects_all => Err(CliError::Invalid(
            "give machines, or select them with -l SELECTOR; nothing was ordered".to_owned(),
        )),
        _ => Ok(()),
    }
}

/// The names in these arguments and on standard input, each once, in their order.
pub(crate) fn read_names(arguments: &[String]) -> Result<Vec<String>, CliError> {
    expand_names(arguments, || {
        let mut input = Vec::new();
        // One byte more shows that there is more.
        let limit = u64::try_from(MAX_INPUT + 1).unwrap_or(u64::MAX);
        std::io::stdin().lock().take(limit).read_to_end(&mut input)?;
        Ok(input)
    })
}

fn expand_names(
    arguments: &[String],
    read: impl FnOnce() -> std::io::Result<Vec<u8>>,
) -> Result<Vec<String>, CliError> {
    let mut read = Some(read);
    let mut names = Vec::new();
    for argument in arguments {
        if argument != STDIN {
            names.push(argument.clone());
        } else if let Some(read) = read.take() {
            let unread = |error: &dyn std::fmt::Display| {
                CliError::Invalid(format!(
                    "cannot read names of machines from standard input: {error}; nothing was ordered"
                ))
            };
            let input = read().map_err(|error| unread(&error))?;
            if input.len() > MAX_INPUT {
                return Err(unread(&"it is longer than 1 MiB"));
            }
            let text = String::from_utf8(input).map_err(|_| unread(&"it is not UTF-8"))?;
            names.extend(parse_names(&text)?);
        }
    }
    let mut known = BTreeSet::new();
    names.retain(|name| known.insert(name.clone()));
    if names.len() > MAX_NAMES {
        return Err(CliError::Invalid(format!(
            "{} machines are named, and an order names at most {MAX_NAMES}; nothing was ordered. Give several orders, or \
             select the machines by -l",
            names.len()
        )));
    }
    Ok(names)
}

/// The names in a text, one per line.
fn parse_names(text: &str) -> Result<Vec<String>, CliError> {
    let mut names = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        // Columns of a table are two spaces apart.
        if line == HEADER || line.contains("  ") || line.contains('\t') {
            return Err(CliError::Invalid(format!(
                "line {} of standard input is {line:?}, and no name of a machine; nothing was ordered. Print names \
                 alone with: shepherdctl get machines -o name",
                number + 1
            )));
        }
        if !line.is_empty() {
            names.push(line.to_owned());
        }
    }
    if names.is_empty() {
        return Err(CliError::Invalid(
            "standard input has no name of a machine, and nothing was ordered".to_owned(),
        ));
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(arguments: &[&str], input: &str) -> Result<Vec<String>, CliError> {
        let arguments: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
        expand_names(&arguments, || Ok(input.as_bytes().to_vec()))
    }

    #[test]
    fn names_are_read_from_arguments_and_standard_input_each_once() {
        for (arguments, input, expected) in [
            (&["a", "b"][..], "ignored", &["a", "b"][..]),
            (&["a", "b", "a"], "", &["a", "b"]),
            (&["-"], "sim/a\nsim/b\n", &["sim/a", "sim/b"]),
            (&["-"], "\r\n sim/a \r\n\nsim/b\nsim/a", &["sim/a", "sim/b"]),
            (&["-"], "rack a/1\n", &["rack a/1"]),
            (&["z", "-", "y", "-"], "a\nz\n", &["z", "a", "y"]),
            (&[], "a\n", &[]),
        ] {
            assert_eq!(expanded(arguments, input).unwrap(), expected, "{arguments:?} {input:?}");
        }
    }

    #[test]
    fn names_are_bounded() {
        let lines =
            |count: usize| (0..count).map(|number| format!("sim/m{number}\n")).collect::<Vec<_>>().concat();
        assert_eq!(expanded(&["-"], &lines(MAX_NAMES)).unwrap().len(), MAX_NAMES);
        // The same names again are no more machines.
        assert_eq!(expanded(&["-", "sim/m7"], &lines(MAX_NAMES)).unwrap().len(), MAX_NAMES);
        for (arguments, input, part) in [
            (&["-"][..], lines(MAX_NAMES + 1), "1001 machines are named, and an order names at most 1000"),
            (&["-", "x"], lines(MAX_NAMES), "1001 machines are named"),
            (&["-"], "\n".repeat(MAX_INPUT + 1), "it is longer than 1 MiB"),
        ] {
            let error = expanded(arguments, &input).unwrap_err();
            let text = error.to_string();
            assert!(error.exit_code().number() == 2 && text.contains(part), "{text}");
            assert!(text.contains("nothing was ordered"), "{text}");
        }
    }

    #[test]
    fn machines_are_named_or_selected() {
        let none = BulkSelection::default();
        let all = BulkSelection { beyond_limits: true, ..BulkSelection::default() };
        let named = ["a".to_owned()];
        for (machines, selection, expected) in
            [(&named[..], &none, true), (&named[..], &all, true), (&[], &none, false), (&[], &all, true)]
        {
            assert_eq!(check_machines(machines, selection).is_ok(), expected, "{machines:?} {selection:?}");
        }
    }

    #[test]
    fn input_without_names_orders_nothing() {
        for (input, part) in [
            ("", "standard input has no name of a machine"),
            ("\n \n", "standard input has no name of a machine"),
            ("NAME\nsim/a\n", "line 1 of standard input is \"NAME\""),
            ("NAME      PHASE\nsim/a     Ready\n", "line 1 of standard input is \"NAME      PHASE\""),
            ("sim/a\nsim/b     Ready\n", "line 2 of standard input is"),
            ("sim/a\tReady\n", "line 1 of standard input is"),
        ] {
            let error = expanded(&["a", "-"], input).unwrap_err();
            let text = error.to_string();
            assert!(error.exit_code().number() == 2 && text.contains(part), "{input:?}: {text}");
            assert!(text.contains("nothing was ordered"), "{text}");
        }
        let binary = expand_names(&["-".to_owned()], || Ok(vec![b'a', 0xff]));
        assert!(binary.unwrap_err().to_string().contains("it is not UTF-8; nothing was ordered"));
        let unread = expand_names(&["-".to_owned()], || Err(std::io::ErrorKind::InvalidData.into()));
        assert_eq!(unread.unwrap_err().exit_code().number(), 2);
    }
}
