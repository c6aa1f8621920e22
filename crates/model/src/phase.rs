//! Phase of a machine, derived from its facts.
//!
//! The phase is never stored as truth. `machine_due.phase_index` holds a copy for lists and counts, and
//! `sql/fleet/count_phases.sql` computes the same in SQL. A property test compares the two over random facts.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::facts::MachineFacts;
use crate::policy::Policy;
use crate::process::UnknownName;
use crate::provider_status::ProviderStatus;
use crate::time::{Timestamp, after};

/// The phase of a machine in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// Only its id is known.
    New,
    /// The provider is still making it ready, or has given no address.
    Provisioning,
    /// It is ours and has no agent.
    Provided,
    /// An agent was enrolled and has not reported yet.
    AgentStarting,
    /// Its agent reports in time.
    Ready,
    /// Its agent has an open request to install an operating system. No machine of this release is in this phase.
    Installing,
    /// The requested operating system is installed. No machine of this release is in this phase.
    Installed,
    /// Its agent has not reported for longer than the limit.
    Silent,
    /// A recovery ladder is under way.
    Recovering,
    /// Left alone until a discrepancy is explained.
    Quarantined,
    /// Left alone until a person helps.
    NeedsHuman,
    /// On its way back to its provider.
    Retiring,
    /// Its retirement has finished.
    Retired,
}

impl Phase {
    /// Every phase, in the order of a machine's life.
    pub const ALL: [Self; 13] = [
        Self::New,
        Self::Provisioning,
        Self::Provided,
        Self::AgentStarting,
        Self::Ready,
        Self::Installing,
        Self::Installed,
        Self::Silent,
        Self::Recovering,
        Self::Quarantined,
        Self::NeedsHuman,
        Self::Retiring,
        Self::Retired,
    ];

    /// The phase of this name in any case, as people write it; `None` for any other text.
    #[must_use]
    pub fn find_by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|phase| phase.as_str().eq_ignore_ascii_case(name))
    }

    /// The names of all phases, for a sentence.
    #[must_use]
    pub fn list_names() -> String {
        Self::ALL.map(Self::as_str).join(", ")
    }

    /// The name used in the database, the API and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::New => "New",
            Self::Provisioning => "Provisioning",
            Self::Provided => "Provided",
            Self::AgentStarting => "AgentStarting",
            Self::Ready => "Ready",
            Self::Installing => "Installing",
            Self::Installed => "Installed",
            Self::Silent => "Silent",
            Self::Recovering => "Recovering",
            Self::Quarantined => "Quarantined",
            Self::NeedsHuman => "NeedsHuman",
            Self::Retiring => "Retiring",
            Self::Retired => "Retired",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Phase {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.into_iter().find(|phase| phase.as_str() == name).ok_or_else(|| UnknownName {
            what: "phase",
            name: name.to_owned(),
            known: "New, Provisioning, Provided, AgentStarting, Ready, Installing, Installed, Silent, \
                    Recovering, Quarantined, NeedsHuman, Retiring, Retired",
        })
    }
}

/// When the silence of a machine's agent becomes evidence: its last sign of life, or the moment since which heartbeats
/// are received if that is later, plus the limit that applies. `None` when there is no agent, or nothing receives
/// heartbeats.
#[must_use]
pub fn silence_deadline(facts: &MachineFacts, policy: &Policy) -> Option<Timestamp> {
    let last_contact = facts.last_sign_of_life()?;
    let limit = if facts.heartbeat.is_some() {
        policy.recovery_silence_timeout
    } else {
        policy.recovery_first_heartbeat_timeout
    };
    Some(after(last_contact, limit.0))
}

/// The phase of a machine. Its SQL twin is `sql/fleet/count_phases.sql`: change both.
#[must_use]
pub fn phase_of(facts: &MachineFacts, policy: &Policy, now: Timestamp) -> Phase {
    if let Some(retirement) = &facts.retirement {
        return if retirement.finished_at.is_some() { Phase::Retired } else { Phase::Retiring };
    }
    if facts.quarantine.is_some() {
        return Phase::Quarantined;
    }
    if facts.needs_human.is_some() {
        return Phase::NeedsHuman;
    }
    if facts.recovery.is_some() {
        return Phase::Recovering;
    }
    // Installing is not available in this release, so a request and its report mean nothing.
    let Some(provided) = &facts.provider_record else { return Phase::New };
    if facts.agent_started.is_none() {
        let usable = provided.address.is_some() && provided.status != ProviderStatus::Provisioning;
        return if usable { Phase::Provided } else { Phase::Provisioning };
    }
    if silence_deadline(facts, policy).is_some_and(|silent| silent <= now) {
        return Phase::Silent;
    }
    if facts.heartbeat.is_none() { Phase::AgentStarting } else { Phase::Ready }
}
