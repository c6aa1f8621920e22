//! Reaches a machine over SSH: enrols the agent, runs a command, classifies failures.
//!
//! The initializer, the recoverer and the power controller share it. It turns facts into an SSH target, an expected
//! host key and an enrolment request with the fence of the work. It turns the result into changes of facts.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use secrecy::SecretString;
use tokio::time::Instant;
use uuid::Uuid;

use crate::bmdb::connection::error::BmdbError;
use crate::bmdb::engine::fact_change::key_replacement::KeyReplacementChange;
use crate::bmdb::engine::fact_change::{FactChange, HostKeySource, NewAgent};
use crate::bmdb::engine::facts::MachineSnapshot;
use crate::bmdb::engine::work::Work;
use crate::manager::agent_file::{AgentFile, AgentFileError};
use crate::manager::control_loop::HandlerError;
use crate::manager::failpoint;
use crate::model::host_key::PinnedHostKey;
use crate::model::needs_human::Obstacle;
use crate::model::process::Process;
use crate::model::program_versions::{Program, find_faults};
use crate::model::signed_artefact::key_replacement::{KeyReplacement, PinnedKeyAction, decide_pinned_keys};
use crate::model::signed_artefact::signing_configuration::SigningConfiguration;
use crate::model::signed_artefact::signing_trust::KeyRotation;
use crate::model::time::unix_milliseconds;
use crate::model::unknown_fence::UnknownFence;
use crate::proto::agent::v1::{EnrollRequest, EnrollSuccess, Supervision};
use crate::takeover::agent_binary::AgentBinary;
use crate::takeover::exec::RunOutcome;
use crate::takeover::host_keys::HostKeyExpectation;
use crate::takeover::machine_takeover::{TakeoverResult, TakeoverStep, take_over_machine};
use crate::takeover::program_path::TargetPath;
use crate::takeover::session::{LoginMethod, SshSession, SshSettings, SshTarget};
use crate::takeover::ssh_error::SshError;
use crate::takeover::takeover_error::TakeoverError;

/// How machines are reached, and what is installed on them.
pub struct MachineAccess {
    /// SSH key and time limits.
    pub ssh: SshSettings,
    /// Passwords of the machines that log in by one, by the name of their provider.
    pub passwords: HashMap<String, SecretString>,
    /// SSH user for machines of a provider that names none.
    pub user: String,
    /// The role server to install.
    pub agent_file: AgentFile,
    /// Where the role server goes on the machine.
    pub agent_path: TargetPath,
    /// `host:port` of each callback server.
    pub endpoints: Vec<String>,
    /// CA certificates of the callback servers at this moment, DER.
    pub ca_certificates: Box<dyn Fn() -> Vec<Vec<u8>> + Send + Sync>,
    /// Keys that releases must be signed with, which the machine pins.
    pub signing: Arc<SigningConfiguration>,
    /// The BMDB that the machine belongs to after its enrolment.
    pub bmdb_id: Uuid,
}

/// Why a machine was not reached or not taken over.
#[derive(Debug)]
pub struct AccessError {
    /// The failure as a sentence for people.
    pub message: String,
    /// What prevents access, if the machine answered and waiting alone will not help.
    pub obstacle: Option<Obstacle>,
    /// Facts that were established before the failure.
    pub changes: Vec<FactChange>,
}

impl AccessError {
    /// A failure that may pass by itself.
    pub fn new(sentence: impl Into<String>) -> Self {
        Self { message: sentence.into(), obstacle: None, changes: Vec::new() }
    }

    /// The established facts, and an escalation to a person if the obstacle needs one at its first occurrence.
    #[must_use]
    pub fn fact_changes(&self) -> Vec<FactChange> {
        let called = self.obstacle.clone().filter(Obstacle::needs_human_at_once);
        let call = called.map(|obstacle| FactChange::NeedsHuman { obstacle, reason: self.message.clone() });
        self.changes.iter().cloned().chain(call).collect()
    }
}

impl From<BmdbError> for AccessError {
    fn from(error: BmdbError) -> Self {
        Self::new(error.to_string())
    }
}

/// For a loop that retries by itself as long as that may help.
impl From<AccessError> for HandlerError {
    fn from(error: AccessError) -> Self {
        let changes = error.fact_changes();
        Self::new(error.message).with_changes(changes)
    }
}

impl MachineAccess {
    /// The SSH target of a machine, by what its provider reports.
    pub fn ssh_target(&self, snapshot: &MachineSnapshot) -> Result<SshTarget, AccessError> {
        let provided = snapshot
            .facts
            .provider_record
            .as_ref()
            .ok_or_else(|| AccessError::new("no provider has handed the machine over"))?;
        let host = provided
            .address
            .clone()
            .ok_or_else(|| AccessError::new("its provider has given no address for it"))?;
        Ok(SshTarget {
            host,
            port: provided.ssh_port.unwrap_or(22),
            user: provided.ssh_user.clone().unwrap_or_else(|| self.user.clone()),
        })
    }

    /// The SSH settings of a machine: those of all, with the login method of its provider.
    fn ssh_settings(&self, snapshot: &MachineSnapshot) -> SshSettings {
        let provider = snapshot.facts.provider_record.as_ref().map(|record| record.provider.as_str());
        let password = provider.and_then(|name| self.passwords.get(name));
        let login = password.map_or(LoginMethod::Key, |password| LoginMethod::Password(password.clone()));
        SshSettings { login, ..self.ssh.clone() }
    }

    /// Longest time that an enrolment may take: the sum of all its time limits.
    fn enroll_time_limit(&self) -> Duration {
        let SshSettings { connect_timeout, login_timeout, exec_timeout, .. } = self.ssh;
        // If the host has no key of the pinned kind, a second connection fetches the key that it has instead.
        (connect_timeout + login_timeout) * 2 + login_timeout + exec_timeout * 3
    }

    /// Loads the agent program, by the present policy.
    pub async fn load_agent(&self, work: &Work) -> Result<Arc<AgentBinary>, AgentFileError> {
        let (_, policy) = work.bmdb().policy();
        self.agent_file.load(policy.allow_unsigned_releases).await
    }

    /// Installs the agent on the machine, or restarts it there. Returns the facts that follow.
    pub async fn enroll_agent(
        &self,
        work: &Work,
        snapshot: &MachineSnapshot,
    ) -> Result<Vec<FactChange>, AccessError> {
        check_fence(work).await?;
        let target = self.ssh_target(snapshot)?;
        let pinned = work.bmdb().host_key(work.machine()).await?;
        let agent = self.load_agent(work).await.map_err(|error| AccessError::new(error.to_string()))?;
        // A takeover does not replace an updated role server by an older one.
        let agent = agent.accepting_release(work.bmdb().read_updated_release(work.machine()).await?);
        let replacement = self.decide_replacement(work, snapshot)?;
        let (_, policy) = work.bmdb().policy();
        let request = EnrollRequest {
            machine_id: work.machine().to_string(),
            endpoints: self.endpoints.clone(),
            ca_certificates: (self.ca_certificates)(),
            lane: work.process().lane().as_str().to_owned(),
            fence: work.fence(),
            session_id: work.session().id().to_string(),
            bmdb_id: self.bmdb_id.to_string(),
            heartbeat_interval_seconds: u32::try_from(policy.heartbeat_interval.0.as_secs()).unwrap_or(0),
            shepherd_time_ms: unix_milliseconds(SystemTime::now()),
            signing_keys: self.signing.key_lines(),
            key_rotations: self.signing.rotations().iter().map(KeyRotation::to_wire).collect(),
            replace_signing_keys: replacement.is_some(),
            require_signed_declarations: self.signing.requires_signed_declarations(),
        };
        // The machine rejects an older fence, so a step that was started may outlast the lease.
        let deadline = Instant::now() + self.enroll_time_limit();
        let taken = take_over_machine(
            &self.ssh_settings(snapshot),
            &target,
            &host_key_expectation(pinned.as_ref()),
            &agent,
            self.agent_path.clone(),
            &request,
            deadline,
            |step| {
                tracing::debug!(?step, "takeover");
                match step {
                    TakeoverStep::Connect | TakeoverStep::Probe => {}
                    TakeoverStep::Upload { .. } => failpoint::hit("takeover", "probed"),
                    TakeoverStep::Enroll => failpoint::hit("takeover", "uploaded"),
                }
                work.outward_call_limit(Duration::ZERO).map(|_| ()).map_err(|error| error.to_string())
            },
        )
        .await;
        match taken {
            Ok(taken) => {
                let mut changes = takeover_changes(taken, pinned.as_ref(), work.fence());
                changes.extend(replacement.map(KeyReplacementChange::Used).map(FactChange::KeyReplacement));
                Ok(changes)
            }
            Err(error) => {
                if let TakeoverError::StaleFence { machine_fence: known, .. } = &error
                    && let Err(write_error) = work.report_rejected_fence(*known).await
                {
                    tracing::warn!(error = %write_error, "cannot record that the machine knows a newer fence");
                }
                Err(takeover_access_error(&error))
            }
        }
    }

    /// The order by which this takeover replaces the keys that the machine has pinned. A takeover that has no other purpose
    /// fails if the order is for other keys: it would be repeated for ever.
    fn decide_replacement(
        &self,
        work: &Work,
        snapshot: &MachineSnapshot,
    ) -> Result<Option<KeyReplacement>, AccessError> {
        let (facts, order) = (&snapshot.facts, snapshot.facts.key_replacement.as_ref());
        match decide_pinned_keys(order, self.signing.keys(), snapshot.now) {
            PinnedKeyAction::Replace => Ok(order.cloned()),
            PinnedKeyAction::OtherKeys(text)
                if work.process() == Process::AgentStart && facts.agent_started.is_some() =>
            {
                Err(AccessError::new(text))
            }
            PinnedKeyAction::Keep | PinnedKeyAction::OtherKeys(_) => Ok(None),
        }
    }

    /// Runs an argument vector on the machine. A missing exit status, as under a reboot, is no failure.
    pub async fn run_command(
        &self,
        work: &Work,
        snapshot: &MachineSnapshot,
        argv: &[String],
    ) -> Result<String, AccessError> {
        check_fence(work).await?;
        let target = self.ssh_target(snapshot)?;
        let expectation = host_key_expectation(work.bmdb().host_key(work.machine()).await?.as_ref());
        let deadline = Instant::now() + work.outward_call_limit(self.enroll_time_limit())?;
        let session = SshSession::connect(&self.ssh_settings(snapshot), &target, &expectation, deadline)
            .await
            .map_err(|error| takeover_access_error(&error.into()))?;
        // Checked again: a shepherd that was frozen during the login may have lost the machine, and no fence on the
        // machine rejects the effects of an argument vector.
        work.outward_call_limit(Duration::ZERO)?;
        let outcome = session
            .run_argv("ordering a reboot", argv)
            .await
            .map_err(|error| AccessError::new(error.to_string()))?;
        match outcome {
            RunOutcome::Finished(output) if output.success() => Ok("the command succeeded".to_owned()),
            RunOutcome::Finished(output) => Err(AccessError::new(format!(
                "{} failed on {}: {}",
                argv.join(" "),
                target.address(),
                output.summary()
            ))),
            RunOutcome::Unknown(error) => Ok(format!("it was started, and its end was not seen: {error}")),
        }
    }
}

/// Checks that no fence newer than this work's is known on the machine.
async fn check_fence(work: &Work) -> Result<(), AccessError> {
    work.unknown_fence().await?.map_or(Ok(()), |newer| Err(stale_fence_error(&newer)))
}

/// The machine would reject this BMDB, and rightly so. It needs a person as long as that lasts.
fn stale_fence_error(newer: &UnknownFence) -> AccessError {
    AccessError { obstacle: Some(Obstacle::StaleFence), ..AccessError::new(newer.describe()) }
}

fn host_key_expectation(pinned: Option<&PinnedHostKey>) -> HostKeyExpectation {
    match pinned {
        Some(pinned) => HostKeyExpectation::Pinned(vec![pinned.key.clone()]),
        None => HostKeyExpectation::PinOnFirstUse,
    }
}

fn takeover_changes(taken: TakeoverResult, pinned: Option<&PinnedHostKey>, fence: i64) -> Vec<FactChange> {
    let mut changes = Vec::new();
    match pinned {
        None => changes.push(FactChange::HostKeyPinned {
            algorithm: taken.host_key.algorithm,
            public_key: taken.host_key.key,
            source: HostKeySource::FirstUse,
        }),
        // Otherwise `why` would advise for ever to allow a key that a stranger once showed.
        Some(pinned) if pinned.rejected.is_some() => changes.push(FactChange::HostKeyVerified),
        Some(_) => {}
    }
    for finding in taken.openssh.into_iter().flat_map(|version| find_faults(Program::OpenSsh, version)) {
        if finding.is_certain {
            tracing::warn!(fault = finding.fault.name, "the machine was taken over, and its {finding}");
        } else {
            tracing::info!(fault = finding.fault.name, "the machine was taken over, and its {finding}");
        }
    }
    for warning in &taken.success.warnings {
        tracing::warn!(warning, "the machine enrolled with a warning");
    }
    changes.push(FactChange::AgentStarted(new_agent(taken.success, fence)));
    changes.push(FactChange::AgentPlaced(taken.program.describe()));
    changes
}

fn new_agent(success: EnrollSuccess, fence: i64) -> NewAgent {
    let supervision = match success.supervision() {
        Supervision::Systemd => "systemd",
        Supervision::Detached => "detached",
        Supervision::External => "external",
        Supervision::Unspecified => "unknown",
    };
    NewAgent {
        public_key: success.public_key,
        boot_id: (!success.boot_id.is_empty()).then_some(success.boot_id),
        version: success.agent_version,
        supervision: supervision.to_owned(),
        fence,
    }
}

/// Turns a failed takeover into an access error, with the obstacle if the failure shows one.
fn takeover_access_error(error: &TakeoverError) -> AccessError {
    let changes = match error {
        TakeoverError::HostKeyChanged(changed) => vec![FactChange::HostKeyRefused {
            algorithm: changed.offered.algorithm.clone(),
            public_key: changed.offered.key.clone(),
        }],
        _ => Vec::new(),
    };
    AccessError { message: error.to_string(), obstacle: classify_obstacle(error), changes }
}

/// The obstacle that a failure shows. A machine that does not answer may be dead, and then it is a case for the
/// recovery ladder and has no obstacle.
fn classify_obstacle(error: &TakeoverError) -> Option<Obstacle> {
    match error {
        TakeoverError::HostKeyChanged(_) => Some(Obstacle::HostKeyChanged),
        TakeoverError::OtherMachine { .. } => Some(Obstacle::OtherMachine),
        TakeoverError::OtherBmdb { .. } => Some(Obstacle::OtherBmdb),
        TakeoverError::StaleFence { .. } => Some(Obstacle::StaleFence),
        TakeoverError::Ssh(
            SshError::AuthenticationRejected { .. }
            | SshError::SecondFactorRequired { .. }
            | SshError::UnknownHostKey { .. },
        ) => Some(Obstacle::LoginRefused),
        TakeoverError::Ssh(SshError::RsaOnly { .. } | SshError::ExecRejected { .. })
        | TakeoverError::InvalidAgentPath(_)
        | TakeoverError::NotLinux { .. }
        | TakeoverError::WrongArchitecture { .. }
        | TakeoverError::NoDigestProgram { .. }
        | TakeoverError::UnsafeAgentPath { .. }
        | TakeoverError::MalformedRequest { .. } => Some(Obstacle::Unfit),
        TakeoverError::NoLongerPermitted { .. }
        | TakeoverError::Ssh(_)
        | TakeoverError::StepFailed { .. }
        | TakeoverError::InvalidResponse { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::agent_file::AgentTrust;
    use crate::model::host_key::HostKey;
    use crate::model::time::Timestamp;
    use crate::takeover::program_path::ProgramPath;

    #[tokio::test]
    async fn workers_that_start_together_share_one_copy_of_the_agent() {
        // The test's own program is an executable of this architecture.
        let file = AgentFile::new(std::env::current_exe().unwrap(), AgentTrust::Unchecked);
        let copies = futures::future::join_all((0..4).map(|_| file.load(true))).await;
        let copies: Vec<_> = copies.into_iter().map(Result::unwrap).collect();
        assert!(copies.iter().all(|copy| Arc::ptr_eq(copy, &copies[0])));
    }

    #[test]
    fn only_a_rejecting_machine_is_an_obstacle() {
        let address = || "192.0.2.7:22".to_owned();
        let login = SshError::AuthenticationRejected {
            address: address(),
            user: "root".into(),
            tried: vec!["publickey"],
            accepted: Vec::new(),
            message: None,
            public_key: "ssh-ed25519 AAAA".into(),
        };
        let half = SshError::SecondFactorRequired {
            address: address().into(),
            user: "root".into(),
            accepted: vec!["publickey"],
            refused: Box::new([]),
            required: vec!["keyboard-interactive".to_owned()],
            message: None,
            has_password: false,
        };
        let hung = SshError::Timeout {
            address: address(),
            operation: "waiting for its greeting",
            limit: std::time::Duration::from_secs(5),
            flag: "--agent_ssh_greeting_timeout",
        };
        let full =
            TakeoverError::StepFailed { address: address(), step: "upload", reason: "no space".into() };
        let other = TakeoverError::OtherMachine {
            address: address(),
            machine_id: "1".to_owned(),
            message: "it is 2".to_owned(),
        };
        for (name, error, met, called) in [
            ("our key is refused", login.into(), Some(Obstacle::LoginRefused), false),
            ("it wants a second factor", half.into(), Some(Obstacle::LoginRefused), false),
            ("it hangs", hung.into(), None, false),
            ("nothing listens", SshError::ConnectionRefused { address: address() }.into(), None, false),
            ("its disk is full", full, None, false),
            ("RSA alone", SshError::RsaOnly { address: address() }.into(), Some(Obstacle::Unfit), false),
            ("another machine", other, Some(Obstacle::OtherMachine), true),
        ] {
            let error = takeover_access_error(&error);
            assert_eq!(error.obstacle, met, "{name}");
            let calls = |change: &FactChange| matches!(change, FactChange::NeedsHuman { .. });
            assert_eq!(error.fact_changes().iter().any(calls), called, "{name}");
        }
    }

    fn key(byte: u8) -> HostKey {
        HostKey { algorithm: "ssh-ed25519".to_owned(), key: vec![byte; 51] }
    }

    #[test]
    fn login_pins_or_confirms_the_host_key() {
        let program = || ProgramPath { path: "p".to_owned(), reason: "it is good".to_owned() };
        let taken = || TakeoverResult {
            host_key: key(1),
            openssh: None,
            uploaded: false,
            program: program(),
            success: EnrollSuccess::default(),
        };
        let at = Timestamp::from_timestamp(1_800_000_000, 0).unwrap();
        let pinned = |refused: Option<HostKey>| PinnedHostKey {
            key: key(1),
            source: "first-use".to_owned(),
            pinned_at: at,
            rejected: refused.map(|key| (key, at)),
        };
        let first_use = FactChange::HostKeyPinned {
            algorithm: "ssh-ed25519".to_owned(),
            public_key: key(1).key,
            source: HostKeySource::FirstUse,
        };
        for (name, known, expected) in [
            ("first use", None, Some(first_use)),
            ("the key that is pinned", Some(pinned(None)), None),
            ("that key again, after another", Some(pinned(Some(key(2)))), Some(FactChange::HostKeyVerified)),
        ] {
            let changes = takeover_changes(taken(), known.as_ref(), 7);
            let about_key: Vec<_> = changes
                .into_iter()
                .filter(|change| !matches!(change, FactChange::AgentStarted(_) | FactChange::AgentPlaced(_)))
                .collect();
            assert_eq!(about_key, Vec::from_iter(expected), "{name}");
        }
    }
}
