//! Inputs of issues: one snapshot of fleet, providers, database and sessions.

use std::sync::Arc;
use std::time::Duration;

use crate::adoption::NotAdopted;
use crate::byte_size::ByteSize;
use crate::cluster::authority_rotation::{AuthorityProgress, AuthorityRotationOrder};
use crate::cluster::kubernetes::{KubernetesKeyRotation, NodeKubernetes};
use crate::cluster::secret_keys::SecretKeys;
use crate::database_limits::DatabaseLimits;
use crate::facts::MachineFacts;
use crate::host_finding::HostFinding;
use crate::kubernetes::version::ReleaseVersion;
use crate::machine_view::{EngagedBrake, MachineName};
use crate::pause::Pause;
use crate::plan::RecordedDisruption;
use crate::policy::Policy;
use crate::program_versions::Program;
use crate::program_versions::version::ProgramVersion;
use crate::time::Timestamp;
use crate::unknown_fence::UnknownFence;

/// A snapshot that issues are derived from.
#[derive(Clone, Debug)]
pub struct IssueInputs {
    /// When it was taken, by the database's clock.
    pub at: Timestamp,
    /// The policy in force.
    pub policy: Arc<Policy>,
    /// Every machine in the BMDB.
    pub machines: Vec<MachineIssueInputs>,
    /// Disruptions that started within the longest window of any budget.
    pub recent_disruptions: Vec<RecordedDisruption>,
    /// The last response of each provider.
    pub providers: Vec<ProviderIssueInputs>,
    /// Brakes that are engaged.
    pub brakes: Vec<EngagedBrake>,
    /// Pauses of loops that are in force.
    pub pauses: Vec<Pause>,
    /// Sessions that are open.
    pub sessions: Vec<SessionIssueInputs>,
    /// Sessions that expired lately, by component and host.
    pub expired_sessions: Vec<ExpiredSessions>,
    /// Since when a callback server has received heartbeats without a gap; `None` when none runs.
    pub listening_since: Option<Timestamp>,
    /// Clusters that are founded and not being deleted.
    pub clusters: Vec<ClusterIssueInputs>,
    /// Clusters that are not founded yet and not being deleted.
    pub unfounded_clusters: Vec<UnfoundedClusterInputs>,
    /// What these clusters run of Kubernetes.
    pub kubernetes: Vec<KubernetesIssueInputs>,
    /// The database's own statistics, where it has any.
    pub storage: Option<StorageIssueInputs>,
    /// How close the database server is to its limits.
    pub database_limits: DatabaseLimitInputs,
    /// Version of the PostgreSQL that has the database; `None` for another server.
    pub database_version: Option<ReleaseVersion>,
    /// Size of all artefacts together.
    pub artefacts: ByteSize,
    /// What is stored of the two-person rule beside the policy.
    pub two_person_rule: TwoPersonRuleInputs,
}

/// The two-person rule, as far as issues need it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TwoPersonRuleInputs {
    /// How many different people are admins of the whole fleet.
    pub admins: usize,
    /// The flags that could not switch the rule on, because there were too few admins; `None` if there are none.
    pub requested_by: Option<String>,
    /// The last time that the rule was switched off; `None` if it never was.
    pub last_off: Option<RuleSwitchedOff>,
}

/// How the two-person rule was switched off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSwitchedOff {
    /// When it was switched off, by the database's clock.
    pub at: Timestamp,
    /// The user on the host, as `kim@workstation`.
    pub by: String,
    /// The reason that the user gave.
    pub reason: String,
}

/// A machine, as far as issues need it.
#[derive(Clone, Debug)]
pub struct MachineIssueInputs {
    /// Its facts at that moment.
    pub facts: MachineFacts,
    /// When it entered its indexed phase.
    pub phase_since: Timestamp,
    /// Consecutive sessions that were lost while they worked on it.
    pub lost_sessions: i64,
    /// How its stored schedule contradicts its facts, if it does.
    pub schedule_mismatch: Option<String>,
    /// Release of the agent that reported last.
    pub agent_version: Option<String>,
    /// Its serial number, as its firmware reports it.
    pub serial_number: Option<String>,
    /// MAC addresses of its network interfaces, in hexadecimal digits with colons.
    pub macs: Vec<String>,
    /// When it offered another host key than the pinned one.
    pub host_key_rejected_at: Option<Timestamp>,
    /// A problem that it reports about its node, and since when; `None` if it is no node or reports none.
    pub node_problem: Option<(String, Timestamp)>,
    /// Proof that it has seen a fence this BMDB never issued. While it is set, no order is given to the machine.
    pub unknown_fence: Option<UnknownFence>,
    /// What its agent finds wrong with how it runs.
    pub findings: Vec<HostFinding>,
    /// What its agent reported within [`HISTORY_WINDOW`].
    pub recent: RecentHistory,
}

/// What a machine's agent reported within [`HISTORY_WINDOW`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecentHistory {
    /// Boots that its agent reported from and that we had not ordered.
    pub unordered_boots: u32,
    /// When the first of them was reported.
    pub first_boot_at: Option<Timestamp>,
}

/// How far back history is looked through.
pub const HISTORY_WINDOW: Duration = Duration::from_hours(1);

impl MachineIssueInputs {
    /// The names by which people know it.
    #[must_use]
    pub fn name(&self) -> MachineName {
        MachineName::from_facts(&self.facts)
    }

    /// Whether it is retiring or retired. The only issue of such a machine is that it does not leave.
    #[must_use]
    pub fn is_retiring(&self) -> bool {
        self.facts.retirement.is_some()
    }
}

/// The last response of a provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderIssueInputs {
    /// Name of the provider.
    pub provider: String,
    /// When it last returned a list.
    pub listed_at: Option<Timestamp>,
    /// Why it has returned none since then.
    pub error: Option<String>,
    /// When that error occurred.
    pub error_at: Option<Timestamp>,
    /// Why no machine is taken from it, if a brake is engaged.
    pub brake: Option<String>,
    /// When that brake was engaged.
    pub brake_since: Option<Timestamp>,
    /// Machines of its list that its limit leaves out.
    pub not_adopted: Option<NotAdopted>,
    /// Since when its limit leaves out any.
    pub not_adopted_since: Option<Timestamp>,
}

/// An open session of a shepherd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionIssueInputs {
    /// The component that it belongs to.
    pub component: String,
    /// Host of the process that owns it.
    pub host: String,
    /// Release of that process.
    pub version: Option<String>,
    /// When it started, by the database's clock.
    pub started_at: Timestamp,
    /// When it started, by the clock of its host.
    pub host_clock: Option<Timestamp>,
    /// When the certificate that it presents expires; `None` for a session that presents none.
    pub certificate_expires_at: Option<Timestamp>,
    /// When its listener last turned a connection away, by the clock of its host. The session of the sampler has that of
    /// the metrics listener of its process.
    pub turned_away_at: Option<Timestamp>,
    /// When a client last rejected its certificate, by the clock of its host.
    pub certificate_rejected_at: Option<Timestamp>,
    /// The label of that rejection, as in `shepherd_tls_handshake_failures_total`.
    pub certificate_rejection: Option<String>,
    /// A file system of its host that runs out of space, as a sentence; `None` in all sessions of a process but one.
    pub storage_low: Option<String>,
    /// The sentence that its process has nearly as many open files as it may have, in the same session.
    pub open_files_low: Option<String>,
    /// The sentence that its process refuses a certificate, a key or an agent that it has read again, in the same session.
    pub file_refused: Option<String>,
}

/// A cluster that is founded and not being deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterIssueInputs {
    /// Name of the cluster.
    pub name: String,
    /// When it was founded.
    pub founded_at: Timestamp,
    /// When its last snapshot was taken.
    pub snapshot_at: Option<Timestamp>,
    /// When its last snapshot was taken that has an image of etcd.
    pub image_at: Option<Timestamp>,
    /// Since when it has Kubernetes in its present form; `None` if it has none.
    pub kubernetes_since: Option<Timestamp>,
    /// Since when its curators reject every key that the shepherd has for it.
    pub keys_rejected_since: Option<Timestamp>,
    /// Size of the database file of its etcd, as its curators last reported it.
    pub etcd_bytes: Option<ByteSize>,
    /// Size of that file from which etcd accepts no writes; `None` if its curators never reported it.
    pub etcd_quota_bytes: Option<ByteSize>,
    /// The machines of its control plane that reported an etcd, and the version of each as the program prints it.
    pub etcd_members: Vec<EtcdMemberInputs>,
    /// Since when a member of its etcd has had the alarm `NOSPACE`, as its curators last reported it.
    pub etcd_full_since: Option<Timestamp>,
    /// How often its authority was replaced, as far as its shepherds follow that.
    pub authority_replacements: usize,
    /// The keys of its Kubernetes Secrets; `None` for a cluster of a release before them.
    pub secret_keys: Option<SecretKeys>,
    /// Since when none of its curators answers.
    pub unreachable_since: Option<Timestamp>,
    /// The order to replace its authority that is carried out.
    pub authority_rotation: Option<AuthorityRotationOrder>,
    /// How far a replacement of its authority is, as its curators last reported.
    pub authority_progress: Option<AuthorityProgress>,
}

/// A cluster that was created, is not founded yet, and is not being deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnfoundedClusterInputs {
    /// Name of the cluster.
    pub name: String,
    /// When an operator created it.
    pub created_at: Timestamp,
    /// What the cluster waited for in the last pass over it. What single machines wait for is not part of it.
    pub wait_reasons: Vec<String>,
}

/// A machine of a control plane that reported which etcd is installed there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdMemberInputs {
    /// The name of the machine.
    pub machine: String,
    /// The version as the program prints it.
    pub version: String,
}

/// Kubernetes of a cluster that is founded and not being deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesIssueInputs {
    /// Name of the cluster.
    pub name: String,
    /// Key rotations under way, as its curators last reported them.
    pub rotations: Vec<KubernetesKeyRotation>,
    /// Nodes that reported what they run.
    pub nodes: Vec<NodeIssueInputs>,
    /// Versions of other programs in the bundles that these nodes run, as far as a bundle is still stored.
    pub bundled: Vec<(Program, ProgramVersion)>,
}

/// A node that reported what it runs of Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeIssueInputs {
    /// The name of its machine.
    pub machine: String,
    /// Node id in the cluster, if there is one.
    pub node: Option<String>,
    /// What the node reported of Kubernetes.
    pub kubernetes: NodeKubernetes,
}

/// Sessions of one component and host that expired within [`HISTORY_WINDOW`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpiredSessions {
    /// The component that they belonged to.
    pub component: String,
    /// Host of the process that owned them.
    pub host: String,
    /// How many sessions expired.
    pub count: i64,
    /// When the first of them expired.
    pub first_at: Timestamp,
}

/// What the database reports of its storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageIssueInputs {
    /// Tables with their numbers of dead rows and of live rows.
    pub rows: Vec<(String, i64, i64)>,
    /// Age of the oldest open snapshot, which keeps dead rows from being removed.
    pub oldest_snapshot: Duration,
}

/// What was read of the limits of the database server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DatabaseLimitInputs {
    /// The server has such limits, and answered.
    Known(DatabaseLimits),
    /// The database is of another kind, without them.
    Absent,
    /// The server refused an answer, for this reason.
    Unreadable(String),
    /// The server did not answer in time, twice, for this reason. It may answer the next time.
    Unanswered(String),
}
