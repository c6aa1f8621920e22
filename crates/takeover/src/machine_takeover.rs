//! The takeover of one machine: connect, probe, upload, enrol.
//!
//! It begins at a closed port and ends with a trusted key. Everything may stop at any point and be started again from
//! the beginning: the probe sees what is there already, the upload is whole or absent, and enrolment is idempotent and
//! carries the fence, which the machine compares.

use prost::Message;
use tokio::time::Instant;

use crate::agent_binary::{AgentBinary, Architecture};
use crate::exec::CommandOutput;
use crate::host_keys::HostKeyExpectation;
use crate::program_path::{PlaceFacts, ProgramPath, TargetPath, UnsafePath, choose_program_path};
use crate::scripts::{ENROLL_SCRIPT, PROBE_SCRIPT, UPLOAD_SCRIPT};
use crate::session::{SshSession, SshSettings, SshTarget};
use crate::ssh_error::{Blame, HostKeyChanged, SshError};
use crate::steps::{ProbeReport, StepError, parse_enroll, parse_probe, parse_upload, unsafe_path_reason};
use model::host_key::HostKey;
use model::program_versions::version::ProgramVersion;
use model::remote_step::RemoteStep;
use model::sanitize::sanitize_text;
use model::shell_words::NulInWord;
use proto::agent::v1::{EnrollError, EnrollRequest, EnrollSuccess, enroll_error, enroll_response};

/// The next step of a takeover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeoverStep {
    /// Connect to the machine and log in.
    Connect,
    /// Read what the machine is and has.
    Probe,
    /// Upload the agent program.
    Upload {
        /// Size of the program in bytes.
        size: u64,
    },
    /// Enrol the agent over the session.
    Enroll,
}

impl TakeoverStep {
    const fn name(self) -> &'static str {
        match self {
            Self::Connect => "login",
            Self::Probe => "probe",
            Self::Upload { .. } => "upload",
            Self::Enroll => "enrolment",
        }
    }
}

/// The result of a takeover.
#[derive(Clone, Debug, PartialEq)]
pub struct TakeoverResult {
    /// The key that the host proved; the caller pins it on first use.
    pub host_key: HostKey,
    /// The version of its OpenSSH; `None` for another server.
    pub openssh: Option<ProgramVersion>,
    /// Whether the program was uploaded; `false` if the right one was there.
    pub uploaded: bool,
    /// Where the program is, and why.
    pub program: ProgramPath,
    /// The agent's verified response.
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

/// Installs the agent on a machine and enrols it.
///
/// Returns when the agent's response is verified: the request came back unchanged, and the key is valid. Whether the
/// agent then sends heartbeats is observed elsewhere. Nothing of this outlives `deadline` or the returned future.
///
/// `may_begin` is called right before each step, and its error ends the takeover: a shepherd that was frozen during one
/// step and lost its lease meanwhile must not begin the next.
#[expect(clippy::too_many_arguments, reason = "each is a value of its own, given once, at one call site")]
pub async fn take_over_machine(
    ssh: &SshSettings,
    target: &SshTarget,
    expectation: &HostKeyExpectation,
    agent: &AgentBinary,
    agent_path: impl Into<TargetPath>,
    request: &EnrollRequest,
    deadline: Instant,
    may_begin: impl Fn(TakeoverStep) -> Result<(), String> + Send + Sync,
) -> Result<TakeoverResult, TakeoverError> {
    let may_begin = |step: TakeoverStep| {
        may_begin(step).map_err(|reason| TakeoverError::NoLongerPermitted {
            address: target.address(),
            step: step.name(),
            reason,
        })
    };
    may_begin(TakeoverStep::Connect)?;
    let session = SshSession::connect(ssh, target, expectation, deadline).await?;
    let outcome = run_steps(&session, target, agent, &agent_path.into(), request, may_begin).await;
    let (host_key, openssh) = (session.host_key().clone(), session.openssh_version());
    session.close().await;
    let (uploaded, program, success) = outcome?;
    Ok(TakeoverResult { host_key, openssh, uploaded, program, success })
}

async fn run_steps(
    session: &SshSession,
    target: &SshTarget,
    agent: &AgentBinary,
    agent_path: &TargetPath,
    request: &EnrollRequest,
    may_begin: impl Fn(TakeoverStep) -> Result<(), TakeoverError> + Send + Sync,
) -> Result<(bool, ProgramPath, EnrollSuccess), TakeoverError> {
    let address = target.address();
    let remote = |step: &'static str, mount: Option<String>| {
        let address = address.clone();
        move |StepError(reason)| {
            let reason = mount.map_or(reason.clone(), |mount| format!("{reason}; {mount}"));
            TakeoverError::StepFailed { address, step, reason }
        }
    };

    let is_safe = |output: &CommandOutput| match unsafe_path_reason(output) {
        Some(reason) => Err(unsafe_path_error(target, reason)),
        None => Ok(()),
    };

    let probe = probe_machine(session, target, agent_path.first_path(), &may_begin).await?;
    if probe.os != "Linux" {
        return Err(TakeoverError::NotLinux { address, os: probe.os });
    }
    if probe.architecture != agent.architecture().uname() {
        let agent = agent.architecture();
        return Err(TakeoverError::WrongArchitecture { address, machine: probe.architecture, agent });
    }

    let (program, probe) = find_safe_path(session, target, agent, agent_path, probe, &may_begin).await?;
    let path = program.path.clone();
    // The mount explains what a shell only calls a permission.
    let mount = probe.target.as_ref().and_then(PlaceFacts::mount_obstacle);

    let uploaded = probe.digest.as_deref().is_none_or(|digest| !agent.accepts_digest(digest));
    if uploaded {
        if !probe.has_digest_program {
            return Err(TakeoverError::NoDigestProgram { address });
        }
        may_begin(TakeoverStep::Upload { size: agent.size() })?;
        let sha256 = agent.sha256().to_owned();
        let command = RemoteStep::Upload { path: path.clone(), sha256, size: agent.size() }
            .to_command(UPLOAD_SCRIPT)?;
        let output = session.exec("uploading the agent", &command, agent.content()).await?;
        is_safe(&output)?;
        parse_upload(&output, agent.sha256()).map_err(remote("upload", mount.clone()))?;
    }

    may_begin(TakeoverStep::Enroll)?;
    let command = RemoteStep::Enroll { path: path.clone() }.to_command(ENROLL_SCRIPT)?;
    let output = session.exec("enrolling the agent", &command, request.encode_to_vec().into()).await?;
    is_safe(&output)?;
    let response = parse_enroll(&output).map_err(remote("enrolment", mount))?;
    let success = check_enroll_response(response.result, &address, &path, request)?;
    Ok((uploaded, program, success))
}

/// Finds a path at which no other user can change the program. Each candidate is probed. `first` is the probe of the first
/// path; the result has the probe of the chosen one.
async fn find_safe_path(
    session: &SshSession,
    target: &SshTarget,
    agent: &AgentBinary,
    agent_path: &TargetPath,
    first: ProbeReport,
    may_begin: &(impl Fn(TakeoverStep) -> Result<(), TakeoverError> + Send + Sync),
) -> Result<(ProgramPath, ProbeReport), TakeoverError> {
    let first_path = agent_path.first_path();
    let found_unsafe = |path: &str, reason: String| UnsafePath { path: path.to_owned(), reason };
    let mut unsafe_paths: Vec<_> =
        first.unsafe_reason.iter().map(|reason| found_unsafe(first_path, reason.clone())).collect();
    loop {
        let program = choose_program_path(agent_path, &first, agent, &unsafe_paths)
            .map_err(|reason| unsafe_path_error(target, reason))?;
        if program.path == first_path {
            return Ok((program, first));
        }
        let probe = probe_machine(session, target, &program.path, may_begin).await?;
        match probe.unsafe_reason.clone() {
            None => return Ok((program, probe)),
            Some(reason) => unsafe_paths.push(found_unsafe(&program.path, reason)),
        }
    }
}

fn unsafe_path_error(target: &SshTarget, reason: String) -> TakeoverError {
    TakeoverError::UnsafeAgentPath { address: target.address(), user: target.user.clone(), reason }
}

async fn probe_machine(
    session: &SshSession,
    target: &SshTarget,
    path: &str,
    may_begin: &(impl Fn(TakeoverStep) -> Result<(), TakeoverError> + Send + Sync),
) -> Result<ProbeReport, TakeoverError> {
    may_begin(TakeoverStep::Probe)?;
    let command = RemoteStep::Probe { path: path.to_owned() }.to_command(PROBE_SCRIPT)?;
    let output = session.exec("probing the machine", &command, bytes::Bytes::new()).await?;
    parse_probe(&output).map_err(|StepError(reason)| TakeoverError::StepFailed {
        address: target.address(),
        step: TakeoverStep::Probe.name(),
        reason,
    })
}

/// Why a response to another request is wrong.
const OTHER_REQUEST: &str = "it enrolled by another request than the one it was sent";
/// The same for an agent of an earlier release, which leaves out the order to replace pinned keys.
const NO_REPLACEMENT: &str =
    "its release cannot replace pinned signing keys: let root remove signing.json there";

/// Verifies an agent's response.
fn check_enroll_response(
    result: Option<enroll_response::Result>,
    address: &str,
    agent_path: &str,
    request: &EnrollRequest,
) -> Result<EnrollSuccess, TakeoverError> {
    let bad = |reason: String| TakeoverError::InvalidResponse {
        address: address.to_owned(),
        reason,
        agent_path: agent_path.to_owned(),
    };
    match result {
        Some(enroll_response::Result::Success(success)) => {
            if !success.request.as_ref().is_some_and(|echo| is_echo(echo, request)) {
                let keeping = EnrollRequest { replace_signing_keys: false, ..request.clone() };
                let knows_no_replacement =
                    success.request.as_ref().is_some_and(|echo| is_echo(echo, &keeping));
                return Err(
                    bad(if knows_no_replacement { NO_REPLACEMENT } else { OTHER_REQUEST }.to_owned()),
                );
            }
            if success.public_key.len() != 32 {
                return Err(bad(format!("its public key has {} bytes and not 32", success.public_key.len())));
            }
            if success.public_key.iter().all(|byte| *byte == 0) {
                return Err(bad("its public key is all zero".to_owned()));
            }
            Ok(success)
        }
        Some(enroll_response::Result::Error(error)) => Err(map_enroll_error(&error, address, request)),
        None => Err(bad("it returned neither success nor error".to_owned())),
    }
}

/// Whether an agent returned the request that it was sent. One of a release before signed releases leaves the keys out.
fn is_echo(echo: &EnrollRequest, request: &EnrollRequest) -> bool {
    let keyless = || EnrollRequest { signing_keys: vec![], key_rotations: vec![], ..request.clone() };
    echo == request || *echo == keyless()
}

fn map_enroll_error(error: &EnrollError, address: &str, request: &EnrollRequest) -> TakeoverError {
    use enroll_error::Kind;
    let address = address.to_owned();
    let message = sanitize_text(&error.message).trim_end_matches('.').to_owned();
    match error.kind() {
        Kind::StaleFence => {
            TakeoverError::StaleFence { address, sent: request.fence, machine_fence: error.current_fence }
        }
        Kind::OtherMachine => {
            TakeoverError::OtherMachine { address, machine_id: request.machine_id.clone(), message }
        }
        Kind::OtherBmdb => TakeoverError::OtherBmdb { address, bmdb_id: request.bmdb_id.clone(), message },
        Kind::Invalid => TakeoverError::MalformedRequest { address, message },
        // A kind that only a later agent knows is a failure whose message can still be shown.
        Kind::Failed | Kind::Unspecified => {
            TakeoverError::StepFailed { address, step: "enrolment", reason: message }
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

    fn check_result(result: enroll_response::Result) -> Result<EnrollSuccess, TakeoverError> {
        check_enroll_response(Some(result), ADDRESS, "agent", &request())
    }

    fn rejection_of(kind: enroll_error::Kind, message: &str) -> TakeoverError {
        let error = EnrollError { kind: kind.into(), message: message.to_owned(), current_fence: 9 };
        check_result(enroll_response::Result::Error(error)).unwrap_err()
    }

    #[test]
    fn only_an_echoed_request_with_a_key_is_success() {
        use enroll_response::Result::Success;
        assert_eq!(check_result(Success(success())).unwrap(), success());

        // As an agent of a release before signed releases returns it, and one that was sent other keys.
        let signed = |key: &str| EnrollRequest { signing_keys: vec![key.to_owned()], ..request() };
        for (echo, is_accepted) in [(signed("a"), true), (request(), true), (signed("b"), false)] {
            let returned = Success(EnrollSuccess { request: Some(echo), ..success() });
            let checked = check_enroll_response(Some(returned), ADDRESS, "agent", &signed("a"));
            assert_eq!(checked.is_ok(), is_accepted, "{checked:?}");
        }

        let replacing = EnrollRequest { replace_signing_keys: true, ..signed("a") };
        for (echo, text) in
            [(signed("a"), NO_REPLACEMENT), (request(), NO_REPLACEMENT), (signed("b"), OTHER_REQUEST)]
        {
            let returned = Success(EnrollSuccess { request: Some(echo), ..success() });
            let error = check_enroll_response(Some(returned), ADDRESS, "agent", &replacing).unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
        }

        let mut other = success();
        other.request.as_mut().unwrap().fence = 8;
        insta::assert_snapshot!(check_result(Success(other)).unwrap_err(), @"the agent on 192.0.2.7:22 answered wrongly: it enrolled by another request than the one it was sent; is the program at agent a role server?");
        let short = EnrollSuccess { public_key: vec![7; 31], ..success() };
        insta::assert_snapshot!(check_result(Success(short)).unwrap_err(), @"the agent on 192.0.2.7:22 answered wrongly: its public key has 31 bytes and not 32; is the program at agent a role server?");
        let zero = EnrollSuccess { public_key: vec![0; 32], ..success() };
        insta::assert_snapshot!(check_result(Success(zero)).unwrap_err(), @"the agent on 192.0.2.7:22 answered wrongly: its public key is all zero; is the program at agent a role server?");
        insta::assert_snapshot!(check_enroll_response(None, ADDRESS, "agent", &request()).unwrap_err(), @"the agent on 192.0.2.7:22 answered wrongly: it returned neither success nor error; is the program at agent a role server?");
    }

    #[test]
    fn each_agent_error_has_its_message() {
        use enroll_error::Kind;
        let stale = rejection_of(Kind::StaleFence, "stale");
        assert!(matches!(stale, TakeoverError::StaleFence { machine_fence: 9, sent: 7, .. }));
        insta::assert_snapshot!(stale, @"192.0.2.7:22 refused fence 7 because it has seen fence 9: another shepherd works on it with a newer lease, or the database was restored from a backup: then stop every shepherd and declare it with `shepherdctl declare restored`");
        insta::assert_snapshot!(rejection_of(Kind::OtherMachine, "it is machine A."), @"192.0.2.7:22 is enrolled as another machine than 5a0c2c4e-0000-4000-8000-000000000001: it is machine A. Two entries may name one address, another machine may have got the address, or its disk may be a copy of another machine's disk; to give it a new identity, remove its agent's state directory");
        insta::assert_snapshot!(rejection_of(Kind::OtherBmdb, "it is of database B."), @"192.0.2.7:22 belongs to another bare metal database than 5a0c2c4e-0000-4000-8000-00000000000b: it is of database B. Release it there, or remove its agent's state directory if that database is gone");
        insta::assert_snapshot!(rejection_of(Kind::Invalid, "the lane is empty."), @"the agent on 192.0.2.7:22 refused the enrolment as malformed: the lane is empty");
        insta::assert_snapshot!(rejection_of(Kind::Failed, "the state directory\nis locked."), @"the enrolment on 192.0.2.7:22 failed: the state directory is locked");
        let later = EnrollError { kind: 99, message: "a later reason.".to_owned(), current_fence: 0 };
        insta::assert_snapshot!(check_result(enroll_response::Result::Error(later)).unwrap_err(), @"the enrolment on 192.0.2.7:22 failed: a later reason");
    }

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
