//! What grows in the BMDB, and what deletes it again.
//!
//! # Every table and its bound
//!
//! | tables | rows |
//! | --- | --- |
//! | `machine`, its tags (`machine_provided` … `machine_ssh_host_key`) | one per machine a provider ever named |
//! | `machine_due` | two per machine: one a lane |
//! | `work_backoff`, `work_postponed` | one per machine and process |
//! | `work` | one per worker |
//! | `cluster` | one per cluster that there is |
//! | `cluster_credential` | those in force, and those that ended within a day; 100 per cluster |
//! | `cluster_declaration` | one per role that is declared to a cluster, 64 at most |
//! | `cluster_former_key` | one per key of the shepherd for a cluster that was replaced since the oldest snapshot that is kept |
//! | `cluster_kubernetes` | one per cluster that has Kubernetes |
//! | `cluster_kubernetes_user` | those in force, and those that ended within a day; 100 per cluster |
//! | `cluster_left_node` | one per machine that left a cluster since the oldest snapshot of it that is kept |
//! | `cluster_snapshot`, `cluster_snapshot_chunk` | as many per cluster as the policy keeps, each with a chunk per 512 KiB, 128 at most |
//! | `cluster_upgrade` | the one under way, and the 10 that ended last of each cluster |
//! | `log_request`, `log_part` | 64 that have not ended, each with 1 MiB at the most; those that nobody came for go after five minutes |
//! | `cluster_order` | one per machine that was ever asked about a cluster |
//! | `named_lease` | one per provider ever configured, per cluster that there is, per kind of disturbance, and for roll-outs |
//! | `provider_state` | one per provider ever configured |
//! | `brake` | one per kind and provider, while it is on |
//! | `loop_pause` | one per loop and provider that was ever paused and not resumed |
//! | `fleet_listening` | one per shard: 16 |
//! | `policy`, `bmdb_identity`, `migration_lock` | fixed |
//! | `sealed_secret` | one, and for each cluster that there is its key, the next one and the former ones |
//! | `history` | what is written within the retention time, and a newer fence per machine until it is declared |
//! | `intent` | what is settled within it, and what is open |
//! | `session` | what is closed within it, and what is open or holds something |
//! | `audit`, `approval` | what was ordered, and asked for, within it |
//! | `roll_out`, `roll_out_machine` | those under way, and the 50 that ended last; one per machine of each |
//! | `release_order` | one per machine that was ever asked to become another release |
//! | `artefact`, `artefact_chunk` | 200 files of 256 MiB at the most; those that nobody brought to their end go after a day |
//! | `access_credential` | one per credential an admin ever made |
//! | `fleet_sample` | one a minute for thirty days |
//!
//! `history`, `intent`, `session`, `audit`, `approval` and `fleet_sample` are the ones that time alone makes grow, and
//! [`Bmdb::forget`] is what keeps them to their bounds. What was begun of an artefact is deleted with them, and so is what
//! nobody came for of a machine's log. A machine that
//! left is kept: its row is what refuses whoever comes back with its name.
//!
//! # What is never deleted
//!
//! Nothing is derived from history but the end of a work item whose commit was not answered, minutes
//! after it, and that a machine knows a fence which this BMDB never gave: that line stays until a
//! restoration is declared, because until then nothing is ordered of the machine. Fences stand in
//! `machine_due` and `named_lease`, so they cannot go back. Budgets and brakes
//! count the intents of their windows, so the retention time is never shorter than those
//! ([`Policy::effective_history_retention`][crate::model::policy::Policy::effective_history_retention]).
//! An open intent stays whatever its age, and so does a session that work or a named lease still refers
//! to, because the reaper frees both by its row.
//!
//! # Why batches and not partitions
//!
//! Monthly partitions would make deleting cheap, but need the right to change the schema at run time
//! (which the service's role should not have), exist on one of the two kinds of database only, and would
//! give every look at a machine's history as many indexes to search as there are months. Batches are one
//! statement for both. Each finds the oldest rows by an index, deletes a thousand of them and commits, so
//! that it takes milliseconds and locks nothing but rows that nobody else writes: history is inserted
//! beside it, never waiting.
//!
//! # Whose right it is
//!
//! Everybody's, like sweeping: what is too old by the database's clock and the stored policy is so for
//! all, so a shepherd that was frozen in the middle does no harm when it goes on. None of it acts for a
//! session. Two that meet wait for each other's batch, or leave it.

use sqlx::postgres::PgQueryResult;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::log_request::KEPT_MS as LOGS_KEPT_MS;
use crate::model::newer_fence::ANSWERED_BEYOND;

/// Every table of the BMDB, as the table above has them.
pub const TABLES: [&str; 58] = [
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

/// A thousand years: what is subtracted from now must be a moment that a database can write.
const LONGEST_KEPT_MS: i64 = 1_000 * 365 * 86_400_000;

/// How long counts of the fleet are kept: thirty days, whatever the policy says of history.
const SAMPLES_KEPT_MS: i64 = 30 * 86_400_000;

/// How long an artefact is kept that nobody brings to its end: a day.
const BEGUN_KEPT_MS: i64 = 86_400_000;
/// Most pieces of artefacts that one statement deletes: each is hundreds of rows where the database keeps it.
const MOST_PIECES: i64 = 50;

/// What time alone makes grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retained {
    /// Lines of machines' histories.
    History,
    /// Settled intents.
    Intents,
    /// Closed sessions.
    Sessions,
    /// Orders that were carried out.
    Audit,
    /// Orders that were asked for.
    Approvals,
    /// Counts of the fleet.
    Samples,
    /// Pieces of artefacts that nobody brought to their end.
    Pieces,
    /// Artefacts that nobody brought to their end.
    Begun,
    /// Parts of machines' logs that nobody came for.
    LogParts,
    /// Requests for logs that nobody came for.
    Logs,
}

impl Retained {
    /// In the order in which they are deleted: history names sessions, and pieces their artefacts.
    pub const ALL: [Self; 10] = [
        Self::History,
        Self::Intents,
        Self::Sessions,
        Self::Audit,
        Self::Approvals,
        Self::Samples,
        Self::Pieces,
        Self::Begun,
        Self::LogParts,
        Self::Logs,
    ];

    /// Most rows of it that one statement deletes.
    #[must_use]
    pub const fn batch(self) -> i64 {
        match self {
            Self::Pieces | Self::LogParts => MOST_PIECES,
            _ => BATCH,
        }
    }

    /// Its table.
    #[must_use]
    pub const fn table(self) -> &'static str {
        match self {
            Self::History => "history",
            Self::Intents => "intent",
            Self::Sessions => "session",
            Self::Audit => "audit",
            Self::Approvals => "approval",
            Self::Samples => "fleet_sample",
            Self::Pieces => "artefact_chunk",
            Self::Begun => "artefact",
            Self::LogParts => "log_part",
            Self::Logs => "log_request",
        }
    }
}

impl Bmdb {
    /// Deletes the oldest rows of `what` that are older than they are kept, by the policy's retention time or their
    /// own, about `most` of them. Returns how many: fewer than `most` means that no more are old, or that somebody else is
    /// deleting them at this moment.
    pub async fn forget(&self, what: Retained, most: i64) -> Result<u64, BmdbError> {
        // By the row: a process whose policy is of yesterday could delete what is to be kept since.
        self.read_policy().await?;
        let (_, policy) = self.policy();
        let kept = policy.effective_history_retention();
        let kept = i64::try_from(kept.0.as_millis()).unwrap_or(i64::MAX).min(LONGEST_KEPT_MS);
        let deleted = match what {
            Retained::History => {
                self.statement("deleting old history", move |connection| {
                    Box::pin(async move {
                        sqlx::query_file!("sql/retention/delete_history.sql", kept, most, ANSWERED_BEYOND)
                            .execute(connection)
                            .await
                    })
                })
                .await
            }
            Retained::Intents => {
                self.statement("deleting old intents", move |connection| {
                    Box::pin(async move {
                        sqlx::query_file!("sql/retention/delete_intents.sql", kept, most)
                            .execute(connection)
                            .await
                    })
                })
                .await
            }
            Retained::Audit => {
                self.statement("deleting old orders", move |connection| {
                    Box::pin(async move {
                        sqlx::query_file!("sql/retention/delete_audit.sql", kept, most)
                            .execute(connection)
                            .await
                    })
                })
                .await
            }
            Retained::Approvals => {
                self.statement("deleting old approvals", move |connection| {
                    Box::pin(async move {
                        sqlx::query_file!("sql/retention/delete_approvals.sql", kept, most)
                            .execute(connection)
                            .await
                    })
                })
                .await
            }
            Retained::Sessions => {
                self.statement("deleting old sessions", move |connection| {
                    Box::pin(async move {
                        sqlx::query_file!("sql/retention/delete_sessions.sql", kept, most)
                            .execute(connection)
                            .await
                    })
                })
                .await
            }
            Retained::Samples => {
                self.statement("deleting old counts of the fleet", move |connection| {
                    Box::pin(async move {
                        sqlx::query_file!("sql/retention/delete_samples.sql", SAMPLES_KEPT_MS, most)
                            .execute(connection)
                            .await
                    })
                })
                .await
            }
            Retained::Pieces => {
                self.statement("deleting pieces of artefacts", move |connection| {
                    Box::pin(async move {
                        sqlx::query_file!("sql/retention/delete_unfinished_pieces.sql", BEGUN_KEPT_MS, most)
                            .execute(connection)
                            .await
                    })
                })
                .await
            }
            Retained::Begun => {
                self.statement("deleting artefacts that are not whole", move |connection| {
                    Box::pin(async move {
                        sqlx::query_file!("sql/retention/delete_unfinished_artefacts.sql", BEGUN_KEPT_MS)
                            .execute(connection)
                            .await
                    })
                })
                .await
            }
            Retained::LogParts => self.forget_parts_of_logs(most).await,
            Retained::Logs => self.forget_logs().await,
        };
        match deleted {
            Ok(done) => Ok(done.rows_affected()),
            Err(error) if error.is_lock_not_available() => Ok(0),
            Err(error) => Err(error),
        }
    }
    async fn forget_parts_of_logs(&self, most: i64) -> Result<PgQueryResult, BmdbError> {
        self.statement("deleting parts of logs", move |connection| {
            Box::pin(async move {
                sqlx::query_file!("sql/retention/delete_log_parts.sql", LOGS_KEPT_MS, most)
                    .execute(connection)
                    .await
            })
        })
        .await
    }

    async fn forget_logs(&self) -> Result<PgQueryResult, BmdbError> {
        self.statement("deleting requests for logs", move |connection| {
            Box::pin(async move {
                sqlx::query_file!("sql/retention/delete_log_requests.sql", LOGS_KEPT_MS)
                    .execute(connection)
                    .await
            })
        })
        .await
    }
}
