//! What issues are derived from: one look at the fleet, its providers, its database and its shepherds.

use std::sync::Arc;
use std::time::Duration;

use crate::model::cluster::kubernetes::{OnNode, Rotation};
use crate::model::facts::MachineFacts;
use crate::model::machine_view::{BrakeLine, MachineName};
use crate::model::newer_fence::NewerFence;
use crate::model::pause::Pause;
use crate::model::plan::Disturbed;
use crate::model::policy::Policy;
use crate::model::time::Timestamp;

/// One look.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// The database's clock.
    pub at: Timestamp,
    /// The policy that holds.
    pub policy: Arc<Policy>,
    /// Every machine.
    pub machines: Vec<MachineEvidence>,
    /// Disturbances begun within the longest window that a budget looks back over.
    pub disturbed: Vec<Disturbed>,
    /// What providers answered last.
    pub providers: Vec<ProviderEvidence>,
    /// Brakes that are on.
    pub brakes: Vec<BrakeLine>,
    /// Pauses of loops that hold.
    pub pauses: Vec<Pause>,
    /// Open sessions.
    pub sessions: Vec<SessionEvidence>,
    /// Sessions that expired lately, by who had them.
    pub expired: Vec<ExpiredSessions>,
    /// Since when somebody has listened for heartbeats without a gap, if anybody does.
    pub listening_since: Option<Timestamp>,
    /// Clusters that were founded and are to stay.
    pub clusters: Vec<ClusterEvidence>,
    /// What clusters that are to stay run of Kubernetes.
    pub kubernetes: Vec<KubernetesEvidence>,
    /// The database's own books, where it keeps any.
    pub storage: Option<StorageEvidence>,
}

/// One machine.
#[derive(Clone, Debug)]
pub struct MachineEvidence {
    /// What is known of it.
    pub facts: MachineFacts,
    /// Since when it is in the phase that it is indexed in.
    pub phase_since: Timestamp,
    /// Sessions in a row that were lost while they worked on it.
    pub losses: i64,
    /// What its stored schedule says that its facts do not, if it does.
    pub drift: Option<String>,
    /// Release of the agent that reported last.
    pub agent_version: Option<String>,
    /// Its serial number, as its own firmware tells it.
    pub serial_number: Option<String>,
    /// Addresses of its network interfaces, in hexadecimal digits with colons.
    pub macs: Vec<String>,
    /// When it showed another host key than the pinned one.
    pub host_key_refused_at: Option<Timestamp>,
    /// Proof that it has seen more than this BMDB has given, while nothing may be ordered of it.
    pub newer_fence: Option<NewerFence>,
    /// What its agent said within [`LATELY`].
    pub lately: Lately,
}

/// What was told of a machine within [`LATELY`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lately {
    /// Boots that its agent reported from, where we had ordered none.
    pub boots: u32,
    /// When the first of them was heard of.
    pub first_boot_at: Option<Timestamp>,
}

/// How far back history is looked through.
pub const LATELY: Duration = Duration::from_hours(1);

impl MachineEvidence {
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

    /// Whether it is on its way out, or out: nothing is wrong with such a machine but that it does not leave.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        self.facts.retirement.is_some()
    }
}

/// What a provider answered last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderEvidence {
    /// Its name.
    pub provider: String,
    /// When it last gave a list.
    pub listed_at: Option<Timestamp>,
    /// Why it gave none since.
    pub error: Option<String>,
    /// When that was.
    pub error_at: Option<Timestamp>,
    /// Why no machine is taken from it.
    pub brake: Option<String>,
    /// Since when.
    pub brake_since: Option<Timestamp>,
}

/// An open session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionEvidence {
    /// What it is for.
    pub component: String,
    /// Host of the process that has it.
    pub host: String,
    /// Release of that process.
    pub version: Option<String>,
    /// When it began, by the database's clock.
    pub started_at: Timestamp,
    /// When it began, by the clock of its host.
    pub host_clock: Option<Timestamp>,
    /// When the certificate ends that it shows to agents, of a session that shows one.
    pub certificate_ends: Option<Timestamp>,
}

/// A cluster that was founded and is to stay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterEvidence {
    /// Its name.
    pub name: String,
    /// Since when it is founded.
    pub founded_at: Timestamp,
    /// When the last snapshot of it was taken.
    pub snapshot_at: Option<Timestamp>,
    /// Since when its curators refuse every key that the shepherd has for it.
    pub keys_refused_since: Option<Timestamp>,
}

/// Kubernetes of a cluster that was founded and is to stay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesEvidence {
    /// The cluster's name.
    pub name: String,
    /// What is being replaced, as its curators said last.
    pub rotations: Vec<Rotation>,
    /// Nodes that said what they run.
    pub nodes: Vec<NodeEvidence>,
}

/// A node that said what it runs of Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeEvidence {
    /// The name of its machine.
    pub machine: String,
    /// Its id.
    pub node: Option<String>,
    /// It.
    pub runs: OnNode,
}

/// Sessions of one component and host that expired within [`LATELY`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpiredSessions {
    /// What they were for.
    pub component: String,
    /// Host of the process that had them.
    pub host: String,
    /// How many.
    pub count: i64,
    /// When the first of them did.
    pub first_at: Timestamp,
}

/// What the database says of its storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageEvidence {
    /// Table, dead rows, live rows.
    pub rows: Vec<(String, i64, i64)>,
    /// Since when the oldest snapshot keeps dead rows.
    pub oldest_snapshot: Duration,
}
