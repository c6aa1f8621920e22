//! The two database dialects that the suite passes in, and which tests run in both.
//!
//! `SHEPHERD_TEST_DIALECT` names the dialect of a run. The default is `postgres`. Each dialect proves itself: when a
//! test's database is dropped, the statements that it was sent are read back.
//!
//! # Lists
//!
//! Every test that uses the database is in one of two lists, by name or with its whole module:
//! `same_in_both_dialects.txt` has those whose result cannot depend on the dialect, which run in `postgres` alone, and
//! `can_differ_by_dialect.txt` those that run in both. `make test-all` runs all of them in both. Of two entries that
//! name a test, the longer one counts. `without_database.txt` has modules whose tests use no database. A test that asks
//! for a database and is in neither list fails.

use std::env;
use std::thread;

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum as _;
use shepherd::bmdb::connection::dialect::Dialect;

const VARIABLE: &str = "SHEPHERD_TEST_DIALECT";

/// What the lists state about a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listed {
    /// Its module uses no database.
    WithoutDatabase,
    /// It runs in `postgres`.
    SameInBoth,
    /// It runs in both dialects.
    CanDiffer,
}

/// The entries of the lists: a module with `::` behind it, or the full name of a test.
pub(crate) fn entries() -> Vec<(&'static str, Listed)> {
    let lists = [
        (include_str!("../without_database.txt"), Listed::WithoutDatabase),
        (include_str!("../same_in_both_dialects.txt"), Listed::SameInBoth),
        (include_str!("../can_differ_by_dialect.txt"), Listed::CanDiffer),
    ];
    let mut entries = Vec::new();
    for (text, listed) in lists {
        let lines = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
        entries.extend(lines.filter_map(|line| line.split_whitespace().next()).map(|name| (name, listed)));
    }
    entries
}

/// What the lists state about a test, by the longest entry that names it; `None` if no entry does.
pub(crate) fn listed(test: &str) -> Option<Listed> {
    let names = |entry: &str| if entry.ends_with("::") { test.starts_with(entry) } else { test == entry };
    let found = entries().into_iter().filter(|(entry, _)| names(entry));
    found.max_by_key(|(entry, _)| entry.len()).map(|(_, listed)| listed)
}

/// The dialect of this run. Fails for a test that may use no database, and for one that no list has.
pub(crate) fn of_this_run() -> Result<Dialect> {
    let thread = thread::current();
    // With one test thread, libtest runs tests on the main thread, which has no test's name.
    if let Some(test) = thread.name().filter(|name| *name != "main") {
        match listed(test) {
            Some(Listed::SameInBoth | Listed::CanDiffer) => {}
            Some(Listed::WithoutDatabase) => bail!(
                "{test} uses the database, and tests/all/without_database.txt has its module: move the module to \
                 same_in_both_dialects.txt or can_differ_by_dialect.txt"
            ),
            None => bail!(
                "{test} uses the database: add it or its module to tests/all/same_in_both_dialects.txt or \
                 tests/all/can_differ_by_dialect.txt, with the reason"
            ),
        }
    }
    match env::var(VARIABLE) {
        Ok(name) => parse(&name).context(VARIABLE),
        Err(env::VarError::NotPresent) => Ok(Dialect::Postgres),
        Err(error) => Err(error).context(VARIABLE),
    }
}

/// The dialect of that name.
pub(crate) fn parse(name: &str) -> Result<Dialect> {
    let known = Dialect::value_variants();
    let found = known.iter().find(|dialect| dialect.as_str() == name);
    let names = || known.iter().map(|dialect| dialect.as_str()).collect::<Vec<_>>().join(" or ");
    found.copied().with_context(|| format!("{name:?} is no dialect; give {}", names()))
}

/// Result of `SHOW transaction_isolation` in a dialect. It is repeated here, because a test that took it from the
/// dialect itself would agree with any value.
pub(crate) fn isolation(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Postgres => "read committed",
        Dialect::Cockroachdb => "serializable",
    }
}

/// Whether `LISTEN` and `NOTIFY` may be sent in a dialect.
pub(crate) fn may_notify(dialect: Dialect) -> bool {
    match dialect {
        Dialect::Postgres => true,
        Dialect::Cockroachdb => false,
    }
}

/// The statements among those sent that the dialect must not send.
pub(crate) fn forbidden(dialect: Dialect, statements: Vec<String>) -> Vec<String> {
    let notifies = |statement: &String| {
        let words = words_of(statement);
        ["notify", "pg_notify", "listen", "unlisten"].iter().any(|word| words.iter().any(|one| one == word))
    };
    if may_notify(dialect) { Vec::new() } else { statements.into_iter().filter(notifies).collect() }
}

/// The words of a statement without its comments, in lower case.
fn words_of(statement: &str) -> Vec<String> {
    let code: Vec<&str> = statement.lines().filter_map(|line| line.split("--").next()).collect();
    let code = code.join(" ").to_ascii_lowercase();
    code.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|w| !w.is_empty())
        .map(str::to_owned)
        .collect()
}
