//! Exit failure: message and exit code.

use std::fmt;

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
