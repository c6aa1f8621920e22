//! Recent steps of a machine: what was done to it lately, from its intents.

use std::time::Duration;

use sqlx::PgConnection;

use crate::connection::DbContext;
use crate::connection::error::BmdbError;
use model::ids::MachineId;
use model::recent_step::RecentStep;
use model::time::{Timestamp, before};

/// For how long a step is recent. A recovery that ended within the hour may have taken its last step an hour before.
const RECENT: Duration = Duration::from_hours(2);
/// Most steps of a machine that are read.
const MAX_STEPS: i64 = 5;

/// The newest steps of a machine, newest first.
pub async fn list_recent_steps(
    tx: &mut PgConnection,
    machine: MachineId,
    now: Timestamp,
) -> Result<Vec<RecentStep>, BmdbError> {
    let since = before(now, RECENT);
    let rows = sqlx::query_file!("../../sql/intent/list_recent_steps.sql", machine.0, since, MAX_STEPS)
        .fetch_all(tx)
        .await
        .context("reading what was done to a machine")?;
    let steps = rows.into_iter().map(|row| {
        RecentStep::from_intent(row.kind, &row.detail, row.begun_at, row.settled_at, row.outcome.as_deref())
    });
    Ok(steps.collect())
}
