//! The takeover of one machine, from a closed port to a key that is trusted.
//!
//! Everything may stop at any point and be started again from the beginning:
//! the probe sees what is there already, the upload is whole or absent, and
//! enrolment is idempotent and carries the fence, which the machine compares.

use prost::Message;
use tokio::time::Instant;

use crate::model::host_key::HostKey;
use crate::model::readable::readable;
use crate::model::remote_step::RemoteStep;
use crate::model::shell_words::NulInWord;
use crate::proto::agent::v1::{EnrollError, EnrollRequest, EnrollSuccess, enroll_error, enroll_response};
use crate::takeover::agent_binary::{AgentBinary, Architecture};
use crate::takeover::error::{Blame, HostKeyChanged, SshError};
use crate::takeover::host_keys::HostKeyExpectation;
use crate::takeover::session::{SshSession, SshSettings, SshTarget};
use crate::takeover::steps::{
    ENROLL_SCRIPT, PROBE_SCRIPT, StepFailure, UPLOAD_SCRIPT, read_enroll, read_probe, read_upload,
};

/// What a takeover is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Connecting and logging in.
    Connect,
    /// Asking what the machine is.
    Probe,
    /// Sending this many bytes.
    Upload {
        /// Size of the program.
        size: u64,
    },
    /// Enrolling the agent.
    Enroll,
}

impl Step {
    const fn name(self) -> &'static str {
        match self {
            Self::Connect => "login",
            Self::Probe => "probe",
            Self::Upload { .. } => "upload",
            Self::Enroll => "enrolment",
        }
    }
}

/// A machine that is taken over.
#[derive(Clone, Debug, PartialEq)]
pub struct TakenOver {
    /// The key that the host proved; to be pinned on first use.
    pub host_key: HostKey,
    /// Whether the program had to be sent.
    pub uploaded: bool,
    /// The agent's checked answer.
    pub success: EnrollSuccess,
}

/// Why a machine was not taken over.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// The connection failed, or ended too early.
    #[error(transparent)]
    Ssh(SshError),
    /// The host presented another key than the pinned one; nothing was sent to it.
    #[error(transparent)]
    HostKeyChanged(Box<HostKeyChanged>),
    /// The path for the program cannot be given to a shell.
    #[error("the agent's path cannot be used: {0}")]
    AgentPath(#[from] NulInWord),
    /// The machine runs something else than Linux.
    #[error("{address} runs {os}, and the agent runs on Linux only")]
    NotLinux {
        /// Host and port.
        address: String,
        /// What `uname -s` said.
        os: String,
    },
    /// The program is for another processor; it was not sent.
    #[error(
        "{address} is a machine of architecture {machine}, and the agent program is for {agent}; give a \
         program for {machine} by --agent_executable_path"
    )]
    WrongArchitecture {
        /// Host and port.
        address: String,
        /// What `uname -m` said.
        machine: String,
        /// What the program is for.
        agent: Architecture,
    },
    /// The machine cannot check what it received.
    #[error(
        "{address} has none of sha256sum, openssl and shasum, so an upload to it cannot be checked; install coreutils on it"
    )]
    NoDigestProgram {
        /// Host and port.
        address: String,
    },
    /// A step ran and failed.
    #[error("the {step} on {address} failed: {reason}")]
    Remote {
        /// Host and port.
        address: String,
        /// `probe`, `upload` or `enrolment`.
        step: &'static str,
        /// What the machine said, in our words and its own.
        reason: String,
    },
    /// The machine has seen a higher fence: somebody else holds, or held, a newer lease on it.
    #[error(
        "{address} refused fence {sent} because it has seen fence {known}: another shepherd works on it with a \
         newer lease, or the database was restored from a backup: then stop every shepherd and declare it with \
         `shepherdctl declare restored`"
    )]
    StaleFence {
        /// Host and port.
        address: String,
        /// The fence that the request carried.
        sent: i64,
        /// The fence that the machine holds.
        known: i64,
    },
    /// The machine is enrolled under another machine id.
    #[error(
        "{address} is enrolled as another machine than {machine_id}: {message}. Two entries may name one address, \
             another machine may have got the address, or its disk may be a copy of another machine's disk; to \
             give it a new identity, remove its agent's state directory"
    )]
    OtherMachine {
        /// Host and port.
        address: String,
        /// The id that the request carried.
        machine_id: String,
        /// What the agent said.
        message: String,
    },
    /// The machine belongs to another bare metal database.
    #[error(
        "{address} belongs to another bare metal database than {bmdb_id}: {message}. Release it there, or remove \
             its agent's state directory if that database is gone"
    )]
    OtherBmdb {
        /// Host and port.
        address: String,
        /// The id that the request carried.
        bmdb_id: String,
        /// What the agent said.
        message: String,
    },
    /// The caller may not touch the machine any more.
    #[error("the takeover of {address} was stopped before the {step}: {reason}")]
    Stopped {
        /// Host and port.
        address: String,
        /// `login`, `probe`, `upload` or `enrolment`.
        step: &'static str,
        /// Why the caller may not.
        reason: String,
    },
    /// The agent found the request malformed.
    #[error("the agent on {address} refused the enrolment as malformed: {message}")]
    Invalid {
        /// Host and port.
        address: String,
        /// What the agent said.
        message: String,
    },
    /// The agent answered something that cannot be trusted.
    #[error(
        "the agent on {address} answered wrongly: {reason}; is the program at {agent_path} a role server?"
    )]
    BadAnswer {
        /// Host and port.
        address: String,
        /// What was wrong.
        reason: String,
        /// Where the program is.
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
            Self::Stopped { .. } => Blame::Deadline,
            Self::Remote { .. } | Self::BadAnswer { .. } => Blame::Machine,
            Self::HostKeyChanged(_)
            | Self::AgentPath(_)
            | Self::NotLinux { .. }
            | Self::WrongArchitecture { .. }
            | Self::NoDigestProgram { .. }
            | Self::StaleFence { .. }
            | Self::OtherMachine { .. }
            | Self::OtherBmdb { .. }
            | Self::Invalid { .. } => Blame::Configuration,
        }
    }
}

/// Puts the agent on a machine and enrols it.
///
/// Returns when the agent's answer is checked: the request came back unchanged, and the key is one. Whether it
/// then heartbeats is seen elsewhere. Nothing of this outlives `deadline` or the returned future.
///
/// `may_begin` is asked right before each step, and its refusal is where the takeover ends: who was frozen during one
/// step and lost the machine meanwhile must not begin the next before anybody tells it.
#[expect(clippy::too_many_arguments, reason = "each is a value of its own, given once, at one call site")]
pub async fn take_over(
    ssh: &SshSettings,
    target: &SshTarget,
    expectation: &HostKeyExpectation,
    agent: &AgentBinary,
    agent_path: &str,
    request: &EnrollRequest,
    deadline: Instant,
    may_begin: impl Fn(Step) -> Result<(), String> + Send + Sync,
) -> Result<TakenOver, TakeoverError> {
    let may_begin = |step: Step| {
        may_begin(step).map_err(|reason| TakeoverError::Stopped {
            address: target.address(),
            step: step.name(),
            reason,
        })
    };
    may_begin(Step::Connect)?;
    let session = SshSession::connect(ssh, target, expectation, deadline).await?;
    let outcome = on_machine(&session, target, agent, agent_path, request, may_begin).await;
    let host_key = session.host_key().clone();
    session.close().await;
    let (uploaded, success) = outcome?;
    Ok(TakenOver { host_key, uploaded, success })
}

async fn on_machine(
    session: &SshSession,
    target: &SshTarget,
    agent: &AgentBinary,
    agent_path: &str,
    request: &EnrollRequest,
    may_begin: impl Fn(Step) -> Result<(), TakeoverError> + Send + Sync,
) -> Result<(bool, EnrollSuccess), TakeoverError> {
    let address = target.address();
    let path = agent_path.to_owned();
    let remote = |step: &'static str| {
        let address = address.clone();
        move |StepFailure(reason)| TakeoverError::Remote { address, step, reason }
    };

    may_begin(Step::Probe)?;
    let command = RemoteStep::Probe { path: path.clone() }.to_command(PROBE_SCRIPT)?;
    let output = session.exec("asking what the machine is", &command, bytes::Bytes::new()).await?;
    let probe = read_probe(&output).map_err(remote("probe"))?;
    if probe.os != "Linux" {
        return Err(TakeoverError::NotLinux { address, os: probe.os });
    }
    if probe.architecture != agent.architecture().uname() {
        let agent = agent.architecture();
        return Err(TakeoverError::WrongArchitecture { address, machine: probe.architecture, agent });
    }

    let uploaded = probe.digest.as_deref().is_none_or(|digest| !agent.suffices(digest));
    if uploaded {
        if !probe.can_digest {
            return Err(TakeoverError::NoDigestProgram { address });
        }
        may_begin(Step::Upload { size: agent.size() })?;
        let sha256 = agent.sha256().to_owned();
        let command = RemoteStep::Upload { path: path.clone(), sha256, size: agent.size() }
            .to_command(UPLOAD_SCRIPT)?;
        let output = session.exec("uploading the agent", &command, agent.content()).await?;
        read_upload(&output, agent.sha256()).map_err(remote("upload"))?;
    }

    may_begin(Step::Enroll)?;
    let command = RemoteStep::Enroll { path }.to_command(ENROLL_SCRIPT)?;
    let output = session.exec("enrolling the agent", &command, request.encode_to_vec().into()).await?;
    let response = read_enroll(&output).map_err(remote("enrolment"))?;
    let success = check(response.result, &address, agent_path, request)?;
    Ok((uploaded, success))
}

/// Judges an agent's answer.
fn check(
    result: Option<enroll_response::Result>,
    address: &str,
    agent_path: &str,
    request: &EnrollRequest,
) -> Result<EnrollSuccess, TakeoverError> {
    let bad = |reason: String| TakeoverError::BadAnswer {
        address: address.to_owned(),
        reason,
        agent_path: agent_path.to_owned(),
    };
    match result {
        Some(enroll_response::Result::Success(success)) => {
            if success.request.as_ref() != Some(request) {
                return Err(bad("it enrolled by another request than the one it was sent".to_owned()));
            }
            if success.public_key.len() != 32 {
                return Err(bad(format!("its public key has {} bytes and not 32", success.public_key.len())));
            }
            if success.public_key.iter().all(|byte| *byte == 0) {
                return Err(bad("its public key is all zero".to_owned()));
            }
            Ok(success)
        }
        Some(enroll_response::Result::Error(error)) => Err(refusal(&error, address, request)),
        None => Err(bad("it said neither success nor error".to_owned())),
    }
}

fn refusal(error: &EnrollError, address: &str, request: &EnrollRequest) -> TakeoverError {
    use enroll_error::Kind;
    let address = address.to_owned();
    let message = readable(&error.message).trim_end_matches('.').to_owned();
    match error.kind() {
        Kind::StaleFence => {
            TakeoverError::StaleFence { address, sent: request.fence, known: error.known_fence }
        }
        Kind::OtherMachine => {
            TakeoverError::OtherMachine { address, machine_id: request.machine_id.clone(), message }
        }
        Kind::OtherBmdb => TakeoverError::OtherBmdb { address, bmdb_id: request.bmdb_id.clone(), message },
        Kind::Invalid => TakeoverError::Invalid { address, message },
        // A kind that a later agent knows is a failure whose sentence we can still show.
        Kind::Failed | Kind::Unspecified => {
            TakeoverError::Remote { address, step: "enrolment", reason: message }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: &str = "192.0.2.7:22";

    fn request() -> EnrollRequest {
        EnrollRequest {
            machine_id: "5a0c2c4e-0000-4000-8000-000000000001".to_owned(),
            lane: "access".to_owned(),
            fence: 7,
            bmdb_id: "5a0c2c4e-0000-4000-8000-00000000000b".to_owned(),
            ..EnrollRequest::default()
        }
    }

    fn success() -> EnrollSuccess {
        EnrollSuccess { request: Some(request()), public_key: vec![7; 32], ..EnrollSuccess::default() }
    }

    fn judge(result: enroll_response::Result) -> Result<EnrollSuccess, TakeoverError> {
        check(Some(result), ADDRESS, "agent", &request())
    }

    fn refused(kind: enroll_error::Kind, message: &str) -> TakeoverError {
        let error = EnrollError { kind: kind.into(), message: message.to_owned(), known_fence: 9 };
        judge(enroll_response::Result::Error(error)).unwrap_err()
    }

    #[test]
    fn only_an_answer_that_echoes_the_request_with_a_key_is_success() {
        use enroll_response::Result::Success;
        assert_eq!(judge(Success(success())).unwrap(), success());

        let mut other = success();
        other.request.as_mut().unwrap().fence = 8;
        insta::assert_snapshot!(judge(Success(other)).unwrap_err(), @"the agent on 192.0.2.7:22 answered wrongly: it enrolled by another request than the one it was sent; is the program at agent a role server?");
        let short = EnrollSuccess { public_key: vec![7; 31], ..success() };
        insta::assert_snapshot!(judge(Success(short)).unwrap_err(), @"the agent on 192.0.2.7:22 answered wrongly: its public key has 31 bytes and not 32; is the program at agent a role server?");
        let zero = EnrollSuccess { public_key: vec![0; 32], ..success() };
        insta::assert_snapshot!(judge(Success(zero)).unwrap_err(), @"the agent on 192.0.2.7:22 answered wrongly: its public key is all zero; is the program at agent a role server?");
        insta::assert_snapshot!(check(None, ADDRESS, "agent", &request()).unwrap_err(), @"the agent on 192.0.2.7:22 answered wrongly: it said neither success nor error; is the program at agent a role server?");
    }

    #[test]
    fn each_refusal_of_the_agent_has_its_sentence() {
        use enroll_error::Kind;
        let stale = refused(Kind::StaleFence, "stale");
        assert!(matches!(stale, TakeoverError::StaleFence { known: 9, sent: 7, .. }));
        insta::assert_snapshot!(stale, @"192.0.2.7:22 refused fence 7 because it has seen fence 9: another shepherd works on it with a newer lease, or the database was restored from a backup: then stop every shepherd and declare it with `shepherdctl declare restored`");
        insta::assert_snapshot!(refused(Kind::OtherMachine, "it is machine A."), @"192.0.2.7:22 is enrolled as another machine than 5a0c2c4e-0000-4000-8000-000000000001: it is machine A. Two entries may name one address, another machine may have got the address, or its disk may be a copy of another machine's disk; to give it a new identity, remove its agent's state directory");
        insta::assert_snapshot!(refused(Kind::OtherBmdb, "it is of database B."), @"192.0.2.7:22 belongs to another bare metal database than 5a0c2c4e-0000-4000-8000-00000000000b: it is of database B. Release it there, or remove its agent's state directory if that database is gone");
        insta::assert_snapshot!(refused(Kind::Invalid, "the lane is empty."), @"the agent on 192.0.2.7:22 refused the enrolment as malformed: the lane is empty");
        insta::assert_snapshot!(refused(Kind::Failed, "the state directory\nis locked."), @"the enrolment on 192.0.2.7:22 failed: the state directory is locked");
        let later = EnrollError { kind: 99, message: "a later reason.".to_owned(), known_fence: 0 };
        insta::assert_snapshot!(judge(enroll_response::Result::Error(later)).unwrap_err(), @"the enrolment on 192.0.2.7:22 failed: a later reason");
    }

    #[test]
    fn a_machine_that_cannot_run_the_agent_is_told_in_one_sentence() {
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
            TakeoverError::Remote { address: address(), step: "upload", reason: "no space".to_owned() };
        insta::assert_snapshot!(remote, @"the upload on 192.0.2.7:22 failed: no space");
        assert_eq!(remote.blame(), Blame::Machine);
    }
}
