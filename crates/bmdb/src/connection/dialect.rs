//! Dialect: PostgreSQL or CockroachDB, as far as transactions and notifications go.

use clap::ValueEnum;

/// Which database the BMDB is, as far as transactions and notifications go. Correctness needs neither `NOTIFY` nor
/// `SKIP LOCKED`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dialect {
    /// PostgreSQL: READ COMMITTED, with `LISTEN` and `NOTIFY`.
    #[value(help = "PostgreSQL: READ COMMITTED, with LISTEN and NOTIFY")]
    Postgres,
    /// `CockroachDB`: SERIALIZABLE, without notifications.
    ///
    /// `SKIP LOCKED` is sent in both dialects, because every statement that uses it loses nothing by skipping a row too
    /// many: a renewal asks for that row alone, a heartbeat is stored alone, a claim counts its candidates without
    /// locks and tries again, and the reaper and the timers come back to it with their next pass.
    #[value(help = "CockroachDB: SERIALIZABLE, without LISTEN and NOTIFY")]
    Cockroachdb,
}

impl Dialect {
    /// The name in flags and answers, the same in every program.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Postgres => "postgres",
            Self::Cockroachdb => "cockroachdb",
        }
    }

    /// The isolation level that every transaction runs at, as the server spells it.
    #[must_use]
    pub const fn isolation(self) -> &'static str {
        match self {
            Self::Postgres => "read committed",
            Self::Cockroachdb => "serializable",
        }
    }

    /// Whether `LISTEN` and `NOTIFY` are used. Without them, loops poll.
    #[must_use]
    pub const fn notifies(self) -> bool {
        matches!(self, Self::Postgres)
    }
}
