//! What can go wrong, told apart by whose it is: that decides the exit code.

use crate::bmdb::error::BmdbError;

/// Why a command did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// What was typed cannot be.
    #[error("{0}")]
    Wrong(String),
    /// The database.
    #[error("{}", .0.with_advice())]
    Bmdb(#[from] BmdbError),
    /// An order that needs another admin: a sentence, and the key to give it again with.
    #[error("{said}")]
    SecondPerson {
        /// The sentence.
        said: String,
        /// The key.
        key: String,
    },
    /// What was asked for failed: a sentence.
    #[error("{0}")]
    Failed(String),
    /// The answer cannot be written.
    #[error("cannot write the answer: {0}")]
    Output(#[from] std::io::Error),
    /// The answer is no JSON.
    #[error("cannot write the answer as JSON: {0}")]
    Json(#[from] serde_json::Error),
}

impl CliError {
    /// The idempotency key that the same order is to be given again with, where another admin has to approve it.
    #[must_use]
    pub fn key_to_repeat_with(&self) -> Option<&str> {
        match self {
            Self::SecondPerson { key, .. } => Some(key),
            Self::Bmdb(BmdbError::SecondPerson(wanted)) => Some(&wanted.key),
            _ => None,
        }
    }

    /// 2 for what the caller got wrong, 1 for what failed.
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self {
            // A database of another release is the wrong one to name, as `shepherd` says too.
            Self::Wrong(_)
            | Self::SecondPerson { .. }
            | Self::Bmdb(
                BmdbError::Url { .. }
                | BmdbError::NoSuchMachine(_)
                | BmdbError::NoSuchCredential(_)
                | BmdbError::KeyOfAnotherOrder { .. }
                | BmdbError::OrderRefused { .. }
                | BmdbError::SecondPerson(_)
                | BmdbError::NewerSchema { .. }
                | BmdbError::OlderSchema { .. },
            ) => 2,
            Self::Bmdb(_) | Self::Failed(_) | Self::Output(_) | Self::Json(_) => 1,
        }
    }
}
