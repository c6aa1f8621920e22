//! What the BMDB knows of one machine at one moment.
//!
//! One optional part per tag: an absent row means "not so". The snapshot is
//! read in one statement after the machine's due rows are locked, so all parts
//! belong to the same moment.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::model::backoff::BackoffFact;
use crate::model::ids::{IntentId, MachineId};
use crate::model::needs_human::Obstacle;
use crate::model::policy::Disturbance;
use crate::model::power_order::Switch;
use crate::model::priority::Priority;
use crate::model::process::Process;
use crate::model::provider_status::ProviderStatus;
use crate::model::time::Timestamp;

/// Everything known of a machine that any decision looks at.
#[derive(Clone, Debug, PartialEq)]
pub struct MachineFacts {
    /// Which machine.
    pub machine: MachineId,
    /// When the BMDB first heard of it.
    pub created_at: Timestamp,
    /// What its provider said last.
    pub provided: Option<Provided>,
    /// The agent that was put on it.
    pub agent_started: Option<AgentStarted>,
    /// The last report of that agent.
    pub heartbeat: Option<Heartbeat>,
    /// An operating system asked for.
    pub installation_request: Option<InstallationRequest>,
    /// What became of such a request.
    pub installation_report: Option<InstallationReport>,
    /// An operator's stop.
    pub hold: Option<Hold>,
    /// Left alone because provider and BMDB disagree.
    pub quarantine: Option<Quarantine>,
    /// Left alone because only a person can help.
    pub needs_human: Option<NeedsHuman>,
    /// A recovery ladder being climbed.
    pub recovery: Option<Recovery>,
    /// On its way out, or out.
    pub retirement: Option<Retirement>,
    /// What a person ordered of its power, and is not done yet.
    pub power_order: Option<PowerOrder>,
    /// Whether its work comes before or behind that of others, as a person says.
    pub priority: Option<Priority>,
    /// Processes that failed and have not finished since.
    pub backoffs: BTreeMap<Process, BackoffFact>,
    /// Processes put off without having failed.
    pub postponements: BTreeMap<Process, Postponement>,
    /// Since when somebody has listened for heartbeats without a gap; `None` when nobody does.
    pub listening_since: Option<Timestamp>,
}

impl MachineFacts {
    /// A machine of which nothing else is known.
    #[must_use]
    pub fn unknown(machine: MachineId, created_at: Timestamp) -> Self {
        Self {
            machine,
            created_at,
            provided: None,
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
            priority: None,
            backoffs: BTreeMap::new(),
            postponements: BTreeMap::new(),
            listening_since: None,
        }
    }

    /// Where an asked-for installation stands.
    #[must_use]
    pub fn installation(&self) -> Installation {
        let report = self.installation_report.as_ref();
        Installation::of(
            self.installation_request.as_ref().map(|request| request.generation),
            report.map(|report| (report.generation, report.succeeded)),
        )
    }

    /// The boot that the machine was last known to be in: that of its last report, or of the
    /// enrolment of its agent where that came later.
    #[must_use]
    pub fn known_boot(&self) -> Option<&str> {
        let started = self.agent_started.as_ref();
        match (&self.heartbeat, started.and_then(|agent| Some((agent.at, agent.boot_id.as_deref()?)))) {
            (Some(heartbeat), Some((at, enrolled))) => {
                Some(if at > heartbeat.at { enrolled } else { &heartbeat.boot_id })
            }
            (Some(heartbeat), None) => Some(&heartbeat.boot_id),
            (None, enrolled) => enrolled.map(|(_, boot)| boot),
        }
    }

    /// Earliest moment at which silence of the agent is evidence, before any limit is added: its
    /// last sign of life, but not from before we listened. `None` when there is no agent to hear,
    /// or nobody listening.
    #[must_use]
    pub fn heard_until(&self) -> Option<Timestamp> {
        let started = self.agent_started.as_ref()?;
        let sign = self.heartbeat.as_ref().map_or(started.at, |heartbeat| heartbeat.at.max(started.at));
        Some(sign.max(self.listening_since?))
    }
}

/// Where an asked-for installation stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Installation {
    /// None was asked for.
    None,
    /// Asked for, no report of that generation yet.
    Pending,
    /// Reported done.
    Succeeded,
    /// Reported failed.
    Failed,
}

impl Installation {
    /// Where it stands by the generation that was asked for, and the one reported with whether it succeeded.
    #[must_use]
    pub fn of(asked: Option<i64>, reported: Option<(i64, bool)>) -> Self {
        match (asked, reported) {
            (None, _) => Self::None,
            (Some(asked), Some((generation, succeeded))) if asked == generation => {
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

/// Tag `machine_provided`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provided {
    /// Name of the provider, as configured.
    pub provider: String,
    /// The provider's name for the machine.
    pub provider_id: String,
    /// The reservation it came from, where the provider has such.
    pub reservation: Option<String>,
    /// Host name or IP literal for SSH; `None` while the provider has given none.
    pub address: Option<String>,
    /// SSH port, when not the usual one.
    pub ssh_port: Option<u16>,
    /// SSH user, when not the configured one.
    pub ssh_user: Option<String>,
    /// Where it stands, in the provider's words.
    pub location: Option<String>,
    /// What the provider says of it.
    pub status: ProviderStatus,
    /// When it became ours.
    pub at: Timestamp,
    /// When the provider was last asked; `None` when never since it became ours.
    pub looked_at: Option<Timestamp>,
    /// Whether the last look changed nothing.
    pub unchanged: bool,
}

/// Tag `machine_agent_started`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentStarted {
    /// When it was put there.
    pub at: Timestamp,
    /// Its Ed25519 key, 32 bytes.
    pub public_key: Vec<u8>,
    /// Boot id of the kernel it was started under.
    pub boot_id: Option<String>,
    /// Fence of the work that enrolled it.
    pub fence: i64,
}

/// Tag `machine_agent_heartbeat`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// When it was stored, by the database's clock.
    pub at: Timestamp,
    /// Boot id of the kernel that sent it.
    pub boot_id: String,
    /// The agent process that sent it.
    pub incarnation: String,
    /// Its number within that boot.
    pub sequence: i64,
}

/// Tag `machine_os_installation_request`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstallationRequest {
    /// Version of the request.
    pub generation: i64,
}

/// Tag `machine_os_installation_report`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InstallationReport {
    /// The request it answers.
    pub generation: i64,
    /// What became of it.
    pub succeeded: bool,
}

/// What an operator's stop covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldScope {
    /// Nothing is done to the machine.
    Everything,
    /// No power action and no reboot.
    Power,
    /// No recovery.
    Recovery,
}

impl HoldScope {
    /// Every scope.
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

/// Tag `machine_hold`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// What it covers. A scope that only a newer release knows counts as everything.
    pub scope: HoldScope,
    /// Why, in the operator's words.
    pub reason: String,
    /// Who asked for it.
    pub by: String,
    /// When it ends by itself.
    pub until: Option<Timestamp>,
}

impl Hold {
    /// Whether it still counts at `now`.
    #[must_use]
    pub fn holds_at(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| until > now)
    }
}

/// Tag `machine_quarantine`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quarantine {
    /// Since when.
    pub since: Timestamp,
    /// What does not agree.
    pub reason: String,
}

/// Tag `machine_needs_human`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NeedsHuman {
    /// Since when.
    pub since: Timestamp,
    /// What was tried and what a person can do.
    pub reason: String,
    /// What to decide by.
    pub obstacle: Obstacle,
    /// Since when its agent has reported again; `None` before its first report since then.
    pub heard_since: Option<Timestamp>,
}

/// Tag `machine_recovery`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// When the ladder was begun.
    pub started_at: Timestamp,
    /// Index into the policy's ladder.
    pub rung: usize,
    /// What was done last, if anything was.
    pub acted: Option<Acted>,
    /// How often this rung was tried.
    pub tries: u32,
    /// When to look again.
    pub next_at: Timestamp,
    /// What happened so far, for people.
    pub note: String,
    /// What stood in our way when the machine answered last; `None` when it did not answer, or nothing did.
    pub obstacle: Option<Obstacle>,
}

/// The last thing a ladder did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acted {
    /// What.
    pub step: Disturbance,
    /// When.
    pub at: Timestamp,
    /// By when the machine must have reported.
    pub deadline: Timestamp,
    /// Boot id that was known before.
    pub boot_id_before: Option<String>,
}

/// Tag `machine_retirement`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retirement {
    /// Why.
    pub reason: String,
    /// Who asked for it.
    pub by: String,
    /// When.
    pub requested_at: Timestamp,
    /// Whether it is to be wiped before it is given back.
    pub wipe: bool,
    /// That it need not be wiped after all.
    pub wipe_waived: Option<Waiver>,
    /// Its provider was told to take it back.
    pub release: Option<ReleaseOrder>,
    /// When it was over.
    pub finished_at: Option<Timestamp>,
    /// How it ended, for people.
    pub outcome: Option<String>,
    /// Since when its provider's list names it although it is over.
    pub listed_since: Option<Timestamp>,
}

impl Retirement {
    /// One that was asked for, and of which nothing else is known.
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

/// That a stage of a retirement may be left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiver {
    /// When that was said.
    pub at: Timestamp,
    /// By whom.
    pub by: String,
}

/// An order to a provider to take a machine back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReleaseOrder {
    /// The intent that was named to the provider.
    pub intent: IntentId,
    /// When it was recorded.
    pub at: Timestamp,
}

/// Tag `machine_power_order`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PowerOrder {
    /// What.
    pub switch: Switch,
    /// Why.
    pub reason: String,
    /// Who ordered it.
    pub by: String,
    /// When.
    pub at: Timestamp,
    /// That it may have been carried out.
    pub begun: Option<Begun>,
}

/// That something outside may have happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begun {
    /// The intent that was recorded before.
    pub intent: IntentId,
    /// When it was.
    pub at: Timestamp,
}

/// Work put off for a reason that is no failure: a brake, a budget, another machine's turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Postponement {
    /// Until when.
    pub until: Timestamp,
    /// Why.
    pub reason: String,
    /// `file:line` of the decision.
    pub decided_at: String,
}

/// Longest wait among a process's backoff and postponement, and which of them it is.
#[must_use]
pub fn wait_of(facts: &MachineFacts, process: Process) -> Option<(Timestamp, String)> {
    let backoff = facts.backoffs.get(&process).map(|fact| {
        let wait = crate::model::time::Span(Duration::from_secs(fact.last_interval.as_secs()));
        (fact.until, format!("failed {}, waits about {wait}: {}", times(fact.failures), fact.cause))
    });
    let postponed = facts.postponements.get(&process).map(|fact| (fact.until, fact.reason.clone()));
    match (backoff, postponed) {
        (Some(backoff), Some(postponed)) => Some(if postponed.0 > backoff.0 { postponed } else { backoff }),
        (one, other) => one.or(other),
    }
}

fn times(count: u32) -> String {
    if count == 1 { "once".to_owned() } else { format!("{count} times in a row") }
}
