//! What can go wrong with the database, told apart by what the caller must do.

use std::time::Duration;

use crate::bmdb::approval::Wanted;
use crate::bmdb::connection::Dialect;

/// Why a statement or transaction did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum BmdbError {
    /// The connection URL is none.
    #[error("the BMDB URL is no PostgreSQL URL ({reason}); write postgres://USER@HOST:5432/DATABASE")]
    Url {
        /// What the parser said, without the URL: it may hold a password.
        reason: String,
    },
    /// The server cannot be reached, or refuses us. Nothing was done.
    #[error("cannot reach the BMDB at {place}: {reason}")]
    Unreachable {
        /// Host, port and database, without credentials.
        place: String,
        /// What happened.
        reason: String,
    },
    /// The server runs transactions at another isolation level than the dialect needs. Nothing was done.
    #[error(
        "the BMDB at {place} runs transactions at {}, and the dialect {} needs {}: a pooler in between drops connection \
         options (connect to the server itself), or the server is of another kind (see --bmdb_dialect)",
        found.to_uppercase(), dialect.as_str(), dialect.isolation().to_uppercase()
    )]
    Isolation {
        /// Host, port and database, without credentials.
        place: String,
        /// The level that the server reports.
        found: String,
        /// The dialect that was configured.
        dialect: Dialect,
    },
    /// The schema is newer than this release knows.
    #[error(
        "the BMDB has schema version {found}, and this release knows versions up to {known}: it was upgraded by a \
         newer shepherd; start that release instead"
    )]
    NewerSchema {
        /// Version found.
        found: i64,
        /// Newest version known.
        known: i64,
    },
    /// The schema is older than this program needs, and this program does not migrate.
    #[error(
        "the BMDB has schema version {found}, and this release needs {known}: start the `shepherd` of this release \
         once, which upgrades it"
    )]
    OlderSchema {
        /// Version found.
        found: i64,
        /// Version needed.
        known: i64,
    },
    /// A migration failed.
    #[error("cannot bring the BMDB's schema up to date: {0}")]
    Migrate(String),
    /// The session is over: its deadline passed, or it was closed. It never revives.
    #[error("the session is over; nothing was written")]
    SessionOver,
    /// The lease is not (or no longer) held with that fence.
    #[error("the lease is not held any more; nothing was written")]
    LeaseLost,
    /// An outward call was given up.
    #[error(
        "an outward call was given up after {after:.1?}: it had not ended when its limit, or the time until its machine \
         could be somebody else's, was over"
    )]
    CutOff {
        /// How long it had taken.
        after: Duration,
    },
    /// No such machine.
    #[error("the BMDB knows no machine {0}")]
    NoSuchMachine(String),
    /// A row was written by a newer release, whose rules this one must not overrule.
    #[error("the schedule of this machine was written by a newer release (rules {found}, known {known})")]
    NewerRules {
        /// Rules version found.
        found: i64,
        /// Rules version of this release.
        known: i64,
    },
    /// The answer to a commit was lost: it may have happened or not.
    #[error("the connection was lost while committing, so that the outcome is unknown: {0}")]
    UnknownOutcome(String),
    /// The database was busy with conflicting transactions for longer than we try.
    #[error("the database could not serialise {what} in {tries} tries")]
    Conflict {
        /// What was being done.
        what: &'static str,
        /// How often it was tried.
        tries: u32,
    },
    /// The transaction panicked or its task was ended with the runtime.
    #[error("{what} was ended in the middle: {reason}")]
    Task {
        /// What was being done.
        what: &'static str,
        /// The panic's text.
        reason: String,
    },
    /// Looking took longer than somebody on the network may look. Nothing was changed.
    #[error("reading was given up after {limit:?}, because the database is busy; ask again, or for less")]
    LookedTooLong {
        /// How long it may take.
        limit: Duration,
    },
    /// The machine is not as whoever gave an order saw it. Nothing was done.
    #[error(
        "{machine} is at version {found} by now, and the order was for version {expected}; look again, and decide anew"
    )]
    OtherVersion {
        /// The machine.
        machine: String,
        /// Its version.
        found: i64,
        /// The version that the order was for.
        expected: i64,
    },
    /// An idempotency key was used before for something else. Nothing was done.
    #[error(
        "the idempotency key {key:?} was given before with another order; give each order a key of its own"
    )]
    KeyOfAnotherOrder {
        /// The key.
        key: String,
    },
    /// An order that cannot be carried out as things are. Nothing was done.
    #[error("{said}")]
    OrderRefused {
        /// For programs, `NO_SUCH_KEY`.
        reason: &'static str,
        /// A sentence.
        said: String,
    },
    /// An order that needs another admin, and is asked for by this. Nothing was done.
    #[error("{}", .0.said)]
    SecondPerson(Box<Wanted>),
    /// The same order was given several times at once; one of them was carried out.
    #[error(
        "the same order was given more than once at this moment; give it again to hear what became of it"
    )]
    OrderedAtOnce,
    /// No such credential.
    #[error("the BMDB knows no credential {0}; `shepherdctl tokens get` lists those it knows")]
    NoSuchCredential(String),
    /// What stands in the database cannot be.
    #[error("the BMDB holds something that cannot be: {0}")]
    Corrupt(String),
    /// Anything else the database said.
    #[error("{what} failed: {source}")]
    Statement {
        /// What was being done.
        what: &'static str,
        /// What the database said.
        source: sqlx::Error,
    },
}

impl BmdbError {
    /// The same for the person who named the database: with what to look at where the sentence alone
    /// does not say it.
    #[must_use]
    pub fn with_advice(&self) -> String {
        match self {
            // What is wrong with TLS says itself what to do.
            Self::Unreachable { reason, .. } if !reason.starts_with("TLS failed") => {
                format!("{self}. Is it running, and are host, port, user and password right?")
            }
            _ => self.to_string(),
        }
    }

    /// Whether somebody held a lock that could not be waited for.
    pub(crate) fn is_lock_not_available(&self) -> bool {
        matches!(self, Self::Statement { source, .. } if is_lock_not_available(source))
    }

    /// Whether the database knows no such table, column or function, or not this use of one: it is of
    /// another kind than the statement was written for.
    #[must_use]
    pub fn is_unknown_to_the_database(&self) -> bool {
        let Self::Statement { source: sqlx::Error::Database(database), .. } = self else { return false };
        let code = database.code();
        let code = code.as_deref().unwrap_or_default();
        matches!(code, "42P01" | "42703" | "42883" | "42704" | "3F000") || code.starts_with("0A")
    }

    /// Whether trying again later may help without anybody doing anything.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. }
            | Self::UnknownOutcome(_)
            | Self::Conflict { .. }
            | Self::LookedTooLong { .. }
            | Self::OrderedAtOnce
            | Self::Task { .. } => true,
            Self::Statement { source, .. } => may_pass(source),
            _ => false,
        }
    }
}

/// Whether the database said that somebody held a lock that could not be waited for.
pub(crate) fn is_lock_not_available(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|error| error.code().as_deref() == Some("55P03"))
}

/// Whether the same statement may succeed later: the server was away, busy, or somebody held a lock.
/// What it refused for what the statement says (a constraint, a malformed text) it refuses for ever.
fn may_pass(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(database) => {
            let code = database.code().unwrap_or_default();
            ["08", "25P0", "40", "53", "55P03", "57", "58"].iter().any(|class| code.starts_with(class))
        }
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::WorkerCrashed => true,
        _ => false,
    }
}

/// What a failed transaction calls for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remedy {
    /// The whole transaction again: it lost against another one.
    Again,
    /// Find out what became of it.
    FindOut,
    /// Nothing: it did not happen.
    GiveUp,
}

/// Codes of conflicts that are nobody's fault: serialisation failure, deadlock.
const CONFLICTS: [&str; 2] = ["40001", "40P01"];
/// The server does not know whether a statement completed.
const COMPLETION_UNKNOWN: &str = "40003";

/// What `error` calls for. `committing` says whether a commit (or a statement that commits itself)
/// had been sent.
pub(crate) fn remedy(error: &sqlx::Error, committing: bool) -> Remedy {
    if let sqlx::Error::Database(database) = error {
        let code = database.code();
        let code = code.as_deref().unwrap_or_default();
        if CONFLICTS.contains(&code) {
            return Remedy::Again;
        }
        // Class 57P is the server going away; with a commit under way that decides nothing.
        if committing && (code == COMPLETION_UNKNOWN || code.starts_with("57P")) {
            return Remedy::FindOut;
        }
        return Remedy::GiveUp;
    }
    if committing && !matches!(error, sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed) {
        return Remedy::FindOut;
    }
    Remedy::GiveUp
}

/// How long to wait before the transaction is run for the `attempt`-th time again. `roll` is uniform
/// in 0..1.
pub(crate) fn conflict_pause(attempt: u32, roll: f64) -> Duration {
    let ceiling = Duration::from_millis(2) * 2_u32.pow(attempt.min(7));
    ceiling.mul_f64(roll.clamp(0.0, 1.0))
}
