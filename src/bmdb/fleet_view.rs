//! The whole fleet at a moment, for what is computed of all machines: plans and issues.
//!
//! It is read in pages, each a statement of its own, as the sweeper reads: a fleet takes seconds, and
//! no snapshot of the database may be held for as long. A machine that changes between two pages is seen
//! before or after it, never in the middle, and machines share little.

use std::collections::HashMap;

use uuid::Uuid;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::bmdb::facts::Snapshot;
use crate::model::cluster::disturb::InCluster;
use crate::model::ids::MachineId;
use crate::model::plan::{Disturbed, FleetView, MachineState, StoredLane};
use crate::model::policy::Disturbance;
use crate::model::process::{Lane, Process};
use crate::model::schedule::Armed;
use crate::model::time::{Span, Timestamp};

/// Machines read in one statement.
pub(crate) const PAGE: i64 = 500;

impl Bmdb {
    /// The whole fleet, as far as its future follows from it.
    pub async fn fleet_view(&self) -> Result<FleetView, BmdbError> {
        self.read_policy().await?;
        let (_, policy) = self.policy();
        let mut machines = Vec::new();
        let mut after = MachineId(Uuid::nil());
        loop {
            let page = self.snapshot_page(after, PAGE).await?;
            let ids: Vec<Uuid> = page.iter().map(|snapshot| snapshot.facts.machine.0).collect();
            let Some(last) = ids.last().copied() else { break };
            let mut lanes = self.stored_lanes(ids.clone()).await?;
            let mut clusters = self.in_clusters(ids.clone()).await?;
            let mut newer_fences = self.newer_fences(ids).await?;
            machines.extend(page.into_iter().filter_map(|Snapshot { facts, .. }| {
                let lanes = lanes.remove(&facts.machine.0)?;
                let (phase_index, phase_since) = lanes.phase?;
                let newer_fence = newer_fences.remove(&facts.machine.0);
                let cluster = clusters.remove(&facts.machine.0);
                let lanes = lanes.stored;
                Some(MachineState { facts, phase_index, phase_since, lanes, newer_fence, cluster })
            }));
            after = MachineId(last);
        }
        let disturbed = self.disturbances_within(policy.longest_window()).await?;
        let released = self.released_within(policy.release_budget.window).await?;
        let at = self.database_clock().await?;
        let pauses = self.pauses().await?;
        Ok(FleetView { at, policy, machines, disturbed, released, pauses })
    }

    /// Disturbances begun within `window`, oldest first.
    pub(crate) async fn disturbances_within(&self, window: Span) -> Result<Vec<Disturbed>, BmdbError> {
        let window = window.float_milliseconds();
        let rows = self
            .statement("reading what was disturbed", move |pool| {
                Box::pin(async move {
                    sqlx::query_file!("sql/plan/list_disruptions.sql", window).fetch_all(pool).await
                })
            })
            .await?;
        let known = rows.into_iter().filter_map(|row| {
            let step = row.kind.parse::<Disturbance>().ok()?;
            Some(Disturbed {
                step,
                machine: MachineId(row.machine_id),
                provider: row.provider,
                at: row.begun_at,
            })
        });
        Ok(known.collect())
    }

    /// When providers were told within `window` to take machines back.
    async fn released_within(&self, window: Span) -> Result<Vec<Timestamp>, BmdbError> {
        let window = window.float_milliseconds();
        self.statement("reading what was given back", move |pool| {
            Box::pin(async move {
                sqlx::query_file_scalar!("sql/plan/list_releases.sql", window).fetch_all(pool).await
            })
        })
        .await
    }

    /// The database's clock.
    async fn database_clock(&self) -> Result<Timestamp, BmdbError> {
        self.statement("reading the clock", |pool| {
            Box::pin(
                async move { sqlx::query_file_scalar!("sql/inspect/read_clock.sql").fetch_one(pool).await },
            )
        })
        .await
    }

    async fn in_clusters(&self, machines: Vec<Uuid>) -> Result<HashMap<Uuid, InCluster>, BmdbError> {
        let rows = self
            .statement("reading what clusters say of a page of machines", move |pool| {
                let machines = machines.clone();
                Box::pin(async move {
                    sqlx::query_file!("sql/plan/list_cluster_memberships.sql", &machines)
                        .fetch_all(pool)
                        .await
                })
            })
            .await?;
        let count = |count: i64| usize::try_from(count).unwrap_or(0);
        let read = rows.into_iter().map(|row| {
            let cluster = InCluster {
                name: row.name,
                founded: row.founded,
                leaving: row.deleting || row.leaving.is_some(),
                health: row.health,
                voter: row.voter.unwrap_or(false),
                votes: row
                    .voters
                    .zip(row.voters_reached)
                    .map(|(voters, reached)| (count(voters), count(reached))),
                seen_at: row.seen_at,
                disturbed: None,
            };
            (row.machine_id, cluster)
        });
        Ok(read.collect())
    }

    async fn stored_lanes(&self, machines: Vec<Uuid>) -> Result<HashMap<Uuid, StoredLanes>, BmdbError> {
        let rows = self
            .statement("reading a page of the schedule", move |pool| {
                let machines = machines.clone();
                Box::pin(async move {
                    sqlx::query_file!("sql/plan/list_lanes.sql", &machines).fetch_all(pool).await
                })
            })
            .await?;
        let mut found: HashMap<Uuid, StoredLanes> = HashMap::new();
        for row in rows {
            let lanes = found.entry(row.machine_id).or_default();
            // A lane or a process that only a newer release knows has no future here.
            let Ok(lane) = row.lane.parse::<Lane>() else { continue };
            let process = row.process.and_then(|process| process.parse::<Process>().ok());
            if lane == Lane::Access {
                lanes.phase = Some((row.phase_index, row.phase_since));
            }
            lanes.stored.push(StoredLane {
                lane,
                armed: Armed { process, ready_at: row.ready_at, timer: row.timer },
                not_before: row.not_before,
                working: row.working,
            });
        }
        Ok(found)
    }
}

/// The lanes of one machine, and its phase as the access lane has it.
#[derive(Default)]
struct StoredLanes {
    phase: Option<(String, Timestamp)>,
    stored: Vec<StoredLane>,
}
