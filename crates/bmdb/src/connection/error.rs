//! Database errors and what to do about each: retry, resolve the outcome, or fail.

use std::path::PathBuf;
use std::time::Duration;

use sqlx::error::DatabaseError;
use sqlx::postgres::PgDatabaseError;
use uuid::Uuid;

use crate::connection::host_list::HostListFault;
use crate::connection::session_state::SessionFault;
use model::excerpt::Excerpt;
use model::time::Span;

/// Most characters of an answer of a server that an error quotes.
const MAX_SERVER_CHARS: usize = 1000;

/// Why a statement or transaction failed, or what is known of its outcome.
#[derive(Debug, thiserror::Error)]
pub enum BmdbError {
    /// The connection URL is invalid.
    #[error("the BMDB URL is not a PostgreSQL URL ({reason}); write postgres://USER@HOST:5432/DATABASE")]
    InvalidUrl {
        /// The parser's message, without the URL: it may contain a password.
        reason: String,
    },
    /// The hosts of the connection URL cannot be used.
    #[error("the BMDB URL cannot be used: {0}")]
    UnusableHosts(HostListFault),
    /// The server cannot be reached, or rejects us. Nothing was done.
    #[error("cannot reach the BMDB at {address}: {reason}")]
    Unreachable {
        /// Host, port and database, without credentials.
        address: String,
        /// The connection's error, without credentials.
        reason: String,
    },
    /// A file of a certificate or a key that the URL names cannot be used. Nothing was done.
    #[error("the file {} of {parameter} in the BMDB URL cannot be used: {reason}", path.display())]
    TlsFile {
        /// The parameter of the URL.
        parameter: &'static str,
        /// The file that it names.
        path: PathBuf,
        /// What is wrong with the file, and what to do.
        reason: String,
    },
    /// A new connection is not what correctness depends on. Nothing was done.
    #[error("the BMDB at {address} {fault}")]
    UnusableSession {
        /// Host, port and database, without credentials.
        address: String,
        /// What is wrong with it, and what to do.
        fault: SessionFault,
    },
    /// The server takes no writes. Nothing was done.
    #[error(
        "the BMDB at {address} is read-only: the server is a standby, or default_transaction_read_only is on; give the \
         address of the primary"
    )]
    ReadOnly {
        /// Host, port and database, without credentials.
        address: String,
    },
    /// A setting that correctness depends on cannot be brought into force. Nothing was done.
    #[error(
        "the BMDB at {address} runs with {setting} = {found:?}, and {requested:?} was requested: a pooler in between drops \
         settings; connect to the server itself, or to a pooler that gives each connection a session of its own"
    )]
    SettingNotInForce {
        /// Host, port and database, without credentials.
        address: String,
        /// Name of the setting.
        setting: String,
        /// The value that was requested.
        requested: String,
        /// The value that the server reports.
        found: String,
    },
    /// A pooler gives the sessions of the server to transactions. Nothing was done.
    #[error(
        "the BMDB at {address} is behind a pooler that pools transactions, where settings, prepared statements and LISTEN \
         do not last; set pool_mode = session (PgBouncer), or give the address of the server itself"
    )]
    TransactionPooling {
        /// Host, port and database, without credentials.
        address: String,
    },
    /// A pooler gives a session of the server to the next connection as the last one left it. Nothing was done.
    #[error(
        "the BMDB at {address} is behind a pooler that does not reset the sessions it gives to other connections; set \
         server_reset_query = DISCARD ALL (PgBouncer), or give the address of the server itself"
    )]
    SessionsNotReset {
        /// Host, port and database, without credentials.
        address: String,
    },
    /// Pgpool-II sends reads to standbys. Nothing was done.
    #[error(
        "the BMDB at {address} is behind Pgpool-II, which sends reads to standbys; set load_balance_mode = off, or give \
         the address of the primary itself"
    )]
    ReadsSpread {
        /// Host, port and database, without credentials.
        address: String,
    },
    /// The dedicated connections and the pool lead to different servers. Nothing was done.
    #[error("{0}")]
    DifferentServers(String),
    /// There are too few connections to work with. Nothing was done.
    #[error("the BMDB at {address} has too few connections: {shortage}")]
    TooFewConnections {
        /// Host, port and database, without credentials.
        address: String,
        /// Which limit, how many are missing, and what to do.
        shortage: String,
    },
    /// The schema is newer than this release knows.
    #[error(
        "the BMDB has schema version {found}, and this release knows versions up to {supported}: it was upgraded by a \
         newer shepherd; start that release instead"
    )]
    NewerSchema {
        /// Schema version found in the database.
        found: i64,
        /// Newest schema version that this release knows.
        supported: i64,
    },
    /// The schema is older than this program needs, and this program does not migrate.
    #[error(
        "the BMDB has schema version {found}, and this release needs {required}: start the `shepherd` of this release \
         once, which upgrades it"
    )]
    OlderSchema {
        /// Schema version found in the database.
        found: i64,
        /// Schema version that this program needs.
        required: i64,
    },
    /// A migration failed, with the reason.
    #[error("cannot bring the BMDB's schema up to date: {0}")]
    MigrationFailed(String),
    /// The session is over: its deadline passed, or it was closed. It never revives.
    #[error("the session is over; nothing was written")]
    SessionEnded,
    /// The lease is not (or no longer) held with that fence.
    #[error("the lease is not held any more; nothing was written")]
    LeaseLost,
    /// An outward call was given up.
    #[error(
        "an outward call was given up after {after:.1?}: it did not end within its time limit, or before another \
         worker could take over its machine"
    )]
    OutwardCallTimedOut {
        /// How long it had taken.
        after: Duration,
    },
    /// The BMDB has no such machine.
    #[error("the BMDB knows no machine {0}")]
    NoSuchMachine(String),
    /// A row was written by a newer release, whose rules this one must not overrule.
    #[error("the schedule of this machine was written by a newer release (rules {found}, known {supported})")]
    NewerRules {
        /// Version of the rules the row was written by.
        found: i64,
        /// Rules version of this release.
        supported: i64,
    },
    /// The answer to a commit was lost: it may have happened or not.
    #[error("the connection was lost while committing, so that the outcome is unknown: {0}")]
    UnknownOutcome(String),
    /// The database was busy with conflicting transactions for longer than we try.
    #[error("the database could not serialise {operation} in {tries} tries")]
    Conflict {
        /// What was being done.
        operation: &'static str,
        /// How often it was tried.
        tries: u32,
    },
    /// The transaction panicked or its task was ended with the runtime.
    #[error("{operation} was interrupted: {reason}")]
    TaskFailed {
        /// What was being done.
        operation: &'static str,
        /// Text of the panic, or why the task ended.
        reason: String,
    },
    /// A read took longer than a client on the network may take. Nothing was changed.
    #[error("reading was given up after {limit:?}, because the database is busy; try again, or request less")]
    ReadTimedOut {
        /// How long a read may take.
        limit: Duration,
    },
    /// The machine changed since the client read the version that the order names. Nothing was done.
    #[error(
        "{machine} is at version {found} by now, and the order was for version {expected}; read it again, and \
         decide again"
    )]
    VersionMismatch {
        /// The machine as people call it.
        machine: String,
        /// Version of the machine now.
        found: i64,
        /// The version that the order was for.
        expected: i64,
    },
    /// An idempotency key was used before for something else. Nothing was done.
    #[error(
        "the idempotency key {key:?} was given before with another order; give each order a key of its own"
    )]
    IdempotencyKeyReused {
        /// The key that was used before.
        key: String,
    },
    /// An order that cannot be carried out as things are. Nothing was done.
    #[error("{message}")]
    OrderRejected {
        /// Identifier for programs, such as `NO_SUCH_KEY`.
        reason: &'static str,
        /// A sentence for people, with what to do.
        message: String,
    },
    /// An order that needs a second admin, with the request for the approval. Nothing was done.
    #[error("{}", .0.message)]
    ApprovalRequired(Box<ApprovalRequest>),
    /// The same order was given several times at once; one of them was carried out.
    #[error("the same order was given several times at once; give it again to get its outcome")]
    DuplicateOrderInProgress,
    /// The BMDB has no such credential.
    #[error("the BMDB knows no credential {0}; `shepherdctl get tokens` lists those it knows")]
    NoSuchCredential(String),
    /// A value in the database is impossible.
    #[error("the BMDB contains an impossible value: {0}")]
    Corrupt(String),
    /// Any other error of the database.
    #[error("{operation} failed: {}", describe_error(source))]
    Statement {
        /// What was being done.
        operation: &'static str,
        /// The error as sqlx reports it.
        source: sqlx::Error,
    },
}

impl BmdbError {
    /// The message for the person who named the database, with advice where the sentence alone gives none.
    #[must_use]
    pub fn with_advice(&self) -> String {
        match self {
            // Errors about TLS and about poolers contain their own advice.
            Self::Unreachable { reason, .. }
                if !reason.starts_with("TLS failed") && !reason.contains("refuses connection options") =>
            {
                format!("{self}. Is it running, and are host, port, user and password right?")
            }
            _ => self.to_string(),
        }
    }

    /// Whether another client held a lock that could not be waited for.
    pub(crate) fn is_lock_not_available(&self) -> bool {
        matches!(self, Self::Statement { source, .. } if is_lock_not_available(source))
    }

    /// Whether the database has no such table, column or function, or does not support this use of one: it is of
    /// another kind than the statement was written for.
    #[must_use]
    pub fn is_undefined_object(&self) -> bool {
        let Self::Statement { source: sqlx::Error::Database(database), .. } = self else { return false };
        let code = database.code();
        let code = code.as_deref().unwrap_or_default();
        matches!(code, "42P01" | "42703" | "42883" | "42704" | "3F000") || code.starts_with("0A")
    }

    /// Whether a later attempt may succeed without anybody's intervention.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. }
            | Self::ReadOnly { .. }
            | Self::UnknownOutcome(_)
            | Self::Conflict { .. }
            | Self::ReadTimedOut { .. }
            | Self::DuplicateOrderInProgress
            | Self::TaskFailed { .. } => true,
            Self::Statement { source, .. } => is_retryable(source),
            _ => false,
        }
    }
}

/// The request that is stored for an order that needs a second admin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalRequest {
    /// Id of its row in `approval`.
    pub approval_id: Uuid,
    /// The order's idempotency key: the one that the actor gave, or one that was generated.
    pub idempotency_key: String,
    /// Digest that distinguishes it from every other order.
    pub request_digest: [u8; 32],
    /// What the order is about, for the admin who approves it.
    pub target: String,
    /// How long the request waits for an approval before it expires.
    pub ttl: Span,
    /// A sentence for the actor: who must approve, and how.
    pub message: String,
}

/// An order that is rejected, with a reason for programs and a sentence for people.
pub(crate) fn order_rejected(reason: &'static str, message: impl Into<String>) -> BmdbError {
    BmdbError::OrderRejected { reason, message: message.into() }
}

/// An error of the database as a part of a sentence.
///
/// sqlx adds "at line 412" to what the server reports: a line of the source of PostgreSQL, which an operator takes for
/// one of their own files.
#[must_use]
pub fn describe_error(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Database(refusal) => {
            let code = refusal.code().unwrap_or_default();
            let advice = advice_for(&code, refusal.message());
            let words = words_with_hint(refusal.message(), hint_of(refusal.as_ref()));
            format!("the database refused it: {words}{advice}")
        }
        sqlx::Error::Tls(_) => without_blocks(&error.to_string()),
        other => other.to_string(),
    }
}

/// The message of TLS without the content of a file, which it repeats if a certificate there is damaged.
pub(super) fn without_blocks(message: &str) -> String {
    match message.split_once("-----BEGIN") {
        None => message.to_owned(),
        Some((start, _)) => {
            format!(
                "{} in a file that the URL names; copy it again from where it was issued",
                start.trim_end()
            )
        }
    }
}

/// What a server or a pooler answered, as one line of limited length.
pub(crate) fn server_words(message: &str) -> String {
    let words = Excerpt::within(message, MAX_SERVER_CHARS);
    words.map_or_else(|| "it gave no reason".to_owned(), |words| words.to_string())
}

/// The server's own advice. Its details are left out, because they may have stored values.
fn hint_of<'a>(refusal: &'a (dyn DatabaseError + 'static)) -> Option<&'a str> {
    refusal.try_downcast_ref::<PgDatabaseError>()?.hint()
}

fn words_with_hint(message: &str, hint: Option<&str>) -> String {
    let words = server_words(message);
    match hint.and_then(|hint| Excerpt::within(hint, MAX_SERVER_CHARS)) {
        Some(hint) => format!("{words} (its hint: {hint})"),
        None => words,
    }
}

/// What to do about an error that an operator can end, to follow its message; empty for the others.
fn advice_for(code: &str, message: &str) -> &'static str {
    match code {
        // Since PostgreSQL 15 nobody but the owner of a database may create tables in it.
        "42501" if message.contains("public") => {
            "; make the user of the URL the owner of the database, or run \
             `GRANT USAGE, CREATE ON SCHEMA public TO USER` in it"
        }
        _ => "",
    }
}

/// Whether the database reported that another client held a lock that could not be waited for.
pub(crate) fn is_lock_not_available(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|error| error.code().as_deref() == Some("55P03"))
}

/// Whether the same statement may succeed later: the server was away or busy, or another client held a lock. What it
/// rejects because of the statement's content (a constraint, a malformed text) it rejects for ever.
fn is_retryable(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(database) => {
            let code = database.code().unwrap_or_default();
            ["08", "25006", "25P0", "40", "53", "55P03", "57", "58"]
                .iter()
                .any(|class| code.starts_with(class))
        }
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::WorkerCrashed => true,
        _ => false,
    }
}

/// What the caller does about a failed transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remedy {
    /// Run the whole transaction again: it lost against another one.
    Retry,
    /// Find out whether it was committed.
    ResolveOutcome,
    /// Return the error: the transaction did not happen.
    Fail,
}

/// Codes of conflicts that are nobody's fault: serialisation failure, deadlock.
const CONFLICT_CODES: [&str; 2] = ["40001", "40P01"];
/// Code for a statement whose completion the server does not know.
const COMPLETION_UNKNOWN: &str = "40003";

/// The remedy for `error`. `committing` is whether a commit (or a statement that commits itself) had been sent.
pub(crate) fn remedy_for(error: &sqlx::Error, committing: bool) -> Remedy {
    if let sqlx::Error::Database(database) = error {
        let code = database.code();
        let code = code.as_deref().unwrap_or_default();
        if CONFLICT_CODES.contains(&code) {
            return Remedy::Retry;
        }
        // Class 57P is the server going away; with a commit under way that decides nothing.
        if committing && (code == COMPLETION_UNKNOWN || code.starts_with("57P")) {
            return Remedy::ResolveOutcome;
        }
        return Remedy::Fail;
    }
    if committing && !matches!(error, sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed) {
        return Remedy::ResolveOutcome;
    }
    Remedy::Fail
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_of_a_server_is_one_line_of_limited_length() {
        assert_eq!(server_words("no\u{1b}[2J\nspace\u{202e}left "), "no [2J space left");
        assert_eq!(server_words("\u{200b}"), "it gave no reason");
        assert_eq!(server_words(&"x".repeat(100_000)).chars().count(), MAX_SERVER_CHARS + 1);
    }

    #[test]
    fn hint_of_a_server_follows_its_message() {
        for (hint, expected) in [
            (None, "could not extend file"),
            (Some(" \u{200b}"), "could not extend file"),
            (Some("Check free\ndisk space."), "could not extend file (its hint: Check free disk space.)"),
        ] {
            assert_eq!(words_with_hint("could not extend file", hint), expected);
        }
    }

    #[test]
    fn missing_right_on_the_schema_is_advised_by_its_grant() {
        for (code, message, advised) in [
            ("42501", "permission denied for schema public", true),
            ("42501", "keine Berechtigung für Schema public", true),
            ("42501", "permission denied for table machine", false),
            ("3F000", "schema \"public\" does not exist", false),
        ] {
            assert_eq!(
                advice_for(code, message).contains("GRANT USAGE, CREATE"),
                advised,
                "{code} {message}"
            );
        }
    }
}
