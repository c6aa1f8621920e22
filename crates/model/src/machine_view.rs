//! Machine view: one machine as the API and `shepherdctl` show it.
//!
//! `bmdb/machine/view.rs` reads these, at one moment; [`crate::why`] explains them. `shepherdctl -o json` prints them,
//! so a field may be added, but none changes its name or meaning.

use std::sync::Arc;

use serde::Serialize;
use uuid::Uuid;

use crate::cluster::view::ClusterMembership;
use crate::facts::MachineFacts;
use crate::host_finding::HostFinding;
use crate::host_key::PinnedHostKey;
use crate::pause::Pause;
use crate::policy::Policy;
use crate::recent_step::RecentStep;
use crate::schedule_mismatch::StoredDecision;
use crate::time::Timestamp;
use crate::unknown_fence::UnknownFence;

/// A machine, by the names that people use for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MachineName {
    /// UUID of the machine.
    pub machine: Uuid,
    /// Its provider; `null` before any provider reported it.
    pub provider: Option<String>,
    /// The provider's name for it.
    pub provider_id: Option<String>,
}

impl MachineName {
    /// The names of the machine with these facts.
    #[must_use]
    pub fn from_facts(facts: &MachineFacts) -> Self {
        let provided = facts.provider_record.as_ref();
        Self {
            machine: facts.machine.0,
            provider: provided.map(|provided| provided.provider.clone()),
            provider_id: provided.map(|provided| provided.provider_id.clone()),
        }
    }

    /// `provider/id`, or the UUID of a machine without provider.
    #[must_use]
    pub fn short_name(&self) -> String {
        match (&self.provider, &self.provider_id) {
            (Some(provider), Some(id)) => format!("{provider}/{id}"),
            _ => self.machine.to_string(),
        }
    }
}

/// The worker that holds a claim.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkHolder {
    /// Name of the process that it works on.
    pub process: String,
    /// Fence of the claim.
    pub fence: i64,
    /// When the claim was made.
    pub since: Timestamp,
    /// The session that the claim belongs to.
    pub session: Uuid,
    /// The component that the session belongs to.
    pub component: Option<String>,
    /// Host of the process that owns the session.
    pub host: Option<String>,
    /// Process id on that host.
    pub pid: Option<i64>,
    /// When the session expires unless it is renewed.
    pub session_deadline: Option<Timestamp>,
    /// When the session ended, if it has.
    pub session_closed_at: Option<Timestamp>,
}

/// One lane of a machine's schedule, as it is stored.
#[derive(Clone, Debug, PartialEq)]
pub struct LaneView {
    /// Name of the lane: `access` or `observe`.
    pub lane: String,
    /// Name of the process that it is due for.
    pub process: Option<String>,
    /// When it is due; `None` when nothing is.
    pub ready_at: Option<Timestamp>,
    /// Whether heartbeats move that moment without writing the row.
    pub timer: bool,
    /// Why it is not due earlier.
    pub reason: String,
    /// `file:line` of the decision.
    pub decided_at: String,
    /// When something else happens unless the awaited event comes.
    pub deadline: Option<Timestamp>,
    /// Priority class, 0 first.
    pub priority: i64,
    /// Fence of the last claim.
    pub fence: i64,
    /// Consecutive sessions that were lost while they worked on it.
    pub losses: i64,
    /// No claim before this moment, because of these losses.
    pub not_before: Option<Timestamp>,
    /// The phase as it is indexed.
    pub phase_index: String,
    /// When the machine entered that phase.
    pub phase_since: Timestamp,
    /// Version of the rules it was computed by.
    pub rules_version: i64,
    /// Version of the policy it was computed by.
    pub policy_version: i64,
    /// The claim in force, if there is one.
    pub work: Option<WorkHolder>,
}

impl LaneView {
    /// The part that can contradict the facts; `None` for a lane that only a newer release knows.
    #[must_use]
    pub fn stored_decision(&self) -> Option<StoredDecision<'_>> {
        Some(StoredDecision {
            lane: self.lane.parse().ok()?,
            process: self.process.as_deref(),
            priority: self.priority,
            reason: &self.reason,
            rules_version: self.rules_version,
            policy_version: self.policy_version,
        })
    }
}

/// A brake that is engaged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngagedBrake {
    /// What it stops: `recovery`, or another kind.
    pub kind: String,
    /// Its provider, or `*` for all.
    pub scope: String,
    /// Why it is engaged.
    pub reason: String,
    /// When it was engaged.
    pub engaged_at: Timestamp,
    /// When it was last found engaged.
    pub confirmed_at: Timestamp,
}

/// One machine, with everything that decisions about it depend on.
#[derive(Clone, Debug)]
pub struct MachineView {
    /// Its facts at that moment.
    pub facts: MachineFacts,
    /// When this was read, by the database's clock.
    pub at: Timestamp,
    /// The policy in force then.
    pub policy: Arc<Policy>,
    /// The version of that policy.
    pub policy_version: i64,
    /// Both lanes of the machine.
    pub lanes: Vec<LaneView>,
    /// Its host keys; `None` before any was pinned.
    pub host_keys: Option<PinnedHostKey>,
    /// Brakes that are engaged, of any kind and scope.
    pub brakes: Vec<EngagedBrake>,
    /// Pauses in force, of any loop and provider.
    pub pauses: Vec<Pause>,
    /// Open sessions of all processes, counted up to 1,000.
    pub open_sessions: i64,
    /// Proof that it has seen a fence which this BMDB never issued.
    pub unknown_fence: Option<UnknownFence>,
    /// The cluster that it belongs to, if any.
    pub cluster: Option<ClusterMembership>,
    /// Its state in a roll-out, as a sentence, if it is in one.
    pub roll_out_note: Option<String>,
    /// Where a takeover put the agent's program and why, as a sentence; `None` if not known.
    pub placement: Option<String>,
    /// What its agent finds wrong with how it runs.
    pub findings: Vec<HostFinding>,
    /// What was done to it lately, newest first.
    pub recent_steps: Vec<RecentStep>,
}

impl MachineView {
    /// The names by which people know it.
    #[must_use]
    pub fn name(&self) -> MachineName {
        MachineName::from_facts(&self.facts)
    }
}
