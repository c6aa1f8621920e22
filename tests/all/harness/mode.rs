//! The three ways in which the whole suite passes.
//!
//! `SHEPHERD_TEST_MODE` names one for the run; the default is the way a PostgreSQL server is used in
//! earnest. The other two are what databases without `SKIP LOCKED` and `NOTIFY` are like. Each mode proves
//! itself: when a test's database is dropped, the statements that it was sent are read back.
//!
//! A test that asks for no database is the same in each mode, and is run in one. Its module stands in
//! `without_database.txt`, and who asks for the mode from there is refused.

use std::env;
use std::str::FromStr;
use std::thread;

use anyhow::{Context as _, bail};
use shepherd::bmdb::connection::Dialect;

/// One way to use the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// `skip-locked`: READ COMMITTED with `SKIP LOCKED` and `NOTIFY`.
    SkipLocked,
    /// `waiting`: READ COMMITTED without both.
    Waiting,
    /// `serializable`: SERIALIZABLE without both.
    Serializable,
}

impl Mode {
    /// The mode of this run.
    pub(crate) fn of_this_run() -> anyhow::Result<Self> {
        let thread = thread::current();
        if let Some(module) = thread.name().and_then(|test| test.split("::").next())
            && without_database().any(|listed| listed == module)
        {
            bail!("{module} uses a database: take it out of tests/all/without_database.txt");
        }
        match env::var("SHEPHERD_TEST_MODE") {
            Ok(name) => name.parse().context("SHEPHERD_TEST_MODE"),
            Err(env::VarError::NotPresent) => Ok(Self::SkipLocked),
            Err(error) => Err(error).context("SHEPHERD_TEST_MODE"),
        }
    }

    /// The same, as the BMDB is told.
    pub(crate) fn dialect(self) -> Dialect {
        match self {
            Self::SkipLocked => Dialect::POSTGRES,
            Self::Waiting => Dialect::WAITING,
            Self::Serializable => Dialect::SERIALIZABLE,
        }
    }

    /// What `SHOW default_transaction_isolation` answers.
    pub(crate) fn isolation(self) -> &'static str {
        match self {
            Self::SkipLocked | Self::Waiting => "read committed",
            Self::Serializable => "serializable",
        }
    }

    /// Whether statements may say `SKIP LOCKED`, and transactions `NOTIFY`.
    pub(crate) fn has_skip_locked_and_notify(self) -> bool {
        self == Self::SkipLocked
    }

    /// Of statements that were sent, those that this mode does without.
    pub(crate) fn forbidden(self, statements: Vec<String>) -> Vec<String> {
        let says_it = |statement: &String| {
            let words = words_of(statement);
            let pair = |first, second| words.windows(2).any(|pair| pair[0] == first && pair[1] == second);
            let word = |one: &str| words.iter().any(|word| word == one);
            pair("skip", "locked") || word("notify") || word("pg_notify") || word("listen")
        };
        if self.has_skip_locked_and_notify() {
            return Vec::new();
        }
        statements.into_iter().filter(says_it).collect()
    }
}

/// The modules whose tests ask for no database.
pub(crate) fn without_database() -> impl Iterator<Item = &'static str> {
    include_str!("../without_database.txt").lines().filter(|line| !line.starts_with('#'))
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

impl FromStr for Mode {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> anyhow::Result<Self> {
        Ok(match name {
            "skip-locked" => Self::SkipLocked,
            "waiting" => Self::Waiting,
            "serializable" => Self::Serializable,
            _ => bail!("{name:?} is no test mode; give skip-locked, waiting or serializable"),
        })
    }
}
