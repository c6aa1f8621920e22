//! Heartbeats of agents: what one carries, how it is classified, and how it is stored.
//!
//! Nearly every heartbeat reports only that its agent still lives, and changes a time; those are stored in groups
//! ([`group_commit`]). The others are each a transaction under the machine's lock that changes facts and recomputes the
//! schedule (`storing`): the first heartbeat ever, the first of a boot, one of a machine that was considered silent or
//! waits for a person, one that carries a report, and the ones that are rejected. A pure function decides which is
//! which (`classification`).
//!
//! # Which heartbeat is newer
//!
//! Within a boot, `sequence` (milliseconds since boot) decides. A heartbeat with the number that is stored is the same
//! one sent again, because its answer was lost: it is answered again, and nothing is written.
//!
//! Between boots there is no order: a boot id is a random UUID. So the boot before the present one is stored. A boot
//! ends for good when the next one begins, therefore a heartbeat of the stored boot can only be late, whatever its
//! number, and is rejected. If it were taken for a new boot, a recovery that waits for another boot id as its proof
//! would end with a machine that is down, and the two boots would then replace each other with every heartbeat in
//! flight. One former boot is enough: an agent gives up a call after ten seconds, and no machine boots twice in that
//! time. The same rule separates two machines cloned from one disk, key and all: the machine that reported first is
//! rejected from the moment the other one reports, instead of both being believed in turns. The exception is an agent
//! that we installed since: then we spoke to that boot ourselves, and it is the present one.
//!
//! # Whose it is
//!
//! The machine id must be that of a machine whose agent was started with the key that the connection proved. Whichever
//! of the two is wrong, the answer is the same. If both are right and the machine is retired, its agent is answered so:
//! it concerns nobody else, and nobody else can query it.

use crate::engine::fact_change::{NewHardwareReport, NewHeartbeat};
use model::cluster::state::MemberReport;
use model::ids::MachineId;
use model::roll_out::ReleaseReport;

mod classification;
pub mod group_commit;
mod storing;

/// A heartbeat whose form is checked, but not yet its identity.
#[derive(Clone, Debug)]
pub struct ReceivedHeartbeat {
    /// The machine it claims to be from.
    pub machine: MachineId,
    /// The Ed25519 key that the connection proved.
    pub public_key: [u8; 32],
    /// Boot, agent process, number and version.
    pub beat: NewHeartbeat,
    /// The hardware report; `None` if it carries none.
    pub hardware: Option<NewHardwareReport>,
    /// The outcome of an installation; `None` if it carries none.
    pub installation: Option<InstallationOutcome>,
    /// The machine's state in its cluster; `None` if it carries none.
    pub cluster: Option<MemberReport>,
    /// The agent's release; `None` if it carries none.
    pub release: Option<ReleaseReport>,
    /// The highest fence of the access lane that its machine has seen; 0 when it does not report one.
    pub access_fence: i64,
}

impl ReceivedHeartbeat {
    /// Whether it carries something that must be durable before the answer.
    #[must_use]
    pub(crate) const fn has_report(&self) -> bool {
        self.hardware.is_some()
            || self.installation.is_some()
            || self.cluster.is_some()
            || self.release.is_some()
    }

    /// The same heartbeat without any report.
    #[must_use]
    pub(crate) fn without_report(&self) -> Self {
        Self { hardware: None, installation: None, cluster: None, release: None, ..self.clone() }
    }
}

/// The outcome of an installation as the agent reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstallationOutcome {
    /// Generation of the request that it answers.
    pub generation: i64,
    /// Why it failed; `None` when it did not.
    pub error: Option<String>,
}

/// The result of a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeartbeatOutcome {
    /// Stored, with everything it carried.
    Stored(AgentInstructions),
    /// It was stored before; nothing was written.
    Duplicate(AgentInstructions),
    /// A newer one is stored; nothing was written.
    Stale,
    /// No machine of that id has an agent with that key; nothing was written.
    Unauthenticated,
    /// The machine and its key belong together, and it is retired; nothing was written.
    Retired,
}

/// What the agent should do next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentInstructions {
    /// Send a hardware report: none of this agent process is stored.
    pub hardware_report: bool,
    /// Install this artefact; `None` if there is nothing to install.
    pub installation: Option<PendingInstallation>,
    /// Carry out this order about a cluster.
    pub cluster: Option<PendingClusterOrder>,
    /// Change to this release; `None` if there is none to change to.
    pub release: Option<PendingRelease>,
    /// A request for its logs waits ([`Bmdb::deliver_log_requests`](crate::connection::Bmdb::deliver_log_requests)).
    pub logs: bool,
}

/// The reply to a plain heartbeat that was stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlainHeartbeatReply {
    /// What the agent should do next.
    pub instructions: AgentInstructions,
    /// The highest fence of the machine's access lane that this BMDB has issued.
    pub issued_fence: i64,
}

/// A requested installation whose outcome is not reported yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingInstallation {
    /// Generation of the request.
    pub generation: i64,
    /// URL of the artefact.
    pub artefact_url: String,
    /// SHA-256 of the artefact, 32 bytes.
    pub artefact_sha256: Vec<u8>,
}

/// A requested release of the role server whose outcome is not reported yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingRelease {
    /// Generation of the machine's order.
    pub generation: i64,
    /// SHA-256 of the program.
    pub sha256: Vec<u8>,
    /// How long the change may take, in seconds.
    pub deadline_seconds: i64,
}

impl PendingRelease {
    pub(crate) fn from_columns(
        generation: Option<i64>,
        sha256: Option<Vec<u8>>,
        deadline_seconds: Option<i64>,
    ) -> Option<Self> {
        Some(Self { generation: generation?, sha256: sha256?, deadline_seconds: deadline_seconds? })
    }
}

/// An issued order about a cluster whose outcome is not reported yet.
#[derive(Clone, PartialEq, Eq)]
pub struct PendingClusterOrder {
    /// Generation of the machine's order.
    pub generation: i64,
    /// The order, sealed for the machine.
    pub sealed: Vec<u8>,
}

impl std::fmt::Debug for PendingClusterOrder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingClusterOrder").field("generation", &self.generation).finish_non_exhaustive()
    }
}

impl PendingClusterOrder {
    pub(crate) fn from_columns(generation: Option<i64>, sealed: Option<Vec<u8>>) -> Option<Self> {
        Some(Self { generation: generation?, sealed: sealed? })
    }
}

impl PendingInstallation {
    pub(crate) fn from_columns(
        generation: Option<i64>,
        artefact_url: Option<String>,
        artefact_sha256: Option<Vec<u8>>,
    ) -> Option<Self> {
        Some(Self { generation: generation?, artefact_url: artefact_url?, artefact_sha256: artefact_sha256? })
    }
}
