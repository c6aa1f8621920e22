//! `--idempotency_key`: an order's name, for whoever may have to give it again.
//!
//! Each order through the API has such a key anyhow ([`again`]); one that is typed lets a script give the same
//! order again after it was cut off itself. It is carried out once, and answered as it was then.
//!
//! Every verb that changes something takes the flag, and none can be forgotten: the grammar gets it where an
//! order has a `--reason`, and it is found again where the order is made, not handed through each verb. So does
//! [`dry_run`].
//! `declare restored` is left out, because saying it again is how it is gone on with where it was cut off.
//!
//! [`again`]: crate::cli::again
//! [`dry_run`]: crate::cli::dry_run

use std::ffi::OsString;

use clap::{Arg, ArgMatches, Command, CommandFactory as _};
use secrecy::SecretString;
use uuid::Uuid;

use crate::bmdb::audit::{Order, request_digest};
use crate::cli::command::Cli;
use crate::cli::dry_run;
use crate::cli::error::CliError;
use crate::model::shell_words;

const FLAG: &str = "idempotency_key";
/// Longest key, in characters, as the API has it.
const LONGEST: usize = 128;
/// What is never given again as it was.
const WITHOUT: [&str; 1] = ["declare"];

tokio::task_local! {
    static TYPED: Typed;
}

/// The key that was typed, if one was, and what tells the order from another one.
#[derive(Clone, Debug)]
struct Typed {
    key: Option<String>,
    command: [u8; 32],
}

/// The grammar, with these flags wherever something is ordered.
#[must_use]
pub fn grammar() -> Command {
    let keyed = with_the_flag(Cli::command(), &flag(), &WITHOUT);
    with_the_flag(keyed, &dry_run::flag(), &dry_run::WITHOUT)
}

fn with_the_flag(command: Command, flag: &Arg, without: &[&str]) -> Command {
    let orders = command.get_arguments().any(|argument| argument.get_id() == "reason");
    let command = if orders { command.arg(flag.clone()) } else { command };
    let below: Vec<String> = command.get_subcommands().map(|below| below.get_name().to_owned()).collect();
    below.into_iter().filter(|name| !without.contains(&name.as_str())).fold(command, |command, name| {
        // What is left out is named by its first word alone.
        command.mut_subcommand(name, |below| with_the_flag(below, flag, &[]))
    })
}

fn flag() -> Arg {
    Arg::new(FLAG)
        .long(FLAG)
        .value_name("KEY")
        .help_heading(None)
        .value_parser(read)
        .help("Names this order: given again with the same KEY it is carried out once, and answered again")
}

fn read(said: &str) -> Result<String, String> {
    let key = said.trim();
    if key.is_empty() {
        return Err("it is empty; give each order one of its own, for example a UUID".to_owned());
    }
    if key.chars().count() > LONGEST {
        return Err(format!("it is longer than {LONGEST} characters"));
    }
    if key.chars().any(char::is_control) {
        return Err("it must be one line, without control characters".to_owned());
    }
    Ok(key.to_owned())
}

/// The key that was typed after some subcommand.
#[must_use]
pub fn typed(matches: &ArgMatches) -> Option<String> {
    let here = matches.try_get_one::<String>(FLAG).ok().flatten().cloned();
    here.or_else(|| matches.subcommand().and_then(|(_, matches)| typed(matches)))
}

/// Does `what`, whose orders have this key if one was typed. `command` is what was typed with it.
pub async fn scope<T>(key: Option<String>, command: &str, what: impl Future<Output = T>) -> T {
    TYPED.scope(Typed { key, command: request_digest(command.as_bytes()) }, what).await
}

fn current() -> Option<Typed> {
    TYPED.try_with(Clone::clone).ok()
}

/// Whether a key was typed.
#[must_use]
pub fn is_typed() -> bool {
    current().is_some_and(|typed| typed.key.is_some())
}

/// The key of an order through the API: the one that was typed, or one of its own.
#[must_use]
pub fn key() -> String {
    current().and_then(|typed| typed.key).unwrap_or_else(|| Uuid::new_v4().to_string())
}

/// An order straight in the BMDB, with the key that was typed.
#[must_use]
pub fn named(order: Order) -> Order {
    match current() {
        None => order,
        Some(Typed { key, command }) => Order { idempotency_key: key, request: command, ..order },
    }
}

/// The same command as it is to be typed again, with this key.
#[must_use]
pub fn repeated(arguments: &[OsString], key: &str) -> String {
    let word = |word: &OsString| shell_words::word(&without_password(&word.to_string_lossy()));
    let words: Vec<String> = arguments.iter().map(word).collect();
    let line = words.join(" ");
    if is_named(arguments) { line } else { format!("{line} --{FLAG} {}", shell_words::word(key)) }
}

/// A URL as it may be shown; whatever else as it is.
fn without_password(word: &str) -> String {
    let Some((scheme, rest)) = word.split_once("://") else { return word.to_owned() };
    let Some((who, place)) = rest.rsplit_once('@') else { return word.to_owned() };
    match who.split_once(':') {
        Some((name, _)) => format!("{scheme}://{name}:***@{place}"),
        None => word.to_owned(),
    }
}

/// Whether a key was typed among these.
fn is_named(arguments: &[OsString]) -> bool {
    let flag = format!("--{FLAG}");
    arguments.iter().filter_map(|word| word.to_str()).any(|word| word.split('=').next() == Some(&flag))
}

/// The id that the audit has of a credential.
#[must_use]
pub fn written_id(after: Option<&serde_json::Value>) -> String {
    let id = after.and_then(|after| after.get("credential")).and_then(serde_json::Value::as_str);
    id.unwrap_or_default().to_owned()
}

/// What is answered about a credential that an earlier order with the same key made.
pub fn made_before(id: &str, pinned: bool) -> Result<(String, Option<SecretString>), CliError> {
    if pinned {
        return Ok((id.to_owned(), None));
    }
    Err(CliError::Failed(format!(
        "an order with this idempotency key has made the token {id}, and a token is said once; if nobody has it, end \
         it by: shepherdctl tokens revoke {id} --reason 'was lost', and make another one with another key"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every command without others below it, with its path.
    fn leaves(command: &Command, path: &str, found: &mut Vec<(String, bool)>) {
        let path = format!("{path} {}", command.get_name());
        let keyed = command.get_arguments().any(|argument| argument.get_id() == FLAG);
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
        for other in ["get machines", "plan", "why", "declare restored", "tokens get", "tokens bootstrap"] {
            assert_eq!(keyed(&format!("shepherdctl {other}")), Some(false), "{other}");
        }
    }

    #[test]
    fn command_is_repeated_as_it_was_typed_with_its_key() {
        let line = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        let typed = ["shepherdctl", "budget", "set", "reboot", "--most", "5", "--reason", "it's due"];
        let said = "shepherdctl budget set reboot --most 5 --reason 'it'\\''s due'";
        assert_eq!(repeated(&line(&typed), "k 1"), format!("{said} --idempotency_key 'k 1'"));
        for (url, shown) in [
            ("postgres://kim@db/b", "postgres://kim@db/b"),
            ("postgres://kim:se@cret@db/b", "postgres://kim:***@db/b"),
        ] {
            assert_eq!(without_password(url), shown);
        }
        let named = [&typed[..], &["--idempotency_key=k"]].concat();
        assert_eq!(repeated(&line(&named), "k"), format!("{said} '--idempotency_key=k'"));
    }

    #[test]
    fn key_is_found_where_it_was_typed() {
        let typed = |arguments: &[&str]| {
            let line = ["shepherdctl"].iter().chain(arguments);
            grammar().try_get_matches_from(line).map(|matches| typed(&matches)).ok()
        };
        let hold = ["hold", "m", "--reason", "r"];
        assert_eq!(typed(&hold), Some(None));
        assert_eq!(typed(&[&hold[..], &["--idempotency_key", " k 1 "]].concat()), Some(Some("k 1".into())));
        assert_eq!(typed(&["allow", "host-key", "m", "--fingerprint", "f"]), Some(None));
        for odd in ["", " ", "a\nb", &"k".repeat(129)] {
            assert_eq!(typed(&[&hold[..], &["--idempotency_key", odd]].concat()), None, "{odd:?}");
        }
        assert_eq!(typed(&["get", "machines", "--idempotency_key", "k"]), None, "that is no order");
    }
}
