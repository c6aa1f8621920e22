//! Exit failures: a message and an exit code, and which errors are mistakes of the caller.

use std::fmt;

use crate::bmdb::connection::error::BmdbError;
use crate::bmdb::connection::private_postgres::options::PrivatePostgresError;
use crate::server::error::ServerError;

/// Why a program failed: a sentence for the caller, and the exit code.
#[derive(Debug, PartialEq, Eq)]
pub struct ExitFailure {
    /// 2 for a mistake of the caller, 1 for a failure of something else.
    pub code: u8,
    /// What was attempted on what, what happened, and what to do.
    pub message: String,
}

impl ExitFailure {
    /// A mistake of the caller: exit code 2.
    pub fn usage(sentence: impl Into<String>) -> Self {
        Self { code: 2, message: sentence.into() }
    }

    /// A failure of something else: exit code 1.
    pub fn failed(sentence: impl Into<String>) -> Self {
        Self { code: 1, message: sentence.into() }
    }
}

impl fmt::Display for ExitFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ExitFailure {}

/// The exit failure for a database's error: a mistake of the caller, or another failure.
#[expect(clippy::needless_pass_by_value, reason = "this is the signature that `map_err` takes")]
#[must_use]
pub fn database_failure(error: BmdbError) -> ExitFailure {
    let sentence = error.with_advice();
    match error {
        BmdbError::InvalidUrl { .. }
        | BmdbError::TlsFile { .. }
        | BmdbError::NewerSchema { .. }
        | BmdbError::OlderSchema { .. } => ExitFailure::usage(sentence),
        _ => ExitFailure::failed(sentence),
    }
}

/// The exit failure for an error of a private server: a mistake of the caller, or another failure.
#[expect(clippy::needless_pass_by_value, reason = "this is the signature that `map_err` takes")]
pub(super) fn postgres_failure(error: PrivatePostgresError) -> ExitFailure {
    let sentence = error.to_string();
    match error {
        PrivatePostgresError::Inaccessible { .. }
        | PrivatePostgresError::OtherVersion { .. }
        | PrivatePostgresError::InUse { .. }
        | PrivatePostgresError::ServedByOther { .. } => ExitFailure::usage(sentence),
        _ => ExitFailure::failed(sentence),
    }
}

/// The exit failure for a server's error: a mistake of the caller, or another failure.
#[must_use]
pub fn server_failure(error: &ServerError) -> ExitFailure {
    let sentence = error.to_string();
    match error {
        ServerError::Bmdb(_) => ExitFailure::failed(sentence),
        ServerError::Listen { source, .. } if source.kind() == std::io::ErrorKind::AddrInUse => {
            ExitFailure::failed(sentence)
        }
        _ => ExitFailure::usage(sentence),
    }
}
