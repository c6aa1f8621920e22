//! The three ways in which the whole suite passes.
//!
//! `SHEPHERD_TEST_MODE` names one for the run; the default is the way a PostgreSQL server is used in
//! earnest. The other two are what databases without `SKIP LOCKED` and `NOTIFY` are like.

use std::env;
use std::str::FromStr;

use anyhow::{Context as _, bail};

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
        match env::var("SHEPHERD_TEST_MODE") {
            Ok(name) => name.parse().context("SHEPHERD_TEST_MODE"),
            Err(env::VarError::NotPresent) => Ok(Self::SkipLocked),
            Err(error) => Err(error).context("SHEPHERD_TEST_MODE"),
        }
    }

    /// What `SHOW default_transaction_isolation` answers.
    pub(crate) fn isolation(self) -> &'static str {
        match self {
            Self::SkipLocked | Self::Waiting => "read committed",
            Self::Serializable => "serializable",
        }
    }

    /// Whether statements may say `SKIP LOCKED`.
    pub(crate) fn skip_locked(self) -> bool {
        self == Self::SkipLocked
    }

    /// Whether transactions may say `NOTIFY`.
    pub(crate) fn notify(self) -> bool {
        self == Self::SkipLocked
    }
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
