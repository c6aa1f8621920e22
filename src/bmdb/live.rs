//! Counts of the moment: what is held, and how many machines are in which phase.

use std::collections::BTreeMap;

use crate::bmdb::connection::{Bmdb, Doing};
use crate::bmdb::error::BmdbError;

/// What is held at this moment, by anybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveCounts {
    /// Work items.
    pub work: i64,
    /// Sessions that are not closed.
    pub sessions: i64,
}

impl Bmdb {
    /// Counts live work and open sessions.
    pub async fn live_counts(&self) -> Result<LiveCounts, BmdbError> {
        let row = sqlx::query_file!("sql/fleet/live_counts.sql")
            .fetch_one(self.pool())
            .await
            .doing("counting live work")?;
        Ok(LiveCounts { work: row.work, sessions: row.sessions })
    }

    /// Counts machines by indexed phase. Reads an index over the whole fleet.
    pub async fn indexed_phases(&self) -> Result<BTreeMap<String, i64>, BmdbError> {
        let rows = sqlx::query_file!("sql/fleet/phases.sql")
            .fetch_all(self.pool())
            .await
            .doing("counting machines by phase")?;
        Ok(rows.into_iter().map(|row| (row.phase, row.count)).collect())
    }
}
