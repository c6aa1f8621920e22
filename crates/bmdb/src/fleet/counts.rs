//! Live counts: work, sessions, machines by phase.
//!
//! Lists and pages count by `machine_due.phase_index`, which may lag behind time. [`Bmdb::count_phases`] derives the
//! phase from the facts instead, by a statement that is the SQL twin of [`phase_of`](model::phase::phase_of); a test
//! compares the two over ten thousand sets of facts. The statement reads the whole fleet, and only tests use it: the
//! fleet is counted by [`crate::fleet::sample`].

use std::collections::BTreeMap;

use crate::connection::Bmdb;
use crate::connection::error::BmdbError;
use model::ids::MachineId;
use model::phase::Phase;
use model::time::Timestamp;

/// Counts of what is claimed and open now, by all processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveCounts {
    /// Work items under way.
    pub work: i64,
    /// Sessions that are not closed.
    pub sessions: i64,
}

/// Machines that are not Ready, with the counts of both kinds at that moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NotReadyMachines {
    /// Machines that were Ready. 0 when none was waiting, because they were not counted then.
    pub ready: i64,
    /// Machines that were not Ready, including those left out of the list.
    pub not_ready: i64,
    /// The first of them in the order of their provider ids.
    pub machines: Vec<MachineId>,
}

/// A machine as a progress display shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachinePhase {
    /// Its provider id, or else its id.
    pub name: String,
    /// Phase as it is indexed.
    pub phase: String,
    /// What it waits for.
    pub reason: String,
    /// Since when it has been in that phase.
    pub since: Timestamp,
    /// When this was read.
    pub read_at: Timestamp,
}

impl Bmdb {
    /// Every machine with its indexed phase. Reads the whole fleet: for small ones.
    pub async fn machine_phases(&self) -> Result<Vec<MachinePhase>, BmdbError> {
        let rows = self
            .statement("listing the phases of machines", |pool| {
                Box::pin(sqlx::query_file!("../../sql/fleet/list_machine_phases.sql").fetch_all(pool))
            })
            .await?;
        Ok(rows
            .into_iter()
            .map(|row| MachinePhase {
                name: row.name,
                phase: row.phase,
                reason: row.reason,
                since: row.since,
                read_at: row.now,
            })
            .collect())
    }

    /// Machines that are not Ready, `limit` of them at the most.
    pub async fn list_not_ready_machines(&self, limit: i64) -> Result<NotReadyMachines, BmdbError> {
        let rows = self
            .statement("listing machines that are not ready", move |pool| {
                Box::pin(sqlx::query_file!("../../sql/fleet/list_not_ready.sql", limit).fetch_all(pool))
            })
            .await?;
        let (ready, waiting) = rows.first().map_or((0, 0), |row| (row.ready, row.waiting));
        let machines = rows.into_iter().map(|row| MachineId(row.machine_id)).collect();
        Ok(NotReadyMachines { ready, not_ready: waiting, machines })
    }

    /// Counts live work and open sessions.
    pub async fn live_counts(&self) -> Result<LiveCounts, BmdbError> {
        let row = self
            .statement("counting live work", |pool| {
                Box::pin(
                    sqlx::query!(
                        r#"SELECT (SELECT count(*) FROM work) AS "work!",
                                  (SELECT count(*) FROM session WHERE closed_at IS NULL) AS "sessions!""#
                    )
                    .fetch_one(pool),
                )
            })
            .await?;
        Ok(LiveCounts { work: row.work, sessions: row.sessions })
    }

    /// Counts machines by indexed phase. Reads an index over the whole fleet.
    pub async fn indexed_phases(&self) -> Result<BTreeMap<String, i64>, BmdbError> {
        let rows = self
            .statement("counting machines by phase", |pool| {
                // These counts are for progress and lists. The facts are authoritative
                // (`sql/fleet/count_phases.sql`).
                Box::pin(
                    sqlx::query!(
                        r#"SELECT phase_index AS phase, count(*) AS "count!" FROM machine_due
                           WHERE lane = 'access' GROUP BY phase_index"#
                    )
                    .fetch_all(pool),
                )
            })
            .await?;
        Ok(rows.into_iter().map(|row| (row.phase, row.count)).collect())
    }
}

impl Bmdb {
    /// How many machines are in which phase now. Phases without a machine are left out.
    pub async fn count_phases(&self) -> Result<BTreeMap<Phase, u64>, BmdbError> {
        let rows = self
            .statement("counting phases", |pool| {
                Box::pin(sqlx::query_file!("../../sql/fleet/count_phases.sql").fetch_all(pool))
            })
            .await?;
        rows.into_iter()
            .map(|row| {
                let phase = row.phase.parse().map_err(|error| BmdbError::Corrupt(format!("{error}")))?;
                Ok((phase, u64::try_from(row.count).unwrap_or_default()))
            })
            .collect()
    }
}
