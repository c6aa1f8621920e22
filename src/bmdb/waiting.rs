//! Lists of what waits: what is due for a process, and what failed and is to be tried again.

use sqlx::PgConnection;
use uuid::Uuid;

use crate::bmdb::connection::Doing as _;
use crate::bmdb::error::BmdbError;
use crate::model::machine_view::MachineName;
use crate::model::time::Timestamp;

const WHAT: &str = "listing what waits";

/// A machine that is due for a process, and that nobody works on.
#[derive(Clone, Debug, PartialEq)]
pub struct DueLine {
    /// Which.
    pub name: MachineName,
    /// In which lane.
    pub lane: String,
    /// For what.
    pub process: String,
    /// When it may begin.
    pub ready_at: Timestamp,
    /// Not claimed before, because sessions were lost over it.
    pub not_before: Option<Timestamp>,
    /// Whether heartbeats move that moment without writing it.
    pub timer: bool,
    /// Priority class, 0 first.
    pub priority: i64,
    /// Why not earlier.
    pub reason: String,
    /// `file:line` of the decision.
    pub decided_at: String,
}

/// A process of a machine that failed and has not finished since.
#[derive(Clone, Debug, PartialEq)]
pub struct BackoffLine {
    /// Which machine.
    pub name: MachineName,
    /// What failed.
    pub process: String,
    /// How often in a row.
    pub failures: i64,
    /// End of the present wait.
    pub until: Timestamp,
    /// The last error.
    pub cause: String,
}

/// What a process is due for, soonest first, from the one after (ready at, machine).
pub async fn due(
    tx: &mut PgConnection,
    process: &str,
    (ready_at, machine): (Timestamp, Uuid),
    limit: i64,
) -> Result<Vec<DueLine>, BmdbError> {
    let rows = sqlx::query_file!("sql/inspect/list_due.sql", process, ready_at, machine, limit)
        .fetch_all(tx)
        .await
        .doing(WHAT)?;
    Ok(rows
        .into_iter()
        .map(|row| DueLine {
            name: MachineName {
                machine: row.machine_id,
                provider: row.provider,
                provider_id: row.provider_id,
            },
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

/// What failed, by machine, from the one after (machine, process).
pub async fn backoffs(
    tx: &mut PgConnection,
    (machine, process): (Uuid, &str),
    limit: i64,
) -> Result<Vec<BackoffLine>, BmdbError> {
    let rows = sqlx::query_file!("sql/inspect/list_backoffs.sql", machine, process, limit)
        .fetch_all(tx)
        .await
        .doing(WHAT)?;
    Ok(rows
        .into_iter()
        .map(|row| BackoffLine {
            name: MachineName {
                machine: row.machine_id,
                provider: row.provider,
                provider_id: row.provider_id,
            },
            process: row.process,
            failures: row.failures,
            until: row.until,
            cause: row.cause,
        })
        .collect())
}
