//! Why a machine was not taken over, and where to look for the cause.

use crate::agent_binary::Architecture;
use crate::ssh_error::{Blame, HostKeyChanged, SshError};
use model::shell_words::NulInWord;

/// Why a machine was not taken over.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// The connection failed, or ended too early.
    #[error(transparent)]
    Ssh(SshError),
    /// The host presented another key than the pinned one; nothing was sent to it.
    #[error(transparent)]
    HostKeyChanged(Box<HostKeyChanged>),
    /// The path of the program cannot be passed to a shell.
    #[error("the agent's path cannot be used: {0}")]
    InvalidAgentPath(#[from] NulInWord),
    /// The machine runs an operating system other than Linux.
    #[error("{address} runs {os}, and the agent runs on Linux only")]
    NotLinux {
        /// Host and port of the machine.
        address: String,
        /// The output of `uname -s`.
        os: String,
    },
    /// The program is for another processor; it was not uploaded.
    #[error(
        "{address} is a machine of architecture {machine}, and the agent program is for {agent}; give a \
         program for {machine} by --agent_executable_path"
    )]
    WrongArchitecture {
        /// Host and port of the machine.
        address: String,
        /// The output of `uname -m`.
        machine: String,
        /// The architecture of the program.
        agent: Architecture,
    },
    /// The machine has no program to verify an upload with.
    #[error(
        "{address} has none of sha256sum, openssl and shasum, so an upload to it cannot be checked; install coreutils on it"
    )]
    NoDigestProgram {
        /// Host and port of the machine.
        address: String,
    },
    /// Other users of the machine can change the program, which root would run. Nothing was written.
    #[error(
        "the agent's place on {address} is not safe: {reason}. Let only {user} and root change the program and every \
         directory on the way to it, or give another place by --agent_target_path"
    )]
    UnsafeAgentPath {
        /// Host and port of the machine.
        address: String,
        /// The user that logged in.
        user: String,
        /// What others can change.
        reason: String,
    },
    /// A step ran and failed.
    #[error("the {step} on {address} failed: {reason}")]
    StepFailed {
        /// Host and port of the machine.
        address: String,
        /// `probe`, `upload` or `enrolment`.
        step: &'static str,
        /// The cause in our words, and the machine's own message.
        reason: String,
    },
    /// The machine has seen a higher fence: another shepherd holds, or held, a newer lease on it.
    #[error(
        "{address} refused fence {sent} because it has seen fence {machine_fence}: another shepherd works on it with a \
         newer lease, or the database was restored from a backup: then stop every shepherd and declare it with \
         `shepherdctl declare restored`"
    )]
    StaleFence {
        /// Host and port of the machine.
        address: String,
        /// The fence in the request.
        sent: i64,
        /// The fence that the machine holds.
        machine_fence: i64,
    },
    /// The machine is enrolled under another machine id.
    #[error(
        "{address} is enrolled as another machine than {machine_id}: {message}. Two entries may name one address, \
             another machine may have got the address, or its disk may be a copy of another machine's disk; to \
             give it a new identity, remove its agent's state directory"
    )]
    OtherMachine {
        /// Host and port of the machine.
        address: String,
        /// The machine id in the request.
        machine_id: String,
        /// The agent's error message.
        message: String,
    },
    /// The machine belongs to another bare metal database.
    #[error(
        "{address} belongs to another bare metal database than {bmdb_id}: {message}. Release it there, or remove \
             its agent's state directory if that database is gone"
    )]
    OtherBmdb {
        /// Host and port of the machine.
        address: String,
        /// The database id in the request.
        bmdb_id: String,
        /// The agent's error message.
        message: String,
    },
    /// The caller is no longer permitted to work on the machine.
    #[error("the takeover of {address} was stopped before the {step}: {reason}")]
    NoLongerPermitted {
        /// Host and port of the machine.
        address: String,
        /// `login`, `probe`, `upload` or `enrolment`.
        step: &'static str,
        /// Why the caller is not permitted.
        reason: String,
    },
    /// The agent rejected the request as malformed.
    #[error("the agent on {address} refused the enrolment as malformed: {message}")]
    MalformedRequest {
        /// Host and port of the machine.
        address: String,
        /// The agent's error message.
        message: String,
    },
    /// The agent's response cannot be trusted.
    #[error(
        "the agent on {address} answered wrongly: {reason}; is the program at {agent_path} a role server?"
    )]
    InvalidResponse {
        /// Host and port of the machine.
        address: String,
        /// What is wrong with the response.
        reason: String,
        /// The path of the program on the machine.
        agent_path: String,
    },
}

impl From<SshError> for TakeoverError {
    fn from(error: SshError) -> Self {
        match error {
            SshError::HostKeyChanged(changed) => Self::HostKeyChanged(changed),
            other => Self::Ssh(other),
        }
    }
}

impl TakeoverError {
    /// Where the cause most likely lies.
    #[must_use]
    pub const fn blame(&self) -> Blame {
        match self {
            Self::Ssh(error) => error.blame(),
            Self::NoLongerPermitted { .. } => Blame::Deadline,
            Self::StepFailed { .. } | Self::InvalidResponse { .. } => Blame::Machine,
            Self::HostKeyChanged(_)
            | Self::InvalidAgentPath(_)
            | Self::NotLinux { .. }
            | Self::WrongArchitecture { .. }
            | Self::NoDigestProgram { .. }
            | Self::UnsafeAgentPath { .. }
            | Self::StaleFence { .. }
            | Self::OtherMachine { .. }
            | Self::OtherBmdb { .. }
            | Self::MalformedRequest { .. } => Blame::Configuration,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: &str = "192.0.2.7:22";

    #[test]
    fn unsuitable_machine_error_is_one_sentence() {
        let address = || ADDRESS.to_owned();
        let wrong = TakeoverError::WrongArchitecture {
            address: address(),
            machine: "aarch64".to_owned(),
            agent: Architecture::X86_64,
        };
        insta::assert_snapshot!(wrong, @"192.0.2.7:22 is a machine of architecture aarch64, and the agent program is for x86_64; give a program for aarch64 by --agent_executable_path");
        insta::assert_snapshot!(TakeoverError::NotLinux { address: address(), os: "FreeBSD".to_owned() }, @"192.0.2.7:22 runs FreeBSD, and the agent runs on Linux only");
        insta::assert_snapshot!(TakeoverError::NoDigestProgram { address: address() }, @"192.0.2.7:22 has none of sha256sum, openssl and shasum, so an upload to it cannot be checked; install coreutils on it");
        let remote =
            TakeoverError::StepFailed { address: address(), step: "upload", reason: "no space".to_owned() };
        insta::assert_snapshot!(remote, @"the upload on 192.0.2.7:22 failed: no space");
        assert_eq!(remote.blame(), Blame::Machine);
    }
}
