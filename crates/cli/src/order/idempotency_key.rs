//! `--idempotency-key`: carry out a repeated order once.
//!
//! Each order through the API has such a key ([`retry`]). With an explicit key, a script can repeat an order
//! after the script itself was interrupted. The order is carried out once, and a repetition returns the first result.
//!
//! Every command that changes something has the flag, and none can be forgotten: the grammar adds it to each command
//! with a `--reason`, and [`crate::run`] reads it into the [`OrderFlags`] of the context that each command gets, as it
//! does with [`dry_run`]. `declare restored` is left out, because repeating it is how an interrupted run is resumed, and so
//! is `policy disable-two-person-rule`, which changes nothing the second time.
//!
//! [`retry`]: crate::order::retry
//! [`dry_run`]: crate::order::dry_run
//! [`OrderFlags`]: crate::context::OrderFlags

use std::ffi::OsString;

use clap::{Arg, ArgMatches};

use bmdb::connection::url::mask_password;
use model::plain_text::check_visible;
use model::shell_words;

/// Its name among the arguments of a command.
const ID: &str = "idempotency_key";
/// Its name on a command line, without the dashes before it.
const FLAG: &str = "idempotency-key";
/// Longest key, in characters, same as in the API.
const MAX_CHARS: usize = 128;
/// Commands that need no key, because repeating them is safe.
pub(crate) const EXCLUDED_COMMANDS: [&str; 2] = ["declare", "policy"];

/// The definition of `--idempotency-key`.
pub(crate) fn flag() -> Arg {
    Arg::new(ID)
        .long(FLAG)
        .value_name("KEY")
        .help_heading(None)
        .value_parser(parse_key)
        .help("Idempotency key: an order repeated with the same KEY is carried out once and gets the first response")
}

fn parse_key(text: &str) -> Result<String, String> {
    let key = text.trim();
    if key.is_empty() {
        return Err("the key is empty; use a new one for each order, for example a UUID".to_owned());
    }
    if key.chars().count() > MAX_CHARS {
        return Err(format!("it is longer than {MAX_CHARS} characters"));
    }
    check_visible(key).map_err(|reason| format!("it {reason}"))?;
    Ok(key.to_owned())
}

/// The key that is given after some subcommand.
#[must_use]
pub fn find_key(matches: &ArgMatches) -> Option<String> {
    let here = matches.try_get_one::<String>(ID).ok().flatten().cloned();
    here.or_else(|| matches.subcommand().and_then(|(_, matches)| find_key(matches)))
}

/// The same command line with this key, for the operator to repeat.
#[must_use]
pub fn repeat_command(arguments: &[OsString], key: &str) -> String {
    if has_key_flag(arguments) {
        command_with_flags(arguments, &[])
    } else {
        command_with_flags(arguments, &[&format!("--{FLAG}"), key])
    }
}

/// The same command line with more flags, quoted for a shell.
#[must_use]
pub fn command_with_flags(arguments: &[OsString], flags: &[&str]) -> String {
    // What follows a lone `--` is no flag.
    let end = arguments.iter().position(|word| word == "--").unwrap_or(arguments.len());
    let (before, after) = arguments.split_at(end);
    let word = |word: &OsString| shell_words::quote_if_needed(&mask_url_password(&word.to_string_lossy()));
    let flags = flags.iter().map(|flag| shell_words::quote_if_needed(flag));
    let words: Vec<String> = before.iter().map(word).chain(flags).chain(after.iter().map(word)).collect();
    words.join(" ")
}

/// What the sentence above a command to repeat adds if the arguments take names from standard input: these are not in it.
#[must_use]
pub fn stdin_note(arguments: &[OsString]) -> &'static str {
    if arguments.iter().any(|word| word == "-") { ", with the same input piped into it" } else { "" }
}

/// Masks the password of a URL, before its host or as a parameter; returns any other word unchanged.
pub(crate) fn mask_url_password(word: &str) -> String {
    let Some((scheme, rest)) = word.split_once("://") else { return word.to_owned() };
    let user = rest.rsplit_once('@').and_then(|(who, place)| Some((who.split_once(':')?.0, place)));
    let masked = user.map(|(name, place)| format!("{scheme}://{name}:***@{place}"));
    mask_password(masked.as_deref().unwrap_or(word))
}

/// Whether the arguments contain a key.
fn has_key_flag(arguments: &[OsString]) -> bool {
    let flag = format!("--{FLAG}");
    arguments.iter().filter_map(|word| word.to_str()).any(|word| word.split('=').next() == Some(&flag))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::grammar;

    /// Collects every command that has no subcommands, with its path.
    fn leaves(command: &clap::Command, path: &str, found: &mut Vec<(String, bool)>) {
        let path = format!("{path} {}", command.get_name());
        let keyed = command.get_arguments().any(|argument| argument.get_id() == ID);
        if command.get_subcommands().next().is_none() {
            found.push((path.trim().to_owned(), keyed));
        }
        for below in command.get_subcommands() {
            leaves(below, &path, found);
        }
    }

    #[test]
    fn every_order_takes_a_key_and_nothing_else_does() {
        let mut found = Vec::new();
        leaves(&grammar(), "", &mut found);
        let keyed = |path: &str| found.iter().find(|(found, _)| found == path).map(|(_, keyed)| *keyed);
        for order in ["hold", "release", "retry", "allow host-key", "tokens create", "tokens revoke"] {
            assert_eq!(keyed(&format!("shepherdctl {order}")), Some(true), "{order}");
        }
        for other in [
            "get machines",
            "plan",
            "why",
            "declare restored",
            "policy disable-two-person-rule",
            "get tokens",
            "tokens bootstrap",
        ] {
            assert_eq!(keyed(&format!("shepherdctl {other}")), Some(false), "{other}");
        }
    }

    #[test]
    fn command_is_repeated_as_it_was_typed_with_its_key() {
        let line = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        let typed = ["shepherdctl", "budget", "set", "reboot", "--max-count", "5", "--reason", "it's due"];
        let output = "shepherdctl budget set reboot --max-count 5 --reason \"it's due\"";
        assert_eq!(repeat_command(&line(&typed), "k 1"), format!("{output} --idempotency-key 'k 1'"));
        for (url, shown) in [
            ("postgres://kim@db/b", "postgres://kim@db/b"),
            ("postgres://kim:se@cret@db/b", "postgres://kim:***@db/b"),
            ("--bmdb-url=postgres:///b?password=secret", "--bmdb-url=postgres:///b?password=***"),
        ] {
            assert_eq!(mask_url_password(url), shown);
        }
        let named = [&typed[..], &["--idempotency-key=k"]].concat();
        assert_eq!(repeat_command(&line(&named), "k"), format!("{output} '--idempotency-key=k'"));
        let trailing = ["shepherdctl", "retire", "--reason", "old", "--", "-odd"];
        assert_eq!(
            command_with_flags(&line(&trailing), &["--yes"]),
            "shepherdctl retire --reason old --yes -- -odd"
        );
    }

    #[test]
    fn command_with_names_on_standard_input_needs_them_again() {
        let note = |words: &[&str]| stdin_note(&words.iter().map(OsString::from).collect::<Vec<_>>());
        assert_eq!(
            note(&["shepherdctl", "retire", "-", "--reason", "r"]),
            ", with the same input piped into it"
        );
        assert_eq!(note(&["shepherdctl", "retire", "m", "--reason", "a - b"]), "");
    }

    #[test]
    fn key_is_found_where_it_was_typed() {
        let typed = |arguments: &[&str]| {
            let line = ["shepherdctl"].iter().chain(arguments);
            grammar().try_get_matches_from(line).map(|matches| find_key(&matches)).ok()
        };
        let hold = ["hold", "m", "--reason", "r"];
        assert_eq!(typed(&hold), Some(None));
        assert_eq!(typed(&[&hold[..], &["--idempotency-key", " k 1 "]].concat()), Some(Some("k 1".into())));
        assert_eq!(typed(&["allow", "host-key", "m", "--fingerprint", "f"]), Some(None));
        for odd in ["", " ", "a\nb", &"k".repeat(129)] {
            assert_eq!(typed(&[&hold[..], &["--idempotency-key", odd]].concat()), None, "{odd:?}");
        }
        assert_eq!(typed(&["get", "machines", "--idempotency-key", "k"]), None, "that is no order");
    }
}
