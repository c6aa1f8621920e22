//! Errors of `shepherdctl` and their exit codes. The variants separate errors of the caller from failures, because
//! that decides the exit code.

use bmdb::connection::error::BmdbError;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The input is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The BMDB returned an error.
    #[error("{}", .0.with_advice())]
    Bmdb(#[from] BmdbError),
    /// The order needs the approval of a second admin.
    #[error("{message}")]
    ApprovalRequired {
        /// What the caller has to do, as a sentence.
        message: String,
        /// The key with which to repeat the order.
        idempotency_key: String,
    },
    /// The command failed; the text is a sentence.
    #[error("{0}")]
    Failed(String),
    /// The output could not be written.
    #[error("cannot write the output: {0}")]
    Output(#[from] std::io::Error),
    /// The response is not valid JSON.
    #[error("cannot write the output as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The output cannot be written as YAML.
    #[error("cannot write the output as YAML: {0}")]
    Yaml(#[from] serde_saphyr::SerializeError),
}

impl CliError {
    /// The idempotency key with which to repeat the order after another admin has approved it.
    #[must_use]
    pub fn idempotency_key(&self) -> Option<&str> {
        match self {
            Self::ApprovalRequired { idempotency_key: key, .. } => Some(key),
            Self::Bmdb(BmdbError::ApprovalRequired(wanted)) => Some(&wanted.idempotency_key),
            _ => None,
        }
    }

    /// 2 for an error of the caller, 1 for a failure.
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self {
            // The caller named the wrong database if it is of another release. `shepherd` decides the same.
            Self::Invalid(_)
            | Self::ApprovalRequired { .. }
            | Self::Bmdb(
                BmdbError::InvalidUrl { .. }
                | BmdbError::NoSuchMachine(_)
                | BmdbError::NoSuchCredential(_)
                | BmdbError::IdempotencyKeyReused { .. }
                | BmdbError::OrderRejected { .. }
                | BmdbError::ApprovalRequired(_)
                | BmdbError::NewerSchema { .. }
                | BmdbError::OlderSchema { .. },
            ) => 2,
            Self::Bmdb(_) | Self::Failed(_) | Self::Output(_) | Self::Json(_) | Self::Yaml(_) => 1,
        }
    }
}
