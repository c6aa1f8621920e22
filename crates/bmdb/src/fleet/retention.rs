//! Retention: which tables grow, and batch deletion of old rows.
//!
//! # Every table and its bound
//!
//! | tables | rows |
//! | --- | --- |
//! | `machine`, its tags (`machine_provided` … `machine_ssh_host_key`) | one per machine a provider ever named |
//! | `machine_due` | two per machine: one a lane |
//! | `work_backoff`, `work_postponed` | one per machine and process |
//! | `work` | one per worker |
//! | `cluster` | one per existing cluster |
//! | `cluster_credential` | those in force, and those that ended within a day; 100 per cluster |
//! | `cluster_declaration` | one per role that is declared to a cluster, 64 at most |
//! | `cluster_former_key` | one per owner key of a cluster replaced since its oldest retained snapshot |
//! | `cluster_image` | one per retained snapshot of a cluster with Kubernetes; unfinished and unneeded ones go soon |
//! | `cluster_image_part` | one per MiB of an image, 2,049 at most each |
//! | `cluster_kubernetes` | one per cluster that has Kubernetes |
//! | `cluster_kubernetes_user` | those in force, and those that ended within a day; 100 per cluster |
//! | `cluster_left_node` | one per machine that left a cluster since the oldest snapshot of it that is retained |
//! | `cluster_snapshot` | as many per cluster as the policy retains |
//! | `cluster_snapshot_chunk` | one per 512 KiB of a snapshot, 128 at most each |
//! | `cluster_upgrade` | the one under way, and the 10 that ended last of each cluster |
//! | `log_request`, `log_part` | 64 open ones of 1 MiB at most each; those without a client go after five minutes |
//! | `cluster_order` | one per machine that ever had an order about a cluster |
//! | `named_lease` | one per provider ever configured, per cluster, per kind of disruption, and for roll-outs |
//! | `provider_state` | one per provider ever configured |
//! | `brake` | one per kind and provider, while it is on |
//! | `loop_pause` | one per loop and provider that was ever paused and not resumed |
//! | `fleet_listening` | one per shard: 16 |
//! | `policy`, `bmdb_identity`, `migration_lock` | fixed |
//! | `sealed_secret` | one, and for each cluster that there is its key, the next one and the former ones, and the keys of its Secrets |
//! | `history` | what is written within the retention time, and a newer fence per machine until it is declared |
//! | `intent` | what is settled within it, and what is open |
//! | `session` | what is closed within it, and what is open or holds something |
//! | `audit`, `approval` | orders and approval requests within it |
//! | `roll_out`, `roll_out_machine` | those under way, and the 50 that ended last; one per machine of each |
//! | `release_order` | one per machine that ever had an order to change to another release |
//! | `artefact`, `artefact_chunk` | 200 files of 256 MiB at most; unfinished uploads go after a day |
//! | `access_credential` | one per credential an admin ever made |
//! | `fleet_sample` | one a minute for thirty days |
//!
//! `history`, `intent`, `session`, `audit`, `approval` and `fleet_sample` are the ones that grow with time alone, and
//! [`Bmdb::delete_expired`] keeps them to their bounds. Unfinished uploads of artefacts are deleted with them, and so
//! are parts of machines' logs that no client came back for, and images of etcd that do not count, or of a snapshot that
//! is not retained any more. The row of a machine that left is retained: it rejects a machine that comes back with its
//! name.
//!
//! # What is never deleted
//!
//! The only facts derived from history are the end of a work item whose commit was not answered, minutes after it, and
//! that a machine knows a fence which this BMDB never issued: that line stays until a restoration is declared, because
//! until then the machine gets no orders. Fences are in `machine_due` and `named_lease`, so they cannot decrease.
//! Budgets and brakes count the intents of their windows, so the retention time is never shorter than those
//! ([`Policy::effective_history_retention`][model::policy::Policy::effective_history_retention]). An open intent
//! stays whatever its age, and so does a session that work or a named lease still refers to, because the reaper frees
//! both by its row.
//!
//! # Why batches and not partitions
//!
//! Monthly partitions would make deleting cheap, but need the right to change the schema at run time (which the
//! service's role should not have), exist on one of the two kinds of database only, and would give every read of a
//! machine's history as many indexes to search as there are months. Batches are one statement for both. Each finds the
//! oldest rows by an index, deletes a thousand of them and commits, so that it takes milliseconds and locks only rows
//! that nobody else writes: history is inserted beside it, without waiting.
//!
//! # Which shepherd deletes
//!
//! Every shepherd, as with sweeping: what is too old by the database's clock and the stored policy is too old for all,
//! so a shepherd that was frozen in the middle does no harm when it continues. None of it acts for a session. Two that
//! meet wait for each other's batch, or leave it.

use sqlx::Postgres;
use sqlx::postgres::PgArguments;
use sqlx::query::Query;

use crate::connection::Bmdb;
use crate::connection::error::BmdbError;
use crate::machine::log_request::RETENTION_MS as LOGS_KEPT_MS;
use model::unknown_fence::ANSWER_MARGIN;

/// Every table of the BMDB, as the table above lists them.
pub const TABLES: [&str; 61] = [
    "access_credential",
    "approval",
    "artefact",
    "artefact_chunk",
    "audit",
    "bmdb_identity",
    "brake",
    "cluster",
    "cluster_credential",
    "cluster_declaration",
    "cluster_former_key",
    "cluster_image",
    "cluster_image_part",
    "cluster_kubernetes",
    "cluster_kubernetes_user",
    "cluster_left_node",
    "cluster_order",
    "cluster_snapshot",
    "cluster_snapshot_chunk",
    "cluster_upgrade",
    "fleet_listening",
    "fleet_sample",
    "history",
    "intent",
    "log_part",
    "log_request",
    "loop_pause",
    "machine",
    "machine_agent_heartbeat",
    "machine_agent_started",
    "machine_cluster",
    "machine_cluster_report",
    "machine_due",
    "machine_hardware_report",
    "machine_hold",
    "machine_key_replacement",
    "machine_labels",
    "machine_needs_human",
    "machine_os_installation_report",
    "machine_os_installation_request",
    "machine_power_order",
    "machine_priority",
    "machine_provided",
    "machine_quarantine",
    "machine_recovery",
    "machine_release_report",
    "machine_retirement",
    "machine_ssh_host_key",
    "migration_lock",
    "named_lease",
    "policy",
    "provider_state",
    "release_order",
    "roll_out",
    "roll_out_machine",
    "sealed_secret",
    "session",
    "work",
    "work_backoff",
    "work_postponed",
    "_sqlx_migrations",
];

/// Most rows that one statement deletes, but for lines of history of the same microsecond.
pub const BATCH: i64 = 1_000;

/// A thousand years: now minus the retention time must be a moment that a database can store.
const MAX_RETENTION_MS: i64 = 1_000 * 365 * 86_400_000;

/// How long samples of the fleet are retained: thirty days, whatever the policy's retention of history.
const SAMPLE_RETENTION_MS: i64 = 30 * 86_400_000;

/// How long an unfinished upload of an artefact is retained: a day.
const UPLOAD_RETENTION_MS: i64 = 86_400_000;
/// How long an unfinished image of etcd is retained: longer than one may take. One that is abandoned goes at once.
const IMAGE_RETENTION_MS: i64 = 3 * 3_600_000;
/// Most pieces of artefacts that one statement deletes: the database stores each in hundreds of rows.
const PIECE_BATCH: i64 = 50;

/// Rows that grow with time alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetainedKind {
    /// Lines of machines' histories.
    History,
    /// Intents whose outcome is recorded.
    Intents,
    /// Sessions that are closed and unreferenced.
    Sessions,
    /// Orders that were carried out.
    Audit,
    /// Requests for approval of orders.
    Approvals,
    /// Samples of the fleet.
    Samples,
    /// Pieces of unfinished uploads.
    UnfinishedPieces,
    /// Unfinished uploads of artefacts.
    UnfinishedArtefacts,
    /// Parts of machines' logs that no client came back for.
    LogParts,
    /// Requests for logs that no client came back for.
    LogRequests,
    /// Parts of images of etcd that do not count, or of a snapshot that is not retained.
    ImageParts,
    /// Images of etcd that do not count, or of a snapshot that is not retained.
    Images,
}

impl RetainedKind {
    /// All kinds, in the order in which they are deleted: history names sessions, pieces their artefacts, and parts
    /// their images.
    pub const ALL: [Self; 12] = [
        Self::History,
        Self::Intents,
        Self::Sessions,
        Self::Audit,
        Self::Approvals,
        Self::Samples,
        Self::UnfinishedPieces,
        Self::UnfinishedArtefacts,
        Self::LogParts,
        Self::LogRequests,
        Self::ImageParts,
        Self::Images,
    ];

    /// Most rows that one statement deletes.
    #[must_use]
    pub const fn batch(self) -> i64 {
        match self {
            Self::UnfinishedPieces | Self::LogParts | Self::ImageParts => PIECE_BATCH,
            _ => BATCH,
        }
    }

    /// Name of its table.
    #[must_use]
    pub const fn table(self) -> &'static str {
        match self {
            Self::History => "history",
            Self::Intents => "intent",
            Self::Sessions => "session",
            Self::Audit => "audit",
            Self::Approvals => "approval",
            Self::Samples => "fleet_sample",
            Self::UnfinishedPieces => "artefact_chunk",
            Self::UnfinishedArtefacts => "artefact",
            Self::LogParts => "log_part",
            Self::LogRequests => "log_request",
            Self::ImageParts => "cluster_image_part",
            Self::Images => "cluster_image",
        }
    }

    /// What its deletion is called in errors and metrics.
    const fn deletion_name(self) -> &'static str {
        match self {
            Self::History => "deleting old history",
            Self::Intents => "deleting old intents",
            Self::Sessions => "deleting old sessions",
            Self::Audit => "deleting old orders",
            Self::Approvals => "deleting old approvals",
            Self::Samples => "deleting old counts of the fleet",
            Self::UnfinishedPieces => "deleting pieces of artefacts",
            Self::UnfinishedArtefacts => "deleting artefacts that are not whole",
            Self::LogParts => "deleting parts of logs",
            Self::LogRequests => "deleting requests for logs",
            Self::ImageParts => "deleting parts of images of etcd",
            Self::Images => "deleting images of etcd",
        }
    }

    /// The statement that deletes about `most` rows that are past their retention time: `kept` milliseconds, or their
    /// own.
    fn deletion(self, kept: i64, most: i64) -> Query<'static, Postgres, PgArguments> {
        match self {
            Self::History => {
                sqlx::query_file!("../../sql/retention/delete_history.sql", kept, most, ANSWER_MARGIN)
            }
            Self::Intents => sqlx::query_file!("../../sql/retention/delete_intents.sql", kept, most),
            Self::Sessions => sqlx::query_file!("../../sql/retention/delete_sessions.sql", kept, most),
            Self::Audit => sqlx::query_file!("../../sql/retention/delete_audit.sql", kept, most),
            Self::Approvals => sqlx::query_file!("../../sql/retention/delete_approvals.sql", kept, most),
            Self::Samples => {
                sqlx::query_file!("../../sql/retention/delete_samples.sql", SAMPLE_RETENTION_MS, most)
            }
            Self::UnfinishedPieces => sqlx::query_file!(
                "../../sql/retention/delete_unfinished_pieces.sql",
                UPLOAD_RETENTION_MS,
                most
            ),
            Self::UnfinishedArtefacts => sqlx::query!(
                "DELETE FROM artefact a
                 WHERE a.added_at IS NULL AND a.begun_at < now() - $1::INT8 * INTERVAL '1 millisecond'
                   AND NOT EXISTS (SELECT 1 FROM artefact_chunk c WHERE c.sha256 = a.sha256)",
                UPLOAD_RETENTION_MS
            ),
            Self::LogParts => {
                sqlx::query_file!("../../sql/retention/delete_log_parts.sql", LOGS_KEPT_MS, most)
            }
            Self::LogRequests => {
                sqlx::query_file!("../../sql/retention/delete_log_requests.sql", LOGS_KEPT_MS)
            }
            Self::ImageParts => {
                sqlx::query_file!("../../sql/retention/delete_image_parts.sql", IMAGE_RETENTION_MS, most)
            }
            Self::Images => {
                sqlx::query_file!("../../sql/retention/delete_images.sql", IMAGE_RETENTION_MS)
            }
        }
    }
}

impl Bmdb {
    /// Deletes about `most` of the oldest rows of `what` that are past their retention time, the policy's or their own.
    /// Returns how many: fewer than `most` means that no more are old, or that another shepherd is deleting them at
    /// this moment.
    pub async fn delete_expired(&self, what: RetainedKind, most: i64) -> Result<u64, BmdbError> {
        // By the stored policy: a process with a cached older one could delete what has to be retained since.
        self.read_policy().await?;
        let (_, policy) = self.policy();
        let kept = policy.effective_history_retention();
        let kept = i64::try_from(kept.0.as_millis()).unwrap_or(i64::MAX).min(MAX_RETENTION_MS);
        let deleted = self
            .statement(what.deletion_name(), move |connection| {
                Box::pin(what.deletion(kept, most).execute(connection))
            })
            .await;
        match deleted {
            Ok(done) => Ok(done.rows_affected()),
            Err(error) if error.is_lock_not_available() => Ok(0),
            Err(error) => Err(error),
        }
    }
}
