//! What is true of the fleet as a whole.
//!
//! Lists and pages count by `machine_due.phase_index`, which may lag behind
//! time. What is counted here is derived from the facts, by a statement that
//! says in SQL what [`phase_of`](crate::model::phase::phase_of) says in Rust; a
//! test holds the two together over ten thousand sets of facts. It reads the
//! whole fleet, so it is for a gauge each minute and not for a page.

use std::collections::BTreeMap;

use crate::bmdb::connection::Bmdb;
use crate::bmdb::error::BmdbError;
use crate::model::phase::Phase;

impl Bmdb {
    /// How many machines are in which phase now. Phases of no machine are left out.
    pub async fn count_phases(&self) -> Result<BTreeMap<Phase, u64>, BmdbError> {
        let rows = self
            .statement("counting phases", |pool| {
                Box::pin(async move { sqlx::query_file!("sql/fleet/count_phases.sql").fetch_all(pool).await })
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
