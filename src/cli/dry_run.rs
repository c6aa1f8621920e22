//! `--dry_run`: an order is decided on what is known at that moment, and nothing is changed.
//!
//! It stands where `--idempotency_key` does, except at credentials: what would be said of one that is not made
//! helps nobody.

use clap::{Arg, ArgAction, ArgMatches};
use serde_json::Value;

const FLAG: &str = "dry_run";
/// Where nothing is tried out.
pub const WITHOUT: [&str; 2] = ["declare", "tokens"];

tokio::task_local! {
    static ASKED: bool;
}

/// The flag.
#[must_use]
pub fn flag() -> Arg {
    Arg::new(FLAG)
        .long(FLAG)
        .action(ArgAction::SetTrue)
        .help_heading(None)
        .help("Only say what would become of it: nothing is changed, and the audit has a line that says so")
}

/// Whether it was typed after some subcommand.
#[must_use]
pub fn typed(matches: &ArgMatches) -> bool {
    let here = matches.try_get_one::<bool>(FLAG).ok().flatten().copied().unwrap_or_default();
    here || matches.subcommand().is_some_and(|(_, matches)| typed(matches))
}

/// Does `what`, whose orders change nothing if that was asked for.
pub async fn scope<T>(asked: bool, what: impl Future<Output = T>) -> T {
    ASKED.scope(asked, what).await
}

/// Whether orders are to change nothing.
#[must_use]
pub fn asked() -> bool {
    ASKED.try_with(|asked| *asked).unwrap_or_default()
}

/// What became of an order, as a line for people.
#[must_use]
pub fn line(said: &str) -> String {
    if asked() { format!("nothing was changed; without --dry_run: {said}") } else { said.to_owned() }
}

/// The same for programs.
pub fn mark(answer: &mut Value) {
    if let (true, Value::Object(fields)) = (asked(), answer) {
        fields.insert(FLAG.to_owned(), Value::Bool(true));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cli::order_key::grammar;

    #[test]
    fn flag_is_found_where_it_was_typed_and_stands_at_no_credential() {
        let found = |line: &[&str]| {
            let line = ["shepherdctl"].iter().chain(line);
            grammar().try_get_matches_from(line).map(|matches| typed(&matches)).ok()
        };
        assert_eq!(found(&["hold", "m", "--reason", "r"]), Some(false));
        assert_eq!(found(&["hold", "m", "--reason", "r", "--dry_run"]), Some(true));
        assert_eq!(found(&["loops", "pause", "recoverer", "--reason", "r", "--dry_run"]), Some(true));
        assert_eq!(found(&["retire", "cancel", "m", "--dry_run"]), Some(true));
        assert_eq!(found(&["tokens", "revoke", "t", "--reason", "r", "--dry_run"]), None);
        assert_eq!(found(&["get", "machines", "--dry_run"]), None);
    }

    #[tokio::test]
    async fn answers_say_that_nothing_was_changed() {
        for (asked, said, marked) in [
            (false, "m is held", json!({ "changed": true })),
            (
                true,
                "nothing was changed; without --dry_run: m is held",
                json!({ "changed": true, "dry_run": true }),
            ),
        ] {
            scope(asked, async {
                let mut answer = json!({ "changed": true });
                mark(&mut answer);
                assert_eq!((line("m is held"), answer), (said.to_owned(), marked));
            })
            .await;
        }
    }
}
