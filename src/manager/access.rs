//! Getting at a machine: what the initializer and the recoverer share.
//!
//! Turns facts into an SSH target, an expectation of its host key and an
//! enrolment request that carries the fence of the work; and what came of it
//! into changes of facts.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::Mutex;
use tokio::time::Instant;
use uuid::Uuid;

use crate::bmdb::change::{FactChange, HostKeySource, NewAgent};
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::Snapshot;
use crate::bmdb::work::Work;
use crate::manager::control_loop::HandlerError;
use crate::manager::failpoint;
use crate::model::host_key::PinnedHostKey;
use crate::model::needs_human::Obstacle;
use crate::model::newer_fence::NewerFence;
use crate::model::time::unix_milliseconds;
use crate::proto::agent::v1::{EnrollRequest, EnrollSuccess, Supervision};
use crate::takeover::agent_binary::{AgentBinary, AgentBinaryError};
use crate::takeover::error::SshError;
use crate::takeover::exec::RunOutcome;
use crate::takeover::host_keys::HostKeyExpectation;
use crate::takeover::session::{SshSession, SshSettings, SshTarget};
use crate::takeover::take_over::{Step, TakenOver, TakeoverError, take_over};

/// How machines are reached, and what is put on them.
pub struct Access {
    /// Key, password and limits.
    pub ssh: SshSettings,
    /// User for machines whose provider names none.
    pub user: String,
    /// The role server to put there.
    pub agent: AgentFile,
    /// Where it goes on the machine.
    pub agent_path: String,
    /// `host:port` of the callback servers.
    pub endpoints: Vec<String>,
    /// What their certificates chain to, DER, as it is at this moment.
    pub ca_certificates: Box<dyn Fn() -> Vec<Vec<u8>> + Send + Sync>,
    /// Which BMDB the machine belongs to from then on.
    pub bmdb_id: Uuid,
}

/// The agent program on this host; read again when the file changes.
pub struct AgentFile {
    path: PathBuf,
    loaded: Mutex<Option<(SystemTime, u64, Arc<AgentBinary>)>>,
}

impl AgentFile {
    /// The program at `path`, not read yet.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path, loaded: Mutex::new(None) }
    }

    /// The program as it is now. All uploads of one version share one copy.
    pub async fn load(&self) -> Result<Arc<AgentBinary>, AgentBinaryError> {
        let stamp = tokio::fs::metadata(&self.path)
            .await
            .ok()
            .and_then(|metadata| Some((metadata.modified().ok()?, metadata.len())));
        // Held while it is read: else each of the workers that start together reads a copy of its own.
        let mut loaded = self.loaded.lock().await;
        if let Some((modified, length)) = stamp
            && let Some((known, known_length, binary)) = &*loaded
            && (*known, *known_length) == (modified, length)
        {
            return Ok(binary.clone());
        }
        let binary = Arc::new(AgentBinary::load(&self.path).await?);
        if let Some((modified, length)) = stamp {
            *loaded = Some((modified, length, binary.clone()));
        }
        Ok(binary)
    }
}

/// Why a machine was not reached, or not taken over.
#[derive(Debug)]
pub struct AccessError {
    /// For people.
    pub sentence: String,
    /// What stands in the way, where the machine answered and waiting alone will not help.
    pub obstacle: Option<Obstacle>,
    /// What was learnt all the same.
    pub changes: Vec<FactChange>,
}

impl AccessError {
    /// A failure that may pass.
    pub fn new(sentence: impl Into<String>) -> Self {
        Self { sentence: sentence.into(), obstacle: None, changes: Vec::new() }
    }

    /// What was learnt, with the call for a person where the obstacle wants one at its first sight.
    #[must_use]
    pub fn learnt(&self) -> Vec<FactChange> {
        let called = self.obstacle.clone().filter(Obstacle::calls_at_once);
        let call = called.map(|obstacle| FactChange::NeedsHuman { obstacle, reason: self.sentence.clone() });
        self.changes.iter().cloned().chain(call).collect()
    }
}

impl From<BmdbError> for AccessError {
    fn from(error: BmdbError) -> Self {
        Self::new(error.to_string())
    }
}

/// For a loop that tries again by itself as long as that may help.
impl From<AccessError> for HandlerError {
    fn from(error: AccessError) -> Self {
        let changes = error.learnt();
        Self::new(error.sentence).with_changes(changes)
    }
}

impl Access {
    /// Where the machine answers SSH, by what its provider says.
    pub fn target(&self, snapshot: &Snapshot) -> Result<SshTarget, AccessError> {
        let provided = snapshot
            .facts
            .provided
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

    /// Longest time an enrolment may take: every limit on its way, one after the other.
    fn time_limit(&self) -> Duration {
        let SshSettings { connect_timeout, login_timeout, exec_timeout, .. } = self.ssh;
        // A host that has no key of the pinned kind is asked a second time, for what it has instead.
        (connect_timeout + login_timeout) * 2 + login_timeout + exec_timeout * 3
    }

    /// Puts the agent on the machine, or starts it anew there. Returns the facts that follow.
    pub async fn enroll(&self, work: &Work, snapshot: &Snapshot) -> Result<Vec<FactChange>, AccessError> {
        may_order(work).await?;
        let target = self.target(snapshot)?;
        let pinned = work.bmdb().host_key(work.machine()).await?;
        let agent = self.agent.load().await.map_err(|error| AccessError::new(error.to_string()))?;
        // Who was updated is not set back by a takeover.
        let agent = agent.keeping(work.bmdb().updated_to(work.machine()).await?);
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
        };
        // The machine refuses an older fence, so a step that was begun may outlast the lease.
        let deadline = Instant::now() + self.time_limit();
        let taken = take_over(
            &self.ssh,
            &target,
            &expectation(pinned.as_ref()),
            &agent,
            &self.agent_path,
            &request,
            deadline,
            |step| {
                tracing::debug!(?step, "takeover");
                match step {
                    Step::Connect | Step::Probe => {}
                    Step::Upload { .. } => failpoint::pass("takeover", "probed"),
                    Step::Enroll => failpoint::pass("takeover", "uploaded"),
                }
                work.may_call_out(Duration::ZERO).map(|_| ()).map_err(|error| error.to_string())
            },
        )
        .await;
        match taken {
            Ok(taken) => Ok(changes_of(taken, pinned.as_ref(), work.fence())),
            Err(error) => {
                if let TakeoverError::StaleFence { known, .. } = &error
                    && let Err(untold) = work.tell_refused_fence(*known).await
                {
                    tracing::warn!(%untold, "cannot write down that the machine knows a newer fence");
                }
                Err(refused(&error))
            }
        }
    }

    /// Runs an argument vector on the machine. That its end is not seen, as under a reboot, is no failure.
    pub async fn run(
        &self,
        work: &Work,
        snapshot: &Snapshot,
        argv: &[String],
    ) -> Result<String, AccessError> {
        may_order(work).await?;
        let target = self.target(snapshot)?;
        let expectation = expectation(work.bmdb().host_key(work.machine()).await?.as_ref());
        let deadline = Instant::now() + work.may_call_out(self.time_limit())?;
        let session = SshSession::connect(&self.ssh, &target, &expectation, deadline)
            .await
            .map_err(|error| refused(&error.into()))?;
        // Again: who was frozen while it logged in may have lost the machine, and what an argument vector does, no
        // fence on the machine refuses.
        work.may_call_out(Duration::ZERO)?;
        let outcome = session
            .run_argv("asking for a reboot", argv)
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

/// Whether anything may be ordered of the machine by who holds this work's fence.
async fn may_order(work: &Work) -> Result<(), AccessError> {
    work.newer_fence().await?.map_or(Ok(()), |newer| Err(held_back(&newer)))
}

/// The machine would refuse us, and it must: for as long as that lasts a person is waited for.
fn held_back(newer: &NewerFence) -> AccessError {
    AccessError { obstacle: Some(Obstacle::StaleFence), ..AccessError::new(newer.sentence()) }
}

fn expectation(pinned: Option<&PinnedHostKey>) -> HostKeyExpectation {
    match pinned {
        Some(pinned) => HostKeyExpectation::Pinned(vec![pinned.key.clone()]),
        None => HostKeyExpectation::PinOnFirstUse,
    }
}

fn changes_of(taken: TakenOver, pinned: Option<&PinnedHostKey>, fence: i64) -> Vec<FactChange> {
    let mut changes = Vec::new();
    match pinned {
        None => changes.push(FactChange::HostKeyPinned {
            algorithm: taken.host_key.algorithm,
            public_key: taken.host_key.key,
            source: HostKeySource::FirstUse,
        }),
        // Else `why` would advise for ever to allow a key that a stranger once showed.
        Some(pinned) if pinned.refused.is_some() => changes.push(FactChange::HostKeyProven),
        Some(_) => {}
    }
    for warning in &taken.success.warnings {
        tracing::warn!(warning, "the machine enrolled with a warning");
    }
    changes.push(FactChange::AgentStarted(new_agent(taken.success, fence)));
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

/// A failure, with what stands in the way where that can be told.
fn refused(error: &TakeoverError) -> AccessError {
    let changes = match error {
        TakeoverError::HostKeyChanged(changed) => vec![FactChange::HostKeyRefused {
            algorithm: changed.offered.algorithm.clone(),
            public_key: changed.offered.key.clone(),
        }],
        _ => Vec::new(),
    };
    AccessError { sentence: error.to_string(), obstacle: obstacle(error), changes }
}

/// What a failure says of the way to the machine. Who does not answer may be dead, so nothing is said of
/// that: the ladder is for the dead.
fn obstacle(error: &TakeoverError) -> Option<Obstacle> {
    match error {
        TakeoverError::HostKeyChanged(_) => Some(Obstacle::HostKeyChanged),
        TakeoverError::OtherMachine { .. } => Some(Obstacle::OtherMachine),
        TakeoverError::OtherBmdb { .. } => Some(Obstacle::OtherBmdb),
        TakeoverError::StaleFence { .. } => Some(Obstacle::StaleFence),
        TakeoverError::Ssh(SshError::AuthenticationRefused { .. }) => Some(Obstacle::LoginRefused),
        TakeoverError::Ssh(SshError::RsaOnly { .. } | SshError::ExecRefused { .. })
        | TakeoverError::AgentPath(_)
        | TakeoverError::NotLinux { .. }
        | TakeoverError::WrongArchitecture { .. }
        | TakeoverError::NoDigestProgram { .. }
        | TakeoverError::Invalid { .. } => Some(Obstacle::Unfit),
        TakeoverError::Stopped { .. }
        | TakeoverError::Ssh(_)
        | TakeoverError::Remote { .. }
        | TakeoverError::BadAnswer { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::host_key::HostKey;
    use crate::model::time::Timestamp;

    #[tokio::test]
    async fn workers_that_start_together_share_one_copy_of_the_agent() {
        // The test's own program is an executable of this architecture.
        let file = AgentFile::new(std::env::current_exe().unwrap());
        let copies = futures::future::join_all((0..4).map(|_| file.load())).await;
        let copies: Vec<_> = copies.into_iter().map(Result::unwrap).collect();
        assert!(copies.iter().all(|copy| Arc::ptr_eq(copy, &copies[0])));
    }

    #[test]
    fn only_what_answers_and_refuses_us_is_an_obstacle() {
        let address = || "192.0.2.7:22".to_owned();
        let login = SshError::AuthenticationRefused {
            address: address(),
            user: "root".to_owned(),
            tried: vec!["publickey"],
            accepted: Vec::new(),
            public_key: "ssh-ed25519 AAAA".to_owned(),
        };
        let hung = SshError::Timeout {
            address: address(),
            doing: "waiting for its greeting",
            limit: std::time::Duration::from_secs(5),
            flag: "--agent_ssh_greeting_timeout",
        };
        let full = TakeoverError::Remote { address: address(), step: "upload", reason: "no space".into() };
        let other = TakeoverError::OtherMachine {
            address: address(),
            machine_id: "1".to_owned(),
            message: "it is 2".to_owned(),
        };
        for (name, error, met, called) in [
            ("our key is refused", login.into(), Some(Obstacle::LoginRefused), false),
            ("it hangs", hung.into(), None, false),
            ("nothing listens", SshError::Refused { address: address() }.into(), None, false),
            ("its disk is full", full, None, false),
            ("RSA alone", SshError::RsaOnly { address: address() }.into(), Some(Obstacle::Unfit), false),
            ("another machine", other, Some(Obstacle::OtherMachine), true),
        ] {
            let error = refused(&error);
            assert_eq!(error.obstacle, met, "{name}");
            let calls = |change: &FactChange| matches!(change, FactChange::NeedsHuman { .. });
            assert_eq!(error.learnt().iter().any(calls), called, "{name}");
        }
    }

    fn key(byte: u8) -> HostKey {
        HostKey { algorithm: "ssh-ed25519".to_owned(), key: vec![byte; 51] }
    }

    #[test]
    fn login_settles_what_is_believed_of_the_host_key() {
        let taken = || TakenOver { host_key: key(1), uploaded: false, success: EnrollSuccess::default() };
        let at = Timestamp::from_timestamp(1_800_000_000, 0).unwrap();
        let pinned = |refused: Option<HostKey>| PinnedHostKey {
            key: key(1),
            source: "first-use".to_owned(),
            pinned_at: at,
            refused: refused.map(|key| (key, at)),
        };
        let first_use = FactChange::HostKeyPinned {
            algorithm: "ssh-ed25519".to_owned(),
            public_key: key(1).key,
            source: HostKeySource::FirstUse,
        };
        for (name, known, expected) in [
            ("first use", None, Some(first_use)),
            ("the key that is pinned", Some(pinned(None)), None),
            ("that key again, after another", Some(pinned(Some(key(2)))), Some(FactChange::HostKeyProven)),
        ] {
            let changes = changes_of(taken(), known.as_ref(), 7);
            let about_key: Vec<_> =
                changes.into_iter().filter(|change| !matches!(change, FactChange::AgentStarted(_))).collect();
            assert_eq!(about_key, Vec::from_iter(expected), "{name}");
        }
    }
}
