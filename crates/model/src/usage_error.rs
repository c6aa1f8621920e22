//! Usage errors: one sentence for a wrong command line.
//!
//! The parser's own messages take five lines and repeat every flag on the command line. A person needs to know which
//! word is wrong, what would be right, and where to read on. A word that may contain a password, such as a URL whose
//! flag was forgotten, is not repeated.

use std::error::Error as _;
use std::ffi::OsString;

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// The sentence for an error of the parser. `arguments` are those of the process, its own name first.
#[must_use]
pub fn format_usage_error(error: &clap::Error, command: &Command, arguments: &[OsString]) -> String {
    let path = command_path(command, arguments);
    let problem = describe_problem(error);
    let joint = if problem.ends_with('?') { " See" } else { "; see" };
    format!("{problem}{joint} `{path} --help`")
}

/// The flag that an error concerns, such as `--ssh_user`; `None` for an error without one.
#[must_use]
pub fn flag_name(error: &clap::Error) -> Option<String> {
    let named = context_texts(error, ContextKind::InvalidArg).into_iter().next()?;
    named.split([' ', '=']).next().filter(|name| name.starts_with("--")).map(ToOwned::to_owned)
}

fn describe_problem(error: &clap::Error) -> String {
    let all = |kind| context_texts(error, kind);
    let first = |kind| all(kind).into_iter().next();
    let flag = first(ContextKind::InvalidArg).unwrap_or_default();
    let value = first(ContextKind::InvalidValue).unwrap_or_default();
    let meant =
        |name: Option<String>| name.map_or_else(String::new, |name| format!("; did you mean {name}?"));
    match error.kind() {
        ErrorKind::UnknownArgument if flag.starts_with('-') => {
            format!("there is no flag {flag}{}", meant(first(ContextKind::SuggestedArg)))
        }
        ErrorKind::UnknownArgument => format!("{:?} is one word too many", mask_url_credentials(&flag)),
        ErrorKind::InvalidSubcommand => {
            let word = first(ContextKind::InvalidSubcommand).unwrap_or_default();
            format!(
                "there is no command {:?}{}",
                mask_url_credentials(&word),
                meant(first(ContextKind::SuggestedSubcommand))
            )
        }
        ErrorKind::InvalidValue if value.is_empty() => format!("{flag} needs a value"),
        ErrorKind::InvalidValue => {
            let name = flag.split(' ').next().unwrap_or_default();
            let value = mask_url_credentials(&value);
            format!("{name} cannot be {value:?}; it is one of {}", all(ContextKind::ValidValue).join(", "))
        }
        ErrorKind::ValueValidation => {
            let why = error.source().map(ToString::to_string).unwrap_or_default();
            let name = flag.split(' ').next().unwrap_or_default();
            let shown = shorten_value(&value);
            // A message that contains the value already need not repeat it.
            if why.contains(&format!("{value:?}")) {
                format!("{name}: {why}")
            } else {
                format!("{name} cannot be {shown:?}: {}", explain_parse_error(&flag, why))
            }
        }
        ErrorKind::MissingRequiredArgument => format!("give {}", all(ContextKind::InvalidArg).join(" and ")),
        ErrorKind::ArgumentConflict => {
            let others = all(ContextKind::PriorArg);
            let subcommand = first(ContextKind::InvalidSubcommand);
            match subcommand.or_else(|| Some(flag).filter(|flag| !flag.is_empty())) {
                Some(one) if !others.is_empty() => {
                    format!("{one} and {} cannot be given together", others.join(" and "))
                }
                _ => first_line(error),
            }
        }
        _ => first_line(error),
    }
}

/// Replaces messages of the standard library that do not explain what a valid value looks like.
fn explain_parse_error(flag: &str, why: String) -> String {
    if flag.ends_with("<ADDRESS:PORT>") {
        "it is not an ADDRESS:PORT; write for example 127.0.0.1:9090 or [::1]:9090".to_owned()
    } else if why == "invalid digit found in string" {
        "it is no whole number".to_owned()
    } else if let Some((first, last)) =
        why.split_once(" is not in ").and_then(|(_, range)| range.split_once("..="))
    {
        format!("give a number from {first} to {last}")
    } else {
        why
    }
}

/// A value without what follows its first characters, if it has very many.
fn shorten_value(value: &str) -> String {
    const MAX_CHARS: usize = 200;
    let short: String = value.chars().take(MAX_CHARS).collect();
    if short.len() < value.len() { short + "…" } else { short }
}

/// A word without the part between `://` and `@`.
fn mask_url_credentials(word: &str) -> String {
    match word.split_once("://") {
        Some((scheme, rest)) if rest.contains('@') => format!("{scheme}://…"),
        _ => word.to_owned(),
    }
}

fn first_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let line = text.lines().next().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}

fn context_texts(error: &clap::Error, kind: ContextKind) -> Vec<String> {
    match error.get(kind) {
        Some(ContextValue::String(text)) => vec![text.clone()],
        Some(ContextValue::Strings(texts)) => texts.clone(),
        Some(ContextValue::StyledStr(text)) => vec![text.to_string()],
        Some(ContextValue::StyledStrs(texts)) => texts.iter().map(ToString::to_string).collect(),
        _ => Vec::new(),
    }
}

/// The name of the command that the arguments lead to, such as `shepherd simulator fault`.
fn command_path(command: &Command, arguments: &[OsString]) -> String {
    let mut path = vec![command];
    let mut rest = arguments.iter().skip(1);
    while let Some(argument) = rest.next() {
        if let Some(flag) = argument.to_str().filter(|text| text.starts_with('-')) {
            // Flags of any command on the path may occur here, each with its value.
            if path.iter().any(|command| takes_next_word(command, flag)) {
                rest.next();
            }
            continue;
        }
        let Some(next) = path.last().and_then(|here| here.find_subcommand(argument)) else { break };
        path.push(next);
    }
    path.iter().map(|command| command.get_name()).collect::<Vec<_>>().join(" ")
}

/// Whether `flag` belongs to this command and takes the next word as its value.
fn takes_next_word(command: &Command, flag: &str) -> bool {
    command.get_arguments().any(|argument| {
        let long = argument.get_long().is_some_and(|long| flag.strip_prefix("--") == Some(long));
        let short =
            argument.get_short().is_some_and(|short| flag.strip_prefix('-') == Some(&short.to_string()));
        (long || short) && argument.get_action().takes_values()
    })
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ArgAction};

    use super::*;

    fn usage_error_of(arguments: &[&str]) -> String {
        let number = Arg::new("number").long("number").value_name("N").value_parser(clap::value_parser!(u8));
        let listen = Arg::new("listen").long("listen").value_name("ADDRESS:PORT");
        let listen = listen.value_parser(clap::value_parser!(std::net::SocketAddr));
        let colour = Arg::new("colour").long("colour").value_parser(["red", "blue"]).conflicts_with("number");
        let verb = Command::new("paint").arg(Arg::new("wall").required(true).value_name("WALL"));
        let quiet = Arg::new("quiet").long("quiet").action(ArgAction::SetTrue);
        let command = Command::new("p").args([number, colour, listen, quiet]).subcommand(verb);
        let arguments: Vec<OsString> = arguments.iter().map(OsString::from).collect();
        let error = command.clone().try_get_matches_from(&arguments).unwrap_err();
        format_usage_error(&error, &command, &arguments)
    }

    #[test]
    fn each_mistake_is_one_sentence() {
        let long = "x".repeat(300);
        for (arguments, expected) in [
            (vec!["p", "--colr", "red"], "there is no flag --colr; did you mean --colour? See `p --help`"),
            (vec!["p", "pant"], "there is no command \"pant\"; did you mean paint? See `p --help`"),
            (vec!["p", "--colour"], "--colour <colour> needs a value; see `p --help`"),
            (vec!["p", "--colour", "x"], "--colour cannot be \"x\"; it is one of red, blue; see `p --help`"),
            (
                vec!["p", "--colour", "red", "--number", "1"],
                "--colour <colour> and --number <N> cannot be given together; see `p --help`",
            ),
            (
                vec!["p", "--number", "300"],
                "--number cannot be \"300\": give a number from 0 to 255; see `p --help`",
            ),
            (
                vec!["p", "--listen", "here"],
                "--listen cannot be \"here\": it is not an ADDRESS:PORT; write for example 127.0.0.1:9090 or \
                 [::1]:9090; see `p --help`",
            ),
            (
                vec!["p", "--number", long.as_str()],
                &format!(
                    "--number cannot be \"{}…\": it is no whole number; see `p --help`",
                    "x".repeat(200)
                ),
            ),
            (vec!["p", "paint"], "give <WALL>; see `p paint --help`"),
            (vec!["p", "paint", "a", "b"], "\"b\" is one word too many; see `p paint --help`"),
            (vec!["p", "--colour", "red", "--quiet", "paint"], "give <WALL>; see `p paint --help`"),
            (
                vec!["p", "--listen", "paint"],
                "--listen cannot be \"paint\": it is not an ADDRESS:PORT; write for example \
                127.0.0.1:9090 or [::1]:9090; see `p --help`",
            ),
            (vec!["p", "x://kim:secret@db"], "there is no command \"x://…\"; see `p --help`"),
            (
                vec!["p", "paint", "a", "x://kim:secret@db"],
                "\"x://…\" is one word too many; see `p paint --help`",
            ),
        ] {
            assert_eq!(usage_error_of(&arguments), expected, "{arguments:?}");
        }
    }
}
