//! Samples of the fleet: counting it, writing a count down, and reading the newest.
//!
//! What a machine counts for is decided in [`crate::model::fleet_sample`]; here is only what is read for it. A
//! count reads the fleet in pages by key, each a statement of its own that holds no snapshot for the next, so that
//! a large fleet costs a little for longer and nobody has to wait for it. It is made under the named lease
//! ([`LEASE`]) and written under its fence: a shepherd that was frozen in the middle writes nothing any more. The
//! minute is the row's key, so that there is one row a minute whoever counts.

use uuid::Uuid;

use crate::bmdb::connection::{Bmdb, Doing as _};
use crate::bmdb::error::BmdbError;
use crate::bmdb::inspect;
use crate::bmdb::lease::{NamedLease, lock_lease};
use crate::model::cluster::view::{RESTORING, stage};
use crate::model::facts::Installation;
use crate::model::fleet_sample::{
    BrakeOn, FleetSample, SeenCluster, SeenKubernetes, SeenLane, SeenMachine, minute_of,
};
use crate::model::ids::MachineId;
use crate::model::time::{Timestamp, between};

const WHAT: &str = "counting the fleet";

/// Kind and name of the lease that a count is made under.
pub const LEASE: (&str, &str) = ("sampler", "fleet");

/// What is known of the newest sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Latest {
    /// The database's clock.
    pub now: Timestamp,
    /// The minute of the newest sample, and when it was taken; `None` when there is none.
    pub of: Option<(Timestamp, Timestamp)>,
    /// What it says, where that is news.
    pub sample: Option<FleetSample>,
}

/// A count as it is stored.
pub(crate) fn understood(counts: serde_json::Value) -> Result<FleetSample, BmdbError> {
    serde_json::from_value(counts).map_err(|error| {
        BmdbError::Corrupt(format!("a count of the fleet that this release cannot read: {error}"))
    })
}

impl Bmdb {
    /// Looks for a sample that is newer than that of the minute `known`. One row by key.
    pub async fn latest_sample(&self, known: Option<Timestamp>) -> Result<Latest, BmdbError> {
        let row = self
            .statement("looking for the newest count of the fleet", move |pool| {
                Box::pin(async move {
                    sqlx::query_file!("sql/fleet_sample/read_latest.sql", known as Option<Timestamp>)
                        .fetch_one(pool)
                        .await
                })
            })
            .await?;
        let sample = row.counts.map(understood).transpose()?;
        Ok(Latest { now: row.now, of: row.minute.zip(row.taken_at), sample })
    }

    /// Reads `limit` machines after `after` for a count, in the order of their ids, with the last one's id. None
    /// are left when none come.
    pub async fn seen_page(
        &self,
        after: MachineId,
        limit: i64,
    ) -> Result<(Vec<SeenMachine>, Option<MachineId>), BmdbError> {
        let rows = self
            .statement(WHAT, move |pool| {
                Box::pin(async move {
                    sqlx::query_file!("sql/fleet_sample/list_machine_page.sql", after.0, limit)
                        .fetch_all(pool)
                        .await
                })
            })
            .await?;
        let last = rows.last().map(|row| MachineId(row.machine_id));
        let machines = rows.into_iter().map(|row| SeenMachine {
            at: row.seen_at,
            phase: row.phase,
            phase_since: row.phase_since,
            deadline: row.deadline,
            lanes: vec![
                SeenLane {
                    process: row.access_process,
                    ready_at: row.access_ready_at,
                    timer: row.access_timer,
                    leased: row.access_leased,
                },
                SeenLane {
                    process: row.observe_process,
                    ready_at: row.observe_ready_at,
                    timer: row.observe_timer,
                    leased: row.observe_leased,
                },
            ],
            backoffs: row.backoffs,
            provider: row.provider,
            location: row.location,
            agent_started: row.agent_started,
            heartbeat_at: row.heartbeat_at,
            installation: Installation::of(row.asked, row.reported.zip(row.succeeded)),
            held: row.held,
            hardware: row.memory_bytes.zip(row.cpu_threads),
        });
        Ok((machines.collect(), last))
    }

    /// Every cluster, as far as it is counted.
    pub async fn seen_clusters(&self) -> Result<Vec<SeenCluster>, BmdbError> {
        let rows = self
            .statement(WHAT, |pool| {
                Box::pin(async move {
                    sqlx::query_file!("sql/fleet_sample/list_clusters.sql").fetch_all(pool).await
                })
            })
            .await?;
        let seen = rows.into_iter().map(|row| SeenCluster {
            at: row.now,
            stage: if row.restoring && !row.deleting {
                RESTORING
            } else {
                stage(row.deleting, row.founded, usize::try_from(row.machines).unwrap_or(0), row.settled)
            },
            lives: row.founded && !row.deleting && !row.restoring,
            seen_at: row.seen_at,
            snapshot_at: row.snapshot_at,
            kubernetes: row.kubernetes.then(|| SeenKubernetes {
                unwell: u64::try_from(row.unwell).unwrap_or(0),
                behind: row.behind.and_then(|behind| behind.try_into().ok()).unwrap_or(0),
            }),
            upgrade_paused: row.paused,
        });
        Ok(seen.collect())
    }

    /// Work under way by process, and the brakes that are on.
    pub async fn seen_beside(&self) -> Result<(Vec<(String, u64)>, Vec<BrakeOn>), BmdbError> {
        self.inspect(|tx| {
            Box::pin(async move {
                let work = sqlx::query_file!("sql/fleet_sample/count_work.sql")
                    .fetch_all(&mut *tx)
                    .await
                    .doing(WHAT)?;
                let work = work.into_iter().map(|row| (row.process, u64::try_from(row.count).unwrap_or(0)));
                let recovery = inspect::brakes(tx).await?;
                let recovery =
                    recovery.into_iter().map(|brake| BrakeOn { kind: brake.kind, scope: brake.scope });
                let providers = inspect::providers(tx).await?;
                let creation = providers.into_iter().filter(|provider| provider.brake.is_some());
                let creation = creation
                    .map(|provider| BrakeOn { kind: "creation".to_owned(), scope: provider.provider });
                Ok((work.collect(), recovery.chain(creation).collect()))
            })
        })
        .await
    }

    /// Writes down what was counted from `began` to now, under the lease. Says whether it is the sample of its
    /// minute: the first one is.
    pub async fn store_sample(
        &self,
        lease: &NamedLease,
        began: Timestamp,
        sample: &FleetSample,
    ) -> Result<bool, BmdbError> {
        let counts = serde_json::to_value(sample)
            .map_err(|error| BmdbError::Corrupt(format!("a count of the fleet that is no JSON: {error}")))?;
        let lease = lease.clone();
        self.transact("writing down a count of the fleet", move |tx| {
            let (lease, counts) = (lease.clone(), counts.clone());
            Box::pin(async move {
                lock_lease(tx, &lease).await?;
                let now = inspect::now(tx).await?;
                let took = i64::try_from(between(began, now).as_millis()).unwrap_or(i64::MAX);
                let stored =
                    sqlx::query_file!("sql/fleet_sample/insert.sql", minute_of(began), now, took, counts)
                        .execute(tx)
                        .await
                        .doing("writing down a count of the fleet")?;
                Ok(stored.rows_affected() > 0)
            })
        })
        .await
    }
}

/// Where a count begins.
#[must_use]
pub const fn before_all() -> MachineId {
    MachineId(Uuid::nil())
}
