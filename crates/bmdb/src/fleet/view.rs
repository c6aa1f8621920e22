//! The whole fleet read page by page, for plans and issues.
//!
//! Each page is a statement of its own, as in the sweeper: reading a fleet takes seconds, and no snapshot of the
//! database may be held that long. A machine that changes between two pages is seen before or after the change, never
//! in the middle. Facts of different machines may be of different moments.

use std::collections::HashMap;

use uuid::Uuid;

use crate::connection::error::BmdbError;
use crate::connection::{Bmdb, read_clock};
use crate::engine::facts::MachineSnapshot;
use model::cluster::disruption::ClusterContext;
use model::ids::MachineId;
use model::plan::{FleetView, MachineState, RecordedDisruption, StoredLane};
use model::policy::DisruptionKind;
use model::process::{Lane, Process};
use model::schedule::StoredDue;
use model::time::{Span, Timestamp};

/// Machines read in one statement.
pub(crate) const PAGE_SIZE: i64 = 500;

impl Bmdb {
    /// Everything about the fleet that its future follows from.
    pub async fn read_fleet_view(&self) -> Result<FleetView, BmdbError> {
        self.read_policy().await?;
        let (_, policy) = self.policy();
        let mut machines = Vec::new();
        let mut after = MachineId(Uuid::nil());
        loop {
            let page = self.read_snapshot_page(after, PAGE_SIZE).await?;
            let ids: Vec<Uuid> = page.iter().map(|snapshot| snapshot.facts.machine.0).collect();
            let Some(last) = ids.last().copied() else { break };
            let mut lanes = self.read_stored_lanes(ids.clone()).await?;
            let mut clusters = self.read_cluster_memberships(ids.clone()).await?;
            let mut newer_fences = self.read_unknown_fences(ids).await?;
            machines.extend(page.into_iter().filter_map(|MachineSnapshot { facts, .. }| {
                let lanes = lanes.remove(&facts.machine.0)?;
                let (phase_index, phase_since) = lanes.phase?;
                let newer_fence = newer_fences.remove(&facts.machine.0);
                let cluster = clusters.remove(&facts.machine.0);
                let lanes = lanes.stored;
                Some(MachineState {
                    facts,
                    phase_index,
                    phase_since,
                    lanes,
                    unknown_fence: newer_fence,
                    cluster,
                })
            }));
            after = MachineId(last);
        }
        let disruptions = self.list_disruptions(policy.longest_window()).await?;
        let released = self.list_releases(policy.release_budget.window).await?;
        let at = self.read_database_clock().await?;
        let pauses = self.list_pauses().await?;
        Ok(FleetView {
            at,
            policy,
            machines,
            recent_disruptions: disruptions,
            recent_releases: released,
            pauses,
        })
    }

    /// Disruptions begun within `window`, oldest first.
    pub(crate) async fn list_disruptions(&self, window: Span) -> Result<Vec<RecordedDisruption>, BmdbError> {
        let window = window.float_milliseconds();
        let rows = self
            .statement("reading recent disruptions", move |pool| {
                Box::pin(sqlx::query_file!("../../sql/plan/list_disruptions.sql", window).fetch_all(pool))
            })
            .await?;
        let known = rows.into_iter().filter_map(|row| {
            let step = row.kind.parse::<DisruptionKind>().ok()?;
            Some(RecordedDisruption {
                step,
                machine: MachineId(row.machine_id),
                provider: row.provider,
                at: row.begun_at,
            })
        });
        Ok(known.collect())
    }

    /// When releases of machines were sent to their providers, within `window`.
    async fn list_releases(&self, window: Span) -> Result<Vec<Timestamp>, BmdbError> {
        let window = window.float_milliseconds();
        self.statement("reading what was given back", move |pool| {
            // The releases within the window of the release budget.
            Box::pin(
                sqlx::query_scalar!(
                    "SELECT begun_at FROM intent
                     WHERE kind = 'release' AND begun_at > clock_timestamp() - $1 * INTERVAL '1 millisecond'
                     ORDER BY begun_at",
                    window
                )
                .fetch_all(pool),
            )
        })
        .await
    }

    /// Reads the database's clock alone.
    async fn read_database_clock(&self) -> Result<Timestamp, BmdbError> {
        self.statement("reading the clock", |connection| Box::pin(read_clock(connection))).await
    }

    /// The name of the cluster that a machine is a part of, also while it leaves it.
    pub async fn read_cluster_name(&self, machine: MachineId) -> Result<Option<String>, BmdbError> {
        let mut memberships = self.read_cluster_memberships(vec![machine.0]).await?;
        Ok(memberships.remove(&machine.0).map(|cluster| cluster.name))
    }

    /// Those of these machines with a node that votes in etcd of its cluster, by the last answer of their curators.
    pub async fn list_voting_machines(&self, machines: Vec<Uuid>) -> Result<Vec<Uuid>, BmdbError> {
        let memberships = self.read_cluster_memberships(machines).await?;
        Ok(memberships.into_iter().filter(|(_, cluster)| cluster.voter).map(|(machine, _)| machine).collect())
    }

    async fn read_cluster_memberships(
        &self,
        machines: Vec<Uuid>,
    ) -> Result<HashMap<Uuid, ClusterContext>, BmdbError> {
        let what = "reading what clusters say of a page of machines";
        let rows = self
            .statement_with(what, machines, move |pool, machines| {
                Box::pin(
                    sqlx::query_file!("../../sql/plan/list_cluster_memberships.sql", machines)
                        .fetch_all(pool),
                )
            })
            .await?;
        let count = |count: i64| usize::try_from(count).unwrap_or(0);
        let read = rows.into_iter().map(|row| {
            let cluster = ClusterContext {
                name: row.name,
                founded: row.founded,
                leaving: row.deleting || row.leaving.is_some(),
                health: row.health,
                voter: row.voter.unwrap_or(false),
                votes: row
                    .voters
                    .zip(row.voters_reached)
                    .map(|(voters, reached)| (count(voters), count(reached))),
                observed_at: row.observed_at,
                other_disrupted: None,
            };
            (row.machine_id, cluster)
        });
        Ok(read.collect())
    }

    async fn read_stored_lanes(&self, machines: Vec<Uuid>) -> Result<HashMap<Uuid, StoredLanes>, BmdbError> {
        let rows = self
            .statement_with("reading a page of the schedule", machines, move |pool, machines| {
                Box::pin(sqlx::query_file!("../../sql/plan/list_lanes.sql", machines).fetch_all(pool))
            })
            .await?;
        let mut found: HashMap<Uuid, StoredLanes> = HashMap::new();
        for row in rows {
            let lanes = found.entry(row.machine_id).or_default();
            // A lane or process that only a newer release knows has no predicted future here.
            let Ok(lane) = row.lane.parse::<Lane>() else { continue };
            let process = row.process.and_then(|process| process.parse::<Process>().ok());
            if lane == Lane::Access {
                lanes.phase = Some((row.phase_index, row.phase_since));
            }
            lanes.stored.push(StoredLane {
                lane,
                stored_due: StoredDue { process, ready_at: row.ready_at, timer: row.timer },
                not_before: row.not_before,
                is_working: row.working,
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
