//! Listing the due queue and the backoffs.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::connection::DbContext as _;
use crate::connection::error::BmdbError;
use crate::machine::lookup::machine_name;
use model::machine_view::MachineName;
use model::time::Timestamp;

const OPERATION: &str = "listing what waits";

/// A machine that is due for a process, and that no worker has claimed.
#[derive(Clone, Debug, PartialEq)]
pub struct DueEntry {
    /// Names of the machine.
    pub name: MachineName,
    /// Name of the due lane.
    pub lane: String,
    /// Process it is due for.
    pub process: String,
    /// When it may begin.
    pub ready_at: Timestamp,
    /// Not claimed before this moment, because sessions were lost over it; `None` is no such delay.
    pub not_before: Option<Timestamp>,
    /// Whether heartbeats move that moment without a write.
    pub timer: bool,
    /// Priority class, 0 first.
    pub priority: i64,
    /// Why it is due then, and not earlier.
    pub reason: String,
    /// `file:line` of the decision in the code.
    pub decided_at: String,
}

/// A process of a machine that failed and has not finished since.
#[derive(Clone, Debug, PartialEq)]
pub struct BackoffEntry {
    /// Names of the machine.
    pub name: MachineName,
    /// Name of the process that failed.
    pub process: String,
    /// How often it failed in a row.
    pub failures: i64,
    /// End of the present backoff.
    pub until: Timestamp,
    /// Message of the last error.
    pub cause: String,
}

/// Machines that are due for a process, soonest first, after (ready at, machine).
pub async fn list_due(
    tx: &mut PgConnection,
    process: &str,
    (ready_at, machine): (Timestamp, Uuid),
    limit: i64,
) -> Result<Vec<DueEntry>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/inspect/list_due.sql", process, ready_at, machine, limit)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows
        .into_iter()
        .map(|row| DueEntry {
            name: machine_name(row.machine_id, row.provider, row.provider_id),
            lane: row.lane,
            process: row.process,
            ready_at: row.ready_at,
            not_before: row.not_before,
            timer: row.timer,
            priority: row.priority,
            reason: row.reason,
            decided_at: row.decided_at,
        })
        .collect())
}

/// Processes that failed, by machine, after (machine, process).
pub async fn list_backoffs(
    tx: &mut PgConnection,
    (machine, process): (Uuid, &str),
    limit: i64,
) -> Result<Vec<BackoffEntry>, BmdbError> {
    let rows = sqlx::query_file!("../../sql/inspect/list_backoffs.sql", machine, process, limit)
        .fetch_all(tx)
        .await
        .context(OPERATION)?;
    Ok(rows
        .into_iter()
        .map(|row| BackoffEntry {
            name: machine_name(row.machine_id, row.provider, row.provider_id),
            process: row.process,
            failures: row.failures,
            until: row.until,
            cause: row.cause,
        })
        .collect())
}
