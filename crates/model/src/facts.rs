//! Facts: everything the BMDB knows of one machine at one moment.
//!
//! Each tag has one optional part: an absent row means that the fact does not hold. The snapshot is read in one
//! statement after the machine's due rows are locked, so all parts belong to the same moment.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::backoff::BackoffFact;
use crate::ids::{IntentId, MachineId};
use crate::needs_human::Obstacle;
use crate::policy::DisruptionKind;
use crate::power_order::PowerOrderKind;
use crate::priority::Priority;
use crate::process::Process;
use crate::provider_status::ProviderStatus;
use crate::signed_artefact::key_replacement::KeyReplacement;
use crate::time::Timestamp;

/// All facts of a machine that any decision reads.
#[derive(Clone, Debug, PartialEq)]
pub struct MachineFacts {
    /// Identifier of the machine.
    pub machine: MachineId,
    /// When the BMDB first recorded it.
    pub created_at: Timestamp,
    /// What its provider reported last.
    pub provider_record: Option<ProviderRecord>,
    /// The agent that was enrolled on it.
    pub agent_started: Option<AgentStarted>,
    /// The last report of that agent.
    pub heartbeat: Option<HeartbeatFact>,
    /// The requested installation of an operating system.
    pub installation_request: Option<InstallationRequest>,
    /// The agent's report on such a request.
    pub installation_report: Option<InstallationReport>,
    /// An operator's hold on the machine.
    pub hold: Option<Hold>,
    /// Quarantine: left alone because provider and BMDB disagree.
    pub quarantine: Option<Quarantine>,
    /// Obstacle: left alone because only a person can help.
    pub needs_human: Option<NeedsHuman>,
    /// The recovery ladder under way.
    pub recovery: Option<Recovery>,
    /// Its retirement, under way or finished.
    pub retirement: Option<Retirement>,
    /// An operator's power order that is not finished.
    pub power_order: Option<PowerOrder>,
    /// An admin's order to replace its pinned signing keys.
    pub key_replacement: Option<KeyReplacement>,
    /// An operator's priority for its work: before or after that of others.
    pub priority: Option<Priority>,
    /// Processes that failed and have not succeeded since.
    pub backoffs: BTreeMap<Process, BackoffFact>,
    /// Processes postponed without having failed.
    pub postponements: BTreeMap<Process, Postponement>,
    /// Since when a callback server has received heartbeats without a gap; `None` when none runs.
    pub listening_since: Option<Timestamp>,
}

impl MachineFacts {
    /// A machine with no fact but its creation.
    #[must_use]
    pub fn empty(machine: MachineId, created_at: Timestamp) -> Self {
        Self {
            machine,
            created_at,
            provider_record: None,
            agent_started: None,
            heartbeat: None,
            installation_request: None,
            installation_report: None,
            hold: None,
            quarantine: None,
            needs_human: None,
            recovery: None,
            retirement: None,
            power_order: None,
            key_replacement: None,
            priority: None,
            backoffs: BTreeMap::new(),
            postponements: BTreeMap::new(),
            listening_since: None,
        }
    }

    /// State of the requested installation.
    #[must_use]
    pub fn installation(&self) -> InstallationState {
        let report = self.installation_report.as_ref();
        InstallationState::from_generations(
            self.installation_request.as_ref().map(|request| request.generation),
            report.map(|report| (report.generation, report.succeeded)),
        )
    }

    /// The last known boot of the machine: that of its last report, or of the enrolment of its agent if that is later.
    #[must_use]
    pub fn last_boot_id(&self) -> Option<&str> {
        let started = self.agent_started.as_ref();
        match (&self.heartbeat, started.and_then(|agent| Some((agent.started_at, agent.boot_id.as_deref()?))))
        {
            (Some(heartbeat), Some((at, enrolled))) => {
                Some(if at > heartbeat.received_at { enrolled } else { &heartbeat.boot_id })
            }
            (Some(heartbeat), None) => Some(&heartbeat.boot_id),
            (None, enrolled) => enrolled.map(|(_, boot)| boot),
        }
    }

    /// Earliest moment at which silence of the agent is evidence, before any limit is added: its last sign of life, but
    /// not before heartbeats were received at all. `None` when there is no agent, or nothing receives heartbeats.
    #[must_use]
    pub fn last_sign_of_life(&self) -> Option<Timestamp> {
        let started = self.agent_started.as_ref()?;
        let sign = self
            .heartbeat
            .as_ref()
            .map_or(started.started_at, |heartbeat| heartbeat.received_at.max(started.started_at));
        Some(sign.max(self.listening_since?))
    }
}

/// State of a requested installation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstallationState {
    /// No installation was requested.
    None,
    /// Requested; no report of that generation yet.
    Pending,
    /// Reported as succeeded, for the requested generation.
    Succeeded,
    /// Reported as failed, for the requested generation.
    Failed,
}

impl InstallationState {
    /// The state by the requested generation and the reported one. The flag is whether the reported one succeeded.
    #[must_use]
    pub fn from_generations(requested: Option<i64>, reported: Option<(i64, bool)>) -> Self {
        match (requested, reported) {
            (None, _) => Self::None,
            (Some(requested), Some((generation, succeeded))) if requested == generation => {
                if succeeded {
                    Self::Succeeded
                } else {
                    Self::Failed
                }
            }
            (Some(_), _) => Self::Pending,
        }
    }
}

/// Tag `machine_provided`: the machine's record at its provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderRecord {
    /// Name of the provider, as configured.
    pub provider: String,
    /// The provider's name for the machine.
    pub provider_id: String,
    /// The reservation it came from, where the provider has such.
    pub reservation: Option<String>,
    /// Host name or IP literal for SSH; `None` until the provider reports one.
    pub address: Option<String>,
    /// SSH port; `None` for the usual one.
    pub ssh_port: Option<u16>,
    /// SSH user; `None` for the configured one.
    pub ssh_user: Option<String>,
    /// Its location, in the provider's words.
    pub location: Option<String>,
    /// Its status, as the provider reported it.
    pub status: ProviderStatus,
    /// When it became ours.
    pub acquired_at: Timestamp,
    /// When the provider was last queried; `None` if never since it became ours.
    pub polled_at: Option<Timestamp>,
    /// Whether the last query changed nothing.
    pub unchanged: bool,
}

/// Tag `machine_agent_started`: the enrolled agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentStarted {
    /// When the agent was enrolled.
    pub started_at: Timestamp,
    /// Its Ed25519 key, 32 bytes.
    pub public_key: Vec<u8>,
    /// Boot id of the kernel it was started under.
    pub boot_id: Option<String>,
    /// Fence of the work that enrolled it.
    pub fence: i64,
}

/// Tag `machine_agent_heartbeat`: the last report of the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeartbeatFact {
    /// When it was stored, by the database's clock.
    pub received_at: Timestamp,
    /// Boot id of the kernel that sent it.
    pub boot_id: String,
    /// The agent process that sent it.
    pub incarnation: String,
    /// Its sequence number within that boot.
    pub sequence: i64,
}

/// Tag `machine_os_installation_request`: the requested installation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstallationRequest {
    /// Version of the request.
    pub generation: i64,
}

/// Tag `machine_os_installation_report`: the outcome of an installation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstallationReport {
    /// Generation of the request that it reports on.
    pub generation: i64,
    /// Whether the installation succeeded.
    pub succeeded: bool,
}

/// What an operator's hold covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldScope {
    /// Nothing is done to the machine.
    Everything,
    /// No power action and no reboot.
    Power,
    /// Recovery is not started.
    Recovery,
}

impl HoldScope {
    /// Every scope, the widest first.
    pub const ALL: [Self; 3] = [Self::Everything, Self::Power, Self::Recovery];

    /// The name used in the database and by people.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Everything => "everything",
            Self::Power => "power",
            Self::Recovery => "recovery",
        }
    }
}

/// Tag `machine_hold`: an operator's hold on a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// What it covers. A scope that only a newer release knows counts as everything.
    pub scope: HoldScope,
    /// Why, in the operator's words.
    pub reason: String,
    /// The operator who set it.
    pub by: String,
    /// When it ends by itself; `None` for no end.
    pub until: Option<Timestamp>,
}

impl Hold {
    /// Whether it is still in force at `now`.
    #[must_use]
    pub fn is_active_at(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| until > now)
    }
}

/// Tag `machine_quarantine`: provider and BMDB disagree about the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quarantine {
    /// When the quarantine started.
    pub since: Timestamp,
    /// The contradiction, as a sentence.
    pub reason: String,
}

/// Tag `machine_needs_human`: the machine waits for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NeedsHuman {
    /// When it was left to a person.
    pub since: Timestamp,
    /// What was tried and what a person can do.
    pub reason: String,
    /// The kind of obstacle, which decisions go by.
    pub obstacle: Obstacle,
    /// Since when its agent has reported again; `None` before its first report after `since`.
    pub reporting_since: Option<Timestamp>,
}

/// Tag `machine_recovery`: a recovery ladder under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// When the ladder was started.
    pub started_at: Timestamp,
    /// Index into the policy's ladder.
    pub rung: usize,
    /// The last step taken; `None` before the first.
    pub last_action: Option<RecoveryAction>,
    /// How many attempts this rung has had.
    pub attempts: u32,
    /// When to check again.
    pub next_check_at: Timestamp,
    /// What happened so far, for people.
    pub note: String,
    /// The obstacle met when the machine last answered; `None` when it did not answer, or there was no obstacle.
    pub obstacle: Option<Obstacle>,
}

/// The last step that a ladder took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveryAction {
    /// Kind of the step taken.
    pub step: DisruptionKind,
    /// When the step was taken.
    pub acted_at: Timestamp,
    /// Time by which the machine must have reported.
    pub deadline: Timestamp,
    /// Boot id that was last known before the step.
    pub boot_id_before: Option<String>,
}

/// Tag `machine_retirement`: a machine on its way out, or out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retirement {
    /// Why, in the operator's words.
    pub reason: String,
    /// The operator who ordered it.
    pub by: String,
    /// When it was ordered.
    pub requested_at: Timestamp,
    /// Whether the machine must be wiped before it is released.
    pub wipe: bool,
    /// The waiver of the wipe, if there is one.
    pub wipe_waived: Option<Waiver>,
    /// The order to its provider to take it back, once recorded.
    pub release: Option<ReleaseOrder>,
    /// When the retirement finished; `None` while it is under way.
    pub finished_at: Option<Timestamp>,
    /// How it ended, for people.
    pub outcome: Option<String>,
    /// Since when its provider's list names it although the retirement has finished.
    pub listed_since: Option<Timestamp>,
}

impl Retirement {
    /// Whether the machine is still to be wiped: the wipe was ordered, and not waived.
    #[must_use]
    pub const fn is_wipe_pending(&self) -> bool {
        self.wipe && self.wipe_waived.is_none() && self.finished_at.is_none()
    }

    /// A retirement that was just ordered.
    #[must_use]
    pub const fn new(reason: String, by: String, requested_at: Timestamp) -> Self {
        Self {
            reason,
            by,
            requested_at,
            wipe: false,
            wipe_waived: None,
            release: None,
            finished_at: None,
            outcome: None,
            listed_since: None,
        }
    }
}

/// Permission to skip a stage of a retirement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiver {
    /// When the stage was waived.
    pub waived_at: Timestamp,
    /// The operator who waived it.
    pub by: String,
}

/// An order to a provider to take a machine back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReleaseOrder {
    /// The intent that was passed to the provider.
    pub intent: IntentId,
    /// When the intent was recorded.
    pub recorded_at: Timestamp,
}

/// Tag `machine_power_order`: an operator's power order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PowerOrder {
    /// What is ordered: reboot, power on, off or cycle.
    pub kind: PowerOrderKind,
    /// Why, in the operator's words.
    pub reason: String,
    /// The operator who ordered it.
    pub by: String,
    /// When it was ordered.
    pub ordered_at: Timestamp,
    /// The intent recorded for it, once it may have been carried out.
    pub intent: Option<RecordedIntent>,
}

/// An intent: an outward action that may have happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedIntent {
    /// The intent, recorded before the action.
    pub intent: IntentId,
    /// When the intent was recorded.
    pub recorded_at: Timestamp,
}

/// Work postponed for a reason that is no failure: a brake, a budget, another machine's turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Postponement {
    /// When the work may start.
    pub until: Timestamp,
    /// Why it was postponed, as a sentence.
    pub reason: String,
    /// `file:line` of the decision.
    pub decided_at: String,
}

/// The end of the longer wait of a process, its backoff or its postponement, and the reason for that wait.
#[must_use]
pub fn current_wait(facts: &MachineFacts, process: Process) -> Option<(Timestamp, String)> {
    let backoff = facts.backoffs.get(&process).map(|fact| {
        let wait = crate::time::Span(Duration::from_secs(fact.last_interval.as_secs()));
        (fact.until, format!("failed {}, waits about {wait}: {}", format_failures(fact.failures), fact.cause))
    });
    let postponed = facts.postponements.get(&process).map(|fact| (fact.until, fact.reason.clone()));
    match (backoff, postponed) {
        (Some(backoff), Some(postponed)) => Some(if postponed.0 > backoff.0 { postponed } else { backoff }),
        (one, other) => one.or(other),
    }
}

fn format_failures(count: u32) -> String {
    if count == 1 { "once".to_owned() } else { format!("{count} times in a row") }
}
