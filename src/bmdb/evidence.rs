//! One look at everything that issues are derived from ([`crate::model::issues`]).
//!
//! Machines are read in pages, as for a plan (`fleet_view.rs`). What two statements may have seen
//! at two moments is looked at once more, at one, before it is called a contradiction.

use std::collections::HashMap;

use prost::Message as _;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::Snapshot;
use crate::bmdb::fleet_view::PAGE;
use crate::bmdb::inspect;
use crate::bmdb::pause::pauses;
use crate::bmdb::retention::TABLES;
use crate::model::cluster::kubernetes_view::Known;
use crate::model::drift::drift_of;
use crate::model::ids::MachineId;
use crate::model::issues::evidence::{
    ClusterEvidence, Evidence, ExpiredSessions, KubernetesEvidence, LATELY, Lately, MachineEvidence,
    NodeEvidence, ProviderEvidence, SessionEvidence, StorageEvidence,
};
use crate::model::machine_view::MachineView;
use crate::model::policy::Policy;
use crate::model::schedule::next_due;
use crate::model::time::{Span, Timestamp};
use crate::proto::hardware::v1::HardwareReport;

const WHAT: &str = "looking for issues";
/// Most open sessions that are read.
const SESSIONS: i64 = 1000;

impl Bmdb {
    /// Looks at everything that issues are derived from.
    pub async fn evidence(&self) -> Result<Evidence, BmdbError> {
        self.read_policy().await?;
        let (version, policy) = self.policy();
        let lately = self.lately_told().await?;
        let mut machines = Vec::new();
        let mut after = MachineId(Uuid::nil());
        loop {
            let page = self.snapshot_page(after, PAGE).await?;
            let Some(last) = page.last().map(|snapshot| snapshot.facts.machine) else { break };
            machines.extend(self.page_of_evidence(page, &lately, (version, &policy)).await?);
            after = last;
        }
        let disturbed = self.disturbances_within(policy.longest_window()).await?;
        let (at, providers, brakes, pauses, sessions) = self
            .inspect(|tx| {
                Box::pin(async move {
                    let now = inspect::now(tx).await?;
                    let providers = inspect::providers(tx).await?;
                    let brakes = inspect::brakes(tx).await?;
                    let pauses = pauses(tx).await?;
                    Ok((now, providers, brakes, pauses, living_sessions(tx, now).await?))
                })
            })
            .await?;
        let expired = self.expired_sessions().await?;
        let clusters = self.cluster_evidence().await?;
        let kubernetes = self.kubernetes_evidence().await?;
        let storage = self.storage_evidence().await?;
        let listening_since =
            machines.iter().filter_map(|machine: &MachineEvidence| machine.facts.listening_since).min();
        Ok(Evidence {
            at,
            policy,
            machines,
            disturbed,
            providers: providers
                .into_iter()
                .map(|line| ProviderEvidence {
                    provider: line.provider,
                    listed_at: line.listed_at,
                    error: line.error,
                    error_at: line.error_at,
                    brake: line.brake,
                    brake_since: line.brake_since,
                })
                .collect(),
            brakes,
            pauses,
            sessions,
            expired,
            listening_since,
            clusters,
            kubernetes,
            storage,
        })
    }

    async fn page_of_evidence(
        &self,
        page: Vec<Snapshot>,
        lately: &HashMap<Uuid, Lately>,
        (version, policy): (i64, &Policy),
    ) -> Result<Vec<MachineEvidence>, BmdbError> {
        let contradicted = self.contradicted(&page, policy, version).await?;
        let ids: Vec<Uuid> = page.iter().map(|snapshot| snapshot.facts.machine.0).collect();
        let mut newer_fences = self.newer_fences(ids.clone()).await?;
        let rows = self
            .statement(WHAT, move |pool| {
                let ids = ids.clone();
                Box::pin(async move {
                    sqlx::query_file!("sql/issues/list_machines.sql", &ids).fetch_all(pool).await
                })
            })
            .await?;
        let mut rows: HashMap<Uuid, _> = rows.into_iter().map(|row| (row.machine_id, row)).collect();
        let mut found = Vec::new();
        for Snapshot { facts, .. } in page {
            let machine = facts.machine;
            let Some(row) = rows.remove(&machine.0) else { continue };
            let drift = if contradicted.contains(&machine) {
                drift_in(&self.machine_view(machine).await?)
            } else {
                None
            };
            found.push(MachineEvidence {
                facts,
                phase_since: row.phase_since,
                losses: row.losses,
                drift,
                agent_version: row.agent_version,
                serial_number: row.serial_number,
                macs: row.report.as_deref().map(macs_of).unwrap_or_default(),
                host_key_refused_at: row.refused_at,
                newer_fence: newer_fences.remove(&machine.0),
                lately: lately.get(&machine.0).copied().unwrap_or_default(),
            });
        }
        Ok(found)
    }

    async fn lately_told(&self) -> Result<HashMap<Uuid, Lately>, BmdbError> {
        let window = Span(LATELY).float_milliseconds();
        let rows = self
            .statement(WHAT, move |pool| {
                Box::pin(async move {
                    sqlx::query_file!("sql/issues/count_recent_boots.sql", window).fetch_all(pool).await
                })
            })
            .await?;
        let lately = rows.into_iter().map(|row| {
            let told = Lately {
                boots: u32::try_from(row.boots).unwrap_or(u32::MAX),
                first_boot_at: Some(row.first_boot_at),
            };
            (row.machine_id, told)
        });
        Ok(lately.collect())
    }

    async fn expired_sessions(&self) -> Result<Vec<ExpiredSessions>, BmdbError> {
        let window = Span(LATELY).float_milliseconds();
        let rows = self
            .statement(WHAT, move |pool| {
                Box::pin(async move {
                    sqlx::query_file!("sql/issues/count_expired_sessions.sql", window).fetch_all(pool).await
                })
            })
            .await?;
        let expired = rows.into_iter().map(|row| ExpiredSessions {
            component: row.component,
            host: row.host.unwrap_or_else(unknown_host),
            count: row.count,
            first_at: row.first_at,
        });
        Ok(expired.collect())
    }

    async fn cluster_evidence(&self) -> Result<Vec<ClusterEvidence>, BmdbError> {
        let rows = self
            .statement(WHAT, move |pool| {
                Box::pin(
                    async move { sqlx::query_file!("sql/issues/list_clusters.sql").fetch_all(pool).await },
                )
            })
            .await?;
        let clusters = rows.into_iter().map(|row| ClusterEvidence {
            name: row.name,
            founded_at: row.founded_at,
            snapshot_at: row.taken_at,
            keys_refused_since: row.keys_refused_since,
        });
        Ok(clusters.collect())
    }

    async fn kubernetes_evidence(&self) -> Result<Vec<KubernetesEvidence>, BmdbError> {
        let rows = self
            .statement(WHAT, move |pool| {
                Box::pin(async move {
                    sqlx::query_file!("sql/issues/list_kubernetes_nodes.sql").fetch_all(pool).await
                })
            })
            .await?;
        let mut found: Vec<KubernetesEvidence> = Vec::new();
        for row in rows {
            if found.last().is_none_or(|last| last.name != row.name) {
                // What another release wrote is said again with the next look.
                let known: Option<Known> = row.known.and_then(|known| serde_json::from_value(known).ok());
                found.push(KubernetesEvidence {
                    name: row.name,
                    rotations: known.unwrap_or_default().rotations,
                    nodes: Vec::new(),
                });
            }
            let runs = row.kubernetes.and_then(|runs| serde_json::from_value(runs).ok());
            if let (Some(cluster), Some(runs), Some(machine)) = (found.last_mut(), runs, row.machine) {
                cluster.nodes.push(NodeEvidence { machine, node: row.node_id, runs });
            }
        }
        Ok(found)
    }

    /// What the database's books say; `None` where it keeps none.
    async fn storage_evidence(&self) -> Result<Option<StorageEvidence>, BmdbError> {
        let sample = match self.sample_storage().await {
            Err(error) if error.is_unknown_to_the_database() => return Ok(None),
            other => other?,
        };
        let tables = TABLES.map(str::to_owned);
        let rows = self
            .statement(WHAT, move |pool| {
                let tables = tables.clone();
                Box::pin(async move {
                    sqlx::query_file!("sql/issues/count_table_rows.sql", &tables).fetch_all(pool).await
                })
            })
            .await?;
        let rows = rows.into_iter().map(|row| (row.name, row.dead, row.live)).collect();
        Ok(Some(StorageEvidence { rows, oldest_snapshot: sample.oldest_snapshot }))
    }
}

/// Sessions that live at `now`, oldest first. Where every shepherd died nobody is left to close what was
/// theirs, so that their rows say nothing.
async fn living_sessions(tx: &mut PgConnection, now: Timestamp) -> Result<Vec<SessionEvidence>, BmdbError> {
    let rows = sqlx::query_file!("sql/inspect/list_sessions.sql", Uuid::nil(), SESSIONS)
        .fetch_all(tx)
        .await
        .doing(WHAT)?;
    let living = rows.into_iter().filter(|row| row.deadline > now).map(|row| {
        let text = |key: &str| row.runtime_info.get(key).and_then(|value| value.as_str());
        SessionEvidence {
            host: text("host").map_or_else(unknown_host, str::to_owned),
            version: text("version").map(str::to_owned),
            certificate_ends: text("certificate_ends").and_then(|at| at.parse().ok()),
            host_clock: began_by_its_host(row.session_id),
            component: row.component,
            started_at: row.started_at,
        }
    });
    Ok(living.collect())
}

/// How a machine's stored schedule contradicts its facts, read at one moment.
fn drift_in(view: &MachineView) -> Option<String> {
    view.lanes.iter().find_map(|lane| {
        let stored = lane.stored()?;
        let due = next_due(&view.facts, stored.lane, &view.policy, view.at);
        drift_of(&stored, &due, view.policy_version)
    })
}

/// The id of a session begins with the time, by the clock of the host that made it.
fn began_by_its_host(session: Uuid) -> Option<Timestamp> {
    let (seconds, nanoseconds) = session.get_timestamp()?.to_unix();
    Timestamp::from_timestamp(i64::try_from(seconds).ok()?, nanoseconds)
}

fn unknown_host() -> String {
    "a host that is not known".to_owned()
}

/// Addresses of network interfaces in a hardware report. What cannot be read tells none.
fn macs_of(report: &[u8]) -> Vec<String> {
    let Ok(report) = HardwareReport::decode(report) else { return Vec::new() };
    let interfaces = report.network_interfaces.into_iter().filter(|interface| interface.mac.len() == 6);
    interfaces
        .map(|interface| interface.mac.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":"))
        .collect()
}
