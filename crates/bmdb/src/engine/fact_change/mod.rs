//! Changes of facts as data, and the statement that writes each.
//!
//! A handler returns what it learnt as a list of changes, and the transaction that ends its work applies them: they can
//! be logged, retried after a conflict, and compared in a test. The transaction that applies changes holds the
//! machine's due rows and recomputes the schedule before it commits.

use sqlx::PgConnection;

use crate::connection::DbContext;
use crate::connection::error::BmdbError;
use crate::engine::fact_change::key_replacement::{KeyReplacementChange, apply_key_replacement};
use crate::engine::fact_change::power::{PowerChange, apply_power_change};
use crate::engine::fact_change::retirement::{RetirementChange, apply_retirement_change};
use crate::engine::host_findings::store_findings;
use model::backoff::BackoffFact;
use model::cluster::authority_theft::AuthorityStep;
use model::cluster::state::MemberReport;
use model::facts::{Hold, Postponement, Recovery};
use model::ids::MachineId;
use model::label::Labels;
use model::needs_human::Obstacle;
use model::priority::PriorityLevel;
use model::process::Process;
use model::provider_status::ProviderStatus;
use model::roll_out::ReleaseReport;
use model::time::Timestamp;

pub mod key_replacement;
pub mod power;
pub mod retirement;

/// One change of a machine's facts.
#[derive(Clone, Debug, PartialEq)]
pub enum FactChange {
    /// A provider delivered the machine.
    Provided {
        /// Name of the provider.
        provider: String,
        /// The provider's name for it.
        provider_id: String,
        /// The provider's details of it.
        details: ProviderDetails,
    },
    /// The provider was queried for the machine again.
    ProviderPolled {
        /// The provider's present details.
        details: ProviderDetails,
        /// Whether they equal the stored ones.
        unchanged: bool,
    },
    /// An agent was installed on it.
    AgentStarted(NewAgent),
    /// A takeover put the agent's program at a path for a reason; both in a sentence.
    AgentPlaced(String),
    /// The agent, and what it reported, no longer count.
    AgentCleared,
    /// This host key is pinned from now on.
    HostKeyPinned {
        /// Algorithm name, such as `ssh-ed25519`.
        algorithm: String,
        /// The key as SSH sends it.
        public_key: Vec<u8>,
        /// `first-use`, `provider` or `allowed`.
        source: HostKeySource,
    },
    /// Another host key than the pinned one was offered, and rejected.
    HostKeyRefused {
        /// Algorithm name, such as `ssh-ed25519`.
        algorithm: String,
        /// The key as SSH sends it.
        public_key: Vec<u8>,
    },
    /// The pinned host key was proven again: an earlier rejection no longer counts.
    HostKeyVerified,
    /// The recovery ladder reached this rung.
    Recovery(Recovery),
    /// The recovery ladder ended.
    RecoveryCleared,
    /// Only a person can help.
    NeedsHuman {
        /// What stands in the way.
        obstacle: Obstacle,
        /// What was tried and what a person can do.
        reason: String,
    },
    /// The machine waits for a person, and its agent reports again, as of now.
    NeedsHumanReporting,
    /// A person helped, or none was needed.
    NeedsHumanCleared,
    /// Left alone until a discrepancy is explained.
    Quarantined(String),
    /// The discrepancy was explained, or the quarantine released.
    QuarantineCleared,
    /// Its labels are replaced by these.
    LabelsSet(Labels),
    /// An operator stops work on it.
    HoldSet(Hold),
    /// The stop is over.
    HoldCleared,
    /// A person puts its work before or behind that of others.
    Prioritized {
        /// Whether before or behind.
        level: PriorityLevel,
        /// The operator's reason for it.
        reason: String,
        /// Name of the operator who set it.
        by: String,
        /// When that ends by itself.
        until: Option<Timestamp>,
    },
    /// Its work comes as the engine decides.
    PriorityCleared,
    /// A process is postponed without having failed.
    Postponed(Process, Postponement),
    /// A process is not postponed any more.
    PostponementCleared(Process),
    /// A process failed, with its backoff.
    Backoff(Process, BackoffFact),
    /// A process may be tried at once.
    BackoffCleared(Process),
    /// Its retirement reached another stage.
    Retirement(RetirementChange),
    /// Its power order was given, begun or ended.
    Power(PowerChange),
    /// The order to replace its pinned signing keys was given, or used.
    KeyReplacement(KeyReplacementChange),
    /// Its agent reported that it lives.
    Heartbeat(NewHeartbeat),
    /// Its agent reported the machine's hardware.
    HardwareReport(NewHardwareReport),
    /// Its agent reported the outcome of an installation.
    InstallationReport {
        /// Generation of the request that it answers.
        generation: i64,
        /// Why it failed; `None` when it did not.
        error: Option<String>,
    },
    /// Its agent reported the machine's state in its cluster.
    ClusterReport(MemberReport),
    /// Its agent reported its release.
    ReleaseReport(ReleaseReport),
}

/// Details of a machine as its provider reports them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderDetails {
    /// The reservation it came from.
    pub reservation: Option<String>,
    /// Host name or IP literal.
    pub address: Option<String>,
    /// SSH port, when not the usual one.
    pub ssh_port: Option<u16>,
    /// SSH user, when not the configured one.
    pub ssh_user: Option<String>,
    /// Location as the provider names it; `None` if unknown.
    pub location: Option<String>,
    /// State of the machine at its provider.
    pub status: ProviderStatus,
}

/// An agent that was just installed on a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewAgent {
    /// Its Ed25519 key, 32 bytes.
    pub public_key: Vec<u8>,
    /// Boot id of the running kernel.
    pub boot_id: Option<String>,
    /// Version of the agent's program.
    pub version: String,
    /// Name of the supervision that keeps it alive.
    pub supervision: String,
    /// Fence of the work that enrolled it.
    pub fence: i64,
}

/// A heartbeat that passed every check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewHeartbeat {
    /// Boot id of the kernel that sent it.
    pub boot_id: String,
    /// The agent process that sent it.
    pub incarnation: String,
    /// Its number within that boot.
    pub sequence: i64,
    /// Version of the agent.
    pub version: String,
}

/// A hardware report that passed every check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewHardwareReport {
    /// The agent process that sent it.
    pub incarnation: String,
    /// The report, encoded as Protocol Buffers.
    pub report: Vec<u8>,
    /// Copied out of it for lists.
    pub manufacturer: Option<String>,
    /// Copied out of it for lists.
    pub product: Option<String>,
    /// Copied out of it for lists.
    pub serial_number: Option<String>,
    /// Installed memory in bytes.
    pub memory_bytes: i64,
    /// Hardware threads over all packages.
    pub cpu_threads: i64,
}

/// Why a host key is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostKeySource {
    /// It was offered when we first connected.
    FirstUse,
    /// The provider reported it.
    Provider,
    /// An operator allowed it.
    Allowed,
}

impl HostKeySource {
    /// The name used in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::FirstUse => "first-use",
            Self::Provider => "provider",
            Self::Allowed => "allowed",
        }
    }
}

const OPERATION: &str = "changing a fact";

/// Writes one change. The caller holds the machine's due rows.
#[expect(clippy::too_many_lines, reason = "one arm a fact; each is a single statement")]
pub(crate) async fn apply_fact_change(
    tx: &mut PgConnection,
    machine: MachineId,
    change: &FactChange,
) -> Result<(), BmdbError> {
    let id = machine.0;
    let statement = match change {
        FactChange::Provided { provider, provider_id, details } => sqlx::query!(
            "INSERT INTO machine_provided (machine_id, provider, provider_id, reservation, address,
                 ssh_port, ssh_user, location, status, provided_at, looked_at, unchanged)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, clock_timestamp(), NULL, FALSE)",
            id,
            provider,
            provider_id,
            details.reservation.as_deref(),
            details.address.as_deref(),
            details.ssh_port.map(i64::from),
            details.ssh_user.as_deref(),
            details.location.as_deref(),
            details.status.as_str(),
        ),
        FactChange::ProviderPolled { details, unchanged } => sqlx::query_file!(
            "../../sql/facts/update_provided.sql",
            id,
            details.reservation.as_deref(),
            details.address.as_deref(),
            details.ssh_port.map(i64::from),
            details.ssh_user.as_deref(),
            details.location.as_deref(),
            details.status.as_str(),
            unchanged,
        ),
        FactChange::AgentStarted(agent) => sqlx::query_file!(
            "../../sql/facts/upsert_agent_started.sql",
            id,
            agent.public_key,
            agent.boot_id.as_deref(),
            agent.version,
            agent.supervision,
            agent.fence,
        ),
        FactChange::AgentPlaced(placement) => sqlx::query!(
            "UPDATE machine_agent_started SET placement = $2 WHERE machine_id = $1",
            id,
            placement
        ),
        FactChange::AgentCleared => {
            sqlx::query!("DELETE FROM machine_agent_started WHERE machine_id = $1", id)
                .execute(&mut *tx)
                .await
                .context(OPERATION)?;
            sqlx::query!("DELETE FROM machine_agent_heartbeat WHERE machine_id = $1", id)
        }
        FactChange::HostKeyPinned { algorithm, public_key, source } => sqlx::query_file!(
            "../../sql/facts/upsert_host_key.sql",
            id,
            algorithm,
            public_key,
            source.as_str()
        ),
        FactChange::HostKeyRefused { algorithm, public_key } => sqlx::query!(
            "UPDATE machine_ssh_host_key
             SET refused_algorithm = $2, refused_key = $3, refused_at = clock_timestamp()
             WHERE machine_id = $1",
            id,
            algorithm,
            public_key
        ),
        FactChange::HostKeyVerified => sqlx::query!(
            "UPDATE machine_ssh_host_key
             SET refused_algorithm = NULL, refused_key = NULL, refused_at = NULL
             WHERE machine_id = $1",
            id
        ),
        FactChange::Recovery(recovery) => return set_recovery(tx, machine, recovery).await,
        FactChange::RecoveryCleared => sqlx::query!("DELETE FROM machine_recovery WHERE machine_id = $1", id),
        FactChange::NeedsHuman { obstacle, reason } => sqlx::query!(
            "INSERT INTO machine_needs_human (machine_id, since, obstacle, reason)
             VALUES ($1, clock_timestamp(), $2, $3) ON CONFLICT (machine_id) DO UPDATE
             SET obstacle = EXCLUDED.obstacle, reason = EXCLUDED.reason, reporting_since = NULL",
            id,
            obstacle.as_str(),
            reason
        ),
        FactChange::NeedsHumanReporting => sqlx::query!(
            "UPDATE machine_needs_human SET reporting_since = clock_timestamp() WHERE machine_id = $1",
            id
        ),
        FactChange::NeedsHumanCleared => {
            sqlx::query!("DELETE FROM machine_needs_human WHERE machine_id = $1", id)
        }
        FactChange::Quarantined(reason) => sqlx::query!(
            "INSERT INTO machine_quarantine (machine_id, since, reason)
             VALUES ($1, clock_timestamp(), $2)
             ON CONFLICT (machine_id) DO UPDATE SET reason = EXCLUDED.reason",
            id,
            reason
        ),
        FactChange::QuarantineCleared => {
            sqlx::query!("DELETE FROM machine_quarantine WHERE machine_id = $1", id)
        }
        FactChange::LabelsSet(labels) if labels.is_empty() => {
            sqlx::query!("DELETE FROM machine_labels WHERE machine_id = $1", id)
        }
        FactChange::LabelsSet(labels) => sqlx::query!(
            "INSERT INTO machine_labels (machine_id, labels) VALUES ($1, $2)
             ON CONFLICT (machine_id) DO UPDATE SET labels = EXCLUDED.labels",
            id,
            serde_json::json!(labels)
        ),
        FactChange::Prioritized { level, reason, by, until } => {
            sqlx::query_file!("../../sql/facts/upsert_priority.sql", id, level.as_str(), reason, by, *until)
        }
        FactChange::PriorityCleared => sqlx::query!("DELETE FROM machine_priority WHERE machine_id = $1", id),
        FactChange::HoldSet(hold) => sqlx::query_file!(
            "../../sql/facts/upsert_hold.sql",
            id,
            hold.scope.as_str(),
            hold.reason,
            hold.by,
            hold.until
        ),
        FactChange::HoldCleared => sqlx::query!("DELETE FROM machine_hold WHERE machine_id = $1", id),
        FactChange::Postponed(process, wait) => sqlx::query!(
            "INSERT INTO work_postponed (machine_id, process, until, reason, decided_at)
             VALUES ($1, $2, $3, $4, $5) ON CONFLICT (machine_id, process) DO UPDATE
             SET until = EXCLUDED.until, reason = EXCLUDED.reason, decided_at = EXCLUDED.decided_at",
            id,
            process.as_str(),
            wait.until,
            wait.reason,
            wait.decided_at
        ),
        FactChange::PostponementCleared(process) => sqlx::query!(
            "DELETE FROM work_postponed WHERE machine_id = $1 AND process = $2",
            id,
            process.as_str()
        ),
        FactChange::Backoff(process, backoff) => sqlx::query_file!(
            "../../sql/facts/upsert_backoff.sql",
            id,
            process.as_str(),
            i64::from(backoff.failures),
            i64::try_from(backoff.last_interval.as_millis()).unwrap_or(i64::MAX),
            backoff.until,
            backoff.cause,
        ),
        FactChange::BackoffCleared(process) => sqlx::query!(
            "DELETE FROM work_backoff WHERE machine_id = $1 AND process = $2",
            id,
            process.as_str()
        ),
        FactChange::Retirement(change) => {
            return apply_retirement_change(tx, machine, change).await;
        }
        FactChange::Power(change) => return apply_power_change(tx, machine, change).await,
        FactChange::KeyReplacement(change) => return apply_key_replacement(tx, machine, change).await,
        FactChange::Heartbeat(beat) => sqlx::query_file!(
            "../../sql/facts/upsert_heartbeat.sql",
            id,
            beat.boot_id,
            beat.incarnation,
            beat.sequence,
            beat.version
        ),
        FactChange::HardwareReport(report) => sqlx::query_file!(
            "../../sql/facts/upsert_hardware_report.sql",
            id,
            report.incarnation,
            report.report,
            report.manufacturer.as_deref(),
            report.product.as_deref(),
            report.serial_number.as_deref(),
            report.memory_bytes,
            report.cpu_threads,
        ),
        FactChange::ClusterReport(report) => sqlx::query_file!(
            "../../sql/cluster/upsert_report.sql",
            id,
            report.generation,
            report.key.as_ref().map(<[u8; 32]>::as_slice),
            report.ca_certificate.as_deref(),
            report.address.as_deref(),
            report.error.as_deref(),
            i64::try_from(report.epoch).unwrap_or(i64::MAX),
            report.next_authority.as_deref(),
            report.next_authority_step.map(AuthorityStep::number),
            report.programs.etcd.as_deref(),
            report.programs.etcdutl.as_deref(),
            report.secrets.as_ref().map(|secrets| serde_json::json!(secrets))
        ),
        FactChange::ReleaseReport(report) => sqlx::query_file!(
            "../../sql/roll_out/upsert_report.sql",
            id,
            report.generation,
            report.sha256.as_slice(),
            report.error.as_deref(),
            store_findings(&report.findings)
        ),
        FactChange::InstallationReport { generation, error } => sqlx::query_file!(
            "../../sql/facts/upsert_installation_report.sql",
            id,
            generation,
            error.is_none(),
            error.as_deref()
        ),
    };
    statement.execute(tx).await.context(OPERATION)?;
    Ok(())
}

async fn set_recovery(
    tx: &mut PgConnection,
    machine: MachineId,
    recovery: &Recovery,
) -> Result<(), BmdbError> {
    let acted = recovery.last_action.as_ref();
    sqlx::query_file!(
        "../../sql/facts/upsert_recovery.sql",
        machine.0,
        recovery.started_at,
        i64::try_from(recovery.rung).unwrap_or(i64::MAX),
        i64::from(recovery.attempts),
        acted.map(|acted| acted.step.as_str()),
        acted.map(|acted| acted.acted_at),
        acted.map(|acted| acted.deadline),
        acted.and_then(|acted| acted.boot_id_before.as_deref()),
        recovery.next_check_at,
        recovery.note,
        recovery.obstacle.as_ref().map(Obstacle::as_str),
    )
    .execute(tx)
    .await
    .context(OPERATION)?;
    Ok(())
}
