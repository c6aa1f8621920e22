//! Why the state directory could not be used.
//!
//! Each error names the file or directory, and the way back ([`state_directory`] has the rules).
//!
//! [`state_directory`]: crate::state_directory

use std::path::PathBuf;

use curator_client::identity::IdentityError;
use trusted_file::private_file::PrivateFileError;
use trusted_file::unchangeable_path::ChangeableError;

/// What a person writes into a damaged file of signing keys: no keys, and that declarations must be signed.
pub const EMPTY_SIGNING_TRUST: &str = r#"{"keys":[],"requires_signed_declarations":true}"#;

/// Why the directory could not be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The user has no home directory to store it in.
    #[error("no home directory for the state is known; give --state_dir")]
    NoHomeDirectory,
    /// An operation on the file system failed.
    #[error("{operation} {path} failed: {source}", path = path.display())]
    Io {
        /// The operation that failed.
        operation: &'static str,
        /// The file or directory it failed on.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The content of a file of truth is not what this program writes.
    #[error(
        "the state file {path} is damaged ({reason}); look at it, then remove it and let the shepherd \
         enrol this machine again", path = path.display()
    )]
    Damaged {
        /// The path of the damaged file.
        path: PathBuf,
        /// What is wrong with its content.
        reason: String,
    },
    /// The content of a hint is not what this program writes. Nobody has to do anything.
    #[error(
        "the state file {path} is damaged ({reason}); the role server works without it, and replaces it by itself",
        path = path.display()
    )]
    DamagedHint {
        /// The path of the damaged file.
        path: PathBuf,
        /// What is wrong with its content.
        reason: String,
    },
    /// The content of the file with the pinned signing keys is not what this program writes. It has a way back of its own:
    /// without the file, the machine would run what it has refused.
    #[error(
        "{path} is damaged ({reason}); look at it, write {empty} into it, with false where declarations need no signature, \
         and restart the role server, which pins the keys of its shepherd again (without the file, it would run what it \
         has refused)", path = path.display(), empty = EMPTY_SIGNING_TRUST
    )]
    DamagedSigningTrust {
        /// The path of the damaged file.
        path: PathBuf,
        /// What is wrong with its content.
        reason: String,
    },
    /// The private key cannot be read, or other users can read or write it.
    #[error(transparent)]
    KeyFile(PrivateFileError),
    /// Other users can write to the directory.
    #[error("the state directory is not safe: {0}")]
    Directory(#[from] ChangeableError),
    /// The identity could not be generated or read.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// Another process holds the lock.
    #[error(
        "another role server already {does} in {path}; stop that one, or give this one its own --state_dir",
        path = path.display()
    )]
    Locked {
        /// The activity of the other process, such as `runs`.
        does: &'static str,
        /// The state directory of both.
        path: PathBuf,
    },
}
