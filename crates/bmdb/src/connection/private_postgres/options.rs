//! Options, fixed settings and errors of a private PostgreSQL server.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::connection::error::describe_error;

/// How long a server may take until it accepts connections: after a crash it replays its log first.
pub(super) const READY_TIMEOUT: Duration = Duration::from_mins(2);
pub(super) const PORT: u16 = 5432;
pub(super) const SUPERUSER: &str = "postgres";
pub(super) const POLL: Duration = Duration::from_millis(10);

/// Where a private server stores its data, and for how long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerStorage {
    /// In a new temporary directory, without `fsync`, removed at the end.
    Temporary,
    /// In this directory, made if absent, with `fsync`, retained and served again next time.
    Persistent(PathBuf),
}

/// Options of a private server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrivatePostgresOptions {
    /// Where its data is and how long it lives.
    pub storage: ServerStorage,
    /// How many connections the server accepts.
    pub max_connections: u16,
}

/// Why a private server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum PrivatePostgresError {
    /// No server programs were found on this host.
    #[error(
        "no PostgreSQL server programs (initdb, postgres) were found in {searched}; install them with \
         `apt-get install postgresql`, or name their directory in SHEPHERD_POSTGRES_BIN"
    )]
    NoPrograms {
        /// The places that were searched.
        searched: String,
    },
    /// We are root and there is no other user.
    #[error(
        "PostgreSQL refuses to run as root, and there is neither a user postgres nor a user nobody to \
         run it as; add one, or run shepherd as an ordinary user"
    )]
    NoServerUser,
    /// The directory was made by a version whose programs are not installed.
    #[error(
        "{} was made by PostgreSQL {made_by}, and only {found} is installed; install the package \
         postgresql-{made_by}, or give another directory", directory.display()
    )]
    OtherVersion {
        /// Path of the data directory.
        directory: PathBuf,
        /// The major version in its `PG_VERSION`.
        made_by: String,
        /// The major versions that are installed.
        found: String,
    },
    /// Another process serves this directory.
    #[error("{} is in use by another shepherd; stop that one, or give another directory", directory.display())]
    InUse {
        /// The directory that the caller gave.
        directory: PathBuf,
    },
    /// A server that is not ours runs on this directory.
    #[error(
        "a PostgreSQL server that shepherd did not start (process {pid}) runs on {}; stop it, or give \
         another directory", directory.display()
    )]
    ServedByOther {
        /// Path of the data directory.
        directory: PathBuf,
        /// The process id in its `postmaster.pid`.
        pid: u32,
    },
    /// The user that the server runs as cannot enter the directory.
    #[error(
        "{} cannot be entered by the user {user}, as whom PostgreSQL runs because it refuses to run as \
         root; give a directory that this user can reach, such as one below /var/lib", directory.display()
    )]
    Inaccessible {
        /// The directory that the caller gave.
        directory: PathBuf,
        /// Name of the server's user.
        user: String,
    },
    /// The operating system rejected an operation.
    #[error("PostgreSQL could not be started: {operation} {} failed: {error}", path.display())]
    Io {
        /// What was being done.
        operation: &'static str,
        /// The path it was done to.
        path: PathBuf,
        /// Error of the operating system.
        error: io::Error,
    },
    /// The server, or the program that makes its directory, failed.
    #[error("{program} gave up on {}: {output}", directory.display())]
    Failed {
        /// Name of the program.
        program: &'static str,
        /// Path of the data directory.
        directory: PathBuf,
        /// The last lines it wrote.
        output: String,
    },
    /// The server did not accept connections in time.
    #[error("PostgreSQL did not become ready within {} s; its last words: {output}", READY_TIMEOUT.as_secs())]
    NotReady {
        /// The last lines it wrote.
        output: String,
    },
    /// A database name that is no plain identifier.
    #[error(
        "{name:?} is not a valid name for a database here: use lower-case letters, digits and underscores"
    )]
    InvalidName {
        /// The name that the caller gave.
        name: String,
    },
    /// The server rejected the creation of a database.
    #[error("the database {name} could not be created: {}", describe_error(error))]
    CreateDatabase {
        /// Name of the new database.
        name: String,
        /// Error of the server.
        error: sqlx::Error,
    },
    /// A thread that did blocking work for us panicked.
    #[error("PostgreSQL could not be started or stopped: {0}")]
    Task(#[from] tokio::task::JoinError),
}
