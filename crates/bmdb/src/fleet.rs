//! Counting machines by phase from the facts (SQL twin of `phase_of`).
//!
//! Lists and pages count by `machine_due.phase_index`, which may lag behind time. Here the phase is derived from the
//! facts, by a statement that is the SQL twin of [`phase_of`](model::phase::phase_of); a test compares the two
//! over ten thousand sets of facts. The statement reads the whole fleet, so it is for a gauge each minute and not for a
//! page.

use std::collections::BTreeMap;

use crate::connection::Bmdb;
use crate::error::BmdbError;
use model::phase::Phase;

impl Bmdb {
    /// How many machines are in which phase now. Phases without a machine are left out.
    pub async fn count_phases(&self) -> Result<BTreeMap<Phase, u64>, BmdbError> {
        let rows = self
            .statement("counting phases", |pool| {
                Box::pin(async move {
                    sqlx::query_file!("../../sql/fleet/count_phases.sql").fetch_all(pool).await
                })
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
