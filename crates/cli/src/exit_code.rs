//! Exit codes of `shepherdctl`.
//!
//! A script decides by the exit code whether an order has done what was requested, and whether to repeat it. So the code
//! follows from data only: the outcome of an order, or the status and the reason of an error. No sentence counts.
//! [`exit_code`] decides it, and [`ExitRecord`] keeps the highest one of a command with several objects.

use std::sync::atomic::{AtomicU8, Ordering};

use tonic::Code;

use bmdb::orders::order::{EXPIRY_PASSED, OutcomeKind};
use server::api::api_error::OUTCOME_UNKNOWN;

/// The table of exit codes, for help and man pages: each code, and what it means.
pub const EXIT_CODES: [(&str, &str); 8] = [
    ("0", "done, or what was requested holds already"),
    ("1", "failed, or without effect"),
    ("2", "wrong command or arguments"),
    ("3", "not found"),
    ("4", "refused: a person must decide"),
    ("5", "nobody answers: try again"),
    ("6", "the outcome of an order is unknown"),
    ("128 + N", "ended by signal N, for example 130 after Ctrl-C"),
];
/// What applies to all exit codes.
pub const EXIT_CODE_RULES: &str = "With several objects, the highest. A dry run exits as the order would.";

/// Reasons of the API for an object that does not exist, although the call itself is a valid one.
const NOT_FOUND_REASONS: [&str; 12] = [
    "NO_MACHINES",
    "NO_SUCH_ADD_ON",
    "NO_SUCH_APPROVAL",
    "NO_SUCH_ARTEFACT",
    "NO_SUCH_CLUSTER",
    "NO_SUCH_CREDENTIAL",
    "NO_SUCH_KEY",
    "NO_SUCH_MACHINE",
    "NO_SUCH_RELEASE",
    "NO_SUCH_REQUEST",
    "NO_SUCH_SNAPSHOT",
    "NO_SUCH_UPDATE",
];

/// Reasons of the API for a value that is wrong in every state of the fleet.
const WRONG_VALUE_REASONS: [&str; 15] = [
    "DECLARATION_TOO_LARGE",
    EXPIRY_PASSED,
    "INVALID_SPEC",
    "LABELS",
    "LOOP_WITHOUT_PROVIDERS",
    "NO_HOLDER",
    "NO_LIFETIME",
    "NO_SUCH_BUDGET",
    "NO_SUCH_KUBERNETES",
    "WRONG_LOG",
    "WRONG_NAME",
    "WRONG_PIECE",
    "WRONG_SIZE",
    "WRONG_UPDATE",
    "WRONG_UPGRADE",
];

/// The table of exit codes as text.
#[must_use]
pub fn exit_status_text() -> String {
    let rows = EXIT_CODES.iter().map(|(code, meaning)| format!("  {code:<8} {meaning}\n"));
    format!("Exit status:\n{}{EXIT_CODE_RULES}", rows.collect::<Vec<_>>().concat())
}

/// How a command ended, for its caller. A higher code counts more when a command has several objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum ExitCode {
    /// It is done, or holds already.
    #[default]
    Done = 0,
    /// It failed, or had no effect.
    Failed = 1,
    /// The command or one of its values is wrong.
    WrongCommand = 2,
    /// A named object does not exist.
    NotFound = 3,
    /// It was refused, and a person must decide.
    Refused = 4,
    /// Nobody answers; another attempt may succeed.
    Unreachable = 5,
    /// An order may have been carried out or not.
    OutcomeUnknown = 6,
    /// SIGHUP ended the command: 128 and the number of the signal. Its terminal is gone.
    HungUp = 129,
    /// Ctrl-C ended the command: 128 and the number of the signal.
    Interrupted = 130,
    /// SIGTERM ended the command: 128 and the number of the signal.
    Terminated = 143,
}

impl ExitCode {
    /// The number that the process exits with.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }
}

/// What decides an exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandEnd<'a> {
    /// An order was carried out, or would be in a dry run.
    Outcome(OutcomeKind),
    /// A bulk order was rejected on a machine, or a dry run found that the order would be.
    Rejected,
    /// A call ended with an error.
    Error {
        /// Code of the status.
        code: Code,
        /// Reason in the details of the status, such as `NO_SUCH_CLUSTER`; empty if it has none.
        reason: &'a str,
        /// Whether the client made the status because the connection ended.
        is_broken: bool,
    },
}

/// The exit code for one outcome or error.
#[must_use]
pub fn exit_code(end: CommandEnd<'_>) -> ExitCode {
    match end {
        CommandEnd::Outcome(OutcomeKind::Changed | OutcomeKind::Already) => ExitCode::Done,
        CommandEnd::Outcome(OutcomeKind::NoEffect) => ExitCode::Failed,
        CommandEnd::Rejected => ExitCode::Refused,
        CommandEnd::Error { reason: OUTCOME_UNKNOWN, .. } => ExitCode::OutcomeUnknown,
        CommandEnd::Error { is_broken: true, .. } => ExitCode::Unreachable,
        CommandEnd::Error { code, reason, .. } => match code {
            Code::FailedPrecondition if NOT_FOUND_REASONS.contains(&reason) => ExitCode::NotFound,
            Code::FailedPrecondition if WRONG_VALUE_REASONS.contains(&reason) => ExitCode::WrongCommand,
            Code::NotFound => ExitCode::NotFound,
            // The only such error is an idempotency key that was given with another order.
            Code::InvalidArgument | Code::OutOfRange | Code::AlreadyExists => ExitCode::WrongCommand,
            Code::FailedPrecondition | Code::Aborted | Code::PermissionDenied | Code::Unauthenticated => {
                ExitCode::Refused
            }
            // No server sends `Cancelled` or `Unknown`: the response ended in the middle.
            Code::Unavailable
            | Code::DeadlineExceeded
            | Code::ResourceExhausted
            | Code::Cancelled
            | Code::Unknown => ExitCode::Unreachable,
            Code::Ok | Code::Internal | Code::Unimplemented | Code::DataLoss => ExitCode::Failed,
        },
    }
}

/// The highest exit code of what a command has done so far.
#[derive(Debug, Default)]
pub struct ExitRecord(AtomicU8);

impl ExitRecord {
    /// Records the exit code of one object.
    pub fn record(&self, code: ExitCode) {
        self.0.fetch_max(code.number(), Ordering::Relaxed);
    }

    /// The number that the process exits with.
    #[must_use]
    pub fn highest(&self) -> u8 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: Code, reason: &str, is_broken: bool) -> CommandEnd<'_> {
        CommandEnd::Error { code, reason, is_broken }
    }

    #[test]
    fn outcome_or_error_decides_the_exit_code() {
        for (end, expected) in [
            (CommandEnd::Outcome(OutcomeKind::Changed), 0),
            (CommandEnd::Outcome(OutcomeKind::Already), 0),
            (CommandEnd::Outcome(OutcomeKind::NoEffect), 1),
            (CommandEnd::Rejected, 4),
            (error(Code::Internal, "INTERNAL", false), 1),
            (error(Code::Unimplemented, "UNKNOWN_RPC", false), 1),
            (error(Code::InvalidArgument, "INVALID_FIELD", false), 2),
            (error(Code::OutOfRange, "RESUME_TOKEN_EXPIRED", false), 2),
            (error(Code::AlreadyExists, "IDEMPOTENCY_KEY_REUSED", false), 2),
            (error(Code::FailedPrecondition, EXPIRY_PASSED, false), 2),
            (error(Code::FailedPrecondition, "NO_SUCH_BUDGET", false), 2),
            (error(Code::NotFound, "NO_SUCH_RESOURCE", false), 3),
            (error(Code::NotFound, "", false), 3),
            (error(Code::FailedPrecondition, "NO_SUCH_CLUSTER", false), 3),
            (error(Code::FailedPrecondition, "NO_SUCH_UPDATE", false), 3),
            (error(Code::FailedPrecondition, "NO_MACHINES", false), 3),
            (error(Code::FailedPrecondition, "NO_SUCH_KEY", false), 3),
            (error(Code::FailedPrecondition, "TOO_MANY", false), 4),
            (error(Code::FailedPrecondition, "APPROVAL_REQUIRED", false), 4),
            (error(Code::FailedPrecondition, "", false), 4),
            (error(Code::Aborted, "VERSION_MISMATCH", false), 4),
            (error(Code::PermissionDenied, "PERMISSION_DENIED", false), 4),
            (error(Code::Unauthenticated, "INVALID_CREDENTIAL", false), 4),
            (error(Code::Unavailable, "UNAVAILABLE", false), 5),
            (error(Code::ResourceExhausted, "RATE_LIMITED", false), 5),
            (error(Code::DeadlineExceeded, "CALL_TIMEOUT", false), 5),
            (error(Code::Unknown, "", false), 5),
            (error(Code::Cancelled, "", false), 5),
            (error(Code::Internal, "", true), 5),
            (error(Code::Unavailable, OUTCOME_UNKNOWN, false), 6),
            (error(Code::Unavailable, OUTCOME_UNKNOWN, true), 6),
        ] {
            assert_eq!(exit_code(end).number(), expected, "{end:?}");
        }
    }

    #[test]
    fn highest_code_of_several_objects_counts() {
        for (codes, expected) in [
            (&[][..], 0),
            (&[ExitCode::Done, ExitCode::Done], 0),
            (&[ExitCode::Failed, ExitCode::Done], 1),
            (&[ExitCode::Refused, ExitCode::NotFound, ExitCode::Failed], 4),
        ] {
            let record = ExitRecord::default();
            for code in codes {
                record.record(*code);
            }
            assert_eq!(record.highest(), expected, "{codes:?}");
        }
    }

    #[test]
    fn table_has_every_code() {
        for code in 0..=ExitCode::OutcomeUnknown.number() {
            let rows = EXIT_CODES.iter().filter(|(shown, _)| *shown == code.to_string());
            assert_eq!(rows.count(), 1, "{code}");
        }
    }
}
