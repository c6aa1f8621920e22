//! How a program ends badly: one sentence, and a code that says whose fault it is.

use std::fmt;

/// A sentence for the person who called, and the exit code.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    /// 2 for what the caller got wrong, 1 for what failed.
    pub code: u8,
    /// What was being done, to what, what happened, what to do.
    pub sentence: String,
}

impl Failure {
    /// The caller got it wrong.
    pub fn usage(sentence: impl Into<String>) -> Self {
        Self { code: 2, sentence: sentence.into() }
    }

    /// It failed.
    pub fn failed(sentence: impl Into<String>) -> Self {
        Self { code: 1, sentence: sentence.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl std::error::Error for Failure {}
