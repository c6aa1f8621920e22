//! One machine as it is shown: its names, its schedule, who works on it, what
//! stops it.
//!
//! `bmdb/inspect.rs` reads these, at one moment; [`crate::model::why`] explains
//! them. They are what `shepherdctl -o json` prints: a field may be added, none
//! changes its name or meaning.

use std::sync::Arc;

use serde::Serialize;
use uuid::Uuid;

use crate::model::cluster::view::PartOfCluster;
use crate::model::drift::StoredDecision;
use crate::model::facts::MachineFacts;
use crate::model::host_key::PinnedHostKey;
use crate::model::newer_fence::NewerFence;
use crate::model::pause::Pause;
use crate::model::policy::Policy;
use crate::model::time::Timestamp;

/// A machine, by the names that people have for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MachineName {
    /// Its id.
    pub machine: Uuid,
    /// The provider it is from; `null` before any handed it over.
    pub provider: Option<String>,
    /// The provider's name for it.
    pub provider_id: Option<String>,
}

impl MachineName {
    /// `provider/id`, or the UUID of a machine without provider.
    #[must_use]
    pub fn short(&self) -> String {
        match (&self.provider, &self.provider_id) {
            (Some(provider), Some(id)) => format!("{provider}/{id}"),
            _ => self.machine.to_string(),
        }
    }
}

/// Who works.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Holder {
    /// The process.
    pub process: String,
    /// Fence of the claim.
    pub fence: i64,
    /// Since when.
    pub since: Timestamp,
    /// The session it hangs off.
    pub session: Uuid,
    /// What that session is for.
    pub component: Option<String>,
    /// Host of the process that has it.
    pub host: Option<String>,
    /// Its process id there.
    pub pid: Option<i64>,
    /// When the session ends unless it is renewed.
    pub session_deadline: Option<Timestamp>,
    /// When it ended, if it did.
    pub session_closed_at: Option<Timestamp>,
}

/// One lane of a machine's schedule, as it is stored.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LaneView {
    /// `access` or `observe`.
    pub lane: String,
    /// What it is due for.
    pub process: Option<String>,
    /// When.
    pub ready_at: Option<Timestamp>,
    /// Whether heartbeats move that moment without writing it.
    pub timer: bool,
    /// Why not earlier.
    pub reason: String,
    /// `file:line` of the decision.
    pub decided_at: String,
    /// When something else happens if this does not.
    pub deadline: Option<Timestamp>,
    /// Priority class, 0 first.
    pub priority: i64,
    /// Number of the last claim.
    pub fence: i64,
    /// Sessions in a row that were lost while they worked on it.
    pub losses: i64,
    /// Not claimed before, because of those.
    pub not_before: Option<Timestamp>,
    /// Phase as it is indexed.
    pub phase_index: String,
    /// Since when.
    pub phase_since: Timestamp,
    /// Version of the rules it was computed by.
    pub rules_version: i64,
    /// Version of the policy it was computed by.
    pub policy_version: i64,
    /// Who works on it now.
    pub work: Option<Holder>,
}

impl LaneView {
    /// What of it can contradict the facts; `None` for a lane that only a newer release knows.
    #[must_use]
    pub fn stored(&self) -> Option<StoredDecision<'_>> {
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

/// A brake that is on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BrakeLine {
    /// What it stops.
    pub kind: String,
    /// Whose: a provider, or `*` for all.
    pub scope: String,
    /// Why.
    pub reason: String,
    /// Since when.
    pub engaged_at: Timestamp,
    /// When it was last found on.
    pub seen_at: Timestamp,
}

/// One machine, as far as decisions about it go.
#[derive(Clone, Debug)]
pub struct MachineView {
    /// What is known of it.
    pub facts: MachineFacts,
    /// The database's clock when that was read.
    pub at: Timestamp,
    /// The policy that held then.
    pub policy: Arc<Policy>,
    /// The version of that policy.
    pub policy_version: i64,
    /// Both lanes.
    pub lanes: Vec<LaneView>,
    /// Host keys, once one was seen.
    pub host_keys: Option<PinnedHostKey>,
    /// Brakes that are on, of any kind and scope.
    pub brakes: Vec<BrakeLine>,
    /// Pauses that hold, of any loop and provider.
    pub pauses: Vec<Pause>,
    /// Open sessions of all processes, counted up to 1,000.
    pub open_sessions: i64,
    /// Proof that it has seen a fence which this BMDB never gave.
    pub newer_fence: Option<NewerFence>,
    /// The cluster that it is a part of, if it is of one.
    pub cluster: Option<PartOfCluster>,
    /// Its part in the roll-out of a release that it is in, a sentence.
    pub release: Option<String>,
}

impl MachineView {
    /// Its names.
    #[must_use]
    pub fn name(&self) -> MachineName {
        let provided = self.facts.provided.as_ref();
        MachineName {
            machine: self.facts.machine.0,
            provider: provided.map(|provided| provided.provider.clone()),
            provider_id: provided.map(|provided| provided.provider_id.clone()),
        }
    }
}
