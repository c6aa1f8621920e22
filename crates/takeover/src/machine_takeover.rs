//! The takeover of one machine: connect, probe, upload, enrol.
//!
//! It begins at a closed port and ends with a trusted key. Everything may stop at any point and be started again from
//! the beginning: the probe sees what is there already, the upload is whole or absent, and enrolment is idempotent and
//! carries the fence, which the machine compares.

use prost::Message;
use tokio::time::Instant;

use crate::agent_binary::AgentBinary;
use crate::enroll_response::check_enroll_response;
use crate::exec::CommandOutput;
use crate::host_keys::HostKeyExpectation;
use crate::program_path::{PlaceFacts, ProgramPath, TargetPath, UnsafePath, choose_program_path};
use crate::scripts::{ENROLL_SCRIPT, PROBE_SCRIPT, UPLOAD_SCRIPT};
use crate::session::{SshSession, SshSettings, SshTarget};
use crate::steps::{ProbeReport, StepError, parse_enroll, parse_probe, parse_upload, unsafe_path_reason};
use crate::takeover_error::TakeoverError;
use model::host_key::HostKey;
use model::program_versions::version::ProgramVersion;
use model::remote_step::RemoteStep;
use proto::agent::v1::{EnrollRequest, EnrollSuccess};

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
