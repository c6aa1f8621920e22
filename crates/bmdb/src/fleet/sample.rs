//! Fleet samples: counting the fleet once a minute for metrics and statistics.
//!
//! [`model::fleet_sample`] decides what a machine counts for; this module only reads the inputs, writes a count
//! and reads the newest. A count reads the fleet in pages by key, each a statement of its own that holds no snapshot
//! for the next, so that a large fleet costs a little for longer and blocks nobody. It is made under the named lease
//! ([`LEASE`]) and written under its fence: a shepherd that was frozen in the middle writes nothing any more. The
//! minute is the row's key, so that there is one row a minute whatever shepherd counts.

use uuid::Uuid;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, DbContext as _, database_now};
use crate::engine::named_lease::NamedLease;
use crate::fleet::brake::list_brakes;
use crate::fleet::provider::list_providers;
use model::cluster::view::{RESTORING_STAGE, cluster_stage};
use model::facts::InstallationState;
use model::fleet_sample::{
    FleetSample, SampledBrake, SampledCluster, SampledKubernetes, SampledLane, SampledMachine,
    truncate_to_minute,
};
use model::ids::MachineId;
use model::time::{Timestamp, between};

const OPERATION: &str = "counting the fleet";

/// Kind and name of the lease that a count is made under.
pub const LEASE: (&str, &str) = ("sampler", "fleet");

/// The newest sample, as far as it is new to the reader.
#[derive(Clone, Debug, PartialEq)]
pub struct LatestSample {
    /// The database's clock when this was read.
    pub now: Timestamp,
    /// The minute of the newest sample, and when it was taken; `None` when there is none.
    pub minute_and_taken_at: Option<(Timestamp, Timestamp)>,
    /// The sample, if it is newer than the reader's.
    pub sample: Option<FleetSample>,
}

/// Decodes a stored count.
pub(crate) fn parse_sample(counts: serde_json::Value) -> Result<FleetSample, BmdbError> {
    serde_json::from_value(counts).map_err(|error| {
        BmdbError::Corrupt(format!("a count of the fleet that this release cannot read: {error}"))
    })
}

impl Bmdb {
    /// Reads the newest sample, with its content if it is newer than that of the minute `known`. One row by key.
    pub async fn read_latest_sample(&self, known: Option<Timestamp>) -> Result<LatestSample, BmdbError> {
        let row = self
            .statement("looking for the newest count of the fleet", move |pool| {
                Box::pin(
                    sqlx::query_file!("../../sql/fleet_sample/read_latest.sql", known as Option<Timestamp>)
                        .fetch_one(pool),
                )
            })
            .await?;
        let sample = row.counts.map(parse_sample).transpose()?;
        Ok(LatestSample { now: row.now, minute_and_taken_at: row.minute.zip(row.taken_at), sample })
    }

    /// Reads up to `limit` machines after `after` for a count, in the order of their ids, with the last one's id. An
    /// empty page ends the count.
    pub async fn read_machine_sample_page(
        &self,
        after: MachineId,
        limit: i64,
    ) -> Result<(Vec<SampledMachine>, Option<MachineId>), BmdbError> {
        let rows = self
            .statement(OPERATION, move |pool| {
                Box::pin(
                    sqlx::query_file!("../../sql/fleet_sample/list_machine_page.sql", after.0, limit)
                        .fetch_all(pool),
                )
            })
            .await?;
        let last = rows.last().map(|row| MachineId(row.machine_id));
        let machines = rows.into_iter().map(|row| SampledMachine {
            at: row.read_at,
            phase: row.phase,
            phase_since: row.phase_since,
            deadline: row.deadline,
            lanes: vec![
                SampledLane {
                    process: row.access_process,
                    ready_at: row.access_ready_at,
                    timer: row.access_timer,
                    is_leased: row.access_leased,
                },
                SampledLane {
                    process: row.observe_process,
                    ready_at: row.observe_ready_at,
                    timer: row.observe_timer,
                    is_leased: row.observe_leased,
                },
            ],
            backoffs: row.backoffs,
            provider: row.provider,
            location: row.location,
            agent_started: row.agent_started,
            heartbeat_at: row.heartbeat_at,
            installation: InstallationState::from_generations(
                row.requested_generation,
                row.reported_generation.zip(row.succeeded),
            ),
            is_held: row.on_hold,
            hardware: row.memory_bytes.zip(row.cpu_threads),
        });
        Ok((machines.collect(), last))
    }

    /// Every cluster, with what is counted of it.
    pub async fn read_cluster_samples(&self) -> Result<Vec<SampledCluster>, BmdbError> {
        let rows = self
            .statement(OPERATION, |pool| {
                Box::pin(sqlx::query_file!("../../sql/fleet_sample/list_clusters.sql").fetch_all(pool))
            })
            .await?;
        let seen = rows.into_iter().map(|row| SampledCluster {
            at: row.now,
            stage: if row.restoring && !row.deleting {
                RESTORING_STAGE
            } else {
                cluster_stage(
                    row.deleting,
                    row.founded,
                    usize::try_from(row.machines).unwrap_or(0),
                    row.settled,
                )
            },
            is_active: row.founded && !row.deleting && !row.restoring,
            observed_at: row.observed_at,
            snapshot_at: row.snapshot_at,
            kubernetes: row.kubernetes.then(|| SampledKubernetes {
                unhealthy_components: u64::try_from(row.unwell).unwrap_or(0),
                nodes_behind: row.behind.and_then(|behind| behind.try_into().ok()).unwrap_or(0),
            }),
            upgrade_paused: row.paused,
        });
        Ok(seen.collect())
    }

    /// Work under way by process, and the brakes that are on.
    pub async fn read_work_and_brakes(&self) -> Result<(Vec<(String, u64)>, Vec<SampledBrake>), BmdbError> {
        self.transact_read_only(|tx| {
            Box::pin(async move {
                // The table `work` has at most one row per worker.
                let work = sqlx::query!(r#"SELECT process, count(*) AS "count!" FROM work GROUP BY process"#)
                    .fetch_all(&mut *tx)
                    .await
                    .context(OPERATION)?;
                let work = work.into_iter().map(|row| (row.process, u64::try_from(row.count).unwrap_or(0)));
                let recovery = list_brakes(tx).await?;
                let recovery =
                    recovery.into_iter().map(|brake| SampledBrake { kind: brake.kind, scope: brake.scope });
                let providers = list_providers(tx).await?;
                let creation = providers.into_iter().filter(|provider| provider.brake.is_some());
                let creation = creation
                    .map(|provider| SampledBrake { kind: "creation".to_owned(), scope: provider.provider });
                Ok((work.collect(), recovery.chain(creation).collect()))
            })
        })
        .await
    }

    /// Stores what was counted from `began` to now, under the lease. Returns whether it became the sample of its
    /// minute: the first one does.
    pub async fn store_sample(
        &self,
        lease: &NamedLease,
        began: Timestamp,
        sample: &FleetSample,
    ) -> Result<bool, BmdbError> {
        let counts = serde_json::to_value(sample)
            .map_err(|error| BmdbError::Corrupt(format!("a count of the fleet that is no JSON: {error}")))?;
        let doing = "recording a count of the fleet";
        self.transact_under_lease(doing, lease, counts, move |tx, counts| {
            Box::pin(async move {
                let now = database_now(tx).await?;
                let took = i64::try_from(between(began, now).as_millis()).unwrap_or(i64::MAX);
                // The first sample of a minute stays.
                let stored = sqlx::query!(
                    "INSERT INTO fleet_sample (minute, taken_at, took_ms, counts) VALUES ($1, $2, $3, $4)
                     ON CONFLICT (minute) DO NOTHING",
                    truncate_to_minute(began),
                    now,
                    took,
                    counts
                )
                .execute(tx)
                .await
                .context(doing)?;
                Ok(stored.rows_affected() > 0)
            })
        })
        .await
    }
}

/// The cursor at which a count begins.
#[must_use]
pub const fn first_cursor() -> MachineId {
    MachineId(Uuid::nil())
}
