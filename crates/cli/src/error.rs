//! Errors of `shepherdctl`. The variants separate what has another exit code.

use tonic::Code;

use crate::exit_code::{CommandEnd, ExitCode, exit_code};
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
    /// The order has to be confirmed first, and nothing was ordered.
    #[error("{message}")]
    Unconfirmed {
        /// Why, as a sentence.
        message: String,
        /// The command that gives the order, with its confirmation.
        command: String,
    },
    /// The command ended with an error of the API, or with one that has an exit code of its own.
    #[error("{message}")]
    Ended {
        /// The code that the process exits with.
        exit: ExitCode,
        /// The error as a sentence.
        message: String,
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

    /// Whether the caller was refused what was requested, so that nothing was done and another attempt ends the same way.
    #[must_use]
    pub const fn is_rejection(&self) -> bool {
        matches!(
            self,
            Self::Invalid(_)
                | Self::Unconfirmed { .. }
                | Self::Ended { exit: ExitCode::WrongCommand | ExitCode::NotFound | ExitCode::Refused, .. }
        )
    }

    /// The code that the process exits with.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Ended { exit, .. } => *exit,
            Self::Invalid(_) | Self::Unconfirmed { .. } => ExitCode::WrongCommand,
            Self::ApprovalRequired { .. } => ExitCode::Refused,
            Self::Bmdb(error) => bmdb_exit_code(error),
            Self::Failed(_) | Self::Output(_) | Self::Json(_) | Self::Yaml(_) => ExitCode::Failed,
        }
    }
}

/// The exit code for an error of the BMDB, to which a command is connected without the API.
fn bmdb_exit_code(error: &BmdbError) -> ExitCode {
    match error {
        BmdbError::InvalidUrl { .. }
        | BmdbError::UnusableHosts(_)
        | BmdbError::TlsFile { .. }
        | BmdbError::IdempotencyKeyReused { .. } => ExitCode::WrongCommand,
        // The same code as through the API.
        BmdbError::OrderRejected { reason, .. } => {
            exit_code(CommandEnd::Error { code: Code::FailedPrecondition, reason, is_broken: false })
        }
        BmdbError::NoSuchMachine(_) | BmdbError::NoSuchCredential(_) => ExitCode::NotFound,
        BmdbError::ApprovalRequired(_)
        | BmdbError::NewerRules { .. }
        | BmdbError::NewerSchema { .. }
        | BmdbError::OlderSchema { .. }
        | BmdbError::VersionMismatch { .. } => ExitCode::Refused,
        BmdbError::UnknownOutcome(_) => ExitCode::OutcomeUnknown,
        _ if error.is_transient() => ExitCode::Unreachable,
        _ => ExitCode::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_the_database_has_the_exit_code_that_the_api_would_give() {
        for (error, expected) in [
            (BmdbError::InvalidUrl { reason: "no host".into() }, ExitCode::WrongCommand),
            (BmdbError::NoSuchMachine("m".into()), ExitCode::NotFound),
            (
                BmdbError::OrderRejected { reason: "NO_SUCH_CLUSTER", message: "no".into() },
                ExitCode::NotFound,
            ),
            (BmdbError::OrderRejected { reason: "IN_USE", message: "no".into() }, ExitCode::Refused),
            (BmdbError::NewerSchema { found: 9, supported: 8 }, ExitCode::Refused),
            (BmdbError::OlderSchema { found: 7, required: 8 }, ExitCode::Refused),
            (
                BmdbError::Unreachable { address: "db:5432".into(), reason: "refused".into() },
                ExitCode::Unreachable,
            ),
            (BmdbError::UnknownOutcome("lost".into()), ExitCode::OutcomeUnknown),
            (BmdbError::Corrupt("a value".into()), ExitCode::Failed),
        ] {
            let text = error.to_string();
            assert_eq!(CliError::Bmdb(error).exit_code(), expected, "{text}");
        }
    }

    #[test]
    fn what_may_succeed_later_is_no_rejection() {
        for (exit, expected) in [
            (ExitCode::Failed, false),
            (ExitCode::WrongCommand, true),
            (ExitCode::NotFound, true),
            (ExitCode::Refused, true),
            (ExitCode::Unreachable, false),
            (ExitCode::OutcomeUnknown, false),
        ] {
            assert_eq!(CliError::Ended { exit, message: "no".into() }.is_rejection(), expected, "{exit:?}");
        }
    }
}
