//! Reading everything that issues are derived from.
//!
//! The issues themselves are derived in [`model::issues`]. Machines are read in pages, as for a plan
//! (`fleet/view.rs`). An apparent contradiction that two statements may have read at two moments is read again at one
//! moment before it is reported.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use prost::Message as _;
use proto::hardware::v1::HardwareReport;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::cluster::reading::{parse_rotation_order, parse_secret_keys};
use crate::cluster::record::json_strings;
use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext as _, database_now};
use crate::engine::facts::MachineSnapshot;
use crate::engine::host_findings::read_findings;
use crate::fleet::artefact::measure_artefacts;
use crate::fleet::brake::list_brakes;
use crate::fleet::provider::list_providers;
use crate::fleet::retention::TABLES;
use crate::fleet::view::PAGE_SIZE;
use crate::orders::loop_pause::list_pauses;
use crate::orders::two_person_rule::read_rule_inputs;
use model::byte_size::ByteSize;
use model::cluster::view::KubernetesStatusView;
use model::database_limits::DatabaseLimits;
use model::ids::MachineId;
use model::issues::inputs::{
    ClusterIssueInputs, DatabaseLimitInputs, EtcdMemberInputs, ExpiredSessions, HISTORY_WINDOW, IssueInputs,
    KubernetesIssueInputs, MachineIssueInputs, NodeIssueInputs, ProviderIssueInputs, RecentHistory,
    SessionIssueInputs, StorageIssueInputs, UnfoundedClusterInputs,
};
use model::kubernetes::archive::read_bundle_manifest;
use model::kubernetes::version::ReleaseVersion;
use model::machine_view::MachineView;
use model::policy::Policy;
use model::program_versions::Program;
use model::program_versions::version::ProgramVersion;
use model::schedule::next_due;
use model::schedule_mismatch::describe_mismatch;
use model::time::{Span, Timestamp};

const OPERATION: &str = "looking for issues";
/// Most open sessions that are read.
const MAX_SESSIONS: i64 = 1000;
/// The pause before the limits of the server are read again, because it did not answer.
const LIMIT_RETRY_PAUSE: Duration = Duration::from_millis(500);

impl Bmdb {
    /// Reads everything that issues are derived from.
    pub async fn read_issue_inputs(&self) -> Result<IssueInputs, BmdbError> {
        self.read_policy().await?;
        let (version, policy) = self.policy();
        let lately = self.read_recent_boots().await?;
        let mut machines = Vec::new();
        let mut after = MachineId(Uuid::nil());
        loop {
            let page = self.read_snapshot_page(after, PAGE_SIZE).await?;
            let Some(last) = page.last().map(|snapshot| snapshot.facts.machine) else { break };
            machines.extend(self.read_machine_inputs(page, &lately, (version, &policy)).await?);
            after = last;
        }
        let disruptions = self.list_disruptions(policy.longest_window()).await?;
        let (at, providers, brakes, pauses, sessions, artefacts, two_person_rule) = self
            .transact_read_only(|tx| {
                Box::pin(async move {
                    let now = database_now(tx).await?;
                    let providers = list_providers(tx).await?;
                    let brakes = list_brakes(tx).await?;
                    let pauses = list_pauses(tx).await?;
                    let artefacts = measure_artefacts(tx).await?;
                    let rule = read_rule_inputs(tx).await?;
                    Ok((now, providers, brakes, pauses, read_live_sessions(tx, now).await?, artefacts, rule))
                })
            })
            .await?;
        let expired = self.read_expired_sessions().await?;
        let clusters = self.read_cluster_inputs().await?;
        let unfounded_clusters = self.read_unfounded_cluster_inputs().await?;
        let kubernetes = self.read_kubernetes_inputs().await?;
        let storage = self.read_storage_inputs().await?;
        let database_limits = self.read_limit_inputs().await;
        let listening_since =
            machines.iter().filter_map(|machine: &MachineIssueInputs| machine.facts.listening_since).min();
        Ok(IssueInputs {
            at,
            policy,
            machines,
            recent_disruptions: disruptions,
            providers: providers
                .into_iter()
                .map(|line| ProviderIssueInputs {
                    provider: line.provider,
                    listed_at: line.listed_at,
                    error: line.error,
                    error_at: line.error_at,
                    brake: line.brake,
                    brake_since: line.brake_since,
                    not_adopted: line.not_adopted,
                    not_adopted_since: line.not_adopted_since,
                })
                .collect(),
            brakes,
            pauses,
            sessions,
            expired_sessions: expired,
            listening_since,
            clusters,
            unfounded_clusters,
            kubernetes,
            storage,
            artefacts,
            two_person_rule,
            database_version: version_now(&database_limits, self.server_version()),
            database_limits,
        })
    }

    async fn read_machine_inputs(
        &self,
        page: Vec<MachineSnapshot>,
        lately: &HashMap<Uuid, RecentHistory>,
        (version, policy): (i64, &Policy),
    ) -> Result<Vec<MachineIssueInputs>, BmdbError> {
        let contradicted = self.find_contradicted_machines(&page, policy, version).await?;
        let ids: Vec<Uuid> = page.iter().map(|snapshot| snapshot.facts.machine.0).collect();
        let mut newer_fences = self.read_unknown_fences(ids.clone()).await?;
        let rows = self
            .statement_with(OPERATION, ids, move |pool, ids| {
                Box::pin(sqlx::query_file!("../../sql/issues/list_machines.sql", ids).fetch_all(pool))
            })
            .await?;
        let mut rows: HashMap<Uuid, _> = rows.into_iter().map(|row| (row.machine_id, row)).collect();
        let mut found = Vec::new();
        for MachineSnapshot { facts, .. } in page {
            let machine = facts.machine;
            let Some(row) = rows.remove(&machine.0) else { continue };
            let schedule_mismatch = if contradicted.contains(&machine) {
                find_schedule_mismatch(&self.machine_view(machine).await?)
            } else {
                None
            };
            found.push(MachineIssueInputs {
                facts,
                phase_since: row.phase_since,
                lost_sessions: row.losses,
                schedule_mismatch,
                agent_version: row.agent_version,
                serial_number: row.serial_number,
                macs: row.report.as_deref().map(mac_addresses).unwrap_or_default(),
                host_key_rejected_at: row.refused_at,
                node_problem: row.node_problem.zip(row.node_problem_at),
                unknown_fence: newer_fences.remove(&machine.0),
                findings: read_findings(row.findings),
                recent: lately.get(&machine.0).copied().unwrap_or_default(),
            });
        }
        Ok(found)
    }

    async fn read_recent_boots(&self) -> Result<HashMap<Uuid, RecentHistory>, BmdbError> {
        let window = Span(HISTORY_WINDOW).float_milliseconds();
        let rows = self
            .statement(OPERATION, move |pool| {
                Box::pin(sqlx::query_file!("../../sql/issues/count_recent_boots.sql", window).fetch_all(pool))
            })
            .await?;
        let lately = rows.into_iter().map(|row| {
            let history = RecentHistory {
                unordered_boots: u32::try_from(row.boots).unwrap_or(u32::MAX),
                first_boot_at: Some(row.first_boot_at),
            };
            (row.machine_id, history)
        });
        Ok(lately.collect())
    }

    async fn read_expired_sessions(&self) -> Result<Vec<ExpiredSessions>, BmdbError> {
        let window = Span(HISTORY_WINDOW).float_milliseconds();
        let rows = self
            .statement(OPERATION, move |pool| {
                Box::pin(
                    sqlx::query_file!("../../sql/issues/count_expired_sessions.sql", window).fetch_all(pool),
                )
            })
            .await?;
        let expired = rows.into_iter().map(|row| ExpiredSessions {
            component: row.component,
            host: row.host.unwrap_or_else(unknown_host_name),
            count: row.count,
            first_at: row.first_at,
        });
        Ok(expired.collect())
    }

    async fn read_cluster_inputs(&self) -> Result<Vec<ClusterIssueInputs>, BmdbError> {
        let rows = self
            .statement(OPERATION, move |pool| {
                Box::pin(sqlx::query_file!("../../sql/issues/list_clusters.sql").fetch_all(pool))
            })
            .await?;
        let mut members = self.read_etcd_members().await?;
        let clusters = rows.into_iter().map(|row| {
            let order = (
                row.authority_rotation,
                row.authority_rotation_ordered_at,
                row.authority_rotation_ordered_by,
            );
            Ok(ClusterIssueInputs {
                name: row.name,
                founded_at: row.founded_at,
                snapshot_at: row.taken_at,
                image_at: row.image_at,
                kubernetes_since: row.kubernetes_since,
                keys_rejected_since: row.keys_refused_since,
                etcd_bytes: row.etcd_bytes.and_then(parse_size),
                etcd_quota_bytes: row.etcd_quota_bytes.and_then(parse_size),
                etcd_members: members.remove(&row.cluster_id).unwrap_or_default(),
                etcd_full_since: row.etcd_full_since,
                authority_replacements: row
                    .authority_replacements
                    .and_then(|count| usize::try_from(count).ok())
                    .unwrap_or(0),
                secret_keys: parse_secret_keys(row.secret_keys)?,
                unreachable_since: row.unreachable_since,
                authority_rotation: parse_rotation_order(order, row.authority_rotation_from)?,
                // What another release wrote and this one cannot read is written again by the next pass.
                authority_progress: row
                    .authority_rotation_progress
                    .and_then(|value| serde_json::from_value(value).ok()),
            })
        });
        clusters.collect()
    }

    async fn read_unfounded_cluster_inputs(&self) -> Result<Vec<UnfoundedClusterInputs>, BmdbError> {
        let rows = self
            .statement(OPERATION, move |pool| {
                Box::pin(
                    sqlx::query!(
                        "SELECT name, created_at, wait_reasons FROM cluster
                         WHERE founded_at IS NULL AND deleting_at IS NULL ORDER BY name"
                    )
                    .fetch_all(pool),
                )
            })
            .await?;
        let clusters = rows.into_iter().map(|row| UnfoundedClusterInputs {
            name: row.name,
            created_at: row.created_at,
            wait_reasons: json_strings(&row.wait_reasons),
        });
        Ok(clusters.collect())
    }

    /// The machines of control planes that reported an etcd, by cluster.
    async fn read_etcd_members(&self) -> Result<HashMap<Uuid, Vec<EtcdMemberInputs>>, BmdbError> {
        let rows = self
            .statement(OPERATION, move |pool| {
                Box::pin(sqlx::query_file!("../../sql/issues/list_etcd_members.sql").fetch_all(pool))
            })
            .await?;
        let mut found: HashMap<Uuid, Vec<EtcdMemberInputs>> = HashMap::new();
        for row in rows {
            let member = EtcdMemberInputs { machine: row.machine, version: row.etcd_version };
            found.entry(row.cluster_id).or_default().push(member);
        }
        Ok(found)
    }

    /// The versions of the programs in stored bundles, by the digest of the bundle. A bundle that is stored no more, or
    /// that this release cannot read, has none.
    async fn read_bundled_programs(
        &self,
        digests: Vec<Vec<u8>>,
    ) -> Result<HashMap<String, Vec<(Program, ProgramVersion)>>, BmdbError> {
        if digests.is_empty() {
            return Ok(HashMap::new());
        }
        let rows = self
            .statement_with(OPERATION, digests, move |pool, digests| {
                Box::pin(sqlx::query_file!("../../sql/issues/read_first_pieces.sql", digests).fetch_all(pool))
            })
            .await?;
        let of = |bytes: &[u8]| read_bundle_manifest(bytes).map(|manifest| manifest.program_versions());
        Ok(rows
            .into_iter()
            .map(|row| (hex::encode(row.sha256), of(&row.bytes).unwrap_or_default()))
            .collect())
    }

    async fn read_kubernetes_inputs(&self) -> Result<Vec<KubernetesIssueInputs>, BmdbError> {
        let rows = self
            .statement(OPERATION, move |pool| {
                Box::pin(sqlx::query_file!("../../sql/issues/list_kubernetes_nodes.sql").fetch_all(pool))
            })
            .await?;
        let mut found: Vec<KubernetesIssueInputs> = Vec::new();
        for row in rows {
            if found.last().is_none_or(|last| last.name != row.name) {
                // A value that another release wrote and this one cannot read is written again by the next pass.
                let observed: Option<KubernetesStatusView> =
                    row.observed.and_then(|observed| serde_json::from_value(observed).ok());
                found.push(KubernetesIssueInputs {
                    name: row.name,
                    rotations: observed.unwrap_or_default().rotations,
                    nodes: Vec::new(),
                    bundled: Vec::new(),
                });
            }
            let runs = row.kubernetes.and_then(|runs| serde_json::from_value(runs).ok());
            if let (Some(cluster), Some(runs), Some(machine)) = (found.last_mut(), runs, row.machine) {
                cluster.nodes.push(NodeIssueInputs { machine, node: row.node_id, kubernetes: runs });
            }
        }
        let digests: BTreeSet<&str> = found
            .iter()
            .flat_map(|cluster| cluster.nodes.iter().map(|node| node.kubernetes.bundle.as_str()))
            .collect();
        let digests = digests.into_iter().filter_map(|digest| hex::decode(digest).ok()).collect();
        let programs = self.read_bundled_programs(digests).await?;
        for cluster in &mut found {
            let bundles: BTreeSet<&str> =
                cluster.nodes.iter().map(|node| node.kubernetes.bundle.as_str()).collect();
            cluster.bundled =
                bundles.into_iter().filter_map(|digest| programs.get(digest)).flatten().copied().collect();
        }
        Ok(found)
    }

    /// The limits of the database server. A server that refuses an answer is an issue and hides no other one. One that is
    /// away for a moment is none.
    async fn read_limit_inputs(&self) -> DatabaseLimitInputs {
        let first = interpret_limits(self.read_database_limits().await);
        let DatabaseLimitInputs::Unanswered(_) = first else { return first };
        tokio::time::sleep(LIMIT_RETRY_PAUSE).await;
        interpret_limits(self.read_database_limits().await)
    }

    /// Statistics of the database's storage; `None` where it has none.
    async fn read_storage_inputs(&self) -> Result<Option<StorageIssueInputs>, BmdbError> {
        let sample = match self.read_vacuum_stats().await {
            Err(error) if error.is_undefined_object() => return Ok(None),
            other => other?,
        };
        let rows = self
            .statement_with(OPERATION, TABLES.map(str::to_owned), move |pool, tables| {
                // PostgreSQL's own counts of dead and live rows.
                Box::pin(
                    sqlx::query!(
                        r#"SELECT t.relname::TEXT AS "name!", t.n_dead_tup AS "dead!", t.n_live_tup AS "live!"
                           FROM pg_stat_user_tables t
                           WHERE t.relname = ANY ($1::TEXT[]) AND pg_table_is_visible(t.relid)"#,
                        tables
                    )
                    .fetch_all(pool),
                )
            })
            .await?;
        let rows = rows.into_iter().map(|row| (row.name, row.dead, row.live)).collect();
        Ok(Some(StorageIssueInputs { rows, oldest_snapshot: sample.oldest_snapshot }))
    }
}

/// What an attempt to read the limits of the server means for issues. *Pure.*
fn interpret_limits(read: Result<DatabaseLimits, BmdbError>) -> DatabaseLimitInputs {
    match read {
        Ok(limits) => DatabaseLimitInputs::Known(limits),
        Err(error) if error.is_undefined_object() => DatabaseLimitInputs::Absent,
        Err(error) if error.is_transient() => DatabaseLimitInputs::Unanswered(error.to_string()),
        Err(error) => DatabaseLimitInputs::Unreadable(error.to_string()),
    }
}

/// The version of the server that answers now. After a fail-over that is another server than the one that answered when
/// this handle connected; only where the present one does not answer, that one counts. *Pure.*
fn version_now(limits: &DatabaseLimitInputs, at_connect: Option<ReleaseVersion>) -> Option<ReleaseVersion> {
    match limits {
        DatabaseLimitInputs::Known(limits) => limits.version.or(at_connect),
        DatabaseLimitInputs::Absent => None,
        DatabaseLimitInputs::Unreadable(_) | DatabaseLimitInputs::Unanswered(_) => at_connect,
    }
}

/// Sessions that are alive at `now`, oldest first. Where every shepherd died, no process is left to close their
/// sessions, so an open row alone proves nothing.
async fn read_live_sessions(
    tx: &mut PgConnection,
    now: Timestamp,
) -> Result<Vec<SessionIssueInputs>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/inspect/list_sessions.sql", Uuid::nil(), MAX_SESSIONS)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    let living = rows.into_iter().filter(|row| row.deadline > now).map(|row| {
        let text = |key: &str| row.runtime_info.get(key).and_then(|value| value.as_str());
        SessionIssueInputs {
            host: text("host").map_or_else(unknown_host_name, str::to_owned),
            version: text("version").map(str::to_owned),
            certificate_expires_at: text("certificate_ends").and_then(|at| at.parse().ok()),
            turned_away_at: text("turned_away_at").and_then(|at| at.parse().ok()),
            certificate_rejected_at: text("certificate_rejected_at").and_then(|at| at.parse().ok()),
            certificate_rejection: text("certificate_rejection").map(str::to_owned),
            storage_low: text("storage_low").map(str::to_owned),
            open_files_low: text("open_files_low").map(str::to_owned),
            file_refused: text("file_refused").map(str::to_owned),
            host_clock: started_by_host_clock(row.session_id),
            component: row.component,
            started_at: row.started_at,
        }
    });
    Ok(living.collect())
}

/// How a machine's stored schedule contradicts its facts, both read at one moment.
fn find_schedule_mismatch(view: &MachineView) -> Option<String> {
    view.lanes.iter().find_map(|lane| {
        let stored = lane.stored_decision()?;
        let due = next_due(&view.facts, stored.lane, &view.policy, view.at);
        describe_mismatch(&stored, &due, view.policy_version)
    })
}

/// The id of a session begins with the time, by the clock of the host that made it.
fn started_by_host_clock(session: Uuid) -> Option<Timestamp> {
    let (seconds, nanoseconds) = session.get_timestamp()?.to_unix();
    Timestamp::from_timestamp(i64::try_from(seconds).ok()?, nanoseconds)
}

fn unknown_host_name() -> String {
    "a host that is not known".to_owned()
}

/// A stored number of bytes; `None` for a negative one, which nothing stores.
fn parse_size(bytes: i64) -> Option<ByteSize> {
    u64::try_from(bytes).ok().map(ByteSize)
}

/// MAC addresses of the network interfaces in a hardware report; empty if it cannot be decoded.
fn mac_addresses(report: &[u8]) -> Vec<String> {
    let Ok(report) = HardwareReport::decode(report) else { return Vec::new() };
    let interfaces = report.network_interfaces.into_iter().filter(|interface| interface.mac.len() == 6);
    interfaces
        .map(|interface| interface.mac.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_that_of_the_server_that_answers_now() {
        let (before, now) = (ReleaseVersion::new(15, 4, 0), ReleaseVersion::new(14, 2, 0));
        let known =
            |version| DatabaseLimitInputs::Known(DatabaseLimits { version, ..DatabaseLimits::default() });
        for (limits, expected) in [
            (known(Some(now)), Some(now)),
            (known(None), Some(before)),
            (DatabaseLimitInputs::Unanswered(String::new()), Some(before)),
            (DatabaseLimitInputs::Unreadable(String::new()), Some(before)),
            (DatabaseLimitInputs::Absent, None),
        ] {
            assert_eq!(version_now(&limits, Some(before)), expected, "{limits:?}");
        }
    }

    #[test]
    fn server_that_is_away_or_slow_is_not_one_that_refuses() {
        let known = interpret_limits(Ok(DatabaseLimits::default()));
        assert_eq!(known, DatabaseLimitInputs::Known(DatabaseLimits::default()));
        let away =
            BmdbError::Unreachable { address: "db:5432/bmdb".to_owned(), reason: "timed out".to_owned() };
        for error in [away, BmdbError::ReadTimedOut { limit: Duration::from_secs(1) }] {
            let text = error.to_string();
            assert_eq!(interpret_limits(Err(error)), DatabaseLimitInputs::Unanswered(text));
        }
        let refused = BmdbError::Corrupt("x".to_owned());
        let text = refused.to_string();
        assert_eq!(interpret_limits(Err(refused)), DatabaseLimitInputs::Unreadable(text));
    }
}
