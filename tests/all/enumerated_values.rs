//! Arguments with a fixed set of values accept each of them in any case, in every program, and give the code behind the
//! parser one spelling.

use std::any::TypeId;

use clap::{Arg, Command};

/// The value behind the parser of `argument`: its text, or `None` if it is an enum.
fn parse_value(argument: &Arg, text: &str) -> Result<Option<String>, clap::Error> {
    let probe = Arg::new("probe")
        .value_parser(argument.get_value_parser().clone())
        .ignore_case(argument.is_ignore_case_set());
    let matches = Command::new("program").arg(probe).try_get_matches_from(["program", text])?;
    Ok(matches.try_get_one::<String>("probe").ok().flatten().cloned())
}

/// Reports each argument of `command`, and of the commands below it, that takes a value in one case only. Returns how
/// many arguments have a fixed set of values.
fn check_command(path: &str, command: &Command, problems: &mut Vec<String>) -> usize {
    let mut count = 0;
    // A truth value is written as in the configuration file.
    let arguments = command.get_arguments();
    for argument in arguments.filter(|one| one.get_value_parser().type_id() != TypeId::of::<bool>()) {
        let values = argument.get_possible_values();
        count += usize::from(!values.is_empty());
        for value in values {
            let name = value.get_name();
            let expected = parse_value(argument, name).ok();
            for text in [name.to_ascii_uppercase(), name.to_ascii_lowercase()] {
                if expected.is_none() || parse_value(argument, &text).ok() != expected {
                    problems.push(format!("{path}: {argument} does not take {text:?} as {name:?}"));
                }
            }
        }
    }
    let below = command.get_subcommands();
    count
        + below
            .map(|below| check_command(&format!("{path} {}", below.get_name()), below, problems))
            .sum::<usize>()
}

#[test]
fn every_enumerated_value_is_accepted_in_any_case() {
    let mut problems = Vec::new();
    let mut check = |name: &str, command: &Command| check_command(name, command, &mut problems);
    assert!(check("shepherdctl", &shepherd::cli::command::whole_grammar()) >= 15);
    assert!(check("shepherd", &shepherd::service::flags::build_command()) >= 4);
    assert!(check("roleserver", &shepherd::roleserver::program::build_command()) >= 1);
    assert!(
        problems.is_empty(),
        "write value_parser = one_of(...) or ignore_case = true:\n{}",
        problems.join("\n")
    );
}

#[test]
fn values_in_one_case_are_found() {
    for (argument, expected) in [
        (Arg::new("a").value_parser(["on", "off"]), 2),
        // Without the spelling of the set, the code behind the parser would have to compare in any case, too.
        (Arg::new("a").value_parser(["on", "off"]).ignore_case(true), 2),
        (Arg::new("a").value_parser(shepherd::cli::one_of::one_of(["on", "off"])), 0),
        (Arg::new("a"), 0),
    ] {
        let mut problems = Vec::new();
        check_command("p", &Command::new("p").arg(argument), &mut problems);
        assert_eq!(problems.len(), expected, "{problems:?}");
    }
}
