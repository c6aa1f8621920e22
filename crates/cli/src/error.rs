//! Errors of `shepherdctl`. The variants separate what has another exit code.

use serde_json::Value;
use tonic::{Code, Status};

use crate::exit_code::{CommandEnd, ExitCode, exit_code};
use bmdb::connection::error::BmdbError;
use server::api::api_error::{OUTCOME_UNKNOWN, error_status, public_status};
use server::api::error_json::error_json;

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
        /// The error as the API returned it.
        status: Box<Status>,
    },
    /// The API ended a call with an error.
    #[error("{message}")]
    Api {
        /// The code that the process exits with.
        exit: ExitCode,
        /// The error as a sentence.
        message: String,
        /// The error as the API returned it.
        status: Box<Status>,
    },
    /// The order has to be confirmed first, and nothing was ordered.
    #[error("{message}")]
    Unconfirmed {
        /// Why, as a sentence.
        message: String,
        /// The command that gives the order, with its confirmation.
        command: String,
    },
    /// The command line is wrong, and another one is what the user means.
    #[error("{message}")]
    Corrected {
        /// What is wrong, as a sentence.
        message: String,
        /// The command that is right.
        command: String,
    },
    /// The command ended with an error that has an exit code of its own.
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
    /// The operator ended the command by Ctrl-C.
    #[error("{message}")]
    Interrupted {
        /// What was ended and what was not, as a sentence.
        message: String,
        /// The command that continues, with the flags that name the fleet; `None` if it would be too long.
        command: Option<String>,
    },
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

    /// The command for the user to run next, in a line of its own below the sentence.
    #[must_use]
    pub fn next_command(&self) -> Option<&str> {
        match self {
            Self::Unconfirmed { command, .. } | Self::Corrected { command, .. } => Some(command),
            Self::Interrupted { command, .. } => command.as_deref(),
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
                | Self::Corrected { .. }
                | Self::Ended { exit: ExitCode::WrongCommand | ExitCode::NotFound | ExitCode::Refused, .. }
                | Self::Api { exit: ExitCode::WrongCommand | ExitCode::NotFound | ExitCode::Refused, .. }
        )
    }

    /// The error for programs: that of the API, the code that the process exits with, and the command to
    /// run next.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut document = error_json(&self.status());
        if let Value::Object(fields) = &mut document {
            fields.insert("exitCode".to_owned(), self.exit_code().number().into());
            if let Some(command) = self.next_command() {
                fields.insert("command".to_owned(), command.into());
            }
        }
        document
    }

    /// The error as a status of the API. One that no API returned has the status that fits its exit code.
    fn status(&self) -> Status {
        match self {
            Self::Api { status, message, .. } | Self::ApprovalRequired { status, message, .. } => {
                if status.message().is_empty() {
                    return Status::new(status.code(), message.clone());
                }
                (**status).clone()
            }
            Self::Bmdb(error @ BmdbError::ApprovalRequired(_)) => public_status(error),
            _ => match self.exit_code() {
                ExitCode::OutcomeUnknown => {
                    error_status(Code::Unavailable, OUTCOME_UNKNOWN, self.to_string())
                }
                exit => Status::new(code_of_exit(exit), self.to_string()),
            },
        }
    }

    /// The code that the process exits with.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Ended { exit, .. } | Self::Api { exit, .. } => *exit,
            Self::Invalid(_) | Self::Unconfirmed { .. } | Self::Corrected { .. } => ExitCode::WrongCommand,
            Self::ApprovalRequired { .. } => ExitCode::Refused,
            Self::Bmdb(error) => bmdb_exit_code(error),
            Self::Interrupted { .. } => ExitCode::Interrupted,
            Self::Failed(_) | Self::Output(_) | Self::Json(_) | Self::Yaml(_) => ExitCode::Failed,
        }
    }
}

/// The code of the API for an error that no API returned.
const fn code_of_exit(exit: ExitCode) -> Code {
    match exit {
        ExitCode::WrongCommand => Code::InvalidArgument,
        ExitCode::NotFound => Code::NotFound,
        ExitCode::Refused => Code::FailedPrecondition,
        ExitCode::Unreachable | ExitCode::OutcomeUnknown => Code::Unavailable,
        ExitCode::Interrupted | ExitCode::HungUp | ExitCode::Terminated => Code::Cancelled,
        ExitCode::Done | ExitCode::Failed => Code::Unknown,
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
    fn error_for_programs_has_the_status_and_the_exit_code() {
        let ended = |exit| CliError::Ended { exit, message: "no".into() };
        let api = |message: &str| CliError::Api {
            exit: ExitCode::NotFound,
            message: "the API failed".into(),
            status: Box::new(error_status(Code::FailedPrecondition, "NO_SUCH_CLUSTER", message)),
        };
        let unconfirmed = || CliError::Unconfirmed {
            message: "nothing undoes this order".into(),
            command: "shepherdctl retire m --yes".into(),
        };
        let interrupted = || CliError::Interrupted {
            message: "the waiting was ended".into(),
            command: Some("shepherdctl wait machines m --for retired".into()),
        };
        let approval = CliError::ApprovalRequired {
            message: "needs an admin".into(),
            idempotency_key: "k7".into(),
            status: Box::new(error_status(Code::FailedPrecondition, "APPROVAL_REQUIRED", "needs an admin")),
        };
        for (error, code, status, reason, exit) in [
            (CliError::Invalid("no".into()), 400, "INVALID_ARGUMENT", "", 2),
            (ended(ExitCode::NotFound), 404, "NOT_FOUND", "", 3),
            (ended(ExitCode::Refused), 400, "FAILED_PRECONDITION", "", 4),
            (ended(ExitCode::Unreachable), 503, "UNAVAILABLE", "", 5),
            (ended(ExitCode::OutcomeUnknown), 503, "UNAVAILABLE", "OUTCOME_UNKNOWN", 6),
            (CliError::Failed("no".into()), 500, "UNKNOWN", "", 1),
            (interrupted(), 499, "CANCELLED", "", 130),
            (approval, 400, "FAILED_PRECONDITION", "APPROVAL_REQUIRED", 4),
            (api("no such cluster"), 400, "FAILED_PRECONDITION", "NO_SUCH_CLUSTER", 3),
            (api(""), 400, "FAILED_PRECONDITION", "", 3),
            (unconfirmed(), 400, "INVALID_ARGUMENT", "", 2),
        ] {
            let found = error.to_json();
            let shown = &found["error"];
            assert_eq!((&shown["code"], &shown["status"]), (&code.into(), &status.into()), "{found}");
            assert_eq!(shown["details"][0]["reason"].as_str().unwrap_or_default(), reason, "{found}");
            assert!(shown["message"].as_str().is_some_and(|message| !message.is_empty()), "{found}");
            assert_eq!(found["exitCode"], exit, "{found}");
        }
        assert_eq!(unconfirmed().to_json()["command"], "shepherdctl retire m --yes");
        assert_eq!(interrupted().to_json()["command"], "shepherdctl wait machines m --for retired");
        assert_eq!(CliError::Invalid("no".into()).to_json().get("command"), None);
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
