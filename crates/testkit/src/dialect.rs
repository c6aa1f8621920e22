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
//! name a test, the longer one counts. `without_database.txt` has modules with tests that use no database. A test that
//! requests a database and is in none of the lists fails.
//!
//! The lists are `tests/all/*.txt`, and cover the test programs of all packages. An entry of the root package's program
//! is a path of Rust (`demo::`). One of a crate's program begins with the crate and a slash (`etcd/members::`), which
//! alone name the whole program (`supervisor/`).

use std::env;
use std::thread;

use anyhow::{Context as _, Result, bail};
use bmdb::connection::dialect::Dialect;
use clap::ValueEnum as _;

const VARIABLE: &str = "SHEPHERD_TEST_DIALECT";
/// The package of the tests that run. Cargo sets it for the programs that it starts, and `tools/test` does.
const PACKAGE: &str = "CARGO_PKG_NAME";

/// What the lists state about a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listed {
    /// Its module uses no database.
    WithoutDatabase,
    /// It runs in `postgres`.
    SameInBoth,
    /// It runs in both dialects.
    CanDiffer,
}

/// The entries of the lists: a module with `::` behind it, a crate with `/` behind it, or the full name of a test.
#[must_use]
pub fn entries() -> Vec<(&'static str, Listed)> {
    let lists = [
        (include_str!("../../../tests/all/without_database.txt"), Listed::WithoutDatabase),
        (include_str!("../../../tests/all/same_in_both_dialects.txt"), Listed::SameInBoth),
        (include_str!("../../../tests/all/can_differ_by_dialect.txt"), Listed::CanDiffer),
    ];
    let mut entries = Vec::new();
    for (text, listed) in lists {
        let lines = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
        entries.extend(lines.filter_map(|line| line.split_whitespace().next()).map(|name| (name, listed)));
    }
    entries
}

/// Whether an entry names a test, by itself or with its module or crate.
#[must_use]
pub fn names(entry: &str, test: &str) -> bool {
    if entry.ends_with("::") || entry.ends_with('/') { test.starts_with(entry) } else { test == entry }
}

/// The name that the lists have for a test of a package.
#[must_use]
pub fn full_name(package: &str, test: &str) -> String {
    package.strip_prefix("shepherd-").map_or_else(|| test.to_owned(), |name| format!("{name}/{test}"))
}

/// The group that the lists give to a test, by the longest entry that names it; `None` if no entry does.
#[must_use]
pub fn listed(test: &str) -> Option<Listed> {
    let found = entries().into_iter().filter(|(entry, _)| names(entry, test));
    found.max_by_key(|(entry, _)| entry.len()).map(|(_, listed)| listed)
}

/// The dialect of this run. Fails for a test that may use no database, and for one that no list has.
pub fn of_this_run() -> Result<Dialect> {
    // A test program that is started by hand does not know its package, and checks no list.
    of_run_in(env::var(PACKAGE).ok().as_deref())
}

/// The same, for a test of this package.
pub fn of_run_in(package: Option<&str>) -> Result<Dialect> {
    let thread = thread::current();
    // With one test thread, libtest runs tests on the main thread, which has no test's name.
    if let (Some(package), Some(test)) = (package, thread.name().filter(|name| *name != "main")) {
        let test = full_name(package, test);
        match listed(&test) {
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
pub fn parse(name: &str) -> Result<Dialect> {
    let known = Dialect::value_variants();
    let found = known.iter().find(|dialect| dialect.as_str() == name);
    let names = || known.iter().map(|dialect| dialect.as_str()).collect::<Vec<_>>().join(" or ");
    found.copied().with_context(|| format!("{name:?} is no dialect; give {}", names()))
}

/// Result of `SHOW transaction_isolation` in a dialect. It is repeated here, because a test that took it from the
/// dialect itself would agree with any value.
#[must_use]
pub fn isolation(dialect: Dialect) -> &'static str {
    match dialect {
        Dialect::Postgres => "read committed",
        Dialect::Cockroachdb => "serializable",
    }
}

/// Whether `LISTEN` and `NOTIFY` may be sent in a dialect.
#[must_use]
pub fn may_notify(dialect: Dialect) -> bool {
    match dialect {
        Dialect::Postgres => true,
        Dialect::Cockroachdb => false,
    }
}

/// The statements among those sent that the dialect must not send.
#[must_use]
pub fn forbidden(dialect: Dialect, statements: Vec<String>) -> Vec<String> {
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
