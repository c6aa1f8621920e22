//! The verbs of the `roleserver` program.
//!
//! The binary parses flags and calls one of these; each returns its error as a
//! sentence, and none prints it.

pub mod enroll;
pub mod metrics;
pub mod plan;
pub mod run;
pub mod status;
pub mod supervise;

/// Why a verb did not do what it was called for.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The caller got something wrong.
    #[error("{0}")]
    Usage(String),
    /// Something failed.
    #[error("{0}")]
    Failed(String),
}

impl CommandError {
    /// What the program exits with: 2 for the caller's mistakes, 1 for failures.
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Failed(_) => 1,
        }
    }

    /// A failure, from whatever says it.
    pub fn failed(error: impl std::fmt::Display) -> Self {
        Self::Failed(error.to_string())
    }
}
