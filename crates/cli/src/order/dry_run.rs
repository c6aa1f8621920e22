//! `--dry-run`: decide an order without changing anything.
//!
//! Every command with `--idempotency-key` has this flag, except the commands about credentials: the result of a
//! credential that is not created is of no use.

use clap::{Arg, ArgAction, ArgMatches};
use serde_json::Value;

/// Its name among the arguments of a command.
const ID: &str = "dry_run";
/// Commands without a dry run.
pub const EXCLUDED_COMMANDS: [&str; 2] = ["declare", "tokens"];

/// The definition of `--dry-run`.
#[must_use]
pub fn flag() -> Arg {
    Arg::new(ID)
        .long("dry-run")
        .action(ArgAction::SetTrue)
        .help_heading(None)
        .help("Show what the order would do, and change nothing; the audit records the dry run")
}

/// Whether the flag is given after some subcommand.
#[must_use]
pub fn is_given(matches: &ArgMatches) -> bool {
    let here = matches.try_get_one::<bool>(ID).ok().flatten().copied().unwrap_or_default();
    here || matches.subcommand().is_some_and(|(_, matches)| is_given(matches))
}

/// Formats the outcome of a dry run for people. `fleet` is what it was about.
#[must_use]
pub fn annotate_text(fleet: &str, text: &str) -> String {
    format!("nothing was changed at {fleet}; without --dry-run: {text}")
}

/// Marks a dry run in the JSON output, with the fleet that it was about. The fleet is the only name that is not the
/// API's: no server knows the context of its client.
#[must_use]
pub fn annotate_json(fleet: &str, mut answer: Value) -> Value {
    if let Value::Object(fields) = &mut answer {
        fields.insert("dryRun".to_owned(), Value::Bool(true));
        fields.insert("fleet".to_owned(), Value::String(fleet.to_owned()));
    }
    answer
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::command::grammar;

    #[test]
    fn flag_follows_any_subcommand_but_those_of_credentials() {
        let found = |line: &[&str]| {
            let line = ["shepherdctl"].iter().chain(line);
            grammar().try_get_matches_from(line).map(|matches| is_given(&matches)).ok()
        };
        assert_eq!(found(&["hold", "m", "--reason", "r"]), Some(false));
        assert_eq!(found(&["hold", "m", "--reason", "r", "--dry-run"]), Some(true));
        assert_eq!(found(&["loops", "pause", "recoverer", "--reason", "r", "--dry-run"]), Some(true));
        assert_eq!(found(&["retire", "cancel", "m", "--dry-run"]), Some(true));
        assert_eq!(found(&["tokens", "revoke", "t", "--reason", "r", "--dry-run"]), None);
        assert_eq!(found(&["get", "machines", "--dry-run"]), None);
    }

    #[test]
    fn outcome_says_that_nothing_was_changed_and_where() {
        let fleet = "context prod (db:8444)";
        let expected = "nothing was changed at context prod (db:8444); without --dry-run: m is held";
        assert_eq!(annotate_text(fleet, "m is held"), expected);
        let answer = annotate_json(fleet, json!({ "changed": true }));
        assert_eq!(answer, json!({ "changed": true, "dryRun": true, "fleet": fleet }));
    }
}
